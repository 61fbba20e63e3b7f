"""The little film language of the film model: films, prompts, drawing and the held-out rule.

A film is 64 x 64 pixels: one flat shape on a plain background, which moves in a straight line from one of
nine places to another. Shapes, colours and places are those of `demo/scenes.py`. Only numpy is needed; the
trainer draws its films on the GPU with the same signed distances.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import scenes  # noqa: E402

FRAME_SIZE = 64
RADIUS = 9.5
"""Nominal radius of a shape, in pixels."""
FRAMES_PER_SECOND = 30
WINDOW = 9
"""Latent frames of a section."""
SECTION_FRAMES = 4 * WINDOW
"""Frames that a section adds; a film has one more, its start picture."""

PLACE_JITTER = 1.5
"""Largest shift of a drawn shape from the middle of its place, in pixels along each axis."""
RADIUS_JITTER = 0.06
"""Largest relative change of a drawn shape's radius."""


@dataclass(frozen=True, slots=True)
class Film:
    """One shape that moves from `start` to `end`, places of `scenes.PLACES`."""

    shape: str
    colour: str
    background: str
    start: str
    end: str

    def key(self) -> str:
        """The canonical text of this film, which the held-out rule hashes."""
        return f"film: {self.colour} {self.shape} @ {self.start} -> {self.end}"

    def to_json(self) -> dict[str, Any]:
        """The structure that `heldout.jsonl` holds and `film_judge.py` reads."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Film:
        """The inverse of `to_json`."""
        return Film(**data)


def is_held_out(film: Film) -> bool:
    """Whether a film is never trained on, on any background: about 1 in 10."""
    digest = hashlib.sha256(film.key().encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def sample_film(rng: random.Random) -> Film:
    """A random film, held out or not; the shape's colour is not the background's."""
    background, colour = rng.sample(scenes.COLOURS, 2)
    start, end = rng.sample(scenes.PLACES, 2)
    return Film(rng.choice(scenes.SHAPES), colour, background, start, end)


def sample_training_film(rng: random.Random) -> Film:
    """A random film that the held-out rule lets the model be trained on."""
    while True:
        film = sample_film(rng)
        if not is_held_out(film):
            return film


# ---------------------------------------------------------------------------------------------
# Prompts

_VERBS = ("moves", "moves", "moves", "goes", "slides", "travels")
_CENTRES = ("centre", "center", "middle")


def _place_words(place: str) -> tuple[str, ...]:
    if place == "centre":
        return _CENTRES
    if " " not in place:
        return (place, place, f"{place} side")
    vertical, horizontal = place.split()
    synonym = {"top": "upper", "bottom": "lower"}[vertical]
    return (place, place, f"{place} corner", f"{synonym} {horizontal}")


PLACE_WORDS: dict[str, tuple[str, ...]] = {place: _place_words(place) for place in scenes.PLACES}


def _article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _noun(rng: random.Random, film: Film) -> str:
    if rng.random() < 0.04:
        return "it"
    shape = rng.choice(scenes.SHAPE_WORDS[film.shape])
    noun = shape if rng.random() < 0.08 else f"{rng.choice(_colour_words(film.colour))} {shape}"
    return f"the {noun}" if rng.random() < 0.6 else _article(noun)


def _colour_words(colour: str) -> tuple[str, ...]:
    return scenes.COLOUR_WORDS[colour]


def write_prompt(rng: random.Random, film: Film) -> str:
    """One of many phrasings of a film; each names the end place, and most name the start too."""
    article = "the " if rng.random() < 0.5 else ""
    start, end = (article + rng.choice(PLACE_WORDS[place]) for place in (film.start, film.end))
    way = f"from {start} to {end}" if rng.random() < 0.85 else f"to {end}"
    text = f"{_noun(rng, film)} {rng.choice(_VERBS)} {way}"
    colour = rng.choice(_colour_words(film.background))
    kind = rng.random()
    if kind < 0.1:
        return f"on {_article(colour)} background, {text}"
    if kind < 0.75:
        grounds = (f" on {_article(colour)} background",) * 4
        grounds += (f" on {colour}", f" against {_article(colour)} background")
        return text + rng.choice((*grounds, f", {colour} background"))
    return text


def language_words() -> list[str]:
    """Every word that a prompt can hold, sorted, without punctuation marks."""
    texts = ["a an the it on from to against background", *_VERBS]
    for table in (scenes.SHAPE_WORDS, scenes.COLOUR_WORDS, PLACE_WORDS):
        for choices in table.values():
            texts.extend(choices)
    return sorted({word for text in texts for word in text.split()})


# ---------------------------------------------------------------------------------------------
# Motion and drawing


def paddings(sections: int) -> list[int]:
    """FramePack's distance of each section from the start picture, in sections, from the end on.

    Source: `HunyuanVideoFramepackPipeline.__call__` (inverted anti-drifting sampling).
    """
    if sections > 4:
        return [3] + [2] * (sections - 3) + [1, 0]
    return list(reversed(range(sections)))


def boundaries(sections: int) -> list[float]:
    """How much of the way is done at each section's bounds, in order of time: sections + 1 shares.

    A section knows only its padding p and what comes after it, so it covers the last of p + 1 equal parts
    of the way that is left. Up to four sections that is one speed for the whole film.
    """
    shares = [1.0]
    for padding in paddings(sections):
        shares.append(shares[-1] * padding / (padding + 1))
    return shares[::-1]


def progress(sections: int, frame: float) -> float:
    """The share of the way that is done at a frame of a film of so many sections."""
    bounds = boundaries(sections)
    return float(np.interp(frame / SECTION_FRAMES, np.arange(sections + 1), bounds))


def place_middle(place: str) -> tuple[float, float]:
    """The x and y of the middle of a place, in pixels."""
    x, y = scenes.place_middle(place)
    return x * FRAME_SIZE / scenes.PICTURE_SIZE, y * FRAME_SIZE / scenes.PICTURE_SIZE


def position(film: Film, share: float) -> tuple[float, float]:
    """The x and y of a film's shape when `share` of its way is done, in pixels."""
    (x0, y0), (x1, y1) = place_middle(film.start), place_middle(film.end)
    return x0 + share * (x1 - x0), y0 + share * (y1 - y0)


def draw(film: Film, share: float, rng: random.Random | None = None) -> np.ndarray:
    """The anti-aliased frame at `share` of the way, uint8 [64, 64, 3]; with `rng`, jittered."""
    x, y = position(film, share)
    radius = RADIUS
    if rng is not None:
        x += rng.uniform(-PLACE_JITTER, PLACE_JITTER)
        y += rng.uniform(-PLACE_JITTER, PLACE_JITTER)
        radius *= 1 + rng.uniform(-RADIUS_JITTER, RADIUS_JITTER)
    axis = np.arange(FRAME_SIZE) + 0.5
    distance = scenes.signed_distance(np, film.shape, axis[None] - x, axis[:, None] - y, radius)
    cover = np.clip(0.5 - distance, 0, 1)[..., None]
    ground, paint = (np.array(scenes.PALETTE[c], float) for c in (film.background, film.colour))
    return np.round(ground + cover * (paint - ground)).astype(np.uint8)


def draw_film(film: Film, sections: int) -> np.ndarray:
    """The true film, uint8 [36 sections + 1, 64, 64, 3]."""
    count = SECTION_FRAMES * sections + 1
    return np.stack([draw(film, progress(sections, frame)) for frame in range(count)])


# ---------------------------------------------------------------------------------------------
# The held-out prompts


def held_out_prompts(count: int, seed: int = 20261123) -> list[dict[str, Any]]:
    """`count` held-out prompts; neighbours never share an end place, so that shuffled ones must fail."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        film = sample_film(rng)
        taken = {
            row["film"]["end"] for row in (rows[-1:] + (rows[:1] if len(rows) == count - 1 else []))
        }
        if is_held_out(film) and film.end not in taken:
            rows.append({"prompt": write_prompt(rng, film), "film": film.to_json()})
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
