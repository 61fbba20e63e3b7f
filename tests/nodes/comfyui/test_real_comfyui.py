"""The pack on a real ComfyUI, against the real service; COMFYUI_DIR and COMFYUI_PYTHON say where it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from behaviour import *  # noqa: F403
from behaviour import shown
from conftest import CLIENT, OWN_MODEL, PACK
from object_info import comparable, golden
from prompts import Graph
from real import RealComfyUI, started
from sharing import *  # noqa: F403
from sharing import use_own_model

from service import Service


@pytest.fixture(scope="module")
def comfyui(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealComfyUI]:
    """A ComfyUI of its own."""
    comfyui = started(PACK, CLIENT, tmp_path_factory.mktemp("comfyui"), OWN_MODEL)
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


def test_the_log_says_that_comfyuis_models_were_unloaded(
    comfyui: RealComfyUI, service: Service, card: Path
) -> None:
    with service.client() as client:
        use_own_model(comfyui, client, card, 20)
        graph = Graph(service.address, model="flux-full")
        shown(graph, graph.text_to_image(patience_s=30.0))
        comfyui.queue(graph.prompt).succeeded()
    said = r"ComfyUI's own models were unloaded \(\d+\): a job of the moored service waits"
    assert re.search(said, comfyui.log.read_text(encoding="utf-8"))


def test_the_golden_file_is_what_this_comfyui_says(comfyui: RealComfyUI) -> None:
    assert comparable(comfyui.object_info()) == golden()["nodes"]
