"""Weights in, weights out: link, load, unload, swap, drift."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import checkpoints
import moored
from bench import Bench, Running, gigabytes, takes_replace
from figures import MIB, percentile

HASH_TIMEOUT_S = 240.0
WARM_UP_CYCLES = 20
SEEN_WITHIN_S = 0.5
SAMPLE_EVERY = 10


def make(bench: Bench) -> None:
    """The checkpoints, and the hashes of their content, by which the service knows what two models share."""
    sizes = checkpoints.SMALL if bench.small else checkpoints.FULL
    written, seconds = checkpoints.make(bench.models, sizes, bench.threads, bench.models_made)
    if written:
        bench.record.note(f"made {gigabytes(written):.2f} GB in {seconds:.1f} s")
    else:
        bench.record.note("the checkpoints are there already")
    began = time.monotonic()
    read = checkpoints.warm(bench.models, bench.threads)
    seconds = time.monotonic() - began
    bench.record.note(f"read {gigabytes(read):.2f} GB into the page cache in {seconds:.1f} s")
    began = time.monotonic()
    with bench.serve() as running:
        wait_for_hashes(running.client, checkpoints.MODELS[: bench.models_made])
    bench.record.note(f"hashed by the service in {time.monotonic() - began:.1f} s")


def wait_for_hashes(client: moored.Client, names: tuple[str, ...]) -> None:
    """Waits until the service knows these checkpoints by their content, or raises a TimeoutError.

    They are of one size: all but their transformers is the same.
    """
    wait_until_known(client, names)
    models = {model.id: model for model in client.list_models(timeout=60)}
    by_name = [{c.name: c.id for c in models[name].components} for name in names]
    shared = [part for part in by_name[0] if len({one[part] for one in by_name}) == 1]
    if len(names) > 1 and sorted(shared) != ["text_encoder", "text_encoder_2", "vae"]:
        raise RuntimeError(f"the models share {', '.join(shared) or 'nothing'}")


def wait_until_known(client: moored.Client, names: tuple[str, ...]) -> None:
    """Waits until the service knows the files of these models by their content, or raises a TimeoutError."""
    until = time.monotonic() + HASH_TIMEOUT_S
    while not _are_known(client, names):
        if time.monotonic() > until:
            raise TimeoutError("the service has not hashed the files in time")
        time.sleep(0.5)


def _are_known(client: moored.Client, names: tuple[str, ...]) -> bool:
    """Whether no component goes by its path any more.

    They change over when somebody asks something of them: to be unloaded, which here does nothing.
    """
    for name in names:
        client.unload(name, timeout=60)
    models = {model.id: model for model in client.list_models(timeout=60)}
    problems = [f"{m.id}: {m.problem}" for m in models.values() if m.problem]
    if problems:
        raise RuntimeError("; ".join(problems))
    known = (c.id for name in names for c in models[name].components)
    return not any(one.startswith("path:") for one in known)


def link(bench: Bench) -> None:
    """What the link gives to a program that does nothing else."""
    bench.needs_card()
    found = bench.beside("link")
    add = bench.record.add
    unit = "GB/s"
    add("link.pinned", "link, pinned host to card", found["pinned_to_card"], unit, "higher")
    add("link.back", "link, card to pinned host", found["card_to_pinned"], unit, "higher")
    add("link.pageable", "link, pageable host to card", found["pageable_to_card"], unit, "higher")
    bench.record.note(f"link by torch {found['torch']}")


def component_bytes(client: moored.Client, model: str, name: str) -> int:
    """Bytes of a component in full precision, as the service lists it."""
    models = {one.id: one for one in client.list_models(timeout=60)}
    return next(c.bytes for c in models[model].components if c.name == name)


def load(bench: Bench) -> None:
    """The transformer from the page cache onto the card."""
    model = checkpoints.MODELS[0]
    checkpoints.warm(bench.models / model / "transformer", bench.threads)
    inside, outside = [], []
    with bench.serve() as running:
        client = running.client
        # A service hashes files that it has not seen, which reads memory as fast as a load does.
        wait_for_hashes(client, checkpoints.MODELS[: bench.models_made])
        size = component_bytes(client, model, "transformer")
        for _ in range(bench.scale.load_rounds):
            began = time.perf_counter()
            done = client.load(model, components=("transformer",), timeout=120)
            outside.append(time.perf_counter() - began)
            inside.append(sum(stage.move_ms for stage in done.stages) / 1000)
            client.unload(model, timeout=60)
    what = f"load {gigabytes(size):.1f} GB, page cache hot"
    # The first round may find the pinned ring not there yet; it counts like any other.
    add = bench.record.add
    speeds = [gigabytes(size) / max(seconds, 1e-3) for seconds in inside]
    add("load.p50", f"{what}, p50", statistics.median(speeds), "GB/s", "higher", 45.0)
    add("load.best", f"{what}, best", max(speeds), "GB/s", "higher")
    add("load.worst", f"{what}, worst", min(speeds), "GB/s", "higher")
    wall = gigabytes(size) / statistics.median(outside)
    add("load.call", f"{what}, the whole call, p50", wall, "GB/s", "higher")
    bench.record.note("load seconds: " + ", ".join(f"{one:.3f}" for one in inside))


def unload(bench: Bench) -> None:
    """The transformer off the card, and small components, many times."""
    scale = bench.scale
    with bench.serve() as running:
        size = component_bytes(running.client, checkpoints.MODELS[0], "transformer")
        what = f"unload {gigabytes(size):.1f} GB"
        large = _cycles(running, ("transformer",), scale.unload_rounds)
        _tell_unloads(bench, "unload.large", what, large, target=100.0)
        small = _cycles(running, ("vae", "text_encoder"), scale.small_unload_rounds)
        _tell_unloads(bench, "unload.small", "unload VAE and CLIP", small, target=None)


def _tell_unloads(
    bench: Bench, key: str, what: str, cycles: list[_Cycle], target: float | None
) -> None:
    add, calls = bench.record.add, [1e3 * cycle.call_s for cycle in cycles]
    call = f"{what}, the whole call"
    add(f"{key}.p50", f"{call}, p50 of {len(calls)}", statistics.median(calls), "ms")
    worst = percentile(calls, 0.99)
    add(f"{key}.p99", f"{call}, p99 of {len(calls)}", worst, "ms", target=target)
    share = 100 * min(cycle.freed / cycle.booked for cycle in cycles)
    add(f"{key}.share", f"{what}, bytes reported as freed, least", share, "%", "higher", 100.0)
    left = max(cycle.left for cycle in cycles) / MIB
    add(f"{key}.left", f"{what}, bytes left by NVML, most", left, "MiB", target=0.0)
    seen = percentile([1e3 * cycle.seen_s for cycle in cycles], 0.99)
    add(f"{key}.seen", f"{what}, from the call to NVML's seeing it, p99", seen, "ms")


class _Cycle:
    """One load and unload."""

    def __init__(self, running: Running, components: tuple[str, ...]) -> None:
        model, before = checkpoints.MODELS[0], running.settled()
        running.client.load(model, components=components, timeout=120)
        began = time.monotonic()
        answer = running.client.unload(model, timeout=60)
        self.call_s = time.monotonic() - began
        self.left = running.used() - before
        self.seen_s = running.back_at(before, began, within_s=SEEN_WITHIN_S)
        if answer.kept:
            raise RuntimeError(f"an unload kept {answer.kept}")
        self.booked = sum(one.booked_bytes for one in answer.freed)
        self.freed = sum(one.freed_bytes for one in answer.freed)


def _cycles(running: Running, components: tuple[str, ...], count: int) -> list[_Cycle]:
    # The first one of a kind brings what stays: the context, the pinned ring, the libraries.
    _Cycle(running, components)
    return [_Cycle(running, components) for _ in range(count)]


def swap(bench: Bench) -> None:
    """One model for the other, and back."""
    times, how = swap_seconds(bench)
    for what, seconds in times.items():
        add, text = bench.record.add, f"swap {what}, {how}"
        add(f"swap.{what}.p50", f"{text}, p50", statistics.median(seconds), "s", target=0.8)
        add(f"swap.{what}.worst", f"{text}, worst", max(seconds), "s", target=0.8)


@dataclass(frozen=True)
class Swap:
    """One model in the place of the other."""

    old: str
    new: str
    seconds: float
    stages: tuple[moored.StageReport, ...]
    freed: list[tuple[int, int]]
    """Bytes of what left, as booked and as the driver confirmed."""
    log: list[str]
    """What the service wrote meanwhile."""


def swap_seconds(bench: Bench) -> tuple[dict[str, list[float]], str]:
    """Seconds of each swap there and back, by direction, and how a swap is done."""
    first, second = checkpoints.MODELS
    times: dict[str, list[float]] = {f"{first} -> {second}": [], f"{second} -> {first}": []}
    with serve_for_swaps(bench) as running:
        whole = takes_replace(running.client)
        for one in swaps(running, bench.scale.swap_rounds):
            times[f"{one.old} -> {one.new}"].append(one.seconds)
    if not whole:
        bench.record.note("this client's load has no `replace`: swaps were put together by hand")
    return times, "proof included" if whole else "by a smallest picture and an unload"


@contextmanager
def serve_for_swaps(bench: Bench, settings: tuple[str, ...] = ()) -> Iterator[Running]:
    """A service whose first model has computed, as one that serves; both are in the page cache."""
    for model in checkpoints.MODELS:
        checkpoints.warm(bench.models / model / "transformer", bench.threads)
    with bench.serve(settings=settings) as running:
        running.client.load(checkpoints.MODELS[0], prove=True, timeout=120)
        yield running


def swaps(running: Running, rounds: int, log_s: float = 0.0) -> Iterator[Swap]:
    """Swaps there and back; each is followed by so long a wait for what the service writes."""
    first, second = checkpoints.MODELS
    whole = takes_replace(running.client)
    for _ in range(rounds):
        for old, new in ((first, second), (second, first)):
            lines = len(running.service.log)
            began = time.perf_counter()
            done = _swap(running.client, old, new, whole)
            seconds = time.perf_counter() - began
            _assert_resident(running, new, old)
            time.sleep(log_s)
            freed = [(one.booked_bytes, one.freed_bytes) for one in done.freed] if done else []
            stages = done.stages if done else ()
            yield Swap(old, new, seconds, stages, freed, running.service.log[lines:])


def _swap(client: moored.Client, old: str, new: str, whole: bool) -> moored.Done | None:
    """The job's last event, where it is one job."""
    if whole:
        # Of a client that has it; see takes_replace.
        load: Any = client.load
        done: moored.Done = load(new, replace=old, timeout=120).done
        return done
    client.load(new, timeout=120)
    client.generate_image("a canary", model=new, width=64, height=64, steps=1, timeout=120)
    client.unload(old, timeout=60)
    return None


def _assert_resident(running: Running, there: str, gone: str) -> None:
    models = {one.id: one for one in running.client.list_models(timeout=60)}
    residents = {one.component.id for one in running.status().residents}
    new = {c.id for c in models[there].components}
    old = {c.id for c in models[gone].components} - new
    if not new <= residents or old & residents:
        raise RuntimeError(f"after a swap to {there} there are {sorted(residents)}")


def drift(bench: Bench) -> None:
    """Many cycles of mixed entries; then the idle card holds what it held after the first few."""
    chance = random.Random(1)
    samples: list[int] = []
    untrimmed: list[int] = []
    done, began = 0, time.monotonic()
    counts: dict[str, int] = {}
    with bench.serve() as running:
        for cycle in range(1, bench.scale.drift_cycles + 1):
            spent = (time.monotonic() - began) / bench.scale.drift_seconds
            if spent > 1:
                break
            ahead = spent <= cycle / bench.scale.drift_cycles
            kind = _kind_of_cycle(cycle, chance, large_is_affordable=ahead)
            _drift_cycle(running.client, kind, cycle)
            counts[kind] = counts.get(kind, 0) + 1
            done = cycle
            if cycle >= WARM_UP_CYCLES and cycle % SAMPLE_EVERY == 0:
                untrimmed.append(running.settled())
                running.client.trim()
                samples.append(running.settled())
    base = samples[0]
    what = f"drift of idle memory, {done:,} cycles"
    add = bench.record.add
    add("drift.end", f"{what}, at the end", (samples[-1] - base) / MIB, "MiB", target=16.0)
    add("drift.most", f"{what}, at most", (max(samples) - base) / MIB, "MiB", target=16.0)
    slack = max(one - two for one, two in zip(untrimmed, samples, strict=True)) / MIB
    add("drift.slack", "what an idle card keeps before a trim, most", slack, "MiB")
    mixture = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    bench.record.note(f"drift: {mixture}; {time.monotonic() - began:.0f} s")
    if done < bench.scale.drift_cycles:
        limit = bench.scale.drift_seconds
        bench.record.note(f"drift: {bench.scale.drift_cycles} cycles did not fit into {limit:g} s")


def _kind_of_cycle(cycle: int, chance: random.Random, large_is_affordable: bool) -> str:
    """Each kind comes in the warm-up, so that what it brings for good is there when drift is counted."""
    kinds = ("clip", "vae", "small picture", "t5", "transformer", "large picture")
    if cycle <= WARM_UP_CYCLES:
        return kinds[cycle % len(kinds)]
    kind = chance.choices(kinds, (45, 25, 20, 4, 4, 2))[0]
    return kind if large_is_affordable or kind in kinds[:3] else kinds[0]


def _drift_cycle(client: moored.Client, kind: str, seed: int) -> None:
    model = checkpoints.MODELS[seed % 2]
    parts = {
        "clip": ("text_encoder",),
        "vae": ("vae",),
        "t5": ("text_encoder_2",),
        "transformer": ("transformer",),
    }
    if kind in parts:
        client.load(model, components=parts[kind], timeout=120)
    else:
        demo_service = model if kind == "large picture" else "moored/demo"
        client.generate_image(
            f"drift {seed}",
            model=demo_service,
            width=64,
            height=64,
            steps=1,
            seed=seed,
            timeout=120,
        )
    client.unload(timeout=60)


PARTS = {"make": make, "link": link, "load": load, "unload": unload, "swap": swap, "drift": drift}
