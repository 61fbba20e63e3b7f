# Generated from _async_claims.py by scripts/sync_client: edit that.
"""Holds and reservations: a model kept in memory, or memory kept free, for a limited time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ._channel import Process
from ._records import FreedComponent

Self = TypeVar("Self", bound="_Claim")


@dataclass(eq=False)
class _Claim:
    _release: Callable[[], bool] = field(repr=False)
    id: str
    """Its handle."""
    released: bool | None = field(default=None, init=False)
    """None: not yet; True: it was released; False: it had expired before."""
    _process: Process = field(default_factory=Process, init=False, repr=False)

    def release(self) -> bool:
        """Gives it back. False: it had expired already. Again is harmless and says the same."""
        if self.released is None:
            self.released = self._release()
        return self.released

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.is_this:  # else a fork of the one that holds it ends
            self.release()


@dataclass(eq=False)
class Hold(_Claim):
    """A model that stays in until `release()`, or until `ttl_s` seconds are over.

    It does not renew itself: asking again, by the same `client_id`, does.
    """

    ttl_s: float = 0.0
    """Seconds that it was granted for."""


@dataclass(eq=False)
class ReservedMemory(_Claim):
    """Memory of a card that stays free for another program, until `release()` or its end."""

    bytes: int = 0
    """Bytes that stay free."""
    card: str = ""
    """The card."""
    evicted: tuple[FreedComponent, ...] = ()
    """What left for it."""
