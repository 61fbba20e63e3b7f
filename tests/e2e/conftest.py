"""What the end-to-end tests share: services, started for each test or for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import moored
import pytest

from service import BINARY, INSTANT_MODELS, ROOT, ReservedPort, Service, run

pytest.register_assert_rewrite("commands", "faults", "http2", "waiting")

# After the line above, which must come before their import.
from commands import LARGE_ID, Completed, Run  # noqa: E402
from hub import Hub, Repository, files_of  # noqa: E402


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
def hub() -> Iterator[Hub]:
    """A hub that has the shipped model under the name of a large one."""
    with Hub() as hub:
        hub.repositories[LARGE_ID] = Repository(files_of(ROOT / "demo/model"))
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of downloads."""
    return tmp_path / "home"


@pytest.fixture
def alone(hub: Hub, home: Path, tmp_path: Path) -> Run:
    """A command where no service runs, in a folder of its own."""
    port = ReservedPort()
    env = hub.environment(home) | {
        "MOORED_ENDPOINT": f"http://{port.address}",
        "MOORED_SERVICE_STATE": str(tmp_path / "state"),
    }

    def command(*arguments: str, **variables: str) -> Completed:
        return run(*arguments, env=env | variables, cwd=tmp_path)

    return command


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
