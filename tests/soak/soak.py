"""Holds a service under mixed load for long and says whether anything grows, drifts, or ends wrongly.

`scripts/soak` starts this. Everything that is drawn follows from the seed; what threads make of it does not.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import moored
from bench_service import machine, write_table
from clients import OtherAddress, Visitor, World
from disturbances import JobWatcher, Killer, Pressure
from job_book import JobBook
from load import REAL, actions_for
from measures import Rest
from models import REWRITTEN, ROOT, make_models
from report import Report, add_flatness, add_jobs, add_ledger
from rests import NeverRests, Rester
from results import Overwritten, Results
from second_program import second_program
from served import Served

HOUR_S = 3600.0
SIMULATED = (
    "sim:40GiB,speed=100GiB/s,context=500MiB,workspaces=64MiB,slack=keep,lag=20ms,release=2ms"
)
ROWS_FILE = ROOT / "docs/benchmarks/soak.json"
CLIENTS = 6
READY_S = 120.0
REST_EVERY_S = (1.5, 30.0)
RESTS = 60
"""As many rests as there is time for, about."""


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument(
        "--binary", type=Path, help="moored; default: MOORED_BINARY, else it is built"
    )
    parser.add_argument("--seconds", type=float, default=HOUR_S, help="default: an hour")
    parser.add_argument(
        "--device", default=SIMULATED, help="sim:..., cuda:0 or cpu:...; default: %(default)s"
    )
    parser.add_argument(
        "--seed", default="", help="default: another one each time, which is printed"
    )
    parser.add_argument("--clients", type=int, default=CLIENTS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument(
        "--work", type=Path, help="a folder for models, state and log; default: one that is removed"
    )
    parser.add_argument(
        "--write-docs",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="record the rows of these files and their table",
    )
    found = parser.parse_args(words)
    if not found.write_docs and (not found.binary or not found.binary.is_file()):
        parser.error("--binary is needed: the moored to be soaked")
    found.seed = found.seed or str(random.randrange(10**9))
    return found


def prefix_of(device: str) -> str:
    """What is soaked, in a word."""
    kinds = {"sim": "simulated card", "cuda": "real card", "cpu": "CPU"}
    return kinds.get(device.partition(":")[0].partition(",")[0], device)


class Soak:
    """A service, its load, and what is found of it."""

    def __init__(self, settings: argparse.Namespace, work: Path, stack: ExitStack) -> None:
        """Starts everything but the load. What it starts ends with the stack."""
        self._settings = settings
        self.simulated = settings.device.startswith("sim:")
        models = make_models(work / "models", self.simulated)
        self.program = second_program(settings.device, work)
        stack.callback(self.program.end)
        self.served = Served(
            settings.binary.resolve(), settings.device + self.program.device, [models], work
        )
        stack.callback(self.served.stop)
        self.client = stack.enter_context(moored.Client(self.served.address, client_id="soak"))
        self.client.wait_until_ready(READY_S)
        card = self.client.status().cards[0]
        self.card_name = card.name
        self.world = World(
            address=self.served.address,
            simulated=self.simulated,
            on_card=settings.device.startswith("cuda"),
            card_bytes=card.memory.total,
            book=JobBook(),
            results=Results(exact=not settings.device.startswith("cuda")),
            overwritten=tuple(Overwritten(one, models) for one in REWRITTEN),
        )
        stack.callback(self.world.gate.end)
        self.world.learn_formats(self.client, REAL)
        for one in self.world.overwritten:
            one.learn(self.client)
        other = OtherAddress(self.served.address, "127.0.0.2")
        stack.callback(other.close)
        self._addresses = (self.served.address, other.address)
        self.rests: list[Rest] = []
        self.stopped_by = ""
        self.killer: Killer | None = None
        self.pressure: Pressure | None = None
        self.rester: Rester | None = None

    def run(self) -> float:
        """The load, with rests, for as long as was asked for; how long that was."""
        seconds, seed = self._settings.seconds, self._settings.seed
        actions = actions_for(self.simulated)
        threads: list[Visitor | Killer | Pressure | JobWatcher] = [
            Visitor(self.world, f"client {number}", self._addresses[number % 3 == 2], seed, actions)
            for number in range(self._settings.clients)
        ]
        self.killer = Killer(self.world, seconds, seed)
        self.pressure = Pressure(self.world, self.program, seed)
        threads += [self.killer, self.pressure, JobWatcher(self.world)]
        rester = self.rester = Rester(self.world, self.served.process.pid, self.program)
        shortest, longest = REST_EVERY_S
        every = min(max(seconds / RESTS, shortest), longest)
        began = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            while (
                left := seconds - (time.monotonic() - began)
            ) > 0 and not self.served.process.poll():
                self.world.gate.open()
                time.sleep(min(every, left))
                self.rests.append(rester.rest(time.monotonic() - began))
                self._tell(self.rests[-1])
        except (NeverRests, moored.MooredError, OSError) as why:
            self.stopped_by = f"{type(why).__name__}: {why}"
        self.world.gate.end()
        for thread in threads:
            if not isinstance(thread, Killer):
                thread.join(READY_S if not self.stopped_by else 1.0)
        rester.close()
        return time.monotonic() - began

    def _tell(self, rest: Rest) -> None:
        print(
            f"{rest.at_s:6.0f} s  supervisor {rest.supervisor.rss_bytes / 2**20:.1f} MiB,"
            f" worker {rest.generation + 1} {rest.worker.rss_bytes / 2**20:.1f} MiB,"
            f" {self.world.book.done} streams done, {len(self.world.unexpected)} unexpected",
            flush=True,
        )

    def report(self, seconds: float, exit_code: int) -> Report:
        """What was found. The service has ended."""
        world, served = self.world, self.served
        report = Report(f"{self.card_name}; {machine()}", prefix_of(self._settings.device))
        report.add("held for", seconds, "s")
        add_flatness(report, self.rests, self._settings.seconds)
        add_ledger(report, self.rests)
        book = world.book
        add_jobs(report, book.ends(served.accepted, served.ended, served.states))
        report.add(
            "streams that say too much or too little",
            len(book.faults),
            "streams",
            0,
            reasons=book.faults,
        )
        unexpected = world.unexpected
        report.add("errors that nobody asked for", len(unexpected), "errors", 0, reasons=unexpected)
        results = world.results
        report.add("results held against the first of their request", results.compared, "results")
        report.add(
            "results that differ from it", len(results.faults), "results", 0, reasons=results.faults
        )
        stale = [text for one in world.overwritten for text in one.faults]
        report.add(
            "checkpoints overwritten", sum(one.overwritten for one in world.overwritten), "times"
        )
        report.add(
            "pictures of them that were judged",
            sum(one.judged for one in world.overwritten),
            "pictures",
        )
        report.add(
            "pictures of them that are not of what was on disk",
            len(stale),
            "pictures",
            0,
            reasons=stale,
        )
        assert self.killer is not None and self.pressure is not None and self.rester is not None
        report.add("workers killed", self.killer.killed, "workers")
        report.add("workers stopped", self.killer.stopped, "workers")
        by_itself = self.rester.restarts - self.killer.killed - self.killer.stopped
        ends = [
            line
            for line in served.warnings
            if "the worker ended" in line or "taken for hung" in line
        ]
        report.add(
            "workers that ended and were not ended", max(0, by_itself), "workers", 0, reasons=ends
        )
        report.add("demands of the second program", self.pressure.changes, "demands")
        bad = [*served.panics, *served.errors]
        report.add("panics and errors in the log", len(bad), "lines", 0, reasons=bad)
        broken = [text for text in (self.stopped_by, self.pressure.failed) if text]
        report.add("reasons to stop early", len(broken), "reasons", 0, reasons=broken)
        report.add("exit code of the service", abs(exit_code), "", 0)
        return report


def soak(settings: argparse.Namespace, work: Path) -> Report:
    """A whole soak."""
    with ExitStack() as stack:
        one = Soak(settings, work, stack)
        held = {model: ", ".join(names) for model, names in one.world.formats.items()}
        print(f"on {one.card_name}: {held}", flush=True)
        seconds = one.run()
        exit_code = one.served.stop()
    counts = ", ".join(f"{count} {name}" for name, count in one.world.counts.most_common())
    print(f"actions: {counts}")
    print(
        f"errors told to clients: {dict(one.world.book.errors)}; retries: {dict(one.world.book.retries)}"
    )
    return one.report(seconds, exit_code)


def write_docs(files: list[Path]) -> None:
    """The rows of several runs as those of the benchmark, and their table in the document."""
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]
    ROWS_FILE.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_table(rows, ROWS_FILE.name)
    print(f"{len(rows)} rows are in {ROWS_FILE} and in docs/BENCHMARKS.md")


def main(words: list[str] | None = None) -> int:
    """Soaks and prints the table; 1 when a target is missed."""
    settings = arguments_of(words)
    if settings.write_docs:
        write_docs(settings.write_docs)
        return 0
    print(f"seed {settings.seed}, {settings.seconds:g} s on {settings.device}", flush=True)
    with tempfile.TemporaryDirectory(prefix="moored-soak-") as folder:
        work = settings.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        report = soak(settings, work)
    print(f"\n{report.table()}\n\nseed {settings.seed}")
    if settings.json:
        report.write(settings.json)
    for row in report.missed:
        print(f"missed: {row.measure}", file=sys.stderr)
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
