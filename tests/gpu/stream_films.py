"""Films of models that are larger than the card, beside the same card whole; and diffusers' offloading."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import moored
from bench import GIB, Bench, Running, gigabytes
from figures import MIB
from formats import FULL, PART
from loading import wait_until_known
from speed import answers_of_peer
from start_picture import start_picture
from streaming import Made, followed
from tiny_models import film_models

FILM = Path(__file__).with_name("film.py")
MODELS = ("hunyuan", "framepack")
MADE = "hunyuan/model_index.json"
"""The last file that is made."""
MAKE_SECONDS = 200.0
PROMPT = "a red circle on the left of a blue square"
STEPS = 4
TIMEOUT_S = 240.0
PEER_FRAMES = 49
PEER_SECONDS = 240.0


@dataclass(frozen=True)
class Film:
    """A film to be made on the whole card and on a small one."""

    model: str
    format: str
    size: tuple[int, int]
    frames: int
    card: int
    """Bytes of the small card."""
    share: float
    """The most that a step may take there, as a share of a resident one."""

    @property
    def what(self) -> str:
        """Its name in the table."""
        width, height = self.size
        return f"{self.model} {self.format}, {width}x{height}, {self.frames} frames"

    def options(self, steps: int) -> dict[str, Any]:
        """What is asked for."""
        formats = {} if self.format == FULL else {PART: self.format}
        told: dict[str, Any] = {
            "model": moored.ModelRef(self.model, formats=formats),
            "width": self.size[0],
            "height": self.size[1],
            "frames": self.frames,
            "steps": steps,
            "seed": 1,
            "output": "raw",
        }
        if self.model == "framepack":
            told["init_image"] = start_picture(self.size)
        return told

    def make(self, running: Running, steps: int) -> Made:
        """The film, and what it took."""
        call = running.client.stream_video
        return followed(running, call(PROMPT, timeout=TIMEOUT_S, **self.options(steps)))


SECTION = 37
"""Frames of one section of FramePack."""
FILMS = (
    Film("hunyuan", FULL, (832, 480), 49, 10 * GIB, 1.05),
    *(Film("framepack", name, (640, 640), SECTION, 6 * GIB, 1.10) for name in (FULL, "fp8", "nf4")),
)
SMALL_FILMS = (
    Film("hunyuan", FULL, (64, 48), 17, 12 * MIB, 1.05),
    *(Film("framepack", name, (64, 64), SECTION, 12 * MIB, 1.10) for name in (FULL, "nf4")),
)


def films(bench: Bench) -> None:
    """Steps and frames of each film on a small card, beside its own on the whole card."""
    _make_models(bench)
    nothing = bench.foreign_bytes()
    chosen = SMALL_FILMS if bench.small else FILMS
    failed = []
    for film in chosen:
        try:
            _beside_whole(bench, film, nothing)
        except (moored.MooredError, RuntimeError) as error:
            # The others are worth their figures.
            bench.record.note(f"{film.what} failed: {type(error).__name__}: {error}")
            failed.append(film.what)
    if failed:
        raise RuntimeError(f"failed: {'; '.join(failed)}")


def _make_models(bench: Bench) -> None:
    """Both models, in full size by film.py and PyTorch, or tiny; and their hashes in the service."""
    began = time.monotonic()
    if not (bench.models / MADE).is_file():
        for name in MODELS:
            shutil.rmtree(bench.models / name, ignore_errors=True)
        if bench.small:
            film_models(bench.models)
        else:
            bench.models.mkdir(parents=True, exist_ok=True)
            command = [bench.torch_python, str(FILM), "--parts", "make"]
            command += ["--binary", str(bench.binary), "--work", str(bench.models)]
            command += ["--out", str(bench.work / "films-made.json")]
            command += ["--llama", str(bench.scale.film_llama_layers)]
            subprocess.run(command, check=True, timeout=MAKE_SECONDS, stdout=sys.stderr)
        bench.record.note(f"made the models of films in {time.monotonic() - began:.1f} s")
    for name in MODELS:
        checkpoints.warm(bench.models / name, bench.threads)
    began = time.monotonic()
    with bench.serve() as running:
        wait_until_known(running.client, MODELS)
    bench.record.note(f"hashed by the service in {time.monotonic() - began:.1f} s")


def _beside_whole(bench: Bench, film: Film, nothing: int) -> None:
    with bench.serve() as running:
        whole = [film.make(running, steps) for steps in (1, STEPS)]
        streamed = _streamed(running)
    if streamed:
        raise RuntimeError(f"the whole card does not hold {', '.join(streamed)}")
    settings = ("log.filter=info,timeline=debug,gpu=debug",)
    card = f"{film.card // GIB} GiB" if film.card >= GIB else f"{film.card // MIB} MiB"
    key = f"stream.{film.model}.{film.format}"
    with bench.serve(bench.small_card(film.card), settings=settings) as running:
        before = running.settled()
        small = [film.make(running, steps) for steps in (1, STEPS)]
        plan = running.client.plan_video(PROMPT, **film.options(STEPS))
        running.client.unload(timeout=60)
        running.client.trim()
        left = running.settled() - before
        log = "".join(running.service.log)
    (bench.out / f"{key}.log").write_text(log, encoding="utf-8")
    add, what = bench.record.add, f"{film.what}, on a card of {card}"
    resident = statistics.median(whole[-1].step_ms)
    ms = statistics.median(small[-1].step_ms)
    add(f"{key}.resident", f"step, {film.what}, resident", resident, "ms")
    add(key, f"step, {what}", ms, "ms", target=film.share * resident)
    add(f"{key}.ratio", f"step, {what}: of a resident one", ms / resident, "", target=film.share)
    parts = [part for stage in plan.stages for part in stage.streamed if part.name == PART]
    each = max((part.streamed_bytes for part in parts), default=0)
    add(f"{key}.bytes", f"streamed in each step, {what}", gigabytes(each), "GB")
    add(
        f"{key}.rate",
        f"streamed in each step, by its time, {what}",
        1e3 * gigabytes(each) / ms,
        "GB/s",
    )
    add(f"{key}.first", f"first film, {what}, 1 step", small[0].seconds, "s")
    add(f"{key}.again", f"film, {what}, {STEPS} steps", small[-1].seconds, "s")
    most = max(small, key=lambda one: one.most_used)
    bench.record.note(f"{what}: the most was on the card at {most.most_used_at}")
    used = gigabytes(most.most_used - nothing)
    target = gigabytes(film.card)
    add(f"{key}.used", f"most on the card by NVML, {what}", used, "GB", target=target)
    add(f"{key}.left", f"left on the card after an unload, {what}", left / MIB, "MiB")
    others = [one for one, beside in zip(small, whole, strict=True) if one.digest != beside.digest]
    # Of a part the library convolves by other algorithms, and the last bits differ.
    wrong = [one for one in others if one.computed_whole]
    same = float(not wrong)
    add(f"{key}.same", f"frames equal to resident ones, {what}", same, "", "higher", 1.0)
    strips = len(others) - len(wrong)
    add(f"{key}.strips", f"films of other bits that were decoded in parts, {what}", strips, "")
    _note_stages(bench, film.what, whole[-1])
    _note_stages(bench, what, small[-1])


def _streamed(running: Running) -> list[str]:
    """Names of the components of which a part is on the card."""
    return [one.component.name for one in running.status().residents if one.streamed]


def _note_stages(bench: Bench, what: str, made: Made) -> None:
    stages = ", ".join(
        f"{one.name} {one.chunking} {one.move_ms} + {one.run_ms} ms" for one in made.done.stages
    )
    approximate = ", ".join(made.done.approximations) or "exact"
    bench.record.note(f"{what}: {stages}; {approximate}")


def peers(bench: Bench) -> None:
    """diffusers: a step of HunyuanVideo, resident, and with group offloading by leaf and by block."""
    bench.needs_card()
    of = f"stream.hunyuan.{FULL}"
    options = ["--ways", "resident,leaf,block", "--frames", str(PEER_FRAMES)]
    for one in answers_of_peer(bench, "film", PEER_SECONDS, *options):
        key, what = f"stream.peer.hunyuan.{one['way']}", f"diffusers, {one['told']}"
        # One figure of another program stands beside ours; the others have rows of their own.
        beside = of if one["way"] == "leaf" else ""
        bench.record.add(key, f"{what}, a step", one["ms"], "ms", peer_of=beside)
        bench.record.add(f"{key}.peak", f"{what}, most on the card", one["peak"] / 1e9, "GB")
        if one["ready_s"]:
            bench.record.add(f"{key}.ready", f"{what}, to make it ready", one["ready_s"], "s")
        bench.record.note(f"others: {one['versions']}")


PARTS = {"stream-films": films, "stream-films-peers": peers}
LIMITS_S = {"stream-films": 460.0, "stream-films-peers": 300.0}
