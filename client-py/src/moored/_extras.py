"""The optional packages, imported when they are first needed."""

from __future__ import annotations

from types import ModuleType

_HINT = "moored[images] brings it"


def pillow() -> ModuleType:
    """`PIL.Image`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"This needs pillow: pip install pillow ({_HINT})") from error
    return Image


def numpy() -> ModuleType:
    """`numpy`."""
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError(f"This needs numpy: pip install numpy ({_HINT})") from error
    return np
