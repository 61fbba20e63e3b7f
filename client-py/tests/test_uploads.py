from __future__ import annotations

import asyncio
import io
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import Ask
from scripted import (
    CHANNELS,
    FRAMES_PER_SECOND,
    HEIGHT,
    SAMPLES_PER_SECOND,
    WAIT_S,
    WIDTH,
    Service,
    accepted,
    done,
    film,
    pieces,
    reason,
    refuse,
    sound,
    track,
)

import moored
from moored import _uploads
from moored._generated import events_pb2, generation_pb2, rpc_pb2

np = pytest.importorskip("numpy")

MIB = 2**20
FILM = moored.VideoFormat(WIDTH, HEIGHT, 3, 24.0)
SOUND = moored.AudioTrackFormat(8000, 2, 6)


class Store:
    """Stores what PutMedia uploads, and answers with its description."""

    def __init__(self, service: Service) -> None:
        self.chunks: list[generation_pb2.MediaChunk] = []
        service.on("PutMedia", self.put)

    def put(self, chunks: list[generation_pb2.MediaChunk], context: Any) -> Any:
        self.chunks = chunks
        info = generation_pb2.MediaInfo(id="media-1", expires_in_ms=600_000)
        info.MergeFrom(self.info)
        return info

    @property
    def info(self) -> generation_pb2.MediaInfo:
        assert self.chunks[0].HasField("info")
        assert not any(chunk.HasField("info") for chunk in self.chunks[1:])
        return self.chunks[0].info

    @property
    def data(self) -> bytes:
        assert all(len(chunk.chunk) <= MIB for chunk in self.chunks)
        return b"".join(chunk.chunk for chunk in self.chunks)


@pytest.fixture
def store(service: Service) -> Store:
    return Store(service)


def wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(CHANNELS)
        written.setsampwidth(2)
        written.setframerate(SAMPLES_PER_SECOND)
        written.writeframes(samples)
    return file.getvalue()


def encoded(form: str) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (16, 8), (200, 10, 30)).save(file, form)
    return file.getvalue()


FILES = {
    "image/png": lambda: encoded("PNG"),
    "image/jpeg": lambda: encoded("JPEG"),
    "image/webp": lambda: encoded("WEBP"),
    "audio/wav": lambda: wav(sound(9)),
    "audio/flac": lambda: b"fLaC" + bytes(40),
}


# Media types and formats.


@pytest.mark.parametrize("media_type", FILES)
@pytest.mark.parametrize("form", ["bytes", "bytearray", "memoryview", "path", "str"])
def test_the_media_type_of_a_file_follows_from_its_content(
    store: Store, ask: Ask, tmp_path: Path, media_type: str, form: str
) -> None:
    data = FILES[media_type]()
    # The ending is wrong for all but one.
    path = tmp_path / "file.jpg"
    path.write_bytes(data)
    forms = {
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(b"".join(bytes([one, 0]) for one in data))[::2],
        "path": path,
        "str": str(path),
    }
    info = ask("put_media", forms[form])
    assert isinstance(info, moored.MediaInfo)
    assert (info.id, info.media_type, info.expires_in_ms) == ("media-1", media_type, 600_000)
    assert info.bytes == len(data)
    assert (info.image, info.video, info.audio) == (None, None, None)
    assert store.info == generation_pb2.MediaInfo(media_type=media_type, bytes=len(data))
    assert store.data == data


def test_the_media_type_of_unknown_content_follows_from_the_ending(
    store: Store, ask: Ask, tmp_path: Path
) -> None:
    for ending, media_type in {
        "PNG": "image/png",
        "jpeg": "image/jpeg",
        "webp": "image/webp",
        "wav": "audio/wav",
        "flac": "audio/flac",
    }.items():
        path = tmp_path / f"odd.{ending}"
        path.write_bytes(b"unknown content")
        assert ask("put_media", path).media_type == media_type
    empty = tmp_path / "empty.wav"
    empty.touch()
    for given in (empty, b""):
        with pytest.raises(moored.InvalidRequest, match="is empty"):
            ask("put_media", given)


def test_raw_frames_and_samples_are_described_by_format(
    store: Store, ask: Ask, tmp_path: Path
) -> None:
    frames, samples = bytes(range(24)) * 3, sound(6)
    info = ask("put_media", frames, format=FILM)
    assert (info.media_type, info.video) == ("video/x-raw-rgb", FILM)
    assert store.info.video == events_pb2.VideoFormat(
        width=WIDTH, height=HEIGHT, frames=3, frames_per_second=24.0
    )
    assert store.data == frames
    path = tmp_path / "track.pcm"
    path.write_bytes(samples)
    info = ask("put_media", path, format=SOUND)
    assert (info.media_type, info.audio) == ("audio/x-raw-s16le", SOUND)
    assert store.info.audio == events_pb2.AudioTrackFormat(
        samples_per_second=8000, channels=2, samples=6
    )
    assert store.data == samples
    # Raw bytes may begin like a PNG.
    begins = b"\x89PNG\r\n\x1a\n" + bytes(16)
    assert ask("put_media", begins, format=FILM).media_type == "video/x-raw-rgb"


def test_an_explicit_media_type_overrides_the_content(store: Store, ask: Ask, png: bytes) -> None:
    assert ask("put_media", png, media_type="image/x-newer").media_type == "image/x-newer"
    told = ask("put_media", b"\0" * 72, media_type="video/x-raw-rgb", format=FILM)
    assert (told.media_type, told.video) == ("video/x-raw-rgb", FILM)


def test_a_pil_image_is_sent_as_png(store: Store, ask: Ask, png: bytes) -> None:
    image = pytest.importorskip("PIL.Image")
    shown = image.open(io.BytesIO(png))
    assert ask("put_media", shown).media_type == "image/png"
    assert image.open(io.BytesIO(store.data)).tobytes() == shown.tobytes()


def test_an_array_of_frames_is_sent_as_a_film(store: Store, ask: Ask) -> None:
    # More than one chunk, and not in row-major order.
    frames = np.random.default_rng(3).integers(0, 256, (3, 5, 400, 320), dtype="u1")
    frames = frames.transpose(1, 3, 2, 0)
    info = ask("put_media", frames, frames_per_second=12.5)
    assert (info.media_type, info.bytes) == ("video/x-raw-rgb", frames.nbytes)
    assert info.video == moored.VideoFormat(400, 320, 5, 12.5)
    assert len(store.chunks) > 1
    assert store.data == frames.tobytes()


@pytest.mark.parametrize(
    ("array", "sent", "channels"),
    [
        (np.array([[1, -2], [3, -4]], "i2"), [1, -2, 3, -4], 2),
        (np.array([1, -2, 3], "i2"), [1, -2, 3], 1),
        # Floats: 1 is full scale, and what is louder is cut.
        (np.array([[-1.0], [0.5], [1.0], [7.0]], "f4"), [-32768, 16384, 32767, 32767], 1),
        (np.zeros((2, 3), "i2").T, [0] * 6, 2),
    ],
)
def test_an_array_of_samples_is_sent_as_a_track(
    store: Store, ask: Ask, array: Any, sent: list[int], channels: int
) -> None:
    info = ask("put_media", array, sample_rate=8000)
    assert info.media_type == "audio/x-raw-s16le"
    assert info.audio == moored.AudioTrackFormat(8000, channels, len(sent) // channels)
    assert np.frombuffer(store.data, "<i2").tolist() == sent


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((2, 9), "i2"), r"array\.T"),
        (np.zeros((9, 8), "i2"), "1 or 2 channels"),
        (np.zeros((0, 2), "i2"), r"\[samples, channels\]"),
        (np.zeros((9, 2), "i4"), "int16"),
        (np.array([[np.nan]], "f4"), "NaN or infinity"),
    ],
)
def test_an_array_that_is_no_track_is_refused(ask: Ask, array: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ask("put_media", array, sample_rate=8000)


def test_a_sample_rate_is_of_an_array(ask: Ask) -> None:
    for media in (b"RIFF", "a.wav"):
        with pytest.raises(ValueError, match="sample_rate"):
            ask("put_media", media, sample_rate=8000)
    with pytest.raises(ValueError, match="sample_rate"):
        ask("put_media", np.zeros((2, 2, 2, 3), "u1"), sample_rate=8000, frames_per_second=8.0)


def test_results_are_sent_in_their_own_format(service: Service, ask: Ask, png: bytes) -> None:
    store = Store(service)
    data, chunks = film(3)
    samples = sound(9)
    service.on("GenerateVideo", [accepted(), *chunks, done()])
    service.on("GenerateImage", [accepted(), *pieces(png), done()])
    result = ask("generate_video", "x")
    for one in (result, result.film):
        info = ask("put_media", one)
        assert (info.media_type, store.data) == ("video/x-raw-rgb", data)
        assert info.video == moored.VideoFormat(WIDTH, HEIGHT, 3, FRAMES_PER_SECOND)
    picture = ask("generate_image", "x")
    for one in (picture, picture.pictures[0]):
        assert ask("put_media", one).media_type == "image/png"
        assert store.data == png
    for file, media_type in ((wav(samples), "audio/wav"), (samples, "audio/x-raw-s16le")):
        service.on(
            "GenerateAudio", [accepted(), *track(file, samples=9, media_type=media_type), done()]
        )
        result = ask("generate_audio", "x")
        for one in (result, result.track()):
            assert ask("put_media", one).media_type == "audio/wav"
            assert store.data == wav(samples)


def test_a_raw_picture_of_a_result_is_sent_as_png(service: Service, ask: Ask) -> None:
    image = pytest.importorskip("PIL.Image")
    store = Store(service)
    pixels = bytes(range(24))
    size = {"width": "4", "height": "2"}
    service.on(
        "GenerateImage", [accepted(), *pieces(pixels, media_type="image/x-raw-rgb", **size), done()]
    )
    assert ask("put_media", ask("generate_image", "x", output="raw")).media_type == "image/png"
    assert image.open(io.BytesIO(store.data)).tobytes() == pixels


# Sending.


def test_a_file_is_read_while_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "film.rgb"
    data = np.random.default_rng(3).bytes(3 * MIB + 1)
    path.write_bytes(data)
    monkeypatch.setattr(Path, "read_bytes", None)
    upload = _uploads.upload_of(path, None, moored.VideoFormat(1, 1, len(data), 1.0), None)
    first = next(upload)
    assert first.info.bytes == len(data)
    # Pieces after the first have not been read yet.
    with path.open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"!")
    rest = [chunk.chunk for chunk in upload]
    assert [len(chunk) for chunk in (first.chunk, *rest)] == [MIB, MIB, MIB, 1]
    assert b"".join((first.chunk, *rest)) == data[:-1] + b"!"


def test_an_error_while_reading_is_raised(
    service: Service, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(service)
    path = tmp_path / "track.wav"
    path.write_bytes(FILES["audio/wav"]())

    def failing(path: Path) -> Iterator[bytes]:
        yield b"RIFF"
        raise OSError("the disk is gone")

    monkeypatch.setattr(_uploads, "_pieces_of_file", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        ask("put_media", path)
    with pytest.raises(FileNotFoundError):
        ask("put_media", tmp_path / "none.wav")


def test_a_refusal_during_an_upload_is_raised(service: Service, ask: Ask, tmp_path: Path) -> None:
    def refused(chunks: Any, context: grpc.ServicerContext) -> Any:
        refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "Enough.", reason("CLIENT_LIMIT"))

    service.handle = lambda method, request, context: refused(request, context)  # type: ignore[method-assign]
    path = tmp_path / "film.rgb"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
    # Several times: the refusal and the chunk that fails come in either order.
    for _ in range(20):
        with pytest.raises(moored.ClientLimit, match="Enough"):
            ask("put_media", path, format=moored.VideoFormat(1024, 1024, 21, 1.0))


def test_cancelling_a_task_ends_its_upload(service: Service, address: str) -> None:
    begun, over = threading.Event(), threading.Event()

    def receive(method: str, chunks: Any, context: grpc.ServicerContext) -> Any:
        context.add_callback(over.set)
        next(chunks)
        begun.set()
        over.wait(WAIT_S)
        return generation_pb2.MediaInfo()

    async def leave() -> None:
        async with moored.AsyncClient(address) as client:
            # More than the buffers of the connection hold.
            task = asyncio.create_task(client.put_media(bytes(64 * MIB), media_type="image/png"))
            assert await asyncio.to_thread(begun.wait, WAIT_S)
            task.cancel()
            await task

    service.handle = receive  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
    assert over.wait(WAIT_S)


def test_a_file_is_not_read_on_the_thread_of_the_event_loop(
    store: Store, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "track.wav"
    path.write_bytes(FILES["audio/wav"]())
    readers = []

    def reading(path: Path) -> Iterator[bytes]:
        readers.append(threading.current_thread())
        yield path.read_bytes()

    async def bring() -> None:
        async with moored.AsyncClient(address) as client:
            await client.put_media(path)

    monkeypatch.setattr(_uploads, "_pieces_of_file", reading)
    asyncio.run(bring())
    assert store.data == path.read_bytes()
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()


# Errors.


@pytest.mark.parametrize(
    ("media", "more", "said"),
    [
        (b"words", {}, r"no PNG, JPEG, WebP, WAV or FLAC.*format=moored\.VideoFormat"),
        (b"....ftypisom", {}, "MP4.*frames as an array"),
        (b"\x1aE\xdf\xa3", {}, "WebM.*frames as an array"),
        (b"GIF89a", {}, "GIF.*frames as an array"),
        (b"RIFF....AVI ", {}, "AVI.*frames as an array"),
        (b"ID3", {}, "MP3.*WAV or FLAC"),
        (b"OggS", {}, "WAV or FLAC"),
        (b"\0", {"media_type": "video/x-raw-rgb"}, r"format=moored\.VideoFormat"),
        (b"\0", {"media_type": "audio/x-raw-s16le"}, r"format=moored\.AudioTrackFormat"),
        (b"\0", {"format": moored.ImageFormat(1, 1)}, "PIL image"),
        (b"\0", {"format": moored.VideoFormat(-1, 1, 1, 1.0)}, "VideoFormat.*cannot be sent"),
        (b"\0", {"frames_per_second": 24}, "format="),
        (np.zeros((2, 4, 4, 3), "u1"), {}, "frames_per_second="),
        (np.zeros((2, 4, 4, 3)), {"frames_per_second": 1}, r"float64.*astype\('uint8'\)"),
        (np.zeros((2, 4, 4, 4), "u1"), {"frames_per_second": 1}, r"\[\.\.\., :3\]"),
        (np.zeros((4, 4, 3), "u1"), {"frames_per_second": 1}, r"\[frames, height, width, 3\]"),
        (np.zeros((2, 3, 8, 8), "u1"), {"frames_per_second": 1}, r"not \[2, 3, 8, 8\]"),
        (np.zeros((0, 4, 4, 3), "u1"), {"frames_per_second": 1}, r"not \[0, 4, 4, 3\]"),
        (np.zeros((2, 4, 4, 3), "u1"), {"media_type": "video/x-raw-rgb"}, "leave them out"),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_an_error_of_a_value_names_the_remedy(
    ask: Ask, media: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ask("put_media", media, **more)


@pytest.mark.parametrize(
    ("media", "more", "said"),
    [
        (None, {}, "not a NoneType"),
        ([np.zeros((4, 4, 3), "u1")], {}, r"numpy\.stack"),
        (moored.MediaInfo("media-1", "image/png", 1, 1), {}, "init_media="),
        (moored.LatentInfo("lat-1", (1,), "f32", "v", 0, 4), {}, "put_latent.*init_latent="),
        (b"\0", {"format": (1, 1, 1, 1.0)}, "format: a VideoFormat"),
        (b"\0", {"format": moored.VideoFormat("1", 1, 1, 1.0)}, "cannot be sent"),  # type: ignore[arg-type]
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_an_error_of_a_type_names_the_remedy(
    ask: Ask, media: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        ask("put_media", media, **more)


def test_the_frame_rate_of_a_result_cannot_be_changed(service: Service, ask: Ask) -> None:
    service.on("GenerateVideo", [accepted(), *film(3)[1], done()])
    with pytest.raises(ValueError, match="leave it out of a VideoResult"):
        ask("put_media", ask("generate_video", "x"), frames_per_second=12)


# Handles.


@pytest.mark.parametrize("method", ["GenerateImage", "GenerateVideo", "GenerateAudio"])
@pytest.mark.parametrize("start", ["media-1", moored.MediaInfo("media-1", "audio/wav", 1, 1)])
def test_requests_of_every_medium_carry_the_handle(
    service: Service, ask: Ask, method: str, start: Any
) -> None:
    service.on(method, [accepted(), done()])
    name = f"generate_{method.removeprefix('Generate').lower()}"
    ask(name, "x", init_media=start)
    assert service.requests[method].init_media_id == "media-1"
    ask(name, "x", init_media=None)
    assert service.requests[method].init_media_id == ""


@pytest.mark.parametrize("media", [b"\x89PNG", Path("start.png"), np.zeros((2, 4, 4, 3), "u1")])
def test_init_media_that_is_no_handle_names_put_media(ask: Ask, media: Any) -> None:
    with pytest.raises(TypeError, match=r"init_media: .* put_media\(\) first"):
        ask("generate_video", "x", init_media=media)
    with pytest.raises(TypeError, match="media: "):
        ask("release_media", media)


@pytest.mark.parametrize("option", ["video", "init_video", "init_audio"])
def test_option_names_of_other_libraries_lead_to_init_media(ask: Ask, option: str) -> None:
    with pytest.raises(TypeError, match=r"write init_media=.*put_media\(\)"):
        ask("generate_video", "x", **{option: b""})


@pytest.mark.parametrize("handle", ["init_media", "init_latent"])
def test_a_refused_handle_is_named_as_its_option(service: Service, ask: Ask, handle: str) -> None:
    bad = rpc_pb2.BadRequest()
    bad.field_violations.add(field=f"{handle}_id", description="excludes init_media_id here")

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        code, why = grpc.StatusCode.INVALID_ARGUMENT, f"{handle}_id: there is none"
        refuse(context, code, why, reason("INVALID_REQUEST"), bad)

    service.on("GenerateVideo", answer)
    with pytest.raises(moored.InvalidRequest) as refused:
        ask("generate_video", "x", **{handle: "none-1"})
    assert str(refused.value) == f"{handle}: there is none"
    assert refused.value.violations == (moored.Violation(handle, "excludes init_media here"),)


def test_release(service: Service, ask: Ask) -> None:
    there = {"media-1"}

    def release(request: Any, context: grpc.ServicerContext) -> Any:
        released = request.media_id in there
        there.discard(request.media_id)
        return generation_pb2.ReleaseMediaResponse(released=released)

    service.on("ReleaseMedia", release)
    assert ask("release_media", moored.MediaInfo("media-1", "audio/wav", 1, 1)) is True
    assert ask("release_media", "media-1") is False
