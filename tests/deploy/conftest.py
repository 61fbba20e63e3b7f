"""What the tests of deploy/ share: three boxes, and a proxy of each kind before them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service import INSTANT_MODELS

pytest.register_assert_rewrite("proxies")

from proxies import PROXIES, Boxes, HaProxy, Proxy, make_models, running  # noqa: E402

MODELS = tuple(f"picture-{number}" for number in range(8))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: quick ones, one with long steps, a film and a track."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, MODELS, gib=0.1, step_ms=5)
    make_models(folder, ["slow"], gib=0.1, step_ms=300)
    for name in ("track", "video"):
        (folder / f"{name}.instant.json").write_bytes(
            (INSTANT_MODELS / f"{name}.instant.json").read_bytes()
        )
    return folder


@pytest.fixture(scope="session")
def boxes(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Boxes]:
    """Three boxes, for tests that leave all of them running."""
    boxes = Boxes(tmp_path_factory.mktemp("boxes"), models)
    yield boxes
    boxes.stop()


@pytest.fixture
def own_boxes(tmp_path: Path, models: Path) -> Iterator[Boxes]:
    """Two boxes of a test that ends some of them."""
    boxes = Boxes(tmp_path / "boxes", models, names=("a", "b"))
    yield boxes
    boxes.stop()


@pytest.fixture(params=PROXIES, scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    """HAProxy, and Envoy."""
    return str(request.param)


@pytest.fixture(scope="session")
def proxy(
    kind: str, boxes: Boxes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HaProxy | Proxy]:
    """A proxy before all three boxes."""
    with running(kind, tmp_path_factory.mktemp(kind), boxes) as proxy:
        yield proxy
