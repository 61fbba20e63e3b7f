"""Sounds of the shipped model: they play their prompts, and other tasks do what they say."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODEL = "moored/demo-sound"
PROMPT = "three high short notes, then a low long one, square wave"
SECONDS, RATE, CHANNELS = 4, 16_000, 2
# Of one, two, two, three and three phrases in turn.
SOUNDS = 20
LEAST_RIGHT = 18
# In the waveform as well.
LEAST_RIGHT_WAVEFORMS = 10

sys.path.insert(0, str(DEMO / "sound"))
# They are scripts and no package.
melodies: Any = importlib.import_module("melodies")
judge: Any = importlib.import_module("sound_judge")


@dataclass(frozen=True)
class HeldOut:
    """Prompts that the model was not trained on, and their sounds."""

    melodies: list[Any]
    sounds: list[Any]


def heard(sound: moored.AudioResult, melody: Any) -> Any:
    return judge.judge_sound(sound.array / 32768, sound.sample_rate, melody)


@pytest.fixture(scope="module")
def held_out(demo_client: moored.Client) -> HeldOut:
    lines = (DEMO / "sound/heldout.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines][:SOUNDS]
    sounds = [
        demo_client.generate_audio(row["prompt"], model=MODEL, seed=seed)
        for seed, row in enumerate(rows)
    ]
    return HeldOut([melodies.Melody.from_json(row["melody"]) for row in rows], sounds)


def test_a_sound_has_the_models_length_and_rate(held_out: HeldOut) -> None:
    for sound in held_out.sounds:
        assert sound.sample_rate == RATE
        assert sound.array.shape == (SECONDS * RATE, CHANNELS)


def test_sounds_play_their_prompts(held_out: HeldOut) -> None:
    verdicts = [heard(*pair) for pair in zip(held_out.sounds, held_out.melodies, strict=True)]
    wrong = [(verdict.mistakes, verdict.heard) for verdict in verdicts if not verdict.melody_right]
    assert len(wrong) <= SOUNDS - LEAST_RIGHT, wrong
    assert sum(verdict.right for verdict in verdicts) >= LEAST_RIGHT_WAVEFORMS


def test_sounds_do_not_play_other_prompts(held_out: HeldOut) -> None:
    others = held_out.melodies[1:] + held_out.melodies[:1]
    verdicts = [heard(*pair) for pair in zip(held_out.sounds, others, strict=True)]
    assert sum(verdict.melody_right for verdict in verdicts) == 0


def test_the_same_seed_gives_the_same_sound(demo_client: moored.Client) -> None:
    first, again, other = (
        demo_client.generate_audio(PROMPT, model=MODEL, seed=seed).array for seed in (7, 7, 8)
    )
    assert (first == again).all()
    assert (first != other).any()


def played(client: moored.Client, melody: Any) -> moored.MediaInfo:
    """The true sound of a melody, brought to the service."""
    sound = melodies.render(melody)
    samples = np.round(np.stack([sound, sound], 1) * 32767).astype("<i2")
    return client.put_media(samples, sample_rate=RATE)


def melody_of(first: str, last: str, wave: str) -> Any:
    """Three short notes of one pitch, then a long one of another."""
    phrases = (melodies.Phrase(3, first, "short"), melodies.Phrase(1, last, "long"))
    return melodies.Melody(phrases, wave)


def test_a_repaint_plays_a_part_anew(demo_client: moored.Client) -> None:
    source = played(demo_client, melody_of("high", "middle", "square"))
    last = melody_of("high", "low", "square").notes()[-1].start / 25
    made = demo_client.generate_audio(
        PROMPT, model=MODEL, seed=3, task="repaint", init_media=source, window=(last - 0.1, None)
    )
    verdict = heard(made, melody_of("high", "low", "square"))
    assert verdict.melody_right, verdict


def test_a_cover_is_the_sources_melody_in_another_waveform(
    demo_client: moored.Client,
) -> None:
    source = melody_of("middle", "low", "sine")
    made = demo_client.generate_audio(
        "sawtooth wave",
        model=MODEL,
        seed=3,
        task="cover",
        init_media=played(demo_client, source),
    )
    verdict = heard(made, melody_of("middle", "low", "sawtooth"))
    assert verdict.right, verdict
