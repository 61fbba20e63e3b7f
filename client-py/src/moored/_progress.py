"""Events in words, and a display that follows them: in a terminal, a notebook, or a log."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Generic, TextIO, TypeVar, overload

from ._async_streams import AsyncEventStream
from ._events import (
    Accepted,
    Artifact,
    Done,
    Event,
    Evicting,
    LatentKept,
    Loading,
    Preview,
    Queued,
    Retrying,
    StageStarted,
    Step,
    Waiting,
)
from ._records import AttachedAdapter, PullProgress, ResolvedModel
from ._session_events import (
    AudioSessionClosed,
    ModelReplaced,
    SegmentAccepted,
    SegmentFailed,
    SegmentProgress,
    SegmentReady,
    SessionEvent,
    SoundChunk,
    SoundGap,
    SourceReplaced,
)
from ._streams import EventStream

R = TypeVar("R")

# Tensors that an adapter has for no layer, by name.
_IGNORED_AT_MOST = 3
_STAGES = {
    "encode_text": "Encoding the text",
    "encode_image": "Encoding the picture",
    "encode_end": "Encoding the end picture",
    "encode_vision": "Encoding the picture for the transformer",
    "encode_reference": "Encoding the reference",
    "encode_masked": "Encoding the masked picture",
    "encode_source": "Encoding the source",
    "encode_condition": "Encoding lyrics and timbre",
    "quantize_source": "Quantizing the source",
    "denoise": "Denoising",
    "decode": "Decoding",
    "decode_sound": "Decoding the sound",
    "load": "Loading",
    "restore": "Restoring",
}


def describe(event: Event | PullProgress | SessionEvent | AttachedAdapter) -> str:
    """An event in a few words, for people: `Step 7/20`, `Loading transformer 6.1/11.9 GiB`.

    And what an adapter changes: `304 layers of transformer, rank 16; 2 tensors ignored (a, b)`.
    """
    # Longer than most functions here: one case an event, and mypy sees that none is missing.
    match event:
        case Accepted():
            said = ["Joined" if event.joined else "Accepted", event.model.choice]
            said += [left_out.message for left_out in event.left_out]
            return ", ".join(part for part in said if part)
        case Queued():
            place = f"{event.position} ahead" if event.position else "next"
            soon = event.estimate_ms
            return f"Queued, {place}" + (f", about {_time(soon)}" if soon is not None else "")
        case Waiting():
            return _waiting(event)
        case Evicting():
            return f"Evicting {event.component.name}, {_size(event.component.bytes)}"
        case Loading():
            return f"Loading {event.component.name} {_of(event.bytes_done, event.bytes_total)}"
        case Retrying(reason="RESTORING"):
            return event.message or event.reason
        case Retrying():
            return f"Retrying {event.stage}: {event.message or event.reason}"
        case StageStarted():
            words = _STAGES.get(event.name, event.name)
            if event.cached:
                return f"{words}, already done"
            words += f", section {event.part}/{event.parts}" if event.parts > 1 else ""
            return words + (f", {event.chunking}" if event.chunking not in ("", "whole") else "")
        case Step() if event.parts > 1:
            return f"Section {event.part}/{event.parts}, step {event.n}/{event.of}"
        case Step():
            return f"Step {event.n}/{event.of}"
        case Preview():
            return f"Preview at step {event.step}"
        case Artifact():
            return f"Receiving {_whole(event)} {event.index + 1}"
        case LatentKept():
            return f"Latent {event.latent.id} kept"
        case PullProgress(bytes_total=0):
            return "Asking the hub"
        case PullProgress():
            return f"Pulling {_of(event.bytes_done, event.bytes_total, _on_disk)}"
        case Done():
            exact = "".join(f", approximated: {one}" for one in event.approximations)
            exact += "".join(f", {left_out.message}" for left_out in event.left_out)
            return f"Done in {_time(event.total_ms)}{exact}"
        case AttachedAdapter():
            return _changes(event)
        case SoundChunk():
            return f"{event.seconds:.2f} s of segment {event.segment}"
        case SoundGap():
            return f"No sound for {_time(event.milliseconds)}"
        case AudioSessionClosed():
            counts = f"{event.segments} segments, {event.gaps} gaps"
            return f"Closed ({event.reason}), {counts}" + (
                f" of {_time(event.gap_ms)}" if event.gaps else ""
            )
        case _:
            return f"Segment {event.segment}: {_of_segment(event)}"


def _of_segment(
    event: SegmentAccepted
    | SegmentProgress
    | SegmentReady
    | SegmentFailed
    | SourceReplaced
    | ModelReplaced,
) -> str:
    match event:
        case SegmentAccepted():
            return f"accepted, seed {event.seed}"
        case SegmentProgress():
            words = describe(event.event)
            return words[:1].lower() + words[1:]
        case SegmentReady():
            return f"ready in {_time(event.done.total_ms)}"
        case SegmentFailed():
            return event.error.message
        case SourceReplaced():
            return "the new source is in use"
        case ModelReplaced():
            return f"{event.model.key} is in use"


def _whole(piece: Artifact) -> str:
    """What it is a piece of: only the first piece need say so."""
    if piece.video is not None or piece.media_type.startswith("video/"):
        return "film"
    if piece.audio is not None or piece.media_type.startswith("audio/"):
        return f"{piece.track} of track" if piece.track else "track"
    return "picture"


def _changes(adapter: AttachedAdapter) -> str:
    layers = [
        f"{count} layer{'s' if count != 1 else ''} of {component}"
        for component, count in sorted(adapter.layers.items())
    ]
    ranks = [f"rank {adapter.rank}"] if adapter.rank else []
    words = [", ".join([*layers, *ranks])]
    if adapter.ignored_count:
        named = list(adapter.ignored[:_IGNORED_AT_MOST])
        named += ["..."] if adapter.ignored_count > len(named) else []
        plural = "s" if adapter.ignored_count != 1 else ""
        words.append(f"{adapter.ignored_count} tensor{plural} ignored ({', '.join(named)})")
    return "; ".join(filter(None, words))


def _waiting(event: Waiting) -> str:
    words = [f"Waiting for {_size(max(0, event.needed_bytes - event.free_bytes))}"]
    for holder in sorted(event.holders, key=lambda one: -one.bytes)[:2]:
        pid = f" {holder.pid}" if holder.pid else ""
        words.append(f"{holder.name}{pid} holds {_size(holder.bytes)}")
    words.append(f"{_time(event.patience_left_ms)} left")
    return ", ".join(words)


def _in_memory(size: int) -> tuple[float, str]:
    """The unit of memory: as the service's own messages have it."""
    return (2**30, "GiB") if size >= 2**30 / 10 else (2**20, "MiB")


def _on_disk(size: int) -> tuple[float, str]:
    """The unit of downloads: as hubs have it."""
    return (1e9, "GB") if size >= 1e8 else (1e6, "MB")


def _size(size: int) -> str:
    divisor, unit = _in_memory(size)
    return f"{size / divisor:.1f} {unit}"


def _of(done: int, total: int, unit_of: Callable[[int], tuple[float, str]] = _in_memory) -> str:
    divisor, unit = unit_of(total)
    return f"{done / divisor:.1f}/{total / divisor:.1f} {unit}"


def _time(milliseconds: int) -> str:
    seconds = milliseconds / 1000
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _phase(event: Event) -> tuple[object, ...] | None:
    """What shares a line with it; None for what is not shown."""
    match event:
        case Preview() | Artifact() | LatentKept():
            return None
        case Accepted(model=ResolvedModel(choice=""), left_out=()):
            return None
        case Evicting() | Loading():
            return (type(event), event.component.id, event.component.name)
        case StageStarted():
            return (event.name, event.item, event.part)
        case Step():
            return ("denoise", event.item, event.part)
        case Waiting() | Retrying():
            return (type(event), event.stage)
        case Accepted() | Queued() | Done():
            return (type(event),)


class _Display:
    """One line a phase, kept up to date where that is possible."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._phase: tuple[object, ...] | None = None
        self._lines: list[str] = []
        self._notebook = _notebook() if file is sys.stderr else None
        self._live = self._notebook is None and file.isatty()

    def show(self, event: Event) -> None:
        phase = _phase(event)
        if phase is None:
            return
        fresh = phase != self._phase
        self._phase = phase
        text = describe(event)
        if self._notebook is not None:
            self._lines = [*self._lines, text] if fresh else [*self._lines[:-1], text]
            self._notebook("\n".join(self._lines))
        elif self._live:
            start = "\n" if fresh and self._lines else "\r\x1b[K"
            self._lines = [text]
            self._write(f"{start}{text}")
        elif fresh:
            self._write(f"{text}\n")

    def finish(self) -> None:
        if self._live and self._lines:
            self._write("\n")
        self._lines = []

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()


def _notebook() -> Callable[[str], None] | None:
    """What shows a text in the notebook's cell, in the place of the last one; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if type(shell).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import display

    handle = display({"text/plain": ""}, raw=True, display_id=True)

    def show(text: str) -> None:
        handle.update({"text/plain": text}, raw=True)

    return show


class Progress(Generic[R]):
    """Events that are shown as they pass. Iterate over it, or ask for the `result()`."""

    def __init__(self, events: Iterable[Event], file: TextIO | None = None) -> None:
        self._events = events
        self._iterator = iter(events)
        self._display = _Display(file or sys.stderr)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            event = next(self._iterator)
        except BaseException:
            self._display.finish()
            raise
        self._display.show(event)
        return event

    def result(self) -> R:
        """Shows what is left of the events and returns the job's result."""
        if not isinstance(self._events, EventStream):
            raise TypeError("Only the stream of a client has a result")
        with self._events:
            for _ in self:
                pass
        result: R = self._events.result()
        return result


class AsyncProgress(Generic[R]):
    """Events that are shown as they pass. Iterate over it, or await the `result()`."""

    def __init__(self, events: AsyncIterable[Event], file: TextIO | None = None) -> None:
        self._events = events
        self._iterator = aiter(events)
        self._display = _Display(file or sys.stderr)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await anext(self._iterator)
        except BaseException:
            self._display.finish()
            raise
        self._display.show(event)
        return event

    async def result(self) -> R:
        """Shows what is left of the events and returns the job's result."""
        if not isinstance(self._events, AsyncEventStream):
            raise TypeError("Only the stream of a client has a result")
        async with self._events:
            async for _ in self:
                pass
        result: R = await self._events.result()
        return result


@overload
def progress(events: EventStream[R], *, file: TextIO | None = None) -> Progress[R]: ...
@overload
def progress(events: AsyncEventStream[R], *, file: TextIO | None = None) -> AsyncProgress[R]: ...
@overload
def progress(events: Iterable[Event], *, file: TextIO | None = None) -> Progress[Any]: ...
@overload
def progress(events: AsyncIterable[Event], *, file: TextIO | None = None) -> AsyncProgress[Any]: ...
def progress(
    events: Iterable[Event] | AsyncIterable[Event], *, file: TextIO | None = None
) -> Progress[Any] | AsyncProgress[Any]:
    """Shows a job's events while they are iterated over, or while the `result()` is waited for.

    result = moored.progress(client.stream_image("a red cube")).result()

    One line a phase: kept up to date in a terminal and in a notebook's cell, else written once. To
    stderr, unless `file` names another.
    """
    if isinstance(events, AsyncIterable):
        return AsyncProgress(events, file)
    return Progress(events, file)
