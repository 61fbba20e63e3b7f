"""The judge accepts true sounds and refuses others. Run: pytest demo/sound."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import melodies  # noqa: E402
import sound_judge  # noqa: E402
from melodies import Melody, Phrase  # noqa: E402


def _sampled(count: int, seed: int = 7) -> list[Melody]:
    rng = random.Random(seed)
    tunes = melodies.every_tune()
    return [Melody(rng.choice(tunes), rng.choice(melodies.WAVES)) for _ in range(count)]


def _true(melody: Melody, rng: random.Random) -> np.ndarray:
    return melodies.render(
        melody,
        key=rng.choice(melodies.KEYS),
        loudness=rng.uniform(*melodies.LOUDNESS),
        decay=rng.uniform(*melodies.DECAY),
    )


def _judge(sound: np.ndarray, melody: Melody) -> sound_judge.Verdict:
    return sound_judge.judge_sound(sound, melodies.RATE, melody)


def test_accepts_true_sounds_with_some_noise() -> None:
    rng, noise = random.Random(1), np.random.default_rng(1)
    for melody in _sampled(60):
        sound = _true(melody, rng)
        sound = sound + 0.005 * noise.standard_normal(len(sound))
        assert _judge(sound, melody).right, (melody, _judge(sound, melody))


def test_refuses_the_next_prompts_sound() -> None:
    rng, wanted = random.Random(2), _sampled(40, seed=3)
    for melody, other in zip(wanted, wanted[1:] + wanted[:1], strict=True):
        assert melody.phrases != other.phrases
        assert not _judge(_true(other, rng), melody).melody_right


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("missing note", {"count": 2}),
        ("extra note", {"count": 4}),
        ("pitch", {"pitch": "low"}),
        ("pitch", {"pitch": "high"}),
        ("length", {"length": "long"}),
    ],
)
def test_names_the_changed_attribute(kind: str, change: dict[str, int | str]) -> None:
    phrase = Phrase(3, "middle", "short")
    for wave in melodies.WAVES:
        melody = Melody((phrase, Phrase(1, "low", "long")), wave)
        changed = Melody((replace(phrase, **change), melody.phrases[1]), wave)
        verdict = _judge(melodies.render(changed), melody)
        assert set(verdict.mistakes) == {kind}, verdict
        assert not verdict.melody_right


def test_the_order_of_notes_counts() -> None:
    high, low = Phrase(2, "high", "short"), Phrase(2, "low", "short")
    verdict = _judge(melodies.render(Melody((high, low), "sine")), Melody((low, high), "sine"))
    assert verdict.mistakes == ("pitch",) * 4


def test_tells_every_waveform_from_every_other() -> None:
    rng = random.Random(4)
    for melody in _sampled(8, seed=5):
        for wave in melodies.WAVES:
            sound = _true(replace(melody, wave=wave), rng)
            expected = () if wave == melody.wave else ("waveform",)
            verdict = _judge(sound, melody)
            assert verdict.mistakes == expected and verdict.melody_right
            assert _judge(sound, replace(melody, wave=None)).right


def test_refuses_silence_and_noise() -> None:
    melody = Melody((Phrase(2, "low", "long"),), "square")
    nothing = np.zeros(melodies.FRAMES * melodies.FRAME)
    assert _judge(nothing, melody).mistakes == ("missing note",) * 2
    assert not _judge(np.zeros(0), melody).right
    hiss = np.random.default_rng(0).standard_normal(len(nothing)) * 0.1
    assert not _judge(hiss, melody).right
    # Noise in the rhythm of the notes has their number and lengths, but no pitch.
    beats = hiss * (np.abs(melodies.render(replace(melody, wave="sine"))) > 0.001)
    assert "noise" in _judge(beats, melody).mistakes


def test_a_wav_is_judged_at_its_own_rate(tmp_path: Path) -> None:
    melody = Melody((Phrase(2, "high", "short"), Phrase(1, "low", "long")), "sawtooth")
    sound = melodies.render(melody)
    stereo = np.stack([sound, sound], 1)
    sound_judge.write_wav(tmp_path / "0000.wav", stereo)
    times = np.arange(0, len(sound), melodies.RATE / 44_100)
    resampled = np.interp(times, np.arange(len(sound)), sound)
    sound_judge.write_wav(tmp_path / "0001.wav", resampled, rate=44_100)
    result = sound_judge.judge_sounds(sound_judge.open_folder(tmp_path, 2), [melody] * 2)
    assert result["summary"]["right"] == 2
    samples, rate = sound_judge.read_wav(tmp_path / "0000.wav")
    assert samples.shape == stereo.shape and rate == melodies.RATE
    assert np.abs(samples - stereo).max() < 1e-4


def test_held_out_prompts_are_held_out_and_neighbours_differ() -> None:
    rows = [json.loads(line) for line in (HERE / "heldout.jsonl").read_text().splitlines()]
    assert rows == json.loads(json.dumps(melodies.held_out_prompts(len(rows)))) and len(rows) == 100
    wanted = [Melody.from_json(row["melody"]) for row in rows]
    assert all(melodies.is_held_out(melody) for melody in wanted)
    neighbours = zip(wanted, wanted[1:] + wanted[:1], strict=True)
    assert all(one.phrases != two.phrases for one, two in neighbours)


def test_one_melody_in_ten_is_held_out_whatever_its_waveform() -> None:
    every, trained = melodies.every_tune(), melodies.training_tunes()
    assert 0.07 < 1 - len(trained) / len(every) < 0.13
    held = set(every) - set(trained)
    assert all(melodies.is_held_out(Melody(tune, wave)) for tune in held for wave in melodies.WAVES)
    assert all(Melody(tune, None).end() <= melodies.LAST for tune in every)


def test_prompts_use_the_languages_words() -> None:
    rng, words = random.Random(9), set(melodies.language_words())
    for melody in _sampled(300):
        prompt = melodies.write_prompt(rng, melody)
        for mark in (",", ".", ":"):
            prompt = prompt.replace(mark, "")
        assert set(prompt.split()) <= words
