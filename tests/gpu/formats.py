"""The transformer in every format of weights: formats, kept, mixed, and bitsandbytes beside them."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import checkpoints
import moored
from bench import Bench, Running, gigabytes
from figures import MIB, read_part
from loading import component_bytes, wait_for_hashes

FULL = "full"
FORMATS = (FULL, "int8", "fp8", "nf4", "nf4-double")
QUANTIZED = FORMATS[1:]
PEER_FORMATS = (FULL, "int8", "nf4", "nf4-double")
PART = "transformer"
LARGE_PARTS = (PART, "text_encoder_2")
# What the transformer of FLUX.1-dev may take on the card, and how fast it is made, in GB of bf16 a second.
MOST_GB = {"int8": 12.1, "fp8": 12.1, "nf4": 6.8, "nf4-double": 6.3}
LEAST_SPEED = {"fp8": 25.0, "nf4": 25.0}
LINK_SHARE = 0.8
"""A kept copy moves at link speed if it reaches this share of what PyTorch's pinned transfers reach."""
COPIES = "*.kept.safetensors"
COPY_TIMEOUT_S = 60.0
COPY_STABLE_S = 1.0
COPY_SHARE = 0.9
"""A copy is whole at no less than this share of the component's booked bytes, which are rounded up."""
COPY_SPARE_BYTES = 16 << 30
WARM_UP_CYCLES = 20
PICTURE_EVERY = 20
SAMPLE_EVERY = 10
DRIFT_TARGET_MIB = 16.0


def in_format(name: str, part: str = PART) -> moored.ModelRef:
    """The first checkpoint with one component in this format, and everything else as it is stored."""
    return moored.ModelRef(checkpoints.MODELS[0], formats={part: name})


@dataclass(frozen=True)
class Cycle:
    """One load of a component and its unload: seconds, bytes."""

    call_s: float
    move_s: float
    booked: int
    used: int
    """What the card held more, by NVML."""
    unload_s: float
    left: int
    """What it held more when the unload had returned."""


def cycle(running: Running, model: moored.ModelRef, part: str = PART) -> Cycle:
    """Loads and unloads; an unload that keeps anything is an error."""
    before = running.settled()
    began = time.perf_counter()
    done = running.client.load(model, components=(part,), timeout=120)
    call_s = time.perf_counter() - began
    used = running.used() - before
    began = time.perf_counter()
    answer = running.client.unload(model, timeout=60)
    unload_s = time.perf_counter() - began
    left = running.used() - before
    if answer.kept:
        raise RuntimeError(f"an unload kept {answer.kept}")
    booked = [one.booked_bytes for one in answer.freed if one.component.name == part]
    if len(booked) != 1:
        raise RuntimeError(f"{part} was to be freed, and {answer.freed} was")
    move_s = sum(stage.move_ms for stage in done.stages) / 1e3
    return Cycle(call_s, max(move_s, 1e-3), booked[0], used, unload_s, left)


def formats(bench: Bench) -> None:
    """Each format: loads from the page cache while it is made, bytes, unloads, steps."""
    checkpoints.warm(bench.models / checkpoints.MODELS[0] / PART, bench.threads)
    with bench.serve() as running:
        wait_for_hashes(running.client, checkpoints.MODELS[:1])
        size = component_bytes(running.client, checkpoints.MODELS[0], PART)
        # What a first job brings for good, the libraries above all, is there before bytes are compared; so is
        # the encoded prompt.
        _generate(bench, running, FULL, bench.scale.job_picture, 1)
        running.client.unload(timeout=60)
        running.client.trim()
        failed = []
        for name in FORMATS:
            try:
                _one_format(bench, running, name, size)
            except (moored.MooredError, RuntimeError) as error:
                # The others are worth their figures.
                bench.record.note(f"{name} failed: {type(error).__name__}: {error}")
                failed.append(name)
    if failed:
        raise RuntimeError(f"formats that failed: {', '.join(failed)}")


def _one_format(bench: Bench, running: Running, name: str, input_bytes: int) -> None:
    input_gb = gigabytes(input_bytes)
    cycles = [cycle(running, in_format(name)) for _ in range(bench.scale.format_rounds)]
    if name != FULL and cycles[0].booked >= input_bytes:
        raise RuntimeError(f"it takes {cycles[0].booked} bytes, as in full precision")
    # The first of a format brings its scratch; its time counts, its bytes do not.
    later = cycles[1:] or cycles
    add, key, what = bench.record.add, f"formats.{name}", f"transformer, {name}"
    most = MOST_GB.get(name)
    booked = gigabytes(max(one.booked for one in later))
    add(f"{key}.booked", f"{what}: bytes on the card as booked", booked, "GB", target=most)
    used = gigabytes(max(one.used for one in later))
    add(f"{key}.used", f"{what}: bytes on the card by NVML", used, "GB", target=most)
    speeds = [input_gb / one.move_s for one in cycles]
    speed, least = f"{what}: load of {input_gb:.1f} GB of bf16", LEAST_SPEED.get(name)
    add(f"{key}.speed", f"{speed}, p50", statistics.median(speeds), "GB/s", "higher", least)
    add(f"{key}.speed.worst", f"{speed}, worst", min(speeds), "GB/s", "higher")
    calls, call = [one.call_s for one in cycles], f"{what}: load, the whole call"
    add(f"{key}.load", f"{call}, p50 of {len(calls)}", statistics.median(calls), "s")
    add(f"{key}.load.worst", f"{call}, worst", max(calls), "s")
    unloads = [1e3 * one.unload_s for one in cycles]
    add(f"{key}.unload", f"{what}: unload, p50", statistics.median(unloads), "ms")
    left = max(one.left for one in later) / MIB
    add(f"{key}.left", f"{what}: bytes left by NVML, most", left, "MiB", target=0.0)
    base = running.settled()
    side = bench.scale.picture
    step_ms, scratch, predicted = _generate(
        bench, running, name, side, bench.scale.format_steps + 1
    )
    add(f"{key}.step", f"{what}: a step at {side}x{side}, mean", step_ms, "ms")
    add(f"{key}.scratch", f"{what}: scratch of it", gigabytes(scratch), "GB")
    running.client.unload(timeout=60)
    running.client.trim()
    after = (running.settled() - base) / MIB
    bench.record.note(
        f"{name}: load seconds {', '.join(f'{one.move_s:.3f}' for one in cycles)}; "
        f"scratch was predicted as {gigabytes(predicted):.2f} GB; "
        f"{after:g} MiB more than before once it had computed and all was trimmed"
    )


def _generate(
    bench: Bench, running: Running, name: str, side: int, steps: int
) -> tuple[float, int, int]:
    """Milliseconds of a step after the first, and scratch bytes of the denoising: taken, predicted."""
    at: list[tuple[int, float]] = []
    done: moored.Done | None = None
    with running.client.stream_image(
        "in every format",
        model=in_format(name),
        width=side,
        height=side,
        steps=steps,
        seed=1,
        latent_only=True,
        timeout=240,
    ) as stream:
        for event in stream:
            if isinstance(event, moored.Step):
                at.append((event.n, time.monotonic()))
            elif isinstance(event, moored.Done):
                done = event
    if done is None or not at:
        raise RuntimeError(f"{name}: a job ended without a step")
    (first, began), (last, ended) = at[0], at[-1]
    denoise = next(stage for stage in done.stages if stage.name == "denoise")
    # Steps that come faster than they are told may leave only the last one.
    apart = last - first
    step_ms = 1e3 * (ended - began) / apart if apart else denoise.run_ms / last
    return step_ms, denoise.peak_scratch_bytes, denoise.predicted_scratch_bytes


def kept(bench: Bench) -> None:
    """The same from copies that an earlier load has kept: only the small bytes move."""
    if not bench.knows("quantization.keep_folder"):
        raise RuntimeError("this build has no setting quantization.keep_folder")
    checkpoints.warm(bench.models / checkpoints.MODELS[0] / PART, bench.threads)
    target, failed = _link_target(bench), []
    for name in QUANTIZED:
        folder = _roomy_folder(bench) / f"moored-kept-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            _one_kept(bench, name, folder, target)
        except (moored.MooredError, RuntimeError) as error:
            bench.record.note(f"{name} failed: {type(error).__name__}: {error}")
            failed.append(name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    if failed:
        raise RuntimeError(f"formats that failed: {', '.join(failed)}")


def _one_kept(bench: Bench, name: str, folder: Path, target: float | None) -> None:
    settings = (f"quantization.keep_folder={folder}", "quantization.keep_limit=64GiB")
    model = in_format(name)
    with bench.serve(settings=settings) as running:
        # A copy is kept by the content that it is made of.
        wait_for_hashes(running.client, checkpoints.MODELS[:1])
        made = cycle(running, model)
        began = time.monotonic()
        copy = _whole_copy(folder, int(COPY_SHARE * made.booked))
        written_s = time.monotonic() - began - COPY_STABLE_S
        checkpoints.warm(folder, bench.threads, ending="")
        cycles = [cycle(running, model) for _ in range(bench.scale.kept_rounds)]
    speeds = [gigabytes(one.booked) / one.move_s for one in cycles]
    add, what = bench.record.add, f"kept copy, {name}, {gigabytes(copy):.1f} GB"
    add(f"kept.{name}", f"{what}: load, p50", statistics.median(speeds), "GB/s", "higher", target)
    add(f"kept.{name}.worst", f"{what}: load, worst", min(speeds), "GB/s", "higher")
    calls = [one.call_s for one in cycles]
    add(f"kept.{name}.load", f"{what}: load, the whole call, p50", statistics.median(calls), "s")
    left = max(one.left for one in cycles) / MIB
    add(f"kept.{name}.left", f"{what}: bytes left by NVML, most", left, "MiB", target=0.0)
    bench.record.note(
        f"{name}: the load that made it took {made.call_s:.2f} s, "
        f"the copy was whole {max(0.0, written_s):.1f} s after its unload"
    )


COLD_FORMATS = ("int8", "nf4")


def cold(bench: Bench) -> None:
    """What a kept copy saves of a load where nothing is in the page cache."""
    weights = bench.models / checkpoints.MODELS[0] / PART
    for name in COLD_FORMATS:
        folder = bench.work / f"moored-cold-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            checkpoints.evict(weights)
            with bench.serve() as running:
                wait_for_hashes(running.client, checkpoints.MODELS[:1])
                checkpoints.evict(weights)
                without = cycle(running, in_format(name))
            settings = (f"quantization.keep_folder={folder}", "quantization.keep_limit=64GiB")
            with bench.serve(settings=settings) as running:
                wait_for_hashes(running.client, checkpoints.MODELS[:1])
                made = cycle(running, in_format(name))
                _whole_copy(folder, int(COPY_SHARE * made.booked))
                checkpoints.evict(folder)
                checkpoints.evict(weights)
                copied = cycle(running, in_format(name))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        add, what = bench.record.add, f"cold load, {name}"
        add(f"cold.{name}.stored", f"{what}: from the checkpoint", without.call_s, "s")
        add(f"cold.{name}.copy", f"{what}: from a kept copy", copied.call_s, "s")
        saved = 1 - copied.call_s / without.call_s
        add(f"cold.{name}.saved", f"{what}: what the copy saves", 100 * saved, "%", "higher", 20.0)


def _link_target(bench: Bench) -> float | None:
    """A share of what the part `link` has found on this machine; None where it has not run."""
    found = read_part(bench.work / "link.jsonl", "ok", "", 0.0)
    pinned = next((one.value for one in found.figures if one.key == "link.pinned"), None)
    if pinned is None:
        bench.record.note("the part link has not run here: kept copies have no target")
        return None
    bench.record.note(f"link speed: {LINK_SHARE:g} of the {pinned:g} GB/s of the part link")
    return float(f"{LINK_SHARE * pinned:.3g}")


def _roomy_folder(bench: Bench) -> Path:
    """The work folder, or shared memory where its disk is too small for the largest copy."""
    roomy = bench.small or shutil.disk_usage(bench.work).free >= COPY_SPARE_BYTES
    return (
        bench.work if roomy or not checkpoints.SHARED_MEMORY.is_dir() else checkpoints.SHARED_MEMORY
    )


def _whole_copy(folder: Path, least_bytes: int) -> int:
    """Waits until the copy is there, and grows no more; its bytes."""
    until, last, since = time.monotonic() + COPY_TIMEOUT_S, -1, 0.0
    while (now := time.monotonic()) < until:
        size = _bytes_in(folder)
        if size != last:
            last, since = size, now
        elif size >= least_bytes and now - since >= COPY_STABLE_S:
            return size
        time.sleep(0.1)
    raise TimeoutError(f"after {COPY_TIMEOUT_S:g} s there are {last} bytes of a copy in {folder}")


def _bytes_in(folder: Path) -> int:
    """Bytes of whole copies: one that is being written has its size from the start, and another name."""
    size = 0
    for file in folder.rglob(COPIES):
        try:
            size += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:
            pass  # It was renamed to its own name just now.
    return size


def mixed(bench: Bench) -> None:
    """Many cycles that mix formats; then the idle card holds what it held after the first few."""
    scale, samples, left = bench.scale, [], []
    done, pictures, began = 0, 0, time.monotonic()
    with bench.serve() as running:
        wait_for_hashes(running.client, checkpoints.MODELS[:1])
        for number in range(scale.mixed_cycles):
            if time.monotonic() - began > scale.mixed_seconds:
                break
            name, part = mixture(number)
            if is_picture(number):
                _generate(bench, running, FORMATS[pictures % len(FORMATS)], scale.job_picture, 1)
                running.client.unload(timeout=60)
                pictures += 1
            else:
                one = cycle(running, in_format(name, part), part)
                if number >= WARM_UP_CYCLES:
                    left.append(one.left)
            done = number + 1
            if done >= WARM_UP_CYCLES and done % SAMPLE_EVERY == 0:
                running.client.trim()
                samples.append(running.settled())
    base = samples[0]
    add, what = bench.record.add, f"{done:,} cycles that mix formats"
    drift = f"{what}: drift of idle memory"
    target = DRIFT_TARGET_MIB
    add("mixed.end", f"{drift}, at the end", (samples[-1] - base) / MIB, "MiB", target=target)
    add("mixed.most", f"{drift}, at most", (max(samples) - base) / MIB, "MiB", target=target)
    if left:
        add("mixed.left", f"{what}: bytes left by NVML, most", max(left) / MIB, "MiB", target=0.0)
    seconds = time.monotonic() - began
    parts = " and ".join(LARGE_PARTS)
    bench.record.note(f"{parts}, {pictures} of them pictures; {seconds:.0f} s")
    if done < scale.mixed_cycles:
        limit = scale.mixed_seconds
        bench.record.note(f"{scale.mixed_cycles} cycles did not fit into {limit:g} s")


def mixture(number: int) -> tuple[str, str]:
    """Format and component of a cycle: each ten in a row are all there are, each ten in another order."""
    turn, place = divmod(number, len(FORMATS) * len(LARGE_PARTS))
    index = (place * 3 + turn) % (len(FORMATS) * len(LARGE_PARTS))
    return FORMATS[index % len(FORMATS)], LARGE_PARTS[index // len(FORMATS)]


def is_picture(number: int) -> bool:
    """Whether a cycle generates. In the warm-up every format does: what it brings for good is there then."""
    if number < WARM_UP_CYCLES:
        return number % (WARM_UP_CYCLES // len(FORMATS)) == WARM_UP_CYCLES // len(FORMATS) - 1
    return number % PICTURE_EVERY == PICTURE_EVERY // 2


def bitsandbytes(bench: Bench) -> None:
    """diffusers with bitsandbytes, and without, on the same files; each format in a process of its own."""
    bench.needs_card()
    folder = bench.models / checkpoints.MODELS[0] / PART
    checkpoints.warm(folder, bench.threads)
    scale, said = bench.scale, set()
    for name in PEER_FORMATS:
        options = {
            "--folder": str(folder),
            "--format": name,
            "--rounds": str(scale.peer_rounds),
            "--steps": str(scale.format_steps),
            "--side": str(scale.picture),
        }
        words = [word for option in options.items() for word in option]
        try:
            found = bench.beside("quantized", *words, timeout_s=scale.peer_seconds)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"error": str(error)}
        if "error" in found:
            bench.record.note(f"{name}: {found['error']}")
            continue
        said.add(found["versions"])
        _tell_peer(bench, name, found["rounds"], found["steps"])
    bench.record.note(f"others: {'; '.join(sorted(said))}")


def _tell_peer(bench: Bench, name: str, rounds: list[dict[str, float]], steps: list[float]) -> None:
    def median(what: str) -> float:
        return statistics.median(one[what] for one in rounds)

    of, key = f"formats.{name}", f"bitsandbytes.{name}"
    who = "diffusers" if name == FULL else f"bitsandbytes {name}"
    later = rounds[1:] or rounds
    used, allocated = (gigabytes(int(median(what))) for what in ("used", "allocated"))
    add = bench.record.add
    add(f"{key}.allocated", f"{who}, allocated", allocated, "GB", peer_of=f"{of}.booked")
    add(f"{key}.used", f"{who}, by NVML", used, "GB", peer_of=f"{of}.used")
    count = f"p50 of {len(rounds)}"
    add(f"{key}.load", f"{who}, {count}", median("load_s"), "s", peer_of=f"{of}.load")
    unload = statistics.median(1e3 * one["unload_s"] for one in later)
    what = f"{who}: del, gc, empty_cache"
    add(f"{key}.unload", what, unload, "ms", peer_of=f"{of}.unload")
    left = max(one["left"] for one in later) / MIB
    add(f"{key}.left", f"{who}, most", left, "MiB", peer_of=f"{of}.left")
    step = 1e3 * statistics.mean(steps)
    add(f"{key}.step", f"{who}, the transformer alone", step, "ms", peer_of=f"{of}.step")
    first = rounds[0]["left"] / MIB
    bench.record.note(f"{who}: {first:g} MiB left after the first round, which computed")


PARTS = {
    "formats": formats,
    "kept": kept,
    "cold": cold,
    "mixed": mixed,
    "bitsandbytes": bitsandbytes,
}
