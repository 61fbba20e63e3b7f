"""What a session of sound says: its sound and its events, mirrors of generation.proto."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ._errors import MooredError, error_of_segment
from ._events import Done, Event, event_of
from ._generated import generation_pb2
from ._media import SAMPLE_BYTES, samples_of
from ._mirror import mirror, mirrors
from ._records import ResolvedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class SoundChunk:
    """Sound: at most a quarter of a second. Chunks follow each other without a break."""

    samples: bytes = field(repr=False)
    """16-bit little-endian, channels interleaved."""
    first_sample: int
    """The place of its first sample in the session, from 0; samples are of each channel."""
    segment: int
    """The segment that sounds at its end, from 1."""
    first_sample_of_segment: int
    """The place of its first sample in that segment."""
    sample_rate: int
    """Samples a second, of each channel."""
    channels: int

    @property
    def sample_count(self) -> int:
        """Samples of each channel."""
        return len(self.samples) // (SAMPLE_BYTES * self.channels)

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.sample_count / self.sample_rate

    @property
    def array(self) -> NDArray[Any]:
        """A numpy array, int16, [samples, channels], without a copy: it cannot be written.

        Needs `moored[images]`.
        """
        return samples_of(self.samples, self.channels)


@mirrors(generation_pb2.AudioSessionOpened)
@dataclass(frozen=True, slots=True)
class AudioSessionOpened:
    """A session is open. What it was asked for is here as it is in effect."""

    session_id: str
    model: ResolvedModel
    samples_per_second: int
    channels: int
    lead_ms: int
    crossfade_ms: int
    slots: int
    idle_seconds: int


@mirrors(generation_pb2.SegmentAccepted)
@dataclass(frozen=True, slots=True)
class SegmentAccepted:
    """A segment is taken: the job that makes it, and its seed."""

    segment: int
    job_id: str
    seed: int


@dataclass(frozen=True, slots=True)
class SegmentProgress:
    """An event of a segment's job: Queued, Waiting, Step and their like."""

    segment: int
    event: Event


@mirrors(generation_pb2.SegmentReady)
@dataclass(frozen=True, slots=True)
class SegmentReady:
    """All of a segment is there: `samples` of each channel. `done` is of its job."""

    segment: int
    samples: int
    done: Done


@dataclass(frozen=True, slots=True)
class SegmentFailed:
    """A segment does not come, and why; the session goes on."""

    segment: int
    error: MooredError


@mirrors(generation_pb2.SoundGap)
@dataclass(frozen=True, slots=True)
class SoundGap:
    """The play head came to a place whose sound was not there yet."""

    at_sample: int
    milliseconds: int


@mirrors(generation_pb2.SourceReplaced)
@dataclass(frozen=True, slots=True)
class SourceReplaced:
    """Further segments start from the new source, as `segment` did."""

    segment: int


@mirrors(generation_pb2.ModelReplaced)
@dataclass(frozen=True, slots=True)
class ModelReplaced:
    """Further segments are made with the new model, as `segment` was."""

    segment: int
    model: ResolvedModel


@mirrors(generation_pb2.AudioSessionClosed)
@dataclass(frozen=True, slots=True)
class AudioSessionClosed:
    """The end of a session, and its report.

    `reason` is `closed`; `idle`, where the service heard nothing of the client; `shutting_down`.
    `samples` of each channel were sent, of `segments`; `gaps` is how often there was no sound in
    time.
    """

    reason: str
    samples: int
    segments: int
    gaps: int
    gap_ms: int

    @property
    def gap_seconds(self) -> float:
        """How long there was no sound in time, in all."""
        return self.gap_ms / 1000


SessionEvent: TypeAlias = (
    SoundChunk
    | SegmentAccepted
    | SegmentProgress
    | SegmentReady
    | SegmentFailed
    | SoundGap
    | SourceReplaced
    | ModelReplaced
    | AudioSessionClosed
)

# Events that are passed on as they arrive, by the field of the oneof that carries them.
_MIRRORED: dict[str, type[Any]] = {
    "opened": AudioSessionOpened,
    "accepted": SegmentAccepted,
    "gap": SoundGap,
    "source_replaced": SourceReplaced,
    "model_replaced": ModelReplaced,
    "closed": AudioSessionClosed,
}


def session_event_of(
    message: generation_pb2.StreamAudioResponse,
    opened: AudioSessionOpened | None,
    job_of: Callable[[int], str],
) -> SessionEvent | AudioSessionOpened | None:
    """The typed event of a message; None for one that this version does not know.

    `job_of` returns the job of a segment by its number.
    """
    kind = message.WhichOneof("message")
    if kind == "sound" and opened is not None:
        sound = message.sound
        return SoundChunk(
            sound.samples,
            sound.first_sample,
            sound.segment,
            sound.first_sample_of_segment,
            opened.samples_per_second,
            opened.channels,
        )
    if kind == "progress":
        event = event_of(message.progress.event)
        return SegmentProgress(message.progress.segment, event) if event is not None else None
    if kind == "ready":
        ready = message.ready
        done = mirror(Done, ready.done, job_id=job_of(ready.segment))
        return mirror(SegmentReady, ready, done=done)
    if kind == "failed":
        failed = message.failed
        error = error_of_segment(failed, job_of(failed.segment))
        return SegmentFailed(failed.segment, error)
    if kind is None or kind not in _MIRRORED:
        return None
    event_or_opened: SessionEvent | AudioSessionOpened = mirror(
        _MIRRORED[kind], getattr(message, kind)
    )
    return event_or_opened
