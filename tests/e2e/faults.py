"""Faults that tests make, and what they see of them: jobs that run, workers that are killed, retries."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import moored
from waiting import DEADLINE_S, until


def assert_at_rest(client: moored.Client) -> None:
    """No job is left, no lease, no activation; and everything can be unloaded."""

    def rests(status: moored.Status) -> bool:
        return status.jobs == () and all(
            card.state == "ready"
            and card.job_id == ""
            and card.memory.scratch == 0
            and all(one.leases == 0 and one.state == "resident" for one in card.residents)
            for card in status.cards
        )

    status = until(client, rests)
    for card in status.cards:
        booked = sum(one.resident_bytes for one in card.residents)
        assert card.memory.components == booked
    assert client.unload(timeout=DEADLINE_S).kept == ()
    until(client, lambda status: all(card.memory.components == 0 for card in status.cards))


@contextmanager
def running(
    client: moored.Client, **options: object
) -> Iterator[moored.EventStream[moored.ImageResult]]:
    """A slow job that is denoising."""
    settings: dict[str, object] = {"model": "slow", "steps": 200}
    with client.stream_image("slow", **(settings | options)) as stream:  # type: ignore[arg-type]
        next(event for event in stream if isinstance(event, moored.Step))
        yield stream


def worker_pid(client: moored.Client, card: int = 0) -> int:
    pid = client.status().cards[card].worker_pid
    assert pid > 0
    return pid


def kill_worker(client: moored.Client, card: int = 0) -> int:
    """Kills a card's worker by SIGKILL; its pid, once it has exited."""
    pid = worker_pid(client, card)
    gone = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([gone], [], [], DEADLINE_S)[0]
    finally:
        os.close(gone)
    return pid


def ended(client: moored.Client, job: str) -> moored.JobInfo:
    """The record of a job that has ended."""
    return next(one for one in client.jobs(include_ended=True) if one.id == job)


def retries(events: list[moored.Event]) -> list[tuple[str, str]]:
    return [(e.reason, e.stage) for e in events if isinstance(e, moored.Retrying)]
