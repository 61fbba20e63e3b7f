"""The nodes that make music: from text, and from a track."""

from __future__ import annotations

from typing import Any

import moored
from comfy_api.latest import io

from . import connection, tensors
from .failures import Failure, told
from .follow import Deliver, Display, attend, follow
from .handles import ModelHandle
from .schema import (
    CATEGORY,
    model_input,
    music_inputs,
    music_start_inputs,
    options_of,
    prompt_input,
    seconds_input,
)

WHAT_IS_HEARD = "What is heard: style, instruments, mood."
MAX_SECONDS = 3600.0
EMPTY_WINDOW = (
    "Nothing lies between start_seconds and end_seconds: set end_seconds after the start, or to 0."
)


def _source_input(tooltip: str) -> io.Input:
    return io.Audio.Input("audio", tooltip=f"{tooltip} Of a batch, the first track is taken.")


def _outputs() -> list[io.Output]:
    return [io.Audio.Output("audio", tooltip="The tracks, as a batch.")]


class TextToMusic(io.ComfyNode):
    """Tracks from a prompt."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredTextToMusic",
            display_name="Text to Music (moored)",
            category=f"{CATEGORY}/audio",
            description="Generates music or sound from a prompt.",
            search_aliases=["txt2audio", "text to audio", "music", "song", "sound", "ace step"],
            inputs=[
                model_input(),
                prompt_input(WHAT_IS_HEARD),
                *music_start_inputs(),
                seconds_input("seconds", MAX_SECONDS, "How long. 0: the model's default."),
                *music_inputs(),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls, model: ModelHandle, prompt: str, seconds: float, **playing: Any
    ) -> io.NodeOutput:
        """Generates."""
        with told(cls.hidden.unique_id):
            options = {"seconds": seconds or None}
            return await _played(cls.hidden.unique_id, model, prompt, None, options, **playing)


class RepaintMusic(io.ComfyNode):
    """A track with a part of it made anew."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredRepaintMusic",
            display_name="Repaint Music (moored)",
            category=f"{CATEGORY}/audio",
            description="Makes a part of a track anew, as a prompt says. What is around it stays.",
            search_aliases=["inpaint audio", "audio inpainting", "edit music", "ace step"],
            inputs=[
                model_input(),
                prompt_input(WHAT_IS_HEARD),
                _source_input("The track."),
                *music_start_inputs(),
                seconds_input("start_seconds", MAX_SECONDS, "Where the part begins."),
                seconds_input(
                    "end_seconds", MAX_SECONDS, "Where the part ends. 0: at the end of the track."
                ),
                *music_inputs(),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls,
        model: ModelHandle,
        prompt: str,
        audio: Any,
        start_seconds: float,
        end_seconds: float,
        **playing: Any,
    ) -> io.NodeOutput:
        """Generates."""
        with told(cls.hidden.unique_id):
            if end_seconds and end_seconds <= start_seconds:
                raise Failure(EMPTY_WINDOW)
            options = {"task": "repaint", "window": (start_seconds, end_seconds or None)}
            return await _played(cls.hidden.unique_id, model, prompt, audio, options, **playing)


class CoverMusic(io.ComfyNode):
    """A track in another style."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="MooredCoverMusic",
            display_name="Cover Music (moored)",
            category=f"{CATEGORY}/audio",
            description="Plays the melody and rhythm of a track in the style that a prompt says.",
            search_aliases=["audio to audio", "music style", "remix", "ace step"],
            inputs=[
                model_input(),
                prompt_input(WHAT_IS_HEARD),
                _source_input("The track whose melody and rhythm are taken."),
                *music_start_inputs(),
                *music_inputs(),
            ],
            outputs=_outputs(),
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    async def execute(
        cls, model: ModelHandle, prompt: str, audio: Any, **playing: Any
    ) -> io.NodeOutput:
        """Generates."""
        with told(cls.hidden.unique_id):
            options = {"task": "cover"}
            return await _played(cls.hidden.unique_id, model, prompt, audio, options, **playing)


async def _played(
    node: str | None,
    model: ModelHandle,
    prompt: str,
    source: Any,
    options: dict[str, Any],
    *,
    seed: int,
    count: int,
    reference: Any = None,
    bpm: int = 0,
    **asked: Any,
) -> io.NodeOutput:
    """Tracks, from an AUDIO or from none (None); `options` are those of the node alone."""
    recipe, display = model.recipe, Display(node, pictures=count)
    target = connection.target(recipe.server)
    given = {"init_media": source, "reference": reference}
    sounds = {
        option: tensors.samples_of_audio(sound)
        for option, sound in given.items()
        if sound is not None
    }
    brought: list[str] = []

    async def bring(client: moored.AsyncClient, deliver: Deliver) -> dict[str, Any]:
        media: dict[str, Any] = {}
        for option, (samples, rate) in sounds.items():
            # Of several boxes, all of a request is at the one that is to have its model.
            box = client.box_of(brought[0]) if brought else ""
            info = await client.put_media(samples, sample_rate=rate, model=recipe.ref, box=box)
            brought.append(info.id)
            media[option] = info.id
        return media

    async def give_back(client: moored.AsyncClient) -> None:
        for media in brought:
            await client.release_media(media)

    try:
        media = await attend(display, target, bring) if sounds else {}
        result = await follow(
            display,
            target,
            recipe,
            lambda client: client.stream_audio(
                prompt,
                model=recipe.ref,
                bpm=bpm or None,
                seed=seed,
                count=count,
                output="raw",
                **media,
                **options,
                **options_of(moored.AudioOptions, asked),
            ),
        )
    finally:
        if brought:
            # Also where the prompt is interrupted: what fails here expires.
            connection.start_with_client(give_back, target)
    return io.NodeOutput(tensors.audio_of([result.track(index=n) for n in range(count)]))
