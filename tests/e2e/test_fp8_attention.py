"""Attention in fp8, with the shipped models: what is told of it, and who refuses the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import moored
from PIL import Image

from service import Service

PROMPT = "a red circle on a white background"


def test_attention_in_fp8_is_told_in_the_report_and_in_the_file(
    demo_client: moored.Client,
) -> None:
    full = demo_client.generate_image(PROMPT, steps=4, seed=3)
    assert not full.approximations
    fp8 = demo_client.generate_image(PROMPT, steps=4, seed=3, fp8_attention=True)
    assert fp8.approximations == ("denoise with attention in fp8",)
    (stage,) = [one for one in fp8.stages if one.name == "denoise"]
    assert stage.attention.endswith("in fp8")
    assert fp8.image.tobytes() != full.image.tobytes()
    recipes = [one.recipe for one in (full.pictures[0], fp8.pictures[0])]
    assert [recipe.get("fp8_attention") for recipe in recipes] == [None, True]
    off = demo_client.generate_image(PROMPT, steps=4, seed=3, fp8_attention=False)
    assert off.image.tobytes() == full.image.tobytes()


def test_a_film_takes_it_too(demo_client: moored.Client) -> None:
    start = Image.new("RGB", (64, 64), "white")
    asked: dict[str, Any] = {"steps": 1, "frames": 37, "width": 64, "height": 64, "seed": 3}
    result = demo_client.generate_video(
        "a red circle moves right",
        model="moored/demo-film",
        init_image=start,
        fp8_attention=True,
        **asked,
    )
    assert "with attention in fp8" in " ".join(result.approximations)


def test_a_model_that_does_not_read_the_field_has_none() -> None:
    assert "fp8_attention" not in moored.AudioOptions.__annotations__


def test_the_command_line_says_it(demo_service: Service, tmp_path: Path) -> None:
    options = ["--steps", "2", "--seed", "3", "--fp8-attention"]
    done = demo_service.run("generate", PROMPT, *options, "-o", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    assert "approximate: denoise with attention in fp8" in done.stdout + done.stderr
    assert moored.read_recipe(tmp_path / "a.png")["fp8_attention"] is True


def test_the_command_line_refuses_it_for_tracks(demo_service: Service, tmp_path: Path) -> None:
    options = ["--model", "moored/demo-sound", "--fp8-attention"]
    done = demo_service.run("generate", "a drum", *options, "-o", str(tmp_path / "a.wav"))
    assert done.returncode != 0
    assert "fp8" in done.stdout + done.stderr
