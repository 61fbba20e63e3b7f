"""A FLUX.1 in SVDQuant, as Nunchaku stores it, of random codes at full size: the part `speed-svdquant`."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import moored
import numpy as np
from bench import Bench
from speed import _denoise

RANK = 32
GROUP = 64
SHARE = 1.15
"""Of a step in nf4."""
LIMITS_S = {"speed-svdquant": 150.0}
Part = tuple[str, str, tuple[int, ...]]


def layers(sizes: checkpoints.Sizes) -> Iterator[tuple[str, int, int]]:
    """The layers in four bits: name, outputs and inputs."""
    width = sizes.head * sizes.heads
    for i in range(sizes.doubles):
        block = f"transformer_blocks.{i}"
        for stream in ("", "_context"):
            yield f"{block}.qkv_proj{stream}", 3 * width, width
            yield f"{block}.out_proj{stream}", width, width
            yield f"{block}.mlp{stream}_fc1", 4 * width, width
            yield f"{block}.mlp{stream}_fc2", width, 4 * width
    for i in range(sizes.singles):
        block = f"single_transformer_blocks.{i}"
        yield f"{block}.qkv_proj", 3 * width, width
        yield f"{block}.out_proj", width, width
        yield f"{block}.mlp_fc1", 4 * width, width
        yield f"{block}.mlp_fc2", width, 4 * width


def parts(sizes: checkpoints.Sizes) -> Iterator[Part]:
    """All tensors of the file: name, type of safetensors, shape. Modulators are in bf16 here."""
    is_of_a_block = ("transformer_blocks.", "single_transformer_blocks.")
    for name, shape in checkpoints.transformer(sizes):
        if ".attn.norm_" in name:
            yield name.replace(".attn.norm_", ".norm_"), "BF16", shape
        elif ".norm" in name or not name.startswith(is_of_a_block):
            yield name, "BF16", shape
    for name, outputs, inputs in layers(sizes):
        yield f"{name}.qweight", "I8", (outputs, inputs // 2)
        yield f"{name}.wscales", "BF16", (inputs // GROUP, outputs)
        yield f"{name}.lora_down", "BF16", (inputs, RANK)
        yield f"{name}.lora_up", "BF16", (outputs, RANK)
        yield f"{name}.smooth", "BF16", (inputs,)
        yield f"{name}.bias", "BF16", (outputs,)


def write(file: Path, sizes: checkpoints.Sizes, base: str) -> int:
    """Writes the file, and beside it what says where the other parts of the model are; its bytes."""
    chance = np.random.default_rng(1)
    numbers = bytes(checkpoints.random_block(sizes.block_numbers))
    codes = chance.integers(0, 256, sizes.block_numbers, np.uint8).tobytes()
    # 1 / 128 and 1 in bf16: the deviation of codes of -8 to 7 is 4.6.
    scales, ones = (
        np.full(sizes.block_numbers, bits, np.uint16).tobytes() for bits in (0x3B80, 0x3F80)
    )
    header, at = {}, 0
    for name, kind, shape in parts(sizes):
        length = int(np.prod(shape)) * (1 if kind == "I8" else 2)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (at, at + length)}
        at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, kind, shape in parts(sizes):
            left = int(np.prod(shape)) * (1 if kind == "I8" else 2)
            of = (
                ones
                if name.endswith(".smooth")
                else scales
                if name.endswith(".wscales")
                else numbers
            )
            source = codes if kind == "I8" else of
            while left:
                left -= out.write(source[: min(left, len(source))])
    file.with_suffix(".moored.json").write_text(json.dumps({"base": base}))
    return at


def svdquant(bench: Bench) -> None:
    """A step of a file in SVDQuant, int4 with a low-rank branch of 32, beside one in nf4."""
    side = bench.scale.picture
    # Of whole tiles of 128.
    small = dataclasses.replace(checkpoints.SMALL, heads=4)
    sizes = small if bench.small else checkpoints.FULL
    file = bench.models / "svdq-int4_r32-flux.safetensors"
    size = write(file, sizes, checkpoints.MODELS[0])
    bench.record.add("speed.svdquant.bytes", "transformer in SVDQuant", size / 1e9, "GB")
    with bench.serve() as running:
        nf4 = _denoise(bench, running, "nf4", side, side)
        of = statistics.median(nf4.step_ms)
        bench.record.add("speed.svdquant.nf4", f"step, nf4, {side}x{side}, beside it", of, "ms")
        running.client.unload(timeout=60)
        found = _denoise(bench, running, moored.ModelRef(file.stem), side, side)
        ms = statistics.median(found.step_ms)
        what = f"step, file in SVDQuant, {side}x{side}"
        told = {"share": SHARE, "share_of": "speed.svdquant.nf4"}
        bench.record.add("speed.svdquant", what, ms, "ms", **told)
        running.client.unload(timeout=60)
    file.unlink()


PARTS = {"speed-svdquant": svdquant}
