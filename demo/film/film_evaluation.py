"""The film model as a diffusers folder: writing it, and judging the films that it makes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import film_data
import film_judge
import film_networks
import films
import numpy as np
import torch
from diffusers import HunyuanVideoFramepackPipeline
from film_networks import Filmer, make_scheduler, make_vae
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, SiglipImageProcessor

WINDOW_FRAMES = 4 * (films.WINDOW - 1) + 1
"""Frames that the pipeline counts for a section when it is asked for a number of frames."""
DEFAULTS = {
    "steps": film_networks.STEPS,
    "guidance": film_networks.GUIDANCE,
    "width": films.FRAME_SIZE,
    "height": films.FRAME_SIZE,
    "frames": films.SECTION_FRAMES * 3 + 1,
    "frames_per_second": films.FRAMES_PER_SECOND,
}


def _rename(file: Path, prefix: str, own: tuple[str, ...] = ()) -> None:
    """Give a component's tensors the names that published checkpoints have.

    Newer transformers drops the prefix on saving; names that begin with one of `own` never had it.
    """
    named = {
        k if k.startswith((prefix, *own)) else prefix + k: v for k, v in load_file(file).items()
    }
    save_file(named, file, metadata={"format": "pt"})


def _name_classes_plainly(out: Path) -> None:
    """Undo the class names that depend on the version of transformers and on what is installed."""
    plain = {
        "SiglipImageProcessorPil": "SiglipImageProcessor",
        "TokenizersBackend": "PreTrainedTokenizerFast",
    }
    for file in (out / "model_index.json", out / "feature_extractor" / "preprocessor_config.json"):
        text = file.read_text()
        for changed, name in plain.items():
            text = text.replace(changed, name)
        file.write_text(text)


def export(work: Path, out: Path) -> None:
    """Write the averaged weights as a HunyuanVideoFramepackPipeline folder, in bf16."""
    sizes = film_data.write_tokenizers(out)
    trained = torch.load(work / "vae.pt", map_location="cpu")
    vae = make_vae()
    vae.load_state_dict(trained["vae"])
    vae.register_to_config(scaling_factor=round(trained["scaling"], 4))
    filmer = Filmer(*sizes)
    filmer.load_state_dict(torch.load(work / "flow-average.pt", map_location="cpu"))
    side = films.FRAME_SIZE
    pipeline = HunyuanVideoFramepackPipeline(
        text_encoder=filmer.llama.bfloat16(),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(out / "tokenizer"),
        transformer=filmer.transformer.bfloat16(),
        vae=vae.bfloat16(),
        scheduler=make_scheduler(),
        text_encoder_2=filmer.clip.bfloat16(),
        tokenizer_2=CLIPTokenizer.from_pretrained(out / "tokenizer_2"),
        image_encoder=filmer.siglip.bfloat16(),
        feature_extractor=SiglipImageProcessor(size={"height": side, "width": side}),
    )
    pipeline.save_pretrained(out, safe_serialization=True)
    # save_pretrained writes its own form of the tokenizers: keep the classic files.
    for name in ("tokenizer", "tokenizer_2"):
        shutil.rmtree(out / name)
    film_data.write_tokenizers(out)
    _name_classes_plainly(out)
    _rename(out / "text_encoder_2" / "model.safetensors", "text_model.")
    _rename(out / "image_encoder" / "model.safetensors", "vision_model.")
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)
    (out / "moored.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
    for name, module in (("vae", vae), *filmer.shipped()):
        count = sum(p.numel() for p in module.parameters())
        print(json.dumps({"part": name, "parameters": count}))
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(json.dumps({"bytes": total}), flush=True)


def generate(
    pipeline: HunyuanVideoFramepackPipeline,
    prompts: list[str],
    starts: list[Image.Image],
    seeds: list[int],
    steps: int,
    sections: int,
) -> np.ndarray:
    """The films of some prompts, uint8 [films, 36 sections + 1, 64, 64, 3]."""
    shown = pipeline(
        image=starts,
        prompt=prompts,
        width=films.FRAME_SIZE,
        height=films.FRAME_SIZE,
        num_frames=WINDOW_FRAMES * sections,
        num_inference_steps=steps,
        guidance_scale=film_networks.GUIDANCE,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="np",
    ).frames
    return np.round(np.asarray(shown) * 255).astype(np.uint8)


def contact_sheet(shown: list[np.ndarray], columns: int = 7) -> Image.Image:
    """One picture that shows frames of all films, a film a row."""
    rows = []
    for frames in shown:
        picked = np.linspace(0, len(frames) - 1, columns).round().astype(int)
        rows.append(
            np.concatenate([np.pad(frames[i], ((1, 1), (1, 1), (0, 0))) for i in picked], 1)
        )
    return Image.fromarray(np.concatenate(rows))


def evaluate(
    out: Path,
    results: Path,
    device: str,
    rows: list[dict[str, Any]],
    *,
    steps: int,
    sections: int,
    batch: int,
    shuffled: bool,
) -> dict[str, Any]:
    """Make the films of held-out prompts with diffusers in f32 and let the judge count the right ones.

    With `shuffled`, each start picture gets the next row's prompt, and is judged against its own row.
    """
    torch.backends.cudnn.allow_tf32 = False
    pipeline = HunyuanVideoFramepackPipeline.from_pretrained(out, torch_dtype=torch.float32)
    pipeline.to(device).set_progress_bar_config(disable=True)
    wanted = [films.Film.from_json(row["film"]) for row in rows]
    prompts = [row["prompt"] for row in rows]
    if shuffled:
        prompts = prompts[1:] + prompts[:1]
    began, shown = time.monotonic(), []
    for first in range(0, len(rows), batch):
        part = range(first, min(first + batch, len(rows)))
        starts = [Image.fromarray(films.draw(wanted[i], 0.0)) for i in part]
        shown += list(
            generate(pipeline, [prompts[i] for i in part], starts, list(part), steps, sections)
        )
    seconds = time.monotonic() - began
    name = f"{'shuffled' if shuffled else 'heldout'}-{steps}-{sections}"
    contact_sheet(shown[:24]).save(results / f"{name}.png")
    report = film_judge.judge_films(shown, wanted)
    (results / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"{name}: {seconds / max(len(rows), 1):.2f} s a film")
    film_judge.print_summary(report["summary"])
    return report
