"""Many mixed jobs on a card made small, with cancels and a worker that is killed among them.

Every picture must have the bytes of the same request's on the whole card, and nothing may be left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import checkpoints
import host_memory
import moored
import numpy as np
import z_image_checkpoint
from bench import GIB, Bench, Running, gigabytes
from endings import JOB_TIMEOUT_S
from figures import MIB, percentile
from formats import FULL, PART
from loading import wait_until_known
from streaming import computed_whole, digest

MODELS = (checkpoints.MODELS[0], z_image_checkpoint.NAME)
FORMATS = (FULL, "int8", "fp8", "nf4")
CAPS = (5 * GIB, 8 * GIB, 12 * GIB, 20 * GIB)
SMALL_CAPS = (16 * MIB, 20 * MIB, 24 * MIB, 32 * MIB)
SIDES = (256, 320, 384, 512)
SMALL_SIDES = (64, 80, 96, 128)
EACH = 2
"""Requests of each model in each format."""
LANES = 2
"""Jobs that are asked for at a time."""
CANCELLED_STEPS = 40
CANCELS, KILLS = 8, 3
AT = ("loading", "stage", "step")
"""What a job is seen to do when it is cancelled, or its worker is killed."""
LEAST_DEVIATION = 1.0
"""Of the bytes of a picture, so that it shows anything at all."""
SAMPLE_S = 0.02
GONE_WITHIN_S = 3.0
REFERENCES = "stream-mixed-references.json"
SEED = 35


@dataclass(frozen=True)
class Request:
    """A small picture."""

    model: str
    format: str
    side: int
    steps: int
    seed: int

    def options(self, steps: int = 0) -> dict[str, Any]:
        """What is asked for, with other steps if any are given."""
        formats = {} if self.format == FULL else {PART: self.format}
        return {
            "prompt": f"lighthouse number {self.seed} in the rain",
            "model": moored.ModelRef(self.model, formats=formats),
            "width": self.side,
            "height": self.side,
            "steps": steps or self.steps,
            "seed": self.seed,
            "output": "raw",
            "timeout": JOB_TIMEOUT_S,
        }

    def stream(
        self, client: moored.Client, steps: int = 0
    ) -> moored.EventStream[moored.ImageResult]:
        """Asks for it."""
        return client.stream_image(**self.options(steps))

    def ever_fits(self, client: moored.Client) -> bool:
        """Whether the card can do it at all, in as many steps as one that is to be cancelled has."""
        try:
            plan = client.plan(**self.options(CANCELLED_STEPS))
        except moored.MemoryShortage:
            return False
        return all(stage.verdict != "never" for stage in plan.stages)


@dataclass(frozen=True)
class Job:
    """A request, and what is done to it: `cancel`, `kill`, or nothing, when it is seen at something."""

    request: Request
    act: str = ""
    at: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `done`, `cancelled` or `failed`, with its picture's digest or the error."""

    job: Job
    how: str
    said: str
    seconds: float
    acted: bool
    retried: bool
    whole: bool = True
    """Whether every stage computed whole what the whole card computes whole."""


def requests(sides: Sequence[int]) -> list[Request]:
    """All that are asked for: of each model in each format some, which differ in size, steps and seed."""
    kinds = [(model, name) for model in MODELS for name in FORMATS for _ in range(EACH)]
    return [
        Request(model, name, sides[number % len(sides)], 1 + number // 2 % 2, number)
        for number, (model, name) in enumerate(kinds)
    ]


def mixed_jobs(chance: random.Random, asked: Sequence[Request], count: int) -> list[list[Job]]:
    """Jobs in three series: with kills and cancels; one of each model and format; with cancels.

    What the first job of a kind brings for good is there after the second, whatever was killed before.
    """
    kinds = {(one.model, one.format): one for one in chance.sample(asked, len(asked))}
    each = [Job(one) for one in kinds.values()]
    first = (count - len(each)) // 2
    series = [
        [Job(chance.choice(asked)) for _ in range(number)]
        for number in (first, count - len(each) - first)
    ]
    # Kills lie apart, so that none meets the second attempt of a job.
    apart = max(first // KILLS, 1)
    kills = range(apart // 2, first, apart)[:KILLS]
    for number, place in enumerate(kills):
        series[0][place] = Job(series[0][place].request, "kill", AT[number % len(AT)])
    free = [(0, i) for i in range(first) if i not in kills]
    free += [(1, i) for i in range(len(series[1]))]
    for number, (one, place) in enumerate(chance.sample(free, min(CANCELS, len(free)))):
        series[one][place] = Job(series[one][place].request, "cancel", AT[number % len(AT)])
    return [series[0], each, series[1]]


def mixed(bench: Bench, place: int) -> None:
    """Jobs on the small card of this number."""
    _make_models(bench)
    known = _references(bench)
    cap = (SMALL_CAPS if bench.small else CAPS)[place]
    asked = requests(SMALL_SIDES if bench.small else SIDES)
    nothing = bench.foreign_bytes()
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with bench.serve(bench.small_card(cap)) as running:
        possible = [one for one in asked if one.ever_fits(running.client)]
        series = mixed_jobs(random.Random(SEED + place), possible, bench.scale.stream_jobs)
        with running.peak() as jobs:
            outcomes += _in_lanes(running, series[0])
            outcomes += _in_lanes(running, series[1])
        base, host_base = _at_rest(running)
        with running.peak() as more_jobs:
            outcomes += _in_lanes(running, series[2])
        left, host_left = _at_rest(running)
        memory, residents = running.status().memory, running.status().residents
        restarts = running.status().worker_restarts
        log = "".join(running.service.log)
    seconds = time.monotonic() - began
    gone = _still_there(bench, nothing)
    card = f"{cap // GIB} GiB" if cap >= GIB else f"{cap // MIB} MiB"
    key, what = f"stream.mixed.{place}", f"{len(outcomes)} mixed jobs on a card of {card}"
    (bench.out / f"{key}.log").write_text(log, encoding="utf-8")
    add = bench.record.add
    refused = [one for one in asked if one not in possible]
    add(f"{key}.refused", f"requests of {len(asked)} that never fit, {what}", len(refused), "")
    for one in refused:
        bench.record.note(f"{what}: never fits: {one}")
    _tell_outcomes(bench, key, what, outcomes, known)
    kills = sum(one.acted for one in outcomes if one.job.act == "kill")
    add(f"{key}.kills", f"workers killed, {what}", kills, "", "higher", float(KILLS))
    add(f"{key}.restarts", f"workers that were replaced, {what}", restarts, "", target=float(kills))
    used, target = gigabytes(max(jobs.bytes, more_jobs.bytes) - nothing), gigabytes(cap)
    add(f"{key}.used", f"most on the card by NVML, {what}", used, "GB", target=target)
    add(f"{key}.left", f"bytes left by NVML, {what}", float(left - base), "bytes", target=0.0)
    booked = float(memory.components + memory.scratch + memory.unexplained + len(residents))
    add(f"{key}.booked", f"bytes left by the status, {what}", booked, "bytes", target=0.0)
    add(
        f"{key}.gone",
        f"bytes left once the service ended, {what}",
        float(gone),
        "bytes",
        target=0.0,
    )
    grown = host_left - host_base
    add(f"{key}.host", f"memory of the processes, growth, {what}", grown.resident / MIB, "MiB")
    pinned = grown.pages_pinned / MIB
    add(f"{key}.pinned", f"memory pinned for the card, growth, {what}", pinned, "MiB", target=0.0)
    bench.record.note(
        f"{what}: {seconds:.0f} s; {gigabytes(base - nothing):.3f} GB on the card at rest after the first of "
        f"each kind; MiB of the machine's memory then: {_mebibytes(host_base)}; at the end: "
        f"{_mebibytes(host_left)}"
    )


def _still_there(bench: Bench, nothing: int) -> int:
    """Bytes that the card shows more than before the service; the driver has a moment to notice its end."""
    until = time.monotonic() + GONE_WITHIN_S
    while (more := bench.foreign_bytes() - nothing) > 0 and time.monotonic() < until:
        pass
    return more


def _make_models(bench: Bench) -> None:
    flux, z_image = (
        (checkpoints.SMALL, z_image_checkpoint.SMALL)
        if bench.small
        else (checkpoints.FULL, z_image_checkpoint.FULL)
    )
    written, seconds = checkpoints.make(bench.models, flux, bench.threads, 1)
    more, further = z_image_checkpoint.make(bench.models, z_image, flux, bench.threads)
    if written or more:
        made = f"made {gigabytes(written + more):.2f} GB in {seconds + further:.1f} s"
        bench.record.note(made)
    for name in MODELS:
        checkpoints.warm(bench.models / name, bench.threads)
    began = time.monotonic()
    with bench.serve() as running:
        wait_until_known(running.client, MODELS)
    bench.record.note(f"hashed by the service in {time.monotonic() - began:.1f} s")


def _followed(running: Running, one: Request) -> tuple[moored.EventStream[Any], moored.Done]:
    """A request to its end."""
    done = None
    with one.stream(running.client) as stream:
        for event in stream:
            if isinstance(event, moored.Done):
                done = event
    if done is None:
        raise RuntimeError(f"{one} ended without its last event")
    return stream, done


def _references(bench: Bench) -> dict[int, str]:
    """Digests of all requests on the whole card, by their seeds; kept for the other small cards."""
    file = bench.work / REFERENCES
    asked = requests(SMALL_SIDES if bench.small else SIDES)
    binary = bench.binary.stat()
    made_by = [bench.device, binary.st_size, binary.st_mtime_ns, repr(asked)]
    made_by += [(bench.models / name).stat().st_mtime_ns for name in MODELS]
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["made_by"] == made_by:
            return {int(seed): found for seed, found in kept["digests"].items()}
    began = time.monotonic()
    found, flat = {}, []
    with bench.serve() as running:
        for one in asked:
            stream, done = _followed(running, one)
            if not computed_whole(done.stages):
                # Other models leave too little room on a card of 80 GB.
                running.client.unload(timeout=60)
                stream, done = _followed(running, one)
            if not computed_whole(done.stages):
                raise RuntimeError(f"the whole card computes {one} in parts")
            found[one.seed] = digest(stream)
            pixels = np.frombuffer(stream.pictures[0].data, np.uint8)
            if pixels.std() < LEAST_DEVIATION:
                flat.append(f"{one.model} {one.format}")
    if flat:
        raise RuntimeError(f"nothing is to be seen in pictures of {', '.join(flat)}")
    file.write_text(json.dumps({"made_by": made_by, "digests": found}), encoding="utf-8")
    seconds = time.monotonic() - began
    bench.record.note(f"{len(found)} pictures on the whole card in {seconds:.1f} s")
    return found


def _in_lanes(running: Running, jobs: Sequence[Job]) -> list[Outcome]:
    with ThreadPoolExecutor(LANES) as lanes:
        return list(lanes.map(partial(_run, running), jobs))


def _run(running: Running, job: Job) -> Outcome:
    """One job; what is done to it is done once."""
    began = time.monotonic()
    acted = retried = False
    stages: Sequence[moored.StageReport] = ()

    def ended(how: str, said: str, whole: bool = True) -> Outcome:
        return Outcome(job, how, said, time.monotonic() - began, acted, retried, whole)

    try:
        # One that is to be cancelled has steps left whenever it is.
        steps = CANCELLED_STEPS if job.act == "cancel" else 0
        with job.request.stream(running.client, steps) as stream:
            for event in stream:
                stages = event.stages if isinstance(event, moored.Done) else stages
                retried |= isinstance(event, moored.Retrying)
                if job.act and not acted and _is_at(event, job.at):
                    acted = True
                    if job.act == "cancel":
                        running.client.cancel(stream.job_id)
                    else:
                        os.kill(running.status().worker_pid, signal.SIGKILL)
        return ended("done", digest(stream), computed_whole(stages))
    except moored.Cancelled:
        return ended("cancelled", "")
    except (moored.MooredError, OSError) as error:
        return ended("failed", f"{type(error).__name__}: {error}")


def _is_at(event: moored.Event, what: str) -> bool:
    """Whether a job is seen at this; what is resident already is not loaded, and its stage will do."""
    if what == "loading":
        return isinstance(event, moored.Loading | moored.StageStarted)
    if what == "stage":
        return isinstance(event, moored.StageStarted) and event.name == "denoise"
    return isinstance(event, moored.Step)


def _at_rest(running: Running) -> tuple[int, host_memory.Memory]:
    """Bytes of the card, and the machine's memory, once everything is unloaded."""
    running.client.unload(timeout=60)
    running.client.trim()
    used = running.settled()
    return used, host_memory.read(host_memory.family_of(running.service.process.pid))


def _tell_outcomes(
    bench: Bench, key: str, what: str, outcomes: Sequence[Outcome], known: dict[int, str]
) -> None:
    add = bench.record.add
    compared = [one for one in outcomes if one.how == "done" and one.job.act != "cancel"]
    others = [one for one in compared if one.said != known[one.job.request.seed]]
    # In strips the library convolves by other algorithms, and the last bits differ.
    wrong = [one for one in others if one.whole]
    strips = len(others) - len(wrong)
    failed = [one for one in outcomes if one.how == "failed"]
    cancels = [one for one in outcomes if one.job.act == "cancel"]
    ended = sum(one.how == "cancelled" for one in cancels)
    add(f"{key}.wrong", f"wrong pictures, {what}", len(wrong), "", target=0.0)
    add(f"{key}.strips", f"pictures of other bits that were decoded in strips, {what}", strips, "")
    add(f"{key}.compared", f"pictures compared, {what}", len(compared), "", "higher")
    add(f"{key}.failed", f"jobs that failed, {what}", len(failed), "", target=0.0)
    target = float(len(cancels))
    add(f"{key}.cancels", f"jobs that were cancelled, {what}", ended, "", "higher", target)
    seconds = [one.seconds for one in compared]
    add(
        f"{key}.p50",
        f"a job, {LANES} asked for at a time, p50, {what}",
        statistics.median(seconds),
        "s",
    )
    add(f"{key}.p90", f"a job, p90, {what}", percentile(seconds, 0.9), "s")
    for one in (*wrong, *failed):
        bench.record.note(f"{what}: {one.how} {one.said}: {one.job}")
    struck = [one for one in outcomes if one.job.act == "kill"]
    ends = ", ".join(f"{one.job.at}: {one.how}{', retried' * one.retried}" for one in struck)
    bench.record.note(f"{what}: jobs whose worker was killed: {ends}")


def _mebibytes(memory: host_memory.Memory) -> str:
    return (
        f"{memory.resident / MIB:.0f} resident, {memory.anonymous / MIB:.0f} anonymous, "
        f"{memory.files / MIB:.0f} of files, {memory.pages_pinned / MIB:.0f} pinned, "
        f"{memory.available / MIB:.0f} available"
    )


PARTS = {
    f"stream-mixed-{cap // GIB}": partial(mixed, place=place) for place, cap in enumerate(CAPS)
}
LIMITS_S = {name: 420.0 for name in PARTS}
