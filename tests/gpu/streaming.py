"""Models larger than the card: FLUX.1-dev on a card made small, beside the whole card."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import checkpoints
import moored
from bench import GIB, Bench, Running, gigabytes
from formats import FULL, in_format
from speed import step_times

FLUX = checkpoints.MODELS[0]
# Format of the transformer, GiB of the card, and the most that a step may take, as a share of a
# resident one.
CAPS = (
    (FULL, 20, 1.05),
    (FULL, 12, None),
    (FULL, 8, None),
    (FULL, 6, None),
    ("fp8", 8, None),
    ("nf4", 5, None),
)
STEPS = 8
SIDE = 1024
BOUND_SHARE = 1.08
"""The most that a step may take, as a share of the longer of its computation and its copies."""
AUTO_CAP = 8
AUTO_STEPS = 28
AUTO_ROUNDS = 3


@dataclass(frozen=True)
class Made:
    """One picture or film: a digest of its bytes, its steps, and what it took."""

    digest: str
    step_ms: list[float]
    first_step_s: float
    """From the request to the end of the first step."""
    seconds: float
    most_used: int
    most_used_at: str
    done: moored.Done

    @property
    def computed_whole(self) -> bool:
        """Whether no stage was cut into parts: the library convolves those by other algorithms."""
        return computed_whole(self.done.stages)

    @property
    def stages(self) -> dict[str, float]:
        """Milliseconds of moves and of the computation, by stage."""
        return {one.name: float(one.move_ms + one.run_ms) for one in self.done.stages}


def computed_whole(stages: Sequence[moored.StageReport]) -> bool:
    """Whether no stage was cut into parts: the library convolves those by other algorithms."""
    return all(one.cached or one.chunking == "whole" for one in stages)


@dataclass(frozen=True)
class Beside:
    """What a small card is held against."""

    whole: Made
    """The same on the whole card."""
    nothing: int
    """Bytes of the card that are used while nothing of ours is on it."""
    link: float | None
    """GB/s from pinned memory to the card, by PyTorch in the same run; None without PyTorch."""


def followed(running: Running, stream: moored.EventStream[Any]) -> Made:
    """A job to its end, with its figures."""
    at: list[tuple[int, float]] = []
    done = None
    began = time.perf_counter()
    with running.peak() as peak, stream:
        for event in stream:
            if isinstance(event, moored.Step):
                at.append((event.n, time.perf_counter()))
            elif isinstance(event, moored.Done):
                done = event
    if done is None or not at:
        raise RuntimeError("a job ended without its last event, or without a step")
    seconds, first = time.perf_counter() - began, at[0][1] - began
    made = digest(stream)
    return Made(made, step_times(at), first, seconds, peak.bytes, peak.told, done)


def digest(stream: moored.EventStream[Any]) -> str:
    """Of the bytes of a job's pictures and films."""
    found = hashlib.sha256()
    for one in (*stream.pictures, *stream.films):
        found.update(one.data)
    return found.hexdigest()


def make(running: Running, name: str) -> Made:
    """A picture in few steps, and its figures."""
    options: dict[str, Any] = {"width": SIDE, "height": SIDE, "seed": 7, "output": "raw"}
    options["steps"] = STEPS
    model = in_format(name)
    return followed(
        running,
        running.client.stream_image(
            "a lighthouse in the rain", model=model, timeout=300, **options
        ),
    )


def pictures(bench: Bench) -> None:
    """Steps and pictures on small cards, each format beside its own on the whole card."""
    bench.needs_card()
    link = _link(bench)
    checkpoints.warm(bench.models / FLUX, bench.threads)
    whole: dict[str, Made] = {}
    for name in dict.fromkeys(name for name, *_ in CAPS):
        with bench.serve() as running:
            cold = make(running, name)
            whole[name] = make(running, name)
        same = f"pictures equal, {name}, of a model that came for it and of a resident one"
        is_same = float(cold.digest == whole[name].digest)
        bench.record.add(f"stream.{name}.cold.same", same, is_same, "", "higher", 1.0)
        ms = statistics.median(whole[name].step_ms)
        bench.record.add(
            f"stream.{name}.resident", f"step, {name}, {SIDE}x{SIDE}, resident", ms, "ms"
        )
    failed = []
    for name, cap, share in CAPS:
        try:
            # What the driver has on an empty card differs from time to time.
            nothing = bench.foreign_bytes()
            bench.record.note(f"used before {name} on {cap} GiB: {gigabytes(nothing):.3f} GB")
            _on_small_card(bench, name, cap, share, Beside(whole[name], nothing, link))
        except (moored.MooredError, RuntimeError) as error:
            bench.record.note(f"{name} on {cap} GiB failed: {type(error).__name__}: {error}")
            failed.append(f"{name} on {cap} GiB")
    try:
        _by_itself(bench)
    except (moored.MooredError, RuntimeError) as error:
        bench.record.note(f"auto failed: {type(error).__name__}: {error}")
        failed.append("auto")
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _link(bench: Bench) -> float | None:
    try:
        return float(bench.beside("link")["pinned_to_card"])
    except RuntimeError as error:
        bench.record.note(f"the link was not measured: {error}")
        return None


def _by_itself(bench: Bench) -> None:
    """Prompt to PNG on a small card, in formats that the service chooses, from the page cache."""
    options = {"model": f"{FLUX}+auto", "width": SIDE, "height": SIDE, "seed": 7, "timeout": 300}
    with bench.serve(bench.small_card(AUTO_CAP * GIB)) as running:
        running.client.generate_image("a lighthouse in the rain", steps=1, **options)
        taken = []
        for number in range(AUTO_ROUNDS):
            running.client.unload(timeout=60)
            began = time.perf_counter()
            prompt = f"lighthouse number {number} in the rain"
            made = running.client.generate_image(prompt, steps=AUTO_STEPS, **options)
            taken.append(time.perf_counter() - began)
    what = f"auto on a card of {AUTO_CAP} GiB, {AUTO_STEPS} steps, prompt to PNG, nothing resident"
    bench.record.add("stream.auto", what, statistics.median(taken), "s", target=3.8)
    stages = ", ".join(f"{one.name} {one.move_ms} + {one.run_ms} ms" for one in made.stages)
    bench.record.note(f"{what}: {made.model.key}: {stages}")


def _on_small_card(bench: Bench, name: str, cap: int, share: float | None, beside: Beside) -> None:
    whole, nothing = beside.whole, beside.nothing
    key, what = f"stream.{name}.{cap}", f"{name} on a card of {cap} GiB"
    settings = ("log.filter=info,timeline=debug",)
    with bench.serve(bench.small_card(cap * GIB), settings=settings) as running:
        before = running.used()
        first = make(running, name)
        again = make(running, name)
        options = {"width": SIDE, "height": SIDE, "steps": STEPS, "model": in_format(name)}
        plan = running.client.plan("a lighthouse in the rain", **options)
        parts = [part for stage in plan.stages for part in stage.streamed]
        each = sum(part.streamed_bytes for part in parts if part.name == "transformer")
        once = sum(part.streamed_once_bytes for part in parts if part.name == "transformer")
        running.client.unload(timeout=60)
        running.client.trim()
        left = running.used() - before
        log = "".join(running.service.log)
    (bench.out / f"{key}.log").write_text(log, encoding="utf-8")
    add = bench.record.add
    ms, resident = statistics.median(again.step_ms), statistics.median(whole.step_ms)
    add(key, f"step, {what}", ms, "ms", target=share and share * resident)
    add(f"{key}.ratio", f"step, {what}: of a resident one", ms / resident, "")
    add(f"{key}.bytes", f"streamed in each step, {what}", gigabytes(each), "GB")
    add(f"{key}.once", f"streamed once, {what}", gigabytes(once), "GB")
    rate = gigabytes(each) / ms * 1e3
    add(f"{key}.rate", f"streamed in each step, by its time, {what}", rate, "GB/s", "higher")
    if beside.link and each:
        bound = max(resident, 1e3 * gigabytes(each) / beside.link)
        told = f"step, {what}: of the longer of its computation and its copies"
        add(f"{key}.bound", told, ms / bound, "", target=BOUND_SHARE)
    add(f"{key}.first", f"first picture, {what}, {STEPS} steps", first.seconds, "s")
    add(f"{key}.again", f"the same again, {what}", again.seconds, "s")
    used = gigabytes(max(first.most_used, again.most_used) - nothing)
    add(f"{key}.used", f"most on the card by NVML, {what}", used, "GB", target=gigabytes(cap * GIB))
    add(f"{key}.left", f"left on the card after an unload, {what}", left / (1 << 20), "MiB")
    same = first.digest == again.digest == whole.digest
    add(f"{key}.same", f"pictures equal to resident ones, {what}", float(same), "", "higher", 1.0)
    stages = ", ".join(f"{stage} {ms:.0f} ms" for stage, ms in again.stages.items())
    bench.record.note(f"{what}: {stages}")


# Format, GiB of the card, and GiB of the machine's memory.
FROM_DISK = ((FULL, 6, 4), ("nf4", 5, 1))


def from_disk(bench: Bench) -> None:
    """Models for which the machine has too little memory: the rest is read, and made, in each pass."""
    bench.needs_card()
    checkpoints.warm(bench.models / FLUX, bench.threads)
    for name, cap, budget in FROM_DISK:
        _from_disk(bench, name, cap, budget)


def _from_disk(bench: Bench, name: str, cap: int, budget: int) -> None:
    with bench.serve() as running:
        whole = make(running, name)
    memory = f"{gigabytes(budget * GIB):.1f} GB of the machine's memory"
    what = f"{name} on a card of {cap} GiB, with {memory}"
    settings = (f"cards.host_memory={budget}GiB",)
    with bench.serve(bench.small_card(cap * GIB), settings=settings) as running:
        make(running, name)
        again = make(running, name)
        (card,) = running.client.status().cards
        held = sum(one.bytes for one in card.on_host)
    key = "stream.disk" if name == FULL else f"stream.disk.{name}"
    add = bench.record.add
    add(key, f"step, {what}", statistics.median(again.step_ms), "ms")
    told = f"held of the machine's memory, {what}"
    add(f"{key}.held", told, gigabytes(held), "GB", target=gigabytes(budget * GIB))
    same = again.digest == whole.digest
    add(f"{key}.same", f"pictures equal, {what}", float(same), "", "higher", 1.0)


# Cheap ones first.
PARTS = {"stream-pictures": pictures, "stream-disk": from_disk}
LIMITS_S = {"stream-pictures": 420.0, "stream-disk": 120.0}
