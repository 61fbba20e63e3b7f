"""Compares pictures of the shipped model on a card and on the CPU, in all formats.

    python tests/gpu/stored_pictures.py --binary moored --work FOLDER --out stored.json

The card computes in bf16 and the CPU in f32: a format is as right on the card as full precision is, if its
pictures are as near to the CPU's. One line of JSON for each format, with the mean difference of bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import full_size
import numpy as np
from full_size import ROOT, begin, command_line, guarded, run_parts, tell

sys.path.insert(0, str(ROOT / "tests/e2e"))

import test_stored_formats as stored_formats  # noqa: E402

MADE = ("int8-convrot", "int8", "fp8", "nf4", "nf4-double")
PROMPTS = 4
STEPS = 8


def models() -> Iterator[tuple[str, Any]]:
    """Names of figures, and models."""
    import moored

    yield "full", "moored/demo"
    for name in MADE:
        yield f"{name}, made at load", moored.ModelRef("moored/demo", formats={"transformer": name})
    for name in stored_formats.STORED:
        yield f"{name}, stored", name


def picture(service: full_size.Service, model: Any, number: int) -> Any:
    prompt = stored_formats.prompts(PROMPTS)[number]["prompt"]
    result = service.client.generate_image(prompt, model=model, seed=number, steps=STEPS)
    return np.asarray(result.image, np.float32)


def main() -> None:
    settings = command_line(__doc__, "compare", "formats").parse_args()
    begin(settings)
    folder = settings.work / "stored"
    folder.mkdir(parents=True, exist_ok=True)
    stored_formats.write_models(folder)
    names = [entry.name for entry in folder.iterdir()]

    def compare() -> None:
        with ExitStack() as running:
            services = []
            for device in ("cpu", "cuda"):
                work = settings.work / device
                work.mkdir(exist_ok=True)
                for name in names:
                    if not (work / name).exists():
                        (work / name).symlink_to((folder / name).absolute())
                one = full_size.Service(settings.binary, work, names, device=device)
                services.append(running.enter_context(one.logged(device)))
            for what, model in models():

                def difference(model: Any = model, what: str = what) -> None:
                    apart = []
                    for number in range(PROMPTS):
                        cpu, card = (picture(service, model, number) for service in services)
                        apart.append(float(np.abs(cpu - card).mean()))
                    tell(f"the card's pictures beside the CPU's, {what}", max(apart), "of 255")

                guarded(what, difference)

    run_parts({"compare": compare}, settings.parts.split(","))


if __name__ == "__main__":
    main()
