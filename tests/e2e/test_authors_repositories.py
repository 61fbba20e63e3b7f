"""Wan's repositories as the authors publish them: pulled, listed, and films made of them. All are tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from commands import Run, good
from hub import Hub, Repository, files_of
from stored_files import Tensor, Tensors, in_f32, read_safetensors, write_pth, write_safetensors

from service import ROOT, Service

FIXTURES = ROOT / "service/pipelines/fixtures"
TI2V, A14B, VACE = (f"Wan-AI/Wan2.{name}" for name in ("2-TI2V-5B", "2-T2V-A14B", "1-VACE-1.3B"))
WIDTH, INNER, TEXT = 32, 40, 32
# Widths of the published autoencoders, and of tiny ones.
NARROWER = {
    "2.2": {160: 8, 320: 16, 640: 32, 1920: 96, 256: 16, 512: 32, 1024: 64, 2048: 128, 3072: 192},
    "2.1": {96: 8, 192: 16, 384: 32, 768: 64, 1152: 96},
}
UMT5 = {
    "layer.0.layer_norm": "norm1",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.0.SelfAttention": "attn",
    "layer.1.layer_norm": "norm2",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
    "encoder.final_layer_norm": "norm",
    "encoder.block": "blocks",
    "shared": "token_embedding",
}


class Numbers:
    """Random tensors."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(1)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        inputs = int(np.prod(shape[1:]))
        centre = (
            1.0 if name.endswith("gamma") or ("norm" in name and name.endswith("weight")) else 0.0
        )
        scale = 0.1 if len(shape) == 1 or centre else inputs**-0.5
        numbers = centre + scale * self._generator.standard_normal(shape)
        return in_f32(*numbers.flat, shape=shape)


def transformer_shapes(channels: int) -> dict[str, tuple[int, ...]]:
    """The tensors of `wan/modules/model.py`, of two blocks."""

    def linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding.weight": (WIDTH, channels, 1, 2, 2),
        "patch_embedding.bias": (WIDTH,),
        "head.modulation": (1, 2, WIDTH),
    }
    shapes |= linear("text_embedding.0", WIDTH, TEXT) | linear("text_embedding.2", WIDTH, WIDTH)
    shapes |= linear("time_embedding.0", WIDTH, 256) | linear("time_embedding.2", WIDTH, WIDTH)
    shapes |= linear("time_projection.1", 6 * WIDTH, WIDTH)
    shapes |= linear("head.head", 4 * channels, WIDTH)
    for block in ("blocks.0", "blocks.1"):
        shapes |= {f"{block}.modulation": (1, 6, WIDTH)}
        shapes |= {f"{block}.norm3.{kind}": (WIDTH,) for kind in ("weight", "bias")}
        shapes |= linear(f"{block}.ffn.0", INNER, WIDTH) | linear(f"{block}.ffn.2", WIDTH, INNER)
        for attention in (f"{block}.self_attn", f"{block}.cross_attn"):
            for layer in "qkvo":
                shapes |= linear(f"{attention}.{layer}", WIDTH, WIDTH)
            shapes |= {f"{attention}.norm_{one}.weight": (WIDTH,) for one in "qk"}
    return shapes


def transformer(folder: Path, channels: int) -> dict[str, bytes]:
    """A transformer in two shards with their index, and the authors' configuration."""
    numbers = Numbers()
    tensors = {
        name: numbers.tensor(name, shape) for name, shape in transformer_shapes(channels).items()
    }
    names = sorted(tensors)
    config = {"_class_name": "WanModel", "dim": WIDTH, "num_heads": 2, "model_type": "ti2v"}
    files = {"config.json": json.dumps(config).encode()}
    of_shard = {}
    for number in (1, 2):
        shard = f"diffusion_pytorch_model-{number:05}-of-00002.safetensors"
        own = names[number - 1 :: 2]
        write_safetensors(folder / shard, {name: tensors[name] for name in own})
        files[shard] = (folder / shard).read_bytes()
        of_shard |= dict.fromkeys(own, shard)
    index = "diffusion_pytorch_model.safetensors.index.json"
    return files | {index: json.dumps({"weight_map": of_shard}).encode()}


def parts(folder: Path, version: str) -> dict[str, bytes]:
    """The autoencoder and the text encoder as pickles, and the tokenizer."""
    numbers = Numbers()
    of_authors = json.loads((FIXTURES / "wan-vae-tiny/authors.json").read_text(encoding="utf-8"))
    narrower = NARROWER[version]
    vae: Tensors = {
        name: numbers.tensor(name, tuple(narrower.get(side, side) for side in shape))
        for name, shape in of_authors[version].items()
    }
    text: Tensors = {}
    read = read_safetensors(FIXTURES / "wan-tiny/text_encoder/model.safetensors")
    for name, values in read.items():
        renamed = name
        for ours, theirs in UMT5.items():
            renamed = renamed.replace(ours, theirs)
        text[renamed] = in_f32(*values.flat, shape=values.shape)
    names = (f"Wan{version}_VAE.pth", "models_t5_umt5-xxl-enc-bf16.pth")
    for name, tensors in zip(names, (vae, text), strict=True):
        write_pth(folder / name, tensors)
    tokenizer = files_of(FIXTURES / "wan-tiny/tokenizer")
    return {name: (folder / name).read_bytes() for name in names} | {
        f"google/umt5-xxl/{name}": content for name, content in tokenizer.items()
    }


DECOYS = {
    "README.md": b"of the authors",
    "assets/logo.png": b"a picture",
    "examples/i2v_input.JPG": b"another",
    "configuration.json": b"{}",
}


@pytest.fixture
def authors(hub: Hub, tmp_path: Path) -> Hub:
    """A hub with the repositories of the authors."""
    folder = tmp_path / "made"
    folder.mkdir()
    two = transformer(folder, 16)
    both = {
        f"{noise}_noise_model/{name}": data
        for noise in ("high", "low")
        for name, data in two.items()
    }
    vace = two | {"config.json": json.dumps({"_class_name": "VaceWanModel"}).encode()}
    of_2_1 = parts(folder, "2.1")
    hub.repositories |= {
        TI2V: Repository(transformer(folder, 48) | parts(folder, "2.2") | DECOYS),
        A14B: Repository(both | of_2_1 | DECOYS),
        VACE: Repository(vace | of_2_1),
    }
    return hub


def pulled(hub: Hub, id: str, home: Path) -> dict[str, bytes]:
    snapshots = home / f"hub/models--{id.replace('/', '--')}/snapshots"
    return files_of(snapshots / hub.repositories[id].revisions["main"])


def test_the_authors_repositories_are_pulled_listed_and_make_films(
    authors: Hub, home: Path, alone: Run, tmp_path: Path
) -> None:
    for id in (TI2V, A14B):
        good(alone("pull", id))
        wanted = authors.repositories[id].files
        assert pulled(authors, id, home) == {
            name: data for name, data in wanted.items() if name not in DECOYS
        }
    refused = alone("pull", VACE)
    assert refused.returncode != 0
    assert "VaceWanModel" in refused.stderr + refused.stdout
    assert not (home / "hub/models--Wan-AI--Wan2.1-VACE-1.3B").exists(), "nothing was fetched"
    service = Service(state=tmp_path / "s", environment=authors.environment(home))
    try:
        with service.client() as client:
            theirs = {
                model.id: model.problem
                for model in client.list_models()
                if not model.id.startswith("moored/")
            }
            assert theirs == {TI2V: "", A14B: ""}
            size: dict[str, Any] = {"width": 64, "height": 32, "frames": 5, "steps": 4}
            for id, stages in (
                (TI2V, ["encode_text", "denoise", "decode"]),
                (A14B, ["encode_text", "denoise", "denoise_low_noise", "decode"]),
            ):
                film = client.generate_video("a wave", model=id, seed=3, **size)
                assert film.array.shape == (5, 32, 64, 3)
                assert list(film.timings) == stages
            with pytest.raises(moored.InvalidRequest, match="77 or 81"):
                client.plan_video("a wave", model=TI2V, frames=80)
    finally:
        assert service.stop() == 0
    # As an interrupted download of another program leaves it.
    (snapshot,) = (home / "hub/models--Wan-AI--Wan2.2-TI2V-5B/snapshots").iterdir()
    shard = "diffusion_pytorch_model-00002-of-00002.safetensors"
    (snapshot / shard).unlink()
    offline = alone("pull", TI2V, HF_HUB_OFFLINE="1")
    assert offline.returncode != 0
    assert shard in offline.stderr
    good(alone("pull", TI2V))
    assert (snapshot / shard).is_file()
