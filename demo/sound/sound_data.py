"""Training data of the sound model, made on the device: sounds, banks of latents and encoded prompts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import melodies
import numpy as np
import sound_tokens
import torch
from diffusers import AutoencoderOobleck
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
)
from melodies import FRAME, FRAMES, RATE
from sound_networks import LATENT, WINDOW, through_tokens
from sound_training import Plan, half_precision, save
from tokenizers import Tokenizer
from torch import Tensor

SILENCE_FRAMES = 15_000
"""Of the condition encoder's silence: ten minutes, the size of diffusers' buffer."""
EDGE = 4
"""Latent frames at an end that know of it."""
QUIET = 93
"""A frame of every sound in the bank that knows neither a note nor an end."""
ROOM = FRAMES - melodies.LAST
"""Least frames from a melody's last note to the end."""
FRAME_WEIGHTS = {75: 0.12, FRAMES: 0.74, 150: 0.14}
"""How often sounds of so many frames are trained on."""
SOURCE_NOISE = 0.05
"""Spread of a source's latents, which the pipeline samples."""


@dataclass
class Sounds:
    """Melodies as tensors, all [batch]: rows of `SoundSource.tunes`, waveforms, what a seed may choose."""

    rows: Tensor
    waves: Tensor
    keys: Tensor
    loudness: Tensor
    decay: Tensor


class SoundSource:
    """Makes random training sounds on a device."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.chance = device, random.Random(seed)
        self._generator = torch.Generator(device).manual_seed(seed)
        self.tunes = melodies.training_tunes()
        self._amplitudes = torch.tensor(melodies.harmonics(), device=device)
        self._keys = torch.tensor(melodies.KEYS, device=device, dtype=torch.float32)
        timeline = np.zeros((len(self.tunes), 3, FRAMES), np.int8)
        for row, tune in enumerate(self.tunes):
            for note in melodies.Melody(tune, None).notes():
                here = slice(note.start, note.start + note.frames)
                timeline[row, 0, here] = melodies.PITCHES.index(note.pitch)
                timeline[row, 1, here] = np.arange(note.frames)
                timeline[row, 2, here] = note.frames - np.arange(note.frames)
        # Of every frame: the pitch, the frames since its note began, and those to its end (0: no note).
        self._timeline = torch.tensor(timeline, device=device)
        ends = [melodies.Melody(tune, None).end() for tune in self.tunes]
        self._ends = torch.tensor(ends, device=device)
        all_high = [
            row for row, tune in enumerate(self.tunes) if {p.pitch for p in tune} == {"high"}
        ]
        self._all_high = torch.tensor(all_high, device=device)
        by_phrases = torch.tensor([len(tune) for tune in self.tunes], device=device)
        self._by_phrases = [torch.nonzero(by_phrases == n + 1)[:, 0] for n in range(3)]

    def rand(self, *shape: int) -> Tensor:
        """Uniform numbers from 0 to 1."""
        return torch.rand(shape, device=self.device, generator=self._generator)

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, device=self.device, generator=self._generator)

    def integers(self, below: int, count: int) -> Tensor:
        """Random whole numbers."""
        return torch.randint(below, (count,), device=self.device, generator=self._generator)

    def choose(self, rows: Tensor) -> Sounds:
        """Everything that a melody leaves open, at random."""
        count = len(rows)
        low, high = melodies.LOUDNESS
        slow, fast = melodies.DECAY
        return Sounds(
            rows,
            self.integers(len(melodies.WAVES), count),
            self._keys[self.integers(len(melodies.KEYS), count)],
            low + (high - low) * self.rand(count),
            slow + (fast - slow) * self.rand(count),
        )

    def draw(self, count: int) -> Sounds:
        """Random melodies, as many of one phrase as of two and of three."""
        kinds = self.integers(3, count)
        rows = torch.zeros_like(kinds)
        for kind, tunes in enumerate(self._by_phrases):
            rows = torch.where(kinds == kind, tunes[self.integers(len(tunes), count)], rows)
        return self.choose(rows)

    def play(self, sounds: Sounds, frames: Tensor) -> Tensor:
        """The samples of the given frames [batch, count] of sounds, [batch, count x `FRAME`]."""
        timeline = self._timeline[sounds.rows].gather(2, frames[:, None].expand(-1, 3, -1)).float()
        pitch, since, left = timeline.unbind(1)
        within = torch.arange(FRAME, device=self.device) / RATE
        since = (since[..., None] * (FRAME / RATE) + within).flatten(1)
        left = (left[..., None] * (FRAME / RATE) - within).flatten(1)
        hertz = (sounds.keys[:, None] * 2**pitch).repeat_interleave(FRAME, 1)
        amplitudes = self._amplitudes[sounds.waves]
        tone = melodies.oscillate(torch, amplitudes, hertz * since, hertz)
        shape = melodies.envelope(torch, since, left, sounds.decay[:, None])
        return tone * shape * sounds.loudness[:, None]

    def clips(self, count: int, frames: int, high: float = 0.0) -> Tensor:
        """Parts of melodies for the autoencoder, mono [batch, samples]; most have notes in them.

        At least the share `high` of them is of melodies whose notes are all high.
        """
        sounds = self.draw(count)
        are_high = self._all_high[self.integers(len(self._all_high), count)]
        sounds.rows = torch.where(self.rand(count) < high, are_high, sounds.rows)
        last = (self._ends[sounds.rows] + 4).clamp(max=FRAMES - frames + 1)
        first = (self.rand(count) * last).long()
        return self.play(sounds, first[:, None] + torch.arange(frames, device=self.device))


@torch.no_grad()
def encode(vae: AutoencoderOobleck, sound: Tensor) -> Tensor:
    """The mean latents [batch, frames, channels] of mono sound [batch, samples], in f32."""
    with half_precision(sound.device.type):
        moments = vae.encoder(sound[:, None].expand(-1, 2, -1)).float()
    return moments[:, :LATENT].transpose(1, 2).contiguous()


@torch.no_grad()
def encode_silence(vae: AutoencoderOobleck) -> Tensor:
    """The latents of ten minutes of silence, [1, 15000, channels]: all but its ends are alike."""
    device = next(vae.parameters()).device
    moments = vae.encoder(torch.zeros(1, 2, FRAMES * FRAME, device=device)).float()
    short = moments[:, :LATENT].transpose(1, 2)
    return of_length(short, SILENCE_FRAMES)


def of_length(latents: Tensor, frames: int) -> Tensor:
    """Latents [batch, 100, channels] with more or less silence between the last note and the end."""
    place = torch.arange(frames, device=latents.device)
    at_end = place >= frames - EDGE
    return latents[:, torch.where(at_end, place + FRAMES - frames, place.clamp(max=QUIET))]


def bank_rows(plan: Plan, tunes: list[tuple[melodies.Phrase, ...]]) -> list[int]:
    """The melodies of a bank, as rows of `tunes`; the short ones several times."""
    rows = [row for row, tune in enumerate(tunes) for _ in range(plan.repeats[len(tune) - 1])]
    random.Random(plan.seed).shuffle(rows)
    return rows[: plan.bank]


class LatentBank:
    """The latents of sounds in all four waveforms, each of one key and loudness, held in bf16."""

    def __init__(self, vae: AutoencoderOobleck, source: SoundSource, plan: Plan) -> None:
        self._source = source
        self.rows = bank_rows(plan, source.tunes)
        ends = [melodies.Melody(source.tunes[row], None).end() for row in self.rows]
        self._fitting = {
            frames: torch.tensor(
                [i for i, end in enumerate(ends) if end + ROOM <= frames], device=source.device
            )
            for frames in FRAME_WEIGHTS
        }
        sounds = source.choose(torch.tensor(self.rows, device=source.device))
        every = torch.arange(FRAMES, device=source.device)[None]
        waves, step = [], 256
        for wave in range(len(melodies.WAVES)):
            parts = []
            for first in range(0, len(self.rows), step):
                part = Sounds(
                    *(
                        value[first : first + step]
                        for value in (
                            sounds.rows,
                            torch.full_like(sounds.waves, wave),
                            sounds.keys,
                            sounds.loudness,
                            sounds.decay,
                        )
                    )
                )
                played = source.play(part, every.expand(len(part.rows), -1))
                parts.append(encode(vae, played).bfloat16())
            waves.append(torch.cat(parts))
        self.latents = torch.stack(waves, 1)
        """[melodies, waveforms, 100, channels]."""
        self.silence = encode_silence(vae)
        self.hints: Tensor | None = None
        """What covers start from, of the shape of `latents`."""

    @torch.no_grad()
    def make_hints(
        self, tokenizer: AceStepAudioTokenizer, detokenizer: AceStepAudioTokenDetokenizer
    ) -> None:
        """Pass all latents through their tokens."""
        flat = self.latents.flatten(0, 1)
        parts = [
            through_tokens(tokenizer, detokenizer, part.float()).bfloat16()
            for part in flat.split(4096)
        ]
        self.hints = torch.cat(parts).view_as(self.latents)

    def fitting(self, frames: int, count: int) -> Tensor:
        """Rows of melodies that fit into so many frames."""
        rows = self._fitting[frames]
        return rows[self._source.integers(len(rows), count)]

    def waves(self, count: int) -> Tensor:
        """Random waveforms."""
        return self._source.integers(len(melodies.WAVES), count)

    def take(self, rows: Tensor, waves: Tensor, frames: int) -> Tensor:
        """Latents of melodies in waveforms, with silence at their end."""
        return of_length(self.latents[rows, waves].float(), frames)

    def take_hints(self, rows: Tensor, waves: Tensor, frames: int) -> Tensor:
        """The same as their tokens say them."""
        assert self.hints is not None
        return of_length(self.hints[rows, waves].float(), frames)


PROMPT_KINDS = ("text2music", "text2music", "repaint", "cover", "any waveform")
"""Of the prompts that each melody of the bank has in each waveform."""


def write_prompts(tokenizer: Tokenizer, plan: Plan, path: Path) -> None:
    """Write prompts for every melody and waveform of a bank, and what they say."""
    rng, tunes = random.Random(plan.seed), melodies.training_tunes()
    texts, said = [], []
    rows = bank_rows(plan, tunes)
    for row in rows:
        said.append([code for phrase in _padded(tunes[row]) for code in phrase])
        for wave in melodies.WAVES:
            for kind in PROMPT_KINDS:
                texts.append(_prompt_text(rng, melodies.Melody(tunes[row], wave), kind))
    encoded = [entry.ids for entry in tokenizer.encode_batch(texts)]
    longest = max(len(ids) for ids in encoded)
    table = np.zeros((len(encoded), longest), np.int16)
    for index, ids in enumerate(encoded):
        table[index, : len(ids)] = ids
    shape = (len(rows), len(melodies.WAVES), len(PROMPT_KINDS))
    lengths = np.array([len(ids) for ids in encoded])
    written = {
        "ids": torch.from_numpy(table).view(*shape, longest),
        "lengths": torch.from_numpy(lengths).view(*shape),
        "said": torch.tensor(said),
        "lyrics": torch.tensor([tokenizer.encode(sound_tokens.lyrics()).ids]),
    }
    save(path, written)


def _prompt_text(rng: random.Random, melody: melodies.Melody, kind: str) -> str:
    task = "text2music" if kind == "any waveform" else kind
    if kind == "any waveform":
        melody = melodies.Melody(melody.phrases, None)
    prompt = melodies.write_prompt(rng, melody)
    if kind == "cover" and rng.random() < 0.5 and melody.wave is not None:
        # The melody is that of the source.
        article = rng.choice(("", "a ", "as a "))
        prompt = f"{article}{rng.choice(melodies.WAVE_WORDS[melody.wave])} wave"
    seconds = melodies.SECONDS if rng.random() < 0.7 else rng.randint(2, 9)
    return sound_tokens.caption(prompt, task, seconds)


class Prompts:
    """Token ids of prompts for every melody and waveform of a bank, and what they say."""

    def __init__(self, written: dict[str, Tensor], device: str) -> None:
        """Of what `write_prompts` wrote."""
        held = {name: value.to(device) for name, value in written.items()}
        self.ids, self.lengths = held["ids"], held["lengths"]
        self.said = held["said"]
        """[melodies, phrases x 3] of counts, pitches and lengths; -1 where there is no phrase."""
        self.lyrics = held["lyrics"]

    def of(self, rows: Tensor, waves: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        """Padded ids of prompts and their bool mask, both [batch, tokens]."""
        lengths = self.lengths[rows, waves, kinds]
        mask = torch.arange(self.ids.shape[-1], device=rows.device)[None] < lengths[:, None]
        return self.ids[rows, waves, kinds].long(), mask


def _padded(tune: tuple[melodies.Phrase, ...]) -> list[tuple[int, int, int]]:
    """Counts, pitches and lengths of three phrases: 0, -1 and -1 for those that are not there."""
    codes = [
        (phrase.count, melodies.PITCHES.index(phrase.pitch), melodies.LENGTHS.index(phrase.length))
        for phrase in tune
    ]
    return codes + [(0, -1, -1)] * (melodies.MOST_PHRASES - len(tune))


@dataclass
class Batch:
    """What a step of the flow stage learns from."""

    clean: Tensor
    """[batch, frames, channels]."""
    context: Tensor
    """The source and its mask, [batch, frames, 2 channels]."""
    ids: Tensor
    mask: Tensor
    references: Tensor
    """Latents whose timbre the first of the batch have, [references, frames, channels]."""
    said: Tensor
    waves: Tensor
    """-1 where the prompt does not name it."""


@cache
def _parts(count: int, device: torch.device) -> tuple[list[int], Tensor, Tensor]:
    """Sizes of the parts of a batch, the part of each row, and the kind of prompt that it has."""
    shares = {"reference": 0.06, "any waveform": 0.05, "cover": 0.12, "repaint": 0.12}
    sizes = [int(count * share) for share in shares.values()]
    sizes.append(count - sum(sizes))
    part = torch.tensor([index for index, size in enumerate(sizes) for _ in range(size)])
    kinds = torch.tensor([4, 4, 3, 2, 0])[part]
    return sizes, part.to(device), kinds.to(device)


def draw_batch(bank: LatentBank, prompts: Prompts, source: SoundSource, count: int) -> Batch:
    """A batch of all tasks: references, prompts without a waveform, covers, repaints, then new tracks."""
    (frames,) = source.chance.choices(list(FRAME_WEIGHTS), list(FRAME_WEIGHTS.values()))
    rows, waves = bank.fitting(frames, count), bank.waves(count)
    clean = bank.take(rows, waves, frames)
    device = rows.device
    sizes, part, kinds = _parts(count, device)
    kinds = torch.where(part == 4, source.integers(2, count), kinds)
    # Some references come with a prompt that names the waveform: then the prompt decides.
    named = (part == 0) & (source.rand(count) < 0.25)
    kinds = torch.where(named, source.integers(2, count), kinds)
    ids, mask = prompts.of(rows, waves, kinds)
    silence = bank.silence[:, :frames].expand(count, -1, -1)
    covers = slice(sizes[0] + sizes[1], sum(sizes[:3]))
    repaints = slice(sum(sizes[:3]), sum(sizes[:4]))
    origin = silence.clone()
    origin[covers] = bank.take_hints(rows[covers], bank.waves(sizes[2]), frames)
    changes = torch.ones(count, frames, 1, device=device)
    length = (0.15 + 0.7 * source.rand(sizes[3], 1)) * frames
    start = source.rand(sizes[3], 1) * (frames - length)
    place = torch.arange(frames, device=device)[None]
    inside = ((place >= start.floor()) & (place < (start + length).floor())).float()[..., None]
    noisy = clean[repaints] + SOURCE_NOISE * source.randn(sizes[3], frames, LATENT)
    origin[repaints] = torch.lerp(noisy, origin[repaints], inside)
    changes[repaints] = inside
    some = slice(0, sizes[0])
    wave = torch.where(named[some], bank.waves(sizes[0]), waves[some])
    song = bank.latents[bank.fitting(FRAMES, sizes[0]), wave].float()
    repeated = torch.arange(WINDOW + 1, device=device) % FRAMES
    return Batch(
        clean,
        torch.cat([origin, changes.expand(-1, -1, LATENT)], -1),
        ids,
        mask,
        song[:, repeated],
        prompts.said[rows],
        torch.where(kinds == 4, -1, waves),
    )


def open_tokenizer(folder: Path) -> tuple[Tokenizer, int]:
    """The tokenizer, written into `folder`, and its vocabulary's size."""
    size = sound_tokens.write_tokenizer(folder / "tokenizer")
    return Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")), size
