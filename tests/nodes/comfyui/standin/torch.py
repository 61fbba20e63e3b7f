"""Stand-in: as much of torch's tensor as passes between the pack and ComfyUI, over numpy; and a layer."""

from __future__ import annotations

from typing import Any

import numpy as np


class Tensor:
    """A numpy array in torch's clothes."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> str:
        """Its dtype's name."""
        return str(self._array.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        """A view of a part of it."""
        return Tensor(self._array[index])

    def detach(self) -> Tensor:
        """Itself."""
        return self

    def cpu(self) -> Tensor:
        """Itself."""
        return self

    def float(self) -> Tensor:
        """As float32."""
        return Tensor(self._array.astype(np.float32))

    def numpy(self) -> np.ndarray[Any, Any]:
        """The array."""
        return self._array


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over an array."""
    return Tensor(array)


def cat(tensors: list[Tensor]) -> Tensor:
    """Tensors one after another."""
    return Tensor(np.concatenate([tensor.numpy() for tensor in tensors]))


class nn:
    """Layers."""

    class Linear:
        """A layer without weights."""

        def __init__(self, in_features: int, out_features: int) -> None:
            pass


def device(name: str) -> str:
    """A device."""
    return name
