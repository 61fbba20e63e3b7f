"""Makes docs/benchmarks/sound.json, and its table in docs/BENCHMARKS.md, of what music was measured to take.

    python tests/gpu/sound_rows.py RUN.json ... --write-docs docs/benchmarks/sound.json

Each file is a run of `sound.py` or `session.py`, or has figures in its form from elsewhere (`peer_rows.py`).
"""

from __future__ import annotations

import sys
from functools import partial

from peer_rows import Wanted, main

LONG, SHORT = "step, 240 s of music", "step, 60 s of music"
FORMATS = ("fp8", "int8", "nf4")
TOGETHER = 4
"""Segments in a pass whose step is timed."""
SEGMENT_S = (10, 60, 240)
RANK = 16
LORA_SHARE = 1.10
"""What a step with a LoRA for each segment may take, of one without."""
WITH_PROMPTS = f" with {TOGETHER} prompts"
WITH_ONE_LORA = f" with one LoRA of rank {RANK}"
WITH_LORAS = f" with {TOGETHER} LoRAs of rank {RANK}"


def step_of(seconds: int) -> str:
    """The name of the figure of a step of segments of so many seconds, which are alike."""
    return f"session: a step of {TOGETHER} segments of {seconds} s"


def steps_of(seconds: int) -> tuple[Wanted, ...]:
    """Rows of steps of such segments, alike and not."""
    alike = step_of(seconds)
    beside_alike = partial(Wanted, of_ours=alike, peer="alike")
    return (
        Wanted(alike),
        beside_alike(alike + WITH_PROMPTS),
        beside_alike(alike + WITH_ONE_LORA),
        beside_alike(alike + WITH_LORAS, LORA_SHARE),
    )


ROWS = (
    Wanted(LONG, 0.45),
    *(Wanted(f"{LONG} {name}", beside=LONG) for name in FORMATS),
    Wanted(SHORT, 0.22),
    *(Wanted(f"{SHORT} {name}", beside=SHORT) for name in FORMATS),
    Wanted("decode of 240 s", 0.6),
    Wanted("decode of 240 s: scratch", target=1.0),
    Wanted("decode of 240 s on the card alone", 0.6, beside="decode of 240 s"),
    Wanted("encode of 240 s", 0.6),
    Wanted("encode of 240 s: scratch", target=1.0),
    Wanted("encode of 240 s on the card alone", 0.6, beside="encode of 240 s"),
    Wanted("peak over the weights, 240 s repainted", target=1.0),
    Wanted("240 s repainted in 8 steps"),
    *(
        Wanted(f"swap by a {by}, 240 s repainted, 5.9 GiB left, {policy}")
        for policy in ("shared", "exclusive")
        for by in ("job", "load, fp8")
    ),
    Wanted("session: first sound after open", target=300.0),
    Wanted("session: another version sounds after"),
    Wanted("step of four tracks of 60 s in one pass", target=15.0),
    Wanted("step of four tracks of 60 s in one pass, in fp8", target=15.0),
    Wanted("session: another version of 60 s sounds after", target=120.0),
    *(
        Wanted(f"session: segments of 10 s a second, {slots} slots", target=target, better="higher")
        for slots, target in ((1, None), (2, None), (4, 40.0), (8, 55.0))
    ),
    *(row for seconds in SEGMENT_S for row in steps_of(seconds)),
    Wanted("session: gaps in two minutes beside another client's tracks", target=0.0),
    Wanted("session: bytes left after 24 sessions", target=0.0),
    Wanted("code and context that first tracks leave"),
    Wanted("bytes left after four minutes and unloading", target=0.0),
    Wanted("bytes left after unloading, 100 mixed cycles", target=0.0),
    Wanted("components beside diffusers, relative L2, farthest", target=1e-5),
    Wanted("tracks beside diffusers, relative L2, farthest", target=1e-4),
    Wanted("Oobleck beside diffusers, decode, relative L2, farthest", target=1e-6),
    Wanted("Oobleck beside diffusers, encode, relative L2, farthest", target=1e-6),
)


if __name__ == "__main__":
    sys.exit(main(ROWS, "sound.json"))
