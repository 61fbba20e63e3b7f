"""Pictures of the shipped model: they show their prompts, and are sent as the API says."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import moored
import numpy as np
import pytest
from PIL import Image

from service import Service

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODEL = "moored/demo"
PROMPT = "a large red circle in the centre on a yellow background"
# One for every number of shapes that held-out prompts have; the rest go round.
PICTURES = 16
LEAST_RIGHT = 12
MOST_RIGHT_SHUFFLED = 2
# Small and quick, where it does not matter what the picture shows.
QUICK: dict[str, Any] = {"width": 64, "height": 64, "steps": 2}


def load_judge() -> ModuleType:
    """demo/judge.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("moored_demo_judge", DEMO / "judge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses ask for it
    spec.loader.exec_module(module)
    return module


def spread(prompts: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """So many prompts, in turn of one, two and three shapes, taken evenly from the file."""
    by_shapes: dict[int, list[dict[str, Any]]] = {}
    for prompt in prompts:
        by_shapes.setdefault(len(prompt["scene"]["objects"]), []).append(prompt)
    groups = [by_shapes[shapes] for shapes in sorted(by_shapes)]
    assert len(groups) == 3
    chosen = []
    for turn in range(math.ceil(number / len(groups))):
        for group in groups:
            chosen.append(group[turn * len(group) // math.ceil(number / len(groups))])
    return chosen[:number]


@dataclass(frozen=True)
class HeldOut:
    """Prompts that the model was not trained on, and their pictures."""

    scenes: list[dict[str, Any]]
    images: list[Image.Image]


@pytest.fixture(scope="module")
def held_out(demo_client: moored.Client) -> HeldOut:
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = spread([json.loads(line) for line in lines], PICTURES)
    images = [
        demo_client.generate_image(prompt["prompt"], seed=seed).image
        for seed, prompt in enumerate(prompts)
    ]
    return HeldOut([prompt["scene"] for prompt in prompts], images)


def test_pictures_show_their_prompts(held_out: HeldOut) -> None:
    judge = load_judge()
    verdicts = [
        judge.judge(image, scene)
        for image, scene in zip(held_out.images, held_out.scenes, strict=True)
    ]
    assert sum(verdict.right for verdict in verdicts) >= LEAST_RIGHT, [
        (scene, verdict.mistakes)
        for scene, verdict in zip(held_out.scenes, verdicts, strict=True)
        if not verdict.right
    ]


def test_pictures_do_not_show_other_prompts(held_out: HeldOut) -> None:
    judge = load_judge()
    others = held_out.scenes[1:] + held_out.scenes[:1]
    right = [
        judge.judge(image, scene).right
        for image, scene in zip(held_out.images, others, strict=True)
    ]
    assert sum(right) <= MOST_RIGHT_SHUFFLED


def test_the_same_seed_gives_the_same_picture(demo_client: moored.Client) -> None:
    first, again, other = (
        demo_client.generate_image(PROMPT, seed=seed, **QUICK).pictures[0] for seed in (7, 7, 8)
    )
    assert first.data == again.data
    assert first.array.tobytes() != other.array.tobytes()


def test_the_result_has_the_random_seed_that_repeats_it(
    demo_client: moored.Client,
) -> None:
    random = demo_client.generate_image(PROMPT, **QUICK)
    assert random.pictures[0].seed == random.seed
    repeated = demo_client.generate_image(PROMPT, seed=random.seed, **QUICK)
    assert repeated.pictures[0].data == random.pictures[0].data


def test_several_pictures_have_consecutive_seeds(
    demo_client: moored.Client,
) -> None:
    several = demo_client.generate_image(PROMPT, seed=40, count=3, **QUICK)
    assert several.seed == 40
    assert [picture.seed for picture in several.pictures] == [40, 41, 42]
    assert [picture.index for picture in several.pictures] == [0, 1, 2]
    for picture in several.pictures:
        single = demo_client.generate_image(PROMPT, seed=picture.seed, **QUICK)
        assert single.pictures[0].data == picture.data
    assert len({picture.data for picture in several.pictures}) == 3


def test_raw_pixels_equal_those_of_the_png(demo_client: moored.Client) -> None:
    png = demo_client.generate_image(PROMPT, seed=3, output="png", **QUICK).pictures[0]
    raw = demo_client.generate_image(PROMPT, seed=3, output="raw", **QUICK).pictures[0]
    assert (png.media_type, raw.media_type) == ("image/png", "image/x-raw-rgb")
    assert len(raw.data) == 64 * 64 * 3
    assert raw.data == png.image.convert("RGB").tobytes()
    assert np.array_equal(raw.array, png.array)


def test_a_png_has_its_recipe(
    demo_client: moored.Client,
) -> None:
    prompt = 'ein roter Ring, "größer" als 🟥'
    result = demo_client.generate_image(
        prompt, seed=2**40, guidance=2.5, max_sequence_length=40, **QUICK
    )
    recipe = json.loads(Image.open(io.BytesIO(result.pictures[0].data)).info["moored"])
    assert recipe == {
        "prompt": prompt,
        "seed": 2**40,
        "width": 64,
        "height": 64,
        "steps": 2,
        "guidance": 2.5,
        "max_sequence_length": 40,
        "model": MODEL,
        "model_key": result.model.key,
        "version": demo_client.server_info().version,
    }


def test_a_png_without_metadata_has_none_and_the_same_pixels(
    demo_client: moored.Client,
) -> None:
    prompt = "a secret prompt"
    with_it = demo_client.generate_image(prompt, seed=5, **QUICK).pictures[0]
    without = demo_client.generate_image(prompt, seed=5, omit_metadata=True, **QUICK)
    assert prompt.encode() in with_it.data
    assert prompt.encode() not in without.pictures[0].data
    assert MODEL.encode() not in without.pictures[0].data
    assert without.image.info == {}
    assert np.array_equal(without.pictures[0].array, with_it.array)


def distance(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of the pixels of two pictures of one size, from 0 to 255."""
    pixels = [np.asarray(image.convert("RGB"), dtype=float) for image in (one, other)]
    return float(np.abs(pixels[0] - pixels[1]).mean())


def test_image_to_image_stays_closer_the_weaker_it_is(
    demo_client: moored.Client, held_out: HeldOut
) -> None:
    start = held_out.images[0]
    weak, strong, full = (
        demo_client.generate_image(PROMPT, seed=11, init_image=start, strength=strength)
        for strength in (0.2, 0.6, 1.0)
    )
    assert weak.image.size == start.size
    assert distance(weak.image, start) < distance(strong.image, start)
    assert distance(weak.image, start) < distance(full.image, start)
    assert weak.pictures[0].data != strong.pictures[0].data
    assert "encode_image" in weak.timings
    recipe = json.loads(weak.image.info["moored"])
    assert recipe["strength"] == pytest.approx(0.2)


def test_each_of_several_pictures_from_a_picture_depends_on_its_seed_alone(
    demo_client: moored.Client,
) -> None:
    gradient = np.linspace(0, 255, 64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    asked = {"init_image": Image.fromarray(gradient), "strength": 0.5, **QUICK}
    both = demo_client.generate_image(PROMPT, seed=11, count=2, **asked)
    for picture, seed in zip(both.pictures, (11, 12), strict=True):
        alone = demo_client.generate_image(PROMPT, seed=seed, **asked)
        assert np.array_equal(picture.array, alone.pictures[0].array), f"seed {seed}"


def test_image_to_image_runs_only_the_last_part_of_the_steps(
    demo_client: moored.Client,
) -> None:
    start = Image.new("RGB", (64, 64), (200, 40, 40))
    stream = demo_client.stream_image(
        PROMPT, seed=1, width=64, height=64, steps=8, init_image=start, strength=0.5
    )
    steps = [event for event in stream if isinstance(event, moored.Step)]
    # Steps that came faster than they are sent are told by a later one.
    numbers = [step.n for step in steps]
    assert numbers == sorted(set(numbers))
    assert (steps[-1].n, steps[-1].of) == (4, 4)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({}, (96, 48)),  # its own, down to multiples of 16
        ({"width": 64, "height": 96}, (64, 96)),
    ],
)
def test_image_to_image_respects_the_size(
    demo_client: moored.Client, asked: dict[str, Any], given: tuple[int, int]
) -> None:
    start = Image.new("RGB", (100, 60), (40, 90, 200))
    result = demo_client.generate_image(
        PROMPT, seed=1, steps=2, init_image=start, strength=0.5, **asked
    )
    assert result.image.size == given


def test_jpeg_and_webp_can_be_started_from(demo_client: moored.Client) -> None:
    start = Image.new("RGB", (64, 64), (40, 90, 200))
    for format_name in ("JPEG", "WEBP"):
        encoded = io.BytesIO()
        start.save(encoded, format=format_name)
        result = demo_client.generate_image(
            PROMPT, seed=1, init_image=encoded.getvalue(), strength=0.3, **QUICK
        )
        assert result.image.size == (64, 64)


def test_sizes_need_not_be_square(demo_client: moored.Client) -> None:
    result = demo_client.generate_image(PROMPT, seed=1, steps=2, width=160, height=48)
    assert result.image.size == (160, 48)
    assert (result.metadata["width"], result.metadata["height"]) == ("160", "48")


def test_previews_are_small_and_sent_at_the_interval(
    demo_client: moored.Client,
) -> None:
    stream = demo_client.stream_image(PROMPT, seed=1, width=1056, height=64, preview_interval_s=0.5)
    previews = [event for event in stream if isinstance(event, moored.Preview)]
    assert stream.result().image.size == (1056, 64)
    assert previews
    for preview in previews:
        assert preview.image.format == "JPEG"
        assert 128 <= max(preview.image.size) <= 512
    # Not by the times of the events, which are stamped late: so many fit into the stage that made them.
    assert len(previews) <= 1 + stream.result().timings["denoise"].run_ms / 500
    assert [preview.step for preview in previews] == sorted({p.step for p in previews})


def test_a_long_interval_gives_few_previews(demo_client: moored.Client) -> None:
    stream = demo_client.stream_image(
        PROMPT, seed=1, width=64, height=64, steps=8, preview_interval_s=3600
    )
    assert sum(isinstance(event, moored.Preview) for event in stream) <= 1


def test_no_previews_without_an_interval(demo_client: moored.Client) -> None:
    stream = demo_client.stream_image(PROMPT, seed=1, **QUICK)
    assert not [event for event in stream if isinstance(event, moored.Preview)]


def test_a_repeated_prompt_is_not_encoded_again(
    demo_client: moored.Client,
) -> None:
    prompt = "a prompt of this test alone: a small green star on a black background"

    def encoding(stream: moored.EventStream[moored.ImageResult]) -> moored.StageStarted:
        stages = [event for event in stream if isinstance(event, moored.StageStarted)]
        assert [stage.name for stage in stages] == ["encode_text", "denoise", "decode"]
        assert [stage.index for stage in stages] == [1, 2, 3]
        assert {stage.of for stage in stages} == {3}
        return stages[0]

    assert not encoding(demo_client.stream_image(prompt, seed=1, **QUICK)).cached
    again = demo_client.stream_image(prompt, seed=2, **QUICK)  # calls begin at once
    assert encoding(again).cached
    reports = {stage.name: stage for stage in again.result().stages}
    assert reports["encode_text"].cached
    assert not reports["denoise"].cached
    # Everything was there already; what the cache made needless need not be told.
    assert {"transformer", "vae"} <= set(again.result().resident_already)


def test_the_command_line_says_what_computed_attention(
    demo_service: Service, tmp_path: Path
) -> None:
    given = ["generate", PROMPT, "-W", "64", "-H", "64", "-s", "1", "-o", str(tmp_path / "a.png")]
    plain = demo_service.run(*given, "--verbose")
    assert plain.returncode == 0, plain.stderr
    assert "attention: cpu loops" in plain.stderr.splitlines()
    told = demo_service.run(*given, "--force", "--json")
    done = next(
        line for line in map(json.loads, told.stdout.splitlines()) if line["event"] == "done"
    )
    by_stage = {stage["name"]: stage["attention"] for stage in done["stages"]}
    # The text was encoded for the first picture.
    assert by_stage == {"encode_text": "", "denoise": "cpu loops", "decode": "cpu loops"}


def test_done_has_times_and_peaks_of_every_stage(demo_client: moored.Client) -> None:
    prompt = "a prompt of this test alone: a large blue square on a white background"
    # The first job of a worker allocates what it keeps: tokenizers, workspaces of its threads.
    demo_client.generate_image(PROMPT, seed=1, steps=1)
    stream = demo_client.stream_image(prompt, seed=1, steps=4)
    events = list(stream)
    result = stream.result()
    assert isinstance(events[0], moored.Accepted)
    assert events[-1] == result.done
    assert [stage.name for stage in result.stages] == ["encode_text", "denoise", "decode"]
    (memory,) = (card.memory for card in demo_client.status().cards)
    at_rest = memory.components + memory.workspaces + memory.context
    for stage in result.stages:
        assert stage.card == "cpu"
        assert 0 < stage.peak_scratch_bytes <= stage.predicted_scratch_bytes
        assert stage.peak_scratch_bytes < stage.peak_bytes
        assert stage.peak_bytes <= at_rest + stage.predicted_scratch_bytes
        assert stage.attention == "cpu loops"
    assert result.timings["denoise"].run_ms > 0
    spent = sum(stage.run_ms + stage.move_ms + stage.wait_ms for stage in result.stages)
    # Each is rounded by itself.
    assert spent <= result.total_ms + len(result.stages) * 3
    assert result.approximations == ()
    assert result.model.id == MODEL
