"""Input files of a node: pictures, and ControlNets with the pictures that they read."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from typing import Any

import moored
from griptape_nodes.files.file import File
from PIL import ExifTags, Image, UnidentifiedImageError

from moored_griptape.numbers import listed, number_or_none

# Orientations of a camera that was turned by a quarter.
_LYING = (5, 6, 7, 8)
_CONTROL_KEYS = ("id", "image", "scale", "start", "end", "mode")


def file_data(given: Any) -> bytes:
    """The bytes of an artifact, or of a file by its path or URL. Blocks."""
    value = given.get("value") if isinstance(given, Mapping) else getattr(given, "value", given)
    if isinstance(value, bytes):
        return value
    path = str(value)
    # The engine would say what Python says of a NUL, or of half of a character, and not of which file.
    if not is_name_of_a_file(path):
        raise ValueError(f"There is no file {path!r}: choose another one")
    return File(path).read_bytes()


def is_name_of_a_file(path: str) -> bool:
    """Whether a file can have it as its path."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def sized_picture(given: Any, name: str) -> tuple[bytes, tuple[int, int]]:
    """The bytes of an artifact or a path, and the picture's width and height. Blocks.

    `name` is for messages: the field.
    """
    data = file_data(given)
    try:
        picture = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise ValueError(f"The {name} is no picture: give a PNG, JPEG or WebP") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"The {name} is too large to be read: give a smaller one") from error
    width, height = picture.size
    return data, (height, width) if _turned(picture) else (width, height)


def _turned(picture: Image.Image) -> bool:
    """Whether the service, which turns a picture as its camera says, makes its width its height."""
    exif = Image.Exif()
    # Not `getexif`, which decodes all of a PNG; and what is broken turns nothing.
    with contextlib.suppress(Exception):
        exif.load(picture.info.get("exif"))
    return exif.get(ExifTags.Base.Orientation) in _LYING


def parse_controls(value: object, picture: Any) -> tuple[moored.Control, ...]:
    """ControlNets: names, also as `NAME:SCALE`, objects, or a JSON list of them. Blocks.

    `picture` is what those read that name no `image`.
    """
    return tuple(_control(one, picture) for one in listed(value, "controls", "`id`"))


def _control(value: object, picture: Any) -> moored.Control:
    match value:
        case str(text):
            name, colon, scale = text.rpartition(":")
            value = {"id": name, "scale": scale} if colon and name.strip() else {"id": text}
        case Mapping() if value.get("id"):
            pass
        case _:
            raise ValueError(f"{value!r} is no ControlNet: give a name, or an object with `id`")
    unknown = sorted(str(key) for key in value if key not in _CONTROL_KEYS)
    if unknown:
        raise ValueError(
            f"A ControlNet has no {', '.join(unknown)}: it has {', '.join(_CONTROL_KEYS)}"
        )
    name = str(value["id"]).strip()
    image = value.get("image") or picture
    if not image:
        raise ValueError(f"{name} has no picture to read: connect or choose a control_image")
    scale, start, end = (
        number_or_none(value.get(key), f"{key} of {name}") for key in ("scale", "start", "end")
    )
    mode = number_or_none(value.get("mode"), f"mode of {name}")
    if mode is not None and (mode < 0 or mode % 1):
        raise ValueError(f"mode of {name} is a whole number from 0, not {value['mode']!r}")
    whole = None if mode is None else int(mode)
    return moored.Control(name, file_data(image), scale, start, end, whole)
