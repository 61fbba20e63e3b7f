"""The machine's memory while a model is streamed: what the kernel says, beside what the service says."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from functools import partial

import checkpoints
import host_memory
import moored
from bench import GIB, Bench, Running, gigabytes
from figures import MIB
from formats import FULL, PART, in_format
from sampling import sampled
from streaming import FLUX, followed

# Format of the transformer, and bytes of the small card.
CASES = ((FULL, 6 * GIB), ("fp8", 8 * GIB))
SMALL_CASES = ((FULL, 20 * MIB), ("fp8", 20 * MIB))
STEPS = 8
ROUNDS = 2
SAMPLE_S = 0.05
REST_S = 1.0
APART = 1.0
"""Percent that what is measured may be apart from what is booked."""


@dataclass(frozen=True)
class Reading:
    """The kernel's figures and the service's of a moment."""

    memory: host_memory.Memory
    booked: int
    workers: int | None
    """What the service says that its workers have."""
    away: int
    """Bytes of the components on the card that are not there, but in the machine's memory."""

    @property
    def level(self) -> int:
        """By which the fullest moment is found."""
        return self.memory.resident + self.memory.pages_pinned


def booked_bytes(status: moored.Status) -> int:
    """What the components of all cards hold of the machine's memory, as the service says."""
    return sum(held.bytes for card in status.cards for held in card.on_host)


def read(running: Running) -> Reading:
    """The worker's memory, and what the service says."""
    status = running.client.status()
    card = next(one for one in status.cards if one.id == running.card)
    memory = host_memory.read((card.worker_pid,))
    workers = status.host.workers_bytes if status.host else None
    parts = (one.streamed for one in card.residents)
    away = sum(one.whole_bytes - one.resident_bytes for one in parts if one)
    return Reading(memory, booked_bytes(status), workers, away)


def host(bench: Bench) -> None:
    """Each format on its small card: memory of the worker before, meanwhile and after."""
    checkpoints.warm(bench.models / FLUX, bench.threads)
    failed = []
    for name, cap in SMALL_CASES if bench.small else CASES:
        try:
            _one(bench, name, cap)
        except (moored.MooredError, RuntimeError) as error:
            bench.record.note(f"{name} failed: {type(error).__name__}: {error}")
            failed.append(name)
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def _one(bench: Bench, name: str, cap: int) -> None:
    card = f"{cap // GIB} GiB" if cap >= GIB else f"{cap // MIB} MiB"
    key, what = f"stream.host.{name}", f"{name} on a card of {card}"
    side = bench.scale.picture
    with bench.serve(bench.small_card(cap)) as running:
        # Libraries, code and the text encoder's pages come with the first picture, and stay or go with it.
        _picture(running, name, side, 1)
        _at_rest(running)
        before = read(running)
        with sampled(partial(read, running), SAMPLE_S) as seen:
            for _ in range(ROUNDS):
                _picture(running, name, side, STEPS)
        idle = read(running)
        _at_rest(running)
        after = read(running)
    held = max(seen, key=lambda one: one.level)
    grown, left = held.memory - before.memory, after.memory - before.memory
    add = bench.record.add
    away = max(one.away for one in seen)
    add(f"{key}.away", f"weights that were not on the card, most, {what}", gigabytes(away), "GB")
    add(f"{key}.most", f"memory of the worker, growth, {what}", gigabytes(grown.resident), "GB")
    pinned = gigabytes(grown.pages_pinned)
    add(f"{key}.pinned", f"memory pinned for the card, growth, {what}", pinned, "GB")
    available = gigabytes(before.memory.available - min(one.memory.available for one in seen))
    add(f"{key}.available", f"less available to the machine, most, {what}", available, "GB")
    add(
        f"{key}.left",
        f"memory of the worker, left after an unload, {what}",
        left.resident / MIB,
        "MiB",
    )
    back, told = (
        left.pages_pinned / MIB,
        f"memory pinned for the card, left after an unload, {what}",
    )
    add(f"{key}.back", told, back, "MiB", target=0.0)
    _tell_booked(bench, key, what, (before, held, after))
    moments = (("before", before), ("most", held), ("idle on the card", idle), ("unloaded", after))
    for when, one in moments:
        bench.record.note(f"{what}, {when}, in GB: {_told(one)}")


def _tell_booked(
    bench: Bench, key: str, what: str, moments: tuple[Reading, Reading, Reading]
) -> None:
    """What the service says beside what was measured: before, at the most, and at the end."""
    before, held, after = moments
    booked = held.booked - before.booked
    add, told = bench.record.add, "memory for streaming"
    add(f"{key}.booked", f"{told}, as booked, {what}", gigabytes(booked), "GB")
    grown = held.memory - before.memory
    # What is registered is mapped as well, but for a driver that pins what it does not map.
    measured = max(grown.resident, grown.pages_pinned)
    apart = 100 * abs(measured - booked) / max(booked, 1)
    add(f"{key}.apart", f"{told}, measured apart from booked, {what}", apart, "%", target=APART)
    kept = (after.booked - before.booked) / MIB
    add(f"{key}.kept", f"{told}, booked after an unload, {what}", kept, "MiB", target=0.0)


def _picture(running: Running, name: str, side: int, steps: int) -> None:
    call = running.client.stream_image(
        "a lighthouse in the rain",
        model=in_format(name, PART),
        width=side,
        height=side,
        steps=steps,
        seed=7,
        output="raw",
        timeout=300,
    )
    followed(running, call)


def _at_rest(running: Running) -> None:
    running.client.unload(timeout=60)
    running.client.trim()
    running.settled()
    time.sleep(REST_S)


def _told(reading: Reading) -> str:
    memory = reading.memory
    names = (one.name for one in fields(memory))
    said = [f"{name} {gigabytes(getattr(memory, name)):.3f}" for name in names]
    said.append(f"not on the card {gigabytes(reading.away):.3f}")
    if reading.workers is not None:
        said.append(f"workers by the status {gigabytes(reading.workers):.3f}")
    if reading.booked is not None:
        said.append(f"for streaming by the status {gigabytes(reading.booked):.3f}")
    return ", ".join(said)


PARTS = {"stream-host": host}
LIMITS_S = {"stream-host": 180.0}
