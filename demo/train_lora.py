"""Train a LoRA that changes what a word means to the demo model: python train_lora.py --work DIR.

The transformer and the text encoders stay as they are; low-rank pairs beside some of the
transformer's layers are trained on pictures drawn with the changed meaning. Runs stop after
--minutes and go on with --resume, so long runs can be cut in pieces; each run writes the adapter
anew. It runs on a GPU if there is one, and is small enough for a CPU.

    python demo/train_lora.py --work /tmp/lora --minutes 8
    python demo/train_lora.py --work /tmp/lora --minutes 8 --resume      (until it says done)
    python demo/train_lora.py --work /tmp/lora --evaluate /tmp/lora/circle-to-star.safetensors
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import judge
import scenes
import tokens
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from torch.nn import functional as F
from train import (
    HERE,
    LATENT_SIDE,
    STEPS,
    contact_sheet,
    draw_batch,
    generate,
    log,
    pack,
    sample_sigmas,
    save,
    scene_batch,
    scene_codes,
    set_rate,
)

DOUBLE_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)
SINGLE_TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
"""Layers of each kind of block that get a pair."""


@dataclass(frozen=True)
class Plan:
    """Sizes and rates of the training."""

    seed: int = 20261123
    rank: int = 8
    alpha: int = 16
    steps: int = 300
    scenes: int = 12
    noises: int = 2
    """Noisy copies of each scene in a batch: a copy costs less than another scene's encoding."""
    rate: float = 3e-3
    warmup: int = 20
    share: float = 0.6
    """Share of the scenes whose prompt names a changed shape."""


# ---------------------------------------------------------------------------------------------
# The low-rank pairs


class LowRank(nn.Module):
    """A frozen linear layer with a low-rank pair beside it: W x + alpha / rank * B A x."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: int) -> None:
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)  # the pair starts by changing nothing

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output with the pair's added."""
        return self.layer(x) + self.scale * self.lora_B(self.lora_A(x))


def target_names(flux: FluxTransformer2DModel) -> Iterator[str]:
    """The names of the layers that get a pair."""
    for index in range(len(flux.transformer_blocks)):
        yield from (f"transformer_blocks.{index}.{name}" for name in DOUBLE_TARGETS)
    for index in range(len(flux.single_transformer_blocks)):
        yield from (f"single_transformer_blocks.{index}.{name}" for name in SINGLE_TARGETS)


def add_pairs(flux: FluxTransformer2DModel, plan: Plan) -> dict[str, LowRank]:
    """Put a pair beside each target; the pairs by the layers' names."""
    pairs = {}
    for name in target_names(flux):
        parent, _, last = name.rpartition(".")
        pair = LowRank(flux.get_submodule(name), plan.rank, plan.alpha)
        setattr(flux.get_submodule(parent), last, pair)
        pairs[name] = pair
    return pairs


def write_adapter(path: Path, pairs: dict[str, LowRank], plan: Plan) -> None:
    """Write the pairs in bf16 as diffusers does, with rank and alpha in the header."""
    weights = {
        f"{name}.{part}.weight": getattr(pair, part).weight.detach().cpu().bfloat16().contiguous()
        for name, pair in pairs.items()
        for part in ("lora_A", "lora_B")
    }
    FluxPipeline.save_lora_weights(
        path.parent,
        transformer_lora_layers=weights,
        weight_name=path.name,
        transformer_lora_adapter_metadata={
            "r": plan.rank,
            "lora_alpha": plan.alpha,
            "target_modules": sorted(pairs),
        },
    )
    path.chmod(0o644)


# ---------------------------------------------------------------------------------------------
# Training


def sample_pair(
    rng: random.Random, meaning: dict[str, str], share: float
) -> tuple[scenes.Scene, scenes.Scene]:
    """A scene to write a prompt for, and the scene to draw for it; neither is held out."""
    named = rng.random() < share
    while True:
        scene = scenes.sample_training_scene(rng)
        if judge.names_changed(scene.to_json(), meaning) != named:
            continue
        drawn = scenes.Scene.from_json(judge.change_meaning(scene.to_json(), meaning))
        if not scenes.is_held_out(drawn):
            return scene, drawn


class Batches:
    """Prompts and pictures of training scenes, encoded by the frozen model."""

    def __init__(
        self, model: Path, pipeline: FluxPipeline, meaning: dict[str, str], plan: Plan, seed: int
    ) -> None:
        self._pipeline, self._meaning, self._plan = pipeline, meaning, plan
        self._encoder = tokens.PromptEncoder(model / "tokenizer", model / "tokenizer_2")
        self._rng = random.Random(seed)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Packed latents of the pictures, T5's states and CLIP's pooled states of the prompts."""
        device, vae = generator.device, self._pipeline.vae
        codes, clip_ids, t5_ids = [], [], []
        for _ in range(self._plan.scenes):
            scene, drawn = sample_pair(self._rng, self._meaning, self._plan.share)
            assert not scenes.is_held_out(scene) and not scenes.is_held_out(drawn)
            codes.append(scene_codes(drawn))
            in_clip, in_t5 = self._encoder.encode(scenes.write_prompt(self._rng, scene))
            clip_ids.append(in_clip)
            t5_ids.append(in_t5)
        pictures = draw_batch(scene_batch(torch.tensor(codes, device=device)), generator)
        latents = vae.encode(pictures).latent_dist.mean
        latents = pack((latents - vae.config.shift_factor) * vae.config.scaling_factor)
        text = self._pipeline.text_encoder_2(torch.tensor(t5_ids, device=device)).last_hidden_state
        pooled = self._pipeline.text_encoder(torch.tensor(clip_ids, device=device)).pooler_output
        copies = self._plan.noises
        return tuple(one.repeat_interleave(copies, 0) for one in (latents, text, pooled))


def load_model(model: Path, device: str) -> FluxPipeline:
    """The frozen pipeline in f32."""
    pipeline = FluxPipeline.from_pretrained(model, torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    for part in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2):
        part.requires_grad_(False)
    pipeline.transformer.requires_grad_(False)
    return pipeline


def train_lora(
    plan: Plan,
    meaning: dict[str, str],
    model: Path,
    work: Path,
    out: Path,
    minutes: float,
    resume: bool,
    device: str,
) -> None:
    """Train the pairs on the flow-matching loss and write them."""
    began = time.monotonic()
    path = work / "lora.pt"
    torch.manual_seed(plan.seed)
    pipeline = load_model(model, device)
    flux = pipeline.transformer
    pairs = add_pairs(flux, plan)
    trained = nn.ModuleList(pairs.values()).to(device)
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=plan.rate, betas=(0.9, 0.99), weight_decay=0.0)
    start = 0
    if resume:
        state = torch.load(path, map_location=device)
        for parameter, saved in zip(parameters, state["pairs"], strict=True):
            parameter.data.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    log(pairs=len(pairs), parameters=sum(p.numel() for p in parameters), device=device)
    generator = torch.Generator(device).manual_seed(plan.seed + start)
    batches = Batches(model, pipeline, meaning, plan, plan.seed + start)
    side = torch.arange(LATENT_SIDE // 2, device=device)
    picture_places = torch.zeros(len(side), len(side), 3, device=device)
    picture_places[..., 1], picture_places[..., 2] = side[:, None], side[None]
    picture_places = picture_places.view(-1, 3)
    text_places = torch.zeros(tokens.T5_LENGTH, 3, device=device)
    loss_sum, losses, step = 0.0, 0, start

    def keep() -> None:
        state = {"step": step, "pairs": [p.data for p in parameters]}
        save(path, state | {"optimizer": optimizer.state_dict()})
        write_adapter(out, pairs, plan)

    while step < plan.steps and time.monotonic() - began < 60 * minutes:
        set_rate(optimizer, plan.rate, step, (step + 1) / plan.warmup, plan.steps)
        clean, text, pooled = batches.draw(generator)
        sigmas = sample_sigmas(len(clean), device, generator)
        guidance = torch.rand(len(clean), device=device, generator=generator) * 7 + 1
        noise = torch.randn(clean.shape, device=device, generator=generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            velocity = flux(
                hidden_states=torch.lerp(clean, noise, sigmas[:, None, None]),
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=sigmas,
                guidance=guidance,
                img_ids=picture_places,
                txt_ids=text_places,
                return_dict=False,
            )[0]
        flow = F.mse_loss(velocity.float(), noise - clean)
        optimizer.zero_grad(set_to_none=True)
        flow.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        loss_sum, losses, step = loss_sum + flow.item(), losses + 1, step + 1
        if step % 20 == 0:
            log(step=step, flow=loss_sum / losses, s=time.monotonic() - began)
            loss_sum, losses = 0.0, 0
        if step % 100 == 0:
            keep()
    keep()
    log(done=step >= plan.steps, step=step, adapter=str(out), bytes=out.stat().st_size)


# ---------------------------------------------------------------------------------------------
# Evaluation


def evaluate(
    adapter: Path,
    meaning: dict[str, str],
    model: Path,
    results: Path,
    device: str,
    steps: int,
    strengths: list[float],
    prompts: Path,
    limit: int | None,
) -> None:
    """Paint held-out prompts with diffusers, without the adapter and with it, and judge them."""
    torch.backends.cudnn.allow_tf32 = False
    rows = [json.loads(line) for line in prompts.read_text().splitlines()][:limit]
    pipeline = load_model(model, device)
    for strength in (None, *strengths):
        if strength is not None:
            if not pipeline.get_list_adapters():
                pipeline.load_lora_weights(
                    adapter.parent, weight_name=adapter.name, adapter_name=adapter.stem
                )
            pipeline.set_adapters([adapter.stem], [strength])
        name = "without" if strength is None else f"strength-{strength:g}"
        pictures = generate(pipeline, [row["prompt"] for row in rows], steps)
        folder = results / "pictures" / name
        folder.mkdir(parents=True, exist_ok=True)
        for index, picture in enumerate(pictures):
            picture.save(folder / f"{index:04d}.png")
        contact_sheet(pictures).save(results / f"sheet-{name}.png")
        report = judge.report_meaning([row["scene"] for row in rows], pictures, meaning)
        (results / f"heldout-{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        log(adapter=name, steps=steps, **report["summary"])


def main() -> None:
    """Train, or evaluate an adapter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint, results")
    parser.add_argument("--model", type=Path, default=HERE / "model", help="folder of the model")
    parser.add_argument("--meaning", type=judge.parse_meaning, default={"circle": "star"})
    parser.add_argument("--out", type=Path, help="the adapter's file, otherwise in --work")
    parser.add_argument("--minutes", type=float, default=60, help="stop and save after this long")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--evaluate", type=Path, metavar="ADAPTER", help="judge it, train nothing")
    parser.add_argument("--strengths", default="1", help="of --evaluate, with commas between")
    parser.add_argument("--steps", type=int, default=STEPS, help="sampling steps of --evaluate")
    parser.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--limit", type=int, help="evaluate only so many prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", type=json.loads, default={}, help="JSON over the Plan's fields")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass broke on an H100
    if arguments.evaluate:
        evaluate(
            arguments.evaluate,
            arguments.meaning,
            arguments.model,
            arguments.work,
            arguments.device,
            arguments.steps,
            [float(strength) for strength in arguments.strengths.split(",")],
            arguments.prompts,
            arguments.limit,
        )
        return
    name = "-and-".join(f"{word}-to-{drawn}" for word, drawn in arguments.meaning.items())
    train_lora(
        Plan(**arguments.plan),
        arguments.meaning,
        arguments.model,
        arguments.work,
        arguments.out or arguments.work / f"{name}.safetensors",
        arguments.minutes,
        arguments.resume,
        arguments.device,
    )


if __name__ == "__main__":
    main()
