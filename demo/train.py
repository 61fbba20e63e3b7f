"""Make the demo model from nothing: python train.py --work DIR --stage STAGE.

One GPU, no downloads; the pictures and prompts are drawn here. Each stage stops after --minutes and
goes on from its checkpoint in the work folder when called again, so long runs can be cut in pieces:

    python demo/train.py --work /tmp/demo --stage vae
    python demo/train.py --work /tmp/demo --stage decoder
    python demo/train.py --work /tmp/demo --stage flow --minutes 9     (again until it says done)
    python demo/train.py --work /tmp/demo --stage export --out demo/model
    python demo/train.py --work /tmp/demo --stage evaluate --out demo/model
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scenes
import tokens
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

HERE = Path(__file__).resolve().parent
STAGES = ("vae", "decoder", "flow", "export", "evaluate")
GUIDANCE = 3.5
STEPS = 8
LATENT_CHANNELS = 16
LATENT_SIDE = scenes.PICTURE_SIZE // 8
TOKENS = (LATENT_SIDE // 2) ** 2
DEFAULTS = {
    "steps": STEPS,
    "guidance": GUIDANCE,
    "max_sequence_length": tokens.T5_LENGTH,
    "width": scenes.PICTURE_SIZE,
    "height": scenes.PICTURE_SIZE,
}


@dataclass(frozen=True)
class Plan:
    """Sizes and rates of the training. The model card says how the shipped model's run differed."""

    seed: int = 20261120
    vae_steps: int = 8000
    vae_batch: int = 64
    vae_rate: float = 1e-3
    kl_weight: float = 3e-4
    decoder_steps: int = 4500
    decoder_rate: float = 6e-4
    decoder_noise: float = 0.05
    flow_steps: int = 13000
    flow_batch: int = 2048
    flow_rate: float = 1.5e-3
    warmup: int = 400
    auxiliary_weight: float = 0.1
    pool: int = 500_000
    workers: int = 16


# ---------------------------------------------------------------------------------------------
# Pictures on the GPU


@dataclass
class SceneBatch:
    """Scenes as integer tensors: shape, colour, size and place are [batch, 3], -1 for none."""

    background: Tensor
    shape: Tensor
    colour: Tensor
    size: Tensor
    place: Tensor

    def select(self, index: Tensor) -> SceneBatch:
        """The scenes at the given rows."""
        return SceneBatch(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def to(self, device: str) -> SceneBatch:
        """The same scenes on another device."""
        return SceneBatch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def scene_codes(scene: scenes.Scene) -> list[int]:
    """A scene as 13 small integers: the background, then shape, colour, size, place of three."""
    codes = [scenes.COLOURS.index(scene.background)]
    for thing in scene.objects:
        codes += [
            scenes.SHAPES.index(thing.shape),
            scenes.COLOURS.index(thing.colour),
            scenes.SIZES.index(thing.size),
            scenes.PLACES.index(thing.place),
        ]
    return codes + [-1] * (1 + 4 * scenes.MAX_OBJECTS - len(codes))


def scene_batch(codes: Tensor) -> SceneBatch:
    """Scenes from rows of `scene_codes`."""
    codes = codes.long()
    return SceneBatch(codes[:, 0], codes[:, 1::4], codes[:, 2::4], codes[:, 3::4], codes[:, 4::4])


def draw_batch(batch: SceneBatch, generator: torch.Generator | None) -> Tensor:
    """Jittered pictures [batch, 3, 128, 128] in -1 to 1; without a generator, no jitter."""
    device = batch.background.device
    palette = torch.tensor(list(scenes.PALETTE.values()), device=device) / 127.5 - 1
    radii = torch.tensor(list(scenes.RADII.values()), device=device)
    count = batch.shape.shape[0]
    jitter = torch.zeros(3, count, scenes.MAX_OBJECTS, device=device)
    if generator is not None:
        jitter = torch.rand(jitter.shape, device=device, generator=generator) * 2 - 1
    third = scenes.PICTURE_SIZE / 3
    middle_x = (batch.place % 3 + 0.5) * third + jitter[0] * scenes.PLACE_JITTER
    middle_y = (batch.place // 3 + 0.5) * third + jitter[1] * scenes.PLACE_JITTER
    radius = radii[batch.size.clamp_min(0)] * (1 + jitter[2] * scenes.RADIUS_JITTER)
    axis = torch.arange(scenes.PICTURE_SIZE, device=device) + 0.5
    picture = palette[batch.background][:, :, None, None].expand(-1, -1, *[len(axis)] * 2)
    for slot in range(scenes.MAX_OBJECTS):
        x = axis[None, None, :] - middle_x[:, slot, None, None]
        y = axis[None, :, None] - middle_y[:, slot, None, None]
        x, y = torch.broadcast_tensors(x, y)
        r, kind = radius[:, slot, None, None], batch.shape[:, slot, None, None]
        distance = torch.full_like(x, 1e3)
        for index, shape in enumerate(scenes.SHAPES):
            distance = torch.where(
                kind == index, scenes.signed_distance(torch, shape, x, y, r), distance
            )
        cover = (0.5 - distance).clamp(0, 1)[:, None]
        colour = palette[batch.colour[:, slot].clamp_min(0)][:, :, None, None]
        picture = torch.lerp(picture, colour, cover)
    return picture


# ---------------------------------------------------------------------------------------------
# The pool of scenes and prompts


def _pool_part(job: tuple[int, int, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    seed, count, folder = job
    rng = random.Random(seed)
    encoder = tokens.PromptEncoder(Path(folder) / "tokenizer", Path(folder) / "tokenizer_2")
    codes, clip, t5 = [], [], []
    for _ in range(count):
        scene = scenes.sample_training_scene(rng)
        assert not scenes.is_held_out(scene)
        codes.append(scene_codes(scene))
        in_clip, in_t5 = encoder.encode(scenes.write_prompt(rng, scene))
        clip.append(in_clip)
        t5.append(in_t5)
    return np.array(codes, np.int8), np.array(clip, np.int16), np.array(t5, np.int16)


def make_pool(count: int, seed: int, folder: Path, workers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scene codes, CLIP ids and T5 ids of `count` training scenes (fork before CUDA starts)."""
    parts = max(1, count // 5000)
    jobs = [(seed * 100_003 + part, count // parts, str(folder)) for part in range(parts)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        results = pool.map(_pool_part, jobs, chunksize=1)
    codes, clip, t5 = (np.concatenate(column) for column in zip(*results, strict=True))
    return torch.from_numpy(codes), torch.from_numpy(clip), torch.from_numpy(t5)


def write_tokenizers(folder: Path) -> tuple[int, int]:
    """Write both tokenizers and check the fast encoder against them; returns their sizes."""
    sizes = (
        tokens.write_clip_tokenizer(folder / "tokenizer"),
        tokens.write_t5_tokenizer(folder / "tokenizer_2"),
    )
    clip = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    t5 = T5TokenizerFast.from_pretrained(folder / "tokenizer_2")
    encoder = tokens.PromptEncoder(folder / "tokenizer", folder / "tokenizer_2")
    rng = random.Random(0)
    for _ in range(300):
        prompt = scenes.write_prompt(rng, scenes.sample_training_scene(rng))
        expected = tuple(
            tokenizer(prompt, padding="max_length", max_length=length).input_ids
            for tokenizer, length in ((clip, tokens.CLIP_LENGTH), (t5, tokens.T5_LENGTH))
        )
        assert encoder.encode(prompt) == expected, prompt
    return sizes


# ---------------------------------------------------------------------------------------------
# The networks


def make_vae() -> AutoencoderKL:
    """FLUX's autoencoder (8x, 16 channels, no quant convolutions), four small blocks."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 96),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=scenes.PICTURE_SIZE,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


class Painter(nn.Module):
    """Both text encoders and the transformer, trained jointly, and the training-only heads."""

    def __init__(self, clip_size: int, t5_size: int) -> None:
        super().__init__()
        clip_config = CLIPTextConfig(
            vocab_size=clip_size,
            hidden_size=96,
            intermediate_size=192,
            projection_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=tokens.CLIP_LENGTH,
            hidden_act="quick_gelu",
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
        t5_config = T5Config(
            vocab_size=t5_size,
            d_model=128,
            d_kv=32,
            d_ff=256,
            num_layers=4,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=1,
        )
        self.clip = CLIPTextModel(clip_config)
        self.t5 = T5EncoderModel(t5_config)
        self.transformer = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=6,
            joint_attention_dim=128,
            pooled_projection_dim=96,
            guidance_embeds=True,
            axes_dims_rope=(8, 12, 12),
        )
        self._start_as_identity()
        self.heads = SceneHeads(128, 96)

    def _start_as_identity(self) -> None:
        """Zero the modulations and the last layer, so that each block starts as the identity."""
        flux = self.transformer
        layers = [flux.proj_out, flux.norm_out.linear]
        for block in flux.transformer_blocks:
            layers += [block.norm1.linear, block.norm1_context.linear]
        layers += [block.norm.linear for block in flux.single_transformer_blocks]
        for layer in layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def compile_blocks(self) -> None:
        """Compile block by block, which is quicker to build than the whole and as fast."""
        blocks = [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]
        blocks += [
            *self.t5.encoder.block,
            *getattr(self.clip, "text_model", self.clip).encoder.layers,
        ]
        for block in blocks:
            block.compile(dynamic=False)

    def shipped(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that the exported model holds, by folder."""
        yield "text_encoder", self.clip
        yield "text_encoder_2", self.t5
        yield "transformer", self.transformer


class SceneHeads(nn.Module):
    """Training-only readers: what lies at each place, and the background, from the text alone.

    They make the text encoders bind colour, size, shape and place early; they are not shipped.
    """

    GROUPS = (len(scenes.SHAPES) + 1, len(scenes.COLOURS) + 1, len(scenes.SIZES) + 1)

    def __init__(self, text_width: int, pooled_width: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(len(scenes.PLACES) + 1, text_width) * 0.5)
        self.attention = nn.MultiheadAttention(text_width, 4, batch_first=True)
        self.read = nn.Linear(text_width, sum(self.GROUPS))
        self.read_pooled = nn.Linear(pooled_width, len(scenes.PLACES) * sum(self.GROUPS))
        self.ground = nn.Linear(text_width, len(scenes.COLOURS))
        self.ground_pooled = nn.Linear(pooled_width, len(scenes.COLOURS))

    def forward(self, text: Tensor, pooled: Tensor, batch: SceneBatch) -> tuple[Tensor, Tensor]:
        """The loss, and the share of the places read wholly right from T5's states."""
        count, places = text.shape[0], len(scenes.PLACES)
        queries = self.queries.expand(count, -1, -1)
        found = self.attention(queries, text, text, need_weights=False)[0]
        loss = F.cross_entropy(self.ground(found[:, -1]).float(), batch.background)
        loss = loss + F.cross_entropy(self.ground_pooled(pooled).float(), batch.background)
        cells = self.read(found[:, :-1]).float()
        cells_pooled = self.read_pooled(pooled).float().view(count, places, -1)
        right = torch.ones(count, places, dtype=torch.bool, device=text.device)
        start = 0
        for width, codes in zip(self.GROUPS, (batch.shape, batch.colour, batch.size), strict=True):
            target = torch.zeros(count, places + 1, dtype=torch.long, device=text.device)
            slot = torch.where(batch.place < 0, places, batch.place)
            target = target.scatter(1, slot, codes + 1)[:, :places]
            for logits in (cells, cells_pooled):
                part = logits[..., start : start + width]
                loss = loss + F.cross_entropy(part.flatten(0, 1), target.flatten()) * 3
            right &= cells[..., start : start + width].argmax(-1) == target
            start += width
        return loss, (right | (target == 0)).all(1).float().mean()


def pack(latents: Tensor) -> Tensor:
    """Latents [b, 16, 16, 16] as tokens [b, 64, 64], as FluxPipeline packs them."""
    count = latents.shape[0]
    split = latents.view(count, LATENT_CHANNELS, LATENT_SIDE // 2, 2, LATENT_SIDE // 2, 2)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(count, TOKENS, 4 * LATENT_CHANNELS)


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1 dev's scheduler, unchanged."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def time_shift() -> float:
    """The factor by which the scheduler shifts the noise levels at this picture size."""
    slope = (1.15 - 0.5) / (4096 - 256)
    return math.exp(0.5 + slope * (TOKENS - 256))


# ---------------------------------------------------------------------------------------------
# Training


def log(**fields: Any) -> None:
    """Print one line of named numbers."""
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in fields.items()}))


def set_rate(
    optimizer: torch.optim.Optimizer, peak: float, step: int, warm: float, last: int
) -> None:
    """Half a cosine to zero at the step `last`, times the done share of a warm-up."""
    rate = peak * min(1.0, warm) * 0.5 * (1 + math.cos(math.pi * step / last))
    for group in optimizer.param_groups:
        group["lr"] = rate


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint whole or not at all."""
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def codes_without_prompts(count: int, seed: int, small: float = 0.0) -> Tensor:
    """Scene codes for the autoencoder, from training scenes only.

    A share `small` of the shapes is made small, and scenes which that makes held out are dropped.
    """
    rng = random.Random(seed)
    codes = []
    while len(codes) < count:
        scene = scenes.sample_training_scene(rng)
        things = [replace(t, size="small") if rng.random() < small else t for t in scene.objects]
        scene = replace(scene, objects=tuple(things))
        if not scenes.is_held_out(scene):
            codes.append(scene_codes(scene))
    return torch.tensor(codes)


def train_vae(plan: Plan, work: Path, minutes: float, device: str) -> None:
    """Train the autoencoder, then measure the latents' mean and spread."""
    began = time.monotonic()
    pool = scene_batch(codes_without_prompts(100_000 if device == "cuda" else 500, plan.seed))
    pool = pool.to(device)
    torch.manual_seed(plan.seed)
    vae = make_vae().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=plan.vae_rate, betas=(0.9, 0.99), weight_decay=1e-4
    )
    start, path = 0, work / "vae.pt"
    if path.exists():
        state = torch.load(path, map_location=device)
        vae.load_state_dict(state["vae"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    generator = torch.Generator(device).manual_seed(plan.seed + start)

    def objective(pictures: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moments = vae.encoder(pictures)
        mean, logvar = moments.float().chunk(2, 1)
        logvar = logvar.clamp(-20, 10)
        drawn = vae.decoder(mean + torch.exp(0.5 * logvar) * noise).float()
        kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).mean()
        error = drawn - pictures
        return error.abs().mean(), error.square().mean(), kl

    drawn_rows = torch.empty(plan.vae_batch, dtype=torch.long, device=device)
    for step in range(start, plan.vae_steps):
        set_rate(optimizer, plan.vae_rate, step, (step + 1) / 200, plan.vae_steps)
        drawn_rows.random_(len(pool.background), generator=generator)
        with torch.no_grad():
            pictures = draw_batch(pool.select(drawn_rows), generator)
            pictures = pictures.contiguous(memory_format=torch.channels_last)
            shape = (plan.vae_batch, LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE)
            noise = torch.randn(shape, device=device, generator=generator)
        with torch.autocast(device, torch.bfloat16):
            absolute, square, kl = objective(pictures, noise)
        loss = absolute + square + plan.kl_weight * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0:
            elapsed = time.monotonic() - began
            log(step=step, l1=absolute.item(), mse=square.item(), kl=kl.item(), s=elapsed)
            if elapsed > 60 * minutes:
                break
    step += 1
    latents = encode_pool(vae, pool.select(torch.arange(0, len(pool.place), 10)), generator)
    shift, scaling = latents.float().mean().item(), 1 / latents.float().std().item()
    state = {"vae": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    save(path, state | {"shift": shift, "scaling": scaling})
    log(done=step >= plan.vae_steps, step=step, shift=shift, scaling=scaling)


def refine_decoder(plan: Plan, work: Path, minutes: float, device: str) -> None:
    """Train the decoder on, the encoder frozen, with most weight on the shapes and their edges.

    Six in ten shapes are small here: their corners are what the first training leaves blurred.
    """
    began = time.monotonic()
    path, weights = work / "decoder.pt", torch.load(work / "vae.pt", map_location=device)
    codes = codes_without_prompts(100_000 if device == "cuda" else 500, plan.seed + 1, small=0.4)
    pool = scene_batch(codes).to(device)
    torch.manual_seed(plan.seed)
    vae = make_vae().to(device, memory_format=torch.channels_last)
    vae.load_state_dict(weights["vae"])
    decoder = vae.decoder
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=plan.decoder_rate, betas=(0.9, 0.99))
    start = 0
    if path.exists():
        state = torch.load(path, map_location=device)
        decoder.load_state_dict(state["decoder"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    generator = torch.Generator(device).manual_seed(plan.seed + 1 + start)
    rows = torch.empty(plan.vae_batch, dtype=torch.long, device=device)
    for step in range(start, plan.decoder_steps):
        set_rate(optimizer, plan.decoder_rate, step, (step + 1) / 100, plan.decoder_steps)
        rows.random_(len(pool.background), generator=generator)
        with torch.no_grad():
            pictures = draw_batch(pool.select(rows), generator)
            pictures = pictures.contiguous(memory_format=torch.channels_last)
            drawn = (pictures - pictures[:, :, :1, :1]).abs().amax(1, keepdim=True) > 0.02
            weight = 1 + 12 * F.max_pool2d(drawn.float(), 5, 1, 2)
            weight = weight / weight.mean()
        with torch.autocast(device, torch.bfloat16):
            with torch.no_grad():
                latents = vae.encoder(pictures).float().chunk(2, 1)[0]
                noise = torch.randn(latents.shape, device=device, generator=generator)
                latents = latents + noise * (plan.decoder_noise / weights["scaling"])
            error = (decoder(latents).float() - pictures) * weight.sqrt()
        absolute, square = (error.abs() * weight.sqrt()).mean(), error.square().mean()
        optimizer.zero_grad(set_to_none=True)
        (absolute + 2 * square).backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 0:
            elapsed = time.monotonic() - began
            log(step=step, l1=absolute.item(), mse=square.item(), s=elapsed)
            if elapsed > 60 * minutes:
                break
    step += 1
    save(path, {"step": step, "decoder": decoder.state_dict(), "optimizer": optimizer.state_dict()})
    log(done=step >= plan.decoder_steps, step=step, s=time.monotonic() - began)


@torch.no_grad()
def encode_pool(vae: AutoencoderKL, pool: SceneBatch, generator: torch.Generator) -> Tensor:
    """The latents' means of freshly drawn pictures, in bf16."""
    device = pool.background.device
    parts = []
    for rows in torch.arange(len(pool.background), device=device).split(1024):
        with torch.autocast(device.type, torch.bfloat16):
            pictures = draw_batch(pool.select(rows), generator)
            moments = vae.encoder(pictures.contiguous(memory_format=torch.channels_last))
        parts.append(moments.chunk(2, 1)[0].bfloat16().contiguous())
    return torch.cat(parts)


def sample_sigmas(count: int, device: str, generator: torch.Generator) -> Tensor:
    """Noise levels: half uniform, half logit-normal, shifted as the scheduler shifts them."""
    uniform = torch.rand(count, device=device, generator=generator)
    normal = torch.randn(count, device=device, generator=generator).sigmoid()
    level = torch.where(torch.arange(count, device=device) % 2 == 0, uniform, normal)
    shift = time_shift()
    return shift * level / (1 + (shift - 1) * level)


def train_flow(plan: Plan, work: Path, minutes: float, device: str) -> None:
    """Train the text encoders and the transformer on the flow-matching loss."""
    began = time.monotonic()
    path = work / "flow.pt"
    state = torch.load(path, map_location="cpu") if path.exists() else {"step": 0}
    start = state["step"]
    sizes = write_tokenizers(work)
    codes, clip_ids, t5_ids = make_pool(plan.pool, plan.seed + start, work, plan.workers)
    log(scenes=len(codes), s=time.monotonic() - began)
    # CLIP is causal and pooled at the first end token, so that padding behind it changes nothing.
    clip_ids = clip_ids[:, : int((clip_ids != clip_ids.max()).sum(1).max()) + 1]
    pool, clip_ids, t5_ids = scene_batch(codes.to(device)), clip_ids.to(device), t5_ids.to(device)
    generator = torch.Generator(device).manual_seed(plan.seed + start)
    trained = torch.load(work / "vae.pt", map_location=device)
    vae = make_vae().to(device, memory_format=torch.channels_last)
    vae.load_state_dict(trained["vae"])
    latents = (encode_pool(vae, pool, generator) - trained["shift"]) * trained["scaling"]
    latents = pack(latents)
    del vae
    log(latents=list(latents.shape), std=latents.std().item(), s=time.monotonic() - began)

    torch.manual_seed(plan.seed)
    model = Painter(*sizes).to(device)
    average = Painter(*sizes).to(device).requires_grad_(False)
    average.load_state_dict(model.state_dict())
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    fused = device == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=plan.flow_rate, betas=(0.9, 0.98), fused=fused)
    fresh = start  # the step at which the optimizer started
    if start:
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
            fresh = state.get("fresh", 0)
    if fused:
        model.compile_blocks()
    side = torch.arange(LATENT_SIDE // 2, device=device)
    picture_places = torch.zeros(len(side), len(side), 3, device=device)
    picture_places[..., 1], picture_places[..., 2] = side[:, None], side[None]
    picture_places = picture_places.view(-1, 3)
    text_places = torch.zeros(tokens.T5_LENGTH, 3, device=device)
    rows = torch.empty(plan.flow_batch, dtype=torch.long, device=device)
    sums = torch.zeros(3, device=device)

    for step in range(start, plan.flow_steps):
        warm = (step + 1 - fresh) / plan.warmup
        set_rate(optimizer, plan.flow_rate, step, warm, plan.flow_steps)
        rows.random_(len(latents), generator=generator)
        clean = latents[rows].float()
        sigmas = sample_sigmas(plan.flow_batch, device, generator)
        guidance = torch.rand(plan.flow_batch, device=device, generator=generator) * 7 + 1
        noise = torch.randn(clean.shape, device=device, generator=generator)
        noisy = torch.lerp(clean, noise, sigmas[:, None, None])
        with torch.autocast(device, torch.bfloat16):
            pooled = model.clip(clip_ids[rows].long()).pooler_output
            text = model.t5(t5_ids[rows].long()).last_hidden_state
            velocity = model.transformer(
                hidden_states=noisy,
                encoder_hidden_states=text,
                pooled_projections=pooled,
                timestep=sigmas,
                guidance=guidance,
                img_ids=picture_places,
                txt_ids=text_places,
                return_dict=False,
            )[0]
            reading, read_right = model.heads(text, pooled, pool.select(rows))
        flow = F.mse_loss(velocity.float(), noise - clean)
        fading = plan.auxiliary_weight * (1 - step / plan.flow_steps)
        optimizer.zero_grad(set_to_none=True)
        (flow + fading * reading).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay = min(0.9995, (step + 1) / (step + 10))
        with torch.no_grad():
            shadow, live = list(average.parameters()), list(model.parameters())
            torch._foreach_lerp_(shadow, live, 1 - decay)
            sums += torch.stack([flow.detach(), reading.detach(), read_right])
        if step % 200 == 199:
            elapsed = time.monotonic() - began
            loss, heads, right = (sums / 200).tolist()
            sums.zero_()
            log(step=step + 1, flow=loss, heads=heads, read_right=right, s=elapsed)
            if elapsed > 60 * minutes:
                break
    state = {"step": step + 1, "model": model.state_dict(), "average": average.state_dict()}
    save(path, state | {"optimizer": optimizer.state_dict(), "fresh": fresh})
    log(done=step + 1 >= plan.flow_steps, step=step + 1, s=time.monotonic() - began)


# ---------------------------------------------------------------------------------------------
# Export and evaluation


def export(work: Path, out: Path) -> None:
    """Write the averaged weights as a FluxPipeline folder, in bf16."""
    sizes = write_tokenizers(out)
    trained = torch.load(work / "vae.pt", map_location="cpu")
    vae = make_vae()
    vae.load_state_dict(trained["vae"])
    if (work / "decoder.pt").exists():
        vae.decoder.load_state_dict(torch.load(work / "decoder.pt", map_location="cpu")["decoder"])
    vae.register_to_config(
        scaling_factor=round(trained["scaling"], 4), shift_factor=round(trained["shift"], 4)
    )
    painter = Painter(*sizes)
    painter.load_state_dict(torch.load(work / "flow.pt", map_location="cpu")["average"])
    pipeline = FluxPipeline(
        scheduler=make_scheduler(),
        vae=vae.bfloat16(),
        text_encoder=painter.clip.bfloat16(),
        tokenizer=CLIPTokenizer.from_pretrained(out / "tokenizer"),
        text_encoder_2=painter.t5.bfloat16(),
        tokenizer_2=T5TokenizerFast.from_pretrained(out / "tokenizer_2"),
        transformer=painter.transformer.bfloat16(),
    )
    pipeline.save_pretrained(out, safe_serialization=True)
    # save_pretrained writes its own form of the tokenizers: keep the classic files.
    for name in ("tokenizer", "tokenizer_2"):
        shutil.rmtree(out / name)
    write_tokenizers(out)
    # CLIP checkpoints name their tensors text_model.*; newer transformers drop that on saving.
    clip_file = out / "text_encoder" / "model.safetensors"
    named = {
        "text_model." + k.removeprefix("text_model."): v for k, v in load_file(clip_file).items()
    }
    save_file(named, clip_file, metadata={"format": "pt"})
    for file in out.rglob("*.safetensors"):
        file.chmod(0o644)
    (out / "moored.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    for name, module in (("vae", vae), *painter.shipped()):
        log(part=name, parameters=sum(p.numel() for p in module.parameters()))
    log(bytes=total)


def contact_sheet(pictures: list[Any], columns: int = 20) -> Any:
    """One picture that shows all of them in rows."""
    from PIL import Image

    side = scenes.PICTURE_SIZE + 2
    sheet = Image.new("RGB", (columns * side, math.ceil(len(pictures) / columns) * side), "white")
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (index % columns * side, index // columns * side))
    return sheet


def generate(pipeline: FluxPipeline, prompts: list[str], steps: int) -> list[Any]:
    """The prompts' pictures, prompt i with seed i."""
    pictures = []
    for first in range(0, len(prompts), 40):
        part = prompts[first : first + 40]
        pictures += pipeline(
            part,
            width=scenes.PICTURE_SIZE,
            height=scenes.PICTURE_SIZE,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            max_sequence_length=tokens.T5_LENGTH,
            generator=[torch.Generator().manual_seed(first + i) for i in range(len(part))],
        ).images
    return pictures


def evaluate(
    out: Path, results: Path, device: str, steps: int, prompts: Path, limit: int | None
) -> None:
    """Paint held-out prompts with diffusers in f32 and let judge.py count the right ones."""
    import judge

    torch.backends.cudnn.allow_tf32 = False
    rows = [json.loads(line) for line in prompts.read_text().splitlines()][:limit]
    pipeline = FluxPipeline.from_pretrained(out, torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    pictures = generate(pipeline, [row["prompt"] for row in rows], steps)
    folder = results / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(pictures):
        picture.save(folder / f"{index:04d}.png")
    contact_sheet(pictures).save(results / f"sheet-{steps}.png")
    report = judge.judge_folder([row["scene"] for row in rows], folder)
    (results / f"heldout-{steps}.json").write_text(json.dumps(report, indent=1) + "\n")
    log(steps=steps, **report["summary"])


def main() -> None:
    """Run one stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder of the model")
    parser.add_argument("--minutes", type=float, default=60, help="stop and save after this long")
    parser.add_argument("--steps", type=int, default=STEPS, help="sampling steps of evaluate")
    parser.add_argument("--prompts", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--limit", type=int, help="evaluate only so many prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--plan", type=json.loads, default={}, help="JSON over the Plan's fields")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    plan = Plan(**arguments.plan)
    torch.backends.cuda.matmul.allow_tf32 = arguments.stage in STAGES[:3]
    torch.backends.cudnn.benchmark = arguments.stage in STAGES[:3]
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass broke on an H100
    if arguments.stage == "vae":
        train_vae(plan, arguments.work, arguments.minutes, arguments.device)
    elif arguments.stage == "decoder":
        refine_decoder(plan, arguments.work, arguments.minutes, arguments.device)
    elif arguments.stage == "flow":
        train_flow(plan, arguments.work, arguments.minutes, arguments.device)
    elif arguments.stage == "export":
        export(arguments.work, arguments.out)
    else:
        evaluate(
            arguments.out,
            arguments.work,
            arguments.device,
            arguments.steps,
            arguments.prompts,
            arguments.limit,
        )


if __name__ == "__main__":
    main()
