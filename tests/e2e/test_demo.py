"""`moored demo`: one command that shows everything, and leaves only what it made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from service import ROOT, clean_environment, run

PROMPTS = (ROOT / "service/cli/src/demo_prompts.txt").read_text(encoding="utf-8").split("\n")
PROMPTS = [prompt for prompt in PROMPTS if prompt]
FILM_PROMPT = "the red circle moves to the top left on a yellow background"
SOUND_PROMPT = "three high short notes, then a low long one, square wave"
DEMO_TIMEOUT_S = 600


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary folder can be looked into afterwards."""
    (tmp_path / "temporary").mkdir()
    return clean_environment() | {"TMPDIR": str(tmp_path / "temporary")}


def check_pictures(out: Path) -> None:
    names = [f"{number:02}.png" for number in range(1, len(PROMPTS) + 1)]
    others = ["contact-sheet.png", "film.mp4", "sound.wav"]
    assert sorted(path.name for path in out.iterdir()) == [*names, *others]
    for name, prompt in zip(names, PROMPTS, strict=True):
        with Image.open(out / name) as picture:
            assert picture.size == (128, 128)
            assert json.loads(picture.info["moored"])["prompt"] == prompt
    with Image.open(out / "contact-sheet.png") as sheet:
        # Four in a row, with their margins.
        assert sheet.width > 4 * 128
        assert sheet.height > -(-len(PROMPTS) // 4) * 128
    film = (out / "film.mp4").read_bytes()
    assert film[4:8] == b"ftyp"
    assert FILM_PROMPT.encode() in film, "the recipe is in the file"
    sound = (out / "sound.wav").read_bytes()
    assert (sound[:4], sound[8:12]) == (b"RIFF", b"WAVE")
    assert SOUND_PROMPT.encode() in sound, "the recipe is in the file"


def test_the_demo_prints_a_line_for_each_picture(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    demo = run("demo", "--out", str(out), env=environment, timeout=DEMO_TIMEOUT_S)
    assert demo.returncode == 0, demo.stderr
    check_pictures(out)
    # One line a result, one with where to look; nothing of what the service does.
    *lines, film, sound, last = demo.stdout.splitlines()
    assert len(lines) == len(PROMPTS)
    assert re.fullmatch(rf"{re.escape(str(out))}/film\.mp4  \d+\.\d s  {FILM_PROMPT}", film)
    assert re.fullmatch(rf"{re.escape(str(out))}/sound\.wav  \d+\.\d s  {SOUND_PROMPT}", sound)
    for number, (line, prompt) in enumerate(zip(lines, PROMPTS, strict=True), start=1):
        assert re.fullmatch(
            rf"{re.escape(str(out))}/{number:02}\.png  \d+\.\d s  {re.escape(prompt)}", line
        )
    assert str(out / "contact-sheet.png") in last
    assert [line for line in demo.stderr.splitlines() if not line.startswith("next: ")] == []
    # Piped: no colours, no cursor movements.
    assert "\x1b" not in demo.stdout + demo.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_demo_prints_json(tmp_path: Path, environment: dict[str, str]) -> None:
    out = tmp_path / "out"
    demo = run("--json", "demo", "--out", str(out), env=environment, timeout=DEMO_TIMEOUT_S)
    assert demo.returncode == 0, demo.stderr
    check_pictures(out)
    lines = [json.loads(line) for line in demo.stdout.splitlines()]
    written = [line for line in lines if line.get("event") == "written"]
    assert [line["prompt"] for line in written] == [*PROMPTS, FILM_PROMPT, SOUND_PROMPT]
    assert all(Path(line["path"]).is_file() for line in written)
    assert lines[-1]["event"] == "contact_sheet"
    assert lines[-1]["pictures"] == len(PROMPTS)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_demo_that_cannot_write_fails_and_leaves_nothing(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    demo = run("demo", "--out", str(tmp_path / "file/out"), env=environment)
    assert demo.returncode != 0
    assert str(tmp_path / "file") in demo.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_demo_does_not_overwrite_earlier_pictures(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "07.png").write_text("mine", encoding="utf-8")
    demo = run("demo", "--out", str(out), env=environment)
    assert demo.returncode == 8
    assert "07.png" in demo.stderr
    assert "--force" in demo.stderr
    assert [path.name for path in out.iterdir()] == ["07.png"]
