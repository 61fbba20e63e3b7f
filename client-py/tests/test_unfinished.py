"""A program that ends before its detached job does finds the job again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted import WAIT_S, Endless, Service, accepted, done, reason, refuse, step

import moored
from moored._generated import jobs_pb2


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "of-this-program" / "unfinished.json"


def program(address: str, file: Path, name: str = "program-1") -> moored.Client:
    """A client as a program has it that may end at any time."""
    return moored.Client(address, unfinished=file, client_id=name)


def key(service: Service) -> str:
    options = service.requests["GenerateImage"].options
    assert options.detach
    return str(options.idempotency_key)


def refused(why: str, code: grpc.StatusCode) -> Any:
    return lambda request, context: refuse(context, code, "no", reason(why))


def begun(client: moored.Client, prompt: str = "x", **options: Any) -> None:
    """Asks for a picture, and ends as its program would: with the job's first events alone."""
    stream = client.stream_image(prompt, seed=1, detach=True, **options)
    next(stream)
    next(stream)
    stream.close()


def test_the_same_request_of_a_program_that_begins_again_joins_the_job(
    service: Service, address: str, file: Path
) -> None:
    service.on("GenerateImage", Endless(accepted(), step(1)))
    with program(address, file) as client:
        begun(client)
    first = key(service)
    assert first
    assert file.stat().st_mode & 0o077 == 0, "a key is as good as the job's results"
    with program(address, file, "program-2") as client:
        begun(client)
    assert key(service) == first
    with program(address, file) as client:
        begun(client, prompt="y")
    assert key(service) != first


@pytest.mark.parametrize("end", ["done", "failed", "cancelled", "left"])
def test_after_an_end_the_same_request_is_a_new_job(
    service: Service, address: str, file: Path, end: str
) -> None:
    service.on("GenerateImage", Endless(accepted(), step(1)))
    service.on("Cancel", jobs_pb2.CancelJobResponse(cancelled=True))
    with program(address, file) as client:
        begun(client)
        first = key(service)
        match end:
            case "done":
                service.on("GenerateImage", [accepted(), done()])
                for _ in client.stream_image("x", seed=1, detach=True):
                    pass
            case "failed":
                service.on("GenerateImage", refused("WORKER_DIED", grpc.StatusCode.INTERNAL))
                with pytest.raises(moored.WorkerDied):
                    client.stream_image("x", seed=1, detach=True).result()
            case "cancelled":
                client.cancel("job-1")
            case "left":
                assert client.stream_image("x", seed=1, detach=True).leave() == "job-1"
        assert key(service) == first
    service.on("GenerateImage", Endless(accepted(), step(1)))
    with program(address, file) as client:
        begun(client)
    assert key(service) != first


def test_a_service_that_is_gone_is_no_end(service: Service, address: str, file: Path) -> None:
    service.on("GenerateImage", Endless(accepted(), step(1)))
    with program(address, file) as client:
        begun(client)
        first = key(service)
        service.on("GenerateImage", refused("SHUTTING_DOWN", grpc.StatusCode.UNAVAILABLE))
        with pytest.raises(moored.ShuttingDown):
            client.stream_image("x", seed=1, detach=True).result()
        service.on("GenerateImage", Endless(accepted(), step(1)))
        begun(client)
    assert key(service) == first


def test_cancel_ends_a_detached_job_that_was_not_heard_of(
    service: Service, address: str, file: Path
) -> None:
    endless = Endless(accepted(), step(1))
    service.on("GenerateImage", endless)
    service.on("Cancel", jobs_pb2.CancelJobResponse(cancelled=True))
    with program(address, file) as client:
        stream = client.stream_image("x", seed=1, detach=True)
        assert endless.begun.wait(WAIT_S)
        first = key(service)
        stream.cancel(release_latents=True)
        assert key(service) == first, "it was joined"
        cancelled = service.requests["Cancel"]
        assert (cancelled.job_id, cancelled.release_latents) == ("job-1", True)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2}', '{"version": 1, "jobs": {"a": 1}}']
)
def test_a_damaged_file_has_no_jobs(service: Service, address: str, file: Path, text: str) -> None:
    service.on("GenerateImage", Endless(accepted(), step(1)))
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    with program(address, file) as client:
        begun(client)
    first = key(service)
    with program(address, file) as client:
        begun(client)
    assert key(service) == first


def test_a_file_that_cannot_be_written_costs_no_job(
    service: Service, address: str, tmp_path: Path
) -> None:
    service.on("GenerateImage", [accepted(), done()])
    (tmp_path / "file").touch()
    with program(address, tmp_path / "file" / "unfinished.json") as client:
        for _ in client.stream_image("x", seed=1, detach=True):
            pass
    assert key(service)


def test_a_key_of_the_program_itself_stays(service: Service, address: str, file: Path) -> None:
    service.on("GenerateImage", Endless(accepted(), step(1)))
    with program(address, file) as client:
        begun(client, idempotency_key="mine")
    assert key(service) == "mine"
    assert not file.exists()
