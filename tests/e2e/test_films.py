"""Films as files: MP4 from the service, through the Python client and the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import moored
import numpy as np
import pytest
from faults import assert_at_rest, ended
from numpy.typing import NDArray
from test_media import FRAMES, RATE, SIDE, slow_decoders
from waiting import until

from service import Service

Simulate = Callable[..., Service]


@dataclass
class Shown:
    """A film as FFmpeg reads it."""

    frames: NDArray[np.uint8]
    metadata: dict[str, str]
    count: int
    rate: Fraction
    seconds: Fraction
    codec: str
    pixels: str
    colours: tuple[int, ...]


def read(file: bytes) -> Shown:
    """Reads a whole film."""
    with av.open(io.BytesIO(file)) as film:
        (stream,) = film.streams
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(stream)]
        codec = stream.codec_context
        return Shown(
            np.stack(frames),
            dict(film.metadata),
            stream.frames,
            stream.average_rate,
            stream.duration * stream.time_base,
            codec.name,
            codec.pix_fmt,
            (codec.colorspace, codec.color_primaries, codec.color_trc, codec.color_range),
        )


def assert_close(shown: NDArray[np.uint8], asked: NDArray[np.uint8]) -> None:
    """The same film but for what encoding loses."""
    assert shown.shape == asked.shape
    assert np.abs(shown.astype(int) - asked.astype(int)).max() <= 8


def test_a_film_as_mp4_is_the_film(simulate: Simulate, tmp_path: Path) -> None:
    with simulate().client() as client:
        asked = client.generate_video("a wave – ü", model="video", seed=7)
        stream = client.stream_video("a wave – ü", model="video", seed=7, output="mp4")
        pieces = [event for event in stream if isinstance(event, moored.Artifact)]
        result = stream.result()
        assert [piece.media_type for piece in pieces] == ["video/mp4"] * len(pieces)
        assert pieces[0].total_bytes == len(result.mp4)
        assert pieces[0].video == moored.VideoFormat(SIDE, SIDE, FRAMES, RATE)
        shown = read(result.mp4)
        assert_close(shown.frames, asked.array)
        assert (shown.count, shown.rate, shown.seconds) == (FRAMES, 24, Fraction(FRAMES, 24))
        assert (shown.codec, shown.pixels) == ("h264", "yuv420p")
        # 1 is BT.709, and the limited range.
        assert shown.colours == (1, 1, 1, 1)
        # The index comes before the frames: a player can begin with the first bytes.
        assert result.mp4.index(b"moov") < result.mp4.index(b"mdat")
        assert json.loads(shown.metadata["comment"]) == result.film.recipe
        result.save(tmp_path / "film.mp4")
        assert moored.read_recipe(tmp_path / "film.mp4") == asked.film.recipe
        bare = client.generate_video("a wave", model="video", output="mp4", omit_metadata=True)
        assert "comment" not in read(bare.mp4).metadata
        assert_at_rest(client)


def test_a_decoded_latent_is_a_file_too(simulate: Simulate) -> None:
    with simulate().client() as client:
        made = client.generate_video("a wave", model="video", seed=7, keep_latent=True)
        (latent,) = made.latents
        decoded = client.decode_video(latent, model="video", output="mp4")
        shown = read(decoded.mp4)
        assert (len(shown.frames), shown.rate) == (FRAMES, 24)
        whole = client.generate_video("a wave", model="video", seed=7, output="mp4")
        assert (read(whole.mp4).frames == shown.frames).all()
        assert "comment" not in shown.metadata


def test_length_rate_and_size_are_as_asked(simulate: Simulate) -> None:
    with simulate().client() as client:
        asked: dict[str, Any] = {"model": "video", "output": "mp4", "seed": 1}
        second = client.generate_video("a wave", seconds=1.5, frames_per_second=30.0, **asked)
        shown = read(second.mp4)
        assert (len(shown.frames), shown.rate, shown.seconds) == (45, 30, Fraction(3, 2))
        at_default = client.generate_video("a wave", seconds=0.5, **asked)
        assert at_default.film.frame_count == 12
        wide = client.generate_video("a wave", width=208, height=16, frames=29, **asked)
        assert read(wide.mp4).frames.shape == (29, 16, 208, 3)
        one = client.generate_video("a wave", frames=1, **asked)
        assert len(read(one.mp4).frames) == 1
        two = client.generate_video("a wave", count=2, **asked)
        assert [film.seed for film in two.films] == [1, 2]
        assert all(len(read(film.mp4).frames) == FRAMES for film in two.films)


def test_sizes_that_mp4_cannot_hold_are_refused_at_once(simulate: Simulate) -> None:
    with simulate().client() as client:
        for wrong, why in [
            ({"width": 4096, "height": 64}, "4096x64 is no size of an MP4"),
            ({"width": 2176, "height": 2176}, "2176x2176 is no size of an MP4"),
            ({"frames_per_second": 1000.0}, "1000 frames a second"),
            ({"seconds": -1.0}, "seconds"),
            ({"seconds": 2.0, "frames": 9}, "excludes frames"),
        ]:
            with pytest.raises(moored.InvalidRequest, match=why):
                client.generate_video("a wave", model="video", output="mp4", **wrong)
        raw = client.generate_video("a wave", model="video", width=4096, height=64, frames=1)
        assert raw.array.shape == (1, 64, 4096, 3)
        assert_at_rest(client)


def test_a_film_that_is_decoded_faster_than_it_is_encoded_comes_whole(simulate: Simulate) -> None:
    """Its 636 MiB of pixels are more than a client may leave unread, and more than wait for the encoder."""
    service = simulate()
    with service.client() as client:
        before = peak_bytes(service)
        film = client.generate_video(
            "a wave", model="video", width=960, height=960, frames=241, seed=7, output="mp4"
        )
        with av.open(io.BytesIO(film.mp4)) as file:
            assert file.streams.video[0].frames == 241
        assert peak_bytes(service) - before < 450 * 2**20
        assert_at_rest(client)


def peak_bytes(service: Service) -> int:
    """The most memory that the service's process has had."""
    status = Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def test_an_abandoned_film_leaves_no_memory_in_use(simulate: Simulate, tmp_path: Path) -> None:
    with simulate(arguments=slow_decoders(tmp_path, 1000)).client() as client:

        def decoding(stream: moored.EventStream[Any]) -> None:
            for event in stream:
                assert not isinstance(event, moored.Artifact)
                if isinstance(event, moored.StageStarted) and event.name == "decode":
                    return

        asked: dict[str, Any] = {"model": "slow-video", "output": "mp4"}
        with client.stream_video("a wave", **asked) as stream:
            decoding(stream)
            assert client.cancel(stream.job_id)
            with pytest.raises(moored.Cancelled):
                stream.result()
        assert ended(client, stream.job_id).state == "cancelled"
        with client.stream_video("a wave", **asked) as stream:
            decoding(stream)
        until(client, lambda status: status.jobs == ())
        assert ended(client, stream.job_id).state == "cancelled"
        assert_at_rest(client)


def test_a_client_that_stops_reading_a_film_is_disconnected(simulate: Simulate) -> None:
    with simulate().client() as client:
        asked: dict[str, Any] = {"model": "video", "width": 1024, "height": 1024, "frames": 121}
        with client.stream_video("a wave", **asked) as stream:
            next(stream)
            # 363 MiB of frames, of which nobody reads any.
            until(client, lambda status: status.jobs == ())
            assert ended(client, stream.job_id).state == "cancelled"
            with pytest.raises(moored.SlowReader):
                stream.result()
        assert len(client.generate_video("a wave", model="video").array) == FRAMES
        assert_at_rest(client)


def test_streams_of_one_job_get_the_same_file(simulate: Simulate, tmp_path: Path) -> None:
    with simulate(arguments=slow_decoders(tmp_path, 300)).client() as client:
        asked: dict[str, Any] = {
            "model": "slow-video",
            "output": "mp4",
            "seed": 3,
            "idempotency_key": "k",
        }
        with client.stream_video("a wave", **asked) as first:
            for event in first:
                if isinstance(event, moored.StageStarted) and event.name == "decode":
                    break
            with client.stream_video("a wave", **asked) as second:
                file = second.result().mp4
            assert first.result().mp4 == file
        assert client.generate_video("a wave", **asked).mp4 == file
        assert len(read(file).frames) == FRAMES
        assert_at_rest(client)


def test_the_command_line_writes_and_repeats_films(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate()
    with service.client() as client:
        asked = client.generate_video("a wave", model="video", seed=7, frames=12)
    here: dict[str, Any] = {"cwd": tmp_path}
    film = ("film", "a wave", "--model", "video", "--seed", "7")
    made = service.run(*film, "--seconds", "0.5", "-o", "cat.mp4", **here)
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == "cat.mp4"
    file = (tmp_path / "cat.mp4").read_bytes()
    assert_close(read(file).frames, asked.array)
    # Nothing is overwritten unless that is asked for.
    again = service.run(*film, "-o", "cat.mp4", **here)
    assert again.returncode != 0
    assert "--force" in again.stderr
    assert (tmp_path / "cat.mp4").read_bytes() == file
    # Its own settings make it again, from the file alone; and a model names a film that is not named.
    repeated = service.run("generate", "--from", "cat.mp4", "--json", **here)
    assert repeated.returncode == 0, repeated.stderr
    events = [json.loads(line) for line in repeated.stdout.splitlines()]
    assert {event["media_type"] for event in events if event["event"] == "artifact"} == {
        "video/mp4"
    }
    assert {event["parts"] for event in events if event["event"] == "step"} == {0}
    (written,) = [event["path"] for event in events if event["event"] == "written"]
    assert written == "video-7.mp4"
    assert (tmp_path / written).read_bytes() == file
    # As frames, of which an animation is made here.
    animated = service.run("generate", "a wave", "-m", "video", "-o", "cat.apng", **here)
    assert animated.returncode == 0, animated.stderr
    assert (tmp_path / "cat.apng").read_bytes().startswith(b"\x89PNG")
    for wrong, why in [
        (("film", "a wave", "--medium", "image"), "makes films"),
        ((*film, "--lyrics", "la"), "--lyrics does not apply to a film"),
        ((*film, "--seconds", "2", "--frames", "9"), "cannot be used with"),
        ((*film, "-o", "cat.mov"), "not as .mov"),
        ((*film, "-W", "4096", "-H", "64"), "4096x64 is no size of an MP4"),
    ]:
        refused = service.run(*wrong, **here)
        assert refused.returncode != 0
        assert why in refused.stderr, refused.stderr
