"""The nodes that make pictures."""

from __future__ import annotations

from typing import Any

import moored
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from . import claims, connection, latents, tensors
from .failures import Failure, told
from .follow import Display
from .handles import Generation, KeptLatent, LatentHandle, ModelHandle
from .schema import (
    CATEGORY,
    LatentType,
    latent_input,
    model_input,
    options_of,
    picture_inputs,
    prompt_input,
    seed_of,
    size_inputs,
)

NO_IMAGE = (
    "The node before makes the latent only: link its latent to VAE Decode (moored), or switch its "
    "latent_only off."
)

Start = bytes | KeptLatent | None


def _outputs() -> list[io.Output]:
    return [
        io.Image.Output("image", tooltip="The pictures, as a batch."),
        LatentType.Output("latent", tooltip="Their latents, which stay in the service."),
    ]


class TextToImage(io.ComfyNode):
    """Pictures from a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredTextToImage",
            display_name="Text to Image (moored)",
            category=f"{CATEGORY}/image",
            description="Generates pictures from a prompt.",
            search_aliases=["txt2img", "generate", "sampler"],
            inputs=[
                model_input(),
                prompt_input("What the picture shows."),
                *size_inputs("the model's default"),
                *picture_inputs(),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls, model: ModelHandle, prompt: str, width: int, height: int, **sampling: Any
    ) -> io.NodeOutput:
        """Generates."""
        with told(cls.hidden.unique_id):
            size = {"width": width or None, "height": height or None}
            return await _generated(cls.hidden.unique_id, model, prompt, [(None, size)], **sampling)


class ImageToImage(io.ComfyNode):
    """Pictures from a prompt and from pictures or latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredImageToImage",
            display_name="Image to Image (moored)",
            category=f"{CATEGORY}/image",
            description="Generates pictures from a prompt and a picture, or a latent.",
            search_aliases=["img2img", "inpaint", "variation"],
            inputs=[
                model_input(),
                prompt_input("What the picture shows."),
                io.Image.Input(
                    "image", optional=True, tooltip="What to start from: a picture, or a batch."
                ),
                latent_input(optional=True),
                io.Mask.Input(
                    "mask",
                    optional=True,
                    tooltip="The mask: 1 changes, 0 stays exactly. Not connected: all changes.",
                ),
                io.Float.Input(
                    "strength",
                    default=0.6,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="How strongly to change the picture: more than 0, up to 1. FLUX.1 Fill: 1.",
                ),
                *size_inputs("the picture's own"),
                *picture_inputs(),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        prompt: str,
        strength: float,
        width: int,
        height: int,
        count: int,
        image: Any = None,
        latent: LatentHandle | None = None,
        mask: Any = None,
        **sampling: Any,
    ) -> io.NodeOutput:
        """Generates."""
        with told(cls.hidden.unique_id):
            if (image is None) == (latent is None):
                raise Failure(
                    "Image to Image starts from an image or from a latent: link one of the two."
                )
            starts: list[tuple[Start, dict[str, Any]]] = []
            if image is not None:
                across, down = (width, height) if width and height else tensors.size_of(image)
                size = {"width": width or across, "height": height or down}
                starts = [(png, size) for png in tensors.pngs_of(image)]
            elif latent is not None:
                starts = [(one, {}) for one in latent.latents]
            if mask is not None:
                masks = tensors.masks_of(mask)
                starts = [
                    (start, size | {"mask": masks[n % len(masks)]})
                    for n, (start, size) in enumerate(starts)
                ]
            node = cls.hidden.unique_id
            sampling |= {"strength": strength, "count": count}
            return await _generated(node, model, prompt, starts, **sampling)


class EditImage(io.ComfyNode):
    """Pictures from a prompt that is about a picture, or about several."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredEditImage",
            display_name="Edit Image (moored)",
            category=f"{CATEGORY}/image",
            description="Changes a picture as the prompt says, with FLUX.1 Kontext, Qwen-Image-Edit or "
            "FLUX.2 klein.",
            search_aliases=["kontext", "klein", "qwen", "edit", "reference", "instruct"],
            inputs=[
                model_input(),
                prompt_input("What is to change, as in: make it snow."),
                io.Image.Input(
                    "image", tooltip="The picture to edit. Each picture of a batch is edited."
                ),
                *(
                    io.Image.Input(
                        f"image_{number}",
                        optional=True,
                        tooltip=f"Picture {number} of those that the prompt is about: FLUX.2 klein takes all "
                        "four, Qwen-Image-Edit (from 2509 on) three, FLUX.1 Kontext image alone. "
                        "Of a batch the first.",
                    )
                    for number in (2, 3, 4)
                ),
                *size_inputs("that which the model prefers for the picture"),
                *picture_inputs(),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        prompt: str,
        image: Any,
        width: int,
        height: int,
        image_2: Any = None,
        image_3: Any = None,
        image_4: Any = None,
        **sampling: Any,
    ) -> io.NodeOutput:
        """Generates."""
        with told(cls.hidden.unique_id):
            size = {"width": width or None, "height": height or None}
            given = (one for one in (image_2, image_3, image_4) if one is not None)
            further = tuple(tensors.first_png_of(one) for one in given)
            edits: list[tuple[Start, dict[str, Any]]] = [
                (None, size | {"references": (png, *further)}) for png in tensors.pngs_of(image)
            ]
            return await _generated(cls.hidden.unique_id, model, prompt, edits, **sampling)


async def _generated(
    node: str | None,
    model: ModelHandle,
    prompt: str,
    starts: list[tuple[Start, dict[str, Any]]],
    *,
    seed: int,
    count: int,
    latent_only: bool = False,
    preview_every_s: float = 0.0,
    **asked: Any,
) -> io.NodeOutput:
    """`count` pictures from each start, one job a start; picture n of them all has seed + n."""
    recipe = model.recipe
    target = connection.target(recipe.server)
    display = Display(node, pictures=count * len(starts))
    options = options_of(moored.ImageOptions, asked) | {"controls": model.controls}
    shown = {
        "latent_only": latent_only,
        "output": "raw",
        "preview_interval_s": preview_every_s or None,
    }
    pictures: list[moored.Picture] = []
    with claims.latents_of(target) as handle:
        for index, (start, size) in enumerate(starts):
            display.pictures_before = index * count
            first = seed_of(seed, index * count)
            fixed = options | size
            generation = Generation(prompt, tuple((fixed | {"seed": first}).items()), start)
            result = await latents.generate(
                display, target, recipe, generation, count=count, **shown
            )
            pictures += result.pictures
            for n, kept in enumerate(result.latents):
                one = Generation(
                    prompt, tuple((fixed | {"seed": seed_of(first, n)}).items()), start
                )
                family = result.model.family
                handle.latents.append(KeptLatent(recipe, one, kept.id, family))
        image = ExecutionBlocker(NO_IMAGE) if latent_only else tensors.image_of(pictures)
        if pictures and preview_every_s:
            display.finish(pictures[-1].image)
    return io.NodeOutput(image, handle)
