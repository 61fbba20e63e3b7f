"""Has many clients use one service at once, and says what they see.

Errors that are no limits, memory that grows, unequal shares of the card, what the service adds to a job.
`scripts/load` starts this. Everything that is drawn follows from the seed; what tasks make of it does not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import moored
from bench_service import machine, write_table
from checks import Flatness, after_warm_up, flatness
from measures import process_sample
from processes import children_of
from report import Report
from served import Served
from visitors import FILM, PICTURE, TRACK, Seen, act_in_a_process

ROOT = Path(__file__).resolve().parents[2]
INSTANT = ROOT / "tests/models/instant"
DEVICE = "sim:24GiB"
SECONDS, CLIENTS = 600.0, 200
SHORT_S = 120.0
"""A load that is shorter says nothing about growth and shares."""
# Of a job. The card is what all clients wait for if its steps are long enough for the machine.
MODELS = {PICTURE: ("small", 4), FILM: ("video", 4), TRACK: ("track", 4)}
STEP_MS = 30
SAMPLES = 120
# So many clients leave the processors little time for a worker: it is not taken for hung.
PATIENT = ("queue.stall_floor=60s", "queue.stall_limit=120s", "queue.cancel_limit=60s")
READY_S, END_S = 60.0, 300.0
MIB = 2**20
SHARE_PERCENT = 10.0
GROWTH_PERCENT = 5.0


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/load", description=__doc__)
    parser.add_argument("--binary", type=Path, required=True, help="moored; default: it is built")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)g")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="default: %(default)s")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="of clients; default: %(default)s",
    )
    parser.add_argument("--device", default=DEVICE, help="default: %(default)s")
    parser.add_argument(
        "--step-ms", type=int, default=STEP_MS, help="a step of the card; default: %(default)s"
    )
    parser.add_argument("--seed", default="", help="default: another one each time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--note", default="", help="what else the machine did, for the rows")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="as --json, and their table in the document"
    )
    found = parser.parse_args(words)
    found.seed = found.seed or str(random.randrange(10**9))
    return found


def make_models(folder: Path, step_ms: int) -> Path:
    """Models of pictures, films and tracks whose steps take so many milliseconds."""
    folder.mkdir(parents=True)
    for name, (base, steps) in MODELS.items():
        model = json.loads((INSTANT / f"{base}.instant.json").read_text(encoding="utf-8"))
        model |= {"name": name, "steps_ms": step_ms}
        model["defaults"]["steps"] = steps
        (folder / f"{name}.instant.json").write_text(json.dumps(model), encoding="utf-8")
    return folder


@dataclass
class Memory:
    """Resident bytes of the service's two processes, over time."""

    points: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {"supervisor": [], "worker": []}
    )

    workers: set[int] = field(default_factory=set)

    def sample(self, at_s: float, supervisor: int) -> None:
        """Reads both."""
        self.points["supervisor"].append((at_s, process_sample(supervisor).rss_bytes))
        for worker in children_of(supervisor):
            with suppress(OSError):  # it has ended just now
                self.points["worker"].append((at_s, process_sample(worker).rss_bytes))
                self.workers.add(worker)

    def flatness(self, name: str, whole_s: float) -> Flatness | None:
        """How one of them went after the warm-up."""
        return flatness(after_warm_up(self.points[name], whole_s))


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which so many hundredths of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part / 100))] if ordered else 0.0


def commit() -> str:
    """What is checked out, and whether something was changed."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return said.stdout.strip() or "unknown"


def load(settings: argparse.Namespace, served: Served, memory: Memory) -> tuple[Seen, float]:
    """All clients, in some processes, for as long as was asked for; what they have seen, and the time."""
    count = settings.processes
    began, every = time.monotonic(), settings.seconds / SAMPLES
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as processes:
        acting = [
            processes.submit(
                act_in_a_process,
                settings.clients,
                served.address,
                settings.seed,
                settings.seconds,
                END_S,
                (number, count),
            )
            for number in range(count)
        ]
        while (at := time.monotonic() - began) < settings.seconds:
            memory.sample(at, served.process.pid)
            if len(memory.points["supervisor"]) % 10 == 1:
                last = memory.points["supervisor"][-1][1] / MIB
                print(f"{at:6.0f} s  supervisor {last:.1f} MiB", flush=True)
            time.sleep(min(every, settings.seconds - at))
        seconds = time.monotonic() - began
        seen = Seen()
        for one in acting:
            seen.add(one.result())
    return seen, seconds


def left_behind(client: moored.Client, patience_s: float = 20.0) -> list[str]:
    """What is there although nobody asks for anything; what ends by itself is given some time."""
    until = time.monotonic() + patience_s
    while True:
        status = client.status()
        left = [f"job {job.id} ({job.state})" for job in status.jobs]
        left += [f"{status.latents} latents"] if status.latents else []
        residents = [one for card in status.cards for one in card.residents]
        left += [f"a hold of {one.component.name}" for one in residents if one.held]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.2)


def report_of(
    settings: argparse.Namespace, card: str, seen: Seen, memory: Memory, seconds: float
) -> Report:
    """What clients and samples say."""
    device = f"{card}; {machine()}; commit {commit()}"
    report = Report(device + (f"; {settings.note}" if settings.note else ""), "load")
    report.add("clients", settings.clients, "clients")
    report.add("time", seconds, "s")
    report.add("a step of the card", settings.step_ms, "ms")
    for what, count in sorted(seen.done.items()):
        report.add(f"{what} done", count, "jobs")
    report.add("jobs done in a second", seen.done.total() / seconds, "jobs/s")
    report.add("segments of sessions", seen.segments, "segments")
    report.add("streams that their clients left", seen.left, "streams")
    for reason, count in sorted(seen.limits.items()):
        report.add(f"limits told: {reason}", count, "errors")
    missing = [f"{reason}: {count}" for reason, count in seen.without_retry.items()]
    report.add(
        "limits that do not say when to try again",
        seen.without_retry.total(),
        "errors",
        0,
        reasons=missing,
    )
    report.add(
        "errors that are no limits", len(seen.unexpected), "errors", 0, reasons=seen.unexpected
    )
    add_shares(report, seen, seconds, is_judged=seconds >= SHORT_S)
    for name in ("accepted_s", "added_s"):
        words = {
            "accepted_s": "from the call to its acceptance",
            "added_s": "added to what a job takes the service",
        }[name]
        values = [1000 * value for value in getattr(seen, name)]
        for part in (50, 99):
            report.add(f"{words}, {part}th percentile", percentile(values, part), "ms")
    for name, points in memory.points.items():
        flat = memory.flatness(name, seconds)
        if flat is None:
            continue
        target = GROWTH_PERCENT if seconds >= SHORT_S else None
        shown = ", ".join(f"{bytes_ / MIB:.0f}" for _, bytes_ in points)
        report.add(f"{name}, RSS, first third", flat.first / MIB, "MiB")
        report.add(
            f"{name}, RSS, growth to the last third",
            100 * flat.growth,
            "%",
            target,
            reasons=[f"MiB: {shown}"],
        )
        report.add(f"{name}, RSS, the most above it", 100 * flat.peak, "%")
    return report


def add_shares(report: Report, seen: Seen, seconds: float, is_judged: bool) -> None:
    """Rows of the card's time."""
    own = {name: ms for name, ms in seen.card_ms.items() if name.startswith("steady")}
    mean = statistics.fmean(own.values()) if own else 0.0
    report.add("card's time of a steady client, mean", mean, "ms")
    if mean:
        apart = max(abs(ms - mean) for ms in own.values())
        ends = sorted(own.items(), key=lambda entry: entry[1])
        report.add(
            "card's time of a steady client, farthest from the mean",
            100 * apart / mean,
            "%",
            SHARE_PERCENT if is_judged else None,
            reasons=[f"least {ends[:3]}, most {ends[-3:]}"],
        )
    all_ms = sum(seen.card_ms.values())
    report.add("card at work for jobs that were read to their end", all_ms / seconds / 10, "%")


def main(words: list[str] | None = None) -> int:
    """Loads and prints the table; 1 when a target is missed."""
    settings = arguments_of(words)
    print(f"seed {settings.seed}, {settings.seconds:g} s, {settings.clients} clients", flush=True)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="moored-load-") as folder:
        work, memory = Path(folder), Memory()
        served = Served(
            settings.binary.resolve(),
            settings.device,
            [make_models(work / "models", settings.step_ms)],
            work,
            PATIENT,
        )
        try:
            with moored.Client(served.address, client_id="load") as client:
                client.wait_until_ready(READY_S)
                card = client.status().cards[0].name
                seen, seconds = load(settings, served, memory)
                left = left_behind(client)
        finally:
            exit_code = served.stop()
        report = report_of(settings, card, seen, memory, seconds)
    report.add("what is left behind", len(left), "things", 0, reasons=left)
    warned = [line for line in served.warnings if "worker" in line]
    ended = max(0, len(memory.workers) - 1)
    report.add("workers that ended", ended, "workers", 0, reasons=warned)
    bad = [*served.panics, *served.errors]
    report.add("panics and errors in the log", len(bad), "lines", 0, reasons=bad)
    report.add("exit code of the service", abs(exit_code), "", 0)
    report.add("load of the machine before", load_before, "processes")
    print(f"\n{report.table()}\n\nseed {settings.seed}")
    for file in filter(None, (settings.json, settings.record)):
        report.write(file)
    if settings.record:
        write_table(json.loads(settings.record.read_text(encoding="utf-8")), settings.record.name)
    for row in report.missed:
        print(f"missed: {row.measure}", file=sys.stderr)
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
