"""How fast the mathematics is, beside other programs on the same card: the parts `speed-...`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import loading
import moored
import numpy as np
from bench import ROOT, START_TIMEOUT_S, Bench, NeedsCard, Running, gigabytes
from figures import MIB
from formats import FULL, PART, in_format
from others import DEMO, PROMPTS
from PIL import Image

PEERS = Path(__file__).with_name("peers.py")
FLUX = checkpoints.MODELS[0]
TOKENS = 512
BATCH = 4
COMPILED, EAGER = "speed.peer.compiled", "speed.peer.eager"
BNB = "speed.peer.bitsandbytes"
# What a step at 1024x1024 may take, as a share of another program's.
STEP_SHARES = {
    FULL: (0.90, COMPILED),
    "fp8": (0.63, COMPILED),
    "int8": (0.66, f"{BNB}.nf4"),
    "nf4": (0.66, f"{BNB}.nf4"),
}
SIZES = ((512, 512), (1536, 1024))
VAE_SHARES = {"decode": 0.42, "encode": 0.6}
DECODE_SCRATCH_GB = 2.0
TEXT_MS = 35.0
REQUEST_S = {FULL: 3.6, "fp8": 2.6}
CACHED = (0.0, 0.05, 0.08, 0.12, 0.3, 1.0)
FIRST_STEPS = 4
RESTED = "the caches left after a rest"
FIRST_S = {"empty caches": 4.0, "the caches left": 1.5, RESTED: 1.5}
# The driver is busy with what a process had for some tenths of a second after its end, and one that
# starts meanwhile waits for it.
REST_S = 2.0
SWAP_S = 0.6
# Scratch may be apart from what was booked by so much.
SCRATCH_SHARE, SCRATCH_BYTES = 0.05, 8 * MIB
CPU_SIDES = (128, 256, 512)
CPU_THREADS = 2
BNB_SECONDS = 75.0
PEER_SECONDS = {
    "rates": 60.0,
    "step": 110.0,
    "sizes": 200.0,
    "vae": 60.0,
    "text": 60.0,
    "demo": 80.0,
}
LIMITS_S = {
    "speed-steps": 120.0,
    "speed-request": 240.0,
    "speed-cached": 240.0,
    "speed-peers": 260.0,
    "speed-sizes-peers": 240.0,
    "speed-cpu": 120.0,
}


@dataclass(frozen=True)
class Denoising:
    """One job's denoising: milliseconds of each step after the first, and what the stage reported."""

    step_ms: list[float]
    scratch: int
    booked: int


def rates(bench: Bench) -> None:
    """What the card's own libraries reach: the ceiling of everything below."""
    for found in answers_of_peer(bench, "rates", PEER_SECONDS["rates"]):
        what, rate = found["what"], found["tflops"]
        bench.record.add(f"speed.rate.{found['rate']}", what, rate, "TFLOP/s", "higher")


def steps(bench: Bench) -> None:
    """A step at 1024x1024 with the transformer in each format, and its scratch."""
    side = bench.scale.picture
    with _serve_flux(bench) as running:
        for name, (share, of) in STEP_SHARES.items():
            found = _denoise(bench, running, name, side, side)
            key, what = f"speed.step.{name}", f"step, {name}, {side}x{side}"
            ms = statistics.median(found.step_ms)
            bench.record.add(key, what, ms, "ms", share=share, share_of=of)
            _tell_scratch(bench, f"{key}.scratch", what, found.scratch, found.booked)
            running.client.unload(timeout=60)


def guided(bench: Bench) -> None:
    """A step of two passes, for a prompt and a negative prompt, beside one of one pass."""
    side = bench.scale.picture
    second = {"negative_prompt": "blurred", "true_guidance": 4.0}
    with _serve_flux(bench) as running:
        one = _denoise(bench, running, FULL, side, side)
        two = _denoise(bench, running, FULL, side, side, **second)
    single, double = statistics.median(one.step_ms), statistics.median(two.step_ms)
    what = f"step with a negative prompt, full, {side}x{side}"
    bench.record.add("speed.guided", what, double, "ms")
    bench.record.add("speed.guided.ratio", f"{what}: of a step without", double / single, "")
    _tell_scratch(bench, "speed.guided.scratch", what, two.scratch, two.booked)


def int8(bench: Bench) -> None:
    """A step with weights in int8 whose columns were rotated, multiplied in int8 and dequantized."""
    side = bench.scale.picture
    for products, how in (("never", "dequantized"), ("auto", "multiplied in int8")):
        with bench.serve(settings=(f'cards.int8_products="{products}"',)) as running:
            found = _denoise(bench, running, "int8-convrot", side, side)
        what = f"step, int8-convrot, {side}x{side}, {how}"
        ms, (share, of) = statistics.median(found.step_ms), STEP_SHARES["int8"]
        told = {"share": share, "share_of": of} if products == "auto" else {}
        bench.record.add(f"speed.int8.{products}", what, ms, "ms", **told)
        _tell_scratch(bench, f"speed.int8.{products}.scratch", what, found.scratch, found.booked)


def sizes(bench: Bench) -> None:
    """A step at other sizes, and of several pictures of one request; never slower than compiled."""
    with _serve_flux(bench) as running:
        for width, height in _sizes(bench):
            found = _denoise(bench, running, FULL, width, height)
            ms, key = statistics.median(found.step_ms), _shape(width, height, 1)
            what = f"step, full, {width}x{height}"
            of = f"{COMPILED}.{key}"
            bench.record.add(f"speed.step.{key}", what, ms, "ms", share=1.0, share_of=of)
            booked = found.booked
            _tell_scratch(bench, f"speed.step.{key}.scratch", what, found.scratch, booked)


def batch(bench: Bench) -> None:
    """A step of four pictures of one request, however many the service generates at a time."""
    side, fewer = bench.scale.picture, 1
    more = fewer + bench.scale.speed_steps
    key = _shape(side, side, BATCH)
    with _serve_flux(bench) as running:
        seconds = {}
        # The first brings what stays.
        for count in (fewer, fewer, more):
            began = time.perf_counter()
            running.client.generate_image(
                "four of them", count=BATCH, steps=count, **_options(FULL, side, side)
            )
            seconds[count] = time.perf_counter() - began
    ms = 1e3 * (seconds[more] - seconds[fewer]) / (more - fewer)
    what = f"step of {BATCH} pictures of a request, full, {side}x{side}"
    of = f"{COMPILED}.{key}"
    bench.record.add(f"speed.step.{key}", what, ms, "ms", share=1.0, share_of=of)


def vae(bench: Bench) -> None:
    """Decodes of a kept latent, and encodes of a picture, by the job's own report."""
    side, rounds = bench.scale.picture, bench.scale.speed_rounds
    noise = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    with _serve_flux(bench) as running:
        client = running.client
        made = client.generate_image("a latent", steps=1, **_options(FULL, side, side))
        latent = made.latents[0]
        decodes = [
            client.decode_latent(latent, model=FLUX, output="raw", timeout=120)
            for _ in range(rounds + 1)
        ]
        encodes = []
        for number in range(rounds + 1):
            encodes.append(client.encode_image(picture, model=FLUX, seed=number, timeout=120))
            client.release_latent(encodes[-1].latent)
    for what, stage, jobs in (
        ("decode", "decode", decodes),
        ("encode", "encode_image", encodes),
    ):
        # The first brings what stays, and its load.
        stages = [_stage(job.done, stage) for job in jobs[1:]]
        key, told = f"speed.vae.{what}", f"VAE {what} {side}x{side}"
        ms, of = statistics.median(one.run_ms for one in stages), f"speed.peer.vae.{what}"
        bench.record.add(key, told, ms, "ms", share=VAE_SHARES[what], share_of=of)
        most = max(stages, key=lambda one: one.peak_scratch_bytes)
        target = DECODE_SCRATCH_GB if what == "decode" else None
        scratch, booked = most.peak_scratch_bytes, most.predicted_scratch_bytes
        _tell_scratch(bench, f"{key}.scratch", told, scratch, booked, target)
    bench.record.note("stage times are whole milliseconds, rounded down")


def text(bench: Bench) -> None:
    """CLIP and T5 at 512 tokens, each prompt a new one."""
    side, taken = bench.scale.job_picture, []
    with _serve_flux(bench) as running:
        for number in range(bench.scale.speed_rounds + 1):
            prompt = f"prompt {number} of those that are encoded"
            done = running.client.generate_image(prompt, steps=1, **_options(FULL, side, side)).done
            stage = _stage(done, "encode_text")
            if stage.cached:
                raise RuntimeError("a new prompt came from a cache")
            taken.append(stage.run_ms)
    ms = statistics.median(taken[1:])
    bench.record.add("speed.text", f"text encoders, {TOKENS} tokens", ms, "ms", target=TEXT_MS)


def request(bench: Bench) -> None:
    """A whole request at the client, prompt to PNG, everything resident before it."""
    side, count = bench.scale.picture, bench.scale.request_steps
    with _serve_flux(bench) as running:
        for name, target in REQUEST_S.items():
            taken: list[float] = []
            for number in range(bench.scale.request_rounds + 1):
                # The first loads, in few steps.
                few = {"steps": count if number else 2}
                options = _options(name, side, side) | {"latent_only": False} | few
                began = time.perf_counter()
                result = running.client.generate_image(f"{name}, {number}", **options)
                taken.append(time.perf_counter() - began)
                if not result.pictures[0].data.startswith(b"\x89PNG"):
                    raise RuntimeError("what came is no PNG")
            stages = {one.name: one.run_ms for one in result.stages}
            bench.record.note(f"{name}: milliseconds of the last one's stages: {stages}")
            what = f"{count} steps at {side}x{side}, {name}, prompt to PNG at the client"
            seconds = statistics.median(taken[1:])
            bench.record.add(f"speed.request.{name}", what, seconds, "s", target=target)
            running.client.unload(timeout=60)


def cached(bench: Bench) -> None:
    """Denoising with passes left out (`step_cache`), beside all of them.

    How many are left out depends on the weights: a random transformer's first block changes more from step to
    step than a trained one's.
    """
    side, count = bench.scale.picture, bench.scale.request_steps
    with _serve_flux(bench) as running:
        whole = 0.0
        for change in CACHED:
            taken, left_out = [], 0
            for _ in range(bench.scale.request_rounds + 1):
                options = _options(FULL, side, side) | {"steps": count, "step_cache": change}
                result = running.client.generate_image("passes left out", **options)
                stage = next(one for one in result.stages if one.name == "denoise")
                taken.append(stage.run_ms)
                left_out = stage.passes_left_out
            ms = statistics.median(taken[1:])
            whole = whole or ms
            what = (
                f"{count} steps at {side}x{side}, step_cache {change}: {left_out} passes left out"
            )
            bench.record.add(f"speed.cached.{change}", what, ms / 1e3, "s")
            bench.record.note(f"{whole / ms:.2f} times as fast")


def first(bench: Bench) -> None:
    """The first picture of a new process, from its start; weights are in the page cache, and loaded."""
    checkpoints.warm(bench.models / FLUX, bench.threads)
    state, caches = bench.work / "first-state", bench.work / "first-driver-cache"
    side, taken = bench.scale.picture, {name: [] for name in FIRST_S}
    for _ in range(bench.scale.first_rounds):
        for folder in (state, caches):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        for name in FIRST_S:
            if name == RESTED:
                time.sleep(REST_S)
            seconds, done = _first_picture(bench, state, caches)
            taken[name].append(seconds)
            stages = {one.name: (one.move_ms, one.run_ms) for one in done.stages}
            bench.record.note(f"{name}: {seconds:.2f} s; stages' moves and computing, ms: {stages}")
    for name, target in FIRST_S.items():
        what = f"first picture of a process, {FIRST_STEPS} steps at {side}x{side}, {name}, worst"
        key = f"speed.first.{name.replace(' ', '-')}"
        bench.record.add(key, what, max(taken[name]), "s", target=target)
    if not bench.simulated:
        bench.witness().end()


def _first_picture(bench: Bench, state: Path, caches: Path) -> tuple[float, moored.Done]:
    side = bench.scale.picture
    variables = {"CUDA_CACHE_PATH": str(caches)}
    options = _options(FULL, side, side) | {"latent_only": False}
    began = time.perf_counter()
    service = bench.start(state=state, variables=variables)
    try:
        with moored.Client(service.address) as client:
            client.wait_until_ready(START_TIMEOUT_S)
            card = next(one for one in client.server_info().cards if one.kind != "cpu")
            client.wait_until_ready(START_TIMEOUT_S, card=card.id)
            if bench.simulated:
                bench.record.device(f"{card.name}, {bench.cores} cores")
            result = client.generate_image("the first of all", steps=FIRST_STEPS, **options)
            return time.perf_counter() - began, result.done
    finally:
        service.stop()


def swap(bench: Bench) -> None:
    """One model in the place of the other, proof included."""
    if bench.models_made < len(checkpoints.MODELS):
        raise RuntimeError("a swap needs both models: --models 2")
    times, how = loading.swap_seconds(bench)
    seconds = [one for direction in times.values() for one in direction]
    what = f"swap of 23.8 GB models, {how}"
    bench.record.add("speed.swap", f"{what}, p50", statistics.median(seconds), "s", target=SWAP_S)
    bench.record.add("speed.swap.worst", f"{what}, worst", max(seconds), "s")


def peers(bench: Bench) -> None:
    """diffusers and transformers: a step, eager and compiled, the VAE, the text encoders."""
    known: dict[str, float] = {}
    failed = []
    for program in (_peer_steps, _peer_vae, _peer_text):
        try:
            program(bench, known)
        except RuntimeError as error:
            # The others are worth their figures.
            failed.append(str(error))
    if {"compiled", "decode", "text"} <= known.keys():
        count = bench.scale.request_steps
        seconds = (count * known["compiled"] + known["decode"] + known["text"]) / 1e3
        what, of = "diffusers, compiled steps, decode, text encoders added up", "speed.request"
        bench.record.add("speed.peer.request", what, seconds, "s", peer_of=f"{of}.{FULL}")
    if failed:
        raise RuntimeError("; ".join(failed))


def _peer_steps(bench: Bench, known: dict[str, float]) -> None:
    side, add = bench.scale.picture, bench.record.add
    options = ["--ways", "eager,compiled", "--shapes", _shape(side, side, 1)]
    for one in answers_of_peer(bench, "step", PEER_SECONDS["step"], *options):
        known[one["way"]] = one["ms"]
        if one["way"] == "eager":
            add(EAGER, f"diffusers, eager: step, {side}x{side}", one["ms"], "ms")
            bench.record.note(f"others: {one['versions']}")
            continue
        add(COMPILED, "diffusers, compiled", one["ms"], "ms", peer_of=f"speed.step.{FULL}")
        key, what = f"{COMPILED}.first", "diffusers, compiling to the end of a step"
        add(key, what, one["first_s"], "s", peer_of="speed.first.empty-caches")


def _peer_vae(bench: Bench, known: dict[str, float]) -> None:
    options = ["--sides", str(bench.scale.picture)]
    for one in answers_of_peer(bench, "vae", PEER_SECONDS["vae"], *options):
        known[one["vae"]] = one["ms"]
        key, of = f"speed.peer.vae.{one['vae']}", f"speed.vae.{one['vae']}"
        what = f"diffusers, {one['vae']}"
        bench.record.add(key, what, one["ms"], "ms", peer_of=of)
        what, peak = f"{what}: peak beyond the weights", gigabytes(one["peak"])
        bench.record.add(f"{key}.scratch", what, peak, "GB", peer_of=f"{of}.scratch")


def _peer_text(bench: Bench, known: dict[str, float]) -> None:
    for one in answers_of_peer(bench, "text", PEER_SECONDS["text"], "--tokens", str(TOKENS)):
        known["text"] = one["ms"]
        what = "transformers, text encoders"
        bench.record.add("speed.peer.text", what, one["ms"], "ms", peer_of="speed.text")
        bench.record.note(f"others: {one['versions']}")


def sizes_peers(bench: Bench) -> None:
    """diffusers compiled at the other sizes, each compiled for itself."""
    side = bench.scale.picture
    shapes = [_shape(*size, 1) for size in _sizes(bench)] + [_shape(side, side, BATCH)]
    options = ["--ways", "compiled", "--shapes", ",".join(shapes)]
    for one in answers_of_peer(bench, "step", PEER_SECONDS["sizes"], *options):
        key, of = f"{COMPILED}.{one['shape']}", f"speed.step.{one['shape']}"
        what = f"diffusers, compiled, {one['shape']}"
        bench.record.add(key, what, one["ms"], "ms", peer_of=of)


def bitsandbytes(bench: Bench) -> None:
    """diffusers with bitsandbytes on the checkpoint's files: a step in nf4 and in int8."""
    bench.needs_card()
    folder, failed = bench.models / FLUX / PART, []
    checkpoints.warm(folder, bench.threads)
    for name in ("nf4", "int8"):
        words = f"--format {name} --rounds 1 --steps {bench.scale.speed_rounds}".split()
        words += ["--side", str(bench.scale.picture), "--folder", str(folder)]
        try:
            found = bench.beside("quantized", *words, timeout_s=BNB_SECONDS)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found = {"error": str(error)}
        if "error" in found:
            failed.append(f"{name}: {found['error']}")
            continue
        ms, of = 1e3 * statistics.median(found["steps"]), f"speed.step.{name}"
        bench.record.add(f"{BNB}.{name}", f"bitsandbytes {name}", ms, "ms", peer_of=of)
        bench.record.note(f"others: {found['versions']}")
    if failed:
        raise RuntimeError("; ".join(failed))


def cpu(bench: Bench) -> None:
    """The shipped model on two processors, prompt to pixels: ours, and diffusers with PyTorch in f32."""
    processors = sorted(os.sched_getaffinity(0))[:CPU_THREADS]
    # Of this process and of all that it starts.
    os.sched_setaffinity(0, processors)
    os.environ |= {name: str(CPU_THREADS) for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS")}
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line]
    rounds = bench.scale.cpu_rounds
    with bench.serve("cpu") as running:
        for side in CPU_SIDES:
            taken = []
            for number in range(rounds + 1):
                prompt = prompts[number % len(prompts)]
                began = time.perf_counter()
                running.client.generate_image(
                    prompt,
                    model=DEMO,
                    width=side,
                    height=side,
                    steps=8,
                    seed=number,
                    output="raw",
                    timeout=120,
                )
                taken.append(time.perf_counter() - began)
            what = f"shipped model on the CPU, {CPU_THREADS} threads, {side}x{side}"
            seconds, of = statistics.median(taken[1:]), f"speed.peer.cpu.{side}"
            bench.record.note(f"{side}: best of {rounds}: {min(taken[1:]):.3f} s")
            bench.record.add(f"speed.cpu.{side}", what, seconds, "s", share=1.0, share_of=of)
    _say_processor(bench)
    options = ["--sides", ",".join(map(str, CPU_SIDES)), "--prompts", str(PROMPTS)]
    options += ["--rounds", str(rounds)]
    for one in answers_of_peer(bench, "demo", PEER_SECONDS["demo"], *options, place="cpu"):
        key, of = f"speed.peer.cpu.{one['side']}", f"speed.cpu.{one['side']}"
        seconds = statistics.median(one["seconds"])
        bench.record.note(f"{one['side']}, diffusers: best: {min(one['seconds']):.3f} s")
        bench.record.add(key, "diffusers and PyTorch, f32", seconds, "s", peer_of=of)
    bench.record.note(f"others: {one['versions']}")


def _say_processor(bench: Bench) -> None:
    from bench_service import machine

    bench.record.device(("simulated: " if bench.small else "") + machine())


def _serve_flux(bench: Bench) -> Any:
    """A service on the card; the checkpoint is read into the page cache before."""
    checkpoints.warm(bench.models / FLUX, bench.threads)
    return bench.serve()


def _options(name: str, width: int, height: int) -> dict[str, Any]:
    """What every request of a picture or latent asks for."""
    return {
        "model": in_format(name),
        "width": width,
        "height": height,
        "seed": 1,
        "max_sequence_length": TOKENS,
        "latent_only": True,
        "timeout": 240,
    }


def _denoise(
    bench: Bench,
    running: Running,
    name: str | moored.ModelRef,
    width: int,
    height: int,
    **more: Any,
) -> Denoising:
    """A job of a few steps, after one that brings what stays: of a format, or of a model."""
    model = in_format(name) if isinstance(name, str) else name
    prompt, options = "a step at a time", _options(FULL, width, height) | {"model": model} | more
    running.client.generate_image(prompt, steps=1, **options)
    at: list[tuple[int, float]] = []
    done: moored.Done | None = None
    count = bench.scale.speed_steps
    with running.client.stream_image(prompt, steps=count, **options) as stream:
        for event in stream:
            if isinstance(event, moored.Step):
                at.append((event.n, time.perf_counter()))
            elif isinstance(event, moored.Done):
                done = event
    if done is None:
        raise RuntimeError(f"{name}: a job ended without its last event")
    stage = _stage(done, "denoise")
    return Denoising(
        step_times(at) or [stage.run_ms / count],
        stage.peak_scratch_bytes,
        stage.predicted_scratch_bytes,
    )


def step_times(at: list[tuple[int, float]]) -> list[float]:
    """Milliseconds of each step after the first, from numbers and seconds; of those untold, the mean."""
    pairs = zip(at, at[1:], strict=False)
    return [1e3 * (later - sooner) / (n - m) for (m, sooner), (n, later) in pairs if n > m]


def _tell_scratch(
    bench: Bench, key: str, what: str, taken: int, booked: int, target: float | None = None
) -> None:
    """Scratch of a stage, and how far it is from what was booked for it."""
    bench.record.add(key, f"{what}: scratch", gigabytes(taken), "GB", target=target)
    may = max(SCRATCH_SHARE * booked, SCRATCH_BYTES) / MIB
    apart, told = abs(taken - booked) / MIB, f"{what}: scratch, apart from what was booked"
    bench.record.add(f"{key}.apart", told, apart, "MiB", target=float(f"{may:.4g}"))


def _stage(done: moored.Done, name: str) -> Any:
    return next(stage for stage in done.stages if stage.name == name)


def _sizes(bench: Bench) -> list[tuple[int, int]]:
    """The sizes that are measured besides, in proportion to the large picture."""
    by = 1024 // bench.scale.picture
    return [(width // by, height // by) for width, height in SIZES]


def _shape(width: int, height: int, pictures: int) -> str:
    return f"{width}x{height}x{pictures}"


def answers_of_peer(
    bench: Bench, program: str, limit_s: float, *options: str, place: str = ""
) -> Iterator[dict[str, Any]]:
    """What a program of peers.py finds, as it comes. A RuntimeError if it fails, or if its time is up."""
    on_card = not place and not bench.simulated
    if on_card:
        bench.witness().end()
    elif bench.torch_python == sys.executable and importlib.util.find_spec("torch") is None:
        raise NeedsCard("needs PyTorch")
    command = [bench.torch_python, str(PEERS), program]
    command += ["--place", place or (f"cuda:{bench.index}" if on_card else "cpu")]
    command += ["--rounds", str(bench.scale.speed_rounds), *options]
    command += ["--small"] if bench.small else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        process.kill()

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if code := process.wait():
            over = f", its {limit_s:g} s were over" if is_over.is_set() else ""
            raise RuntimeError(f"peers.py {program} ended with {code}{over}")
    finally:
        timer.cancel()
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


# Cheap ones first.
PARTS = {
    "speed-rates": rates,
    "speed-steps": steps,
    "speed-guided": guided,
    "speed-int8": int8,
    "speed-vae": vae,
    "speed-text": text,
    "speed-request": request,
    "speed-cached": cached,
    "speed-peers": peers,
    "speed-bitsandbytes": bitsandbytes,
    "speed-sizes": sizes,
    "speed-batch": batch,
    "speed-sizes-peers": sizes_peers,
    "speed-first": first,
    "speed-swap": swap,
    "speed-cpu": cpu,
}
