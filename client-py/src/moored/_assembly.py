"""Pieces of results, put together as they arrive, in any order.

A film and a track are kept once, in place; a picture's chunks are joined once, at its end.
"""

from __future__ import annotations

import bisect
import mmap
from collections import deque
from collections.abc import Iterator

from ._bounds import Bounds, artifact_error
from ._errors import InternalError
from ._events import Artifact
from ._media import (
    RAW_RGB,
    RAW_VIDEO,
    SAMPLE_BYTES,
    Film,
    Frame,
    Picture,
    Samples,
    Track,
    samples_start,
)


class _Spans:
    """The bytes that are there, each of them once."""

    def __init__(self) -> None:
        # In order; no two touch.
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> tuple[int, int] | None:
        """Adds a range and gives the one that it is now in; None: a part of it was there."""
        if start >= end:
            return (start, end)
        at = bisect.bisect_left(self._spans, (start, start))
        if at and self._spans[at - 1][1] > start:
            return None
        if at < len(self._spans) and self._spans[at][0] < end:
            return None
        first, last = at, at
        if at and self._spans[at - 1][1] == start:
            first, start = at - 1, self._spans[at - 1][0]
        if at < len(self._spans) and self._spans[at][0] == end:
            last, end = at + 1, self._spans[at][1]
        self._spans[first:last] = [(start, end)]
        return (start, end)

    @property
    def prefix(self) -> int:
        """How many there are from the start on, without a gap."""
        return self._spans[0][1] if self._spans and self._spans[0][0] == 0 else 0


class Assembly:
    """A result that arrives."""

    def __init__(self, first: Artifact, bounds: Bounds) -> None:
        self.first = first
        self.most_bytes = bounds.most_bytes(first)
        self.arrived = 0
        self.whole: Picture | Film | Track | None = None
        """What it is, once all of it is there."""
        self._there = _Spans()
        self._next = 0

    def add(self, piece: Artifact) -> None:
        """Takes a piece; the last one must make it whole."""
        start = self._next if piece.offset is None else piece.offset
        end, total = start + len(piece.chunk), self.first.total_bytes
        if end > self.most_bytes:
            raise self._wrong(f"has more than its {self.most_bytes} bytes")
        span = self._there.add(start, end)
        if span is None:
            raise self._wrong(f"has bytes twice, from {start} to {end}")
        self._put(start, piece.chunk, span)
        self.arrived += len(piece.chunk)
        self._next = end
        if piece.last and total and self.arrived != total:
            raise self._wrong(f"ended after {self.arrived} of {total} bytes")
        if piece.last:
            self.whole = self._finish()

    def _put(self, start: int, chunk: bytes, span: tuple[int, int]) -> None:
        """Keeps a chunk; `span` is what there is around it now, without a gap."""
        raise NotImplementedError

    def _finish(self) -> Picture | Film | Track:
        raise NotImplementedError

    def _wrong(self, why: str) -> InternalError:
        return artifact_error(self.first, why)


class PictureAssembly(Assembly):
    """A picture that arrives. Its size may not be known before its end."""

    def __init__(self, first: Artifact, bounds: Bounds) -> None:
        super().__init__(first, bounds)
        # By the place where each begins; none of them is a part of another.
        self._chunks: dict[int, bytes] = {}

    def _put(self, start: int, chunk: bytes, span: tuple[int, int]) -> None:
        if chunk:
            self._chunks[start] = chunk

    def _finish(self) -> Picture:
        first, there = self.first, self._there.prefix
        if there != self.arrived:
            raise self._wrong(f"ended with bytes missing from {there} on")
        data = b"".join(self._chunks[start] for start in sorted(self._chunks))
        self._chunks.clear()
        if first.media_type == RAW_RGB and first.image is not None:
            whole = 3 * first.image.width * first.image.height
            if whole != len(data):
                raise self._wrong(f"has {len(data)} bytes where its pixels have {whole}")
        return Picture(first.index, first.media_type, data, first.metadata, first.track)


# Up to here a result is allocated at once.
_SMALL_BYTES = 1024 * 1024


class _InPlace(Assembly):
    """What is kept in the place that it has in the end, so that views of its parts stay true."""

    def __init__(self, first: Artifact, bounds: Bounds) -> None:
        super().__init__(first, bounds)
        self._buffer = self._memory(first.total_bytes)

    def _memory(self, size: int) -> bytearray | mmap.mmap:
        if size <= _SMALL_BYTES:
            return bytearray(size)
        # The system gives it page by page, as it is written: what is announced and never comes
        # takes none. It has no views that stand in the way, as a growing bytearray would.
        try:
            return mmap.mmap(-1, size)
        except (OSError, OverflowError, ValueError, MemoryError):
            raise self._wrong(f"announces {size} bytes, which this machine does not have") from None

    def _put(self, start: int, chunk: bytes, span: tuple[int, int]) -> None:
        end = start + len(chunk)
        if end > len(self._buffer):
            raise self._wrong(f"has more than its {len(self._buffer)} bytes")
        self._buffer[start:end] = chunk

    def _view(self, start: int, end: int) -> memoryview:
        return memoryview(self._buffer).toreadonly()[start:end]


class FilmAssembly(_InPlace):
    """A film that arrives."""

    def __init__(self, first: Artifact, bounds: Bounds) -> None:
        assert first.video is not None
        self._format = first.video
        self._frame_bytes = 3 * first.video.width * first.video.height
        whole = self._frame_bytes * first.video.frames
        if first.media_type == RAW_VIDEO and whole != first.total_bytes:
            raise artifact_error(
                first, f"has {first.total_bytes} bytes where its frames have {whole}"
            )
        super().__init__(first, bounds)
        # Numbers of frames that arrived and were not returned yet, in order of arrival.
        self._ready: deque[range] = deque()

    def _put(self, start: int, chunk: bytes, span: tuple[int, int]) -> None:
        super()._put(start, chunk, span)
        size = self._frame_bytes
        if self.first.media_type != RAW_VIDEO or not chunk:
            return
        # Of the frames that the chunk has a part of, those that are whole by it.
        first = max(start // size, -(-span[0] // size))
        last = min((start + len(chunk) - 1) // size + 1, span[1] // size)
        if first < last:
            self._ready.append(range(first, last))

    def frames(self) -> Iterator[Frame]:
        """The frames that arrived and that it has not returned yet, in order of arrival."""
        first, format_, size = self.first, self._format, self._frame_bytes
        while self._ready:
            numbers = self._ready.popleft()
            if len(numbers) > 1:
                self._ready.appendleft(numbers[1:])
            number = numbers[0]
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
            sound=format_.sound,
        )


class TrackAssembly(_InPlace):
    """A track that arrives."""

    def __init__(self, first: Artifact, bounds: Bounds) -> None:
        super().__init__(first, bounds)
        assert first.audio is not None
        self._format = first.audio
        self._told = 0

    def samples(self) -> Samples | None:
        """The samples without a gap from the start that it has not returned yet.

        None: there are none.
        """
        first, format_ = self.first, self._format
        there = self._there.prefix
        start = samples_start(first.media_type, self._view(0, there))
        if start is None:
            return None
        size = SAMPLE_BYTES * format_.channels
        there = min((there - start) // size, format_.samples)
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


def assembly_of(first: Artifact, bounds: Bounds) -> Assembly:
    """What a result is put together in, by its first piece."""
    if first.video is not None:
        return FilmAssembly(first, bounds)
    if first.audio is not None:
        return TrackAssembly(first, bounds)
    return PictureAssembly(first, bounds)
