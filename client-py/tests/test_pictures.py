"""Pictures of every kind reach the service with the pixels that a file of them has."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Ask
from scripted import Service, accepted, done, pieces

import moored
from moored._pictures import picture_bytes

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

MODES = [
    "1",
    "L",
    "LA",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBX",
    "CMYK",
    "YCbCr",
    "HSV",
    "LAB",
    "I",
    "I;16",
    "F",
]


def sent(service: Service, ask: Ask, picture: Any) -> Any:
    service.on("GenerateImage", [accepted(), done()])
    ask("generate_image", "x", init_image=picture, references=[picture], mask=picture)
    request = service.requests["GenerateImage"]
    assert request.references[0].data == request.mask.data == request.init_image
    return Image.open(io.BytesIO(request.init_image))


def drawn() -> Any:
    image = Image.new("RGB", (6, 4), (250, 250, 250))
    image.putpixel((0, 0), (0, 0, 0))
    return image


@pytest.mark.parametrize("mode", MODES)
def test_a_pil_image_of_any_mode(service: Service, ask: Ask, mode: str) -> None:
    if mode == "LAB":
        from PIL import ImageCms

        profiles = (ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"))
        image = ImageCms.profileToProfile(drawn(), *profiles, outputMode="LAB")
    elif mode.startswith("I"):
        grey = np.asarray(drawn().convert("L")).astype("uint16") * 257
        image = Image.fromarray(grey if mode == "I;16" else grey.astype("int32"))
        assert image.mode == mode
    elif mode == "PA":
        image = drawn().convert("P").convert("PA")
    else:
        image = drawn().convert("L").convert(mode) if mode in ("LA", "F") else drawn().convert(mode)
    seen = sent(service, ask, image)
    pixels = np.asarray(seen).astype("f8") / (257 if seen.mode.startswith("I") else 1)
    if seen.mode in ("1", "P", "RGBA", "LA"):
        pixels = np.asarray(seen.convert("RGB")).astype("f8")
    like = image if mode in ("1", "P", "PA") else drawn()
    expected = np.asarray(like.convert("RGB").convert("L")).astype("f8")
    found = pixels if pixels.ndim == 2 else pixels[:, :, 0]
    assert np.abs(found - expected).max() <= 2


def test_a_turned_picture_is_upright(service: Service, ask: Ask, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    drawn().save(tmp_path / "turned.png", exif=exif)
    seen = sent(service, ask, Image.open(tmp_path / "turned.png"))
    assert seen.size == (4, 6)
    assert seen.getpixel((3, 0)) == (0, 0, 0)
    assert not seen.getexif().get(0x0112)


@pytest.mark.parametrize(
    ("array", "mode"),
    [
        (np.full((4, 6), 250, "uint8"), "L"),
        (np.full((4, 6, 1), 250, "uint8"), "L"),
        (np.full((4, 6, 3), 250, "uint8"), "RGB"),
        (np.full((4, 6, 4), 250, "uint8"), "RGBA"),
        (np.full((4, 6, 3), 250 / 255, "float32"), "RGB"),
        (np.full((4, 6, 3), 250 * 257, "uint16"), "RGB"),
        (np.full((4, 6), True), "L"),
    ],
)
def test_an_array(service: Service, ask: Ask, array: Any, mode: str) -> None:
    seen = sent(service, ask, array)
    first = np.asarray(seen).ravel()[0]
    assert (seen.mode, seen.size, first) == (mode, (6, 4), 255 if array.dtype == "bool" else 250)


def test_16_bits_of_grey_are_kept(service: Service, ask: Ask) -> None:
    seen = sent(service, ask, np.full((4, 6), 12_345, "uint16"))
    assert np.asarray(seen).ravel()[0] == 12_345


def test_a_result_starts_another(service: Service, ask: Ask, png: bytes) -> None:
    service.on("GenerateImage", [accepted(), *pieces(png), done()])
    result = ask("generate_image", "x")
    assert result.data == png
    for given in (result, result.pictures[0], result.image):
        assert sent(service, ask, given).convert("RGB").tobytes() == result.image.tobytes()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (7, "a path, a PIL image, an array or a result"),
        (np.zeros((3, 4, 6), "float32") + 2, "transpose"),
        (np.zeros((4, 6, 3)) - 1, "0 to 1 is read"),
        (np.full((4, 6, 3), np.nan), "NaN"),
        (np.zeros((4, 6), "int64"), "astype"),
        (np.zeros((1, 4, 6, 3)), r"array\[0\]"),
        (b"", "is empty: it has 0 bytes"),
        (bytearray(), "is empty"),
    ],
)
def test_what_is_no_picture_is_refused_by_its_name(ask: Ask, given: Any, why: str) -> None:
    for option, value in (("init_image", given), ("mask", given), ("references", [given])):
        with pytest.raises((TypeError, ValueError, moored.InvalidRequest), match=why) as told:
            ask("generate_image", "x", **{option: value})
        assert str(told.value).startswith(option)
    with pytest.raises((TypeError, ValueError, moored.InvalidRequest), match=why):
        ask("encode_image", given)


def test_an_empty_file_is_refused(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "zero.png").touch()
    for call, given in (
        ("generate_image", {"init_image": tmp_path / "zero.png"}),
        ("generate_video", {"init_image": str(tmp_path / "zero.png")}),
    ):
        with pytest.raises(moored.InvalidRequest, match=r"init_image: .*zero.png is empty"):
            ask(call, "x", **given)
    with pytest.raises(moored.InvalidRequest, match=r"zero.png is empty"):
        ask("put_media", tmp_path / "zero.png")


def test_0_is_not_taken_for_the_default(ask: Ask) -> None:
    for option in ("steps", "count", "width"):
        with pytest.raises(moored.InvalidRequest, match=f"{option} is 0"):
            ask("generate_image", "x", **{option: 0})


@pytest.mark.parametrize("name", ["/dev/zero", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="no regular file"):
        picture_bytes(tmp_path / name, "init_image")
    with pytest.raises(OSError, match="no regular file"):
        moored.read_recipe(tmp_path / name)


def test_the_recipe_of_a_damaged_picture_is_refused(tmp_path: Path, png: bytes) -> None:
    for name, data in {"cut": png[: len(png) // 2], "text": b"no picture", "empty": b""}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(moored.InvalidRequest, match=rf"path: .*{name} is no picture"):
            moored.read_recipe(tmp_path / name)
