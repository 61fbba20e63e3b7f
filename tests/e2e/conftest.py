"""What the end-to-end tests share: services, started for each test or for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import moored
import pytest

from service import BINARY, INSTANT_MODELS, Service

pytest.register_assert_rewrite("faults", "http2", "waiting")


@pytest.fixture(scope="session", autouse=True)
def _binary_is_there() -> None:
    assert BINARY.is_file(), f"{BINARY} is missing: scripts/test e2e builds it"


@pytest.fixture(scope="session")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped model on the CPU, for all tests of its pictures."""
    service = Service(state=tmp_path_factory.mktemp("demo"))
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="session")
def demo_client(demo_service: Service) -> Iterator[moored.Client]:
    """A client of `demo_service`."""
    with demo_service.client() as client:
        yield client


@pytest.fixture
def simulate(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services on simulated cards with the instant models: `simulate("sim:24GiB", ...)`."""
    started: list[Service] = []

    def start(*devices: str, arguments: tuple[str, ...] = ()) -> Service:
        state = tmp_path / f"state-{len(started)}"
        service = Service(
            "--models",
            str(INSTANT_MODELS),
            *arguments,
            state=state,
            devices=devices or ("sim:24GiB",),
        )
        started.append(service)
        return service

    yield start
    for service in started:
        service.kill()
