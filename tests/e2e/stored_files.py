"""Files of weights as other programs write them, made of the shipped models' tensors."""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
"""Of a pipeline's folder."""


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: a dtype by its name in safetensors, a shape, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Tensor]
Numbers = dict[str, np.ndarray]


def read_safetensors(path: Path) -> Numbers:
    """The tensors of a file in bf16 or f32, by name."""
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    numbers = {}
    for name, entry in json.loads(data[8:end]).items():
        if name != "__metadata__":
            begin, behind = entry["data_offsets"]
            raw = data[end + begin : end + behind]
            if entry["dtype"] == "BF16":
                values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
            else:
                assert entry["dtype"] == "F32", name
                values = np.frombuffer(raw, "<f4")
            numbers[name] = values.reshape(entry["shape"])
    return numbers


def write_safetensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def in_bf16(numbers: np.ndarray) -> Tensor:
    """Tensors in bf16, of values that were in bf16: nothing is rounded."""
    halves = (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")
    return Tensor("BF16", numbers.shape, halves.tobytes())


def in_f32(*numbers: float, shape: tuple[int, ...] = ()) -> Tensor:
    return Tensor("F32", shape, np.array(numbers, "<f4").tobytes())


def in_bytes(codes: np.ndarray | bytes, dtype: str = "U8") -> Tensor:
    codes = np.frombuffer(codes, np.uint8) if isinstance(codes, bytes) else codes
    return Tensor(dtype, codes.shape, codes.tobytes())


# ---------------------------------------------------------------------------------------------
# Black Forest Labs' names: rows of one input fused, the last layer's shift before its scale.


def names_of_bfl() -> dict[str, tuple[str, ...]]:
    """By layer in their names: the layers in diffusers' names whose rows it has, one behind the other."""
    names: dict[str, tuple[str, ...]] = {
        "img_in": ("x_embedder",),
        "txt_in": ("context_embedder",),
        "final_layer.linear": ("proj_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    }
    for bfl, name in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance")):
        for side, number in (("in", 1), ("out", 2)):
            embedder = f"time_text_embed.{name}_embedder.linear_{number}"
            names[f"{bfl}_in.{side}_layer"] = (embedder,)
    for block in range(2):
        for stream, attention, out, feed, norm in (
            ("img", ("to_q", "to_k", "to_v"), "to_out.0", "ff", "norm1"),
            (
                "txt",
                ("add_q_proj", "add_k_proj", "add_v_proj"),
                "to_add_out",
                "ff_context",
                "norm1_context",
            ),
        ):
            ours, theirs = f"transformer_blocks.{block}", f"double_blocks.{block}.{stream}"
            names[f"{theirs}_attn.qkv"] = tuple(f"{ours}.attn.{one}" for one in attention)
            names[f"{theirs}_attn.proj"] = (f"{ours}.attn.{out}",)
            names[f"{theirs}_mlp.0"] = (f"{ours}.{feed}.net.0.proj",)
            names[f"{theirs}_mlp.2"] = (f"{ours}.{feed}.net.2",)
            names[f"{theirs}_mod.lin"] = (f"{ours}.{norm}.linear",)
    for block in range(4):
        ours, theirs = f"single_transformer_blocks.{block}", f"single_blocks.{block}"
        parts = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        names[f"{theirs}.linear1"] = tuple(f"{ours}.{part}" for part in parts)
        names[f"{theirs}.linear2"] = (f"{ours}.proj_out",)
        names[f"{theirs}.modulation.lin"] = (f"{ours}.norm.linear",)
    return names


def norms_of_bfl() -> dict[str, str]:
    names = {}
    for bfl, ours in (("query", "q"), ("key", "k")):
        for block in range(2):
            for stream, added in (("img", ""), ("txt", "added_")):
                name = f"double_blocks.{block}.{stream}_attn.norm.{bfl}_norm.scale"
                names[name] = f"transformer_blocks.{block}.attn.norm_{added}{ours}.weight"
        for block in range(4):
            name = f"single_blocks.{block}.norm.{bfl}_norm.scale"
            names[name] = f"single_transformer_blocks.{block}.attn.norm_{ours}.weight"
    return names


def in_bfl_names(ours: Numbers) -> Numbers:
    theirs = {name: ours[norm] for name, norm in norms_of_bfl().items()}
    for name, layers in names_of_bfl().items():
        for kind in ("weight", "bias"):
            rows = np.concatenate([ours[f"{layer}.{kind}"] for layer in layers])
            if name.startswith("final_layer.adaLN"):
                scale, shift = np.split(rows, 2)
                rows = np.concatenate([shift, scale])
            theirs[f"{name}.{kind}"] = rows
    assert sum(one.size for one in theirs.values()) == sum(one.size for one in ours.values())
    return theirs


def is_weight(numbers: np.ndarray) -> bool:
    return numbers.ndim == 2


def is_in_a_block(name: str) -> bool:
    return "blocks." in name


def e4m3(numbers: np.ndarray) -> np.ndarray:
    """Codes of the nearest floats of 8 bits, of two the even one."""
    exponents, mantissas = np.divmod(np.arange(0x7F), 8)
    normal = (1 + mantissas / 8) * 2.0 ** (exponents - 7)
    values = np.where(exponents == 0, mantissas / 512, normal)
    size = np.abs(numbers.astype(float))
    middle = (values[1:] + values[:-1]) / 2
    low, high = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    codes = np.where(low % 2 == 0, low, high)
    return (codes | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)


GgufKind = gguf.GGMLQuantizationType


def write_gguf(path: Path, weights: Numbers, kind_of: Callable[[str], GgufKind]) -> None:
    writer = gguf.GGUFWriter(path, "flux")
    for name, numbers in weights.items():
        kind = kind_of(name) if is_weight(numbers) else GgufKind.F32
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


STORAGES = {
    "BF16": (b"ctorch\nBFloat16Storage\n", b"_rebuild_tensor_v2\n", b""),
    "F32": (b"ctorch\nFloatStorage\n", b"_rebuild_tensor_v2\n", b""),
    "F8_E4M3": (
        b"ctorch.storage\nUntypedStorage\n",
        b"_rebuild_tensor_v3\n",
        b"ctorch\nfloat8_e4m3fn\n}",
    ),
}
"""How PyTorch writes tensors, by dtypes: the class of storages, a function, and its last arguments."""


def write_pth(path: Path, tensors: Tensors, within: str = "") -> None:
    """As `torch.save` writes a state dict, alone or within another: a pickle beside the tensors' bytes."""

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value.encode())) + value.encode()

    def several(numbers: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"J" + struct.pack("<i", n) for n in numbers) + b"t"

    empty = b"ccollections\nOrderedDict\n)R"
    pickle = empty + b"("
    with zipfile.ZipFile(path, "w") as archive:
        for key, (name, tensor) in enumerate(tensors.items()):
            shape, count = tensor.shape, math.prod(tensor.shape)
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            kind, rebuilt, behind = STORAGES[tensor.dtype]
            storage = text("storage") + kind + text(str(key)) + text("cpu")
            storage = b"((" + storage + b"J" + struct.pack("<i", count) + b"tQ"
            where = b"J" + struct.pack("<i", 0) + several(shape) + several(strides)
            pickle += text(name) + b"ctorch._utils\n" + rebuilt
            pickle += storage + where + b"\x89" + empty + behind + b"tR"
            archive.writestr(f"pickled/data/{key}", tensor.data)
        pickle += b"u"
        if within:
            pickle = empty + b"(" + text(within) + pickle + b"u"
        archive.writestr("pickled/data.pkl", b"\x80\x02" + pickle + b".")
        archive.writestr("pickled/version", b"3\n")
