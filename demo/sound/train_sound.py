"""Make the sound model from nothing: python demo/sound/train_sound.py --work DIR --stage STAGE.

One GPU, no downloads; the sounds and prompts are made here. Each stage stops after --minutes and goes on from
its checkpoint in the work folder when called again; its learning rate falls to zero over the minutes that the
plan gives it, whatever the pieces.

    python demo/sound/train_sound.py --work /tmp/sound --stage prompts              (any machine)
    python demo/sound/train_sound.py --work /tmp/sound --stage vae --stage tokens
    python demo/sound/train_sound.py --work /tmp/sound --stage flow --minutes 5     (again until it says done)
    python demo/sound/train_sound.py --work /tmp/sound --stage export --out demo/sound/model
    python demo/sound/train_sound.py --work /tmp/sound --stage evaluate --out demo/sound/model
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import melodies
import sound_networks
import torch
from sound_autoencoder import open_vae, train_decoder, train_tokens, train_vae
from sound_data import (
    Batch,
    LatentBank,
    Prompts,
    SoundSource,
    draw_batch,
    open_tokenizer,
    write_prompts,
)
from sound_evaluation import evaluate, export, judge_samples
from sound_networks import SHIFT, Player, make_tokenizers
from sound_training import (
    Clock,
    GradientStep,
    Plan,
    half_precision,
    log,
    read_moments,
    restore_moments,
    save,
    set_rate,
)
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
STAGES = ("prompts", "vae", "decoder", "tokens", "flow", "export", "evaluate")


def sample_times(source: SoundSource, count: int) -> Tensor:
    """Times of noise: half uniform, half logit-normal, shifted as the pipeline shifts them."""
    uniform, normal = source.rand(count), source.randn(count).sigmoid()
    even = torch.arange(count, device=uniform.device) % 2 == 0
    level = torch.where(even, uniform, normal)
    return SHIFT * level / (1 + (SHIFT - 1) * level)


def reading_loss(read: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of reading the melodies off the text encoder, and the share that is read right.

    `read` [batch, scores] of the counts, pitches and lengths of three phrases, and of the waveforms.
    """
    sizes = [melodies.MOST_NOTES + 1, len(melodies.PITCHES), len(melodies.LENGTHS)]
    parts = read.split([*sizes * melodies.MOST_PHRASES, len(melodies.WAVES)], 1)
    loss, right = read.new_zeros(()), torch.ones_like(batch.waves, dtype=torch.bool)
    for part, wanted in zip(parts, [*batch.said.unbind(1), batch.waves], strict=True):
        loss = loss + F.cross_entropy(part, wanted, ignore_index=-1)
        right &= (part.argmax(1) == wanted) | (wanted < 0)
    return loss / len(parts), right.float().mean()


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
    plan: Plan, work: Path, minutes: float, last: bool, device: str, is_graphed: bool
) -> None:
    """Train the encoders and the transformer on the flow-matching loss."""
    state = load_flow(work)
    step = start = fresh = state["step"]  # fresh: where the optimizer's moments began
    clock = Clock(state["spent"], plan.flow_minutes, minutes, last)
    torch.manual_seed(plan.seed + start)
    source = SoundSource(device, plan.seed + 4 + start)
    tokenizer, vocabulary = open_tokenizer(work)
    vae = open_vae(work, device)
    bank = LatentBank(vae, source, plan)
    both = nn.ModuleList(make_tokenizers()).to(device).requires_grad_(False)
    both.load_state_dict(torch.load(work / "tokens.pt", map_location=device)["both"])
    bank.make_hints(*both)
    if not (work / "prompts.pt").exists():
        write_prompts(tokenizer, plan, work / "prompts.pt")
    prompts = Prompts(torch.load(work / "prompts.pt"), device)
    log(bank=len(bank.rows), tokens=prompts.ids.shape[-1], s=clock.seconds())

    model, average = Player(vocabulary).to(device), Player(vocabulary).to(device)
    average.requires_grad_(False).load_state_dict(model.state_dict())
    live = list(model.parameters())
    shadow = list(average.parameters())
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
    model.prepare_training()
    average.prepare_training()

    def compute(weight: Tensor, times: Tensor, noise: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        batch = Batch(*parts)
        noisy = torch.lerp(batch.clean, noise, times[:, None, None])
        with half_precision(device):
            states = model.read_text(batch.ids)
            quiet = model.read_timbre(bank.silence)
            given = model.read_timbre(batch.references)
            rest = quiet.expand(len(states) - len(given), -1, -1)
            condition, mask = model.conditions(
                states, batch.mask, torch.cat([given, rest]), prompts.lyrics
            )
            velocity = model.velocity(noisy, times, batch.context, condition, mask)
            ends = states[torch.arange(len(states), device=device), batch.mask.sum(1) - 1]
            read = model.read_melody(ends)
        flow = F.mse_loss(velocity.float(), noise - batch.clean)
        reading, right = reading_loss(read.float(), batch)
        return flow + weight * reading, flow, reading, right

    gradients = GradientStep(live, compute, is_graphed)

    def keep() -> None:
        save(work / "flow.pt", {"step": step, "spent": clock.spent(), "model": model.state_dict()})
        save(work / "flow-average.pt", average.state_dict())
        for name, moments in read_moments(optimizer).items():
            save(work / f"flow-{name}.pt", moments)

    clock.start_training()
    sums = torch.zeros(3, device=device)
    since, kept = step, clock.seconds()
    while True:
        set_rate(optimizer, plan.flow_rate, (step + 1 - fresh) / plan.warmup, clock.progress())
        batch = draw_batch(bank, prompts, source, plan.flow_batch)
        times = sample_times(source, plan.flow_batch)
        weight = torch.full((), plan.auxiliary_weight * (1 - clock.progress()), device=device)
        shown = gradients(
            weight,
            times,
            source.randn(*batch.clean.shape),
            *(getattr(batch, field.name) for field in fields(batch)),
        )
        nn.utils.clip_grad_norm_(live, 1.0)
        optimizer.step()
        decay = min(plan.average, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(shadow, live, 1 - decay)
            sums += torch.stack(shown[1:])
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
            if clock.seconds() - kept > 90:
                judge_samples(average, vae, bank, tokenizer, prompts.lyrics)
                keep()
                kept = clock.seconds()
    judge_samples(average, vae, bank, tokenizer, prompts.lyrics)
    keep()
    log(done=clock.progress() >= 1, step=step, spent=clock.spent(), s=clock.seconds())


def main() -> None:
    """Run some stages, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--stage", choices=STAGES, required=True, action="append", help="may be repeated"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder of the model")
    parser.add_argument(
        "--minutes",
        type=float,
        action="append",
        help="stop and save after this long; of each stage",
    )
    parser.add_argument(
        "--last", action="store_true", help="end the stage with this piece, whatever the plan says"
    )
    parser.add_argument("--steps", type=int, default=sound_networks.STEPS, help="evaluate: steps")
    parser.add_argument(
        "--task", choices=("text2music", "cover", "repaint"), default="text2music", help="evaluate"
    )
    parser.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--limit", type=int, help="evaluate only so many prompts")
    parser.add_argument(
        "--shuffle", action="store_true", help="evaluate: with the next row's prompt (must fail)"
    )
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", type=json.loads, default={}, help="JSON over the Plan's fields")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass broke on an H100
    minutes = arguments.minutes or [60.0]
    for index, stage in enumerate(arguments.stage):
        run(arguments, stage, minutes[min(index, len(minutes) - 1)])


def run(arguments: argparse.Namespace, stage: str, minutes: float) -> None:
    """Run one stage for so many minutes at most."""
    plan = Plan(**arguments.plan)
    training = {
        "vae": train_vae,
        "decoder": train_decoder,
        "tokens": train_tokens,
        "flow": train_flow,
    }
    work, device = arguments.work, arguments.device
    torch.backends.cuda.matmul.allow_tf32 = stage in training
    torch.backends.cudnn.benchmark = stage in training
    if stage == "prompts":
        write_prompts(open_tokenizer(work)[0], plan, work / "prompts.pt")
    elif stage in training:
        is_graphed = device == "cuda" and not arguments.no_graphs
        training[stage](plan, work, minutes, arguments.last, device, is_graphed)
    elif stage == "export":
        export(work, arguments.out)
    else:
        rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
        evaluate(
            arguments.out,
            work,
            device,
            rows[: arguments.limit],
            steps=arguments.steps,
            task=arguments.task,
            shuffled=arguments.shuffle,
        )


if __name__ == "__main__":
    main()
