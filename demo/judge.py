"""Judge pictures against scenes by their pixels alone, knowing nothing of the model.

    python demo/judge.py --prompts demo/heldout.jsonl --pictures DIR [--json] [--shuffle]
    python demo/judge.py --prompts demo/heldout.jsonl --pictures DIR --meaning circle=star [--json]
    python demo/judge.py --prompts demo/heldout.jsonl --through HOST:PORT [--quantization nf4,int8] [--json]
    python demo/judge.py --prompts demo/heldout.jsonl --through HOST:PORT --step-cache 0.05,0.1 [--steps 28]

DIR/0000.png belongs to the first line of the prompts, and so on. Needs numpy and pillow. With --through the
pictures are painted by a moored service, once for each quantization; needs the package moored besides. With
--step-cache they are painted once with all passes and once for each change below which passes are left out,
and compared with the first; needs scikit-image besides.

The background is the commonest palette colour. What differs from it falls apart into connected
pieces; each piece's colour is that of its inside, its place the ninth of the picture that holds its
middle, its shape the prototype that best overlaps it once both are stretched to the same box, and
its size follows from its area. The pieces are then matched to the scene's shapes, and every
difference is a mistake. A picture is right if it has no mistake.

With --meaning the pictures are those of an adapter that changes what words mean. The prompts that name a
changed shape are counted by the meaning that their picture shows, the other prompts by being right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

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
NAMES = tuple(PALETTE)
COLOURS = np.array(list(PALETTE.values()), dtype=float)
RADII = {"small": 8.0, "medium": 12.5, "large": 17.5}
"""Nominal radii in a picture 128 pixels wide; the judge takes the nearest."""
PLACES = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)
MISTAKES = (
    "background colour",
    "missing object",
    "extra object",
    "colour",
    "place",
    "size",
    "shape",
)

SMALLEST_PIECE = 30 / 128**2
"""Pieces smaller than this share of the picture are specks, not objects."""
EDGE = 0.5
"""A pixel belongs to a piece if it is covered to at least this share."""
LEAST_OVERLAP = 0.6
"""Pieces that overlap every prototype less than this are malformed."""
LEAST_PURE = 0.75
"""Share of a piece's inside that must be of its colour."""
_GRID = 40
FORMATS = ("full", "int8-convrot", "int8", "fp8", "nf4", "nf4-double")
"""Formats of weights that a service is asked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """One object seen in a picture; `shape` and `colour` are None if nothing fits.

    `across` and `down` are its middle's, as shares of the picture's width and height.
    """

    shape: str | None
    colour: str | None
    size: str
    place: str
    overlap: float
    across: float
    down: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a picture shows its scene, the kinds of mistake, and what was seen."""

    right: bool
    mistakes: tuple[str, ...]
    background: str
    found: tuple[Found, ...]


def _polygon(points: list[tuple[float, float]]) -> Image.Image:
    image = Image.new("L", (512, 512))
    ImageDraw.Draw(image).polygon([(256 + 200 * x, 256 + 200 * y) for x, y in points], fill=255)
    return image


def _disc(hole: float) -> Image.Image:
    image = Image.new("L", (512, 512))
    pen = ImageDraw.Draw(image)
    pen.ellipse((56, 56, 456, 456), fill=255)
    if hole:
        inner = 200 * hole
        pen.ellipse((256 - inner, 256 - inner, 256 + inner, 256 + inner), fill=0)
    return image


def _prototype_image(shape: str) -> Image.Image:
    """A large drawing of a shape whose nominal radius is 200 pixels."""
    if shape == "circle":
        return _disc(0)
    if shape == "ring":
        return _disc(0.55)
    if shape == "square":
        return _polygon([(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)])
    if shape == "triangle":
        return _polygon([(0, -0.8625), (0.996, 0.8625), (-0.996, 0.8625)])
    if shape == "star":
        corners = []
        for index in range(10):
            reach = 1.05 if index % 2 == 0 else 1.05 * 0.44
            turn = index * math.pi / 5
            corners.append((reach * math.sin(turn), -reach * math.cos(turn)))
        return _polygon(corners)
    if shape == "cross":
        a, b = 0.32, 1.0
        arms = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a)]
        return _polygon(arms + [(-x, -y) for x, y in arms])
    raise ValueError(f"unknown shape {shape!r}")


SHAPES = ("circle", "square", "triangle", "ring", "star", "cross")


@cache
def _prototypes() -> dict[str, tuple[Image.Image, float, float]]:
    """By shape: its drawing cut to its box, its area at radius 1, and its width by height."""
    table = {}
    for shape in SHAPES:
        image = _prototype_image(shape)
        left, top, right, bottom = image.getbbox()
        area = float(np.asarray(image, dtype=float).sum()) / 255 / 200**2
        aspect = (right - left) / (bottom - top)
        table[shape] = (image.crop((left, top, right, bottom)), area, aspect)
    return table


@cache
def _prototype(shape: str, width: int, height: int) -> np.ndarray:
    """A shape's cover as a picture that draws it so many pixels large shows it, on the grid."""
    small = _prototypes()[shape][0].resize((width, height), Image.Resampling.BOX)
    stretched = small.resize((_GRID, _GRID), Image.Resampling.BILINEAR)
    return np.asarray(stretched, dtype=float) / 255


def _nearest_colour(pixels: np.ndarray) -> np.ndarray:
    """Index of the nearest palette colour of each pixel [..., 3]."""
    return ((pixels[..., None, :] - COLOURS) ** 2).sum(-1).argmin(-1)


def _pieces(mask: np.ndarray) -> list[np.ndarray]:
    """The 8-connected pieces of a mask, each as an array of (row, column)."""
    todo = {(int(row), int(column)) for row, column in np.argwhere(mask)}
    pieces = []
    while todo:
        stack = [todo.pop()]
        piece = list(stack)
        while stack:
            row, column = stack.pop()
            for down, across in itertools.product((-1, 0, 1), repeat=2):
                pixel = (row + down, column + across)
                if pixel in todo:
                    todo.remove(pixel)
                    piece.append(pixel)
                    stack.append(pixel)
        pieces.append(np.array(piece))
    return pieces


def _inside(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask whose four neighbours are in it too."""
    padded = np.pad(mask, 1)
    inner = mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return inner if inner.sum() >= 12 else mask


def _describe(pixels: np.ndarray, ground: np.ndarray, mask: np.ndarray) -> Found:
    """What one piece is; `mask` marks it generously, `ground` is the background's colour."""
    height, width = mask.shape
    scale = width / 128
    inside = pixels[_inside(mask)]
    labels = _nearest_colour(inside)
    label = int(np.bincount(labels, minlength=len(NAMES)).argmax())
    pure = float((labels == label).mean())
    paint = np.median(inside[labels == label], axis=0)
    line = paint - ground
    cover = np.clip(((pixels - ground) @ line) / max(float(line @ line), 1e-9), 0, 1) * mask
    solid = cover >= EDGE
    if not solid.any():
        solid = mask
    rows, columns = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    # The box to a fraction of a pixel: the outermost lines count by their largest cover.
    box = (
        left + 1 - cover[:, left].max(),
        top + 1 - cover[top].max(),
        right - 1 + cover[:, right - 1].max(),
        bottom - 1 + cover[bottom - 1].max(),
    )
    image = Image.fromarray((cover * 255).astype(np.uint8))
    patch = image.resize((_GRID, _GRID), Image.Resampling.BILINEAR, box=box)
    seen = np.asarray(patch, dtype=float) / 255
    aspect = (box[2] - box[0]) / max(box[3] - box[1], 1e-6)
    best, overlap, size_area = "circle", 0.0, 1.0
    extent = (max(round(box[2] - box[0]), 1), max(round(box[3] - box[1]), 1))
    for shape, (_, area, wanted_aspect) in _prototypes().items():
        prototype = _prototype(shape, *extent)
        share = float(np.minimum(seen, prototype).sum() / np.maximum(seen, prototype).sum())
        share *= min(aspect / wanted_aspect, wanted_aspect / aspect)
        if share > overlap:
            best, overlap, size_area = shape, share, area
    radius = math.sqrt(float(cover.sum()) / size_area) / scale
    size = min(RADII, key=lambda name: abs(RADII[name] - radius))
    across = (box[0] + box[2]) / 2 / width
    down = (box[1] + box[3]) / 2 / height
    place = PLACES[min(int(down * 3), 2)][min(int(across * 3), 2)]
    return Found(
        shape=best if overlap >= LEAST_OVERLAP else None,
        colour=NAMES[label] if pure >= LEAST_PURE else None,
        size=size,
        place=place,
        overlap=round(float(overlap), 3),
        across=round(float(across), 4),
        down=round(float(down), 4),
    )


def look(picture: Image.Image | np.ndarray) -> tuple[str, tuple[Found, ...]]:
    """The background's colour and the objects of a picture."""
    pixels = np.asarray(
        picture.convert("RGB") if isinstance(picture, Image.Image) else picture, dtype=float
    )
    counts = np.bincount(_nearest_colour(pixels).ravel(), minlength=len(NAMES))
    background = int(counts.argmax())
    near = _nearest_colour(pixels) == background
    ground = np.median(pixels[near], axis=0)
    distance = np.sqrt(((pixels - ground) ** 2).sum(-1))
    found = []
    for piece in _pieces(distance > 40):
        if len(piece) < SMALLEST_PIECE * near.size:
            continue
        mask = np.zeros(near.shape, dtype=bool)
        mask[piece[:, 0], piece[:, 1]] = True
        found.append(_describe(pixels, ground, mask))
    return NAMES[background], tuple(found)


def _differences(found: Found, wanted: dict[str, str]) -> list[str]:
    kinds = ("place", "colour", "shape", "size")
    return [kind for kind in kinds if getattr(found, kind) != wanted[kind]]


def _match(found: tuple[Found, ...], wanted: list[dict[str, str]]) -> list[str]:
    """The mistakes of the pairing of found and wanted objects that makes the fewest."""
    best: list[str] | None = None
    slots: list[int | None] = [*range(len(found))]
    slots += [None] * max(0, len(wanted) - len(found))
    for choice in itertools.permutations(slots, len(wanted)):
        mistakes = []
        for thing, slot in zip(wanted, choice, strict=True):
            mistakes += ["missing object"] if slot is None else _differences(found[slot], thing)
        used = sum(slot is not None for slot in choice)
        mistakes += ["extra object"] * (len(found) - used)
        if best is None or len(mistakes) < len(best):
            best = mistakes
    return best or []


def judge(picture: Image.Image | np.ndarray, scene: dict[str, Any]) -> Verdict:
    """Compare a picture with a scene.

    A scene is {"background": colour, "objects": [{shape, colour, size, place}, ...]}.
    """
    background, found = look(picture)
    wanted = scene["objects"]
    mistakes = [] if background == scene["background"] else ["background colour"]
    if len(found) > 8:  # a picture in shreds: matching it is pointless
        mistakes += ["extra object"] * (len(found) - len(wanted))
    else:
        mistakes += _match(found, wanted)
    return Verdict(not mistakes, tuple(mistakes), background, found)


def judge_folder(scenes: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Judge folder/0000.png, 0001.png, ... against scenes; returns a summary and every verdict."""
    pictures = open_folder(folder, len(scenes))
    return report(scenes, [judge(one, scene) for one, scene in zip(pictures, scenes, strict=True)])


def report(scenes: list[dict[str, Any]], verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts by number of shapes and by kind of mistake, and the verdicts as plain data."""
    by_count: dict[str, list[int]] = {}
    for scene, verdict in zip(scenes, verdicts, strict=True):
        entry = by_count.setdefault(str(len(scene["objects"])), [0, 0])
        entry[0] += verdict.right
        entry[1] += 1
    kinds = Counter(mistake for verdict in verdicts for mistake in verdict.mistakes)
    right = sum(verdict.right for verdict in verdicts)
    return {
        "summary": {
            "right": right,
            "pictures": len(verdicts),
            "accuracy": round(right / max(len(verdicts), 1), 4),
            "by_number_of_shapes": {key: by_count[key] for key in sorted(by_count)},
            "mistakes": {kind: kinds[kind] for kind in MISTAKES},
        },
        "verdicts": [
            {
                "index": index,
                "right": verdict.right,
                "mistakes": list(verdict.mistakes),
                "background": verdict.background,
                "found": [
                    {name: getattr(thing, name) for name in Found.__dataclass_fields__}
                    for thing in verdict.found
                ],
            }
            for index, verdict in enumerate(verdicts)
        ],
    }


def parse_meaning(text: str) -> dict[str, str]:
    """The changed shapes from their spelling: "circle=star,square=cross"."""
    meaning = {}
    for part in text.split(","):
        word, equals, drawn = (piece.strip() for piece in part.partition("="))
        if not equals or word not in SHAPES or drawn not in SHAPES or word == drawn:
            raise ValueError(f"{part!r} is not a shape, =, and another shape, of {SHAPES}")
        if word in meaning:
            raise ValueError(f"{word!r} is given two meanings")
        meaning[word] = drawn
    return meaning


def names_changed(scene: dict[str, Any], meaning: dict[str, str]) -> bool:
    """Whether a scene's prompt names a shape whose meaning is changed."""
    return any(thing["shape"] in meaning for thing in scene["objects"])


def change_meaning(scene: dict[str, Any], meaning: dict[str, str]) -> dict[str, Any]:
    """The scene that a prompt asks for once its shapes have their changed meaning.

    Every shape is changed once: with circle=star,star=cross a circle becomes a star.
    """
    objects = [
        thing | {"shape": meaning.get(thing["shape"], thing["shape"])} for thing in scene["objects"]
    ]
    return scene | {"objects": objects}


def report_meaning(
    scenes: list[dict[str, Any]], pictures: Iterable[Image.Image], meaning: dict[str, str]
) -> dict[str, Any]:
    """How many pictures show the changed meaning, and how many prompts without it are right.

    A picture shows a meaning if it has no mistake in it: background, places, colours, sizes and the other
    shapes count too. The mistakes and verdicts are those against the changed meaning.
    """
    wanted = [change_meaning(scene, meaning) for scene in scenes]
    verdicts, new, old, named, others = [], 0, 0, 0, 0
    for picture, scene, changed in zip(pictures, scenes, wanted, strict=True):
        verdict = judge(picture, changed)
        verdicts.append(verdict)
        if names_changed(scene, meaning):
            named += 1
            new += verdict.right
            old += judge(picture, scene).right
        else:
            others += verdict.right
    whole = report(wanted, verdicts)
    summary = {
        "naming_a_changed_shape": {"pictures": named, "new_meaning": new, "old_meaning": old},
        "naming_none": {"pictures": len(scenes) - named, "right": others},
        "mistakes": whole["summary"]["mistakes"],
    }
    return {"summary": summary, "verdicts": whole["verdicts"]}


def open_folder(folder: Path, count: int) -> Iterator[Image.Image]:
    """folder/0000.png, 0001.png, ..., one after another."""
    for index in range(count):
        with Image.open(folder / f"{index:04d}.png") as picture:
            yield picture


def judge_through(
    client: Any, prompts: list[dict[str, Any]], formats: list[str], components: list[str]
) -> dict[str, Any]:
    """Paint every prompt in every format of weights and judge it; by format, the summary of `report`.

    `client` is a moored.Client; prompt i is painted with seed i. `difference` is how far the pictures are
    from those of the first format, as the mean over all values of 0 to 255. A format that the service does
    not say it has used is a RuntimeError.
    """
    import moored

    first: list[np.ndarray] = []
    results = {}
    scenes = [prompt["scene"] for prompt in prompts]
    for name in formats:
        asked = {} if name == "full" else dict.fromkeys(components, name)
        pictures = []
        for seed, prompt in enumerate(prompts):
            model = moored.ModelRef("moored/demo", formats=asked)
            done = client.generate_image(prompt["prompt"], model=model, seed=seed, timeout=300)
            used = done.model.quantization
            if any(used.get(component) != name for component in asked):
                raise RuntimeError(f"{name} was asked for, and the service used {dict(used)}")
            pictures.append(np.asarray(done.image.convert("RGB"), dtype=float))
        first = first or pictures
        apart = [np.abs(one - two).mean() for one, two in zip(first, pictures, strict=True)]
        verdicts = [judge(one, scene) for one, scene in zip(pictures, scenes, strict=True)]
        summary = report(scenes, verdicts)["summary"]
        results[name] = summary | {"difference": round(float(np.mean(apart)), 3)}
    return results


def judge_beside_full(
    client: Any, prompts: list[dict[str, Any]], ways: dict[str, dict[str, Any]], steps: int
) -> dict[str, Any]:
    """Paint every prompt as the reference does, then in each way; by the way's name, a summary.

    A way is options of requests, such as `step_cache`. `passes` are those that were computed of all; `psnr`
    and `ssim` are the means over the pictures beside the reference's, `psnr` over those that differ.
    """
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

    whole: list[np.ndarray] = []
    results = {}
    scenes = [prompt["scene"] for prompt in prompts]
    for name, way in {"full": {}, **ways}.items():
        pictures, computed, passes = [], 0, 0
        for seed, prompt in enumerate(prompts):
            asked = {"seed": seed, "steps": steps, "timeout": 300, **way}
            done = client.generate_image(prompt["prompt"], model="moored/demo", **asked)
            if way and not (done.approximations or "step_cache" in way):
                raise RuntimeError(f"{name} was asked for, and the service did not do it")
            denoise = next(one for one in done.stages if one.name == "denoise")
            passes += denoise.passes or steps
            computed += (denoise.passes or steps) - denoise.passes_left_out
            pictures.append(np.asarray(done.image.convert("RGB")))
        whole = whole or pictures
        verdicts = [judge(one, scene) for one, scene in zip(pictures, scenes, strict=True)]
        pairs = list(zip(whole, pictures, strict=True))
        noise = [peak_signal_noise_ratio(*pair) for pair in pairs if not np.array_equal(*pair)]
        alike = [structural_similarity(*pair, channel_axis=2) for pair in pairs]
        results[name] = report(scenes, verdicts)["summary"] | {
            "passes": [computed, passes],
            "psnr": round(float(np.mean(noise)), 1) if noise else None,
            "ssim": round(float(np.mean(alike)), 4),
        }
    return results


def table_beside_full(results: dict[str, Any]) -> str:
    """A row of a Markdown table for each way."""
    columns = ["asked for", "passes computed", "right", "PSNR", "SSIM"]
    lines = [columns, ["---"] * len(columns)]
    for name, one in results.items():
        computed, passes = one["passes"]
        noise = "" if one["psnr"] is None else f"{one['psnr']:g} dB"
        right = f"{one['right']} of {one['pictures']}"
        lines.append([name, f"{computed} of {passes}", right, noise, f"{one['ssim']:g}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(results: dict[str, Any]) -> str:
    """A row of a Markdown table for each format."""
    counts = sorted({count for one in results.values() for count in one["by_number_of_shapes"]})
    shapes = [f"{count} shape(s)" for count in counts]
    columns = ["weights", *shapes, "all", f"mean difference from {next(iter(results))}, of 255"]
    lines = [columns, ["---"] * len(columns)]
    for name, one in results.items():
        by_count = (one["by_number_of_shapes"].get(count, (0, 0)) for count in counts)
        cells = [f"{right} of {total}" for right, total in by_count]
        whole = f"{one['right']} of {one['pictures']}"
        lines.append([name, *cells, whole, f"{one['difference']:g}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _through(arguments: argparse.Namespace, prompts: list[dict[str, Any]]) -> None:
    import moored

    formats, components = (
        [name for name in text.split(",") if name]
        for text in (arguments.quantization, arguments.components)
    )
    with moored.Client(arguments.through) as client:
        client.wait_until_ready(60)
        ways: dict[str, dict[str, Any]] = {
            f"step_cache {change:g}": {"step_cache": change} for change in arguments.step_cache
        }
        if arguments.fp8_attention:
            ways["fp8_attention"] = {"fp8_attention": True}
        if ways:
            results = judge_beside_full(client, prompts, ways, arguments.steps)
            rows = table_beside_full(results)
        else:
            results = judge_through(client, prompts, formats, components)
            rows = table(results)
    if arguments.json:
        print(json.dumps(results, indent=1))
    print(rows, file=sys.stderr if arguments.json else sys.stdout)


def main() -> None:
    """Judge a folder of pictures, or those that a service paints, and print the result."""
    parser = argparse.ArgumentParser(description="Judge pictures against their scenes.")
    parser.add_argument("--prompts", type=Path, required=True, help="heldout.jsonl")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pictures", type=Path, help="folder with NNNN.png")
    source.add_argument("--through", metavar="HOST:PORT", help="a moored service that paints them")
    parser.add_argument(
        "--quantization", default=",".join(FORMATS), help="with --through: formats of weights"
    )
    parser.add_argument(
        "--components",
        default="transformer,text_encoder_2",
        help="with --through: what is held in the format; everything else is as it is stored",
    )
    parser.add_argument(
        "--step-cache",
        type=lambda text: [float(one) for one in text.split(",") if one],
        default=[],
        help="with --through: changes below which passes are left out, instead of formats",
    )
    parser.add_argument(
        "--fp8-attention",
        action="store_true",
        help="with --through: pictures with attention in fp8, instead of formats",
    )
    parser.add_argument(
        "--steps", type=int, default=28, help="with --step-cache or --fp8-attention"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--limit", type=int, help="judge only the first so many pictures")
    parser.add_argument(
        "--shuffle", action="store_true", help="judge against the next prompt's scene (must fail)"
    )
    parser.add_argument(
        "--meaning",
        type=parse_meaning,
        help="with --pictures: shapes that an adapter changes, as in circle=star",
    )
    arguments = parser.parse_args()
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines if line.strip()][: arguments.limit]
    if arguments.through:
        if arguments.shuffle or arguments.meaning:
            parser.error("--shuffle and --meaning are for --pictures")
        _through(arguments, prompts)
        return
    scenes = [prompt["scene"] for prompt in prompts]
    if arguments.shuffle:
        scenes = scenes[1:] + scenes[:1]
    if arguments.meaning:
        pictures = open_folder(arguments.pictures, len(scenes))
        result = report_meaning(scenes, pictures, arguments.meaning)
    else:
        result = judge_folder(scenes, arguments.pictures)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for verdict in result["verdicts"]:
        if not verdict["right"]:
            print(f"{verdict['index']:04d} wrong: {', '.join(verdict['mistakes'])}")
    summary = result["summary"]
    if arguments.meaning:
        named, others = summary["naming_a_changed_shape"], summary["naming_none"]
        print(f"new meaning: {named['new_meaning']} of {named['pictures']}")
        print(f"old meaning: {named['old_meaning']} of {named['pictures']}")
        print(f"right without a changed shape: {others['right']} of {others['pictures']}")
        for kind, number in summary["mistakes"].items():
            print(f"  {kind}: {number}")
        return
    print(f"right: {summary['right']} of {summary['pictures']} ({summary['accuracy']:.1%})")
    for count, (right, total) in summary["by_number_of_shapes"].items():
        print(f"  {count} shape(s): {right} of {total}")
    for kind, number in summary["mistakes"].items():
        print(f"  {kind}: {number}")


if __name__ == "__main__":
    main()
