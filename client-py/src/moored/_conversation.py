"""The state of a session of sound, from the messages of both sides; threads and tasks share it."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal, TypeAlias

import grpc

from ._errors import Cancelled, Deadline, InternalError, MooredError, ShuttingDown, error_of
from ._events import Done
from ._generated import generation_pb2
from ._records import MediaInfo, ResolvedModel
from ._session_events import (
    AudioSessionClosed,
    AudioSessionOpened,
    ModelReplaced,
    SegmentAccepted,
    SegmentFailed,
    SegmentReady,
    SessionEvent,
    SoundChunk,
    SourceReplaced,
    session_event_of,
)

SegmentState: TypeAlias = Literal["sent", "accepted", "ready", "failed"]

UNREAD_BYTES = 64 * 1024 * 1024
"""Most bytes of unread sound that are kept; beyond, gRPC's flow control stops the service."""

# Most bytes of sound that are kept once the end is asked for; what comes beyond is dropped.
_CLOSING_BYTES = UNREAD_BYTES
# Most events that are kept unread.
_UNREAD_EVENTS = 100_000

_IDLE_S = 60
"""Of the service, where a session says nothing else."""

NOT_OPEN = "The session is not open: with client.audio_session(...) as session"

now = time.monotonic


class SegmentRecord:
    """What is known of a segment."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: SegmentState = "sent"
        self.job_id = ""
        self.seed: int | None = None
        self.samples: int | None = None
        self.done: Done | None = None
        self.error: Exception | None = None


class Conversation:
    """What is known of a session. It waits for nothing, and is used by one thread at a time."""

    def __init__(self, endpoint: str, request: generation_pb2.OpenAudioSession) -> None:
        self.endpoint = endpoint
        self.opened: AudioSessionOpened | None = None
        self.model: ResolvedModel | None = None
        self.report: AudioSessionClosed | None = None
        self.error: Exception | None = None
        """Why it ended, where it did not end well."""
        self.error_told = False
        self.ended = False
        self.closing = False
        self.call: Any = None
        self._paced = request.paced_by_client
        self._idle_s = request.idle_seconds or _IDLE_S
        self._numbers = 0
        self._segments: dict[int, SegmentRecord] = {}
        # Each with its bytes.
        self._unread: deque[tuple[SessionEvent, int]] = deque()
        self._unread_bytes = 0
        self._taken = 0
        self._head = 0
        self._head_is_told = False
        self._said_at = now()
        self.say(generation_pb2.StreamAudioRequest(open=request))

    # What differs between threads and tasks.

    def put(self, message: generation_pb2.StreamAudioRequest | None) -> None:
        """Sends a message; None: there are no more."""
        raise NotImplementedError

    def wake(self) -> None:
        """Wakes the threads or tasks that wait for a change."""
        raise NotImplementedError

    # What the client says.

    def say(self, message: generation_pb2.StreamAudioRequest) -> None:
        """Sends a message, if the session is there to hear it."""
        if self.ended or self.closing:
            raise self.why_ended("The session is closed")
        self._said_at = now()
        self.put(message)

    def say_segment(self, **message: Any) -> SegmentRecord:
        """Sends what makes a segment: the service numbers them as they come."""
        self.say(generation_pb2.StreamAudioRequest(**message))
        self._numbers += 1
        record = self._segments[self._numbers] = SegmentRecord(self._numbers)
        return record

    def say_close(self) -> None:
        """Asks for the end, once."""
        if not (self.ended or self.closing):
            close = generation_pb2.CloseAudioSession()
            self.say(generation_pb2.StreamAudioRequest(close=close))
            self.closing = True
            # Nothing follows. HAProxy drops the end of an answer whose question has not ended.
            self.put(None)
            self.wake()  # what is read no longer waits for its reader

    def say_played(self, sample: int, *, by_hand: bool = False) -> None:
        """Says how far the client has played."""
        if by_hand:
            self._head_is_told = True
        played = generation_pb2.PlayHead(sample=sample)
        self.say(generation_pb2.StreamAudioRequest(played=played))
        self._head = sample

    def beat(self) -> None:
        """Shows the service that the client is there, if nothing else did so for a while."""
        if not (self.ended or self.closing) and now() - self._said_at >= self.beat_s:
            if not self._paced and not self._head_is_told:
                self._head = self._taken
            self.say_played(self._head)

    @property
    def beat_s(self) -> float:
        """Seconds in which the service is to hear something."""
        return self._idle_s / 3

    # What the service says.

    def hear(self, message: generation_pb2.StreamAudioResponse) -> None:
        """Takes a message in."""
        event = session_event_of(message, self.opened, self._job_of)
        if event is None:
            return
        match event:
            case AudioSessionOpened():
                if not 1 <= event.channels <= 8 or event.samples_per_second < 1:
                    raise InternalError(
                        f"The service opened a session of {event.channels} channels of "
                        f"{event.samples_per_second} samples a second"
                    )
                self.opened, self.model = event, event.model
                self._idle_s = event.idle_seconds or self._idle_s
            case SegmentAccepted():
                if record := self._segments.get(event.segment):
                    record.state = "accepted"
                    record.job_id, record.seed = event.job_id, event.seed
            case SegmentReady():
                if record := self._segments.pop(event.segment, None):
                    record.state = "ready"
                    record.samples, record.done = event.samples, event.done
            case SegmentFailed():
                if record := self._segments.pop(event.segment, None):
                    record.state, record.error = "failed", event.error
            case SourceReplaced() | ModelReplaced():
                # The segment of a replacement may be reported as ready before or after this.
                if record := self._segments.get(event.segment):
                    record.state = "ready"
                if isinstance(event, ModelReplaced):
                    self.model = event.model
            case AudioSessionClosed():
                self.report = event
        if not isinstance(event, AudioSessionOpened) and not self._is_left_out(event):
            size = len(event.samples) if isinstance(event, SoundChunk) else message.ByteSize()
            self._unread_bytes += size
            self._unread.append((event, size))
        self.wake()

    def _is_left_out(self, event: SessionEvent) -> bool:
        """Whether nobody will take it: after the end is asked for, only so much is kept."""
        is_last = isinstance(event, AudioSessionClosed)
        return self.closing and self._unread_bytes > _CLOSING_BYTES and not is_last

    @property
    def _has_much_unread(self) -> bool:
        return self._unread_bytes > UNREAD_BYTES or len(self._unread) > _UNREAD_EVENTS

    def _job_of(self, number: int) -> str:
        record = self._segments.get(number)
        return record.job_id if record is not None else ""

    def end(self, error: BaseException | None = None) -> None:
        """The call is over: by an error of gRPC, by another, or well."""
        if self.ended:
            return
        if isinstance(error, grpc.RpcError):
            error = error_of(error, self.endpoint, begun=self.opened is not None)
        if error is None and self.report is None:
            error = InternalError("The service ended the session without a report")
        self.ended = True
        self.error = error if isinstance(error, Exception) or error is None else closed_here()
        for record in self._segments.values():
            if record.state in ("sent", "accepted"):
                record.error = self.why_ended(
                    f"The session ended before segment {record.number} was ready"
                )
                record.state = "failed"
        self._segments.clear()
        self.put(None)
        self.wake()

    def why_ended(self, words: str) -> Exception:
        """The error of a call on a session that has ended."""
        if self.error is not None:
            return self.error
        reason = self.report.reason if self.report is not None else ""
        kind = ShuttingDown if reason == "shutting_down" else Cancelled
        return kind(f"{words} ({reason})" if reason else words)

    # What the reader takes.

    @property
    def is_full(self) -> bool:
        """Whether so much waits for its reader that nothing more is read."""
        return self._has_much_unread and not (self.ended or self.closing)

    def asks(self) -> None:
        """The reader asks for the next sound, so what it took before has been played."""
        is_heard = not (self.ended or self.closing)
        if self._paced and not self._head_is_told and self._taken > self._head and is_heard:
            self.say_played(self._taken)

    def take(self) -> tuple[SessionEvent | None] | None:
        """What is next, or that there is nothing more; None: it is not there yet."""
        if self._unread:
            event, size = self._unread.popleft()
            self._unread_bytes -= size
            if isinstance(event, SoundChunk):
                self._taken = event.first_sample + event.sample_count
            self.wake()
            return (event,)
        if not self.ended:
            return None
        if self.error is not None:
            self.error_told = True
            raise self.error
        return (None,)

    # What is waited for.

    def there_open(self) -> AudioSessionOpened | None:
        """What the service says when it is open; None: not yet."""
        if self.opened is None and self.ended:
            raise self.why_ended("The session ended before it was open")
        return self.opened

    def there_report(self) -> AudioSessionClosed | None:
        """The report of a session that has ended; None: not yet."""
        if self.ended and self.error is not None:
            raise self.error
        return self.report if self.ended else None

    def there_ready(self, record: SegmentRecord) -> SegmentRecord | None:
        """A segment that is ready; None: not yet."""
        if record.error is not None:
            raise record.error
        return record if record.state == "ready" else None


def closed_here() -> MooredError:
    """The error of a caller that waits for an event of a session that was left."""
    return Cancelled("The session was closed")


def late(what: str, timeout: float) -> Deadline:
    """The error for what did not come in time."""
    return Deadline(f"{what} within {timeout:g} s")


def is_in_service(source: object) -> bool:
    """Whether a source is one that put_media has uploaded: its MediaInfo, or its handle."""
    if isinstance(source, MediaInfo):
        return True
    is_handle = isinstance(source, str) and source.startswith("media-")
    return is_handle and not Path(os.fspath(str(source))).exists()
