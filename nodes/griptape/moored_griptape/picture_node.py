"""What Generate Image and Edit Image share: their settings, and where pictures go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import moored
from griptape.artifacts import ImageUrlArtifact
from griptape_nodes.exe_types.core_types import Parameter, ParameterList, ParameterMode
from griptape_nodes.exe_types.param_types.parameter_image import ParameterImage
from griptape_nodes.exe_types.param_types.parameter_int import ParameterInt

from moored_griptape.given_pictures import file_data, parse_controls
from moored_griptape.previewing_node import PreviewingNode


class PictureNode(PreviewingNode):
    """A node that gives a picture, as a file of the project."""

    kind_of_options = moored.ImageOptions
    shown = "picture"
    prompt_tooltip = "What the picture shows."
    prompt_example = "a red cube on a blue plane"
    without_prompt = "There is no prompt: say what the picture is to show"
    default_file = "picture.png"
    size_tooltip = "0: the model's default"

    def _add_inputs_of_its_own(self) -> None:
        self._add_picture_inputs()
        self.add_parameter(
            ParameterImage(
                name="reference_image",
                tooltip="A picture that the prompt is about, for FLUX.1 Kontext, Qwen-Image-Edit and FLUX.2 "
                "klein: make it snow.",
                allow_output=False,
            )
        )
        self.add_parameter(
            ParameterList(
                name="reference_images",
                tooltip="Further pictures that the prompt is about, after reference_image in their order. "
                "With that one, FLUX.2 klein takes up to eight, Qwen-Image-Edit (from 2509 on) three, FLUX.1 "
                "Kontext no more than one.",
                type="ImageUrlArtifact",
                input_types=["ImageUrlArtifact", "ImageArtifact", "str"],
                allowed_modes={ParameterMode.INPUT, ParameterMode.PROPERTY},
                ui_options={"clickable_file_browser": True},
            )
        )
        self.add_parameter(
            Parameter(
                name="controls",
                tooltip="ControlNets of the service, at most four: names, NAME:SCALE, or objects with "
                "`id`, `image`, `scale`, `start`, `end` and `mode`.",
                type="list",
                input_types=["list", "json", "str"],
                default_value=None,
            )
        )
        self.add_parameter(
            ParameterImage(
                name="control_image",
                tooltip="What ControlNets read that have no image of their own: edges, depths, a pose.",
                allow_output=False,
            )
        )
        for side in ("width", "height"):
            self.add_parameter(
                ParameterInt(
                    name=side,
                    tooltip=f"Pixels, a multiple of 16. {self.size_tooltip}.",
                    default_value=0,
                )
            )

    def _add_picture_inputs(self) -> None:
        """Adds what is between the prompt and the size."""

    def _add_result(self) -> None:
        self.add_parameter(
            ParameterImage(
                name="image",
                tooltip="The picture, a file of the project.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )

    async def _picture_options(self) -> moored.ImageOptions:
        """What is particular to the node's kind of picture."""
        return moored.ImageOptions()

    async def _run(self, client: moored.AsyncClient) -> str:
        prompt = self._prompt()
        size = {side: self._whole(side) for side in ("width", "height")}
        options: dict[str, Any] = {**self._options(), **size, **await self._picture_options()}
        # Asks the engine for connections, which is done on its own loop.
        further = self.get_parameter_list_value("reference_images")
        options |= await asyncio.to_thread(self._guides, further)

        def begin(whole: dict[str, Any]) -> moored.AsyncEventStream[moored.ImageResult]:
            interval_s = self._preview_interval_s
            return client.stream_image(prompt, preview_interval_s=interval_s, **whole)

        result = await self._made(client, client.plan, options, begin)
        image = await asyncio.to_thread(self._saved, result.pictures[0].data)
        self.parameter_output_values["image"] = image
        return (
            f"Generated with {result.model.key}, seed {result.seed}, in "
            f"{result.total_ms / 1000:.1f} s: {Path(image.value).name}"
        )

    def _guides(self, further: list[Any]) -> moored.ImageOptions:
        """The references, with further ones, and the ControlNets. Blocks: run it in a thread."""
        references = [self.get_parameter_value("reference_image"), *further]
        controls = self.get_parameter_value("controls")
        return moored.ImageOptions(
            references=[file_data(one) for one in references if one] or None,
            controls=parse_controls(controls, self.get_parameter_value("control_image")),
        )

    def _saved(self, data: bytes) -> ImageUrlArtifact:
        """The picture as a file, by the project's rules. Blocks: run it in a thread."""
        return ImageUrlArtifact(self._file.build_file().write_bytes(data).location)
