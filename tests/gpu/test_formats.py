"""What can be tested of the measuring without a card. Run: pytest tests/gpu."""

from __future__ import annotations

import json
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/gpu", "tests", "scripts")]

import figures  # noqa: E402
import formats  # noqa: E402
import measure  # noqa: E402
import strip_wheel  # noqa: E402


@pytest.fixture
def binary(tmp_path: Path) -> str:
    program = tmp_path / "moored"
    program.touch()
    return str(program)


def part(*found: figures.Figure) -> figures.PartResult:
    return figures.PartResult("ok", device="a card", date="2026-11-21", figures=list(found))


def test_a_suite_is_all_of_its_parts(binary: str) -> None:
    words = ["--binary", binary, "--parts", "quantization,drift"]
    expected = [*measure.SUITES["quantization"], "drift"]
    assert measure.arguments_of(words).parts == expected
    assert measure.arguments_of(["--binary", binary]).parts == measure.SUITES["card"]


def test_an_unknown_part_is_refused(binary: str) -> None:
    with pytest.raises(SystemExit):
        measure.arguments_of(["--binary", binary, "--parts", "fromats"])


def test_the_scale_is_reported_by_name(binary: str) -> None:
    words = ["--scale", "mixed_cycles=7", "--scale", "mixed_seconds=1.5"]
    scale = measure.scale_of(measure.arguments_of(["--binary", binary, *words]))
    assert (scale.mixed_cycles, scale.mixed_seconds) == (7, 1.5)
    assert scale.format_rounds == measure.FULL.format_rounds >= 5


@pytest.mark.parametrize("word", ["cycles=7", "mixed_cycles=many", "settings=1", "mixed_cycles"])
def test_an_unknown_or_wrong_scale_argument_is_refused(binary: str, word: str) -> None:
    with pytest.raises(SystemExit):
        measure.arguments_of(["--binary", binary, "--scale", word])


def test_docs_take_the_parts_of_their_own_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench_service.DOCUMENT", tmp_path / "BENCHMARKS.md")
    document = tmp_path / "BENCHMARKS.md"
    document.write_text("before\n<!-- quantization.json -->\nold\n<!-- end -->\nafter\n")
    results = figures.Results(tmp_path / "results.json")
    ours = figures.Figure("formats.nf4.used", "nf4: bytes", 6.69, "GB", "lower", 6.8)
    theirs = figures.Figure(
        "bitsandbytes.nf4.used", "bnb", 7.1, "GB", "lower", peer_of="formats.nf4.used"
    )
    results.put("formats", part(ours))
    results.put("bitsandbytes", part(theirs))
    results.put("unload", part(figures.Figure("unload.x", "not of it", 1, "ms", "lower")))
    rows_file = tmp_path / "benchmarks/quantization.json"
    measure.write_docs(figures.Results(tmp_path / "results.json"), rows_file)
    (row,) = json.loads(rows_file.read_text())
    assert (row["measure"], row["peer"], row["peer_value"]) == ("nf4: bytes", "bnb", 7.1)
    written = document.read_text()
    assert written.startswith("before\n") and written.endswith("after\n")
    assert "| nf4: bytes | 6.69 GB | ≤ 6.8 GB | yes | bnb: 7.1 GB |" in written
    assert "old" not in written and "not of it" not in written


def test_a_target_beside_a_missed_figure_says_so() -> None:
    found = part(
        figures.Figure("a", "speed", 24.0, "GB/s", "higher", 25.0),
        figures.Figure("b", "bytes", 6.3, "GB", "lower", 6.3),
    )
    _, speed, bytes_ = figures.table([("formats", found)]).splitlines()
    assert (speed.split()[-1], bytes_.split()[-1]) == ("MISSED", "met")


def test_every_ten_cycles_hold_every_format_of_every_part() -> None:
    turns = [[formats.mixture(10 * turn + place) for place in range(10)] for turn in range(20)]
    assert all(len(set(turn)) == 10 for turn in turns)
    assert turns[0] != turns[1]


def test_loads_of_every_kind_remain_between_the_pictures() -> None:
    pictures = [number for number in range(200) if formats.is_picture(number)]
    warm = [number for number in pictures if number < formats.WARM_UP_CYCLES]
    assert len(warm) == len(formats.FORMATS)
    assert len(pictures) - len(warm) == 9
    loads = Counter(formats.mixture(number) for number in range(200) if number not in pictures)
    assert len(loads) == 10 and min(loads.values()) >= 15


class Clock:
    """Time that passes in sleeps only; a program that writes a piece of a file in each of the first few."""

    def __init__(self, file: Path, pieces: int) -> None:
        self.now, self._file, self._pieces = 0.0, file, pieces

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._pieces:
            self._pieces -= 1
            with self._file.open("ab") as file:
                file.write(b"x" * 100)


def test_a_copy_is_whole_when_it_grows_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ab").mkdir()
    # One that is being written has its size from the start.
    (tmp_path / "ab/next.kept.part").write_bytes(b"x" * 400)
    clock = Clock(tmp_path / "ab/copy.kept.safetensors", pieces=5)
    monkeypatch.setattr(formats, "time", clock)
    assert formats._whole_copy(tmp_path, 250) == 500
    assert clock.now == pytest.approx(0.5 + formats.COPY_STABLE_S, abs=0.2)
    with pytest.raises(TimeoutError, match="500 bytes"):
        formats._whole_copy(tmp_path, 501)


def test_a_stripped_wheel_has_the_libraries_that_are_kept(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1-py3-none-any.whl"
    names = ["some/__init__.py", "some/kept.so", "some/dropped.so"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, name)
        record = "".join(f"{name},sha256=x,1\n" for name in names) + "some-1.dist-info/RECORD,,\n"
        archive.writestr("some-1.dist-info/RECORD", record)
    made = strip_wheel.strip(wheel, tmp_path / "out", {"kept.so"})
    with zipfile.ZipFile(made) as archive:
        assert archive.namelist() == [*names[:2], "some-1.dist-info/RECORD"]
        assert archive.read("some/kept.so") == b"some/kept.so"
        listed = archive.read("some-1.dist-info/RECORD").decode()
    assert "kept.so" in listed and "dropped.so" not in listed
    with pytest.raises(ValueError, match="absent.so"):
        strip_wheel.strip(wheel, tmp_path / "out", {"absent.so"})
