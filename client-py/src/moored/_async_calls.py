"""The connection of an `AsyncClient`, and the calls whose messages its tasks read.

`_calls` is the same for threads: both have one interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import grpc
import grpc.aio

from ._calls import Connection
from ._channel import Dropped, Line, Process
from ._late_channel import LateChannel
from ._stubs import AsyncStubs

pause = asyncio.sleep


class _Droppable(Protocol):
    def drop(self) -> None: ...


class AsyncConnection:
    """The channel of a client, for one event loop and one process: those that first use it.

    Uploads and sessions of sound are calls of threads, on a channel of their own: grpc.aio may
    report an internal error where the service ends a stream that is still being sent.
    """

    def __init__(self, line: Line) -> None:
        self.endpoint = line.endpoint
        self._line = line
        self._closed = False
        self._process = Process()
        self._channel: grpc.aio.Channel | LateChannel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stubs: AsyncStubs | None = None
        self._threads: Connection | None = None
        # Closing a channel of grpc.aio does not end all of its calls.
        self._calls: weakref.WeakSet[_Droppable] = weakref.WeakSet()

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("The client is closed")
        if self._stubs is None and self._threads is None:
            self._process = Process()
        self._process.check("This AsyncClient")

    @property
    def stubs(self) -> AsyncStubs:
        """The calls of the service."""
        self._check()
        loop = asyncio.get_running_loop()
        if self._stubs is None:
            self._loop = loop
            line = self._line
            self._channel = LateChannel(line) if line.is_pinned else line.open_async()
            self._stubs = AsyncStubs(cast("grpc.aio.Channel", self._channel))
        elif self._loop is not loop:
            raise RuntimeError("An AsyncClient belongs to the event loop that it was first used in")
        return self._stubs

    def stream(self, method: Callable[..., Any], request: Any, timeout: float | None) -> AsyncCall:
        """Begins a call whose answer is a stream."""
        metadata = self._line.metadata(request)
        begun = method(request, timeout=timeout, metadata=metadata)

        async def heard(message: Any) -> None:
            self._line.boxes.learn(metadata, await begun.initial_metadata(), message, request)

        call = AsyncCall(begun, heard)
        self.drop_at_close(call)
        return call

    async def unary(self, method: Any, request: Any, timeout: float | None) -> Any:
        """Makes a call of one message and one answer."""
        metadata = self._line.metadata(request)
        call = method(request, timeout=timeout, metadata=metadata)
        answer = await call
        self._line.boxes.learn(metadata, await call.initial_metadata(), answer)
        return answer

    async def put_latent(self, chunks: Any, timeout: float | None, **at: str) -> Any:
        """Sends the chunks of a latent and returns the answer. `at` is where: `box`, `model`."""
        await self.ready()
        return await self._sent(self._of_threads().stubs.generation.PutLatent, chunks, timeout, at)

    async def put_media(self, chunks: Any, timeout: float | None, **at: str) -> Any:
        """Sends the chunks of media and returns the answer. `at` is where: `box`, `model`."""
        await self.ready()
        return await self._sent(self._of_threads().stubs.generation.PutMedia, chunks, timeout, at)

    async def _sent(
        self,
        method: grpc.StreamUnaryMultiCallable[Any, Any],
        chunks: Any,
        timeout: float | None,
        at: dict[str, str],
    ) -> Any:
        """Sends a stream of messages and returns the answer. A thread of gRPC reads `chunks`."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        metadata = self._line.metadata(**at)
        call = method.future(chunks, timeout=timeout, metadata=metadata)
        try:
            call.add_done_callback(end)
            await ended.wait()
            answer = call.result()
            self._line.boxes.learn(metadata, call.initial_metadata(), answer)
            return answer
        finally:
            call.cancel()

    async def ready(self) -> None:
        """Looks at the certificate, where one is pinned, before a call of threads."""
        self._check()
        if self._line.is_pinned:
            await asyncio.to_thread(self._line.look)

    def stream_audio(self, messages: Any, opening: Any) -> Any:
        """Begins the call of a session. A thread of gRPC reads `messages`."""
        return self._of_threads().stream_audio(messages, opening)

    def box_of(self, what: str) -> str:
        """The box that has what has this id; empty: not known, or there is one alone."""
        return self._line.boxes.of(what)

    def heard_of_session(self, call: Any, message: Any, opening: Any) -> None:
        """Remembers at which box a session is, and its jobs."""
        metadata = self._line.metadata(opening)
        self._line.boxes.learn(metadata, call.initial_metadata(), message)

    def _of_threads(self) -> Connection:
        self._check()
        if self._threads is None:
            self._threads = Connection(self._line)
        return self._threads

    def drop_at_close(self, call: _Droppable) -> None:
        """Has `close` end a call."""
        self._calls.add(call)

    async def close(self) -> None:
        """Ends all calls and closes the channels. Again is harmless."""
        if not self._closed:
            self._closed = True
            if not self._process.is_this:
                return  # after a fork: all of it is the parent's
            for call in self._calls:
                call.drop()
            if self._threads is not None:
                self._threads.close()
            if self._channel is not None:
                await self._channel.close()


class AsyncCall:
    """A call of grpc.aio whose messages are read one by one."""

    def __init__(self, call: Any, heard: Callable[[Any], Awaitable[None]]) -> None:
        self._call = call
        self._heard = heard
        self.dropped = False
        """Whether it was ended here."""

    async def next(self) -> Any:
        """The next message, or the error that ended the call; StopAsyncIteration at its good end.

        Dropped: it was ended here, by its stream or its client.
        """
        try:
            message = await self._call.read()
            if message is not grpc.aio.EOF:
                await self._heard(message)
        except grpc.RpcError:
            if self.dropped:
                raise Dropped from None
            raise
        except asyncio.CancelledError:
            # gRPC says the same for a call that somebody else has ended, and for a task that is
            # cancelled. The first is no reason for the task to stop.
            if self._task_is_cancelled():
                raise
            self.dropped = True
            raise Dropped from None
        if message is not grpc.aio.EOF:
            return message
        # Older gRPC ends a call quietly that its channel has cancelled.
        if self._call.cancelled():
            self.dropped = True
            raise Dropped
        raise StopAsyncIteration

    def _task_is_cancelled(self) -> bool:
        cancelling = getattr(asyncio.current_task(), "cancelling", None)
        # Python 3.10 does not show this: there, only a dropped call is known to be no such case.
        return bool(cancelling()) if cancelling is not None else not self.dropped

    def drop(self) -> None:
        """Ends the call at both ends. One that has ended stays as it is."""
        self.dropped = True
        self._call.cancel()
