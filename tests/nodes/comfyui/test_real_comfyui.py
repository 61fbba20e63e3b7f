"""The pack on a real ComfyUI, against the real service; COMFYUI_DIR and COMFYUI_PYTHON say where it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from behaviour import *  # noqa: F403
from conftest import CLIENT, PACK
from object_info import comparable, golden
from real import RealComfyUI, started


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealComfyUI]:
    """A ComfyUI of its own."""
    comfyui = started(PACK, CLIENT, tmp_path_factory.mktemp("comfyui"))
    if comfyui is None:
        pytest.skip("COMFYUI_DIR and COMFYUI_PYTHON are not set")
    yield comfyui
    comfyui.stop()


FORMAT = """
import json, sys, torch
from comfy.latent_formats import Flux
samples = torch.tensor(json.loads(sys.argv[1]))
print(json.dumps(Flux().process_in(samples).tolist()))
"""


def test_latents_are_what_comfyuis_samplers_expect(comfyui: RealComfyUI, pack: ModuleType) -> None:
    """ComfyUI takes its LATENT in as the transformer's: that is where ours came from."""
    ours = np.random.default_rng(1).standard_normal((1, 16, 2, 2)).astype(np.float32)
    samples = pack.tensors.samples_of([ours], "flux")["samples"].numpy()
    said = comfyui.python("-c", FORMAT, json.dumps(samples.tolist()))
    np.testing.assert_allclose(np.array(json.loads(said), dtype=np.float32), ours, atol=1e-6)


def test_the_golden_file_is_what_this_comfyui_says(comfyui: RealComfyUI) -> None:
    assert comparable(comfyui.object_info()) == golden()["nodes"]
