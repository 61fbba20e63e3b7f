"""What the nodes share that show what comes while it is generated: pictures and films."""

from __future__ import annotations

import asyncio
import re
from typing import ClassVar

import moored
from griptape.artifacts import ImageUrlArtifact
from griptape_nodes.exe_types.param_types.parameter_bool import ParameterBool
from griptape_nodes.exe_types.param_types.parameter_image import ParameterImage
from griptape_nodes.retained_mode.events.os_events import ExistingFilePolicy
from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

from moored_griptape.generating_node import GeneratingNode

PREVIEW_INTERVAL_S = 0.5

# The first artifact that is serialized imports much of griptape, for half a second: while the library
# loads, and not on the engine's loop in the middle of a run.
ImageUrlArtifact("").to_dict()


class PreviewingNode(GeneratingNode):
    """A node that shows previews, as a file that is always written over the last one."""

    shown: ClassVar[str]
    """What the previews are of, in a word."""

    def _add_inputs_before_the_file(self) -> None:
        self.add_parameter(
            ParameterBool(
                name="previews",
                tooltip=f"Show what the {self.shown} looks like while it is generated.",
                default_value=True,
            )
        )

    def _add_outputs(self) -> None:
        self._add_result()
        self.add_parameter(
            ParameterImage(
                name="preview",
                tooltip=f"What the {self.shown} looks like so far.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )

    def _add_result(self) -> None:
        """Adds what the node makes."""
        raise NotImplementedError

    @property
    def _preview_interval_s(self) -> float | None:
        return PREVIEW_INTERVAL_S if self.get_parameter_value("previews") else None

    async def _show_preview(self, preview: moored.Preview) -> None:
        artifact = await asyncio.to_thread(self._saved_preview, preview.jpeg)
        self.publish_update_to_parameter("preview", artifact)

    def _saved_preview(self, jpeg: bytes) -> ImageUrlArtifact:
        return ImageUrlArtifact(self._saved_beside(jpeg, "preview.jpg"))

    def _saved_beside(self, data: bytes, kind: str) -> str:
        """The address of a file of the node, always over the last one. Blocks: run it in a thread."""
        name = re.sub(r"\W+", "_", self.name)
        return GriptapeNodes.StaticFilesManager().save_static_file(
            data,
            f"{name}_{kind}",
            ExistingFilePolicy.OVERWRITE,
            skip_metadata_injection=True,
        )
