"""Tiny models of random numbers, put together of the fixtures that hold the mathematics to its reference."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "service/pipelines/fixtures"


def film_models(models: Path) -> None:
    """Adds `hunyuan`, which makes a film of a text, and `framepack`, which makes one of a picture."""
    for name, parts in (
        ("hunyuan", ("hunyuan-tiny",)),
        ("framepack", ("hunyuan-tiny", "framepack-tiny")),
    ):
        for part in parts:
            shutil.copytree(FIXTURES / part, models / name, dirs_exist_ok=True)
        shutil.copytree(FIXTURES / "flux-tiny/text_encoder", models / name / "text_encoder_2")
        shutil.copytree(FIXTURES / "flux-tiny/tokenizer", models / name / "tokenizer_2")
        shutil.rmtree(models / name / "expected")


def picture_models(models: Path) -> None:
    """Adds `plain`, a FLUX.1, `kontext`, which edits a picture, `klein`, which edits several, `qwen`, and
    `sdxl`, which has several samplers.
    """
    for name in ("plain", "kontext"):
        shutil.copytree(FIXTURES / "flux-tiny", models / name)
    shutil.copytree(FIXTURES / "flux-kontext-tiny", models / "kontext", dirs_exist_ok=True)
    shutil.copytree(FIXTURES / "flux2-tiny", models / "klein")
    shutil.copytree(FIXTURES / "sdxl-tiny", models / "sdxl")
    for part in ("qwen-image-tiny", "qwen-vl-tiny"):
        shutil.copytree(FIXTURES / part, models / "qwen", dirs_exist_ok=True)
    shutil.rmtree(models / "qwen/expected")
