"""What a job makes: pictures, films with their frames, tracks with their samples."""

from __future__ import annotations

import base64
import io
import itertools
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._errors import InternalError
from ._extras import numpy, pillow
from ._saving import (
    exif_of,
    picture_file,
    recipe_in,
    wav_file,
    with_recipe,
    write,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

    from ._records import AudioTrackFormat

PNG = "image/png"
RAW_RGB = "image/x-raw-rgb"
RAW_VIDEO = "video/x-raw-rgb"
MP4 = "video/mp4"
WAV = "audio/wav"
FLAC = "audio/flac"
RAW_AUDIO = "audio/x-raw-s16le"

SAMPLE_BYTES = 2
"""Of one channel: 16-bit little-endian."""

# What pillow writes well of a film, by a file's ending: its name for it, and in how many
# milliseconds the format counts a frame's time.
_ANIMATIONS = {
    ".png": ("PNG", 1),
    ".apng": ("PNG", 1),
    ".webp": ("WEBP", 1),
    ".gif": ("GIF", 10),
}
_PICTURES = (".png", ".jpg", ".jpeg", ".webp")
_RAW_ENDINGS = (".rgb", ".raw")


class _Made:
    """What the service made; its metadata say how."""

    metadata: Mapping[str, str]

    @property
    def seed(self) -> int | None:
        """The seed that it was made with; None where the service sent none."""
        said = self.metadata.get("seed")
        return _number(self.metadata, "seed") if said is not None else None

    @property
    def recipe(self) -> Mapping[str, Any]:
        """What it was made with; empty where the service was asked to leave that out."""
        return recipe_in(self.metadata)


@dataclass(frozen=True)
class Picture(_Made):
    """A picture as it came: `data` is a PNG, or raw RGB, as `media_type` says."""

    index: int
    """Its place among the pictures of the job, from 0."""
    media_type: str
    """`image/png` or `image/x-raw-rgb`."""
    data: bytes = field(repr=False)
    """The bytes of the file, or of the pixels: 8 bits a channel, row-major."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Width, height, seed, prompt and the like, as text."""
    track: str = ""
    """Which of several results of one item; empty where there is one alone."""

    @cached_property
    def image(self) -> Image.Image:
        """A PIL image, decoded once. Needs `moored[images]`."""
        image: Image.Image
        opened = pillow()
        try:
            if self.media_type == RAW_RGB:
                image = opened.frombytes("RGB", self._size, self.data)
            else:
                image = opened.open(io.BytesIO(self.data))
                image.load()
        except (OSError, ValueError, SyntaxError, opened.DecompressionBombError) as problem:
            raise InternalError(
                f"Picture {self.index} came as {self.media_type} that cannot be read: {problem}"
            ) from None
        return image

    @property
    def _size(self) -> tuple[int, int]:
        width, height = _number(self.metadata, "width"), _number(self.metadata, "height")
        if 3 * width * height != len(self.data):
            raise InternalError(
                f"Picture {self.index} has {len(self.data)} bytes, and is said to be "
                f"{width}x{height}"
            )
        return width, height

    def _repr_png_(self) -> bytes:
        return self._png()

    @cached_property
    def array(self) -> NDArray[Any]:
        """A numpy array, uint8, [height, width, 3]; raw RGB is not copied.

        It cannot be written. Needs `moored[images]`.
        """
        if self.media_type == RAW_RGB:
            width, height = self._size
            return pixels_of(self.data, height, width)
        array: NDArray[Any] = numpy().asarray(self.image.convert("RGB"))
        return array

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes it to a file, with the recipe in it: `.png`, `.jpg` or `.webp`.

        A `.png` of a picture that came as one needs nothing more; the others need
        `moored[images]`. A file that is there is replaced by
        `overwrite` alone; else the name is counted up. Returns the path.
        """
        ending = Path(path).suffix.lower()
        if ending not in _PICTURES:
            named = repr(ending) if ending else "a file without an ending"
            raise ValueError(
                f"A picture is not saved as {named}: {', '.join(_PICTURES)}. Pillow has other "
                "formats, without the recipe: .image.save(path)"
            )
        if ending != ".png":
            data = picture_file(self.image, ending, self.metadata)
        else:
            data = with_recipe(self._png(), self.metadata)
        return write(path, data, overwrite)

    def _png(self) -> bytes:
        if self.media_type == PNG:
            return self.data
        file = io.BytesIO()
        self.image.save(file, format="PNG")
        return file.getvalue()


@dataclass(frozen=True)
class Frame:
    """A frame of a film. Its bytes are those of the film, not a copy."""

    index: int
    """The film's place among the films of the job, from 0."""
    number: int
    """Its place in the film, from 0."""
    width: int
    height: int
    data: memoryview = field(repr=False)
    """RGB, 8 bits a channel, row-major. Not to be written."""
    track: str = ""
    """Which of several films of one item; empty where there is one alone."""

    @property
    def array(self) -> NDArray[Any]:
        """A numpy array, uint8, [height, width, 3], without a copy: it cannot be written.

        Needs `moored[images]`.
        """
        return pixels_of(self.data, self.height, self.width)

    @property
    def image(self) -> Image.Image:
        """A PIL image, made anew at each access. Needs `moored[images]`."""
        image: Image.Image = pillow().frombytes("RGB", (self.width, self.height), self.data)
        return image


@dataclass(frozen=True)
class Film(_Made):
    """A film as it came: `data` is an MP4 file, or its raw frames, as `media_type` says."""

    index: int
    """Its place among the films of the job, from 0."""
    media_type: str
    """`video/mp4`, or `video/x-raw-rgb`: frame after frame, RGB, 8 bits a channel."""
    width: int
    height: int
    frame_count: int
    frames_per_second: float
    _buffer: bytes | bytearray | mmap.mmap = field(repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Width, height, seed, prompt and the like, as text."""
    track: str = ""
    """Which of several films of one item; empty where there is one alone."""
    _file: bytes | None = field(default=None, repr=False)
    sound: AudioTrackFormat | None = None
    """What its sound is; None: it is silent. The samples are in the result's `audio`."""

    def __getstate__(self) -> dict[str, Any]:
        return _kept(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if self._file is None and self.media_type != MP4:
            return {"text/plain": repr(self)}
        return _shown(self, "video", MP4, self._mp4())

    @property
    def data(self) -> memoryview:
        """Its bytes, without a copy. Not to be written."""
        return memoryview(self._buffer).toreadonly()

    @property
    def mp4(self) -> bytes:
        """The MP4 file, with the recipe in it, unless it came by `output="raw"`."""
        return bytes(self._mp4())

    @property
    def array(self) -> NDArray[Any]:
        """A numpy array, uint8, [frames, height, width, 3], without a copy: it cannot be written.

        Needs `moored[images]`.
        """
        return pixels_of(self._raw(), self.frame_count, self.height, self.width)

    @property
    def frames(self) -> list[Image.Image]:
        """Its frames as PIL images, made anew at each access. Needs `moored[images]`."""
        return [self.frame(number).image for number in range(self.frame_count)]

    def frame(self, number: int) -> Frame:
        """One of its frames, from 0."""
        if not 0 <= number < self.frame_count:
            raise IndexError(f"Film {self.index} has {self.frame_count} frames, not {number + 1}")
        size = self.width * self.height * 3
        data = self._raw()[number * size : (number + 1) * size]
        return Frame(self.index, number, self.width, self.height, data, self.track)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes it to a file, in the format of its ending.

        `.mp4` is the file that came by `output="raw+mp4"`, the default, or by `output="mp4"`, and
        then the only one; it alone has the sound. Of frames, `.png` or `.apng`, `.webp` and `.gif`
        are animations, at the film's rate to the nearest millisecond (`.gif`: hundredth of a
        second); they need `moored[images]`. `.rgb` and `.raw` are its bytes as they are. Other
        formats are for other libraries: they take `array`, or the frames as they come. `.mp4`,
        `.png` and `.webp` have the recipe in them. A file that is there is replaced by
        `overwrite` alone; else the name is counted up. Returns the path.
        """
        ending = Path(path).suffix.lower()
        if ending == ".mp4" or self.media_type == MP4:
            if ending != ".mp4":
                raise ValueError(f"It came as an MP4: name a file .mp4, not {ending or path!r}")
            return write(path, self._mp4(), overwrite)
        if ending in _RAW_ENDINGS:
            return write(path, self.data, overwrite)
        if ending not in _ANIMATIONS:
            known = ", ".join((".mp4", *_ANIMATIONS, *_RAW_ENDINGS))
            raise ValueError(
                f"A film is not written as {ending or 'a file without an ending'!r}: {known}"
            )
        name, unit_ms = _ANIMATIONS[ending]
        first, *others = self.frames
        file = io.BytesIO()
        first.save(
            file,
            format=name,
            save_all=True,
            append_images=others,
            duration=self._durations(unit_ms),
            loop=0,
            **({"exif": exif_of(self.metadata)} if name == "WEBP" else {}),
        )
        data = file.getvalue()
        data = with_recipe(data, self.metadata) if name == "PNG" else data
        return write(path, data, overwrite)

    def _durations(self, unit_ms: int) -> list[int]:
        """Milliseconds of each frame, in whole units. What is rounded does not add up."""
        units_a_frame = 1000 / self.frames_per_second / unit_ms
        ends = [round(n * units_a_frame) * unit_ms for n in range(self.frame_count + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]

    def _mp4(self) -> memoryview:
        if self._file is not None:
            return memoryview(self._file)
        if self.media_type != MP4:
            raise ValueError(
                'It came as frames alone: ask for output="raw+mp4", the default, or "mp4". Its '
                "frames can be saved now, as .webp or .png"
            )
        return self.data

    def _raw(self) -> memoryview:
        if self.media_type == MP4:
            raise ValueError('It came as an MP4: ask for frames by output="raw"')
        if self.media_type != RAW_VIDEO:
            raise ValueError(f"The frames of {self.media_type} are not known to this version")
        return self.data


@dataclass(frozen=True)
class Samples:
    """Consecutive samples of a track. Their bytes are those of the track, not a copy."""

    index: int
    """The track's item among those of the job, from 0."""
    track: str
    """Which of several tracks of one item; empty where there is one alone."""
    first: int
    """The place of the first one in the track, from 0."""
    sample_rate: int
    """Samples a second, of each channel."""
    channels: int
    data: memoryview = field(repr=False)
    """16-bit little-endian, channels interleaved. Not to be written."""

    @property
    def array(self) -> NDArray[Any]:
        """A numpy array, int16, [samples, channels], without a copy: it cannot be written.

        Needs `moored[images]`.
        """
        return samples_of(self.data, self.channels)


@dataclass(frozen=True)
class Track(_Made):
    """A track as it came: `data` is a WAV or FLAC file, or its samples, as `media_type` says."""

    index: int
    """Its item's place among those of the job, from 0."""
    name: str
    """Which of several tracks of one item; empty where there is one alone."""
    media_type: str
    """`audio/wav`, `audio/flac` or `audio/x-raw-s16le`."""
    sample_rate: int
    """Samples a second, of each channel."""
    channels: int
    sample_count: int
    """Samples of each channel."""
    _buffer: bytes | bytearray | mmap.mmap = field(repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Seed, prompt and the like, as text."""
    _file: bytes | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return _kept(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if self._file is not None or self.media_type == FLAC:
            return _shown(self, "audio", FLAC, self._flac())
        return _shown(self, "audio", WAV, self._wav())

    @property
    def data(self) -> memoryview:
        """Its bytes, without a copy. Not to be written."""
        return memoryview(self._buffer).toreadonly()

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.sample_count / self.sample_rate

    @property
    def array(self) -> NDArray[Any]:
        """A numpy array, int16, [samples, channels], without a copy: it cannot be written.

        Needs `moored[images]`.
        """
        return samples_of(self._samples(), self.channels)

    @property
    def flac(self) -> bytes:
        """The FLAC file, with the recipe in it, unless it came by `output="wav"` or `"raw"`."""
        return bytes(self._flac())

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes it to a file, in the format of its ending.

        `.flac` is the file that came by `output="wav+flac"`, the default, or by `output="flac"`,
        and then the only one. Of samples, `.wav` is a WAV file, `.raw` and `.pcm` are the samples
        alone. `.flac` and `.wav` have the recipe in them. Other formats are for other libraries:
        they take `array`. A file that is there is replaced by
        `overwrite` alone; else the name is counted up. Returns the path.
        """
        ending = Path(path).suffix.lower()
        if ending == ".flac" or self.media_type == FLAC:
            if ending != ".flac":
                raise ValueError(f"It came as FLAC: name a file .flac, not {ending or path!r}")
            return write(path, self._flac(), overwrite)
        if ending in (".raw", ".pcm"):
            return write(path, self._samples(), overwrite)
        if ending != ".wav":
            named = repr(ending) if ending else "a file without an ending"
            raise ValueError(f"A track is not written as {named}: .flac, .wav, .raw, .pcm")
        return write(path, self._wav(), overwrite)

    def _wav(self) -> memoryview:
        if self.media_type == WAV:
            return self.data
        file = wav_file(self._samples(), self.sample_rate, self.channels, self.metadata)
        return memoryview(file)

    def _flac(self) -> memoryview:
        if self._file is not None:
            return memoryview(self._file)
        if self.media_type != FLAC:
            raise ValueError(
                'It came as samples alone: ask for output="wav+flac", the default, or "flac". They '
                "can be saved now, as .wav"
            )
        return self.data

    def _samples(self) -> memoryview:
        if self.media_type == FLAC:
            raise ValueError('It came as FLAC: ask for samples by output="wav"')
        start = samples_start(self.media_type, self.data)
        if start is None:
            raise ValueError(f"The samples of {self.media_type} are not known to this version")
        size = self.sample_count * self.channels * SAMPLE_BYTES
        return self.data[start : start + size]


def _number(metadata: Mapping[str, str], name: str) -> int:
    said = metadata.get(name, "")
    # No longer than any number of 64 bits.
    if not (said.isascii() and said.isdigit() and len(said) <= 20):
        raise InternalError(f"The service sent a {name} that is no number: {said[:40]!r}")
    return int(said)


def _kept(made: Film | Track) -> dict[str, Any]:
    """What is pickled: bytes in place of memory that is this process's own."""
    state = dict(vars(made))
    if isinstance(state["_buffer"], mmap.mmap):
        state["_buffer"] = bytes(made.data)
    return state


# What a notebook keeps in its file without harm.
_SHOWN_BYTES = 32 * 1024 * 1024


def _shown(made: Film | Track, tag: str, media_type: str, file: memoryview) -> dict[str, Any]:
    """A player for a notebook."""
    if len(file) > _SHOWN_BYTES:
        return {"text/plain": repr(made)}
    source = f"data:{media_type};base64,{base64.b64encode(file).decode()}"
    loops = " loop" if tag == "video" else ""
    player = f'<{tag} controls{loops} src="{source}"></{tag}>'
    return {"text/plain": repr(made), "text/html": player}


def pixels_of(data: bytes | memoryview, *shape: int) -> NDArray[Any]:
    """RGB of this shape as an array, uint8, [*shape, 3], without a copy."""
    array: NDArray[Any] = numpy().frombuffer(data, dtype="u1")
    return array.reshape(*shape, 3)


def samples_of(data: bytes | memoryview, channels: int) -> NDArray[Any]:
    """16-bit little-endian samples, interleaved, as [samples, channels], without a copy."""
    array: NDArray[Any] = numpy().frombuffer(data, dtype="<i2")
    return array.reshape(-1, channels)


def samples_start(media_type: str, data: memoryview) -> int | None:
    """Where the samples begin in a track's bytes; None: not in these, or it is not known."""
    if media_type == RAW_AUDIO:
        return 0
    if media_type != WAV or bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return None
    at = 12
    while at + 8 <= len(data):
        if bytes(data[at : at + 4]) == b"data":
            return at + 8
        # A chunk of odd length is followed by a byte that is not counted.
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
    return None
