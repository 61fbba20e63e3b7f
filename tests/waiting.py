"""How tests wait: until a service's status is so, until anything is so. Never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

import moored

DEADLINE_S = 60.0
POLL_S = 0.005


def wait_until(holds: Callable[[], bool], what: str, within_s: float = DEADLINE_S) -> None:
    """Waits until it is so, for what nothing tells of."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(POLL_S)


def accounts_sum(memory: moored.MemoryAccounts) -> int:
    """Bytes of all accounts of a card: what it has in all."""
    ours = memory.components + memory.scratch + memory.slack + memory.workspaces + memory.context
    return ours + memory.foreign + memory.unexplained + memory.free


def until(
    client: moored.Client, holds: Callable[[moored.Status], bool], within_s: float = DEADLINE_S
) -> moored.Status:
    """The first status that fulfils the condition. Until then the accounts of each card add up."""
    last = None
    with client.watch_status(interval_s=0.02, timeout=within_s) as watch:
        try:
            for tick in watch:
                last = client.status()
                for card in (*tick.cards, *last.cards):
                    assert accounts_sum(card.memory) == card.memory.total, card
                if holds(last):
                    return last
        except moored.Deadline:
            pass
    raise AssertionError(f"not within {within_s:g} s; the status is {last}")
