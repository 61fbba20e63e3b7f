from __future__ import annotations

import asyncio
import io
import json
import pickle
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Ask
from scripted import (
    CHANNELS,
    FRAME_BYTES,
    FRAMES_PER_SECOND,
    HEIGHT,
    SAMPLES_PER_SECOND,
    WAIT_S,
    WIDTH,
    Service,
    accepted,
    done,
    event,
    film,
    sound,
    step,
    track,
)

import moored
from moored._generated import events_pb2, generation_pb2, model_pb2

np = pytest.importorskip("numpy")

JOB_OPTIONS: dict[str, Any] = {
    "priority": "high",
    "patience_s": 1.5,
    "allow_low_memory": True,
    "card": "cuda:1",
    "idempotency_key": "key",
    "detach": True,
}
SENT_JOB_OPTIONS = generation_pb2.JobOptions(
    client_id="the-client",
    priority=generation_pb2.HIGH,
    patience_ms=1500,
    allow_low_memory=True,
    card="cuda:1",
    idempotency_key="key",
    detach=True,
)


def wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(CHANNELS)
        written.setsampwidth(2)
        written.setframerate(SAMPLES_PER_SECOND)
        written.writeframes(samples)
    return file.getvalue()


def pieces_of(ask: Ask, method: str, iterator: str, **more: Any) -> list[Any]:
    """Everything that `stream.frames()` or `stream.samples()` gives, and the result after it."""
    if ask.kind == "sync":
        with moored.Client(ask.address) as client, getattr(client, method)("x", **more) as stream:
            return [*getattr(stream, iterator)(), stream.result()]

    async def read() -> list[Any]:
        async with moored.AsyncClient(ask.address) as client:
            stream = getattr(client, method)("x", **more)
            seen = [one async for one in getattr(stream, iterator)()]
            return [*seen, await stream.result()]

    return asyncio.run(read())


# Films.


def test_a_film(service: Service, ask: Ask) -> None:
    data, chunks = film(5, seed="7")
    service.on("GenerateVideo", [accepted(), step(1), *chunks, done()])
    result = ask("generate_video", "waves")
    assert isinstance(result, moored.VideoResult)
    assert result.film.data == data
    assert result.array.shape == (5, HEIGHT, WIDTH, 3)
    assert result.array.dtype == np.uint8
    assert result.array.tobytes() == data
    assert not result.array.flags.writeable
    assert (result.frames_per_second, result.film.frame_count) == (FRAMES_PER_SECOND, 5)
    assert (result.film.width, result.film.height) == (WIDTH, HEIGHT)
    assert (result.metadata, result.film.seed) == ({"seed": "7"}, 7)
    assert (result.seed, result.tracks, result.latents) == (7, (), ())
    frame = result.film.frame(4)
    assert (frame.number, frame.array.shape) == (4, (HEIGHT, WIDTH, 3))
    assert (frame.array == 5).all()
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match="5 frames"):
            result.film.frame(wrong)


def test_the_frames_of_a_film_are_pictures(service: Service, ask: Ask) -> None:
    pytest.importorskip("PIL")
    service.on("GenerateVideo", [accepted(), *film(3)[1], done()])
    frames = ask("generate_video", "waves").frames
    assert [frame.size for frame in frames] == [(WIDTH, HEIGHT)] * 3
    assert [frame.getpixel((3, 1)) for frame in frames] == [(n, n, n) for n in (1, 2, 3)]


@pytest.mark.parametrize("size", [1, FRAME_BYTES - 1, FRAME_BYTES, 2 * FRAME_BYTES + 1, 10**6])
def test_frames_come_each_once_and_in_order(service: Service, ask: Ask, size: int) -> None:
    data, chunks = film(7, size=size)
    service.on("GenerateVideo", [accepted(), *chunks, done()])
    *frames, result = pieces_of(ask, "stream_video", "frames")
    assert [frame.number for frame in frames] == [*range(7)]
    assert b"".join(frame.data for frame in frames) == data
    assert {(frame.index, frame.width, frame.height) for frame in frames} == {(0, WIDTH, HEIGHT)}
    # They are the film's own bytes.
    whole = result.array
    assert all(np.shares_memory(whole[frame.number], frame.array) for frame in frames)


def test_frames_come_before_the_film_is_whole(service: Service, client: moored.Client) -> None:
    _, chunks = film(3, size=FRAME_BYTES)
    seen = threading.Event()

    def answer(request: Any, context: Any) -> Iterator[events_pb2.Event]:
        yield from [accepted(), chunks[0]]
        assert seen.wait(WAIT_S)
        yield from [*chunks[1:], done()]

    service.on("GenerateVideo", answer)
    with client.stream_video("waves") as stream:
        frames = stream.frames()
        assert next(frames).number == 0
        assert (stream.films, stream.job_id) == ((), "job-1")
        seen.set()
        # What a second iterator gives, the first has not given.
        assert [frame.number for frame in stream.frames()] == [1, 2]
        assert [*frames] == []
        (whole,) = stream.films
        assert stream.result().film is whole


def test_frames_that_were_read_as_events_are_not_lost(
    service: Service, client: moored.Client
) -> None:
    service.on("GenerateVideo", [accepted(), *film(4, size=FRAME_BYTES)[1], done()])
    with client.stream_video("waves") as stream:
        next(one for one in stream if isinstance(one, moored.Artifact))
        assert [frame.number for frame in stream.frames()] == [0, 1, 2, 3]
    with client.stream_video("waves") as stream:
        stream.result()
        assert [frame.number for frame in stream.frames()] == [0, 1, 2, 3]
    service.on("GenerateAudio", [accepted(), *track(sound(9), samples=9), done()])
    with client.stream_audio("a drum") as stream:
        stream.result()
        assert [len(samples.array) for samples in stream.samples()] == [9]


def test_several_films_with_sound_interleaved(service: Service, ask: Ask) -> None:
    first, first_pieces = film(3, size=30, seed="7")
    second, second_pieces = film(2, size=50, index=1, seed="8")
    samples = sound(40)
    spoken = track(samples, samples=40, name="sound", size=70)
    sequence = [second_pieces[0], first_pieces[0], spoken[0], *second_pieces[1:]]
    sequence += [*first_pieces[1:], *spoken[1:]]
    service.on("GenerateVideo", [accepted(), *sequence, done()])
    result = ask("generate_video", "waves", count=2)
    assert [one.data for one in result.films] == [first, second]
    assert [one.seed for one in result.films] == [7, 8]
    assert [one.frame_count for one in result.films] == [3, 2]
    (heard,) = result.tracks
    assert (heard.name, bytes(heard.data)) == ("sound", samples)


def with_sound(events: list[events_pb2.Event], samples: int) -> list[events_pb2.Event]:
    """A film that says that it has so many samples of sound."""
    events[0].artifact.video.sound.CopyFrom(
        events_pb2.AudioTrackFormat(
            samples_per_second=SAMPLES_PER_SECOND, channels=CHANNELS, samples=samples
        )
    )
    return events


def test_the_sound_of_a_film(service: Service, ask: Ask) -> None:
    samples = sound(40)
    frames = with_sound(film(3)[1], 40)
    heard = track(wav(samples), samples=40, media_type="audio/wav", name="sound")
    service.on("GenerateVideo", [accepted(), *heard, *frames, done()])
    result = ask("generate_video", "waves")
    assert result.film.sound == moored.AudioTrackFormat(SAMPLES_PER_SECOND, CHANNELS, 40)
    assert (result.audio.sample_rate, result.audio.sample_count) == (SAMPLES_PER_SECOND, 40)
    assert result.audio.array.tobytes() == samples
    assert f"3 frames of {WIDTH}x{HEIGHT} with sound" in repr(result)
    assert "\n" not in repr(result)
    described = json.loads(json.dumps(result.to_dict()))
    assert described["films"][0]["sound"]["samples"] == 40
    # A film that came as MP4 has it inside alone; a silent one has none.
    service.on("GenerateVideo", [accepted(), *with_sound(encoded("video/mp4"), 40), done()])
    with pytest.raises(ValueError, match=r'output="raw\+mp4"'):
        _ = ask("generate_video", "waves", output="mp4").audio
    service.on("GenerateVideo", [accepted(), *film(3)[1], done()])
    silent = ask("generate_video", "waves")
    assert (silent.audio, silent.film.sound) == (None, None)
    assert "sound" not in repr(silent)


def test_a_film_may_end_with_a_picture(service: Service, ask: Ask) -> None:
    service.on("GenerateVideo", [accepted(), *film(3)[1], done()])
    ask("generate_video", "waves", end_image=b"the last frame")
    request = service.requests["GenerateVideo"]
    assert request.end_image.data == b"the last frame"
    with pytest.raises(TypeError, match="end_image"):
        ask("generate_video", "waves", last_image=b"the last frame")


@pytest.mark.parametrize(
    ("ending", "kind", "millisecond"),
    [(".png", "PNG", 1), (".apng", "PNG", 1), (".webp", "WEBP", 1), (".GIF", "GIF", 10)],
)
def test_a_film_is_saved_as_an_animation(
    service: Service, ask: Ask, tmp_path: Path, ending: str, kind: str, millisecond: int
) -> None:
    image = pytest.importorskip("PIL.Image")
    features = pytest.importorskip("PIL.features")
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("this pillow writes no WebP")
    # Colours far from one another, so that no format takes two frames for one.
    colours = [200, 10, 120, 60, 250, 30, 150]
    data = b"".join(bytes([colour] * 16 * 16 * 3) for colour in colours)
    format_ = events_pb2.VideoFormat(width=16, height=16, frames=7, frames_per_second=24)
    piece = events_pb2.Artifact(
        chunk=data, total_bytes=len(data), last=True, media_type="video/x-raw-rgb", video=format_
    )
    service.on("GenerateVideo", [accepted(), event(artifact=piece), done()])
    path = tmp_path / f"film{ending}"
    ask("generate_video", "waves").save(path)
    durations = []
    with image.open(path) as opened:
        assert (opened.format, opened.n_frames, opened.size) == (kind, 7, (16, 16))
        for number, colour in enumerate(colours):
            opened.seek(number)
            opened.load()
            durations.append(opened.info["duration"])
            shown = opened.convert("RGB").getpixel((8, 8))
            assert max(abs(part - colour) for part in shown) <= 4
    # 7 frames of 24 a second: what is rounded does not add up.
    assert sum(durations) == pytest.approx(7000 / 24, abs=millisecond)
    assert max(durations) - min(durations) <= millisecond


def test_a_film_is_saved_raw_and_not_as_what_it_is_not(
    service: Service, ask: Ask, tmp_path: Path
) -> None:
    data, chunks = film(2)
    service.on("GenerateVideo", [accepted(), *chunks, done()])
    result = ask("generate_video", "waves")
    result.save(tmp_path / "film.rgb")
    assert (tmp_path / "film.rgb").read_bytes() == data
    for name, why in (("film.mov", r"\.webp"), ("film", r"\.webp"), ("film.mp4", 'or "mp4"')):
        with pytest.raises(ValueError, match=why):
            result.save(tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(ValueError, match=r'output="raw.mp4"'):
        _ = result.mp4


def encoded(media_type: str) -> list[events_pb2.Event]:
    """A film of nine frames that came as a file, in two pieces."""
    format_ = events_pb2.VideoFormat(width=2, height=2, frames=9, frames_per_second=24)
    first = events_pb2.Artifact(
        chunk=b"m", total_bytes=3, media_type=media_type, video=format_, offset=0
    )
    last = events_pb2.Artifact(chunk=b"p4", last=True, offset=1)
    return [event(artifact=first), event(artifact=last)]


def test_a_film_as_mp4(service: Service, ask: Ask, tmp_path: Path) -> None:
    service.on("GenerateVideo", [accepted(), *encoded("video/mp4"), done()])
    result = ask("generate_video", "waves", output="mp4")
    assert service.requests["GenerateVideo"].output == generation_pb2.MP4
    assert (result.mp4, result.film.frame_count, result.frames_per_second) == (b"mp4", 9, 24)
    result.save(tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").read_bytes() == b"mp4"
    with pytest.warns(UserWarning, match="film-2.mp4"):
        assert result.save(tmp_path / "film.mp4") == tmp_path / "film-2.mp4"
    with pytest.raises(ValueError, match=r"\.mp4"):
        result.save(tmp_path / "film.webp")
    with pytest.raises(ValueError, match='output="raw"'):
        _ = result.array
    with pytest.raises(moored.InvalidRequest, match="one of raw, mp4, raw"):
        ask("generate_video", "waves", output="gif")


def test_a_film_that_came_as_frames_and_as_mp4_gives_both(
    service: Service, ask: Ask, tmp_path: Path
) -> None:
    data, chunks = film(9, size=50)
    service.on("GenerateVideo", [accepted(), *chunks, *encoded("video/mp4"), done()])
    result = ask("generate_video", "waves")
    assert service.requests["GenerateVideo"].output == generation_pb2.RAW_FRAMES_AND_MP4
    assert len(result.films) == 1
    assert (bytes(result.data), result.mp4, result.array.shape[0]) == (data, b"mp4", 9)
    assert result.save(tmp_path / "film.mp4").read_bytes() == b"mp4"
    assert result.save(tmp_path / "film.webp").exists()
    shown = result._repr_mimebundle_()
    assert "<video" in shown["text/html"]
    assert len(repr(result)) < 100
    json.dumps(result.to_dict())
    again = pickle.loads(pickle.dumps(result.film))
    assert (again.mp4, bytes(again.data)) == (b"mp4", data)


def test_a_track_that_came_as_wav_and_as_flac_gives_both(
    service: Service, ask: Ask, tmp_path: Path
) -> None:
    samples = sound(20)
    chunks = track(wav(samples), samples=20, media_type="audio/wav", size=50)
    file = track(b"fLaC...", samples=20, media_type="audio/flac", size=5)
    service.on("GenerateAudio", [accepted(), *chunks, *file, done()])
    result = ask("generate_audio", "a drum")
    assert result.flac == b"fLaC..."
    assert result.save(tmp_path / "a.flac").read_bytes() == b"fLaC..."
    assert result.save(tmp_path / "a.wav").read_bytes() == wav(samples)
    assert "audio/flac" in result._repr_mimebundle_()["text/html"]


def test_a_film_of_another_kind_is_kept_as_it_came(service: Service, ask: Ask) -> None:
    service.on("GenerateVideo", [accepted(), *encoded("video/webm"), done()])
    *frames, result = pieces_of(ask, "stream_video", "frames")
    assert frames == []
    assert bytes(result.film.data) == b"mp4"
    with pytest.raises(ValueError, match="video/webm"):
        _ = result.array


@pytest.mark.parametrize("size", [7, FRAME_BYTES, 2 * FRAME_BYTES + 1])
def test_frames_come_in_any_order(service: Service, ask: Ask, size: int) -> None:
    data, chunks = film(7, size=size)
    first = chunks[0].artifact
    for place, chunk in enumerate(chunks):
        chunk.artifact.offset = place * size
        chunk.artifact.last = place == 0
    # The one with the format comes first, whatever its place is.
    chunks[-1].artifact.video.CopyFrom(first.video)
    chunks[-1].artifact.media_type = first.media_type
    chunks[-1].artifact.total_bytes = first.total_bytes
    service.on("GenerateVideo", [accepted(), *reversed(chunks), done()])
    *frames, result = pieces_of(ask, "stream_video", "frames")
    assert sorted(frame.number for frame in frames) == [*range(7)]
    assert frames[0].number > 0
    for frame in frames:
        assert frame.data == data[frame.number * FRAME_BYTES :][:FRAME_BYTES]
    assert result.film.data == data


def test_frames_that_come_twice_are_an_error(service: Service, ask: Ask) -> None:
    chunks = film(3, size=30)[1]
    for place, offset in enumerate((0, 20, 60)):
        chunks[place].artifact.offset = offset
    service.on("GenerateVideo", [accepted(), *chunks, done()])
    with pytest.raises(moored.InternalError, match="twice, from 20 to 50"):
        ask("generate_video", "waves")


@pytest.mark.parametrize(
    ("places", "why"),
    [([0, 2], "ended after 42 of 72 bytes"), ([0, 1, 1, 2], "more than its 72 bytes")],
    ids=["short", "long"],
)
def test_a_film_of_other_bytes_than_it_says_is_an_error(
    service: Service, ask: Ask, places: list[int], why: str
) -> None:
    chunks = film(3, size=30)[1]
    service.on("GenerateVideo", [accepted(), *(chunks[place] for place in places), done()])
    with pytest.raises(moored.InternalError, match=why):
        ask("generate_video", "waves")


def test_a_film_whose_frames_are_not_its_bytes_is_an_error(service: Service, ask: Ask) -> None:
    chunks = film(3)[1]
    chunks[0].artifact.video.frames = 4
    service.on("GenerateVideo", [accepted(), *chunks, done()])
    with pytest.raises(moored.InternalError, match="72 bytes where its frames have 96"):
        ask("generate_video", "waves")


def test_a_latent_without_a_film(service: Service, ask: Ask) -> None:
    tensors = [
        model_pb2.TensorInfo(name="latent", shape=[1, 4, 5, 2, 2]),
        model_pb2.TensorInfo(name="sound", shape=[1, 8]),
    ]
    info = model_pb2.LatentInfo(id="lat-1", shape=[1, 4, 5, 2, 2], tensors=tensors)
    kept = events_pb2.LatentKept(latent=info)
    service.on("GenerateVideo", [accepted(), event(latent=kept), done()])
    result = ask("generate_video", "waves", latent_only=True)
    (latent,) = result.latents
    assert latent.tensors == (
        moored.TensorInfo("latent", (1, 4, 5, 2, 2)),
        moored.TensorInfo("sound", (1, 8)),
    )
    assert result.films == ()
    with pytest.raises(LookupError, match="latents"):
        _ = result.array


def test_all_options_of_a_film_reach_the_service(service: Service, ask: Ask) -> None:
    service.on("GenerateVideo", [accepted(), done()])
    ask.settings["client_id"] = "the-client"
    ask(
        "generate_video",
        "waves",
        model="film",
        width=64,
        height=32,
        frames=81,
        frames_per_second=23.5,
        seconds=2.5,
        steps=3,
        guidance=0.0,
        seed=0,
        max_sequence_length=128,
        count=2,
        init_image=b"picture",
        init_latent="lat-9",
        strength=0.25,
        omit_metadata=True,
        keep_latent=True,
        latent_only=True,
        preview_interval_s=0.5,
        **JOB_OPTIONS,
    )
    assert service.requests["GenerateVideo"] == generation_pb2.GenerateVideoRequest(
        model=model_pb2.ModelRef(id="film"),
        prompt="waves",
        width=64,
        height=32,
        frames=81,
        frames_per_second=23.5,
        seconds=2.5,
        output=generation_pb2.RAW_FRAMES_AND_MP4,
        steps=3,
        guidance=0.0,
        seed=0,
        max_sequence_length=128,
        count=2,
        init_image=b"picture",
        init_latent_id="lat-9",
        strength=0.25,
        omit_metadata=True,
        keep_latent=True,
        latent_only=True,
        preview_interval_ms=500,
        options=SENT_JOB_OPTIONS,
    )


# Tracks.


@pytest.mark.parametrize("size", [1, 3, 44, 46, 10**6])
def test_a_track(service: Service, ask: Ask, tmp_path: Path, size: int) -> None:
    samples = sound(50)
    file = wav(samples)
    chunks = track(file, samples=50, media_type="audio/wav", size=size, seed="7")
    service.on("GenerateAudio", [accepted(), step(1), *chunks, done()])
    *arrived, result = pieces_of(ask, "stream_audio", "samples")
    assert isinstance(result, moored.AudioResult)
    assert service.requests["GenerateAudio"].output == generation_pb2.WAV_AND_FLAC
    assert bytes(result.track().data) == file
    assert result.array.shape == (50, CHANNELS)
    assert result.array.dtype == np.int16
    assert result.array.ravel().tolist() == [*range(50 * CHANNELS)]
    assert (result.sample_rate, result.track().seconds) == (SAMPLES_PER_SECOND, 50 / 8000)
    assert (result.metadata, result.track().seed) == ({"seed": "7"}, 7)
    # As they came: each once, in order, without the header.
    assert b"".join(one.data for one in arrived) == samples
    lengths = [len(one.array) for one in arrived]
    assert [one.first for one in arrived] == [sum(lengths[:n]) for n in range(len(lengths))]
    assert all(np.shares_memory(result.array, one.array) for one in arrived)
    result.save(tmp_path / "track.WAV")
    assert (tmp_path / "track.WAV").read_bytes() == file
    result.save(tmp_path / "track.pcm")
    assert (tmp_path / "track.pcm").read_bytes() == samples
    with pytest.raises(ValueError, match=r"\.wav"):
        result.save(tmp_path / "track.mp3")


def test_a_raw_track_is_saved_as_a_file(service: Service, ask: Ask, tmp_path: Path) -> None:
    samples = sound(20)
    service.on("GenerateAudio", [accepted(), *track(samples, samples=20, size=7), done()])
    result = ask("generate_audio", "a drum", output="raw")
    assert service.requests["GenerateAudio"].output == generation_pb2.RAW_S16LE
    assert bytes(result.track().data) == samples
    result.save(tmp_path / "track.wav")
    assert (tmp_path / "track.wav").read_bytes() == wav(samples)


def test_a_track_as_flac_is_a_file(service: Service, ask: Ask, tmp_path: Path) -> None:
    file = b"fLaC" + bytes(range(40))
    chunks = track(file, samples=20, media_type="audio/flac", size=7)
    service.on("GenerateAudio", [accepted(), *chunks, done()])
    result = ask("generate_audio", "a drum", output="flac")
    assert service.requests["GenerateAudio"].output == generation_pb2.FLAC
    assert (result.flac, result.track().flac) == (file, file)
    assert (result.sample_rate, result.track().sample_count) == (SAMPLES_PER_SECOND, 20)
    result.save(tmp_path / "track.flac")
    assert (tmp_path / "track.flac").read_bytes() == file
    # It is not decoded here, and its samples do not come one by one.
    for path in ("track.wav", "track.pcm", "track"):
        with pytest.raises(ValueError, match=r"\.flac"):
            result.save(tmp_path / path)
    with pytest.raises(ValueError, match='output="wav"'):
        _ = result.array
    service.on("GenerateAudio", [accepted(), *chunks, done()])
    assert len(pieces_of(ask, "stream_audio", "samples")) == 1


def test_samples_are_not_saved_as_flac(service: Service, ask: Ask, tmp_path: Path) -> None:
    service.on("GenerateAudio", [accepted(), *track(sound(20), samples=20, size=7), done()])
    with pytest.raises(ValueError, match='or "flac"'):
        ask("generate_audio", "a drum").save(tmp_path / "track.flac")
    assert not list(tmp_path.iterdir())


def test_a_file_with_more_in_it_than_samples(service: Service, ask: Ask) -> None:
    samples = sound(6)
    file = bytearray(wav(samples))
    file[36:36] = b"LIST" + (5).to_bytes(4, "little") + b"hello\0"
    file += b"id3 " + (2).to_bytes(4, "little") + b"ab"
    chunks = track(bytes(file), samples=6, media_type="audio/wav", size=10)
    service.on("GenerateAudio", [accepted(), *chunks, done()])
    *arrived, result = pieces_of(ask, "stream_audio", "samples")
    assert result.array.tobytes() == samples
    assert b"".join(one.data for one in arrived) == samples


def test_tracks_by_name_interleaved(service: Service, ask: Ask) -> None:
    made = {
        (index, name): sound(30, first=1000 * index + 100 * place)
        for index in (0, 1)
        for place, name in enumerate(("voice", "drums"))
    }
    streams = {
        key: track(data, samples=30, name=key[1], index=key[0], size=50)
        for key, data in made.items()
    }
    mixed = [one for group in zip(*streams.values(), strict=True) for one in group]
    service.on("GenerateAudio", [accepted(), *mixed, done()])
    result = ask("generate_audio", "a song", count=2)
    assert [(one.index, one.name) for one in result.tracks] == [*made]
    for (index, name), data in made.items():
        assert bytes(result.track(name, index).data) == data
    assert result.track().name == "voice"
    assert result.track(index=1) is result.tracks[2]
    with pytest.raises(LookupError, match="no track 'bass' of item 0: 'voice' of item 0"):
        result.track("bass")
    samples = pieces_of(ask, "stream_audio", "samples", count=2)[:-1]
    for key, data in made.items():
        own = [one.data for one in samples if (one.index, one.track) == key]
        assert b"".join(own) == data


def test_a_latent_without_a_track(service: Service, ask: Ask) -> None:
    kept = events_pb2.LatentKept(latent=model_pb2.LatentInfo(id="lat-1"))
    service.on("GenerateAudio", [accepted(), event(latent=kept), done()])
    result = ask("generate_audio", "a drum", latent_only=True)
    assert result.latents[0].id == "lat-1"
    with pytest.raises(LookupError, match="latents"):
        _ = result.array


def test_all_options_of_a_track_reach_the_service(service: Service, ask: Ask) -> None:
    service.on("GenerateAudio", [accepted(), done()])
    ask.settings["client_id"] = "the-client"
    ask(
        "generate_audio",
        "a drum",
        model="track",
        lyrics="la",
        seconds=2.5,
        task="lego",
        tracks=["drums", "bass"],
        window=(0.5, 2.0),
        reference="media-3",
        bpm=120,
        key="C major",
        time_signature="3",
        language="en",
        steps=3,
        guidance=0.0,
        seed=0,
        max_sequence_length=128,
        count=2,
        init_latent="lat-9",
        strength=0.25,
        output="flac",
        omit_metadata=True,
        keep_latent=True,
        latent_only=True,
        **JOB_OPTIONS,
    )
    assert service.requests["GenerateAudio"] == generation_pb2.GenerateAudioRequest(
        model=model_pb2.ModelRef(id="track"),
        prompt="a drum",
        lyrics="la",
        seconds=2.5,
        task=generation_pb2.LEGO,
        tracks=["drums", "bass"],
        window_start_seconds=0.5,
        window_end_seconds=2.0,
        reference_media_id="media-3",
        beats_per_minute=120,
        key="C major",
        time_signature="3",
        language="en",
        steps=3,
        guidance=0.0,
        seed=0,
        max_sequence_length=128,
        count=2,
        init_latent_id="lat-9",
        strength=0.25,
        output=generation_pb2.FLAC,
        omit_metadata=True,
        keep_latent=True,
        latent_only=True,
        options=SENT_JOB_OPTIONS,
    )


# Both.


@pytest.mark.parametrize("method", ["generate_video", "generate_audio"])
def test_what_is_left_open_stays_open(service: Service, ask: Ask, method: str) -> None:
    for name in ("GenerateVideo", "GenerateAudio"):
        service.on(name, [accepted(), done()])
    ask(method, "x", model=None, seed=None, guidance=None, count=None, init_latent=None)
    (request,) = service.requests.values()
    for field in ("model", "seed", "guidance", "strength"):
        assert not request.HasField(field)
    assert (request.count, request.init_latent_id) == (0, "")


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("generate_video", {"frames": -1}),
        ("generate_video", {"width": 2**40}),
        ("generate_audio", {"seed": -1}),
        ("generate_audio", {"output": "mp3"}),
        ("generate_audio", {"task": "remix"}),
        ("generate_audio", {"bpm": -1}),
    ],
)
def test_what_no_field_can_hold_is_refused_here(
    ask: Ask, method: str, wrong: dict[str, Any]
) -> None:
    with pytest.raises(moored.InvalidRequest):
        ask(method, "x", **wrong)


def test_half_a_window_leaves_the_other_end_open(service: Service, ask: Ask) -> None:
    service.on("GenerateAudio", [accepted(), done()])
    ask("generate_audio", "x", task="repaint", window=(1.5, None))
    request = service.requests["GenerateAudio"]
    assert request.window_start_seconds == 1.5
    assert not request.HasField("window_end_seconds")
    for wrong in ({"window": 3}, {"window": (1, 2, 3)}, {"tracks": "drums"}, {"tracks": [1]}):
        with pytest.raises(TypeError):
            ask("generate_audio", "x", **wrong)


def test_an_option_of_another_medium_is_a_type_error(client: moored.Client) -> None:
    with pytest.raises(TypeError, match="lyrics"):
        client.generate_video("x", lyrics="la")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="frames"):
        client.generate_audio("x", frames=3)  # type: ignore[call-arg]


def test_a_latent_is_decoded_to_what_it_is_of(service: Service, ask: Ask) -> None:
    latent = moored.LatentInfo("lat-1", (1,), "f32", "v", 0, 4)
    data, chunks = film(2)
    service.on("DecodeLatent", [accepted(), *chunks, done()])
    decoded = ask("decode_video", latent, model="film", priority="low")
    assert decoded.film.data == data
    request = service.requests["DecodeLatent"]
    assert (request.latent_id, request.model.id) == ("lat-1", "film")
    assert request.options.priority == generation_pb2.LOW
    samples = sound(9)
    service.on("DecodeLatent", [accepted(), *track(samples, samples=9), done()])
    assert bytes(ask("decode_audio", "lat-2", card="cuda:1").track().data) == samples
    assert service.requests["DecodeLatent"].options.card == "cuda:1"
    assert len(ask.items("stream_decode_video", "lat-2")) == 3
    assert len(ask.items("stream_decode_audio", "lat-2")) == 3


def test_results_can_be_pickled(service: Service, ask: Ask) -> None:
    spoken = track(sound(9), samples=9, name="sound")
    service.on("GenerateVideo", [accepted(), *film(3)[1], *spoken, done()])
    result = ask("generate_video", "x")
    back = pickle.loads(pickle.dumps(result))
    assert back == result
    assert (back.array == result.array).all()
    assert (back.tracks[0].array == result.tracks[0].array).all()
