"""Options as fields of a form, as frontends ask for them."""

from __future__ import annotations

import typing
from typing import Any

import pytest

import moored
from moored._generated import generation_pb2

KINDS: dict[type, str] = {str: "text", int: "whole", float: "number", bool: "truth"}
ENUMS = ("output", "task", "sampler")
OTHERWISE = ("prompt", "window_start_seconds", "window_end_seconds", "beats_per_minute")


def fields(options: type) -> dict[str, moored.OptionField]:
    return {field.option: field for field in moored.option_fields(options)}


@pytest.mark.parametrize(
    ("options", "request_"),
    [
        (moored.ImageOptions, generation_pb2.GenerateImageRequest),
        (moored.VideoOptions, generation_pb2.GenerateVideoRequest),
        (moored.AudioOptions, generation_pb2.GenerateAudioRequest),
    ],
)
def test_every_plain_field_of_a_request_is_a_form_field(options: type, request_: Any) -> None:
    kinds = {name: type(getattr(request_(), name)) for name in request_.DESCRIPTOR.fields_by_name}
    expected = {
        name: KINDS[kind]
        for name, kind in kinds.items()
        if kind in KINDS and not name.endswith(("_id", "_ms")) and name not in ENUMS + OTHERWISE
    }
    found = {name: field.kind for name, field in fields(options).items()}
    assert expected.items() <= found.items()


def test_a_field_has_its_words_and_its_range() -> None:
    found = fields(moored.ImageOptions)
    assert found["steps"] == moored.OptionField(
        "steps", "whole", "Denoising steps, 1 to 200.", 1, 200
    )
    assert (found["guidance"].least, found["guidance"].most) == (0, 1000)
    assert "true_guidance" in found["negative_prompt"].words
    assert {"prompt", "model", "mask", "references", "init_latent"}.isdisjoint(found)


def test_a_choice_has_its_names_and_one_for_the_model() -> None:
    sampler = fields(moored.ImageOptions)["sampler"]
    assert (sampler.kind, sampler.left_open) == ("choice", "default")
    assert sampler.names == typing.get_args(moored.Sampler)
    assert sampler.left_open not in sampler.names
    assert "sampler" not in fields(moored.VideoOptions)


def test_forms_ask_in_one_way_for_how_a_result_is_sampled() -> None:
    sampling = {"steps", "guidance", "max_sequence_length"}
    sampling |= {"negative_prompt", "true_guidance", "step_cache"}
    others = {"seed", "count", "strength", "width", "frames", "lyrics", "bpm", "card"}
    others |= {"output", "priority", "task"}
    for options in (moored.ImageOptions, moored.VideoOptions, moored.AudioOptions):
        found = {field.option for field in moored.sampling_fields(options)}
        assert sampling <= found
        assert not others & found
    images = {field.option for field in moored.sampling_fields(moored.ImageOptions)}
    assert images == sampling | {"sampler", "fp8_attention"}
    films = {field.option for field in moored.sampling_fields(moored.VideoOptions)}
    assert films == sampling | {"fp8_attention", "cards"}
    cards = fields(moored.VideoOptions)["cards"]
    assert (cards.kind, cards.least, cards.most, cards.left_open) == ("whole", 1, 2, 0)
    tooltip = fields(moored.ImageOptions)["true_guidance"].tooltip
    assert "negative_prompt" in tooltip
    assert not {"`", "Default"} & {*tooltip, *tooltip.split()}


@pytest.mark.parametrize(
    ("values", "asked"),
    [
        ({"steps": 0, "guidance": -1.0, "negative_prompt": "", "true_guidance": -1}, {}),
        ({"steps": None, "guidance": "", "negative_prompt": " \n", "true_guidance": None}, {}),
        ({"guidance": 0.0, "keep_latent": False}, {"guidance": 0.0}),
        ({"steps": 4, "keep_latent": True, "node": 7}, {"steps": 4, "keep_latent": True}),
        ({"sampler": "default"}, {}),
        ({"sampler": ""}, {}),
        ({"sampler": "euler_ancestral"}, {"sampler": "euler_ancestral"}),
        ({"negative_prompt": "blurred"}, {"negative_prompt": "blurred"}),
        ({"true_guidance": 4.0}, {"true_guidance": 4.0, "negative_prompt": ""}),
        ({"true_guidance": 1.0}, {"true_guidance": 1.0}),
        (
            {"true_guidance": 4.0, "negative_prompt": "a dog"},
            {"true_guidance": 4.0, "negative_prompt": "a dog"},
        ),
    ],
)
def test_empty_form_fields_are_not_sent(values: dict[str, Any], asked: dict[str, Any]) -> None:
    assert moored.asked_options(moored.ImageOptions, values) == asked
