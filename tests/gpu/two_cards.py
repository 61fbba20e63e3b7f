"""Measures films that two cards of one box sample together, beside one card in the same run.

    python tests/gpu/two_cards.py --binary moored --work FOLDER --out two_cards.json

It needs two cards, and the models that `film.py --parts make` leaves in the folder. `--parts steps`
tells what a step takes on one card and on two, how far the latents are apart, and what both cards hold
by their ledgers and by the driver; `--parts deaths` kills the worker of either card in the middle of a
film. One line of JSON for each figure, and all of them in the file.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from film import Service, film, hunyuan_step
from film_rows import CARDS
from full_size import begin, command_line, guarded, run_parts, settled, show, tell, tell_step

SPEEDUP = 1.8
"""How many times faster two cards are to be at 129 frames."""
DIFFERENCE = 1e-2
"""Relative L2 error up to which latents in bf16 are alike."""
FILMS: tuple[tuple[str, str, tuple[int, int], int, dict[str, Any]], ...] = (
    ("", "hunyuan", (832, 480), 129, {"latent_only": True}),
    (" fp8", "hunyuan+fp8", (832, 480), 129, {"latent_only": True}),
    ("", "hunyuan", (832, 480), 49, {"latent_only": True}),
    (
        " fp8, attention in fp8",
        "hunyuan+fp8",
        (832, 480),
        129,
        {"latent_only": True, "fp8_attention": True},
    ),
)


def numbers(service: Service, result: Any) -> np.ndarray[Any, Any]:
    """The latent of a film."""
    latent = service.client.get_latent(result.latents[0])
    return np.concatenate([np.ravel(one).astype(np.float64) for one in latent.arrays.values()])


def driver_bytes(number: int) -> int:
    """What a card has in use by the driver."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(number)
    # Version 2 does not count what the driver keeps for itself.
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)


def tell_ledgers(service: Service, what: str) -> None:
    """Both cards' own accounts, beside the driver's figure."""
    drivers = [settled(partial(driver_bytes, number)) for number in (0, 1)]
    for number, card in enumerate(service.client.status().cards):
        used, driver = card.memory.total - card.memory.free, drivers[number]
        more = {"driver_bytes": driver, "scratch_bytes": card.memory.scratch}
        tell(f"{what}: ledger of card {number} less the driver's", used - driver, "bytes", **more)


def both(
    service: Service,
    name: str,
    model: str,
    size: tuple[int, int],
    frames: int,
    asked: Any,
    in_bf16: dict[int, Any],
) -> None:
    """One film on one card and on two. `in_bf16` has the latents of one card in bf16, by frames."""
    what = f"{hunyuan_step(size, frames)}{name}"
    took, latents = {}, {}
    for cards in (1, 2):
        make = partial(film, service, model, size, frames, cards=cards, **asked)
        tell_step(f"{what}, {CARDS[cards]}", make, 1, 4)
        result = make(4)
        took[cards] = [stage.run_ms for stage in result.stages if stage.name == "denoise"][-1]
        latents[cards] = numbers(service, result)
    tell(f"{what}: four steps on one card by two", took[1] / took[2], "times", at_least=SPEEDUP)
    apart = distance(latents[1], latents[2])
    tell(f"{what}: latents of two cards from one's", apart, "relative L2", at_most=DIFFERENCE)
    if name:
        # What rounding to eight bits alone changes.
        apart = distance(in_bf16[frames], latents[1])
        tell(f"{what}: latents of one card from those in bf16", apart, "relative L2")
    else:
        in_bf16[frames] = latents[1]


def distance(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    """The relative L2 distance."""
    return float(np.linalg.norm(expected - found) / np.linalg.norm(expected))


def steps(binary: Path, work: Path) -> None:
    in_bf16: dict[int, Any] = {}
    with Service(binary, work, "log.filter=info,timeline=debug").logged("steps") as service:
        service.client.wait_until_ready(60)
        for name, model, size, frames, asked in FILMS:
            what = f"{frames} frames{name}"
            measure = partial(both, service, name, model, size, frames, asked, in_bf16)
            guarded(what, measure)
            tell_ledgers(service, f"after {what}")
        service.client.unload(timeout=60)
        service.client.trim()
        tell_ledgers(service, "after unloading")


def deaths(binary: Path, work: Path) -> None:
    """A worker that dies costs what was being sampled, and the film is made all the same."""
    with Service(binary, work).logged("deaths") as service:
        service.client.wait_until_ready(60)
        make = partial(film, service, "hunyuan", (832, 480), 49, latent_only=True, cards=2)
        expected = numbers(service, make(4))
        for number in (0, 1):
            guarded(f"death of card {number}", partial(death, service, make, number, expected))


def death(service: Service, make: Any, number: int, expected: np.ndarray[Any, Any]) -> None:
    workers = [card.worker_pid for card in service.client.status().cards]
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(make(4)))
    began = time.perf_counter()
    thread.start()
    time.sleep(1.5)
    os.kill(workers[number], signal.SIGKILL)
    thread.join(120)
    if not made:
        raise RuntimeError("the film was not made")
    show(made[0])
    apart = distance(expected, numbers(service, made[0]))
    what = f"a film whose card {number} dies"
    tell(what, time.perf_counter() - began, "s", relative_l2=apart)
    tell_ledgers(service, what)


def main() -> None:
    settings = command_line(__doc__, "steps", "all figures").parse_args()
    begin(settings)
    parts = {
        "steps": partial(steps, settings.binary, settings.work),
        "deaths": partial(deaths, settings.binary, settings.work),
    }
    run_parts(parts, settings.parts.split(","))


if __name__ == "__main__":
    main()
