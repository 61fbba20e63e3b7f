"""The events of a job: frozen mirrors of events.proto, and the one conversion that makes them.

Every event knows its job, and when it happened (`at_ms`, milliseconds since the job was accepted).
`match` takes them apart:

    for event in client.stream_image("a red cube"):
        match event:
            case moored.Step(n, of):
                print(n, of)
            case moored.Waiting():
                print(moored.describe(event))
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ._extras import pillow
from ._generated import events_pb2
from ._mirror import mirror, mirrors
from ._records import (
    AudioTrackFormat,
    Component,
    FreedComponent,
    Holder,
    ImageFormat,
    KeptComponent,
    LatentInfo,
    MemoryAccounts,
    ResolvedModel,
    StageReport,
    VideoFormat,
)

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseEvent:
    """What all events have: the job, and milliseconds since it was accepted."""

    job_id: str = ""
    at_ms: int = 0


@mirrors(events_pb2.TextLeftOut)
@dataclass(frozen=True, slots=True)
class TextLeftOut:
    """The end of a text that the model does not read: the text is longer than its limit."""

    field: str
    """`prompt`, `lyrics`."""
    tokens: int
    """Tokens that are left out."""
    limit: int
    """Tokens that are read, with those that the model adds."""
    message: str
    """The sentence for people."""


@mirrors(events_pb2.Accepted)
@dataclass(frozen=True, slots=True)
class Accepted(BaseEvent):
    """The job is recorded. First event of every stream.

    `joined`: an idempotency key matched a job that was there already. `left_out`: the ends of texts
    that the model does not read.
    """

    model: ResolvedModel
    joined: bool
    left_out: tuple[TextLeftOut, ...] = ()


@mirrors(events_pb2.Queued)
@dataclass(frozen=True, slots=True)
class Queued(BaseEvent):
    """Behind our own jobs: `position` of them; 0 is next. `estimate_ms` is None while unknown."""

    position: int
    estimate_ms: int | None = None


@mirrors(events_pb2.Waiting)
@dataclass(frozen=True, slots=True)
class Waiting(BaseEvent):
    """Waiting for late or foreign memory, bounded by patience. Twice a second.

    `cause` is `late_eviction`, `foreign` or `reservation`.
    """

    needed_bytes: int
    free_bytes: int
    holders: tuple[Holder, ...]
    patience_left_ms: int
    cause: str
    stage: str


@mirrors(events_pb2.Evicting)
@dataclass(frozen=True, slots=True)
class Evicting(BaseEvent):
    """A component leaves to free memory."""

    component: Component
    card: str


@mirrors(events_pb2.Loading)
@dataclass(frozen=True, slots=True)
class Loading(BaseEvent):
    """A component is being read: bytes on the card so far, and in all."""

    component: Component
    bytes_done: int
    bytes_total: int
    card: str


@mirrors(events_pb2.Retrying)
@dataclass(frozen=True, slots=True)
class Retrying(BaseEvent):
    """Something failed that is tried again.

    `reason`: `WORKER_DIED`, `WORKER_RECYCLED`, `MODEL_CHANGED`, `OUT_OF_MEMORY`, `RESTORING` or
    `PART_FAILED`.
    """

    reason: str
    message: str
    stage: str


@mirrors(events_pb2.StageStarted)
@dataclass(frozen=True, slots=True)
class StageStarted(BaseEvent):
    """A stage begins (`encode_text`, `denoise`, ...): `index` from 1, `item` from 0.

    `memory` is the card's as it begins; None where nothing runs. `part` is the section of a film,
    from 1, of `parts`; both 0 where there are none.
    """

    name: str
    index: int
    of: int
    chunking: str
    cached: bool
    card: str
    item: int
    memory: MemoryAccounts | None = None
    part: int = 0
    parts: int = 0


@mirrors(events_pb2.Step)
@dataclass(frozen=True, slots=True)
class Step(BaseEvent):
    """A denoising step is done: `n` from 1, `item` from 0.

    `part` is the section of a film, from 1, of `parts`; both 0 where there are none.
    """

    n: int
    of: int
    item: int
    part: int = 0
    parts: int = 0


@mirrors(events_pb2.Preview)
@dataclass(frozen=True, slots=True)
class Preview(BaseEvent):
    """What the picture looks like so far: a JPEG of at most 512 pixels on the longer side."""

    jpeg: bytes
    step: int
    item: int

    @property
    def image(self) -> Image.Image:
        """The preview as a PIL image, decoded anew at each access. Needs `moored[images]`."""
        image: Image.Image = pillow().open(io.BytesIO(self.jpeg))
        image.load()
        return image


@mirrors(events_pb2.Artifact)
@dataclass(frozen=True, slots=True)
class Artifact(BaseEvent):
    """A piece of a result. `EventStream` puts them together: `pictures`, `films`, `tracks`.

    The first piece of an artifact that comes carries its metadata, `total_bytes`, and its format:
    one of `image`, `video` and `audio`. The last that comes has `last` set. `offset` is where its
    bytes belong in the artifact: frames of a film come in any order; None: after the piece before
    it. `track` is which of several results of one item it is of, such as a stem of a song; empty
    where there is one alone.
    """

    index: int
    media_type: str
    metadata: Mapping[str, str]
    chunk: bytes
    total_bytes: int
    last: bool
    track: str = ""
    image: ImageFormat | None = None
    video: VideoFormat | None = None
    audio: AudioTrackFormat | None = None
    offset: int | None = None


@mirrors(events_pb2.LatentKept)
@dataclass(frozen=True, slots=True)
class LatentKept(BaseEvent):
    """A latent is in the store of the service, on request or because a decode failed."""

    latent: LatentInfo
    item: int


@mirrors(events_pb2.Done)
@dataclass(frozen=True, slots=True)
class Done(BaseEvent):
    """The job is finished. Picture i used `seed` + i. `approximations`: what memory forced, or
    `step_cache` or `fp8_attention` asked for.

    `freed` and `kept` are what left and what stayed of a model that a load replaced.
    """

    seed: int
    stages: tuple[StageReport, ...]
    resident_already: tuple[str, ...]
    approximations: tuple[str, ...]
    total_ms: int
    model: ResolvedModel
    freed: tuple[FreedComponent, ...] = ()
    kept: tuple[KeptComponent, ...] = ()
    left_out: tuple[TextLeftOut, ...] = ()


Event: TypeAlias = (
    Accepted
    | Queued
    | Waiting
    | Evicting
    | Loading
    | Retrying
    | StageStarted
    | Step
    | Preview
    | Artifact
    | LatentKept
    | Done
)

# By the field of the oneof that carries it. A test holds this against events.proto.
EVENTS: dict[str, type[Event]] = {
    "accepted": Accepted,
    "queued": Queued,
    "waiting": Waiting,
    "evicting": Evicting,
    "loading": Loading,
    "retrying": Retrying,
    "stage": StageStarted,
    "step": Step,
    "preview": Preview,
    "artifact": Artifact,
    "done": Done,
    "latent": LatentKept,
}


def event_of(message: events_pb2.Event) -> Event | None:
    """The typed event of a message; None for one that this version does not know."""
    field = message.WhichOneof("event")
    if field is None or field not in EVENTS:
        return None
    inner = getattr(message, field)
    return mirror(EVENTS[field], inner, job_id=message.job_id, at_ms=message.at_ms)
