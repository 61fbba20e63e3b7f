"""Judge sounds against what their prompts say by their samples alone, knowing nothing of the model.

    python demo/sound/sound_judge.py --prompts demo/sound/heldout.jsonl --sounds DIR [--json] [--shuffle]

DIR/0000.wav belongs to the first line of the prompts, and so on. Needs only numpy.

Notes are found by loudness; each note's pitch is its strongest frequency, and the waveform is read from the
second and third harmonics of all notes together. The melody is right if there are the prompt's notes in their
order, each of the right pitch and length; the sound is right if its waveform is right as well.
"""

from __future__ import annotations

import argparse
import json
import wave
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import melodies
import numpy as np

HOP_SECONDS, WINDOW_SECONDS = 0.005, 0.02
"""Of the loudness."""
QUIET = 0.12
"""A note is louder than this share of the loudest moment."""
SILENT = 1e-3
"""A sound whose loudest moment is below this has no notes."""
LEAST_SECONDS = 0.04
"""What is shorter is no note."""
LENGTH_SECONDS = {"short": (0.06, 0.2), "long": (0.2, 0.45)}
PITCH_HZ = {"low": (170, 300), "middle": (340, 600), "high": (680, 1200)}
"""A third of an octave around the keys of each pitch; between them there is none."""
LEAST_PURITY = 0.6
"""Least share of a note's energy that lies at the harmonics of its pitch."""
MISTAKES = ("missing note", "extra note", "pitch", "length", "noise", "waveform")


@dataclass(frozen=True, slots=True)
class Heard:
    """A note as it is heard."""

    start: float
    """In seconds."""
    seconds: float
    hertz: float
    purity: float
    second: float
    """Amplitude of the second harmonic over the first's."""
    third: float

    def pitch(self) -> str | None:
        """The pitch whose range holds the frequency."""
        return _named(PITCH_HZ, self.hertz)

    def length(self) -> str | None:
        """The length whose range holds the seconds."""
        return _named(LENGTH_SECONDS, self.seconds)


def _named(ranges: dict[str, tuple[Any, Any]], value: float) -> str | None:
    return next((name for name, (low, high) in ranges.items() if low <= value < high), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a sound has its prompt's melody and waveform, and its mistakes."""

    mistakes: tuple[str, ...]
    heard: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether there is no mistake."""
        return not self.mistakes

    @property
    def melody_right(self) -> bool:
        """Whether the notes are right, whatever their waveform."""
        return set(self.mistakes) <= {"waveform"}


def _loudness(sound: np.ndarray, rate: int) -> np.ndarray:
    """The root mean square around every hop."""
    hop, half = round(HOP_SECONDS * rate), round(WINDOW_SECONDS * rate / 2)
    total = np.concatenate([[0.0], np.cumsum(sound**2)])
    middles = np.arange(0, len(sound), hop)
    low, high = (middles - half).clip(0), (middles + half).clip(max=len(sound))
    return np.sqrt(np.maximum(total[high] - total[low], 0) / (high - low))


def _tone(sound: np.ndarray, rate: int) -> tuple[float, float, float, float]:
    """The frequency of a note's middle, its purity, and its second and third harmonics."""
    cut = len(sound) // 7
    middle = sound[cut : len(sound) - cut]
    size = 1 << (len(middle) * 4).bit_length()
    spectrum = np.abs(np.fft.rfft((middle - middle.mean()) * np.hanning(len(middle)), size))
    hertz = rate / size

    def peak(low: float, high: float) -> tuple[float, float]:
        """The strongest frequency of a range, between the bins, and its amplitude."""
        first, last = max(1, int(low / hertz)), min(len(spectrum) - 2, int(high / hertz) + 1)
        if last <= first:
            return 0.0, 0.0
        top = first + int(np.argmax(spectrum[first : last + 1]))
        left, here, right = spectrum[top - 1 : top + 2]
        bend = left - 2 * here + right
        shift = 0.5 * (left - right) / bend if bend < 0 else 0.0
        return (top + shift) * hertz, float(here)

    pitch, first = peak(100, 2000)
    second, third = (peak(n * pitch * 0.97, n * pitch * 1.03)[1] for n in (2, 3))
    # A Hann window's main lobe is four bins of the unpadded length wide.
    reach = 3 * rate / len(middle)
    away = np.abs((np.arange(len(spectrum)) * hertz / max(pitch, 1) + 0.5) % 1 - 0.5) * pitch
    purity = float((spectrum**2)[away <= reach].sum() / max((spectrum**2).sum(), 1e-12))
    return pitch, purity, second / max(first, 1e-12), third / max(first, 1e-12)


def listen(sound: np.ndarray, rate: int) -> list[Heard]:
    """The notes of a sound, [samples] or [samples, channels] of -1 to 1, in the order of time."""
    sound = np.asarray(sound, np.float64)
    if sound.ndim == 2:
        sound = sound.mean(1)
    loudness = _loudness(sound, rate)
    if not len(sound) or loudness.max() < SILENT:
        return []
    is_loud = np.concatenate([[False], loudness > QUIET * loudness.max(), [False]])
    changes = np.flatnonzero(is_loud[1:] != is_loud[:-1])
    heard = []
    for start, end in zip(changes[::2] * HOP_SECONDS, changes[1::2] * HOP_SECONDS, strict=True):
        if end - start >= LEAST_SECONDS:
            tone = _tone(sound[round(start * rate) : round(end * rate)], rate)
            heard.append(Heard(start, end - start, *tone))
    return heard


def waveform(heard: list[Heard]) -> str:
    """The waveform whose harmonics are nearest to those of the notes.

    Sawtooth has the second harmonic at half of the first; of the others, the third is a third in square, a
    ninth in triangle and nothing in sine.
    """
    second, third = (float(np.median([getattr(n, k) for n in heard])) for k in ("second", "third"))
    if second > 0.22:
        return "sawtooth"
    return "square" if third > 0.2 else "triangle" if third > 0.05 else "sine"


def judge_sound(sound: np.ndarray, rate: int, melody: melodies.Melody) -> Verdict:
    """Compare a sound, [samples] or [samples, channels], with what its prompt says."""
    heard, wanted = listen(sound, rate), melody.notes()
    words = tuple(
        f"{note.start:.2f} s: {note.seconds:.2f} s at {note.hertz:.0f} Hz" for note in heard
    )
    if len(heard) != len(wanted):
        kind = "missing note" if len(heard) < len(wanted) else "extra note"
        return Verdict((kind,) * abs(len(heard) - len(wanted)), words)
    mistakes = []
    for note, right in zip(heard, wanted, strict=True):
        mistakes += ["pitch"] * (note.pitch() != right.pitch)
        mistakes += ["length"] * (note.length() != right.length)
        mistakes += ["noise"] * (note.purity < LEAST_PURITY)
    if melody.wave is not None and waveform(heard) != melody.wave:
        mistakes.append("waveform")
    return Verdict(tuple(mistakes), words)


def report(verdicts: list[Verdict]) -> dict[str, Any]:
    """How many sounds are right, the mistakes by kind, and every verdict."""
    counts = Counter(mistake for verdict in verdicts for mistake in set(verdict.mistakes))
    right = sum(verdict.right for verdict in verdicts)
    return {
        "summary": {
            "right": right,
            "melody_right": sum(verdict.melody_right for verdict in verdicts),
            "sounds": len(verdicts),
            "accuracy": round(right / max(len(verdicts), 1), 4),
            "mistakes": {kind: counts[kind] for kind in MISTAKES},
        },
        "verdicts": [
            {
                "index": index,
                "right": verdict.right,
                "mistakes": list(verdict.mistakes),
                "heard": list(verdict.heard),
            }
            for index, verdict in enumerate(verdicts)
        ],
    }


def judge_sounds(
    sounds: Iterable[tuple[np.ndarray, int]], wanted: Iterable[melodies.Melody]
) -> dict[str, Any]:
    """`report` of sounds and their rates against what they should be, one after another."""
    pairs = zip(sounds, wanted, strict=True)
    return report([judge_sound(sound, rate, melody) for (sound, rate), melody in pairs])


def read_wav(path: Path) -> tuple[np.ndarray, int]:
    """The samples of a WAV of 16 bits, float64 [samples, channels] of -1 to 1, and their rate."""
    with wave.open(str(path), "rb") as file:
        if file.getsampwidth() != 2:
            raise ValueError(f"{path} has {8 * file.getsampwidth()} bits a sample, not 16")
        data = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return data.reshape(-1, file.getnchannels()) / 32768, file.getframerate()


def write_wav(path: Path, sound: np.ndarray, rate: int = melodies.RATE) -> None:
    """Write samples, [samples] or [samples, channels] of -1 to 1, as a WAV of 16 bits."""
    levels = np.round(np.clip(sound, -1, 1) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if levels.ndim == 1 else levels.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(levels.tobytes())


def open_folder(folder: Path, count: int) -> Iterator[tuple[np.ndarray, int]]:
    """The sounds folder/0000.wav, 0001, ..."""
    for index in range(count):
        yield read_wav(folder / f"{index:04d}.wav")


def print_summary(summary: dict[str, Any]) -> None:
    """The counts of `report` in words."""
    print(f"right: {summary['right']} of {summary['sounds']} ({summary['accuracy']:.1%})")
    print(f"melody right: {summary['melody_right']} of {summary['sounds']}")
    print("sounds with: " + ", ".join(f"{k} {n}" for k, n in summary["mistakes"].items()))


def main() -> None:
    """Judge a folder of sounds and print the result."""
    parser = argparse.ArgumentParser(description="Judge sounds against their prompts.")
    parser.add_argument("--prompts", type=Path, required=True, help="heldout.jsonl")
    parser.add_argument("--sounds", type=Path, required=True, help="folder with NNNN.wav")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--limit", type=int, help="judge only the first so many sounds")
    parser.add_argument(
        "--shuffle", action="store_true", help="judge against the next prompt's melody (must fail)"
    )
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()][: arguments.limit]
    wanted = [melodies.Melody.from_json(row["melody"]) for row in rows]
    if arguments.shuffle:
        wanted = wanted[1:] + wanted[:1]
    result = judge_sounds(open_folder(arguments.sounds, len(wanted)), wanted)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for verdict in result["verdicts"]:
        if not verdict["right"]:
            print(f"{verdict['index']:04d} wrong: {', '.join(verdict['mistakes'])}")
    print_summary(result["summary"])


if __name__ == "__main__":
    main()
