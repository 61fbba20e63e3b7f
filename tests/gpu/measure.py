"""Measures moored on a real card and prints one table; `run` beside this file starts it.

Each part is a process of its own with a time limit: one that fails or hangs costs its own figures only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import adapters
import endings
import formats
import loading
import others
import pressure
import speed
import stream_films
import stream_host
import stream_mixed
import stream_start
import streaming
import svdquant
from bench import FULL, ROOT, SMALL, Bench, NeedsCard, Scale
from figures import PartResult, Recorder, Results, read_part, table

STREAMED = (streaming, stream_host, stream_start, stream_films, stream_mixed)
PARTS = (
    loading.PARTS
    | pressure.PARTS
    | endings.PARTS
    | others.PARTS
    | formats.PARTS
    | speed.PARTS
    | svdquant.PARTS
    | adapters.PARTS
)
for module in STREAMED:
    PARTS |= module.PARTS
# Sets of parts, by the name of the file of figures that they make in docs/benchmarks.
SUITES = {
    "card": (
        "make link load unload swap cancel poison kill hang decode oom held repeat pictures peers drift"
    ).split(),
    "quantization": "make link formats kept cold mixed bitsandbytes".split(),
    "speed": ["make", "link", *speed.PARTS, *svdquant.PARTS],
    "adapters": ["make", "link", *adapters.PARTS],
    "streaming": ["make", "link", *(part for module in STREAMED for part in module.PARTS)],
}
ORDER = list(dict.fromkeys(name for suite in SUITES.values() for name in suite))
assert sorted(ORDER) == sorted(PARTS)
LIMIT_S = 150.0
LIMITS_S = (
    {"make": 400.0, "drift": 300.0, "repeat": 290.0, "peers": 300.0}
    | {
        "formats": 240.0,
        "kept": 240.0,
        "cold": 300.0,
        "mixed": 240.0,
        "bitsandbytes": 300.0,
    }
    | speed.LIMITS_S
    | svdquant.LIMITS_S
    | adapters.LIMITS_S
)
for module in STREAMED:
    LIMITS_S |= module.LIMITS_S
LAST_LINES = 25
LEAST_S = 5.0
AFTER_FAILURE_S = 2.0


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests/gpu/run", description="Measure moored on a card.")
    parser.add_argument("--binary", type=Path, help="moored: a release build with the feature cuda")
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/moored-gpu"), help="for checkpoints, 58 GB"
    )
    parser.add_argument(
        "--parts",
        default="card",
        help=f"some of {','.join(ORDER)}, or a set of them: {', '.join(SUITES)} (default: card)",
    )
    parser.add_argument(
        "--models",
        dest="model_count",
        type=int,
        choices=(1, 2),
        default=2,
        help="how many checkpoints `make` makes: all but swap and drift need one alone, 34 GB",
    )
    parser.add_argument(
        "--scale",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="measure more or less of something: a field of Scale in bench.py, such as mixed_cycles",
    )
    parser.add_argument("--out", type=Path, help="for pictures; default: the work folder")
    parser.add_argument("--results", type=Path, help="a JSON file that figures are merged into")
    parser.add_argument("--device", help="default: cuda:0, or a simulated card with --small")
    parser.add_argument("--small", action="store_true", help="tiny checkpoints: see that it works")
    parser.add_argument(
        "--torch-python", default=sys.executable, help="the Python that has PyTorch"
    )
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 4))
    parser.add_argument(
        "--write-docs",
        type=Path,
        metavar="FILE",
        help="write the figures of --results there, and the table",
    )
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="for everything; what is left over is not run"
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args(words)
    given = [name for name in found.parts.split(",") if name]
    found.parts = [part for name in given for part in SUITES.get(name, [name])]
    if unknown := set(found.parts) - set(ORDER):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: {', '.join(ORDER)}")
    if found.write_docs and (found.small or not found.results):
        parser.error("--write-docs needs the --results of a run that was not --small")
    if not found.write_docs and (not found.binary or not found.binary.is_file()):
        parser.error("--binary is needed: the moored to be measured")
    found.device = found.device or ("sim:2GiB,speed=2GiB/s" if found.small else "cuda:0")
    found.out = found.out or found.work
    try:
        scale_of(found)
    except ValueError as error:
        parser.error(str(error))
    for name in ("binary", "work", "out", "results", "write_docs", "record"):
        path = getattr(found, name)
        setattr(found, name, path and path.resolve())
    return found


def scale_of(settings: argparse.Namespace) -> Scale:
    """How much is measured, with what the command line changes of it.

    Raises a ValueError for what is no number of Scale.
    """
    scale = SMALL if settings.small else FULL
    for word in settings.scale:
        name, _, number = word.partition("=")
        kind = type(getattr(scale, name, None))
        if kind not in (int, float):
            raise ValueError(f"--scale {word}: there is no such number")
        try:
            scale = dataclasses.replace(scale, **{name: kind(number)})
        except ValueError:
            raise ValueError(f"--scale {word}: {number!r} is no {kind.__name__}") from None
    return scale


def run_here(settings: argparse.Namespace) -> int:
    """One part, in this process."""
    bench = Bench(
        binary=settings.binary,
        work=settings.work,
        out=settings.out,
        device=settings.device,
        small=settings.small,
        torch_python=settings.torch_python,
        threads=settings.threads,
        record=Recorder(settings.record),
        scale=scale_of(settings),
        models_made=settings.model_count,
    )
    try:
        PARTS[settings.part](bench)
    except NeedsCard as why:
        if not settings.small:
            raise
        bench.record.skip(str(why))
    except BaseException:
        traceback.print_exc()
        if bench.services:
            sys.stderr.writelines(
                ["the end of the service's log:\n", *bench.services[-1].log[-LAST_LINES:]]
            )
        return 1
    return 0


def run_apart(settings: argparse.Namespace, name: str, left_s: float) -> PartResult:
    """One part, in a process of its own that is ended when its time is up."""
    record = settings.work / f"{name}.jsonl"
    command = [sys.executable, __file__, "--part", name, "--record", str(record)]
    for option in ("binary", "work", "out", "device", "threads", "torch_python"):
        command += [f"--{option.replace('_', '-')}", str(getattr(settings, option))]
    command += ["--small"] if settings.small else []
    command += ["--models", str(settings.model_count)]
    command += [f"--scale={word}" for word in settings.scale]
    limit, began = min(LIMITS_S.get(name, LIMIT_S), left_s), time.monotonic()
    print(f"== {name}", flush=True)
    errors = settings.work / f"{name}.log"
    record.unlink(missing_ok=True)
    with errors.open("w", encoding="utf-8") as log:
        part = subprocess.Popen(command, stderr=log, start_new_session=True)
        try:
            status = "ok" if part.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            # Whatever it has started and left; its services end with their standard input besides.
            try:
                os.killpg(part.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            part.wait()
    said = errors.read_text(encoding="utf-8").strip().splitlines()
    if status != "ok":
        print("\n".join(said[-2 * LAST_LINES :]), flush=True)
        # A service that was ended by force gives its card back when the driver has noticed.
        time.sleep(AFTER_FAILURE_S)
    reasons = {"ok": "", "timed out": f"after {limit:g} s", "failed": _reason(said)}
    result = read_part(record, status, reasons[status], time.monotonic() - began)
    print(f"  {result.status} in {result.seconds:.1f} s {result.reason}".rstrip(), flush=True)
    return result


def _reason(said: list[str]) -> str:
    """The line of a traceback that says what went wrong."""
    before = (
        said[: said.index("the end of the service's log:")]
        if "the end of the service's log:" in said
        else said
    )
    return before[-1] if before else "without a word"


def write_docs(results: Results, rows_file: Path) -> None:
    """The figures in the form that all benchmarks have, and their table in the document."""
    from bench_service import write_table

    # Results of several sets may be in one file: each set has rows of its own.
    for name in set(results.parts) - set(SUITES.get(rows_file.stem, results.parts)):
        del results.parts[name]
    for name, part in results.parts.items():
        if part.device.startswith("simulated"):
            raise SystemExit(f"{name} was measured on a simulated card: nothing is written")
        if part.status != "ok":
            print(f"{name}: {part.status}, {part.reason}: only what it found before is written")
    rows = list(results.rows())
    rows_file.parent.mkdir(parents=True, exist_ok=True)
    rows_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_table(rows, rows_file.name)
    print(f"{len(rows)} figures are in {rows_file} and in docs/BENCHMARKS.md")


def main() -> int:
    """Runs the parts and prints the table; 1 when a part failed or a target is missed."""
    settings = arguments_of()
    os.chdir(ROOT)
    if settings.part:
        return run_here(settings)
    results = Results(settings.results)
    if settings.write_docs:
        write_docs(results, settings.write_docs)
        return 0
    for folder in (settings.work, settings.out):
        folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in ORDER if name in settings.parts]
    until = time.monotonic() + settings.seconds
    for name in names:
        left_s = until - time.monotonic()
        if left_s < LEAST_S:
            names = names[: names.index(name)]
            print(f"the time is over: {name} and what follows is not run", flush=True)
            break
        results.put(name, run_apart(settings, name, left_s))
    parts = results.with_targets()
    ran = [(name, parts[name]) for name in names]
    for name, part in ran:
        for note in part.notes:
            print(f"{name}: {note}")
    print(f"\n{table(ran)}", flush=True)
    good = all(part.status in ("ok", "skipped") for _, part in ran)
    met = all(one.met is not False for _, part in ran for one in part.figures)
    return 0 if good and met else 1


if __name__ == "__main__":
    sys.exit(main())
