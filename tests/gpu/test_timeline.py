"""The table of where time goes, on lines as the service writes them. Run: pytest tests/gpu."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import timeline  # noqa: E402

TEXT = """\
2026-11-22T04:33:08.500000Z  INFO moored is listening address=127.0.0.1:1
2026-11-22T04:33:08.900000Z DEBUG of="open the card" part="context" ms=340.5
2026-11-22T04:33:09.000000Z DEBUG of="open the card" part="context" ms=9.5
a line of some library
2026-11-22T04:33:09.100000Z  INFO a job is done
2026-11-22T04:33:09.250000Z DEBUG of="load" part="trim" ms=1e-3
"""


def as_json() -> list[str]:
    lines = []
    for at, of, part, ms in (
        ("2026-11-22T04:33:08.900000Z", "open the card", "context", 340.5),
        ("2026-11-22T04:33:09.000000Z", "open the card", "context", 9.5),
        ("2026-11-22T04:33:09.250000Z", "load", "trim", 1e-3),
    ):
        fields = {"of": of, "part": part, "ms": ms}
        told = {"timestamp": at, "level": "DEBUG", "fields": fields, "target": "timeline"}
        lines.append(json.dumps(told))
    other = {"message": "moored is listening", "address": "127.0.0.1:1"}
    first = {"timestamp": "2026-11-22T04:33:08.500000Z", "fields": other, "target": "moored::serve"}
    return [json.dumps(first), *lines, "{not JSON", json.dumps([1])]


@pytest.mark.parametrize("lines", [TEXT.splitlines(), as_json()], ids=["text", "json"])
def test_parts_and_landmarks_are_found(lines: list[str]) -> None:
    found = timeline.entries(lines)
    assert [one.ms for one in found] == [None, 340.5, 9.5, 1e-3]
    assert (found[1].of, found[1].part) == ("open the card", "context")
    assert found[1].began_s - found[0].ended_s == pytest.approx(0.4 - 0.3405, abs=1e-5)


def test_the_table_counts_from_the_first_and_the_sums_add_up() -> None:
    found = timeline.entries(TEXT.splitlines())
    rows = [row.split() for row in timeline.table(found, least_ms=1).splitlines()[1:]]
    assert rows[0][:2] == ["0.0", "--"]
    assert rows[1][:3] == ["59.5", "400.0", "340.50"]
    assert len(rows) == 3, "what took less than asked for is left out"
    assert timeline.sums(found).splitlines()[1].split()[:3] == ["350.0", "340.50", "2"]
    assert "no parts" in timeline.table([])


def test_a_log_is_cut_at_words() -> None:
    lines = ["one", "begin", "two", "end", "three", "end"]
    assert timeline.between(lines, "begin", "end") == ["begin", "two", "end"]
    assert timeline.between(lines, "", "") == lines
    assert timeline.between(lines, "nowhere", "") == []
