"""Which service, and which model: the nodes that say what the others use."""

from __future__ import annotations

import contextlib

import moored
from comfy_api.latest import io

from . import claims, connection
from .failures import Failure, told
from .follow import Deliver, Display, attend
from .handles import (
    AUTO,
    QUANTIZATIONS,
    RESIDENCIES,
    ModelHandle,
    ModelRecipe,
    Residency,
    chosen_name,
    formats_of,
)
from .schema import CATEGORY, ModelType, ServerType, server_input

WHEN_MISSING = ["stop with an error", "pull"]


class Server(io.ComfyNode):
    """The address of a service."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredServer",
            display_name="Server (moored)",
            category=f"{CATEGORY}/model",
            description="The address of another moored service than the one in ComfyUI's settings.",
            search_aliases=["endpoint", "remote gpu"],
            inputs=[
                io.String.Input(
                    "endpoint",
                    default="",
                    placeholder="127.0.0.1:50051",
                    tooltip="host:port, or https://host:port for TLS. Empty: the one of ComfyUI's settings.",
                )
            ],
            outputs=[ServerType.Output("server")],
        )

    @classmethod
    def execute(cls, endpoint: str) -> io.NodeOutput:
        """Says it; nothing is dialled yet."""
        return io.NodeOutput(connection.Server(endpoint))


class LoadModel(io.ComfyNode):
    """A model of the service, how its weights are held, and for how long."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredLoadModel",
            display_name="Load Model (moored)",
            category=f"{CATEGORY}/model",
            description="Chooses a model of the moored service. It uses the service's memory, not ComfyUI's.",
            search_aliases=["checkpoint", "diffusion model", "flux"],
            inputs=[
                # The pack's script fills the list. A remote combo of ComfyUI would set what a workflow has
                # saved to the first of the list.
                io.Combo.Input("model", options=[], tooltip="The models of the service."),
                io.Combo.Input(
                    "quantization",
                    options=list(QUANTIZATIONS),
                    default=AUTO,
                    tooltip="Memory for the weights: full, about a half (8-bit) or about a quarter (4-bit). "
                    "auto: the first of these that fits the GPU; the nodes show which and why.",
                ),
                io.Combo.Input(
                    "residency",
                    options=list(RESIDENCIES),
                    default="auto",
                    tooltip="How long the model stays in memory. auto: until others need it. hold: five "
                    "minutes after each use. pin: until it is unpinned. evict after: evict_after_s seconds "
                    "after its last use.",
                ),
                io.Int.Input(
                    "evict_after_s",
                    default=60,
                    min=0,
                    max=86_400,
                    tooltip="Seconds after the last use. Only for residency `evict after`.",
                    advanced=True,
                ),
                io.Combo.Input(
                    "when_missing",
                    options=WHEN_MISSING,
                    default="stop with an error",
                    display_name="if missing",
                    tooltip="If the service does not have the model: stop with an error, or pull: download "
                    "it from the hub first.",
                ),
                io.String.Input(
                    "other_model",
                    default="",
                    placeholder="owner/name",
                    tooltip="A model that is not in the list. Empty: the one above.",
                    advanced=True,
                ),
                io.String.Input(
                    "formats",
                    default="",
                    placeholder="text_encoder_2=int8, transformer=nf4",
                    tooltip="Formats of single components, as component=format, separated by commas: "
                    "text_encoder_2=int8, transformer=nf4. "
                    "Formats: full, int8-convrot, int8, fp8, nf4, nf4-double. Not with quantization auto.",
                    advanced=True,
                ),
                io.String.Input(
                    "revision",
                    default="",
                    tooltip="Revision of a model from the hub. Empty: the one that is there.",
                    advanced=True,
                ),
                server_input(),
            ],
            outputs=[ModelType.Output("model")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, model: str | None = None) -> bool:
        """Takes any model's name: which ones there are is the service's to say, when it runs."""
        return True

    @classmethod
    async def execute(
        cls,
        model: str,
        quantization: str,
        residency: Residency,
        evict_after_s: int,
        when_missing: str,
        other_model: str = "",
        formats: str = "",
        revision: str = "",
        server: connection.Server | None = None,
    ) -> io.NodeOutput:
        """Sees that the service has the model; nothing is loaded yet."""
        with told(cls.hidden.unique_id):
            name = chosen_name(other_model, model, "model", "Load Model")
            of_components = formats_of(formats)
            if of_components and quantization == AUTO:
                raise Failure(
                    "With quantization auto the service chooses every format: leave formats empty, or choose "
                    "full, 8-bit or 4-bit for what it does not name."
                )
            recipe = ModelRecipe(
                server=server,
                id=name,
                quantization=quantization,
                formats=of_components,
                revision=revision.strip(),
                residency=residency,
                evict_after_s=evict_after_s if residency == "evict after" else 0,
            )
            target = connection.target(server)

            async def work(client: moored.AsyncClient, deliver: Deliver) -> str:
                choice = await _found(client, deliver, recipe, pull=when_missing == "pull")
                await claims.use(client, target, recipe)
                claims.rest(target, recipe)
                return choice

            handle = claims.own_model(ModelHandle(recipe), target)
            display = Display(cls.hidden.unique_id)
            display.say(await attend(display, target, work))
        return io.NodeOutput(handle)


async def _found(
    client: moored.AsyncClient, deliver: Deliver, recipe: ModelRecipe, pull: bool
) -> str:
    """Raises unless the service has the model, and can hold it so; pulls it, if the node allows that.

    What the service chose and why, where the quantization is left to it.
    """
    # What a request would need says all of that, and loads nothing. Whether memory is short is asked later.
    with contextlib.suppress(moored.MemoryShortage, moored.CardNotReady):
        try:
            return (await client.plan_model(recipe.ref)).model.choice
        except moored.ModelNotFound:
            if not pull:
                raise
        async with client.stream_pull(recipe.id, revision=recipe.revision) as progress:
            async for event in progress:
                deliver(event)
            await progress.result()
        return (await client.plan_model(recipe.ref)).model.choice
    return ""
