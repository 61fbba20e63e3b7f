"""The pack's own types, and the inputs that several nodes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import moored
from comfy_api.latest import io

CATEGORY = "moored"

ServerType = io.Custom("MOORED_SERVER")
ModelType = io.Custom("MOORED_MODEL")
LatentType = io.Custom("MOORED_LATENT")
ReservationType = io.Custom("MOORED_RESERVATION")

MAX_SEED = 0xFFFFFFFFFFFFFFFF
MAX_SIDE = 4096
MAX_COUNT = 64
MAX_FRAMES = 10_000
MAX_FRAMES_PER_SECOND = 240.0
MAX_FILM_SECONDS = 600.0
MAX_BEATS_PER_MINUTE = 999

SERVICE_PATIENCE = -1.0


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
        *placed_inputs("steps", "guidance"),
        seed_input(),
        count_input("How many pictures."),
        io.Boolean.Input(
            "latent_only",
            default=False,
            advanced=True,
            tooltip="Make only a latent, for VAE Decode. Nodes linked to image do not run.",
        ),
        *placed_inputs("max_sequence_length", folded=True),
        preview_input(),
        *job_inputs(),
        *further_inputs(moored.ImageOptions, unfolded=("negative_prompt", "true_guidance")),
        detach_input(default=False),
        *newer_inputs(moored.ImageOptions),
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
        *placed_inputs("steps", "guidance"),
        seed_input("Another seed is another film."),
        io.Boolean.Input(
            "give_frames",
            default=False,
            advanced=True,
            tooltip="Output the frames too, as a batch. If off, nodes linked to frames do not run.",
        ),
        *placed_inputs("max_sequence_length", folded=True),
        preview_input(),
        *job_inputs(),
        *further_inputs(moored.VideoOptions),
        detach_input(default=True),
        *newer_inputs(moored.VideoOptions),
    ]


def seconds_input(name: str, most: float, tooltip: str) -> io.Input:
    """Seconds of a track."""
    return io.Float.Input(name, default=0.0, min=0.0, max=most, step=0.1, tooltip=tooltip)


def music_start_inputs() -> list[io.Input]:
    """The inputs of every music node besides its prompt."""
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
        *placed_inputs("steps", "guidance"),
        seed_input("Track n of several uses seed + n, from 0."),
        count_input("How many tracks."),
        *placed_inputs("max_sequence_length", folded=True),
        *job_inputs(),
        *further_inputs(moored.AudioOptions),
        detach_input(default=True),
        *newer_inputs(moored.AudioOptions),
    ]


# Those that have had their place since before: a workflow that is saved has its values by their places. All
# others come last, in the order in which they came to be.
PLACED = ("steps", "guidance", "max_sequence_length")
FURTHER = ("negative_prompt", "true_guidance")
NEWER = ("sampler", "step_cache", "fp8_attention", "cards")

MAX_NUMBER = 1_000_000


def option_input(field: moored.OptionField, *, folded: bool, optional: bool = False) -> io.Input:
    """An option of the client as an input; the value that leaves it open is its default."""
    if field.kind == "text":
        left_open = "Empty: the model's default."
    elif field.kind == "choice":
        left_open = f"{field.left_open}: the model's own."
    else:
        left_open = f"{field.left_open}: the model's default."
    shared: dict[str, Any] = {
        "optional": optional,
        "advanced": folded or None,
        "tooltip": field.tooltip if field.kind == "truth" else f"{field.tooltip} {left_open}",
    }
    least, most = field.left_open, field.most or MAX_NUMBER
    match field.kind:
        case "text":
            return io.String.Input(
                field.option, default="", multiline=True, dynamic_prompts=True, **shared
            )
        case "truth":
            return io.Boolean.Input(field.option, default=False, **shared)
        case "whole":
            return io.Int.Input(field.option, default=least, min=least, max=most, **shared)
        case "number":
            first, last = float(least), float(most)
            # Of what goes up to 1, a hundredth counts.
            step = 0.01 if last <= 1 else 0.1
            return io.Float.Input(
                field.option, default=first, min=first, max=last, step=step, **shared
            )
        case "choice":
            open_ = str(field.left_open)
            return io.Combo.Input(
                field.option, options=[open_, *field.names], default=open_, **shared
            )


def placed_inputs(*options: str, folded: bool = False) -> list[io.Input]:
    """Inputs of these options, which every medium has."""
    fields = {field.option: field for field in moored.sampling_fields(moored.GenerateOptions)}
    return [option_input(fields[option], folded=folded) for option in options]


def further_inputs(kind: type, unfolded: tuple[str, ...] = ()) -> list[io.Input]:
    """Inputs of further options of a medium. Nodes and prompts that are saved may lack them."""
    return [
        option_input(field, folded=field.option not in unfolded, optional=True)
        for field in moored.sampling_fields(kind)
        if field.option in FURTHER
    ]


def newer_inputs(kind: type) -> list[io.Input]:
    """Inputs of all other options of a medium: of those that came to be since, and of what is new."""
    others = [one for one in moored.sampling_fields(kind) if one.option not in PLACED + FURTHER]
    age = {option: place for place, option in enumerate(NEWER)}
    others.sort(key=lambda one: age.get(one.option, len(NEWER)))
    return [option_input(field, folded=True, optional=True) for field in others]


def options_of(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the inputs of a job and of its options asked for, as options of the client."""
    return moored.asked_options(kind, values) | {"priority": values["priority"]}


def count_input(tooltip: str) -> io.Input:
    """How many."""
    return io.Int.Input("count", default=1, min=1, max=MAX_COUNT, tooltip=tooltip)


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


def detach_input(*, default: bool) -> io.Input:
    """Whether a job goes on where ComfyUI ends before it. Saved nodes may lack it."""
    return io.Boolean.Input(
        "detach",
        default=default,
        optional=True,
        advanced=True,
        tooltip="If ComfyUI ends or restarts, the service finishes the job: queue it again for its result. "
        "The interrupt button ends it all the same.",
    )


def seed_of(seed: int, n: int) -> int:
    """The seed of picture n."""
    return (seed + n) % (MAX_SEED + 1)
