"""Memory of a card that the service keeps free for ComfyUI's own nodes, and how it is given back.

A reservation ends when somebody gives it back, at the latest with its prompt, and with this process. Where
none of that reaches the service, it runs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import moored

from . import connection
from .connection import Target

log = logging.getLogger(__name__)

TTL_S = 600.0
"""Seconds that a reservation lasts unless it is renewed."""

RENEW_S = 150.0
"""Seconds between two renewals: several may fail."""

RETRY_S = 1.0
"""Seconds between two attempts to make one while the memory is taken."""


@dataclass(eq=False)
class Reservation:
    """A MOORED_RESERVATION."""

    made: moored.AsyncReservedMemory
    target: Target
    _renewing: Future[None] | None = field(default=None, repr=False)

    def keep(self) -> None:
        """Keeps it for the prompt that runs: renews it, and gives it back at the prompt's end at the latest.

        ComfyUI runs each prompt in an event loop of its own, and what still runs in that at its end is
        cancelled: also after a failure and after an interrupt.
        """
        self._renewing = connection.start(self._renew())
        of_prompt = asyncio.get_running_loop().create_task(asyncio.Event().wait())
        # A loop has only weak references to its tasks.
        _with_prompts.add(of_prompt)
        of_prompt.add_done_callback(self._prompt_ended)

    def give_back(self) -> None:
        """Ends it; does not wait."""
        connection.start(self.release())

    async def release(self) -> bool:
        """Ends it, in the pack's thread. False: it had ended before."""
        if self._renewing is not None:
            self._renewing.cancel()
        # Without the service it runs out.
        return bool(await connection.attempt(lambda _: self.made.release(), self.target))

    def _prompt_ended(self, task: asyncio.Task[bool]) -> None:
        _with_prompts.discard(task)
        self.give_back()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await connection.with_client(
                    lambda client: client.renew_reservation(self.made.id, ttl_s=TTL_S), self.target
                )
            except moored.InvalidRequest:
                log.warning("The memory reserved for ComfyUI is no longer reserved")
                return
            except moored.MooredError:
                continue  # the service may be back at the next attempt


_with_prompts: set[asyncio.Task[bool]] = set()


async def make(
    client: moored.AsyncClient,
    target: Target,
    size_bytes: int,
    card: str,
    patience_s: float,
    deliver: Callable[[Any], None],
) -> Reservation:
    """Reserves memory of a card; empty: of the one that ComfyUI uses, where the service sees that.

    Waits for memory that others use, `patience_s` seconds at the most, and delivers what it waits for.
    """
    until = time.monotonic() + patience_s
    card = card or await _own_card(client)
    while True:
        try:
            return Reservation(await _wanted(_asked(client, size_bytes, card)), target)
        except moored.MemoryTaken as taken:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise
            deliver(
                moored.Waiting(
                    needed_bytes=taken.needed_bytes,
                    free_bytes=taken.free_bytes,
                    holders=taken.holders,
                    patience_left_ms=int(left_s * 1000),
                    cause="foreign",
                    stage="reserve",
                )
            )
            await asyncio.sleep(min(RETRY_S, left_s))


async def _wanted(
    call: Coroutine[Any, Any, moored.AsyncReservedMemory],
) -> moored.AsyncReservedMemory:
    """Awaits a reservation. If this is cancelled, what comes of the call is given back.

    A cancelled call would not do: the service may reserve all the same, and nobody would know what.
    """
    made = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        connection.start(_unwanted(made))
        raise


async def _unwanted(made: asyncio.Future[moored.AsyncReservedMemory]) -> None:
    with contextlib.suppress(moored.MooredError):
        await (await made).release()


async def _asked(
    client: moored.AsyncClient, size_bytes: int, card: str
) -> moored.AsyncReservedMemory:
    asked: dict[str, Any] = {"ttl_s": TTL_S, "label": connection.client_id(), "card": card}
    try:
        return await client.reserve(size_bytes, process_id=os.getpid(), **asked)
    except moored.InvalidRequest as refused:
        # From another machine, or from a container: without this process its time alone ends it.
        if [one.field for one in refused.violations] != ["process_id"]:
            raise
        return await client.reserve(size_bytes, **asked)


async def _own_card(client: moored.AsyncClient) -> str:
    """The card on which this process holds memory; empty where it is not exactly one."""
    cards = (await client.status()).cards
    own = [card.id for card in cards if any(holder.pid == os.getpid() for holder in card.holders)]
    return own[0] if len(own) == 1 else ""
