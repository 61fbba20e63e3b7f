"""Make the film model from nothing: python demo/film/train_film.py --work DIR --stage STAGE.

One GPU, no downloads; the films and prompts are drawn here. Each stage stops after --minutes and goes on
from its checkpoint in the work folder when called again; its learning rate falls to zero over the minutes
that the plan gives it, whatever the pieces. The decoder and the flow stages may run side by side:

    python demo/film/train_film.py --work /tmp/film --stage vae
    python demo/film/train_film.py --work /tmp/film --stage decoder
    python demo/film/train_film.py --work /tmp/film --stage flow --minutes 5     (again until it says done)
    python demo/film/train_film.py --work /tmp/film --stage export --out demo/film/model
    python demo/film/train_film.py --work /tmp/film --stage evaluate --out demo/film/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import film_data
import film_networks
import torch
from film_autoencoder import train_decoder, train_vae
from film_evaluation import evaluate, export
from film_networks import Filmer, make_vae, speed_up
from film_training import (
    Clock,
    Plan,
    log,
    read_moments,
    restore_moments,
    save,
    set_rate,
)
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
STAGES = ("vae", "decoder", "flow", "export", "evaluate")


def sample_sigmas(source: film_data.FilmSource, count: int) -> Tensor:
    """Noise levels: half uniform, half logit-normal, shifted as the scheduler shifts them."""
    uniform, normal = source.rand(count), source.randn(count).sigmoid()
    even = torch.arange(count, device=uniform.device) % 2 == 0
    level, shift = torch.where(even, uniform, normal), film_networks.SHIFT
    return shift * level / (1 + (shift - 1) * level)


def load_flow(work: Path) -> dict[str, Any]:
    """The flow stage's checkpoint, which lies in several files; step 0 if there is none."""
    if not (work / "flow.pt").exists():
        return {"step": 0, "spent": 0.0}
    state = torch.load(work / "flow.pt", map_location="cpu")
    for name in ("average", "moment1", "moment2"):
        if (work / f"flow-{name}.pt").exists():
            state[name] = torch.load(work / f"flow-{name}.pt", map_location="cpu")
    return state


def train_flow(
    plan: Plan, work: Path, minutes: float, last: bool, device: str, compiled: bool
) -> None:
    """Train the encoders and the transformer on the flow-matching loss of single sections."""
    state = load_flow(work)
    step = start = fresh = state["step"]  # fresh: where the optimizer's moments began
    clock = Clock(state["spent"], plan.flow_minutes, minutes, last)
    torch.manual_seed(plan.seed + start)
    generator = torch.Generator(device).manual_seed(plan.seed + 1 + start)
    source = film_data.FilmSource(device, generator)
    sizes = film_data.write_tokenizers(work)
    prompts = film_data.encode_prompts(work, source, plan.seed + start, plan.prompts_per_film)
    log(films=len(source.films), prompts=len(prompts.llama), s=clock.seconds())
    trained = torch.load(work / "vae.pt", map_location=device)
    vae = make_vae().to(device).requires_grad_(False)
    vae.load_state_dict(trained["vae"])
    speed_up(vae)
    bank = film_data.LatentBank(vae, source, trained["scaling"], plan.bank, plan.bank_seconds)
    log(bank=bank.films, latents=bank.size, std=bank.std(), s=clock.seconds())
    del vae

    model, average = Filmer(*sizes).to(device), Filmer(*sizes).to(device).requires_grad_(False)
    average.load_state_dict(model.state_dict())
    live = [p for p in model.parameters() if p.requires_grad]
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    shadow = [p for name, p in average.named_parameters() if name in names]
    groups = [
        {"params": [p for p in live if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in live if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=plan.flow_rate, betas=(0.9, 0.98), fused=device == "cuda"
    )
    if start:
        model.load_state_dict(state["model"])
        average.load_state_dict(state.get("average", state["model"]))
        if "moment1" in state and "moment2" in state:
            restore_moments(optimizer, state)
            fresh = 0
    model.prepare_training(compiled)
    clock.start_training()
    sums = torch.zeros(3, device=device)
    since = step
    while True:
        set_rate(optimizer, plan.flow_rate, (step + 1 - fresh) / plan.warmup, clock.progress())
        with torch.no_grad():
            rows, pictures, padding, first, clean, history = bank.sections(plan.flow_batch)
            chosen = source.integers(plan.prompts_per_film, plan.flow_batch)
            llama, mask, clip, end = prompts.of(rows, chosen)
            sigmas = sample_sigmas(source, plan.flow_batch)
            guidance = source.rand(plan.flow_batch) * 9 + 1
            noise = source.randn(*clean.shape)
            noisy = torch.lerp(clean, noise, sigmas[:, None, None, None, None])
            # What is sampled is not perfect: the history it becomes is blurred a little here.
            known = history.abs().amax((1, 3, 4), keepdim=True) > 0
            blur = source.rand(plan.flow_batch, 1, 1, 1, 1) * 0.15 * known
            history = history + blur * source.randn(*history.shape)
            first = first + 0.03 * source.randn(*first.shape)
        with film_data.half_precision(device):
            text, pooled = model.read_text(llama, clip, prompts.head)
            velocity = model.velocity(
                noisy, sigmas, padding, first, history, text, mask, pooled, pictures, guidance
            )
            turn_end = text[torch.arange(len(mask), device=device), mask.sum(1) - 1]
            read = model.read_places(torch.cat([turn_end, pooled], 1)).float()
        flow, reading = F.mse_loss(velocity.float(), noise - clean), F.cross_entropy(read, end)
        optimizer.zero_grad(set_to_none=True)
        (flow + plan.auxiliary_weight * (1 - clock.progress()) * reading).backward()
        nn.utils.clip_grad_norm_(live, 1.0)
        optimizer.step()
        decay = min(plan.average, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(shadow, live, 1 - decay)
            right = (read.argmax(1) == end).float().mean()
            sums += torch.stack([flow.detach(), reading.detach(), right])
        step += 1
        if step % 20 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            over = clock.over()
            if step % 200 == 0 or over or device == "cpu":
                mean = (sums / (step - since)).tolist()
                sums.zero_()
                since = step
                log(step=step, flow=mean[0], heads=mean[1], read=mean[2], s=clock.seconds())
            if over:
                break
    save(work / "flow.pt", {"step": step, "spent": clock.spent(), "model": model.state_dict()})
    save(work / "flow-average.pt", average.state_dict())
    for name, moments in read_moments(optimizer).items():
        save(work / f"flow-{name}.pt", moments)
    log(done=clock.progress() >= 1, step=step, spent=clock.spent(), s=clock.seconds())


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder of the model")
    parser.add_argument("--minutes", type=float, default=60, help="stop and save after this long")
    parser.add_argument(
        "--last", action="store_true", help="end the stage with this piece, whatever the plan says"
    )
    parser.add_argument("--steps", type=int, default=film_networks.STEPS, help="evaluate: steps")
    parser.add_argument("--sections", type=int, default=3, help="evaluate: sections of each film")
    parser.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--limit", type=int, help="evaluate only so many prompts")
    parser.add_argument("--batch", type=int, default=1, help="evaluate: films at a time")
    parser.add_argument(
        "--shuffle", action="store_true", help="evaluate: with the next row's prompt (must fail)"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", type=json.loads, default={}, help="JSON over the Plan's fields")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    plan, training = Plan(**arguments.plan), arguments.stage in STAGES[:3]
    compiled = arguments.device == "cuda" and not arguments.no_compile
    torch.backends.cuda.matmul.allow_tf32 = training
    torch.backends.cudnn.benchmark = training
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass broke on an H100
    if arguments.stage == "vae":
        train_vae(plan, arguments.work, arguments.minutes, arguments.last, arguments.device)
    elif arguments.stage == "decoder":
        train_decoder(
            plan, arguments.work, arguments.minutes, arguments.last, arguments.device, compiled
        )
    elif arguments.stage == "flow":
        train_flow(
            plan, arguments.work, arguments.minutes, arguments.last, arguments.device, compiled
        )
    elif arguments.stage == "export":
        export(arguments.work, arguments.out)
    else:
        rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
        evaluate(
            arguments.out,
            arguments.work,
            arguments.device,
            rows[: arguments.limit],
            steps=arguments.steps,
            sections=arguments.sections,
            batch=arguments.batch,
            shuffled=arguments.shuffle,
        )


if __name__ == "__main__":
    main()
