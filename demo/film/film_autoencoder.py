"""The stages that train the autoencoder: all of it first, then its decoder on the latents of whole films."""

from __future__ import annotations

import math
from pathlib import Path

import film_data
import torch
from film_networks import make_vae, speed_up
from film_training import Clock, Plan, log, save, set_rate
from torch import Tensor, nn
from torch.nn import functional as F

FAR = 0.1
"""Errors beyond this are wrong colours, not soft edges; colours go from -1 to 1."""


def edge_weights(clips: Tensor) -> Tensor:
    """Weights of mean 1 for the pixels of clips: most lies on the shape and its edges."""
    shape = (clips - clips[:, :, :, :1, :1]).abs().amax(1) > 0.02
    weight = 1 + 6 * F.max_pool2d(shape.to(clips.dtype), 5, 1, 2)[:, None]
    return weight / weight.mean()


def clip_loss(
    vae: nn.Module, clips: Tensor, noise: float, kl_weight: float
) -> tuple[Tensor, Tensor]:
    """The loss of clips [batch, 3, 4n + 1, 64, 64], and the mean absolute error.

    Half of the clips have the first latent of their first frame alone, which is all the pipeline has of a
    start picture. Long clips are decoded a second time from their second latent on, as tiles that begin in
    the middle of a film are.
    """

    def encode(frames: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = vae.quant_conv(vae.encoder(frames)).float().chunk(2, 1)
        return mean, logvar.clamp(-20, 10)

    def error(latents: Tensor, frames: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        drawn = vae.decoder(vae.post_quant_conv(latents)).float()
        difference = (drawn - frames) * weight
        return difference.abs().mean(), difference.square().mean()

    weight = edge_weights(clips)
    mean, logvar = encode(clips)
    half = len(clips) // 2
    alone, alone_logvar = encode(clips[:half, :, :1])
    first = torch.cat([alone, mean[half:, :, :1]])
    mean = torch.cat([first, mean[:, :, 1:]], 2)
    first = torch.cat([alone_logvar, logvar[half:, :, :1]])
    logvar = torch.cat([first, logvar[:, :, 1:]], 2)
    kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
    spread = torch.exp(0.5 * logvar) * torch.randn_like(mean) + noise * torch.randn_like(mean)
    latents = mean + spread
    absolute, square = error(latents, clips, weight)
    loss = absolute + 2 * square + kl_weight * kl
    if latents.shape[2] > 2:
        late, late_square = error(latents[half:, :, 1:], clips[half:, :, 4:], weight[half:, :, 4:])
        loss = loss + 0.5 * (late + 2 * late_square)
    return loss, absolute


def train_vae(plan: Plan, work: Path, minutes: float, last: bool, device: str) -> None:
    """Train the autoencoder, then measure the latents' spread."""
    path = work / "vae.pt"
    state = torch.load(path, map_location=device) if path.exists() else {"step": 0, "spent": 0.0}
    clock = Clock(state["spent"], plan.vae_minutes, minutes, last)
    torch.manual_seed(plan.seed + state["step"])
    source = film_data.FilmSource(
        device, torch.Generator(device).manual_seed(plan.seed + state["step"])
    )
    vae = make_vae().to(device)
    speed_up(vae)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=plan.vae_rate, betas=(0.9, 0.99), weight_decay=1e-4
    )
    if state["step"]:
        vae.load_state_dict(state["vae"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
    step = since = state["step"]
    sums = torch.zeros(2, device=device)
    clock.start_training()
    while True:
        set_rate(optimizer, plan.vae_rate, (step + 1) / plan.warmup, clock.progress())
        long = step % plan.long_every == plan.long_every - 1
        frames, count = (17, plan.vae_batch) if long else (plan.short, 2 * plan.vae_batch)
        with torch.no_grad():
            clips = film_data.moving_clips(source, count, frames)
        with film_data.half_precision(device):
            loss, absolute = clip_loss(vae, clips, plan.latent_noise, plan.kl_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        sums += torch.stack([loss.detach(), absolute.detach()])
        step += 1
        if step % 10 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            over = clock.over()
            if step % 100 == 0 or over or device == "cpu":
                mean = (sums / (step - since)).tolist()
                log(step=step, loss=mean[0], l1=mean[1], s=clock.seconds())
                sums.zero_()
                since = step
            if over:
                break
    batch, _ = source.draw(64)
    latents = film_data.encode_films(vae, batch, 3)
    scaling = 1 / latents.std().item()
    with torch.no_grad(), film_data.half_precision(device):
        clips = film_data.moving_clips(source, 32, 17)
        mean = vae.quant_conv(vae.encoder(clips)).float().chunk(2, 1)[0]
        drawn = vae.decoder(vae.post_quant_conv(mean)).float().clamp(-1, 1)
    psnr = -10 * math.log10((drawn - clips).square().mean().item() / 4)
    done = {"vae": vae.state_dict(), "scaling": scaling, "step": step, "spent": clock.spent()}
    unfinished = {} if clock.progress() >= 1 else {"optimizer": optimizer.state_dict()}
    save(path, done | unfinished)
    log(
        done=clock.progress() >= 1,
        step=step,
        psnr=psnr,
        scaling=scaling,
        mean=latents.mean().item(),
        s=clock.seconds(),
    )


def train_decoder(
    plan: Plan, work: Path, minutes: float, last: bool, device: str, compiled: bool
) -> None:
    """Train the decoder alone on tiles of whole films' latents; the encoder and its latents stay."""
    path, state = work / "vae.pt", torch.load(work / "vae.pt", map_location=device)
    step = since = start = state.get("decoder_step", 0)
    clock = Clock(state.get("decoder_spent", 0.0), plan.decoder_minutes, minutes, last)
    generator = torch.Generator(device).manual_seed(plan.seed + 2 + start)
    source = film_data.FilmSource(device, generator)
    vae = make_vae().to(device).requires_grad_(False)
    vae.load_state_dict(state["vae"])
    speed_up(vae)
    scaling = state["scaling"]
    bank = film_data.LatentBank(vae, source, scaling, plan.bank // 3, plan.bank_seconds)
    live = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    for parameter in live:
        parameter.requires_grad_(True)
    vae.to(memory_format=torch.channels_last_3d)
    if compiled:
        torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is
        vae.decoder.compile(dynamic=False)
    optimizer = torch.optim.AdamW(
        live, lr=plan.decoder_rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=device == "cuda"
    )
    if "decoder_optimizer" in state:
        optimizer.load_state_dict(state["decoder_optimizer"])

    def decode(latents: Tensor) -> Tensor:
        return vae.decoder(vae.post_quant_conv(latents / scaling)).float()

    @torch.no_grad()
    def psnr() -> float:
        with film_data.half_precision(device):
            latents, clips = bank.tiles(plan.decoder_batch)
            difference = decode(latents).clamp(-1, 1) - clips
        return -10 * math.log10(difference.square().mean().item() / 4)

    log(bank=bank.films, psnr=psnr(), s=clock.seconds())
    sums = torch.zeros(2, device=device)
    clock.start_training()
    while True:
        warm = (step + 1 - start) / plan.warmup
        set_rate(optimizer, plan.decoder_rate, warm, clock.progress())
        latents, clips = bank.tiles(plan.decoder_batch)
        amount = plan.decoder_noise * source.rand(plan.decoder_batch, 1, 1, 1, 1)
        latents = latents + amount * source.randn(*latents.shape)
        with film_data.half_precision(device):
            plain = decode(latents) - clips
            difference = plain * edge_weights(clips)
        absolute = difference.abs().mean()
        # Spots beside the shape are few pixels, far off: rare pairs of colours had them.
        far = F.relu(plain.abs() - FAR).square().mean()
        loss = absolute + 2 * difference.square().mean() + plan.far_weight * far
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(live, 1.0)
        optimizer.step()
        sums += torch.stack([loss.detach(), absolute.detach()])
        step += 1
        if step % 10 == 0:
            if device == "cuda":
                torch.cuda.synchronize()
            over = clock.over()
            if step % 200 == 0 or over or device == "cpu":
                mean = (sums / (step - since)).tolist()
                log(step=step, loss=mean[0], l1=mean[1], s=clock.seconds())
                sums.zero_()
                since = step
            if over:
                break
    state |= {"vae": vae.state_dict(), "decoder_step": step, "decoder_spent": clock.spent()}
    state.pop("decoder_optimizer", None)
    if clock.progress() < 1:
        state["decoder_optimizer"] = optimizer.state_dict()
    save(path, state)
    log(done=clock.progress() >= 1, step=step, psnr=psnr(), s=clock.seconds())
