"""What can be tested of the measuring of speed without a card. Run: pytest tests/gpu."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/gpu", "tests", "scripts")]

import figures  # noqa: E402
import measure  # noqa: E402
import speed  # noqa: E402


def part(*found: figures.Figure, device: str = "a card") -> figures.PartResult:
    return figures.PartResult("ok", device=device, date="2026-11-22", figures=list(found))


def ours(value: float, share: float = 0.9) -> figures.Figure:
    return figures.Figure(
        "speed.step.full", "step", value, "ms", "lower", share=share, share_of=speed.COMPILED
    )


def theirs(value: float) -> figures.Figure:
    of = "speed.step.full"
    return figures.Figure(speed.COMPILED, "diffusers, compiled", value, "ms", "lower", peer_of=of)


def results(tmp_path: Path, **parts: figures.PartResult) -> figures.Results:
    """As they are read from a file that an earlier run has written."""
    whole = figures.Results(tmp_path / "results.json")
    for name, one in parts.items():
        whole.put(name, one)
    return figures.Results(tmp_path / "results.json")


@pytest.mark.parametrize(("value", "met"), [(117.0, True), (118.08, True), (118.2, False)])
def test_a_target_is_a_share_of_what_the_other_program_reached(
    tmp_path: Path, value: float, met: bool
) -> None:
    parts = results(tmp_path, ours=part(ours(value)), peers=part(theirs(131.2))).with_targets()
    (one,) = parts["ours"].figures
    assert (one.target, one.met) == (118.1, met)
    assert parts["peers"].figures[0].target is None


@pytest.mark.parametrize(
    "peers", [{}, {"peers": part(theirs(131.2), device="another card")}], ids=["none", "elsewhere"]
)
def test_there_is_no_target_without_the_other_program_on_the_same_card(
    tmp_path: Path, peers: dict[str, figures.PartResult]
) -> None:
    (one,) = results(tmp_path, ours=part(ours(1.0)), **peers).with_targets()["ours"].figures
    assert (one.target, one.met) == (None, None)


def test_docs_show_the_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "BENCHMARKS.md"
    document.write_text("before\n<!-- speed.json -->\n<!-- end -->\nafter\n")
    monkeypatch.setattr("bench_service.DOCUMENT", document)
    fp8 = figures.Figure(
        "speed.step.fp8", "step, fp8", 80.0, "ms", "lower", share=0.63, share_of=speed.COMPILED
    )
    parts = {"speed-steps": part(ours(115.0), fp8), "speed-peers": part(theirs(131.2))}
    rows_file = tmp_path / "benchmarks/speed.json"
    measure.write_docs(results(tmp_path, **parts), rows_file)
    first, second = json.loads(rows_file.read_text())
    assert (first["target"], first["peer_value"]) == (118.1, 131.2)
    # A figure without a program of its own stands beside the one that its target is a share of.
    assert (second["target"], second["peer"]) == (82.66, "diffusers, compiled")
    written = document.read_text()
    line = "| step | 115 ms | ≤ 118.1 ms | yes | diffusers, compiled: 131.2 ms (0.88 of it) |"
    assert line in written and "(0.61 of it)" in written


def finds(bench: Any, found: str, *rest: Any, place: str = "") -> Any:
    """What each program of peers.py prints, in its form."""
    del bench, place
    if found == "step":
        shapes = rest[-1].split(",")
        for way in rest[2].split(","):
            for shape in shapes:
                ms = {"eager": 173.0, "compiled": 131.0}[way]
                yield {"way": way, "shape": shape, "ms": ms, "first_s": 16.0, "versions": "1"}
    elif found == "vae":
        yield {"vae": "decode", "ms": 87.0, "peak": 2_550_000_000}
        yield {"vae": "encode", "ms": 50.0, "peak": 1_000_000_000}
    else:
        yield {"ms": 45.0, "versions": "1"}


def test_every_relative_target_names_a_measured_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Found()
    beside = {"steps": [0.19, 0.20, 0.21], "versions": "1"}
    bench: Any = SimpleNamespace(
        record=found,
        scale=measure.FULL,
        models=Path("models"),
        threads=1,
        needs_card=lambda: None,
        beside=lambda *words, **more: beside,
    )
    monkeypatch.setattr(speed, "answers_of_peer", finds)
    monkeypatch.setattr(speed.checkpoints, "warm", lambda *where: 0)
    for one in (speed.peers, speed.sizes_peers, speed.bitsandbytes):
        one(bench)
    shares = [of for _, of in speed.STEP_SHARES.values()]
    shares += [f"speed.peer.vae.{what}" for what in speed.VAE_SHARES]
    shares += [f"{speed.COMPILED}.{key}" for key in ("512x512x1", "1536x1024x1", "1024x1024x4")]
    assert set(shares) <= set(found.figures)
    assert found.figures[speed.COMPILED]["peer_of"] == "speed.step.full"
    assert found.figures[f"{speed.BNB}.nf4"]["value"] == pytest.approx(200.0)
    request = found.figures["speed.peer.request"]
    assert request["value"] == pytest.approx(28 * 0.131 + 0.087 + 0.045)
    assert request["peer_of"] == "speed.request.full"


def test_the_set_has_all_of_its_parts(tmp_path: Path) -> None:
    (tmp_path / "moored").touch()
    words = ["--binary", str(tmp_path / "moored"), "--parts", "speed"]
    parts = measure.arguments_of(words).parts
    assert parts == measure.SUITES["speed"] and parts[:2] == ["make", "link"]
    assert set(speed.LIMITS_S) <= set(speed.PARTS) <= set(parts)


def test_unreported_steps_share_the_time_to_the_next_reported_one() -> None:
    at = [(1, 10.0), (2, 10.1), (5, 10.7), (5, 10.8)]
    assert speed.step_times(at) == pytest.approx([100.0, 200.0])
    assert speed.step_times(at[:1]) == []


class Found:
    """A recorder that keeps what is added."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, Any]] = {}

    def add(self, key: str, measure: str, value: float, unit: str, **more: Any) -> None:
        self.figures[key] = {"value": value, "unit": unit} | more

    def note(self, text: str) -> None:
        pass


@pytest.mark.parametrize(("booked_mib", "may"), [(100, 8.0), (1000, 50.0)])
def test_scratch_may_be_apart_by_a_share_or_a_few_mib(booked_mib: int, may: float) -> None:
    found = Found()
    bench: Any = SimpleNamespace(record=found)
    taken = (booked_mib - 9) * figures.MIB
    speed._tell_scratch(bench, "x", "a stage", taken, booked_mib * figures.MIB)
    apart = found.figures["x.apart"]
    assert (apart["value"], apart["target"]) == (9.0, may)
    assert found.figures["x"]["value"] == pytest.approx(taken / 1e9)


def program(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "program.py"
    file.write_text(text)
    return file


def peer_bench() -> Any:
    scale = SimpleNamespace(speed_rounds=1)
    return SimpleNamespace(
        simulated=True, small=True, torch_python=sys.executable, index=0, scale=scale
    )


def test_what_a_peer_found_before_its_time_was_over_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import time\nprint('noise')\nprint('{\"ms\": 1}', flush=True)\ntime.sleep(60)\n"
    monkeypatch.setattr(speed, "PEERS", program(tmp_path, text))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: name)
    for limit_s in (3.0, 10.0, 30.0):
        found = speed.answers_of_peer(peer_bench(), "step", limit_s)
        with contextlib.suppress(RuntimeError):  # of a busy machine: it was over before it spoke
            assert next(found) == {"ms": 1}
            break
    with pytest.raises(RuntimeError, match=f"its {limit_s:g} s were over"):
        next(found)


def test_a_peer_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "PEERS", program(tmp_path, "import sys\nsys.exit(3)\n"))
    monkeypatch.setattr(speed.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(RuntimeError, match="ended with 3$"):
        list(speed.answers_of_peer(peer_bench(), "vae", 30.0))
