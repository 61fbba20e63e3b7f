"""What a service may send for a request: no more than was asked for and announced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._errors import InternalError
from ._events import Artifact

# How much larger than its pixels or samples an encoded file may be, with the recipe in it.
_FILE_FACTOR, _FILE_BYTES = 2, 16 * 1024 * 1024
# Of a result whose size was left to the model, and of all of a call: above all that a model makes.
_MOST_BYTES = 64 * 1024**3
_MOST_SIDE = 16_384
_MOST_CHANNELS = 8
_MOST_TRACKS = 32


@dataclass(frozen=True)
class Bounds:
    """Of one call. 0: what was left to the model."""

    items: int = 1
    width: int = 0
    height: int = 0
    frames: int = 0

    @staticmethod
    def unknown() -> Bounds:
        """Those of a job whose request is not known here."""
        return Bounds(items=1 << 16)

    @staticmethod
    def of(request: Any) -> Bounds:
        """Those that follow from a request."""
        said = [getattr(request, name, 0) or 0 for name in ("count", "width", "height", "frames")]
        return Bounds(max(1, said[0]), *said[1:])

    def check_item(self, item: int, kind: str) -> None:
        """Refuses what was not asked for."""
        if not 0 <= item < self.items:
            raise InternalError(
                f"The service sent {kind} number {item + 1}, and {self.items} were asked for"
            )

    def check_tracks(self, number: int) -> None:
        """Refuses more tracks than items can have."""
        if number > self.items * _MOST_TRACKS:
            raise InternalError(f"The service sent more than {number - 1} tracks")

    @staticmethod
    def check_bytes(came: int) -> None:
        """Refuses more bytes than all results of a call can have."""
        if came > _MOST_BYTES:
            raise InternalError(f"The service sent more than {_MOST_BYTES} bytes of results")

    def most_bytes(self, first: Artifact) -> int:
        """The most that an artifact may have in all, by its first piece."""
        raw = self._raw_bytes(first)
        most = raw * _FILE_FACTOR + _FILE_BYTES
        if first.total_bytes > min(most, _MOST_BYTES):
            raise artifact_error(
                first, f"announces {first.total_bytes} bytes, for {raw} of pixels or sound"
            )
        return first.total_bytes or most

    def _raw_bytes(self, first: Artifact) -> int:
        if first.audio is not None:
            sound = first.audio
            if not 1 <= sound.channels <= _MOST_CHANNELS or sound.samples_per_second < 1:
                raise artifact_error(
                    first,
                    f"has {sound.channels} channels of {sound.samples_per_second} samples a second",
                )
            return sound.samples * sound.channels * 2
        if first.video is not None:
            size = (first.video.width, first.video.height)
            frames = first.video.frames
        elif first.image is not None:
            size, frames = (first.image.width, first.image.height), 1
        else:
            sides = (2 * self.width or _MOST_SIDE) * (2 * self.height or _MOST_SIDE)
            return sides * 3 * max(1, self.frames)
        if min(*size, frames) < 1 or max(size) > _MOST_SIDE:
            raise artifact_error(first, f"has {frames} frames of {size[0]}x{size[1]}")
        asked = (self.width, self.height, self.frames)
        for has, wanted in zip((*size, frames), asked, strict=True):
            # A model may round up to what it can make.
            if wanted and has > 2 * wanted:
                raise artifact_error(
                    first, f"has {frames} frames of {size[0]}x{size[1]}, and {asked} asked"
                )
        return 3 * size[0] * size[1] * frames


def artifact_error(first: Artifact, why: str) -> InternalError:
    """The error for an artifact that is not as it was asked for or announced."""
    track = f" ({first.track})" if first.track else ""
    return InternalError(f"Artifact {first.index}{track} {why}")
