"""Films: what Generate Video gives, shows and says, on the real service."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored
import pytest
from headless import Headless
from lora_files import instant_adapter
from PIL import ExifTags, Image
from waiting import until

from service import Service, model_as

Simulate = Callable[..., moored.Client]
VALUES: dict[str, Any] = {"prompt": "a red circle moves", "model": "video", "seed": 7, "steps": 2}


def outputs(node: Any) -> dict[str, Any]:
    return dict(node.parameter_output_values)


def first_frame(node: Any) -> Image.Image:
    """The first frame of the file that a node gave, read as the engine reads it."""
    from griptape.artifacts import VideoUrlArtifact
    from griptape_nodes.files.file import File

    artifact = outputs(node)["video"]
    assert type(artifact) is VideoUrlArtifact
    assert isinstance(artifact.value, str)
    data = File(artifact.value).read_bytes()
    assert artifact.value.endswith(".webp"), "the ending is that of what is in it"
    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def fails(engine: Headless, node: Any) -> str:
    """Runs the workflow, which fails; the sentence that the node says."""
    assert engine.do(engine.run()).failed()
    said = str(outputs(node)["result_details"])
    assert said.endswith("."), said
    assert "\n" not in said
    assert "video" not in outputs(node)
    return said


def succeeds(engine: Headless) -> None:
    result = engine.do(engine.run())
    assert result.succeeded(), result.result_details


def close(frame: Image.Image, own: moored.Film) -> None:
    """A frame of a client's film, which is of one colour, but for the rounding of its file."""
    other = own.frame(0).image
    assert frame.size == other.size
    pairs = zip(frame.getpixel((9, 9)), other.getpixel((9, 9)), strict=True)
    assert all(abs(one - two) <= 8 for one, two in pairs)


def test_a_prompt_becomes_a_film_by_url(simulate: Simulate, nowhere: Headless) -> None:
    client = simulate()
    node = nowhere.do(nowhere.node("GenerateVideo", frames=5, width=96, height=32, **VALUES))
    succeeds(nowhere)
    size: dict[str, Any] = {"frames": 5, "width": 96, "height": 32}
    own = client.generate_video(VALUES["prompt"], model="video", seed=7, steps=2, **size)
    close(first_frame(node), own.film)
    shown = outputs(node)
    assert (shown["was_successful"], shown["progress"], shown["status"]) == (True, 1.0, "Done")
    assert "seed 7, 5 frames of 96 x 32, 0.2 s long" in shown["result_details"]
    assert {"encode_text", "denoise", "decode", "total_s"} <= set(shown["timings"])
    for words in ("Denoising", "Step 2/2", "Decoding", "Done in"):
        assert words in shown["logs"]


def test_a_film_starts_from_a_picture_and_has_its_shape(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    simulate()
    source = tmp_path / "upright.jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # the camera was turned: it is 500 x 750
    Image.new("RGB", (750, 500), "teal").save(source, exif=exif)
    node = nowhere.do(nowhere.node("GenerateVideo", frames=2, input_image=str(source), **VALUES))
    for named, size in (
        ({}, (48, 80)),  # of as many pixels as the model's own 64 x 64
        ({"width": 32}, (32, 48)),
        ({"width": 64, "height": 32}, (64, 32)),
    ):
        nowhere.do(nowhere.set(node, **named))
        succeeds(nowhere)
        assert "2 frames of {} x {}, ".format(*size) in outputs(node)["result_details"]
        assert "Encoding the picture" in outputs(node)["logs"]


@pytest.mark.parametrize(
    ("named", "frames"),
    [({}, 25), ({"seconds": 0.25}, 6), ({"seconds": 0.5, "fps": 10.0}, 5), ({"frames": 3}, 3)],
)
def test_a_film_is_as_long_as_it_is_asked_to_be(
    simulate: Simulate, nowhere: Headless, named: dict[str, Any], frames: int
) -> None:
    simulate()
    node = nowhere.do(nowhere.node("GenerateVideo", **named, **VALUES))
    succeeds(nowhere)
    assert f" {frames} frames of " in outputs(node)["result_details"]


def slow_film(folder: Path) -> tuple[str, ...]:
    """Arguments of a service with a model `film`, which takes 5 s for 10 steps."""
    return ("--models", str(model_as(folder, "video", "film", steps_ms=500)))


async def at_a_step(nowhere: Headless, node: Any) -> asyncio.Task[Any]:
    """A run that has come to a step."""
    run = asyncio.create_task(nowhere.run())
    while not outputs(node).get("status", "").startswith("Step"):
        assert not run.done(), run.result()
        await asyncio.sleep(0.01)
    return run


def test_a_film_whose_run_was_lost_is_joined_by_the_same_run(
    nowhere: Headless, tmp_path: Path
) -> None:
    """As after an end of the engine: the line is lost, and the job goes on."""
    arguments = slow_film(tmp_path)
    options: dict[str, Any] = {"state": tmp_path / "state", "devices": ("sim:40GiB",)}
    service = Service(*arguments, **options)
    nowhere.do(nowhere.settings(endpoint=service.address))
    film = VALUES | {"model": "film", "steps": 10}
    node = nowhere.do(nowhere.node("GenerateVideo", **film))

    async def lost() -> None:
        run = await at_a_step(nowhere, node)
        await asyncio.to_thread(service.kill)
        assert (await run).failed()

    try:
        nowhere.do(lost())
        service = Service(*arguments, listen=service.address, **options)
        with service.client() as client:
            (job,) = client.jobs(include_ended=True)
            succeeds(nowhere)
            assert [one.id for one in client.jobs(include_ended=True)] == [job.id]
            assert client.fetch(job.id).seed == VALUES["seed"]
    finally:
        service.kill()


def test_a_film_that_is_cancelled_ends_though_it_would_outlive_the_engine(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    client = simulate("sim:40GiB", *slow_film(tmp_path))
    node = nowhere.do(nowhere.node("GenerateVideo", **VALUES | {"model": "film", "steps": 100}))

    async def cancelled() -> None:
        run = await at_a_step(nowhere, node)
        await nowhere.cancel()
        await run

    nowhere.do(cancelled())
    until(client, lambda status: not status.jobs)
    assert [job.state for job in client.jobs(include_ended=True)] == ["cancelled"]


def test_a_film_with_sound_gives_both(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    from griptape.artifacts import AudioUrlArtifact
    from griptape_nodes.files.file import File

    models = model_as(tmp_path, "video", "film", sound=True)
    client = simulate("sim:40GiB", "--models", str(models))
    node = nowhere.do(nowhere.node("GenerateVideo", **VALUES | {"model": "film"}))
    succeeds(nowhere)
    own = client.generate_video(VALUES["prompt"], model="film", seed=7, steps=2)
    heard = outputs(node)["audio"]
    assert type(heard) is AudioUrlArtifact
    assert own.audio is not None
    assert File(heard.value).read_bytes() == bytes(own.audio.data)
    film = outputs(node)["video"].value
    # The engine takes no MP4 that it cannot look into.
    if shutil.which("ffprobe"):
        assert File(film).read_bytes() == own.mp4
    else:
        assert film.endswith(".webp")
        assert "saved without its sound" in outputs(node)["logs"]


def test_an_end_picture_that_a_model_does_not_take_is_refused(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    simulate()
    picture = tmp_path / "end.png"
    Image.new("RGB", (64, 64), "teal").save(picture)
    values = VALUES | {"input_image": str(picture), "end_image": str(picture)}
    node = nowhere.do(nowhere.node("GenerateVideo", **values))
    assert "end_image is not taken" in fails(nowhere, node)


def test_previews_of_a_film_show_while_it_is_made(simulate: Simulate, nowhere: Headless) -> None:
    simulate()
    values = VALUES | {"steps": 12, "frames": 1}
    with_them = nowhere.do(nowhere.node("GenerateVideo", **values))
    succeeds(nowhere)
    assert "preview" in outputs(with_them)["preview"].value
    nowhere.do(nowhere.fresh_flow())
    without = nowhere.do(nowhere.node("GenerateVideo", previews=False, **values))
    succeeds(nowhere)
    assert "preview" not in outputs(without)


def test_a_lora_changes_a_film(simulate: Simulate, nowhere: Headless, tmp_path: Path) -> None:
    instant_adapter(tmp_path / "loras", "red", 1 << 20)
    folders = json.dumps([str(tmp_path / "loras")])
    client = simulate("sim:40GiB", "--set", f"models.adapters={folders}")
    model = {"model": "video", "loras": ["red"]}
    node = nowhere.do(nowhere.node("GenerateVideo", **VALUES | {"frames": 1, "model": model}))
    succeeds(nowhere)
    asked: dict[str, Any] = {"model": "video", "seed": 7, "steps": 2, "frames": 1}
    own = client.generate_video(VALUES["prompt"], adapters=["red"], **asked)
    plain = client.generate_video(VALUES["prompt"], **asked)
    assert bytes(own.film.data) != bytes(plain.film.data)
    close(first_frame(node), own.film)


@pytest.mark.parametrize("steps", [100, 1])
def test_a_cancel_ends_a_film_in_its_steps_and_in_its_decoding(
    simulate: Simulate, nowhere: Headless, tmp_path: Path, steps: int
) -> None:
    models = model_as(tmp_path, "video", "film", steps_ms=3000)
    client = simulate("sim:40GiB", "--models", str(models))
    values = VALUES | {"model": "film", "steps": steps}
    node = nowhere.do(nowhere.node("GenerateVideo", **values))
    awaited = "Step " if steps > 1 else "Decoding"

    async def cancelled_at() -> int:
        """The step at which it was cancelled."""
        run = asyncio.create_task(nowhere.run())
        while not outputs(node).get("status", "").startswith(awaited):
            assert not run.done(), run.result()
            await asyncio.sleep(0.01)
        (before,) = client.jobs()
        await nowhere.cancel()
        await asyncio.gather(run, return_exceptions=True)
        return before.step

    step = nowhere.do(cancelled_at())
    with client.watch_status(interval_s=0.02, timeout=30) as watch:
        next(status for status in watch if not status.jobs)
    (job,) = client.jobs(include_ended=True)
    assert job.state == "cancelled"
    assert job.step <= step + 1
    assert client.status().latents == 0


def test_a_budget_bears_on_films(simulate: Simulate, nowhere: Headless) -> None:
    simulate("sim:1GiB")
    little = {"gpu_memory_fraction": 0.001}
    node = nowhere.do(nowhere.node("GenerateVideo", system_constraints=little, **VALUES))
    assert "gpu_memory_fraction allows" in fails(nowhere, node)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": ""}, "There is no prompt: say what the film is to show."),
        ({"width": 100}, "multiple of 16"),
        ({"frames": -1}, "frames is 0 or more"),
        ({"seconds": -0.5}, "seconds is 0 or more"),
        ({"seconds": 1.0, "frames": 3}, "either seconds or frames"),
        ({"frames": 5000}, "frames"),
        ({"model": "small"}, "makes pictures"),
        ({"model": "small", "seconds": 1.0}, "makes pictures"),
        ({"model": "no/such-model", "seconds": 1.0}, "no/such-model"),
        ({"input_image": "/gone.png"}, "gone.png"),
    ],
)
def test_an_invalid_film_request_fails_with_one_sentence(
    simulate: Simulate, nowhere: Headless, values: dict[str, Any], said: str
) -> None:
    simulate()
    node = nowhere.do(nowhere.node("GenerateVideo", **VALUES | values))
    assert said in fails(nowhere, node)


def test_progress_is_reported_by_section(nowhere: Headless) -> None:
    node = nowhere.do(nowhere.node("GenerateVideo"))
    log = node._shown
    log.begin()
    for n in (1, 2):
        log.event(moored.Step(n, 2, 0, 2, 4))
    assert outputs(node)["status"] == "Section 2/4, step 2/2"
    assert outputs(node)["progress"] == 0.5
    log.event(moored.Step(2, 2, 0, 3, 4))
    assert outputs(node)["progress"] == 0.75
    lines = [line.split(" s  ")[1] for line in outputs(node)["logs"].splitlines()]
    assert lines == ["Section 2/4, step 2/2", "Section 3/4, step 2/2"]
