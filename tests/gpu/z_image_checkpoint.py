"""Makes a Z-Image checkpoint of random numbers, in the sizes and the layout of Z-Image-Turbo, or a tiny one.

It lies beside the checkpoints of `checkpoints.py`, whose VAE it has by hard links.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import checkpoints
from checkpoints import Layers, Shapes, bytes_of

FIXTURE = checkpoints.ROOT / "service/pipelines/fixtures/z-image-tiny"
NAME = "z-image"
PATCH = 64
"""Numbers in a patch of the latent: 2 x 2 cells of 16 channels."""


@dataclass(frozen=True)
class Sizes:
    """What makes a checkpoint large or small; all else is as in the fixture."""

    head: int
    heads: int
    axes: tuple[int, int, int]
    blocks: int
    timestep_inner: int
    text: int
    text_inner: int
    text_head: int
    text_heads: int
    text_key_heads: int
    text_layers: int
    words: int


FULL = Sizes(
    head=128,
    heads=30,
    axes=(32, 48, 48),
    blocks=30,
    timestep_inner=1024,
    text=2560,
    text_inner=9728,
    text_head=128,
    text_heads=32,
    text_key_heads=8,
    text_layers=36,
    words=151_936,
)
SMALL = Sizes(
    head=32,
    heads=6,
    axes=(8, 12, 12),
    blocks=4,
    timestep_inner=64,
    text=128,
    text_inner=256,
    text_head=16,
    text_heads=8,
    text_key_heads=2,
    text_layers=4,
    words=400,
)


def transformer(s: Sizes) -> Shapes:
    """diffusers' ZImageTransformer2DModel."""
    width, made = s.head * s.heads, Layers()
    inner, times = int(width / 3 * 8), min(width, 256)
    made.layer("all_x_embedder.2-1", width, PATCH)
    made.weight("cap_embedder.0", s.text)
    made.layer("cap_embedder.1", width, s.text)
    made.tensor("cap_pad_token", 1, width)
    made.tensor("x_pad_token", 1, width)
    made.layer("t_embedder.mlp.0", s.timestep_inner, 256)
    made.layer("t_embedder.mlp.2", times, s.timestep_inner)
    made.layer("all_final_layer.2-1.adaLN_modulation.1", width, times)
    made.layer("all_final_layer.2-1.linear", PATCH, width)
    for kind, count in (("noise_refiner", 2), ("context_refiner", 2), ("layers", s.blocks)):
        for i in range(count):
            block = f"{kind}.{i}"
            if kind != "context_refiner":
                made.layer(f"{block}.adaLN_modulation.0", 4 * width, times)
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                made.weight(f"{block}.attention.{part}", width, width)
            for norm in ("norm_q", "norm_k"):
                made.weight(f"{block}.attention.{norm}", s.head)
            for norm in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
                made.weight(f"{block}.{norm}", width)
            for part, shape in (
                ("w1", (inner, width)),
                ("w2", (width, inner)),
                ("w3", (inner, width)),
            ):
                made.weight(f"{block}.feed_forward.{part}", *shape)
    return made.shapes


def text_encoder(s: Sizes) -> Shapes:
    """transformers' Qwen3Model."""
    made = Layers()
    queries, keys = s.text_head * s.text_heads, s.text_head * s.text_key_heads
    made.weight("model.embed_tokens", s.words, s.text)
    for i in range(s.text_layers):
        block = f"model.layers.{i}"
        made.weight(f"{block}.input_layernorm", s.text)
        made.weight(f"{block}.post_attention_layernorm", s.text)
        made.weight(f"{block}.self_attn.q_proj", queries, s.text)
        made.weight(f"{block}.self_attn.k_proj", keys, s.text)
        made.weight(f"{block}.self_attn.v_proj", keys, s.text)
        made.weight(f"{block}.self_attn.o_proj", s.text, queries)
        for norm in ("q_norm", "k_norm"):
            made.weight(f"{block}.self_attn.{norm}", s.text_head)
        made.weight(f"{block}.mlp.gate_proj", s.text_inner, s.text)
        made.weight(f"{block}.mlp.up_proj", s.text_inner, s.text)
        made.weight(f"{block}.mlp.down_proj", s.text, s.text_inner)
    made.weight("model.norm", s.text)
    return made.shapes


def configurations(s: Sizes) -> dict[str, dict[str, object]]:
    """The JSON files, by their place in the folder: those of the fixture with other sizes."""

    def of_fixture(place: str, **changes: object) -> dict[str, object]:
        told: dict[str, object] = json.loads((FIXTURE / place).read_text(encoding="utf-8"))
        return told | changes

    return {
        "model_index.json": of_fixture("model_index.json"),
        "scheduler/scheduler_config.json": of_fixture("scheduler/scheduler_config.json"),
        "transformer/config.json": of_fixture(
            "transformer/config.json",
            axes_dims=list(s.axes),
            axes_lens=[1536, 512, 512],
            cap_feat_dim=s.text,
            dim=s.head * s.heads,
            n_heads=s.heads,
            n_kv_heads=s.heads,
            n_layers=s.blocks,
        ),
        "text_encoder/config.json": of_fixture(
            "text_encoder/config.json",
            head_dim=s.text_head,
            hidden_size=s.text,
            intermediate_size=s.text_inner,
            layer_types=["full_attention"] * s.text_layers,
            max_position_embeddings=40_960,
            num_attention_heads=s.text_heads,
            num_hidden_layers=s.text_layers,
            num_key_value_heads=s.text_key_heads,
            vocab_size=s.words,
        ),
    }


def make(models: Path, sizes: Sizes, beside: checkpoints.Sizes, threads: int) -> tuple[int, float]:
    """Makes the model beside the first of `checkpoints.py`, unless it is there.

    Bytes written, and seconds; zeros if nothing was to do.
    """
    folder, done = models / NAME, models / f"{NAME}.json"
    told = {"sizes": repr(sizes), "vae": repr(beside)}
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == told:
        return 0, 0.0
    began = time.monotonic()
    done.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    parts = {
        "transformer": ("diffusion_pytorch_model", transformer(sizes)),
        "text_encoder": ("model", text_encoder(sizes)),
    }
    with ThreadPoolExecutor(threads) as pool:
        writer = checkpoints.Writer(checkpoints.random_block(beside.block_numbers), pool)
        for number, (name, (stem, shapes)) in enumerate(parts.items()):
            start = (2 * number + 1) * beside.block_numbers // 4 * 2
            writer.component(folder / name, stem, shapes, beside.shard_bytes // 2, start)
        writer.finish()
    for place, content in configurations(sizes).items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.copytree(FIXTURE / "tokenizer", folder / "tokenizer")
    shutil.copytree(models / checkpoints.MODELS[0] / "vae", folder / "vae", copy_function=os.link)
    done.write_text(json.dumps(told), encoding="utf-8")
    return sum(bytes_of(shapes) for _, shapes in parts.values()), time.monotonic() - began
