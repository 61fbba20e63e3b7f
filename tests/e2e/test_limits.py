"""Bounds on connections, calls, uploads and unread results; and freed memory is returned to the system.

Most of these tests write HTTP/2 frames by hand (`http2.py`).
"""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import moored
import numpy as np
import pytest
from http2 import DATA, GOAWAY, PREFACE, Http2, message
from moored._errors import error_of
from moored._generated import generation_pb2, generation_pb2_grpc, model_pb2
from waiting import wait_until

from service import Service

Simulate = Callable[..., Service]

MIB = 2**20


def resident(service: Service) -> int:
    """Bytes of the service's process that are in memory."""
    pages = int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])
    return pages * 4096


def grew(service: Service, before: int) -> int:
    return (resident(service) - before) // MIB


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_too_long_vae_id_is_refused(simulate: Simulate) -> None:
    service = simulate()
    with service.client() as client, grpc.insecure_channel(service.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        info = model_pb2.LatentInfo(vae_id="x" * (20 * MIB), shape=[1, 1, 1, 1], dtype="f32")
        with pytest.raises(grpc.RpcError) as refused:
            stub.PutLatent(iter([generation_pb2.LatentChunk(info=info, chunk=bytes(4))]))
        error = error_of(refused.value, service.address)
        assert isinstance(error, moored.InvalidRequest), error
        assert "info.vae_id" in str(error)
        assert client.status().latents == 0


def test_uploads_that_pause_for_too_long_are_ended(simulate: Simulate, opened: ExitStack) -> None:
    service = simulate(arguments=("--set", "limits.upload_idle=500ms"))
    service.client().close()
    connection = Http2(service.address)
    opened.callback(connection.close)
    half_a_message = connection.call("Generation/GenerateImage")
    connection.write(half_a_message, message(bytes(100_000))[:50_000])
    half_a_latent = connection.call("Generation/PutLatent")
    chunk = generation_pb2.LatentChunk(chunk=bytes(1000)).SerializeToString()
    connection.write(half_a_latent, message(chunk))
    whole_but_open = connection.call("Jobs/List")
    connection.write(whole_but_open, message(b""))
    for stream in (half_a_message, half_a_latent, whole_but_open):
        connection.wait_for(lambda stream=stream: connection.ended(stream), 20)
    assert (GOAWAY, 0) not in connection.frames, "the connection itself is well"


def test_uploads_are_bounded_for_each_client(simulate: Simulate, opened: ExitStack) -> None:
    service = simulate(arguments=("--set", "limits.uploads_per_client=100MiB"))
    with service.client() as client:
        before = resident(service)
        ended = 0
        for _ in range(10):
            connection = Http2(service.address)
            opened.callback(connection.close)
            stream = connection.call("Generation/GenerateImage")
            unfinished = message(bytes(60 * MIB))[: 40 * MIB]
            ended += not connection.write(stream, unfinished)
        assert ended >= 8, f"{ended} of 10 were ended"
        assert grew(service, before) < 250
        assert client.status().cards, "others are served"
        opened.close()
        client.generate_image("small", model="small", width=64, height=64)


def test_status_and_cancel_are_served_beyond_the_bound_of_calls(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "limits.calls_per_client=4"))
    with service.client() as client, ExitStack() as watchers:
        for _ in range(4):
            watching = iter(client.watch_status())
            next(watching)
            watchers.callback(watching.close)
        with pytest.raises(moored.ClientLimit) as refused:
            client.generate_image("one more", model="small", width=64, height=64)
        assert "limits.calls_per_client" in str(refused.value)
        assert refused.value.retry_after_s
        assert client.status().cards
        assert not client.jobs()
    with service.client() as client:
        client.generate_image("again", model="small", width=64, height=64)


def test_connections_without_a_handshake_are_closed(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "limits.handshake=500ms"))
    host, port = service.address.rsplit(":", 1)
    for said in (b"", PREFACE[:10], PREFACE):
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            silent.sendall(said)
            while silent.recv(1000):  # the service's own settings come first
                pass


def test_an_old_connection_is_replaced_and_its_calls_go_on(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "limits.connection_age=1s"))
    connection = Http2(service.address)
    connection.wait_for(lambda: (GOAWAY, 0) in connection.frames)
    with service.client() as client:
        # It takes longer than its connection may get old. Calls beside it come by newer ones.
        with client.stream_image("slow", model="slow", steps=50) as stream:
            for event in stream:
                if isinstance(event, moored.Step):
                    client.status()
            assert len(stream.pictures) == 1


def test_a_client_that_retries_waits_as_long_as_it_is_told(
    simulate: Simulate, tmp_path: Path
) -> None:
    service = simulate(arguments=("--set", "queue.max_jobs=1"))
    options: dict[str, Any] = {"model": "slow", "seed": 1, "width": 64, "height": 64}
    with service.client() as first, first.stream_image("slow", steps=120, **options) as stream:
        next(stream)
        with service.client() as other, pytest.raises(moored.QueueFull) as refused:
            other.generate_image("at once", steps=1, **options)
        assert refused.value.retry_after_s
        with service.client(retry_s=60.0) as patient:
            began = time.monotonic()
            assert patient.generate_image("in time", steps=1, **options).pictures
            assert time.monotonic() - began >= refused.value.retry_after_s
    with service.client() as first, first.stream_image("slow", steps=160, **options) as stream:
        next(stream)
        asked = ("generate", "a boat", "-m", "small", "-o", str(tmp_path / "boat.png"))
        assert "queue" in service.run(*asked).stderr
        done = service.run(*asked, "--retry", "1m")
        assert (done.returncode, (tmp_path / "boat.png").is_file()) == (0, True), done.stderr
        assert "asking again in 2s" in done.stderr
        with (
            service.client(retry_s=60.0) as hurried,
            hurried.stream_image("slow", steps=200, **options) as under_way,
            service.client(retry_s=60.0) as other,
        ):
            next(under_way)
            with pytest.raises(moored.QueueFull):
                # It is told to wait two seconds.
                other.generate_image("in no time", steps=1, timeout=2.0, **options)


def test_without_file_descriptors_the_service_waits_and_logs_it_once(simulate: Simulate) -> None:
    service = simulate()
    pid = service.process.pid
    with service.client() as client:
        there = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (there + 4, there + 4))
        host, port = service.address.rsplit(":", 1)
        idle = [socket.create_connection((host, int(port))) for _ in range(20)]

        def said() -> list[str]:
            return [line for line in service.log if "no connection can be accepted" in line]

        service.wait_for_log(lambda: bool(said()))
        ticks = cpu_ticks(pid)
        time.sleep(2)  # what it does in some time is what is measured
        assert cpu_ticks(pid) - ticks < 50, "hundredths of a second of two"
        assert len(said()) == 1
        for each in idle:
            each.close()
        with moored.Client(service.address) as another:
            assert another.status().cards
        assert client.status().cards


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_picture_that_many_leave_unread_is_held_once(
    simulate: Simulate, opened: ExitStack
) -> None:
    service = simulate()
    request = generation_pb2.GenerateImageRequest(prompt="wide", width=4096, height=4096, seed=1)
    request.model.id = "small"
    request.options.idempotency_key = "wide"
    request.output = generation_pb2.RAW_RGB
    with service.client() as client:
        connection = Http2(service.address, window=20_000)
        opened.callback(connection.close)
        connection.open_window()
        before = resident(service)
        streams = [connection.call("Generation/GenerateImage") for _ in range(100)]
        for stream in streams:
            connection.write(stream, message(request.SerializeToString()), end=True)
        received = connection.frames
        connection.wait_for(
            lambda: all(len(received.get((DATA, one), b"")) == 20_000 for one in streams)
        )
        assert len(client.jobs()) <= 1
        assert grew(service, before) < 2 * 48 + 100


def test_freed_memory_is_returned_to_the_system(simulate: Simulate) -> None:
    service = simulate()
    with service.client() as client:
        client.generate_image("first", model="small", width=64, height=64)
        before = resident(service)

        def generate(seed: int) -> None:
            client.generate_image("one of many", model="small", width=2048, height=2048, seed=seed)

        with ThreadPoolExecutor(24) as several:
            list(several.map(generate, range(60)))
        wait_until(lambda: grew(service, before) <= 24, "it has grown by 24 MiB at the most", 30)


def test_holds_and_reservations_are_bounded(simulate: Simulate) -> None:
    bounds = ("limits.holds_per_client=3", "limits.reservations_per_client=2")
    service = simulate(arguments=tuple(word for bound in bounds for word in ("--set", bound)))
    with ExitStack() as clients:
        named = [clients.enter_context(service.client(client_id=f"name {n}")) for n in range(4)]
        holds = [each.hold("small") for each in named[:3]]
        with pytest.raises(moored.ClientLimit, match=r"limits\.holds_per_client"):
            named[3].hold("small")
        named[0].hold("small")  # renewed
        holds[0].release()
        named[3].hold("small")
        client = named[0]
        reserved = [client.reserve(MIB) for _ in range(2)]
        with pytest.raises(moored.ClientLimit, match=r"limits\.reservations_per_client"):
            client.reserve(MIB)
        reserved[0].release()
        client.reserve(MIB)


def test_log_lines_have_the_call_and_the_job(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "log.filter=debug"))
    with service.client(client_id="who asks") as client:
        job = client.generate_image("x", model="small", width=64, height=64).job_id

        def said(*words: str) -> bool:
            return any(all(word in line for word in words) for line in service.log)

        service.wait_for_log(lambda: said("order{", f'job="{job}"', "stage=", "loaded"))
        service.wait_for_log(
            lambda: said("call{", "GenerateImage", 'client="who asks"', "answered")
        )


def test_output_of_a_library_in_a_worker_is_not_read_as_a_frame(simulate: Simulate) -> None:
    service = simulate()
    with service.client() as client:
        worker = client.status().cards[0].worker_pid
        with Path(f"/proc/{worker}/fd/1").open("wb") as standard_output:
            standard_output.write(b"cuBLAS says what it thinks of this call\n")
        service.wait_for_log(lambda: any("cuBLAS says" in line for line in service.log))
        client.generate_image("after it", model="small", width=64, height=64)
        card = client.status().cards[0]
        assert (card.worker_pid, card.worker_restarts) == (worker, 0)


def test_latents_of_one_client_push_out_its_own_and_not_those_of_another(
    simulate: Simulate, opened: ExitStack
) -> None:
    service = simulate(arguments=("--set", "queue.latents=8KiB"))
    info = model_pb2.LatentInfo(vae_id="a decoder", shape=[1, 1, 16, 16], dtype="f32")
    chunk = generation_pb2.LatentChunk(info=info, chunk=bytes(1024)).SerializeToString()
    other = Http2(service.address, source="127.0.0.30")
    opened.callback(other.close)
    stream = other.call("Generation/PutLatent")
    other.write(stream, message(chunk), end=True)
    other.wait_for(lambda: (DATA, stream) in other.frames)
    of_another = model_pb2.LatentInfo.FromString(other.frames[(DATA, stream)][5:])
    with service.client() as client:
        own = [client.put_latent(np.zeros((1, 1, 16, 16), "f4"), vae_id="a") for _ in range(20)]
        assert client.status().latents == 8, "seven of its own, and that of the other"
        assert client.get_latent(of_another.id).data == bytes(1024)
        assert client.get_latent(own[-7].id).data == bytes(1024)
        with pytest.raises(moored.LatentNotFound):
            client.get_latent(own[-8].id)
