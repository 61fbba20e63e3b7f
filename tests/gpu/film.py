"""Measures films on a card, beside diffusers in the same run: steps, decodes, and whole films behind a hog.

    python tests/gpu/film.py --binary moored --work FOLDER --out film.json

It makes FramePack and HunyuanVideo in full size from random numbers (54 GB; LLaMA has one layer of those
that are computed, unless `--llama` says how many), and needs torch, diffusers, transformers, and what the
Python client needs. `--parts` chooses among make, peers, steps and hog. One line of JSON for each figure, a
table last.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client-py/src"))

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

FIXTURES = ROOT / "service/pipelines/fixtures"
SHARD_BYTES = 2 << 30
FIGURES: list[dict[str, Any]] = []


def tell(measure: str, figure: float, unit: str, **more: object) -> None:
    FIGURES.append({"measure": measure, "figure": round(figure, 4), "unit": unit, **more})
    print(json.dumps(FIGURES[-1]), flush=True)


def made(build: Any) -> torch.nn.Module:
    """A module on the card in bf16 with weights of N(0, 0.02), norms of ones."""
    with torch.device("meta"):
        module = build().to(torch.bfloat16)
    module = module.to_empty(device="cuda").eval()
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            if name.endswith("weight") and parameter.ndim > 1:
                parameter.normal_(0, 0.02)
            elif name.endswith("weight"):
                parameter.fill_(1)
            else:
                parameter.zero_()
    for name, buffer in module.named_buffers():
        if "position_ids" in name:
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
    return module


def write(folder: Path, module: torch.nn.Module, name: str, prefix: str = "") -> None:
    """A component in shards, as transformers and diffusers name them."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for key, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        size += tensor.nbytes
        if size > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = tensor.nbytes
        shards[-1][prefix + key] = tensor
    files = {}
    for number, shard in enumerate(shards, 1):
        file = f"{name}-{number:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file = f"{name}.safetensors"
        save_file({key: tensor.cpu().contiguous() for key, tensor in shard.items()}, folder / file)
        files |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": files}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index))


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
    write(folder / "transformer", module, "diffusion_pytorch_model")
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

    # Text to film: the same files, but for the transformer.
    film = work / "hunyuan"
    for name in ("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"):
        shutil.copytree(folder / name, film / name, copy_function=os.link)
    module = transformer(framepack=False)
    write(film / "transformer", module, "diffusion_pytorch_model")
    (film / "transformer/config.json").write_text(module.to_json_string())
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


def timed(work: Any, runs: int) -> float:
    work()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e3


@torch.no_grad()
def peers(text: int) -> None:
    torch.manual_seed(1)
    for peer in (_framepack_peer, _hunyuan_peer, _decode_peer):
        peer(text)
        gc.collect()
        torch.cuda.empty_cache()


def _framepack_peer(text: int) -> None:
    module = transformer(framepack=True)
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
    ms = timed(lambda: module(**given, return_dict=False), 3)
    tell("step, FramePack 640x640", ms, "ms", who="diffusers eager")


def _hunyuan_peer(text: int) -> None:
    module = transformer(framepack=False)
    for frames in (49, 129):
        given = inputs(module.config, (832, 480), (frames - 1) // 4 + 1, text)
        ms = timed(lambda given=given: module(**given, return_dict=False), 2)
        tell(f"step, HunyuanVideo 832x480, {frames} frames", ms, "ms", who="diffusers eager")


def _decode_peer(_text: int) -> None:
    import diffusers

    vae = made(diffusers.AutoencoderKLHunyuanVideo)
    for width, height in ((832, 480), (640, 640)):
        shape = (1, 16, 5, height // 8, width // 8)
        latents = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        ms = timed(lambda latents=latents: vae.decode(latents, return_dict=False), 3)
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        name = f"decode of 5 latents, {width}x{height}"
        tell(name, ms, "ms", who="diffusers eager", peak_gib=round(peak, 2))


class Service:
    """A running service, with a client of it."""

    def __init__(self, binary: Path, work: Path, *settings: str) -> None:
        import moored

        models = work / "models"
        models.mkdir(exist_ok=True)
        for name in ("framepack", "hunyuan"):
            if (work / name).is_dir() and not (models / name).exists():
                (models / name).symlink_to(work / name)
        words = [str(binary), "serve", "--listen", "127.0.0.1:0", "--end-with-stdin"]
        words += ["--state", str(work / "state"), "--models", str(models)]
        for setting in settings:
            words += ["--set", setting]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.log: list[str] = []
        address = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r"moored is listening address=(\S+)", line)
            if found:
                address = found[1]
                break
        if not address:
            raise RuntimeError("the service did not start:\n" + "".join(self.log))
        import threading

        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        self.client = moored.Client(address)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def start_picture(size: tuple[int, int]) -> Any:
    import numpy as np

    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8)


def film(service: Service, model: str, size: tuple[int, int], frames: int, steps: int) -> Any:
    options: dict[str, Any] = {}
    if model.startswith("framepack"):
        options["init_image"] = start_picture(size)
    return service.client.generate_video(
        "a red circle on the left of a blue square",
        model=model,
        width=size[0],
        height=size[1],
        frames=frames,
        steps=steps,
        seed=1,
        **options,
    )


def run_ms(result: Any, name: str) -> list[tuple[float, Any]]:
    return [(stage.run_ms, stage) for stage in result.report.stages if stage.name == name]


def steps_of(service: Service, model: str, size: tuple[int, int], frames: int, what: str) -> None:
    few, many = (
        run_ms(film(service, model, size, frames, count), "denoise")[-1][0] for count in (2, 6)
    )
    tell(what, (many - few) / 4, "ms", who="moored")


def steps(binary: Path, work: Path) -> None:
    service = Service(binary, work)
    try:
        for name, model in (
            ("", "framepack"),
            (" fp8", "framepack+fp8"),
            (" int8", "framepack+8-bit"),
            (" nf4", "framepack+4-bit"),
        ):
            steps_of(service, model, (640, 640), 37, f"step, FramePack 640x640{name}")
        for frames in (49, 129):
            what = f"step, HunyuanVideo 832x480, {frames} frames"
            steps_of(service, "hunyuan", (832, 480), frames, what)
        for size in ((832, 480), (640, 640)):
            film(service, "hunyuan", size, 17, 1)
            result = film(service, "hunyuan", size, 17, 1)
            ms, stage = run_ms(result, "decode")[-1]
            more = {
                "peak_gib": round(stage.peak_scratch_bytes / 2**30, 2),
                "predicted_gib": round(stage.predicted_scratch_bytes / 2**30, 2),
                "attention": stage.attention,
            }
            name = f"decode of 5 latents, {size[0]}x{size[1]}"
            tell(name, ms, "ms", who="moored", **more)
        result = film(service, "framepack", (640, 640), 109, 2)
        for stage in result.report.stages:
            print(stage.name, round(stage.run_ms), round(stage.move_ms), stage.chunking, flush=True)
    except BaseException:
        print("".join(service.log[-40:]))
        raise
    finally:
        service.stop()


def hog(binary: Path, work: Path, left_gib: float) -> None:
    """Films behind a program that leaves so much of the card."""
    total = torch.cuda.mem_get_info()[0]
    held = torch.empty(int(total - left_gib * 2**30), dtype=torch.uint8, device="cuda")
    try:
        for policy in ("shared", "exclusive"):
            service = Service(binary, work, f"cards.policy={policy}")
            try:
                for preset in ("8-bit", "fp8", "4-bit"):
                    model = f"framepack+{preset}"
                    what = (
                        f"film 640x640, 2 sections of 3 steps, {preset}, {left_gib:g} GiB, {policy}"
                    )
                    try:
                        film(service, model, (640, 640), 73, 1)
                        began = time.perf_counter()
                        result = film(service, model, (640, 640), 73, 3)
                        seconds = time.perf_counter() - began
                        kinds = sorted({stage.chunking for stage in result.report.stages})
                        tell(what, seconds, "s", who="moored", chunking=kinds)
                    except Exception as error:  # noqa: BLE001
                        print(f"{what}: {error}", flush=True)
            finally:
                service.stop()
    finally:
        del held
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--llama", type=int, default=3)
    parser.add_argument("--parts", default="make,peers,steps,hog")
    settings = parser.parse_args()
    settings.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    for part in settings.parts.split(","):
        began = time.perf_counter()
        try:
            match part:
                case "make":
                    make(settings.work, settings.llama)
                case "peers":
                    peers(text=16)
                case "steps":
                    steps(settings.binary, settings.work)
                case "hog":
                    for left in (24.0, 12.0):
                        hog(settings.binary, settings.work, left)
        except Exception as error:  # noqa: BLE001
            print(f"{part} failed: {error!r}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        print(f"# {part}: {time.perf_counter() - began:.1f} s", flush=True)
        settings.out.write_text(json.dumps(FIGURES, indent=1) + "\n")
    for each in FIGURES:
        print(
            f"{each.get('who', ''):16} {each['measure']:60} {each['figure']:10.1f} {each['unit']}"
        )


if __name__ == "__main__":
    main()
