"""What the stages of training share: the plan, the clock, checkpoints and the line of numbers."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """Sizes, rates and minutes of the training."""

    seed: int = 20261123
    warmup: int = 200
    vae_minutes: float = 4.0
    vae_batch: int = 16
    vae_rate: float = 1.5e-3
    short: int = 5
    """Frames of short clips."""
    long_every: int = 3
    """One step in so many has clips as long as the decoder's tiles, the others short ones."""
    kl_weight: float = 3e-4
    latent_noise: float = 0.05
    decoder_minutes: float = 7.5
    decoder_batch: int = 32
    decoder_rate: float = 1e-3
    decoder_noise: float = 0.06
    """Largest noise on the latents that the decoder learns from, for latents of spread 1."""
    far_weight: float = 10.0
    """Weight of the decoder's errors beyond `FAR`, squared."""
    flow_minutes: float = 10.5
    flow_batch: int = 1024
    flow_rate: float = 1.5e-3
    auxiliary_weight: float = 0.1
    bank: int = 40_000
    bank_seconds: float = 30
    prompts_per_film: int = 4
    average: float = 0.999


def log(**fields: Any) -> None:
    """Print one line of named numbers."""
    values = {k: round(v, 5) if isinstance(v, float) else v for k, v in fields.items()}
    print(json.dumps(values), flush=True)


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


class Clock:
    """How far a stage is: the minutes of all its pieces against those that the plan gives it."""

    def __init__(self, spent: float, planned: float, piece: float, last: bool) -> None:
        """All in minutes; `spent` by earlier pieces, `piece` is what this one may take.

        If it is the `last` piece, the plan ends with it.
        """
        self._spent, self._planned, self._piece, self._last = spent, planned, piece, last
        self.began = time.monotonic()
        self._training = self.began

    def start_training(self) -> None:
        """Count from now on: what was prepared before is not training."""
        self._training = time.monotonic()
        if self._last:
            self._planned = self._spent + max(self._piece - self.seconds() / 60, 0.01)

    def spent(self) -> float:
        """Minutes of training so far."""
        return self._spent + (time.monotonic() - self._training) / 60

    def progress(self) -> float:
        """The share of the plan that is done, from 0 to 1."""
        return min(1.0, self.spent() / self._planned)

    def seconds(self) -> float:
        """Since this piece began."""
        return time.monotonic() - self.began

    def over(self) -> bool:
        """Whether the plan or this piece is at its end."""
        return self.progress() >= 1 or self.seconds() >= 60 * self._piece


def set_rate(optimizer: torch.optim.Optimizer, peak: float, warm: float, progress: float) -> None:
    """Half a cosine to zero, times the done share of a warm-up."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, warm) * 0.5 * (1 + math.cos(math.pi * progress))


def read_moments(optimizer: torch.optim.Optimizer) -> dict[str, list[Tensor | None]]:
    """AdamW's state for two small files, in bf16; None for what has had no gradient."""
    states = [optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"]]
    return {
        name: [state[key].bfloat16().cpu() if state else None for state in states]
        for name, key in (("moment1", "exp_avg"), ("moment2", "exp_avg_sq"))
    }


def restore_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of `read_moments`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fused = optimizer.defaults.get("fused")
    for parameter, one, two in zip(parameters, state["moment1"], state["moment2"], strict=True):
        if one is None or two is None:
            continue
        count = torch.tensor(float(state["step"]))
        optimizer.state[parameter] = {
            "step": count.to(parameter.device) if fused else count,
            "exp_avg": one.float().to(parameter.device),
            "exp_avg_sq": two.float().to(parameter.device),
        }
