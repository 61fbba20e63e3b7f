"""Judge films against what their prompts say by their pixels alone, knowing nothing of the model.

    python demo/film/film_judge.py --prompts demo/film/heldout.jsonl --films DIR [--json] [--shuffle]

DIR/0000.npy (or .npz with one array) belongs to the first line of the prompts, and so on: the frames as
uint8 [frames, height, width, 3]. Instead of an array there may be a folder DIR/0000 with the frames as PNG
files in the order of their names. Needs numpy and pillow.

A film is looked at in its first, middle and last frame. In each the background must have the prompt's
colour and there must be one object, of the right shape and colour, no further than `TOLERANCE` from where
the motion has it. A film is right if all three frames are. It is in place if the object is where it should
be at all three moments, whatever else is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import films  # noqa: E402
import judge  # noqa: E402

TOLERANCE = 7 / 64
"""Largest distance of an object from its true position, as a share of the frame's width.

A third of the distance between neighbouring places.
"""
MOMENTS = ("start", "middle", "end")
MISTAKES = ("background colour", "missing object", "extra object", "colour", "shape", "place")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a film shows its prompt, and its mistakes as "moment: kind"."""

    right: bool
    mistakes: tuple[str, ...]
    distances: tuple[float | None, ...]
    """How far the object is from its true position at each moment, as a share of the width."""

    @property
    def in_place(self) -> bool:
        """Whether an object is near its true position at every moment, whatever it looks like."""
        return all(distance is not None and distance <= TOLERANCE for distance in self.distances)


def judge_frame(
    frame: np.ndarray, film: films.Film, share: float
) -> tuple[list[str], float | None]:
    """The mistakes of one frame when `share` of the way is done, and the object's distance."""
    background, found = judge.look(frame)
    mistakes = [] if background == film.background else ["background colour"]
    if not found:
        return [*mistakes, "missing object"], None
    x, y = (value / films.FRAME_SIZE for value in films.position(film, share))

    def distance(thing: judge.Found) -> float:
        return math.hypot(thing.across - x, thing.down - y)

    nearest = min(found, key=distance)
    mistakes += ["extra object"] * (len(found) - 1)
    mistakes += ["colour"] * (nearest.colour != film.colour)
    mistakes += ["shape"] * (nearest.shape != film.shape)
    mistakes += ["place"] * (distance(nearest) > TOLERANCE)
    return mistakes, round(distance(nearest), 4)


def judge_film(frames: np.ndarray, film: films.Film) -> Verdict:
    """Compare a film, uint8 [36 sections + 1, height, width, 3], with what its prompt says."""
    sections, rest = divmod(len(frames) - 1, films.SECTION_FRAMES)
    if frames.ndim != 4 or frames.shape[-1] != 3 or sections < 1 or rest:
        raise ValueError(f"frames of shape {frames.shape} are not 36 for each section, and one")
    mistakes: list[str] = []
    distances = []
    for moment, index in zip(MOMENTS, (0, len(frames) // 2, len(frames) - 1), strict=True):
        kinds, distance = judge_frame(frames[index], film, films.progress(sections, index))
        mistakes += [f"{moment}: {kind}" for kind in kinds]
        distances.append(distance)
    return Verdict(not mistakes, tuple(mistakes), tuple(distances))


def report(verdicts: list[Verdict]) -> dict[str, Any]:
    """How many films are right, the mistakes by moment and kind, and every verdict."""
    counts = Counter(mistake for verdict in verdicts for mistake in verdict.mistakes)
    right = sum(verdict.right for verdict in verdicts)
    return {
        "summary": {
            "right": right,
            "in_place": sum(verdict.in_place for verdict in verdicts),
            "films": len(verdicts),
            "accuracy": round(right / max(len(verdicts), 1), 4),
            "mistakes": {
                moment: {kind: counts[f"{moment}: {kind}"] for kind in MISTAKES}
                for moment in MOMENTS
            },
        },
        "verdicts": [
            {
                "index": index,
                "right": verdict.right,
                "mistakes": list(verdict.mistakes),
                "distances": list(verdict.distances),
            }
            for index, verdict in enumerate(verdicts)
        ],
    }


def judge_films(shown: Iterable[np.ndarray], wanted: Iterable[films.Film]) -> dict[str, Any]:
    """`report` of films against what they should show, one after another."""
    return report([judge_film(frames, film) for frames, film in zip(shown, wanted, strict=True)])


def open_folder(folder: Path, count: int) -> Iterator[np.ndarray]:
    """The frames of folder/0000.npy (or .npz, or folder/0000/*.png), 0001, ..."""
    for index in range(count):
        stem = folder / f"{index:04d}"
        if stem.is_dir():
            files = sorted(stem.glob("*.png"))
            yield np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
        elif stem.with_suffix(".npz").is_file():
            with np.load(stem.with_suffix(".npz")) as arrays:
                yield arrays[arrays.files[0]]
        else:
            yield np.load(stem.with_suffix(".npy"))


def print_summary(summary: dict[str, Any]) -> None:
    """The counts of `report` in words."""
    print(f"right: {summary['right']} of {summary['films']} ({summary['accuracy']:.1%})")
    print(f"in place: {summary['in_place']} of {summary['films']}")
    for moment, kinds in summary["mistakes"].items():
        print(f"  {moment}: " + ", ".join(f"{kind} {count}" for kind, count in kinds.items()))


def main() -> None:
    """Judge a folder of films and print the result."""
    parser = argparse.ArgumentParser(description="Judge films against their prompts.")
    parser.add_argument("--prompts", type=Path, required=True, help="heldout.jsonl")
    parser.add_argument("--films", type=Path, required=True, help="folder with NNNN.npy")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--limit", type=int, help="judge only the first so many films")
    parser.add_argument(
        "--shuffle", action="store_true", help="judge against the next prompt's film (must fail)"
    )
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()][: arguments.limit]
    wanted = [films.Film.from_json(row["film"]) for row in rows]
    if arguments.shuffle:
        wanted = wanted[1:] + wanted[:1]
    result = judge_films(open_folder(arguments.films, len(wanted)), wanted)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for verdict in result["verdicts"]:
        if not verdict["right"]:
            print(f"{verdict['index']:04d} wrong: {', '.join(verdict['mistakes'])}")
    print_summary(result["summary"])


if __name__ == "__main__":
    main()
