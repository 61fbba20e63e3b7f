"""Every example workflow of the pack runs on the stand-in, with small models in place of large ones."""

from __future__ import annotations

import json
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from behaviour import scene
from conftest import PACK
from prompts import Prompt
from standin.executor import StandIn
from tiny_models import FIXTURES, film_models, picture_models

from service import Service

EXAMPLES = sorted((PACK / "example_workflows").glob("*.json"))
IN_PLACE_OF = {
    "lllyasviel/FramePackI2V_HY": "moored/demo-film",
    "hunyuanvideo-community/HunyuanVideo": "hunyuan",
    # No shipped model makes films with sound.
    "chetwinlow1/Ovi:model_960x960.safetensors": "hunyuan",
    "ACE-Step/Ace-Step1.5": "moored/demo-sound",
    "black-forest-labs/FLUX.1-dev": "plain",
    "black-forest-labs/FLUX.1-Kontext-dev": "kontext",
    "black-forest-labs/FLUX.2-klein-4B": "klein",
    "Qwen/Qwen-Image": "qwen",
    # A tiny Qwen-Image-Edit would scale each picture to a megapixel.
    "Qwen/Qwen-Image-Edit-2511": "klein",
    "stabilityai/stable-diffusion-xl-base-1.0": "sdxl",
}
"""Models that are small, by those that the examples name; what is not here is used as it is."""
FEW: dict[str, Any] = {
    "steps": 2,
    "seconds": 0.0,
    "frames": 0,
    "start_seconds": 0.5,
    "end_seconds": 1.5,
}
SIDE = 128
"""Of the pictures, as in the examples that mask a part."""
SHOWS = {"SaveImage": "PreviewImage", "SaveAudioAdvanced": "PreviewAudio"}
"""Nodes of the stand-in that show what ComfyUI's own would write to a file."""


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    folder = tmp_path_factory.mktemp("examples")
    linked = folder / "pack"
    linked.symlink_to(PACK)
    standin = StandIn(linked, folder)
    scene(1).resize((SIDE, SIDE)).save(folder / "example.png")
    with wave.open(str(folder / "song.wav"), "wb") as song:
        song.setnchannels(2)
        song.setsampwidth(2)
        song.setframerate(16_000)
        noise = np.random.default_rng(1).integers(-9000, 9000, (32_000, 2), dtype=np.int16)
        song.writeframes(noise.tobytes())
    yield standin
    standin.stop()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped models, tiny ones of all families that edit or sample, and a ControlNet."""
    models, nets = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("nets")
    picture_models(models)
    film_models(models)
    shutil.copytree(FIXTURES / "flux-controlnet-tiny" / "single", nets / "single")
    arguments = ("--models", str(models), "--set", f"models.adapters={json.dumps([str(nets)])}")
    service = Service(*arguments, state=tmp_path_factory.mktemp("state"))
    with service.client():
        pass
    yield service
    assert service.stop() == 0


def prompt_of(example: Path, endpoint: str) -> Prompt:
    """What ComfyUI's page queues of an example, with few steps and models that are here."""
    workflow = json.loads(example.read_text(encoding="utf-8"))
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt: Prompt = {"server": {"class_type": "MooredServer", "inputs": {"endpoint": endpoint}}}
    for node in workflow["nodes"]:
        kind = SHOWS.get(node["type"], node["type"])
        inputs = dict(node.get("widgets_values_named") or {})
        inputs |= {name: few for name, few in FEW.items() if name in inputs}
        if node["type"] == "MooredTextToImage":
            inputs |= {"width": SIDE, "height": SIDE}
        if node["type"] == "MooredTextToVideo":
            inputs |= {"width": 64, "height": 64, "frames": 5}
        for each in node["inputs"]:
            if each["link"] is not None:
                inputs[each["name"]] = links[each["link"]]
            elif each["name"] == "server":
                inputs["server"] = ["server", 0]
        for name in ("control_after_generate", "upload", "filename_prefix", "format"):
            inputs.pop(name, None)
        if "model" in inputs and isinstance(inputs["model"], str):
            inputs["model"] = IN_PLACE_OF.get(inputs["model"], inputs["model"])
        if "control_net" in inputs:
            inputs["control_net"] = "single"
        if "audio" in inputs and isinstance(inputs["audio"], str):
            inputs["audio"] = "song.wav"
        if node["type"] == "SaveVideo":
            kind, inputs = "PreviewAny", {"source": inputs["video"]}
        prompt[str(node["id"])] = {"class_type": kind, "inputs": inputs}
    return prompt


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(standin: StandIn, service: Service, example: Path) -> None:
    run = standin.queue(prompt_of(example, service.address)).succeeded()
    assert any(text.startswith("Done in") for text in run.texts())
    assert run.outputs, "it shows something"
