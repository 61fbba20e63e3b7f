"""The node that makes tracks."""

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
    sampling_inputs,
    sampling_options,
    seed_input,
    text_length_input,
)

MAX_SECONDS = 3600.0


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
