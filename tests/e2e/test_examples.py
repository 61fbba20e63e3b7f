"""The examples of the client do what they say, against the models that are included."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import moored

from service import ROOT, Service, clean_environment

EXAMPLES = ROOT / "client-py/examples"


def example(name: str, service: Service, folder: Path, *models: str) -> list[str]:
    """The lines that an example prints, run in a folder of its own."""
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *models],
        env=clean_environment() | {"MOORED_ENDPOINT": service.address},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_a_picture(demo_service: Service, tmp_path: Path) -> None:
    wrote, settings = example("picture.py", demo_service, tmp_path)
    assert wrote == "Wrote picture.png: moored/demo+full, seed 7"
    assert settings == "Settings in the file: 8 steps"
    assert moored.read_recipe(tmp_path / "picture.png")["seed"] == 7


def test_a_film(demo_service: Service, tmp_path: Path) -> None:
    *frames, wrote = example("film.py", demo_service, tmp_path, "moored/demo-film")
    assert frames[0].startswith("Frame 1: ")
    assert wrote.startswith(f"Wrote film.mp4: {len(frames)} frames, ")
    assert moored.read_recipe(tmp_path / "film.mp4")["prompt"] == "the star moves to the right"


def test_a_song(demo_service: Service, tmp_path: Path) -> None:
    song, other = example("song.py", demo_service, tmp_path, "moored/demo-sound")
    assert song == "Wrote song.flac: 16000 samples a second"
    assert other == "Wrote other-ending.flac"
    assert moored.read_recipe(tmp_path / "song.flac")["lyrics"].startswith("[verse]")


def test_a_latent(demo_service: Service, tmp_path: Path) -> None:
    kept, decoded, changed = example("latent.py", demo_service, tmp_path)
    assert kept.startswith("Kept latent-")
    assert decoded == "Wrote decoded.png"
    assert changed == "Wrote changed.png"
    pictures = {(tmp_path / name).read_bytes() for name in ("decoded.png", "changed.png")}
    assert len(pictures) == 2


def test_a_shared_card(simulate: Callable[..., Service], tmp_path: Path) -> None:
    lines = example("shared_card.py", simulate(), tmp_path, "small")
    assert lines[0].startswith("renderer: keeps ")
    given = lines.index("renderer: gives it back")
    assert lines[given - 1].startswith("artist: Waiting for ")
    assert lines[-1] == "artist: wrote shared.png"
