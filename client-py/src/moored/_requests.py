"""Turns the arguments of calls into messages of the service, for both clients.

Seconds here are milliseconds or a Duration there; None leaves a field to the service.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from ._errors import InvalidRequest, Violation, refused
from ._generated import generation_pb2, hub_pb2, model_pb2, residency_pb2, rpc_pb2
from ._generated.request_fields import (
    AudioFields,
    ImageFields,
    ResultFields,
    SamplingFields,
    VideoFields,
)
from ._options import is_left_out_by_0, message_of, put
from ._pictures import WANTED, ImageInput, picture_bytes
from ._records import LatentInfo, MediaInfo

M = TypeVar("M", bound=Message)

Priority: TypeAlias = Literal["low", "normal", "high"]
"""Share of the GPU time: `low` is a quarter of a normal share, `high` is four."""

OutputFormat: TypeAlias = Literal["png", "raw"]
"""How pictures travel: as PNG, or as raw RGB, which costs more bytes and no encoding."""

Sampler: TypeAlias = Literal["euler", "euler_ancestral", "dpmpp_2m_karras"]
"""How noise is removed: in steps of the first order, in such steps with new noise in each, or by
DPM-Solver++ of the second order over the noise levels of Karras et al."""

AudioOutput: TypeAlias = Literal["wav", "flac", "raw", "wav+flac"]
"""How tracks travel: as WAV, or as samples alone, 16-bit little-endian, as they are decoded; as one
FLAC file at the end; or as WAV and FLAC both."""

AudioTask: TypeAlias = Literal["repaint", "cover", "extract", "lego", "complete"]
"""The task on the track of `init_media`, or on the source of a session.

`repaint` makes a window of it anew, `cover` gives its melody and rhythm another style, `extract`
gives one of its tracks alone, `lego` makes one track more that fits it, `complete` adds tracks. A
model may know some of them only.
"""

SegmentStart: TypeAlias = Literal["over", "now", "now_from_start"]
"""When a segment of a session sounds: when those before it are `over`; or as soon as it is there,
`now` at the place where the one that sounds is, `now_from_start` from its beginning."""

FilmOutput: TypeAlias = Literal["raw", "mp4", "raw+mp4"]
"""How films travel: as raw frames, each as it is decoded; as one MP4 file at the end; or both."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA, and how strongly it changes the model.

    moored.Adapter("styles/ink", 0.8)
    moored.Adapter("styles/ink", curve=[(0, 1), (0.5, 0)])
    """

    id: str
    """Its name, as `list_adapters()` tells it."""
    strength: float | None = None
    """-100 to 100. None: 1, as trained. 0: left out, and the result is that of the model alone."""
    curve: Sequence[tuple[float, float]] = field(default=(), hash=False)
    """Strength over the steps, instead of `strength`: a line through these points.

    Each is a position, from 0 (the first step) to 1 (the last), and the strength there.
    """
    text_strength: float | None = None
    """Strength in text encoders, which run once. None: that of the first step."""
    ignore_unknown: bool = False
    """Ignore tensors that are of no layer of the model, instead of refusing the adapter."""


PictureLike: TypeAlias = ImageInput | MediaInfo
"""A picture as an ImageInput, or one that `put_media` has uploaded."""


@dataclass(frozen=True)
class Control:
    """A ControlNet, and the picture that it reads.

    moored.Control("union-pro", "edges.png", scale=0.7, end=0.65, mode=0)
    """

    id: str
    """Its name, as `list_adapters()` tells it."""
    image: PictureLike = field(hash=False, repr=False)
    """What it reads, made beforehand: edges, depth, a pose. Scaled to the size."""
    scale: float | None = None
    """Factor of what it adds, -100 to 100. None: 1."""
    start: float | None = None
    """From this part of the steps on, 0 to 1. None: 0."""
    end: float | None = None
    """Up to this part of the steps, `start` to 1. None: 1."""
    mode: int | None = None
    """Which mode of a union, from 0, as its description says. Others have none."""


AdapterLike: TypeAlias = str | tuple[str, float] | Adapter | Mapping[str, Any]
"""An adapter's name, a pair of it and its strength, or an Adapter that says more.

Or one of `adapters` in a recipe, as `read_recipe` gives it.
"""


@dataclass(frozen=True)
class ModelRef:
    """Which model, and how its weights are held.

    moored.ModelRef("owner/name", quantization="4-bit", formats={"text_encoder_2": "int8"})
    """

    id: str
    """`owner/name`, or the name of a model folder.

    Or an entry as reports call it, quantization included: `owner/name+4-bit`,
    `owner/name+text_encoder_2=nf4,transformer=int8`; `owner/name+auto`.
    """
    quantization: str = ""
    """Preset for what `formats` leaves open: `full` (default), `8-bit` or `4-bit`; or `auto`.

    `full` is as it is stored, `8-bit` is int8-convrot, `4-bit` is nf4: of the model's large
    components, the transformer and its large text encoder.

    With `auto`, and without `formats`, the service takes the first of these that fits a card beside
    what is pinned, reserved or held by other programs, and stays with it while the model is in use.
    `ResolvedModel.choice` says which and why.
    """
    formats: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Component name -> `full`, `int8-convrot`, `int8`, `fp8`, `nf4` or `nf4-double`."""
    revision: str = ""
    """Revision of a model in the hub cache; empty: the one that is there."""
    adapters: tuple[AdapterLike, ...] = ()
    """Adapters (LoRA), in order; at most 16."""


ModelLike: TypeAlias = str | ModelRef
"""A model's id, or a ModelRef that says more."""


class QueueOptions(TypedDict, total=False):
    """How jobs are queued and admitted. None is the same as left out."""

    client_id: Annotated[
        str | None, "Your name in the list of jobs, and for fair shares. Default: the client's own."
    ]
    priority: Annotated[
        Priority | None, "Your share of the GPU: `low`, `normal` or `high`. Default: `normal`."
    ]
    patience_s: Annotated[
        float | None,
        "Seconds to wait for memory that others use. Default: the service's setting.",
    ]
    allow_low_memory: Annotated[
        bool | None,
        "Try even if memory is short. If it runs out, only this job fails.",
    ]
    card: Annotated[
        str | None, "Prefer this GPU, by its name in status(): `cuda:0`. Another may be used."
    ]
    headroom_bytes: Annotated[
        int | None,
        "Bytes of the GPU to keep free meanwhile, for other programs. Default: the service's.",
    ]


class JobOptions(QueueOptions, total=False):
    """How a job is queued and admitted. None is the same as left out."""

    idempotency_key: Annotated[
        str | None,
        "A second request with the same key joins the job of the first.",
    ]
    detach: Annotated[
        bool | None,
        "Go on when you leave the stream, and after a restart of the service: see `fetch`.",
    ]


class GenerateOptions(SamplingFields, ResultFields, JobOptions, total=False):
    """What pictures, films and tracks are made with. None is the same as left out.

    What is left out is the model's default.
    """

    model: Annotated[
        ModelLike | None,
        "`owner/name`, a short name such as `flux-schnell`, or a ModelRef. Default: the service's "
        "default model of pictures, films or music.",
    ]
    adapters: Annotated[
        Sequence[AdapterLike] | None,
        "LoRA: names, (name, strength) pairs, or Adapter. Added after those of a ModelRef.",
    ]
    init_latent: Annotated[str | LatentInfo | None, "Start from this latent of the service."]
    init_media: Annotated[
        str | MediaInfo | None,
        "Start from this picture, film or track, uploaded by `put_media`.",
    ]


class ImageOptions(ImageFields, GenerateOptions, total=False):
    """What a picture is made with. None is the same as left out: the model's default."""

    init_image: Annotated[
        ImageInput | None,
        "A picture to start from: bytes, a path, a PIL image, an array or a result. "
        "Scaled to the size.",
    ]
    mask: Annotated[
        PictureLike | None,
        "Mask: white parts of the start picture change, black parts stay exactly. "
        "Scaled to the size.",
    ]
    references: Annotated[
        Sequence[PictureLike] | None,
        "Editing: pictures that the prompt is about. "
        "FLUX.1 Kontext takes one, Qwen-Image-Edit up to 3, FLUX.2 klein up to 8.",
    ]
    controls: Annotated[Sequence[Control] | None, "ControlNets, at most 4: a list of Control."]
    sampler: Annotated[
        Sampler | None,
        "How noise is removed, of models with several ways (SDXL): `euler`, `euler_ancestral` or "
        "`dpmpp_2m_karras`. Default: as the checkpoint says.",
    ]
    output: Annotated[
        OutputFormat | None, "How pictures are sent: `png`, or `raw` pixels. Default: `png`."
    ]
    preview_interval_s: Annotated[
        float | None, "Seconds between previews, at least 0.1. Default: none."
    ]


class VideoOptions(VideoFields, GenerateOptions, total=False):
    """What a film is made with. None is the same as left out: the model's default."""

    init_image: Annotated[
        ImageInput | None, "Image to video: the first frame; scaled to width x height."
    ]
    end_image: Annotated[
        PictureLike | None,
        "The picture that the film ends with, where the model takes one (FramePack). "
        "Scaled to width x height.",
    ]
    output: Annotated[
        FilmOutput | None,
        "How films are sent: `raw` frames as they are decoded, one `mp4`, or both, `raw+mp4`. "
        "Default: both.",
    ]
    preview_interval_s: Annotated[
        float | None, "Seconds between previews, at least 0.1. Default: none."
    ]


class TrackOptions(AudioFields, total=False):
    """What sounds. None is the same as left out: the model's default."""

    task: Annotated[
        AudioTask | None,
        "What to make of the track to start from: `repaint`, `cover`, `extract`, `lego`, "
        "`complete`.",
    ]
    tracks: Annotated[
        Sequence[str] | None,
        "For extract, lego and complete: names of tracks, such as `vocals`.",
    ]
    window: Annotated[
        tuple[float | None, float | None] | None,
        "For repaint and lego: start and end, in seconds, of the part to generate again. "
        "Default: all of it.",
    ]
    strengths: Annotated[
        Sequence[tuple[float, float]] | None,
        "Strengths over time instead of one: (second, strength) points, interpolated linearly.",
    ]
    reference: Annotated[
        str | MediaInfo | None, "A track to take the timbre from, uploaded by `put_media`."
    ]
    bpm: Annotated[int | None, "Beats a minute. Default: the model's choice."]


class AudioOptions(TrackOptions, GenerateOptions, total=False):
    """What a track is made with. None is the same as left out: the model's default."""

    output: Annotated[
        AudioOutput | None,
        "How sound is sent: `wav` or `raw` samples as they are decoded, one `flac`, or `wav+flac`. "
        "Default: `wav+flac`.",
    ]


class SegmentOptions(TrackOptions, SamplingFields, total=False):
    """What a segment of a session is made with. None is the same as left out.

    What is left out is the model's default.
    """

    adapters: Annotated[
        Sequence[AdapterLike] | None,
        "LoRA: names, (name, strength) pairs, or Adapter. Default: those of the session.",
    ]


class SessionOptions(QueueOptions, total=False):
    """How a session of sound is held. None is the same as left out."""

    adapters: Annotated[
        Sequence[AdapterLike] | None,
        "LoRA of segments that name none. Added after those of a ModelRef.",
    ]
    lead_s: Annotated[
        float | None,
        "Seconds that sound is sent ahead of the play head, 0.1 to 60. Default: 2.",
    ]
    crossfade_s: Annotated[
        float | None, "Seconds that one segment fades into another, 0 to 5. Default: 0.025."
    ]
    slots: Annotated[
        int | None,
        "Most segments that are computed in one pass of the model, 1 to 8. Default: 1.",
    ]
    idle_s: Annotated[
        int | None,
        "Seconds without a message after which the service ends the session, 1 to 3,600. "
        "Default: 60.",
    ]
    paced: Annotated[
        bool | None,
        "The play head follows the chunks that you take. Default: it follows the clock.",
    ]
    once: Annotated[
        bool | None, "Silence when all segments are over. Default: the last one is repeated."
    ]


def model_id(model: ModelLike | None) -> str:
    """The name of a model; empty for none."""
    message = model_of(model)
    return message.id.partition("+")[0] if message is not None else ""


def model_of(model: ModelLike | None) -> model_pb2.ModelRef | None:
    """A model's name as a message; None for none."""
    if model is None:
        return None
    if isinstance(model, str):
        return message_of(model_pb2.ModelRef, "model", id=model)
    quantization = message_of(
        model_pb2.Quantization,
        "model.quantization",
        preset=model.quantization,
        components=model.formats,
    )
    has_quantization = bool(model.quantization or model.formats)
    return message_of(
        model_pb2.ModelRef,
        "model",
        id=model.id,
        revision=model.revision,
        quantization=quantization if has_quantization else None,
        adapters=[_adapter_of(one, number) for number, one in enumerate(model.adapters)],
    )


def _with_adapters(model: ModelLike | None, adapters: Sequence[AdapterLike]) -> ModelLike | None:
    """A model with these adapters after its own; None is the service's default model."""
    if isinstance(adapters, (str, Adapter)) or not isinstance(adapters, Sequence):
        raise TypeError(f"adapters: a list is wanted, not {adapters!r}")
    if not adapters:
        return model
    ref = model if isinstance(model, ModelRef) else ModelRef(model or "")
    return replace(ref, adapters=(*ref.adapters, *adapters))


def _adapter_of(adapter: AdapterLike, number: int) -> model_pb2.Adapter:
    given: Any = adapter
    match given:
        case Adapter():
            adapter = given
        case str(name):
            adapter = Adapter(name)
        case [str(name), strength]:
            adapter = Adapter(name, strength)
        case {"id": str(name)}:
            # A recipe has the strength of the first step beside a curve.
            curve = given.get("curve", ())
            strength = None if curve else given.get("strength")
            ignores = given.get("ignore_unknown", False)
            adapter = Adapter(name, strength, curve, given.get("text_strength"), ignores)
        case _:
            wanted = "a name, a (name, strength) pair or an Adapter"
            raise TypeError(f"adapters[{number}]: {wanted} is wanted, not {given!r}")
    message = model_pb2.Adapter()
    for name in ("id", "strength", "text_strength", "ignore_unknown"):
        value = getattr(adapter, name)
        if value is not None:
            put(message, name, value, option=f"adapters[{number}].{name}")
    for place in adapter.curve:
        try:
            position, strength = place
        except (TypeError, ValueError):
            wanted = "a (position, strength) pair"
            raise TypeError(
                f"adapters[{number}].curve: {wanted} is wanted, not {place!r}"
            ) from None
        point = message.curve.add()
        put(point, "position", position, option=f"adapters[{number}].curve")
        put(point, "strength", strength, option=f"adapters[{number}].curve")
    return message


# How a result travels unless it is said, by the name of the request.
_FILM_OUTPUT: FilmOutput = "raw+mp4"
_OUTPUTS = {"GenerateVideoRequest": _FILM_OUTPUT, "GenerateAudioRequest": "wav+flac"}


def _fill(message: Message, options: Mapping[str, Any]) -> None:
    """Writes options into a message. None leaves a field to the service."""
    fields = message.DESCRIPTOR.fields_by_name
    for option, value in options.items():
        if value is None:
            continue
        if is_left_out_by_0(fields.get(option)) and isinstance(value, (int, float)) and value == 0:
            # 0 is "left out" in a message: it would be the default without a word.
            why = "is 0: leave it out for the default"
            raise InvalidRequest(
                f"{option} {why}", reason="INVALID_REQUEST", violations=[Violation(option, why)]
            )
        match option:
            case "model":
                put(message, option, model_of(value))
            case "init_image":
                put(message, option, _start_of(value))
            case "mask" | "end_image":
                put(message, option, _picture_of(value, option))
            case "references":
                for number, one in enumerate(_listed(value, option, "pictures")):
                    getattr(message, option).append(_picture_of(one, f"{option}[{number}]"))
            case "controls":
                for number, one in enumerate(_listed(value, option, "Control")):
                    getattr(message, option).append(_control_of(one, f"{option}[{number}]"))
            case "init_latent":
                put(message, "init_latent_id", latent_id(value), option=option)
            case "init_media":
                put(message, "init_media_id", media_id(value, option), option=option)
            case "reference":
                put(message, "reference_media_id", media_id(value, option), option=option)
            case "tracks":
                _put_tracks(message, _listed(value, option, "names"))
            case "strengths":
                _put_strengths(message, value)
            case "window":
                for side, second in zip(("start", "end"), _window_of(value), strict=True):
                    if second is not None:
                        put(message, f"window_{side}_seconds", second, option=option)
            case "bpm":
                put(message, "beats_per_minute", value, option=option)
            case "preview_interval_s" | "patience_s" | "lead_s" | "crossfade_s":
                field = option.removesuffix("s") + "ms"
                put(message, field, _milliseconds_of(option, value), option=option)
            case "idle_s":
                put(message, "idle_seconds", value, option=option)
            case "paced":
                put(message, "paced_by_client", value, option=option)
            case _ if fields[option].enum_type is not None:
                put(message, option, _number_of(fields[option].enum_type, option, value))
            case _:
                put(message, option, value)


# What Python calls values whose own names say more: the others are their names in small letters.
_CALLED: Mapping[str, Mapping[str, str]] = {
    "OutputFormat": {"RAW_RGB": "raw"},
    "FilmFormat": {"RAW_FRAMES": "raw", "RAW_FRAMES_AND_MP4": "raw+mp4"},
    "AudioFormat": {"RAW_S16LE": "raw", "WAV_AND_FLAC": "wav+flac"},
    "SegmentStart": {
        "WHEN_OVER": "over",
        "AT_ONCE": "now",
        "AT_ONCE_FROM_START": "now_from_start",
    },
}


def _number_of(enum: Any, option: str, word: Any) -> Any:
    """The number of a value, by what Python calls it. 0 is a value that was left out."""
    called = _CALLED.get(enum.name, {})
    words = {
        called.get(value.name, value.name.lower()): value.number
        for value in enum.values
        if value.number
    }
    if not isinstance(word, str) or word not in words:
        raise InvalidRequest(f"{option} is one of {', '.join(words)}, not {word!r}")
    return words[word]


def _listed(value: Any, option: str, wanted: str) -> Sequence[Any]:
    # Text and bytes are sequences too, and here they are one picture.
    is_one = isinstance(value, (str, bytes, bytearray, memoryview))
    if is_one or not isinstance(value, Sequence):
        kind = type(value).__name__
        raise TypeError(f"{option}: a list of {wanted} is wanted, not a {kind}")
    return value


def _picture_of(picture: PictureLike, option: str) -> generation_pb2.PictureInput:
    if isinstance(picture, MediaInfo):
        return message_of(generation_pb2.PictureInput, option, media_id=picture.id)
    wanted = f"{WANTED}, or the MediaInfo of put_media()"
    return generation_pb2.PictureInput(data=picture_bytes(picture, option, wanted))


def _start_of(picture: Any) -> bytes:
    if isinstance(picture, MediaInfo):
        raise TypeError("init_image: what put_media() has uploaded is init_media=...")
    return picture_bytes(picture, "init_image")


def _control_of(control: Control, option: str) -> generation_pb2.Control:
    if not isinstance(control, Control):
        raise TypeError(f"{option}: a Control is wanted, not a {type(control).__name__}")
    image = _picture_of(control.image, f"{option}.image")
    message = generation_pb2.Control(image=image)
    for name in ("id", "scale", "start", "end", "mode"):
        value = getattr(control, name)
        if value is not None:
            put(message, name, value, option=f"{option}.{name}")
    return message


def _put_tracks(message: Any, names: Sequence[Any]) -> None:
    for number, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"tracks[{number}]: a str is wanted, not {name!r}")
        message.tracks.append(name)


def _put_strengths(message: Any, points: Any) -> None:
    for number, point in enumerate(_listed(points, "strengths", "(second, strength) pairs")):
        option = f"strengths[{number}]"
        try:
            second, strength = point
        except (TypeError, ValueError):
            wanted = "a (second, strength) pair"
            raise TypeError(f"{option}: {wanted} is wanted, not {point!r}") from None
        added = message.strengths.add()
        put(added, "seconds", second, option=option)
        put(added, "strength", strength, option=option)


def _window_of(window: Any) -> tuple[Any, Any]:
    try:
        start, end = window
    except (TypeError, ValueError):
        raise TypeError(f"window: a (start, end) pair is wanted, not {window!r}") from None
    return start, end


def _milliseconds_of(option: str, seconds: Any) -> int:
    if isinstance(seconds, str) or not hasattr(seconds, "__float__"):
        raise TypeError(f"{option}: a number is wanted, not {seconds!r}")
    if not math.isfinite(seconds):
        raise refused(option, f"a finite number is wanted, not {seconds!r}")
    return milliseconds(seconds)


def generate_request(
    kind: type[M], prompt: str, options: GenerateOptions, client_id: str | None
) -> M:
    """The request of `generate_image` and its like; `client_id` is the client's own."""
    message = kind()
    if not isinstance(prompt, str):
        raise TypeError(f"prompt: a str is wanted, not {prompt!r}")
    rest: dict[str, Any] = dict(options)
    job = JobOptions()
    for name in JobOptions.__annotations__:
        if name in rest:
            job[name] = rest.pop(name)  # type: ignore[literal-required]
    put(message, "prompt", prompt)
    adapters = rest.pop("adapters", None)
    if adapters is not None:
        rest["model"] = _with_adapters(rest.get("model"), adapters)
    rest["output"] = rest.get("output") or _OUTPUTS.get(message.DESCRIPTOR.name, "png")
    _fill(message, rest)
    put(message, "options", job_request(job, client_id))
    return message


def open_request(
    model: ModelLike | None, options: SessionOptions, client_id: str | None
) -> generation_pb2.OpenAudioSession:
    """The first message of a session, without its source; `client_id` is the client's own."""
    rest: dict[str, Any] = dict(options)
    job = JobOptions()
    for name in QueueOptions.__annotations__:
        if name in rest:
            job[name] = rest.pop(name)  # type: ignore[literal-required]
    adapters = rest.pop("adapters", None)
    if adapters is not None:
        model = _with_adapters(model, adapters)
    message = generation_pb2.OpenAudioSession(model=model_of(model))
    _fill(message, rest)
    put(message, "options", job_request(job, client_id))
    return message


def segment_request(
    prompt: str, at: SegmentStart, options: SegmentOptions
) -> generation_pb2.AudioSegment:
    """A segment of a session. What the session says for all of them is left out."""
    if not isinstance(prompt, str):
        raise TypeError(f"prompt: a str is wanted, not {prompt!r}")
    segment = generation_pb2.AudioSegment.DESCRIPTOR.fields_by_name["start"]
    start = _number_of(segment.enum_type, "at", at)
    rest: dict[str, Any] = dict(options)
    track = generation_pb2.GenerateAudioRequest()
    put(track, "prompt", prompt)
    adapters = rest.pop("adapters", None)
    if adapters is not None:
        rest["model"] = _with_adapters(None, adapters)
    _fill(track, rest)
    return generation_pb2.AudioSegment(track=track, start=start)


def replace_model_request(
    model: ModelLike, adapters: Sequence[AdapterLike] | None
) -> generation_pb2.ReplaceModel:
    """What a session is to go on with."""
    return generation_pb2.ReplaceModel(model=model_of(_with_adapters(model, adapters or ())))


def prompts_of(prompt: str | Sequence[str], options: GenerateOptions) -> list[str]:
    """The prompts of a list, each for a job of its own."""
    prompts = list(prompt)
    for number, one in enumerate(prompts):
        if not isinstance(one, str):
            raise TypeError(f"prompt: number {number} of the list is no str, but {one!r}")
    if options.get("idempotency_key"):
        raise InvalidRequest("idempotency_key names one job: give one prompt with it, not a list")
    return prompts


def job_request(options: JobOptions, client_id: str | None) -> generation_pb2.JobOptions:
    """The options of any long call; `client_id` is the client's own."""
    message = generation_pb2.JobOptions(priority=generation_pb2.NORMAL)
    _fill(message, {**options, "client_id": options.get("client_id") or client_id})
    return message


def encode_request(
    image: ImageInput,
    model: ModelLike | None,
    width: int | None,
    height: int | None,
    seed: int,
    options: generation_pb2.JobOptions,
) -> generation_pb2.EncodeImageRequest:
    """The request of encode_image."""
    request = generation_pb2.EncodeImageRequest(
        model=model_of(model), image=picture_bytes(image, "image"), options=options
    )
    _fill(request, {"width": width, "height": height})
    put(request, "seed", seed)
    return request


def decode_request(
    latent: str | LatentInfo,
    model: ModelLike | None,
    output: OutputFormat | None,
    options: generation_pb2.JobOptions,
    film_output: FilmOutput | None = None,
) -> generation_pb2.DecodeLatentRequest:
    """The request of decode_latent, decode_video and decode_audio."""
    request = message_of(
        generation_pb2.DecodeLatentRequest,
        model=model_of(model),
        latent_id=latent_id(latent),
        options=options,
    )
    _fill(request, {"output": output or "png", "film_output": film_output or _FILM_OUTPUT})
    return request


def pull_request(model: str, revision: str) -> hub_pb2.PullModelRequest:
    """The request for a pull: `owner/name`, whose revision may also follow an @."""
    name, _, behind = model.partition("@")
    revision = revision or behind
    return message_of(hub_pb2.PullModelRequest, "model", id=name, revision=revision)


def latent_id(latent: str | LatentInfo) -> str:
    """The handle of a latent."""
    return latent.id if isinstance(latent, LatentInfo) else latent


def media_id(media: str | MediaInfo, option: str = "media") -> str:
    """The handle of media. A picture, film or track itself is a TypeError."""
    if isinstance(media, MediaInfo):
        return media.id
    if not isinstance(media, str):
        raise TypeError(
            f"{option}: a handle is wanted, not a {type(media).__name__}: upload it by put_media() "
            "first"
        )
    return media


def milliseconds(seconds: float) -> int:
    """Whole milliseconds; less than one, but not nothing, is one."""
    return max(1, round(seconds * 1000)) if seconds > 0 else round(seconds * 1000)


def duration(seconds: float | None) -> Duration | None:
    """Seconds as a Duration; None for none."""
    if seconds is None:
        return None
    whole = int(seconds)
    return Duration(seconds=whole, nanos=round((seconds - whole) * 1e9))


def seconds_of(duration: Duration) -> float:
    """A Duration as seconds."""
    return duration.seconds + duration.nanos / 1e9


def component_names(components: Sequence[str]) -> list[str]:
    """Component names; a single string is a slip, not a list of letters."""
    if isinstance(components, str):
        raise InvalidRequest("components is a list of names, not one string")
    return list(components)


def reserve_request(
    size_bytes: int,
    ttl_s: float | None,
    label: str = "",
    card: str = "",
    renews: str = "",
    process_id: int = 0,
) -> residency_pb2.ReserveRequest:
    """The request of reserve; of a renewal, where `renews` is the id of a reservation."""
    return message_of(
        residency_pb2.ReserveRequest,
        bytes=size_bytes,
        ttl=duration(ttl_s),
        label=label,
        card=card,
        reservation_id=renews,
        process_id=process_id,
    )


def health_request(card: str) -> rpc_pb2.HealthCheckRequest:
    """Asks for the service as a whole, or for one card."""
    service = f"moored.card.{card}" if card else ""
    return message_of(rpc_pb2.HealthCheckRequest, "card", service=service)


def health_word(answer: rpc_pb2.HealthCheckResponse) -> str:
    """What the service says of its health, as a word."""
    return rpc_pb2.HealthCheckResponse.ServingStatus.Name(answer.status).lower()


def worth_waiting(error: grpc.RpcError) -> bool:
    """Whether a service that answers so may be ready later."""
    call: Any = error
    code = call.code()
    return code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    )
