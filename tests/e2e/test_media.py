"""Films and tracks: complete, in pieces, through faults, and as latents."""

from __future__ import annotations

import io
import json
import time
import wave
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from faults import assert_at_rest, ended, kill_worker, retries
from numpy.typing import NDArray
from PIL import Image
from waiting import until

from service import INSTANT_MODELS, Service

Simulate = Callable[..., Service]

# As tests/models/instant says.
FRAMES, SIDE, RATE = 25, 64, 24.0
SAMPLE_RATE, CHANNELS, SECONDS = 48_000, 2, 2.0
SAMPLES = round(SAMPLE_RATE * SECONDS)
DEADLINE_S = 60.0


def slow_decoders(folder: Path, steps_ms: int = 500) -> tuple[str, ...]:
    """Settings with `slow-video` and `slow-track`, whose pieces come this far apart."""
    models = folder / "models"
    models.mkdir()
    for name in ("video", "track"):
        model = json.loads((INSTANT_MODELS / f"{name}.instant.json").read_text(encoding="utf-8"))
        model |= {"name": f"slow-{name}", "steps_ms": steps_ms}
        model["defaults"]["steps"] = 1
        (models / f"slow-{name}.instant.json").write_text(json.dumps(model), encoding="utf-8")
    return ("--models", str(models))


def assert_film(array: NDArray[np.uint8], frames: int = FRAMES) -> None:
    """Each frame of an instant film is of one colour, and a little redder than the one before it."""
    assert array.shape == (frames, SIDE, SIDE, 3)
    assert (array == array[:, :1, :1]).all()
    colours = array[:, 0, 0].astype(int)
    reds = (colours[0, 0] + np.arange(frames)) % 256
    assert colours[:, 0].tolist() == reds.tolist()
    assert (colours[:, 1:] == colours[0, 1:]).all()


def bytes_of(events: list[moored.Event], index: int = 0) -> bytes:
    """The chunks of an item, one behind the other as they came."""
    pieces = [e for e in events if isinstance(e, moored.Artifact) and e.index == index]
    return b"".join(piece.chunk for piece in pieces)


def first_piece(stream: moored.EventStream[Any]) -> list[moored.Event]:
    """Reads up to the first piece of a result."""
    seen: list[moored.Event] = []
    for event in stream:
        seen.append(event)
        if isinstance(event, moored.Artifact):
            return seen
    raise AssertionError(f"there is none in {seen}")


# Whole.


def test_models_say_what_they_generate(simulate: Simulate) -> None:
    with simulate().client() as client:
        models = {model.id: model for model in client.list_models()}
        media = {name: models[name].media for name in ("video", "track", "small", "moored/demo")}
        assert media == {
            "video": "video",
            "track": "audio",
            "small": "image",
            "moored/demo": "image",
        }
        video, track = models["video"].defaults, models["track"].defaults
        assert (video.frames, video.frames_per_second, video.seconds) == (FRAMES, RATE, 0)
        assert (video.width, video.height) == (SIDE, SIDE)
        assert (track.seconds, track.frames, track.width, track.height) == (SECONDS, 0, 0, 0)
        assert models["small"].defaults.frames == 0


def test_a_film(simulate: Simulate, tmp_path: Path) -> None:
    with simulate().client() as client:
        stream = client.stream_video("a wave", model="video", seed=7, output="raw")
        events = list(stream)
        stages = [event.name for event in events if isinstance(event, moored.StageStarted)]
        assert stages == ["encode_text", "denoise", "decode"]
        result = stream.result()
        assert_film(result.array)
        assert bytes_of(events) == bytes(result.film.data)
        assert result.frames_per_second == RATE
        assert (result.seed, result.film.seed, result.film.index) == (7, 7, 0)
        assert (result.film.media_type, result.film.track) == ("video/x-raw-rgb", "")
        assert (result.metadata["width"], result.metadata["height"]) == (str(SIDE), str(SIDE))
        recipe = json.loads(result.metadata["recipe"])
        assert (recipe["frames"], recipe["frames_per_second"]) == (FRAMES, RATE)
        assert (recipe["prompt"], recipe["model"]) == ("a wave", "video")
        result.save(tmp_path / "film.png")
        with Image.open(tmp_path / "film.png") as saved:
            assert saved.n_frames == FRAMES
        again = client.generate_video("a wave", model="video", seed=7)
        assert (again.array == result.array).all()
        other = client.generate_video("a wave", model="video", seed=8)
        assert (other.array != result.array).any()
        assert_at_rest(client)


def test_a_film_as_it_is_asked_for(simulate: Simulate) -> None:
    with simulate().client() as client:
        result = client.generate_video(
            "a wave",
            model="video",
            width=96,
            height=32,
            frames=7,
            frames_per_second=23.976,
            omit_metadata=True,
        )
        assert result.array.shape == (7, 32, 96, 3)
        assert result.frames_per_second == pytest.approx(23.976)
        assert "prompt" not in result.metadata
        # More than one message for each of its pieces.
        large = client.generate_video("a wave", model="video", width=512, height=512, frames=17)
        assert large.array.shape == (17, 512, 512, 3)
        reds = large.array[:, 0, 0, 0].astype(int)
        assert np.diff(reds).tolist() == [1 if b > a else -255 for a, b in pairwise(reds.tolist())]
        one = client.generate_video("a wave", model="video", frames=1)
        assert_film(one.array, 1)


def test_a_film_from_a_picture(simulate: Simulate) -> None:
    with simulate().client() as client:
        start = Image.new("RGB", (96, 32), (200, 30, 40))
        stream = client.stream_video("a wave", model="video", init_image=start, strength=0.01)
        events = list(stream)
        stages = [event.name for event in events if isinstance(event, moored.StageStarted)]
        assert stages == ["encode_text", "encode_image", "denoise", "decode"]
        array = stream.result().array
        assert array.shape == (FRAMES, 32, 96, 3)
        assert np.abs(array[0, 0, 0].astype(int) - (200, 30, 40)).max() <= 4


@pytest.mark.parametrize("output", ["wav", "raw"])
def test_a_track(simulate: Simulate, tmp_path: Path, output: moored.AudioOutput) -> None:
    with simulate().client() as client:
        stream = client.stream_audio("a drum", model="track", seed=7, output=output)
        events = list(stream)
        result = stream.result()
        track = result.track()
        assert bytes_of(events) == bytes(track.data)
        assert (track.index, track.name, track.seed) == (0, "", 7)
        assert (result.sample_rate, track.channels) == (SAMPLE_RATE, CHANNELS)
        assert result.array.shape == (SAMPLES, CHANNELS)
        assert (result.array == result.array[:1]).all()
        assert json.loads(result.metadata["recipe"])["seconds"] == SECONDS
        result.save(tmp_path / "track.wav")
        with wave.open(str(tmp_path / "track.wav")) as saved:
            assert (saved.getframerate(), saved.getnchannels()) == (SAMPLE_RATE, CHANNELS)
            assert (saved.getsampwidth(), saved.getnframes()) == (2, SAMPLES)
            assert saved.readframes(SAMPLES) == result.array.tobytes()
        if output == "wav":
            assert track.media_type == "audio/wav"
            with wave.open(io.BytesIO(track.data)) as sent:
                assert sent.getnframes() == SAMPLES
        else:
            assert (track.media_type, len(track.data)) == ("audio/x-raw-s16le", SAMPLES * 4)
        shorter = client.generate_audio("a drum", model="track", seconds=0.5, output=output)
        assert shorter.array.shape == (SAMPLE_RATE // 2, CHANNELS)
        assert_at_rest(client)


def test_the_lyrics_of_a_track_are_in_its_recipe(simulate: Simulate) -> None:
    with simulate().client() as client:
        sung = client.generate_audio("a song", model="track", lyrics="la la", seconds=0.2)
        assert json.loads(sung.metadata["recipe"])["lyrics"] == "la la"
        quiet = client.generate_audio("a song", model="track", seconds=0.2, omit_metadata=True)
        assert set(quiet.metadata) == {"seed"}


# As it arrives.


def test_frames_arrive_before_the_end(simulate: Simulate, tmp_path: Path) -> None:
    with (
        simulate(arguments=slow_decoders(tmp_path, 1500)).client() as client,
        client.stream_video("a wave", model="slow-video", seed=7) as stream,
    ):
        arrived: list[tuple[int, float]] = []
        for frame in stream.frames():
            arrived.append((frame.number, time.monotonic()))
            if frame.number == 0:
                assert stream.films == ()
                (job,) = client.status().jobs
                assert (job.id, job.state, job.stage) == (stream.job_id, "running", "decode")
        assert [number for number, _ in arrived] == [*range(FRAMES)]
        # The decode goes on for three pieces more, a second and a half each.
        assert arrived[-1][1] - arrived[0][1] > 1.0
        assert_film(stream.result().array)


def test_pieces_of_a_film_come_in_order_and_say_when_it_is_whole(
    simulate: Simulate, tmp_path: Path
) -> None:
    with simulate(arguments=slow_decoders(tmp_path, 50)).client() as client:
        events = list(client.stream_video("a wave", model="slow-video", output="raw"))
        pieces = [event for event in events if isinstance(event, moored.Artifact)]
        assert len(pieces) > 2
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [piece.video is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert pieces[0].video == moored.VideoFormat(SIDE, SIDE, FRAMES, RATE)
        assert pieces[0].total_bytes == FRAMES * SIDE * SIDE * 3
        assert {bool(piece.metadata) for piece in pieces[1:]} == {False}
        assert pieces[0].at_ms < pieces[-1].at_ms
        assert isinstance(events[-1], moored.Done)


def test_samples_arrive_before_the_end(simulate: Simulate, tmp_path: Path) -> None:
    with (
        simulate(arguments=slow_decoders(tmp_path, 1500)).client() as client,
        client.stream_audio("a drum", model="slow-track") as stream,
    ):
        arrived = []
        for samples in stream.samples():
            arrived.append(samples)
            if samples.first == 0:
                assert stream.tracks == ()
                (job,) = client.status().jobs
                assert (job.state, job.stage) == ("running", "decode")
        assert len(arrived) > 2
        lengths = [len(samples.array) for samples in arrived]
        assert [samples.first for samples in arrived] == [
            sum(lengths[:place]) for place in range(len(lengths))
        ]
        assert sum(lengths) == SAMPLES
        whole = stream.result().array
        assert (np.concatenate([samples.array for samples in arrived]) == whole).all()


@pytest.mark.parametrize("medium", ["video", "audio"])
def test_a_cancel_in_the_middle_leaves_nothing(
    simulate: Simulate, tmp_path: Path, medium: str
) -> None:
    with simulate(arguments=slow_decoders(tmp_path)).client() as client:
        ask = {
            "video": lambda: client.stream_video("x", model="slow-video", count=20),
            "audio": lambda: client.stream_audio("x", model="slow-track", count=20),
        }[medium]
        with ask() as stream:
            first_piece(stream)
            began = time.monotonic()
            assert client.cancel(stream.job_id)
            with pytest.raises(moored.Cancelled) as cancelled:
                stream.result()
            assert time.monotonic() - began < 8, "each takes two seconds"
            assert cancelled.value.latents == ()
        until(client, lambda status: status.jobs == ())
        assert ended(client, stream.job_id).state == "cancelled"
        assert client.status().latents == 0
        assert_at_rest(client)
        # Leaving the stream is the same.
        with ask() as stream:
            first_piece(stream)
        until(client, lambda status: status.jobs == ())
        assert ended(client, stream.job_id).state == "cancelled"
        assert_at_rest(client)


def test_two_films_and_two_tracks(simulate: Simulate) -> None:
    with simulate().client() as client:
        films = client.generate_video("a wave", model="video", seed=7, count=2).films
        assert [(film.index, film.seed) for film in films] == [(0, 7), (1, 8)]
        for film in films:
            assert_film(film.array)
            alone = client.generate_video("a wave", model="video", seed=film.seed)
            assert (alone.array == film.array).all()
        tracks = client.generate_audio("a drum", model="track", seed=7, count=2).tracks
        assert [(track.index, track.name, track.seed) for track in tracks] == [
            (0, "", 7),
            (1, "", 8),
        ]
        for track in tracks:
            alone = client.generate_audio("a drum", model="track", seed=track.seed)
            assert (alone.array == track.array).all()
        assert (tracks[0].array[0] != tracks[1].array[0]).any()


def test_a_client_that_joins_in_the_middle_gets_the_whole_result(
    simulate: Simulate, tmp_path: Path
) -> None:
    with simulate(arguments=slow_decoders(tmp_path)).client() as client:
        asked: dict[str, Any] = {"model": "slow-video", "seed": 3, "idempotency_key": "k"}
        asked["output"] = "raw"
        with client.stream_video("a wave", **asked) as first:
            first_piece(first)
            with client.stream_video("a wave", **asked) as second:
                joined = list(second)
                assert isinstance(joined[0], moored.Accepted)
                assert joined[0].joined
                assert second.job_id == first.job_id
            whole = first.result().array
        assert_film(whole)
        assert bytes_of(joined) == whole.tobytes()
        late = list(client.stream_video("a wave", **asked))
        assert bytes_of(late) == whole.tobytes()
        assert_at_rest(client)


# As latents.


def test_the_latent_of_a_film(simulate: Simulate) -> None:
    with simulate().client() as client:
        stream = client.stream_video("a wave", model="video", seed=7, latent_only=True)
        stages = [event.name for event in stream if isinstance(event, moored.StageStarted)]
        assert stages == ["encode_text", "denoise"]
        result = stream.result()
        assert result.films == ()
        (latent,) = result.latents
        assert latent.shape == (1, 4, FRAMES, SIDE // 8, SIDE // 8)
        assert [tensor.shape for tensor in latent.tensors] == [latent.shape]
        whole = client.generate_video("a wave", model="video", seed=7)
        decoded = client.decode_video(latent, model="video")
        assert (decoded.array == whole.array).all()
        assert decoded.frames_per_second == RATE
        assert "prompt" not in decoded.metadata
        # As a start: nearly none of the way, and all of it.
        near = client.generate_video(
            "a wave", model="video", seed=8, init_latent=latent, strength=0.004
        )
        assert np.abs(near.array[0].astype(int) - whole.array[0]).max() <= 1
        stream = client.stream_video("a wave", model="video", seed=8, init_latent=latent)
        stages = [event.name for event in stream if isinstance(event, moored.StageStarted)]
        assert stages == ["encode_text", "denoise", "decode"]
        assert_film(stream.result().array)
        # Out and back.
        read = client.get_latent(latent)
        assert read.array.shape == latent.shape
        brought = client.put_latent(read)
        assert (client.decode_video(brought, model="video").array == whole.array).all()
        assert client.get_latent(brought).data == read.data


def test_the_latent_of_a_track(simulate: Simulate) -> None:
    with simulate().client() as client:
        result = client.generate_audio("a drum", model="track", seed=7, latent_only=True)
        assert result.tracks == ()
        (latent,) = result.latents
        assert latent.shape == (1, 4, round(SECONDS * 10))
        whole = client.generate_audio("a drum", model="track", seed=7)
        decoded = client.decode_audio(latent, model="track")
        assert (decoded.array == whole.array).all()
        assert decoded.sample_rate == SAMPLE_RATE
        assert decoded.tracks[0].media_type == whole.tracks[0].media_type == "audio/wav"
        near = client.generate_audio(
            "a drum", model="track", seed=8, init_latent=latent, strength=0.004
        )
        assert np.abs(near.array[0].astype(int) - whole.array[0]).max() <= 100
        brought = client.put_latent(client.get_latent(latent))
        assert (client.decode_audio(brought, model="track").array == whole.array).all()


def test_a_kept_latent_comes_beside_the_film(simulate: Simulate) -> None:
    with simulate().client() as client:
        result = client.generate_video("a wave", model="video", count=2, keep_latent=True)
        assert len(result.latents) == len(result.films) == 2
        for latent, film in zip(result.latents, result.films, strict=True):
            assert (client.decode_video(latent, model="video").array == film.array).all()
        with pytest.raises(moored.LatentMismatch, match="small"):
            client.decode_latent(result.latents[0], model="small")
        with pytest.raises(moored.LatentMismatch) as refused:
            client.generate_video("x", model="video", init_latent=result.latents[0], frames=9)
        assert "[1, 4, 25, 8, 8]" in refused.value.message
        assert "[1, 4, 9, 8, 8]" in refused.value.message


# Refused.


@pytest.mark.parametrize("plans", [False, True], ids=["generate", "plan"])
@pytest.mark.parametrize(
    ("asked", "model", "made"),
    [
        ("video", "small", "pictures"),
        ("audio", "small", "pictures"),
        ("image", "video", "films"),
        ("audio", "video", "films"),
        ("image", "track", "music"),
        ("video", "track", "music"),
    ],
)
def test_another_medium_is_refused(
    simulate: Simulate, asked: str, model: str, made: str, plans: bool
) -> None:
    with simulate().client() as client:
        plan = {"image": client.plan, "video": client.plan_video, "audio": client.plan_audio}
        generate: Any = plan[asked] if plans else getattr(client, f"generate_{asked}")
        with pytest.raises(moored.InvalidRequest, match=f"makes {made}") as refused:
            generate("x", model=model)
        assert [violation.field for violation in refused.value.violations] == ["model"]
        assert client.jobs(include_ended=True) == ()


def test_a_wrong_field_of_a_film_or_track_is_named(simulate: Simulate) -> None:
    with simulate().client() as client:
        with pytest.raises(moored.InvalidRequest) as refused:
            client.generate_video(
                "x", model="video", frames=1001, frames_per_second=1000, steps=999
            )
        fields = {violation.field for violation in refused.value.violations}
        assert fields == {"frames", "frames_per_second", "steps"}
        for rate in (float("nan"), float("inf"), -1):
            with pytest.raises(moored.InvalidRequest, match="frames_per_second"):
                client.generate_video("x", model="video", frames_per_second=rate)
        for seconds in (float("nan"), float("inf"), -1, 0.01, 1e9):
            with pytest.raises(moored.InvalidRequest, match="seconds"):
                client.generate_audio("x", model="track", seconds=seconds)
        with pytest.raises(moored.InvalidRequest, match="init_image"):
            client.generate_video("x", model="video", init_image=b"no picture")
        with pytest.raises(moored.InvalidRequest, match="width"):
            client.generate_video("x", model="video", width=17)


def test_a_request_that_exceeds_the_card_is_refused_with_one_that_fits(simulate: Simulate) -> None:
    # `video`: 4 MiB of activations for 25 frames of 64x64; `track`: 2 MiB for two seconds.
    with simulate("sim:1GiB").client() as client:
        with pytest.raises(moored.NeverFits) as refused:
            client.generate_video("x", model="video", width=512, height=512, frames=200)
        labels = [fallback.label for fallback in refused.value.fallbacks]
        sides = [label for label in labels if "x" in label]
        lengths = [label for label in labels if label.endswith("frames")]
        assert "256x256" in sides
        assert "50 frames" in lengths
        assert refused.value.needed_bytes > refused.value.capacity_bytes
        for label in (sides[0], lengths[0]):
            smaller: dict[str, Any] = {"width": 512, "height": 512, "frames": 200}
            if label.endswith("frames"):
                smaller["frames"] = int(label.split()[0])
            else:
                smaller["width"], smaller["height"] = (int(side) for side in label.split("x"))
            assert client.plan_video("x", model="video", **smaller).runs_now, label
    with simulate("sim:512MiB").client() as client:
        with pytest.raises(moored.NeverFits) as refused:
            client.generate_audio("x", model="track", seconds=400)
        labels = [fallback.label for fallback in refused.value.fallbacks]
        assert labels
        assert all(label.endswith(" s") for label in labels)
        assert "100 s" in labels
        longest = float(labels[0].split()[0])
        assert client.plan_audio("x", model="track", seconds=longest).runs_now


def test_a_plan_of_each_medium(simulate: Simulate) -> None:
    with simulate().client() as client:
        film = client.plan_video("x", model="video")
        longer = client.plan_video("x", model="video", frames=2 * FRAMES)
        track = client.plan_audio("x", model="track")
        assert [stage.name for stage in film.stages] == ["encode_text", "denoise", "decode"]
        assert [stage.name for stage in track.stages] == ["encode_text", "denoise", "decode"]
        assert film.runs_now
        assert track.runs_now
        denoise = {plan.stages[1].scratch_bytes for plan in (film, longer)}
        assert len(denoise) == 2
        assert client.jobs(include_ended=True) == ()


# Faults.


@pytest.mark.parametrize("medium", ["video", "audio"])
def test_a_worker_killed_in_a_decode_loses_no_frame(
    simulate: Simulate, tmp_path: Path, medium: str
) -> None:
    with simulate(arguments=slow_decoders(tmp_path, 2000)).client() as client:
        generate: Any = {"video": client.generate_video, "audio": client.generate_audio}[medium]
        ask: Any = {"video": client.stream_video, "audio": client.stream_audio}[medium]
        quick, model = {
            "video": ("video", "slow-video"),
            "audio": ("track", "slow-track"),
        }[medium]
        whole = generate("x", model=quick, steps=1, seed=7).array
        output = {"video": "raw", "audio": "wav"}[medium]
        with ask("x", model=model, seed=7, output=output) as stream:
            events = first_piece(stream)
            kill_worker(client)
            events.extend(stream)
        assert retries(events) == [("WORKER_DIED", "decode")]
        assert isinstance(events[-1], moored.Done)
        # Nothing twice, nothing left out: the result is put together from the same chunks.
        result = stream.result()
        assert (result.array == whole).all()
        data = result.film.data if medium == "video" else result.track().data
        assert bytes_of(events) == bytes(data)
        lasts = [event.last for event in events if isinstance(event, moored.Artifact)]
        assert lasts == [False] * (len(lasts) - 1) + [True]
        started = [event.name for event in events if isinstance(event, moored.StageStarted)]
        assert started.count("denoise") == 1, "paid for once"
        until(client, lambda status: status.cards[0].worker_restarts == 1)
        assert_at_rest(client)


def test_frames_continue_where_a_killed_worker_stopped(simulate: Simulate, tmp_path: Path) -> None:
    """The worker is killed between two pieces in the middle of the second film."""
    with (
        simulate(arguments=slow_decoders(tmp_path)).client() as client,
        client.stream_video("x", model="slow-video", seed=7, count=2) as stream,
    ):
        seen = []
        for frame in stream.frames():
            seen.append((frame.index, frame.number))
            if seen[-1] == (1, FRAMES // 2):
                kill_worker(client)
        assert seen == [(index, number) for index in (0, 1) for number in range(FRAMES)]
        for film in stream.result().films:
            assert_film(film.array)
    assert stream.films[0].seed == 7


def test_a_decode_that_kills_two_workers_leaves_the_latent_of_the_film(
    simulate: Simulate, tmp_path: Path
) -> None:
    with simulate(arguments=slow_decoders(tmp_path, 2000)).client() as client:
        stream = client.stream_video("x", model="slow-video", seed=7)
        with stream, pytest.raises(moored.WorkerDied) as died:
            first_piece(stream)
            kill_worker(client)
            next(e for e in stream if isinstance(e, moored.Retrying))
            first_piece(stream)
            kill_worker(client)
            list(stream)
        (latent,) = died.value.latents
        client.wait_until_ready()
        assert_film(client.decode_video(latent, model="slow-video").array)
        assert_at_rest(client)


def test_a_hung_decode_of_a_film_is_tried_again(simulate: Simulate) -> None:
    service = simulate("sim:24GiB,hang-at=decode:1", arguments=("--set", "queue.stall_limit=8s"))
    with service.client() as client:
        stream = client.stream_video("x", model="video", timeout=DEADLINE_S)
        events = list(stream)
        assert retries(events) == [("WORKER_DIED", "decode")]
        assert_film(stream.result().array)
        assert_at_rest(client)


def test_a_film_that_is_not_finite_is_refused_before_it_is_decoded(
    simulate: Simulate, tmp_path: Path
) -> None:
    arguments = slow_decoders(tmp_path, 10)
    path = tmp_path / "models" / "slow-video.instant.json"
    model = json.loads(path.read_text(encoding="utf-8"))
    model["not_finite_at_step"] = 1
    path.write_text(json.dumps(model), encoding="utf-8")
    with simulate(arguments=arguments).client() as client:
        stream = client.stream_video("x", model="slow-video")
        events: list[moored.Event] = []
        with pytest.raises(moored.NotFinite):
            events.extend(stream)
        assert bytes_of(events) == b""
        assert_at_rest(client)


@pytest.mark.parametrize("model", ["video", "track"])
def test_a_model_of_any_medium_is_proven(simulate: Simulate, model: str) -> None:
    with simulate().client() as client:
        result = client.load(model, prove=True)
        assert {stage.name for stage in result.stages} >= {"denoise", "decode"}
        replaced = client.load("small", replace=model)
        assert replaced.model.id == "small"
        assert replaced.freed
