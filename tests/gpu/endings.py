"""Things that end early: cancelled jobs, workers that are killed, poisoned, or hang."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import checkpoints
import moored
from bench import Bench, Running

LOADED_SHARE = 0.2
RECOVERY_TARGET_S = 3.0
JOB_TIMEOUT_S = 120.0
POLL_S = 0.004
QUEUED_JOBS = 3
CPU_CARD = "cpu"
# Too small for the large model: its jobs must wait for the card and not move over.
CPU_DEVICE = "cpu:8GiB"
UP = ("ready", "busy")


def cancel(bench: Bench) -> None:
    """Cancelled in the middle of a load, and in the middle of a step."""
    # Tiny checkpoints are read in one piece: what a simulated card loads is a size and nothing else.
    model = "flux-full" if bench.simulated else checkpoints.MODELS[0]
    devices = ("sim:40GiB,speed=20GiB/s",) if bench.simulated else ()
    with bench.serve(*devices) as running:
        running.client.load(model, components=("transformer",), timeout=120)
        running.client.unload(timeout=60)
        loads = [_cancel_load(running, model) for _ in range(bench.scale.cancel_rounds)]
        caught = [one for one in loads if one is not None]
        if not caught:
            raise RuntimeError("no load was slow enough to be cancelled")
        add = bench.record.add
        told = 1e3 * max(told for told, _ in caught)
        back = 1e3 * max(back for _, back in caught)
        add("cancel.load", "cancel while loading, to its end, worst", told, "ms", target=500.0)
        what = "cancel while loading, to the bytes being back by NVML, worst"
        add("cancel.load.back", what, back, "ms", target=500.0)
        bench.record.note(f"cancel: {len(caught)} of {len(loads)} loads were caught under way")
        _cancel_denoise(bench, running)


def _cancel_load(running: Running, model: str) -> tuple[float, float] | None:
    """Seconds from the cancelling to the stream's end, and to the bytes; None if it was through by then."""
    before = running.settled()
    stream = running.client.stream_load(model, components=("transformer",), timeout=120)
    with stream:
        for event in stream:
            if (
                isinstance(event, moored.Loading)
                and event.bytes_done >= LOADED_SHARE * event.bytes_total
            ):
                break
        began = time.monotonic()
        running.client.cancel(stream.job_id)
        try:
            for _ in stream:
                pass
        except moored.Cancelled:
            told = time.monotonic() - began
            return told, running.back_at(before, began)
    running.client.unload(timeout=60)
    return None


def _cancel_denoise(bench: Bench, running: Running) -> None:
    side, steps, took = bench.scale.picture, [], []
    rounds = bench.scale.cancel_rounds
    for number in range(rounds):
        phase = number / rounds
        with running.client.stream_image(
            "never done",
            model=checkpoints.MODELS[0],
            width=side,
            height=side,
            steps=50,
            timeout=JOB_TIMEOUT_S,
        ) as stream:
            at = []
            for event in stream:
                if isinstance(event, moored.Step):
                    at.append(time.monotonic())
                    if event.n == 5:
                        break
            step = statistics.median(b - a for a, b in zip(at[:-1], at[1:], strict=True))
            steps.append(step)
            time.sleep(phase * step)
            began = time.monotonic()
            running.client.cancel(stream.job_id)
            try:
                for _ in stream:
                    pass
            except moored.Cancelled:
                took.append(time.monotonic() - began)
    if not took:
        raise RuntimeError("no denoising was cancelled")
    step = 1e3 * statistics.median(steps)
    add, what = bench.record.add, f"cancel while denoising {side}x{side}"
    add("cancel.denoise", f"{what}, worst", 1e3 * max(took), "ms", target=float(f"{step:.4g}"))
    add("cancel.step", f"{what}: one step, p50", step, "ms")


@dataclass(frozen=True)
class Look:
    """A card at a moment."""

    at: float
    state: str
    pid: int
    restarts: int


class Watch:
    """Looks at all cards every few milliseconds."""

    def __init__(self, client: moored.Client) -> None:
        """Begins at once."""
        self._client, self._stop = client, threading.Event()
        self.looks: dict[str, list[Look]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            status, now = self._client.status(), time.monotonic()
            for card in status.cards:
                look = Look(now, card.state, card.worker_pid, card.worker_restarts)
                self.looks.setdefault(card.id, []).append(look)
            time.sleep(POLL_S)

    def end(self) -> None:
        """No more."""
        self._stop.set()
        self._thread.join()

    def died(self, card: str) -> float:
        """When the card was first seen without the worker that it had at the beginning."""
        looks = self.looks[card]
        gone = (look.at for look in looks if look.pid != looks[0].pid or look.state not in UP)
        return next(gone, float("inf"))

    def ready(self, card: str, after: float) -> float:
        """When the card was next seen ready, with another worker."""
        looks = self.looks[card]
        for look in looks:
            if look.at > after and look.state in UP and look.pid not in (0, looks[0].pid):
                return look.at
        raise RuntimeError(f"{card} was never ready again; it was last seen as {looks[-1]}")


@dataclass
class CpuJobs:
    """Jobs on a CPU card of the same service, one after another until they are told to stop."""

    client: moored.Client
    steps: int
    stop: threading.Event = field(default_factory=threading.Event)
    spans: list[tuple[float, float]] = field(default_factory=list)
    retried: int = 0
    failed: int = 0

    def run(self) -> None:
        """Generates until it is told to stop; the last one is finished."""
        while not self.stop.is_set():
            began = time.monotonic()
            try:
                events = list(
                    self.client.stream_image(
                        "on the CPU",
                        model="moored/demo",
                        steps=self.steps,
                        seed=1,
                        card=CPU_CARD,
                        timeout=120,
                    )
                )
                self.retried += sum(isinstance(event, moored.Retrying) for event in events)
                stages = [stage for e in events if isinstance(e, moored.Done) for stage in e.stages]
                self.failed += any(s.card != CPU_CARD for s in stages if not s.cached)
            except moored.MooredError:
                self.failed += 1
            self.spans.append((began, time.monotonic()))


def poison(bench: Bench) -> None:
    """A kernel of the second denoising writes where it must not."""
    _recovery(bench, "illegal address", ("poison-at=denoise:2",), kill=None)


def kill(bench: Bench) -> None:
    """The worker is killed as the kernel would do it."""
    _recovery(bench, "SIGKILL of the worker", (), kill=lambda pid: os.kill(pid, signal.SIGKILL))


def hang(bench: Bench) -> None:
    """The second denoising never comes back."""
    _recovery(bench, "hang", ("hang-at=denoise:2",), kill=None, stalls=True)


def _recovery(
    bench: Bench,
    what: str,
    options: tuple[str, ...],
    kill: Callable[[int], None] | None,
    stalls: bool = False,
) -> None:
    limit = bench.scale.stall_limit_s
    # Where the watchdog's limit is learned, it is held to this one from both sides.
    names = [n for n in ("queue.stall_limit", "queue.stall_floor") if stalls and bench.knows(n)]
    settings = tuple(f"{name}={limit:g}s" for name in names)
    devices = (bench.spec(*options), CPU_DEVICE)
    with bench.serve(*devices, settings=settings) as running, ThreadPoolExecutor() as threads:
        client, card = running.client, running.card
        client.wait_until_ready(card=CPU_CARD)
        job = _Job(client, card, bench.scale.job_picture)
        job.generate("the first denoising", 1)
        watch, jobs = Watch(client), CpuJobs(client, bench.scale.cpu_steps)
        beside = threads.submit(jobs.run)
        time.sleep(0.2)
        stream = job.stream("struck", 20)
        queued: list[Future[None]] = []
        struck_at, seen = 0.0, []
        try:
            for event in stream:
                seen.append((time.monotonic(), event))
                if not queued and isinstance(event, moored.StageStarted):
                    queued = [
                        threads.submit(job.generate, f"queued {number}", 1)
                        for number in range(QUEUED_JOBS)
                    ]
                if kill and not struck_at and isinstance(event, moored.Step) and event.n == 2:
                    pid = running.status().worker_pid
                    struck_at = time.monotonic()
                    kill(pid)
            finished = bool(stream.pictures)
        except moored.MooredError as error:
            bench.record.note(f"{what}: the job failed: {error}")
            finished = False
        through = sum(_succeeded(one.result) for one in queued)
        jobs.stop.set()
        beside.result(JOB_TIMEOUT_S)
        watch.end()
    retries = [(at, event) for at, event in seen if isinstance(event, moored.Retrying)]
    if not retries:
        raise RuntimeError(f"{what}: nothing was retried, so nothing went wrong")
    died = struck_at or min(watch.died(card), retries[0][0])
    if stalls:
        last = max(at for at, _ in seen if at < retries[0][0])
        died = last + limit
    ready = watch.ready(card, min(died, retries[0][0]))
    add, target = bench.record.add, RECOVERY_TARGET_S
    key = what.split()[0].lower()
    beyond = f", beyond the watchdog's {limit:g} s" if stalls else ""
    add(f"{key}.ready", f"{what}: card READY again{beyond}", ready - died, "s", target=target)
    add(f"{key}.job", f"{what}: the job itself finished", float(finished), "of 1", "higher", 1.0)
    of = f"of {QUEUED_JOBS}"
    add(f"{key}.queued", f"{what}: queued jobs finished", through, of, "higher", QUEUED_JOBS)
    looks = watch.looks[CPU_CARD]
    same = looks[0].pid == looks[-1].pid and looks[-1].restarts == looks[0].restarts
    overlap = any(begin < died and end > died for begin, end in jobs.spans)
    untouched = same and overlap and jobs.retried == 0 and jobs.failed == 0
    name = f"{what}: CPU card of the same service untouched"
    add(f"{key}.cpu", name, float(untouched), "of 1", "higher", 1.0)
    if not untouched:
        bench.record.note(
            f"{what}: CPU worker kept: {same}, its job ran across the moment: {overlap}, "
            f"retried {jobs.retried}, failed {jobs.failed}"
        )
    bench.record.note(f"{what}: {retries[0][1].message}")
    if finished:
        bench.record.note(f"{what}: the job was done {seen[-1][0] - died:.1f} s after")


def _succeeded(result: Callable[[float], object]) -> bool:
    try:
        result(JOB_TIMEOUT_S)
    except (moored.MooredError, TimeoutError):
        return False
    return True


@dataclass
class _Job:
    """Small pictures of the large model."""

    client: moored.Client
    card: str
    side: int

    def stream(self, prompt: str, steps: int) -> moored.EventStream[moored.ImageResult]:
        return self.client.stream_image(
            prompt,
            model=checkpoints.MODELS[0],
            width=self.side,
            height=self.side,
            steps=steps,
            seed=1,
            card=self.card,
            timeout=JOB_TIMEOUT_S,
        )

    def generate(self, prompt: str, steps: int) -> None:
        if not self.stream(prompt, steps).result().pictures:
            raise moored.MooredError("a job ended without a picture")


PARTS = {"cancel": cancel, "poison": poison, "kill": kill, "hang": hang}
