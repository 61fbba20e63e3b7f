"""What can be tested of the measuring of streamed models without a card. Run: pytest tests/gpu."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/gpu", "tests", "scripts")]

import bench  # noqa: E402
import checkpoints  # noqa: E402
import host_memory  # noqa: E402
import measure  # noqa: E402
import stream_host  # noqa: E402
import stream_mixed  # noqa: E402
import z_image_checkpoint  # noqa: E402
from figures import MIB, Recorder, read_part  # noqa: E402
from stream_start import INSIDE, WHERE  # noqa: E402

JOBS = 50


@pytest.fixture
def on(tmp_path: Path) -> Any:
    """What makes a bench for a device."""

    def made(device: str) -> bench.Bench:
        nowhere = tmp_path / "none"
        record = Recorder(tmp_path / "record")
        return bench.Bench(nowhere, tmp_path, tmp_path, device, True, "", 1, record, measure.SMALL)

    return made


def test_each_part_of_streaming_can_be_run_alone(tmp_path: Path) -> None:
    program = tmp_path / "moored"
    program.touch()
    for module in measure.STREAMED:
        for name in module.PARTS:
            assert name not in measure.SUITES
            words = ["--binary", str(program), "--parts", name]
            assert measure.arguments_of(words).parts == [name]
            # With the checkpoints made before, it fits into a call of ten minutes.
            assert name in module.LIMITS_S and module.LIMITS_S[name] <= 480


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0", "cuda:0=6GiB"),
        ("cuda:1,dtype=f32", "cuda:1=6GiB,dtype=f32"),
        ("sim:80GiB,speed=2GiB/s", "sim:6GiB,speed=2GiB/s,world="),
    ],
)
def test_a_small_card_is_the_same_device_with_less_memory(
    on: Any, device: str, expected: str
) -> None:
    assert on(device).small_card(6 << 30).startswith(expected)


def test_sizes_that_are_no_whole_gigabytes_are_told_in_megabytes(on: Any) -> None:
    assert on("cuda:0").small_card(20 * MIB) == "cuda:0=20MiB"


def test_mixed_jobs_are_as_many_as_asked_with_all_kinds_after_the_last_kill() -> None:
    asked = stream_mixed.requests(stream_mixed.SIDES)
    kinds = {(one.model, one.format) for one in asked}
    assert len(kinds) == len(stream_mixed.MODELS) * len(stream_mixed.FORMATS)
    assert len({one.seed for one in asked}) == len(asked), "references go by their seeds"
    for seed in range(20):
        stirred, each, after = stream_mixed.mixed_jobs(random.Random(seed), asked, JOBS)
        every = [*stirred, *each, *after]
        assert len(every) == JOBS
        assert {(one.request.model, one.request.format) for one in each} == kinds
        assert not any(one.act for one in each)
        kills = [place for place, one in enumerate(stirred) if one.act == "kill"]
        assert len(kills) == stream_mixed.KILLS
        assert not any(one.act == "kill" for one in after)
        apart = [later - sooner for sooner, later in zip(kills, kills[1:], strict=False)]
        assert min(apart) > stream_mixed.LANES, "a kill may meet the second attempt of a job"
        assert sum(one.act == "cancel" for one in every) == stream_mixed.CANCELS


def test_memory_is_read_as_the_kernel_tells_it() -> None:
    told = "VmRSS:\t  12 kB\nVmLck:\t       0 kB\nThreads:\t7\nHugetlbpages:\t 4 kB\n"
    assert host_memory.kilobytes(told) == {"VmRSS": 12288, "VmLck": 0, "Hugetlbpages": 4096}
    assert host_memory.numbers("nr_dirty 12\nnr_foll_pin_acquired 99\n")["nr_dirty"] == 12
    mine = host_memory.read((os.getpid(),))
    assert mine.resident >= mine.anonymous > 0 and mine.available > 0
    twice = host_memory.read((os.getpid(), os.getpid()))
    assert twice.resident > mine.resident


def test_a_process_that_has_ended_counts_nothing() -> None:
    assert host_memory.read((2**22 + 1,)).resident == 0


def test_growth_and_the_most_are_of_each_figure() -> None:
    some, more = host_memory.Memory(resident=5, locked=3), host_memory.Memory(resident=9, locked=1)
    assert (more - some).resident == 4 and (more - some).locked == -2
    most = host_memory.Memory.most([some, more])
    assert (most.resident, most.locked) == (9, 3)


def test_what_the_service_books_is_that_of_all_cards() -> None:
    held = [SimpleNamespace(bytes=5), SimpleNamespace(bytes=7)]
    status: Any = SimpleNamespace(
        cards=[SimpleNamespace(on_host=held), SimpleNamespace(on_host=[])]
    )
    assert stream_host.booked_bytes(status) == 12


def test_z_image_has_the_sizes_of_the_published_one() -> None:
    full = z_image_checkpoint.FULL
    weights = checkpoints.bytes_of(z_image_checkpoint.transformer(full)) / 2
    words = checkpoints.bytes_of(z_image_checkpoint.text_encoder(full)) / 2
    assert weights == pytest.approx(6.155e9, rel=1e-3)
    assert words == pytest.approx(4.02e9, rel=1e-2)


def test_z_image_is_made_beside_flux_and_shares_its_vae(tmp_path: Path) -> None:
    sizes, flux = z_image_checkpoint.SMALL, checkpoints.SMALL
    checkpoints.make(tmp_path, flux, 2, 1)
    written, _ = z_image_checkpoint.make(tmp_path, sizes, flux, 2)
    assert written > 0
    assert z_image_checkpoint.make(tmp_path, sizes, flux, 2) == (0, 0.0)
    assert z_image_checkpoint.make(tmp_path, replace(sizes, blocks=5), flux, 2)[0] > written
    vae = "vae/diffusion_pytorch_model.safetensors"
    assert (tmp_path / checkpoints.MODELS[0] / vae).samefile(
        tmp_path / z_image_checkpoint.NAME / vae
    )


@pytest.mark.parametrize("name", [name for _, name in (*WHERE, *INSIDE)])
def test_parts_of_a_swap_are_some_that_the_service_logs(name: str) -> None:
    words = [f'"{word}"' for word in name.split(": ")]
    sources = (file.read_text(encoding="utf-8") for file in (ROOT / "service").rglob("src/**/*.rs"))
    assert any(all(word in source for word in words) for source in sources)


def test_a_picture_with_other_bytes_is_wrong_and_one_that_was_to_be_cancelled_is_not_compared(
    on: Any, tmp_path: Path
) -> None:
    asked = stream_mixed.requests(stream_mixed.SIDES)
    known = {one.seed: f"digest {one.seed}" for one in asked}
    ends = (
        ("", "done", known[0]),
        ("kill", "done", known[0]),
        ("", "done", known[1]),
        ("cancel", "done", "of more steps"),
        ("cancel", "cancelled", ""),
        ("kill", "failed", "WorkerDied"),
    )
    outcomes = [
        stream_mixed.Outcome(stream_mixed.Job(asked[0], act), how, said, 1.0, True, False)
        for act, how, said in ends
    ]
    stream_mixed._tell_outcomes(on("sim:1GiB"), "key", "jobs", outcomes, known)
    found = {one.key: one for one in read_part(tmp_path / "record", "ok", "", 1.0).figures}
    figures = {key: found[f"key.{key}"].value for key in ("wrong", "compared", "failed", "cancels")}
    assert figures == {"wrong": 1, "compared": 3, "failed": 1, "cancels": 1}
    assert not found["key.wrong"].met and not found["key.cancels"].met
