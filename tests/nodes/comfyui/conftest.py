"""What the tests of the ComfyUI pack share: a service under test, and prompts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import moored
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PACK = ROOT / "nodes" / "comfyui"
OWN_MODEL = HERE / "own_model"
HUB_MODEL = "me/mine"
CLIENT = ROOT / "client-py" / "src"

pytest.register_assert_rewrite("behaviour", "runs", "real", "sharing", "waiting")
sys.path.insert(0, str(HERE))
# The stand-in's modules have the names of ComfyUI's; what the pack imports is found there.
sys.path.insert(1, str(HERE / "standin"))

from browser import PanelPage  # noqa: E402
from standin.executor import imported  # noqa: E402

from service import BINARY, INSTANT_MODELS, ReservedPort, Service  # noqa: E402

Serve = Callable[..., Service]


@pytest.fixture(scope="session", autouse=True)
def _binary_is_there() -> None:
    assert BINARY.is_file(), f"{BINARY} is missing: scripts/test builds it"


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_a_user() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MOORED_")]:
            if name != "MOORED_BINARY":
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _credentials_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORED_CREDENTIALS", str(tmp_path / "credentials" / "kept.json"))


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """The pack, imported as a package of any name; its modules are attributes."""
    return imported(PACK, "moored_nodes")


@pytest.fixture(scope="session")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped model on the CPU, for all tests that generate."""
    service = Service(state=tmp_path_factory.mktemp("demo"))
    with service.client():
        pass
    yield service
    assert service.stop() == 0


@pytest.fixture
def client(demo_service: Service) -> Iterator[moored.Client]:
    """A client of `demo_service`, to see what a node did."""
    with demo_service.client() as client:
        yield client


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port of loopback where nobody listens until the test has somebody do so."""
    reserved = ReservedPort()
    yield reserved.number


@pytest.fixture
def panel(tmp_path: Path) -> Iterator[PanelPage]:
    """A page with the panel."""
    page = PanelPage(tmp_path / "user")
    yield page
    page.stop()


@pytest.fixture
def hub() -> Iterator[Any]:
    """The end-to-end tests' stand-in of a model hub; it has the shipped model under another name."""
    sys.path.append(str(ROOT / "tests" / "e2e"))
    from hub import Hub, Repository, files_of

    with Hub() as hub:
        hub.repositories[HUB_MODEL] = Repository(files_of(ROOT / "demo" / "model"))
        yield hub


@pytest.fixture
def puller(hub: Any, tmp_path: Path) -> Iterator[Service]:
    """A service that pulls from `hub`."""
    environment = hub.environment(tmp_path / "home")
    service = Service(state=tmp_path / "puller", environment=environment)
    with service.client():
        pass
    yield service
    service.kill()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts services; on simulated cards with the instant models: `serve("sim:24GiB")`."""
    started: list[Service] = []

    def start(
        *devices: str,
        listen: str | None = None,
        more_models: Path | None = None,
        adapters: Path | None = None,
    ) -> Service:
        models: tuple[str, ...] = ("--models", str(INSTANT_MODELS)) if devices else ()
        if more_models is not None:
            models += ("--models", str(more_models))
        if adapters is not None:
            models += ("--set", f"models.adapters={json.dumps([str(adapters)])}")
        state = tmp_path / f"state-{len(started)}"
        service = Service(*models, state=state, devices=devices or ("cpu",), listen=listen)
        started.append(service)
        with service.client():
            pass
        return service

    yield start
    for service in started:
        service.kill()
