"""Latents as bytes and as arrays, and the chunks that they travel in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._extras import numpy
from ._generated import generation_pb2, model_pb2
from ._records import LatentInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_BYTES = 1024 * 1024

# Ours -> numpy's, little-endian.
_DTYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}


@dataclass(frozen=True)
class Latent:
    """A latent with its numbers: `data` is little-endian and row-major, as `info` says."""

    info: LatentInfo
    data: bytes = field(repr=False)

    @property
    def array(self) -> NDArray[Any]:
        """A numpy array of `info.shape`, made anew at each access. `bf16` comes as float32."""
        np = numpy()
        dtype = _DTYPES.get(self.info.dtype)
        if dtype is None:
            raise ValueError(f"{self.info.dtype} is no dtype that this version knows")
        flat = np.frombuffer(self.data, dtype=dtype)
        if self.info.dtype == "bf16":
            flat = (flat.astype("<u4") << 16).view("<f4")
        array: NDArray[Any] = flat.reshape(self.info.shape).copy()
        return array


def chunks_of(latent: Latent | NDArray[Any], vae_id: str) -> Iterator[generation_pb2.LatentChunk]:
    """A latent in the messages that PutLatent takes; the first carries what it is."""
    if isinstance(latent, Latent):
        shape, dtype, data = latent.info.shape, latent.info.dtype, latent.data
        vae_id = vae_id or latent.info.vae_id
    else:
        # The service takes f32; anything else that numpy can hold becomes that.
        array = numpy().ascontiguousarray(latent, dtype="<f4")
        shape, dtype, data = array.shape, "f32", array.tobytes()
    if not vae_id:
        raise ValueError("An array does not say whose VAE it is of: name it by vae_id")
    info = model_pb2.LatentInfo(shape=shape, dtype=dtype, vae_id=vae_id, bytes=len(data))
    first = generation_pb2.LatentChunk(info=info, chunk=data[:CHUNK_BYTES])
    rest = (
        generation_pb2.LatentChunk(chunk=data[start : start + CHUNK_BYTES])
        for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES)
    )
    return itertools.chain([first], rest)
