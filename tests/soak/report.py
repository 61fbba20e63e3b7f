"""The rows of a soak: figures, targets, verdicts, and what lies behind those that are missed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from bench_service import Row
from checks import (
    COUNT_SLACK,
    Flatness,
    JobEnds,
    account_faults,
    after_warm_up,
    contradicted,
    drift,
    ended_twice,
    flatness,
    never_ended,
)
from measures import ProcessSample, Rest

MIB = 2**20
SHOWN_REASONS = 5


@dataclass
class Report:
    """Rows as they are added, and reasons by the row that they explain."""

    device: str
    prefix: str
    """What is soaked, in front of each row's name."""
    rows: list[Row] = field(default_factory=list)
    reasons: dict[str, list[str]] = field(default_factory=dict)

    def add(
        self,
        measure: str,
        value: float,
        unit: str,
        target: float | None = None,
        better: str = "lower",
        reasons: Iterable[str] = (),
    ) -> None:
        """Adds a figure. Reasons are shown where its target is missed."""
        name = f"{self.prefix}: {measure}"
        date = datetime.now(timezone.utc).date().isoformat()
        self.rows.append(Row(name, round(value, 3), unit, target, better, self.device, date))
        if found := list(reasons):
            self.reasons[name] = found

    @property
    def missed(self) -> list[Row]:
        """The rows whose target is missed."""
        return [row for row in self.rows if row.met is False]

    def table(self) -> str:
        """Everything for people, in plain text; under it the reasons of what is missed."""
        lines = [("measure", "figure", "target", "")]
        for row in self.rows:
            sign = "<=" if row.better == "lower" else ">="
            target = "" if row.target is None else f"{sign} {row.target:g}"
            met = {None: "", True: "met", False: "MISSED"}[row.met]
            lines.append(
                (
                    row.measure.removeprefix(f"{self.prefix}: "),
                    f"{row.value:g} {row.unit}",
                    target,
                    met,
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        text = [f"{self.prefix}, on {self.device}", ""]
        for name, figure, target, met in lines:
            cells = (name.ljust(widths[0]), figure.rjust(widths[1]), target.ljust(widths[2]), met)
            text.append("  ".join(cells).rstrip())
        for row in self.missed:
            reasons = self.reasons.get(row.measure, [])
            text += ["", f"MISSED: {row.measure}: {row.value:g} {row.unit}"]
            text += [f"  {reason}" for reason in reasons[:SHOWN_REASONS]]
            if len(reasons) > SHOWN_REASONS:
                text.append(f"  and {len(reasons) - SHOWN_REASONS} more")
        return "\n".join(text)

    def write(self, file: Path) -> None:
        """The rows in the form of docs/benchmarks/*.json."""
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for row in self.rows]
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def add_flatness(report: Report, rests: list[Rest], whole_s: float) -> None:
    """Rows of the supervisor over all rests, and of each worker that lived long enough over its own."""
    series = {"supervisor": [(rest.at_s, rest.supervisor) for rest in rests]}
    generations = sorted({rest.generation for rest in rests})
    for number in generations:
        lived = [(rest.at_s, rest.worker) for rest in rests if rest.generation == number]
        series[f"worker {number + 1}"] = lived
    for name, points in series.items():
        _add_process(report, name, points, whole_s)


def _add_process(
    report: Report, name: str, points: list[tuple[float, ProcessSample]], whole_s: float
) -> None:
    def judged(what: str) -> Flatness | None:
        return flatness(after_warm_up([(at, getattr(one, what)) for at, one in points], whole_s))

    rss = judged("rss_bytes")
    if rss is None:
        return  # it did not live long enough
    said = f"{name} ({rss.count} rests)"
    whole = ", ".join(f"{one.rss_bytes / MIB:.1f}" for _, one in points)
    reasons = [f"MiB at its rests, with its warm-up: {whole}"]
    report.add(f"{said}, RSS, first third", rss.first / MIB, "MiB")
    report.add(
        f"{said}, RSS, growth to the last third", 100 * rss.growth, "%", 5.0, reasons=reasons
    )
    report.add(f"{said}, RSS, the most above it", 100 * rss.peak, "%", 5.0, reasons=reasons)
    for what in ("descriptors", "threads"):
        counts = judged(what)
        assert counts is not None
        reasons = ["at its rests: " + ", ".join(str(getattr(one, what)) for _, one in points)]
        allowed = float(round(max(COUNT_SLACK, 0.05 * counts.first)))
        report.add(f"{said}, {what}, first third", counts.first, what)
        grown = max(counts.last, counts.most) - counts.first
        report.add(f"{said}, {what}, the most above it", grown, what, allowed, reasons=reasons)


def add_ledger(report: Report, rests: list[Rest]) -> None:
    """Rows of the card's accounts at rests."""
    faults = [
        f"at {rest.at_s:.0f} s: {text}" for rest in rests for text in account_faults(rest.card)
    ]
    wrong = {rest.at_s for rest in rests if account_faults(rest.card)}
    most = max((drift(rest.card) for rest in rests), default=0)
    known = sorted({name for rest in rests for name in rest.card.expected})
    by = f"by the driver: {', '.join(known)}" if known else "adding up alone"
    report.add("rests", len(rests), "rests", 1, "higher")
    report.add(f"rests at which the ledger is wrong ({by})", len(wrong), "rests", 0, reasons=faults)
    report.add("most bytes by which an account is wrong", most, "B", 0, reasons=faults)
    left = [f"at {rest.at_s:.0f} s: {text}" for rest in rests for text in rest.left]
    report.add("what is left behind at rests", len(left), "things", 0, reasons=left)


def add_jobs(report: Report, jobs: JobEnds) -> None:
    """Rows of how jobs ended."""
    report.add("jobs accepted", len(jobs.accepted), "jobs")
    report.add(
        "jobs done", sum(state == "done" for state in jobs.states.values()), "jobs", 1, "higher"
    )
    for measure, found in (
        ("jobs that ended twice", ended_twice(jobs)),
        ("jobs that never ended", never_ended(jobs)),
        ("jobs whose stream, list and log differ", contradicted(jobs)),
    ):
        reasons = [
            f"{job}: accepted {jobs.accepted[job]}, ended {jobs.ended[job]}, log {jobs.states.get(job)},"
            f" streams {jobs.told.get(job, [])}, list {sorted(jobs.seen.get(job, ()))}"
            for job in found
        ]
        report.add(measure, len(found), "jobs", 0, reasons=reasons)
