"""What Generate Image and Edit Image share: their settings, and where pictures go."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import moored
from griptape.artifacts import ImageUrlArtifact
from griptape_nodes.exe_types.core_types import Parameter
from griptape_nodes.exe_types.param_components.project_file_parameter import ProjectFileParameter
from griptape_nodes.exe_types.param_components.seed_parameter import SeedParameter
from griptape_nodes.exe_types.param_types.parameter_bool import ParameterBool
from griptape_nodes.exe_types.param_types.parameter_image import ParameterImage
from griptape_nodes.exe_types.param_types.parameter_int import ParameterInt
from griptape_nodes.exe_types.param_types.parameter_string import ParameterString
from griptape_nodes.retained_mode.events.os_events import ExistingFilePolicy
from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

from moored_griptape.numbers import number_or_none
from moored_griptape.run_node import RunNode

PREVIEW_INTERVAL_S = 0.5

# The first artifact that is serialized imports much of griptape, for half a second: while the library
# loads, and not on the engine's loop in the middle of a run.
ImageUrlArtifact("").to_dict()


class PictureNode(RunNode):
    """A node that gives a picture, as a file of the project."""

    size_tooltip = "0: the model's own"

    def _add_inputs(self) -> None:
        self.add_parameter(
            ParameterString(
                name="prompt",
                tooltip="What to paint.",
                default_value="",
                multiline=True,
                placeholder_text="a red cube on a blue plane",
            )
        )
        self._add_picture_inputs()
        for side in ("width", "height"):
            self.add_parameter(
                ParameterInt(
                    name=side,
                    tooltip=f"Pixels, a multiple of 16. {self.size_tooltip}.",
                    default_value=0,
                )
            )
        self.add_parameter(
            ParameterInt(name="steps", tooltip="1 to 200. 0: the model's own.", default_value=0)
        )
        self.add_parameter(
            # No ParameterFloat: that makes 0 of a field that was emptied, which is another picture.
            Parameter(
                name="guidance",
                tooltip="Empty: the model's own.",
                type="float",
                input_types=["any"],
                output_type="float",
                default_value=None,
            )
        )
        self._seed = SeedParameter(self)
        self._seed.add_input_parameters()
        self.add_parameter(
            ParameterBool(
                name="previews",
                tooltip="Show what the picture looks like while it is painted.",
                default_value=True,
            )
        )
        self._file = ProjectFileParameter(self, "output_file", default_filename="picture.png")
        self._file.add_parameter()

    def _add_picture_inputs(self) -> None:
        """Adds what is between the prompt and the size."""

    def _add_outputs(self) -> None:
        self.add_parameter(
            ParameterImage(
                name="image",
                tooltip="The picture, a file of the project.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )
        self.add_parameter(
            ParameterImage(
                name="preview",
                tooltip="What the picture looks like so far.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )

    def after_value_set(self, parameter: Parameter, value: Any) -> None:
        """A random seed is none to type in."""
        self._seed.after_value_set(parameter, value)
        super().after_value_set(parameter, value)

    async def _picture_options(self) -> moored.ImageOptions:
        """What is particular to the node's kind of picture."""
        return moored.ImageOptions()

    async def _run(self, client: moored.AsyncClient) -> str:
        handle, constraints = self._handle, self._constraints
        prompt = str(self.get_parameter_value("prompt") or "").strip()
        if not prompt:
            raise ValueError("There is no prompt: say what to paint")
        self._seed.preprocess()
        options = moored.ImageOptions(
            model=handle.ref,
            width=self._whole("width"),
            height=self._whole("height"),
            steps=self._whole("steps"),
            guidance=number_or_none(self.get_parameter_value("guidance"), "guidance"),
            seed=_unsigned(self._seed.get_seed(), "seed", bits=64),
        )
        options.update(constraints.image_options)
        options.update(await self._picture_options())

        async def paint() -> moored.ImageResult:
            await constraints.check(client, handle, prompt, options, self._shown.line)
            if self.get_parameter_value("previews"):
                options["preview_interval_s"] = PREVIEW_INTERVAL_S
            return await self._follow(client.stream_image(prompt, **options))

        result = await self._with_model(client, handle, paint)
        self._shown.done(result)
        image = await asyncio.to_thread(self._saved, result.pictures[0].data)
        self.parameter_output_values["image"] = image
        return (
            f"Painted with {result.model.key}, seed {result.seed}, in "
            f"{result.total_ms / 1000:.1f} s: {Path(image.value).name}"
        )

    def _whole(self, name: str) -> int | None:
        """A number that 0 leaves to the model."""
        return _unsigned(int(self.get_parameter_value(name) or 0), name, bits=32) or None

    def _saved(self, data: bytes) -> ImageUrlArtifact:
        """The picture as a file, by the project's rules. Blocks: run it in a thread."""
        return ImageUrlArtifact(self._file.build_file().write_bytes(data).location)

    async def _show_preview(self, preview: moored.Preview) -> None:
        artifact = await asyncio.to_thread(self._saved_preview, preview.jpeg)
        self.publish_update_to_parameter("preview", artifact)

    def _saved_preview(self, jpeg: bytes) -> ImageUrlArtifact:
        """The preview as a file, always over the last one. Blocks: run it in a thread."""
        name = re.sub(r"\W+", "_", self.name)
        return ImageUrlArtifact(
            GriptapeNodes.StaticFilesManager().save_static_file(
                jpeg,
                f"{name}_preview.jpg",
                ExistingFilePolicy.OVERWRITE,
                skip_metadata_injection=True,
            )
        )


def _unsigned(value: int, name: str, bits: int) -> int:
    """What can be said to the service at all; its own limits it tells itself."""
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is 0 or more, and less than 2^{bits}, not {value}")
    return value
