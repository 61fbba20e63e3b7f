"""What must be so after a soak: functions over what was measured, which know no service."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from measures import OTHERS, OURS, CardSample

WARM_UP_SHARE = 0.1
"""Of the whole time: what comes before is not judged."""
LEAST_RESTS = 6
"""Fewer than these say nothing about growth."""
WITHIN = 0.05
"""How far memory may go from where it was, as a share of that."""
COUNT_SLACK = 2
"""How many descriptors or threads may come and go: 5% of few of them is less than one."""


@dataclass(frozen=True)
class Flatness:
    """How a series went after its warm-up: medians of its first and last third, and its extremes."""

    first: float
    last: float
    most: float
    count: int

    @property
    def growth(self) -> float:
        """The median of the last third over that of the first, as a share: 0.06 is a growth of 6%."""
        return self.last / self.first - 1 if self.first else 0.0

    @property
    def peak(self) -> float:
        """The largest over the median of the first third, as a share."""
        return self.most / self.first - 1 if self.first else 0.0

    def is_flat(self, within: float = WITHIN, slack: float = 0.0) -> bool:
        """Whether neither the end nor any moment is further above the beginning than a share, or `slack`."""
        allowed = max(within * self.first, slack)
        return self.last - self.first <= allowed and self.most - self.first <= allowed


def flatness(series: Sequence[float]) -> Flatness | None:
    """Of values at equal states, without those of the warm-up; None where there are too few to say.

    Medians of thirds, since a single rest may fall on a moment in which a buffer is still given back; the
    largest besides, so that a tide that has gone out by the end does not pass.
    """
    if len(series) < LEAST_RESTS:
        return None
    third = len(series) // 3
    return Flatness(
        first=statistics.median(series[:third]),
        last=statistics.median(series[-third:]),
        most=max(series),
        count=len(series),
    )


def after_warm_up(points: Iterable[tuple[float, float]], whole_s: float) -> list[float]:
    """The values of a series of (time, value) without its first tenth of the whole time.

    A worker that is started in the middle has its own warm-up.
    """
    known = list(points)
    if not known:
        return []
    judged_from = known[0][0] + WARM_UP_SHARE * whole_s
    return [value for at, value in known if at >= judged_from]


def account_faults(card: CardSample) -> list[str]:
    """What is wrong with the accounts of a card at a rest, to the byte; empty: nothing."""
    accounts, faults = card.accounts, []
    whole = sum(accounts[name] for name in (*OURS, *OTHERS))
    if whole != accounts["total"]:
        faults.append(f"the accounts add up to {whole - accounts['total']:+d} B more than the card")
    if accounts["components"] != card.booked:
        more = accounts["components"] - card.booked
        faults.append(f"components are {more:+d} B more than those that are listed")
    for name in ("components", "scratch", "slack", "unexplained"):
        if accounts[name] != 0:
            faults.append(f"{name} of an empty card: {accounts[name]} B")
    for name, expected in card.expected.items():
        if accounts[name] != expected:
            faults.append(f"{name}: {accounts[name] - expected:+d} B more than the driver says")
    return faults


def drift(card: CardSample) -> int:
    """The most bytes by which an account is not what it must be."""
    accounts = card.accounts
    apart = [sum(accounts[name] for name in (*OURS, *OTHERS)) - accounts["total"]]
    apart += [accounts["components"] - card.booked]
    apart += [accounts[name] for name in ("components", "scratch", "slack", "unexplained")]
    apart += [accounts[name] - expected for name, expected in card.expected.items()]
    return max(map(abs, apart))


@dataclass(frozen=True)
class JobEnds:
    """How the jobs of a soak ended, by what three witnesses saw."""

    accepted: Counter[str]
    """How often a job was taken, by the service's log."""
    ended: Counter[str]
    """How often it ended, by the log."""
    states: dict[str, str]
    """How it ended, by the log: `done` or `ended`."""
    told: dict[str, list[str]]
    """What its streams said at their end: `done`, `left`, or the name of an error."""
    seen: dict[str, set[str]]
    """The states after its end in which the list of jobs has shown it."""


def ended_twice(jobs: JobEnds) -> list[str]:
    """Jobs that ended more than once, or were listed in two ends."""
    twice = {job for job, count in jobs.ended.items() if count > 1}
    twice |= {job for job, count in jobs.accepted.items() if count > 1}
    twice |= {job for job, states in jobs.seen.items() if len(states) > 1}
    return sorted(twice)


def never_ended(jobs: JobEnds) -> list[str]:
    """Jobs that were accepted, by the log or by a stream, and of whose end the log knows nothing."""
    return sorted((set(jobs.accepted) | set(jobs.told)) - set(jobs.ended))


def contradicted(jobs: JobEnds) -> list[str]:
    """Jobs whose streams, log and list do not say the same of their end."""
    wrong = set()
    for job, words in jobs.told.items():
        # Who leaves, or whose own deadline passes, does not hear of the end.
        heard = {"done" if word == "done" else "ended" for word in words if word != "left"}
        state = jobs.states.get(job)
        if state == "done" and "ended" in heard and not set(words) & {"Deadline", "left"}:
            wrong.add(job)
        if state == "ended" and "done" in heard:
            wrong.add(job)
    for job, states in jobs.seen.items():
        listed = {"done" if state == "done" else "ended" for state in states}
        if job in jobs.states and listed != {jobs.states[job]}:
            wrong.add(job)
    return sorted(wrong)
