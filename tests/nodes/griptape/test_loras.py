"""LoRAs of Diffusion Model, on the real service: what they change, show and say."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moored
import pytest
from headless import Headless
from lora_files import LAYERS, RANK, instant_adapter, random_lora, write_safetensors
from PIL import Image

from service import Service

PROMPT = "a large red circle in the centre on a black background"
QUICK: dict[str, Any] = {"seed": 7, "steps": 2, "width": 64, "height": 64}
CHANGED = f"{LAYERS} layers of transformer, rank {RANK}"


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped model and LoRAs for it."""
    folder = tmp_path_factory.mktemp("loras")
    tensors = random_lora()
    write_safetensors(folder / "styles" / "ink.safetensors", tensors)
    write_safetensors(folder / "oil.safetensors", random_lora(seed=2))
    unknown = {f"transformer.none.lora_{part}.weight": tensors.popitem()[1] for part in "BA"}
    write_safetensors(folder / "unknown.safetensors", tensors | unknown)
    arguments = ("--set", f"models.adapters={json.dumps([str(folder)])}")
    service = Service(*arguments, state=tmp_path_factory.mktemp("adapting"))
    service.client().close()
    yield service
    assert service.stop() == 0


@pytest.fixture
def engine_with(nowhere: Headless, adapting: Service) -> Headless:
    """The engine with a fresh workflow, speaking to `adapting`."""
    nowhere.do(nowhere.settings(endpoint=adapting.address))
    return nowhere


def workflow(engine: Headless, **values: Any) -> tuple[Any, Any]:
    """Diffusion Model with these values, and Generate Image behind it."""
    values = {"quantization_mode": "None"} | values
    model = engine.do(engine.node("DiffusionModel", **values))
    demo_service = engine.do(engine.node("GenerateImage", prompt=PROMPT, **QUICK))
    engine.do(engine.connect(model, "model_handle", demo_service, "model"))
    return model, demo_service


def pixels(node: Any) -> bytes:
    """The picture that a node gave."""
    from griptape_nodes.files.file import File

    data = File(node.parameter_output_values["image"].value).read_bytes()
    return Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.parametrize(
    ("values", "adapters"),
    [
        ({"lora": "styles/ink"}, ["styles/ink"]),
        ({"lora": "styles/ink", "lora_strength": 0.5}, [("styles/ink", 0.5)]),
        ({"lora": "none", "loras": "styles/ink:0.5, oil"}, [("styles/ink", 0.5), "oil"]),
        ({"lora": "styles/ink", "loras": ["oil"]}, ["styles/ink", "oil"]),
        (
            {"loras": [{"id": "oil", "strength": -1, "text_strength": 0}]},
            [moored.Adapter("oil", -1, text_strength=0)],
        ),
        (
            {"loras": [{"id": "oil", "curve": [[0, 1], [1, 0]]}]},
            [moored.Adapter("oil", curve=[(0, 1), (1, 0)])],
        ),
    ],
)
def test_a_picture_with_loras_is_the_clients_own(
    engine_with: Headless, adapting: Service, values: dict[str, Any], adapters: list[Any]
) -> None:
    model, demo_service = workflow(engine_with, **values)
    result = engine_with.do(engine_with.run())
    assert result.succeeded(), result.result_details
    with adapting.client() as client:
        own = client.generate_image(PROMPT, adapters=adapters, **QUICK)
        base = client.generate_image(PROMPT, **QUICK)
    assert pixels(demo_service) == own.image.convert("RGB").tobytes()
    assert pixels(demo_service) != base.image.convert("RGB").tobytes()
    report = model.parameter_output_values["lora_report"].splitlines()
    assert report == [f"{told.id}: {CHANGED}" for told in own.model.adapters]
    for line in report:
        assert f"LoRA {line}" in demo_service.parameter_output_values["logs"]


def test_a_lora_of_strength_0_is_left_out(engine_with: Headless, adapting: Service) -> None:
    model, demo_service = workflow(engine_with, lora="styles/ink", lora_strength=0)
    assert engine_with.do(engine_with.run()).succeeded()
    assert model.parameter_output_values["lora_report"] == "1 of strength 0 left out"
    with adapting.client() as client:
        base = client.generate_image(PROMPT, **QUICK)
    assert pixels(demo_service) == base.image.convert("RGB").tobytes()


def test_what_was_ignored_of_a_lora_is_shown(engine_with: Headless) -> None:
    model, _ = workflow(engine_with, loras=[{"id": "unknown", "ignore_unknown": True}])
    assert engine_with.do(engine_with.run()).succeeded()
    assert model.parameter_output_values["lora_report"] == (
        f"unknown: {LAYERS - 1} layers of transformer, rank {RANK}; 2 tensors ignored "
        "(transformer.none.lora_A.weight, transformer.none.lora_B.weight)"
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora": "gone"}, '"gone" is not there'),
        ({"lora": "unknown"}, "transformer.none.lora_A.weight"),
        ({"lora": "oil", "lora_strength": 101}, "strength"),
        ({"loras": "oil:much"}, "strength is a number"),
        ({"loras": "[1"}, "loras is no JSON list"),
        ({"lora": "oil", "model": "no/such"}, "no/such"),
    ],
)
def test_a_lora_that_cannot_be_used_is_reported_before_the_run(
    engine_with: Headless, values: dict[str, Any], said: str
) -> None:
    _, demo_service = workflow(engine_with, **values)
    result = engine_with.do(engine_with.run())
    assert result.failed()
    assert said in str(result.result_details)
    assert "image" not in demo_service.parameter_output_values


def test_a_handle_without_loras_asks_nobody(nowhere: Headless) -> None:
    model = nowhere.do(nowhere.node("DiffusionModel", loras=""))
    assert nowhere.do(nowhere.run()).succeeded()
    assert model.parameter_output_values["model_handle"]["loras"] == []
    assert model.parameter_output_values["lora_report"] == ""


def test_a_lora_without_a_service_says_how_to_start_one(nowhere: Headless) -> None:
    nowhere.do(nowhere.node("DiffusionModel", lora="oil"))
    result = nowhere.do(nowhere.run())
    assert result.failed()
    assert "moored serve" in str(result.result_details)


def test_the_button_brings_the_loras(
    simulate: Callable[..., moored.Client], nowhere: Headless, tmp_path: Path
) -> None:
    from griptape_nodes.traits.options import Options

    for name in ("ink", "styles/oil"):
        instant_adapter(tmp_path / "loras", name, 1 << 20)
    folders = f"models.adapters={json.dumps([str(tmp_path / 'loras')])}"
    node = nowhere.do(nowhere.node("DiffusionModel"))
    with simulate("sim:40GiB", "--set", folders) as client:
        listed = [one.id for one in client.list_adapters()]

        async def ask() -> str:
            return str(await asyncio.wait_for(node._loras.ask(), 30))

        assert nowhere.do(ask()) == f"{len(listed)} found"
    (options,) = node.get_parameter_by_name("lora").find_elements_by_type(Options)
    assert list(options.choices) == ["none", *listed]
    assert {"ink", "styles/oil"} <= {*listed}


def test_a_handle_says_the_same_when_it_is_read_again(nowhere: Headless) -> None:
    from moored_griptape.model_handle import ModelHandle

    loras = [
        {"id": "ink", "strength": 0.5, "text_strength": 0.0, "ignore_unknown": True},
        {"id": "oil", "curve": [[0.0, 1.0], [1.0, 0.0]]},
        {"id": "wax", "strength": 1.0},
    ]
    handle = ModelHandle.parse({"loras": loras})
    assert handle.as_json()["loras"] == loras
    assert ModelHandle.parse(json.dumps(handle.as_json())) == handle
