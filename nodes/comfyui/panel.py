"""The routes of the pack: what the sidebar panel shows, and what its buttons do.

    GET  /moored/status   one snapshot of the service
    GET  /moored/events   the same as server-sent events, each time it changes
    GET  /moored/models   the names of the models, the default first
    GET  /moored/loras    the names of the LoRAs
    GET  /moored/defaults by model, the values that a node's 0 or -1 stands for
    GET  /moored/test     one sentence: which service answers and what cards it has, or why none does
    POST /moored/unload   {"model": KEY, "force": BOOL}
    POST /moored/pin      {"model": KEY, "pinned": BOOL}
    POST /moored/cancel   {"job": ID}
    POST /moored/start    {}: starts a service on this machine, where no address is set

A browser speaks to ComfyUI's server alone; address and token of the service stay with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import moored
from aiohttp import web

from . import connection, local_service, snapshot

T = TypeVar("T")

QUICK_S = 5.0
"""Seconds that a question to the service may take."""

UNLOAD_S = 60.0
"""Seconds that an unload may take: jobs stop first, and the driver confirms what came free."""

RETRY_S = 2.0
"""Seconds between two attempts to reach the service."""

HEARTBEAT_S = 5.0
"""Seconds after which a stream without news says that it is still there: so a closed browser is noticed."""

INTERVAL_S = 0.25
"""Seconds between two snapshots of a stream, at least."""

BODY_AT_MOST_BYTES = 65_536

NOT_HERE = (
    "No service is started here: an address is set, or the settings say never, or moored-service is "
    "not installed."
)

NO_STORE = {"Cache-Control": "no-store"}

STATUS_OF: dict[type[Exception], int] = {
    moored.InvalidRequest: 400,
    moored.ModelNotFound: 404,
    moored.JobNotFound: 404,
    moored.InUse: 409,
    moored.Deadline: 504,
    moored.ConnectionFailed: 503,
    moored.NotStarted: 503,
    moored.CardNotReady: 503,
    moored.DiskNotReady: 503,
    moored.ShuttingDown: 503,
}
"""HTTP status of an error; others are 502: the service refused or failed."""


def register_routes(routes: web.RouteTableDef) -> None:
    """Adds the pack's routes to ComfyUI's, or to those of any aiohttp application."""
    routes.get("/moored/status")(_status)
    routes.get("/moored/events")(_events)
    routes.get("/moored/models")(_models)
    routes.get("/moored/loras")(_loras)
    routes.get("/moored/defaults")(_defaults)
    routes.get("/moored/test")(_test)
    routes.post("/moored/unload")(_unload)
    routes.post("/moored/pin")(_pin)
    routes.post("/moored/cancel")(_cancel)
    routes.post("/moored/start")(_start)


# Reading.


async def _status(request: web.Request) -> web.Response:
    _refuse_other_sites(request)
    endpoint = ""
    try:
        target = await _target()
        endpoint = target.endpoint
        status = await _ask(lambda client: client.status(timeout=QUICK_S), target, QUICK_S)
    except (moored.MooredError, ValueError) as error:
        return _answer(await _unreachable(error, endpoint))
    return _answer(snapshot.reachable(status, endpoint))


async def _models(request: web.Request) -> web.Response:
    """The names for Load Model.

    An error is an error here, never an empty list: a frontend would take that for news, and forget what
    was chosen.
    """
    _refuse_other_sites(request)

    async def work(client: moored.AsyncClient) -> list[str]:
        models = await client.list_models(timeout=QUICK_S)
        usable = [one for one in models if not one.problem]
        return [one.id for one in sorted(usable, key=lambda one: not one.is_default)]

    return await _answer_of(work, QUICK_S)


async def _loras(request: web.Request) -> web.Response:
    """The names for Load LoRA. An error is an error, as above."""
    _refuse_other_sites(request)

    async def work(client: moored.AsyncClient) -> list[str]:
        there = await client.list_adapters(timeout=QUICK_S)
        return [one.id for one in there if one.kind != "controlnet"]

    return await _answer_of(work, QUICK_S)


async def _defaults(request: web.Request) -> web.Response:
    """What the nodes write beside their values, by the names of the nodes' inputs."""
    _refuse_other_sites(request)

    async def work(client: moored.AsyncClient) -> dict[str, dict[str, float]]:
        models = await client.list_models(timeout=QUICK_S)
        return {one.id: snapshot.defaults(one.defaults) for one in models}

    return await _answer_of(work, QUICK_S)


async def _test(request: web.Request) -> web.Response:
    """What the button in the settings says."""
    _refuse_other_sites(request)
    endpoint = ""
    try:
        target = await _target()
        endpoint = target.endpoint
        info = await _ask(lambda client: client.server_info(timeout=QUICK_S), target, QUICK_S)
    except (moored.MooredError, ValueError) as error:
        return _answer({"answers": False, "said": _sentence(error, endpoint)})
    cards = ", ".join(card.name or card.id for card in info.cards) or "no card"
    return _answer({"answers": True, "said": f"moored {info.version} at {endpoint}: {cards}"})


async def _events(request: web.Request) -> web.StreamResponse:
    _refuse_other_sites(request)
    # A proxy that collects answers would hold the news back.
    headers = {**NO_STORE, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    try:
        async with contextlib.aclosing(_snapshots()) as snapshots:
            async for one in snapshots:
                text = ": nothing new\n\n" if one is None else f"data: {json.dumps(one)}\n\n"
                await response.write(text.encode())
    except ConnectionError:
        pass  # The browser has gone.
    return response


async def _snapshots() -> AsyncGenerator[dict[str, Any] | None, None]:
    """Snapshots without end, whatever becomes of the service; None as a heartbeat."""
    while True:
        endpoint = ""
        try:
            target = await _target()
            endpoint = target.endpoint
            async with contextlib.aclosing(_statuses(target)) as statuses:
                heard = False
                async for status in statuses:
                    if status is not None:
                        heard = True
                        yield snapshot.reachable(status, endpoint)
                    elif await _target() != target:
                        break
                    else:
                        yield None if heard else snapshot.unreachable(_silence(endpoint), endpoint)
        except (moored.MooredError, ValueError) as error:
            yield await _unreachable(error, endpoint)
            await asyncio.sleep(RETRY_S)


async def _statuses(target: connection.Target) -> AsyncGenerator[moored.Status | None, None]:
    """The newest status each time there is one; None when none came for a while."""
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    # The newest alone: a browser that reads slowly, or not at all, piles nothing up.
    newest: deque[moored.Status] = deque(maxlen=1)

    async def watch(client: moored.AsyncClient) -> None:
        async with client.watch_status(interval_s=INTERVAL_S) as stream:
            async for status in stream:
                newest.append(status)
                loop.call_soon_threadsafe(news.set)
        raise moored.ConnectionFailed(f"The service at {target.endpoint} has ended", cause="lost")

    watching = asyncio.ensure_future(connection.run(watch, target))
    watching.add_done_callback(lambda _: news.set())
    try:
        while True:
            try:
                await asyncio.wait_for(news.wait(), HEARTBEAT_S)
            except asyncio.TimeoutError:
                yield None
            news.clear()
            if newest:
                yield newest.pop()
            if watching.done() and not newest:
                watching.result()
    finally:
        watching.cancel()


# Acting.


async def _unload(request: web.Request) -> web.Response:
    body = await _body(request, {"model": str, "force": bool})

    async def work(client: moored.AsyncClient) -> dict[str, Any]:
        done = await client.unload(body["model"], force=body["force"], timeout=UNLOAD_S)
        kept = [{"name": one.component.name, "reason": one.reason} for one in done.kept]
        cancelled = list(done.cancelled_jobs)
        return {"freed_bytes": done.freed_bytes, "kept": kept, "cancelled_jobs": cancelled}

    return await _answer_of(work, UNLOAD_S)


async def _pin(request: web.Request) -> web.Response:
    body = await _body(request, {"model": str, "pinned": bool})

    async def work(client: moored.AsyncClient) -> dict[str, Any]:
        change = client.pin if body["pinned"] else client.unpin
        return {"pinned": list(await change(body["model"], timeout=QUICK_S))}

    return await _answer_of(work, QUICK_S)


async def _cancel(request: web.Request) -> web.Response:
    body = await _body(request, {"job": str})

    async def work(client: moored.AsyncClient) -> dict[str, Any]:
        return {"cancelled": await client.cancel(body["job"], timeout=QUICK_S)}

    return await _answer_of(work, QUICK_S)


async def _start(request: web.Request) -> web.Response:
    await _body(request, {})
    endpoint = ""
    try:
        target = await _target()
        endpoint = target.endpoint
        if not await asyncio.to_thread(local_service.may_start, target):
            raise moored.NotStarted(NOT_HERE)
        await local_service.started(target)
    except (moored.MooredError, ValueError) as error:
        return _failed(error, endpoint)
    return _answer({"endpoint": endpoint})


async def _body(request: web.Request, fields: dict[str, type]) -> dict[str, Any]:
    """The JSON object that a page of this ComfyUI sent: exactly these fields, and no empty text.

    A form of another site can send no JSON without asking first.
    """
    _refuse_other_sites(request)
    if request.content_type != "application/json":
        raise _refusal(web.HTTPUnsupportedMediaType, "Only application/json is taken here.")
    if request.content_length is None or request.content_length > BODY_AT_MOST_BYTES:
        raise _refusal(
            web.HTTPBadRequest, "The request is too long, or does not say how long it is."
        )
    try:
        body = await request.json()
    except ValueError:
        raise _refusal(web.HTTPBadRequest, "The request is no JSON.") from None
    wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in fields.items())
    if (
        not isinstance(body, dict)
        or body.keys() != fields.keys()
        or any(type(body[name]) is not kind for name, kind in fields.items())
        or any(body[name] == "" for name in fields)
    ):
        raise _refusal(web.HTTPBadRequest, f"An object with these fields is wanted: {wanted}.")
    return body


def _refuse_other_sites(request: web.Request) -> None:
    """Pages of other sites may not ask, whatever the rest of this server allows.

    Browsers say where a request comes from, and a page cannot change what they say. A program that is no
    browser sends neither header.
    """
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        allowed = site in ("same-origin", "none")
    else:
        # Over plain HTTP on a network, browsers leave the other header out.
        origin = request.headers.get("Origin")
        allowed = origin is None or urlsplit(origin).netloc.lower() == request.host.lower()
    if not allowed:
        raise _refusal(
            web.HTTPForbidden,
            "Requests of other sites are refused. Proxies must pass the Host header on.",
        )


# Both.


async def _target() -> connection.Target:
    # It reads files: settings and token.
    return await asyncio.to_thread(connection.target)


async def _answer_of(
    work: Callable[[moored.AsyncClient], Awaitable[object]], timeout_s: float
) -> web.Response:
    """What `work(client)` gives, or the error that it ends with."""
    endpoint = ""
    try:
        target = await _target()
        endpoint = target.endpoint
        return _answer(await _ask(work, target, timeout_s))
    except (moored.MooredError, ValueError) as error:
        return _failed(error, endpoint)


async def _ask(
    work: Callable[[moored.AsyncClient], Awaitable[T]],
    target: connection.Target,
    timeout_s: float,
) -> T:
    try:
        return await asyncio.wait_for(connection.run(work, target), timeout_s)
    except (asyncio.TimeoutError, TimeoutError):
        raise moored.Deadline(_silence(target.endpoint)) from None


async def _unreachable(error: Exception, endpoint: str) -> dict[str, Any]:
    """The snapshot of a service that does not answer, for this reason."""
    is_down = isinstance(error, moored.ConnectionFailed) and error.cause in ("unreachable", "lost")
    can_start = is_down and await asyncio.to_thread(
        local_service.may_start, connection.Target(endpoint)
    )
    return snapshot.unreachable(_sentence(error, endpoint), endpoint, can_start)


def _silence(endpoint: str) -> str:
    return (
        f"The service at {endpoint} does not answer: see whether it runs, "
        "and whether this machine reaches it."
    )


def _sentence(error: Exception, endpoint: str) -> str:
    """What happened and what to do, for somebody who looks at ComfyUI."""
    if isinstance(error, moored.ConnectionFailed) and error.cause in ("unreachable", "lost"):
        return (
            f"No moored service answers at {endpoint}: start it with `moored serve`, "
            "or set its address in Settings > moored."
        )
    if isinstance(error, moored.Unauthenticated) and not isinstance(error, moored.UnencryptedToken):
        said = str(error).rstrip(".")
        return f"{said}. Set the service's token file in Settings > moored."
    return str(error)


def _answer(data: object, status: int = 200) -> web.Response:
    return web.json_response(data, status=status, headers=NO_STORE)


def _failed(error: Exception, endpoint: str) -> web.Response:
    status = 400 if isinstance(error, ValueError) else STATUS_OF.get(type(error), 502)
    return _answer({"error": _sentence(error, endpoint)}, status)


def _refusal(kind: type[web.HTTPError], sentence: str) -> web.HTTPError:
    return kind(
        text=json.dumps({"error": sentence}), content_type="application/json", headers=NO_STORE
    )
