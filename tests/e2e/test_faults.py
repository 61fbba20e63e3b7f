"""Workers that die and hang, loads that fail, clients that disconnect: all memory and jobs are released."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import moored
import pytest
from faults import assert_at_rest, ended, kill_worker, retries, running, worker_pid
from PIL import Image
from waiting import DEADLINE_S, until

from service import BINARY, Service, clean_environment

Simulate = Callable[..., Service]

SMALL = {"instant:small-transformer", "instant:small-clip", "instant:small-t5", "instant:small-vae"}


# Workers that die.


@pytest.mark.parametrize("stage", ["encode_text", "denoise", "decode"])
def test_a_worker_that_dies_is_replaced_and_its_stage_tried_again(
    simulate: Simulate, stage: str
) -> None:
    with simulate(f"sim:24GiB,die-at={stage}:2").client() as client:
        first = client.generate_image("one", model="small", seed=7)
        pid = worker_pid(client)
        stream = client.stream_image("two", model="small", seed=7)
        events = list(stream)
        assert retries(events) == [("WORKER_DIED", stage)]
        assert isinstance(events[-1], moored.Done)
        assert len(stream.pictures) == len(first.pictures) == 1
        started = [event.name for event in events if isinstance(event, moored.StageStarted)]
        assert started.count("denoise") <= (2 if stage == "denoise" else 1), "paid for once"
        status = until(client, lambda status: status.cards[0].worker_restarts == 1)
        assert status.cards[0].worker_pid not in (0, pid)
        assert_at_rest(client)


def test_a_job_that_kills_two_workers_is_given_up(simulate: Simulate) -> None:
    with simulate("sim:24GiB,die-at=denoise:1,die-generations=2").client() as client:
        stream = client.stream_image("deadly", model="small")
        events: list[moored.Event] = []
        with pytest.raises(moored.WorkerDied) as failed:
            events.extend(stream)
        assert failed.value.job_id
        assert "denoise" in failed.value.message
        assert retries(events) == [("WORKER_DIED", "denoise")]
        until(client, lambda status: status.cards[0].worker_restarts == 2)
        assert ended(client, failed.value.job_id).state == "failed"
        # The third worker lives, and generates.
        assert client.generate_image("another", model="small", width=128).pictures
        assert_at_rest(client)


def test_a_killed_worker_fails_no_job(simulate: Simulate) -> None:
    with simulate().client() as client, ThreadPoolExecutor() as threads:
        client.pin("small")
        client.load("small")
        with running(client, steps=100) as stream:
            queued = threads.submit(
                client.generate_image, "behind", model="small", timeout=DEADLINE_S
            )
            until(client, lambda status: len(status.jobs) == 2)
            pid = kill_worker(client)
            events = list(stream)
        assert retries(events) == [("WORKER_DIED", "denoise")]
        assert "signal 9" in next(e.message for e in events if isinstance(e, moored.Retrying))
        assert isinstance(events[-1], moored.Done)
        assert queued.result(DEADLINE_S).pictures

        def is_back(status: moored.Status) -> bool:
            pinned = {one.component.id for one in status.cards[0].residents if one.pinned}
            return pinned >= SMALL and status.cards[0].state == "ready"

        card = until(client, is_back).cards[0]
        assert card.worker_restarts == 1
        assert card.worker_pid not in (0, pid)
        client.unpin("small")
        assert_at_rest(client)


def test_a_pinned_model_is_loaded_again_after_a_kill(simulate: Simulate) -> None:
    with simulate().client() as client:
        client.pin("small")
        client.load("small")
        client.load("slow")
        until(client, lambda status: len(status.cards[0].residents) == 8)
        kill_worker(client)

        def is_back(status: moored.Status) -> bool:
            card = status.cards[0]
            there = {one.component.id for one in card.residents if one.state == "resident"}
            return card.worker_restarts == 1 and there == SMALL

        until(client, is_back)
        client.unpin("small")
        assert_at_rest(client)


def test_claims_outlive_a_worker(simulate: Simulate) -> None:
    with simulate().client() as client:
        reserved = client.reserve(20 << 30, label="blender")
        hold = client.hold("small", client_id="ann")
        kill_worker(client)
        until(client, lambda s: s.cards[0].worker_restarts == 1 and s.cards[0].state == "ready")
        card = client.status().cards[0]
        assert [one.id for one in card.reservations] == [reserved.id]
        client.load("small")
        until(client, lambda status: len(status.cards[0].residents) == 4)
        memory = client.status().cards[0].memory
        assert memory.usable <= memory.free - (20 << 30)
        assert {one.reason for one in client.unload("small").kept} == {"held by ann"}
        assert hold.release()
        assert reserved.release()
        assert_at_rest(client)


def test_a_worker_killed_in_a_load_fails_no_job(simulate: Simulate) -> None:
    with simulate("sim:40GiB,speed=10GiB/s").client() as client:
        with client.stream_load("flux-full") as stream:
            next(e for e in stream if isinstance(e, moored.Loading) and e.bytes_done > 0)
            kill_worker(client)
            events = list(stream)
        assert retries(events) == [("WORKER_DIED", "load")]
        assert isinstance(events[-1], moored.Done)
        assert len(client.status().cards[0].residents) == 4
        assert_at_rest(client)


def test_latents_outlive_a_worker(simulate: Simulate) -> None:
    with simulate().client() as client:
        kept = client.generate_image("kept", model="small", seed=3, keep_latent=True)
        kill_worker(client)
        until(client, lambda s: s.cards[0].worker_restarts == 1 and s.cards[0].state == "ready")
        again = client.decode_latent(kept.latents[0], model="small")
        assert (again.pictures[0].array == kept.pictures[0].array).all()


def test_a_worker_that_hangs_is_replaced(simulate: Simulate) -> None:
    service = simulate("sim:24GiB,hang-at=denoise:1", arguments=("--set", "queue.stall_limit=8s"))
    with service.client() as client:
        began = time.monotonic()
        events = list(client.stream_image("hangs", model="small", timeout=DEADLINE_S))
        assert retries(events) == [("WORKER_DIED", "denoise")]
        assert isinstance(events[-1], moored.Done)
        assert 7.9 <= time.monotonic() - began < 60
        assert_at_rest(client)


def test_a_frozen_worker_is_replaced_although_it_reads_nothing(simulate: Simulate) -> None:
    """A full pipe to the worker must not block its replacement."""
    service = simulate("sim:24GiB", arguments=("--set", "queue.stall_limit=8s"))
    with service.client() as client:
        client.load("small")
        pid = client.status().cards[0].worker_pid
        os.kill(pid, signal.SIGSTOP)
        start = Image.effect_noise((512, 512), 100)
        result = client.generate_image("thaw", model="small", init_image=start, timeout=DEADLINE_S)
        assert result.pictures
        assert client.status().cards[0].worker_pid != pid
        assert_at_rest(client)


def test_a_key_without_a_seed_joins_its_job(simulate: Simulate) -> None:
    """A client whose connection was cut repeats its request by key, without knowing the seed."""
    with simulate("sim:24GiB").client() as client:
        first = client.generate_image("again", model="small", idempotency_key="k")
        again = client.generate_image("again", model="small", idempotency_key="k")
        assert (first.job_id, first.seed) == (again.job_id, again.seed)


def test_names_that_are_too_long_or_hide_something_are_refused(simulate: Simulate) -> None:
    """Every name that a client gives is shown to others, or told back to it."""
    with simulate("sim:24GiB").client() as client:
        for name in ("x" * 1000, "a\u200b", "\u3164", "\U000e0061", "a" + "\u0301" * 30, "\u202ea"):
            for option in ("client_id", "card", "idempotency_key"):
                with pytest.raises(moored.InvalidRequest, match=option):
                    client.generate_image("x", model="small", **{option: name})
            with pytest.raises(moored.InvalidRequest, match="label"):
                client.reserve(1 << 20, label=name)
            with pytest.raises(moored.InvalidRequest, match="client_id"):
                client.hold("small", client_id=name)


def test_a_hung_stage_can_be_cancelled(simulate: Simulate) -> None:
    """Cancelling does not wait for the stall limit."""
    limit = ("--set", "queue.cancel_limit=3s")
    with simulate("sim:24GiB,hang-at=denoise:1", arguments=limit).client() as client:
        with client.stream_image("hangs", model="small") as stream:
            next(e for e in stream if isinstance(e, moored.StageStarted) and e.name == "denoise")
            assert client.cancel(stream.job_id)
            began = time.monotonic()
            with pytest.raises(moored.Cancelled):
                stream.result()
            assert time.monotonic() - began < 30
        assert client.generate_image("the next", model="small", timeout=DEADLINE_S).pictures
        assert_at_rest(client)


def test_a_card_that_is_lost_is_opened_again(simulate: Simulate) -> None:
    with simulate("sim:24GiB,lose-at=denoise:1").client() as client:
        events = list(client.stream_image("lost", model="small", timeout=DEADLINE_S))
        assert retries(events) == [("WORKER_DIED", "denoise")]
        assert isinstance(events[-1], moored.Done)
        assert_at_rest(client)


def test_the_death_of_a_worker_does_not_affect_another_card(simulate: Simulate) -> None:
    with simulate("sim:24GiB", "sim:24GiB,index=1").client() as client:
        for name in ("sim:0", "sim:1"):
            client.wait_until_ready(card=name)
        cards = {card.id: card for card in client.status().cards}
        other_pid = cards["sim:1"].worker_pid
        assert 0 != cards["sim:0"].worker_pid != other_pid != 0
        with (
            running(client, card="sim:1", steps=150) as lives,
            # The last to begin, as it must not have ended when its worker is killed.
            running(client, card="sim:0", steps=100) as dies,
        ):
            kill_worker(client, 0)
            there, here = list(lives), list(dies)
        assert retries(there) == []
        assert isinstance(there[-1], moored.Done)
        assert {stage.card for stage in there[-1].stages} == {"sim:1"}
        assert retries(here) == [("WORKER_DIED", "denoise")]
        assert isinstance(here[-1], moored.Done)
        status = until(client, lambda status: status.cards[0].worker_restarts == 1)
        assert status.cards[1].worker_restarts == 0
        assert status.cards[1].worker_pid == other_pid
        assert_at_rest(client)


# Loads that fail.


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ("fail-load=2:oom,fail-load=3:oom,fail-load=4:oom", moored.OutOfMemory),
        ("fail-load=2:io", moored.ModelDamaged),
        ("fail-load=2:damaged", moored.ModelDamaged),
    ],
    ids=["oom", "io", "damaged"],
)
def test_a_load_that_fails_leaves_nothing(
    simulate: Simulate, faults: str, kind: type[moored.MooredError]
) -> None:
    with simulate(f"sim:24GiB,{faults}").client() as client:
        with pytest.raises(kind) as failed:
            client.load("small", timeout=DEADLINE_S)
        assert failed.value.reason
        assert failed.value.job_id
        status = until(client, lambda s: s.jobs == () and s.cards[0].state == "ready")
        card = status.cards[0]
        assert card.worker_restarts == 0, "a file that cannot be read is no death"
        assert all(one.state == "resident" for one in card.residents)
        assert card.memory.components == sum(one.resident_bytes for one in card.residents)
        assert client.generate_image("next", model="small", timeout=DEADLINE_S).pictures
        assert_at_rest(client)


def test_a_load_that_runs_out_of_memory_once_is_tried_again(simulate: Simulate) -> None:
    with simulate("sim:24GiB,fail-load=2:oom").client() as client:
        assert client.load("small", timeout=DEADLINE_S).done
        status = until(client, lambda status: len(status.cards[0].residents) == 4)
        assert status.cards[0].worker_restarts == 0
        assert_at_rest(client)


# Cancelling.


def test_a_running_job_is_cancelled_at_the_next_step(simulate: Simulate) -> None:
    with simulate().client() as client:
        with running(client, count=10) as stream:
            began = time.monotonic()
            assert client.cancel(stream.job_id) is True
            with pytest.raises(moored.Cancelled) as cancelled:
                stream.result()
            assert time.monotonic() - began < 8, "each picture takes ten seconds"
            assert cancelled.value.reason == "CANCELLED"
            assert cancelled.value.job_id == stream.job_id
        until(client, lambda status: status.jobs == ())
        assert ended(client, stream.job_id).state == "cancelled"
        assert client.cancel(stream.job_id) is False, "it has ended already"
        with pytest.raises(moored.JobNotFound):
            client.cancel("job-of-nobody")
        assert_at_rest(client)


def test_a_queued_job_is_cancelled_at_once(simulate: Simulate) -> None:
    with simulate().client() as client:
        with running(client) as stream, client.stream_image("queued", model="slow") as behind:
            queued = next(event for event in behind if isinstance(event, moored.Queued))
            assert queued.position >= 0
            assert client.cancel(behind.job_id) is True
            with pytest.raises(moored.Cancelled):
                behind.result()
            assert any(isinstance(event, moored.Step) for event in stream), "the other goes on"
        assert_at_rest(client)


def test_a_load_is_cancelled_in_the_middle(simulate: Simulate) -> None:
    with simulate("sim:40GiB,speed=1GiB/s").client() as client:
        with client.stream_load("flux-full") as stream:
            next(e for e in stream if isinstance(e, moored.Loading) and e.bytes_done > 0)
            began = time.monotonic()
            assert client.cancel(stream.job_id)
            with pytest.raises(moored.Cancelled):
                stream.result()
            assert time.monotonic() - began < 15, "all of it takes half a minute"
        assert_at_rest(client)


def test_a_job_that_waits_for_memory_is_cancelled_at_once(simulate: Simulate) -> None:
    with simulate("sim:40GiB,foreign=20GiB").client() as client:
        with client.stream_image("waits", model="flux-full", patience_s=60) as stream:
            next(event for event in stream if isinstance(event, moored.Waiting))
            began = time.monotonic()
            assert client.cancel(stream.job_id)
            with pytest.raises(moored.Cancelled):
                stream.result()
            assert time.monotonic() - began < 30
        with pytest.raises(moored.Deadline):
            client.generate_image("waits", model="flux-full", patience_s=60, timeout=1)
        assert_at_rest(client)


def test_a_stream_that_is_closed_ends_its_job(simulate: Simulate) -> None:
    with simulate().client() as client:
        with running(client) as stream, client.stream_image("q", model="slow") as behind:
            next(event for event in behind if isinstance(event, moored.Queued))
            stream.close()
            behind.close()
            until(client, lambda status: status.jobs == ())
        assert ended(client, stream.job_id).state == "cancelled"
        assert ended(client, behind.job_id).state == "cancelled"
        assert_at_rest(client)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_disconnects_ends_its_job(simulate: Simulate, how: signal.Signals) -> None:
    service = simulate()
    with service.client() as client:
        command = [str(BINARY), "generate", "slow", "-m", "slow", "-s", "200", "--json"]
        vanishing = subprocess.Popen(
            [*command, "--endpoint", f"http://{service.address}"],
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        assert vanishing.stdout is not None
        with vanishing, vanishing.stdout:
            event = next(e for e in map(json.loads, vanishing.stdout) if e["event"] == "step")
            vanishing.send_signal(how)
            assert vanishing.wait(DEADLINE_S) != 0
        until(client, lambda status: status.jobs == ())
        assert ended(client, event["job_id"]).state == "cancelled"
        assert_at_rest(client)


# Detaching and joining.


def test_a_detached_job_goes_on_and_is_joined_by_its_key(simulate: Simulate) -> None:
    with simulate().client() as client:
        options: dict[str, object] = {"steps": 100, "seed": 5, "idempotency_key": "once"}
        with running(client, detach=True, **options) as stream:
            stream.close()
        assert [job.id for job in client.jobs()] == [stream.job_id], "it goes on"

        joined = client.stream_image("slow", model="slow", detach=True, **options)  # type: ignore[arg-type]
        events = list(joined)
        assert isinstance(events[0], moored.Accepted)
        assert events[0].joined
        assert joined.job_id == stream.job_id
        assert isinstance(events[-1], moored.Done)
        assert len(joined.pictures) == 1

        late = client.stream_image("slow", model="slow", detach=True, **options)  # type: ignore[arg-type]
        result = late.result()
        assert result.job_id == stream.job_id, "it had ended, and is told again"
        assert result.pictures[0].data == joined.pictures[0].data

        with pytest.raises(moored.KeyReused):
            client.generate_image("something else", model="slow", idempotency_key="once")
        assert_at_rest(client)


def test_a_joined_job_goes_on_when_one_of_two_leaves(simulate: Simulate) -> None:
    with simulate().client() as client:
        with (
            running(client, steps=100, seed=1, idempotency_key="k") as one,
            running(client, steps=100, seed=1, idempotency_key="k") as two,
        ):
            assert one.job_id == two.job_id
            one.close()
            assert two.result().pictures
        assert len(client.jobs(include_ended=True)) == 1
        assert_at_rest(client)


# Deadlines.


def test_a_deadline_passes_in_the_queue(simulate: Simulate) -> None:
    with simulate().client() as client:
        with running(client, count=10) as stream:
            began = time.monotonic()
            # Long enough to be accepted before: the error is to name the job.
            with pytest.raises(moored.Deadline) as late:
                client.generate_image("late", model="small", width=128, timeout=5)
            assert time.monotonic() - began < 30
            status = until(client, lambda status: len(status.jobs) == 1)
            assert status.jobs[0].id == stream.job_id
            # The service's clock, or ours, whose end of the call cancels it.
            assert ended(client, late.value.job_id).state in ("failed", "cancelled")
        assert_at_rest(client)


def test_a_deadline_passes_in_a_running_job(simulate: Simulate) -> None:
    with simulate().client() as client:
        began = time.monotonic()
        with pytest.raises(moored.Deadline) as late:
            client.generate_image("late", model="slow", steps=200, count=10, timeout=5)
        assert time.monotonic() - began < 30
        until(client, lambda status: status.jobs == ())
        assert ended(client, late.value.job_id).state in ("failed", "cancelled")
        assert_at_rest(client)


def test_a_full_queue_is_refused_with_a_retry_delay(simulate: Simulate) -> None:
    with simulate(arguments=("--set", "queue.max_jobs=2")).client() as client:
        with running(client), client.stream_image("two", model="slow") as second:
            next(event for event in second if isinstance(event, moored.Accepted))
            with pytest.raises(moored.QueueFull) as full:
                client.generate_image("three", model="slow")
            assert full.value.retry_after_s
        assert_at_rest(client)
