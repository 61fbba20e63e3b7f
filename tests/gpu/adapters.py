"""Adapters at full size: what a step costs with one, and how soon one takes effect. The part `adapters`."""

from __future__ import annotations

import dataclasses
import json
import statistics
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import moored
import numpy as np
from bench import Bench, Running
from formats import FULL, in_format
from speed import _denoise, _options

RANKS = {16: (1.03, 1.05), 128: (1.06, 1.10)}
"""Rank of an adapter, and what a step with it may take of the base's: in full precision, and in formats."""
ATTACHED_BYTES = 300 << 20
ATTACH_MS = 50.0
FORMATS = (FULL, "fp8", "int8", "nf4")
ATTACHES = 3
SEVERAL = 4
STEPS_OF_SEVERAL = 12
SHARE_OF_SEVERAL = 1.10
LIMITS_S = {"adapters": 200.0, "several-adapters": 120.0}


def layers(sizes: checkpoints.Sizes) -> list[tuple[str, int, int]]:
    """Name, outputs and inputs of every linear layer of the blocks."""
    width = sizes.head * sizes.heads
    found = []
    for block in (f"transformer_blocks.{i}" for i in range(sizes.doubles)):
        square = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
        found += [(f"{block}.attn.{name}", width, width) for name in [*square, "to_add_out"]]
        for part in ("ff", "ff_context"):
            found.append((f"{block}.{part}.net.0.proj", 4 * width, width))
            found.append((f"{block}.{part}.net.2", width, 4 * width))
    for block in (f"single_transformer_blocks.{i}" for i in range(sizes.singles)):
        found += [(f"{block}.attn.{name}", width, width) for name in ("to_q", "to_k", "to_v")]
        found.append((f"{block}.proj_mlp", 4 * width, width))
        found.append((f"{block}.proj_out", width, 5 * width))
    return found


def write_adapter(path: Path, sizes: checkpoints.Sizes, rank: int, seed: int) -> int:
    """Writes a random adapter of all linear layers of the blocks, in bf16 and diffusers' names; its bytes."""
    header: dict[str, Any] = {}
    at = 0
    for name, outputs, inputs in layers(sizes):
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            length = 2 * shape[0] * shape[1]
            header[f"transformer.{name}.{part}.weight"] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [at, at + length],
            }
            at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    drawn = np.random.default_rng(seed).standard_normal(1 << 20, dtype=np.float32) * 0.002
    block = (drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = at
        while left:
            left -= file.write(block[: min(left, len(block))])
    return at


def rank_of(sizes: checkpoints.Sizes, wanted: int) -> int:
    """The rank, a multiple of 8 as people train, at which an adapter takes so many bytes or more."""
    of_one = sum(2 * (out + into) for _, out, into in layers(sizes))
    return max(8, -(-wanted // (8 * of_one)) * 8)


def adapters(bench: Bench) -> None:
    """A step with an adapter beside the base's, in every format, and the first step with one that is new."""
    sizes = checkpoints.SMALL if bench.small else checkpoints.FULL
    side = bench.scale.picture
    folder = bench.models / "adapters"
    for rank in RANKS:
        size = write_adapter(folder / f"rank-{rank}.safetensors", sizes, rank, rank)
        bench.record.add(f"adapters.bytes.{rank}", f"adapter of rank {rank}", size / 1e9, "GB")
    rank = rank_of(sizes, ATTACHED_BYTES)
    for number in range(ATTACHES):
        write_adapter(folder / f"new-{number}.safetensors", sizes, rank, 1000 + number)
    settings = (f'models.adapters=["{folder}"]',)
    with bench.serve(settings=settings) as running:
        for name in FORMATS:
            key = f"adapters.step.{name}"
            ms = _median(bench, running, name, side)
            bench.record.add(key, f"step, {name}, {side}x{side}", ms, "ms")
            for rank, (share, _) in RANKS.items():
                ms = _median(bench, running, name, side, moored.Adapter(f"rank-{rank}"))
                told = f"step, {name}, with an adapter of rank {rank}"
                wanted = {"share": share, "share_of": key} if name == FULL else {}
                bench.record.add(f"{key}.{rank}", told, ms, "ms", **wanted)
            if name == FULL:
                _attach(bench, running, side)
            running.client.unload(timeout=60)
    with bench.serve(settings=(*settings, 'cards.adapter_copies="always"')) as running:
        for name in FORMATS:
            if name == FULL:
                continue
            for rank, (_, share) in RANKS.items():
                key = f"adapters.step.{name}"
                ms = _median(bench, running, name, side, moored.Adapter(f"rank-{rank}"))
                told = f"step, {name}, with an adapter of rank {rank}, with copies"
                told_of = {"share": share, "share_of": key}
                bench.record.add(f"{key}.{rank}.copies", told, ms, "ms", **told_of)
            running.client.unload(timeout=60)


def _with(model: Any, *adapter: moored.Adapter) -> moored.ModelRef:
    return dataclasses.replace(model, adapters=adapter)


def _median(
    bench: Bench, running: Running, name: str, side: int, *adapter: moored.Adapter
) -> float:
    found = _denoise(bench, running, _with(in_format(name), *adapter), side, side)
    return statistics.median(found.step_ms)


def _first_step_s(running: Running, model: moored.ModelRef, side: int) -> float:
    """Seconds from the request to its first step."""
    options = _options(FULL, side, side) | {"model": model}
    began = time.perf_counter()
    with running.client.stream_image("an adapter", steps=2, **options) as stream:
        for event in stream:
            if isinstance(event, moored.Step):
                return time.perf_counter() - began
    raise RuntimeError("a job ended without a step")


def _attach(bench: Bench, running: Running, side: int) -> None:
    """How much later the first step is with an adapter that was never on the card."""
    base = in_format(FULL)
    for _ in range(2):
        without = _first_step_s(running, base, side)
    taken = [
        _first_step_s(running, _with(base, moored.Adapter(f"new-{number}")), side) - without
        for number in range(ATTACHES)
    ]
    told = f"first step with a new adapter of {ATTACHED_BYTES >> 20} MiB, later than without"
    bench.record.add(
        "adapters.attach", told, 1e3 * statistics.median(taken), "ms", target=ATTACH_MS
    )
    again = [
        _first_step_s(running, _with(base, moored.Adapter(f"new-{number}")), side) - without
        for number in range(ATTACHES)
    ]
    told = "the same, when it is on the card already"
    bench.record.add("adapters.again", told, 1e3 * statistics.median(again), "ms")


def several_adapters(bench: Bench) -> None:
    """Four requests at once, each with another adapter, beside one request of four pictures without.

    A pass over one picture of this size fills the card: the steps of four requests follow each other, and
    another adapter costs a step nothing but its own products.
    """
    sizes = checkpoints.SMALL if bench.small else checkpoints.FULL
    side, rank = bench.scale.picture, 16
    folder = bench.models / "several"
    names = [f"several-{number}" for number in range(SEVERAL)]
    for number, name in enumerate(names):
        write_adapter(folder / f"{name}.safetensors", sizes, rank, number)
    with bench.serve(settings=(f'models.adapters=["{folder}"]',)) as running:
        base = in_format(FULL)
        asked = _options(FULL, side, side) | {"steps": STEPS_OF_SEVERAL}

        def seconds(models: list[moored.ModelRef], count: int) -> float:
            began = time.perf_counter()
            with ThreadPoolExecutor(len(models)) as pool:
                make = partial(running.client.generate_image, "an adapter", count=count)
                list(pool.map(lambda model: make(**(asked | {"model": model})), models))
            return time.perf_counter() - began

        adapted = [_with(base, moored.Adapter(name)) for name in names]
        for models, count in (([base], SEVERAL), (adapted, 1)):
            seconds(models, count)  # what is not on the card yet is loaded, and plans are made
        without = statistics.median(seconds([base], SEVERAL) for _ in range(3))
        with_each = statistics.median(seconds(adapted, 1) for _ in range(3))
        key = "adapters.several"
        told = f"{SEVERAL} pictures of one request, {STEPS_OF_SEVERAL} steps"
        bench.record.add(key, told, without, "s")
        told = f"{SEVERAL} requests at once with {SEVERAL} adapters of rank {rank}"
        bench.record.add(f"{key}.each", told, with_each, "s", share=SHARE_OF_SEVERAL, share_of=key)


PARTS = {"adapters": adapters, "several-adapters": several_adapters}
