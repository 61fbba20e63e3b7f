"""Measures music on a card, beside diffusers in the same run: steps, four minutes of sound, memory.

    python tests/gpu/sound.py --binary moored --work FOLDER --out sound.json

It makes ACE-Step 1.5 (turbo, 2B) in full size from random numbers, with a second transformer for swaps
(9 GB), and needs torch, diffusers, transformers, and what the Python client needs. `--parts` chooses among
make, peers, steps, idle and held, `--only` figures by a pattern of their names. One line of JSON for each
figure, and all of them in the file, of which `sound_rows.py` makes the rows of docs/benchmarks/sound.json.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import full_size
import numpy as np
import torch
from full_size import (
    FIXTURES,
    begin,
    bytes_of,
    command_line,
    free_memory,
    guarded,
    made,
    peak_gib,
    run_parts,
    settled,
    show,
    tell,
    tell_step,
    timed,
    write,
)

MODEL, OTHER = "ace-step", "ace-step-other"
RATE, HOP, CHANNELS = 48_000, 1920, 64
FOUR_MINUTES = 240
WINDOW = (60.0, 120.0)
LYRICS = "[verse]\nthe ship lies at anchor, the harbour is wide\n" * 8
# Tokens of the prompt, of these lyrics by the fixture's small vocabulary, and of the timbre, about.
CONDITION = 512
CYCLES = 100


class Service(full_size.Service):
    """A running service of both models."""

    def __init__(self, binary: Path, work: Path, *settings: str) -> None:
        super().__init__(binary, work, (MODEL, OTHER), "log.filter=info,timeline=debug", *settings)


def transformer() -> Any:
    import diffusers

    return made(lambda: diffusers.AceStepTransformer1DModel(is_turbo=True, model_version="turbo"))


def autoencoder() -> Any:
    import diffusers

    return made(
        lambda: diffusers.AutoencoderOobleck(
            downsampling_ratios=[2, 4, 4, 6, 10], sampling_rate=RATE
        )
    )


def make(work: Path) -> None:
    """The folder of a model, and that of another which differs by its transformer."""
    from diffusers.pipelines.ace_step.modeling_ace_step import (
        AceStepAudioTokenDetokenizer,
        AceStepAudioTokenizer,
        AceStepConditionEncoder,
    )
    from transformers import Qwen3Config, Qwen3Model

    began = time.perf_counter()
    folder, other = work / MODEL, work / OTHER
    stem = "diffusion_pytorch_model"
    for name, build in (
        ("condition_encoder", lambda: made(AceStepConditionEncoder)),
        ("audio_tokenizer", lambda: made(AceStepAudioTokenizer)),
        ("audio_token_detokenizer", lambda: made(AceStepAudioTokenDetokenizer)),
        ("vae", autoencoder),
    ):
        module = build()
        write(folder / name, module, stem)
        (folder / name / "config.json").write_text(module.to_json_string())
    config = Qwen3Config(
        vocab_size=151_669,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_bias=False,
    )
    module = made(lambda: Qwen3Model(config))
    write(folder / "text_encoder", module, "model")
    text = module.config.to_json_string(use_diff=False)
    (folder / "text_encoder/config.json").write_text(text)
    del module
    tiny = FIXTURES / "ace-tiny"
    shutil.copytree(tiny / "tokenizer", folder / "tokenizer")
    shutil.copytree(tiny / "scheduler", folder / "scheduler")
    shutil.copy(tiny / "model_index.json", folder)
    shutil.copytree(folder, other, copy_function=os.link)
    for place in (folder, other):
        module = transformer()
        write(place / "transformer", module, stem)
        (place / "transformer/config.json").write_text(module.to_json_string())
    tell("make", time.perf_counter() - began, "s")


def named(seconds: int) -> str:
    return f"step, {seconds} s of music"


@torch.no_grad()
def peers() -> None:
    torch.manual_seed(1)
    for name, peer in (("step", _step_peer), ("decode, encode", _vae_peer)):
        guarded(name, peer)
        free_memory()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _step_peer() -> None:
    module = transformer()
    for seconds in (FOUR_MINUTES, 60):
        frames = seconds * RATE // HOP
        at = torch.tensor([0.8333], device="cuda", dtype=torch.bfloat16)
        given = {
            "hidden_states": drawn(1, frames, CHANNELS),
            "context_latents": drawn(1, frames, 2 * CHANNELS),
            "encoder_hidden_states": drawn(1, CONDITION, 2048),
            "timestep": at,
            "timestep_r": at,
        }
        step = partial(module, **given, return_dict=False)
        ms, peak = timed(step, 9), peak_gib(step)
        tell(named(seconds), ms, "ms", who="diffusers eager", peak_gib=round(peak, 2))


def _vae_peer() -> None:
    vae = autoencoder()
    frames = FOUR_MINUTES * RATE // HOP
    latents, samples = drawn(1, CHANNELS, frames), drawn(1, 2, frames * HOP) * 0.3
    for name, work in (
        ("decode", partial(vae.decode, latents, return_dict=False)),
        ("encode", partial(vae.encode, samples, return_dict=False)),
    ):
        ms, peak = timed(work, 3), peak_gib(work)
        what = f"{name} of {FOUR_MINUTES} s"
        tell(what, ms, "ms", who="diffusers eager", peak_gib=round(peak, 2))


def reference_of(model: str) -> Any:
    """A model whose name may end with `+` and a format for its transformer."""
    import moored

    name, _, quantized = model.partition("+")
    return moored.ModelRef(name, formats={"transformer": quantized} if quantized else {})


def track(service: Service, model: str, seconds: float | None, steps: int, **options: Any) -> Any:
    return service.client.generate_audio(
        "a slow waltz for piano and strings",
        lyrics=LYRICS,
        model=reference_of(model),
        seconds=seconds,
        steps=steps,
        seed=options.pop("seed", 1),
        output="raw",
        **options,
    )


def brought(service: Service, seconds: float, number: int) -> Any:
    """A source that the service has not seen before."""
    numbers = np.random.default_rng(number)
    samples = numbers.integers(-8000, 8000, (round(seconds * RATE), 2), dtype=np.int16)
    return service.client.put_media(samples, sample_rate=RATE)


def steps(binary: Path, work: Path) -> None:
    with Service(binary, work).logged("steps") as service:
        for quantized in ("", "fp8", "int8", "nf4"):
            for seconds in (FOUR_MINUTES, 60):
                what = f"{named(seconds)} {quantized}".strip()
                model = f"{MODEL}+{quantized}" if quantized else MODEL
                make = partial(track, service, model, seconds, latent_only=True)
                guarded(what, partial(tell_step, what, make, 4, 44))
        guarded("decode, encode", partial(whole_tracks, service))


def whole_tracks(service: Service) -> None:
    """Four minutes, encoded and made anew: what the autoencoder takes, to samples and from them."""
    best: dict[str, Any] = {}
    peak = 0
    for number in range(4):
        source = brought(service, FOUR_MINUTES, number)
        began = time.perf_counter()
        result = track(service, MODEL, None, 8, task="repaint", window=WINDOW, init_media=source)
        seconds = time.perf_counter() - began
        service.client.release_media(source)
        if number == 0:
            show(result)
            continue
        for stage in result.stages:
            peak = max(peak, stage.peak_scratch_bytes)
            if stage.name not in best or stage.run_ms < best[stage.name].run_ms:
                best[stage.name] = stage
    show(result)
    assert result.array.shape == (FOUR_MINUTES * RATE, 2)
    for name, stage in (("decode", best["decode"]), ("encode", best["encode_source"])):
        more = {
            "peak_gib": round(stage.peak_scratch_bytes / 2**30, 3),
            "predicted_gib": round(stage.predicted_scratch_bytes / 2**30, 3),
            "chunking": stage.chunking,
        }
        tell(f"{name} of {FOUR_MINUTES} s", stage.run_ms, "ms", who="moored", **more)
    what = f"peak over the weights, {FOUR_MINUTES} s repainted"
    tell(what, peak / 2**30, "GiB", who="moored")
    tell(f"{FOUR_MINUTES} s repainted in 8 steps", seconds, "s", who="moored")


class Cycles:
    """Jobs of every kind, of which any number leaves nothing."""

    def __init__(self, service: Service) -> None:
        self.service, self.client = service, service.client
        self.source = brought(service, 20.0, 1)
        self.latent: Any = None
        self.kinds: tuple[Callable[[], object], ...] = (
            self.generate,
            self.decode,
            self.swap,
            self.cancel,
            self.refuse,
            self.repaint,
            self.cover,
            self.late,
            self.quantized,
            self.picture,
        )

    def generate(self) -> None:
        result = track(self.service, MODEL, 30, 4, keep_latent=True)
        self.latent = result.latents[0]

    def decode(self) -> None:
        self.client.decode_audio(self.latent, model=MODEL)
        self.client.release_latent(self.latent)

    def swap(self) -> None:
        self.client.load(OTHER, replace=MODEL)
        track(self.service, OTHER, 10, 2)

    def cancel(self) -> None:
        import moored

        with self.client.stream_audio("x", model=MODEL, seconds=240, steps=50) as stream:
            for event in stream:
                if isinstance(event, moored.Step):
                    break

    def refuse(self) -> None:
        import moored

        for work in (
            lambda: track(self.service, MODEL, 10, 4, task="extract", init_media=self.source),
            lambda: self.client.put_media(np.zeros((0, 2), np.int16), sample_rate=RATE),
        ):
            try:
                work()
            except (moored.MooredError, ValueError):
                continue
            raise AssertionError("a wrong request was not refused")

    def repaint(self) -> None:
        track(self.service, MODEL, None, 2, task="repaint", init_media=self.source)

    def cover(self) -> None:
        track(
            self.service,
            MODEL,
            None,
            2,
            task="cover",
            init_media=self.source,
            reference=self.source,
        )

    def late(self) -> None:
        """A job that does not end in time, on the card when its time is over."""
        import moored

        try:
            track(self.service, MODEL, 240, 90, timeout=0.5)
        except moored.MooredError:
            return
        raise AssertionError("a job of 90 steps ended in half a second")

    def quantized(self) -> None:
        track(self.service, f"{MODEL}+fp8", 10, 2)

    def picture(self) -> None:
        self.client.generate_image("a red circle", model="moored/demo", steps=2)


def idle(binary: Path, work: Path) -> None:
    """What is left on the card when everything is unloaded, after a track and after many mixed jobs."""
    with Service(binary, work).logged("idle") as service:
        client = service.client

        def at_rest() -> int:
            client.unload(timeout=60)
            client.trim()
            return settled(lambda: bytes_of(service))

        client.wait_until_ready(60)
        bare = settled(lambda: bytes_of(service))
        cycles = Cycles(service)
        # The first time brings the code of kernels, which stays with the process.
        for kind in cycles.kinds:
            kind()
        before = at_rest()
        tell("code and context that first tracks leave", (before - bare) / 2**20, "MiB")
        track(service, MODEL, FOUR_MINUTES, 2)
        tell(
            "bytes left after four minutes and unloading", at_rest() - before, "bytes", who="moored"
        )
        began, samples = time.perf_counter(), []
        for number in range(CYCLES):
            kind = cycles.kinds[number % len(cycles.kinds)]
            try:
                kind()
            except Exception as error:  # noqa: BLE001
                print(f"cycle {number}, {kind.__name__}: {error!r}", flush=True)
                raise
            if number % 5 == 4:
                samples.append(at_rest() - before)
        seconds = round(time.perf_counter() - began, 1)
        what = f"bytes left after unloading, {CYCLES} mixed cycles"
        tell(what, samples[-1], "bytes", who="moored", most=max(samples), seconds=seconds)


def held(binary: Path, work: Path) -> None:
    """A swap, and four minutes encoded and decoded, behind a program that leaves 5.9 GiB of the card."""
    left_gib = 5.9
    for policy in ("shared", "exclusive"):
        settings = (f"cards.policy={policy}", "queue.patience_foreign=2s")
        with Service(binary, work, *settings).logged(f"held-{policy}") as service:
            service.client.wait_until_ready(60)
            free_memory()
            free = torch.cuda.mem_get_info()[0]
            held = torch.empty(int(free - left_gib * 2**30), dtype=torch.uint8, device="cuda")
            print(f"free beside the other program: {torch.cuda.mem_get_info()[0] / 2**30:.2f} GiB")
            for by, quantized in (("job", ""), ("load, fp8", "+fp8")):
                what = f"swap by a {by}, {FOUR_MINUTES} s repainted, {left_gib} GiB left, {policy}"
                guarded(what, partial(_behind, service, quantized, what))
        del held
        free_memory()


def _behind(service: Service, quantized: str, what: str) -> None:
    """In bf16 a model is 5.9 GiB, and only what a track uses fits: a job swaps it. In fp8 a load does."""
    client = service.client
    model, other = MODEL + quantized, OTHER + quantized
    first = 2 if quantized else 0
    sources = [brought(service, FOUR_MINUTES, number) for number in (first, first + 1)]
    asked: dict[str, Any] = {"task": "repaint", "window": WINDOW}
    track(service, model, None, 8, init_media=sources[0], **asked)
    began = time.perf_counter()
    if quantized:
        client.load(reference_of(other), replace=reference_of(model))
    swapped = time.perf_counter() - began
    result = track(service, other, None, 8, init_media=sources[1], **asked)
    seconds = time.perf_counter() - began
    show(result)
    assert result.array.shape == (FOUR_MINUTES * RATE, 2)
    chunking = {stage.name: stage.chunking for stage in result.stages if stage.chunking}
    more = {"chunking": chunking, "swap_s": round(swapped, 2)}
    more |= {"approximations": list(result.approximations)}
    tell(what, seconds, "s", who="moored", **more)


def main() -> None:
    parser = command_line(__doc__, "make,peers,steps,idle,held", "peers, steps and held")
    settings = parser.parse_args()
    begin(settings)
    binary, work = settings.binary, settings.work
    parts = {
        "make": partial(make, work),
        "peers": peers,
        "steps": partial(steps, binary, work),
        "idle": partial(idle, binary, work),
        "held": partial(held, binary, work),
    }
    run_parts(parts, settings.parts.split(","))


if __name__ == "__main__":
    main()
