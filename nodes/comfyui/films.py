"""What a film is asked for where the nodes leave it to the picture, or name it in seconds."""

from __future__ import annotations

import math

import moored

from .failures import Failure
from .handles import ModelRecipe
from .schema import MAX_SIDE
from .tensors import nearest_side


async def defaults_of(client: moored.AsyncClient, model: ModelRecipe) -> moored.ModelDefaults:
    """The model's own values; all of them 0 where the service does not list it."""
    for listed in await client.list_models():
        if listed.id == model.id:
            return listed.defaults
    return moored.ModelDefaults(0, 0.0, 0, 0, 0)


def size_after(
    picture: tuple[int, int], width: int, height: int, defaults: moored.ModelDefaults
) -> tuple[int, int]:
    """Width and height of a film that starts from a picture of this width and height.

    Named ones stay. Others keep the picture's shape; where both are open (0), with about as many pixels as
    the model's own size: a photograph has more than any film.
    """
    across, down = picture
    if width and height:
        return width, height
    if width or height:
        scale = width / across if width else height / down
    else:
        pixels = defaults.width * defaults.height or across * down
        scale = math.sqrt(pixels / (across * down))
    return width or _side(across * scale), height or _side(down * scale)


def frames_of(seconds: float, frames_per_second: float, defaults: moored.ModelDefaults) -> int:
    """How many frames so many seconds are, at a rate or the model's own (0)."""
    rate = frames_per_second or defaults.frames_per_second
    if not rate:
        raise Failure("This model names no frames a second of its own: set fps beside seconds.")
    return max(1, round(seconds * rate))


def _side(pixels: float) -> int:
    return min(nearest_side(pixels), MAX_SIDE)
