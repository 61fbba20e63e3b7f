"""The pack's own types, and the inputs that several nodes share."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

CATEGORY = "moored"

ServerType = io.Custom("MOORED_SERVER")
ModelType = io.Custom("MOORED_MODEL")
LatentType = io.Custom("MOORED_LATENT")

MAX_SEED = 0xFFFFFFFFFFFFFFFF
MAX_SIDE = 4096
MAX_COUNT = 64
MAX_FRAMES = 10_000
MAX_FRAMES_PER_SECOND = 240.0
MAX_FILM_SECONDS = 600.0
MAX_BEATS_PER_MINUTE = 999

SERVICE_PATIENCE = -1.0
MODEL_GUIDANCE = -1.0


def model_input() -> io.Input:
    """The model of a node."""
    return ModelType.Input("model", tooltip="From Load Model.")


def prompt_input(tooltip: str) -> io.Input:
    """What is to come, in words."""
    return io.String.Input("prompt", multiline=True, dynamic_prompts=True, tooltip=tooltip)


def latent_input(optional: bool = False) -> io.Input:
    """A latent of the service."""
    return LatentType.Input("latent", optional=optional, tooltip="A latent that is in the service.")


def server_input() -> io.Input:
    """Which service."""
    return ServerType.Input(
        "server",
        optional=True,
        tooltip="The service to use. Not connected: the one in ComfyUI's settings.",
    )


def seed_input(tooltip: str = "Picture n of several uses seed + n, from 0.") -> io.Input:
    """A seed, as ComfyUI has them."""
    return io.Int.Input(
        "seed", default=0, min=0, max=MAX_SEED, control_after_generate=True, tooltip=tooltip
    )


def size_inputs(default: str) -> list[io.Input]:
    """Width and height; 0 is `default`."""

    def side(name: str) -> io.Input:
        return io.Int.Input(
            name,
            default=0,
            min=0,
            max=MAX_SIDE,
            step=16,
            tooltip=f"In pixels, a multiple of 16. 0: {default}.",
        )

    return [side("width"), side("height")]


def picture_inputs() -> list[io.Input]:
    """What both picture nodes ask for besides their start."""
    return [
        *sampling_inputs(),
        seed_input(),
        count_input("How many pictures."),
        io.Boolean.Input(
            "latent_only",
            default=False,
            advanced=True,
            tooltip="Make only a latent, for VAE Decode. Nodes linked to image do not run.",
        ),
        text_length_input(),
        preview_input(),
        *job_inputs(),
    ]


def film_inputs() -> list[io.Input]:
    """What both film nodes ask for besides their start."""
    return [
        io.Float.Input(
            "seconds",
            default=0.0,
            min=0.0,
            max=MAX_FILM_SECONDS,
            step=0.1,
            tooltip="How long. 0: the model's default, or by frames.",
        ),
        io.Int.Input(
            "frames",
            default=0,
            min=0,
            max=MAX_FRAMES,
            advanced=True,
            tooltip="How many, instead of seconds. Some models take certain numbers only. 0: by seconds.",
        ),
        io.Float.Input(
            "fps",
            default=0.0,
            min=0.0,
            max=MAX_FRAMES_PER_SECOND,
            step=0.01,
            advanced=True,
            tooltip="Frames a second. 0: the model's default.",
        ),
        *sampling_inputs(),
        seed_input("Another seed is another film."),
        io.Boolean.Input(
            "give_frames",
            default=False,
            advanced=True,
            tooltip="Output the frames too, as a batch. If off, nodes linked to frames do not run.",
        ),
        text_length_input(),
        preview_input(),
        *job_inputs(),
    ]


def seconds_input(name: str, most: float, tooltip: str) -> io.Input:
    """Seconds of a track."""
    return io.Float.Input(name, default=0.0, min=0.0, max=most, step=0.1, tooltip=tooltip)


def music_start_inputs() -> list[io.Input]:
    """What every music node is told besides its prompt."""
    return [
        io.String.Input("lyrics", multiline=True, tooltip="What is sung. Empty: nothing."),
        io.Audio.Input(
            "reference",
            optional=True,
            tooltip="A track to take the timbre from, if the model supports it.",
        ),
    ]


def music_inputs() -> list[io.Input]:
    """What every music node asks for besides its start."""
    return [
        io.Int.Input(
            "bpm",
            default=0,
            min=0,
            max=MAX_BEATS_PER_MINUTE,
            advanced=True,
            tooltip="Beats a minute. 0: the model's choice.",
        ),
        io.String.Input(
            "key", advanced=True, tooltip="Key and scale: C major. Empty: the model's choice."
        ),
        io.String.Input(
            "time_signature",
            advanced=True,
            tooltip="Beats of a bar: 4. Empty: the model's choice.",
        ),
        io.String.Input(
            "language", advanced=True, tooltip="Language of the lyrics: en. Empty: the model's."
        ),
        *sampling_inputs(),
        seed_input("Track n of several uses seed + n, from 0."),
        count_input("How many tracks."),
        text_length_input(),
        *job_inputs(),
    ]


def sampling_inputs() -> list[io.Input]:
    """Steps and guidance."""
    return [
        io.Int.Input("steps", default=0, min=0, max=200, tooltip="0: the model's default."),
        io.Float.Input(
            "guidance",
            default=MODEL_GUIDANCE,
            min=-1.0,
            max=100.0,
            step=0.1,
            tooltip="How closely to follow the prompt. -1: the model's default.",
        ),
    ]


def sampling_options(steps: int, guidance: float, max_sequence_length: int) -> dict[str, Any]:
    """What `sampling_inputs` and `text_length_input` asked for, as options of the client."""
    return {
        "steps": steps or None,
        "guidance": None if guidance == MODEL_GUIDANCE else guidance,
        "max_sequence_length": max_sequence_length or None,
    }


def count_input(tooltip: str) -> io.Input:
    """How many."""
    return io.Int.Input("count", default=1, min=1, max=MAX_COUNT, tooltip=tooltip)


def text_length_input() -> io.Input:
    """How much of the prompt is read."""
    return io.Int.Input(
        "max_sequence_length",
        default=0,
        min=0,
        max=512,
        advanced=True,
        tooltip="Tokens of the prompt that the large text encoder reads. 0: the model's default.",
    )


def preview_input() -> io.Input:
    """How often it is shown what comes."""
    return io.Float.Input(
        "preview_every_s",
        default=0.5,
        min=0.0,
        max=60.0,
        step=0.1,
        advanced=True,
        tooltip="Seconds between two previews, at least 0.1. 0: no previews.",
    )


def job_inputs() -> list[io.Input]:
    """How a job is queued and admitted."""
    return [
        io.Combo.Input(
            "priority",
            options=["low", "normal", "high"],
            default="normal",
            advanced=True,
            tooltip="Your share of the GPU among all who wait for it: low a quarter, normal one, high four.",
        ),
        io.Float.Input(
            "patience_s",
            default=SERVICE_PATIENCE,
            min=-1.0,
            max=600.0,
            step=0.5,
            advanced=True,
            tooltip="Seconds to wait for memory that other programs use. -1: the service's setting.",
        ),
        io.Boolean.Input(
            "allow_low_memory",
            default=False,
            advanced=True,
            tooltip="Try even if memory is short. If it runs out, only this job fails.",
        ),
    ]


def job_options(priority: str, patience_s: float, allow_low_memory: bool) -> dict[str, Any]:
    """What `job_inputs` asked for, as options of the client."""
    return {
        "priority": priority,
        "patience_s": None if patience_s == SERVICE_PATIENCE else patience_s,
        "allow_low_memory": allow_low_memory,
    }


def seed_of(seed: int, n: int) -> int:
    """The seed of picture n."""
    return (seed + n) % (MAX_SEED + 1)
