"""Detached jobs outlive the service: its restart, its kill, the loss of its state in memory."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import moored
import numpy as np
import pytest
from waiting import DEADLINE_S, until, wait_until

from service import INSTANT_MODELS, Service, run

Start = Callable[..., Service]
ENDED = ("done", "failed", "cancelled")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts services one after another, all with the same state folder."""
    started: list[Service] = []

    def start(*arguments: str, device: str = "sim:24GiB") -> Service:
        service = Service(
            "--models", str(INSTANT_MODELS), *arguments, state=tmp_path / "state", devices=(device,)
        )
        started.append(service)
        return service

    yield start
    for service in started:
        service.kill()


def submit(client: moored.Client, prompt: str, **options: object) -> str:
    """The id of a job that goes on without us."""
    options = {"model": "slow", "steps": 20, "seed": 7} | options
    return client.stream_image(prompt, detach=True, **options).leave()  # type: ignore[arg-type]


def states(client: moored.Client) -> dict[str, str]:
    """The state of each job, those that have ended among them. Each is listed once."""
    jobs = client.jobs(include_ended=True)
    assert len({job.id for job in jobs}) == len(jobs), jobs
    return {job.id: job.state for job in jobs}


def has_begun(client: moored.Client, job: str) -> None:
    """Waits until a job computes."""
    until(client, lambda status: any(one.id == job and one.step > 0 for one in status.jobs))


def test_jobs_run_again_after_a_kill_and_give_what_they_would_have_given(start: Start) -> None:
    first = start()
    with first.client() as client:
        expected = client.generate_image("one", model="slow", steps=80, seed=7).data
        jobs = [
            submit(client, "one", steps=80),  # it runs still when the service is killed
            submit(client, "two"),
            submit(client, "one", seed=8),
        ]
        has_begun(client, jobs[0])
    first.process.kill()
    first.process.wait(DEADLINE_S)
    with start().client() as client:
        assert {job: state for job, state in states(client).items() if state in ENDED} == {}
        results = [client.fetch(job) for job in jobs]
        assert [result.job_id for result in results] == jobs
        assert isinstance(results[0], moored.ImageResult)
        assert results[0].data == expected
        assert results[2].seed == 8
        assert states(client) == dict.fromkeys(jobs, "done")


def test_results_are_fetched_as_often_as_one_likes_and_are_not_made_again(
    start: Start, tmp_path: Path
) -> None:
    first = start()
    with first.client() as client:
        options: dict[str, object] = {"idempotency_key": "mine", "keep_latent": True, "count": 2}
        job = submit(client, "one", **options)
        before = client.fetch(job)
        assert isinstance(before, moored.ImageResult)
        assert len(before.pictures) == 2
        entry = next(one for one in client.jobs(include_ended=True) if one.id == job)
        assert entry.results_for_ms is not None
        assert 86_000_000 < entry.results_for_ms <= 86_400_000
    first.process.kill()
    first.process.wait(DEADLINE_S)
    again = start()
    with again.client() as client:
        for _ in range(2):
            after = client.fetch(job)
            assert isinstance(after, moored.ImageResult)
            assert [one.data for one in after.pictures] == [one.data for one in before.pictures]
            assert after.pictures[1].metadata == before.pictures[1].metadata
            assert (after.seed, after.model, after.total_ms) == (
                before.seed,
                before.model,
                before.total_ms,
            )
        joined = client.stream_image("one", model="slow", steps=20, seed=7, detach=True, **options)  # type: ignore[arg-type]
        assert joined.result().job_id == job, "the key is known"
        with pytest.raises(moored.KeyReused):
            submit(client, "two", **options)
        latent = after.latents[0]
        assert client.decode_latent(latent, model="slow", output="raw").data
        assert np.isfinite(client.get_latent(after.latents[1]).array).all()
        assert client.release_latent(latent)
        with pytest.raises(moored.LatentNotFound):
            client.get_latent(latent)
        kept = [file.name for file in (tmp_path / "state/results" / job).glob("latent-*")]
        assert len(kept) == 1, "what was released is not on the disk either"
    assert not any("is in the queue again" in line for line in again.log)


@pytest.mark.parametrize("medium", ["film", "film as mp4", "track"])
def test_films_and_tracks_are_kept_as_they_were_asked_for(start: Start, medium: str) -> None:
    first = start()
    with first.client() as client:
        match medium:
            case "track":
                stream = client.stream_audio("one", model="track", seconds=2, seed=3, detach=True)
            case "film as mp4":
                stream = client.stream_video(
                    "one", model="video", seed=3, output="mp4", detach=True
                )
            case _:
                stream = client.stream_video("one", model="video", seed=3, detach=True)
        before = stream.result()
    first.process.kill()
    first.process.wait(DEADLINE_S)
    with start().client() as client:
        after = client.fetch(stream.job_id)
        assert type(after) is type(before)
        if isinstance(after, moored.VideoResult) and isinstance(before, moored.VideoResult):
            assert [one.data for one in after.films] == [one.data for one in before.films]
        assert not isinstance(after, moored.ImageResult)
        assert not isinstance(before, moored.ImageResult)
        assert [one.data for one in after.tracks] == [one.data for one in before.tracks]


def test_after_a_restart_a_few_jobs_run_at_once_and_the_rest_are_held(start: Start) -> None:
    first = start()
    with first.client() as client:
        jobs = [submit(client, f"number {n}", steps=200) for n in range(5)]
    first.process.kill()
    first.process.wait(DEADLINE_S)
    with start("--set", "queue.resumed_at_once=2").client() as client:
        until(client, lambda status: len(status.jobs) == 2)
        assert [states(client)[job] for job in jobs[2:]] == ["held"] * 3
        held = next(job for job in client.jobs() if job.id == jobs[3])
        assert (held.client_id, held.kind, held.queue_position) == (
            client.client_id,
            "GenerateImage",
            1,
        )
        waiting = client.stream_fetch(jobs[4])
        first_of_it = next(event for event in waiting if isinstance(event, moored.Queued))
        assert first_of_it.position == 2
        waiting.close()
        assert client.cancel(jobs[3])
        assert not client.cancel(jobs[3]), "it has ended"
        with pytest.raises(moored.Cancelled):
            client.fetch(jobs[3])
        for job in jobs[:2]:
            assert client.cancel(job)
        until(client, lambda status: [job.id for job in status.jobs] == [jobs[2], jobs[4]])


def test_a_job_that_ends_the_service_each_time_is_not_tried_for_ever(start: Start) -> None:
    job = ""

    def given_up() -> bool:
        return states(client).get(job) == "failed"

    def runs() -> bool:
        return any(one.id == job and one.step > 0 for one in client.jobs())

    # That it was begun is written while it runs: a life that ends before counts for nothing.
    for _ in range(10):
        service = start()
        with service.client() as client:
            job = job or submit(client, "one", steps=200, count=8)
            # Of the list, as `status` says nothing of a job that is given up when it is resumed.
            wait_until(lambda: given_up() or runs(), "it runs, or is given up")
            if given_up():
                with pytest.raises(moored.WorkerDied, match="ended 3 times"):
                    client.fetch(job)
                return
        service.process.kill()
        service.process.wait(DEADLINE_S)
    raise AssertionError("it is tried for ever")


def test_a_shutdown_in_order_keeps_the_jobs_too(start: Start) -> None:
    first = start("--set", "service.drain=1s")
    with first.client() as client:
        job = submit(client, "one", steps=200, count=8)
        has_begun(client, job)
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(DEADLINE_S) == 0
    with start().client() as client:
        until(client, lambda status: [one.id for one in status.jobs] == [job])
        assert client.cancel(job)


def is_learned(client: moored.Client) -> bool:
    """Whether the peaks of a model are measured."""
    return any(stage.scratch_learned for stage in client.plan("one", model="small").stages)


def test_pins_holds_reservations_and_peaks_survive(start: Start) -> None:
    first = start()
    with first.client() as client:
        assert not is_learned(client)
        client.generate_image("one", model="small", seed=1)
        assert is_learned(client)
        pinned = client.pin("small")
        held = client.hold("slow", ttl_s=600)
        reserved = client.reserve(1 << 30, ttl_s=600, label="training")
    first.process.send_signal(signal.SIGTERM)
    assert first.process.wait(DEADLINE_S) == 0
    second = start()
    with second.client() as client:
        until(
            client,
            lambda status: any(one.pinned for one in status.cards[0].residents)
            and bool(status.cards[0].reservations),
        )
        assert is_learned(client)
        [reservation] = client.status().cards[0].reservations
        assert (reservation.id, reservation.bytes) == (reserved.id, 1 << 30)
        assert client.unpin("small") == ()
        assert client.pin("slow") != pinned
    second.process.kill()
    second.process.wait(DEADLINE_S)
    with start().client() as client:
        until(client, lambda status: any(one.pinned for one in status.cards[0].residents))
        assert client.unpin("slow") == ()
        again = client.hold("slow", ttl_s=600)
        assert again.id == held.id, "it is there, and renewed"
        assert client.renew_reservation(reserved.id) == 1 << 30


def test_what_is_detached_belongs_to_who_submitted_it(start: Start, tmp_path: Path) -> None:
    state = tmp_path / "state"
    tokens = {}
    for name in ("ann", "bob"):
        made = run("token", "make", name, "--role", "generate", "--state", str(state), "--json")
        tokens[name] = json.loads(made.stdout)["token"]
    service = start()
    with service.client(token=tokens["ann"]) as ann, service.client(token=tokens["bob"]) as bob:
        job = submit(ann, "one")
        assert ann.fetch(job).job_id == job
        with pytest.raises(moored.JobNotFound):
            bob.fetch(job)


def test_a_job_of_a_command_is_fetched_by_another(start: Start, tmp_path: Path) -> None:
    service = start()
    left = service.run("generate", "one", "-m", "slow", "-s", "20", "--seed", "7", "--detach")
    assert left.returncode == 0, left.stderr
    job = left.stdout.strip()
    assert job.startswith("job-")
    assert f"moored fetch {job}" in left.stderr
    out = tmp_path / "picture.png"
    fetched = service.run("fetch", job, "-o", str(out))
    assert fetched.returncode == 0, fetched.stderr
    assert fetched.stdout.strip() == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert service.run("fetch", job, "-o", str(out)).returncode != 0, "it is not overwritten"
    listed = service.run("jobs", "--all")
    assert "23h" in listed.stdout, listed.stdout
    unknown = service.run("fetch", "job-0")
    assert unknown.returncode != 0
    assert "job-0" in unknown.stderr


def test_one_service_at_a_time_has_a_state_folder(start: Start, tmp_path: Path) -> None:
    start()
    arguments = ("serve", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "state"))
    other = run(*arguments, "--device", "sim:8GiB,index=1", "--end-with-stdin", input="")
    assert other.returncode != 0
    assert "is in use by another service" in other.stderr, other.stderr
