"""Models that take each other's place, and the first step of one that is not on the card."""

from __future__ import annotations

import statistics
import time
from typing import Any

import checkpoints
import loading
import timeline
from bench import GIB, Bench, Running
from figures import MIB
from formats import PART
from streaming import FLUX, followed

SWAP_S = 0.55
LOG_S = 0.2
"""After it the log of what has ended is read."""
SHOWN_PARTS = 24
CARD = 12 * GIB
SMALL_CARD = 20 * MIB
FIRST_SHARE = 1.1
"""Load and first step together, as a share of the load alone."""
ENCODE = "encode_text"
# What a swap's time is made of, one after another: its name in the table, and the operation and part of the
# log that tell it.
WHERE = (
    ("the unload, to the driver's confirmation", "swap: round trip of an unload"),
    ("loads", "bring a component in: load"),
    ("asking the driver after loads", "bring a component in: ask the driver"),
    ("computing the proof", "run: compute"),
)
# What is inside of these.
INSIDE = (
    ("reading and copying, of the loads", "load: read and copy"),
    ("freeing the memory, of the unload", "unload: free the memory"),
)


def swap(bench: Bench) -> None:
    """Two models of full size in turn, and where the time of each swap goes."""
    if bench.models_made < len(checkpoints.MODELS):
        raise RuntimeError("a swap needs both models: --models 2")
    settings = ("log.filter=info,timeline=debug",)
    with loading.serve_for_swaps(bench, settings) as running:
        swaps = list(loading.swaps(running, bench.scale.stream_swaps, LOG_S))
        log = "".join(running.service.log)
    (bench.out / "stream-swap.log").write_text(log, encoding="utf-8")
    add, what = bench.record.add, "swap of 23.8 GB models, proof included"
    seconds = [one.seconds for one in swaps]
    p50 = statistics.median(seconds)
    add("stream.swap", f"{what}, p50 of {len(seconds)}", p50, "s", target=SWAP_S)
    add("stream.swap.best", f"{what}, best", min(seconds), "s")
    add("stream.swap.worst", f"{what}, worst", max(seconds), "s")
    shares = [100 * freed / booked for one in swaps for booked, freed in one.freed]
    add("stream.swap.freed", f"{what}: bytes freed, least", min(shares), "%", "higher", 100.0)
    found = [timeline.entries(one.log) for one in swaps]
    for number, (name, part) in enumerate((*WHERE, *INSIDE)):
        ms = statistics.median(sum(_ms(one, part)) for one in found)
        add(f"stream.swap.{number}", f"of a swap: {name}, p50", ms, "ms")
    told = [sum(sum(_ms(one, part)) for _, part in WHERE) for one in found]
    rest = statistics.median(1e3 * s - ms for s, ms in zip(seconds, told, strict=True))
    add("stream.swap.rest", "of a swap: all else, p50", rest, "ms")
    median = min(range(len(swaps)), key=lambda at: abs(seconds[at] - p50))
    bench.record.note(f"a swap of {1e3 * seconds[median]:.0f} ms, by its log:")
    for line in timeline.sums(found[median]).splitlines()[: SHOWN_PARTS + 1]:
        bench.record.note(line)
    stages = ", ".join(
        f"{one.name} {one.move_ms} + {one.run_ms} ms" for one in swaps[median].stages
    )
    bench.record.note(f"by its report, moves and computing: {stages}")


def _ms(found: list[timeline.Entry], part: str) -> list[float]:
    return [one.ms for one in found if one.ms is not None and f"{one.of}: {one.part}" == part]


def cold_first_step(bench: Bench) -> None:
    """A model that is not on the card: its load alone, and its load with the first step."""
    checkpoints.warm(bench.models / FLUX, bench.threads)
    small = SMALL_CARD if bench.small else CARD
    told = f"{small // GIB} GiB" if small >= GIB else f"{small // MIB} MiB"
    whole_s = _first_step(bench, "", "on the whole card", 0.0)
    _first_step(bench, bench.small_card(small), f"on a card of {told}", whole_s)


def _first_step(bench: Bench, device: str, where: str, whole_s: float) -> float:
    """The seconds of a load. Where not all fits, all the same crosses the link: the whole load counts."""
    side = bench.scale.picture
    options: dict[str, Any] = {"model": FLUX, "width": side, "height": side, "seed": 7}
    options |= {"latent_only": True, "timeout": 240}
    loads, firsts, steps = [], [], []
    settings = ("log.filter=info,timeline=debug",)
    with bench.serve(*[device] if device else [], settings=settings) as running:
        call = running.client.stream_image
        prompt = "a lighthouse in the rain"
        # It brings libraries, code, and the prompt's encoding, which stays.
        steps += followed(running, call(prompt, steps=4, **options)).step_ms
        for _ in range(bench.scale.cold_rounds):
            _unload(running)
            began = time.perf_counter()
            running.client.load(FLUX, components=(PART,), timeout=120)
            loads.append(time.perf_counter() - began)
            _unload(running)
            made = followed(running, call(prompt, steps=4, **options))
            if not all(one.cached for one in made.done.stages if one.name == ENCODE):
                raise RuntimeError(
                    "the prompt was encoded anew: the first step is not the model's alone"
                )
            firsts.append(made.first_step_s)
            steps += made.step_ms
        log = "".join(running.service.log)
    key = f"stream.cold.{'small' if device else 'whole'}"
    (bench.out / f"{key}.log").write_text(log, encoding="utf-8")
    add, load_s, first_s = bench.record.add, statistics.median(loads), statistics.median(firsts)
    add(f"{key}.load", f"load of the transformer alone, {where}, p50", load_s, "s")
    add(f"{key}.step", f"a later step, {where}, p50", statistics.median(steps), "ms")
    what = f"load and first step of a cold model, {where}"
    add(key, f"{what}, p50", first_s, "s")
    against = whole_s or load_s
    ratio = f"{what}: of the load alone{' on the whole card' if whole_s else ''}"
    add(f"{key}.ratio", ratio, first_s / against, "", target=FIRST_SHARE)
    bench.record.note(f"{what}, seconds: {_listed(firsts)}; loads alone: {_listed(loads)}")
    return load_s


def _unload(running: Running) -> None:
    if kept := running.client.unload(timeout=60).kept:
        raise RuntimeError(f"an unload kept {kept}")


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{one:.3f}" for one in seconds)


PARTS: dict[str, Any] = {"stream-swap": swap, "cold-first-step": cold_first_step}
LIMITS_S = {"stream-swap": 180.0, "cold-first-step": 180.0}
