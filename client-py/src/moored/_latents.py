"""Latents as bytes and as arrays, and the chunks that they travel in."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ._errors import InternalError
from ._extras import numpy
from ._generated import generation_pb2, model_pb2
from ._mirror import mirror
from ._options import message_of
from ._records import LatentInfo, TensorInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_BYTES = 1024 * 1024

# The largest latent that a model makes is far below this.
_MOST_BYTES = 16 * 1024**3

# Ours -> numpy's, little-endian.
_DTYPES = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}


@dataclass(frozen=True)
class Latent:
    """A latent with its numbers: `data` is little-endian and row-major, as `info` says."""

    info: LatentInfo
    data: bytes = field(repr=False)

    @property
    def array(self) -> NDArray[Any]:
        """A numpy array of `info.shape`, made anew at each access. `bf16` comes as float32.

        A latent of several tensors has `arrays` instead.
        """
        arrays = self.arrays
        if len(arrays) > 1:
            raise ValueError(f"The latent has several tensors, in .arrays: {', '.join(arrays)}")
        return next(iter(arrays.values()))

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Its tensors by name as numpy arrays, made anew at each access."""
        np = numpy()
        dtype = _DTYPES.get(self.info.dtype)
        if dtype is None:
            raise InternalError(f"{self.info.dtype} is no dtype that this version knows")
        if len(self.data) % np.dtype(dtype).itemsize:
            raise InternalError(f"The latent's {len(self.data)} bytes are no {self.info.dtype}")
        flat = np.frombuffer(self.data, dtype=dtype)
        if self.info.dtype == "bf16":
            flat = (flat.astype("<u4") << 16).view("<f4")
        tensors = self.info.tensors or (TensorInfo("", self.info.shape),)
        ends = [*itertools.accumulate(math.prod(tensor.shape) for tensor in tensors)]
        if ends[-1] != flat.size:
            raise InternalError(f"The latent has {flat.size} numbers; its shapes say {ends[-1]}")
        return {
            tensor.name: flat[start:end].reshape(tensor.shape).copy()
            for tensor, start, end in zip(tensors, [0, *ends], ends, strict=False)
        }


class LatentReader:
    """A latent that arrives in chunks: no more than its description says."""

    def __init__(self) -> None:
        self._info: LatentInfo | None = None
        self._data = bytearray()

    @property
    def has_begun(self) -> bool:
        """Whether a part of it is there."""
        return self._info is not None

    def add(self, chunk: generation_pb2.LatentChunk) -> None:
        """Takes a chunk; the first one has the description."""
        if self._info is None:
            if not chunk.HasField("info"):
                raise InternalError("The service sent a latent without its description")
            self._info = _checked(mirror(LatentInfo, chunk.info))
        if len(self._data) + len(chunk.chunk) > self._info.bytes:
            raise InternalError(f"The service sent more than the latent's {self._info.bytes} bytes")
        self._data += chunk.chunk

    def finish(self) -> Latent:
        """The latent, once the service has ended it."""
        if self._info is None:
            raise InternalError("The service sent a latent without its description")
        if len(self._data) != self._info.bytes:
            raise InternalError(
                f"The service sent {len(self._data)} of the latent's {self._info.bytes} bytes"
            )
        return Latent(self._info, bytes(self._data))


def _checked(info: LatentInfo) -> LatentInfo:
    """A description, if its bytes are those of its shapes."""
    dtype = _DTYPES.get(info.dtype)
    shapes = [tensor.shape for tensor in info.tensors] or [info.shape]
    # A dtype of a later version has a size that this one does not know, of 8 bytes at most.
    item_bytes = int(dtype[2:]) if dtype else 8
    announced = sum(math.prod(shape) for shape in shapes) * item_bytes
    is_wrong = info.bytes != announced if dtype else info.bytes > announced
    if is_wrong or info.bytes > _MOST_BYTES:
        most = min(announced, _MOST_BYTES)
        raise InternalError(
            f"The service announces a latent of {info.bytes} bytes, and it can have {most}"
        )
    return info


def chunks_of(
    latent: Latent | NDArray[Any] | Mapping[str, NDArray[Any]], vae_id: str
) -> Iterator[generation_pb2.LatentChunk]:
    """A latent in the messages that PutLatent takes; the first has its description."""
    if isinstance(latent, Latent):
        info, data = latent.info, latent.data
        shape, dtype, tensors = info.shape, info.dtype, info.tensors
        vae_id = vae_id or info.vae_id
    else:
        # The service takes f32; anything else that numpy can hold becomes that.
        named = latent if isinstance(latent, Mapping) else {"": latent}
        arrays = {
            name: numpy().ascontiguousarray(array, dtype="<f4") for name, array in named.items()
        }
        if not arrays:
            raise ValueError(
                "A latent needs at least one tensor: give an array, or a mapping with one"
            )
        tensors = tuple(TensorInfo(name, array.shape) for name, array in arrays.items() if name)
        shape, dtype = next(iter(arrays.values())).shape, "f32"
        data = b"".join(array.tobytes() for array in arrays.values())
    if not vae_id:
        raise ValueError("An array does not say whose VAE it is of: name it by vae_id")
    info_out = message_of(
        model_pb2.LatentInfo, shape=shape, dtype=dtype, vae_id=vae_id, bytes=len(data)
    )
    for tensor in tensors:
        info_out.tensors.append(
            message_of(model_pb2.TensorInfo, "tensors", name=tensor.name, shape=tensor.shape)
        )
    first = generation_pb2.LatentChunk(info=info_out, chunk=data[:CHUNK_BYTES])
    rest = (
        generation_pb2.LatentChunk(chunk=data[start : start + CHUNK_BYTES])
        for start in range(CHUNK_BYTES, len(data), CHUNK_BYTES)
    )
    return itertools.chain([first], rest)
