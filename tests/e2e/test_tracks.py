"""Tracks as files, brought and sent: WAV and FLAC, tasks and their sources, the command line."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import moored
import numpy as np
import pytest
from faults import assert_at_rest, ended, kill_worker, retries
from numpy.typing import NDArray
from test_media import CHANNELS, SAMPLE_RATE, SAMPLES, SECONDS, slow_decoders
from test_put_media import NEARLY_NONE, chunk, put_raw, refused_fields, wav
from waiting import until

from service import Service

Simulate = Callable[..., Service]
Samples = NDArray[np.int16]


def read(file: bytes) -> tuple[Samples, int, dict[str, str]]:
    """A track as FFmpeg reads it: samples, their rate, and what the file says of itself."""
    with av.open(io.BytesIO(file)) as container:
        (stream,) = container.streams
        resampler = av.AudioResampler(format="s16")
        frames = [one for frame in container.decode(stream) for one in resampler.resample(frame)]
        channels = stream.codec_context.channels
        samples = np.concatenate([frame.to_ndarray().reshape(-1, channels) for frame in frames])
        return (
            samples,
            stream.codec_context.sample_rate,
            {name.upper(): text for name, text in (container.metadata | stream.metadata).items()},
        )


def flac(samples: Samples, rate: int = 8000) -> bytes:
    """A FLAC of FFmpeg's."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        layout = "mono" if samples.shape[1] == 1 else "stereo"
        stream = container.add_stream("flac", rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate = rate
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return file.getvalue()


def riff(kind: int, bits: int, data: bytes, channels: int = 2, rate: int = 8000) -> bytes:
    """A WAV of this kind: 1 is PCM, 3 has a point."""
    unit = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * unit, unit, bits)
    chunks = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(data))
    return b"RIFF" + struct.pack("<I", len(chunks) + len(data)) + chunks + data


def two_tones(seconds: float = 0.5, rate: int = 8000) -> Samples:
    """What the instant family hears as a colour: one sample for each channel."""
    return np.tile(np.array([[2000, -3000]], "<i2"), (round(seconds * rate), 1))


# Sent.


def test_a_track_as_flac_is_the_track(simulate: Simulate, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"model": "track", "seed": 7, "lyrics": "la\nlä"}
    with simulate().client() as client:
        samples = client.generate_audio("a drum – ü", **asked).array
        stream = client.stream_audio("a drum – ü", output="flac", **asked)
        pieces = [event for event in stream if isinstance(event, moored.Artifact)]
        result = stream.result()
        assert {piece.media_type for piece in pieces} == {"audio/flac"}
        assert pieces[0].total_bytes == len(result.flac)
        assert pieces[0].audio == moored.AudioTrackFormat(SAMPLE_RATE, CHANNELS, SAMPLES)
        shown, rate, said = read(result.flac)
        assert (shown == samples).all()
        assert (rate, result.sample_rate, result.track().sample_count) == (
            SAMPLE_RATE,
            SAMPLE_RATE,
            SAMPLES,
        )
        assert said["ENCODER"].startswith("moored ")
        recipe = json.loads(said["COMMENT"])
        assert recipe == result.track().recipe
        assert (recipe["prompt"], recipe["lyrics"]) == ("a drum – ü", "la\nlä")
        result.save(tmp_path / "track.flac")
        assert moored.read_recipe(tmp_path / "track.flac") == recipe
        bare = client.generate_audio("a drum", output="flac", omit_metadata=True, **asked)
        assert "COMMENT" not in read(bare.flac)[2]
        assert_at_rest(client)


@pytest.mark.parametrize("output", ["wav", "raw"])
def test_a_wav_has_its_recipe_whoever_writes_it(
    simulate: Simulate, tmp_path: Path, output: moored.AudioOutput
) -> None:
    with simulate().client() as client:
        result = client.generate_audio("a drum – ü", model="track", seed=7, output=output)
        result.save(tmp_path / "track.wav")
        samples, _, said = read((tmp_path / "track.wav").read_bytes())
        assert (samples == result.array).all()
        assert json.loads(said["COMMENT"]) == result.track().recipe
        assert moored.read_recipe(tmp_path / "track.wav") == result.track().recipe


def test_streams_of_one_job_get_the_same_flac_and_a_worker_may_die(
    simulate: Simulate, tmp_path: Path
) -> None:
    with simulate(arguments=slow_decoders(tmp_path, 1000)).client() as client:
        asked: dict[str, Any] = {"model": "slow-track", "output": "flac", "seed": 3}
        with client.stream_audio("x", idempotency_key="k", **asked) as first:
            for event in first:
                if isinstance(event, moored.StageStarted) and event.name == "decode":
                    break
            with client.stream_audio("x", idempotency_key="k", **asked) as second:
                file = second.result().flac
            assert first.result().flac == file
        assert len(read(file)[0]) == SAMPLES
        with client.stream_audio("x", **asked) as stream:
            events = []
            for event in stream:
                events.append(event)
                if isinstance(event, moored.StageStarted) and event.name == "decode":
                    if not retries(events):
                        kill_worker(client)
            assert stream.result().flac == file
            assert retries(events)
        with client.stream_audio("x", **asked) as stream:
            for event in stream:
                if isinstance(event, moored.StageStarted) and event.name == "decode":
                    break
        until(client, lambda status: status.jobs == ())
        assert ended(client, stream.job_id).state == "cancelled"
        assert_at_rest(client)


def test_encoded_tracks_are_bounded(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "limits.results_per_client=100B"))
    with service.client() as client, pytest.raises(moored.ClientLimit, match="results_per_client"):
        client.generate_audio("x", model="track", output="flac")


# Brought.


@pytest.mark.parametrize("form", ["16", "24", "32", "point", "flac", "array", "floats"])
def test_tracks_of_every_kind_start_a_track(simulate: Simulate, form: str) -> None:
    tones = two_tones()
    wide = tones.astype("<i4")
    with_point = (tones / 2**15).astype("<f4")
    files = {
        "16": lambda: riff(1, 16, tones.tobytes()),
        "24": lambda: riff(1, 24, (wide << 8).view("u1").reshape(-1, 4)[:, :3].tobytes()),
        "32": lambda: riff(1, 32, (wide << 16).tobytes()),
        "point": lambda: riff(3, 32, with_point.tobytes()),
        "flac": lambda: flac(tones),
        "array": lambda: tones,
        "floats": lambda: with_point,
    }
    media = files[form]()
    rate = {"sample_rate": 8000} if isinstance(media, np.ndarray) else {}
    with simulate().client() as client:
        info = client.put_media(media, **rate)
        assert info.audio == moored.AudioTrackFormat(8000, 2, len(tones))
        assert info.bytes == tones.nbytes, "16 bits are kept"
        near = client.generate_audio("x", model="track", init_media=info, strength=NEARLY_NONE)
        assert near.array.shape == (SAMPLE_RATE // 2, CHANNELS)
        assert np.abs(near.array.astype(int) - (2000, -3000)).max() <= 100
        assert_at_rest(client)


@pytest.mark.parametrize("output", ["wav", "flac"])
def test_a_generated_track_as_wav_or_flac_starts_another(
    simulate: Simulate, output: moored.AudioOutput
) -> None:
    with simulate().client() as client:
        first = client.generate_audio("a", model="track", seconds=0.3, output=output)
        info = client.put_media(first)
        assert info.media_type == "audio/x-raw-s16le"
        again = client.generate_audio("b", model="track", init_media=info, strength=NEARLY_NONE)
        assert again.track().seconds == pytest.approx(0.3)


NAN = struct.pack("<4f", 0, 0, 0, float("nan"))
THREE_HOURS = 3 * 3600 * 8000


@pytest.mark.parametrize(
    ("sent", "media_type", "why"),
    [
        (b"not a sound at all", "audio/wav", "neither WAV nor FLAC"),
        (b"not a sound at all", "audio/flac", "neither WAV nor FLAC"),
        (b"", "audio/flac", "it has 0 bytes"),
        (riff(1, 16, b""), "audio/wav", "has no samples"),
        (riff(3, 32, NAN), "audio/wav", "no numbers: the first is sample 1 of channel 1"),
        (riff(1, 16, bytes(16), channels=8), "audio/wav", "8 channels"),
        (riff(1, 16, bytes(16), rate=7500), "audio/wav", "7500 samples a second"),
        (riff(1, 8, bytes(THREE_HOURS), channels=1), "audio/wav", "longer than 3600 seconds"),
        (riff(1, 16, bytes(16))[:-4], "audio/wav", "cut off"),
        (riff(7, 8, bytes(16)), "audio/wav", "mu-law; PCM of 8, 16, 24 or 32 bits"),
        (flac(two_tones())[:-20], "audio/flac", "cut off"),
        (flac(two_tones(rate=7500), 7500), "audio/flac", "7500 samples a second"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value.replace(" ", "-"),
)
def test_an_invalid_track_is_refused_with_the_reason(
    simulate: Simulate, sent: bytes, media_type: str, why: str
) -> None:
    with simulate().client() as client:
        pieces = [sent[at : at + 2**20] for at in range(0, len(sent), 2**20)] or [b""]
        first, *rest = pieces
        with pytest.raises(moored.InvalidRequest, match=why) as refused:
            put_raw(client, chunk(first, media_type), *map(chunk, rest))
        assert refused_fields(refused.value) == ["chunk"]
        assert client.put_media(wav(1, 2)).audio


def test_a_small_file_that_decodes_to_much_is_bounded(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "limits.media_per_client=1MiB"))
    silence = flac(np.zeros((8000 * 120, 2), "<i2"))
    assert len(silence) < 100_000
    with service.client() as client:
        with pytest.raises(moored.ClientLimit, match=r"limits\.media_per_client"):
            client.put_media(silence)
        # The whole bound is free again.
        client.put_media(np.zeros((2**18, 2), "<i2"), sample_rate=8000)


# Tasks.


def test_a_task_has_its_source_its_window_and_its_reference(simulate: Simulate) -> None:
    with simulate().client() as client:
        source = client.put_media(two_tones(2.0), sample_rate=8000)
        reference = client.put_media(flac(two_tones()))
        metre: dict[str, Any] = {"bpm": 96, "key": "C major", "time_signature": "3"}
        asked: dict[str, Any] = {"model": "track", "init_media": source, "language": "en"}
        for options, made in [
            ({"task": "repaint", "window": (0.5, 1.5)}, {"window": [0.5, 1.5]}),
            ({"task": "repaint", "window": (0.5, None)}, {"window": [0.5, None]}),
            ({"task": "cover"}, {}),
            ({"task": "extract", "tracks": ["vocals"]}, {"tracks": ["vocals"]}),
            (
                {"task": "lego", "tracks": ["drums"]},
                {"tracks": ["drums"], "window": [0.0, None]},
            ),
            ({"task": "complete", "tracks": ["a", "b"]}, {"tracks": ["a", "b"]}),
        ]:
            result = client.generate_audio("x", reference=reference, **options, **metre, **asked)
            recipe = result.track().recipe
            expected = {**metre, **made, "task": options["task"], "language": "en"}
            assert {name: recipe[name] for name in expected} == expected
            assert {"tracks", "window"} & recipe.keys() == made.keys()
            assert recipe["sounds"] == ["source", "reference"]
            assert result.track().seconds == SECONDS
        points = [(0.0, 1.0), (1.0, 0.5)]
        result = client.generate_audio("x", task="cover", strengths=points, **asked)
        assert result.track().recipe["strengths"] == [list(point) for point in points]
        new = client.generate_audio("x", model="track", seconds=0.2).track().recipe
        assert not {"task", "tracks", "window", "bpm", "sounds", "language"} & new.keys()
        assert_at_rest(client)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"task": "repaint"}, "init_media"),
        ({"task": "cover", "tracks": ["drums"], "init_media": "source"}, "tracks"),
        ({"task": "extract", "init_media": "source"}, "tracks"),
        ({"task": "complete", "tracks": ["a\nb"], "init_media": "source"}, "tracks"),
        ({"window": (0.0, 1.0)}, "window"),
        ({"task": "repaint", "window": (1.0, 0.5), "init_media": "source"}, "window"),
        ({"task": "repaint", "window": (0.0, 0.7), "init_media": "source"}, "window"),
        ({"task": "repaint", "window": (float("nan"), None), "init_media": "source"}, "window"),
        ({"bpm": 0}, "bpm"),
        ({"key": "x" * 65}, "key"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": 4000.0}, "seconds"),
        ({"reference": "media-that-never-was"}, "reference"),
        ({"reference": "picture"}, "reference"),
    ],
)
def test_wrong_options_of_a_task_are_refused_by_field(
    simulate: Simulate, options: dict[str, Any], field: str
) -> None:
    with simulate().client() as client:
        there = {
            "source": client.put_media(two_tones(), sample_rate=8000).id,
            "picture": client.put_media(np.zeros((1, 16, 16, 3), "u1"), frames_per_second=1.0).id,
        }
        given = {
            name: there.get(value, value) if isinstance(value, str) else value
            for name, value in options.items()
        }
        with pytest.raises(moored.InvalidRequest) as refused:
            client.generate_audio("x", model="track", **given)
        assert set(refused_fields(refused.value)) == {field}
        assert client.jobs(include_ended=True) == ()


# On the command line.


def test_the_command_line_plays_and_repeats_tracks(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate()
    here: dict[str, Any] = {"cwd": tmp_path}
    (tmp_path / "song.txt").write_text("[verse]\nlä lä\n", encoding="utf-8")
    play = ("play", "a slow waltz", "-m", "track", "--seed", "7")
    words = ("--lyrics", "song.txt", "--seconds", "0.5", "--bpm", "96", "--key", "C major")
    made = service.run(*play, *words, "--language", "de", "-o", "song.flac", **here)
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == "song.flac"
    assert "step 4 of 4" in made.stderr
    recipe = moored.read_recipe(tmp_path / "song.flac")
    expected = {"lyrics": "[verse]\nlä lä\n", "bpm": 96, "key": "C major", "language": "de"}
    assert {name: recipe[name] for name in expected} == expected
    with service.client() as client:
        asked = client.generate_audio("a slow waltz", model="track", seed=7, seconds=0.5)
    file = (tmp_path / "song.flac").read_bytes()
    assert (read(file)[0] == asked.array).all()
    # Nothing is overwritten unless that is asked for.
    again = service.run(*play, "-o", "song.flac", **here)
    assert again.returncode != 0
    assert "--force" in again.stderr
    assert (tmp_path / "song.flac").read_bytes() == file
    # Its own settings make it again.
    repeated = service.run("generate", "--from", "song.flac", "-o", "again.flac", **here)
    assert repeated.returncode == 0, repeated.stderr
    assert (tmp_path / "again.flac").read_bytes() == file
    # Of a source and a reference, which are named again to repeat it.
    repaint = ("--task", "repaint", "--source", "song.flac", "--from", "0.1", "--to", "0.2")
    other = service.run(*play, *repaint, "--reference", "again.flac", "--json", **here)
    assert other.returncode == 0, other.stderr
    events = [json.loads(line) for line in other.stdout.splitlines()]
    (written,) = [event["path"] for event in events if event["event"] == "written"]
    assert written == "track-7.wav"
    recipe = moored.read_recipe(tmp_path / written)
    assert (recipe["task"], recipe["window"]) == ("repaint", pytest.approx([0.1, 0.2]))
    assert recipe["sounds"] == ["source", "reference"]
    missing = service.run("generate", "--from", written, "-o", "b.wav", **here)
    assert missing.returncode != 0
    assert "--init" in missing.stderr
    sounds = ("--init", "song.flac", "--reference", "again.flac")
    repeated = service.run("generate", "--from", written, *sounds, "-o", "b.wav", **here)
    assert repeated.returncode == 0, repeated.stderr
    assert (tmp_path / "b.wav").read_bytes() == (tmp_path / written).read_bytes()
    lego = ("--task", "lego", "--source", "b.wav", "--track", "drums")
    assert service.run(*play, *lego, "-o", "lego.wav", **here).returncode == 0
    assert moored.read_recipe(tmp_path / "lego.wav")["tracks"] == ["drums"]
    # Media is given back at once.
    with service.client() as client:
        assert_at_rest(client)
    for wrong, why in [
        ((*play, "-o", "song.mp3"), "not as .mp3"),
        ((*play, "--task", "cover"), "--source"),
        (
            (*play, "--source", "song.txt"),
            "song.txt: is neither WAV nor FLAC: convert it, for example by `ffmpeg",
        ),
        ((*play, "--source", "gone.wav"), "gone.wav"),
        ((*play, "--lyrics", "song.flac"), "song.flac"),
        ((*play, "--task", "extract", "--source", "b.wav"), "tracks"),
        ((*play, "--width", "64"), "--width"),
    ]:
        refused = service.run(*wrong, **here)
        assert refused.returncode != 0
        assert why in refused.stderr, refused.stderr
