"""The real engine and the real service: one engine for all tests, a fresh workflow for each."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import moored
import pytest
from headless import (
    START_LIMIT_S,
    Headless,
    clean_environment,
    client_from_here,
    library_copy,
)

from service import BINARY, INSTANT_MODELS, Service

# The engine reads its folders when it is imported: nothing may import it before this.
HOME = Path(tempfile.mkdtemp(prefix="moored-griptape-"))
clean_environment(HOME)


@pytest.fixture(scope="session", autouse=True)
def _home() -> Iterator[None]:
    assert BINARY.is_file(), f"{BINARY} is missing: scripts/test nodes builds it"
    yield
    shutil.rmtree(HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def manifest() -> Path:
    """The library's manifest, in a folder as users install it."""
    client_from_here(HOME)
    return library_copy(HOME)


@pytest.fixture(scope="session")
def engine(manifest: Path) -> Iterator[Headless]:
    """The engine with the library loaded, while no service runs."""
    engine = Headless()
    engine.do(engine.settings(endpoint="127.0.0.1:9"), START_LIMIT_S)
    engine.do(engine.start(manifest), START_LIMIT_S)
    yield engine
    engine.loop.close()


@pytest.fixture
def nowhere(engine: Headless, monkeypatch: pytest.MonkeyPatch) -> Headless:
    """The engine with a fresh workflow, and nothing that answers at the endpoint."""
    # A busy machine may need more than a person would wait for.
    monkeypatch.setattr("moored_griptape.run_node._HOLD_TIMEOUT_S", 60.0)
    engine.do(engine.fresh_flow())
    engine.do(engine.settings(endpoint="127.0.0.1:9", client_name="tester"))
    return engine


@pytest.fixture(scope="session")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped model on the CPU."""
    service = Service(state=tmp_path_factory.mktemp("demo"))
    service.client().close()
    yield service
    assert service.stop() == 0


@pytest.fixture
def connected(nowhere: Headless, demo_service: Service) -> Headless:
    """The engine with a fresh workflow, speaking to `demo_service`."""
    nowhere.do(nowhere.settings(endpoint=demo_service.address))
    return nowhere


@pytest.fixture
def simulate(nowhere: Headless, tmp_path: Path) -> Iterator[Callable[..., moored.Client]]:
    """Starts a service on a simulated card and has the engine speak to it; a client of its own."""
    started: list[Service] = []
    clients: list[moored.Client] = []

    def start(device: str = "sim:40GiB", *arguments: str) -> moored.Client:
        state = tmp_path / f"state-{len(started)}"
        service = Service(
            "--models", str(INSTANT_MODELS), *arguments, state=state, devices=(device,)
        )
        started.append(service)
        nowhere.do(nowhere.settings(endpoint=service.address))
        clients.append(service.client(client_id="somebody else"))
        return clients[-1]

    yield start
    for client in clients:
        client.close()
    for service in started:
        service.kill()
