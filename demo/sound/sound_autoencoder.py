"""The stages that train the autoencoder, and the tokenizer of its latents with its inverse."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderOobleck
from melodies import FRAME, FRAMES
from sound_data import LatentBank, SoundSource, encode
from sound_networks import (
    LATENT,
    make_tokenizers,
    make_vae,
    through_tokens,
    without_weight_norm,
)
from sound_training import Clock, GradientStep, Plan, half_precision, log, save, set_rate
from torch import Tensor, nn
from torch.nn import functional as F

DEVIATION = 0.05
"""Deviation of the encoder's samples."""
POOL = 32
"""Batches of clips that are made at a time."""
MARGIN = 3


def open_vae(work: Path, device: str) -> AutoencoderOobleck:
    """The trained autoencoder, with plain weights and fixed."""
    vae = without_weight_norm(make_vae()).to(device).requires_grad_(False)
    vae.load_state_dict(torch.load(work / "vae.pt", map_location=device)["vae"])
    return vae


def spectral_loss(made: Tensor, true: Tensor) -> Tensor:
    """Mean difference of compressed magnitudes of three spectra of sounds [batch, samples]."""
    loss = made.new_zeros(())
    for size in (1024, 256, 64):
        window = torch.hann_window(size, device=made.device)
        pair = torch.stft(
            torch.cat([made, true]), size, size // 4, window=window, return_complex=True
        )
        # The root of the energy's fourth root keeps quiet harmonics in sight.
        power = pair.real.square() + pair.imag.square()
        one, two = (power / size + 1e-6).pow(0.2).chunk(2)
        loss = loss + (one - two).abs().mean()
    return loss


def clip_loss(vae: AutoencoderOobleck, clips: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of mono clips [batch, samples], and their squared error over their energy.

    `noise` [batch, 1, 1] is added to the latents on top of the encoder's own deviation. Each channel of the
    latents is held at mean 0 and spread 1, as the flow's noise has.
    """
    clips = clips[:, None].expand(-1, 2, -1)
    with half_precision(clips.device.type):
        mean, scale = vae.encoder(clips).float().chunk(2, 1)
        deviation = F.softplus(scale) + 1e-4
        latents = mean + (deviation + noise) * torch.randn_like(mean)
        made = vae.decoder(latents).float()
    even = mean.mean((0, 2)).square().mean() + (mean.var((0, 2)) - 1).square().mean()
    sure = (deviation.log() - math.log(DEVIATION)).square().mean()
    square = (made - clips).square().mean()
    loss = 4 * (made - clips).abs().mean() + 4 * square
    loss = loss + spectral_loss(made.flatten(0, 1), clips.flatten(0, 1))
    return loss + 0.05 * even + 0.01 * sure, square / clips.square().mean()


def train_vae(
    plan: Plan, work: Path, minutes: float, last: bool, device: str, is_graphed: bool
) -> None:
    """Train the autoencoder."""
    path = work / "vae.pt"
    state: dict[str, Any] = {"step": 0, "spent": 0.0}
    if path.exists():
        state = torch.load(path, map_location=device)
    clock = Clock(state["spent"], plan.vae_minutes, minutes, last)
    step = since = state["step"]
    torch.manual_seed(plan.seed + step)
    source = SoundSource(device, plan.seed + step)
    vae = without_weight_norm(make_vae()).to(device)
    live = list(vae.parameters())
    optimizer = torch.optim.AdamW(
        live, lr=plan.vae_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=device == "cuda"
    )
    if step:
        vae.load_state_dict(state["vae"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
    gradients = GradientStep(live, lambda *inputs: clip_loss(vae, *inputs), is_graphed)
    sums = torch.zeros(2, device=device)
    waiting: list[Tensor] = []
    clock.start_training()
    while True:
        set_rate(optimizer, plan.vae_rate, (step + 1) / plan.warmup, clock.progress())
        if not waiting:
            several = source.clips(POOL * plan.vae_batch, plan.clip_frames)
            waiting = list(several.split(plan.vae_batch))
        noise = plan.latent_noise * min(1.0, 4 * clock.progress())
        sums += torch.stack(gradients(waiting.pop(), noise * source.rand(plan.vae_batch, 1, 1)))
        nn.utils.clip_grad_norm_(live, 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            over = clock.over()
            if step % 200 == 0 or over or device == "cpu":
                mean = (sums / (step - since)).tolist()
                log(step=step, loss=mean[0], error=mean[1], s=clock.seconds())
                sums.zero_()
                since = step
            if over:
                break
    with torch.no_grad(), half_precision(device):
        clips = source.clips(32, 50)
        moments = vae.encoder(clips[:, None].expand(-1, 2, -1)).float()
        made = vae.decoder(moments[:, :LATENT]).float()[:, 0]
    error = ((made - clips).square().mean() / clips.square().mean()).item()
    done = {"vae": vae.state_dict(), "step": step, "spent": clock.spent()}
    unfinished = {} if clock.progress() >= 1 else {"optimizer": optimizer.state_dict()}
    save(path, done | unfinished)
    log(
        done=clock.progress() >= 1,
        step=step,
        decibels=-10 * math.log10(error),
        mean=moments[:, :LATENT].mean().item(),
        spread=moments[:, :LATENT].std().item(),
        deviation=F.softplus(moments[:, LATENT:]).mean().item(),
        s=clock.seconds(),
    )


def decoder_loss(vae: AutoencoderOobleck, latents: Tensor, clips: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of the decoder alone, and the squared error over the energy.

    `latents` [batch, channels, frames] of mono `clips` [batch, samples]. Without `MARGIN` frames at each end,
    which know less of their neighbours than those of a whole track.
    """
    inner = slice(MARGIN * FRAME, -MARGIN * FRAME)
    with half_precision(clips.device.type):
        made = vae.decoder(latents).float()[..., inner]
    clips = clips[:, None, inner].expand(-1, 2, -1)
    square = (made - clips).square().mean()
    loss = 4 * (made - clips).abs().mean() + 4 * square
    loss = loss + spectral_loss(made.flatten(0, 1), clips.flatten(0, 1))
    return loss, square / clips.square().mean()


def train_decoder(
    plan: Plan, work: Path, minutes: float, last: bool, device: str, is_graphed: bool
) -> None:
    """Train the decoder alone, mostly on high notes; the encoder and its latents stay."""
    path, state = work / "vae.pt", torch.load(work / "vae.pt", map_location=device)
    step = since = start = state.get("decoder_step", 0)
    clock = Clock(state.get("decoder_spent", 0.0), plan.decoder_minutes, minutes, last)
    torch.manual_seed(plan.seed + 6 + start)
    source = SoundSource(device, plan.seed + 6 + start)
    vae = open_vae(work, device)
    live = [p.requires_grad_(True) for p in vae.decoder.parameters()]
    optimizer = torch.optim.AdamW(
        live, lr=plan.decoder_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=device == "cuda"
    )
    if "decoder_optimizer" in state:
        optimizer.load_state_dict(state["decoder_optimizer"])
    gradients = GradientStep(live, lambda *inputs: decoder_loss(vae, *inputs), is_graphed)
    sums = torch.zeros(2, device=device)
    clips = latents = torch.zeros(0, device=device)
    clock.start_training()
    while True:
        warm = (step + 1 - start) / plan.warmup
        set_rate(optimizer, plan.decoder_rate, warm, clock.progress())
        if (step - start) % plan.decoder_reuse == 0:
            clips = source.clips(plan.decoder_clips, plan.clip_frames, high=0.7)
            parts = [encode(vae, part) for part in clips.split(plan.decoder_batch)]
            latents = torch.cat(parts).transpose(1, 2)
        rows = source.integers(len(clips), plan.decoder_batch)
        amount = DEVIATION + plan.decoder_noise * source.rand(plan.decoder_batch, 1, 1)
        noisy = latents[rows] + amount * source.randn(plan.decoder_batch, *latents.shape[1:])
        sums += torch.stack(gradients(noisy, clips[rows]))
        nn.utils.clip_grad_norm_(live, 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            over = clock.over()
            if step % 200 == 0 or over or device == "cpu":
                mean = (sums / (step - since)).tolist()
                log(step=step, loss=mean[0], error=mean[1], s=clock.seconds())
                sums.zero_()
                since = step
            if over:
                break
    state |= {"vae": vae.state_dict(), "decoder_step": step, "decoder_spent": clock.spent()}
    state.pop("decoder_optimizer", None)
    if clock.progress() < 1:
        state["decoder_optimizer"] = optimizer.state_dict()
    save(path, state)
    log(done=clock.progress() >= 1, step=step, s=clock.seconds())


def train_tokens(
    plan: Plan, work: Path, minutes: float, last: bool, device: str, is_graphed: bool
) -> None:
    """Train the tokenizer of latents and its inverse, as an autoencoder of latents."""
    path = work / "tokens.pt"
    state: dict[str, Any] = {"step": 0, "spent": 0.0}
    if path.exists():
        state = torch.load(path, map_location=device)
    clock = Clock(state["spent"], plan.tokens_minutes, minutes, last)
    step = since = state["step"]
    torch.manual_seed(plan.seed + 2 + step)
    source = SoundSource(device, plan.seed + 2 + step)
    bank = LatentBank(open_vae(work, device), source, plan)
    log(bank=len(bank.rows), s=clock.seconds())
    both = nn.ModuleList(make_tokenizers()).to(device)
    live = list(both.parameters())
    optimizer = torch.optim.AdamW(
        live, lr=plan.tokens_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda"
    )
    if step:
        both.load_state_dict(state["both"])

    def compute(latents: Tensor) -> tuple[Tensor, ...]:
        with half_precision(device):
            said = through_tokens(both[0], both[1], latents)
        loss = F.mse_loss(said.float(), latents)
        return loss, loss.detach()

    gradients = GradientStep(live, compute, is_graphed)
    sums = torch.zeros(1, device=device)
    clock.start_training()
    while True:
        set_rate(optimizer, plan.tokens_rate, (step + 1) / plan.warmup, clock.progress())
        rows = bank.fitting(FRAMES, plan.tokens_batch)
        latents = bank.take(rows, bank.waves(plan.tokens_batch), FRAMES)
        # A source begins where it begins: its tokens lie anywhere on its notes.
        sums += gradients(latents.roll(source.chance.randrange(5), 1))[1]
        nn.utils.clip_grad_norm_(live, 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            over = clock.over()
            if step % 400 == 0 or over or device == "cpu":
                log(step=step, loss=sums.item() / (step - since), s=clock.seconds())
                sums.zero_()
                since = step
            if over:
                break
    save(path, {"both": both.state_dict(), "step": step, "spent": clock.spent()})
    log(done=clock.progress() >= 1, step=step, s=clock.seconds())
