"""Models that the service fetches from a hub."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from conftest import Ask
from scripted import WAIT_S, Service, reason, refuse

import moored
from moored._generated import hub_pb2

PULLED = hub_pb2.PulledModel(id="me/mine", revision="c0ffee", bytes_total=30, bytes_fetched=20)


def progress(done: int, file: str = "vae/config.json") -> hub_pb2.PullEvent:
    inner = hub_pb2.PullProgress(
        bytes_done=done, bytes_total=30, files_done=1, files_total=3, file=file
    )
    return hub_pb2.PullEvent(progress=inner)


EVENTS = [
    hub_pb2.PullEvent(progress=hub_pb2.PullProgress()),
    progress(10),
    hub_pb2.PullEvent(),  # of a newer service
    progress(30, file=""),
    hub_pb2.PullEvent(pulled=PULLED),
]


def test_a_pull(service: Service, ask: Ask) -> None:
    service.on("PullModel", EVENTS)
    pulled = ask("pull_model", "me/mine", revision="v1")
    assert pulled == moored.PulledModel("me/mine", "c0ffee", 30, 20)
    assert (service.requests["PullModel"].id, service.requests["PullModel"].revision) == (
        "me/mine",
        "v1",
    )
    ask("pull_model", "me/mine@v2")
    assert service.requests["PullModel"].revision == "v2"
    seen = ask.items("stream_pull", "me/mine")
    assert [one.bytes_done for one in seen] == [0, 10, 30]
    assert seen[1] == moored.PullProgress(10, 30, 1, 3, "vae/config.json")
    assert [moored.describe(one) for one in seen[:2]] == ["Asking the hub", "Pulling 0.0/0.0 MB"]


def test_a_plan(service: Service, ask: Ask) -> None:
    plan = hub_pb2.PullPlan(
        id="me/mine", revision="c0ffee", bytes_total=30, bytes_missing=20, files_total=3
    )
    service.on("PlanPull", plan)
    assert ask("plan_pull", "me/mine") == moored.PullPlan("me/mine", "c0ffee", 30, 20, 3)


def test_the_result_after_the_events(service: Service, client: moored.Client) -> None:
    service.on("PullModel", EVENTS)
    with client.stream_pull("me/mine") as stream:
        for one in stream:
            assert isinstance(one, moored.PullProgress)
        assert stream.result() is stream.result()


@pytest.mark.parametrize(
    ("name", "kind"), [("PULL_FAILED", moored.PullFailed), ("DISK_FULL", moored.DiskFull)]
)
def test_what_is_refused(
    service: Service, ask: Ask, name: str, kind: type[moored.MooredError]
) -> None:
    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield progress(10)
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "The token is wrong.", reason(name))

    service.on("PullModel", answer)
    with pytest.raises(kind, match="token"):
        ask("pull_model", "me/mine")


def test_a_pull_that_ends_without_a_word(service: Service, ask: Ask) -> None:
    service.on("PullModel", [progress(10)])
    with pytest.raises(moored.InternalError):
        ask("pull_model", "me/mine")


class Endless:
    """A pull that goes on until its client leaves."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        if not context.add_callback(self.gone.set):
            self.gone.set()
        yield progress(10)
        self.gone.wait(WAIT_S)


def test_leaving(service: Service, client: moored.Client) -> None:
    endless = Endless()
    service.on("PullModel", endless)
    with client.stream_pull("me/mine") as stream:
        assert next(stream).bytes_done == 10
    assert endless.gone.wait(WAIT_S)
    with pytest.raises(moored.Cancelled):
        stream.result()


def test_a_cancelled_task_leaves(service: Service, address: str) -> None:
    endless = Endless()
    service.on("PullModel", endless)

    async def cancel() -> None:
        async with moored.AsyncClient(address) as client:
            begun = asyncio.Event()

            async def pull() -> None:
                async with client.stream_pull("me/mine") as stream:
                    async for _ in stream:
                        begun.set()

            task = asyncio.create_task(pull())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancel())
    assert endless.gone.wait(WAIT_S)
