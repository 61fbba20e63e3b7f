"""Adapters (LoRA) that tests make: files for the shipped model, and for the family `instant`."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 192
"""Of the shipped model's transformer."""
DOUBLE_BLOCKS, SINGLE_BLOCKS = 2, 4
RANK = 4


def instant_adapter(folder: Path, name: str, size_bytes: int) -> None:
    """An adapter of the family `instant`, which adds red."""
    path = folder / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"bytes": size_bytes, "identity": name}), encoding="utf-8")


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    """Tensors of f32 as a file of safetensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(tensor.astype("<f4").tobytes() for tensor in tensors.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def random_lora(seed: int = 1, size: float = 0.05) -> dict[str, NDArray[np.float32]]:
    """Random pairs for the attention of the shipped model's transformer, by the names of diffusers."""
    layers = [
        f"transformer.transformer_blocks.{block}.attn.{name}"
        for block in range(DOUBLE_BLOCKS)
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    ]
    layers += [
        f"transformer.single_transformer_blocks.{block}.attn.{name}"
        for block in range(SINGLE_BLOCKS)
        for name in ("to_q", "to_k", "to_v")
    ]
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in layers:
        for part, shape in (("lora_A", (RANK, WIDTH)), ("lora_B", (WIDTH, RANK))):
            values = random.normal(0, size, shape).astype(np.float32)
            tensors[f"{layer}.{part}.weight"] = values
    return tensors


def random_text_lora(seed: int = 3, size: float = 0.3) -> dict[str, NDArray[np.float32]]:
    """Random pairs for the attention of the shipped model's CLIP."""
    config = json.loads((ROOT / "demo/model/text_encoder/config.json").read_text(encoding="utf-8"))
    width = config["hidden_size"]
    random = np.random.default_rng(seed)
    return {
        f"text_encoder.text_model.encoder.layers.{layer}.self_attn.{name}.{part}.weight": (
            random.normal(0, size, shape).astype(np.float32)
        )
        for layer in range(config["num_hidden_layers"])
        for name in ("q_proj", "k_proj", "v_proj", "out_proj")
        for part, shape in (("lora_A", (RANK, width)), ("lora_B", (width, RANK)))
    }


LAYERS = DOUBLE_BLOCKS * 4 + SINGLE_BLOCKS * 3
"""Layers that `random_lora` changes."""
