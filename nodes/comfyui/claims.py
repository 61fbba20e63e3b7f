"""Holds, pins and latents that a handle has in the service, and how they are released.

All of it happens in the pack's thread, in the order that it was asked for; the collector may end a handle
in any thread and at any time, so an ending only leaves word.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import moored

from . import connection
from .connection import Target
from .handles import KeptLatent, LatentHandle, ModelHandle, ModelRecipe

HOLD_S = 300.0


@dataclass
class _Claim:
    """What is claimed for one recipe on one service."""

    handles: int = 0
    hold: moored.AsyncHold | None = None
    eviction: asyncio.TimerHandle | None = None


_claims: defaultdict[tuple[Target, ModelRecipe], _Claim] = defaultdict(_Claim)


def own_model(handle: ModelHandle, target: Target) -> ModelHandle:
    """Gives up the handle's hold when the handle goes, unless another handle of the same model lives."""
    key = (target, handle.recipe)
    connection.start(_model_came(key))
    _at_end(handle, lambda: connection.start(_model_went(key)))
    return handle


@contextlib.contextmanager
def latents_of(target: Target) -> Iterator[LatentHandle]:
    """A handle to fill. Its latents are released when it goes, and at once if filling it fails."""
    handle = LatentHandle([])
    latents = handle.latents
    ending = _at_end(handle, lambda: _release_kept(target, latents))
    try:
        yield handle
    except BaseException:
        ending()
        raise


def release(target: Target, names: Sequence[str]) -> None:
    """Releases latents that nobody will ask for; does not wait."""

    async def work(client: moored.AsyncClient) -> None:
        for name in names:
            await client.release_latent(name)

    if names:
        connection.start_with_client(work, target)


async def use(client: moored.AsyncClient, target: Target, recipe: ModelRecipe) -> None:
    """Renews the hold or pin of a model before it is used."""
    claim = _claims[target, recipe]
    if claim.eviction is not None:
        claim.eviction.cancel()
        claim.eviction = None
    if recipe.residency == "hold":
        claim.hold = await client.hold(recipe.ref, ttl_s=HOLD_S)
    elif recipe.residency == "pin":
        await client.pin(recipe.ref)


async def used(target: Target, recipe: ModelRecipe) -> None:
    """Says that a use has succeeded: the time of a hold runs from now."""
    if recipe.residency == "hold":
        # The job is done; what is said of the model afterwards must not fail it.
        await connection.attempt(lambda client: use(client, target, recipe), target)


def rest(target: Target, recipe: ModelRecipe) -> None:
    """Says that a use is over, however it ended: the time until the eviction runs from now."""
    if recipe.residency == "evict after":
        claim = _claims[target, recipe]
        if claim.eviction is not None:
            claim.eviction.cancel()
        claim.eviction = asyncio.get_running_loop().call_later(
            recipe.evict_after_s, _evict, target, recipe
        )


async def give_up(target: Target, recipe: ModelRecipe) -> None:
    """Gives up the hold on a model, so that it can be unloaded."""
    claim = _claims[target, recipe]
    hold, claim.hold = claim.hold, None
    if hold is not None:
        await connection.attempt(lambda _: hold.release(), target)


def _at_end(handle: ModelHandle | LatentHandle, action: Callable[[], Any]) -> Callable[[], Any]:
    ending = weakref.finalize(handle, action)
    # At the end of the process nobody waits: holds and latents run out by themselves.
    ending.atexit = False
    return ending


async def _model_came(key: tuple[Target, ModelRecipe]) -> None:
    _claims[key].handles += 1


async def _model_went(key: tuple[Target, ModelRecipe]) -> None:
    claim = _claims[key]
    claim.handles -= 1
    if claim.handles <= 0:
        await give_up(*key)
        if claim.eviction is None and claim.handles <= 0:
            _claims.pop(key, None)


def _release_kept(target: Target, latents: Sequence[KeptLatent]) -> None:
    release(target, [latent.id for latent in latents if latent.id])
    for latent in latents:
        latent.id = ""


def _evict(target: Target, recipe: ModelRecipe) -> None:
    claim = _claims[target, recipe]
    claim.eviction = None
    if claim.handles <= 0:
        del _claims[target, recipe]
    connection.start_with_client(lambda client: client.unload(recipe.ref), target)
