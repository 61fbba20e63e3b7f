"""Many boxes by simulation: which job goes to which box, what that box loads, and when the job is done.

What it knows of a model is what a service reports: its bytes, and the seconds of its load. A box runs one job
at a time, in the order in which they come, and evicts what was not used for longest, as the ledger does where
nothing is shared or pinned. The proxy is HAProxy's arithmetic: a consistent ring, and a bound on what a box
has to do. The same simulation of three boxes stands beside what was measured.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["roundrobin", "leastconn", "affine"]
POINTS = 16
"""Points of a box in the ring for each unit of its weight, as HAProxy has them."""


@dataclass(frozen=True)
class Model:
    """A model as a service reports it."""

    name: str
    bytes: int
    load_s: float
    run_s: float


@dataclass
class Box:
    """A box: what is on its card, and what it has to do."""

    name: str
    room: int
    resident: OrderedDict[str, int] = field(default_factory=OrderedDict)
    waiting: deque[tuple[float, Model, bool]] = field(default_factory=deque)
    running: bool = False
    loads: int = 0

    @property
    def open(self) -> int:
        """Jobs that it has."""
        return len(self.waiting) + self.running

    def take(self, model: Model) -> bool:
        """Makes room for a model and loads it; whether it was there."""
        if model.name in self.resident:
            self.resident.move_to_end(model.name)
            return True
        while self.resident and sum(self.resident.values()) + model.bytes > self.room:
            self.resident.popitem(last=False)
        self.resident[model.name] = model.bytes
        self.loads += 1
        return False


class Proxy:
    """Which box gets a job."""

    def __init__(self, boxes: Sequence[Box], policy: Policy, bound: float) -> None:
        self._boxes = boxes
        self._policy = policy
        self._bound = bound
        self._turn = 0
        points = [
            (_hash(f"{box.name}/{point}"), number)
            for number, box in enumerate(boxes)
            for point in range(POINTS)
        ]
        self._ring = sorted(points)
        self._keys = [key for key, _ in self._ring]

    def choose(self, model: str) -> Box:
        """The box for a job of this model."""
        self._turn += 1
        if self._policy == "roundrobin":
            return self._boxes[self._turn % len(self._boxes)]
        if self._policy == "leastconn":
            turn = self._turn % len(self._boxes)
            order = [*self._boxes[turn:], *self._boxes[:turn]]
            return min(order, key=lambda box: box.open)
        at = bisect.bisect(self._keys, _hash(model)) % len(self._ring)
        allowed = self._allowed()
        for step in range(len(self._ring)):
            box = self._boxes[self._ring[(at + step) % len(self._ring)][1]]
            if not self._bound or box.open < allowed:
                return box
        return min(self._boxes, key=lambda box: box.open)

    def _allowed(self) -> int:
        """Most jobs that a box may have for another one: so many times the average, rounded up."""
        have = sum(box.open for box in self._boxes) + 1
        return max(1, -int(-have * self._bound // len(self._boxes)))


@dataclass
class Outcome:
    """What came of it."""

    jobs: int = 0
    warm: int = 0
    times_s: list[float] = field(default_factory=list)

    @property
    def warm_percent(self) -> float:
        """Jobs whose model was there."""
        return 100 * self.warm / self.jobs


def simulate(
    models: Sequence[Model],
    shares: Sequence[float],
    boxes: Sequence[Box],
    proxy: Proxy,
    *,
    a_second: float,
    jobs: int,
    warm_up: int,
    seed: int,
) -> Outcome:
    """Jobs that come at random, so many a second."""
    drawn = random.Random(seed)
    outcome = Outcome()
    ends: list[tuple[float, int]] = []
    number_of = {box.name: number for number, box in enumerate(boxes)}

    def begin(box: Box, now: float) -> None:
        came, model, counts = box.waiting.popleft()
        warm = box.take(model)
        box.running = True
        end = now + model.run_s + (0 if warm else model.load_s)
        heapq.heappush(ends, (end, number_of[box.name]))
        if counts:
            outcome.jobs += 1
            outcome.warm += warm
            outcome.times_s.append(end - came)

    def end_until(now: float) -> None:
        while ends and ends[0][0] <= now:
            end, number = heapq.heappop(ends)
            boxes[number].running = False
            if boxes[number].waiting:
                begin(boxes[number], end)

    now = 0.0
    for count in range(jobs + warm_up):
        now += drawn.expovariate(a_second)
        end_until(now)
        (model,) = drawn.choices(models, shares)
        box = proxy.choose(model.name)
        box.waiting.append((now, model, count >= warm_up))
        if not box.running:
            begin(box, now)
    end_until(float("inf"))
    return outcome


def popularity(count: int, exponent: float = 1.0) -> list[float]:
    """Shares of models: the second is asked for half as often as the first, the third a third as often."""
    return [1 / rank**exponent for rank in range(1, count + 1)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
