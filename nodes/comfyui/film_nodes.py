"""The nodes that make films."""

from __future__ import annotations

import contextlib
from typing import Any

import moored
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from . import connection, tensors
from .failures import Failure, told
from .follow import Deliver, Display, attend, follow
from .handles import ModelHandle, ModelRecipe
from .schema import (
    CATEGORY,
    film_inputs,
    model_input,
    options_of,
    prompt_input,
    size_inputs,
)

WHAT_IT_SHOWS = "What the film shows."
NO_FRAMES = (
    "The node before gives its film as video alone: switch its give_frames on, or link the video to Get "
    "Video Components."
)
NO_SOUND = "The film has no sound: link a model that makes films with sound, or no node to audio."
NO_CONTROLS = "ControlNets are for pictures: link the model as it is before Apply ControlNet."
ONE_LENGTH = "The length is named twice: set either seconds or frames to 0."
NO_RATE = "This model has no rate of its own: set fps beside seconds."


def _outputs() -> list[io.Output]:
    return [
        io.Video.Output(
            "video", tooltip="The film, at its rate and with its sound: for Save Video."
        ),
        io.Image.Output("frames", tooltip="Its frames as a batch, where give_frames is on."),
        io.Audio.Output(
            "audio",
            tooltip="Its sound, which the video has too. Of a silent film, nodes linked to audio do not run.",
        ),
    ]


class TextToVideo(io.ComfyNode):
    """A film from a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredTextToVideo",
            display_name="Text to Video (moored)",
            category=f"{CATEGORY}/video",
            description="Generates a film from a prompt.",
            search_aliases=["txt2vid", "t2v", "film", "hunyuan"],
            inputs=[
                model_input(),
                prompt_input(WHAT_IT_SHOWS),
                *size_inputs("the model's default"),
                *film_inputs(),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(cls, model: ModelHandle, prompt: str, **filming: Any) -> io.NodeOutput:
        """Generates."""
        with told(cls.hidden.unique_id):
            return await _filmed(cls.hidden.unique_id, model, prompt, None, **filming)


class ImageToVideo(io.ComfyNode):
    """A film from a prompt and the picture that it starts from."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredImageToVideo",
            display_name="Image to Video (moored)",
            category=f"{CATEGORY}/video",
            description="Generates a film from a prompt and the picture that it starts from.",
            search_aliases=["img2vid", "i2v", "film", "animate", "framepack"],
            inputs=[
                model_input(),
                prompt_input(WHAT_IT_SHOWS),
                io.Image.Input(
                    "image", tooltip="The first frame. Of a batch, the first picture is taken."
                ),
                *size_inputs(
                    "the picture's shape, with about as many pixels as the model's default"
                ),
                *film_inputs(),
                io.Image.Input(
                    "end_image",
                    optional=True,
                    tooltip="The last frame, where the model takes one, such as FramePack.",
                ),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls, model: ModelHandle, prompt: str, image: Any, end_image: Any = None, **filming: Any
    ) -> io.NodeOutput:
        """Generates."""
        node = cls.hidden.unique_id
        with told(node):
            end = None if end_image is None else tensors.first_png_of(end_image)
            return await _filmed(node, model, prompt, image, end=end, **filming)


async def _filmed(
    node: str | None,
    model: ModelHandle,
    prompt: str,
    image: Any,
    *,
    width: int,
    height: int,
    seconds: float,
    seed: int,
    frames: int = 0,
    fps: float = 0.0,
    give_frames: bool = False,
    preview_every_s: float = 0.0,
    end: bytes | None = None,
    **asked: Any,
) -> io.NodeOutput:
    """A film, from an IMAGE or from none (None), to the picture `end` if there is one."""
    if model.controls:
        raise Failure(NO_CONTROLS)
    if seconds and frames:
        raise Failure(ONE_LENGTH)
    recipe, display = model.recipe, Display(node)
    target = connection.target(recipe.server)
    start = None if image is None else tensors.first_png_of(image)

    async def ask(client: moored.AsyncClient, deliver: Deliver) -> moored.ModelDefaults:
        return await _defaults_of(client, recipe)

    if image is not None or seconds:
        defaults = await attend(display, target, ask)
        if image is not None:
            down, across = image.shape[-3:-1]
            width, height = defaults.film_size((across, down), width, height)
        if seconds and not (fps or defaults.frames_per_second):
            raise Failure(NO_RATE)
    result = await follow(
        display,
        target,
        recipe,
        lambda client: client.stream_video(
            prompt,
            model=recipe.ref,
            width=width or None,
            height=height or None,
            frames=None if seconds else frames or None,
            seconds=seconds or None,
            frames_per_second=fps or None,
            init_image=start,
            end_image=end,
            seed=seed,
            output="raw",
            preview_interval_s=preview_every_s or None,
            **options_of(moored.VideoOptions, asked),
        ),
    )
    if preview_every_s and result.film.frame_count:
        display.finish(result.film.frame(0).image)
    batch = tensors.frames_of(result.film)
    audio = None if result.audio is None else tensors.audio_of([result.audio])
    video = tensors.video_of(batch, result.frames_per_second, audio)
    frames_out = batch if give_frames else ExecutionBlocker(NO_FRAMES)
    return io.NodeOutput(video, frames_out, ExecutionBlocker(NO_SOUND) if audio is None else audio)


async def _defaults_of(client: moored.AsyncClient, model: ModelRecipe) -> moored.ModelDefaults:
    """The values of a model that makes films; all of them 0 where the service does not list it."""
    # A name may bring a quantization: owner/name+4-bit.
    name = model.id.partition("+")[0]
    for listed in await client.list_models():
        if listed.id == name and listed.defaults.frames:
            return listed.defaults
    # Whether it is there, and makes films, is the service's to say; what else is missing, later.
    with contextlib.suppress(moored.MemoryShortage, moored.CardNotReady):
        try:
            await client.plan_video(model=model.ref)
        except moored.InvalidRequest as error:
            if any(violation.field == "model" for violation in error.violations):
                raise
    return moored.ModelDefaults(0, 0.0, 0, 0, 0)
