"""PyTorch, diffusers and transformers at the work of the service, on random weights of the same sizes.

Each is a process of its own, started by `peers.py NAME ...`. It prints a line of JSON for each thing that it
finds, so that none is lost when its time is up. Milliseconds are medians: by CUDA events on a card, by the
clock on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import torch
from beside import say, step_inputs

WARM_UP = 3
# Rows, outputs and inputs of products: a large one, and one of FLUX.1's at 1024x1024.
PRODUCTS = {"large": (8192, 8192, 8192), "flux": (4608, 12288, 3072)}
ATTENTION = (1, 24, 4608, 128)
GUIDANCE = 3.5


class Peer:
    """Where another program computes, and how often it is asked to."""

    def __init__(self, place: str, small: bool, rounds: int) -> None:
        """Takes a device of PyTorch, and whether models are tiny."""
        self.place, self.small, self.rounds = place, small, rounds
        self.on_card = place.startswith("cuda")
        if self.on_card:
            torch.cuda.set_device(place)
        self.sizes = checkpoints.SMALL if small else checkpoints.FULL
        configurations = checkpoints.configurations(self.sizes)
        self.config: dict[str, dict[str, Any]] = {
            place.partition("/")[0]: dict(told) for place, told in configurations.items()
        }

    def synchronize(self) -> None:
        """Waits for the card."""
        if self.on_card:
            torch.cuda.synchronize()

    def median_ms(self, call: Callable[[], object]) -> float:
        """Milliseconds of a call, after a few that are not counted."""
        for _ in range(1 if self.small else WARM_UP):
            call()
        self.synchronize()
        return statistics.median(self._once_ms(call) for _ in range(self.rounds))

    def _once_ms(self, call: Callable[[], object]) -> float:
        if not self.on_card:
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))

    def peak(self, call: Callable[[], object]) -> int:
        """Most bytes that PyTorch has allocated during a call, beyond those before it; 0 without a card."""
        if not self.on_card:
            call()
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def made(self, make: Callable[[], Any]) -> Any:
        """A model in bf16 on the device, with the random weights that the checkpoints have."""
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.place):
                model = make().eval()
        finally:
            torch.set_default_dtype(torch.float32)
        for name, weight in model.named_parameters():
            with torch.no_grad():
                if weight.dim() > 1:
                    weight.normal_(0, checkpoints.DEVIATION)
                else:
                    weight.fill_(1.0 if name.endswith(".weight") else 0.0)
        return model


def rates(peer: Peer) -> None:
    """Products in bf16 and in fp8 by rows, and attention, in TFLOP/s."""
    for name, (rows, outputs, inputs) in PRODUCTS.items():
        if peer.small:
            rows, outputs, inputs = rows // 64, outputs // 64, inputs // 64
        x = torch.randn(rows, inputs, device=peer.place, dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, device=peer.place, dtype=torch.bfloat16)
        flop, shape = 2 * rows * outputs * inputs, f"{rows}x{outputs}x{inputs}"
        ms = peer.median_ms(lambda x=x, w=w: torch.nn.functional.linear(x, w))
        say(rate=f"bf16.{name}", what=f"bf16 product {shape}", tflops=flop / ms / 1e9)
        if not peer.on_card or torch.cuda.get_device_capability() < (8, 9):
            continue
        scales = [t.float().abs().amax(1, keepdim=True) / 448 for t in (x, w)]
        xq, wq = (
            (t / s).to(torch.float8_e4m3fn)
            for t, s in zip((x.float(), w.float()), scales, strict=True)
        )

        def product(xq: Any = xq, wq: Any = wq, scales: Any = scales) -> object:
            by_rows = {"scale_a": scales[0], "scale_b": scales[1].t()}
            options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
            return torch._scaled_mm(xq, wq.t(), **by_rows, **options)

        ms = peer.median_ms(product)
        say(rate=f"fp8.{name}", what=f"fp8 product by rows {shape}", tflops=flop / ms / 1e9)
    batch, heads, tokens, width = (1, 2, 64, 32) if peer.small else ATTENTION
    shape = (batch, heads, tokens, width)
    q, k, v = (torch.randn(shape, device=peer.place, dtype=torch.bfloat16) for _ in range(3))
    ms = peer.median_ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    flop = 4 * batch * heads * tokens * tokens * width
    what = f"attention of PyTorch, {heads} heads, {tokens} tokens"
    say(rate="attention", what=what, tflops=flop / ms / 1e9)


def step(peer: Peer, ways: list[str], shapes: list[str]) -> None:
    """diffusers' transformer: forward passes at each shape, `WIDTHxHEIGHTxPICTURES`, in each way.

    `eager`, `compiled`: block by block, `compile_repeated_blocks`, or `tuned`: the whole model with the
    algorithms of its products timed (`max-autotune`), which takes minutes to compile.
    """
    import diffusers

    family: Any = diffusers.FluxTransformer2DModel  # imported by being named
    model = peer.made(lambda: family.from_config(peer.config["transformer"]))
    for way in ways:
        for shape in shapes:
            width, height, pictures = map(int, shape.split("x"))
            given = step_inputs(model.config, peer.place, width, height, pictures)
            if way == "compiled":
                # Each shape for itself: one that follows another is compiled for any, and is slower.
                torch.compiler.reset()
                backend = "inductor" if peer.on_card else "eager"
                model.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=backend)
            run = model
            if way == "tuned":
                torch.compiler.reset()
                run = torch.compile(model, dynamic=False, mode="max-autotune-no-cudagraphs")
            with torch.no_grad():
                began = time.perf_counter()
                run(**given, return_dict=False)
                peer.synchronize()
                first_s = time.perf_counter() - began
                ms = peer.median_ms(lambda given=given, run=run: run(**given, return_dict=False))
            versions = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
            say(way=way, shape=shape, ms=ms, first_s=first_s, versions=versions)


# How diffusers keeps weights in the machine's memory and brings them to the card while it computes.
OFFLOADED: dict[str, dict[str, Any]] = {
    "leaf": {"offload_type": "leaf_level"},
    "block": {"offload_type": "block_level", "num_blocks_per_group": 1},
}


def film(peer: Peer, ways: list[str], frames: int) -> None:
    """diffusers' transformer of HunyuanVideo at 832x480: forward passes, `resident` and offloaded."""
    import diffusers
    from film import inputs, transformer

    for way in ways:
        model: Any = transformer(framepack=False)
        ready_s, began = 0.0, time.perf_counter()
        if way != "resident":
            model.to("cpu")
            torch.cuda.empty_cache()
            places = {
                "onload_device": torch.device(peer.place),
                "offload_device": torch.device("cpu"),
            }
            model.enable_group_offload(**places, use_stream=True, **OFFLOADED[way])
            ready_s = time.perf_counter() - began
        given = inputs(model.config, (832, 480), (frames - 1) // 4 + 1, 16)
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            ms = peer.median_ms(lambda model=model, given=given: model(**given, return_dict=False))
        told = "resident" if way == "resident" else f"group offloading by {way}, with a stream"
        peak = torch.cuda.max_memory_allocated()
        versions = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
        say(way=way, told=told, ms=ms, peak=peak, ready_s=ready_s, versions=versions)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def vae(peer: Peer, side: int) -> None:
    """diffusers' AutoencoderKL: decodes and encodes, and their peak memory."""
    import diffusers

    family: Any = diffusers.AutoencoderKL
    model = peer.made(lambda: family.from_config(peer.config["vae"]))
    kind: dict[str, Any] = {"device": peer.place, "dtype": torch.bfloat16}
    latent = torch.randn(1, model.config.latent_channels, side // 8, side // 8, **kind)
    pixels = torch.rand(1, 3, side, side, **kind) * 2 - 1
    with torch.no_grad():
        for what, call in (
            ("decode", lambda: model.decode(latent, return_dict=False)),
            ("encode", lambda: model.encode(pixels).latent_dist.mode()),
        ):
            # The first call also brings what a library chooses its algorithms by.
            ms = peer.median_ms(call)
            say(vae=what, ms=ms, peak=peer.peak(call))


def text(peer: Peer, tokens: int) -> None:
    """transformers' CLIP and T5, one prompt."""
    import transformers

    first, second = peer.config["text_encoder"], peer.config["text_encoder_2"]
    clip = peer.made(
        lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig.from_dict(first))
    )
    t5 = peer.made(lambda: transformers.T5EncoderModel(transformers.T5Config.from_dict(second)))

    def words(count: int, known: int) -> torch.Tensor:
        return torch.randint(3, known - 3, (1, count), device=peer.place)

    for_clip, for_t5 = words(77, peer.sizes.clip_words), words(tokens, peer.sizes.t5_words)
    with torch.no_grad():
        ms = peer.median_ms(lambda: (clip(for_clip), t5(for_t5)))
    say(ms=ms, versions=f"transformers {transformers.__version__}")


def demo(peer: Peer, sides: list[int], prompts: list[str]) -> None:
    """The shipped model in diffusers, f32, as its defaults are: seconds from a prompt to its pixels."""
    import diffusers
    from diffusers.utils import logging

    logging.disable_progress_bar()
    pipeline: Any = diffusers.FluxPipeline.from_pretrained(
        checkpoints.DEMO, dtype=torch.float32, local_files_only=True
    )
    pipeline.to(peer.place)
    pipeline.set_progress_bar_config(disable=True)
    for side in sides:
        seconds = []
        for number in range(peer.rounds + 1):
            began = time.perf_counter()
            pipeline(
                prompts[number % len(prompts)],
                width=side,
                height=side,
                num_inference_steps=8,
                guidance_scale=GUIDANCE,
                max_sequence_length=48,
                generator=torch.Generator().manual_seed(number),
                output_type="pil",
            )
            peer.synchronize()
            seconds.append(time.perf_counter() - began)
        versions = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
        threads = torch.get_num_threads()
        say(side=side, seconds=seconds[1:], versions=f"{versions}, {threads} threads")


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=["rates", "step", "film", "vae", "text", "demo"])
    parser.add_argument("--place", default="cuda:0")
    parser.add_argument("--small", action="store_true", help="tiny models")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--ways", default="eager", help="step: eager, compiled, tuned; film: resident, leaf, block"
    )
    parser.add_argument("--shapes", default="1024x1024x1", help="for step: WIDTHxHEIGHTxPICTURES")
    parser.add_argument("--frames", type=int, default=49, help="for film")
    parser.add_argument("--sides", default="1024", help="for vae and demo: pixels")
    parser.add_argument("--tokens", type=int, default=512, help="for text")
    parser.add_argument("--prompts", type=Path, help="for demo: a line each")
    told = parser.parse_args()
    peer = Peer(told.place, told.small, told.rounds)
    sides = [int(side) for side in told.sides.split(",")]
    if told.program == "step":
        step(peer, told.ways.split(","), told.shapes.split(","))
    elif told.program == "film":
        film(peer, told.ways.split(","), told.frames)
    elif told.program == "vae":
        vae(peer, sides[0])
    elif told.program == "text":
        text(peer, told.tokens)
    elif told.program == "demo":
        demo(peer, sides, told.prompts.read_text(encoding="utf-8").splitlines())
    else:
        rates(peer)


if __name__ == "__main__":
    sys.exit(main())
