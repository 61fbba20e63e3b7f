"""What a film is asked for, and how it becomes a VIDEO of ComfyUI."""

from __future__ import annotations

from fractions import Fraction
from types import ModuleType
from typing import Any

import moored
import numpy as np
import pytest
import torch


@pytest.mark.parametrize(
    ("told", "rate"),
    [(24.0, (24, 1)), (12.5, (25, 2)), (29.97, (2997, 100)), (30_000 / 1001, (30_000, 1001))],
)
def test_a_film_has_its_true_rate(pack: ModuleType, told: float, rate: tuple[int, int]) -> None:
    """The wire has singles, and ComfyUI's encoder wants a fraction."""
    frames = torch.from_numpy(np.zeros((1, 2, 2, 3), dtype=np.float32))
    video = pack.tensors.video_of(frames, float(np.float32(told)))
    assert video.get_components().frame_rate == Fraction(*rate)


@pytest.mark.parametrize(
    ("picture", "named", "own", "size"),
    [
        ((4000, 3000), (0, 0), (640, 640), (736, 560)),
        ((3000, 4000), (0, 0), (640, 640), (560, 736)),
        ((4000, 3000), (640, 0), (640, 640), (640, 480)),
        ((4000, 3000), (0, 48), (640, 640), (64, 48)),
        ((4000, 3000), (16, 16), (640, 640), (16, 16)),
        ((90, 100), (0, 0), (0, 0), (96, 96)),
        ((4000, 10), (0, 0), (640, 640), (4096, 32)),
        ((1, 3000), (0, 0), (64, 64), (16, 3504)),
    ],
)
def test_a_film_has_the_shape_of_its_picture(
    pack: ModuleType, picture: Any, named: Any, own: Any, size: Any
) -> None:
    defaults = moored.ModelDefaults(1, 1.0, 1, *own)
    assert pack.films.size_after(picture, *named, defaults) == size


def test_seconds_need_a_rate(pack: ModuleType) -> None:
    unknown = moored.ModelDefaults(1, 1.0, 1, 64, 64)
    assert pack.films.frames_of(2.0, 12.0, unknown) == 24
    with pytest.raises(pack.failures.Failure, match="set fps"):
        pack.films.frames_of(2.0, 0.0, unknown)
