"""What the parts find: figures with their targets, the file that collects them, and the table of them all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class Figure:
    """One figure. `better` is `lower` or `higher`; `key` is what another program's figure refers to."""

    key: str
    measure: str
    value: float
    unit: str
    better: str
    target: float | None = None
    peer_of: str = ""
    """The key of the figure that this one, another program's, stands beside."""
    share: float | None = None
    """The target as a share of another program's figure of the same run, once that is known."""
    share_of: str = ""
    """The key of that figure."""

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    @property
    def verdict(self) -> str:
        """The same as a word."""
        return {None: "", True: "met", False: "MISSED"}[self.met]


@dataclass
class PartResult:
    """How one part of the run went. `status`: `ok`, `skipped`, `failed`, `timed out`."""

    status: str
    reason: str = ""
    seconds: float = 0.0
    device: str = ""
    date: str = ""
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Recorder:
    """Figures of one part as they come: printed, and written a line each, so that none is lost with it."""

    def __init__(self, path: Path) -> None:
        """Begins an empty file."""
        self._path = path
        path.write_text("")

    def add(
        self,
        key: str,
        measure: str,
        value: float,
        unit: str,
        better: str = "lower",
        target: float | None = None,
        peer_of: str = "",
        share: float | None = None,
        share_of: str = "",
    ) -> None:
        """Notes a figure."""
        rounded = float(f"{value:.4g}") if abs(value) < 1e4 else round(value, 1)
        figure = Figure(key, measure, rounded, unit, better, target, peer_of, share, share_of)
        print(f"  {measure}: {rounded:g} {unit} {figure.verdict}".rstrip(), flush=True)
        self._write({"figure": asdict(figure)})

    def note(self, text: str) -> None:
        """Notes what a figure cannot say."""
        print(f"  {text}", flush=True)
        self._write({"note": text})

    def device(self, name: str) -> None:
        """Says what is measured on."""
        self._write({"device": name})

    def skip(self, reason: str) -> None:
        """Says why this part has no figures."""
        self._write({"skipped": reason})

    def _write(self, line: dict[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_part(path: Path, status: str, reason: str, seconds: float) -> PartResult:
    """What a part wrote before it ended so."""
    date = datetime.now(timezone.utc).date().isoformat()
    result = PartResult(status, reason, round(seconds, 1), date=date)
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        line: dict[str, Any] = json.loads(text)
        if "figure" in line:
            result.figures.append(Figure(**line["figure"]))
        elif "note" in line:
            result.notes.append(line["note"])
        elif "device" in line:
            result.device = line["device"]
        elif "skipped" in line and status == "ok":
            result.status, result.reason = "skipped", line["skipped"]
    return result


class Results:
    """The file of all parts. A part that is run again replaces what it found before."""

    def __init__(self, path: Path | None) -> None:
        """Reads what is there already."""
        self._path = path
        self.parts: dict[str, PartResult] = {}
        if path is not None and path.is_file():
            for name, part in json.loads(path.read_text(encoding="utf-8")).items():
                figures = [Figure(**figure) for figure in part.pop("figures")]
                self.parts[name] = PartResult(**part, figures=figures)

    def put(self, name: str, part: PartResult) -> None:
        """Takes a part's result and writes the file."""
        self.parts[name] = part
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole = {name: asdict(part) for name, part in self.parts.items()}
            self._path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    def with_targets(self) -> dict[str, PartResult]:
        """All parts, with targets where those are shares of another program's figure on the same machine."""
        found = {one.key: (part, one) for part in self.parts.values() for one in part.figures}

        def resolved(part: PartResult, one: Figure) -> Figure:
            there, other = found.get(one.share_of, (None, None))
            # A part of another program alone, which ran without a card, names no machine.
            if there is None or there.device not in ("", part.device) or one.share is None:
                return one
            return replace(one, target=float(f"{one.share * other.value:.4g}"))

        return {
            name: replace(part, figures=[resolved(part, one) for one in part.figures])
            for name, part in self.parts.items()
        }

    def rows(self) -> Iterator[dict[str, object]]:
        """Every figure in the form of docs/benchmarks/*.json, other programs' beside ours."""
        figures = [(part, one) for part in self.with_targets().values() for one in part.figures]
        peers = {one.peer_of: one for _, one in figures if one.peer_of}
        by_key = {one.key: one for _, one in figures}
        for part, one in figures:
            if one.peer_of:
                continue
            peer = peers.get(one.key) or by_key.get(one.share_of)
            yield {
                "measure": one.measure,
                "value": one.value,
                "unit": one.unit,
                "target": one.target,
                "better": one.better,
                "device": part.device,
                "date": part.date,
                "peer": peer.measure if peer else "",
                "peer_value": peer.value if peer else None,
            }


def table(parts: Iterable[tuple[str, PartResult]]) -> str:
    """Everything for people, in plain text."""
    lines: list[tuple[str, str, str, str]] = [("measure", "target", "figure", "verdict")]
    for name, part in parts:
        for one in part.figures:
            sign = "<=" if one.better == "lower" else ">="
            target = "" if one.target is None else f"{sign} {one.target:g} {one.unit}"
            lines.append((one.measure, target, f"{one.value:g} {one.unit}", one.verdict))
        if part.status != "ok":
            what = part.status if part.status == "skipped" else part.status.upper()
            lines.append((f"[{name}]", "", part.reason.splitlines()[-1][:60], what))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def percentile(values: list[float], share: float) -> float:
    """The value that this share of values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
