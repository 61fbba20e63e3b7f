"""Checkpoints as people have them: names, shapes, indexes, relatives, and what is no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from stored_files import (
    WEIGHTS,
    GgufKind,
    Numbers,
    Tensors,
    e4m3,
    in_bf16,
    in_bytes,
    is_weight,
    read_safetensors,
    write_gguf,
    write_pth,
    write_safetensors,
)

from situations import Check, Done, Place, Refused, Same, Situation
from situations.people_files import (
    Make,
    based,
    copied,
    film,
    film_base,
    foreign_file,
    full,
    picture_base,
    raw_file,
    renamed,
    rewrite,
    scaled_fp8,
    shards,
    single_file,
    single_weights,
    umt5_in_wans_names,
    wan_in_names,
    z_image_single,
)

TEXT = "text_encoder_2/model.safetensors"
CLIP = "text_encoder/model.safetensors"
FP8 = "mp_rank_00_model_states_fp8"


def negated_stray(folder: Path) -> None:
    """Puts an older file of other weights beside the shards."""
    stray = read_safetensors(folder / WEIGHTS)
    shards(folder / "transformer")
    stray["proj_out.weight"] = -stray["proj_out.weight"]
    write_safetensors(folder / WEIGHTS, {name: in_bf16(one) for name, one in stray.items()})


def two_sets(folder: Path) -> None:
    single = (folder / TEXT).read_bytes()
    shards(folder / "text_encoder_2", "model")
    (folder / TEXT).write_bytes(single)


def missing_shard(folder: Path) -> None:
    shards(folder / "transformer")
    (folder / "transformer/diffusion_pytorch_model-00002-of-00003.safetensors").unlink()


def stale_index(folder: Path) -> None:
    """The index of an export into two shards beside an export into three."""
    shards(folder / "transformer")
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    text = index.read_text(encoding="utf-8").replace("-of-00003", "-of-00002")
    index.write_text(text, encoding="utf-8")


def as_bin(folder: Path) -> None:
    (folder / TEXT).rename(folder / "text_encoder_2/pytorch_model.bin")


def as_variant(folder: Path) -> None:
    (folder / TEXT).rename(folder / "text_encoder_2/model.fp16.safetensors")
    stem = folder / "transformer/diffusion_pytorch_model"
    stem.with_suffix(".safetensors").rename(stem.with_suffix(".fp16.safetensors"))


def scaled_t5(scale: str, folder: Path) -> None:
    """T5 as ComfyUI's users have it: its layers scaled, with marker and tokenizer in the file."""

    def change(numbers: Numbers) -> Tensors:
        tables = [name for name in numbers if "shared" in name or "embed" in name or "bias" in name]
        layers = {name: one for name, one in numbers.items() if name not in tables}
        tensors = scaled_fp8(layers, scale) | {name: in_bf16(numbers[name]) for name in tables}
        tensors["scaled_fp8"] = in_bytes(np.zeros(2, np.uint8), "F8_E4M3")
        tensors["spiece_model"] = in_bytes(b"the bytes of a tokenizer")
        return tensors

    rewrite(folder / TEXT, change)


def embed_alone(folder: Path) -> None:
    def change(numbers: Numbers) -> Tensors:
        table = "shared.weight" if "shared.weight" in numbers else "encoder.embed_tokens.weight"
        numbers["encoder.embed_tokens.weight"] = numbers.pop(table)
        return {name: in_bf16(one) for name, one in numbers.items()}

    rewrite(folder / TEXT, change)


def clip_of_transformers_5(folder: Path) -> None:
    rewrite(
        folder / CLIP,
        lambda numbers: {
            name.removeprefix("text_model."): in_bf16(one) for name, one in numbers.items()
        },
    )


def lfs_pointer(name: str) -> bytes:
    oid = "0" * 64
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {len(name)}\n".encode()
    )


def with_pads(name: str, dimensions: int) -> Make:
    """Z-Image with pad tokens of so many dimensions, in safetensors."""

    def write(place: Place) -> None:
        numbers = z_image_single(place)
        for pad in ("x_pad_token", "cap_pad_token"):
            numbers[pad] = numbers[pad].reshape((1,) * (dimensions - 1) + (-1,))
        write_safetensors(
            based(place.models / f"{name}.safetensors", picture_base(place)), full(numbers)
        )

    return write


def pads_in_gguf(place: Place) -> None:
    numbers = z_image_single(place)
    for pad in ("x_pad_token", "cap_pad_token"):
        numbers[pad] = numbers[pad].reshape(-1)
    path = based(place.models / "c02-pad-1d.gguf", picture_base(place))
    write_gguf(path, numbers, lambda _: GgufKind.F32)


def tencents_fp8(place: Place, name: str, *, has_map: bool, ending: str = "pt") -> None:
    """Weights of blocks as codes, and the scales of the layers in a file of their own, if at all."""
    numbers = read_safetensors(film_base(place) / WEIGHTS)
    codes, scales = {}, {}
    for tensor, one in numbers.items():
        if is_weight(one) and "transformer_blocks." in tensor:
            largest = float(np.abs(one).max()) / 448
            codes[tensor] = in_bytes(e4m3(one / largest), "F8_E4M3")
            scales[tensor.removesuffix(".weight")] = full({"": np.array([largest], np.float32)})[""]
        else:
            codes[tensor] = full({"": one})[""]
    write = write_pth if ending == "pt" else write_safetensors
    write(based(place.models / f"{name}.{ending}", film_base(place)), codes)
    if has_map:
        write(place.models / f"{name}_map.{ending}", scales)


def films_are_near(place: Place, names: tuple[str, str]) -> None:
    right, found = (film(place, name) for name in names)
    difference = float(np.abs(right - found).mean())
    assert difference < 4, f"{difference} of 255 from the right film"


def comfys_film(place: Place) -> None:
    """HunyuanVideo in ComfyUI's names, and in Tencent's."""
    ours = read_safetensors(film_base(place) / WEIGHTS)
    tensors = in_tencents_names(ours)
    write_safetensors(
        based(place.models / "h-tencent.safetensors", film_base(place)), full(tensors)
    )
    comfy = {"model.diffusion_model." + in_comfys_name(name): one for name, one in tensors.items()}
    write_safetensors(based(place.models / "h-comfy.safetensors", film_base(place)), full(comfy))


def wans_films(place: Place) -> None:
    """Wan with either of the two spellings of its text encoder."""
    wan_in_names(place, "w-hf", "umt5_xxl_bf16", str)
    wan_in_names(place, "w-authors", "umt5-xxl-enc-bf16", umt5_in_wans_names)


def in_tencents_names(ours: Numbers) -> Numbers:
    """Attention, norms, feed-forwards and embedders under their names in `hyvideo/modules/models.py`."""
    order = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "proj_mlp")
    parts: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, one in ours.items():
        layer, kind = name.rsplit(".", 1)
        last = layer.rsplit(".", 1)[-1]
        place = order.index(last) if last in order else 0
        if layer == "norm_out.linear":
            scale, shift = np.split(one, 2)
            one = np.concatenate([shift, scale])
        parts.setdefault(f"{tencents_layer(layer)}.{kind}", []).append((place, one))
    return {
        name: np.concatenate([one for _, one in sorted(of, key=lambda part: part[0])])
        for name, of in parts.items()
    }


def tencents_layer(layer: str) -> str:
    """The layer of Tencent's that has a layer of diffusers."""
    whole = {
        "x_embedder.proj": "img_in.proj",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "context_embedder.proj_in": "txt_in.input_embedder",
    }
    if layer in whole:
        return whole[layer]
    for ours, theirs in (
        ("context_embedder.time_text_embed.timestep_embedder.linear_1", "txt_in.t_embedder.mlp.0"),
        ("context_embedder.time_text_embed.timestep_embedder.linear_2", "txt_in.t_embedder.mlp.2"),
        ("context_embedder.time_text_embed.text_embedder", "txt_in.c_embedder"),
        ("time_text_embed.timestep_embedder.linear_1", "time_in.mlp.0"),
        ("time_text_embed.timestep_embedder.linear_2", "time_in.mlp.2"),
        ("time_text_embed.guidance_embedder.linear_1", "guidance_in.mlp.0"),
        ("time_text_embed.guidance_embedder.linear_2", "guidance_in.mlp.2"),
        ("time_text_embed.text_embedder.linear_1", "vector_in.in_layer"),
        ("time_text_embed.text_embedder.linear_2", "vector_in.out_layer"),
    ):
        if layer.startswith(ours):
            return theirs + layer.removeprefix(ours)
    if layer.startswith("context_embedder.token_refiner.refiner_blocks."):
        block = layer.replace(
            "context_embedder.token_refiner.refiner_blocks",
            "txt_in.individual_token_refiner.blocks",
        )
        for ours, theirs in (
            ("attn.to_out.0", "self_attn_proj"),
            ("ff.net.0.proj", "mlp.fc1"),
            ("ff.net.2", "mlp.fc2"),
            ("norm_out.linear", "adaLN_modulation.1"),
        ):
            block = block.replace(ours, theirs)
        return block.rsplit(".attn.to_", 1)[0] + (".self_attn_qkv" if ".attn.to_" in block else "")
    kind, number, rest = layer.split(".", 2)
    if kind == "single_transformer_blocks":
        names = {
            "norm.linear": "modulation.linear",
            "attn.norm_q": "q_norm",
            "attn.norm_k": "k_norm",
            "proj_out": "linear2",
        }
        return f"single_blocks.{number}.{names.get(rest, 'linear1')}"
    names = {
        "norm1.linear": "img_mod.linear",
        "norm1_context.linear": "txt_mod.linear",
        "attn.to_out.0": "img_attn_proj",
        "attn.to_add_out": "txt_attn_proj",
        "attn.norm_q": "img_attn_q_norm",
        "attn.norm_k": "img_attn_k_norm",
        "attn.norm_added_q": "txt_attn_q_norm",
        "attn.norm_added_k": "txt_attn_k_norm",
        "ff.net.0.proj": "img_mlp.fc1",
        "ff.net.2": "img_mlp.fc2",
        "ff_context.net.0.proj": "txt_mlp.fc1",
        "ff_context.net.2": "txt_mlp.fc2",
    }
    fused = "txt_attn_qkv" if "add_" in rest else "img_attn_qkv"
    return f"double_blocks.{number}.{names.get(rest, fused)}"


def in_comfys_name(name: str) -> str:
    """What ComfyUI calls a tensor of Tencent's once it has loaded it, and saves it as."""
    for theirs, comfys in (
        ("t_embedder.mlp.0.", "t_embedder.in_layer."),
        ("t_embedder.mlp.2.", "t_embedder.out_layer."),
        ("c_embedder.linear_1.", "c_embedder.in_layer."),
        ("c_embedder.linear_2.", "c_embedder.out_layer."),
        ("_mod.linear.", "_mod.lin."),
        (".modulation.linear.", ".modulation.lin."),
        ("_attn_qkv.", "_attn.qkv."),
        ("_attn_proj.", "_attn.proj."),
        ("_attn_q_norm.weight", "_attn.norm.query_norm.scale"),
        ("_attn_k_norm.weight", "_attn.norm.key_norm.scale"),
        (".q_norm.weight", ".norm.query_norm.scale"),
        (".k_norm.weight", ".norm.key_norm.scale"),
        ("mlp.fc1.", "mlp.0."),
        ("mlp.fc2.", "mlp.2."),
        ("_in.mlp.0.", "_in.in_layer."),
        ("_in.mlp.2.", "_in.out_layer."),
    ):
        name = name.replace(theirs, comfys)
    return name


def gguf_of(architecture: str, tensor: str, name: str) -> Make:
    """A GGUF file that says what it is."""

    def write(place: Place) -> None:
        writer = gguf.GGUFWriter(based(place.models / f"{name}.gguf", place.demo), architecture)
        writer.add_tensor(tensor, np.zeros((32, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def mixed_gguf(place: Place) -> None:
    """Q8_0 beside BF16, F16 and F32, as converters mix them."""
    kinds = [GgufKind.Q8_0, GgufKind.BF16, GgufKind.F16, GgufKind.F32]
    names = list(single_weights())
    write_gguf(
        based(place.models / "c14-mixed.gguf", place.demo),
        single_weights(),
        lambda name: kinds[names.index(name) % 4],
    )


def pipeline_of(name: str, class_name: str) -> Make:
    """A folder of another pipeline."""

    def write(place: Place) -> None:
        folder = place.models / name
        folder.mkdir()
        index = json.dumps({"_class_name": class_name})
        (folder / "model_index.json").write_text(index, encoding="utf-8")

    return write


def half_a_file(place: Place) -> None:
    path = based(place.models / "c-half.safetensors", place.demo)
    write_safetensors(path, {name: in_bf16(one) for name, one in single_weights().items()})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def prefixed(prefix: str) -> Situation:
    name = "c04-" + prefix.strip("._").replace(".", "-").replace("_", "-")
    return Situation(
        f"transformer-under-{name.removeprefix('c04-')}",
        "huggingface/diffusers#9803, wochenlong/lora-scripts-next#102, huggingface/diffusers#10540, #9279",
        "what saves a model puts a part in front of all its names",
        Same(()),
        generate=("-m", name),
        make=single_file(name, renamed(lambda tensor: prefix + tensor)),
    )


def relative(name: str, source: str, says: str, *tensors: str) -> Situation:
    return Situation(
        f"{name}-is-named",
        source,
        "a file of another model lies in the folder, and is said to be damaged",
        Refused((says,), never=("is damaged", "is missing", "panicked")),
        generate=("-m", name),
        make=foreign_file(name, tensors),
    )


def no_checkpoint(name: str, source: str, data: bytes, *says: str) -> Situation:
    return Situation(
        f"{name}-in-place-of-a-checkpoint",
        source,
        "what was saved under the model's name is something else",
        Refused(says),
        generate=("-m", name),
        make=raw_file(f"{name}.safetensors", data),
    )


RENAMED = [
    Situation(
        "norms-called-weight",
        "invoke-ai/InvokeAI#9190, Haoming02/sd-webui-forge-classic#1053, city96/ComfyUI-GGUF#470",
        "exports of 2026 call the norms of queries and keys weight where loaders look for scale",
        Same(()),
        generate=("-m", "c01-weight"),
        make=single_file(
            "c01-weight", renamed(lambda name: name.replace("_norm.scale", "_norm.weight"))
        ),
    ),
    *map(prefixed, ("diffusion_model.", "transformer.", "module.", "model._orig_mod.")),
    Situation(
        "a-file-called-sft",
        "Acly/krita-ai-diffusion#1163, huggingface/diffusers#9088",
        "FLUX.1 was first published in files that end in .sft",
        Same(()),
        generate=("-m", "short"),
        make=single_file("short", renamed(str), "sft"),
    ),
    Situation(
        "a-matrix-as-a-convolution-of-one-pixel",
        "black-forest-labs/flux#187",
        "programs write linear layers as convolutions of one pixel",
        Same(()),
        generate=("-m", "c-pixel"),
        make=single_file(
            "c-pixel",
            lambda numbers: {
                name: in_bf16(one.reshape((*one.shape, 1, 1)) if is_weight(one) else one)
                for name, one in numbers.items()
            },
        ),
    ),
    *(
        Situation(
            f"pad-tokens-of-{dimensions}-dimensions",
            "invoke-ai/InvokeAI#8690, city96/ComfyUI-GGUF#392, #417, calcuis/gguf#62",
            "the pad tokens of Z-Image have one dimension in some files and two in others",
            Same(("-m", "z-base")),
            generate=("-m", f"c02-st-{dimensions}d"),
            make=with_pads(f"c02-st-{dimensions}d", dimensions),
        )
        for dimensions in (1, 2, 3)
    ),
    Situation(
        "pad-tokens-of-one-dimension-in-gguf",
        "city96/ComfyUI-GGUF#392, #417",
        "the same in GGUF",
        Same(("-m", "z-base")),
        generate=("-m", "c02-pad-1d"),
        make=pads_in_gguf,
    ),
    Situation(
        "hunyuan-video-in-the-names-of-comfyui",
        "kijai/ComfyUI-HunyuanVideoWrapper#468",
        "ComfyUI saves HunyuanVideo with the names that it uses itself",
        Check(films_are_near),
        call=lambda place: ("h-tencent", "h-comfy"),
        make=comfys_film,
    ),
    Situation(
        "wan-with-a-text-encoder-in-other-names",
        "snicolast/ComfyUI-Ovi#10",
        "the text encoder is published in the names of transformers and in those of Wan's authors",
        Check(films_are_near),
        call=lambda place: ("w-hf", "w-authors"),
        make=wans_films,
    ),
]

SETS = [
    Situation(
        "a-stray-file-beside-shards",
        "Blaizzy/mlx-vlm#1464",
        "an older file lies beside the shards of the index",
        Same(()),
        generate=("-m", "c06-stray"),
        make=copied("c06-stray", negated_stray),
    ),
    Situation(
        "a-stray-file-beside-the-shards-of-a-text-encoder",
        "Blaizzy/mlx-vlm#1464",
        "transformers would take the file and diffusers the shards",
        Refused(("two sets of weights", "model.safetensors.index.json")),
        generate=("-m", "c06-two"),
        make=copied("c06-two", two_sets),
    ),
    Situation(
        "a-shard-that-is-missing",
        "sgl-project/sglang#32279",
        "a download of shards was interrupted",
        Refused(
            (
                "is not complete",
                "diffusion_pytorch_model-00002-of-00003.safetensors",
                "ownload it again",
            )
        ),
        generate=("-m", "c07-missing"),
        make=copied("c07-missing", missing_shard),
    ),
    Situation(
        "an-index-of-another-export",
        "Neph0s/CoSER#3",
        "the index names shards of another number",
        Refused(("is not complete", "-of-00002.safetensors")),
        generate=("-m", "c07-stale"),
        make=copied("c07-stale", stale_index),
    ),
    Situation(
        "weights-in-bin-alone",
        "huggingface/diffusers#14811",
        "an older repository has its weights as PyTorch's .bin",
        Refused(("text_encoder_2", "pytorch_model.bin", "safetensors")),
        generate=("-m", "c41-bin"),
        make=copied("c41-bin", as_bin),
    ),
    Situation(
        "an-fp16-variant-alone",
        "huggingface/diffusers#14811",
        "only the fp16 variant was downloaded",
        Same(()),
        generate=("-m", "c41-fp16"),
        make=copied("c41-fp16", as_variant),
    ),
    Situation(
        "tencents-fp8-with-its-map",
        "Comfy-Org/ComfyUI#6813",
        "the scales of the official fp8 file are in another file",
        Check(films_are_near),
        call=lambda place: ("h-base", FP8),
        make=lambda place: tencents_fp8(place, FP8, has_map=True),
    ),
    *(
        Situation(
            f"tencents-fp8-without-its-map-in-{ending}",
            "Comfy-Org/ComfyUI#6813",
            "without its scales the official fp8 file makes noise",
            Refused((f"alone-{ending}_map.{'pt'}", "fp8", "scales")),
            command=("film", "a wave", "-m", f"alone-{ending}", "--frames", "5"),
            make=lambda place, ending=ending: tencents_fp8(
                place, f"alone-{ending}", has_map=False, ending=ending
            ),
        )
        for ending in ("pt", "safetensors")
    ),
    *(
        Situation(
            f"t5-in-fp8-with-{scale.replace('_', '-')}",
            "leejet/stable-diffusion.cpp#1898",
            "scales of T5 were ignored, and pictures white",
            Same((), within=0.5),
            generate=("-m", f"c08-{scale}"),
            make=copied(f"c08-{scale}", lambda folder, scale=scale: scaled_t5(scale, folder)),
        )
        for scale in ("weight_scale", "scale_weight")
    ),
    Situation(
        "clip-as-transformers-5-saves-it",
        "huggingface/diffusers#14035",
        "CLIP's names have lost their prefix",
        Same(()),
        generate=("-m", "c09-clip5"),
        make=copied("c09-clip5", clip_of_transformers_5),
    ),
    Situation(
        "t5-with-one-name-of-its-table",
        "modelscope/DiffSynth-Studio#636, huggingface/transformers#43880",
        "T5's table of tokens is there as encoder.embed_tokens alone",
        Same(()),
        generate=("-m", "c12-embed"),
        make=copied("c12-embed", embed_alone),
    ),
    Situation(
        "gguf-of-several-types",
        "EricLBuehler/mistral.rs#663, vllm-project/vllm#29948",
        "converters mix Q8_0 with BF16, F16 and F32",
        Same((), within=0.5),
        generate=("-m", "c14-mixed"),
        make=mixed_gguf,
    ),
]

BLOCK = "double_blocks.0.img_attn.qkv.weight"
RELATIVES = [
    relative(
        "chroma",
        "Acly/krita-ai-diffusion#2288",
        "it is Chroma",
        BLOCK,
        "distilled_guidance_layer.in_proj.weight",
    ),
    relative(
        "flux2-dev",
        "huggingface/diffusers#13001",
        "it is FLUX.2 dev",
        BLOCK,
        "double_stream_modulation_img.lin.weight",
        "guidance_in.in_layer.weight",
    ),
    relative(
        "sdxl-refiner",
        "alexopus/ComfyUI-Image-Saver#39",
        "it is the refiner of Stable Diffusion XL",
        "model.diffusion_model.input_blocks.0.0.weight",
        "model.diffusion_model.label_emb.0.0.weight",
        "conditioner.embedders.0.model.ln_final.weight",
    ),
    relative(
        "lora-as-a-model",
        "Comfy-Org/ComfyUI#4428, easydiffusion/easydiffusion#1754",
        "it is a LoRA",
        "double_blocks.0.img_attn.qkv.lora_A.weight",
        "single_blocks.0.linear1.lora_A.weight",
    ),
    relative(
        "controlnet-as-a-model",
        "nunchux-ai/nunchaku#241",
        "it is a ControlNet",
        "controlnet_blocks.0.weight",
        "transformer_blocks.0.attn.to_q.weight",
        "single_transformer_blocks.0.attn.to_q.weight",
        "x_embedder.weight",
    ),
    relative(
        "vae-as-a-model",
        "huggingface/diffusers#9088",
        "the autoencoder (VAE)",
        "decoder.mid.block_1.conv1.weight",
    ),
    relative(
        "t5-as-a-model",
        "modelscope/DiffSynth-Studio#494",
        "the text encoder (T5)",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
    ),
    Situation(
        "a-model-that-does-not-run-is-named-in-gguf",
        "AHEKOT/ComfyUI_VNCCS#86",
        "loaders tell the architecture and not the model",
        Refused(("it is LTX-Video",)),
        generate=("-m", "q-image"),
        make=gguf_of("ltxv", "transformer_blocks.0.attn1.to_q.weight", "q-image"),
    ),
    Situation(
        "a-language-model-in-gguf-is-named",
        "Comfy-Org/ComfyUI#10558",
        "people load the text encoder's GGUF as the model",
        Refused(("it is a language model",)),
        generate=("-m", "q-text"),
        make=gguf_of("qwen2vl", "blk.0.attn_q.weight", "q-text"),
    ),
    Situation(
        "a-pipeline-of-another-kind-of-wan-is-named",
        "kijai/ComfyUI-WanVideoWrapper#56",
        "a folder of another pipeline lies among the models",
        Refused(("it is another kind of Wan", "(WanVACEPipeline)", "FLUX.1")),
        generate=("-m", "wan-folder"),
        make=pipeline_of("wan-folder", "WanVACEPipeline"),
    ),
]

NO_CHECKPOINTS = [
    no_checkpoint(
        "c11-lfs",
        "microsoft/OmniParser#34, AUTOMATIC1111/stable-diffusion-webui#8123",
        lfs_pointer("c11-lfs"),
        "pointer of git-lfs",
        "git lfs pull",
    ),
    no_checkpoint(
        "c11-page",
        "debpalash/VoiceStudio#1422",
        b"<!doctype html><html><head><title>Log in</title></head></html>",
        "web page",
        "download it again",
    ),
    no_checkpoint(
        "c11-empty",
        "Comfy-Org/ComfyUI#6744",
        b"",
        "is not complete",
        "0 bytes",
        "download it again",
    ),
    no_checkpoint(
        "c11-zeros",
        "ssube/onnx-web#165",
        bytes(4096),
        "is not complete",
        "download has not finished",
    ),
    no_checkpoint(
        "c11-json",
        "huggingface/transformers#27923",
        b'{"error": "Invalid credentials in Authorization header"}',
        "it is a text",
        "Invalid credentials",
    ),
    Situation(
        "half-a-download",
        "Comfy-Org/ComfyUI#6744, Comfy-Org/Comfy-Desktop#1322, invoke-ai/InvokeAI#7009",
        "a download stopped in the middle, and the file has its final name",
        Refused(("is not complete", "ownload it again")),
        generate=("-m", "c-half"),
        make=half_a_file,
    ),
    Situation(
        "a-plain-cast-to-fp8-is-read",
        "Comfy-Org/ComfyUI#4530",
        "flux1-dev-fp8 has no scales, and needs none",
        Done(),
        generate=("-m", "c-cast"),
        make=single_file(
            "c-cast",
            lambda numbers: {name: in_bytes(e4m3(one), "F8_E4M3") for name, one in numbers.items()},
        ),
    ),
]

SITUATIONS = [*RENAMED, *SETS, *RELATIVES, *NO_CHECKPOINTS]
