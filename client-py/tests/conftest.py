from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from scripted import Service
from talks import Both

import moored


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TOKEN_FILE", "CLIENT", "CA_FILE", "INSECURE_TOKEN"):
        monkeypatch.delenv(f"MOORED_{name}", raising=False)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    server, address = service.start()
    yield address
    server.stop(None).wait()


@pytest.fixture
def client(address: str) -> Iterator[moored.Client]:
    with moored.Client(address) as client:
        yield client


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, and its default in programs that are started.

    A shell has the signal ignored by what it runs in the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass
class Ask:
    """One question for both clients, so that one test serves them both."""

    kind: str
    address: str
    settings: dict[str, Any]

    def __call__(self, method: str, *args: Any, **more: Any) -> Any:
        if self.kind == "sync":
            with moored.Client(self.address, **self.settings) as client:
                return getattr(client, method)(*args, **more)

        async def ask() -> Any:
            async with moored.AsyncClient(self.address, **self.settings) as client:
                return await getattr(client, method)(*args, **more)

        return asyncio.run(ask())

    def items(self, method: str, *args: Any, **more: Any) -> list[Any]:
        """Everything that a stream gives."""
        if self.kind == "sync":
            with moored.Client(self.address, **self.settings) as client:
                return list(getattr(client, method)(*args, **more))

        async def ask() -> list[Any]:
            async with moored.AsyncClient(self.address, **self.settings) as client:
                return [item async for item in getattr(client, method)(*args, **more)]

        return asyncio.run(ask())


@pytest.fixture(params=["sync", "async"])
def ask(request: pytest.FixtureRequest, address: str) -> Ask:
    return Ask(request.param, address, {})


@pytest.fixture
def both(ask: Ask) -> Both:
    return Both(ask)


@pytest.fixture
def png() -> bytes:
    image = pytest.importorskip("PIL.Image")
    encoded = io.BytesIO()
    image.new("RGB", (32, 16), (200, 10, 30)).save(encoded, "PNG")
    return encoded.getvalue()
