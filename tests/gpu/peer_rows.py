"""Rows of docs/benchmarks of what whole models were measured to take beside diffusers, and their table.

`film_rows.py` and `sound_rows.py` say which rows there are. Each file is one run of `film.py` or `sound.py`,
or has figures in its form from elsewhere. A figure has a target where the project has set one: a share of
diffusers' figure of the same run, or a number. Of several runs the last one that measured a figure counts,
beside diffusers if any did. Rows of the file that no run has measured stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Figure = dict[str, Any]
Row = dict[str, object]


@dataclass(frozen=True)
class Wanted:
    """A row: the figure's name, and what it is held against."""

    measure: str
    share: float | None = None
    """The target as a share of diffusers' figure."""
    beside: str = ""
    """The name of that figure, if it is another."""
    of_ours: str = ""
    """The name of a figure of ours of which `share` is the target's share, instead of diffusers'."""
    peer: str = ""
    """What the table calls that figure of ours, if not by its name."""
    target: float | None = None
    better: str = "lower"


def with_scratch(run: Iterable[Figure]) -> Iterator[Figure]:
    """The figures of a run; the scratch of a decode or an encode is one of its own."""
    for figure in run:
        yield figure
        if figure["measure"].startswith(("decode", "encode")) and "peak_gib" in figure:
            name = f"{figure['measure']}: scratch"
            yield figure | {"measure": name, "figure": figure["peak_gib"], "unit": "GiB"}


def rows_of(
    wanted: Sequence[Wanted], runs: Iterable[Iterable[Figure]], earlier: Iterable[Row] = ()
) -> list[Row]:
    """Rows in the form of all benchmarks, in the order in which they are wanted; after `earlier` ones."""
    found = {str(row["measure"]): row for row in earlier}
    for run in runs:
        figures = list(with_scratch(run))
        ours = {one["measure"]: one for one in figures if not is_theirs(one)}
        theirs = {one["measure"]: one for one in figures if is_theirs(one)}
        for row in wanted:
            one, other = ours.get(row.measure), theirs.get(row.beside or row.measure)
            if row.of_ours:
                other = ours.get(row.of_ours)
            before = found.get(row.measure)
            if one is not None and (other is not None or before is None or not before["peer"]):
                found[row.measure] = row_of(row, one, other)
    return [found[row.measure] for row in wanted if row.measure in found]


def is_theirs(figure: Figure) -> bool:
    """Whether it is another program's."""
    return str(figure.get("who", "")).startswith("diffusers")


def row_of(wanted: Wanted, one: Figure, other: Figure | None) -> Row:
    """A row of ours beside theirs."""
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
        "peer": wanted.peer or wanted.of_ours or (other["who"] if other else ""),
        "peer_value": float(f"{other['figure']:.4g}") if other else None,
    }


def main(wanted: Sequence[Wanted], name: str) -> int:
    """Writes the rows and the table of a file of docs/benchmarks; 1 when a target is missed."""
    sys.path[:0] = [str(ROOT / folder) for folder in ("scripts", "tests", "client-py/src")]
    from bench_service import table_of, write_table

    parser = argparse.ArgumentParser(description=f"Rows of docs/benchmarks/{name}.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--write-docs", type=Path, metavar="FILE")
    settings = parser.parse_args()
    runs = (json.loads(file.read_text(encoding="utf-8")) for file in settings.runs)
    file, earlier = settings.write_docs, []
    if file and file.exists():
        earlier = json.loads(file.read_text(encoding="utf-8"))
    rows = rows_of(wanted, runs, earlier)
    print(table_of(rows, ratios=True))
    if file:
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        write_table(rows, file.name)
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
