"""Uploads of media: media type, format, and the chunks that are sent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from ._errors import refused
from ._extras import numpy
from ._files import check_regular
from ._generated import events_pb2, generation_pb2
from ._latents import CHUNK_BYTES, Latent
from ._media import FLAC, PNG, RAW_AUDIO, RAW_VIDEO, WAV, Film, Frame, Picture, Track
from ._options import message_of
from ._pictures import is_array, picture_bytes
from ._records import AudioTrackFormat, ImageFormat, LatentInfo, MediaInfo, VideoFormat
from ._results import AudioResult, ImageResult, LatentResult, VideoResult

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

MediaInput: TypeAlias = Union[
    bytes,
    bytearray,
    memoryview,
    str,
    "os.PathLike[str]",
    "Image.Image",
    "NDArray[Any]",
    ImageResult,
    VideoResult,
    AudioResult,
    Picture,
    Frame,
    Film,
    Track,
]
"""A picture, a film or a track: bytes, a path, a PIL image, an array of a picture, of frames or of
samples, or a result."""

SourceInput: TypeAlias = MediaInput | MediaInfo
"""A track as `put_media` takes it, which is uploaded; or the `MediaInfo` or the id of one."""

_ENDINGS = {
    ".png": PNG,
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".wav": WAV,
    ".flac": FLAC,
}
# Bytes of the beginning by which a format is recognised.
_HEAD_BYTES = 64
_RAW = (
    "format=moored.VideoFormat(width, height, frames, frames_per_second) for raw frames, "
    "format=moored.AudioTrackFormat(samples_per_second, channels, samples) for raw samples"
)
# Offset and bytes by which formats are recognised.
_BEGINNINGS = (
    (0, b"\x89PNG\r\n\x1a\n", PNG),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (8, b"WEBP", "image/webp"),
    (8, b"WAVE", WAV),
    (0, b"fLaC", FLAC),
)
_FRAMES = "give its frames as an array, with frames_per_second=..."
_SOUND = "convert it to a WAV or FLAC, for example by `ffmpeg -i FILE OUT.flac`"
_PICTURE = "convert it to a PNG, JPEG or WebP, or give a PIL image"
# As `service/media/src/tracks/containers.rs` names them; the first that fits.
_NOT_DECODED = (
    (0, b"RIFX", "a WAV in the byte order of big-endian machines", _SOUND),
    (4, b"ftypM4A", "an M4A", _SOUND),
    (4, b"ftypavif", "an AVIF", _PICTURE),
    (4, b"ftypheic", "a HEIC", _PICTURE),
    (4, b"ftyp", "an MP4 or its like", _FRAMES),
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska", _FRAMES),
    (8, b"AVI ", "an AVI", _FRAMES),
    (0, b"GIF8", "a GIF", _FRAMES),
    (0, b"II*\0", "a TIFF", _PICTURE),
    (0, b"MM\0*", "a TIFF", _PICTURE),
    (0, b"BM", "a BMP", _PICTURE),
    (28, b"OpusHead", "Opus in an Ogg", _SOUND),
    (28, b"\x7fFLAC", "FLAC in an Ogg", _SOUND),
    (28, b"\x01vorbis", "Vorbis in an Ogg", _SOUND),
    (0, b"OggS", "an Ogg", _SOUND),
    (8, b"AIFC", "an AIFF-C", _SOUND),
    (8, b"AIFF", "an AIFF", _SOUND),
    (0, b"caff", "a CAF", _SOUND),
    (0, b"wvpk", "a WavPack", _SOUND),
    (0, b"ID3", "an MP3", _SOUND),
    *((0, bytes([0xFF, second]), "an AAC", _SOUND) for second in (0xF0, 0xF1, 0xF8, 0xF9)),
    *((0, bytes([0xFF, second]), "an MP3", _SOUND) for second in range(0xE2, 0xFF)),
)
_ID3_HEAD_BYTES, _ID3_HAS_FOOT = 10, 0x10


def _id3_tag_bytes(head: bytes) -> int:
    """The size of the ID3v2 tag that a file begins with (ID3v2.4.0, section 3.1); 0: none."""
    if not head.startswith(b"ID3") or len(head) < _ID3_HEAD_BYTES:
        return 0
    length = 0
    for byte in head[6:_ID3_HEAD_BYTES]:
        length = length << 7 | byte & 0x7F
    return length + _ID3_HEAD_BYTES * (2 if head[5] & _ID3_HAS_FOOT else 1)


def _head_after_tag(after: bytes, head: bytes) -> bytes:
    """The beginning of a FLAC after its tag; the tag itself of anything else, as an MP3 has it."""
    return after if after.startswith(b"fLaC") else head


class Upload(Iterator[generation_pb2.MediaChunk]):
    """The messages of PutMedia; the first one describes the media."""

    failure: Exception | None = None
    """The error that ended reading. gRPC reports only that there was one."""

    def __init__(self, info: generation_pb2.MediaInfo, pieces: Iterator[bytes]) -> None:
        self._info: generation_pb2.MediaInfo | None = info
        self._pieces = pieces

    def __next__(self) -> generation_pb2.MediaChunk:
        info, self._info = self._info, None
        try:
            piece = next(self._pieces, None)
        except Exception as error:
            self.failure = error
            raise
        if info is None and piece is None:
            raise StopIteration
        return generation_pb2.MediaChunk(info=info, chunk=piece or b"")

    def close(self) -> None:
        """Closes the file, unless a thread still reads it: that one closes it."""
        if isinstance(self._pieces, Generator):
            with contextlib.suppress(ValueError):
                self._pieces.close()


def upload_of(
    media: MediaInput,
    media_type: str | None,
    format: VideoFormat | AudioTrackFormat | None,
    frames_per_second: float | None,
    sample_rate: int | None = None,
) -> Upload:
    """An upload of media. Type and format follow from the media where they are not passed."""
    is_path = isinstance(media, (str, os.PathLike))
    if is_path or isinstance(media, (bytes, bytearray, memoryview)):
        if frames_per_second is not None:
            raise ValueError(
                "frames_per_second is for an array of frames. For bytes and files write "
                "format=moored.VideoFormat(width, height, frames, frames_per_second)"
            )
        if sample_rate is not None:
            raise ValueError(
                "sample_rate is for an array of samples. For bytes and files write "
                "format=moored.AudioTrackFormat(samples_per_second, channels, samples)"
            )
        return (
            _of_file(media, media_type, format) if is_path else _of_bytes(media, media_type, format)
        )
    if media_type is not None or format is not None:
        raise ValueError(
            f"media_type and format are for bytes and files; leave them out of a {_name(media)}"
        )
    if is_array(media):
        if sample_rate is None:
            return _of_array(media, frames_per_second)
        if frames_per_second is not None:
            raise ValueError(
                "An array is frames or samples: give frames_per_second or sample_rate, not both"
            )
        return _of_samples(media, sample_rate)
    if sample_rate is not None:
        raise ValueError(
            f"sample_rate is for an array of samples; leave it out of a {_name(media)}"
        )
    if frames_per_second is not None:
        raise ValueError(
            f"frames_per_second is for an array of frames; leave it out of a {_name(media)}"
        )
    return _of_object(media)


def _of_file(media: Any, media_type: str | None, format: Any) -> Upload:
    path = Path(media)
    # Opened here too, so that a missing file is an error before the call begins.
    check_regular(path)
    with path.open("rb") as file:
        head, size = file.read(_HEAD_BYTES), os.fstat(file.fileno()).st_size
        if tag := _id3_tag_bytes(head):
            file.seek(tag)
            head = _head_after_tag(file.read(_HEAD_BYTES), head)
    if not size:
        raise refused("media", f"{os.fspath(path)} is empty: it has 0 bytes")
    found = _type_of(head, media_type, format, path.suffix.lower(), os.fspath(path))
    return _upload(found, format, size, _pieces_of_file(path))


def _of_bytes(media: Any, media_type: str | None, format: Any) -> Upload:
    data = memoryview(media)
    data = data.cast("B") if data.c_contiguous else memoryview(data.tobytes())
    if not len(data):
        raise refused("media", "is empty: it has 0 bytes")
    head = bytes(data[:_HEAD_BYTES])
    if tag := _id3_tag_bytes(head):
        head = _head_after_tag(bytes(data[tag : tag + _HEAD_BYTES]), head)
    found = _type_of(head, media_type, format, "", "media")
    return _upload(found, format, len(data), _pieces_of(data))


def _of_array(frames: Any, frames_per_second: float | None) -> Upload:
    shape = tuple(frames.shape)
    if frames_per_second is None and frames.ndim == 2 and min(shape) <= _MOST_CHANNELS:
        raise ValueError("An array of samples has no rate: write sample_rate=...")
    if frames_per_second is None and frames.ndim in (2, 3):
        return _of_picture(frames)
    if frames.ndim == 4 and shape[-1] == 4:
        raise ValueError("A film has no transparency: write array[..., :3]")
    if frames.ndim != 4 or shape[-1] != 3 or 0 in shape:
        raise ValueError(f"An array of frames is [frames, height, width, 3], not {[*shape]}")
    if frames.dtype != "uint8":
        raise ValueError(
            f"An array of frames is uint8, 0 to 255, not {frames.dtype}: write "
            "(array * 255).round().astype('uint8'), if it is 0 to 1"
        )
    if frames_per_second is None:
        raise ValueError("An array has no frame rate: write frames_per_second=...")
    count, height, width, _ = shape
    data = memoryview(numpy().ascontiguousarray(frames)).cast("B")
    format = VideoFormat(width, height, count, frames_per_second)
    return _upload(RAW_VIDEO, format, len(data), _pieces_of(data))


_MOST_CHANNELS = 2


def _of_samples(samples: Any, sample_rate: int) -> Upload:
    np, shape = numpy(), tuple(samples.shape)
    if samples.ndim == 1:
        samples = samples[:, None]
    if samples.ndim != 2 or 0 in shape:
        raise ValueError(f"An array of samples is [samples, channels], not {[*shape]}")
    if samples.shape[1] > _MOST_CHANNELS:
        hint = ": write array.T" if samples.shape[0] <= _MOST_CHANNELS else ""
        raise ValueError(
            f"An array of samples is [samples, channels] with 1 or 2 channels, not {[*shape]}{hint}"
        )
    if samples.dtype.kind == "f":
        if not np.isfinite(samples).all():
            raise ValueError("An array of samples contains NaN or infinity: replace them first")
        # As the service reads a WAV of such samples: 1 is full scale, and what is louder is cut.
        samples = (samples.astype("f8") * 32768).round().clip(-32768, 32767).astype("<i2")
    elif samples.dtype != "int16":
        raise ValueError(
            f"An array of samples is int16, or floating with 1 as full scale, not {samples.dtype}"
        )
    count, channels = samples.shape
    data = memoryview(np.ascontiguousarray(samples, dtype="<i2")).cast("B")
    format = AudioTrackFormat(sample_rate, channels, count)
    return _upload(RAW_AUDIO, format, len(data), _pieces_of(data))


def _of_object(media: Any) -> Upload:
    if isinstance(media, VideoResult):
        media = media.film
    elif isinstance(media, AudioResult):
        media = media.track()
    elif isinstance(media, ImageResult):
        media = media._first()
    if isinstance(media, Film):
        format = VideoFormat(media.width, media.height, media.frame_count, media.frames_per_second)
        data = media._raw()
        return _upload(RAW_VIDEO, format, len(data), _pieces_of(data))
    if isinstance(media, Track) and media.media_type == FLAC:
        return _upload(FLAC, None, len(media.data), _pieces_of(media.data))
    if isinstance(media, Track):
        data = media._wav()
        return _upload(WAV, None, len(data), _pieces_of(data))
    if isinstance(media, (Picture, Frame)) or (hasattr(media, "save") and hasattr(media, "mode")):
        return _of_picture(media)
    raise TypeError(_no_media(media))


def _of_picture(media: Any) -> Upload:
    data = memoryview(picture_bytes(media, "media"))
    return _upload(PNG, None, len(data), _pieces_of(data))


def _no_media(media: object) -> str:
    if isinstance(media, MediaInfo):
        return "This media is in the service already: use it by init_media=..."
    if isinstance(media, (Latent, LatentInfo, LatentResult)):
        return "A latent is uploaded by put_latent() and used by init_latent=..."
    if isinstance(media, (list, tuple)):
        return "Frames are one array: numpy.stack(frames), with frames_per_second=..."
    return (
        "Media is bytes, a path, a PIL image, an array of frames with frames_per_second=... or of "
        f"samples with sample_rate=..., or a result, not a {_name(media)}"
    )


def _type_of(head: bytes, media_type: str | None, format: object, ending: str, what: str) -> str:
    """The media type of bytes: as passed, else by their content, else by the file's extension."""
    if isinstance(format, ImageFormat):
        raise ValueError("Raw pixels of a picture are not uploaded: give a PIL image")
    if format is not None and not isinstance(format, (VideoFormat, AudioTrackFormat)):
        raise TypeError(f"format: a VideoFormat or AudioTrackFormat is wanted, not {format!r}")
    if media_type is None and format is not None:
        return RAW_VIDEO if isinstance(format, VideoFormat) else RAW_AUDIO
    if media_type is None:
        found = _type_by_content(head, what) or _ENDINGS.get(ending)
        if found is None:
            raise ValueError(f"{what} is no PNG, JPEG, WebP, WAV or FLAC. Write {_RAW}")
        return found
    if format is None and media_type in (RAW_VIDEO, RAW_AUDIO):
        raise ValueError(f"{media_type} needs a format. Write {_RAW}")
    return media_type


def _type_by_content(head: bytes, what: str) -> str | None:
    for at, begins, media_type in _BEGINNINGS:
        if head.startswith(begins, at):
            return media_type
    for at, begins, kind, remedy in _NOT_DECODED:
        if head.startswith(begins, at):
            raise ValueError(f"{what} is {kind}, which the service does not decode: {remedy}")
    return None


def _upload(
    media_type: str,
    format: VideoFormat | AudioTrackFormat | None,
    size: int,
    pieces: Iterator[bytes],
) -> Upload:
    info = message_of(generation_pb2.MediaInfo, media_type=media_type, bytes=size)
    try:
        if isinstance(format, VideoFormat):
            info.video.CopyFrom(
                events_pb2.VideoFormat(
                    width=format.width,
                    height=format.height,
                    frames=format.frames,
                    frames_per_second=format.frames_per_second,
                )
            )
        elif isinstance(format, AudioTrackFormat):
            info.audio.CopyFrom(
                events_pb2.AudioTrackFormat(
                    samples_per_second=format.samples_per_second,
                    channels=format.channels,
                    samples=format.samples,
                )
            )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{format} cannot be sent: {error}") from None
    return Upload(info, pieces)


def _pieces_of(data: memoryview) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield bytes(data[start : start + CHUNK_BYTES])


def _pieces_of_file(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


def _name(media: object) -> str:
    return type(media).__name__
