"""Generated from proto/ by scripts/stubs. Not to be edited, nor imported by users."""

from __future__ import annotations

from typing import Annotated, TypedDict


class SamplingFields(TypedDict, total=False):
    """How pictures, films and tracks are sampled."""

    steps: Annotated[
        int | None,
        'Denoising steps, 1 to 200.',
        (1, 200),
    ]
    guidance: Annotated[
        float | None,
        'How closely to follow the prompt, 0 to 1000.',
        (0, 1000),
    ]
    seed: Annotated[
        int | None,
        'Default: random, and told in `done`; with an idempotency key always the same. Number'
        ' i of several uses seed + i.',
    ]
    max_sequence_length: Annotated[
        int | None,
        'Tokens of the prompt that are read, 1 to 512.',
        (1, 512),
    ]
    strength: Annotated[
        float | None,
        "How strongly to change the start: over 0, up to 1. Default: the model's, mostly 0.6 "
        'of pictures and 1 of all else.',
    ]
    negative_prompt: Annotated[
        str | None,
        'What the result is led away from, at most 10,000 characters. It needs '
        '`true_guidance` over 1.',
    ]
    true_guidance: Annotated[
        float | None,
        '0 to 1000. Over 1: every step takes two passes, which takes twice the time, and goes'
        ' away from `negative_prompt` by this scale. Default: 1, one pass.',
        (0, 1000),
    ]
    step_cache: Annotated[
        float | None,
        '0 to 1, such as 0.08. Over 0: passes of the model that would hardly change the '
        'result are left out, which takes less time. Default: 0, every pass is computed.',
        (0, 1),
    ]


class ResultFields(TypedDict, total=False):
    """What is made of them, and kept."""

    count: Annotated[
        int | None,
        'How many pictures, films or tracks, 1 to 64. Default: 1.',
        (1, 64),
    ]
    omit_metadata: Annotated[
        bool | None,
        'Leave prompt, seed, settings and model out of the metadata.',
    ]
    keep_latent: Annotated[
        bool | None,
        'Keep the latent of each in the service; its handle comes as `latent`.',
    ]
    latent_only: Annotated[
        bool | None,
        'Make only the latent, and no picture, film or track. Implies `keep_latent`.',
    ]


class ImageFields(TypedDict, total=False):
    """Of pictures alone."""

    width: Annotated[
        int | None,
        'Pixels across; a multiple of 16, at most 4096.',
    ]
    height: Annotated[
        int | None,
        'Pixels down; a multiple of 16, at most 4096.',
    ]
    fp8_attention: Annotated[
        bool | None,
        'Attention in fp8: faster on cards with fp8 attention (Hopper and newer), and not '
        'quite the same result. Default: in full.',
    ]


class VideoFields(TypedDict, total=False):
    """Of films alone."""

    width: Annotated[
        int | None,
        'Pixels across; a multiple of 16, at most 4096.',
    ]
    height: Annotated[
        int | None,
        'Pixels down; a multiple of 16, at most 4096.',
    ]
    frames: Annotated[
        int | None,
        'Frames in all. A model may take certain numbers only.',
    ]
    frames_per_second: Annotated[
        float | None,
        'Frames a second.',
    ]
    seconds: Annotated[
        float | None,
        'The length in seconds, instead of `frames`: at the rate that the film has.',
    ]
    frames_at_a_time: Annotated[
        int | None,
        'Most frames that are brought from the card and sent at a time, such as 16, 4 or 1: '
        'it changes no pixel. Default: as they are decoded.',
    ]
    fp8_attention: Annotated[
        bool | None,
        'Attention in fp8: faster on cards with fp8 attention (Hopper and newer), and not '
        'quite the same result. Default: in full.',
    ]
    cards: Annotated[
        int | None,
        'On how many cards of the service the film is sampled together, 1 to 2. Each computes'
        ' a part of it. Only some models of films do this, and the service needs two cards of'
        ' one kind. Default: 1.',
        (1, 2),
    ]


class AudioFields(TypedDict, total=False):
    """Of tracks alone."""

    lyrics: Annotated[
        str | None,
        'What is sung. Default: nothing.',
    ]
    seconds: Annotated[
        float | None,
        "Length in seconds. Default: that of the start, else the model's.",
    ]
    key: Annotated[
        str | None,
        "Key and scale: `C major`. Default: the model's choice.",
    ]
    time_signature: Annotated[
        str | None,
        "Beats of a bar: `4`. Default: the model's choice.",
    ]
    language: Annotated[
        str | None,
        "Language of the lyrics: `en`. Default: the model's choice.",
    ]
