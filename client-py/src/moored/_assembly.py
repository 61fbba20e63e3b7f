"""Pieces of results, put together as they arrive. A film and a track are kept once: in place."""

from __future__ import annotations

from collections.abc import Iterator

from ._errors import InternalError
from ._events import Artifact
from ._media import (
    RAW_VIDEO,
    SAMPLE_BYTES,
    Film,
    Frame,
    Picture,
    Samples,
    Track,
    samples_start,
)


class Assembly:
    """A result that arrives."""

    def __init__(self, first: Artifact) -> None:
        self.first = first
        self.arrived = 0
        self.whole: Picture | Film | Track | None = None
        """What it is, once all of it is there."""

    def add(self, piece: Artifact) -> None:
        """Takes the next piece; the last one must make it whole."""
        self._put(piece.chunk)
        self.arrived += len(piece.chunk)
        total = self.first.total_bytes
        if piece.last and total and self.arrived != total:
            raise self._wrong(f"ended after {self.arrived} of {total} bytes")
        if piece.last:
            self.whole = self._finish()

    def _put(self, chunk: bytes) -> None:
        raise NotImplementedError

    def _finish(self) -> Picture | Film | Track:
        raise NotImplementedError

    def _wrong(self, why: str) -> InternalError:
        track = f" ({self.first.track})" if self.first.track else ""
        return InternalError(f"Artifact {self.first.index}{track} {why}")


class PictureAssembly(Assembly):
    """A picture that arrives. Its size may not be known before its end."""

    def __init__(self, first: Artifact) -> None:
        super().__init__(first)
        self._data = bytearray()

    def _put(self, chunk: bytes) -> None:
        self._data += chunk

    def _finish(self) -> Picture:
        first, data = self.first, bytes(self._data)
        self._data.clear()
        return Picture(first.index, first.media_type, data, first.metadata, first.track)


class _InPlace(Assembly):
    """What is kept in the place that it has in the end, so that views of its start stay true."""

    def __init__(self, first: Artifact) -> None:
        super().__init__(first)
        # What is not written yet takes no memory.
        self._buffer = bytearray(first.total_bytes)

    def _put(self, chunk: bytes) -> None:
        end = self.arrived + len(chunk)
        if end > len(self._buffer):
            raise self._wrong(f"has more than its {len(self._buffer)} bytes")
        self._buffer[self.arrived : end] = chunk

    def _view(self, start: int, end: int) -> memoryview:
        return memoryview(self._buffer).toreadonly()[start:end]


class FilmAssembly(_InPlace):
    """A film that arrives."""

    def __init__(self, first: Artifact) -> None:
        super().__init__(first)
        assert first.video is not None
        self._format = first.video
        self._frame_bytes = 3 * first.video.width * first.video.height
        self._told = 0
        whole = self._frame_bytes * first.video.frames
        if first.media_type == RAW_VIDEO and whole != first.total_bytes:
            raise self._wrong(f"has {first.total_bytes} bytes where its frames have {whole}")

    def frames(self) -> Iterator[Frame]:
        """The frames that are there and that it has not given before."""
        first, format_ = self.first, self._format
        if first.media_type != RAW_VIDEO:
            return
        size = self._frame_bytes
        while self._told < format_.frames and (self._told + 1) * size <= self.arrived:
            number = self._told
            self._told += 1
            data = self._view(number * size, (number + 1) * size)
            yield Frame(first.index, number, format_.width, format_.height, data, first.track)

    def _finish(self) -> Film:
        first, format_ = self.first, self._format
        return Film(
            first.index,
            first.media_type,
            format_.width,
            format_.height,
            format_.frames,
            format_.frames_per_second,
            self._buffer,
            first.metadata,
            first.track,
        )


class TrackAssembly(_InPlace):
    """A track that arrives."""

    def __init__(self, first: Artifact) -> None:
        super().__init__(first)
        assert first.audio is not None
        self._format = first.audio
        self._told = 0

    def samples(self) -> Samples | None:
        """The samples that are there and that it has not given before; None: there are none."""
        first, format_ = self.first, self._format
        start = samples_start(first.media_type, self._view(0, self.arrived))
        if start is None:
            return None
        size = SAMPLE_BYTES * format_.channels
        there = min((self.arrived - start) // size, format_.samples)
        told, self._told = self._told, there
        if there <= told:
            return None
        data = self._view(start + told * size, start + there * size)
        rate = format_.samples_per_second
        return Samples(first.index, first.track, told, rate, format_.channels, data)

    def _finish(self) -> Track:
        first, format_ = self.first, self._format
        return Track(
            first.index,
            first.track,
            first.media_type,
            format_.samples_per_second,
            format_.channels,
            format_.samples,
            self._buffer,
            first.metadata,
        )


def assembly_of(first: Artifact) -> Assembly:
    """What a result is put together in, by its first piece."""
    if first.video is not None:
        return FilmAssembly(first)
    if first.audio is not None:
        return TrackAssembly(first)
    return PictureAssembly(first)
