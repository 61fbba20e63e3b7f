"""Holds and reservations: a model kept in memory, or memory kept free, for a limited time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ._channel import Process
from ._records import FreedComponent

AsyncSelf = TypeVar("AsyncSelf", bound="_AsyncClaim")


@dataclass(eq=False)
class _AsyncClaim:
    _release: Callable[[], Awaitable[bool]] = field(repr=False)
    id: str
    """Its handle."""
    released: bool | None = field(default=None, init=False)
    """None: not yet; True: it was released; False: it had expired before."""
    _process: Process = field(default_factory=Process, init=False, repr=False)

    async def release(self) -> bool:
        """Gives it back. False: it had expired already. Again is harmless and says the same."""
        if self.released is None:
            self.released = await self._release()
        return self.released

    async def __aenter__(self: AsyncSelf) -> AsyncSelf:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._process.is_this:  # else a fork of the one that holds it ends
            await self.release()


@dataclass(eq=False)
class AsyncHold(_AsyncClaim):
    """A model that stays in until `release()`, or until `ttl_s` seconds are over.

    It does not renew itself: asking again, by the same `client_id`, does.
    """

    ttl_s: float = 0.0
    """Seconds that it was granted for."""


@dataclass(eq=False)
class AsyncReservedMemory(_AsyncClaim):
    """Memory of a card that stays free for another program, until `release()` or its end."""

    bytes: int = 0
    """Bytes that stay free."""
    card: str = ""
    """The card."""
    evicted: tuple[FreedComponent, ...] = ()
    """What left for it."""
