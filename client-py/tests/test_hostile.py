"""Services that send what nobody asked for: it takes no more memory than what arrives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Ask
from scripted import Service, accepted, done, event, pieces, track

import moored
from moored._generated import events_pb2, generation_pb2, model_pb2
from moored._saving import recipe_in
from moored._session_calls import SessionCall


def film_of(total_bytes: int, **format_: Any) -> events_pb2.Event:
    video = events_pb2.VideoFormat(frames_per_second=24, **format_)
    return event(
        artifact=events_pb2.Artifact(
            chunk=b"x", total_bytes=total_bytes, media_type="video/x-raw-rgb", video=video, offset=0
        )
    )


@pytest.mark.parametrize(
    ("total_bytes", "width", "height", "frames"),
    [
        (2**63, 64, 64, 1),
        (8 << 30, 64, 64, 1),
        (3 * 16384 * 16384 * 1000, 16384, 16384, 1000),
        (3 * 2**40, 2**20, 2**20, 1),
        (0, 64, 64, 0),
        (0, 0, 0, 0),
    ],
)
def test_a_film_larger_than_announced_or_asked(
    service: Service, ask: Ask, total_bytes: int, width: int, height: int, frames: int
) -> None:
    first = film_of(total_bytes, width=width, height=height, frames=frames)
    service.on("GenerateVideo", [accepted(), first, done()])
    with pytest.raises(moored.InternalError):
        ask("generate_video", "x")


def test_a_film_that_is_announced_takes_memory_as_it_comes(service: Service, ask: Ask) -> None:
    first = film_of(3 * 4096 * 4096 * 500, width=4096, height=4096, frames=500)
    service.on("GenerateVideo", [accepted(), first, done()])
    # 25 GB that never come: the job ends without its film.
    assert ask("generate_video", "x").films == ()


def test_the_results_of_a_call_have_a_bound_in_all(
    service: Service, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moored._bounds._MOST_BYTES", 5)
    names = ("a", "b", "c")
    tracks = [
        piece for name in names for piece in pieces(b"xx", media_type="audio/flac", track=name)
    ]
    service.on("GenerateAudio", [accepted(), *tracks, done()])
    with pytest.raises(moored.InternalError, match="more than 5 bytes"):
        ask("generate_audio", "x")


def test_frames_of_one_pixel_are_given_at_once(service: Service, ask: Ask) -> None:
    """As many as fit in a message: the work is in proportion to them."""
    count = 100_000
    video = events_pb2.VideoFormat(width=1, height=1, frames=count, frames_per_second=24)
    film = events_pb2.Artifact(
        chunk=bytes(3 * count),
        total_bytes=3 * count,
        media_type="video/x-raw-rgb",
        video=video,
        offset=0,
        last=True,
    )
    service.on("GenerateVideo", [accepted(), event(artifact=film), done()])
    (made,) = ask("generate_video", "x").films
    assert len(made.data) == 3 * count


@pytest.mark.parametrize("recipe", ["[" * 100_000, '{"a":' * 50_000])
def test_a_recipe_that_is_nested_without_end_is_ignored(recipe: str) -> None:
    assert recipe_in({"recipe": recipe}) == {}


def endless(message: Any) -> Any:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        yield from map(message, itertools.count())

    return answer


def test_more_pictures_than_were_asked_for(service: Service, ask: Ask, png: bytes) -> None:
    service.on("GenerateImage", endless(lambda n: pieces(png, index=n, size=1 << 20)[0]))
    with pytest.raises(moored.InternalError, match="1 were asked for"):
        ask("generate_image", "x")


def test_a_latent_that_never_ends(service: Service, ask: Ask) -> None:
    info = model_pb2.LatentInfo(id="latent-1", shape=[1], dtype="f32", bytes=4)

    def chunk(number: int) -> generation_pb2.LatentChunk:
        return generation_pb2.LatentChunk(info=info if number == 0 else None, chunk=b"1234")

    service.on("GetLatent", endless(chunk))
    with pytest.raises(moored.InternalError, match="more than the latent"):
        ask("get_latent", "latent-1")


@pytest.mark.parametrize(
    ("shape", "announced"), [([1], 1 << 40), ([1 << 20, 1 << 20], 1 << 42), ([2], 4)]
)
def test_a_latent_that_is_announced_too_large_or_not_as_its_shape(
    service: Service, ask: Ask, shape: list[int], announced: int
) -> None:
    info = model_pb2.LatentInfo(id="latent-1", shape=shape, dtype="f32", bytes=announced)
    service.on("GetLatent", [generation_pb2.LatentChunk(info=info, chunk=b"1234")])
    with pytest.raises(moored.InternalError, match="announces a latent of"):
        ask("get_latent", "latent-1")


def test_a_picture_without_a_size_has_no_more_bytes_than_were_asked_for(
    service: Service, ask: Ask
) -> None:
    piece = pieces(b"\0" * (1 << 20), media_type="image/png", size=1 << 20)[0]
    piece.artifact.total_bytes, piece.artifact.last = 0, False
    piece.artifact.ClearField("format")
    service.on("GenerateImage", [accepted(), *[piece] * 40, done()])
    with pytest.raises(moored.InternalError, match="Artifact 0 has more"):
        ask("generate_image", "x", width=64, height=64)


@pytest.mark.parametrize("chunks", [[generation_pb2.LatentChunk(chunk=b"1234")], []])
def test_a_latent_without_a_description(service: Service, ask: Ask, chunks: list[Any]) -> None:
    service.on("GetLatent", chunks)
    with pytest.raises(moored.InternalError, match="description"):
        ask("get_latent", "latent-1")


@pytest.mark.parametrize(
    ("data", "media_type", "metadata"),
    [
        (b"no png", "image/png", {}),
        (b"abc", "image/x-raw-rgb", {"width": "100000", "height": "100000"}),
        (b"abc", "image/x-raw-rgb", {"width": "y", "height": "1"}),
        (b"abc", "image/x-raw-rgb", {}),
    ],
)
def test_a_picture_that_is_none(
    service: Service, ask: Ask, data: bytes, media_type: str, metadata: dict[str, str]
) -> None:
    service.on(
        "GenerateImage", [accepted(), *pieces(data, media_type=media_type, **metadata), done()]
    )
    result = ask("generate_image", "x")
    with pytest.raises(moored.InternalError):
        _ = result.image


def test_a_seed_that_is_no_number(service: Service, ask: Ask, png: bytes) -> None:
    service.on("GenerateImage", [accepted(), *pieces(png, seed="y"), done()])
    with pytest.raises(moored.InternalError, match="seed"):
        _ = ask("generate_image", "x").pictures[0].seed


def test_a_track_without_channels(service: Service, ask: Ask) -> None:
    chunks = track(b"abcd", samples=1)
    chunks[0].artifact.audio.channels = 0
    service.on("GenerateAudio", [accepted(), *chunks, done()])
    with pytest.raises(moored.InternalError, match="0 channels"):
        ask("generate_audio", "x")


def opened(**more: int) -> generation_pb2.StreamAudioResponse:
    settings = {"samples_per_second": 8000, "channels": 2, **more}
    session = generation_pb2.AudioSessionOpened(session_id="session-1", **settings)
    return generation_pb2.StreamAudioResponse(opened=session)


@pytest.mark.parametrize("more", [{"channels": 0}, {"samples_per_second": 0}])
def test_a_session_without_channels_or_rate(more: dict[str, int]) -> None:
    call = SessionCall("box:1", generation_pb2.OpenAudioSession())
    with pytest.raises(moored.InternalError, match="opened a session"):
        call.hear(opened(**more))


def test_a_session_that_goes_on_after_its_end_was_asked_for() -> None:
    call = SessionCall("box:1", generation_pb2.OpenAudioSession())
    call.hear(opened())
    call.say_close()
    sound = generation_pb2.SoundChunk(samples=bytes(1 << 20))
    for _ in range(80):
        call.hear(generation_pb2.StreamAudioResponse(sound=sound))
    assert call._unread_bytes <= 66 << 20
    closed = generation_pb2.AudioSessionClosed(reason="closed")
    call.hear(generation_pb2.StreamAudioResponse(closed=closed))
    assert call.report is not None
