"""The nodes that make films and tracks."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from . import connection, tensors
from .failures import told
from .follow import Display, follow
from .handles import ModelHandle
from .schema import (
    CATEGORY,
    count_input,
    job_inputs,
    job_options,
    model_input,
    preview_input,
    sampling_inputs,
    sampling_options,
    seed_input,
    size_inputs,
    text_length_input,
)

MAX_FRAMES = 10_000
MAX_RATE = 240.0
MAX_SECONDS = 3600.0


class Video(io.ComfyNode):
    """A film from a prompt, and from a first frame."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredVideo",
            display_name="Video (moored)",
            category=f"{CATEGORY}/video",
            description="Generates a film from a prompt, or from a prompt and a picture.",
            search_aliases=["txt2vid", "img2vid", "text to video", "image to video", "film"],
            inputs=[
                model_input(),
                io.String.Input(
                    "prompt", multiline=True, dynamic_prompts=True, tooltip="What the film shows."
                ),
                io.Image.Input(
                    "image",
                    optional=True,
                    tooltip="The first frame, for models that start from one. Of a batch, the first picture.",
                ),
                *size_inputs("the picture's own, or the model's default"),
                io.Int.Input(
                    "frames",
                    default=0,
                    min=0,
                    max=MAX_FRAMES,
                    tooltip="How many. 0: the model's default.",
                ),
                io.Float.Input(
                    "fps",
                    default=0.0,
                    min=0.0,
                    max=MAX_RATE,
                    step=0.01,
                    tooltip="Frames a second. 0: the model's default.",
                ),
                *sampling_inputs(),
                seed_input("Another seed is another film."),
                text_length_input(),
                preview_input(),
                *job_inputs(),
            ],
            outputs=[
                io.Image.Output("frames", tooltip="The frames, as a batch: for Create Video."),
                io.Float.Output("fps", tooltip="Frames a second: for Create Video."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        prompt: str,
        width: int,
        height: int,
        frames: int,
        fps: float,
        steps: int,
        guidance: float,
        seed: int,
        max_sequence_length: int,
        preview_every_s: float,
        image: Any = None,
        **job: Any,
    ) -> io.NodeOutput:
        """Makes it."""
        with told(cls.hidden.unique_id):
            start = None
            if image is not None:
                start = tensors.first_png_of(image)
                across, down = (width, height) if width and height else tensors.size_of(image)
                width, height = width or across, height or down
            recipe, display = model.recipe, Display(cls.hidden.unique_id)
            result = await follow(
                display,
                connection.target(recipe.server),
                recipe,
                lambda client: client.stream_video(
                    prompt,
                    model=recipe.ref,
                    width=width or None,
                    height=height or None,
                    frames=frames or None,
                    frames_per_second=fps or None,
                    init_image=start,
                    seed=seed,
                    preview_interval_s=preview_every_s or None,
                    **sampling_options(steps, guidance, max_sequence_length),
                    **job_options(**job),
                ),
            )
            if preview_every_s and result.film.frame_count:
                display.finish(result.film.frame(0).image)
            return io.NodeOutput(tensors.frames_of(result.film), result.frames_per_second)


class Audio(io.ComfyNode):
    """Tracks from a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredAudio",
            display_name="Audio (moored)",
            category=f"{CATEGORY}/audio",
            description="Generates music or sound from a prompt.",
            search_aliases=["txt2audio", "text to audio", "music", "song", "sound"],
            inputs=[
                model_input(),
                io.String.Input(
                    "prompt", multiline=True, dynamic_prompts=True, tooltip="What is heard."
                ),
                io.String.Input("lyrics", multiline=True, tooltip="What is sung. Empty: nothing."),
                io.Float.Input(
                    "seconds",
                    default=0.0,
                    min=0.0,
                    max=MAX_SECONDS,
                    step=0.1,
                    tooltip="How long. 0: the model's default.",
                ),
                *sampling_inputs(),
                seed_input("Track n of several uses seed + n, from 0."),
                count_input("How many tracks."),
                text_length_input(),
                *job_inputs(),
            ],
            outputs=[io.Audio.Output("audio", tooltip="The tracks, as a batch.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        prompt: str,
        lyrics: str,
        seconds: float,
        steps: int,
        guidance: float,
        seed: int,
        count: int,
        max_sequence_length: int,
        **job: Any,
    ) -> io.NodeOutput:
        """Makes them."""
        with told(cls.hidden.unique_id):
            recipe = model.recipe
            result = await follow(
                Display(cls.hidden.unique_id, pictures=count),
                connection.target(recipe.server),
                recipe,
                lambda client: client.stream_audio(
                    prompt,
                    model=recipe.ref,
                    lyrics=lyrics or None,
                    seconds=seconds or None,
                    seed=seed,
                    count=count,
                    output="raw",
                    **sampling_options(steps, guidance, max_sequence_length),
                    **job_options(**job),
                ),
            )
            return io.NodeOutput(tensors.audio_of([result.track(index=n) for n in range(count)]))
