"""The examples of the README do what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from readme_tables import README, TABLES, with_tables
from scripted import (
    SAMPLES_PER_SECOND,
    Service,
    accepted,
    done,
    event,
    film,
    pieces,
    sound,
    step,
    track,
)
from talks import CHUNK, Player, talk_on

from moored._generated import events_pb2, generation_pb2, model_pb2, residency_pb2

EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
)
SAID = [
    "7 {'encode_text': 3, 'denoise': 100, 'decode': 21}\n",
    "",
    "step 1 of 4\nWaiting for 2.8 GiB, 4.0 s left\n2 pictures\n",
    "frame 0 1.0\nframe 1 2.0\n(2, 2, 4, 3) 24.0\n",
    "8000 (5, 2)\n",
    "2 42 0\n",
    "demo@main ()\n",
    "demo@main {'vae': 'full'}\ndemo {'full': 100, '4-bit': 30}\n",
    "['styles/ink']\nstyles/ink {'transformer': 304} 16\n",
    "",
]


def test_the_readme_has_ten_examples() -> None:
    assert len(EXAMPLES) == 10


def test_the_readme_lists_every_program_of_the_examples() -> None:
    text = README.read_text("utf-8")
    programs = sorted(path.name for path in (README.parent / "examples").glob("*.py"))
    listed = re.findall(r"^\| \[examples/(\w+\.py)\]\(examples/\1\) \|", text, re.MULTILINE)
    assert sorted(listed) == programs


def test_the_tables_have_every_option() -> None:
    """Written by `readme_tables.py`."""
    text = README.read_text("utf-8")
    assert with_tables(text) == text
    assert all(f"<!-- options of {kind} -->" in text for kind in TABLES)


@pytest.mark.parametrize(("example", "said"), [*zip(EXAMPLES, SAID, strict=True)])
def test_an_example(
    example: str,
    said: str,
    service: Service,
    address: str,
    png: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waiting = events_pb2.Waiting(needed_bytes=3_000_000_000, patience_left_ms=4000)
    end = done()
    end.done.model.adapters.add(id="styles/ink", layers={"transformer": 304}, rank=16)

    def paint(asked: Any, _: Any) -> Any:
        pictures = [one for index in range(asked.count or 1) for one in pieces(png, index=index)]
        return iter([accepted(), step(1), event(waiting=waiting), *pictures, end])

    service.on("GenerateImage", paint)
    service.on("GenerateVideo", [accepted(), *film(2)[1], done()])
    flac = track(b"fLaC" + bytes(40), samples=5, media_type="audio/flac")
    pcm = track(sound(5), samples=5)
    wanted = {generation_pb2.FLAC: flac, generation_pb2.WAV_AND_FLAC: pcm}
    service.on("GenerateAudio", lambda asked, _: iter([accepted(), *wanted[asked.output], done()]))
    service.on("PutMedia", generation_pb2.MediaInfo(id="media-1"))
    choices = {"full": 100, "4-bit": 30}
    model = residency_pb2.ModelInfo(id="demo")
    adapter = model_pb2.AdapterInfo(id="styles/ink", bytes=1000)
    for preset, size in choices.items():
        model.choices.add(preset=preset, bytes=size)
    service.on("ListModels", residency_pb2.ListModelsResponse(models=[model], adapters=[adapter]))
    # Each segment lasts as long as the example plays.
    talk_on(service, Player(chunks_each=10 * SAMPLES_PER_SECOND // CHUNK))
    monkeypatch.setenv("MOORED_ENDPOINT", address)
    monkeypatch.chdir(tmp_path)
    for given in ("house", "door", "edges"):
        (tmp_path / f"{given}.png").write_bytes(png)
    if "source=" in example:
        (tmp_path / "waltz.flac").write_bytes(b"fLaC" + bytes(40))
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == said
