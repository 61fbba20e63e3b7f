"""Measures boxes behind a proxy: `scripts/bench_boxes` starts this."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import moored
from bench_service import machine
from proxies import HAPROXY_CONFIGURATION, Boxes, Envoy, HaProxy, Proxy, make_models
from simulated_boxes import Box, Model, Policy, popularity, simulate
from simulated_boxes import Proxy as SimulatedProxy
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/MANY_BOXES.md"
END = "<!-- end -->"
MODELS = tuple(f"model-{number}" for number in range(9))
MODEL_GIB, CARD_GIB = 4, 14
LINK_BYTES = 16 * 10**9
DEVICE = f"sim:{CARD_GIB}GiB,speed=16GB/s"
STEPS, STEP_MS = 10, 25
A_SECOND, JOBS, WARM_UP = 4.0, 240, 30
UPGRADE_A_SECOND = 5.0
SEED = 20261127
PARTS = ("policies", "lost", "upgrade", "simulated")
BALANCE = re.compile(
    r"    balance hdr\(x-moored-model\)\n    hash-type .*\n    hash-balance-factor 125\n"
)

Row = dict[str, Any]


@dataclass
class Seen:
    """What became of the jobs of a load."""

    done: list[tuple[str, float, float, bool]] = field(default_factory=list)
    """Model, beginning, seconds until the end, and whether all of its components were there."""
    failed: list[tuple[str, float, str]] = field(default_factory=list)

    def times(self) -> list[float]:
        """Seconds of all jobs that were done."""
        return [seconds for _, _, seconds, _ in self.done]

    def warm_percent(self) -> float:
        """Jobs whose model was there."""
        return 100 * sum(warm for *_, warm in self.done) / max(1, len(self.done))


def percentile(values: list[float], part: float) -> float:
    """The value below which so many hundredths of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part / 100))] if ordered else 0.0


def configured(folder: Path, balance: str) -> Path:
    """HAProxy's configuration with another way to choose a box for a job."""
    text, count = BALANCE.subn(balance, HAPROXY_CONFIGURATION.read_text(encoding="utf-8"))
    assert count == 1
    path = folder / "haproxy.cfg"
    path.write_text(text, encoding="utf-8")
    return path


def affine(bound_percent: int) -> str:
    """The lines of a consistent hash with this bound; 0: without one."""
    lines = "    balance hdr(x-moored-model)\n    hash-type consistent sdbm avalanche\n"
    return lines + (f"    hash-balance-factor {bound_percent}\n" if bound_percent else "")


POLICIES: dict[str, tuple[str, Policy, int]] = {
    "round robin": ("    balance roundrobin\n", "roundrobin", 0),
    "least connections": ("    balance leastconn\n", "leastconn", 0),
    "by model, bound 110%": (affine(110), "affine", 110),
    "by model, bound 125%": (affine(125), "affine", 125),
    "by model, bound 150%": (affine(150), "affine", 150),
    "by model, bound 200%": (affine(200), "affine", 200),
    "by model, no bound": (affine(0), "affine", 0),
}


class Load:
    """Jobs that come at random, so many a second, whatever becomes of them."""

    def __init__(self, address: str, a_second: float = A_SECOND, **options: Any) -> None:
        self._client = moored.Client(address, **options)
        self._a_second = a_second
        self.seen = Seen()
        self._lock = threading.Lock()

    def job(self, model: str, prompt: str, warm_up: bool = False) -> None:
        """One job. Its prompt is its own: an encoding that is kept would need no encoder."""
        began = time.monotonic()
        try:
            result = self._client.generate_image(
                prompt, model=model, width=64, height=64, steps=STEPS, timeout=120
            )
        except moored.MooredError as error:
            with self._lock:
                self.seen.failed.append((model, began, f"{type(error).__name__} {error.reason}"))
            return
        took = time.monotonic() - began
        warm = len(result.done.resident_already) == 4
        if not warm_up:
            with self._lock:
                self.seen.done.append((model, began, took, warm))

    def run(self, jobs: int, warm_up: int = 0, until: Callable[[], bool] = lambda: False) -> Seen:
        """So many jobs, or until something has happened."""
        drawn, shares = random.Random(SEED), popularity(len(MODELS))
        with ThreadPoolExecutor(256) as threads:
            due = time.monotonic()
            for number in range(jobs + warm_up):
                due += drawn.expovariate(self._a_second)
                (model,) = drawn.choices(MODELS, shares)
                time.sleep(max(0.0, due - time.monotonic()))
                if until():
                    break
                threads.submit(self.job, model, f"job {number}", number < warm_up)
        self._client.close()
        return self.seen


@contextmanager
def three(folder: Path, *arguments: str) -> Iterator[Boxes]:
    """Three boxes whose cards have nothing yet."""
    models = folder / "models"
    make_models(models, MODELS, MODEL_GIB, STEP_MS)
    boxes = Boxes(folder, models, *arguments, device=DEVICE)
    try:
        yield boxes
    finally:
        boxes.stop()


@contextmanager
def temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def before(boxes: Boxes, proxy: Callable[[], Proxy]) -> Iterator[Any]:
    """A proxy before boxes, which it has found."""
    made = proxy()
    try:
        made.wait_up(*boxes.addresses)
        yield made
    finally:
        made.stop()


def measure_policies(jobs: int) -> list[Row]:
    """Warm hits and times, by the way in which the proxy chooses a box; and the same simulated."""
    rows = []
    for name, (balance, policy, bound) in POLICIES.items():
        with temporary() as folder, three(folder) as boxes:
            path = configured(folder, balance)
            with before(boxes, lambda: HaProxy(folder, boxes.addresses, path)) as proxy:  # noqa: B023
                seen = Load(proxy.address).run(jobs, WARM_UP)
        predicted = simulated_three(policy, bound, jobs)
        rows.append(
            {
                "table": "policies",
                "policy": name,
                "jobs": len(seen.done),
                "failed": len(seen.failed),
                "warm_percent": round(seen.warm_percent(), 1),
                "simulated_warm_percent": round(predicted, 1),
                "median_s": round(statistics.median(seen.times()), 3),
                "p95_s": round(percentile(seen.times(), 95), 3),
                "p99_s": round(percentile(seen.times(), 99), 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def simulated_three(policy: Policy, bound: int, jobs: int) -> float:
    """The share of warm jobs that the simulation has of the same three boxes."""
    size = MODEL_GIB * 2**30
    run_s = STEPS * STEP_MS / 1000
    models = [Model(name, size, size / LINK_BYTES, run_s) for name in MODELS]
    shares, found = popularity(len(MODELS)), []
    for seed in range(20):
        boxes = [Box(name, CARD_GIB * 2**30 - 256 * 2**20) for name in "abc"]
        proxy = SimulatedProxy(boxes, policy, bound / 100)
        outcome = simulate(
            models,
            shares,
            boxes,
            proxy,
            a_second=A_SECOND,
            jobs=jobs,
            warm_up=WARM_UP,
            seed=seed,
        )
        found.append(outcome.warm_percent)
    return statistics.mean(found)


def measure_lost(kinds: dict[str, Any], jobs: int) -> list[Row]:
    """A box is killed under load: what fails, and how soon its models are there again."""
    rows = []
    for name, kind in kinds.items():
        with temporary() as folder, three(folder) as boxes:
            with before(boxes, lambda: kind(folder, boxes.addresses)) as proxy:  # noqa: B023
                load, ended = Load(proxy.address), threading.Event()
                thread = threading.Thread(target=load.run, args=(100_000, 0, ended.is_set))
                thread.start()
                wait_until(lambda: len(load.seen.done) >= jobs / 3, "the load runs", 300)  # noqa: B023
                with boxes.client("a") as client:
                    wait_until(lambda: len(client.jobs()) >= 2, "the box has jobs", 300)  # noqa: B023
                    mine = client.jobs()
                killed = time.monotonic()
                boxes.kill("a")
                # Somebody who wants what the lost box has, and asks until it comes.
                model = mine[0].model_key.partition("+")[0]
                with moored.Client(proxy.address) as client:
                    wait_until(lambda: is_made(client, model), "the model is there again")  # noqa: B023
                first = time.monotonic() - killed
                count = len(load.seen.done)
                wait_until(lambda: len(load.seen.done) >= count + jobs / 3, "it goes on", 300)  # noqa: B023
                restarted = time.monotonic()
                boxes.start("a")
                proxy.wait_up("a")
                back = time.monotonic() - restarted
                count = len(load.seen.done)
                wait_until(lambda: len(load.seen.done) >= count + jobs / 3, "it goes on", 300)  # noqa: B023
                ended.set()
                thread.join()
        late = [at for _, at, _ in load.seen.failed if at > killed]
        rows.append(
            {
                "table": "lost",
                "proxy": name,
                "jobs": len(load.seen.done) + len(load.seen.failed),
                "at_the_box": len(mine),
                "failed": len(load.seen.failed),
                "failed_that_began_later": len(late),
                "first_of_its_models_s": round(first, 2),
                "gets_jobs_again_s": round(back, 2),
            }
        )
        print(rows[-1], load.seen.failed[:5], flush=True)
    return rows


def is_made(client: moored.Client, model: str) -> bool:
    """Whether a job of this model is done."""
    try:
        client.generate_image("once more", model=model, width=64, height=64, steps=STEPS)
    except moored.ConnectionFailed:
        return False
    return True


def measure_upgrade(jobs: int) -> list[Row]:
    """Each box is stopped and started again under load, one after another."""
    notice = ("--set", "service.notice=2s")
    ways: list[tuple[str, Any, bool, float, tuple[str, ...]]] = [
        ("HAProxy, drained there first", HaProxy, True, 0.0, ()),
        ("HAProxy, the service's notice of 2 s", HaProxy, False, 0.0, notice),
        ("HAProxy, the service's drain alone", HaProxy, False, 0.0, ()),
        ("HAProxy, the service's drain, client with retry_s=30", HaProxy, False, 30.0, ()),
        ("Envoy, the service's drain alone", Envoy, False, 0.0, ()),
    ]
    rows = []
    for name, kind, first, retry_s, settings in ways:
        with temporary() as folder, three(folder, *settings) as boxes:
            with before(boxes, lambda: kind(folder, boxes.addresses)) as proxy:  # noqa: B023
                load = Load(proxy.address, UPGRADE_A_SECOND, retry_s=retry_s)
                ended = threading.Event()
                thread = threading.Thread(target=load.run, args=(100_000, 0, ended.is_set))
                thread.start()
                began = time.monotonic()
                for box in "abc":
                    count = len(load.seen.done)
                    wait_until(lambda: len(load.seen.done) >= count + jobs / 4, "it goes on", 300)  # noqa: B023
                    # Not when it happens to have nothing to do.
                    with boxes.client(box) as client:
                        wait_until(lambda: len(client.jobs()) >= 2, "it has jobs", 300)  # noqa: B023
                    if first:
                        proxy.drain(box)
                        wait_until(lambda: proxy.open_jobs(box) == 0, "its jobs have ended")  # noqa: B023
                    boxes.drain(box)
                    boxes.wait_ended(box)
                    boxes.start(box)
                    if first:
                        proxy.ready(box)
                    proxy.wait_up(box)
                took = time.monotonic() - began
                ended.set()
                thread.join()
        rows.append(
            {
                "table": "upgrade",
                "way": name,
                "jobs": len(load.seen.done) + len(load.seen.failed),
                "failed": len(load.seen.failed),
                "p99_s": round(percentile(load.seen.times(), 99), 2),
                "seconds": round(took, 1),
            }
        )
        print(rows[-1], load.seen.failed[:5], flush=True)
    return rows


# Bytes of models as they lie on cards, and seconds of a request of each, near those of docs/BENCHMARKS.md.
SIZES_GIB = (7, 12, 16, 24, 33, 40)
RUNS_S = (2.0, 2.5, 3.5, 4.0, 8.0, 30.0)


def measure_simulated(jobs: int) -> list[Row]:
    """100 boxes by simulation, with the bytes and the seconds that a service reports of a load."""
    rows = []
    count, models_count = 100, 400
    loads = {}
    with temporary() as folder:
        models = folder / "models"
        for size in SIZES_GIB:
            make_models(models, [f"of-{size}"], size)
        boxes = Boxes(folder, models, names=("a",), device="sim:80GiB,speed=55GB/s,disk=6GB/s")
        try:
            with boxes.client("a") as client:
                for size in SIZES_GIB:
                    loaded = client.load(f"of-{size}").done
                    loads[size] = sum(stage.move_ms for stage in loaded.stages) / 1000
                    client.unload()
        finally:
            boxes.stop()
    print("seconds of a load:", loads)
    drawn = random.Random(SEED)
    made = []
    for number in range(models_count):
        kind = drawn.randrange(len(SIZES_GIB))
        size = SIZES_GIB[kind]
        made.append(Model(f"model-{number}", size * 2**30, loads[size], RUNS_S[kind]))
    shares = popularity(models_count)
    mean_run = sum(m.run_s * s for m, s in zip(made, shares, strict=True)) / sum(shares)
    for busy in (0.3, 0.6, 0.8):
        for name, (_, policy, bound) in POLICIES.items():
            at = [Box(f"box-{number}", 79 * 2**30) for number in range(count)]
            outcome = simulate(
                made,
                shares,
                at,
                SimulatedProxy(at, policy, bound / 100),
                a_second=busy * count / mean_run,
                jobs=jobs * 200,
                warm_up=jobs * 50,
                seed=SEED,
            )
            rows.append(
                {
                    "table": "simulated",
                    "busy_percent": round(busy * 100),
                    "policy": name,
                    "jobs": outcome.jobs,
                    "warm_percent": round(outcome.warm_percent, 1),
                    "mean_s": round(statistics.mean(outcome.times_s), 1),
                    "median_s": round(statistics.median(outcome.times_s), 1),
                    "p95_s": round(percentile(outcome.times_s, 95), 1),
                }
            )
            print(rows[-1], flush=True)
    return rows


HEADS: dict[str, dict[str, str]] = {
    "policies": {
        "policy": "a box is chosen",
        "jobs": "jobs",
        "warm_percent": "warm, %",
        "simulated_warm_percent": "simulated, %",
        "median_s": "median, s",
        "p95_s": "p95, s",
        "p99_s": "p99, s",
        "failed": "failed",
    },
    "lost": {
        "proxy": "proxy",
        "jobs": "jobs in all",
        "at_the_box": "at the box when it was killed",
        "failed": "failed",
        "failed_that_began_later": "of them begun later",
        "first_of_its_models_s": "first of its models done after, s",
        "gets_jobs_again_s": "start to new jobs, s",
    },
    "upgrade": {
        "way": "way",
        "jobs": "jobs in all",
        "failed": "failed",
        "p99_s": "p99, s",
        "seconds": "all three boxes, s",
    },
    "simulated": {
        "busy_percent": "busy, %",
        "policy": "a box is chosen",
        "jobs": "jobs",
        "warm_percent": "warm, %",
        "mean_s": "mean, s",
        "median_s": "median, s",
        "p95_s": "p95, s",
    },
}


def write_tables(rows: list[Row]) -> None:
    """Puts each table between its markers in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, heads in HEADS.items():
        mine = [row for row in rows if row["table"] == name]
        if not mine:
            continue
        lines = [f"| {' | '.join(heads.values())} |", "|---" * len(heads) + "|"]
        lines += [f"| {' | '.join(str(row[key]) for key in heads)} |" for row in mine]
        before_it, begin, rest = text.partition(f"<!-- boxes.json {name} -->")
        _, end, after = rest.partition(END)
        if not begin or not end:
            sys.exit(f"{DOCUMENT} has no <!-- boxes.json {name} --> ... {END}")
        text = f"{before_it}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}{after}"
    DOCUMENT.write_text(text, encoding="utf-8")


def main() -> int:
    """Measures, prints, records; 1 where an upgrade that is said to lose no job has lost one."""
    parser = argparse.ArgumentParser(prog="scripts/bench_boxes", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts; default: %(default)s")
    parser.add_argument("--short", action="store_true", help="a tenth of the jobs")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--note", default="", help="what else the machine did, for the rows")
    arguments = parser.parse_args()
    jobs = JOBS // 10 if arguments.short else JOBS
    rows: list[Row] = []
    parts: dict[str, Callable[[], list[Row]]] = {
        "policies": lambda: measure_policies(jobs),
        "lost": lambda: measure_lost({"HAProxy": HaProxy, "Envoy": Envoy}, jobs),
        "upgrade": lambda: measure_upgrade(jobs),
        "simulated": lambda: measure_simulated(jobs),
    }
    for part in arguments.only.split(","):
        rows += parts[part]()
    about = {
        "machine": f"{machine()}, simulated cards",
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    rows = [row | about | ({"note": arguments.note} if arguments.note else {}) for row in rows]
    if arguments.record:
        old = []
        if arguments.record.is_file():
            measured = {row["table"] for row in rows}
            old = json.loads(arguments.record.read_text(encoding="utf-8"))
            old = [row for row in old if row["table"] not in measured]
        rows = sorted(old + rows, key=lambda row: PARTS.index(row["table"]))
        arguments.record.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        write_tables(rows)
    lost = [row for row in rows if row["table"] == "upgrade" and row["failed"]]
    return 1 if any("first" in row["way"] or "notice" in row["way"] for row in lost) else 0


if __name__ == "__main__":
    os.environ.setdefault("MOORED_BINARY", str(ROOT / "target/release/moored"))
    sys.exit(main())
