"""The little picture language of the demo model: scenes, prompts, drawing and the held-out rule.

A scene is a plain background with one to three flat shapes, each with a colour, a size and one of
nine places. Only numpy is needed; the drawing functions also accept torch tensors, so the trainer
draws its pictures on the GPU with exactly these formulas.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

PICTURE_SIZE = 128

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 40),
    "orange": (245, 140, 20),
    "yellow": (250, 225, 50),
    "green": (30, 150, 60),
    "cyan": (60, 210, 220),
    "blue": (30, 70, 210),
    "purple": (120, 40, 150),
    "pink": (250, 150, 200),
    "white": (250, 250, 250),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "ring", "star", "cross")
RADII: dict[str, float] = {"small": 8.0, "medium": 12.5, "large": 17.5}
PLACES = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
COLOURS = tuple(PALETTE)
SIZES = tuple(RADII)

MAX_OBJECTS = 3
PLACE_JITTER = 1.5
"""Largest shift of a drawn shape from the middle of its place, in pixels along each axis."""
RADIUS_JITTER = 0.04
"""Largest relative change of a drawn shape's radius."""


@dataclass(frozen=True, slots=True, order=True)
class Thing:
    """One shape of a scene."""

    shape: str
    colour: str
    size: str
    place: str

    def key(self) -> str:
        """The canonical text of this shape, which the held-out rule hashes."""
        return f"{self.size} {self.colour} {self.shape} @ {self.place}"


@dataclass(frozen=True, slots=True)
class Scene:
    """A background colour and one to three shapes at different places."""

    background: str
    objects: tuple[Thing, ...]

    def to_json(self) -> dict[str, Any]:
        """The structure that `heldout.jsonl` holds and `judge.py` reads."""
        return {"background": self.background, "objects": [asdict(thing) for thing in self.objects]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Scene:
        """The inverse of `to_json`."""
        return Scene(data["background"], tuple(Thing(**thing) for thing in data["objects"]))


# ---------------------------------------------------------------------------------------------
# Held-out rule


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@cache
def is_held_out_thing(thing: Thing) -> bool:
    """Whether this (size, colour, shape, place) is never drawn in training: about 1 in 16."""
    return _hash("thing: " + thing.key()) % 16 == 0


def is_held_out(scene: Scene) -> bool:
    """Whether a scene is never trained on, on any background.

    That is so if one of its shapes is a held-out thing, or if the combination of its shapes hashes
    to a held-out value (about 1 in 10). The order of the shapes and the background don't matter.
    """
    if any(is_held_out_thing(thing) for thing in scene.objects):
        return True
    combination = " + ".join(sorted(thing.key() for thing in scene.objects))
    return _hash("combination: " + combination) % 10 == 0


# ---------------------------------------------------------------------------------------------
# Sampling of scenes and prompts

SHAPE_WORDS: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "circle", "circle", "disc"),
    "square": ("square", "square", "square", "box"),
    "triangle": ("triangle",),
    "ring": ("ring", "ring", "ring", "hoop"),
    "star": ("star",),
    "cross": ("cross", "cross", "cross", "plus"),
}
SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "little", "tiny"),
    "medium": ("medium", "medium", "medium-sized", ""),
    "large": ("large", "large", "big", "huge"),
}
COLOUR_WORDS: dict[str, tuple[str, ...]] = {
    **{colour: (colour,) for colour in COLOURS},
    "purple": ("purple", "purple", "purple", "violet"),
}
_CENTRES = ("centre", "center", "middle")


def _corner_phrases(vertical: str, synonym: str, horizontal: str) -> tuple[str, ...]:
    return (
        f"at the {vertical} {horizontal}",
        f"at the {vertical} {horizontal}",
        f"in the {vertical} {horizontal} corner",
        f"in the {vertical} {horizontal}",
        f"in the {synonym} {horizontal}",
        f"in the {synonym} {horizontal} corner",
    )


PLACE_PHRASES: dict[str, tuple[str, ...]] = {
    "top left": _corner_phrases("top", "upper", "left"),
    "top right": _corner_phrases("top", "upper", "right"),
    "bottom left": _corner_phrases("bottom", "lower", "left"),
    "bottom right": _corner_phrases("bottom", "lower", "right"),
    "top": ("at the top", "at the top", *(f"at the top {word}" for word in _CENTRES)),
    "bottom": ("at the bottom", "at the bottom", *(f"at the bottom {word}" for word in _CENTRES)),
    "left": ("on the left", "on the left", "at the left", "on the left side", "at the middle left"),
    "right": (
        "on the right",
        "on the right",
        "at the right",
        "on the right side",
        "at the middle right",
    ),
    "centre": (*(f"in the {word}" for word in _CENTRES), "at the centre", "at the center"),
}
_OPENINGS = ("", "", "", "", "", "a picture of ", "a painting of ", "draw ", "there is ")


def sample_thing(rng: random.Random, places: list[str], background: str) -> Thing:
    """One shape at one of `places`, of another colour than the background."""
    colour = rng.choice([name for name in COLOURS if name != background])
    return Thing(rng.choice(SHAPES), colour, rng.choice(SIZES), rng.choice(places))


def sample_scene(rng: random.Random, count: int | None = None) -> Scene:
    """A random scene of `count` shapes (drawn from 1, 2 and 3 if None), held out or not."""
    if count is None:
        count = rng.choices((1, 2, 3), (0.2, 0.35, 0.45))[0]
    background = rng.choice(COLOURS)
    free = list(PLACES)
    things = []
    for _ in range(count):
        thing = sample_thing(rng, free, background)
        free.remove(thing.place)
        things.append(thing)
    return Scene(background, tuple(things))


def sample_training_scene(rng: random.Random, count: int | None = None) -> Scene:
    """A random scene that the held-out rule lets the model be trained on."""
    while True:
        scene = sample_scene(rng, count)
        if not is_held_out(scene):
            return scene


def _article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _background_word(rng: random.Random, scene: Scene) -> str:
    return rng.choice(COLOUR_WORDS[scene.background])


def write_prompt(rng: random.Random, scene: Scene) -> str:
    """One of many phrasings of a scene; the shapes are named in the scene's order."""
    terse = rng.random() < 0.1
    place_first = not terse and rng.random() < 0.2
    parts = []
    for thing in scene.objects:
        words = (
            rng.choice(SIZE_WORDS[thing.size]),
            rng.choice(COLOUR_WORDS[thing.colour]),
            rng.choice(SHAPE_WORDS[thing.shape]),
        )
        noun = " ".join(word for word in words if word)
        place = rng.choice(PLACE_PHRASES[thing.place])
        if terse:
            parts.append(f"{noun} {place.partition(' the ')[2]}")
        elif place_first:
            parts.append(f"{place} {_article(noun)}")
        else:
            parts.append(f"{_article(noun)} {place}")
    last_joint = ", " if terse else rng.choice((" and ", " and ", ", and ", ", "))
    text = parts[0]
    if len(parts) > 1:
        first_joint = " and " if last_joint == " and " and rng.random() < 0.2 else ", "
        text = first_joint.join(parts[:-1]) + last_joint + parts[-1]
    colour = _background_word(rng, scene)
    if rng.random() < 0.25:
        ground = rng.choice((f"on {_article(colour)} background", f"on {colour}"))
        if not terse and not place_first and rng.random() < 0.4:
            return f"{_article(colour)} background with {text}"
        return f"{ground}, {text}"
    ground = rng.choice(
        (
            f" on {_article(colour)} background",
            f" on {_article(colour)} background",
            f" on {_article(colour)} background",
            f" on {colour}",
            f" against {_article(colour)} background",
            f", {colour} background",
        )
    )
    opening = "" if terse or place_first else rng.choice(_OPENINGS)
    return opening + text + ground


def language_words() -> list[str]:
    """Every word that a prompt can hold, sorted, without punctuation marks."""
    texts = list(_OPENINGS) + ["a an on against background with and of the"]
    for table in (SHAPE_WORDS, SIZE_WORDS, COLOUR_WORDS, PLACE_PHRASES):
        for choices in table.values():
            texts.extend(choices)
    return sorted({word for text in texts for word in text.split()})


# ---------------------------------------------------------------------------------------------
# Drawing


def signed_distance(xp: ModuleType, shape: str, x: Any, y: Any, r: Any) -> Any:
    """(Approximate) signed distance in pixels to a shape's edge, negative inside.

    `xp` is numpy or torch; x and y are offsets from the shape's middle, y downwards; r its radius.
    """
    if shape == "square":
        return xp.maximum(xp.abs(x), xp.abs(y)) - 0.88 * r
    if shape == "triangle":
        half = 0.8625 * r
        return xp.maximum(y - half, 0.8660254 * xp.abs(x) - 0.5 * (y + half))
    if shape == "cross":
        long, short = xp.maximum(xp.abs(x), xp.abs(y)), xp.minimum(xp.abs(x), xp.abs(y))
        return xp.maximum(short - 0.32 * r, long - r)
    rho = xp.sqrt(x * x + y * y)
    if shape == "circle":
        return rho - r
    if shape == "ring":
        return xp.abs(rho - 0.775 * r) - 0.225 * r
    if shape == "star":
        tip, notch = 1.05, 1.05 * 0.44
        sector = 2 * np.pi / 5
        turn = xp.arctan2(x, -y)
        turn = xp.abs(turn - sector * xp.round(turn / sector))
        normal = np.array([tip - notch * np.cos(sector / 2), notch * np.sin(sector / 2)])
        normal /= np.linalg.norm(normal)
        across, along = float(normal[0]), float(normal[1])
        return rho * xp.sin(turn) * across + (rho * xp.cos(turn) - tip * r) * along
    raise ValueError(f"unknown shape {shape!r}")


def place_middle(place: str) -> tuple[float, float]:
    """The x and y of the middle of a place, in pixels."""
    row, column = divmod(PLACES.index(place), 3)
    return (column + 0.5) * PICTURE_SIZE / 3, (row + 0.5) * PICTURE_SIZE / 3


def draw(scene: Scene, rng: random.Random | None = None) -> np.ndarray:
    """The anti-aliased picture of a scene, uint8 [128, 128, 3]; with `rng`, jittered."""
    axis = np.arange(PICTURE_SIZE) + 0.5
    picture = np.empty((PICTURE_SIZE, PICTURE_SIZE, 3))
    picture[:] = PALETTE[scene.background]
    for thing in scene.objects:
        x, y = place_middle(thing.place)
        radius = RADII[thing.size]
        if rng is not None:
            x += rng.uniform(-PLACE_JITTER, PLACE_JITTER)
            y += rng.uniform(-PLACE_JITTER, PLACE_JITTER)
            radius *= 1 + rng.uniform(-RADIUS_JITTER, RADIUS_JITTER)
        distance = signed_distance(np, thing.shape, axis[None] - x, axis[:, None] - y, radius)
        cover = np.clip(0.5 - distance, 0, 1)[..., None]
        picture += cover * (np.array(PALETTE[thing.colour]) - picture)
    return np.round(picture).astype(np.uint8)


# ---------------------------------------------------------------------------------------------
# The held-out prompts


def held_out_prompts(per_count: int, seed: int = 20261120) -> list[dict[str, Any]]:
    """`per_count` held-out prompts for each number of shapes, in the order 1, 2, 3, 1, 2, 3, ...

    Every other scene of two or three shapes holds no held-out thing: only its combination is new.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for index in range(per_count):
        for count in (1, 2, 3):
            while True:
                scene = sample_scene(rng, count)
                new_thing = any(is_held_out_thing(thing) for thing in scene.objects)
                wanted = new_thing if count == 1 or index % 2 == 0 else not new_thing
                if is_held_out(scene) and wanted:
                    break
            rows.append({"prompt": write_prompt(rng, scene), "scene": scene.to_json()})
    return rows


def main() -> None:
    """Write the held-out prompts as one JSON object a line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("heldout.jsonl"))
    parser.add_argument("--per-count", type=int, default=80)
    arguments = parser.parse_args()
    rows = held_out_prompts(arguments.per_count)
    arguments.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} prompts written to {arguments.out}")


if __name__ == "__main__":
    main()
