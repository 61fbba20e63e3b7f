"""Makes docs/benchmarks/pictures.json, and its table in docs/BENCHMARKS.md, of what pictures take.

    python tests/gpu/picture_rows.py RUN.json ... --write-docs docs/benchmarks/pictures.json

Each file is a run of `pictures.py`, or has figures in its form from elsewhere (`peer_rows.py`).
"""

from __future__ import annotations

import sys

from peer_rows import Wanted, main

KLEIN = "step, FLUX.2 klein 4B 1024x1024"
QWEN = "step, Qwen-Image 1024x1024"
SDXL = "step with guidance, SDXL 1024x1024"
FILES = ("nvfp4", "mxfp8", "int8_tensorwise")


def autoencoder(title: str) -> tuple[Wanted, ...]:
    """Rows of the autoencoder of a model."""
    of = f"{title} 1024x1024"
    return (
        Wanted(f"decode, {of}", 0.42),
        Wanted(f"decode, {of}: scratch"),
        Wanted(f"encode, {of}"),
        Wanted(f"text, {title}"),
    )


ROWS = (
    Wanted(KLEIN, 0.92),
    Wanted(f"{KLEIN} fp8", 0.65, beside=KLEIN),
    *(Wanted(f"{KLEIN} {name}", beside=KLEIN) for name in ("int8-convrot", "int8", "nf4")),
    Wanted(f"{KLEIN} nvfp4 file", 1.15, of_ours=f"{KLEIN} nf4"),
    *(Wanted(f"{KLEIN} {name} file", beside=KLEIN) for name in FILES[1:]),
    *autoencoder("FLUX.2 klein 4B"),
    Wanted(QWEN, 0.92),
    Wanted(f"{QWEN} fp8", 0.65, beside=QWEN),
    *(Wanted(f"{QWEN} {name}", beside=QWEN) for name in ("int8-convrot", "int8", "nf4")),
    *autoencoder("Qwen-Image"),
    Wanted(SDXL, 1.0),
    *(Wanted(f"{SDXL} {name}", beside=SDXL) for name in ("fp8", "int8-convrot", "int8", "nf4")),
    *autoencoder("SDXL"),
)


if __name__ == "__main__":
    sys.exit(main(ROWS, "pictures.json"))
