"""Streams of the service as iterators, sync and async.

Leaving one early ends the call, and with it the job: by `close()`, by `with`, by `break` (once
nothing refers to the stream), by Ctrl-C, by cancelling the task. A job that was asked to `detach`
goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from ._bounds import Bounds
from ._channel import Process
from ._errors import Cancelled, InternalError, MooredError, error_of
from ._events import Event, event_of
from ._generated import hub_pb2, residency_pb2
from ._media import Film, Frame, Picture, Samples, Track
from ._mirror import mirror
from ._records import LatentInfo, PulledModel, PullProgress, Status
from ._results import Gathered

T = TypeVar("T")
R = TypeVar("R")
Self = TypeVar("Self", bound="Stream[Any]")
AsyncSelf = TypeVar("AsyncSelf", bound="AsyncStream[Any]")

_CLOSED = "The stream was closed before the job ended"

# Messages that are read ahead of whoever takes them; then gRPC's flow control holds the service.
_AHEAD = 8
# A reader whose messages nobody takes looks this often whether anybody still will.
_LEFT_POLL_S = 0.2
# A signal that comes just as a thread falls asleep on a lock does not wake it: so late it is seen.
_AWAKE_S = 1.0


class _Reading(Generic[T]):
    """What both kinds of stream do with a message, and with an error."""

    _ended = False
    _closed = False
    _begun = False

    def __init__(self, call: Any, endpoint: str) -> None:
        self._call = call
        self._endpoint = endpoint
        self._process = Process()

    def _read(self, message: Any) -> T | None:
        """The item of a message; None to pass over it."""
        raise NotImplementedError

    def _error(self, error: grpc.RpcError) -> MooredError:
        if self._closed:
            return self._cancelled()
        return error_of(error, self._endpoint, begun=self._begun)

    def _cancelled(self) -> MooredError:
        return Cancelled(_CLOSED)

    def _end(self) -> None:
        """Ends the call at both ends. A call that has ended stays as it is."""
        self._ended = self._closed = True
        if self._process.is_this:  # else it is the parent's, and goes on there
            self._call.cancel()


def _awaited(inbox: Any) -> Any:
    """The next of a queue, waited for where Ctrl-C is seen soon."""
    while True:
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=_AWAKE_S)


def begun(method: Callable[..., Any], request: Any, **settings: Any) -> Any:
    """The call of a stream, begun in a thread of its own and waited for where Ctrl-C is safe.

    gRPC that is interrupted in beginning a call leaves one that goes on and that nobody can end,
    or a lock that nobody gives back. (A call that is told of and then dropped ends by itself.)
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


class _Pump:
    """Reads a call in a thread of its own, a few messages ahead.

    Whoever wants a message waits on a plain queue. There Ctrl-C is safe, as it is not inside of
    gRPC: an interrupt that lands in its code can leave a call that never says how it ended.
    """

    def __init__(self, call: Any) -> None:
        self._inbox: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_AHEAD)
        self._left = threading.Event()
        # It knows nothing of the stream: one that nobody refers to any more can so be ended.
        arguments = (call, self._inbox, self._left)
        threading.Thread(target=_pump, args=arguments, daemon=True, name="moored stream").start()

    def take(self) -> Any:
        """The next message, or the error that ended the call; StopIteration at its good end."""
        message, end = _awaited(self._inbox)
        if end is not None:
            self._inbox.put((None, end))
            raise end
        return message

    def leave(self) -> None:
        """Nobody will take any more."""
        self._left.set()


def _pump(
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


class Stream(_Reading[T]):
    """Items as they arrive. One thread reads; any thread may close."""

    _pump: _Pump | None = None

    def __iter__(self: Self) -> Self:
        return self

    def __next__(self) -> T:
        self._process.check("This stream")
        while not self._ended:
            try:
                if self._pump is None:
                    self._pump = _Pump(self._call)
                message = self._pump.take()
                self._begun = True
                item = self._read(message)
            except StopIteration:
                self._ended = True
                raise
            except grpc.RpcError as error:
                self._ended = True
                raise self._error(error) from None
            except BaseException:
                self.close()
                raise
            if item is not None:
                return item
        raise StopIteration

    def close(self) -> None:
        """Ends the call, and the job with it unless it is detached. Again is harmless."""
        if self._pump is not None:
            self._pump.leave()
        if not self._ended:
            self._end()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The interpreter may be half gone already.
        with contextlib.suppress(Exception):
            self.close()


class AsyncStream(_Reading[T]):
    """Items as they arrive, for `async for`."""

    def __aiter__(self: AsyncSelf) -> AsyncSelf:
        return self

    async def __anext__(self) -> T:
        self._process.check("This stream")
        while not self._ended:
            try:
                message = await self._call.read()
                if message is grpc.aio.EOF:
                    self._ended = True
                    # Older gRPC ends a call quietly that its channel has cancelled.
                    if self._call.cancelled():
                        raise self._cancelled()
                    break
                self._begun = True
                item = self._read(message)
            except grpc.RpcError as error:
                self._ended = True
                raise self._error(error) from None
            except asyncio.CancelledError:
                # gRPC says the same for a call that somebody else has ended, and for a task that is
                # cancelled. The first is no reason for the task to stop.
                task_stops = self._task_is_cancelled()
                self._end()
                if not task_stops:
                    raise self._cancelled() from None
                raise
            except BaseException:
                await self.close()
                raise
            if item is not None:
                return item
        raise StopAsyncIteration

    async def close(self) -> None:
        """Ends the call, and the job with it unless it is detached. Again is harmless."""
        if not self._ended:
            self._end()

    aclose = close

    def _drop(self) -> None:
        """Ends the call because its client is closed: whoever reads is told."""
        if not self._ended:
            self._closed = True
            self._call.cancel()

    def _task_is_cancelled(self) -> bool:
        cancelling = getattr(asyncio.current_task(), "cancelling", None)
        # Python 3.10 cannot tell: there, only a stream that was closed is known to be no such case.
        return bool(cancelling()) if cancelling is not None else not self._closed

    async def __aenter__(self: AsyncSelf) -> AsyncSelf:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # The loop may be closed already: then there is no call to end.
        with contextlib.suppress(Exception):
            if not self._ended:
                self._end()


class _Events(_Reading[Event], Generic[R]):
    """What both kinds of event stream know of their job."""

    def __init__(
        self, call: Any, endpoint: str, finish: Callable[[Gathered], R], bounds: Bounds
    ) -> None:
        super().__init__(call, endpoint)
        self._gathered = Gathered(bounds)
        self._finish = finish
        self._result: R | None = None

    def _read(self, message: Any) -> Event | None:
        event = event_of(message)
        if event is not None:
            self._gathered.add(event)
        return event

    def _error(self, error: grpc.RpcError) -> MooredError:
        return self._gathered.failed(super()._error(error))

    def _cancelled(self) -> MooredError:
        return self._gathered.failed(super()._cancelled())

    def _finished(self) -> R:
        if self._result is None:
            if self._closed and self._gathered.done is None:
                raise self._cancelled()
            self._result = self._finish(self._gathered)
        return self._result

    @property
    def job_id(self) -> str:
        """The job; empty before its first event."""
        return self._gathered.job_id

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures that are complete so far, in order."""
        return self._gathered.pictures

    @property
    def films(self) -> tuple[Film, ...]:
        """The films that are complete so far, in order."""
        return self._gathered.films

    @property
    def tracks(self) -> tuple[Track, ...]:
        """The tracks that are complete so far, in order."""
        return self._gathered.tracks

    @property
    def latents(self) -> tuple[LatentInfo, ...]:
        """The latents that the job has left in the service so far."""
        return self._gathered.latents


class EventStream(_Events[R], Stream[Event]):
    """The events of a job. `result()` is what the blocking call would have returned."""

    def result(self) -> R:
        """Reads what is left of the events and returns the job's result; again, the same one."""
        with self:
            for _ in self:
                pass
        return self._finished()

    def frames(self) -> Iterator[Frame]:
        """The frames of films, each once, as soon as it is there. Reads the events.

        They are views of the film, which `result()` then has whole: nothing is kept twice.
        """
        yield from self._gathered.new_frames()
        for _ in self:
            yield from self._gathered.new_frames()

    def samples(self) -> Iterator[Samples]:
        """The samples of tracks, each once, as soon as they are there. Reads the events.

        They are views of the track, which `result()` then has whole: nothing is kept twice.
        """
        yield from self._gathered.new_samples()
        for _ in self:
            yield from self._gathered.new_samples()


class AsyncEventStream(_Events[R], AsyncStream[Event]):
    """The events of a job. `await result()` is what the plain call would have returned."""

    async def result(self) -> R:
        """Reads what is left of the events and returns the job's result; again, the same one."""
        async with self:
            async for _ in self:
                pass
        return self._finished()

    async def frames(self) -> AsyncIterator[Frame]:
        """The frames of films, each once, as soon as it is there. Reads the events.

        They are views of the film, which `result()` then has whole: nothing is kept twice.
        """
        for frame in self._gathered.new_frames():
            yield frame
        async for _ in self:
            for frame in self._gathered.new_frames():
                yield frame

    async def samples(self) -> AsyncIterator[Samples]:
        """The samples of tracks, each once, as soon as they are there. Reads the events.

        They are views of the track, which `result()` then has whole: nothing is kept twice.
        """
        for samples in self._gathered.new_samples():
            yield samples
        async for _ in self:
            for samples in self._gathered.new_samples():
                yield samples


class _Statuses(_Reading[Status]):
    def _read(self, message: residency_pb2.Status) -> Status:
        return mirror(Status, message)


class StatusStream(_Statuses, Stream[Status]):
    """The cards, each time they change. Endless: leave it by `break` or `close()`."""


class AsyncStatusStream(_Statuses, AsyncStream[Status]):
    """The cards, each time they change. Endless: leave it by `break` or `close()`."""


class _Pulls(_Reading[PullProgress]):
    _pulled: PulledModel | None = None

    def _read(self, message: hub_pb2.PullEvent) -> PullProgress | None:
        kind = message.WhichOneof("event")
        if kind == "pulled":
            self._pulled = mirror(PulledModel, message.pulled)
        return mirror(PullProgress, message.progress) if kind == "progress" else None

    def _cancelled(self) -> MooredError:
        return Cancelled("The stream was closed before the model was there")

    def _finished(self) -> PulledModel:
        if self._pulled is None:
            if self._closed:
                raise self._cancelled()
            raise InternalError("The service ended a pull without a result: pull again")
        return self._pulled


class PullStream(_Pulls, Stream[PullProgress]):
    """How far a pull is, as it goes on. Leaving it ends the pull, unless others wait for it too."""

    def result(self) -> PulledModel:
        """Waits for the end and returns the model that is there now; again, the same one."""
        with self:
            for _ in self:
                pass
        return self._finished()


class AsyncPullStream(_Pulls, AsyncStream[PullProgress]):
    """How far a pull is, as it goes on. Leaving it ends the pull, unless others wait for it too."""

    async def result(self) -> PulledModel:
        """Waits for the end and returns the model that is there now; again, the same one."""
        async with self:
            async for _ in self:
                pass
        return self._finished()
