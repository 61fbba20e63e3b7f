"""Measures a running service over loopback; scripts/bench builds what is measured and starts this.

Every figure is taken after a warm-up, from the release build, on the machine that the rows name.
Latencies are of calls in sequence unless said otherwise; they include the client, which is Python's
gRPC library on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc
import moored

from service import INSTANT_MODELS, ROOT, Service

ROWS_FILE = ROOT / "docs/benchmarks/service.json"
# Written by tests/gpu/run, film_rows.py, picture_rows.py and sound_rows.py in tests/gpu, and scripts/soak.
CARD_ROWS_FILES = (
    ROOT / "docs/benchmarks/card.json",
    ROOT / "docs/benchmarks/quantization.json",
    ROOT / "docs/benchmarks/speed.json",
    ROOT / "docs/benchmarks/adapters.json",
    ROOT / "docs/benchmarks/streaming.json",
    ROOT / "docs/benchmarks/film.json",
    ROOT / "docs/benchmarks/pictures.json",
    ROOT / "docs/benchmarks/sound.json",
    ROOT / "docs/benchmarks/soak.json",
)
# Where a figure is to be read against another program's, the table shows what it is of that.
WITH_RATIOS = ("speed.json", "film.json", "pictures.json", "sound.json")
DOCUMENT = ROOT / "docs/BENCHMARKS.md"
PROMPTS = ROOT / "service/cli/src/demo_prompts.txt"
END = "<!-- end -->"
CLIENTS = 64
MIB = 2**20


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    warm_up: int
    calls: int
    fair_seconds: float
    pictures: int


FULL = Scale(warm_up=50, calls=500, fair_seconds=10.0, pictures=12)
QUICK = Scale(warm_up=5, calls=20, fair_seconds=3.0, pictures=2)


@dataclass(frozen=True)
class Row:
    """One figure. `better` is `lower` or `higher`; a peer is another program's figure for it."""

    measure: str
    value: float
    unit: str
    target: float | None
    better: str
    device: str
    date: str
    peer: str = ""
    peer_value: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


class Rows:
    """Figures as they come, with the machine and the day on each."""

    def __init__(self) -> None:
        """Looks at the machine and the calendar."""
        self.device = machine()
        self.date = datetime.now(timezone.utc).date().isoformat()
        self.all: list[Row] = []

    def add(
        self, measure: str, value: float, unit: str, better: str, target: float | None = None
    ) -> None:
        """Notes a figure and prints it."""
        row = Row(measure, round(value, 3), unit, target, better, self.device, self.date)
        self.all.append(row)
        print(f"{measure}: {row.value:g} {unit}", flush=True)


def machine() -> str:
    """Model and number of the processors that this process may use."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = found[1].strip() if found else model
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return f"{model}, {cores} cores"


@contextmanager
def serving(binary: Path, *arguments: str, device: str) -> Iterator[Service]:
    """A service of an empty state on this device."""
    with tempfile.TemporaryDirectory() as state:
        service = Service(*arguments, state=Path(state), devices=(device,), binary=binary)
        try:
            yield service
        finally:
            service.stop()


def percentile(values: list[float], share: float) -> float:
    """The value that this share of values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def milliseconds_of(call: Callable[[], object], scale: Scale) -> list[float]:
    """What each of many calls took, after those that warm up."""
    for _ in range(scale.warm_up):
        call()
    times = []
    for _ in range(scale.calls):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def measure_plans(rows: Rows, plan_bench: Path) -> None:
    """Planning, without a service: it runs inside of the worker at every stage."""
    answer = subprocess.run([str(plan_bench)], stdout=subprocess.PIPE, check=True, text=True)
    figures = json.loads(answer.stdout)
    what = f"planning a stage, {figures['components']:,} components resident"
    rows.add(f"{what}, p50", figures["p50_us"] / 1e3, "ms", "lower")
    rows.add(f"{what}, p99", figures["p99_us"] / 1e3, "ms", "lower", target=1.0)


def lean_call(channel: grpc.Channel, client_id: str, model: str = "small") -> Callable[[], int]:
    """A GenerateImage call that sends and receives bytes without decoding them."""
    from moored._generated import generation_pb2, model_pb2

    stub: Any = channel.unary_stream("/moored.v1.Generation/GenerateImage")
    request = generation_pb2.GenerateImageRequest(
        model=model_pb2.ModelRef(id=model),
        prompt="a red cube",
        seed=1,
        options=generation_pb2.JobOptions(client_id=client_id),
    ).SerializeToString()
    return lambda: sum(1 for _ in stub(request))


def measure_overhead(rows: Rows, address: str, scale: Scale) -> None:
    """What a picture costs when computing it costs nothing."""
    with grpc.insecure_channel(address) as channel:
        times = milliseconds_of(lean_call(channel, "bench"), scale)
    what = "GenerateImage without the model, lean gRPC client"
    rows.add(f"{what}, p50", statistics.median(times), "ms", "lower", target=3.0)
    rows.add(f"{what}, p99", percentile(times, 0.99), "ms", "lower")
    with moored.Client(address) as client:
        times = milliseconds_of(
            lambda: client.generate_image("a red cube", model="small", seed=1), scale
        )
        inside = [
            float(client.generate_image("a red cube", model="small", seed=1).total_ms)
            for _ in range(scale.warm_up)
        ]
        empty = milliseconds_of(client.server_info, scale)
    what = "GenerateImage without the model"
    rows.add(f"{what}, Python client, p50", statistics.median(times), "ms", "lower")
    # Whole milliseconds, as the service tells them.
    rows.add(f"{what}, inside of the service, p50", statistics.median(inside), "ms", "lower")
    rows.add("an empty call, Python client, p50", statistics.median(empty), "ms", "lower")


def measure_shares(rows: Rows, address: str, scale: Scale) -> None:
    """Many clients that each always want one more picture, for a fixed time.

    Shares are of card time, so the pictures are of a model that takes a steady 5 ms each: of one that
    takes none, what is shared is the noise of a busy machine.
    """
    completed = [0] * CLIENTS
    errors: list[str] = []
    barrier = threading.Barrier(CLIENTS + 1)
    stop = threading.Event()

    def client(number: int) -> None:
        # A connection each, as separate programs would have.
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, options) as channel:
            call = lean_call(channel, f"client-{number}", "steady")
            try:
                call()
                barrier.wait()
                while not stop.is_set():
                    call()
                    completed[number] += 1
            except (grpc.RpcError, threading.BrokenBarrierError) as error:
                errors.append(str(error))
                barrier.abort()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        barrier.wait(120)
    except threading.BrokenBarrierError:
        errors.append("not every client came to its first picture")
    began = time.perf_counter()
    stop.wait(scale.fair_seconds)
    counted, seconds = list(completed), time.perf_counter() - began
    stop.set()
    for thread in threads:
        thread.join()
    if errors:
        print(f"the first of {len(errors)} errors: {errors[0]}", file=sys.stderr)
    what = f"{CLIENTS} clients at once"
    rows.add(f"{what}, errors", len(errors), "calls", "lower", target=0)
    rows.add(f"{what}, pictures of 5 ms", sum(counted) / seconds, "1/s", "higher")
    # Of equal demand. Infinite when somebody got nothing.
    spread = max(counted) / min(counted) if min(counted) else float(max(counted) or 1) * CLIENTS
    rows.add(f"{what}, most by fewest pictures of a client", spread, "ratio", "lower", target=1.5)


def resident_mib(process: subprocess.Popen[str]) -> float:
    """RSS of a process, without its children."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def measure_service(rows: Rows, binary: Path, scale: Scale) -> None:
    """Everything that a simulated card is enough for."""
    arguments = ("--models", str(INSTANT_MODELS))
    with serving(binary, *arguments, device="sim:24GiB") as service:
        service.client().close()
        at_rest = resident_mib(service.process)
        rows.add("supervisor at rest, before the first call, RSS", at_rest, "MiB", "lower")
        measure_overhead(rows, service.address, scale)
        measure_shares(rows, service.address, scale)
        after = resident_mib(service.process)
        rows.add("supervisor after all of the above, RSS", after, "MiB", "lower")


def measure_demo(rows: Rows, binary: Path, scale: Scale) -> None:
    """The shipped model on the CPU, at its default settings."""
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line]
    with serving(binary, device="cpu") as service, service.client() as client:
        began = time.perf_counter()
        client.generate_image("a warm-up", seed=0)
        rows.add("demo, first picture, loading included", time.perf_counter() - began, "s", "lower")
        times = []
        for seed, prompt in enumerate(prompts[: scale.pictures], start=1):
            began = time.perf_counter()
            client.generate_image(prompt, seed=seed)
            times.append(time.perf_counter() - began)
    rows.add(
        "demo, a picture at default settings on the CPU, p50",
        statistics.median(times),
        "s",
        "lower",
        target=2.0,
    )


def table_of(rows: list[dict[str, object]], ratios: bool = False) -> str:
    """The rows for people, in Markdown; `ratios` says what each is of the other program's figure."""
    peers = any(row["peer"] for row in rows)
    lines = ["| Measure | Value | Target | Met |", "| --- | ---: | ---: | :---: |"]
    if peers:
        lines = [f"{lines[0]} Others |", f"{lines[1]} --- |"]
    for row in rows:
        one = Row(**row)  # type: ignore[arg-type]
        sign = "≤" if one.better == "lower" else "≥"
        target = "" if one.target is None else f"{sign} {one.target:g} {one.unit}"
        met = {None: "", True: "yes", False: "no"}[one.met]
        line = f"| {one.measure} | {one.value:g} {one.unit} | {target} | {met} |"
        other = f"{one.peer}: {one.peer_value:g} {one.unit}" if one.peer else ""
        if ratios and one.peer_value:
            other += f" ({one.value / one.peer_value:.2f} of it)"
        lines.append(f"{line} {other} |" if peers else line)
    machines = sorted({f"{row['device']}, {row['date']}" for row in rows})
    return "\n".join([*lines, "", "Measured on: " + "; ".join(machines) + "."])


def write_table(rows: list[dict[str, object]], name: str = ROWS_FILE.name) -> None:
    """Puts the table of a rows file between its markers in the document, where there is one with them."""
    marker = f"<!-- {name} -->"
    text = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.is_file() else ""
    before, begin, rest = text.partition(marker)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{DOCUMENT} has no {marker} ... {END}: the table is not written", file=sys.stderr)
        return
    table = table_of(rows, name in WITH_RATIOS)
    DOCUMENT.write_text(f"{before}{marker}\n\n{table}\n\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Measures, prints and records; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description="Measure a moored service.")
    parser.add_argument("--binary", type=Path, help="moored, a release build")
    parser.add_argument("--plan-bench", type=Path, help="the example plan_bench of residency")
    parser.add_argument("--quick", action="store_true", help="few rounds; nothing is recorded")
    parser.add_argument("--table", action="store_true", help="only write what is recorded anew")
    arguments = parser.parse_args()
    if arguments.table:
        for file in (ROWS_FILE, *CARD_ROWS_FILES):
            if file.is_file():
                write_table(json.loads(file.read_text(encoding="utf-8")), file.name)
        return 0
    if not arguments.binary:
        parser.error("--binary is needed")
    scale = QUICK if arguments.quick else FULL
    rows = Rows()
    print(f"{rows.device}, {rows.date}")
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > 0.5:
        print(f"the machine is not idle (load {load:.1f}): figures are worse than they could be")
    if arguments.plan_bench and arguments.plan_bench.is_file():
        measure_plans(rows, arguments.plan_bench)
    else:
        print("planning is left out: there is no plan_bench")
    measure_service(rows, arguments.binary, scale)
    measure_demo(rows, arguments.binary, scale)

    records = [asdict(row) for row in rows.all]
    print(f"\n{table_of(records)}")
    if arguments.quick:
        print("\n--quick: nothing is recorded")
    else:
        ROWS_FILE.parent.mkdir(parents=True, exist_ok=True)
        ROWS_FILE.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        write_table(records)
        print(f"\nrecorded in {ROWS_FILE.relative_to(ROOT)}")
    missed = [row.measure for row in rows.all if row.met is False]
    for measure in missed:
        print(f"target missed: {measure}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
