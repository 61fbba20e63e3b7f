"""The checks of a soak can fail: on made-up series, jobs and accounts with one fault each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from checks import (
    JobEnds,
    account_faults,
    after_warm_up,
    contradicted,
    drift,
    ended_twice,
    flatness,
    never_ended,
)
from measures import CardSample, ProcessSample, Rest
from report import Report, add_flatness, add_jobs, add_ledger

MIB = 2**20
WHOLE_S = 600.0
RESTS = 60


def noise(number: int) -> float:
    """Half a percent to either side, the same each time."""
    return 1 + 0.005 * ((number * 7919) % 11 - 5) / 5


def rss_of(growth: float) -> list[float]:
    """RSS at rests, which grows by this share from the first third to the last."""
    slope = growth / (2 / 3)
    return [20 * MIB * noise(i) * (1 + slope * i / RESTS) for i in range(RESTS)]


# Memory.


def test_noise_is_flat() -> None:
    found = flatness(rss_of(0.0))
    assert found is not None and found.is_flat()


def test_a_leak_of_six_percent_is_not_flat() -> None:
    found = flatness(rss_of(0.06))
    assert found is not None
    assert found.growth == pytest.approx(0.06, abs=0.01)
    assert not found.is_flat()


def test_a_peak_that_is_over_by_the_end_is_not_flat() -> None:
    series = rss_of(0.0)
    series[30] *= 1.08
    found = flatness(series)
    assert found is not None
    assert found.growth < 0.05 < found.peak
    assert not found.is_flat()


def test_a_process_that_shrinks_is_flat() -> None:
    found = flatness(rss_of(-0.1))
    assert found is not None and found.is_flat()


def test_too_few_measurements_give_no_result() -> None:
    assert flatness([1.0] * 5) is None


def test_the_first_tenth_is_not_judged() -> None:
    points = [(10.0 * i, 100.0 if i < 6 else 20.0) for i in range(60)]
    assert after_warm_up(points, WHOLE_S) == [20.0] * 54


# Accounts.

EMPTY = CardSample(
    accounts={
        "total": 1000,
        "components": 0,
        "scratch": 0,
        "slack": 0,
        "workspaces": 20,
        "context": 80,
        "foreign": 100,
        "unexplained": 0,
        "free": 800,
    },
    booked=0,
    expected={"free": 800, "foreign": 100},
)


def card(**accounts: int) -> CardSample:
    return replace(EMPTY, accounts=EMPTY.accounts | accounts)


def test_accounts_that_are_right_have_no_fault() -> None:
    assert account_faults(EMPTY) == []
    assert drift(EMPTY) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        card(free=799),
        card(free=799, foreign=101),
        card(free=799, scratch=1),
        card(free=799, slack=1),
        card(free=799, unexplained=1),
        card(components=1, free=799),
        card(total=1001),
        replace(EMPTY, booked=1),
        replace(EMPTY, expected={"free": 801}),
    ],
)
def test_a_ledger_that_is_off_by_one_byte_is_a_fault(wrong: CardSample) -> None:
    assert account_faults(wrong)
    assert drift(wrong) == 1


# Jobs.

GOOD = JobEnds(
    accepted=Counter({"a": 1, "b": 1, "c": 1}),
    ended=Counter({"a": 1, "b": 1, "c": 1}),
    states={"a": "done", "b": "ended", "c": "ended"},
    told={"a": ["done", "done", "left"], "b": ["Cancelled"], "c": ["left"]},
    seen={"a": {"done"}, "b": {"cancelled"}},
)


def test_jobs_that_end_once_have_no_fault() -> None:
    assert ended_twice(GOOD) == never_ended(GOOD) == contradicted(GOOD) == []


@pytest.mark.parametrize(
    "change",
    [
        {"ended": Counter({"a": 2, "b": 1, "c": 1})},
        {"accepted": Counter({"a": 2, "b": 1, "c": 1})},
        {"seen": {"a": {"done", "cancelled"}}},
        {"seen": {"a": {"done", "running after its end"}}},
    ],
)
def test_a_job_that_ended_twice_is_found(change: dict[str, Any]) -> None:
    assert ended_twice(replace(GOOD, **change)) == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        {"ended": Counter({"b": 1, "c": 1})},
        {
            "ended": Counter({"b": 1, "c": 1}),
            "accepted": Counter({"b": 1, "c": 1}),
        },
    ],
)
def test_a_job_that_never_ended_is_found(change: dict[str, Any]) -> None:
    assert never_ended(replace(GOOD, **change)) == ["a"]


@pytest.mark.parametrize(
    ("change", "job"),
    [
        ({"told": {"a": ["OutOfMemory"]}}, "a"),
        ({"told": {"b": ["done"]}}, "b"),
        ({"seen": {"b": {"done"}}}, "b"),
    ],
)
def test_a_job_whose_stream_list_and_log_differ_is_found(change: dict[str, Any], job: str) -> None:
    assert contradicted(replace(GOOD, **change)) == [job]


# Rows.


def rests(growth: float = 0.0, descriptors: int = 0, sample: CardSample = EMPTY) -> list[Rest]:
    def process(i: int, rss: float) -> ProcessSample:
        return ProcessSample(7, int(rss), 30 + descriptors * i // RESTS, 12)

    return [
        Rest(10.0 * i, 0, process(i, rss), process(i, 20.0 * MIB), sample)
        for i, rss in enumerate(rss_of(growth), start=1)
    ]


def missed(found: list[Rest], jobs: JobEnds = GOOD) -> list[str]:
    report = Report("a machine", "made up")
    add_flatness(report, found, WHOLE_S)
    add_ledger(report, found)
    add_jobs(report, jobs)
    table = report.table()
    assert all(f"MISSED: {row.measure}" in table for row in report.missed)
    return [row.measure.removeprefix("made up: ") for row in report.missed]


def test_a_good_soak_misses_no_row() -> None:
    assert missed(rests()) == []


def test_each_fault_misses_its_own_row() -> None:
    assert all("supervisor" in row and "RSS" in row for row in missed(rests(growth=0.06)))
    assert missed(rests(growth=0.06))
    assert all("descriptors" in row for row in missed(rests(descriptors=9)))
    assert missed(rests(descriptors=9))
    assert [row[:5] for row in missed(rests(sample=card(free=799)))] == ["rests", "most "]
    twice = replace(GOOD, ended=Counter({"a": 2, "b": 1, "c": 1}))
    assert missed(rests(), twice) == ["jobs that ended twice"]
    never = replace(GOOD, ended=Counter({"b": 1, "c": 1}), states={"b": "ended", "c": "ended"})
    assert "jobs that never ended" in missed(rests(), never)
    assert "jobs done" in missed(rests(), never)


def test_a_leak_of_a_worker_that_came_later_is_found() -> None:
    late = [
        replace(
            rest, generation=1, worker=replace(rest.worker, rss_bytes=rest.supervisor.rss_bytes)
        )
        for rest in rests(growth=0.12)[20:]
    ]
    steady = [replace(rest, worker=rests()[0].worker) for rest in rests()[:20]]
    flat = [replace(rest, supervisor=steady[0].supervisor) for rest in [*steady, *late]]
    found = missed(flat)
    assert found and all(row.startswith("worker 2") for row in found)
