"""Masks, references and ControlNets: how they are asked for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from conftest import Ask
from scripted import Service, accepted, done

import moored
from moored._generated import generation_pb2

UPLOADED = moored.MediaInfo("media-1", "image/png", 100, 1000)
BROUGHT = generation_pb2.PictureInput(media_id="media-1")


def asked_for(service: Service, ask: Ask, **options: Any) -> generation_pb2.GenerateImageRequest:
    """The request with these options."""
    service.on("GenerateImage", [accepted(), done()])
    ask("generate_image", "x", **options)
    return service.requests["GenerateImage"]


def test_a_picture_is_bytes_a_path_a_pil_image_or_uploaded(
    service: Service, ask: Ask, png: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "in.png"
    path.write_bytes(png)
    for given in (png, bytearray(png), memoryview(png), path, str(path)):
        control = moored.Control("edges", given)
        request = asked_for(service, ask, mask=given, references=[given], controls=[control])
        message = generation_pb2.PictureInput(data=png)
        assert request.mask == message
        assert list(request.references) == [message]
        assert list(request.controls) == [generation_pb2.Control(id="edges", image=message)]
    control = moored.Control("edges", UPLOADED)
    request = asked_for(service, ask, mask=UPLOADED, references=(UPLOADED,), controls=(control,))
    assert [request.mask, *request.references, request.controls[0].image] == [BROUGHT] * 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "F"])
def test_a_mask_of_any_mode_is_sent_with_its_pixels(service: Service, ask: Ask, mode: str) -> None:
    image = pytest.importorskip("PIL.Image")
    grey = image.new("L", (4, 2), 255)
    grey.putpixel((1, 1), 0)
    mask = grey.convert("L" if mode == "PA" else mode)
    if mode in ("LA", "RGBA"):
        mask.putalpha(0)
    elif mode == "PA":
        mask = mask.convert("P").convert("PA")
    sent = image.open(io.BytesIO(asked_for(service, ask, mask=mask).mask.data))
    assert sent.format == "PNG"
    assert sent.convert("RGB").convert("L").tobytes() == grey.tobytes(), "as in a file of it"


def test_a_mask_of_16_bits_is_not_cut(service: Service, ask: Ask) -> None:
    image = pytest.importorskip("PIL.Image")
    mask = image.new("I;16", (4, 2), 30_000)
    sent = image.open(io.BytesIO(asked_for(service, ask, mask=mask).mask.data))
    assert sent.getpixel((0, 0)) == 30_000


def test_references_and_control_pictures_keep_their_colours(service: Service, ask: Ask) -> None:
    image = pytest.importorskip("PIL.Image")
    red = image.new("RGB", (4, 2), (200, 10, 30))
    request = asked_for(service, ask, references=[red], controls=[moored.Control("edges", red)])
    for given in (request.references[0], request.controls[0].image):
        assert image.open(io.BytesIO(given.data)).getpixel((3, 1)) == (200, 10, 30)


def test_unset_options_of_a_control_are_not_sent(service: Service, ask: Ask) -> None:
    controls = [moored.Control("edges", b"a"), moored.Control("depth", b"b", 0, 0, 0, 0)]
    edges, depth = asked_for(service, ask, controls=controls).controls
    for name in ("scale", "start", "end", "mode"):
        assert not edges.HasField(name)
        assert depth.HasField(name)


@pytest.mark.parametrize("none", [None, [], ()])
def test_an_empty_list_of_pictures_leaves_the_fields_unset(
    service: Service, ask: Ask, none: Any
) -> None:
    request = asked_for(service, ask, mask=None, references=none, controls=none)
    assert not request.HasField("mask")
    assert not request.references
    assert not request.controls


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mask": 3}, "mask: bytes, a path, .* is wanted, not a int"),
        ({"mask": [b"a"]}, "mask: bytes, .* not a list"),
        ({"references": b"a"}, "references: a list of pictures is wanted, not a bytes"),
        ({"references": "a.png"}, "references: a list of pictures is wanted, not a str"),
        ({"references": UPLOADED}, "references: a list of pictures is wanted, not a MediaInfo"),
        ({"references": [b"a", 3]}, r"references\[1\]: bytes, .* is wanted, not a int"),
        ({"controls": moored.Control("a", b"a")}, "controls: a list of Control is wanted"),
        ({"controls": [("a", b"a")]}, r"controls\[0\]: a Control is wanted, not a tuple"),
        ({"controls": [moored.Control("a", 3)]}, r"controls\[0\].image: bytes"),  # type: ignore[arg-type]
        (
            {"controls": [moored.Control("a", b"a"), moored.Control("a", b"a", "much")]},  # type: ignore[arg-type]
            r"controls\[1\].scale: a number is wanted, not 'much'",
        ),
        ({"controls": [moored.Control(7, b"a")]}, r"controls\[0\].id: a str is wanted"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_is_refused_by_option_and_index(
    ask: Ask, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        ask("generate_image", "x", **wrong)


def test_a_mode_that_no_field_can_hold_is_refused_by_its_place(ask: Ask) -> None:
    with pytest.raises(moored.InvalidRequest) as refused:
        ask("generate_image", "x", controls=[moored.Control("a", b"a", mode=-1)])
    assert [one.field for one in refused.value.violations] == ["controls[0].mode"]


def test_a_picture_that_is_not_there_is_reported_before_the_call(ask: Ask, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        ask("generate_image", "x", mask=tmp_path / "none.png")


def test_video_and_audio_have_no_editing_options(ask: Ask) -> None:
    for method in ("generate_video", "generate_audio"):
        for option in ("mask", "references", "controls"):
            with pytest.raises(TypeError, match=f"no option '{option}'"):
                ask(method, "x", **{option: []})


def test_a_control_can_be_shown_and_be_a_key() -> None:
    control = moored.Control("edges", b"a" * 1000, 0.5)
    assert "aaa" not in repr(control)
    assert {control: 1}[control] == 1
