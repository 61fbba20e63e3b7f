"""Quantized weights, in formats of other programs on disk and made at load.

The shipped model, written in these formats, still generates what its prompts say; unsupported
formats are refused with a reason.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from stored_files import (
    WEIGHTS,
    GgufKind,
    Numbers,
    Tensor,
    Tensors,
    e4m3,
    in_bf16,
    in_bfl_names,
    in_bytes,
    in_f32,
    is_in_a_block,
    is_weight,
    read_safetensors,
    write_gguf,
    write_pth,
    write_safetensors,
)
from test_pictures import DEMO, load_judge, spread

from service import Service

PREFIX = "model.diffusion_model."
T5_WEIGHTS = "text_encoder_2/model.safetensors"
F32_BYTES = 4
"""Of a number in full precision on the CPU."""
PICTURES_STORED = 3
"""One for every number of shapes that held-out prompts have."""
PICTURES_MADE = 12
DEADLINE_S = 300.0
STEPS = 4
"""Half of what the model is used with: the pictures are as right, in half of the time."""


# ---------------------------------------------------------------------------------------------
# What others write


def fp8_of_comfyui(weights: Numbers, scale: str) -> Tensors:
    """Layers of blocks in e4m3, each with one scale, all behind a prefix."""
    tensors: Tensors = {}
    for name, numbers in weights.items():
        if is_weight(numbers) and is_in_a_block(name):
            largest = np.abs(numbers).max() / 448
            tensors[PREFIX + name] = in_bytes(e4m3(numbers / largest), "F8_E4M3")
            tensors[PREFIX + name.replace("weight", scale)] = in_f32(largest)
        else:
            tensors[PREFIX + name] = in_bf16(numbers)
    return tensors


def write_fp8_of_comfyui(folder: Path, weights: Numbers) -> None:
    layers = [name.removesuffix(".weight") for name in weights if is_weight(weights[name])]
    said = {"layers": {name: {"format": "float8_e4m3fn"} for name in layers if is_in_a_block(name)}}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0"} | said)}
    write_safetensors(
        folder / "fp8-comfyui.safetensors", fp8_of_comfyui(weights, "weight_scale"), metadata
    )


def write_fp8_of_comfyui_in_older_words(folder: Path, weights: Numbers) -> None:
    tensors = fp8_of_comfyui(weights, "scale_weight")
    tensors[PREFIX + "scaled_fp8"] = in_bytes(np.zeros(2, np.uint8), "F8_E4M3")
    write_safetensors(folder / "fp8-older.safetensors", tensors)


def write_fp8_without_scales(folder: Path, weights: Numbers) -> None:
    """Writes every tensor in e4m3, norms and biases too."""
    tensors = {name: in_bytes(e4m3(numbers), "F8_E4M3") for name, numbers in weights.items()}
    write_safetensors(folder / "fp8-unscaled.safetensors", tensors)


def write_fp8_of_bfl(folder: Path, weights: Numbers) -> None:
    """Every layer with a scale for each of its rows: the swapped last one too."""
    tensors: Tensors = {}
    for name, numbers in weights.items():
        if is_weight(numbers):
            largest = np.abs(numbers).max(1) / 448
            tensors[name] = in_bytes(e4m3(numbers / largest[:, None]), "F8_E4M3")
            tensors[f"{name}_scale"] = in_f32(*largest, shape=largest.shape)
        else:
            tensors[name] = in_bf16(numbers)
    write_safetensors(folder / "fp8-rows.safetensors", tensors)


def mixed_kind(name: str) -> GgufKind:
    """The mixture of converters: modulation and output layers of a block are finer than the rest."""
    if not is_in_a_block(name):
        return GgufKind.F16
    fine = any(part in name for part in ("mod", "linear2", "mlp.2"))
    return GgufKind.Q5_1 if fine else GgufKind.Q4_0


def write_ggufs(folder: Path, weights: Numbers) -> None:
    write_gguf(folder / "q8_0.gguf", weights, lambda _: GgufKind.Q8_0)
    write_gguf(folder / "mixed.gguf", weights, mixed_kind)


def write_pickled(folder: Path, weights: Numbers) -> None:
    write_pth(folder / "pickled.pth", {name: in_bf16(one) for name, one in weights.items()})


def comfy_quant(name: str, **said: object) -> Tensors:
    """What ComfyUI says of a layer, in a tensor beside its weight."""
    text = json.dumps(said).encode()
    return {name.replace(".weight", ".comfy_quant"): in_bytes(np.frombuffer(text, np.uint8))}


def hadamard(size: int) -> np.ndarray:
    """The regular Hadamard matrix of a power of four over its square root: its own inverse."""
    four = np.ones((4, 4)) - 2 * np.fliplr(np.eye(4))
    return four / 2 if size == 4 else np.kron(hadamard(size // 4), four / 2)


def write_rotated_int8(folder: Path, weights: Numbers) -> None:
    """Layers of blocks in int8, a scale for each row, groups of 64 columns rotated."""
    tensors: Tensors = {}
    for name, numbers in weights.items():
        tensors[name] = in_bf16(numbers)
        if is_weight(numbers) and is_in_a_block(name):
            rotated = (numbers.reshape(len(numbers), -1, 64) @ hadamard(64)).reshape(numbers.shape)
            scales = np.abs(rotated).max(1, keepdims=True) / 127
            codes = np.round(rotated / scales).astype(np.int8)
            tensors[name] = in_bytes(codes.view(np.uint8), "I8")
            tensors[f"{name}_scale"] = in_f32(*scales.reshape(-1), shape=scales.shape)
            said = {"convrot": True, "convrot_groupsize": 64}
            tensors |= comfy_quant(name, format="int8_tensorwise", **said)
    write_safetensors(folder / "int8-convrot.safetensors", tensors)


def for_tensor_cores(scales: np.ndarray) -> np.ndarray:
    """Bytes of blocks in the order of tensor cores: tiles of 128 rows by four blocks."""
    rows, blocks = (math.ceil(side / of) for side, of in zip(scales.shape, (128, 4), strict=True))
    padded = np.zeros((128 * rows, 4 * blocks), np.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    tiles = padded.reshape(rows, 4, 32, blocks, 4).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles).reshape(128 * rows, 4 * blocks)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def nvfp4_of_comfyui(name: str, numbers: np.ndarray) -> Tensors:
    """Codes in e2m1, the high nibble first; a scale in e4m3 for each 16 columns, and one of the weight."""
    blocks = numbers.reshape(len(numbers), -1, 16)
    whole = np.abs(numbers).max() / (6 * 448)
    scales = e4m3(np.abs(blocks).max(2) / 6 / whole)
    table = np.array([float_of_e4m3(code) for code in range(256)], np.float32)
    scaled = blocks / np.maximum(table[scales] * whole, 1e-30)[:, :, None]
    codes = nearest(np.abs(scaled), E2M1) | ((scaled < 0).astype(np.uint8) << 3)
    codes = codes.reshape(len(numbers), -1, 2)
    return {
        name: in_bytes((codes[:, :, 0] << 4) | codes[:, :, 1]),
        f"{name}_scale": in_bytes(for_tensor_cores(scales), "F8_E4M3"),
        f"{name}_scale_2": in_f32(whole),
        **comfy_quant(name, format="nvfp4"),
    }


def mxfp8_of_comfyui(name: str, numbers: np.ndarray) -> Tensors:
    """Codes in e4m3, and a power of two for each 32 columns."""
    blocks = numbers.reshape(len(numbers), -1, 32)
    exponents = np.ceil(np.log2(np.maximum(np.abs(blocks).max(2) / 448, 2.0**-126)))
    codes = e4m3(blocks / np.exp2(exponents)[:, :, None]).reshape(numbers.shape)
    return {
        name: in_bytes(codes, "F8_E4M3"),
        f"{name}_scale": in_bytes(for_tensor_cores((exponents + 127).astype(np.uint8))),
        **comfy_quant(name, format="mxfp8"),
    }


def awq_of_comfyui(name: str, numbers: np.ndarray) -> Tensors:
    """Codes of four bits, the low nibble first; a scale and a zero in bf16 for each 64 columns."""
    groups = numbers.reshape(len(numbers), -1, 64)
    low = groups.min(2)
    scales = in_short(np.maximum((groups.max(2) - low) / 15, 1e-6))
    zeros = in_short(low + 8 * scales)
    codes = np.rint((groups - zeros[:, :, None]) / scales[:, :, None]).clip(-8, 7) + 8
    codes = codes.astype(np.uint8).reshape(len(numbers), -1, 2)
    return {
        name: in_bytes(codes[:, :, 0] | (codes[:, :, 1] << 4), "I8"),
        f"{name}_scale": in_bf16(np.ascontiguousarray(scales.T)),
        f"{name}_zeros": in_bf16(np.ascontiguousarray(zeros.T)),
        **comfy_quant(name, format="awq_w4a16", group_size=64),
    }


def in_short(numbers: np.ndarray) -> np.ndarray:
    """The numbers without what bf16 has no bits for."""
    return (numbers.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def float_of_e4m3(code: int) -> float:
    """The number that a code stands for."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 512 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


def write_blocks_of_comfyui(folder: Path, _: Numbers) -> None:
    """Layers of blocks in nvfp4, mxfp8 and awq_w4a16, in diffusers' names: the scales of the former are in
    tiles of 128 rows, and this model's fused layers have parts of other sizes."""
    ours = read_safetensors(DEMO / "model" / WEIGHTS)
    kinds = (("nvfp4", nvfp4_of_comfyui), ("mxfp8", mxfp8_of_comfyui), ("awq", awq_of_comfyui))
    for stem, made in kinds:
        tensors: Tensors = {}
        for name, numbers in ours.items():
            inside = is_weight(numbers) and is_in_a_block(name)
            tensors |= made(name, numbers) if inside else {name: in_bf16(numbers)}
        write_safetensors(folder / f"{stem}.safetensors", tensors)


# bitsandbytes: its tables are those of QLoRA (Dettmers et al., 2023) and of 8-bit Optimizers via Block-wise
# Quantization (Dettmers et al., 2021).
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
    + [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
    + [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
    + [0.7229568362236023, 1.0],
    np.float32,
)


def dynamic_map() -> np.ndarray:
    """The table of bitsandbytes but for the last bit of some values; readers use the table in the file."""
    values = [0.0, 1.0]
    for power in range(7):
        steps = np.linspace(0.1, 1, 2**power + 1)
        means = (steps[:-1] + steps[1:]) / 2 * 10.0 ** (power - 6)
        values += [*means, *-means]
    return np.sort(np.array(values, np.float32))


def nearest(numbers: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.searchsorted((table[1:] + table[:-1]) / 2, numbers).astype(np.uint8)


def nf4_of_bitsandbytes(name: str, numbers: np.ndarray) -> Tensors:
    """A weight in nf4 with double quantization."""
    blocks = numbers.reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    codes = nearest(blocks / largest[:, None], NF4).reshape(-1, 2)
    offset = float(largest.mean())
    padded = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
    nested = np.abs(padded).max(1)
    scales = nearest(padded / nested[:, None], dynamic_map()).reshape(-1)[: len(largest)]
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": numbers.shape,
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": offset,
    }
    return {
        name: in_bytes((codes[:, :1] << 4) | codes[:, 1:]),
        f"{name}.absmax": in_bytes(scales),
        f"{name}.quant_map": in_f32(*NF4, shape=(16,)),
        f"{name}.nested_absmax": in_f32(*nested, shape=nested.shape),
        f"{name}.nested_quant_map": in_f32(*dynamic_map(), shape=(256,)),
        f"{name}.quant_state.bitsandbytes__nf4": in_bytes(json.dumps(state).encode()),
    }


def write_folder_of_bitsandbytes(folder: Path, _: Numbers) -> None:
    """Every linear layer of transformer and T5, as diffusers and transformers do it."""
    target = folder / "nf4-folder"
    shutil.copytree(DEMO / "model", target)
    for path in (WEIGHTS, T5_WEIGHTS):
        tensors: Tensors = {}
        for name, numbers in read_safetensors(DEMO / "model" / path).items():
            embeds = name.startswith("shared") or "relative" in name
            if is_weight(numbers) and not embeds:
                tensors |= nf4_of_bitsandbytes(name, numbers)
            else:
                tensors[name] = in_bf16(numbers)
        write_safetensors(target / path, tensors)
        config = (target / path).parent / "config.json"
        said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
        said |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"quantization_config": said})
        )


# ---------------------------------------------------------------------------------------------
# What cannot be read


def write_what_is_not_read(folder: Path, weights: Numbers) -> None:
    rest = {name: in_bf16(numbers) for name, numbers in weights.items()}
    gptq = dict(rest)
    layer = "double_blocks.0.img_attn.qkv.weight"
    rows, columns = weights[layer].shape
    del gptq[layer]
    name = layer.removesuffix(".weight")
    gptq[f"{name}.qweight"] = Tensor("I32", (columns // 8, rows), bytes(columns * rows // 2))
    gptq[f"{name}.g_idx"] = Tensor("I32", (columns,), bytes(4 * columns))
    write_safetensors(folder / "gptq.safetensors", gptq)

    target = folder / "quanto-folder"
    shutil.copytree(DEMO / "model", target)
    config = target / "transformer/config.json"
    said = {"quant_method": "quanto", "weights_dtype": "int4"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))


def write_scales_that_are_no_numbers(folder: Path, weights: Numbers) -> None:
    tensors = fp8_of_comfyui(weights, "weight_scale")
    tensors[f"{PREFIX}single_blocks.3.linear2.weight_scale"] = in_f32(math.nan)
    write_safetensors(folder / "nan.safetensors", tensors)


# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A model in a format of another program."""

    formats: dict[str, str]
    """What the service calls its components' formats, where that is not `full`."""
    held: Callable[[str], str]
    """The format of each weight of the transformer, by its name in diffusers' words."""


def block_wise(inside: str, outside: str = "full") -> Callable[[str], str]:
    return lambda name: inside if is_in_a_block(name) else outside


def mixed(name: str) -> str:
    if not is_in_a_block(name):
        return "full"
    fine = (".norm", "net.2", "proj_out")
    return "Q5_1" if any(part in name for part in fine) else "Q4_0"


def unscaled(name: str) -> str:
    """The format of a tensor of a file in which codes have no scales."""
    return "fp8-unscaled" if is_in_a_block(name) or name == "norm_out.linear.weight" else "full"


STORED = {
    "q8_0": Stored({"transformer": "Q8_0"}, block_wise("Q8_0", "Q8_0")),
    "mixed": Stored({"transformer": "Q5_1"}, mixed),
    "fp8-comfyui": Stored({"transformer": "fp8-scaled"}, block_wise("fp8-scaled")),
    "fp8-older": Stored({"transformer": "fp8-scaled"}, block_wise("fp8-scaled")),
    "fp8-unscaled": Stored({"transformer": "fp8-unscaled"}, unscaled),
    "fp8-rows": Stored({"transformer": "fp8"}, block_wise("fp8", "fp8")),
    "nf4-folder": Stored(
        {"transformer": "nf4-double", "text_encoder_2": "nf4-double"},
        block_wise("nf4-double", "nf4-double"),
    ),
    "pickled": Stored({}, block_wise("full")),
    "int8-convrot": Stored({"transformer": "int8-convrot"}, block_wise("int8-convrot")),
    "nvfp4": Stored({"transformer": "nvfp4"}, block_wise("nvfp4")),
    "mxfp8": Stored({"transformer": "mxfp8"}, block_wise("mxfp8")),
    "awq": Stored({"transformer": "awq"}, block_wise("awq")),
}
REFUSED = {
    "gptq": ["GPTQ"],
    "quanto-folder": ["quanto"],
}


def held_bytes(name: str, rows: int, columns: int) -> int:
    """Bytes of a weight in a format."""
    numbers = rows * columns
    scales = math.ceil(numbers / 64)
    tiles = 512 * math.ceil(rows / 128)
    return {
        "int8-convrot": numbers + 4 * rows,
        "nvfp4": 16 + tiles * math.ceil(columns / 64) + numbers // 2,
        "awq": numbers // 2 + 4 * (numbers // 64),
        "mxfp8": tiles * math.ceil(columns / 128) + numbers,
        "full": F32_BYTES * numbers,
        "Q8_0": numbers // 32 * 34,
        "Q5_1": numbers // 32 * 24,
        "Q4_0": numbers // 32 * 18,
        "fp8": numbers + 4 * rows,
        "fp8-scaled": numbers + 16,  # the codes begin aligned
        "fp8-unscaled": numbers,
        "nf4-double": numbers // 2 + scales + 4 * (math.ceil(scales / 256) + 1 + 16 + 256),
    }[name]


def write_models(folder: Path) -> None:
    """The shipped model in all formats, as single files beside which its folder is named, and folders."""
    weights = in_bfl_names(read_safetensors(DEMO / "model" / WEIGHTS))
    for write in (
        write_ggufs,
        write_fp8_of_comfyui,
        write_fp8_of_comfyui_in_older_words,
        write_fp8_without_scales,
        write_fp8_of_bfl,
        write_pickled,
        write_rotated_int8,
        write_blocks_of_comfyui,
        write_folder_of_bitsandbytes,
        write_what_is_not_read,
        write_scales_that_are_no_numbers,
    ):
        write(folder, weights)
    for file in [path for path in folder.iterdir() if path.is_file()]:
        sidecar = file.with_suffix(".moored.json")
        sidecar.write_text(json.dumps({"base": str(DEMO / "model")}))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def service(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service("--models", str(models), state=tmp_path_factory.mktemp("state"))
    yield service
    assert service.stop() == 0


@pytest.fixture
def reader(service: Service) -> Iterator[moored.Client]:
    """A client of a service that has nothing resident, before and after."""
    with service.client() as client:
        yield client
        client.unload(timeout=DEADLINE_S)


def prompts(number: int) -> list[dict[str, Any]]:
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return spread([json.loads(line) for line in lines], number)


def mistakes(
    client: moored.Client, model: moored.ModelRef, formats: dict[str, str], number: int
) -> list[tuple[str, ...]]:
    """Generates held-out prompts; the mistakes of each wrong picture."""
    judge = load_judge()
    wrong = []
    for seed, prompt in enumerate(prompts(number)):
        done = client.generate_image(
            prompt["prompt"], model=model, seed=seed, steps=STEPS, timeout=DEADLINE_S
        )
        used = {name: one for name, one in done.model.quantization.items() if one != "full"}
        assert used == formats
        verdict = judge.judge(done.image, prompt["scene"])
        if not verdict.right:
            wrong.append(verdict.mistakes)
    return wrong


@pytest.mark.parametrize("name", STORED)
def test_pictures_of_foreign_formats_show_their_prompts(reader: moored.Client, name: str) -> None:
    stored = STORED[name]
    (listed,) = (one for one in reader.list_models() if one.id == name)
    assert listed.problem == ""
    assert {key: one for key, one in listed.quantization.items() if one != "full"} == stored.formats
    # Presets make nothing of what is quantized already.
    presets = [choice.preset for choice in listed.choices]
    assert presets == (["full"] if stored.formats else ["full", "8-bit", "4-bit"])

    reader.load(name, timeout=DEADLINE_S)
    assert mistakes(reader, moored.ModelRef(name), stored.formats, PICTURES_STORED) == []
    residents = [one.component for one in reader.status().cards[0].residents]
    held = {one.name: one.bytes for one in residents}
    assert held == {one.name: one.bytes for one in listed.components}
    expected = sum(
        held_bytes(stored.held(each), *numbers.shape)
        if is_weight(numbers)
        else F32_BYTES * numbers.size
        for each, numbers in read_safetensors(DEMO / "model" / WEIGHTS).items()
    )
    assert held["transformer"] == expected
    freed = reader.unload(name, timeout=DEADLINE_S).freed
    assert {one.component.name: one.component.bytes for one in freed} == held


@pytest.mark.parametrize("asked", ["4-bit", "8-bit"])
@pytest.mark.parametrize("name", [name for name in STORED if STORED[name].formats])
def test_weights_stored_quantized_are_not_quantized_again(
    reader: moored.Client, name: str, asked: str
) -> None:
    model = moored.ModelRef(name, quantization=asked)
    calls: list[Callable[[], object]] = [
        lambda: reader.load(model, timeout=DEADLINE_S),
        lambda: reader.generate_image("no", model=model, timeout=DEADLINE_S),
    ]
    for call in calls:
        with pytest.raises(moored.InvalidRequest) as refused:
            call()
        (violation,) = refused.value.violations
        said = f"is stored as {STORED[name].formats['transformer']} already: leave its quantization out"
        assert said in violation.description


def test_a_pickle_in_full_precision_is_quantized_like_any_file(reader: moored.Client) -> None:
    formats = dict.fromkeys(("transformer", "text_encoder_2"), "int8-convrot")
    assert (
        mistakes(reader, moored.ModelRef("pickled", quantization="8-bit"), formats, PICTURES_STORED)
        == []
    )


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_formats_are_refused_with_a_reason(reader: moored.Client, name: str) -> None:
    (listed,) = (one for one in reader.list_models() if one.id == name)
    with pytest.raises(moored.ModelUnsupported) as refused:
        reader.load(name, timeout=DEADLINE_S)
    for said in (listed.problem, str(refused.value)):
        for words in [*REFUSED[name], "is not supported", "what is read is full precision"]:
            assert words in said


def test_a_picture_from_a_scale_that_is_not_finite_is_refused(
    reader: moored.Client,
) -> None:
    with pytest.raises(moored.NotFinite):
        reader.generate_image(
            "a ring", model="nan", width=64, height=64, steps=1, timeout=DEADLINE_S
        )


@pytest.mark.parametrize("name", ["int8-convrot", "int8", "fp8", "nf4", "nf4-double"])
def test_pictures_of_formats_made_at_load_show_their_prompts(
    demo_client: moored.Client, name: str
) -> None:
    formats = {"transformer": name, "text_encoder_2": name}
    wrong = mistakes(demo_client, moored.ModelRef("moored/demo", formats=formats), formats, 12)
    assert len(wrong) <= 1, wrong
    demo_client.unload(moored.ModelRef("moored/demo", formats=formats))
