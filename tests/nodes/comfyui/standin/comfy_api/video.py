"""Stand-in: a VIDEO of ComfyUI that is made of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np


@dataclass
class VideoComponents:
    """Pictures, how many of them a second, and what is heard."""

    images: Any
    frame_rate: Fraction
    audio: Any = None
    metadata: dict[str, Any] | None = None


class VideoFromComponents:
    """A VIDEO that is kept as the parts that it was made of."""

    def __init__(self, components: VideoComponents) -> None:
        pixels = components.images.numpy()
        assert pixels.dtype == np.float32
        assert pixels.ndim == 4, "[frames, H, W, C]"
        assert isinstance(components.frame_rate, Fraction), "ComfyUI gives it to its encoder"
        self._components = components

    def get_components(self) -> VideoComponents:
        """Its parts."""
        return self._components


class InputImpl:
    """Where ComfyUI has what makes its types."""

    VideoFromComponents = VideoFromComponents


class Types:
    """Where ComfyUI has what they are made of."""

    VideoComponents = VideoComponents
