"""A channel of asyncio whose certificate is looked at first, in a thread: the loop goes on.

It has of `grpc.aio.Channel` what the stubs of the service use. The channel itself is opened where
the first call waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import grpc.aio

from ._channel import Line


class LateChannel:
    """A channel that is opened when a call first waits for it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._channel: grpc.aio.Channel | None = None
        self._opening: asyncio.Task[None] | None = None

    async def opened(self) -> grpc.aio.Channel:
        """The channel. Calls wait for one look; after one that fails, the next looks again."""
        while self._channel is None:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.ensure_future(self._open())
                self._opening.add_done_callback(_seen)
            await asyncio.shield(self._opening)  # a call that is cancelled cancels no other
        return self._channel

    async def _open(self) -> None:
        await asyncio.to_thread(self._line.look)
        self._channel = self._line.open_async()

    async def close(self) -> None:
        """Ends the look, and closes the channel."""
        if self._opening is not None:
            self._opening.cancel()
        if self._channel is not None:
            await self._channel.close()

    def unary_unary(self, path: str, *arguments: Any, **settings: Any) -> Callable[..., Any]:
        """A call of one message and one answer."""

        def call(request: Any, **of_call: Any) -> LateAnswer:
            def begin(channel: grpc.aio.Channel) -> Any:
                return channel.unary_unary(path, *arguments, **settings)(request, **of_call)

            return LateAnswer(self, begin)

        return call

    def unary_stream(self, path: str, *arguments: Any, **settings: Any) -> Callable[..., Any]:
        """A call of one message and a stream of answers."""

        def call(request: Any, **of_call: Any) -> LateStream:
            def begin(channel: grpc.aio.Channel) -> Any:
                return channel.unary_stream(path, *arguments, **settings)(request, **of_call)

            return LateStream(self, begin)

        return call

    def stream_unary(self, path: str, *_arguments: Any, **_settings: Any) -> Callable[..., Any]:
        """Uploads are calls of threads."""
        return _of_threads(path)

    def stream_stream(self, path: str, *_arguments: Any, **_settings: Any) -> Callable[..., Any]:
        """Sessions are calls of threads."""
        return _of_threads(path)


def _seen(opening: asyncio.Task[None]) -> None:
    """Whoever waited has the error; where nobody waits any more, nobody is to be told of it."""
    if not opening.cancelled():
        opening.exception()


def _of_threads(path: str) -> Callable[..., Any]:
    def call(*_arguments: Any, **_settings: Any) -> Any:
        raise NotImplementedError(f"{path} is a call of threads")

    return call


class LateAnswer:
    """A call of one answer, begun where that is waited for."""

    def __init__(self, channel: LateChannel, begin: Callable[[grpc.aio.Channel], Any]) -> None:
        self._channel = channel
        self._begin = begin
        self._call: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        self._call = self._begin(await self._channel.opened())
        return await self._call

    async def initial_metadata(self) -> Any:
        """The headers of the answer, once that is there."""
        return await self._call.initial_metadata()


class LateStream:
    """A call with a stream of answers, begun where the first one is waited for."""

    def __init__(self, channel: LateChannel, begin: Callable[[grpc.aio.Channel], Any]) -> None:
        self._channel = channel
        self._begin = begin
        self._call: Any = None
        self._waiting: asyncio.Future[grpc.aio.Channel] | None = None
        self._cancelled = False

    async def _begun(self) -> Any:
        if self._call is None:
            if self._cancelled:
                raise asyncio.CancelledError
            self._waiting = asyncio.ensure_future(self._channel.opened())
            self._call = self._begin(await self._waiting)
        return self._call

    async def read(self) -> Any:
        """The next answer, or the end of them."""
        return await (await self._begun()).read()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._answers()

    async def _answers(self) -> AsyncIterator[Any]:
        async for answer in await self._begun():
            yield answer

    async def initial_metadata(self) -> Any:
        """The headers of the answers."""
        return await (await self._begun()).initial_metadata()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return bool(self._call.cancelled()) if self._call is not None else self._cancelled

    def cancel(self) -> None:
        """Ends it, begun or not."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()
        elif self._waiting is not None:
            self._waiting.cancel()
