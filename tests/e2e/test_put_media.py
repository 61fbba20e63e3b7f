"""Uploaded media: jobs that start from it, its lifetime, its bounds, and refusals."""

from __future__ import annotations

import asyncio
import io
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from faults import assert_at_rest
from moored._generated import events_pb2, generation_pb2
from numpy.typing import NDArray
from PIL import Image
from test_media import CHANNELS, RATE, SAMPLE_RATE

from service import Service

Simulate = Callable[..., Service]

KIB, MIB = 2**10, 2**20
# A strength at which the result differs from its start by rounding alone.
NEARLY_NONE = 0.004
DEADLINE_S = 60.0
NO_SUCH_MEDIA = "media-that-never-was"

Bytes = NDArray[np.uint8]


def film(
    *colours: tuple[int, int, int], frames: int = 6, width: int = 32, height: int = 48
) -> Bytes:
    """A film divided into equal parts, one for each colour."""
    array = np.empty((frames, height, width, 3), np.uint8)
    for part, colour in zip(np.array_split(array, len(colours)), colours, strict=True):
        part[:] = colour
    return array


def wav(*samples: int, seconds: float = 0.5, rate: int = 8000) -> bytes:
    """A WAV in which each channel repeats one sample."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(len(samples))
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes(np.tile(np.array(samples, "<i2"), round(seconds * rate)).tobytes())
    return file.getvalue()


def png(colour: tuple[int, int, int] = (200, 30, 40), width: int = 96, height: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def assert_film_of(array: Bytes, colour: tuple[int, int, int]) -> None:
    """Checks a film of the instant family: frame n has this colour with n more red."""
    wanted = np.array([(colour[0] + number, *colour[1:]) for number in range(len(array))])
    assert np.abs(array.astype(int) - wanted[:, None, None]).max() <= 1


def refused_fields(error: moored.InvalidRequest) -> list[str]:
    return [violation.field for violation in error.violations]


# As a start.


def test_an_uploaded_picture_gives_the_same_result_as_one_in_the_request(
    simulate: Simulate,
) -> None:
    picture = png()
    with simulate().client() as client:
        info = client.put_media(picture)
        assert info.id
        assert info.bytes == len(picture)
        assert info.media_type.startswith("image")
        assert 0 < info.expires_in_ms <= 600_000
        asked: dict[str, Any] = {"model": "small", "seed": 1, "strength": 0.5}
        direct = client.generate_image("x", init_image=picture, **asked)
        assert direct.image.size == (96, 32)
        for handle in (info, info.id):
            uploaded = client.generate_image("x", init_media=handle, **asked)
            assert uploaded.pictures[0].data == direct.pictures[0].data
        assert client.generate_image("x", **asked).pictures[0].data != direct.pictures[0].data
        # A film whose first frame is the picture.
        asked["model"] = "video"
        near = client.generate_video("x", init_image=picture, **asked)
        assert near.array.shape[1:3] == (32, 96)
        assert (client.generate_video("x", init_media=info, **asked).array == near.array).all()
        plans = [client.plan("x", model="small", **start) for start in ({"init_media": info}, {})]
        names = [[stage.name for stage in plan.stages] for plan in plans]
        assert [("encode_image" in one) for one in names] == [True, False]
        assert_at_rest(client)


def test_a_generated_picture_and_a_pil_image_can_be_uploaded(simulate: Simulate) -> None:
    with simulate().client() as client:
        made = client.generate_image("x", model="small", seed=1, output="raw")
        shown = made.image.getpixel((0, 0))
        for picture in (made, made.pictures[0], made.image):
            near = client.generate_image(
                "y",
                model="small",
                init_media=client.put_media(picture),
                strength=NEARLY_NONE,
            )
            difference = np.subtract(near.image.convert("RGB").getpixel((0, 0)), shown)
            assert np.abs(difference).max() <= 1


def test_a_film_starts_a_film(simulate: Simulate) -> None:
    uploaded = film((10, 220, 0), (30, 100, 80))
    with simulate().client() as client:
        info = client.put_media(uploaded, frames_per_second=12.5)
        assert (info.media_type, info.bytes) == ("video/x-raw-rgb", uploaded.nbytes)
        assert info.video == moored.VideoFormat(32, 48, 6, 12.5)
        assert (info.image, info.audio) == (None, None)
        stream = client.stream_video("a wave", model="video", init_media=info, strength=NEARLY_NONE)
        events = list(stream)
        stages = [event.name for event in events if isinstance(event, moored.StageStarted)]
        assert stages == ["encode_text", "encode_image", "denoise", "decode"]
        result = stream.result()
        # Size, length and rate are the defaults; the colour is the mean of all frames.
        assert result.array.shape == uploaded.shape
        assert result.frames_per_second == 12.5
        assert_film_of(result.array, (20, 160, 40))
        # Options override them.
        other = client.generate_video(
            "a wave",
            model="video",
            init_media=info,
            strength=NEARLY_NONE,
            width=64,
            height=16,
            frames=3,
            frames_per_second=RATE,
        )
        assert other.array.shape == (3, 16, 64, 3)
        assert other.frames_per_second == RATE
        assert_film_of(other.array, (20, 160, 40))
        assert_at_rest(client)


def test_sides_that_are_no_multiple_of_16_are_cut(simulate: Simulate) -> None:
    with simulate().client() as client:
        info = client.put_media(film((20, 160, 40), width=70, height=33), frames_per_second=RATE)
        assert (info.video and info.video.width) == 70
        near = client.generate_video("x", model="video", init_media=info, strength=NEARLY_NONE)
        assert near.array.shape[1:3] == (32, 64)
        assert_film_of(near.array, (20, 160, 40))


def test_a_generated_film_starts_another(simulate: Simulate) -> None:
    with simulate().client() as client:
        first = client.generate_video("a wave", model="video", seed=7, frames=9, width=32)
        near = client.generate_video(
            "another", model="video", init_media=client.put_media(first), strength=NEARLY_NONE
        )
        assert near.array.shape == first.array.shape
        assert near.frames_per_second == first.frames_per_second
        mean = first.array.reshape(-1, 3).mean(axis=0).astype(int)
        assert np.abs(near.array[0, 0, 0].astype(int) - mean).max() <= 1


@pytest.mark.parametrize("form", ["bytes", "file", "samples alone"])
def test_a_track_starts_a_track(simulate: Simulate, tmp_path: Path, form: str) -> None:
    file = wav(2000, -3000)
    format_ = moored.AudioTrackFormat(8000, 2, 4000)
    path = tmp_path / "start.wav"
    path.write_bytes(file)
    with simulate().client() as client:
        if form == "samples alone":
            info = client.put_media(file[44:], format=format_)
        else:
            info = client.put_media(path if form == "file" else file)
        assert info.audio == format_
        stream = client.stream_audio("a drum", model="track", init_media=info, strength=NEARLY_NONE)
        events = list(stream)
        stages = [event.name for event in events if isinstance(event, moored.StageStarted)]
        assert "encode_image" in stages
        array = stream.result().array
        # The length of the start at the sample rate of the model.
        assert array.shape == (SAMPLE_RATE // 2, CHANNELS)
        # Samples of the instant family are multiples of 100.
        assert np.abs(array.astype(int) - (2000, -3000)).max() <= 100
        longer = client.generate_audio("a drum", model="track", init_media=info, seconds=0.7)
        assert len(longer.array) == round(0.7 * SAMPLE_RATE)
        assert_at_rest(client)


@pytest.mark.parametrize("output", ["wav", "raw"])
def test_a_generated_track_starts_another(simulate: Simulate, output: moored.AudioOutput) -> None:
    with simulate().client() as client:
        first = client.generate_audio("x", model="track", seed=7, seconds=0.3, output=output)
        info = client.put_media(first)
        assert info.audio == moored.AudioTrackFormat(SAMPLE_RATE, CHANNELS, len(first.array))
        near = client.generate_audio(
            "y", model="track", init_media=info, strength=NEARLY_NONE, output=output
        )
        assert near.array.shape == first.array.shape
        assert np.abs(near.array[0].astype(int) - first.array[0]).max() <= 100


# Uploads and lifetime.


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_film_larger_than_the_message_limit_is_uploaded(
    simulate: Simulate, tmp_path: Path, kind: str
) -> None:
    uploaded = film((10, 220, 0), (30, 100, 80), frames=30, width=256, height=256)
    path = tmp_path / "film.rgb"
    path.write_bytes(uploaded.tobytes())
    format_ = moored.VideoFormat(256, 256, 30, RATE)
    # What is brought does not count as a request that is under way.
    bounds = ("limits.uploads=4MiB", "limits.uploads_per_client=4MiB")
    settings = [each for one in ("service.max_message=2MiB", *bounds) for each in ("--set", one)]
    service = simulate(arguments=settings)
    with service.client() as client:
        assert client.server_info().max_message_bytes < uploaded.nbytes
        if kind == "sync":
            info = client.put_media(path, format=format_)
        else:

            async def bring() -> moored.MediaInfo:
                async with moored.AsyncClient(service.address) as other:
                    return await other.put_media(path, format=format_)

            info = asyncio.run(bring())
        assert info.bytes == uploaded.nbytes
        near = client.generate_video(
            "x", model="video", init_media=info, strength=NEARLY_NONE, width=32, height=32
        )
        # The mean shows that all of it arrived.
        assert len(near.array) == 30
        assert_film_of(near.array, (20, 160, 40))


def test_media_expires_and_use_renews_it(simulate: Simulate) -> None:
    one = film((1, 2, 3), frames=4, width=64, height=64)
    bounds = ("queue.latent_ttl=8s", f"limits.media_per_client={3 * one.nbytes}B")
    service = simulate(arguments=tuple(word for bound in bounds for word in ("--set", bound)))
    with service.client() as client:
        used = client.put_media(one, frames_per_second=RATE)
        unused = client.put_media(one, frames_per_second=RATE)
        assert unused.expires_in_ms <= 8000
        two = np.concatenate([one, one])
        until, refused, third = time.monotonic() + DEADLINE_S, 0, None
        # A second upload of twice the size fits once one has expired; asking for `unused` would renew it.
        while third is None and time.monotonic() < until:
            assert client.plan_video("x", model="video", init_media=used).runs_now
            try:
                third = client.put_media(two, frames_per_second=RATE)
            except moored.ClientLimit:
                refused += 1
        assert refused
        assert third is not None
        # `used` was uploaded first, and has not expired.
        assert client.generate_video("x", model="video", init_media=used).films
        with pytest.raises(moored.InvalidRequest, match=f"{unused.id}.*upload it again") as gone:
            client.generate_video("x", model="video", init_media=unused)
        assert refused_fields(gone.value) == ["init_media"]
        assert client.release_media(unused) is False


def test_released_media_is_removed_and_accepted_jobs_keep_it(simulate: Simulate) -> None:
    with simulate().client() as client:
        info = client.put_media(film((20, 160, 40)), frames_per_second=RATE)
        with client.stream_video(
            "x", model="video", init_media=info, strength=NEARLY_NONE
        ) as stream:
            assert isinstance(next(stream), moored.Accepted)
            assert client.release_media(info) is True
            assert_film_of(stream.result().array, (20, 160, 40))
        assert client.release_media(info.id) is False
        assert client.release_media(NO_SUCH_MEDIA) is False
        with pytest.raises(moored.InvalidRequest, match=info.id):
            client.generate_video("x", model="video", init_media=info)


# Refused.


@pytest.mark.parametrize("model", ["small", "video", "track"])
@pytest.mark.parametrize("plans", [False, True], ids=["generate", "plan"])
def test_an_unknown_handle_is_refused_with_the_name_of_the_option(
    simulate: Simulate, model: str, plans: bool
) -> None:
    with simulate().client() as client:
        ask: Any = {
            "small": (client.generate_image, client.plan),
            "video": (client.generate_video, client.plan_video),
            "track": (client.generate_audio, client.plan_audio),
        }[model][plans]
        with pytest.raises(moored.InvalidRequest, match=f"init_media: .*{NO_SUCH_MEDIA}") as none:
            ask("x", model=model, init_media=NO_SUCH_MEDIA)
        assert refused_fields(none.value) == ["init_media"]
        assert client.jobs(include_ended=True) == ()


@pytest.mark.parametrize(
    ("model", "start", "why"),
    [
        ("small", "film", "is not a picture, from which"),
        ("small", "track", "is not a picture, from which"),
        ("video", "track", "is not a picture or a film, from which"),
        ("track", "film", "is not a track, from which"),
        ("track", "picture", "a track starts from a track"),
    ],
)
def test_a_start_of_another_medium_is_refused_with_the_reason(
    simulate: Simulate, model: str, start: str, why: str
) -> None:
    with simulate().client() as client:
        if start == "film":
            info = client.put_media(film((1, 2, 3)), frames_per_second=RATE)
        else:
            info = client.put_media(wav(1, 2) if start == "track" else png())
        ask: Any = {
            "small": client.generate_image,
            "video": client.generate_video,
            "track": client.generate_audio,
        }[model]
        with pytest.raises(moored.InvalidRequest, match=why) as refused:
            ask("x", model=model, init_media=info)
        assert refused_fields(refused.value) == ["init_media"]
        assert client.jobs(include_ended=True) == ()
        assert client.release_media(info) is True


def test_one_start_excludes_another(simulate: Simulate) -> None:
    with simulate().client() as client:
        info = client.put_media(png())
        with pytest.raises(moored.InvalidRequest, match="init_media: excludes init_image"):
            client.generate_image("x", model="small", init_media=info, init_image=png())
        kept = client.generate_image("x", model="small", latent_only=True).latents[0]
        with pytest.raises(moored.InvalidRequest, match="init_latent: excludes init_media"):
            client.generate_image("x", model="small", init_media=info, init_latent=kept)


def put_raw(client: moored.Client, *chunks: generation_pb2.MediaChunk) -> generation_pb2.MediaInfo:
    """Sends PutMedia messages that `put_media` would not send."""
    return client._unary(client._stubs.generation.PutMedia, iter(chunks), 30)


def chunk(data: bytes, media_type: str | None = None, **format: Any) -> generation_pb2.MediaChunk:
    info = None if media_type is None else generation_pb2.MediaInfo(media_type=media_type, **format)
    return generation_pb2.MediaChunk(info=info, chunk=data)


def of_frames(frames: int) -> dict[str, Any]:
    return {"video": events_pb2.VideoFormat(width=2, height=2, frames=frames, frames_per_second=8)}


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ([], "info"),
        ([chunk(png())], "info"),
        ([chunk(png(), "video/mp4")], "info.media_type"),
        ([chunk(bytes(36), "video/x-raw-rgb")], "info.format"),
        ([chunk(bytes(36), "audio/x-raw-s16le", **of_frames(3))], "info.format"),
        ([chunk(bytes(35), "video/x-raw-rgb", **of_frames(3))], "chunk"),
        ([chunk(bytes(36), "video/x-raw-rgb", **of_frames(3)), chunk(b"\0")], "chunk"),
        ([chunk(b"", "video/x-raw-rgb", **of_frames(0))], "chunk"),
        ([chunk(bytes(36), "video/x-raw-rgb", **of_frames(2**32 - 1))], "chunk"),
        ([chunk(png()[:60], "image/png")], "chunk"),
        ([chunk(b"", "image/png")], "chunk"),
        ([chunk(wav(1)[:-1], "audio/wav")], "chunk"),
        ([chunk(wav(1)[:30], "audio/wav")], "chunk"),
        ([chunk(png(), "audio/wav")], "chunk"),
    ],
    ids=[
        "nothing",
        "no info",
        "a film that is encoded",
        "frames without a format",
        "samples with the format of a film",
        "a byte short",
        "a byte more",
        "no frames",
        "an absurd length",
        "a picture that is cut off",
        "a picture of no bytes",
        "a track that is cut off",
        "a header that is cut off",
        "a picture as a track",
    ],
)
def test_media_that_does_not_fit_its_description_is_refused_and_not_counted(
    simulate: Simulate, sent: list[generation_pb2.MediaChunk], field: str
) -> None:
    most = 10_000
    service = simulate(arguments=("--set", f"limits.media_per_client={most}B"))
    with service.client() as client:
        with pytest.raises(moored.InvalidRequest) as refused:
            put_raw(client, *sent)
        assert refused_fields(refused.value) == [field]
        # The whole bound is free.
        client.put_media(bytes(most), format=moored.AudioTrackFormat(8000, 1, most // 2))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_media_of_a_client_is_bounded_and_refused_media_is_not_counted(
    simulate: Simulate, tmp_path: Path, kind: str
) -> None:
    service = simulate(arguments=("--set", "limits.media_per_client=2MiB"))
    path = tmp_path / "film.rgb"
    with path.open("wb") as file:
        file.truncate(48 * MIB)
    large = moored.VideoFormat(1024, 1024, 16, RATE)
    half = np.zeros((1, 512, 1024, 3), np.uint8)  # 1.5 MiB
    with service.client() as client:

        def bring_too_much() -> None:
            if kind == "sync":
                client.put_media(path, format=large)
                return

            async def bring() -> None:
                async with moored.AsyncClient(service.address) as other:
                    await other.put_media(path, format=large)

            asyncio.run(bring())

        for _ in range(2):
            with pytest.raises(moored.ClientLimit, match=r"limits\.media_per_client") as refused:
                bring_too_much()
            assert refused.value.retry_after_s
        first = client.put_media(half, frames_per_second=RATE)
        with pytest.raises(moored.ClientLimit, match=r"2\.0 MiB in all"):
            client.put_media(half, frames_per_second=RATE)
        # The first upload is still there; releasing it frees its bytes.
        assert client.plan_video("x", model="video", init_media=first).stages
        assert client.release_media(first) is True
        client.put_media(half, frames_per_second=RATE)
