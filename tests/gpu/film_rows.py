"""Makes docs/benchmarks/film.json, and its table in docs/BENCHMARKS.md, of what films were measured to take.

    python tests/gpu/film_rows.py RUN.json ... --write-docs docs/benchmarks/film.json

Each file is one run of `film.py`, or has figures in its form from elsewhere (`peer_rows.py`).
"""

from __future__ import annotations

import sys

from peer_rows import Wanted, main

STEP = "step, FramePack 640x640"
SAMPLED = "step, HunyuanVideo 832x480"
ROWS = (
    Wanted(STEP, 0.75),
    Wanted(f"{STEP} fp8", 0.60, beside=STEP),
    Wanted(f"{STEP} int8", beside=STEP),
    Wanted(f"{STEP} nf4", beside=STEP),
    Wanted(f"{SAMPLED}, 49 frames", 0.65),
    Wanted(f"{SAMPLED}, 129 frames", 0.65),
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
