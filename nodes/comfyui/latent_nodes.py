"""Latents: pictures to and from them, and to and from ComfyUI's own."""

from __future__ import annotations

from typing import Any

import moored
from comfy_api.latest import io

from . import claims, connection, latents, tensors
from .failures import told
from .follow import Display, follow
from .handles import Bringing, Encoding, KeptLatent, LatentHandle, ModelHandle
from .schema import (
    CATEGORY,
    LatentType,
    job_inputs,
    latent_input,
    model_input,
    options_of,
    seed_input,
    seed_of,
)


class VAEEncode(io.ComfyNode):
    """Pictures to latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredVAEEncode",
            display_name="VAE Encode (moored)",
            category=f"{CATEGORY}/latent",
            description="Encodes pictures to latents, which stay in the service.",
            inputs=[
                model_input(),
                io.Image.Input(
                    "image",
                    tooltip="A picture or a batch. Sides that are no multiples of 16 are scaled to the next.",
                ),
                seed_input(),
                *job_inputs(),
            ],
            outputs=[LatentType.Output("latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(cls, model: ModelHandle, image: Any, seed: int, **job: Any) -> io.NodeOutput:
        """Encodes, picture by picture."""
        with told(cls.hidden.unique_id):
            recipe = model.recipe
            target = connection.target(recipe.server)
            pngs = tensors.pngs_of(image)
            width, height = tensors.size_of(image)
            display = Display(cls.hidden.unique_id, pictures=len(pngs))
            options = tuple(options_of(moored.JobOptions, job).items())
            with claims.latents_of(target) as handle:
                for n, png in enumerate(pngs):
                    encoding = Encoding(png, width, height, seed_of(seed, n), options)
                    latent = KeptLatent(recipe, encoding)
                    await latents.make(display, target, latent)
                    handle.latents.append(latent)
        return io.NodeOutput(handle)


class VAEDecode(io.ComfyNode):
    """Latents to pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredVAEDecode",
            display_name="VAE Decode (moored)",
            category=f"{CATEGORY}/latent",
            description="Decodes latents of the service to pictures.",
            inputs=[model_input(), latent_input(), *job_inputs()],
            outputs=[io.Image.Output("image", tooltip="The pictures, as a batch.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(cls, model: ModelHandle, latent: LatentHandle, **job: Any) -> io.NodeOutput:
        """Decodes, latent by latent."""
        with told(cls.hidden.unique_id):
            recipe = model.recipe
            target = connection.target(recipe.server)
            display = Display(cls.hidden.unique_id, pictures=len(latent.latents))
            options = options_of(moored.JobOptions, job)

            async def decoded(name: str) -> moored.ImageResult:
                return await follow(
                    display,
                    target,
                    recipe,
                    lambda client: client.stream_decode(
                        name, model=recipe.ref, output="raw", **options
                    ),
                )

            pictures: list[moored.Picture] = []
            for one in latent.latents:
                result = await latents.with_latent(display, target, one, decoded)
                pictures += result.pictures
            return io.NodeOutput(tensors.image_of(pictures))


class LatentToComfyUI(io.ComfyNode):
    """Latents of the service as ComfyUI's own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredLatentToComfyUI",
            display_name="Latent to ComfyUI (moored)",
            category=f"{CATEGORY}/latent",
            description="Brings latents of the service to ComfyUI, for its own samplers and VAE.",
            inputs=[latent_input()],
            outputs=[io.Latent.Output("samples")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(cls, latent: LatentHandle) -> io.NodeOutput:
        """Reads them."""
        with told(cls.hidden.unique_id):
            display = Display(cls.hidden.unique_id)
            arrays = []
            for one in latent.latents:
                target = connection.target(one.model.server)
                arrays.append(await latents.read(display, target, one))
            return io.NodeOutput(tensors.samples_of(arrays, latent.latents[0].family))


class LatentFromComfyUI(io.ComfyNode):
    """ComfyUI's own latents as latents of the service."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredLatentFromComfyUI",
            display_name="Latent from ComfyUI (moored)",
            category=f"{CATEGORY}/latent",
            description="Brings latents of ComfyUI to the service.",
            inputs=[
                model_input(),
                io.Latent.Input("samples", tooltip="Latents of the same kind of model."),
            ],
            outputs=[LatentType.Output("latent")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(cls, model: ModelHandle, samples: Any) -> io.NodeOutput:
        """Writes them."""
        with told(cls.hidden.unique_id):
            recipe = model.recipe
            target = connection.target(recipe.server)
            display = Display(cls.hidden.unique_id)
            family = await latents.family_of(display, target, recipe)
            with claims.latents_of(target) as handle:
                for array in tensors.arrays_of(samples, family):
                    brought = Bringing(array.tobytes(), array.shape)
                    latent = KeptLatent(recipe, brought, family=family)
                    await latents.make(display, target, latent)
                    handle.latents.append(latent)
        return io.NodeOutput(handle)
