"""When ComfyUI unloads its own models, and how long memory stays reserved: the pack's modules alone."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import comfy.model_management
import moored
import pytest
from conftest import HERE, Serve
from sharing import GIB, Room, reserved
from waiting import DEADLINE_S, until

from service import Service

OURS = moored.Holder("python", os.getpid(), 20 * GIB)
ANOTHER = moored.Holder("blender", os.getpid() + 1, 20 * GIB)
WAITING = moored.Waiting(
    needed_bytes=22 * GIB,
    free_bytes=10 * GIB,
    holders=(ANOTHER, OURS),
    patience_left_ms=7_000,
    cause="foreign",
    stage="denoise",
)
STEP = moored.Step(n=1, of=2, item=0)
QUEUED = moored.Queued(position=0, estimate_ms=None)


def in_the_way(pack: ModuleType, *events: Any, endpoint: str = "127.0.0.1:50051") -> list[bool]:
    own = pack.own_models.OwnModels(pack.connection.Target(endpoint))
    return [own.in_the_way(event) for event in events]


def test_they_are_unloaded_once_in_each_wait(pack: ModuleType) -> None:
    assert in_the_way(pack, WAITING, WAITING, QUEUED, WAITING) == [True, False, False, False]
    assert in_the_way(pack, WAITING, STEP, WAITING, WAITING) == [True, False, True, False]


def test_they_are_unloaded_as_soon_as_comfyui_is_among_the_holders(pack: ModuleType) -> None:
    before = replace(WAITING, holders=(ANOTHER,))
    assert in_the_way(pack, before, WAITING, WAITING) == [False, True, False]


@pytest.mark.parametrize("cause", ["late_eviction", "reservation"])
def test_they_stay_when_other_memory_is_waited_for(pack: ModuleType, cause: str) -> None:
    """What is reserved may be reserved for them."""
    assert in_the_way(pack, replace(WAITING, cause=cause)) == [False]


@pytest.mark.parametrize(
    ("endpoint", "here"),
    [
        ("localhost:50051", True),
        ("127.0.0.2:1", True),
        ("[::1]:50051", True),
        ("https://127.0.0.1:443", True),
        ("unix:/run/moored.sock", True),
        ("192.168.1.7:50051", False),
        ("gpu-box:50051", False),
        ("https://localhost.example.org:443", False),
    ],
)
def test_they_stay_when_the_service_is_on_another_machine(
    pack: ModuleType, endpoint: str, here: bool
) -> None:
    """There this process id is somebody else's."""
    assert in_the_way(pack, WAITING, endpoint=endpoint) == [here]


class Loaded:
    """A model that ComfyUI has loaded."""

    load_device = "cpu"

    def load(self, device: str) -> None:
        """It is loaded."""

    def detach(self) -> None:
        """It is unloaded."""


@pytest.fixture
def loaded() -> Iterator[Loaded]:
    model = Loaded()
    comfy.model_management.load_models_gpu([model])
    yield model
    comfy.model_management.unload_all_models()


def test_the_log_says_that_they_were_unloaded_and_why(
    pack: ModuleType, loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert pack.own_models.unload("a job waits") is True
    assert caplog.messages == ["ComfyUI's own models were unloaded (1): a job waits"]
    assert pack.own_models.unload("a job waits") is False, "there are none"
    assert len(caplog.messages) == 1


def test_what_torch_keeps_is_given_back_though_no_model_is_loaded(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(comfy.model_management, "soft_empty_cache", lambda: emptied.append(True))
    pack.own_models.unload("a job waits")
    assert emptied == [True]


def test_a_job_goes_on_waiting_if_they_cannot_be_unloaded(
    pack: ModuleType, loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("CUDA error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_management, "unload_all_models", fails)
        assert pack.own_models.unload("a job waits") is False
    assert "could not be unloaded" in caplog.text
    assert "CUDA error" in caplog.text


def test_a_later_wait_does_not_say_what_was_done_in_an_earlier_one(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(pack.follow, "show_on", lambda node, text: texts.append(text))
    monkeypatch.setattr(pack.follow.comfy.utils, "ProgressBar", lambda *_, **__: Bar())
    display = pack.follow.Display("1")
    later = replace(WAITING, patience_left_ms=3_000)
    display.show(WAITING)
    display.show_in_wait(WAITING, "Unloaded")
    display.show(later)
    display.show(STEP)
    display.show(WAITING)
    assert [text.endswith("Unloaded") for text in texts] == [False, True, True, False, False]


class Bar:
    """A bar that is shown to nobody."""

    def update_absolute(self, *_: Any) -> None:
        """It stands somewhere."""


# Reservations.


@pytest.fixture
def service(serve: Serve) -> Service:
    return serve("sim:40GiB")


def made(pack: ModuleType, service: Service) -> Any:
    """A reservation of 8 GiB, in the pack's thread."""
    target = pack.connection.Target(service.address)

    async def work(client: moored.AsyncClient) -> Any:
        return await pack.reservations.make(client, target, 8 * GIB, "", 0.0, lambda _: None)

    return pack.connection.start_with_client(work, target).result(DEADLINE_S)


def test_a_reservation_is_renewed_until_the_prompt_ends(
    pack: ModuleType, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack.reservations, "RENEW_S", 0.05)
    left: list[int] = []

    def was_renewed(status: moored.Status) -> bool:
        ((one,),) = [card.reservations for card in status.cards]
        left.append(one.expires_in_ms)
        return left[-1] > min(left)

    async def prompt() -> None:
        made(pack, service).keep()
        with service.client() as client:
            await asyncio.to_thread(until, client, was_renewed)

    asyncio.run(prompt())
    with service.client() as client:
        until(client, lambda status: not reserved(status))


def test_a_reservation_outlives_a_service_that_restarts(pack: ModuleType, service: Service) -> None:
    """What keeps it is in the service; giving it back to one that is away is no failure."""
    reservation = made(pack, service)
    service.kill()
    work = pack.connection.start(reservation.release())
    assert work.result(DEADLINE_S) is False


def test_a_service_that_came_back_is_found_at_once(pack: ModuleType, serve: Serve) -> None:
    """Though a reservation was to be given back while it was away, which failed."""
    service = serve("sim:40GiB")
    reservation = made(pack, service)
    service.kill()
    for _ in range(2):
        assert pack.connection.start(reservation.release()).result(DEADLINE_S) is False
    serve("sim:40GiB", listen=service.address)
    status = pack.connection.start_with_client(lambda client: client.status(), reservation.target)
    assert status.result(DEADLINE_S).cards


class Refusing:
    """A client of a service that knows no such process: it is on another machine, or in a container."""

    def __init__(self, field: str) -> None:
        self.asked: list[int] = []
        self._field = field

    async def status(self) -> Any:
        return SimpleNamespace(cards=())

    async def reserve(self, size_bytes: int, process_id: int = 0, **options: Any) -> Any:
        self.asked.append(process_id)
        if process_id or self._field != "process_id":
            violation = moored.Violation(self._field, "is of the machine of the service")
            raise moored.InvalidRequest("no", violations=[violation])
        return SimpleNamespace(id="r-1", bytes=size_bytes, card="cuda:0")


def reserve_with(pack: ModuleType, client: Refusing) -> Any:
    make = pack.reservations.make
    target = pack.connection.Target("gpu-box:50051")
    return asyncio.run(make(client, target, 8 * GIB, "", 0.0, lambda _: None))


def test_a_service_that_does_not_know_the_process_reserves_without_it(pack: ModuleType) -> None:
    client = Refusing("process_id")
    assert reserve_with(pack, client).made.bytes == 8 * GIB
    assert client.asked == [os.getpid(), 0]


def test_another_refusal_is_told(pack: ModuleType) -> None:
    client = Refusing("card")
    with pytest.raises(moored.InvalidRequest):
        reserve_with(pack, client)
    assert client.asked == [os.getpid()]


class Slow:
    """A client whose service makes room, which takes until it is let go on."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def status(self) -> Any:
        return SimpleNamespace(cards=())

    async def reserve(self, size_bytes: int, **options: Any) -> Any:
        self._room = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.asked.set()
        await self._room.wait()
        return SimpleNamespace(release=self._release)

    def go_on(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._room.set)

    async def _release(self) -> bool:
        self.released.set()
        return True


def test_what_is_reserved_after_an_interrupt_is_given_back(pack: ModuleType) -> None:
    client, target = Slow(), pack.connection.Target("gpu-box:50051")
    make = pack.reservations.make(client, target, 8 * GIB, "", 0.0, lambda _: None)
    making = pack.connection.start(make)
    assert client.asked.wait(DEADLINE_S)
    making.cancel()
    client.go_on()
    assert client.released.wait(DEADLINE_S)


def test_reserved_memory_is_free_again_when_comfyui_is_killed(
    service: Service, tmp_path: Path
) -> None:
    """Within the service's look at processes, and not after the reservation's ten minutes."""
    room = Room(service, tmp_path)
    reservation = room.reserve([room.server, 0])
    room.block("never", [reservation, 0])
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(room.prompt), encoding="utf-8")
    comfyui = subprocess.Popen([sys.executable, HERE / "alone.py", tmp_path, prompt])
    with service.client() as client:
        until(client, lambda status: bool(reserved(status)))
        assert reserved(client.status()) == [("sim:0", 8 * GIB, comfyui.pid)]
        comfyui.kill()
        comfyui.wait(DEADLINE_S)
        until(client, lambda status: not reserved(status))
