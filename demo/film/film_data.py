"""Training data of the film model, drawn on the device: films, encoded prompts and banks of latents."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

import film_tokens
import films
import scenes
import torch
from diffusers import AutoencoderKLHunyuanVideo
from film_networks import HISTORY, LATENT_CHANNELS, LATENT_SIDE, PROMPT_TOKENS
from films import WINDOW
from torch import Tensor
from transformers import CLIPTokenizer, PreTrainedTokenizerFast

CLIP_TOKENS = 24
"""Room for a prompt's CLIP tokens; CLIP is causal and pooled at the first end token."""
SECTION_WEIGHTS = {1: 0.1, 2: 0.15, 3: 0.5, 4: 0.15, 5: 0.05, 6: 0.05}
"""How often films of so many sections are trained on."""
TILE_FRAMES, TILE_STRIDE, TILE_LATENTS = 17, 12, 5
"""The autoencoder's tiles in time: their frames, the frames from one to the next, and their latents."""


def half_precision(device: str) -> torch.autocast:
    """Automatic bf16 on a GPU; a CPU computes faster in f32."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def training_films() -> list[films.Film]:
    """Every film that the held-out rule lets the model be trained on."""
    every = [
        films.Film(shape, colour, background, start, end)
        for shape in scenes.SHAPES
        for colour in scenes.COLOURS
        for background in scenes.COLOURS
        for start in scenes.PLACES
        for end in scenes.PLACES
        if colour != background and start != end
    ]
    return [film for film in every if not films.is_held_out(film)]


@dataclass
class FilmBatch:
    """Films as tensors: `codes` [batch, 3] of shape, colour and background; `way` [batch, 2, 2] of the x and
    y of both ends and `radius` [batch] in pixels, jittered."""

    codes: Tensor
    way: Tensor
    radius: Tensor

    def select(self, index: Tensor) -> FilmBatch:
        """The films at the given rows."""
        return FilmBatch(self.codes[index], self.way[index], self.radius[index])


class FilmSource:
    """Draws random training films on a device."""

    def __init__(self, device: str, generator: torch.Generator) -> None:
        self.films = training_films()
        self._generator, self._device = generator, device
        places = [films.place_middle(place) for place in scenes.PLACES]
        rows = [
            (
                scenes.SHAPES.index(film.shape),
                scenes.COLOURS.index(film.colour),
                scenes.COLOURS.index(film.background),
                scenes.PLACES.index(film.start),
                scenes.PLACES.index(film.end),
            )
            for film in self.films
        ]
        self._codes = torch.tensor(rows, device=device)
        self._places = torch.tensor(places, device=device)

    def rand(self, *shape: int) -> Tensor:
        """Uniform numbers from 0 to 1."""
        return torch.rand(shape, device=self._device, generator=self._generator)

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, device=self._device, generator=self._generator)

    def integers(self, below: int, count: int) -> Tensor:
        """Random whole numbers."""
        return torch.randint(below, (count,), device=self._device, generator=self._generator)

    def draw(self, count: int) -> tuple[FilmBatch, Tensor]:
        """Jittered films and their rows in `films`."""
        rows = self.integers(len(self.films), count)
        codes = self._codes[rows]
        jitter = (self.rand(count, 2, 2) * 2 - 1) * films.PLACE_JITTER
        radius = films.RADIUS * (1 + (self.rand(count) * 2 - 1) * films.RADIUS_JITTER)
        return FilmBatch(codes[:, :3], self._places[codes[:, 3:]] + jitter, radius), rows


def draw_frames(batch: FilmBatch, shares: Tensor) -> Tensor:
    """Frames [batch, 3, times, 64, 64] in -1 to 1 at `shares` [batch, times] of the way."""
    device = shares.device
    palette = torch.tensor(list(scenes.PALETTE.values()), device=device) / 127.5 - 1
    axis = torch.arange(films.FRAME_SIZE, device=device) + 0.5
    here = torch.lerp(batch.way[:, None, 0], batch.way[:, None, 1], shares[..., None])
    x = axis[None, None, None, :] - here[..., 0, None, None]
    y = axis[None, None, :, None] - here[..., 1, None, None]
    x, y = torch.broadcast_tensors(x, y)
    radius, kind = batch.radius[:, None, None, None], batch.codes[:, 0, None, None, None]
    distance = torch.full_like(x, 1e3)
    for index, shape in enumerate(scenes.SHAPES):
        drawn = scenes.signed_distance(torch, shape, x, y, radius)
        distance = torch.where(kind == index, drawn, distance)
    cover = (0.5 - distance).clamp(0, 1)[:, None]
    paint, ground = (palette[batch.codes[:, i]][:, :, None, None, None] for i in (1, 2))
    return torch.lerp(ground, paint, cover)


def film_shares(sections: Tensor, frames: Tensor) -> Tensor:
    """`films.progress` of frames [batch, times] of films with so many sections [batch]."""
    longest = max(SECTION_WEIGHTS)
    rows = [films.boundaries(count) + [1.0] * (longest - count) for count in range(1, longest + 1)]
    bounds = torch.tensor(rows, device=frames.device)[sections - 1]
    place = (frames / films.SECTION_FRAMES).clamp(max=longest - 1e-4)
    low = place.long()
    return torch.lerp(bounds.gather(1, low), bounds.gather(1, low + 1), place - low)


def moving_clips(source: FilmSource, count: int, frames: int) -> Tensor:
    """Clips for the autoencoder: parts of films of many speeds, some standing still."""
    batch, _ = source.draw(count)
    speed = source.rand(count, 1) / films.SECTION_FRAMES * (source.rand(count, 1) > 0.1)
    times = torch.arange(frames, device=speed.device)[None]
    return draw_frames(batch, (source.rand(count, 1) * 1.1 - 0.1 + speed * times).clamp(0, 1))


@dataclass
class Prompts:
    """Encoded prompts: several for each of the source's films, on the device."""

    head: Tensor
    llama: Tensor
    mask: Tensor
    clip: Tensor
    end: Tensor
    per_film: int

    def of(self, rows: Tensor, draw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """LLaMA's ids, their mask, CLIP's ids and the end place, for rows of the source's films."""
        index = rows * self.per_film + draw % self.per_film
        return self.llama[index].long(), self.mask[index], self.clip[index].long(), self.end[rows]


def encode_prompts(folder: Path, source: FilmSource, seed: int, per_film: int) -> Prompts:
    """Write and encode prompts with the tokenizers in `folder`, checked against the real tokenizers."""
    encoder = film_tokens.PromptEncoder(folder / "tokenizer_2")
    llama = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    clip = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
    head = llama(film_tokens.TEMPLATE.split("{}")[0]).input_ids
    assert len(head) == film_tokens.CROP_START, len(head)
    rng = random.Random(seed)
    in_llama, in_clip = [], []
    for index, film in enumerate(source.films):
        for _ in range(per_film):
            prompt = films.write_prompt(rng, film)
            one, two = encoder.encode(prompt)
            if index % 500 == 0:
                assert llama(film_tokens.TEMPLATE.format(prompt)).input_ids == head + one, prompt
                assert clip(prompt).input_ids == two, prompt
            in_llama.append(one + [encoder.pad] * (PROMPT_TOKENS - len(one)))
            in_clip.append(two + [encoder.clip_end] * (CLIP_TOKENS - len(two)))
    device = source._device
    ids = torch.tensor(in_llama, dtype=torch.int16, device=device)
    return Prompts(
        head=torch.tensor(head, device=device),
        llama=ids,
        mask=(ids != encoder.pad).long(),
        clip=torch.tensor(in_clip, dtype=torch.int16, device=device),
        end=source._codes[:, 4],
        per_film=per_film,
    )


@torch.no_grad()
def encode_films(vae: AutoencoderKLHunyuanVideo, batch: FilmBatch, sections: int) -> Tensor:
    """The latents' means [batch, 9 sections + 1, 16, 8, 8], unscaled, as the reference encodes a film.

    The first latent is that of the start picture alone, which is what the pipeline has.
    """
    device, count = batch.radius.device, len(batch.radius)
    tiles = 3 * sections
    frames = torch.arange(TILE_FRAMES, device=device)[None]
    frames = (frames + TILE_STRIDE * torch.arange(tiles, device=device)[:, None]).flatten()[None]
    shares = film_shares(torch.full((1,), sections, device=device), frames)
    shown = draw_frames(batch, shares.expand(count, -1))
    first = shown[:, :, :1]
    shown = shown.unflatten(2, (tiles, TILE_FRAMES)).transpose(1, 2).flatten(0, 1)
    with half_precision(device.type):
        latents = vae.quant_conv(vae.encoder(shown)).float().chunk(2, 1)[0]
        first = vae.quant_conv(vae.encoder(first)).float().chunk(2, 1)[0]
    # Of each tile of five latents the first stands in for what came before; three are this tile's own.
    latents = latents[:, :, 1:4].unflatten(0, (count, tiles)).transpose(2, 3).flatten(1, 2)
    return torch.cat([first.transpose(1, 2), latents], 1)


class LatentBank:
    """Latents of many whole films in one array, from which sections with their history are gathered."""

    def __init__(
        self,
        vae: AutoencoderKLHunyuanVideo,
        source: FilmSource,
        scaling: float,
        count: int,
        seconds: float,
    ) -> None:
        """Encode up to `count` films, but no longer than about `seconds`."""
        began = time.monotonic()
        device = source._device
        part, scale = (64, 24) if device == "cuda" else (1, 4)
        rounds = max(1, count // (part * scale))
        parts, batches, rows, offsets, lengths = [], [], [], [], []
        self.size = 0
        for _ in range(rounds):
            for sections, weight in SECTION_WEIGHTS.items():
                for _ in range(max(1, round(weight * scale))):
                    batch, drawn = source.draw(part)
                    latents = encode_films(vae, batch, sections) * scaling
                    own = latents.shape[1]
                    parts.append(latents.flatten(0, 1).bfloat16())
                    batches.append(batch)
                    rows.append(drawn)
                    offsets.append(self.size + own * torch.arange(part, device=device))
                    lengths.append(torch.full((part,), sections, device=device))
                    self.size += own * part
            if device == "cuda":
                torch.cuda.synchronize()
            if time.monotonic() - began > seconds:
                break
        zero = torch.zeros(1, LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE, device=device)
        self._latents = torch.cat([*parts, zero.bfloat16()])
        self._films = FilmBatch(
            *(torch.cat([getattr(b, name) for b in batches]) for name in ("codes", "way", "radius"))
        )
        self._rows, self._offsets = torch.cat(rows), torch.cat(offsets)
        self._sections = torch.cat(lengths)
        self.films = len(self._rows)
        longest = max(SECTION_WEIGHTS)
        table = torch.zeros(longest + 1, longest, dtype=torch.long)
        for sections in SECTION_WEIGHTS:
            table[sections, :sections] = torch.tensor(films.paddings(sections)[::-1])
        self._paddings = table.to(device)
        self._source = source

    def std(self) -> float:
        """The spread of the scaled latents."""
        return self._latents[: self.size : 7].float().std().item()

    def tiles(self, count: int) -> tuple[Tensor, Tensor]:
        """Random tiles as the decoder meets them: scaled latents [count, 16, 5, 8, 8] and their frames.

        The frames [count, 3, 17, 64, 64] begin with the first latent's last one. One tile in four begins
        with its film.
        """
        index = self._source.integers(self.films, count)
        sections, offset = self._sections[index], self._offsets[index]
        starts = WINDOW * sections + 1 - (TILE_LATENTS - 1)
        start = (self._source.rand(count) * starts).long()
        start = torch.where(self._source.rand(count) < 0.25, 0, start)
        window = start[:, None] + torch.arange(TILE_LATENTS, device=index.device)
        latents = self._latents[offset[:, None] + window].float().transpose(1, 2)
        frames = 4 * start[:, None] + torch.arange(TILE_FRAMES, device=index.device)
        shares = film_shares(sections, frames)
        return latents, draw_frames(self._films.select(index), shares)

    def sections(self, count: int) -> tuple[Tensor, ...]:
        """Random sections: film rows, start pictures, padding, start latent, section and history.

        The section is [count, 16, 9, 8, 8]; the history, [count, 16, 19, 8, 8], is zero after the film's end.
        """
        index = self._source.integers(self.films, count)
        sections, offset = self._sections[index], self._offsets[index]
        which = (self._source.rand(count) * sections).long().clamp_max(sections - 1)
        last = self._source.rand(count) < 0.25  # the end is where most is decided
        which = torch.where(last, sections - 1, which)
        begin = offset + WINDOW * which + 1
        window = begin[:, None] + torch.arange(WINDOW + sum(HISTORY), device=index.device)
        beyond = window > (offset + WINDOW * sections)[:, None]
        whole = self._latents[torch.where(beyond, self.size, window)].float().transpose(1, 2)
        batch = self._films.select(index)
        pictures = draw_frames(batch, torch.zeros(count, 1, device=index.device))[:, :, 0]
        first = self._latents[offset].float()[:, :, None]
        padding = self._paddings[sections, which]
        return (
            self._rows[index],
            pictures,
            padding,
            first,
            whole[:, :, :WINDOW],
            whole[:, :, WINDOW:],
        )


def write_tokenizers(folder: Path) -> tuple[int, int]:
    """Write both tokenizers; returns their sizes."""
    return (
        film_tokens.write_llama_tokenizer(folder / "tokenizer"),
        film_tokens.write_clip_tokenizer(folder / "tokenizer_2"),
    )
