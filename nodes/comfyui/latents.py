"""Latents that are kept in a service, and made again where they are gone."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import moored
import numpy as np

from . import claims
from .connection import Target
from .failures import Failure
from .follow import Deliver, Display, attend, follow
from .handles import Bringing, Encoding, Generation, KeptLatent, ModelRecipe

T = TypeVar("T")

VAE = "vae"

# By the latent's address. A lock is of one event loop, so of one prompt: it goes when nobody waits for it.
_making: weakref.WeakValueDictionary[int, asyncio.Lock] = weakref.WeakValueDictionary()


async def with_latent(
    display: Display, target: Target, latent: KeptLatent, use: Callable[[str], Awaitable[T]]
) -> T:
    """Awaits `use(id)` of a latent; if the service has lost it, it is made again and used then."""
    name = latent.id
    if name:
        try:
            return await use(name)
        except moored.LatentNotFound:
            if latent.id == name:
                latent.id = ""  # the service was restarted, or its time was over
    # Nodes of one prompt run at once, and several may miss the same latent: one of them makes it.
    lock = _making.setdefault(id(latent), asyncio.Lock())
    async with lock:
        if not latent.id:
            before, display.prefix = display.prefix, "Making the latent again: "
            try:
                await make(display, target, latent)
            finally:
                display.prefix = before
    return await use(latent.id)


async def make(display: Display, target: Target, latent: KeptLatent) -> None:
    """Makes a latent by its recipe."""
    recipe = latent.recipe
    match recipe:
        case Generation():
            result: moored.JobResult = await generate(
                display, target, latent.model, recipe, latent_only=True
            )
        case Encoding():
            result = await _encode(display, target, latent.model, recipe)
        case Bringing():
            latent.id = await _bring(display, target, latent.model, recipe)
            return
    (kept,) = result.latents
    latent.id, latent.family = kept.id, result.model.family


async def _encode(
    display: Display, target: Target, model: ModelRecipe, recipe: Encoding
) -> moored.LatentResult:
    return await follow(
        display,
        target,
        model,
        lambda client: client.stream_encode(
            recipe.png,
            model=model.ref,
            width=recipe.width,
            height=recipe.height,
            seed=recipe.seed,
            **dict(recipe.job),
        ),
    )


async def generate(
    display: Display, target: Target, model: ModelRecipe, generation: Generation, **more: Any
) -> moored.ImageResult:
    """Generates one picture or several, from what the recipe starts with."""
    options = dict(generation.options) | more
    start = generation.start

    async def job(init_latent: str | None = None) -> moored.ImageResult:
        return await follow(
            display,
            target,
            model,
            lambda client: client.stream_image(
                generation.prompt,
                model=model.ref,
                init_image=start if isinstance(start, bytes) else None,
                init_latent=init_latent,
                keep_latent=True,
                **options,
            ),
        )

    if isinstance(start, KeptLatent):
        return await with_latent(display, target, start, job)
    return await job()


async def family_of(display: Display, target: Target, model: ModelRecipe) -> str:
    """The family of a model."""
    return (await _plan(display, target, model)).model.family


async def read(display: Display, target: Target, latent: KeptLatent) -> np.ndarray[Any, Any]:
    """The numbers of a latent."""

    async def numbers(name: str) -> np.ndarray[Any, Any]:
        async def work(client: moored.AsyncClient, deliver: Deliver) -> np.ndarray[Any, Any]:
            array: np.ndarray[Any, Any] = (await client.get_latent(name)).array
            return array

        return await attend(display, target, work)

    return await with_latent(display, target, latent, numbers)


async def _bring(display: Display, target: Target, model: ModelRecipe, recipe: Bringing) -> str:
    vae_id = _vae_of(await _plan(display, target, model))
    array = np.frombuffer(recipe.data, dtype="<f4").reshape(recipe.shape)

    async def work(client: moored.AsyncClient, deliver: Deliver) -> str:
        return (await client.put_latent(array, vae_id=vae_id, model=model.ref)).id

    return await attend(display, target, work, lambda name: claims.release(target, [name]))


async def _plan(display: Display, target: Target, model: ModelRecipe) -> moored.Plan:
    async def work(client: moored.AsyncClient, deliver: Deliver) -> moored.Plan:
        return await client.plan_model(model.ref)

    return await attend(display, target, work)


def _vae_of(plan: moored.Plan) -> str:
    for stage in plan.stages:
        for component in stage.components:
            if component.name == VAE:
                return component.id
    raise Failure(
        f"The model {plan.model.id} has no VAE: latents of ComfyUI cannot be used with it."
    )
