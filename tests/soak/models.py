"""The models of a soak, in a folder of its own: small ones, some to be overwritten, some that pretend."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "service/pipelines/fixtures"
INSTANT = ROOT / "tests/models/instant"

DEMO, TINY, Z_TINY, SINGLE = "soak-demo", "soak-tiny", "soak-z-tiny", "soak-single"
FORMATS = ("full", "int8", "fp8", "nf4", "nf4-double")
"""Of a transformer."""
# What the instant family takes a step to be: short, so that much happens in an hour.
STEP_MS = {"slow": 20, "track": 10, "video": 10}


@dataclass(frozen=True)
class Rewritten:
    """A model of which one file is overwritten, by what is in either of two others that stay."""

    name: str
    file: Path
    """Inside of each of the three folders."""
    tensors: tuple[str, ...]
    """Those whose signs tell the second version from the first."""
    inverted: str
    """The model that has the second version; the first is that of `TINY`."""


REWRITTEN = (
    Rewritten(
        "soak-rewritten-vae",
        Path("vae/diffusion_pytorch_model.safetensors"),
        ("decoder.conv_out.weight", "decoder.conv_out.bias"),
        "soak-inverted-vae",
    ),
    Rewritten(
        "soak-rewritten-transformer",
        Path("transformer/diffusion_pytorch_model.safetensors"),
        ("proj_out.weight", "proj_out.bias"),
        "soak-inverted-transformer",
    ),
)


def make_models(folder: Path, simulated: bool) -> Path:
    """Copies what a soak needs from the checkout. Models without mathematics run on simulated cards alone."""
    folder.mkdir(parents=True)
    _copy(ROOT / "demo/model", folder / DEMO)
    _copy(FIXTURES / "flux-tiny", folder / TINY)
    _copy(FIXTURES / "z-image-tiny", folder / Z_TINY)
    # The fixture's VAE is that of the other family.
    _copy(FIXTURES / "flux-tiny/vae", folder / Z_TINY / "vae")
    shutil.copy(FIXTURES / "flux-tiny-bfl/flux-tiny.safetensors", folder / f"{SINGLE}.safetensors")
    base = {"base": TINY}
    (folder / f"{SINGLE}.moored.json").write_text(json.dumps(base), encoding="utf-8")
    for one in REWRITTEN:
        _copy(FIXTURES / "flux-tiny", folder / one.name)
        _copy(FIXTURES / "flux-tiny", folder / one.inverted)
        negate(folder / one.inverted / one.file, one.tensors)
    if simulated:
        for file in sorted(INSTANT.glob("*.instant.json")):
            model = json.loads(file.read_text(encoding="utf-8"))
            if model["name"] in STEP_MS:
                model["steps_ms"] = STEP_MS[model["name"]]
            (folder / file.name).write_text(json.dumps(model), encoding="utf-8")
    return folder


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("expected"), dirs_exist_ok=True)


def negate(file: Path, names: tuple[str, ...]) -> None:
    """Turns the sign of every number of some tensors of a safetensors file."""
    data = bytearray(file.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    width = {"F32": 4, "F16": 2, "BF16": 2}
    for name in names:
        first, behind = header[name]["data_offsets"]
        step = width[header[name]["dtype"]]
        # The sign is the highest bit of the last byte of each.
        for at in range(begin + first + step - 1, begin + behind, step):
            data[at] ^= 0x80
    file.write_bytes(data)
