"""Sessions of sound: what the client says, and what it makes of the service's words."""

from __future__ import annotations

import inspect
import wave
from pathlib import Path
from typing import Any

import pytest
from conftest import Ask
from scripted import CHANNELS, SAMPLES_PER_SECOND, WAIT_S, Service, done, sound
from talks import (
    CHUNK,
    Both,
    accepted,
    failed,
    heard,
    items,
    kinds,
    only_opens,
    ready,
    says,
    taken,
    talk_on,
)

import moored
from moored._generated import generation_pb2


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


def test_the_options_of_a_session_are_sent(service: Service, both: Both) -> None:
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


def test_unset_options_of_a_session_are_not_sent(service: Service, both: Both) -> None:
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


def test_the_options_of_a_segment_are_sent(service: Service, both: Both) -> None:
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
def test_a_wrong_segment_is_refused_by_the_client(
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
        ({"lead_s": float("nan")}, moored.InvalidRequest),
        ({"crossfade_s": float("inf")}, moored.InvalidRequest),
    ],
)
def test_a_wrong_session_option_is_refused_by_the_client(
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


def test_a_wav_over_4_gib_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
