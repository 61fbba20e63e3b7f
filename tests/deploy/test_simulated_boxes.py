"""The simulation of many boxes: what a box keeps, and which box the proxy takes."""

from __future__ import annotations

from collections import Counter

import pytest
from simulated_boxes import Box, Model, Outcome, Policy, Proxy, popularity, simulate

GIB = 2**30


def outcome_of(policy: Policy, bound: float = 0.0, boxes: int = 10, models: int = 30) -> Outcome:
    """Half busy boxes that have room for three models each."""
    made = [Model(f"model-{number}", GIB, 1.0, 1.0) for number in range(models)]
    there = [Box(f"box-{number}", 3 * GIB) for number in range(boxes)]
    return simulate(
        made,
        popularity(models),
        there,
        Proxy(there, policy, bound),
        a_second=boxes / 2,
        jobs=2000,
        warm_up=200,
        seed=1,
    )


def test_a_box_evicts_what_was_not_used_for_longest() -> None:
    box = Box("a", 2 * GIB)
    one, two, three = (Model(name, GIB, 1.0, 1.0) for name in "123")
    assert [box.take(model) for model in (one, two, one)] == [False, False, True]
    assert not box.take(three)
    assert box.take(one)
    assert not box.take(two)
    assert box.loads == 4


def test_every_job_is_counted_and_waits_for_those_before_it() -> None:
    outcome = outcome_of("affine", 1.25, boxes=1, models=1)
    assert (outcome.jobs, outcome.warm) == (2000, 2000)
    assert min(outcome.times_s) == pytest.approx(1.0)
    assert max(outcome.times_s) > 1.0


def test_equal_models_have_more_warm_jobs_than_boxes_that_take_turns() -> None:
    turns, fewest = outcome_of("roundrobin"), outcome_of("leastconn")
    affine = outcome_of("affine", 1.25)
    assert affine.warm > 2 * max(turns.warm, fewest.warm)
    assert turns.jobs == fewest.jobs == affine.jobs == 2000


def test_a_bound_is_kept() -> None:
    boxes = [Box(f"box-{number}", GIB) for number in range(10)]
    proxy, used = Proxy(boxes, "affine", 1.25), Counter[str]()
    model = Model("the only one", GIB, 1.0, 1.0)
    for _ in range(40):
        box = proxy.choose(model.name)
        box.waiting.append((0.0, model, True))
        used[box.name] += 1
    assert max(used.values()) == 5
    assert sum(used.values()) == 40


def test_another_box_moves_few_models() -> None:
    ten = [Box(f"box-{number}", GIB) for number in range(10)]
    names = [f"model-{number}" for number in range(500)]
    before = [Proxy(ten, "affine", 0).choose(name).name for name in names]
    eleven = [*ten, Box("box-10", GIB)]
    after = [Proxy(eleven, "affine", 0).choose(name).name for name in names]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"box-10"}
