"""Where time goes: a table of the parts that a log of the service tells of.

The service says so at the level debug under the target `timeline`:

    moored serve --set log.filter=info,timeline=debug 2> start.log
    python3 tests/gpu/timeline.py start.log

`--from` and `--to` cut the log at the first line with these words, so that one request can be looked at
alone. Parts of one whole follow each other but where they say otherwise; wholes contain each other: `decode`
contains `run`, which contains `compute`. `plans made ahead` are made on threads beside everything else,
several at a time; `plans in a stage` are what stages still wait for.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)Z\s+([A-Z]+)\s+(.*)$")
PART = re.compile(r'of="(?P<of>[^"]*)" part="(?P<part>[^"]*)" ms=(?P<ms>[0-9.eE+-]+)\s*$')
# Other lines that help to read the parts between them.
LANDMARKS = (
    "moored is listening",
    "the worker is ready",
    "loaded component=",
    "unloaded component=",
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Entry:
    """A part that has ended, or a line between them."""

    ended_s: float
    of: str
    part: str
    ms: float | None

    @property
    def began_s(self) -> float:
        """When it began, as far as one line tells."""
        return self.ended_s - (self.ms or 0.0) / 1000


def entries(lines: Iterable[str]) -> list[Entry]:
    """All parts of a log, text or JSON, in the order of their ends; times count from the epoch."""
    found = (_of_json(line) if line.startswith("{") else _of_text(line) for line in lines)
    return sorted((one for one in found if one), key=lambda one: one.ended_s)


def _of_text(line: str) -> Entry | None:
    stamped = STAMP.match(COLOURS.sub("", line).strip())
    if not stamped:
        return None
    at, _, words = stamped.groups()
    if part := PART.search(words):
        return Entry(_seconds(at), part["of"], part["part"], float(part["ms"]))
    return Entry(_seconds(at), "", words, None) if _is_landmark(words) else None


def _of_json(line: str) -> Entry | None:
    try:
        told = json.loads(line)
        fields, at = told["fields"], _seconds(told["timestamp"].rstrip("Z"))
    except (KeyError, TypeError, ValueError):
        return None
    if told.get("target") == "timeline":
        return Entry(at, fields["of"], fields["part"], float(fields["ms"]))
    words = [
        str(fields.get("message", "")),
        *(f"{k}={v}" for k, v in fields.items() if k != "message"),
    ]
    text = " ".join(words)
    return Entry(at, "", text, None) if _is_landmark(text) else None


def _is_landmark(words: str) -> bool:
    return any(landmark in words for landmark in LANDMARKS)


def _seconds(stamp: str) -> float:
    whole, _, fraction = stamp.partition(".")
    return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction or 0}")


def between(lines: Iterable[str], first: str, last: str) -> list[str]:
    """The lines from the first with these words on, up to and with the next that has those."""
    kept: list[str] = []
    for line in lines:
        if not kept and first not in line:
            continue
        kept.append(line)
        if last and last in line:
            break
    return kept


def table(found: list[Entry], least_ms: float = 0.0) -> str:
    """Each part with when it began and ended, in ms from the first on, and how long it took."""
    if not found:
        return "the log has no parts: was log.filter info,timeline=debug?"
    zero = min(one.began_s for one in found)
    rows = [f"{'began':>10} {'ended':>10} {'took ms':>10}  part"]
    for one in found:
        if one.ms is None:
            rows.append(f"{'':10} {1000 * (one.ended_s - zero):10.1f} {'':10}  -- {one.part}")
        elif one.ms >= least_ms:
            began, ended = 1000 * (one.began_s - zero), 1000 * (one.ended_s - zero)
            rows.append(f"{began:10.1f} {ended:10.1f} {one.ms:10.2f}  {one.of}: {one.part}")
    return "\n".join(rows)


def sums(found: list[Entry]) -> str:
    """How often each part came, and how long it took in all and at the most; the longest first."""
    times: dict[str, list[float]] = {}
    for one in found:
        if one.ms is not None:
            times.setdefault(f"{one.of}: {one.part}", []).append(one.ms)
    rows = [f"{'in all ms':>10} {'most ms':>10} {'times':>6}  part"]
    for part, ms in sorted(times.items(), key=lambda pair: -sum(pair[1])):
        rows.append(f"{sum(ms):10.1f} {max(ms):10.2f} {len(ms):6}  {part}")
    return "\n".join(rows)


def main(words: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Show where a service's time went.")
    parser.add_argument("log", type=Path, nargs="?", help="default: standard input")
    parser.add_argument("--from", dest="first", default="", help="words of the first line")
    parser.add_argument("--to", dest="last", default="", help="words of the last line")
    parser.add_argument("--least", type=float, default=0.0, help="milliseconds of what is shown")
    settings = parser.parse_args(words)
    text = settings.log.read_text(errors="replace") if settings.log else sys.stdin.read()
    found = entries(between(text.splitlines(), settings.first, settings.last))
    print(table(found, settings.least), sums(found), sep="\n\n")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
