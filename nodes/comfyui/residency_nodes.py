"""The nodes GPU Status, Preload, Unload and Pin."""

from __future__ import annotations

from typing import Any

import moored
from comfy_api.latest import io

from . import claims, connection
from .failures import told
from .follow import Deliver, Display, attend, follow
from .handles import ModelHandle
from .phases import kept_lines, size, status_text
from .schema import CATEGORY, ModelType, model_input, server_input


class GPUStatus(io.ComfyNode):
    """The cards of the service, as text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredGPUStatus",
            display_name="GPU Status (moored)",
            category=f"{CATEGORY}/memory",
            description="Shows what is in the memory of each GPU. Asked again each time.",
            search_aliases=["vram", "memory"],
            inputs=[
                io.AnyType.Input("after", optional=True, tooltip="Whatever is to happen before."),
                server_input(),
            ],
            outputs=[io.String.Output("status")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> float:
        """Never the same: a status is asked for each time."""
        return float("nan")

    @classmethod
    async def execute(
        cls, after: Any = None, server: connection.Server | None = None
    ) -> io.NodeOutput:
        """Asks."""

        async def work(client: moored.AsyncClient, deliver: Deliver) -> moored.Status:
            return await client.status()

        with told(cls.hidden.unique_id):
            display = Display(cls.hidden.unique_id)
            text = status_text(await attend(display, connection.target(server), work))
        display.say(text)
        return io.NodeOutput(text, ui={"text": [text]})


class Preload(io.ComfyNode):
    """Brings a model in ahead of its use."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredPreload",
            display_name="Preload (moored)",
            category=f"{CATEGORY}/memory",
            description="Loads a model into memory before it is used, and passes it on.",
            inputs=[
                model_input(),
                io.Boolean.Input(
                    "prove",
                    default=False,
                    advanced=True,
                    tooltip="Test the model by generating one tiny picture.",
                ),
            ],
            outputs=[ModelType.Output("model")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    async def execute(cls, model: ModelHandle, prove: bool = False) -> io.NodeOutput:
        """Loads."""
        with told(cls.hidden.unique_id):
            recipe = model.recipe
            await follow(
                Display(cls.hidden.unique_id),
                connection.target(recipe.server),
                recipe,
                lambda client: client.stream_load(recipe.ref, prove=prove),
            )
        return io.NodeOutput(model)


class Unload(io.ComfyNode):
    """Sends a model away, or all."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredUnload",
            display_name="Unload (moored)",
            category=f"{CATEGORY}/memory",
            description="Unloads a model from memory, after whatever is linked to `after`.",
            search_aliases=["free memory", "vram", "evict"],
            inputs=[
                ModelType.Input(
                    "model",
                    optional=True,
                    tooltip="The model to unload. Not connected: all models.",
                ),
                io.AnyType.Input(
                    "after", optional=True, tooltip="Whatever is to happen before. It is passed on."
                ),
                io.Boolean.Input(
                    "force",
                    default=False,
                    advanced=True,
                    tooltip="Cancel the jobs that use it, anybody's, instead of waiting for them.",
                ),
                server_input(),
            ],
            outputs=[ModelType.Output("model"), io.AnyType.Output("passed_on")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> float:
        """Never the same: the model may have come back since, by anybody."""
        return float("nan")

    @classmethod
    async def execute(
        cls,
        model: ModelHandle | None = None,
        after: Any = None,
        force: bool = False,
        server: connection.Server | None = None,
    ) -> io.NodeOutput:
        """Unloads."""
        with told(cls.hidden.unique_id):
            target = connection.target(model.recipe.server if model else server)

            async def work(client: moored.AsyncClient, deliver: Deliver) -> moored.Unloaded:
                if model is None:
                    return await client.unload(force=force)
                await claims.give_up(target, model.recipe)
                return await client.unload(model.recipe.ref, force=force)

            display = Display(cls.hidden.unique_id)
            display.say("Unloading")
            unloaded = await attend(display, target, work)
        display.say("\n".join([f"Freed {size(unloaded.freed_bytes)}", *kept_lines(unloaded)]))
        return io.NodeOutput(model, after)


class Pin(io.ComfyNode):
    """Keeps a model on the card, or no longer."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredPin",
            display_name="Pin (moored)",
            category=f"{CATEGORY}/memory",
            description="Keeps a model in memory until it is unpinned, and passes it on.",
            inputs=[
                model_input(),
                io.Boolean.Input(
                    "pinned",
                    default=True,
                    label_on="pin",
                    label_off="unpin",
                    tooltip="On: pin the model. Off: unpin it.",
                ),
            ],
            outputs=[ModelType.Output("model")],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    async def execute(cls, model: ModelHandle, pinned: bool) -> io.NodeOutput:
        """Pins, or unpins."""

        async def work(client: moored.AsyncClient, deliver: Deliver) -> None:
            await (client.pin if pinned else client.unpin)(model.recipe.ref)

        with told(cls.hidden.unique_id):
            display = Display(cls.hidden.unique_id)
            await attend(display, connection.target(model.recipe.server), work)
        display.say("Pinned" if pinned else "Unpinned")
        return io.NodeOutput(model)
