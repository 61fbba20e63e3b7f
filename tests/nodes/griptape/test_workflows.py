"""The template workflows, run by an engine of their own against the real service."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
from headless import LIBRARY, MANIFEST, START_LIMIT_S, Headless
from make_workflows import (
    EDIT,
    EDITING_MODEL,
    FILM_MODEL,
    FRAMEPACK,
    PROMPT,
    SDXL_MODEL,
    SPEAKING_MODEL,
)
from PIL import Image, ImageChops

from service import ROOT, Service

HERE = Path(__file__).parent
TEMPLATES = json.loads((LIBRARY / MANIFEST).read_text())["workflows"]


def run(manifest: Path, template: str, service: Service) -> dict[str, Any]:
    """Runs a template in a process of its own; what it printed."""
    arguments = [str(manifest), str(manifest.parent / template), service.address]
    ran = subprocess.run(
        [sys.executable, str(HERE / "run_workflow.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S + 100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def picture(shown: dict[str, str]) -> Image.Image:
    """The picture that a node gave."""
    return Image.open(shown["image"]).convert("RGB")


def test_templates_name_models_as_the_service_lists_them() -> None:
    """Lists have the ids of the hub, also of a model that was pulled by its short name."""
    catalogue = tomllib.loads((ROOT / "service/hub/src/catalogue.toml").read_text(encoding="utf-8"))
    short = {model["id"] for model in catalogue["models"]}
    named = {FILM_MODEL, FRAMEPACK, SPEAKING_MODEL, SDXL_MODEL, EDITING_MODEL}
    assert named <= short
    for template in TEMPLATES:
        text = (LIBRARY / template).read_text(encoding="utf-8")
        of_hub = set(re.findall(r'value="([\w.-]+/[\w.-]+(?::[\w.-]+)?)"', text))
        assert {name for name in of_hub if not name.startswith("moored/")} <= named, template


def test_text_to_image(engine: Headless, manifest: Path, demo_service: Service) -> None:
    ran = run(manifest, "workflows/moored_text_to_image.py", demo_service)
    assert Path(ran["moored"]).is_relative_to(manifest.parent), "from the library's own packages"
    shown = ran["nodes"]["Generate Image"]
    with demo_service.client() as client:
        same = client.generate_image(PROMPT, seed=42).image.convert("RGB")
    assert ImageChops.difference(picture(shown), same).getbbox() is None


def test_edit_image(engine: Headless, manifest: Path, demo_service: Service) -> None:
    nodes = run(manifest, "workflows/moored_edit_image.py", demo_service)["nodes"]
    first, edited = picture(nodes["Generate Image"]), picture(nodes["Edit Image"])
    data = io.BytesIO()
    first.save(data, "PNG")
    with demo_service.client() as client:
        assert not client.status().cards[0].residents, "the last node unloads it"
        same = client.generate_image(EDIT, seed=42, init_image=data.getvalue(), strength=0.8)
    assert ImageChops.difference(edited, same.image.convert("RGB")).getbbox() is None
    assert ImageChops.difference(first, edited).getbbox() is not None
    assert "came free" in nodes["Unload Models"]["result_details"]


def test_generate_audio(engine: Headless, manifest: Path, demo_service: Service) -> None:
    shown = run(manifest, "workflows/moored_generate_audio.py", demo_service)["nodes"]
    assert "moored/demo-sound" in shown["Generate Audio"]["result_details"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_load_whole_while_no_service_runs(nowhere: Headless, template: str) -> None:
    nowhere.do(nowhere.clear())
    nodes = nowhere.do(nowhere.load(LIBRARY / template))
    assert all(type(node).__name__.startswith("Moored") for node in nodes.values())
    assert nowhere.do(nowhere.run()).failed()
