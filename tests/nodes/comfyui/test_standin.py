"""The pack on the stand-in, against the real service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from behaviour import *  # noqa: F403
from conftest import PACK
from standin.executor import StandIn


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    """The stand-in, with the pack linked in under another name, as people do."""
    folder = tmp_path_factory.mktemp("standin")
    linked = folder / "pack.of-nodes"
    linked.symlink_to(PACK)
    standin = StandIn(linked, folder)
    yield standin
    standin.stop()
