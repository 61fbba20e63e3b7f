"""Adapters (LoRA) as people have them: names, stored types, alphas, and what is no adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
from lora_files import random_text_lora
from numpy.typing import NDArray
from stored_files import (
    WEIGHTS,
    Numbers,
    Tensor,
    Tensors,
    e4m3,
    in_bf16,
    in_bytes,
    in_f32,
    read_safetensors,
    write_safetensors,
)

from situations import Check, Place, Refused, Same, Situation
from situations.checkpoints import (
    clip_of_transformers_5,
    in_comfys_name,
    lfs_pointer,
    tencents_layer,
)
from situations.people_files import (
    Make,
    based,
    copied,
    film,
    film_base,
    full,
    kohya,
    lora,
    lora_file,
    one_f32,
    pairs,
    picture_base,
    write_raw,
    z_image_single,
)

Array = NDArray[np.float32]


def in_e4m3(numbers: Array) -> Tensor:
    return in_bytes(e4m3(numbers), "F8_E4M3")


def rounded(numbers: Array) -> Array:
    """The nearest floats of 8 bits."""
    codes = e4m3(numbers)
    exponents, mantissas = np.divmod(codes & 0x7F, 8)
    sizes = np.where(
        exponents == 0, mantissas / 512, (1 + mantissas / 8) * 2.0 ** (exponents.astype(float) - 7)
    )
    return np.where(codes >> 7, -sizes, sizes).astype(np.float32)


def alpha_of(value: float) -> dict[str, Tensor]:
    """One number in every type that holds it."""
    return {
        "f16": Tensor("F16", (), np.float16(value).tobytes()),
        "f64": Tensor("F64", (1,), np.float64(value).tobytes()),
        "i64": Tensor("I64", (), np.int64(value).tobytes()),
        "i32": Tensor("I32", (1,), np.int32(value).tobytes()),
        "i8": Tensor("I8", (), np.int8(value).tobytes()),
        "bf16": in_bf16(np.float32(value)),
        "e4m3": in_bytes(e4m3(np.float32(value)), "F8_E4M3"),
    }


def plain(numbers: Numbers) -> Tensors:
    return full(numbers)


def under(rename: Callable[[str], str]) -> Callable[[Numbers], Tensors]:
    return lambda numbers: {rename(name): one_f32(one) for name, one in numbers.items()}


def with_alpha(numbers: Numbers, alpha: float) -> Tensors:
    """Pairs of diffusers whose factors have this alpha in them."""
    rank = next(iter(pairs(numbers).values()))[0].shape[0]
    return {
        name: one_f32(one * (alpha / rank if ".lora_B." in name else 1))
        for name, one in numbers.items()
    }


def xlabs(place: Place) -> None:
    """XLabs' processors of single blocks, and the same in Black Forest Labs' names."""
    random = np.random.default_rng(5)
    theirs: Numbers = {}
    for block in range(4):
        for name, rows, columns in (("qkv_lora", 3 * 192, 192), ("proj_lora", 192, 5 * 192)):
            layer = f"single_blocks.{block}.processor.{name}"
            theirs[f"{layer}.down.weight"] = random.normal(0, 0.1, (2, columns)).astype(np.float32)
            theirs[f"{layer}.up.weight"] = random.normal(0, 0.1, (rows, 2)).astype(np.float32)
    write_safetensors(place.adapters / "l-xlabs.safetensors", full(theirs))
    ours: Numbers = {}
    for name, one in theirs.items():
        block, rest = name.split(".")[1], name.split("processor.")[1]
        layer = f"transformer.single_transformer_blocks.{block}"
        kind, part, _ = rest.split(".")
        factor = "lora_A" if part == "down" else "lora_B"
        if kind == "proj_lora":
            ours[f"{layer}.proj_out.{factor}.weight"] = one
            continue
        for index, projection in enumerate(("to_q", "to_k", "to_v")):
            own = one if part == "down" else one[192 * index : 192 * (index + 1)]
            ours[f"{layer}.attn.{projection}.{factor}.weight"] = own
    write_safetensors(place.adapters / "l-xlabs-diffusers.safetensors", full(ours))


def final_layer(place: Place) -> None:
    """A pair for the last layer alone: kohya's, with alpha, and diffusers'."""
    random = np.random.default_rng(6)
    down, up = (random.normal(0, 0.2, shape).astype(np.float32) for shape in ((4, 192), (64, 4)))
    theirs = "lora_unet_final_layer_linear"
    write_safetensors(
        place.adapters / "l15-final.safetensors",
        {
            f"{theirs}.lora_down.weight": one_f32(down),
            f"{theirs}.lora_up.weight": one_f32(up),
            f"{theirs}.alpha": in_f32(2.0),
        },
    )
    write_safetensors(
        place.adapters / "l15-same.safetensors",
        {
            "transformer.proj_out.lora_A.weight": one_f32(down),
            "transformer.proj_out.lora_B.weight": one_f32(up / 2),
        },
    )


def beside_plain(make: Make) -> Make:
    """Makes an adapter, and those that it is compared with: of diffusers, and of kohya with alpha in f32."""

    def write(place: Place) -> None:
        if not (place.adapters / "l-plain.safetensors").exists():
            lora_file("l-plain", plain)(place)
            lora_file("l-alpha", lambda numbers: kohya(numbers, in_f32(2.0), one_f32))(place)
        make(place)

    return write


def rank_stabilised(place: Place) -> None:
    """peft folders: use_rslora with alpha 16 / sqrt(4), and alpha 16 without it."""
    for name, alpha, is_stabilised in (
        ("l17-rslora", 16 / math.sqrt(4), True),
        ("l17-plain", 16, False),
    ):
        folder = place.adapters / name
        folder.mkdir()
        tensors = {
            name.replace("transformer.", "base_model.model.", 1): one_f32(one)
            for name, one in lora().items()
        }
        write_safetensors(folder / "adapter_model.safetensors", tensors)
        told = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "use_rslora": is_stabilised}
        (folder / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")


def film_lora(place: Place) -> Numbers:
    """Random pairs for layers of the tiny HunyuanVideo, by Tencent's names."""
    random = np.random.default_rng(8)
    rows: dict[str, int] = {}
    columns: dict[str, int] = {}
    for name, one in read_safetensors(film_base(place) / WEIGHTS).items():
        layer = name.removesuffix(".weight")
        if name.endswith(".weight") and one.ndim == 2 and "transformer_blocks." in name:
            theirs = tencents_layer(layer)
            rows[theirs] = rows.get(theirs, 0) + one.shape[0]
            columns[theirs] = one.shape[1]
    pairs: Numbers = {}
    for layer in rows:
        for part, shape in (("A", (2, columns[layer])), ("B", (rows[layer], 2))):
            pairs[f"{layer}.lora_{part}.weight"] = random.normal(0, 0.3, shape).astype(np.float32)
    return pairs


def comfys_film_loras(place: Place) -> None:
    theirs = film_lora(place)
    comfys = {"diffusion_model." + in_comfys_name(name): one for name, one in theirs.items()}
    write_safetensors(place.adapters / "l16-tencent.safetensors", full(theirs))
    write_safetensors(place.adapters / "l16-comfy.safetensors", full(comfys))
    layer = next(iter(comfys)).split(".lora_")[0]
    comfys[f"{layer}.diff_b"] = np.zeros(3, np.float32)
    write_safetensors(place.adapters / "l16-diff-b.safetensors", full(comfys))


def same_films(place: Place, ways: tuple[object, ...]) -> None:
    bare, *films = (film(place, "h-base", adapters=way) for way in ([], *ways))
    assert (films[0] == films[1]).all(), "the same pairs give another film"
    assert not np.array_equal(bare, films[0]), "the adapter does nothing"


def musubi(place: Place) -> None:
    """Z-Image's adapter of musubi, and the model as a folder and as one file."""
    random = np.random.default_rng(9)
    single = z_image_single(place)
    write_safetensors(
        based(place.models / "z-fused.safetensors", picture_base(place)), full(single)
    )
    tensors: Tensors = {}
    for name in ("attention.qkv", "attention.out", "feed_forward.w1"):
        weight = single[f"layers.0.{name}.weight"]
        layer = f"lora_unet_layers_0_{name}".replace(".", "_")
        for part, shape in (("down", (4, weight.shape[1])), ("up", (weight.shape[0], 4))):
            numbers = random.normal(0, 0.3, shape).astype(np.float32)
            tensors[f"{layer}.lora_{part}.weight"] = one_f32(numbers)
        tensors[f"{layer}.alpha"] = in_f32(4.0)
    write_safetensors(place.adapters / "l34-musubi.safetensors", tensors)


def text_loras(place: Place) -> None:
    """Pairs of CLIP as kohya writes them, with and without a part of the names."""
    for name, optional in (("l09-clip-with", "text_model."), ("l09-clip-without", "")):
        tensors = {}
        for key, one in random_text_lora().items():
            layer, part, _ = key.removeprefix("text_encoder.text_model.").rsplit(".", 2)
            joined = "lora_te1_" + (optional + layer).replace(".", "_")
            kind = {"lora_A": "lora_down", "lora_B": "lora_up"}[part]
            tensors[f"{joined}.{kind}.weight"] = one_f32(one)
        write_safetensors(place.adapters / f"{name}.safetensors", tensors)


def clip_and_loras(place: Place) -> None:
    if not (place.models / "l09-clip5").exists():
        copied("l09-clip5", clip_of_transformers_5)(place)
        text_loras(place)


def fp8_loras(place: Place) -> None:
    """An adapter that was converted to fp8 with its alphas, and the same numbers in f32."""
    alphas = alpha_of(2.0)
    write_safetensors(
        place.adapters / "l37-fp8.safetensors", kohya(lora(), alphas["e4m3"], in_e4m3)
    )
    write_safetensors(
        place.adapters / "l37-kohya.safetensors",
        kohya(lora(), in_f32(2.0), lambda numbers: one_f32(rounded(numbers))),
    )


ALPHAS = [
    Situation(
        f"an-alpha-in-{kind}",
        "utensils/mold#766, kohya-ss/musubi-tuner#167",
        "a reader that takes floats alone loses alphas of another type",
        Same(("--lora", "l-alpha")),
        generate=("--lora", f"l-alpha-{kind}"),
        make=beside_plain(
            lora_file(
                f"l-alpha-{kind}",
                lambda numbers, kind=kind: kohya(numbers, alpha_of(2.0)[kind], one_f32),
            )
        ),
    )
    for kind in ("i64", "f64", "e4m3")
]

SITUATIONS = [
    Situation(
        "the-plain-adapter",
        "what the rows below are compared with",
        "an adapter of kohya's scripts has its alpha in f32",
        Same(("--lora", "l-diffusers"), within=0.5),
        generate=("--lora", "l-alpha"),
        make=beside_plain(lora_file("l-diffusers", lambda numbers: with_alpha(numbers, 2.0))),
    ),
    *ALPHAS,
    Situation(
        "kohyas-last-layer-with-alpha",
        "huggingface/diffusers#13998",
        "the last layer has a pair and its modulation has none",
        Same(("--lora", "l15-same"), within=0.5),
        generate=("--lora", "l15-final"),
        make=final_layer,
    ),
    Situation(
        "hunyuan-video-lora-in-the-names-of-comfyui",
        "kijai/ComfyUI-HunyuanVideoWrapper#468",
        "accelerators were extracted with ComfyUI, in its names",
        Check(same_films),
        call=lambda place: (["l16-tencent"], ["l16-comfy"]),
        make=comfys_film_loras,
    ),
    Situation(
        "a-difference-of-a-bias-is-named",
        "kijai/ComfyUI-HunyuanVideoWrapper#468, Comfy-Org/ComfyUI#10222",
        "extracted adapters have differences of biases beside their pairs",
        Refused(("a difference of a bias", "diff_b")),
        command=("film", "a", "-m", "h-base", "--frames", "5", "--lora", "l16-diff-b"),
        make=comfys_film_loras,
    ),
    Situation(
        "a-difference-of-a-bias-is-left-out",
        "kijai/ComfyUI-HunyuanVideoWrapper#468, Comfy-Org/ComfyUI#10222",
        "whoever says so uses the rest",
        Check(same_films),
        call=lambda place: (["l16-tencent"], [{"id": "l16-diff-b", "ignore_unknown": True}]),
        make=comfys_film_loras,
    ),
    Situation(
        "rank-stabilised",
        "sgl-project/sglang#40835",
        "use_rslora divides by the root of the rank",
        Same(("--lora", "l17-plain")),
        generate=("--lora", "l17-rslora"),
        make=rank_stabilised,
    ),
    Situation(
        "an-adapter-in-fp8",
        "nunchux-ai/nunchaku#245",
        "scripts convert whole adapters to fp8, alphas too",
        Same(("--lora", "l37-kohya")),
        generate=("--lora", "l37-fp8"),
        make=fp8_loras,
    ),
    Situation(
        "musubis-z-image-on-a-fused-file",
        "kohya-ss/musubi-tuner#807, Comfy-Org/ComfyUI#11487",
        "one adapter fits the folder and the single file",
        Same(("-m", "z-base", "--lora", "l34-musubi")),
        generate=("-m", "z-fused", "--lora", "l34-musubi"),
        make=musubi,
    ),
    *(
        Situation(
            f"kohyas-clip-on-clip-of-transformers-5-{ending}",
            "huggingface/diffusers#14035, ubisoft/ComfyUI-Chord#27",
            "both have lost or kept a part of their names",
            Same(("--lora", "l09-clip-with")),
            generate=("-m", "l09-clip5", "--lora", f"l09-clip-{ending}"),
            make=clip_and_loras,
        )
        for ending in ("with", "without")
    ),
    Situation(
        "xlabs-single-blocks",
        "huggingface/diffusers#9959, #9914, #9915",
        "XLabs' single blocks were taken for modulations",
        Same(("--lora", "l-xlabs-diffusers"), within=0.5),
        generate=("--lora", "l-xlabs"),
        make=xlabs,
    ),
    Situation(
        "an-adapter-of-a-compiled-model",
        "huggingface/diffusers#9279, kohya-ss/sd-scripts#1024",
        "torch.compile puts _orig_mod into every name",
        Same(("--lora", "l-plain")),
        generate=("--lora", "l-compiled"),
        make=beside_plain(lora_file("l-compiled", under(lambda name: "module._orig_mod." + name))),
    ),
    Situation(
        "an-adapter-in-capitals",
        "Acly/krita-ai-diffusion#1163",
        "endings are written in capitals, or as .sft",
        Same(("--lora", "l-plain")),
        generate=("--lora", "loud"),
        make=beside_plain(lora_file("loud", plain, "SAFETENSORS")),
    ),
    Situation(
        "an-adapter-called-sft",
        "Acly/krita-ai-diffusion#1163",
        "the same",
        Same(("--lora", "l-plain")),
        generate=("--lora", "short-lora"),
        make=beside_plain(lora_file("short-lora", plain, "sft")),
    ),
    Situation(
        "an-adapter-that-is-a-pointer",
        "microsoft/OmniParser#34",
        "adapters are cloned without git-lfs too",
        Refused(("pointer of git-lfs", "git lfs pull")),
        generate=("--lora", "l11-pointer"),
        make=lambda place: write_raw(place.adapters / "l11-pointer.safetensors", lfs_pointer("l")),
    ),
    Situation(
        "a-model-in-the-folder-of-adapters",
        "huggingface/diffusers#11648",
        "a whole model lies among the adapters",
        Refused(("it is no LoRA: it is Chroma",)),
        generate=("--lora", "whole"),
        make=lambda place: write_safetensors(
            place.adapters / "whole.safetensors",
            {"distilled_guidance_layer.in_proj.weight": in_f32(0.0, shape=(1,))},
        ),
    ),
]
