"""Measures films on a card, beside diffusers in the same run: steps, decodes, films on a full card.

    python tests/gpu/film.py --binary moored --work FOLDER --out film.json

It makes FramePack and HunyuanVideo in full size from random numbers (28 GB, which both transformers share;
LLaMA has one layer of those that are computed, unless `--llama` says how many), and needs torch, diffusers,
transformers, and what the Python client needs. `--parts` chooses among make, peers, steps, unload and held,
`--only` figures by a pattern of their names. One line of JSON for each figure, and all of them in the file,
of which `film_rows.py` makes the rows of docs/benchmarks/film.json.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import full_size
import torch
from full_size import (
    FIXTURES,
    Job,
    begin,
    command_line,
    compile_blocks,
    free_memory,
    guarded,
    made,
    peak_gib,
    picture,
    run_parts,
    show,
    small_film,
    tell,
    tell_decode,
    tell_left,
    tell_step,
    tell_whole,
    timed,
    write,
    write_index,
)
from start_picture import start_picture

MODELS = ("framepack", "hunyuan")
# Sizes and frames of HunyuanVideo, the steps of the shorter and of the longer job, and the runs of diffusers.
HUNYUAN = (
    ((832, 480), 49, (1, 4), 3),
    ((832, 480), 129, (1, 4), 2),
    ((1280, 720), 129, (1, 2), 1),
)
# Blocks that diffusers compiles by themselves; its class of FramePack names none.
BLOCKS = ["HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"]
# Of a step with attention in fp8.
FP8_ATTENTION = ", attention in fp8"
# What FramePack's transformer has beside HunyuanVideo's.
FRAMEPACK_ONLY = ("clean_x_embedder.", "image_projection.")


class Service(full_size.Service):
    """A running service of both models."""

    def __init__(self, binary: Path, work: Path, *settings: str) -> None:
        super().__init__(binary, work, MODELS, *settings)


def transformer(framepack: bool) -> torch.nn.Module:
    import diffusers

    if framepack:
        return made(
            lambda: diffusers.HunyuanVideoFramepackTransformer3DModel(
                has_image_proj=True, has_clean_x_embedder=True
            )
        )
    return made(diffusers.HunyuanVideoTransformer3DModel)


def make(work: Path, llama_layers: int) -> None:
    import diffusers
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        LlamaConfig,
        LlamaModel,
        SiglipVisionConfig,
        SiglipVisionModel,
    )

    began = time.perf_counter()
    folder = work / "framepack"
    module = transformer(framepack=True)
    stem = "diffusion_pytorch_model"
    files = write(folder / "transformer", module, stem, apart=FRAMEPACK_ONLY)
    (folder / "transformer/config.json").write_text(module.to_json_string())
    del module
    vae = made(diffusers.AutoencoderKLHunyuanVideo)
    write(folder / "vae", vae, "diffusion_pytorch_model")
    (folder / "vae/config.json").write_text(vae.to_json_string())
    llama = LlamaConfig(
        vocab_size=128_320,
        intermediate_size=14_336,
        num_hidden_layers=llama_layers,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position_embeddings=8192,
        torch_dtype="bfloat16",
    )
    clip = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12)
    siglip = SiglipVisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
    )
    for name, build, prefix in (
        ("text_encoder", lambda: LlamaModel(llama), ""),
        ("text_encoder_2", lambda: CLIPTextModel(clip), ""),
        ("image_encoder", lambda: SiglipVisionModel(siglip), ""),
    ):
        module = made(build)
        write(folder / name, module, "model", prefix)
        (folder / name / "config.json").write_text(module.config.to_json_string(use_diff=False))
        del module
    tiny = FIXTURES / "hunyuan-tiny"
    shutil.copytree(tiny / "tokenizer", folder / "tokenizer")
    shutil.copytree(FIXTURES / "flux-tiny/tokenizer", folder / "tokenizer_2")
    shutil.copytree(tiny / "scheduler", folder / "scheduler")
    (folder / "feature_extractor").mkdir()
    processor = {"size": {"height": 384, "width": 384}, "resample": 3}
    (folder / "feature_extractor/preprocessor_config.json").write_text(json.dumps(processor))
    index = {"_class_name": "HunyuanVideoFramepackPipeline"}
    (folder / "model_index.json").write_text(json.dumps(index))

    # Text to film: the same files, but for the shard of the transformer that only FramePack has.
    film = work / "hunyuan"
    for name in ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"):
        shutil.copytree(folder / name, film / name, copy_function=os.link)
    shared = {key: file for key, file in files.items() if not key.startswith(FRAMEPACK_ONLY)}
    (film / "transformer").mkdir()
    for file in set(shared.values()):
        os.link(folder / "transformer" / file, film / "transformer" / file)
    write_index(film / "transformer", stem, shared)
    with torch.device("meta"):
        config = diffusers.HunyuanVideoTransformer3DModel().to_json_string()
    (film / "transformer/config.json").write_text(config)
    (film / "model_index.json").write_text(json.dumps({"_class_name": "HunyuanVideoPipeline"}))
    tell("make", time.perf_counter() - began, "s")


def inputs(config: Any, size: tuple[int, int], frames: int, text: int) -> dict[str, torch.Tensor]:
    width, height = size

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return {
        "hidden_states": draw(1, 16, frames, height // 8, width // 8),
        "timestep": torch.tensor([637.5], device="cuda"),
        "encoder_hidden_states": draw(1, 256, config.text_embed_dim),
        "encoder_attention_mask": torch.tensor(
            [[1.0] * text + [0.0] * (256 - text)], device="cuda", dtype=torch.bfloat16
        ),
        "pooled_projections": draw(1, 768),
        "guidance": torch.tensor([6000.0], device="cuda", dtype=torch.bfloat16),
    }


@torch.no_grad()
def peers(text: int) -> None:
    torch.manual_seed(1)
    for name, peer in (
        ("step, FramePack", _framepack_peer),
        ("step, HunyuanVideo", _hunyuan_peer),
        ("decode", _decode_peer),
    ):
        guarded(name, partial(peer, text))
        free_memory()


def _compiled(framepack: bool) -> torch.nn.Module:
    """A transformer of diffusers, compiled block by block."""
    module = transformer(framepack)
    module._repeated_blocks = BLOCKS
    compile_blocks(module)
    return module


def _framepack_peer(text: int) -> None:
    module = _compiled(framepack=True)
    given = inputs(module.config, (640, 640), 9, text)
    counts = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 16}
    for name, count in counts.items():
        given[name] = torch.randn(1, 16, count, 80, 80, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(0, 38).split([1, 9, 9, 1, 2, 16])
    given |= {
        "image_embeds": torch.randn(1, 729, 1152, device="cuda", dtype=torch.bfloat16),
        "indices_latents": positions[2],
        "indices_latents_clean": torch.cat([positions[0], positions[3]]),
        "indices_latents_history_2x": positions[4],
        "indices_latents_history_4x": positions[5],
    }
    ms = timed(lambda: module(**given, return_dict=False), 4)
    tell("step, FramePack 640x640", ms, "ms", who="diffusers compiled")


def hunyuan_step(size: tuple[int, int], frames: int) -> str:
    return f"step, HunyuanVideo {size[0]}x{size[1]}, {frames} frames"


def _hunyuan_peer(text: int) -> None:
    module = _compiled(framepack=False)
    for size, frames, _, runs in HUNYUAN:
        given = inputs(module.config, size, (frames - 1) // 4 + 1, text)
        ms = timed(lambda given=given: module(**given, return_dict=False), runs)
        tell(hunyuan_step(size, frames), ms, "ms", who="diffusers compiled")


def _decode_peer(_text: int) -> None:
    import diffusers

    vae = made(diffusers.AutoencoderKLHunyuanVideo)
    for width, height in ((832, 480), (640, 640)):
        shape = (1, 16, 5, height // 8, width // 8)
        latents = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        decode = partial(vae.decode, latents, return_dict=False)
        ms, peak = timed(decode, 3), peak_gib(decode)
        name = f"decode of 5 latents, {width}x{height}"
        tell(name, ms, "ms", who="diffusers eager", peak_gib=round(peak, 2))


def film(
    service: Service, model: str, size: tuple[int, int], frames: int, steps: int, **options: Any
) -> Any:
    """A film; `model` may end with `+` and a format for its transformer."""
    import moored

    name, _, quantized = model.partition("+")
    formats = {"transformer": quantized} if quantized else {}
    if name == "framepack":
        options["init_image"] = start_picture(size)
    return service.client.generate_video(
        "a red circle on the left of a blue square",
        model=moored.ModelRef(name, formats=formats),
        width=size[0],
        height=size[1],
        frames=frames,
        steps=steps,
        seed=1,
        **options,
    )


def steps(binary: Path, work: Path) -> None:
    with Service(binary, work, "log.filter=info,timeline=debug").logged("steps") as service:
        for name, model in (
            ("", "framepack"),
            (" fp8", "framepack+fp8"),
            (" int8", "framepack+int8"),
            (" nf4", "framepack+nf4"),
        ):
            what = f"step, FramePack 640x640{name}"
            make = partial(film, service, model, (640, 640), 37)
            guarded(what, partial(tell_step, what, make, 1, 4))
        for size, frames, (few, many), _ in HUNYUAN:
            for name, model in (("", "hunyuan"), (" fp8", "hunyuan+fp8")):
                what = f"{hunyuan_step(size, frames)}{name}"
                make = partial(film, service, model, size, frames, latent_only=True)
                guarded(what, partial(tell_step, what, make, few, many))
            for name, model in (("", "hunyuan"), (" fp8", "hunyuan+fp8")):
                what = f"{hunyuan_step(size, frames)}{name}{FP8_ATTENTION}"
                asked = {"latent_only": True, "fp8_attention": True}
                make = partial(film, service, model, size, frames, **asked)
                guarded(what, partial(tell_step, what, make, few, many))
        for name, model in (("", "framepack"), (" fp8", "framepack+fp8")):
            what = f"step, FramePack 640x640{name}{FP8_ATTENTION}"
            make = partial(film, service, model, (640, 640), 37, fp8_attention=True)
            guarded(what, partial(tell_step, what, make, 1, 4))
        guarded("step cache", partial(left_out, service))
        for size in ((832, 480), (640, 640)):
            what = f"decode of 5 latents, {size[0]}x{size[1]}"
            guarded(
                what, partial(tell_decode, what, partial(film, service, "hunyuan", size, 17, 1))
            )
        guarded("film", lambda: show(film(service, "framepack", (640, 640), 109, 2)))


def left_out(service: Service) -> None:
    """What a pass takes that is left out: the error is so large that only the first is computed whole."""
    (size, frames, *_) = HUNYUAN[0]
    what = f"{hunyuan_step(size, frames)}, left out"
    make = partial(film, service, "hunyuan", size, frames, step_cache=1.0, latent_only=True)
    tell_step(what, make, 2, 8)


def unload(binary: Path, work: Path) -> None:
    """What is left on the card after films and pictures, when everything is unloaded."""
    with Service(binary, work).logged("unload") as service:

        def of_framepack(preset: str) -> Job:
            return partial(film, service, f"framepack{preset}", (320, 320), 37, 1)

        def mixed(number: int) -> Job:
            if number % 10 == 9:
                return of_framepack(("", "+fp8", "+int8", "+nf4")[number // 10 % 4])
            return partial((small_film, picture)[number % 2], service, number)

        first = (of_framepack(""), partial(small_film, service, 0), partial(picture, service, 0))
        again = [of_framepack(preset) for preset in ("+fp8", "+int8", "+nf4")]
        what = "bytes left after unloading, 50 mixed films and pictures"
        tell_left(service, first, again, mixed, what)


# GiB that the other program leaves, and the formats; 12.4 GiB are the weights in int8 and fp8.
BEHIND = (
    (24.0, ("shared", "exclusive"), ("int8", "fp8", "nf4")),
    (12.0, ("shared", "exclusive"), ("nf4",)),
    (16.0, ("shared", "exclusive"), ("fp8",)),
    (12.0, ("shared",), ("int8", "fp8")),
)


def held(binary: Path, work: Path) -> None:
    """Films behind a program that leaves so much of the card."""
    for left_gib, policies, formats in BEHIND:
        free = torch.cuda.mem_get_info()[0]
        held = torch.empty(int(free - left_gib * 2**30), dtype=torch.uint8, device="cuda")
        for policy in policies:
            settings = (f"cards.policy={policy}", "queue.patience_foreign=2s")
            log = f"held-{left_gib:g}-{policy}-{formats[0]}"
            started = Service(binary, work, *settings, "log.filter=info,timeline=debug")
            with started.logged(log) as service:
                for name in formats:
                    what = f"film 640x640, 2 sections, {name}, {left_gib:g} GiB left, {policy}"
                    make = partial(film, service, f"framepack+{name}", (640, 640), 73)
                    guarded(what, partial(tell_whole, what, partial(make, 1), partial(make, 2)))
        del held
        torch.cuda.empty_cache()


def main() -> None:
    names = "peers, steps and held"
    parser = command_line(__doc__, "make,peers,steps,unload,held", names)
    parser.add_argument("--llama", type=int, default=3)
    settings = parser.parse_args()
    begin(settings)
    binary, work = settings.binary, settings.work
    parts = {
        "make": partial(make, work, settings.llama),
        "peers": partial(peers, 16),
        "steps": partial(steps, binary, work),
        "unload": partial(unload, binary, work),
        "held": partial(held, binary, work),
    }
    run_parts(parts, settings.parts.split(","))


if __name__ == "__main__":
    main()
