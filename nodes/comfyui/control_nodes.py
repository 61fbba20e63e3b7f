"""ControlNets: the node that has a model follow a picture."""

from __future__ import annotations

import contextlib
from typing import Any

import moored
from comfy_api.latest import io

from . import claims, connection, tensors
from .failures import told
from .follow import Deliver, Display, attend
from .handles import ModelHandle, chosen_name
from .schema import CATEGORY, ModelType

STRENGTH_AT_MOST = 10.0
MODES_AT_MOST = 100
NO_MODE = -1


class ApplyControlNet(io.ComfyNode):
    """A model with one more ControlNet, and the picture that it reads."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredApplyControlNet",
            display_name="Apply ControlNet (moored)",
            category=f"{CATEGORY}/model",
            description="Makes pictures follow a control picture (edges, depth, pose). "
            "Chain nodes for several.",
            search_aliases=["controlnet", "canny", "depth", "pose"],
            inputs=[
                ModelType.Input(
                    "model", tooltip="From Load Model, Load LoRA, or another Apply ControlNet."
                ),
                io.Image.Input(
                    "image",
                    tooltip="What it reads, made beforehand: edges, depths, a pose. Of a batch the first.",
                ),
                # The pack's script fills the list, as that of Load LoRA.
                io.Combo.Input(
                    "control_net",
                    options=[],
                    tooltip="The adapters of the service, ControlNets among them.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-STRENGTH_AT_MOST,
                    max=STRENGTH_AT_MOST,
                    step=0.01,
                    tooltip="How strongly the picture follows it. 0: not at all.",
                ),
                _part("start_percent", 0.0, "From which part of the steps on, 0 to 1."),
                _part("end_percent", 1.0, "Up to which part of the steps, 0 to 1."),
                io.Int.Input(
                    "mode",
                    default=NO_MODE,
                    min=NO_MODE,
                    max=MODES_AT_MOST,
                    tooltip="Mode of a union ControlNet, from 0, as its model card lists them. -1: none.",
                ),
                io.String.Input(
                    "other_control_net",
                    default="",
                    placeholder="owner/name",
                    tooltip="A ControlNet that is not in the list. Empty: the one above.",
                    advanced=True,
                ),
            ],
            outputs=[ModelType.Output("model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, control_net: str | None = None) -> bool:
        """Takes any name: which ones there are is the service's to say, when it runs."""
        return True

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        image: Any,
        control_net: str,
        strength: float,
        start_percent: float,
        end_percent: float,
        mode: int = NO_MODE,
        other_control_net: str = "",
    ) -> io.NodeOutput:
        """Sees that the ControlNet fits the model; nothing is loaded yet."""
        with told(cls.hidden.unique_id):
            name = chosen_name(other_control_net, control_net, "ControlNet", "Apply ControlNet")
            picture = tensors.first_png_of(image)
            of_union = None if mode == NO_MODE else mode
            control = moored.Control(name, picture, strength, start_percent, end_percent, of_union)
            recipe, controls = model.recipe, (*model.controls, control)
            target = connection.target(recipe.server)

            async def work(client: moored.AsyncClient, deliver: Deliver) -> None:
                # Whether memory is short is asked later, as in Load Model.
                with contextlib.suppress(moored.MemoryShortage, moored.CardNotReady):
                    await client.plan(model=recipe.ref, controls=controls)

            display = Display(cls.hidden.unique_id)
            if strength:
                await attend(display, target, work)
            else:
                # As ComfyUI's own: the picture is that without it.
                controls = model.controls
                display.say("Strength 0: left out")
            handle = claims.own_model(ModelHandle(recipe, controls), target)
        return io.NodeOutput(handle)


def _part(name: str, default: float, tooltip: str) -> io.Input:
    return io.Float.Input(name, default=default, min=0.0, max=1.0, step=0.001, tooltip=tooltip)
