"""The product as a table: the models that ship, in the precisions that people choose.

Every front runs every row and is held to the synchronous Python client: the command line and the asynchronous
client in `e2e/test_product.py`, the packs in `nodes/comfyui/behaviour.py` and in
`nodes/griptape/test_product.py`. A new model or precision is a row here; a new front reads the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import moored
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Medium = Literal["image", "video", "audio"]
SEED = 7
PRECISIONS = ("full", "auto", "8-bit", "4-bit")
START_SIDE = 64


@dataclass(frozen=True)
class Row:
    """A model, and the smallest request of it that is worth a look."""

    model: str
    medium: Medium
    prompt: str
    options: dict[str, Any] = field(default_factory=dict)
    """Beside model, seed and steps, by the names of the Python client."""
    needs_picture: bool = False
    """Whether it starts from a picture."""
    steps: int = 2
    precisions: tuple[str, ...] = PRECISIONS
    about: str = ""
    """What it shows, in a word, beside another row of the model."""


ROWS = (
    Row(
        "moored/demo",
        "image",
        "a large red circle in the centre on a yellow background",
        {"width": 64, "height": 64},
    ),
    Row(
        "moored/demo",
        "image",
        "a large red circle in the centre on a yellow background",
        {"width": 64, "height": 64, "negative_prompt": "a blue square", "true_guidance": 3.0},
        precisions=("full",),
        about="negative",
    ),
    Row(
        "moored/demo-film",
        "video",
        "a large red circle moves to the right",
        {"width": 64, "height": 64, "frames": 37},
        needs_picture=True,
        steps=1,
    ),
    Row("moored/demo-sound", "audio", "a slow melody", {"seconds": 1.0}),
)

CASES = [(row, precision) for row in ROWS for precision in row.precisions]


def name_of(value: object) -> str:
    """The name of a row or a precision in a test's id."""
    if not isinstance(value, Row):
        return str(value)
    name = value.model.removeprefix("moored/")
    return f"{name}-{value.about}" if value.about else name


def start_picture() -> Image.Image:
    """A picture to start from: four by four squares of colours."""
    pixels = np.random.default_rng(1).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    size = (START_SIDE, START_SIDE)
    return Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)


def model_of(row: Row, precision: str) -> moored.ModelRef:
    """The model in a precision."""
    return moored.ModelRef(row.model, quantization=precision)


def options_of(row: Row, precision: str) -> dict[str, Any]:
    """The options of a call of the Python client, but for the prompt."""
    options = row.options | {
        "model": model_of(row, precision),
        "seed": SEED,
        "steps": row.steps,
    }
    return options | ({"init_image": start_picture()} if row.needs_picture else {})


def generated(client: moored.Client, row: Row, precision: str) -> Any:
    """The result of the Python client."""
    call = {
        "image": client.generate_image,
        "video": client.generate_video,
        "audio": client.generate_audio,
    }[row.medium]
    return call(row.prompt, **options_of(row, precision))


def numbers_of(result: Any) -> NDArray[Any]:
    """Pixels, `[height, width, 3]` or `[frames, height, width, 3]`, or samples, `[samples, channels]`."""
    match result:
        case moored.ImageResult():
            return np.asarray(result.pictures[0].array)
        case moored.VideoResult():
            return np.asarray(result.film.array)
        case _:
            return np.asarray(result.tracks[0].array)
