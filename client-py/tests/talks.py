"""Sessions of sound as a scripted service holds them; both clients' sides in one wording."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from scripted import (
    CHANNELS,
    SAMPLES_PER_SECOND,
    WAIT_S,
    Service,
    Talk,
    done,
    event,
    resolved,
    sound,
    step,
)

import moored
from moored._generated import events_pb2, generation_pb2

CHUNK = 500  # samples of each channel


def says(**message: Any) -> generation_pb2.StreamAudioResponse:
    return generation_pb2.StreamAudioResponse(**message)


def opened(**more: Any) -> generation_pb2.StreamAudioResponse:
    settings = {"lead_ms": 2000, "crossfade_ms": 25, "slots": 1, "idle_seconds": 60, **more}
    return says(
        opened=generation_pb2.AudioSessionOpened(
            session_id="session-1",
            model=resolved(),
            samples_per_second=SAMPLES_PER_SECOND,
            channels=CHANNELS,
            **settings,
        )
    )


def accepted(segment: int, seed: int = 7) -> generation_pb2.StreamAudioResponse:
    job = f"job-{segment}"
    return says(accepted=generation_pb2.SegmentAccepted(segment=segment, job_id=job, seed=seed))


def progress(segment: int, inner: events_pb2.Event) -> generation_pb2.StreamAudioResponse:
    return says(progress=generation_pb2.SegmentProgress(segment=segment, event=inner))


def ready(segment: int, samples: int = CHUNK) -> generation_pb2.StreamAudioResponse:
    return says(
        ready=generation_pb2.SegmentReady(segment=segment, samples=samples, done=done().done)
    )


def failed(segment: int, **more: Any) -> generation_pb2.StreamAudioResponse:
    return says(failed=generation_pb2.SegmentFailed(segment=segment, **more))


def chunk(number: int, segment: int = 1) -> generation_pb2.StreamAudioResponse:
    first = number * CHUNK
    return says(
        sound=generation_pb2.SoundChunk(
            first_sample=first,
            samples=sound(CHUNK, first * CHANNELS % 20_000),
            segment=segment,
            first_sample_of_segment=first,
        )
    )


def closed(reason: str = "closed", **more: Any) -> generation_pb2.StreamAudioResponse:
    return says(closed=generation_pb2.AudioSessionClosed(reason=reason, **more))


def kinds(talk: Talk) -> list[str]:
    return [message.WhichOneof("message") for message in talk.heard]


class Player:
    """A service that makes each segment at once, of some chunks, and ends when it is asked to."""

    def __init__(self, chunks_each: int = 2, **settings: Any) -> None:
        self.settings = settings
        self.chunks_each = chunks_each
        self.segments = 0
        self.chunks = 0

    def __call__(self, message: Any) -> Iterator[generation_pb2.StreamAudioResponse]:
        kind = message.WhichOneof("message")
        if kind == "open":
            yield opened(**self.settings)
        elif kind in ("segment", "replace_source", "replace_model"):
            self.segments += 1
            yield from self.made()
            if kind == "replace_source":
                yield says(source_replaced=generation_pb2.SourceReplaced(segment=self.segments))
            if kind == "replace_model":
                other = resolved()
                other.id = "other"
                replaced = generation_pb2.ModelReplaced(segment=self.segments, model=other)
                yield says(model_replaced=replaced)
        elif kind == "close":
            yield closed(samples=self.chunks * CHUNK, segments=self.segments)
            yield END

    def made(self) -> Iterator[generation_pb2.StreamAudioResponse]:
        number = self.segments
        yield accepted(number, seed=number + 40)
        yield progress(number, event(job_id=f"job-{number}", step=step(1).step))
        for _ in range(self.chunks_each):
            yield chunk(self.chunks, number)
            self.chunks += 1
        yield ready(number, self.chunks_each * CHUNK)


class _End:
    """In the place of a message: the call ends well."""


END: Any = _End()


class Sessions(Talk):
    """A talk whose answers may end it."""

    def say(self, *messages: Any) -> None:
        for message in messages:
            if message is END:
                self.end()
            else:
                super().say(message)


def talk_on(service: Service, answer: Callable[[Any], Any] | None = None) -> Sessions:
    talk = Sessions(answer or Player())
    service.on("StreamAudio", talk)
    return talk


def only_opens(message: Any) -> list[generation_pb2.StreamAudioResponse]:
    """Opens, and closes; what else is said is up to the test."""
    kind = message.WhichOneof("message")
    if kind == "open":
        return [opened()]
    return [closed(), END] if kind == "close" else []


class Both:
    """One wording for both kinds of session: what may be awaited is."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask

    def __call__(self, use: Callable[[Any, Any], Any], *args: Any, **options: Any) -> Any:
        """The result of `use`, a coroutine of the session and of `self.now`."""
        address, settings = self._ask.address, self._ask.settings

        async def run_async() -> Any:
            async with (
                moored.AsyncClient(address, **settings) as client,
                client.audio_session(*args, **options) as session,
            ):
                return await use(session, awaited)

        async def run_sync() -> Any:
            with (
                moored.Client(address, **settings) as client,
                client.audio_session(*args, **options) as session,
            ):
                return await use(session, as_it_is)

        return asyncio.run(run_sync() if self._ask.kind == "sync" else run_async())


async def as_it_is(given: Any) -> Any:
    return given


async def awaited(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given


async def items(iterable: Any) -> AsyncIterator[Any]:
    if hasattr(iterable, "__aiter__"):
        async for item in iterable:
            yield item
    else:
        for item in iterable:
            yield item


async def heard(talk: Talk, count: int) -> None:
    """Waits until the service has heard so many messages."""
    assert await asyncio.to_thread(talk.wait_heard, lambda messages: len(messages) >= count)


async def until(there: Callable[[], bool]) -> None:
    """Waits for what the reading of a session changes."""
    end = time.monotonic() + WAIT_S
    while not there():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0)


async def taken(iterable: Any, count: int) -> list[Any]:
    """The first few of what comes."""
    found: list[Any] = []
    async for item in items(iterable):
        found.append(item)
        if len(found) == count:
            break
    return found
