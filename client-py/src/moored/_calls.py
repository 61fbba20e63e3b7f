"""The connection of a `Client`, which threads share, and the calls whose messages they read.

`_async_calls` is the same for the tasks of an event loop: both have one interface.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from ._channel import Dropped, Line, Process
from ._stubs import Stubs

pause = time.sleep

# Messages that are read ahead of their reader; then gRPC's flow control stops the service.
_AHEAD = 8
# A reader whose messages nobody takes looks this often whether anybody still will.
_LEFT_POLL_S = 0.2
# A signal that comes just as a thread falls asleep on a lock does not wake it: so late it is seen.
AWAKE_S = 1.0


class Connection:
    """The channel of a client. After a fork it is the parent's, and another one is opened."""

    def __init__(self, line: Line) -> None:
        self.endpoint = line.endpoint
        self._line = line
        self._closed = False
        self._process = Process()
        self._opening = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stubs: Stubs | None = None

    def _opened(self) -> Stubs:
        """Opens the channel when it is first used: to look at a certificate may take a while."""
        with self._opening:
            if self._stubs is None:
                self._channel = self._line.open()
                self._stubs = Stubs(self._channel)
            return self._stubs

    @property
    def stubs(self) -> Stubs:
        """The calls of the service."""
        if self._closed:
            raise RuntimeError("The client is closed")
        if not self._process.is_this:
            # Another thread of the parent may have held the lock, and is not here to release it.
            self._process, self._opening, self._stubs = Process(), threading.Lock(), None
        return self._stubs or self._opened()

    def stream(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Call:
        """Begins a call whose answer is a stream."""
        metadata = self._line.metadata(request)
        call = begun(method, request, timeout=timeout, metadata=metadata)

        def heard(message: Any) -> None:
            self._line.boxes.learn(metadata, call.initial_metadata(), message, request)

        return Call(call, heard)

    def unary(
        self,
        method: Any,
        request: Any,
        timeout: float | None,
        *,
        box: str = "",
        model: str = "",
    ) -> Any:
        """Makes a call of one answer: a message is sent, or a stream of them."""
        metadata = self._line.metadata(request, box=box, model=model)
        answer, call = method.with_call(request, timeout=timeout, metadata=metadata)
        self._line.boxes.learn(metadata, call.initial_metadata(), answer)
        return answer

    def put_latent(self, chunks: Any, timeout: float | None, **at: str) -> Any:
        """Sends the chunks of a latent and returns the answer. `at` is where: `box`, `model`."""
        return self.unary(self.stubs.generation.PutLatent, chunks, timeout, **at)

    def put_media(self, chunks: Any, timeout: float | None, **at: str) -> Any:
        """Sends the chunks of media and returns the answer. `at` is where: `box`, `model`."""
        return self.unary(self.stubs.generation.PutMedia, chunks, timeout, **at)

    def ready(self) -> None:
        """Threads may wait where they call."""

    def stream_audio(self, messages: Any, opening: Any) -> Any:
        """Begins the call of a session. A thread of gRPC reads `messages`, the first of which opens
        it so."""
        metadata = self._line.metadata(opening)
        return self.stubs.generation.StreamAudio(messages, metadata=metadata)

    def box_of(self, what: str) -> str:
        """The box that has what has this id; empty: not known, or there is one alone."""
        return self._line.boxes.of(what)

    def heard_of_session(self, call: Any, message: Any, opening: Any) -> None:
        """Remembers at which box a session is, and its jobs."""
        metadata = self._line.metadata(opening)
        self._line.boxes.learn(metadata, call.initial_metadata(), message)

    def close(self) -> None:
        """Ends all calls and closes the channel. Again is harmless."""
        if not self._closed:
            self._closed = True
            if self._process.is_this and self._channel is not None:
                self._channel.close()


class Call:
    """A call that is read in a thread of its own, a few messages ahead.

    Whoever wants a message waits on a plain queue. There Ctrl-C is safe, as it is not inside of
    gRPC: an interrupt that lands in its code can leave a call that never says how it ended.
    """

    def __init__(self, call: Any, heard: Callable[[Any], None]) -> None:
        self._call = call
        self._heard = heard
        self._inbox: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_AHEAD)
        self._left = threading.Event()
        self._is_read = False

    @property
    def dropped(self) -> bool:
        """Whether it was ended here."""
        return self._left.is_set()

    def next(self) -> Any:
        """The next message, or the error that ended the call; StopIteration at its good end."""
        if not self._is_read:
            self._is_read = True
            # It knows nothing of the stream: one that nobody refers to any more can so be ended.
            arguments = (self._call, self._inbox, self._left)
            reader = threading.Thread(target=_read, args=arguments, daemon=True)
            reader.name = "moored stream"
            reader.start()
        message, end = _awaited(self._inbox)
        if end is None:
            self._heard(message)
            return message
        self._inbox.put((None, end))
        if self.dropped and isinstance(end, grpc.RpcError):
            raise Dropped from None
        raise end

    def drop(self) -> None:
        """Ends the call at both ends. One that has ended stays as it is."""
        self._left.set()
        self._call.cancel()


def _read(
    call: Any, inbox: queue.Queue[tuple[Any, BaseException | None]], left: threading.Event
) -> None:
    end: BaseException = StopIteration()
    try:
        for message in call:
            if not _put(inbox, (message, None), left):
                return
    except BaseException as error:
        end = error  # raised where the messages are read
    _put(inbox, (None, end), left)


def _put(
    inbox: queue.Queue[tuple[Any, BaseException | None]],
    item: tuple[Any, BaseException | None],
    left: threading.Event,
) -> bool:
    """Whether the item was queued before all readers had left."""
    while True:
        try:
            inbox.put(item, timeout=_LEFT_POLL_S)
            return True
        except queue.Full:
            if left.is_set():
                return False


def _awaited(inbox: Any) -> Any:
    """The next of a queue, waited for where Ctrl-C is seen soon."""
    while True:
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=AWAKE_S)


def begun(method: Callable[..., Any], request: Any, **settings: Any) -> Any:
    """The call of a stream, begun in a thread of its own and waited for where Ctrl-C is safe.

    gRPC that is interrupted in beginning a call leaves one that goes on and that nobody can end,
    or a lock that is never released. (A call that was returned and then dropped ends by itself.)
    """
    calls: list[Any] = []
    left = threading.Event()
    told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def begin() -> None:
        try:
            calls.append(method(request, **settings))
            if left.is_set():
                calls[0].cancel()
        except BaseException as error:
            told.put(error)  # raised where it was asked for
        else:
            told.put(None)

    try:
        run = contextvars.copy_context().run  # tracing and its like go by the caller's context
        threading.Thread(target=run, args=(begin,), daemon=True, name="moored call").start()
        error = _awaited(told)
    except BaseException:
        # Whichever of the two threads comes second sees what the other has left.
        left.set()
        for call in calls:
            call.cancel()
        raise
    if error is not None:
        raise error
    return calls[0]
