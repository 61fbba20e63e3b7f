"""Settings and commands of an operator: models at the start, reservations, new workers, statuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import moored
import pytest
from waiting import until

from service import Service

Simulate = Callable[..., Service]

GIB = 1 << 30


def test_models_of_the_configuration_are_loaded_and_pinned_at_the_start(simulate: Simulate) -> None:
    settings = (
        "--set",
        'models.pinned=["small"]',
        "--set",
        'models.preload=["flux-full+4-bit", "not-there"]',
    )
    service = simulate("sim:40GiB", arguments=settings)
    with service.client() as client:
        with client.watch_status(interval_s=0.02, timeout=60) as watch:
            for status in watch:
                entries = {entry for one in status.cards[0].residents for entry in one.entries}
                if any(entry.startswith("flux-full") for entry in entries) and not status.jobs:
                    break
        pinned = {one.component.name for one in status.cards[0].residents if one.pinned}
        assert pinned and all(
            "small+full" in one.entries for one in status.cards[0].residents if one.pinned
        )
        client.unload(timeout=60)
        left = client.status().cards[0].residents
        assert {one.component.name for one in left} == pinned
    service.wait_for_log(
        lambda: any("not-there" in line and "WARN" in line for line in service.log)
    )


def test_a_reservation_ends_with_its_process(simulate: Simulate) -> None:
    service = simulate("sim:24GiB")
    with service.client() as client, subprocess.Popen(["sleep", "600"]) as other:
        try:
            reserved = client.reserve(6 * GIB, label="TensorRT", process_id=other.pid)
            (kept,) = client.status().cards[0].reservations
            assert (kept.id, kept.process_id) == (reserved.id, other.pid)
            assert f"TensorRT (process {other.pid})" in service.run("status").stdout
            # Renewed by nobody but its time, it stays its process's.
            service.run("reserve", "--renew", reserved.id, "--for", "1h")
            assert client.status().cards[0].reservations[0].process_id == other.pid
        finally:
            other.kill()
        other.wait()
        until(client, lambda status: status.cards[0].reservations == ())
        with pytest.raises(moored.InvalidRequest, match=rf"process_id.*no process {other.pid}"):
            client.reserve(6 * GIB, process_id=other.pid)
        told = service.run("reserve", "1GiB", "--process", str(other.pid))
        assert told.returncode != 0 and "no process" in told.stderr


def test_memory_is_reserved_renewed_and_released_on_the_command_line(simulate: Simulate) -> None:
    service = simulate("sim:24GiB")
    service.client().close()  # its card is ready

    def told(*arguments: str) -> dict[str, object]:
        done = service.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    reserved = told("reserve", "6GiB", "--for", "1h", "--label", "training")
    name = str(reserved["reservation_id"])
    assert told("reserve", "8GiB", "--renew", name)["reservation_id"] == name
    with service.client() as client:
        (one,) = client.status().cards[0].reservations
        assert (one.label, one.bytes) == ("training", 8 * GIB)
        assert client.renew_reservation(name, ttl_s=60) == 8 * GIB
        # What another reservation has, and what the card never had.
        for gib, refusal in ((20, moored.MemoryTaken), (60, moored.NeverFits)):
            with pytest.raises(refusal) as refused:
                client.reserve(gib * GIB)
            assert refused.value.fallbacks[0].bytes, "what could be had is offered"
    assert told("release", name) == {"released": True}
    again = service.run("release", name)
    assert again.returncode != 0
    assert "no reservation" in again.stderr
    assert "freed_bytes" in told("trim")


def test_a_recycled_worker_is_replaced_and_its_job_finishes(simulate: Simulate) -> None:
    service = simulate("sim:40GiB")
    with service.client() as client:
        before = client.status().cards[0]
        with client.stream_image("a cat", model="slow") as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            assert client.recycle(force=True, timeout=60) == [before.id]
            retried = [event.reason for event in stream if isinstance(event, moored.Retrying)]
        assert retried == ["WORKER_RECYCLED"]
        assert len(stream.result().pictures) == 1
        after = client.status().cards[0]
        assert (after.state, after.worker_restarts) == ("ready", before.worker_restarts + 1)
        assert after.worker_pid != before.worker_pid
        assert after.problem == ""
    assert "a new worker process serves sim:0" in service.run("recycle").stdout


def test_the_status_has_the_memory_of_the_machine(simulate: Simulate) -> None:
    with simulate().client() as client:
        host = client.status().host
        assert host is not None
        assert 0 < host.available_bytes <= host.total_bytes
        assert 0 < host.service_bytes < host.total_bytes
        assert 0 < host.workers_bytes < host.total_bytes


def test_a_stage_reports_the_cards_memory_before_and_after(simulate: Simulate) -> None:
    with simulate().client() as client:
        with client.stream_image("a cat", model="small") as stream:
            started = [event for event in stream if isinstance(event, moored.StageStarted)]
        for event in started:
            assert event.memory is not None
            assert event.memory.components > 0
        stages = [stage for stage in stream.result().stages if not stage.cached]
        assert len(stages) == len(started)
        for stage in stages:
            assert stage.before is not None and stage.after is not None
            assert stage.before.total == stage.after.total == 24 * GIB
            assert stage.before.scratch == stage.after.scratch == 0


def test_a_job_keeps_memory_free_and_is_refused_where_it_cannot(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        client.generate_image("a cat", model="flux-full", headroom_bytes=8 * GIB)
        card = client.status().cards[0]
        assert card.memory.free + card.memory.slack >= 8 * GIB
        with pytest.raises(moored.NeverFits) as refused:
            client.generate_image("a cat", model="flux-full", headroom_bytes=30 * GIB)
        kinds = [one for one in refused.value.fallbacks if one.quantization is not None]
        assert kinds and kinds[0].quantization is not None
        assert kinds[0].quantization.preset == "4-bit", "what fits 10 GiB"


def test_a_plan_says_what_would_lose_less(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        plan = client.plan("a cat", model="flux-full+4-bit")
        assert plan.runs_now
        assert [one.label for one in plan.upgrades] == [
            "quantization full",
            "quantization 8-bit (int8-convrot)",
        ]
        assert client.plan("a cat", model="flux-full").upgrades == ()
