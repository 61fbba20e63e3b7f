"""The little language of the sound model: melodies, prompts, their sound and the held-out rule.

A melody is one to three phrases of one to four equal notes, all in one waveform. Notes are high, middle or
low and short or long, and begin at whole latent frames of 40 ms. Only numpy is needed; the trainer makes its
sounds on the GPU by the same formulas.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

RATE = 16_000
"""Samples a second."""
FRAME = 640
"""Samples of a latent frame: 25 frames a second, as ACE-Step has."""
SECONDS = 4
FRAMES = SECONDS * RATE // FRAME

PITCHES = ("low", "middle", "high")
"""An octave apart each."""
LENGTHS = ("short", "long")
WAVES = ("sine", "triangle", "square", "sawtooth")
MOST_PHRASES, MOST_NOTES = 3, 4

KEYS = (200, 225, 250)
"""Frequencies of the low notes, in Hz; a melody keeps to one. Each has a whole number of cycles a frame."""
SOUNDING = {"short": 3, "long": 8}
"""Frames that a note sounds."""
GAP = 2
"""Silent frames after each note."""
PAUSE = 2
"""Further silent frames between phrases."""
LEAD = 2
"""Silent frames before the first note."""
LAST = 86
"""No note sounds at or after this frame."""

ATTACK_SECONDS, RELEASE_SECONDS = 0.008, 0.015
LOUDNESS = (0.35, 0.7)
DECAY = (0.0, 2.0)
"""Exponential decay within a note, per second."""
HARMONICS = 36
HIGHEST_HZ = 7200
"""Waveforms have no harmonics above it."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """`count` equal notes."""

    count: int
    pitch: str
    length: str


@dataclass(frozen=True, slots=True)
class Note:
    """A note in time, in latent frames."""

    start: int
    frames: int
    pitch: str
    length: str


@dataclass(frozen=True, slots=True)
class Melody:
    """Phrases in a waveform; neighbours differ in pitch or length. No waveform: any."""

    phrases: tuple[Phrase, ...]
    wave: str | None

    def key(self) -> str:
        """The canonical text of this melody in any waveform, which the held-out rule hashes."""
        parts = (f"{phrase.count} {phrase.pitch} {phrase.length}" for phrase in self.phrases)
        return "melody: " + ", ".join(parts)

    def notes(self) -> list[Note]:
        """Its notes in the order of time."""
        notes, start = [], LEAD
        for phrase in self.phrases:
            for _ in range(phrase.count):
                frames = SOUNDING[phrase.length]
                notes.append(Note(start, frames, phrase.pitch, phrase.length))
                start += frames + GAP
            start += PAUSE
        return notes

    def end(self) -> int:
        """The first frame after its last note."""
        last = self.notes()[-1]
        return last.start + last.frames

    def to_json(self) -> dict[str, Any]:
        """The structure that `heldout.jsonl` holds and `sound_judge.py` reads."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Melody:
        """The inverse of `to_json`."""
        return Melody(tuple(Phrase(**phrase) for phrase in data["phrases"]), data["wave"])


def every_tune() -> list[tuple[Phrase, ...]]:
    """The phrases of every melody that fits, held out or not."""
    phrases = [
        Phrase(count, pitch, length)
        for count in range(1, MOST_NOTES + 1)
        for pitch in PITCHES
        for length in LENGTHS
    ]

    def follows(one: Phrase, two: Phrase) -> bool:
        return (one.pitch, one.length) != (two.pitch, two.length)

    tunes: list[tuple[Phrase, ...]] = [(phrase,) for phrase in phrases]
    longer = tunes
    for _ in range(MOST_PHRASES - 1):
        longer = [(*tune, last) for tune in longer for last in phrases if follows(tune[-1], last)]
        tunes = tunes + longer
    return [tune for tune in tunes if Melody(tune, None).end() <= LAST]


def is_held_out(melody: Melody) -> bool:
    """Whether a melody is never trained on, in any waveform: about 1 in 10."""
    digest = hashlib.sha256(melody.key().encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def training_tunes() -> list[tuple[Phrase, ...]]:
    """The phrases of every melody that the held-out rule lets the model be trained on."""
    return [tune for tune in every_tune() if not is_held_out(Melody(tune, None))]


# ---------------------------------------------------------------------------------------------
# Prompts

_COUNTS = (("one", "a", "a", "a single"), ("two",), ("three",), ("four",))
PITCH_WORDS = {
    "low": ("low", "low", "low", "deep"),
    "middle": ("middle", "middle", "mid", "medium"),
    "high": ("high", "high", "high", "high-pitched"),
}
LENGTH_WORDS = {"short": ("short", "short", "brief"), "long": ("long", "long", "sustained")}
_NOUNS = ("note", "note", "note", "tone", "beep")
_JOINERS = (", then ", ", then ", ", then ", " then ", ", and then ", ", followed by ")
WAVE_WORDS = {
    "sine": ("sine",),
    "triangle": ("triangle",),
    "square": ("square",),
    "sawtooth": ("sawtooth", "saw"),
}


def _phrase_words(rng: random.Random, phrase: Phrase, is_first: bool) -> str:
    count = rng.choice(_COUNTS[phrase.count - 1])
    words = [rng.choice(PITCH_WORDS[phrase.pitch]), rng.choice(LENGTH_WORDS[phrase.length])]
    if rng.random() < 0.25:
        words.reverse()
    noun = rng.choice(_NOUNS) if is_first or rng.random() < 0.6 else "one"
    return " ".join([count, *words, noun + ("s" if phrase.count > 1 else "")])


def write_prompt(rng: random.Random, melody: Melody) -> str:
    """One of many phrasings of a melody; the waveform is named if it has one."""
    text = _phrase_words(rng, melody.phrases[0], True)
    for phrase in melody.phrases[1:]:
        text += rng.choice(_JOINERS) + _phrase_words(rng, phrase, False)
    if melody.wave is not None:
        wave = f"{rng.choice(WAVE_WORDS[melody.wave])} wave"
        kind = rng.random()
        if kind < 0.7:
            text += f", {wave}"
        elif kind < 0.85:
            text += f", as a {wave}"
        else:
            text = f"{wave}: {text}"
    if rng.random() < 0.1:
        text = text[0].upper() + text[1:]
    return text + ("." if rng.random() < 0.08 else "")


def language_words() -> list[str]:
    """Every word that a prompt can hold, sorted, without punctuation, with and without a capital."""
    texts = ["ones then and followed by as a wave", *_NOUNS, *(noun + "s" for noun in _NOUNS)]
    for table in (PITCH_WORDS, LENGTH_WORDS, WAVE_WORDS):
        for choices in table.values():
            texts.extend(choices)
    for choices in _COUNTS:
        texts.extend(choices)
    words = {word for text in texts for word in text.split()}
    return sorted(words | {word.capitalize() for word in words})


# ---------------------------------------------------------------------------------------------
# Sound


def harmonics() -> np.ndarray:
    """Amplitudes of the sines that each waveform is made of, float32 [waveforms, harmonics].

    A waveform's Fourier series with its first amplitude chosen so that all sound about equally loud.
    """
    number = np.arange(1, HARMONICS + 1)
    odd = number % 2 == 1
    sign = np.where(number % 4 == 3, -1.0, 1.0)
    series = {
        "sine": (number == 1) * 1.0,
        "triangle": odd * sign / number**2,
        "square": 0.8 * odd / number,
        "sawtooth": 0.7 / number,
    }
    return np.stack([series[wave] for wave in WAVES]).astype(np.float32)


def oscillate(xp: ModuleType, amplitudes: Any, cycles: Any, hertz: Any) -> Any:
    """Tones by their Fourier series: `xp` is numpy or torch.

    `amplitudes` [..., harmonics] of `harmonics`, `cycles` [..., samples] since each tone's start, `hertz` its
    frequencies, of the same shape or broadcast to it. Harmonics above `HIGHEST_HZ` are left out.
    """
    sound = xp.zeros_like(cycles)
    for index in range(HARMONICS):
        number = index + 1
        heard = amplitudes[..., index, None] * (hertz * number <= HIGHEST_HZ)
        sound = sound + heard * xp.sin(2 * np.pi * number * cycles)
    return sound


def envelope(xp: ModuleType, since: Any, left: Any, decay: Any) -> Any:
    """Loudness within a note, `since` its start and with `left` to go, both in seconds; 0 outside."""
    edges = (since / ATTACK_SECONDS).clip(0, 1) * (left / RELEASE_SECONDS).clip(0, 1)
    return edges * xp.exp(-decay * since.clip(0))


def render(
    melody: Melody,
    *,
    key: int = KEYS[1],
    loudness: float = 0.6,
    decay: float = 1.0,
    frames: int = FRAMES,
) -> np.ndarray:
    """The true sound of a melody with a waveform, float32 [samples], `RATE` a second."""
    assert melody.wave is not None
    amplitudes = harmonics()[WAVES.index(melody.wave)]
    sound = np.zeros(frames * FRAME, np.float32)
    for note in melody.notes():
        since = np.arange(note.frames * FRAME) / RATE
        hertz = key * 2.0 ** PITCHES.index(note.pitch)
        tone = oscillate(np, amplitudes, hertz * since, hertz)
        tone = tone * envelope(np, since, note.frames * FRAME / RATE - since, decay) * loudness
        sound[note.start * FRAME :][: len(tone)] += tone[: len(sound) - note.start * FRAME]
    return sound


# ---------------------------------------------------------------------------------------------
# The held-out prompts


def held_out_prompts(count: int, seed: int = 20261123) -> list[dict[str, Any]]:
    """`count` held-out prompts, a fifth of one phrase, the rest of two and three; no neighbours are alike."""
    rng = random.Random(seed)
    tunes = [tune for tune in every_tune() if is_held_out(Melody(tune, None))]
    rows: list[dict[str, Any]] = []
    taken: list[tuple[Phrase, ...]] = []
    while len(rows) < count:
        phrases = (1, 2, 2, 3, 3)[len(rows) % 5]
        tune = rng.choice([tune for tune in tunes if len(tune) == phrases])
        if tune in taken[-1:]:
            continue
        taken.append(tune)
        melody = Melody(tune, WAVES[rng.randrange(len(WAVES))])
        rows.append({"prompt": write_prompt(rng, melody), "melody": melody.to_json()})
    return rows


def main() -> None:
    """Write the held-out prompts as one JSON object a line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("heldout.jsonl"))
    parser.add_argument("--count", type=int, default=100)
    arguments = parser.parse_args()
    rows = held_out_prompts(arguments.count)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts written to {arguments.out}")


if __name__ == "__main__":
    main()
