"""What the page's tests share: services under test, and a chromium to look at the page that they serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "nodes" / "comfyui"))

pytest.register_assert_rewrite("opening", "waiting")

from browser import chromium  # noqa: E402
from opening import HUB_MODEL, Serve  # noqa: E402
from playwright.sync_api import Browser  # noqa: E402

from service import BINARY, INSTANT_MODELS, Service  # noqa: E402


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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless browser."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped models on the CPU, for all tests that generate."""
    service = Service(state=tmp_path_factory.mktemp("demo"))
    with service.client():
        pass
    yield service
    assert service.stop() == 0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts services on simulated cards with the instant models: `serve("sim:24GiB", "--set", ...)`."""
    started: list[Service] = []

    def start(
        *arguments: str,
        devices: tuple[str, ...] = ("sim:24GiB",),
        listen: str | None = None,
        models: Path = INSTANT_MODELS,
        state: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> Service:
        folder = state or tmp_path / f"state-{len(started)}"
        service = Service(
            *("--models", str(models), *arguments),
            state=folder,
            devices=devices,
            listen=listen,
            environment=environment,
        )
        started.append(service)
        return service

    yield start
    for service in started:
        service.kill()


@pytest.fixture
def hub() -> Iterator[Any]:
    """The end-to-end tests' stand-in of a model hub; it has the shipped model under another name."""
    sys.path.append(str(ROOT / "tests" / "e2e"))
    from hub import Hub, Repository, files_of

    with Hub() as hub:
        hub.repositories[HUB_MODEL] = Repository(files_of(ROOT / "demo" / "model"))
        yield hub
