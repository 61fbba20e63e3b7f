"""Sessions of sound: what the client says, what it makes of the service's words, and their ends."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import Ask
from scripted import (
    CHANNELS,
    SAMPLES_PER_SECOND,
    WAIT_S,
    Service,
    Talk,
    done,
    event,
    reason,
    refuse,
    resolved,
    sound,
    step,
)

import moored
from moored import _conversation
from moored._generated import errors_pb2, events_pb2, generation_pb2

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
    """A service that makes each segment at once, of two chunks, and ends when it is asked to."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
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
        for _ in range(2):
            yield chunk(self.chunks, number)
            self.chunks += 1
        yield ready(number, 2 * CHUNK)


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

    def __init__(self, ask: Ask) -> None:
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
    for _ in iter(there, True):
        await asyncio.sleep(0)


async def taken(iterable: Any, count: int) -> list[Any]:
    """The first few of what comes."""
    found: list[Any] = []
    async for item in items(iterable):
        found.append(item)
        if len(found) == count:
            break
    return found


@pytest.fixture
def both(ask: Ask) -> Both:
    return Both(ask)


def test_a_session_from_beginning_to_end(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        assert (session.sample_rate, session.channels) == (SAMPLES_PER_SECOND, CHANNELS)
        assert session.opened.session_id == "session-1"
        assert session.model.id == "demo"
        assert session.report is None
        segment = session.play("a slow waltz")
        assert segment.number == 1
        chunks = await taken(session, 2)
        assert b"".join(one.samples for one in chunks) == sound(CHUNK) + sound(
            CHUNK, CHUNK * CHANNELS
        )
        assert [one.first_sample for one in chunks] == [0, CHUNK]
        assert [one.segment for one in chunks] == [1, 1]
        assert chunks[1].first_sample_of_segment == CHUNK
        assert chunks[1].seconds == CHUNK / SAMPLES_PER_SECOND
        assert (await now(segment.wait(WAIT_S))) is segment
        assert (segment.state, segment.job_id, segment.seed) == ("ready", "job-1", 41)
        assert segment.sample_count == 2 * CHUNK
        assert segment.done.job_id == "job-1"
        report = await now(session.close())
        assert report == moored.AudioSessionClosed("closed", 2 * CHUNK, 1, 0, 0)
        assert session.report == report
        assert await now(session.close()) == report
        assert [one async for one in items(session)] == []

    both(use)
    assert kinds(talk) == ["open", "segment", "close"]
    assert talk.gone.wait(WAIT_S)


def test_everything_comes_in_order_as_events(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        session.play("x")
        await heard(talk, 2)
        talk.say(says(gap=generation_pb2.SoundGap(at_sample=9, milliseconds=30)))
        found = await taken(session.events(), 6)
        assert [type(one).__name__ for one in found] == [
            "SegmentAccepted",
            "SegmentProgress",
            "SoundChunk",
            "SoundChunk",
            "SegmentReady",
            "SoundGap",
        ]
        assert found[0] == moored.SegmentAccepted(1, "job-1", 41)
        assert found[1] == moored.SegmentProgress(1, moored.Step(1, 4, 0, job_id="job-1", at_ms=5))
        assert found[5] == moored.SoundGap(9, 30)
        await now(session.close())
        last = [one async for one in items(session.events())]
        assert [type(one) for one in last] == [moored.AudioSessionClosed]

    both(use)


def test_what_opens_it(service: Service, both: Both) -> None:
    talk = talk_on(service)
    service.on("PutMedia", generation_pb2.MediaInfo(id="media-77"))

    async def use(session: Any, now: Any) -> None:
        pass

    wav = b"RIFF\0\0\0\0WAVEfmt "
    both(
        use,
        moored.ModelRef("owner/music", quantization="8-bit"),
        source=wav,
        adapters=[("styles/waltz", 0.5)],
        lead_s=1.5,
        crossfade_s=0,
        slots=4,
        idle_s=30,
        paced=True,
        once=True,
        priority="high",
        patience_s=2,
        client_id="me",
    )
    asked = talk.heard[0].open
    assert asked.model.id == "owner/music"
    assert asked.model.quantization.preset == "8-bit"
    assert [(one.id, one.strength) for one in asked.model.adapters] == [("styles/waltz", 0.5)]
    assert asked.source_media_id == "media-77"
    assert b"".join(one.chunk for one in service.requests["PutMedia"]) == wav
    assert (asked.lead_ms, asked.slots, asked.idle_seconds) == (1500, 4, 30)
    assert asked.HasField("crossfade_ms")
    assert asked.crossfade_ms == 0
    assert asked.paced_by_client
    assert asked.once
    assert asked.options.priority == generation_pb2.HIGH
    assert (asked.options.patience_ms, asked.options.client_id) == (2000, "me")


def test_what_is_left_out_is_the_services(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        pass

    both(use)
    asked = talk.heard[0].open
    assert not asked.HasField("model")
    assert not asked.HasField("crossfade_ms")
    assert (asked.source_media_id, asked.lead_ms, asked.slots) == ("", 0, 0)
    assert "PutMedia" not in service.requests


@pytest.mark.parametrize(
    "source",
    [moored.MediaInfo("media-5", "audio/wav", None, None, None, 9, 1), "media-5"],
    ids=["info", "handle"],
)
def test_a_source_that_is_in_the_service(service: Service, both: Both, source: Any) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        await now(session.replace_source(source))
        await now(session.replace_source(None))

    both(use, source=source)
    assert talk.heard[0].open.source_media_id == "media-5"
    assert [one.replace_source.media_id for one in talk.heard[1:3]] == ["media-5", ""]
    assert "PutMedia" not in service.requests


def test_a_source_in_a_file(service: Service, both: Both, tmp_path: Path) -> None:
    talk = talk_on(service)
    service.on("PutMedia", generation_pb2.MediaInfo(id="media-78"))
    path = tmp_path / "media-5.flac"
    path.write_bytes(b"fLaC" + bytes(40))

    async def use(session: Any, now: Any) -> None:
        pass

    both(use, source=str(path))
    assert talk.heard[0].open.source_media_id == "media-78"
    with pytest.raises(FileNotFoundError):
        both(use, source=tmp_path / "not-there.wav")
    assert len(talk.heard) == 2  # of the first session alone


def test_what_a_segment_says(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        session.play(
            "a brass band",
            at="now",
            lyrics="[verse]",
            seconds=12.5,
            steps=8,
            guidance=3,
            seed=9,
            strengths=[(0, 0.25), (10, 1)],
            task="repaint",
            tracks=["drums"],
            window=(2, None),
            reference="media-9",
            bpm=120,
            key="C major",
            time_signature="4",
            language="en",
            max_sequence_length=64,
            adapters=["styles/ink"],
        )
        session.play("x", strength=0.5, at="now_from_start")
        session.play("y")

    both(use)
    first, second, third = (one.segment for one in talk.heard[1:4])
    track = first.track
    assert first.start == generation_pb2.AT_ONCE
    assert (track.prompt, track.lyrics, track.seconds) == ("a brass band", "[verse]", 12.5)
    assert (track.steps, track.guidance, track.seed) == (8, 3, 9)
    assert [(one.seconds, one.strength) for one in track.strengths] == [(0, 0.25), (10, 1)]
    assert track.task == generation_pb2.REPAINT
    assert [*track.tracks] == ["drums"]
    assert track.window_start_seconds == 2
    assert not track.HasField("window_end_seconds")
    assert (track.reference_media_id, track.beats_per_minute) == ("media-9", 120)
    assert (track.key, track.time_signature, track.language) == ("C major", "4", "en")
    assert track.max_sequence_length == 64
    assert [one.id for one in track.model.adapters] == ["styles/ink"]
    assert second.start == generation_pb2.AT_ONCE_FROM_START
    assert second.track.strength == 0.5
    assert third.start == generation_pb2.WHEN_OVER
    # What the session says for all of its segments is left out.
    assert third.track == generation_pb2.GenerateAudioRequest(prompt="y")
    assert track.model.id == ""


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"at": "later"}, moored.InvalidRequest, "at is one of over, now, now_from_start"),
        ({"seed": -1}, moored.InvalidRequest, "seed: -1"),
        ({"strengths": [(1, 0.5), 3]}, TypeError, r"strengths\[1\]"),
        ({"strengths": [("a", 0.5)]}, TypeError, r"strengths\[0\]"),
        ({"strengths": 0.5}, TypeError, "strengths: a list"),
        ({"strenghts": []}, TypeError, "did you mean strengths"),
        ({"count": 2}, TypeError, "no option 'count'"),
        ({"init_media": "media-1"}, TypeError, "no option 'init_media'"),
    ],
)
def test_a_segment_that_cannot_be_said(
    service: Service, both: Both, options: dict[str, Any], error: type, words: str
) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        with pytest.raises(error, match=words):
            session.play("x", **options)
        assert session.play("y").number == 1  # it was not counted

    both(use)
    assert kinds(talk) == ["open", "segment", "close"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lead": 2}, TypeError),
        ({"idempotency_key": "a"}, TypeError),
        ({"slots": -1}, moored.InvalidRequest),
        ({"lead_s": "2"}, TypeError),
    ],
)
def test_a_session_that_cannot_be_asked_for(
    client: moored.Client, options: dict[str, Any], error: type
) -> None:
    with pytest.raises(error, match=next(iter(options))):
        client.audio_session(**options)


def test_strengths_of_one_track(service: Service, ask: Ask) -> None:
    service.on("GenerateAudio", lambda request, context: iter([done()]))
    ask("stream_audio", "x").close() if ask.kind == "sync" else None
    with pytest.raises(TypeError, match="strengths"):
        ask.items("stream_audio", "x", strengths=[1])
    ask.items("stream_audio", "x", strengths=[(1, 0.5), (2, 0.75)])
    points = service.requests["GenerateAudio"].strengths
    assert [(one.seconds, one.strength) for one in points] == [(1, 0.5), (2, 0.75)]


def test_another_source_and_another_model(service: Service, both: Both) -> None:
    talk = talk_on(service)
    service.on("PutMedia", generation_pb2.MediaInfo(id="media-79"))

    async def use(session: Any, now: Any) -> None:
        segments = [
            session.play("x"),
            await now(session.replace_source(b"fLaC" + bytes(9))),
            session.replace_model("other", adapters=["a"]),
        ]
        for segment in segments:
            await now(segment.wait(WAIT_S))
        assert [segment.number for segment in segments] == [1, 2, 3]
        assert [segment.seed for segment in segments] == [41, 42, 43]
        await now(session.close())
        found = [one async for one in items(session.events())]
        assert moored.SourceReplaced(2) in found
        assert any(isinstance(one, moored.ModelReplaced) and one.segment == 3 for one in found)
        assert session.model.id == "other"

    both(use)
    assert talk.heard[2].replace_source.media_id == "media-79"
    assert talk.heard[3].replace_model.model.id == "other"
    assert [one.id for one in talk.heard[3].replace_model.model.adapters] == ["a"]


def test_a_replacement_alone_is_ready(service: Service, both: Both) -> None:
    """Without a segment before it nothing is made anew."""
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        segment = await now(session.replace_source(None))
        talk.say(says(source_replaced=generation_pb2.SourceReplaced(segment=1)))
        await now(segment.wait(WAIT_S))
        assert (segment.state, segment.sample_count) == ("ready", None)

    both(use)


def test_a_segment_that_fails(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)
    problem = generation_pb2.SegmentProblem(field="beats_per_minute", description="is 0")

    async def use(session: Any, now: Any) -> None:
        refused, superseded, newer, played = (session.play(str(n)) for n in range(4))
        talk.say(
            failed(1, code=3, reason="INVALID_REQUEST", message="no", problems=[problem]),
            accepted(2),
            failed(2, code=10, reason="SUPERSEDED", message="a later one sounds"),
            failed(3, code=8, reason="OF_A_NEWER_SERVICE", message="so it is"),
            accepted(4),
            ready(4),
        )
        with pytest.raises(moored.InvalidRequest) as caught:
            await now(refused.wait(WAIT_S))
        assert caught.value.violations == (moored.Violation("bpm", "is 0"),)
        with pytest.raises(moored.Superseded, match="a later one") as caught_later:
            await now(superseded.wait(WAIT_S))
        assert (caught_later.value.reason, caught_later.value.job_id) == ("SUPERSEDED", "job-2")
        with pytest.raises(moored.MooredError, match="so it is") as caught_newer:
            await now(newer.wait(WAIT_S))
        assert type(caught_newer.value) is moored.MooredError
        # The session goes on.
        await now(played.wait(WAIT_S))
        states = [one.state for one in (refused, superseded, newer, played)]
        assert states == ["failed", "failed", "failed", "ready"]
        found = await taken(session.events(), 1)
        assert isinstance(found[0], moored.SegmentFailed)
        assert (found[0].segment, found[0].error) == (1, caught.value)

    both(use)


def test_waiting_for_a_segment_no_longer_than_asked(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        segment = session.play("x")
        with pytest.raises(moored.Deadline, match="Segment 1 was not ready within 0 s"):
            await now(segment.wait(0))
        talk.say(ready(1))
        await now(segment.wait(WAIT_S))

    both(use)


def test_a_session_that_is_refused(service: Service, both: Both) -> None:
    def refuses(message: Any) -> list[Any]:
        return [
            lambda context: refuse(
                context, grpc.StatusCode.NOT_FOUND, "no such model", reason("MODEL_NOT_FOUND")
            )
        ]

    talk_on(service, refuses)

    async def use(session: Any, now: Any) -> None:
        raise AssertionError("it is not open")

    with pytest.raises(moored.ModelNotFound, match="no such model"):
        both(use, "not/there")


def test_a_refusal_names_the_options(service: Service, both: Both) -> None:
    from moored._generated import rpc_pb2

    bad = rpc_pb2.BadRequest()
    bad.field_violations.add(field="source_media_id", description="is none")

    def refuses(message: Any) -> list[Any]:
        return [
            lambda context: refuse(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "source_media_id: is none",
                reason("INVALID_REQUEST"),
                bad,
            )
        ]

    talk_on(service, refuses)
    with pytest.raises(moored.InvalidRequest, match=r"^source: is none") as caught:
        both(None)
    assert caught.value.violations[0].field == "source"


def test_no_service(both: Both) -> None:
    both._ask.address = "127.0.0.1:1"
    with pytest.raises(moored.ConnectionFailed):
        both(None)


def test_an_older_service(service: Service, both: Both) -> None:
    talk_on(
        service,
        lambda _: [lambda context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")],
    )
    with pytest.raises(moored.NotBuilt):
        both(None)


def test_a_session_that_fails_while_it_plays(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)
    short = errors_pb2.MemoryShortfall(needed_bytes=5)

    async def use(session: Any, now: Any) -> None:
        segment = session.play("x")
        talk.say(
            chunk(0),
            lambda context: refuse(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the card is full",
                reason("MEMORY_TAKEN"),
                short,
            ),
        )
        with pytest.raises(moored.MemoryTaken):
            await now(segment.wait(WAIT_S))
        assert segment.state == "failed"
        with pytest.raises(moored.MemoryTaken):
            session.play("y")
        # What came before it is there.
        assert len(await taken(session, 1)) == 1
        with pytest.raises(moored.MemoryTaken) as caught:
            await taken(session, 1)
        assert caught.value.needed_bytes == 5

    both(use)  # it was told, and is not raised again


def test_an_end_that_nobody_was_told_of(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        talk.say(lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "gone"))

    with pytest.raises(moored.ConnectionFailed, match="lost"):
        both(use)


def test_the_end_of_the_service(service: Service, address: str) -> None:
    """A connection that drops."""
    other = Service()
    talk = talk_on(other, only_opens)
    server, address = other.start()
    with moored.Client(address) as client, client.audio_session() as session:
        segment = session.play("x")
        assert talk.wait_heard(lambda heard: len(heard) == 2)
        server.stop(None)
        with pytest.raises(moored.MooredError) as caught:
            list(session)
        assert isinstance(caught.value, (moored.ConnectionFailed, moored.Cancelled))
        with pytest.raises(type(caught.value)):
            segment.wait(WAIT_S)


@pytest.mark.parametrize(
    ("why", "error"), [("idle", moored.Cancelled), ("shutting_down", moored.ShuttingDown)]
)
def test_the_service_ends_it(service: Service, both: Both, why: str, error: type) -> None:
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        segment = session.play("x")
        talk.say(chunk(0), closed(why, samples=CHUNK, gaps=2, gap_ms=1500), END)
        assert len([one async for one in items(session)]) == 1
        assert session.report.reason == why
        assert (session.report.gaps, session.report.gap_seconds) == (2, 1.5)
        with pytest.raises(error, match=why):
            await now(segment.wait(WAIT_S))
        with pytest.raises(error, match=why):
            session.play("y")
        assert (await now(session.close())).reason == why

    both(use)


def test_an_end_without_a_report(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        talk.end()
        with pytest.raises(moored.InternalError, match="without a report"):
            await taken(session, 1)

    both(use)


def test_leaving_by_an_error_ends_the_call(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)
    left = []

    async def use(session: Any, now: Any) -> None:
        left.append(session.play("x"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        both(use)
    assert talk.gone.wait(WAIT_S)
    assert "close" not in kinds(talk)
    assert left[0].state == "failed"


def test_a_session_that_is_not_open(address: str) -> None:
    with moored.Client(address) as client:
        session = client.audio_session()
        for use in (
            lambda: session.play("x"),
            lambda: session.opened,
            lambda: next(iter(session)),
            lambda: session.played(0),
            session.close,
        ):
            with pytest.raises(RuntimeError, match="not open"):
                use()


def test_a_session_is_opened_once(service: Service, client: moored.Client) -> None:
    talk_on(service)
    session = client.audio_session()
    assert session.open() is session
    with pytest.raises(RuntimeError, match="before"):
        session.open()
    session.close()


def test_after_the_close(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        await now(session.close())
        with pytest.raises(moored.Cancelled, match="closed"):
            session.play("x")

    both(use)
    assert kinds(talk) == ["open", "close"]


def test_a_service_that_does_not_end_it(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = talk_on(service, lambda one: [opened()] if one.WhichOneof("message") == "open" else [])
    for module in ("_sessions", "_async_sessions"):
        monkeypatch.setattr(f"moored.{module}.QUICK_S", 0)

    async def use(session: Any, now: Any) -> None:
        with pytest.raises(moored.Deadline, match="did not end"):
            await now(session.close())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        both(use)
    assert talk.gone.wait(WAIT_S)


# The play head, and signs of life.


def heads(talk: Talk) -> list[int]:
    return [one.played.sample for one in talk.heard if one.WhichOneof("message") == "played"]


def test_a_paced_session_says_what_was_taken(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        session.play("x")
        # The reader comes for a second and a third chunk: so it has played those before.
        await now(session.play("y").wait(WAIT_S))
        await taken(session, 3)

    both(use, paced=True)
    assert heads(talk) == [CHUNK, 2 * CHUNK]


def test_a_session_by_the_clock_does_not(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))
        await taken(session, 2)

    both(use)
    assert heads(talk) == []


def test_what_is_told_counts_alone(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))
        session.played(17)
        await taken(session, 2)
        with pytest.raises(moored.InvalidRequest, match="sample: -1"):
            session.played(-1)

    both(use, paced=True)
    assert heads(talk) == [17]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(_conversation, "now", lambda: self.now_s)


def test_who_takes_sound_is_alive(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    talk = talk_on(service, Player(idle_seconds=30))

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))
        await taken(session, 1)
        clock.now_s += 9.9  # not yet a third
        await taken(session, 1)
        clock.now_s += 0.2
        session.play("y")  # is heard as well
        clock.now_s += 9.9
        await taken(session, 1)
        clock.now_s += 0.2
        await taken(session, 1)

    both(use)
    assert kinds(talk) == ["open", "segment", "segment", "played", "close"]
    assert heads(talk) == [3 * CHUNK]


def test_who_waits_for_a_segment_is_alive(service: Service, both: Both) -> None:
    def answer(message: Any) -> list[Any]:
        if message.WhichOneof("message") == "played":
            return [ready(1)]  # only a sign of life brings it
        if message.WhichOneof("message") == "open":
            return [opened(idle_seconds=1)]
        return only_opens(message)

    talk = talk_on(service, answer)

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))

    both(use)
    assert heads(talk)[0] == 0


def test_who_waits_for_sound_is_alive(service: Service, both: Both) -> None:
    def answer(message: Any) -> list[Any]:
        kind = message.WhichOneof("message")
        if kind == "open":
            return [opened(idle_seconds=1)]
        return [chunk(0)] if kind == "played" else only_opens(message)

    talk_on(service, answer)

    async def use(session: Any, now: Any) -> None:
        assert len(await taken(session, 1)) == 1

    both(use)


def test_who_does_neither_falls_silent(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        clock.now_s += 1000
        talk.say(chunk(0), chunk(1))  # what the service says is no sign of the client's life
        await until(lambda: session._said._unread_bytes == 2 * CHUNK * CHANNELS * 2)
        assert kinds(talk) == ["open"]

    both(use)


# Threads and tasks.


def test_one_thread_iterates_while_others_play(service: Service, client: moored.Client) -> None:
    player, threads = Player(), 4
    talk = talk_on(service, player)
    with client.audio_session() as session:
        numbers: list[int] = []

        def play() -> None:
            for _ in range(10):
                segment = session.play("x").wait(WAIT_S)
                # Numbers are in the order in which the service heard of them.
                assert segment.seed == segment.number + 40
                numbers.append(segment.number)

        players = [threading.Thread(target=play) for _ in range(threads)]
        for one in players:
            one.start()
        chunks = []
        for one in session:
            chunks.append(one)
            if len(chunks) == 2 * 10 * threads:
                break
        for each in players:
            each.join()
        assert sorted(numbers) == list(range(1, 10 * threads + 1))
        assert [one.first_sample for one in chunks] == [n * CHUNK for n in range(len(chunks))]
    assert kinds(talk).count("segment") == 10 * threads


def test_close_in_another_thread(service: Service, client: moored.Client) -> None:
    talk = talk_on(service)
    with client.audio_session() as session:
        reports = []

        def close() -> None:
            talk.wait_heard(lambda heard: len(heard) == 2)
            reports.append(session.close())

        closer = threading.Thread(target=close)
        closer.start()
        session.play("x")
        assert len(list(session)) == 2
        closer.join()
        assert reports == [session.report]


def test_closing_the_client(service: Service, address: str) -> None:
    talk = talk_on(service)
    client = moored.Client(address)
    session = client.audio_session().open()
    segment = session.play("x").wait(WAIT_S)
    client.close()
    assert talk.gone.wait(WAIT_S)
    with pytest.raises(moored.Cancelled):
        list(session)
    assert segment.state == "ready"
    with pytest.raises(RuntimeError, match="The client is closed"):
        client.audio_session().open()


def test_async_closing_the_client(service: Service, address: str) -> None:
    talk = talk_on(service)

    async def main() -> None:
        client = moored.AsyncClient(address)
        session = await client.audio_session().open()
        reader = asyncio.create_task(taken(session, 1))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(moored.Cancelled):
            await reader
        assert await asyncio.to_thread(talk.gone.wait, WAIT_S)

    asyncio.run(main())


def test_a_cancelled_task_ends_the_session(service: Service, address: str) -> None:
    talk = talk_on(service)

    async def use(client: moored.AsyncClient) -> None:
        async with client.audio_session() as session:
            async for _ in session:
                pass

    async def main() -> None:
        async with moored.AsyncClient(address) as client:
            task = asyncio.create_task(use(client))
            assert await asyncio.to_thread(talk.wait_heard, lambda heard: len(heard) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(talk.gone.wait, WAIT_S)

    asyncio.run(main())


def test_a_wait_that_is_cancelled_ends_itself_alone(service: Service, address: str) -> None:
    talk = talk_on(service, only_opens)

    async def main() -> None:
        async with (
            moored.AsyncClient(address) as client,
            client.audio_session() as session,
        ):
            segment = session.play("x")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(segment.wait(), 0.01)
            talk.say(ready(1))
            await segment.wait(WAIT_S)

    asyncio.run(main())


def test_a_session_that_nobody_refers_to(service: Service, client: moored.Client) -> None:
    talk = talk_on(service)
    session = client.audio_session().open()
    segment = session.play("x")
    del session
    gc.collect()
    assert talk.gone.wait(WAIT_S)
    assert segment.number == 1


def test_sound_that_nobody_takes(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept up to a limit, then not read; and it does not keep the session from its end."""
    kept = 3 * CHUNK * CHANNELS * 2
    monkeypatch.setattr(_conversation, "UNREAD_BYTES", kept)
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        talk.say(*(chunk(n) for n in range(50)))
        said = session._said
        await until(lambda: said.is_full)
        assert len(said._unread) == 4
        assert [one.first_sample for one in await taken(session, 10)] == [
            n * CHUNK for n in range(10)
        ]
        assert (await now(session.close())).reason == "closed"
        assert len([one async for one in items(session)]) == 40

    both(use)


# What is played, written down.


def test_what_is_played_can_be_written(service: Service, both: Both, tmp_path: Path) -> None:
    talk_on(service)
    path = tmp_path / "played.wav"

    async def use(session: Any, now: Any) -> None:
        session.play("x")
        with moored.WavWriter(path, session.sample_rate, session.channels) as file:
            for one in await taken(session, 2):
                file.write(one)
                # Each time a whole file, if nothing more should come.
                with wave.open(str(path)) as written:
                    assert written.getnframes() / SAMPLES_PER_SECOND == file.seconds
        file.close()

    both(use)
    with wave.open(str(path)) as written:
        assert written.getparams()[:4] == (CHANNELS, 2, SAMPLES_PER_SECOND, 2 * CHUNK)
        samples = written.readframes(2 * CHUNK)
    assert samples == sound(CHUNK) + sound(CHUNK, CHUNK * CHANNELS)
    with pytest.raises(FileExistsError, match="overwrite"):
        moored.WavWriter(path, 8000, 1)
    moored.WavWriter(path, 8000, 1, overwrite=True).close()


def test_a_wav_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moored._saving._WAV_BYTES", 103)
    with moored.WavWriter(tmp_path / "long.wav", 8000, 2) as file:
        file.write(bytes(100))
        with pytest.raises(ValueError, match="4 GiB"):
            file.write(bytes(4))
    assert (tmp_path / "long.wav").stat().st_size == 144


def test_a_chunk_as_an_array() -> None:
    pytest.importorskip("numpy")
    one = moored.SoundChunk(sound(3), 0, 1, 0, SAMPLES_PER_SECOND, CHANNELS)
    assert one.array.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert one.array.dtype == "int16"
    assert one.sample_count == 3


WORDS = [
    (moored.SegmentAccepted(2, "job-2", 7), "Segment 2: accepted, seed 7"),
    (moored.SegmentProgress(2, moored.Step(3, 8, 0)), "Segment 2: step 3/8"),
    (moored.SoundGap(8000, 250), "No sound for 0.2 s"),
    (moored.SourceReplaced(3), "Segment 3: the new source is in use"),
    (moored.SegmentFailed(2, moored.Superseded("a later one sounds")), "Segment 2: a later one"),
    (moored.AudioSessionClosed("idle", 16000, 3, 2, 1500), "Closed (idle), 3 segments, 2 gaps"),
]


@pytest.mark.parametrize(("one", "words"), WORDS)
def test_events_in_words(one: Any, words: str) -> None:
    assert moored.describe(one).startswith(words)


def test_both_kinds_have_the_same_methods() -> None:
    def surface(cls: type) -> dict[str, list[str]]:
        return {
            name: [str(one) for one in inspect.signature(thing).parameters.values()]
            for kind in reversed(cls.__mro__)
            for name, thing in vars(kind).items()
            if name[0] != "_" and callable(thing)
        }

    assert surface(moored.AudioSession) == surface(moored.AsyncAudioSession)
    assert surface(moored.Segment) == surface(moored.AsyncSegment)


def test_every_message_of_a_session_is_known() -> None:
    from moored import _session_events

    oneof = generation_pb2.StreamAudioResponse.DESCRIPTOR.oneofs_by_name["message"]
    by_hand = {"sound", "progress", "ready", "failed"}
    assert {field.name for field in oneof.fields} == by_hand | set(_session_events._MIRRORED)
    renamed = {
        "lead_ms": "lead_s",
        "crossfade_ms": "crossfade_s",
        "idle_seconds": "idle_s",
        "paced_by_client": "paced",
    }
    asked = set(generation_pb2.OpenAudioSession.DESCRIPTOR.fields_by_name)
    asked = {renamed.get(name, name) for name in asked}
    queueing = set(generation_pb2.JobOptions.DESCRIPTOR.fields_by_name)
    renamed = {"patience_ms": "patience_s"}
    queueing = {renamed.get(name, name) for name in queueing} - {"idempotency_key", "detach"}
    own = asked - {"model", "source_media_id", "options"} | {"adapters"}
    assert set(moored.SessionOptions.__annotations__) == own | queueing
