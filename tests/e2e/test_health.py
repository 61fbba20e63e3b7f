"""`grpc.health.v1` and server reflection, as probes and tools use them."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import moored
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from service import Service

Simulate = Callable[..., Service]

DEADLINE_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = {
    "grpc.health.v1.Health",
    "moored.v1.Generation",
    "moored.v1.Jobs",
    "moored.v1.Residency",
    "moored.v1.Server",
}


@contextmanager
def channel_to(service: Service) -> Iterator[grpc.Channel]:
    with service.client() as client:
        for card in client.server_info().cards:
            client.wait_until_ready(card=card.id)
    with grpc.insecure_channel(service.address) as channel:
        yield channel


def check(channel: grpc.Channel, name: str) -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    status: int = health_pb2_grpc.HealthStub(channel).Check(request, timeout=DEADLINE_S).status
    return status


class Watch:
    """A health watch that is read in the background."""

    def __init__(self, channel: grpc.Channel, name: str) -> None:
        request = health_pb2.HealthCheckRequest(service=name)
        self._call = health_pb2_grpc.HealthStub(channel).Watch(request, timeout=600)
        self.seen: list[int] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            for answer in self._call:
                with self._changed:
                    self.seen.append(answer.status)
                    self._changed.notify_all()
        except grpc.RpcError:
            pass

    def wait_for(self, count: int) -> list[int]:
        """The first `count` answers, once there are so many."""
        with self._changed:
            there = self._changed.wait_for(lambda: len(self.seen) >= count, DEADLINE_S)
            assert there, f"{count} answers expected, there are {self.seen}"
            return self.seen[:count]

    def close(self) -> None:
        self._call.cancel()
        self._reader.join(DEADLINE_S)


def kill_worker(service: Service, card: int = 0) -> None:
    with service.client() as client:
        os.kill(client.status().cards[card].worker_pid, signal.SIGKILL)


@contextmanager
def without_a_worker(service: Service, world: Path) -> Iterator[None]:
    """Kills the worker of the first card; the next is not ready before this context ends.

    It reads who holds memory, from a pipe into which nobody writes. Without that it may be ready before
    a watch, which shows the latest, has shown that there was none.
    """
    pipe = world.with_suffix(".pipe")
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        pipe.replace(world)
        kill_worker(service)
        yield
    finally:
        world.unlink()
        os.close(writer)


def test_the_service_and_its_card_are_checked(simulate: Simulate) -> None:
    with channel_to(simulate()) as channel:
        assert check(channel, "") == SERVING
        assert check(channel, "moored.card.sim:0") == SERVING
        for unknown in ("moored.card.sim:1", "moored.card.", "something.else"):
            with pytest.raises(grpc.RpcError) as refused:
                check(channel, unknown)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_cpu_is_a_card_too(demo_service: Service) -> None:
    with channel_to(demo_service) as channel:
        assert check(channel, "") == SERVING
        assert check(channel, "moored.card.cpu") == SERVING


@pytest.mark.parametrize("name", ["", "moored.card.sim:0"])
def test_the_health_of_a_card_follows_the_death_and_restart_of_its_worker(
    simulate: Simulate, tmp_path: Path, name: str
) -> None:
    world = tmp_path / "world"
    service = simulate(f"sim:24GiB,world={world}")
    with channel_to(service) as channel:
        watch = Watch(channel, name)
        assert watch.wait_for(1) == [SERVING]
        with without_a_worker(service, world):
            assert watch.wait_for(2) == [SERVING, NOT_SERVING]
        assert watch.wait_for(3) == [SERVING, NOT_SERVING, SERVING]
        assert check(channel, name) == SERVING
        watch.close()


def test_the_service_is_serving_while_one_card_is(simulate: Simulate, tmp_path: Path) -> None:
    world = tmp_path / "world"
    service = simulate(f"sim:24GiB,world={world}", "sim:24GiB,index=1")
    with channel_to(service) as channel:
        whole, dies, lives = (
            Watch(channel, name) for name in ("", "moored.card.sim:0", "moored.card.sim:1")
        )
        assert [watch.wait_for(1) for watch in (whole, dies, lives)] == [[SERVING]] * 3
        with without_a_worker(service, world):
            assert dies.wait_for(2) == [SERVING, NOT_SERVING]
        assert dies.wait_for(3) == [SERVING, NOT_SERVING, SERVING]
        assert whole.seen == lives.seen == [SERVING]
        for watch in (whole, dies, lives):
            watch.close()


def test_a_busy_card_is_serving(simulate: Simulate) -> None:
    service = simulate()
    with channel_to(service) as channel, service.client() as client:
        watch = Watch(channel, "moored.card.sim:0")
        with client.stream_image("busy", model="slow") as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            assert check(channel, "moored.card.sim:0") == SERVING
            stream.result()
        assert watch.seen == [SERVING]
        watch.close()


def test_a_draining_service_is_not_serving(simulate: Simulate) -> None:
    service = simulate()
    with channel_to(service) as channel, service.client() as client:
        watches = [Watch(channel, name) for name in ("", "moored.card.sim:0")]
        assert [watch.wait_for(1) for watch in watches] == [[SERVING]] * 2
        with client.stream_image("busy", model="slow", steps=40) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            service.process.send_signal(signal.SIGTERM)
            for watch in watches:
                assert watch.wait_for(2) == [SERVING, NOT_SERVING]
            assert stream.result().pictures, "what runs is finished all the same"
        assert service.process.wait(DEADLINE_S) == 0
        for watch in watches:
            watch.close()


def test_a_service_that_leaves_is_not_ready_before_it_refuses_jobs(simulate: Simulate) -> None:
    """A proxy before several boxes sees it in time, and sends no job there that is refused."""
    service = simulate(arguments=("--set", "service.notice=1h"))
    with channel_to(service) as channel, service.client() as client:
        watch = Watch(channel, "")
        assert watch.wait_for(1) == [SERVING]
        service.process.send_signal(signal.SIGTERM)
        assert watch.wait_for(2) == [SERVING, NOT_SERVING]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{service.address}/readyz")
        assert client.generate_image("late", model="small", timeout=DEADLINE_S).pictures
        # The second signal ends the notice.
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(DEADLINE_S) == 0
        watch.close()


def test_a_service_whose_workers_die_repeatedly_answers_and_stops(simulate: Simulate) -> None:
    """After workers that die repeatedly the service is healthy, and ends when it is told to."""
    service = simulate("sim:24GiB,die-at=denoise:1,die-generations=9")
    with channel_to(service) as channel, service.client() as client:
        with pytest.raises(moored.WorkerDied):
            client.generate_image("deadly", model="small", timeout=DEADLINE_S)
        assert check(channel, "") in (SERVING, NOT_SERVING)
        client.wait_until_ready(DEADLINE_S)
        assert check(channel, "moored.card.sim:0") == SERVING
    assert service.stop() == 0


def test_the_client_reads_health(simulate: Simulate) -> None:
    with simulate().client() as client:
        assert client.health() == "serving"
        assert client.health("sim:0") == "serving"
        with pytest.raises(moored.MooredError):
            client.health("sim:9")
        began = time.monotonic()
        with pytest.raises(moored.MooredError):
            client.wait_until_ready(0.5, card="sim:9")
        assert time.monotonic() - began < 30


# Reflection.


def reflect(
    channel: grpc.Channel, version: str, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    """One request in a version of the protocol; their messages are the same on the wire."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    answer: reflection_pb2.ServerReflectionResponse = next(
        call(iter([request]), timeout=DEADLINE_S)
    )
    return answer


def test_reflection_lists_the_services(simulate: Simulate) -> None:
    with channel_to(simulate()) as channel:
        listed = reflect(channel, "v1", reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in listed.list_services_response.service}
        assert names >= SERVICES
        assert not any("worker" in name for name in names), "that protocol is private"


def test_reflection_describes_a_method(simulate: Simulate) -> None:
    with channel_to(simulate()) as channel:
        request = reflection_pb2.ServerReflectionRequest(
            file_containing_symbol="moored.v1.Generation.GenerateImage"
        )
        answer = reflect(channel, "v1", request)
        files = answer.file_descriptor_response.file_descriptor_proto
        assert any(b"GenerateImageRequest" in file for file in files)


def test_reflection_reports_an_unknown_symbol_as_not_found(simulate: Simulate) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.such.Thing")
    with channel_to(simulate()) as channel:
        try:
            code = reflect(channel, "v1", request).error_response.error_code
        except grpc.RpcError as error:
            code = error.code().value[0]
    assert code == grpc.StatusCode.NOT_FOUND.value[0]


def test_reflection_serves_older_tools(simulate: Simulate) -> None:
    """Python's own client of reflection, as others from before 2023, asks for v1alpha."""
    with channel_to(simulate()) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert set(database.get_services()) >= SERVICES
        file = database.FindFileContainingSymbol("moored.v1.Residency")
        assert file.package == "moored.v1"
