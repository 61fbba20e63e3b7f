"""Makes docs/benchmarks/film.json, and its table in docs/BENCHMARKS.md, of what films were measured to take.

    python tests/gpu/film_rows.py RUN.json ... --write-docs docs/benchmarks/film.json

Each file is one run of `film.py`, `wan.py` or `ovi.py`, or has figures in its form from elsewhere; see
`peer_rows.py`.
"""

from __future__ import annotations

import sys

from peer_rows import Wanted, main

STEP = "step, FramePack 640x640"
SAMPLED = "step, HunyuanVideo 832x480"
LARGE = "step, HunyuanVideo 1280x720, 129 frames"
WAN_5B = "step, Wan 5B 1280x704, 121 frames"
WAN_14B = "step, Wan 14B 832x480, 81 frames"
WAN_DECODE = "decode of 121 frames, Wan 5B 1280x704"
OVI = "Ovi 720x720, 5 s"
FP8_ATTENTION = ", attention in fp8"
CARDS = {1: "one card", 2: "two cards"}
"""How the figures of `two_cards.py` name the cards that sample a film."""
# 120 frames of 960x960 more, MiB.
DELIVERED = 316.0


def in_fp8(step: str) -> tuple[Wanted, Wanted]:
    """A step with attention in fp8, with weights in full precision and in fp8."""
    return (
        Wanted(f"{step}{FP8_ATTENTION}", 0.65, beside=step),
        Wanted(f"{step} fp8{FP8_ATTENTION}", 0.55, beside=step),
    )


def on_two_cards(step: str, share: float | None) -> Wanted:
    """A step on two cards, as a share of one on one card in the same run."""
    return Wanted(f"{step}, {CARDS[2]}", share, of_ours=f"{step}, {CARDS[1]}", peer=CARDS[1])


ROWS = (
    Wanted(STEP, 0.86),
    Wanted(f"{STEP} fp8", 0.62, beside=STEP),
    Wanted(f"{STEP}{FP8_ATTENTION}", beside=STEP),
    Wanted(f"{STEP} fp8{FP8_ATTENTION}", 0.62, beside=STEP),
    Wanted(f"{STEP} int8", beside=STEP),
    Wanted(f"{STEP} nf4", beside=STEP),
    Wanted(f"{SAMPLED}, 49 frames", 0.70),
    Wanted(f"{SAMPLED}, 49 frames fp8", 0.55, beside=f"{SAMPLED}, 49 frames"),
    *in_fp8(f"{SAMPLED}, 49 frames"),
    Wanted(f"{SAMPLED}, 49 frames, left out", beside=f"{SAMPLED}, 49 frames"),
    Wanted(f"{SAMPLED}, 129 frames", 0.65),
    Wanted(f"{SAMPLED}, 129 frames fp8", 0.55, beside=f"{SAMPLED}, 129 frames"),
    *in_fp8(f"{SAMPLED}, 129 frames"),
    on_two_cards(f"{SAMPLED}, 49 frames", None),
    *(
        on_two_cards(f"{SAMPLED}, 129 frames{name}", 1 / 1.8)
        for name in ("", " fp8", f" fp8{FP8_ATTENTION}")
    ),
    Wanted(LARGE, 0.65),
    Wanted(f"{LARGE} fp8", 0.55, beside=LARGE),
    *in_fp8(LARGE),
    Wanted("decode of 5 latents, 832x480", 0.45),
    Wanted("decode of 5 latents, 832x480: scratch", target=5.0),
    Wanted("decode of 5 latents, 640x640", 0.45),
    Wanted("decode of 5 latents, 640x640: scratch", target=5.0),
    *(
        Wanted(f"film 640x640, 2 sections, {name}, {left} GiB left, {policy}")
        for left, names in ((24, ("int8", "fp8", "nf4")), (16, ("fp8",)), (12, ("nf4",)))
        for name in names
        for policy in ("shared", "exclusive")
    ),
    Wanted("code and context that a first film leaves"),
    Wanted("bytes left after a film and unloading", target=0.0),
    Wanted("bytes left after unloading, 50 mixed films and pictures", target=0.0),
    Wanted(WAN_5B, 0.98),
    Wanted(f"{WAN_5B} fp8", 0.80, beside=WAN_5B),
    Wanted(f"{WAN_5B} int8", beside=WAN_5B),
    Wanted(f"{WAN_5B} nf4", beside=WAN_5B),
    Wanted(WAN_14B, 0.98),
    Wanted(f"{WAN_14B} fp8", 0.75, beside=WAN_14B),
    Wanted(f"{WAN_14B} int8", beside=WAN_14B),
    Wanted(f"{WAN_14B} nf4", beside=WAN_14B),
    Wanted(WAN_DECODE, 0.45),
    Wanted(f"{WAN_DECODE}: scratch", target=4.0),
    Wanted("decode of 81 frames, Wan 14B 832x480"),
    Wanted("decode of 81 frames, Wan 14B 832x480: scratch"),
    *(Wanted(f"step, {OVI}{name}") for name in ("", " fp8", " int8", " nf4")),
    Wanted(f"{OVI}, 50 steps, prompt to MP4", target=60.0),
    *(
        Wanted(f"{OVI}, 50 steps, prompt to MP4: {stage}")
        for stage in ("encode_text", "denoise", "decode_sound", "decode")
    ),
    *(
        Wanted(f"{OVI}, 4 steps in fp8, {place}{figure}")
        for place in ("whole card, shared", "card of 24 GiB, shared", "card of 24 GiB, exclusive")
        for figure in ("", ": most on the card by the driver")
    ),
    Wanted("code and context that a first film leaves, Wan and Ovi"),
    Wanted("bytes left after a film and unloading, Wan and Ovi", target=0.0),
    Wanted("bytes left after unloading, 50 mixed films, pictures and tracks", target=0.0),
    Wanted("film of 10 s beside one of 5 s: memory of the supervisor, growth", target=DELIVERED),
    Wanted("film of 10 s beside one of 5 s: memory of the worker, growth", target=DELIVERED),
    Wanted("sampled latents beside diffusers, relative L2, farthest", target=1e-5),
    Wanted("bytes of films beside diffusers, largest difference", target=1.0),
    Wanted("film of 1,189 frames: memory of the supervisor, growth"),
    Wanted("film of 1,189 frames: memory of the worker, growth"),
    Wanted("film model: held-out prompts, in place", target=85.0, better="higher"),
    Wanted("film model: held-out prompts, right in everything", better="higher"),
    Wanted("film model: shuffled prompts, in place", target=0.0),
)


if __name__ == "__main__":
    sys.exit(main(ROWS, "film.json"))
