"""Measures Wan's films on a card, beside diffusers in the same run: steps and decodes.

    python tests/gpu/wan.py --binary moored --work FOLDER --out wan.json

It makes Wan 2.2 TI2V 5B and Wan 2.1 T2V 14B in full size from random numbers (44 GB; UMT5 has four layers of
those that are computed, unless `--umt5-layers` says how many), and needs torch, diffusers, transformers, and
what the Python client needs. `--models` chooses among wan-5b, wan-14b and wan-a14b: two transformers, which
share the files of the 14B. `--parts` chooses among make, peers and steps, `--only` figures by a pattern of
their names, `--ways` how diffusers computes: eager, blocks (each compiled), whole (compiled). One line of
JSON for each figure, and all of them in the file, of which `film_rows.py` makes rows. `--tiny` runs all but
the decodes of diffusers with tiny models on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import full_size
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
    run_parts,
    show,
    tell,
    tell_decode,
    tell_step,
    timed,
    write,
)
from wan_decode import WAN_2_1, WAN_2_2, decoded

PROMPT = "a red circle on the left of a blue square"
STEM = "diffusion_pytorch_model"
FORMATS = ("", " fp8", " int8", " nf4")
# In this order: blocks that are compiled stay so.
WAYS = ("eager", "whole", "blocks")
TOKENS = 512
UMT5 = {
    "vocab_size": 256_384,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10_240,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
# Of the class's defaults what the 5B has otherwise.
SMALLER = {
    "num_attention_heads": 24,
    "ffn_dim": 14_336,
    "num_layers": 30,
    "in_channels": 48,
    "out_channels": 48,
}


@dataclass(frozen=True)
class Wan:
    """A model, and the film that it is measured with."""

    title: str
    size: tuple[int, int]
    frames: int
    fixture: str
    """A folder of a tiny pipeline of this kind."""
    transformer: dict[str, Any]
    """What differs from the class's defaults."""
    vae: dict[str, Any]

    @property
    def step(self) -> str:
        """The name of its figure."""
        return f"step, {self.title} {self.size[0]}x{self.size[1]}, {self.frames} frames"

    @property
    def decode(self) -> str:
        return f"decode of {self.frames} frames, {self.title} {self.size[0]}x{self.size[1]}"

    def config(self, part: str) -> dict[str, Any]:
        """The configuration of its transformer or its VAE."""
        if ASKED.is_tiny:
            folder = FIXTURES / self.fixture
            file = folder / part / "config.json"
            if not file.is_file():
                file = FIXTURES / "wan-tiny" / part / "config.json"
            config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return config
        return self.transformer if part == "transformer" else self.vae


def moments(channels: int) -> dict[str, list[float]]:
    """Means and deviations of latents, of the size of the published ones."""
    spread = torch.linspace(-1, 1, channels)
    return {"latents_mean": (spread / 2).tolist(), "latents_std": (1.2 + spread / 2).tolist()}


SMALL = Wan("Wan 5B", (1280, 704), 121, "wan-ti2v-tiny", SMALLER, WAN_2_2 | moments(48))
LARGE = Wan("Wan 14B", (832, 480), 81, "wan-tiny", {}, WAN_2_1)
MODELS = {
    "wan-5b": SMALL,
    "wan-14b": LARGE,
    "wan-a14b": Wan("Wan A14B", (832, 480), 81, "wan-a14b-tiny", {}, WAN_2_1),
}


def transformer(model: Wan) -> Any:
    import diffusers

    of: Any = diffusers.WanTransformer3DModel
    return made(partial(of.from_config, model.config("transformer")))


def linked(folder: Path, at: Path) -> None:
    """The same files in another folder."""
    shutil.copytree(folder, at, copy_function=os.link)


def make(work: Path, names: Sequence[str], layers: int) -> None:
    """The folders of models that are not there yet."""
    for name in names:
        began = time.perf_counter()
        folder = work / name
        if not (folder / "model_index.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            if name == "wan-a14b":
                make(work, ("wan-14b",), layers)
                linked(work / "wan-14b", folder)
                linked(folder / "transformer", folder / "transformer_2")
                (folder / "model_index.json").unlink()
            else:
                make_parts(folder, MODELS[name])
            shutil.copy(FIXTURES / MODELS[name].fixture / "model_index.json", folder)
        shutil.rmtree(folder / "text_encoder", ignore_errors=True)
        linked(text_encoder(work, layers), folder / "text_encoder")
        tell(f"make {name}", time.perf_counter() - began, "s")


def make_parts(folder: Path, model: Wan) -> None:
    import diffusers

    vae: Any = diffusers.AutoencoderKLWan
    for part, build in (
        ("transformer", partial(transformer, model)),
        ("vae", partial(made, partial(vae.from_config, model.config("vae")))),
    ):
        module = build()
        write(folder / part, module, STEM)
        (folder / part / "config.json").write_text(module.to_json_string())
        del module
        free_memory()
    shutil.copytree(FIXTURES / "wan-tiny/tokenizer", folder / "tokenizer")
    shutil.copytree(FIXTURES / model.fixture / "scheduler", folder / "scheduler")


def text_encoder(work: Path, layers: int) -> Path:
    """The folder of the text encoder that all models share."""
    from transformers import UMT5Config, UMT5EncoderModel

    folder = work / f"umt5-{layers}"
    if folder.is_dir():
        return folder
    known = UMT5
    if ASKED.is_tiny:
        file = FIXTURES / "wan-tiny/text_encoder/config.json"
        known = json.loads(file.read_text(encoding="utf-8"))
    config = UMT5Config(**(known | {"num_layers": layers}))
    module = made(lambda: UMT5EncoderModel(config))
    # The same numbers as `shared`, which files have once.
    del module.encoder.embed_tokens
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    write(unfinished, module, "model")
    text = module.config.to_json_string(use_diff=False)
    (unfinished / "config.json").write_text(text)
    return unfinished.rename(folder)


def inputs(model: Wan, config: Any) -> dict[str, torch.Tensor]:
    """What the pipeline gives the transformer in a step of the film."""
    factor = model.config("vae").get("scale_factor_spatial", 8)
    (width, height), frames = film_of(model)
    latents, h, w = (frames - 1) // 4 + 1, height // factor, width // factor

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=ASKED.place, dtype=torch.bfloat16)

    # The 5B has a time of its own for each token.
    of_tokens = (1, latents * (h // 2) * (w // 2)) if model is SMALL else (1,)
    return {
        "hidden_states": draw(1, config.in_channels, latents, h, w),
        "timestep": torch.full(of_tokens, 637.0, device=ASKED.place),
        "encoder_hidden_states": draw(1, TOKENS, config.text_dim),
    }


def film_of(model: Wan) -> tuple[tuple[int, int], int]:
    """Size and frames of the film that a model is measured with."""
    return ((64, 32), 9) if ASKED.is_tiny else (model.size, model.frames)


@torch.no_grad()
def peers(names: Sequence[str], ways: Sequence[str]) -> None:
    torch.manual_seed(1)
    for name in names:
        model = MODELS[name]
        if name == "wan-a14b":
            continue
        guarded(model.step, partial(step_peer, model, ways))
        torch.compiler.reset()
        free_memory()
        if not ASKED.is_tiny:
            guarded(model.decode, partial(decode_peer, model))
            free_memory()


def as_loaded(module: Any) -> Any:
    """As `from_pretrained` in bf16: what the class names is in f32. Rotations are no parameters."""
    kept = set(module._keep_in_fp32_modules)
    for name, parameter in module.named_parameters():
        if kept & set(name.split(".")):
            parameter.data = parameter.data.float()
    known = module.config
    sizes = (known.attention_head_dim, known.patch_size, known.rope_max_seq_len)
    module.rope = type(module.rope)(*sizes).to(ASKED.place)
    return module


def step_peer(model: Wan, ways: Sequence[str]) -> None:
    module = as_loaded(transformer(model))
    given = inputs(model, module.config)
    found: dict[str, float] = {}
    for way in (one for one in WAYS if one in ways):
        guarded(f"{model.step}, {way}", partial(step_in, way, model, module, given, found))
    compiled = [ms for way, ms in found.items() if way != "eager"]
    if compiled:
        tell(model.step, min(compiled), "ms", who="diffusers compiled")


def step_in(
    way: str, model: Wan, module: Any, given: dict[str, torch.Tensor], found: dict[str, float]
) -> None:
    torch.compiler.reset()
    forward = module
    if way == "whole":
        forward = torch.compile(module, dynamic=False, backend=compiler())
    elif way == "blocks":
        compile_blocks(module)
    step = partial(forward, **given, return_dict=False)
    began = time.perf_counter()
    peak = peak_gib(step)
    first_s = round(time.perf_counter() - began, 1)
    found[way] = timed(step, 5)
    more = {"peak_gib": round(peak, 2), "first_s": first_s}
    tell(f"{model.step}, {way}", found[way], "ms", who=f"diffusers {way}", **more)


def decode_peer(model: Wan) -> None:
    seconds, peak = decoded(model.vae, *model.size, model.frames)
    tell(
        model.decode,
        seconds * 1e3,
        "ms",
        who="diffusers eager",
        peak_gib=round(peak / 2**30, 2),
    )


def film(
    served: full_size.Service,
    name: str,
    size: tuple[int, int],
    frames: int,
    steps: int,
    **options: Any,
) -> Any:
    """A film without guidance, of which a step is one pass; `name` may end with ` FORMAT`."""
    import moored

    name, _, quantized = name.partition(" ")
    formats = {part: quantized for part in parts_of(name)} if quantized else {}
    told: dict[str, Any] = {"true_guidance": 1.0, "output": "raw"}
    return served.client.generate_video(
        options.pop("prompt", PROMPT),
        model=moored.ModelRef(name, formats=formats) if formats else name,
        width=size[0],
        height=size[1],
        frames=frames,
        steps=steps,
        seed=1,
        **(told | options),
    )


def parts_of(name: str) -> tuple[str, ...]:
    """The components that are quantized here."""
    return ("transformer", "transformer_2") if name == "wan-a14b" else ("transformer",)


def steps(binary: Path, work: Path, names: Sequence[str]) -> None:
    """Ours, of which each figure has the name of the one beside it."""
    settings = "log.filter=info,timeline=debug"
    with full_size.Service(binary, work, names, settings).logged("steps") as service:
        for name in names:
            model = MODELS[name]
            for quantized in FORMATS:
                what = model.step + quantized
                make_film = partial(
                    film, service, name + quantized, *film_of(model), latent_only=True
                )
                if name == "wan-a14b":
                    guarded(what, lambda make_film=make_film: show(make_film(4)))
                else:
                    guarded(what, partial(tell_step, what, make_film, 1, 3))
            if name != "wan-a14b":
                whole = partial(film, service, name, *film_of(model), 1)
                guarded(model.decode, partial(tell_decode, model.decode, whole))


def main() -> None:
    parser = command_line(__doc__, "make,peers,steps", "peers and steps")
    parser.add_argument("--models", default="wan-5b,wan-14b")
    parser.add_argument("--umt5-layers", type=int, default=4)
    parser.add_argument("--ways", default="eager,blocks")
    parser.add_argument("--tiny", action="store_true")
    settings = parser.parse_args()
    begin(settings)
    binary, work = settings.binary, settings.work
    names = settings.models.split(",")
    parts = {
        "make": partial(make, work, names, settings.umt5_layers),
        "peers": partial(peers, names, settings.ways.split(",")),
        "steps": partial(steps, binary, work, names),
    }
    run_parts(parts, settings.parts.split(","))


if __name__ == "__main__":
    main()
