"""The gRPC call of a session of sound, and how threads and asyncio tasks wait for its messages."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from . import _conversation
from ._async_calls import AsyncConnection
from ._calls import AWAKE_S, Connection, begun
from ._channel import Process
from ._conversation import Conversation
from ._generated import generation_pb2
from ._session_events import SessionEvent

T = TypeVar("T")


class Outbox(Iterator[generation_pb2.StreamAudioRequest]):
    """Messages on their way. gRPC takes them, in a thread of its own."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[generation_pb2.StreamAudioRequest | None] = (
            queue.SimpleQueue()
        )
        self.put = self._messages.put

    def __next__(self) -> generation_pb2.StreamAudioRequest:
        message = self._messages.get()
        if message is None:
            raise StopIteration
        return message


class _SessionCall(Conversation):
    """The call of a session, which a thread reads. Every use of it holds `changed`."""

    def __init__(self, endpoint: str, request: generation_pb2.OpenAudioSession) -> None:
        # Reentrant: what waits may speak.
        self.changed = threading.Condition(threading.RLock())
        self.outbox = Outbox()
        self.process = Process()
        self.opening = request
        self.heard: Callable[[Any, Any, Any], None] = lambda call, message, opening: None
        super().__init__(endpoint, request)

    def put(self, message: generation_pb2.StreamAudioRequest | None) -> None:
        self.outbox.put(message)

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def read(self, call: Any) -> None:
        """Begins to take in what the service says, in a thread of its own."""
        self.call = call
        # It knows nothing of the session: one that nobody refers to any more can so be ended.
        threading.Thread(target=_read, args=(self,), daemon=True, name="moored session").start()

    def drop(self) -> None:
        """Ends the call at both ends. One that has ended stays as it is."""
        if not self.process.is_this:
            return  # it is the parent's, and goes on there
        with self.changed:
            self.end(_conversation.closed_here())
        if self.call is not None:
            self.call.cancel()


def _read(conversation: _SessionCall) -> None:
    """Takes in what the service says, in a thread that knows nothing of the session."""
    changed, end = conversation.changed, None
    try:
        for message in conversation.call:
            conversation.heard(conversation.call, message, conversation.opening)
            with changed:
                conversation.hear(message)
                while conversation.is_full:
                    changed.wait()
    except BaseException as error:
        end = error  # raised where it is waited for
    with changed:
        conversation.end(end)


class SessionCall(_SessionCall):
    """The call of a session, for threads that wait."""

    def begin(self, connection: Connection) -> None:
        """Begins it."""
        self.heard = connection.heard_of_session
        self.read(begun(connection.stream_audio, self.outbox, opening=self.opening))

    def until(
        self, there: Callable[[], T | None], timeout: float | None = None, late: str = ""
    ) -> T:
        """Waits in the caller's own thread, and shows the service meanwhile that it is alive."""
        end = None if timeout is None else _conversation.now() + timeout
        with self.changed:
            while (found := there()) is None:
                self.beat()
                left = AWAKE_S if end is None else end - _conversation.now()
                if left <= 0:
                    raise _conversation.late(late, timeout or 0)
                self.changed.wait(min(left, self.beat_s, AWAKE_S))
            return found

    def next(self) -> SessionEvent | None:
        """The next event, waited for; None: there are no more."""
        with self.changed:
            self.asks()
            self.beat()
            return self.until(self.take)[0]


class AsyncSessionCall(_SessionCall):
    """The call of a session, for the tasks of a loop that wait.

    The call is none of grpc.aio, although its client's others are: there, a message that is being
    written as the service ends the call puts "Internal error from Core" in the place of its reason,
    and what was still to be read is lost.
    """

    def __init__(self, endpoint: str, request: generation_pb2.OpenAudioSession) -> None:
        self._loop = asyncio.get_running_loop()
        self._roused = asyncio.Event()
        super().__init__(endpoint, request)

    def wake(self) -> None:
        """Has threads and tasks look again."""
        super().wake()
        # The loop may be closed already: then nobody waits.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._rouse)

    def _rouse(self) -> None:
        self._roused.set()
        self._roused = asyncio.Event()

    def begin(self, connection: AsyncConnection) -> None:
        """Begins it."""
        connection.drop_at_close(self)
        self.heard = connection.heard_of_session
        self.read(connection.stream_audio(self.outbox, self.opening))

    async def until(
        self, there: Callable[[], T | None], timeout: float | None = None, late: str = ""
    ) -> T:
        """Waits in the caller's own task, and shows the service meanwhile that it is alive."""
        end = None if timeout is None else _conversation.now() + timeout
        while True:
            with self.changed:
                if (found := there()) is not None:
                    return found
                self.beat()
            left = self.beat_s if end is None else end - _conversation.now()
            if left <= 0:
                raise _conversation.late(late, timeout or 0)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._roused.wait(), min(left, self.beat_s))

    async def next(self) -> SessionEvent | None:
        """The next event, waited for; None: there are no more."""
        with self.changed:
            self.asks()
            self.beat()
        return (await self.until(self.take))[0]
