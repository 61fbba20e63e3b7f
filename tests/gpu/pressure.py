"""A card that others fill: a decode that must free memory, a job that waits, a job never refused."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable

import checkpoints
import moored
from bench import Bench, MemoryHolder, Running
from figures import MIB, percentile

HELD_SECONDS = 4.0
TICK_SECONDS = 0.5


def decode(bench: Bench) -> None:
    """After a denoise another program fills the card; the latent is decoded all the same."""
    model, side = checkpoints.MODELS[0], bench.scale.picture
    with bench.serve() as running, bench.holder(running) as holder:
        latent = running.client.generate_image(
            "beside another program",
            model=model,
            width=side,
            height=side,
            steps=2,
            latent_only=True,
            timeout=240,
        ).latents[0]
        running.client.trim()
        _decode_beside(bench, running, holder, latent, pinned=False)
        # Again where nothing may leave: then only smaller strips help.
        running.client.load(model, timeout=120)
        running.client.pin(model)
        running.client.trim()
        _decode_beside(bench, running, holder, latent, pinned=True)
        running.client.unpin(model)


def _decode_beside(
    bench: Bench, running: Running, holder: MemoryHolder, latent: moored.LatentInfo, pinned: bool
) -> None:
    model, scale = checkpoints.MODELS[0], bench.scale
    held = holder.hold(scale.tight_bytes)
    free, resident = running.status().memory.free, running.status().residents
    names = ", ".join(sorted(one.component.name for one in resident)) or "nothing"
    key = "decode.pinned" if pinned else "decode"
    bench.record.note(
        f"{key}: the holder has {held / 2**30:.1f} GiB, {free / MIB:.0f} MiB are free; resident: {names}"
    )
    events: list[moored.Event] = []
    began = time.monotonic()
    try:
        with running.client.stream_decode(latent, model=model, output="raw", timeout=60) as stream:
            events.extend(stream)
        done = bool(stream.pictures)
    except moored.MooredError as error:
        bench.record.note(f"{key}: {type(error).__name__}: {error}")
        done = False
    seconds = time.monotonic() - began
    holder.free()
    how = "all pinned" if pinned else "transformer resident"
    size = f"{scale.picture}x{scale.picture}"
    what = f"decode {size} beside a program that leaves {scale.tight_bytes // MIB} MiB, {how}"
    bench.record.add(key, what, float(done), "of 1 done", "higher", 1.0)
    bench.record.note(f"{key}: {seconds:.2f} s; {_what_happened(events)}")


def _what_happened(events: Iterable[moored.Event]) -> str:
    said = []
    for event in events:
        if isinstance(event, moored.Evicting):
            said.append(f"evicted {event.component.name}")
        elif isinstance(event, moored.StageStarted):
            said.append(f"{event.name} {event.chunking}")
        elif isinstance(event, moored.Retrying):
            said.append(f"retried after {event.reason}")
        elif isinstance(event, moored.Waiting) and (not said or said[-1] != "waited"):
            said.append("waited")
        elif isinstance(event, moored.Done):
            said.extend(event.approximations or ("exact",))
    return ", ".join(said)


def oom(bench: Bench) -> None:
    """A decode that risks what is not there: it alone pays for it, and its latent is still good."""
    model, side = checkpoints.MODELS[0], bench.scale.picture
    with bench.serve() as running, bench.holder(running) as holder:
        client = running.client
        latent = client.generate_image(
            "out of memory",
            model=model,
            width=side,
            height=side,
            steps=1,
            latent_only=True,
            timeout=240,
        ).latents[0]
        client.load(model, timeout=120)
        client.pin(model)
        client.trim()
        worker = running.status().worker_pid
        holder.hold(bench.scale.hopeless_bytes)
        events: list[moored.Event] = []
        ended = "done"
        try:
            with client.stream_decode(
                latent, model=model, output="raw", allow_low_memory=True, timeout=60
            ) as stream:
                events.extend(stream)
        except moored.MooredError as error:
            ended = type(error).__name__
            bench.record.note(f"oom: {error}")
        holder.free()
        again = client.decode_latent(latent, model=model, output="raw", timeout=60)
        client.unpin(model)
        same = running.status().worker_pid == worker
    left = bench.scale.hopeless_bytes // MIB
    what = f"decode {side}x{side} with allow_low_memory where {left} MiB are left"
    add = bench.record.add
    typed = ended in ("OutOfMemory", "done")
    add("oom.typed", f"{what}: ends typed", float(typed), "of 1", "higher", 1.0)
    add("oom.worker", f"{what}: the worker lives", float(same), "of 1", "higher", 1.0)
    add(
        "oom.again",
        f"{what}: decodes once there is memory",
        float(bool(again.pictures)),
        "of 1",
        "higher",
        1.0,
    )
    bench.record.note(f"oom: {ended}; {_what_happened(events)}")


def held(bench: Bench) -> None:
    """A job that finds the card taken, until the other program goes after four seconds."""
    model, side = checkpoints.MODELS[0], bench.scale.job_picture
    with bench.serve() as running, bench.holder(running) as other:
        other.hold(bench.scale.waiting_bytes)
        freed: list[float] = []

        def free_later() -> None:
            time.sleep(HELD_SECONDS)
            freed.append(other.free())

        seen: list[tuple[float, moored.Event]] = []
        goes = threading.Thread(target=free_later)
        with running.client.stream_image(
            "waits", model=model, width=side, height=side, steps=1, timeout=120
        ) as stream:
            goes.start()
            seen.extend((time.monotonic(), event) for event in stream)
        goes.join()
    waits = [(at, event) for at, event in seen if isinstance(event, moored.Waiting)]
    moves = (moored.Loading, moored.StageStarted)
    # What it could do before the other program's memory was there does not count.
    last_wait = max((at for at, _ in waits), default=0.0)
    went_on = next(at for at, e in seen if isinstance(e, moves) and at > last_wait)
    add = bench.record.add
    what = "job beside a program that frees after 4 s"
    add("held.proceeds", f"{what}: proceeds after", max(0.0, went_on - freed[0]), "s", target=0.5)
    ticks = HELD_SECONDS / TICK_SECONDS - 2
    add("held.ticks", f"{what}: ticks of its wait", len(waits), "events", "higher", ticks)
    done = sum(isinstance(event, moored.Done) for _, event in seen)
    add("held.done", f"{what}: finished", done, "of 1", "higher", 1.0)
    causes = sorted({event.cause for _, event in waits})
    holders = sorted({holder.name for _, event in waits for holder in event.holders})
    bench.record.note(f"held: waited for {', '.join(causes)}; holders told: {', '.join(holders)}")


def repeat(bench: Bench) -> None:
    """The same small job again and again, on a card that is kept as full as it was at the first."""
    scale = bench.scale
    times: list[float] = []
    refused: dict[str, int] = {}
    waits = 0
    with bench.serve() as running, bench.holder(running) as other:
        for seed in range(2):
            _small_job(bench, running.client, seed)
        other.hold(scale.job_bytes)
        began = time.monotonic()
        while len(times) < scale.jobs and time.monotonic() - began < scale.job_seconds:
            start = time.perf_counter()
            try:
                waits += _small_job(bench, running.client, 1)
            except moored.MooredError as error:
                name = type(error).__name__
                refused[name] = refused.get(name, 0) + 1
            times.append(1e3 * (time.perf_counter() - start))
    add = bench.record.add
    what = f"the same job {len(times):,} times ({scale.job_picture}x{scale.job_picture}, 1 step)"
    add("repeat.refused", f"{what}, refusals", sum(refused.values()), "jobs", target=0.0)
    add("repeat.waits", f"{what}, that had to wait", waits, "jobs", target=0.0)
    add("repeat.p50", f"{what}, p50", statistics.median(times), "ms")
    add("repeat.p99", f"{what}, p99", percentile(times, 0.99), "ms")
    if refused:
        bench.record.note(f"repeat: {refused}")
    if len(times) < scale.jobs:
        bench.record.note(f"repeat: {scale.jobs} jobs did not fit into {scale.job_seconds:g} s")


def _small_job(bench: Bench, client: moored.Client, seed: int) -> bool:
    """Generates one picture; whether it had to wait for memory."""
    with client.stream_image(
        "again",
        model=checkpoints.MODELS[0],
        width=bench.scale.job_picture,
        height=bench.scale.job_picture,
        steps=1,
        seed=seed,
        output="raw",
        timeout=120,
    ) as stream:
        waited = any(isinstance(event, moored.Waiting) for event in list(stream))
    if not stream.pictures:
        raise RuntimeError("a job ended without a picture")
    return waited


PARTS = {"decode": decode, "oom": oom, "held": held, "repeat": repeat}
