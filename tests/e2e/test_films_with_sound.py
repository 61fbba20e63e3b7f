"""Films with sound: frames and samples through faults, as one MP4, and as latents."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import moored
import numpy as np
import pytest
from faults import assert_at_rest, ended, kill_worker, retries
from numpy.typing import NDArray
from test_media import CHANNELS, FRAMES, RATE, SAMPLE_RATE, SIDE, assert_film
from waiting import until

from service import INSTANT_MODELS, Service

# As long as the frames, to the nearest sample.
SAMPLES = round(FRAMES / RATE * SAMPLE_RATE)
SOUND = moored.AudioTrackFormat(SAMPLE_RATE, CHANNELS, SAMPLES)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service with films that have sound, whole or in sections."""
    folder = tmp_path_factory.mktemp("films")
    models = folder / "models"
    models.mkdir()
    model = json.loads((INSTANT_MODELS / "video.instant.json").read_text(encoding="utf-8"))
    model |= {"sound": True, "steps_ms": 30}
    for name, more in (
        ("talkie", {}),
        ("sections", {"sections": 3}),
        ("slow-talkie", {"steps_ms": 1000}),
    ):
        text = json.dumps(model | more | {"name": name})
        (models / f"{name}.instant.json").write_text(text, encoding="utf-8")
    folders = ("--models", str(INSTANT_MODELS), "--models", str(models))
    service = Service(*folders, state=folder / "state", devices=("sim:24GiB",))
    yield service
    service.kill()


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[moored.Client]:
    """A client of it."""
    with service.client() as client:
        yield client


def pieces_of(events: list[moored.Event], track: str) -> list[moored.Artifact]:
    """The pieces of a track."""
    return [one for one in events if isinstance(one, moored.Artifact) and one.track == track]


def assert_heard(track: moored.Track | None) -> NDArray[np.int16]:
    """The sound of an instant film is one tone in each channel."""
    assert track is not None
    assert (track.sample_rate, track.channels, track.sample_count) == (
        SAMPLE_RATE,
        CHANNELS,
        SAMPLES,
    )
    assert track.array.shape == (SAMPLES, CHANNELS)
    assert (track.array == track.array[:1]).all()
    return track.array


def heard_in(file: bytes) -> tuple[NDArray[np.float64], Fraction]:
    """The sound of an MP4 as FFmpeg decodes it, [samples, channels] to 1, and when it begins."""
    with av.open(io.BytesIO(file)) as film:
        (stream,) = film.streams.audio
        assert (stream.codec_context.name, stream.rate) == ("aac", SAMPLE_RATE)
        frames = list(film.decode(stream))
    starts = Fraction(frames[0].pts) * frames[0].time_base
    return np.concatenate([frame.to_ndarray() for frame in frames], axis=1).T, starts


@pytest.mark.parametrize("model", ["talkie", "sections"])
def test_a_film_and_its_sound_are_whole(client: moored.Client, tmp_path: Path, model: str) -> None:
    stream = client.stream_video("a wave", model=model, seed=7, output="raw")
    events = list(stream)
    stages = [event.name for event in events if isinstance(event, moored.StageStarted)]
    assert stages[-2:] == ["decode", "decode_sound"]
    frames, samples = (pieces_of(events, track) for track in ("", "sound"))
    assert {piece.media_type for piece in frames} == {"video/x-raw-rgb"}
    assert {piece.media_type for piece in samples} == {"audio/wav"}
    # Both lengths are told with the first piece, before the sound is decoded.
    assert frames[0].video == moored.VideoFormat(SIDE, SIDE, FRAMES, RATE, SOUND)
    assert samples[0].audio == SOUND
    result = stream.result()
    assert_film(result.array)
    assert_heard(result.audio)
    assert repr(result).startswith(f"VideoResult({FRAMES} frames of {SIDE}x{SIDE} with sound, ")
    assert result.audio is not None
    result.audio.save(tmp_path / "sound.wav")
    with wave.open(str(tmp_path / "sound.wav")) as saved:
        assert (saved.getframerate(), saved.getnframes()) == (SAMPLE_RATE, SAMPLES)
    assert moored.read_recipe(tmp_path / "sound.wav") == result.film.recipe
    assert_at_rest(client)


def test_a_film_as_mp4_has_its_sound(client: moored.Client, tmp_path: Path) -> None:
    both = client.generate_video("a wave", model="talkie", seed=7)
    tone = assert_heard(both.audio)
    alone = client.generate_video("a wave", model="talkie", seed=7, output="mp4")
    assert alone.mp4 == both.mp4
    assert (alone.tracks, alone.film.sound) == ((), SOUND)
    with pytest.raises(ValueError, match=r'output="raw\+mp4"'):
        _ = alone.audio
    heard, starts = heard_in(both.mp4)
    assert starts == 0, "it begins with the first frame"
    assert heard.shape == (SAMPLES, CHANNELS)
    middle = slice(SAMPLES // 4, 3 * SAMPLES // 4)
    assert np.abs(heard[middle] - tone[0] / 32768).max() < 0.02
    with av.open(io.BytesIO(both.mp4)) as film:
        (picture,) = film.streams.video
        assert Fraction(picture.duration * picture.time_base) == Fraction(FRAMES) / round(RATE)
        (sound,) = film.streams.audio
        assert Fraction(film.duration, 1_000_000) >= Fraction(FRAMES, 24) - Fraction(1, 1000)
        assert (picture.frames, sound.channels) == (FRAMES, CHANNELS)
        assert json.loads(film.metadata["comment"]) == both.film.recipe
    path = both.save(tmp_path / "film.mp4")
    assert moored.read_recipe(path) == both.film.recipe
    assert_at_rest(client)


def test_several_films_have_each_their_sound(client: moored.Client) -> None:
    result = client.generate_video("a wave", model="talkie", seed=7, count=2, frames=7)
    assert [(track.index, track.name) for track in result.tracks] == [(0, "sound"), (1, "sound")]
    for film, track in zip(result.films, result.tracks, strict=True):
        alone = client.generate_video("a wave", model="talkie", seed=film.seed, frames=7)
        assert (alone.array == film.array).all()
        assert alone.audio is not None
        assert (alone.audio.array == track.array).all()
        assert alone.mp4 == film.mp4


@pytest.fixture(scope="module")
def undisturbed(client: moored.Client) -> moored.VideoResult:
    """A film of `slow-talkie`, each of whose decodes goes on for three seconds after its first piece."""
    return client.generate_video("x", model="slow-talkie", steps=1, seed=7)


@pytest.mark.parametrize(("killed_in", "stage"), [("", "decode"), ("sound", "decode_sound")])
@pytest.mark.parametrize("output", ["raw", "raw+mp4"])
def test_a_worker_killed_in_a_decode_loses_neither_frames_nor_samples(
    client: moored.Client,
    undisturbed: moored.VideoResult,
    killed_in: str,
    stage: str,
    output: Any,
) -> None:
    asked: dict[str, Any] = {"model": "slow-talkie", "steps": 1, "seed": 7}
    with client.stream_video("x", output=output, **asked) as stream:
        events: list[moored.Event] = []
        for event in stream:
            events.append(event)
            if isinstance(event, moored.Artifact) and event.track == killed_in:
                break
        kill_worker(client)
        events.extend(stream)
    assert retries(events) == [("WORKER_DIED", stage)]
    result = stream.result()
    assert (result.array == undisturbed.array).all()
    assert (assert_heard(result.audio) == assert_heard(undisturbed.audio)).all()
    # Each byte once.
    arrived = sum(len(piece.chunk) for piece in pieces_of(events, "sound"))
    assert result.audio is not None
    assert arrived == len(result.audio.data)
    if output == "raw+mp4":
        assert result.mp4 == undisturbed.mp4
    assert_at_rest(client)


def test_a_client_that_stops_reading_a_film_with_sound_is_disconnected(
    client: moored.Client,
) -> None:
    asked: dict[str, Any] = {"model": "talkie", "width": 1024, "height": 1024, "frames": 121}
    with client.stream_video("a wave", output="raw", **asked) as stream:
        next(stream)
        # 363 MiB of frames and their sound, of which nobody reads any.
        until(client, lambda status: status.jobs == ())
        assert ended(client, stream.job_id).state == "cancelled"
        with pytest.raises(moored.SlowReader):
            stream.result()
    assert_heard(client.generate_video("a wave", model="talkie", seed=7).audio)
    assert_at_rest(client)


def test_a_latent_gives_the_film_and_its_sound(client: moored.Client) -> None:
    made = client.generate_video("a wave", model="talkie", seed=7, keep_latent=True)
    (latent,) = made.latents
    decoded = client.decode_video(latent, model="talkie")
    assert (decoded.array == made.array).all()
    assert (assert_heard(decoded.audio) == assert_heard(made.audio)).all()
    assert heard_in(decoded.mp4)[0].shape == (SAMPLES, CHANNELS)
    assert client.load("talkie", prove=True).stages
    assert_at_rest(client)


def test_the_command_line_writes_sound_in_the_mp4_or_beside_the_frames(
    service: Service, client: moored.Client, tmp_path: Path
) -> None:
    film = ("film", "a wave", "-m", "talkie", "--seed", "7")
    made = service.run(*film, "-o", "wave.mp4", cwd=tmp_path)
    assert (made.returncode, made.stdout.split()) == (0, ["wave.mp4"]), made.stderr
    assert heard_in((tmp_path / "wave.mp4").read_bytes())[0].shape == (SAMPLES, CHANNELS)
    made = service.run(*film, "-o", "wave.apng", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert made.stdout.split() == ["wave.apng", "wave-sound.wav"]
    own = client.generate_video("a wave", model="talkie", seed=7, output="raw").audio
    assert own is not None
    assert (tmp_path / "wave-sound.wav").read_bytes() == bytes(own.data)
    refused = service.run(*film, "--negative-prompt", "blurred", "--true-guidance", "4")
    assert "negative_prompt: is not taken" in refused.stderr, refused.stderr


def test_a_silent_film_says_so(client: moored.Client) -> None:
    silent = client.generate_video("a wave", model="video", frames=5)
    assert (silent.audio, silent.film.sound, silent.tracks) == (None, None, ())
