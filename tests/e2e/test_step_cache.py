"""Passes that are left out, with the shipped model: what is told of them, and who refuses the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import moored
import pytest

from service import Service

PROMPT = "a red circle on a white background"


def denoising(result: Any) -> Any:
    (stage,) = [one for one in result.stages if one.name == "denoise"]
    return stage


def test_what_is_left_out_is_told_in_the_report_and_in_the_file(
    demo_client: moored.Client,
) -> None:
    whole = demo_client.generate_image(PROMPT, steps=14, seed=3)
    assert (denoising(whole).passes_left_out, denoising(whole).passes) == (0, 0)
    assert not whole.approximations
    cached = demo_client.generate_image(PROMPT, steps=14, seed=3, step_cache=0.2)
    stage = denoising(cached)
    assert 0 < stage.passes_left_out < stage.passes == 14
    assert cached.approximations == (f"denoise without {stage.passes_left_out} of 14 passes",)
    assert cached.image.tobytes() != whole.image.tobytes()
    recipes = [one.recipe for one in (whole.pictures[0], cached.pictures[0])]
    assert [recipe.get("step_cache") for recipe in recipes] == [None, pytest.approx(0.2)]


def test_passes_under_both_conditions_count(demo_client: moored.Client) -> None:
    result = demo_client.generate_image(
        PROMPT, steps=8, seed=3, step_cache=0.3, negative_prompt="blurred", true_guidance=2.0
    )
    assert denoising(result).passes == 16


@pytest.mark.parametrize("change", [-0.1, 1.5, float("nan")])
def test_a_change_out_of_bounds_is_refused(demo_client: moored.Client, change: float) -> None:
    with pytest.raises(moored.InvalidRequest) as refused:
        demo_client.generate_image(PROMPT, step_cache=change)
    assert "step_cache" in str(refused.value)


def test_a_model_that_does_not_read_the_field_refuses_it(demo_client: moored.Client) -> None:
    with pytest.raises(moored.InvalidRequest) as refused:
        demo_client.generate_audio("a drum", model="moored/demo-sound", step_cache=0.1)
    assert "step_cache" in str(refused.value)
    # 0 is what it does anyway.
    demo_client.plan_audio("a drum", model="moored/demo-sound", step_cache=0.0)


def test_the_command_line_says_what_was_left_out(demo_service: Service, tmp_path: Path) -> None:
    options = ["--steps", "14", "--seed", "3", "--step-cache", "0.2"]
    done = demo_service.run("generate", PROMPT, *options, "-o", str(tmp_path / "a.png"))
    assert done.returncode == 0, done.stderr
    assert "approximate: denoise without" in done.stdout + done.stderr
    assert moored.read_recipe(tmp_path / "a.png")["step_cache"] == pytest.approx(0.2)
