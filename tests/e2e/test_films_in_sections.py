"""Films that are made section by section, the end of the film first: FramePack's, and instant ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from faults import assert_at_rest, kill_worker, retries
from numpy.typing import NDArray
from PIL import Image
from test_media import RATE, SIDE, assert_film
from tiny_models import film_models
from waiting import until

from service import INSTANT_MODELS, ROOT, Service

Simulate = Callable[..., Service]

FIXTURES = ROOT / "service/pipelines/fixtures"
SECTIONS, FRAMES = 3, 25
# As fixtures/make_hunyuan_fixtures.py asked the reference.
PROMPT = "a red circle on the left of a blue square"
ASKED: dict[str, Any] = {
    "width": 48,
    "height": 32,
    "steps": 2,
    "guidance": 6.0,
    "seed": 7,
    "max_sequence_length": 64,
}


def in_sections(folder: Path) -> tuple[str, ...]:
    """Settings with `sections` and `slow-sections`, whose films are made in three of them."""
    models = folder / "models"
    models.mkdir()
    model = json.loads((INSTANT_MODELS / "video.instant.json").read_text(encoding="utf-8"))
    for name, steps_ms in (("sections", 0), ("slow-sections", 800)):
        one = model | {"name": name, "sections": SECTIONS, "steps_ms": steps_ms}
        (models / f"{name}.instant.json").write_text(json.dumps(one), encoding="utf-8")
    return ("--models", str(models))


def framepack(folder: Path) -> tuple[str, ...]:
    """Settings with `framepack` and `hunyuan`, the tiny models of the fixtures."""
    film_models(folder / "models")
    return ("--models", str(folder / "models"))


def stages(events: list[moored.Event]) -> list[str]:
    return [event.name for event in events if isinstance(event, moored.StageStarted)]


def pieces(events: list[moored.Event]) -> list[moored.Artifact]:
    return [event for event in events if isinstance(event, moored.Artifact)]


def expected() -> dict[str, NDArray[np.uint8]]:
    """What the reference answers: the tensors of bytes of a safetensors file."""
    content = (FIXTURES / "hunyuan-tiny/expected/pipelines.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    found = {}
    for name, tensor in header.items():
        if tensor.get("dtype") == "U8":
            first, last = tensor["data_offsets"]
            data = np.frombuffer(content[8 + length + first : 8 + length + last], np.uint8)
            found[name] = data.reshape(tensor["shape"])
    return found


def start_picture() -> Image.Image:
    """The picture that the reference starts from."""
    return Image.fromarray(expected()["start"])


def kept(film: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Those of a film's frames that the fixtures have."""
    described = json.loads((FIXTURES / "hunyuan-tiny/expected/pipelines.json").read_text())
    return film[[frame for frame in described["frames"] if frame < len(film)]]


def test_the_end_of_a_film_comes_first(simulate: Simulate, tmp_path: Path) -> None:
    with simulate(arguments=in_sections(tmp_path)).client() as client:
        stream = client.stream_video("a wave", model="sections", seed=7, output="raw")
        events = list(stream)
        assert stages(events) == ["encode_text", *["denoise", "decode"] * SECTIONS]
        result = stream.result()
        assert_film(result.array)
        offsets = [piece.offset for piece in pieces(events)]
        assert offsets[0] > 0 and 0 in offsets and offsets != sorted(offsets), offsets
        assert [piece.last for piece in pieces(events)].count(True) == 1
        assert pieces(events)[-1].last
        # A decode is told of before the next sampling begins: each section is there to be seen.
        kinds = [type(e) for e in events if isinstance(e, (moored.StageStarted, moored.Artifact))]
        first_piece = kinds.index(moored.Artifact)
        assert kinds[first_piece:].count(moored.StageStarted) == 2 * (SECTIONS - 1)
        whole = client.generate_video("a wave", model="video", seed=7)
        assert (whole.array == result.array).all(), "sections change no frame"
        assert_at_rest(client)


def test_steps_say_which_section_they_are_of(simulate: Simulate, tmp_path: Path) -> None:
    with simulate(arguments=in_sections(tmp_path)).client() as client:
        events = list(client.stream_video("a wave", model="sections", seed=7))
        started = [e for e in events if isinstance(e, moored.StageStarted) and e.name == "denoise"]
        assert [(e.part, e.parts) for e in started] == [(n, SECTIONS) for n in (1, 2, 3)]


def test_a_worker_that_dies_costs_only_the_section_under_way(
    simulate: Simulate, tmp_path: Path
) -> None:
    with simulate(arguments=in_sections(tmp_path)).client() as client:
        # Few frames, as each section's are decoded in pieces, which come as far apart as steps.
        asked: dict[str, Any] = {"seed": 7, "frames": 2 * SECTIONS}
        whole = client.generate_video("a wave", model="sections", **asked).array
        events: list[moored.Event] = []
        with client.stream_video("a wave", model="slow-sections", **asked) as stream:
            for event in stream:
                events.append(event)
                started = stages(events)
                if isinstance(event, moored.Step) and started.count("denoise") == 2:
                    kill_worker(client)
                    break
            events.extend(stream)
        assert retries(events) == [("WORKER_DIED", "denoise")]
        assert (stream.result().array == whole).all()
        # The first section was sampled and decoded once, the second sampled twice.
        assert stages(events).count("denoise") == SECTIONS + 1
        assert stages(events).count("decode") == SECTIONS
        until(client, lambda status: status.cards[0].worker_restarts == 1)
        assert_at_rest(client)


def test_the_latent_of_a_film_in_sections(simulate: Simulate, tmp_path: Path) -> None:
    with simulate(arguments=in_sections(tmp_path)).client() as client:
        result = client.generate_video("a wave", model="sections", seed=7, keep_latent=True)
        (latent,) = result.latents
        assert [t.name for t in latent.tensors] == [f"latent_{n + 1}" for n in range(SECTIONS)]
        decoded = client.decode_video(latent, model="sections")
        assert (decoded.array == result.array).all()
        sampled = client.generate_video("a wave", model="sections", seed=7, latent_only=True)
        assert sampled.films == ()
        decoded = client.decode_video(sampled.latents[0], model="sections")
        assert (decoded.array == result.array).all()


def test_two_films_in_sections(simulate: Simulate, tmp_path: Path) -> None:
    with simulate(arguments=in_sections(tmp_path)).client() as client:
        result = client.generate_video("a wave", model="sections", seed=7, count=2)
        for number, film in enumerate(result.films):
            assert_film(film.array)
            assert film.seed == 7 + number
        assert (SIDE, RATE) == (result.films[0].array.shape[1], result.frames_per_second)


@pytest.mark.parametrize("policy", ["shared", "exclusive"])
def test_framepack_gives_the_references_frames(
    simulate: Simulate, tmp_path: Path, policy: str
) -> None:
    arguments = (*framepack(tmp_path), "--set", f"cards.policy={policy}")
    with simulate("cpu", arguments=arguments).client() as client:
        answers = expected()
        stream = client.stream_video(
            PROMPT, model="framepack", frames=109, init_image=start_picture(), **ASKED
        )
        events = list(stream)
        result = stream.result()
        assert result.array.shape == (109, 32, 48, 3)
        assert result.frames_per_second == 30.0
        found, answer = kept(result.array).astype(int), answers["i2v.3.frames"].astype(int)
        assert np.abs(found - answer).max() <= 1
        assert (found != answer).mean() < 0.01
        assert stages(events)[-6:] == ["denoise", "decode"] * 3
        assert_at_rest(client)


@pytest.mark.parametrize("frames_at_a_time", [16, 4, 1])
def test_frames_at_a_time_change_no_pixel(
    simulate: Simulate, tmp_path: Path, frames_at_a_time: int
) -> None:
    asked: dict[str, Any] = ASKED | {"frames": 37, "init_image": start_picture()}
    with simulate("cpu", arguments=framepack(tmp_path)).client() as client:
        whole = client.generate_video(PROMPT, model="framepack", **asked)
        stream = client.stream_video(
            PROMPT, model="framepack", output="raw", frames_at_a_time=frames_at_a_time, **asked
        )
        sent = [len(piece.chunk) for piece in pieces(list(stream))]
        assert (stream.result().array == whole.array).all()
        assert max(sent) <= frames_at_a_time * 48 * 32 * 3
        assert sum(sent) == 37 * 48 * 32 * 3


def test_hunyuan_video_gives_the_references_frames(simulate: Simulate, tmp_path: Path) -> None:
    with simulate("cpu", arguments=framepack(tmp_path)).client() as client:
        result = client.generate_video(
            PROMPT, model="hunyuan", frames=33, **(ASKED | {"steps": 3, "seed": 5})
        )
        found = kept(result.array).astype(int)
        assert np.abs(found - expected()["film.frames"].astype(int)).max() <= 1


def test_a_film_ends_with_a_picture_and_away_from_a_prompt(
    simulate: Simulate, tmp_path: Path
) -> None:
    asked: dict[str, Any] = ASKED | {"frames": 37, "init_image": start_picture()}
    end = Image.fromarray(expected()["end"])
    service = simulate("cpu", arguments=framepack(tmp_path))
    with service.client() as client:
        plain = client.generate_video(PROMPT, model="framepack", **asked)
        stream = client.stream_video(PROMPT, model="framepack", end_image=end, **asked)
        assert "encode_end" in stages(list(stream))
        ended = stream.result()
        uploaded = client.put_media(end)
        same = client.generate_video(PROMPT, model="framepack", end_image=uploaded, **asked)
        assert (same.array == ended.array).all()
        away = {"negative_prompt": "a square", "true_guidance": 3.0}
        guided = client.generate_video(PROMPT, model="framepack", end_image=end, **away, **asked)
        films = [plain.array, ended.array, guided.array]
        assert all((one != other).any() for one, other in pairwise(films))
        assert ended.film.recipe["pictures"] == ["end"]
        assert guided.film.recipe["negative_prompt"] == "a square"
        with pytest.raises(moored.InvalidRequest, match="end_image"):
            client.generate_video(PROMPT, model="hunyuan", end_image=end, frames=33, **ASKED)
        with pytest.raises(moored.InvalidRequest, match="end_image"):
            client.generate_video(PROMPT, model="framepack", end_image=b"no picture", **asked)
        assert_at_rest(client)
    start_picture().save(tmp_path / "start.png")
    end.save(tmp_path / "end.png")
    film = (
        "film",
        PROMPT,
        "-m",
        "framepack",
        "--init",
        "start.png",
        "--end",
        "end.png",
        "-W48",
        "-H32",
    )
    settings = ("--frames", "37", "--steps", "2", "--seed", "7", "--guidance", "6")
    tokens = ("--max-sequence-length", "64", "-o", "ended.mp4")
    made = service.run(*film, *settings, *tokens, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "ended.mp4").read_bytes() == ended.mp4
    without = service.run("generate", "--from", "ended.mp4", "--init", "start.png", cwd=tmp_path)
    assert "--end" in without.stderr


def test_framepack_sends_previews(simulate: Simulate, tmp_path: Path) -> None:
    # Far more steps than fit between two previews.
    asked = ASKED | {"steps": 100, "frames": 37, "init_image": start_picture()}
    with simulate("cpu", arguments=framepack(tmp_path)).client() as client:
        stream = client.stream_video(PROMPT, model="framepack", preview_interval_s=0.1, **asked)
        previews = [event for event in stream if isinstance(event, moored.Preview)]
        assert previews
        assert stream.result().array.shape == (37, 32, 48, 3)


def test_a_field_out_of_bounds_is_refused_by_name(simulate: Simulate, tmp_path: Path) -> None:
    with simulate("cpu", arguments=framepack(tmp_path)).client() as client:
        start = start_picture()
        with pytest.raises(moored.InvalidRequest, match="frames"):
            client.generate_video(PROMPT, model="framepack", frames=40, init_image=start, **ASKED)
        with pytest.raises(moored.InvalidRequest, match="init_image"):
            client.generate_video(PROMPT, model="framepack", frames=37, **ASKED)
        with pytest.raises(moored.InvalidRequest, match="init_image"):
            client.generate_video(PROMPT, model="hunyuan", frames=33, init_image=start, **ASKED)
        assert_at_rest(client)
