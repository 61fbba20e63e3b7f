"""Ovi's tensors by their sizes. Run: pytest tests/gpu."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/gpu")]

from ovi_shapes import Fusion  # noqa: E402


def test_the_tensors_of_a_small_model_are_those_of_the_authors_class() -> None:
    file = ROOT / "service/pipelines/fixtures/ovi-tiny/shapes.json"
    of_authors = json.loads(file.read_text(encoding="utf-8"))["Ovi-960x960-5s"]
    small = Fusion(width=32, inner=48, layers=3, text=32, video=6)
    assert {name: list(shape) for name, shape in small.shapes().items()} == of_authors


def test_the_published_model_has_its_published_size() -> None:
    shapes = Fusion().shapes()
    numbers = {
        branch: sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(branch))
        for branch in ("video_model", "audio_model")
    }
    assert len(shapes) == 2073
    millions = {branch: count // 1_000_000 for branch, count in numbers.items()}
    assert millions == {"video_model": 5566, "audio_model": 6094}
