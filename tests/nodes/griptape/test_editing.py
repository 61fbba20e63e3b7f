"""Masks, reference pictures and ControlNets, on the real service."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moored
import pytest
from headless import Headless
from PIL import Image
from tiny_models import FIXTURES, picture_models

from service import Service

PROMPT = "a large red circle in the centre on a black background"
QUICK: dict[str, Any] = {"seed": 7, "steps": 2, "width": 64, "height": 64}


@pytest.fixture(scope="module")
def editing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the tiny models of pictures, and two ControlNets."""
    models, nets = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("nets")
    picture_models(models)
    for name in ("single", "union"):
        shutil.copytree(FIXTURES / "flux-controlnet-tiny" / name, nets / name)
    arguments = ("--models", str(models), "--set", f"models.adapters={json.dumps([str(nets)])}")
    service = Service(*arguments, state=tmp_path_factory.mktemp("editing"))
    service.client().close()
    yield service
    assert service.stop() == 0


@pytest.fixture
def engine_with(nowhere: Headless, editing: Service) -> Headless:
    """The engine with a fresh workflow, speaking to `editing`."""
    nowhere.do(nowhere.settings(endpoint=editing.address))
    return nowhere


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A picture: a gradient."""
    path = tmp_path / "start.png"
    Image.merge("RGB", [Image.linear_gradient("L").resize((64, 64))] * 3).save(path)
    return path


@pytest.fixture
def mask(tmp_path: Path) -> Path:
    """A mask by which the left half changes."""
    path = tmp_path / "mask.png"
    image = Image.new("L", (64, 64), 0)
    image.paste(255, (0, 0, 32, 64))
    image.save(path)
    return path


def picture(node: Any) -> Image.Image:
    """The picture that a node gave."""
    from griptape_nodes.files.file import File

    data = File(node.parameter_output_values["image"].value).read_bytes()
    return Image.open(io.BytesIO(data)).convert("RGB")


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.tobytes() == other.convert("RGB").tobytes()


def test_a_mask_keeps_what_is_black(
    engine_with: Headless, editing: Service, start: Path, mask: Path
) -> None:
    values = {"input_image": str(start), "mask": str(mask), "seed": 7, "steps": 2}
    node = engine_with.do(engine_with.node("EditImage", prompt=PROMPT, strength=0.9, **values))
    result = engine_with.do(engine_with.run())
    assert result.succeeded(), result.result_details
    with editing.client() as client:
        own = client.generate_image(
            PROMPT, init_image=start, mask=mask, strength=0.9, seed=7, steps=2
        )
    assert same(picture(node), own.image)
    right = (32, 0, 64, 64)
    assert same(picture(node).crop(right), Image.open(start).crop(right))


def test_a_reference_is_what_kontext_edits(
    engine_with: Headless, editing: Service, start: Path
) -> None:
    values = {"model": "kontext", "reference_image": str(start), **QUICK, "steps": 1}
    node = engine_with.do(engine_with.node("GenerateImage", prompt=PROMPT, **values))
    result = engine_with.do(engine_with.run())
    assert result.succeeded(), result.result_details
    options = {"model": "kontext", **QUICK, "steps": 1}
    with editing.client() as client:
        own = client.generate_image(PROMPT, references=[start], **options)
        assert not same(client.generate_image(PROMPT, **options).image, own.image)
    assert same(picture(node), own.image)


async def add_references(engine: Headless, node: Any, *pictures: Any) -> list[str]:
    """Adds items to a node's list, as the editor does; their names."""
    from griptape_nodes.retained_mode.events.parameter_events import AddParameterToNodeRequest

    request = AddParameterToNodeRequest(
        node_name=node.name, parent_container_name="reference_images"
    )
    names = [(await engine.ask(request)).parameter_name for _ in pictures]
    await engine.set(node, **dict(zip(names, pictures, strict=True)))
    return names


def test_further_references_follow_the_first_in_their_order(
    engine_with: Headless, editing: Service, start: Path, mask: Path
) -> None:
    options = {"model": "klein", **QUICK, "steps": 1}
    values = {"reference_image": str(start), **options}
    node = engine_with.do(engine_with.node("GenerateImage", prompt=PROMPT, **values))
    artifact = {"type": "ImageUrlArtifact", "value": str(start)}
    engine_with.do(add_references(engine_with, node, str(mask), artifact))
    result = engine_with.do(engine_with.run())
    assert result.succeeded(), result.result_details
    with editing.client() as client:
        own = client.generate_image(PROMPT, references=[start, mask, start], **options).image
        turned = client.generate_image(PROMPT, references=[start, start, mask], **options).image
    assert same(picture(node), own)
    assert not same(own, turned), "order counts"


def test_a_further_reference_comes_from_another_node(
    engine_with: Headless, editing: Service
) -> None:
    options = {"model": "klein", **QUICK, "steps": 1}
    first = engine_with.do(engine_with.node("GenerateImage", prompt=PROMPT, **options))
    node = engine_with.do(engine_with.node("GenerateImage", prompt=PROMPT, **options))
    (name,) = engine_with.do(add_references(engine_with, node, None))
    engine_with.do(engine_with.connect(first, "image", node, name))
    result = engine_with.do(engine_with.run())
    assert result.succeeded(), result.result_details
    with editing.client() as client:
        own = client.generate_image(PROMPT, references=[picture(first)], **options).image
    assert same(picture(node), own)


def test_further_references_are_refused_by_a_model_that_takes_one(
    engine_with: Headless, editing: Service, start: Path
) -> None:
    values = {"model": "kontext", "reference_image": str(start), **QUICK}
    node = engine_with.do(engine_with.node("GenerateImage", prompt=PROMPT, **values))
    engine_with.do(add_references(engine_with, node, str(start)))
    assert engine_with.do(engine_with.run()).failed()
    said = str(node.parameter_output_values["result_details"])
    assert "the reference images are 2; this model takes 1" in said


@pytest.mark.parametrize(
    ("controls", "own"),
    [
        ("single", [("single", {})]),
        ("single:0.5", [("single", {"scale": 0.5})]),
        ([{"id": "union", "mode": 2, "end": 0.5}], [("union", {"mode": 2, "end": 0.5})]),
        (
            '["single", {"id": "union", "mode": "1", "start": 0.25}]',
            [("single", {}), ("union", {"mode": 1, "start": 0.25})],
        ),
    ],
)
def test_control_nets_are_the_clients_own(
    engine_with: Headless,
    editing: Service,
    start: Path,
    controls: Any,
    own: list[tuple[str, dict[str, Any]]],
) -> None:
    values = {"model": "plain", "controls": controls, "control_image": str(start), **QUICK}
    node = engine_with.do(engine_with.node("GenerateImage", prompt=PROMPT, **values))
    result = engine_with.do(engine_with.run())
    assert result.succeeded(), result.result_details
    asked = [moored.Control(name, start, **more) for name, more in own]
    with editing.client() as client:
        expected = client.generate_image(PROMPT, model="plain", controls=asked, **QUICK).image
    assert same(picture(node), expected)


def test_a_control_net_may_have_a_picture_of_its_own(
    engine_with: Headless, editing: Service, start: Path
) -> None:
    controls = [{"id": "single", "image": {"type": "ImageUrlArtifact", "value": str(start)}}]
    node = engine_with.do(
        engine_with.node("GenerateImage", prompt=PROMPT, model="plain", controls=controls, **QUICK)
    )
    result = engine_with.do(engine_with.run())
    assert result.succeeded(), result.result_details
    asked = [moored.Control("single", start)]
    with editing.client() as client:
        expected = client.generate_image(PROMPT, model="plain", controls=asked, **QUICK).image
    assert same(picture(node), expected)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"controls": "single", "control_image": None}, "single has no picture to read"),
        ({"controls": "gone"}, '"gone" is not there'),
        ({"controls": "union"}, "whose modes are 0 to 3"),
        ({"controls": "single:much"}, "scale of single is a number"),
        ({"controls": [{"id": "union", "mode": 0.5}]}, "mode of union is a whole number"),
        ({"controls": [{"id": "single", "weight": 1}]}, "A ControlNet has no weight"),
        ({"controls": [{"name": "single"}]}, "is no ControlNet"),
        ({"controls": "[1"}, "controls is no JSON list"),
        ({"reference": True}, "name a model that takes them"),
    ],
)
def test_an_unusable_input_is_reported_in_a_sentence(
    engine_with: Headless, start: Path, values: dict[str, Any], said: str
) -> None:
    values = {"model": "plain", "control_image": str(start), **QUICK} | values
    if values.pop("reference", False):
        values["reference_image"] = str(start)
    node = engine_with.do(engine_with.node("GenerateImage", prompt=PROMPT, **values))
    assert engine_with.do(engine_with.run()).failed()
    assert said in str(node.parameter_output_values["result_details"])
    assert "image" not in node.parameter_output_values


def test_a_model_with_several_samplers_takes_the_one_that_is_chosen(
    engine_with: Headless, editing: Service
) -> None:
    model = engine_with.do(engine_with.node("DiffusionModel", model="sdxl"))
    values = QUICK | {"prompt": PROMPT, "sampler": "euler_ancestral"}
    node = engine_with.do(engine_with.node("GenerateImage", **values))
    engine_with.do(engine_with.connect(model, "model_handle", node, "model"))
    shown = []
    with editing.client() as client:
        for name in ("euler_ancestral", "default"):
            engine_with.do(engine_with.set(node, sampler=name))
            result = engine_with.do(engine_with.run())
            assert result.succeeded(), result.result_details
            shown.append(picture(node))
            sampler: Any = None if name == "default" else name
            own = client.generate_image(PROMPT, model="sdxl", sampler=sampler, **QUICK)
            assert shown[-1].tobytes() == own.image.convert("RGB").tobytes()
    assert shown[0].tobytes() != shown[1].tobytes()
    engine_with.do(engine_with.set(model, model="plain"))
    engine_with.do(engine_with.set(node, sampler="euler"))
    assert engine_with.do(engine_with.run()).failed()
    assert "sampler is not taken" in node.parameter_output_values["result_details"]
