"""Files that rows about checkpoints and adapters share, made of the shipped models and of tiny fixtures."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from lora_files import random_lora
from numpy.typing import NDArray
from stored_files import (
    WEIGHTS,
    Numbers,
    Tensor,
    Tensors,
    e4m3,
    in_bf16,
    in_bfl_names,
    in_bytes,
    in_f32,
    is_weight,
    read_safetensors,
    write_safetensors,
)

from service import ROOT
from situations import Place

FIXTURES = ROOT / "service/pipelines/fixtures"

Make = Callable[[Place], None]
Rename = Callable[[str], str]


@functools.cache
def folder_weights() -> Numbers:
    """The shipped transformer in diffusers' names."""
    return read_safetensors(ROOT / "demo/model" / WEIGHTS)


@functools.cache
def single_weights() -> Numbers:
    """The shipped transformer in Black Forest Labs' names."""
    return in_bfl_names(folder_weights())


def full(numbers: Numbers) -> Tensors:
    """Tensors of f32."""
    return {name: in_f32(*one.ravel(), shape=one.shape) for name, one in numbers.items()}


def based(path: Path, base: Path) -> Path:
    """Writes beside a single file where its companions are."""
    path.with_suffix(".moored.json").write_text(json.dumps({"base": str(base)}), encoding="utf-8")
    return path


def single_file(name: str, make: Callable[[Numbers], Tensors], ending: str = "safetensors") -> Make:
    """A single file of the shipped transformer."""

    def write(place: Place) -> None:
        path = based(place.models / f"{name}.{ending}", place.demo)
        write_safetensors(path, make(single_weights()))

    return write


def renamed(rename: Rename) -> Callable[[Numbers], Tensors]:
    """The same tensors under other names."""
    return lambda numbers: {rename(name): in_bf16(one) for name, one in numbers.items()}


def foreign_file(name: str, tensors: Iterable[str]) -> Make:
    """A file whose tensors have these names."""

    def write(place: Place) -> None:
        path = based(place.models / f"{name}.safetensors", place.demo)
        write_safetensors(path, {tensor: in_f32(0.0, shape=(1,)) for tensor in tensors})

    return write


def raw_file(name: str, data: bytes) -> Make:
    """A file of these bytes."""
    return lambda place: write_raw(place.models / name, data)


def write_raw(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def copied(name: str, change: Callable[[Path], None]) -> Make:
    """A copy of the shipped model's folder, changed."""

    def write(place: Place) -> None:
        folder = place.models / name
        shutil.copytree(place.demo, folder)
        change(folder)

    return write


def scaled_fp8(numbers: Numbers, scale: str) -> Tensors:
    """Layers of blocks in e4m3, each with one scale."""
    tensors: Tensors = {}
    for name, one in numbers.items():
        if is_weight(one) and "block" in name:
            largest = float(np.abs(one).max()) / 448
            tensors[name] = in_bytes(e4m3(one / largest), "F8_E4M3")
            tensors[name.removesuffix("weight") + scale] = in_f32(largest)
        else:
            tensors[name] = in_bf16(one)
    return tensors


def rewrite(path: Path, change: Callable[[Numbers], Tensors]) -> None:
    """Writes a file of tensors again, changed."""
    write_safetensors(path, change(read_safetensors(path)))


def shards(folder: Path, stem: str = "diffusion_pytorch_model") -> None:
    """Cuts the weights in a folder into three shards with an index."""
    single = folder / f"{stem}.safetensors"
    numbers = read_safetensors(single)
    single.unlink()
    weight_map = {}
    for shard in range(3):
        name = f"{stem}-{shard + 1:05}-of-00003.safetensors"
        part = dict(list(numbers.items())[shard::3])
        write_safetensors(folder / name, {key: in_bf16(one) for key, one in part.items()})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def film_base(place: Place) -> Path:
    """A folder of a tiny HunyuanVideo, whose CLIP is that of the tiny FLUX."""
    base = place.models / "h-base"
    if not base.exists():
        shutil.copytree(FIXTURES / "hunyuan-tiny", base)
        shutil.copytree(FIXTURES / "flux-tiny/text_encoder", base / "text_encoder_2")
        shutil.copytree(FIXTURES / "flux-tiny/tokenizer", base / "tokenizer_2")
    return base


def film(place: Place, model: str, **options: object) -> NDArray[np.float32]:
    """The frames of a little film."""
    asked = {"seed": 5, "steps": 2, "width": 48, "height": 32, "frames": 5} | options
    result = place.client.generate_video("a wave", model=model, **asked)
    return np.asarray(result.array, np.float32)


def wan_in_names(place: Place, name: str, encoder: str, rename: Callable[[str], str]) -> None:
    """A tiny Wan in one file, in the names of its authors, beside a base whose text encoder is a file too."""
    base = place.models / f"{name}-base"
    shutil.copytree(FIXTURES / "wan-tiny", base)
    text = base / "text_encoder/model.safetensors"
    tensors = {rename(tensor): one for tensor, one in read_safetensors(text).items()}
    write_safetensors(base / f"{encoder}.safetensors", full(tensors))
    text.unlink()
    write_safetensors(
        based(place.models / f"{name}.safetensors", base),
        full(
            {in_wans_names(tensor): one for tensor, one in read_safetensors(base / WEIGHTS).items()}
        ),
    )
    (base / WEIGHTS).unlink()


def in_wans_names(name: str) -> str:
    """The name of a tensor in `wan/modules/model.py`."""
    if name == "scale_shift_table":
        return "head.modulation"
    for ours, theirs in (
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("proj_out", "head.head"),
        ("scale_shift_table", "modulation"),
        (".norm2.", ".norm3."),
        (".attn1.to_out.0.", ".attn1.o."),
        (".attn2.to_out.0.", ".attn2.o."),
        (".attn1.", ".self_attn."),
        (".attn2.", ".cross_attn."),
        (".to_", "."),
        (".ffn.net.0.proj.", ".ffn.0."),
        (".ffn.net.2.", ".ffn.2."),
    ):
        name = name.replace(ours, theirs)
    return name


def umt5_in_wans_names(name: str) -> str:
    """The name of a tensor of UMT5 in `wan/modules/t5.py`."""
    for ours, theirs in (
        ("shared.", "token_embedding."),
        ("encoder.block.", "blocks."),
        ("encoder.final_layer_norm.", "norm."),
        ("layer.0.layer_norm", "norm1"),
        ("layer.0.SelfAttention.relative_attention_bias", "pos_embedding.embedding"),
        ("layer.0.SelfAttention", "attn"),
        ("layer.1.layer_norm", "norm2"),
        ("layer.1.DenseReluDense.wi_0", "ffn.gate.0"),
        ("layer.1.DenseReluDense.wi_1", "ffn.fc1"),
        ("layer.1.DenseReluDense.wo", "ffn.fc2"),
    ):
        name = name.replace(ours, theirs)
    return name


def picture_base(place: Place) -> Path:
    """A folder of a tiny Z-Image, whose autoencoder is that of the tiny FLUX."""
    base = place.models / "z-base"
    if not base.exists():
        shutil.copytree(FIXTURES / "z-image-tiny", base)
        shutil.copytree(FIXTURES / "flux-tiny/vae", base / "vae")
    return base


def z_image_single(place: Place) -> Numbers:
    """The tiny Z-Image in the names of its authors, queries, keys and values in one."""
    ours = read_safetensors(picture_base(place) / WEIGHTS)
    parts = json.loads((FIXTURES / "z-image-tiny/expected/comfy.json").read_text(encoding="utf-8"))
    return {name: np.concatenate([ours[part] for part in of]) for name, of in parts.items()}


@functools.cache
def lora() -> Numbers:
    """Random pairs for the shipped transformer, in diffusers' names."""
    return random_lora(seed=11)


def lora_file(name: str, make: Callable[[Numbers], Tensors], ending: str = "safetensors") -> Make:
    """An adapter for the shipped model."""
    return lambda place: write_safetensors(place.adapters / f"{name}.{ending}", make(lora()))


def pairs(numbers: Numbers) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Both factors of each layer of an adapter."""
    layers = {name.rsplit(".lora_", 1)[0] for name in numbers}
    return {
        layer: (numbers[f"{layer}.lora_A.weight"], numbers[f"{layer}.lora_B.weight"])
        for layer in sorted(layers)
    }


def kohya(
    numbers: Numbers, alpha: Tensor, store: Callable[[NDArray[np.float32]], Tensor]
) -> Tensors:
    """An adapter as kohya's scripts write it."""
    tensors: Tensors = {}
    for layer, (down, up) in pairs(numbers).items():
        name = "lora_unet_" + layer.removeprefix("transformer.").replace(".", "_")
        tensors[f"{name}.lora_down.weight"] = store(down)
        tensors[f"{name}.lora_up.weight"] = store(up)
        tensors[f"{name}.alpha"] = alpha
    return tensors


def one_f32(numbers: NDArray[np.float32]) -> Tensor:
    """A tensor of f32."""
    return in_f32(*numbers.ravel(), shape=numbers.shape)
