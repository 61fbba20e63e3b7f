# Generated from _async_streams.py by scripts/sync_client: edit that.
"""Streams of the service as iterators.

Leaving one early ends the call, and with it the job: by `close()`, by `with`, by `break`
(once nothing refers to the stream), by Ctrl-C. A job that was asked to
`detach` goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import grpc

from ._bounds import Bounds
from ._calls import Call, pause
from ._channel import Dropped, Process
from ._errors import (
    Cancelled,
    ConnectionFailed,
    Deadline,
    InternalError,
    MooredError,
    ShuttingDown,
    SlowReader,
    error_of,
)
from ._events import Accepted, Done, Event, event_of
from ._generated import hub_pb2, residency_pb2
from ._media import Film, Frame, Picture, Samples, Track
from ._mirror import mirror
from ._records import LatentInfo, PulledModel, PullProgress, Status
from ._results import Gathered
from ._unfinished import Note

T = TypeVar("T")
R = TypeVar("R")
JOINED_S = 10.0
STREAM_ENDED = (ConnectionFailed, Deadline, ShuttingDown, SlowReader)
"""Errors after which a detached job goes on."""
Self = TypeVar("Self", bound="Stream[Any]")


class Stream(Generic[T]):
    """Items as they arrive, to be read by `for`. One thread reads; any thread may close."""

    _ended = False
    _begun = False

    def __init__(self, call: Call, endpoint: str) -> None:
        self._call = call
        self._endpoint = endpoint
        self._process = Process()

    def _read(self, message: Any) -> T | None:
        """The item of a message; None to pass over it."""
        raise NotImplementedError

    def _error(self, error: grpc.RpcError) -> MooredError:
        return error_of(error, self._endpoint, begun=self._begun)

    def _cancelled(self) -> MooredError:
        return Cancelled("The stream was closed before the job ended")

    def _begin_again(self, error: grpc.RpcError) -> bool:
        """Calls again after a refusal, where that is wanted."""
        return False

    def _end(self) -> None:
        self._ended = True
        if self._process.is_this:  # else it is the parent's, and goes on there
            self._call.drop()

    def __iter__(self: Self) -> Self:
        return self

    def __next__(self) -> T:
        self._process.check("This stream")
        while not self._ended:
            try:
                message = self._call.next()
                self._begun = True
                item = self._read(message)
            except StopIteration:
                self._ended = True
                raise
            except Dropped:
                self._ended = True
                raise self._cancelled() from None
            except grpc.RpcError as error:
                if not self._begun and self._begin_again(error):
                    continue
                self._ended = True
                raise self._error(error) from None
            except BaseException:
                self._end()
                raise
            if item is not None:
                return item
        raise StopIteration

    def close(self) -> None:
        """Ends the call, and the job with it unless it is detached. Again is harmless."""
        if not self._ended:
            self._end()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The interpreter may be half gone already.
        with contextlib.suppress(Exception):
            if not self._ended:
                self._end()


class Retries:
    """Calls again, for so many seconds from now on."""

    def __init__(
        self, call: Callable[[float | None], Call], timeout: float | None, retry_s: float
    ) -> None:
        self._call = call
        self._began = time.monotonic()
        self._timeout = timeout
        self._retry_s = retry_s

    def call_after(self, seconds: float) -> Call | None:
        """The call, after so many seconds; None where that is too late."""
        passed = time.monotonic() - self._began + seconds
        if passed > self._retry_s or (self._timeout is not None and passed >= self._timeout):
            return None
        pause(seconds)
        return self._call(None if self._timeout is None else self._timeout - passed)

    def call_now(self) -> Call:
        """The call, for its first answer."""
        return self._call(JOINED_S)


class EventStream(Stream[Event], Generic[R]):
    """The events of a job. `result()` is what the plain call would have returned."""

    def __init__(
        self,
        call: Call,
        endpoint: str,
        finish: Callable[[Gathered], R],
        bounds: Bounds,
        retries: Retries | None = None,
        is_detached: bool = False,
        note: Note | None = None,
        cancel: Callable[..., bool] | None = None,
    ) -> None:
        super().__init__(call, endpoint)
        self._cancel = cancel
        self._retries = retries
        self._is_detached = is_detached
        self._note = note
        self._has_end = False
        self._gathered = Gathered(bounds)
        self._finish = finish
        self._result: R | None = None

    def _read(self, message: Any) -> Event | None:
        event = event_of(message)
        if event is not None:
            self._gathered.add(event)
            if isinstance(event, Accepted) and self._note:
                self._note.accepted(self.job_id)
            if isinstance(event, Done):
                self._received_end()
        return event

    def _received_end(self) -> None:
        self._has_end = True
        if self._note:
            self._note.ended()

    def _begin_again(self, error: grpc.RpcError) -> bool:
        seconds = error_of(error, self._endpoint).retry_after_s
        if self._retries is None or seconds is None:
            return False
        call = self._retries.call_after(seconds)
        if call is None:
            return False
        self._call = call
        if self._ended:  # it was closed meanwhile
            call.drop()
        return True

    def _error(self, error: grpc.RpcError) -> MooredError:
        failed = super()._error(error)
        # The job goes on where only its stream ended, and runs again after the service did.
        if not isinstance(failed, STREAM_ENDED):
            self._received_end()
        return self._gathered.failed(failed)

    def _cancelled(self) -> MooredError:
        return self._gathered.failed(super()._cancelled())

    @property
    def job_id(self) -> str:
        """The job; empty before its first event."""
        return self._gathered.job_id

    @property
    def goes_on(self) -> bool:
        """Whether the job is detached, and its end was not received: it may be joined again."""
        return self._is_detached and not self._has_end

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

    def result(self) -> R:
        """Reads what is left of the events and returns the job's result; again, the same one."""
        with self:
            for _ in self:
                pass
        if self._result is None:
            if self._call.dropped and self._gathered.done is None:
                raise self._cancelled()
            self._result = self._finish(self._gathered)
        return self._result

    def leave(self) -> str:
        """Waits until the job is accepted, leaves it to go on, and returns its id.

        For a job that was asked for with `detach=True`: `client.fetch(id)` gets its results later.
        """
        if not self._is_detached:
            raise ValueError("The job ends when its stream is left: ask for it with detach=True")
        with self:
            for _ in self:
                break
        if self._note:
            self._note.ended()
        return self.job_id

    def cancel(self, *, release_latents: bool = False) -> None:
        """Ends the stream, and the job also if it is detached.

        `release_latents`: as of `client.cancel`.
        """
        self.close()
        if not self.job_id and self._note and self._retries:
            # The service may have accepted it: by its key it is joined, and says which it is.
            call = self._retries.call_now()
            try:
                self._read(call.next())
            except (grpc.RpcError, Dropped, StopIteration):
                self._note.ended()
            finally:
                call.drop()
        if self.job_id and self._cancel:
            self._cancel(self.job_id, release_latents=release_latents)

    def frames(self) -> Iterator[Frame]:
        """The frames of films, each once, as soon as it is there. Reads the events.

        They are views of the film, which `result()` then has whole: nothing is kept twice.
        """
        for frame in self._gathered.new_frames():
            yield frame
        for _ in self:
            for frame in self._gathered.new_frames():
                yield frame

    def samples(self) -> Iterator[Samples]:
        """The samples of tracks, each once, as soon as they are there. Reads the events.

        They are views of the track, which `result()` then has whole: nothing is kept twice.
        """
        for samples in self._gathered.new_samples():
            yield samples
        for _ in self:
            for samples in self._gathered.new_samples():
                yield samples


class StatusStream(Stream[Status]):
    """The cards, each time they change. Endless: leave it by `break` or `close()`."""

    def _read(self, message: residency_pb2.Status) -> Status:
        return mirror(Status, message)


class PullStream(Stream[PullProgress]):
    """How far a pull is, as it goes on. Leaving it ends the pull, unless others wait for it too."""

    _pulled: PulledModel | None = None

    def _read(self, message: hub_pb2.PullEvent) -> PullProgress | None:
        kind = message.WhichOneof("event")
        if kind == "pulled":
            self._pulled = mirror(PulledModel, message.pulled)
        return mirror(PullProgress, message.progress) if kind == "progress" else None

    def _cancelled(self) -> MooredError:
        return Cancelled("The stream was closed before the model was there")

    def result(self) -> PulledModel:
        """Waits for the end and returns the model that is there now; again, the same one."""
        with self:
            for _ in self:
                pass
        if self._pulled is None:
            if self._call.dropped:
                raise self._cancelled()
            raise InternalError("The service ended a pull without a result: pull again")
        return self._pulled
