"""Measures models of pictures on a card, beside diffusers in the same run: steps, decodes and encodes.

    python tests/gpu/pictures.py --binary moored --work FOLDER --out pictures.json

It makes FLUX.2 klein 4B (16 GB), SDXL (7 GB) and Qwen-Image (44 GB, its text encoder with four layers) in
full size from random numbers, and klein's transformer again as single files in formats of other programs. It
needs torch, diffusers, transformers, and what the Python client needs. `--models` chooses among the models,
`--parts` among make, peers and steps, `--only` figures by a pattern of their names. One line of JSON for each
figure, and all of them in the file, of which `picture_rows.py` makes rows. `--tiny` runs all but the single
files with tiny models on the CPU.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import full_size
import numpy as np
import torch
from full_size import (
    ASKED,
    FIXTURES,
    begin,
    command_line,
    compile_blocks,
    compiler,
    free_memory,
    guarded,
    made,
    peak_gib,
    run_ms,
    run_parts,
    show,
    tell,
    tell_decode,
    tell_step,
    timed,
    write,
)

PROMPT = "a red circle on the left of a blue square"
SIDE = 1024
FORMATS = ("", " fp8", " int8-convrot", " int8", " nf4")
STEM = "diffusion_pytorch_model"
FEW, MANY = 2, 10


@dataclass(frozen=True)
class Pictures:
    """A model, and what it is measured with."""

    title: str
    fixtures: Sequence[str]
    """Folders that have the parts of a tiny pipeline of this kind; the first has its index."""
    denoiser: str
    """The folder of the part that denoises, which names the component."""
    classes: Mapping[str, str]
    """The class of each part."""
    configs: Mapping[str, Mapping[str, Any]]
    """What differs in full size from the fixture's configurations."""
    texts: Mapping[str, Callable[[Mapping[str, Any]], Any]]
    """Makes the text encoders of configurations, by their folders."""
    inputs: Callable[[Any, int], dict[str, Any]]
    """What the pipeline gives the denoiser in a step of a square picture."""
    latents: Callable[[Any, int], tuple[int, ...]]
    """The shape of what the autoencoder of a configuration decodes to a square picture."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of requests."""
    what: str = "step"
    """What a step is called."""
    stored: Sequence[str] = ()
    """Formats of other programs in which the denoiser is a single file, too."""

    @property
    def step(self) -> str:
        """The name of its figure."""
        return f"{self.what}, {self.title} {SIDE}x{SIDE}"

    def config(self, part: str) -> dict[str, Any]:
        """The configuration of a part."""
        files = (FIXTURES / folder / part / "config.json" for folder in self.fixtures)
        file = next(file for file in files if file.is_file())
        known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return known if ASKED.is_tiny else with_changes(known, self.configs[part])


def with_changes(known: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with other values; tables in it are changed, not replaced."""
    changed = dict(known)
    for name, value in changes.items():
        before = known.get(name)
        is_table = isinstance(value, Mapping) and isinstance(before, Mapping)
        changed[name] = with_changes(before, value) if is_table else value
    return changed


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=ASKED.place, dtype=torch.bfloat16)


def flux2_inputs(config: Any, side: int) -> dict[str, Any]:
    cells, tokens = side // 16, 512
    rows, columns = torch.meshgrid(torch.arange(cells), torch.arange(cells), indexing="ij")
    places = torch.zeros(1, cells * cells, 4, dtype=torch.long)
    places[0, :, 1], places[0, :, 2] = rows.reshape(-1), columns.reshape(-1)
    of_text = torch.zeros(1, tokens, 4, dtype=torch.long)
    of_text[0, :, 3] = torch.arange(tokens)
    return {
        "hidden_states": draw(1, cells * cells, config.in_channels),
        "encoder_hidden_states": draw(1, tokens, config.joint_attention_dim),
        "timestep": torch.full((1,), 0.637, device=ASKED.place, dtype=torch.bfloat16),
        "img_ids": places.to(ASKED.place),
        "txt_ids": of_text.to(ASKED.place),
        "guidance": None,
    }


def qwen3(config: Mapping[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**config))


def qwen_image_inputs(config: Any, side: int) -> dict[str, Any]:
    # As many tokens as PROMPT has: it is not padded.
    cells, tokens = side // 16, 48
    return {
        "hidden_states": draw(1, cells * cells, config.in_channels),
        "encoder_hidden_states": draw(1, tokens, config.joint_attention_dim),
        "encoder_hidden_states_mask": None,
        "timestep": torch.full((1,), 0.637, device=ASKED.place, dtype=torch.bfloat16),
        "img_shapes": [[(1, cells, cells)]],
    }


def qwen2_vl(config: Mapping[str, Any]) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config))


def sdxl_inputs(config: Any, side: int) -> dict[str, Any]:
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    size = torch.tensor([[side, side, 0, 0, side, side]] * 2, device=ASKED.place)
    return {
        "sample": draw(2, config.in_channels, side // 8, side // 8),
        "timestep": torch.tensor(637.0, device=ASKED.place),
        "encoder_hidden_states": draw(2, 77, config.cross_attention_dim),
        "added_cond_kwargs": {
            "text_embeds": draw(2, pooled),
            "time_ids": size.to(torch.bfloat16),
        },
    }


def clip(config: Mapping[str, Any]) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(**config))


def clip_with_projection(config: Mapping[str, Any]) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(CLIPTextConfig(**config))


QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "layer_types": None,
    "vocab_size": 151_936,
}
KLEIN = Pictures(
    "FLUX.2 klein 4B",
    ("flux2-tiny",),
    "transformer",
    {"transformer": "Flux2Transformer2DModel", "vae": "AutoencoderKLFlux2"},
    {
        "transformer": {
            "attention_head_dim": 128,
            "axes_dims_rope": [32, 32, 32, 32],
            "in_channels": 128,
            "joint_attention_dim": 7680,
            "num_attention_heads": 24,
            "num_layers": 5,
            "num_single_layers": 20,
        },
        "vae": {
            "block_out_channels": [128, 256, 512, 512],
            "latent_channels": 32,
            "layers_per_block": 2,
            "norm_num_groups": 32,
        },
        "text_encoder": QWEN3_4B,
    },
    {"text_encoder": qwen3},
    flux2_inputs,
    lambda config, side: (1, config.latent_channels, side // 8, side // 8),
    stored=("nvfp4", "mxfp8", "int8_tensorwise"),
)
QWEN_IMAGE = Pictures(
    "Qwen-Image",
    ("qwen-image-tiny", "qwen-vl-tiny"),
    "transformer",
    {"transformer": "QwenImageTransformer2DModel", "vae": "AutoencoderKLQwenImage"},
    {
        "transformer": {
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "in_channels": 64,
            "joint_attention_dim": 3584,
            "num_attention_heads": 24,
            "num_layers": 60,
            "out_channels": 16,
        },
        "vae": {
            "base_dim": 96,
            "dim_mult": [1, 2, 4, 4],
            "latents_mean": [0.0] * 16,
            "latents_std": [1.0] * 16,
            "num_res_blocks": 2,
            "z_dim": 16,
        },
        "text_encoder": {
            "text_config": {
                "hidden_size": 3584,
                "intermediate_size": 18_944,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1e6},
            },
            "vision_config": {"out_hidden_size": 3584},
        },
    },
    {"text_encoder": qwen2_vl},
    qwen_image_inputs,
    lambda config, side: (1, config.z_dim, 1, side // 8, side // 8),
    # A step is one pass.
    {"true_guidance": 1.0},
)
SDXL = Pictures(
    "SDXL",
    ("sdxl-tiny",),
    "unet",
    {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL"},
    {
        "unet": {
            "addition_time_embed_dim": 256,
            "attention_head_dim": [5, 10, 20],
            "block_out_channels": [320, 640, 1280],
            "cross_attention_dim": 2048,
            "norm_num_groups": 32,
            "projection_class_embeddings_input_dim": 2816,
            "sample_size": 128,
            "transformer_layers_per_block": [1, 2, 10],
        },
        "vae": {
            "block_out_channels": [128, 256, 512, 512],
            "layers_per_block": 2,
            "norm_num_groups": 32,
        },
        "text_encoder": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "projection_dim": 768,
        },
        "text_encoder_2": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_attention_heads": 20,
            "num_hidden_layers": 32,
            "projection_dim": 1280,
        },
    },
    {"text_encoder": clip, "text_encoder_2": clip_with_projection},
    sdxl_inputs,
    lambda config, side: (1, config.latent_channels, side // 8, side // 8),
    {"negative_prompt": "blurred", "true_guidance": 5.0},
    what="step with guidance",
)
MODELS = {"klein-4b": KLEIN, "qwen-image": QWEN_IMAGE, "sdxl": SDXL}


def module_of(model: Pictures, part: str) -> Any:
    """A part of random numbers on the card."""
    import diffusers

    of: Any = getattr(diffusers, model.classes[part])
    return made(partial(of.from_config, model.config(part)))


def make(work: Path, names: Sequence[str]) -> None:
    """The folders of models that are not there yet."""
    for name in names:
        began = time.perf_counter()
        model, folder = MODELS[name], work / name
        if not (folder / "model_index.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            make_parts(folder, model)
            shutil.copy(FIXTURES / model.fixtures[0] / "model_index.json", folder)
        tell(f"make {name}", time.perf_counter() - began, "s")
        if not ASKED.is_tiny:
            for stored in model.stored:
                write_stored(work, name, stored)


def make_parts(folder: Path, model: Pictures) -> None:
    for part in model.classes:
        module = module_of(model, part)
        write(folder / part, module, STEM)
        (folder / part / "config.json").write_text(module.to_json_string())
        del module
        free_memory()
    for part, build in model.texts.items():
        text = made(partial(build, model.config(part)))
        if hasattr(text, "lm_head"):
            # It is not read, or has the embeddings' numbers, which files have once.
            del text.lm_head
        write(folder / part, text, "model")
        (folder / part / "config.json").write_text(text.config.to_json_string(use_diff=False))
        del text
        free_memory()
    for fixture in model.fixtures:
        for place in (FIXTURES / fixture).iterdir():
            if place.is_dir() and place.name != "expected" and not (folder / place.name).exists():
                shutil.copytree(place, folder / place.name)


# Single files of other programs. Their weights are as large as the others' are; a step costs the same
# whichever they are.

CODE_STD = {"nvfp4": 2.9, "mxfp8": 1.0, "int8_tensorwise": 73.0}
"""The deviation of random codes."""


def layers_of_klein(config: Any) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Layers by the names of Black Forest Labs: the name, the shape, and whether it is in a block."""
    width = config["attention_head_dim"] * config["num_attention_heads"]
    inner = int(config["mlp_ratio"] * width)
    yield "img_in", (width, config["in_channels"]), False
    yield "txt_in", (width, config["joint_attention_dim"]), False
    yield "time_in.in_layer", (width, config["timestep_guidance_channels"]), False
    yield "time_in.out_layer", (width, width), False
    for stream in ("img", "txt"):
        yield f"double_stream_modulation_{stream}.lin", (6 * width, width), False
    yield "single_stream_modulation.lin", (3 * width, width), False
    yield "final_layer.adaLN_modulation.1", (2 * width, width), False
    yield "final_layer.linear", (config["in_channels"], width), False
    for block in range(config["num_layers"]):
        for stream in ("img", "txt"):
            place = f"double_blocks.{block}.{stream}"
            yield f"{place}_attn.qkv", (3 * width, width), True
            yield f"{place}_attn.proj", (width, width), True
            yield f"{place}_mlp.0", (2 * inner, width), True
            yield f"{place}_mlp.2", (width, inner), True
    for block in range(config["num_single_layers"]):
        yield f"single_blocks.{block}.linear1", (3 * width + 2 * inner, width), True
        yield f"single_blocks.{block}.linear2", (width, width + inner), True


def norms_of_klein(config: Any) -> Iterator[str]:
    for block in range(config["num_layers"]):
        for stream in ("img", "txt"):
            for norm in ("query", "key"):
                yield f"double_blocks.{block}.{stream}_attn.norm.{norm}_norm.scale"
    for block in range(config["num_single_layers"]):
        for norm in ("query", "key"):
            yield f"single_blocks.{block}.norm.{norm}_norm.scale"


def stored_layer(name: str, shape: tuple[int, int], stored: str) -> dict[str, tuple[str, Any]]:
    """A layer in a format of ComfyUI, of random codes: types of safetensors, and numbers."""
    rows, columns = shape
    scale = 0.02 / CODE_STD[stored]
    chance = np.random.default_rng(1)
    said: dict[str, Any] = {"format": stored}
    found: dict[str, tuple[str, Any]] = {}
    if stored == "nvfp4":
        codes = chance.integers(0, 256, (rows, columns // 2), np.uint8)
        found[f"{name}.weight"] = ("U8", codes)
        # 0x38 is one in e4m3.
        found[f"{name}.weight_scale"] = ("F8_E4M3", np.full((rows, columns // 16), 0x38, np.uint8))
        found[f"{name}.weight_scale_2"] = ("F32", np.float32(scale))
    elif stored == "mxfp8":
        numbers = torch.randn(shape, device=ASKED.place).to(torch.float8_e4m3fn)
        codes = numbers.view(torch.uint8).cpu().numpy()
        found[f"{name}.weight"] = ("F8_E4M3", codes)
        found[f"{name}.weight_scale"] = ("U8", np.full((rows, columns // 32), 127 - 6, np.uint8))
    else:
        codes = chance.integers(-127, 128, shape, np.int8)
        found[f"{name}.weight"] = ("I8", codes)
        found[f"{name}.weight_scale"] = ("F32", np.full((rows, 1), scale, np.float32))
        said |= {"convrot": True, "convrot_groupsize": 256}
    text = np.frombuffer(json.dumps(said).encode(), np.uint8)
    return found | {f"{name}.comfy_quant": ("U8", text)}


def write_stored(work: Path, name: str, stored: str) -> None:
    """The transformer of klein as a single file whose blocks are in a format of ComfyUI."""
    config = MODELS[name].config("transformer")
    ones = torch.ones(config["attention_head_dim"], dtype=torch.bfloat16)
    tensors: dict[str, tuple[str, Any]] = {}
    for layer, shape, is_in_a_block in layers_of_klein(config):
        if is_in_a_block:
            tensors |= stored_layer(layer, shape, stored)
        else:
            numbers = torch.randn(shape, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
            tensors[f"{layer}.weight"] = ("BF16", numbers.view(torch.uint8).numpy())
    for norm in norms_of_klein(config):
        tensors[norm] = ("BF16", ones.view(torch.uint8).numpy())
    file = work / f"{name}-{stored}.safetensors"
    write_file(file, tensors)
    sidecar = {"base": f"../{name}"}
    file.with_suffix("").with_suffix(".moored.json").write_text(json.dumps(sidecar))


SIZES = {"BF16": 2, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}


def write_file(file: Path, tensors: Mapping[str, tuple[str, Any]]) -> None:
    """A file of safetensors; numbers of two bytes come as bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, numbers) in tensors.items():
        shape = list(numbers.shape)
        if dtype == "BF16":
            shape[-1] //= 2
        places = [end, end := end + numbers.nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": places}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, numbers in tensors.values():
            out.write(np.ascontiguousarray(numbers).data)


@torch.no_grad()
def peers(names: Sequence[str]) -> None:
    torch.manual_seed(1)
    for name in names:
        model = MODELS[name]
        guarded(model.step, partial(step_peer, model))
        torch.compiler.reset()
        free_memory()
        guarded(f"decode, {model.title}", partial(autoencoder_peer, model))
        free_memory()


def step_peer(model: Pictures) -> None:
    module = module_of(model, model.denoiser)
    if model is QWEN_IMAGE:
        # Rotations are no parameters.
        known = type(module.pos_embed)
        module.pos_embed = known(10_000, list(module.config.axes_dims_rope), scale_rope=True)
    given = model.inputs(module.config, 64 if ASKED.is_tiny else SIDE)
    if model.denoiser == "unet":
        module = module.to(memory_format=torch.channels_last)
    step = partial(module, **given, return_dict=False)
    eager = timed(step, 5)
    tell(f"{model.step}, eager", eager, "ms", who="diffusers eager")
    began = time.perf_counter()
    if model.denoiser == "unet":
        # Half of its work is outside of the blocks that it repeats.
        whole = torch.compile(module, dynamic=False, backend=compiler())
        compiled = partial(whole, **given, return_dict=False)
    else:
        compile_blocks(module)
        compiled = step
    compiled()
    first_s = round(time.perf_counter() - began, 1)
    tell(model.step, timed(compiled, 9), "ms", who="diffusers compiled", first_s=first_s)


def autoencoder_peer(model: Pictures) -> None:
    vae = module_of(model, "vae")
    side = 64 if ASKED.is_tiny else SIDE
    latents, picture = draw(*model.latents(vae.config, side)), draw(1, 3, side, side)
    if model.config("vae").get("_class_name") == "AutoencoderKLQwenImage":
        picture = picture[:, :, None]
    for what, work in (
        ("decode", partial(vae.decode, latents, return_dict=False)),
        ("encode", partial(vae.encode, picture, return_dict=False)),
    ):
        ms, peak = timed(work, 5), peak_gib(work)
        name = f"{what}, {model.title} {SIDE}x{SIDE}"
        tell(name, ms, "ms", who="diffusers eager", peak_gib=round(peak, 2))


def picture(service: full_size.Service, name: str, steps: int, **options: Any) -> Any:
    """A picture; `name` may end with ` FORMAT`."""
    import moored

    name, _, quantized = name.partition(" ")
    model = MODELS.get(name) or MODELS[name.rpartition("-")[0]]
    formats = {model.denoiser: quantized} if quantized else {}
    side = 64 if ASKED.is_tiny else SIDE
    return service.client.generate_image(
        options.pop("prompt", PROMPT),
        model=moored.ModelRef(name, formats=formats) if formats else name,
        width=side,
        height=side,
        steps=steps,
        seed=1,
        **(dict(model.options) | options),
    )


def steps(binary: Path, work: Path, names: Sequence[str]) -> None:
    """Ours, of which each figure has the name of the one beside it."""
    files = []
    for name in names:
        for stored in () if ASKED.is_tiny else MODELS[name].stored:
            files += [f"{name}-{stored}.safetensors", f"{name}-{stored}.moored.json"]
    settings = "log.filter=info,timeline=debug"
    with full_size.Service(binary, work, [*names, *files], settings).logged("steps") as service:
        for name in names:
            model = MODELS[name]
            kinds = [(quantized, name + quantized) for quantized in FORMATS]
            if not ASKED.is_tiny:
                kinds += [(f" {stored} file", f"{name}-{stored}") for stored in model.stored]
            for suffix, of in kinds:
                what = model.step + suffix
                make_one = partial(picture, service, of, latent_only=True)
                guarded(what, partial(tell_step, what, make_one, FEW, MANY))
                guarded(what, partial(tell_booked, service, f"{model.title}{suffix}"))
            whole = partial(picture, service, name, 1)
            what = f"decode, {model.title} {SIDE}x{SIDE}"
            guarded(what, partial(tell_decode, what, whole))
            what = f"text, {model.title}"
            other = partial(picture, service, name, 1, prompt=f"{PROMPT}, and a boat")
            guarded(what, partial(tell_text, what, other))


def tell_booked(service: full_size.Service, what: str) -> None:
    """Tells the bytes of the models that are on the card, as they were booked."""
    residents = [one for card in service.client.status().cards for one in card.residents]
    denoisers = {model.denoiser for model in MODELS.values()}
    own = [one for one in residents if one.component.name in denoisers]
    for one in own:
        print(f"    {what}: {one}", flush=True)
    service.client.unload(timeout=60)


def tell_text(what: str, make: Callable[[], Any]) -> None:
    """Tells what encoding a prompt takes, that nobody has encoded before."""
    result = make()
    show(result)
    found = run_ms(result, "encode_text")
    if found:
        tell(what, found[-1][0], "ms", who="moored")


def main() -> None:
    parser = command_line(__doc__, "make,peers,steps", "peers and steps")
    parser.add_argument("--models", default="klein-4b")
    parser.add_argument("--tiny", action="store_true")
    settings = parser.parse_args()
    begin(settings)
    binary, work = settings.binary, settings.work
    names = settings.models.split(",")
    parts = {
        "make": partial(make, work, names),
        "peers": partial(peers, names),
        "steps": partial(steps, binary, work, names),
    }
    run_parts(parts, settings.parts.split(","))


if __name__ == "__main__":
    main()
