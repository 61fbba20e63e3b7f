"""Data of the service's models, cards and jobs: frozen mirrors of the messages in proto/.

Numbers carry their unit in their name; everything that is not named otherwise is a count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ._generated import (
    errors_pb2,
    events_pb2,
    generation_pb2,
    hub_pb2,
    model_pb2,
    residency_pb2,
    server_pb2,
)
from ._mirror import mirrors

# What the service takes for a width or height of a film, in pixels.
_SIDE_MULTIPLE = 16
_LONGEST_SIDE = 4096


@mirrors(model_pb2.Component)
@dataclass(frozen=True, slots=True)
class Component:
    """A part of a model that is loaded and evicted as one; `bytes` is exact, on the card."""

    id: str
    name: str
    bytes: int


@mirrors(model_pb2.AttachedAdapter)
@dataclass(frozen=True, slots=True)
class AttachedAdapter:
    """What an adapter changes in a model.

    `layers` counts the layers that it changes, by component; `rank` is the largest of its terms.
    `ignored_count` of its tensors were ignored; `ignored` has the first hundred by name.
    """

    id: str
    layers: Mapping[str, int]
    rank: int
    ignored: tuple[str, ...] = ()
    ignored_count: int = 0


@mirrors(model_pb2.AdapterInfo)
@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter that can be named, and the bytes of its file.

    `kind` is `lora`, for `adapters=`, or `controlnet`, for `controls=`.
    """

    id: str
    bytes: int
    kind: str = ""


@mirrors(model_pb2.ResolvedModel)
@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model, with its revision and quantization resolved; `key` is its key in the cache.

    `choice` says what the service chose and why, where the quantization was `auto`. `adapters` says
    what each adapter changes.
    """

    key: str
    id: str
    revision: str
    family: str
    quantization: Mapping[str, str]
    choice: str = ""
    adapters: tuple[AttachedAdapter, ...] = ()


@mirrors(model_pb2.TensorInfo)
@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a latent, under the name that the model's family gives it."""

    name: str
    shape: tuple[int, ...]


@mirrors(model_pb2.LatentInfo)
@dataclass(frozen=True, slots=True)
class LatentInfo:
    """A latent in the store of the service: handle (`id`), shape, dtype, whose VAE it is of.

    `tensors` names its tensors, in the order of their bytes; `shape` is that of the first. Empty:
    it is one tensor without a name.
    """

    id: str
    shape: tuple[int, ...]
    dtype: str
    vae_id: str
    expires_in_ms: int
    bytes: int
    tensors: tuple[TensorInfo, ...] = ()


@mirrors(events_pb2.ImageFormat)
@dataclass(frozen=True, slots=True)
class ImageFormat:
    """What a picture is: pixels across and down."""

    width: int
    height: int


@mirrors(events_pb2.AudioTrackFormat)
@dataclass(frozen=True, slots=True)
class AudioTrackFormat:
    """What a track is: samples a second and in all, both of each channel; channels."""

    samples_per_second: int
    channels: int
    samples: int


@mirrors(events_pb2.VideoFormat)
@dataclass(frozen=True, slots=True)
class VideoFormat:
    """What a film is: pixels across and down, frames in all, frames a second, its sound.

    The sound begins with the first frame, and has its own length; None: the film is silent.
    """

    width: int
    height: int
    frames: int
    frames_per_second: float
    sound: AudioTrackFormat | None = None


@mirrors(generation_pb2.MediaInfo)
@dataclass(frozen=True, slots=True)
class MediaInfo:
    """Media in the store of the service: handle (`id`), media type, bytes, time until it expires.

    A film has `video` and a track `audio`: its format, of a WAV that of the samples in it. `bytes`
    are those of the frames or samples, of a picture those of its file.
    """

    id: str
    media_type: str
    bytes: int
    expires_in_ms: int
    image: ImageFormat | None = None
    video: VideoFormat | None = None
    audio: AudioTrackFormat | None = None


@mirrors(events_pb2.Holder)
@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who holds memory of a card: process name and id where visible (`pid` 0: not)."""

    name: str
    pid: int
    bytes: int


@mirrors(model_pb2.Quantization)
@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's weights are held: a preset, and formats by component over it."""

    preset: str
    components: Mapping[str, str]


@mirrors(errors_pb2.ResultSize)
@dataclass(frozen=True, slots=True)
class ResultSize:
    """How large a result is; 0 where that is as asked, or not of this medium."""

    width: int
    height: int
    frames: int
    seconds: float


@mirrors(errors_pb2.ComponentNames)
@dataclass(frozen=True, slots=True)
class ComponentNames:
    """Names of components."""

    names: tuple[str, ...]


@mirrors(errors_pb2.EntryKeys)
@dataclass(frozen=True, slots=True)
class EntryKeys:
    """Keys of models, as `ResolvedModel.key` has them."""

    keys: tuple[str, ...]


@mirrors(errors_pb2.Fallback)
@dataclass(frozen=True, slots=True)
class Fallback:
    """A request like the refused one that would fit: at once, or after idle components leave.

    `label` says how it differs, for people; one of the others says it for programs: the model's
    weights held so, a result this large, these components, without the pins of these models, or
    this many bytes of a reservation.
    """

    label: str
    peak_bytes: int
    fits_now: bool
    quantization: Quantization | None = None
    size: ResultSize | None = None
    components: ComponentNames | None = None
    unpinned: EntryKeys | None = None
    bytes: int | None = None


@mirrors(errors_pb2.MemoryShortfall)
@dataclass(frozen=True, slots=True)
class MemoryShortfall:
    """By how much memory is short, who holds it, and what would fit instead, closest first."""

    needed_bytes: int
    free_bytes: int
    capacity_bytes: int
    holders: tuple[Holder, ...]
    fallbacks: tuple[Fallback, ...]
    stage: str


@mirrors(events_pb2.MemoryAccounts)
@dataclass(frozen=True, slots=True)
class MemoryAccounts:
    """Every byte of a card in exactly one account; they add up to `total`. All in bytes.

    `usable` is what a plan may use: free and slack, less headroom and reservations.
    """

    total: int
    components: int
    scratch: int
    slack: int
    workspaces: int
    context: int
    foreign: int
    unexplained: int
    free: int
    usable: int


@mirrors(events_pb2.StageReport)
@dataclass(frozen=True, slots=True)
class StageReport:
    """What one stage of a job took: milliseconds and bytes.

    `attention` is what computed attention in it: `cudnn 9.19.0`, `own kernels`, `cpu loops`,
    several with commas between; empty where none was computed, or the service is older than the
    field. `before` and `after` are the card's memory around it, and `largest_block_bytes` is the
    largest block that the driver could have allocated, as far as it needed one (0: not asked).
    `passes_left_out` of `passes` passes over the model's blocks were left out, as `step_cache`
    asked; both are 0 where it did not.
    """

    name: str
    run_ms: int
    move_ms: int
    wait_ms: int
    peak_scratch_bytes: int
    peak_bytes: int
    predicted_scratch_bytes: int
    chunking: str
    cached: bool
    item: int
    card: str
    attention: str
    before: MemoryAccounts | None = None
    after: MemoryAccounts | None = None
    largest_block_bytes: int = 0
    passes_left_out: int = 0
    passes: int = 0


@mirrors(residency_pb2.ModelDefaults)
@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What a request takes where it leaves a field open.

    Width, height: of pictures and films. Frames, frames_per_second: of films. Seconds: of tracks. 0
    where the model generates something else.
    """

    steps: int
    guidance: float
    max_sequence_length: int
    width: int
    height: int
    frames: int = 0
    frames_per_second: float = 0.0
    seconds: float = 0.0

    def film_size(
        self, picture: tuple[int, int], width: int = 0, height: int = 0
    ) -> tuple[int, int]:
        """Width and height of a film that starts from a picture of this width and height.

        Sides that are named stay. Others (0) follow the picture's shape; where both are open, with
        about as many pixels as the model's own size: a photograph has more than any film.
        """
        across, down = picture
        if width or height:
            scale = width / across if width else height / down
        else:
            pixels = self.width * self.height or across * down
            scale = math.sqrt(pixels / (across * down))
        return width or _film_side(across * scale), height or _film_side(down * scale)


def _film_side(pixels: float) -> int:
    """A side of a film as the service takes it."""
    return min(max(_SIDE_MULTIPLE, round(pixels / _SIDE_MULTIPLE) * _SIDE_MULTIPLE), _LONGEST_SIDE)


@mirrors(residency_pb2.QuantizationChoice)
@dataclass(frozen=True, slots=True)
class QuantizationChoice:
    """What a preset (`full`, `8-bit`, `4-bit`) makes of a model: exact bytes on the card."""

    preset: str
    bytes: int


@mirrors(residency_pb2.ModelInfo)
@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be named. `problem` says why it cannot be used; empty: it can.

    `quantization` is the format of each component as it is stored, and `choices` are the presets
    that the model can be loaded with. `media` is what it generates: `image`, `video` or `audio`.
    """

    id: str
    revision: str
    family: str
    components: tuple[Component, ...]
    defaults: ModelDefaults
    problem: str
    is_default: bool
    resident: tuple[str, ...]
    pinned: bool
    quantization: Mapping[str, str]
    choices: tuple[QuantizationChoice, ...]
    media: str = ""

    def __repr__(self) -> str:
        told = [repr(self.id), self.media, "resident" if self.resident else "", self.problem]
        return f"ModelInfo({', '.join(each for each in told if each)})"


@mirrors(model_pb2.FreedComponent)
@dataclass(frozen=True, slots=True)
class FreedComponent:
    """A component that left: bytes as booked, and bytes as the driver's figures confirm."""

    component: Component
    card: str
    booked_bytes: int
    freed_bytes: int


@mirrors(model_pb2.KeptComponent)
@dataclass(frozen=True, slots=True)
class KeptComponent:
    """A component that stayed, and why: `shared with owner/other`, `pinned`, `held by CLIENT`.

    `cause` is the same for programs: `shared`, `pinned`, `held`, `in_use`; `by` is that entry or
    client.
    """

    component: Component
    card: str
    reason: str
    cause: str = ""
    by: str = ""


@mirrors(residency_pb2.UnloadResponse)
@dataclass(frozen=True, slots=True)
class Unloaded:
    """What an unload did."""

    freed: tuple[FreedComponent, ...]
    kept: tuple[KeptComponent, ...]
    cancelled_jobs: tuple[str, ...]

    @property
    def freed_bytes(self) -> int:
        """Bytes that came free in all, as the driver's figures confirm."""
        return sum(one.freed_bytes for one in self.freed)


@mirrors(residency_pb2.StreamedComponent)
@dataclass(frozen=True, slots=True)
class StreamedComponent:
    """A component of which a part is on the card: the rest crosses the link while a stage runs.

    `streamed_bytes` cross it in each pass (a step, or a prompt), `streamed_once_bytes` once in a
    stage. A step takes `more_seconds` longer than with all of it on the card, by prediction; None
    where that is unknown. `words` say all of it.
    """

    name: str
    whole_bytes: int
    resident_bytes: int
    streamed_bytes: int
    streamed_once_bytes: int
    link_bytes_per_second: int = 0
    more_seconds: float | None = None
    words: str = ""


@mirrors(residency_pb2.PlannedStage)
@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One stage of a plan. `verdict`: `run`, `wait` or `never`; `shortfall`: why not `run`."""

    name: str
    components: tuple[Component, ...]
    resident_already: tuple[str, ...]
    component_bytes: int
    scratch_bytes: int
    scratch_learned: bool
    moves: tuple[str, ...]
    verdict: str
    chunking: str
    approximate: bool
    shortfall: MemoryShortfall | None = None
    streamed: tuple[StreamedComponent, ...] = ()


@mirrors(residency_pb2.PlanResponse)
@dataclass(frozen=True, slots=True)
class Plan:
    """What a request would need and do. Moves are predicted in seconds, before the first step.

    `upgrades` are formats of the model that lose less and would fit as well.
    """

    model: ResolvedModel
    card: str
    stages: tuple[PlannedStage, ...]
    runs_now: bool
    predicted_move_seconds: float
    upgrades: tuple[Fallback, ...] = ()


@mirrors(residency_pb2.ResidentComponent)
@dataclass(frozen=True, slots=True)
class ResidentComponent:
    """A component on a card; `entries` are the keys of the models that use it.

    `streamed` is set where not all of it is on the card.
    """

    component: Component
    state: str
    leases: int
    pinned: bool
    held: bool
    idle_ms: int
    entries: tuple[str, ...]
    streamed: StreamedComponent | None = None

    @property
    def resident_bytes(self) -> int:
        """Bytes of it on the card."""
        return self.streamed.resident_bytes if self.streamed else self.component.bytes


@mirrors(residency_pb2.HostComponent)
@dataclass(frozen=True, slots=True)
class HostComponent:
    """The machine's memory that a component holds, on a card or after it has left it.

    `bytes` of its blocks are streamed from there, or come back from there. `entries` are the keys
    of the models that use it.
    """

    component: Component
    bytes: int
    entries: tuple[str, ...]


@mirrors(residency_pb2.Reservation)
@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory that is kept free for another program.

    `process_id` is the process that it ends with; 0: none.
    """

    id: str
    label: str
    bytes: int
    expires_in_ms: int
    process_id: int = 0


@mirrors(residency_pb2.CardStatus)
@dataclass(frozen=True, slots=True)
class CardStatus:
    """One card. `state` is `starting`, `ready`, `busy` or `restarting`.

    `attention` is what computes attention on it: `cudnn 9.19.0`, `own kernels: ` with the reason
    why cuDNN does not, `cpu loops`. For a shape that cuDNN has no plan for, own kernels compute all
    the same: `StageReport.attention` says what a stage went by. Empty while no worker is ready;
    then `problem` says why. `on_host` is the machine's memory that components hold, at most
    `host_limit_bytes`; 0: what is available, less a share for others.
    """

    id: str
    name: str
    kind: str
    state: str
    memory: MemoryAccounts
    residents: tuple[ResidentComponent, ...]
    holders: tuple[Holder, ...]
    reservations: tuple[Reservation, ...]
    worker_restarts: int
    worker_pid: int
    job_id: str
    policy: str
    attention: str
    problem: str = ""
    on_host: tuple[HostComponent, ...] = ()
    host_limit_bytes: int = 0


@mirrors(residency_pb2.JobInfo)
@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job. `state` is `held`, `queued`, `waiting`, `running`, `done`, `failed` or `cancelled`.

    A held job is from before a restart of the service, and not in the queue yet. What a job has
    made that was submitted with `detach` can be fetched for `results_for_ms` after its end.
    """

    id: str
    client_id: str
    priority: str
    state: str
    kind: str
    model_key: str
    card: str
    stage: str
    step: int
    steps: int
    queue_position: int
    age_ms: int
    error: str
    results_for_ms: int | None = None


@mirrors(residency_pb2.HostMemory)
@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the service's machine: what there is, what is left, what our processes have."""

    total_bytes: int
    available_bytes: int
    service_bytes: int
    workers_bytes: int


@mirrors(residency_pb2.Status)
@dataclass(frozen=True, slots=True)
class Status:
    """Everything that the service knows of its cards."""

    cards: tuple[CardStatus, ...]
    jobs: tuple[JobInfo, ...]
    latents: int
    latent_bytes: int
    text_encodings: int
    text_encoding_bytes: int
    uptime_ms: int
    host: HostMemory | None = None

    def __repr__(self) -> str:
        cards = ", ".join(f"{card.id} {card.state}" for card in self.cards)
        return f"Status({cards}; {len(self.jobs)} jobs, {self.latents} latents)"


@mirrors(server_pb2.CardInfo)
@dataclass(frozen=True, slots=True)
class CardInfo:
    """A card as it was found at the start."""

    id: str
    name: str
    kind: str
    total_bytes: int
    compute_capability: str
    compute_dtype: str


@mirrors(server_pb2.ServerInfo)
@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Version, capabilities and cards of a service."""

    version: str
    capabilities: tuple[str, ...]
    not_built: tuple[str, ...]
    cards: tuple[CardInfo, ...]
    default_model: str
    families: tuple[str, ...]
    max_message_bytes: int
    account: str
    role: str


@mirrors(hub_pb2.PullPlan)
@dataclass(frozen=True, slots=True)
class PullPlan:
    """What a pull would fetch: `bytes_missing` of `bytes_total`. `revision` is the commit."""

    id: str
    revision: str
    bytes_total: int
    bytes_missing: int
    files_total: int


@mirrors(hub_pb2.PullProgress)
@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a pull is, what was here before included; all 0 before the hub has answered.

    `file` is one that is being fetched; empty while none is.
    """

    bytes_done: int
    bytes_total: int
    files_done: int
    files_total: int
    file: str


@mirrors(hub_pb2.PulledModel)
@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that is there, whole. `revision` is the commit."""

    id: str
    revision: str
    bytes_total: int
    bytes_fetched: int
