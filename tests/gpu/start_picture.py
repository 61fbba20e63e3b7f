"""The picture that films start from."""

from __future__ import annotations

import numpy as np
from PIL import Image


def start_picture(size: tuple[int, int]) -> Image.Image:
    """Colours that change from the left to the right and from the top to the bottom."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x % 256, y % 256, (x + y) % 256], -1).astype(np.uint8))
