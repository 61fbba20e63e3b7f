"""The node Edit Image: image to image."""

from __future__ import annotations

import asyncio
import contextlib
import io
from typing import Any

import moored
from griptape_nodes.exe_types.param_types.parameter_float import ParameterFloat
from griptape_nodes.exe_types.param_types.parameter_image import ParameterImage
from PIL import ExifTags, Image, UnidentifiedImageError

from moored_griptape.given_pictures import picture_data
from moored_griptape.numbers import number
from moored_griptape.picture_node import PictureNode

_MULTIPLE = 16
# Orientations of a camera that was turned by a quarter.
_LYING = (5, 6, 7, 8)


class MooredEditImage(PictureNode):
    """Generates a picture from another picture and a prompt."""

    size_tooltip = "0: the picture's own, to the nearest 16"

    def _add_picture_inputs(self) -> None:
        self.add_parameter(
            ParameterImage(
                name="input_image", tooltip="The picture to start from.", allow_output=False
            )
        )
        self.add_parameter(
            ParameterImage(
                name="mask",
                tooltip="What changes of it: white does, black stays exactly. Empty: all of it.",
                allow_output=False,
            )
        )
        self.add_parameter(
            ParameterFloat(
                name="strength",
                tooltip="How strongly to change the picture: more than 0, up to 1. FLUX.1 Fill: 1.",
                default_value=0.6,
            )
        )

    async def _picture_options(self) -> moored.ImageOptions:
        given = self.get_parameter_value("input_image")
        if not given:
            raise ValueError("There is no picture to start from: connect or choose an input_image")
        data, width, height = await asyncio.to_thread(_read, given)
        options = moored.ImageOptions(
            init_image=data, strength=number(self.get_parameter_value("strength"), "strength")
        )
        mask = self.get_parameter_value("mask")
        if mask:
            options["mask"] = await asyncio.to_thread(picture_data, mask)
        options["width"] = self._whole("width") or width
        options["height"] = self._whole("height") or height
        return options


def _read(given: Any) -> tuple[bytes, int, int]:
    """The bytes of an artifact or a path, and its size to the nearest multiple. Blocks."""
    data = picture_data(given)
    try:
        picture = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise ValueError("The input_image is no picture: give a PNG, JPEG or WebP") from error
    except Image.DecompressionBombError as error:
        raise ValueError("The input_image is too large to be read: give a smaller one") from error
    width, height = picture.size
    if _turned(picture):
        width, height = height, width
    return data, _nearest(width), _nearest(height)


def _turned(picture: Image.Image) -> bool:
    """Whether the service, which turns a picture as its camera says, makes its width its height."""
    exif = Image.Exif()
    # Not `getexif`, which decodes all of a PNG; and what is broken turns nothing.
    with contextlib.suppress(Exception):
        exif.load(picture.info.get("exif"))
    return exif.get(ExifTags.Base.Orientation) in _LYING


def _nearest(side: int) -> int:
    return max(_MULTIPLE, round(side / _MULTIPLE) * _MULTIPLE)
