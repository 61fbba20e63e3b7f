"""The node Edit Image: image to image."""

from __future__ import annotations

import asyncio

import moored
from griptape_nodes.exe_types.param_types.parameter_float import ParameterFloat
from griptape_nodes.exe_types.param_types.parameter_image import ParameterImage

from moored_griptape.given_pictures import file_data, sized_picture
from moored_griptape.numbers import number
from moored_griptape.picture_node import PictureNode

_MULTIPLE = 16


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
        data, (width, height) = await asyncio.to_thread(sized_picture, given, "input_image")
        options = moored.ImageOptions(
            init_image=data, strength=number(self.get_parameter_value("strength"), "strength")
        )
        mask = self.get_parameter_value("mask")
        if mask:
            options["mask"] = await asyncio.to_thread(file_data, mask)
        options["width"] = self._whole("width") or _nearest(width)
        options["height"] = self._whole("height") or _nearest(height)
        return options


def _nearest(side: int) -> int:
    return max(_MULTIPLE, round(side / _MULTIPLE) * _MULTIPLE)
