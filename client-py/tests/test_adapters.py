"""Adapters: how they are asked for, listed and told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Ask
from scripted import Service, accepted, done, event, pieces

import moored
from moored._generated import events_pb2, generation_pb2, model_pb2, residency_pb2

INK = model_pb2.Adapter(id="ink")
HALF = model_pb2.Adapter(id="ink", strength=0.5)
CALLS = [
    ("generate_image", "GenerateImage", "image"),
    ("generate_video", "GenerateVideo", "video"),
    ("generate_audio", "GenerateAudio", "audio"),
]


def asked_for(
    service: Service, ask: Ask, method: str = "generate_image", **options: Any
) -> model_pb2.ModelRef | None:
    """The model of a request with these options; None where it names none."""
    call = {name: rpc for name, rpc, _ in CALLS}[method]
    service.on(call, [accepted(), done()])
    ask(method, "x", **options)
    request = service.requests[call]
    return request.model if request.HasField("model") else None


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("ink", INK),
        (("ink", 0.5), HALF),
        (["ink", 0.5], HALF),
        (("ink", 0), model_pb2.Adapter(id="ink", strength=0.0)),
        (moored.Adapter("ink"), INK),
        (moored.Adapter("ink", 0.5), HALF),
        (
            moored.Adapter("ink", -2, text_strength=0, ignore_unknown=True),
            model_pb2.Adapter(id="ink", strength=-2.0, text_strength=0.0, ignore_unknown=True),
        ),
        (
            moored.Adapter("ink", curve=[(0, 1), (1, 0.5)]),
            model_pb2.Adapter(
                id="ink",
                curve=[
                    model_pb2.StrengthPoint(position=0, strength=1),
                    model_pb2.StrengthPoint(position=1, strength=0.5),
                ],
            ),
        ),
        ({"id": "ink", "strength": 0.5}, HALF),
        (
            {"id": "ink", "strength": 1.0, "curve": [[0.0, 1.0]], "text_strength": 0.25},
            model_pb2.Adapter(
                id="ink",
                curve=[model_pb2.StrengthPoint(position=0, strength=1)],
                text_strength=0.25,
            ),
        ),
    ],
)
def test_an_adapter_is_a_name_a_pair_an_adapter_or_that_of_a_recipe(
    service: Service, ask: Ask, adapter: moored.AdapterLike, message: model_pb2.Adapter
) -> None:
    model = asked_for(service, ask, adapters=[adapter])
    assert model == model_pb2.ModelRef(adapters=[message])
    assert model.adapters[0].HasField("strength") == message.HasField("strength")


@pytest.mark.parametrize("method", [method for method, _, _ in CALLS])
def test_adapters_stand_behind_those_of_the_model_in_every_medium(
    service: Service, ask: Ask, method: str
) -> None:
    own = moored.ModelRef("demo", quantization="4-bit", adapters=("oil",))
    for model, there in [(None, []), ("demo", []), (own, ["oil"])]:
        asked = asked_for(service, ask, method, model=model, adapters=["ink", ("wax", 2)])
        assert asked is not None
        assert asked.id == ("demo" if model else "")
        assert [adapter.id for adapter in asked.adapters] == [*there, "ink", "wax"]
    assert asked is not None
    assert asked.quantization.preset == "4-bit"
    assert own.adapters == ("oil",)


@pytest.mark.parametrize("none", [None, [], ()])
def test_no_adapters_leave_the_model_as_it_is(service: Service, ask: Ask, none: Any) -> None:
    assert asked_for(service, ask, adapters=none) is None
    assert asked_for(service, ask, model="demo", adapters=none) == model_pb2.ModelRef(id="demo")


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        ("ink", "adapters: a list is wanted, not 'ink'"),
        (moored.Adapter("ink"), "adapters: a list is wanted"),
        ({"ink": 1}, "adapters: a list is wanted"),
        (7, "adapters: a list is wanted, not 7"),
        (("ink", 0.5), r"adapters\[1\]: a name, .* is wanted, not 0.5"),
        ([("ink",)], r"adapters\[0\]: a name, .* is wanted"),
        ([{"name": "ink"}], r"adapters\[0\]: a name, .* is wanted"),
        (["oil", ("ink", "strong")], r"adapters\[1\].strength: a number is wanted, not 'strong'"),
        ([moored.Adapter(7)], r"adapters\[0\].id: a str is wanted, not 7"),  # type: ignore[arg-type]
        ([moored.Adapter("ink", curve=[1])], r"adapters\[0\].curve: a \(position, strength\)"),  # type: ignore[list-item]
        ([moored.Adapter("ink", curve=[(0, "a")])], r"adapters\[0\].curve: a number is wanted"),  # type: ignore[list-item]
    ],
)
def test_a_wrong_adapter_is_refused_by_its_index(ask: Ask, adapters: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        ask("generate_image", "x", adapters=adapters)


def test_models_with_adapters_are_named_anywhere(service: Service, ask: Ask) -> None:
    service.on("Load", [accepted(), done()])
    ask("load", moored.ModelRef("demo", adapters=("oil", ("ink", 0.5))))
    asked = service.requests["Load"].model.adapters
    assert list(asked) == [model_pb2.Adapter(id="oil"), HALF]


def test_a_model_with_adapters_can_be_a_key_of_a_dict() -> None:
    one = moored.ModelRef("demo", adapters=(moored.Adapter("ink", curve=[(0, 1), (1, 0)]),))
    assert {one: 1}[one] == 1


def test_adapters_are_listed(service: Service, ask: Ask) -> None:
    listed = [model_pb2.AdapterInfo(id="styles/ink", bytes=1000)]
    service.on("ListModels", residency_pb2.ListModelsResponse(adapters=listed))
    assert ask("list_adapters") == (moored.AdapterInfo("styles/ink", 1000),)
    assert ask("list_models") == ()


def test_a_result_says_what_adapters_changed(service: Service, ask: Ask) -> None:
    attached = model_pb2.AttachedAdapter(
        id="ink", layers={"transformer": 304}, rank=16, ignored=["a", "b"], ignored_count=2
    )
    model = model_pb2.ResolvedModel(key="demo+full&ink", adapters=[attached])
    service.on("GenerateImage", [accepted(), event(done=events_pb2.Done(model=model))])
    (told,) = ask("generate_image", "x").model.adapters
    assert told == moored.AttachedAdapter("ink", {"transformer": 304}, 16, ("a", "b"), 2)
    service.on("Plan", residency_pb2.PlanResponse(model=model))
    assert ask("plan", adapters=["ink"]).model.adapters == (told,)
    assert service.requests["Plan"].generate.model.adapters[0].id == "ink"


@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
def test_the_adapters_of_a_saved_picture_make_it_again(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path, ending: str
) -> None:
    adapters = [
        {"id": "styles/ink", "strength": 0.8},
        {"id": "立", "strength": 1.0, "curve": [[0.0, 1.0], [1.0, 0.0]], "text_strength": 0.5},
    ]
    recipe = json.dumps({"prompt": "x", "model": "demo", "adapters": adapters})
    service.on("GenerateImage", [accepted(), *pieces(png, recipe=recipe), done()])
    path = tmp_path / f"cube.{ending}"
    client.generate_image("x").save(path)
    again = moored.read_recipe(path)
    assert again["adapters"] == adapters
    client.generate_image(again["prompt"], model=again["model"], adapters=again["adapters"])
    request: generation_pb2.GenerateImageRequest = service.requests["GenerateImage"]
    ink, other = request.model.adapters
    assert (ink.id, round(ink.strength, 6)) == ("styles/ink", 0.8)
    assert (other.id, len(other.curve), other.HasField("strength")) == ("立", 2, False)
    assert other.text_strength == 0.5
