"""Adapters: the node that adds a LoRA to a model."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import moored
from comfy_api.latest import io

from . import claims, connection
from .failures import Failure, told
from .follow import Deliver, Display, attend
from .handles import ModelHandle, chosen_name
from .schema import CATEGORY, ModelType

STRENGTH_AT_MOST = 10.0


class LoadLoRA(io.ComfyNode):
    """A model with one more LoRA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredLoadLoRA",
            display_name="Load LoRA (moored)",
            category=f"{CATEGORY}/model",
            description="Adds a LoRA of the moored service to a model. Link several for several LoRAs.",
            search_aliases=["lora", "adapter", "style"],
            inputs=[
                ModelType.Input("model", tooltip="From Load Model, or from another Load LoRA."),
                # The pack's script fills the list, as that of Load Model.
                io.Combo.Input("lora", options=[], tooltip="The LoRAs of the service."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-STRENGTH_AT_MOST,
                    max=STRENGTH_AT_MOST,
                    step=0.01,
                    tooltip="How strongly it changes the model. 1: as trained. 0: not at all.",
                ),
                io.String.Input(
                    "text_strength",
                    default="",
                    placeholder="as strength",
                    tooltip="Strength in the text encoders, a number. Empty: as strength.",
                    advanced=True,
                ),
                io.Boolean.Input(
                    "ignore_unknown",
                    default=False,
                    tooltip="Ignore tensors that are of no layer of the model, instead of stopping with an "
                    "error. The node shows what was ignored.",
                    advanced=True,
                ),
                io.String.Input(
                    "other_lora",
                    default="",
                    placeholder="owner/name",
                    tooltip="A LoRA that is not in the list. Empty: the one above.",
                    advanced=True,
                ),
            ],
            outputs=[ModelType.Output("model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, lora: str | None = None) -> bool:
        """Takes any name: which ones there are is the service's to say, when it runs."""
        return True

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        lora: str,
        strength: float,
        text_strength: str = "",
        ignore_unknown: bool = False,
        other_lora: str = "",
    ) -> io.NodeOutput:
        """Checks that the LoRA fits the model, and shows the layers that it changes. Loads nothing yet."""
        with told(cls.hidden.unique_id):
            name = chosen_name(other_lora, lora, "LoRA", "Load LoRA")
            of_text = _strength_of(text_strength)
            adapter = moored.Adapter(
                name, strength, text_strength=of_text, ignore_unknown=ignore_unknown
            )
            recipe = replace(model.recipe, adapters=(*model.recipe.adapters, adapter))
            target = connection.target(recipe.server)

            async def work(client: moored.AsyncClient, deliver: Deliver) -> str:
                said = ""
                # Whether memory is short is asked later, as in Load Model.
                with contextlib.suppress(moored.MemoryShortage, moored.CardNotReady):
                    resolved = (await client.plan_model(recipe.ref)).model
                    said = _report(adapter, resolved)
                await claims.use(client, target, recipe)
                claims.rest(target, recipe)
                return said

            handle = claims.own_model(ModelHandle(recipe, model.controls), target)
            display = Display(cls.hidden.unique_id)
            display.say(await attend(display, target, work))
        return io.NodeOutput(handle)


def _report(adapter: moored.Adapter, resolved: moored.ResolvedModel) -> str:
    """What the newest adapter changes; where the service chose a quantization, which and why."""
    # Adapters that change nothing are left out by the service.
    changes = bool(adapter.strength or adapter.text_strength)
    said = moored.describe(resolved.adapters[-1]) if changes else "Strength 0: left out"
    return "\n".join(each for each in (said, resolved.choice) if each)


def _strength_of(text: str) -> float | None:
    """A strength that somebody typed; None for none."""
    text = text.strip()
    if not text:
        return None
    with contextlib.suppress(ValueError):
        strength = float(text)
        if math.isfinite(strength) and abs(strength) <= STRENGTH_AT_MOST:
            return strength
    raise Failure(
        f"text_strength is a number from -{STRENGTH_AT_MOST:g} to {STRENGTH_AT_MOST:g}, or empty, "
        f"not {text!r}."
    )
