"""Makes docs/benchmarks/film.json, and its table in docs/BENCHMARKS.md, of what films were measured to take.

    python tests/gpu/film_rows.py RUN.json ... --write-docs docs/benchmarks/film.json

Each file is one run of `film.py`, or has figures in its form from elsewhere. A figure has a target where the
project has set one: a share of diffusers' figure of the same run, or a number. Of several runs the last one
that measured a figure counts, beside diffusers if any did.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Figure = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A row: the figure's name, and what it is held against."""

    measure: str
    share: float | None = None
    """The target as a share of diffusers' figure."""
    beside: str = ""
    """The name of that figure, if it is another."""
    target: float | None = None
    better: str = "lower"


STEP = "step, FramePack 640x640"
SAMPLED = "step, HunyuanVideo 832x480"
ROWS = (
    Wanted(STEP, 0.75),
    Wanted(f"{STEP} fp8", 0.60, beside=STEP),
    Wanted(f"{STEP} int8", beside=STEP),
    Wanted(f"{STEP} nf4", beside=STEP),
    Wanted(f"{SAMPLED}, 49 frames", 0.65),
    Wanted(f"{SAMPLED}, 129 frames", 0.65),
    Wanted("decode of 5 latents, 832x480", 0.45),
    Wanted("decode of 5 latents, 832x480: scratch", target=5.0),
    Wanted("decode of 5 latents, 640x640", 0.45),
    Wanted("decode of 5 latents, 640x640: scratch", target=5.0),
    *(
        Wanted(f"film 640x640, 2 sections, {name}, {left} GiB left, {policy}")
        for left, names in ((24, ("int8", "fp8", "nf4")), (16, ("fp8",)), (12, ("nf4",)))
        for name in names
        for policy in ("shared", "exclusive")
    ),
    Wanted("code and context that a first film leaves"),
    Wanted("bytes left after a film and unloading", target=0.0),
    Wanted("bytes left after unloading, 50 mixed films and pictures", target=0.0),
    Wanted("sampled latents beside diffusers, relative L2, farthest", target=1e-5),
    Wanted("bytes of films beside diffusers, largest difference", target=1.0),
    Wanted("film of 1,189 frames: memory of the supervisor, growth"),
    Wanted("film of 1,189 frames: memory of the worker, growth"),
    Wanted("film model: held-out prompts, in place", target=85.0, better="higher"),
    Wanted("film model: held-out prompts, right in everything", better="higher"),
    Wanted("film model: shuffled prompts, in place", target=0.0),
)


def with_scratch(run: Iterable[Figure]) -> Iterator[Figure]:
    """The figures of a run; the scratch of a decode is one of its own."""
    for figure in run:
        yield figure
        if figure["measure"].startswith("decode") and "peak_gib" in figure:
            name = f"{figure['measure']}: scratch"
            yield figure | {"measure": name, "figure": figure["peak_gib"], "unit": "GiB"}


def rows_of(runs: Iterable[Iterable[Figure]]) -> list[dict[str, object]]:
    """Rows in the form of all benchmarks, in the order of `ROWS`."""
    found: dict[str, dict[str, object]] = {}
    for run in runs:
        figures = list(with_scratch(run))
        ours = {one["measure"]: one for one in figures if not is_theirs(one)}
        theirs = {one["measure"]: one for one in figures if is_theirs(one)}
        for wanted in ROWS:
            one, other = ours.get(wanted.measure), theirs.get(wanted.beside or wanted.measure)
            before = found.get(wanted.measure)
            if one is not None and (other is not None or before is None or not before["peer"]):
                found[wanted.measure] = row(wanted, one, other)
    return [found[wanted.measure] for wanted in ROWS if wanted.measure in found]


def is_theirs(figure: Figure) -> bool:
    """Whether it is another program's."""
    return str(figure.get("who", "")).startswith("diffusers")


def row(wanted: Wanted, one: Figure, other: Figure | None) -> dict[str, object]:
    target = wanted.target
    if wanted.share is not None and other is not None:
        target = float(f"{wanted.share * other['figure']:.4g}")
    return {
        "measure": wanted.measure,
        "value": float(f"{one['figure']:.4g}"),
        "unit": one["unit"],
        "target": target,
        "better": wanted.better,
        "device": one["device"],
        "date": one["date"],
        "peer": other["who"] if other else "",
        "peer_value": float(f"{other['figure']:.4g}") if other else None,
    }


def main() -> int:
    """Writes the rows and the table; 1 when a target is missed."""
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "client-py/src")]
    from bench_service import table_of, write_table

    parser = argparse.ArgumentParser(description="Rows of docs/benchmarks/film.json.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--write-docs", type=Path, metavar="FILE")
    settings = parser.parse_args()
    rows = rows_of(json.loads(file.read_text(encoding="utf-8")) for file in settings.runs)
    print(table_of(rows, ratios=True))
    if settings.write_docs:
        settings.write_docs.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        write_table(rows, settings.write_docs.name)
    missed = [
        one["measure"]
        for one in rows
        if one["target"] is not None and not is_met(one["value"], one["target"], one["better"])
    ]
    for measure in missed:
        print(f"target missed: {measure}", file=sys.stderr)
    return 1 if missed else 0


def is_met(value: Any, target: Any, better: object) -> bool:
    return bool(value <= target if better == "lower" else value >= target)


if __name__ == "__main__":
    sys.exit(main())
