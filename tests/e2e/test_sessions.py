"""Sessions of sound: one endless track, whatever happens to segments, models, workers and clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import moored
import numpy as np
import pytest
from faults import assert_at_rest, kill_worker, running
from http2 import DATA, Http2, message
from moored._generated import generation_pb2 as pb
from moored._generated import generation_pb2_grpc, model_pb2
from numpy.typing import NDArray
from test_media import slow_decoders
from test_put_media import wav
from waiting import DEADLINE_S, until

from service import INSTANT_MODELS, Service

Simulate = Callable[..., Service]

# As tests/models/instant says.
RATE, CHANNELS, SECONDS = 48_000, 2, 2.0
SAMPLES = round(RATE * SECONDS)
# Enough that a busy machine is not in the way of what is tested.
LEAD_S = 1.0


def session(client: moored.Client, **options: Any) -> moored.AudioSession:
    """A session of the instant model; its play head goes as fast as its test takes chunks."""
    settings: dict[str, Any] = {
        "model": "track",
        "lead_s": LEAD_S,
        "paced": True,
        "crossfade_s": 0.0,
    }
    return client.audio_session(**settings | options)


def take(chunks: Iterator[moored.SoundChunk], seconds: float) -> list[moored.SoundChunk]:
    """Chunks of at least so many seconds, which follow each other."""
    taken: list[moored.SoundChunk] = []
    while sum(len(chunk.array) for chunk in taken) < seconds * RATE:
        taken.append(next(chunks))
    for chunk, after in pairwise(taken):
        assert after.first_sample == chunk.first_sample + len(chunk.array)
    return taken


def take_until(chunks: Iterator[moored.SoundChunk], segment: int) -> moored.SoundChunk:
    """The first chunk of a segment, after less than half a minute of others."""
    for chunk in chunks:
        if chunk.segment == segment:
            return chunk
        assert chunk.first_sample < 30 * RATE, f"{chunk} instead of {segment}"
    raise AssertionError("the session ended")


def sound(chunks: list[moored.SoundChunk]) -> NDArray[np.int16]:
    return np.concatenate([chunk.array for chunk in chunks])


def held(client: moored.Client) -> bool:
    return any(one.held for card in client.status().cards for one in card.residents)


# What sounds.


@pytest.mark.parametrize("slots", [1, 4])
def test_segments_follow_each_other_and_the_last_is_repeated(
    simulate: Simulate, slots: int
) -> None:
    with simulate().client() as client:
        alone = [client.generate_audio(f"drum {n}", model="track", seed=n).array for n in range(3)]
        with session(client, slots=slots) as live:
            assert (live.sample_rate, live.channels, live.opened.slots) == (RATE, CHANNELS, slots)
            played = [live.play(f"drum {n}", seed=n) for n in range(3)]
            for segment in played:
                segment.wait(60)
            heard = sound(take(iter(live), 3.5 * SECONDS))
            assert [segment.seed for segment in played] == [0, 1, 2]
            assert all(segment.sample_count == SAMPLES for segment in played)
            for n in range(3):
                part = heard[n * SAMPLES : (n + 1) * SAMPLES]
                edge = slice(50, -50)  # what is repeated begins and ends softly
                assert (part[edge] == alone[n][edge]).all(), n
            again = heard[3 * SAMPLES :]
            assert (again == alone[2][: len(again)]).all(), "the last one, from its beginning"
        report = live.report
        assert report is not None
        assert (report.reason, report.segments, report.gaps) == ("closed", 3, 0)
        assert_at_rest(client)


def test_a_segment_at_once_starts_at_the_current_position_and_supersedes_queued_ones(
    simulate: Simulate,
) -> None:
    with simulate().client() as client, session(client, crossfade_s=0.05) as live:
        chunks = iter(live)
        live.play("one", seed=1).wait(60)
        before = take(chunks, 0.5)
        live.play("two", seed=2)
        now = live.play("three", seed=3, at="now").wait(60)
        events = take_events(live, now.number)
        superseded = [event for event in events if isinstance(event, moored.SegmentFailed)]
        assert [type(event.error) for event in superseded] == [moored.Superseded]
        first = next(chunks)
        assert first.segment == 3
        expected = first.first_sample % SAMPLES
        assert first.first_sample_of_segment == expected, "the same place of another version"
        assert before[0].segment == 1
        assert now.state == "ready"
        alone = client.generate_audio("three", model="track", seed=3).array
        last = take(chunks, 0.2)[-1]
        place = last.first_sample_of_segment
        assert (last.array[:100] == alone[place : place + 100]).all(), (last, place)
        restart = live.play("four", seed=4, at="now_from_start").wait(60)
        assert take_until(chunks, restart.number).first_sample_of_segment == 0


def test_a_fade_has_no_jump_in_amplitude(simulate: Simulate) -> None:
    with simulate().client() as client, session(client, crossfade_s=0.2) as live:
        chunks = iter(live)
        live.play("one", seed=1).wait(60)
        live.play("two", seed=2).wait(60)
        heard = sound(take(chunks, 2 * SECONDS - 0.3)).astype(int)
        levels = heard[1000], heard[-1000]
        assert (abs(levels[0] - levels[1]) > 100).any(), "two that can be told from each other"
        assert np.abs(np.diff(heard, axis=0)).max() < 20, "65,536 levels in 9,600 samples"


def test_once_ends_in_silence_and_goes_on_with_the_next(simulate: Simulate) -> None:
    with simulate().client() as client, session(client, once=True) as live:
        live.play("one", seed=1).wait(60)
        chunks = iter(live)
        assert len(sound(take(chunks, SECONDS))) == SAMPLES
        live.play("two", seed=2)
        following = next(chunks)
        assert (following.segment, following.first_sample) == (2, SAMPLES)
        assert live.close().gaps == 0, "silence that was asked for"


def test_a_segment_of_a_session_is_the_track_of_a_call(simulate: Simulate) -> None:
    with simulate().client() as client, session(client) as live:
        asked: dict[str, Any] = {"lyrics": "la", "seconds": 1.5, "steps": 2, "seed": 11}
        live.play("a drum", **asked).wait(60)
        heard = sound(take(iter(live), 1.0))
        alone = client.generate_audio("a drum", model="track", **asked).array
        assert (heard[:RATE] == alone[:RATE]).all()


# Sources and models.


def tone(level: int) -> bytes:
    """What the instant family hears as a colour."""
    return wav(level, -level, seconds=1.0)


def test_a_source_is_brought_once_and_replaced_while_the_old_one_sounds(simulate: Simulate) -> None:
    with simulate().client() as client, session(client, source=tone(2000)) as live:
        chunks = iter(live)
        live.play("x", seed=1, strength=0.5).wait(60)
        take(chunks, 0.3)
        failing = live.replace_source("media-that-is-not-there")
        with pytest.raises(moored.InvalidRequest) as refused:
            failing.wait(60)
        assert [problem.field for problem in refused.value.violations] == ["source"]
        replaced = live.replace_source(tone(-9000))
        events = take_events(live, replaced.number, moored.SourceReplaced)
        gaps = [event for event in events if isinstance(event, moored.SoundGap)]
        assert gaps == []
        alone = client.generate_audio(
            "x", model="track", seed=1, strength=0.5, init_media=client.put_media(tone(-9000))
        ).array
        heard = sound(take(chunks, 0.2))
        assert (heard[-1] == alone[len(alone) // 2]).all()


def take_events(
    live: moored.AudioSession, segment: int, *also: type[moored.SessionEvent]
) -> list[moored.SessionEvent]:
    """Events until a segment is ready, and sounds, and each of these has come."""
    seen: list[moored.SessionEvent] = []
    for event in live.events():
        seen.append(event)
        is_ready = any(isinstance(e, moored.SegmentReady) and e.segment == segment for e in seen)
        sounds = isinstance(event, moored.SoundChunk) and event.segment == segment
        if is_ready and sounds and all(any(isinstance(e, kind) for e in seen) for kind in also):
            return seen
    raise AssertionError(f"the session ended: {seen}")


def test_a_new_model_is_proven_before_it_sounds(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate(arguments=slow_decoders(tmp_path, 50))
    with service.client() as client, session(client) as live:
        live.play("x", seed=1).wait(60)
        chunks = iter(live)
        take(chunks, 0.3)
        for unfit, error in (("nope", moored.ModelNotFound), ("small", moored.InvalidRequest)):
            with pytest.raises(error):
                live.replace_model(unfit).wait(60)
            assert live.model.id == "track"
        replaced = live.replace_model("slow-track")
        take_events(live, replaced.number, moored.ModelReplaced)
        assert live.model.id == "slow-track"
        following = live.play("y", seed=2)
        following.wait(60)
        assert {
            job.model_key for job in client.jobs(include_ended=True) if job.id == following.job_id
        } == {"slow-track+full"}


def broken_models(folder: Path) -> tuple[str, ...]:
    """Settings with two models that prove themselves in one step, and fail in the second."""
    models = folder / "models"
    models.mkdir()
    model = json.loads((INSTANT_MODELS / "track.instant.json").read_text(encoding="utf-8"))
    for name in ("broken-one", "broken-two"):
        broken = json.dumps(model | {"name": name, "not_finite_at_step": 2})
        (models / f"{name}.instant.json").write_text(broken, encoding="utf-8")
    return ("--models", str(models))


def test_replacements_that_fail_one_after_another_leave_what_is_proven(
    simulate: Simulate, tmp_path: Path
) -> None:
    service = simulate(arguments=broken_models(tmp_path))
    with service.client() as client, session(client) as live:
        first = live.play("x").wait(60)
        failing = [live.replace_model("broken-one"), live.replace_model("broken-two")]
        for one in failing:
            with pytest.raises(moored.NotFinite):
                one.wait(60)
        assert live.model.id == "track"
        again = live.play("y").wait(60)
        same = live.replace_model("track").wait(60)
        assert (again.seed, same.seed) == (same.seed, again.seed), "the last, as it was"
        assert first.seed != again.seed
        # The model is held as before, under whatever hold.
        time.sleep(0.2)
        assert held(client)


def test_a_refused_segment_is_not_what_is_made_anew(simulate: Simulate) -> None:
    with simulate().client() as client, session(client) as live:
        good = live.play("x", strength=0.5).wait(60)
        with pytest.raises(moored.InvalidRequest):
            live.play("x", seconds=-1.0).wait(60)
        replaced = live.replace_source(tone(3000)).wait(60)
        assert replaced.seed == good.seed


# Faults.


def test_playing_sound_survives_the_death_of_its_worker(simulate: Simulate) -> None:
    with simulate().client() as client, session(client) as live:
        live.play("one", seed=1).wait(60)
        chunks = iter(live)
        take(chunks, 0.3)
        kill_worker(client)
        coming = live.play("two", seed=2)
        take(chunks, 2 * SECONDS)
        coming.wait(60)
        take_until(chunks, coming.number)
        assert live.close().gaps == 0


def test_a_session_has_no_gap_beside_a_job_of_another_client(simulate: Simulate) -> None:
    """By the clock this time: what a listener would hear, if the machine is not held up for five seconds."""
    service = simulate()
    with service.client() as client, session(client, paced=False, slots=2, lead_s=5.0) as live:
        chunks = iter(live)
        live.play("one", seed=1).wait(60)
        with service.client(client_id="another") as another, running(another):
            coming = live.play("two", seed=2, at="now")
            heard = take(chunks, 7.0)  # more than is sent ahead
            assert {chunk.segment for chunk in heard} == {1}, "the card is another's"
        coming.wait(60)
        take_until(chunks, 2)
        assert live.close().gaps == 0


def test_a_client_that_falls_silent_loses_its_session_and_nothing_is_left(
    simulate: Simulate,
) -> None:
    with simulate().client() as client:
        live = session(client, idle_s=5)
        live.open()
        live.play("one", seed=1)
        until(client, lambda status: any(one.held for one in status.cards[0].residents))
        until(client, lambda status: not any(one.held for one in status.cards[0].residents))
        list(live.events())
        assert live.report is not None
        assert live.report.reason == "idle"
        assert_at_rest(client)


def test_a_client_that_dies_leaves_nothing(simulate: Simulate) -> None:
    service = simulate()
    program = f"""
        import moored
        with moored.Client({service.address!r}) as client:
            live = client.audio_session("slow-track", slots=2).open()
            for n in range(4):
                live.play("x", steps=200)
            for event in live.events():
                print(type(event).__name__, flush=True)
    """
    dying = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program).replace("slow-track", "track")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert dying.stdout is not None
    with service.client() as client:
        try:
            until(client, lambda status: status.cards[0].job_id != "")
            assert held(client)
        finally:
            os.kill(dying.pid, signal.SIGKILL)
            dying.wait(10)
            dying.stdout.close()
        until(client, lambda status: not any(one.held for one in status.cards[0].residents))
        assert_at_rest(client)


def test_a_stopping_service_reports_shutting_down(simulate: Simulate) -> None:
    service = simulate()
    with service.client() as client:
        live = session(client, paced=False).open()
        live.play("one", seed=1).wait(60)
        service.process.send_signal(signal.SIGTERM)
        list(live.events())
        assert live.report is not None
        assert live.report.reason == "shutting_down"
        assert service.process.wait(30) == 0


# Bad input.


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"lead_s": 0.05}, {"lead_ms"}),
        ({"lead_s": 61.0, "slots": 9}, {"lead_ms", "slots"}),
        ({"crossfade_s": 5.5, "idle_s": 4000}, {"crossfade_ms", "idle_s"}),
        ({"source": "media-none"}, {"source"}),
        ({"model": "small"}, {"model"}),
    ],
)
def test_wrong_session_options_are_refused_by_field(
    simulate: Simulate, options: dict[str, Any], fields: set[str]
) -> None:
    with simulate().client() as client:
        with pytest.raises(moored.InvalidRequest) as refused:
            session(client, **options).open()
        assert {problem.field for problem in refused.value.violations} == fields
        assert not held(client)
        assert_at_rest(client)


def raw(service: Service, *messages: pb.StreamAudioRequest) -> Iterator[pb.StreamAudioResponse]:
    """A session as it goes over the wire, which half-closes behind these."""
    with grpc.insecure_channel(service.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        yield from stub.StreamAudio(iter(messages), timeout=30)


def opening() -> pb.StreamAudioRequest:
    model = model_pb2.ModelRef(id="track")
    return pb.StreamAudioRequest(open=pb.OpenAudioSession(model=model))


def segment(**fields: Any) -> pb.StreamAudioRequest:
    return pb.StreamAudioRequest(segment=pb.AudioSegment(track=pb.GenerateAudioRequest(**fields)))


@pytest.mark.parametrize("messages", [[], [segment(prompt="x")], [opening(), opening()]])
def test_a_session_is_opened_first_and_once(
    simulate: Simulate, messages: list[pb.StreamAudioRequest]
) -> None:
    service = simulate()
    with pytest.raises(grpc.RpcError) as refused:
        list(raw(service, *messages))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith("open: ")
    with service.client() as client:
        assert_at_rest(client)


def test_a_too_long_message_ends_the_session_with_the_limit(simulate: Simulate) -> None:
    service = simulate()
    with pytest.raises(grpc.RpcError) as refused:
        list(raw(service, opening(), segment(lyrics="x" * (2 << 20))))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "262144" in refused.value.details()
    with service.client() as client:
        assert_at_rest(client)


def test_a_segment_that_is_wrong_fails_alone(simulate: Simulate) -> None:
    """Each is told by its field, and the session goes on."""
    service = simulate()
    wrong: list[tuple[dict[str, Any], set[str]]] = [
        ({"seconds": -1.0}, {"seconds"}),
        ({"seconds": float("nan")}, {"seconds"}),
        ({"steps": 100_000}, {"steps"}),
        ({"task": pb.AudioTask.COVER}, {"init_media_id"}),
        ({"count": 2, "latent_only": True}, {"count", "latent_only"}),
        ({"model": model_pb2.ModelRef(id="video")}, {"model.id"}),
        ({"init_media_id": "x", "output": 2}, {"init_media_id", "output"}),
        ({"strengths": [pb.StrengthAt(seconds=0, strength=2)]}, {"strengths"}),
        ({"prompt": "x" * 10_001}, {"prompt"}),
    ]
    messages = [opening(), *(segment(**fields) for fields, _ in wrong), pb.StreamAudioRequest()]
    answers = list(raw(service, *messages))
    # The stream was half closed at once: what had not been answered by then is not.
    failed = {a.failed.segment: a.failed for a in answers if a.WhichOneof("message") == "failed"}
    assert answers[-1].closed.reason == "closed"
    for number, told in failed.items():
        assert {problem.field for problem in told.problems} == wrong[number - 1][1]
    with service.client() as client, session(client) as live:
        with pytest.raises(moored.InvalidRequest) as refused:
            live.play("x", seconds=-1.0).wait(60)
        assert {problem.field for problem in refused.value.violations} == {"seconds"}
        live.play("x", seed=1).wait(60)
        assert take(iter(live), 0.1)


def test_more_than_32_waiting_segments_are_refused(simulate: Simulate) -> None:
    with simulate().client() as client, session(client) as live:
        asked = [live.play("x", steps=200) for _ in range(33)]
        with pytest.raises(moored.ClientLimit):
            asked[-1].wait(60)
        assert {one.state for one in asked[:-1]} <= {"sent", "accepted"}
    with simulate().client() as client:
        assert_at_rest(client)


def test_sound_beyond_the_bound_of_a_client_fails_that_segment(
    simulate: Simulate, tmp_path: Path
) -> None:
    config = tmp_path / "bounds.toml"
    config.write_text('[limits]\nresults_per_client = "1MiB"\n', encoding="utf-8")
    with simulate(arguments=("--config", str(config))).client() as client, session(client) as live:
        with pytest.raises(moored.ClientLimit) as refused:
            live.play("x", seconds=60.0).wait(60)
        assert "limits.results_per_client" in str(refused.value)
        live.play("x", seconds=1.0, seed=1).wait(60)
        assert take(iter(live), 0.1)


def test_the_hold_of_a_client_that_stops_reading_ends(simulate: Simulate) -> None:
    service = simulate()
    messages: list[pb.StreamAudioRequest] = [
        pb.StreamAudioRequest(
            open=pb.OpenAudioSession(
                model=model_pb2.ModelRef(id="track"), idle_seconds=5, lead_ms=60_000
            )
        ),
        segment(prompt="x", seconds=10.0),
    ]

    over = threading.Event()

    def slow() -> Iterator[pb.StreamAudioRequest]:
        yield from messages
        over.wait(DEADLINE_S)

    with grpc.insecure_channel(service.address) as channel, service.client() as client:
        stub = generation_pb2_grpc.GenerationStub(channel)
        call = stub.StreamAudio(slow())
        assert next(iter(call)).opened.lead_ms == 60_000
        until(client, lambda status: any(one.held for one in status.cards[0].residents))
        until(client, lambda status: not any(one.held for one in status.cards[0].residents))
        call.cancel()
        over.set()
        assert_at_rest(client)


def test_a_gap_is_reported_once_however_long_its_client_does_not_read(simulate: Simulate) -> None:
    connection = Http2(simulate().address, window=10_000)  # of bytes that nobody reads
    try:
        stream = connection.call("Generation/StreamAudio")
        model = model_pb2.ModelRef(id="track")
        opening = pb.StreamAudioRequest(open=pb.OpenAudioSession(model=model, lead_ms=500))
        # A second sounds by the clock, and at each message the session sees that nothing follows.
        looks = [pb.StreamAudioRequest(played=pb.PlayHead(sample=0))] * 80
        for asked in (opening, segment(prompt="x", seconds=10.0), *looks):
            connection.write(stream, message(asked.SerializeToString()))
            time.sleep(0.025)  # how long it does not read is what is tested
        for one in (0, stream):
            connection.open_window(one)
        asked = pb.StreamAudioRequest(close=pb.CloseAudioSession())
        connection.write(stream, message(asked.SerializeToString()), end=True)
        connection.wait_for(lambda: connection.is_answered(stream))
        told = messages_in(connection.frames[(DATA, stream)])
    finally:
        connection.close()
    gaps = [one.gap for one in told if one.HasField("gap")]
    assert 0 < len(gaps) <= 3, [(gap.at_sample, gap.milliseconds) for gap in gaps]
    assert told[-1].closed.gaps == len(gaps)
    assert sum(gap.milliseconds for gap in gaps) > 500


def messages_in(data: bytes) -> list[pb.StreamAudioResponse]:
    """The messages of a stream's data, each after a head of five bytes."""
    told = []
    while data:
        size = int.from_bytes(data[1:5])
        told.append(pb.StreamAudioResponse.FromString(data[5 : 5 + size]))
        data = data[5 + size :]
    return told


def test_what_sessions_keep_of_messages_counts_against_their_client(simulate: Simulate) -> None:
    service = simulate(
        arguments=(
            "--set",
            "service.max_message=256KiB",
            "--set",
            "limits.uploads_per_client=256KiB",
        )
    )
    over = threading.Event()

    def asked() -> Iterator[pb.StreamAudioRequest]:
        yield opening()
        yield segment(prompt="x", lyrics="🟥" * 10_000, seconds=0.2)
        # Its last message is short: what counts then is what is kept.
        yield pb.StreamAudioRequest(played=pb.PlayHead(sample=0))
        over.wait(DEADLINE_S)

    with grpc.insecure_channel(service.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        refused = ""
        calls = []
        while len(calls) < 60 and not refused:
            calls.append(stub.StreamAudio(asked(), timeout=DEADLINE_S))
            for told in calls[-1]:
                if told.HasField("failed"):
                    refused = told.failed.reason + told.failed.message
                if told.HasField("failed") or told.HasField("ready"):
                    break
        assert refused.startswith("CLIENT_LIMIT"), f"{len(calls)} sessions"
        assert "limits.uploads_per_client" in refused
        over.set()
        for call in calls:
            call.cancel()
    with service.client() as client:
        assert_at_rest(client)
        with session(client) as live:
            live.play("x", lyrics="🟥" * 10_000, seconds=0.2).wait(60)
