"""Files of what was made: nothing is overwritten unasked, and the recipe goes along.

The recipe is what the service says of a result: JSON, enough to make it again. It stands in a PNG
as the text `moored`, beside the text `parameters` that other tools read; in the EXIF of a JPEG or
WebP as `MakerNote`, and the same parameters as `UserComment`; in an MP4, which the service writes,
as its comment; in a WAV as the comment among its texts (`ICMT`), and in a FLAC, which the service
writes, as the comment `COMMENT`. The command line writes and reads the same
(`service/media/src/recipe.rs`, `tracks.rs`); `tests/recipes.json` holds both to it.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import secrets
import stat
import struct
import warnings
import wave
import zlib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ._errors import refused
from ._extras import pillow
from ._files import check_regular
from ._text import escaped_values, is_name_of_a_file

if TYPE_CHECKING:
    from ._session_events import SoundChunk

KEYWORD = "moored"
PARAMETERS = "parameters"
_PNG_START = b"\x89PNG\r\n\x1a\n"
_EXIF_IFD, _MAKER_NOTE, _USER_COMMENT = 0x8769, 0x927C, 0x9286
_LONG, _UNDEFINED = 4, 7
# What our note begins with.
_OURS = b"moored\0"
# What the head of a WAV can say of its samples, the head itself left out.
_WAV_BYTES = 2**32 - 64
# How well pictures are kept, of 100, in formats that lose something.
_QUALITY = 95
# Most bytes of a JPEG's EXIF: a segment's length has 16 bits, and includes them.
_JPEG_EXIF_BYTES = 0xFFFF - 2


def write(path: str | os.PathLike[str], data: bytes | memoryview, overwrite: bool) -> Path:
    """Writes a file, whole or not at all, and returns its path.

    One that is there already is replaced where that is asked for; else the name is counted up, as
    the command line counts. A folder that is missing is made. What was computed is not lost for its
    name.
    """
    target = _possible(path)
    if target.exists() and not target.is_file():
        _write_to(target, data)
        return target
    if target.is_symlink() and overwrite:
        target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        beside.write_bytes(data)
        if overwrite:
            beside.replace(target)
            return target
        return _named(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _write_to(target: Path, data: bytes | memoryview) -> None:
    """Writes to a pipe or a device, which has no name to be lost; of a folder it says so."""
    kind = target.stat().st_mode
    if stat.S_ISBLK(kind):
        raise OSError(f"{target} is a disk, and would lose what is on it: name a file")
    if stat.S_ISSOCK(kind):
        raise OSError(f"{target} is a socket, which takes no files: name a file")
    # A pipe without a reader is waited for where it is opened, and so it is not opened that way.
    try:
        opened = os.open(target, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as problem:
        if problem.errno == errno.ENXIO and stat.S_ISFIFO(kind):
            raise OSError(
                errno.ENXIO, "no program reads this pipe: start its reader first", str(target)
            ) from None
        raise
    with os.fdopen(opened, "wb") as file:
        if hasattr(os, "set_blocking"):
            os.set_blocking(opened, True)
        file.write(data)


def _possible(path: str | os.PathLike[str]) -> Path:
    """The path, with `_` for what no file can have in its name: no result is lost for that."""
    text = os.fspath(path)
    if is_name_of_a_file(text):
        return Path(text)
    possible = "".join(sign if is_name_of_a_file(sign) else "_" for sign in text)
    warnings.warn(f"No file can have the name {text!r}: saved as {possible}", stacklevel=4)
    return Path(possible)


def _named(beside: Path, target: Path) -> Path:
    """Gives a file its name, or the first free one after it."""
    for number in itertools.count(1):
        free = target if number == 1 else target.with_stem(f"{target.stem}-{number}")
        try:
            os.link(beside, free)  # fails where the name is taken, by whomever
        except FileExistsError:
            continue
        except OSError:
            # A file system without links.
            if free.exists():
                continue
            beside.replace(free)
        if free != target:
            warnings.warn(f"{target} exists already: saved as {free}", stacklevel=4)
        return free
    raise AssertionError("numbers do not end")


def already_there(path: str | os.PathLike[str]) -> FileExistsError:
    """The error for a file that is there."""
    return FileExistsError(
        f"{os.fspath(path)} exists already: choose another name, or replace it by overwrite=True"
    )


def recipe_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The recipe that the service sent along; empty where it was asked to leave it out.

    Half of a character in its texts is escaped here, so that all that is made of it can be written.
    """
    text = metadata.get("recipe", "{}")
    try:
        recipe = escaped_values(json.loads(text)) if len(text) <= _RECIPE_BYTES else {}
    except (ValueError, RecursionError):  # nested deeper than any recipe
        return {}
    return recipe if isinstance(recipe, dict) else {}


def recipe_text(metadata: Mapping[str, str]) -> str:
    """The recipe as a file has it: as it was sent, unless something in it is escaped."""
    recipe, text = recipe_in(metadata), metadata.get("recipe", "")
    if not recipe:
        return ""
    if json.loads(text) == recipe:
        return text
    return json.dumps(recipe, ensure_ascii=False, separators=(",", ":"))


# What web UIs for Stable Diffusion call samplers.
_SAMPLERS = {"euler_ancestral": "Euler a", "dpmpp_2m_karras": "DPM++ 2M Karras"}


def parameters_of(recipe: Mapping[str, Any]) -> str:
    """A recipe as other tools read it: the prompt, the negative prompt, and a line of settings."""
    width, height, version = (recipe.get(name) for name in ("width", "height", "version"))
    settings = {
        "Steps": recipe.get("steps"),
        "Sampler": _SAMPLERS.get(str(recipe.get("sampler")), "Euler"),
        "CFG scale": recipe.get("true_guidance", recipe.get("guidance")),
        "Seed": recipe.get("seed"),
        "Size": f"{width}x{height}" if width else None,
        "Model": recipe.get("model") or None,
        "Denoising strength": recipe.get("strength"),
        "Version": f"moored {version}" if version else None,
    }
    line = ", ".join(
        f"{name}: {_value(value)}" for name, value in settings.items() if value is not None
    )
    prompt, negative = recipe.get("prompt"), recipe.get("negative_prompt")
    lines = [prompt, f"Negative prompt: {negative}" if negative else None, line]
    text = "\n".join(str(each) for each in lines if each)
    return text.replace("\0", "")  # a text of PNG has none


def _value(value: object) -> str:
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    text = str(value)
    # As a JSON string where a reader would take a part of it for the next setting.
    return json.dumps(text, ensure_ascii=False) if any(sign in text for sign in ',:"\n') else text


def with_recipe(png: bytes, metadata: Mapping[str, str]) -> bytes:
    """A PNG with its recipe, and with the parameters that other tools read. What it has stays."""
    recipe = recipe_in(metadata)
    if not recipe:
        return png
    texts = {KEYWORD: recipe_text(metadata), PARAMETERS: parameters_of(recipe)}
    at, there = len(_PNG_START), set()
    while at + 8 <= len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"IDAT":
            break
        if kind in (b"tEXt", b"iTXt", b"zTXt"):
            there.add(png[at + 8 : at + 8 + size].partition(b"\0")[0].decode("latin-1"))
        at += 12 + size
    new = [_chunk(name, text) for name, text in texts.items() if name not in there]
    return b"".join((png[:at], *new, png[at:]))


def _chunk(keyword: str, text: str) -> bytes:
    try:
        if keyword == KEYWORD:
            raise UnicodeError  # the service reads it as UTF-8
        kind, data = b"tEXt", keyword.encode() + b"\0" + text.encode("latin-1")
    except UnicodeError:
        kind, data = b"iTXt", keyword.encode() + b"\0\0\0\0\0" + text.encode()
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def exif_of(metadata: Mapping[str, str]) -> bytes:
    """EXIF for a JPEG or WebP: the recipe and the parameters; empty where there is no recipe."""
    recipe = recipe_in(metadata)
    if not recipe:
        return b""
    note = _OURS + recipe_text(metadata).encode()
    comment = b"UNICODE\0" + parameters_of(recipe).encode("utf-16-be")
    # All of it big endian (TIFF 6.0, section 2): readers disagree whether UTF-16 in `UserComment`
    # is so always, or as the file is. The comment comes first, as its length is even: TIFF wants
    # values at even places.
    inner = 26
    data = inner + 30
    return b"".join(
        (
            struct.pack(">2sHI", b"MM", 42, 8),
            struct.pack(">HHHIII", 1, _EXIF_IFD, _LONG, 1, inner, 0),
            struct.pack(">H", 2),
            struct.pack(">HHII", _MAKER_NOTE, _UNDEFINED, len(note), data + len(comment)),
            struct.pack(">HHII", _USER_COMMENT, _UNDEFINED, len(comment), data),
            struct.pack(">I", 0),
            comment,
            note,
        )
    )


def picture_file(image: Any, ending: str, metadata: Mapping[str, str]) -> bytes:
    """A PIL image as a JPEG or WebP, with its recipe."""
    file = io.BytesIO()
    exif = exif_of(metadata)
    name = "WEBP" if ending == ".webp" else "JPEG"
    if exif and name == "JPEG":
        exif = b"Exif\0\0" + exif
    if name == "JPEG" and len(exif) > _JPEG_EXIF_BYTES:
        raise ValueError("The prompt is too long for the metadata of a JPEG: save a .png")
    image.convert("RGB").save(file, format=name, quality=_QUALITY, exif=exif)
    return file.getvalue()


def wav_file(
    samples: memoryview, sample_rate: int, channels: int, metadata: Mapping[str, str]
) -> bytearray:
    """A WAV of 16-bit samples, channels interleaved; with its recipe as its comment, if it has one.

    RIFF, as Microsoft's "Multimedia Programming Interface and Data Specifications 1.0" has it; the
    same bytes as the service writes.
    """
    chunks = [
        _riff(
            b"fmt ",
            struct.pack(
                "<HHIIHH", 1, channels, sample_rate, sample_rate * channels * 2, channels * 2, 16
            ),
        )
    ]
    recipe = recipe_in(metadata)
    if recipe:
        software = f"moored {recipe.get('version', '')}"
        texts = ((b"ICMT", recipe_text(metadata)), (b"ISFT", software))
        info = b"".join(_riff(name, text.encode() + b"\0") for name, text in texts)
        chunks.append(_riff(b"LIST", b"INFO" + info))
    head = b"".join(chunks) + b"data" + struct.pack("<I", len(samples))
    file = bytearray(b"RIFF" + struct.pack("<I", 4 + len(head) + len(samples)) + b"WAVE" + head)
    file += samples
    return file


def _riff(name: bytes, content: bytes) -> bytes:
    """A chunk; one of odd length is followed by a byte that is not counted."""
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


class WavWriter:
    """A WAV file that is written while its sound comes: 16-bit samples, at most 4 GiB of them.

    with moored.WavWriter("played.wav", session.sample_rate, session.channels) as file:
        for chunk in session:
            file.write(chunk)

    What is written so far is a whole file at any time. A file that is there is replaced by
    `overwrite` alone.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sample_rate: int,
        channels: int,
        *,
        overwrite: bool = False,
    ) -> None:
        try:
            self._file = Path(path).open("wb" if overwrite else "xb")  # noqa: SIM115
        except FileExistsError:
            raise already_there(path) from None
        self._wave = wave.open(self._file, "wb")  # noqa: SIM115
        self._wave.setparams((channels, 2, sample_rate, 0, "NONE", ""))
        self._most_bytes = _WAV_BYTES - _WAV_BYTES % (2 * channels)
        self._bytes = 0
        self.sample_rate = sample_rate
        self.channels = channels

    @property
    def seconds(self) -> float:
        """How much is written."""
        return self._bytes / (2 * self.channels * self.sample_rate)

    def write(self, sound: SoundChunk | bytes | memoryview) -> None:
        """Adds a chunk, or samples: 16-bit little-endian, channels interleaved."""
        samples = sound if isinstance(sound, (bytes, memoryview)) else sound.samples
        if self._bytes + len(samples) > self._most_bytes:
            raise ValueError("A WAV file has at most 4 GiB of samples: go on in another")
        self._wave.writeframes(samples)  # and the head
        self._file.flush()
        self._bytes += len(samples)

    def close(self) -> None:
        """Closes the file. Again is harmless."""
        self._wave.close()
        self._file.close()

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What something was made with: the recipe in a file of `save`, or of the command line.

    Its keys are those of the options of `generate_image` and its like, and `prompt`, `model_key`,
    `version`. Empty where the file has none. Needs `moored[images]` for a picture.
    """
    check_regular(path)
    with Path(path).open("rb") as file:
        head = file.read(12)
        if head[4:8] == b"ftyp":
            return recipe_in({"recipe": _comment_in(file)})
        if head[:4] == b"RIFF" and head[8:] == b"WAVE":
            return recipe_in({"recipe": _wav_comment_in(file)})
        if head[:4] == b"fLaC":
            return recipe_in({"recipe": _flac_comment_in(file)})
    opened = pillow()
    try:
        with opened.open(path) as image:
            image.load()
            text = image.info.get(KEYWORD)
            if text is None:
                text = _note_in(image)
    except (OSError, SyntaxError, ValueError, opened.DecompressionBombError) as problem:
        raise refused(
            "path", f"{os.fspath(path)} is no picture that can be read, or a damaged one: {problem}"
        ) from None
    return recipe_in({"recipe": text})


# A recipe is far smaller. What a file announces takes no memory.
_RECIPE_BYTES = 16 * 1024**2
# A file of sound has a few dozen.
_MOST_BLOCKS = 4096


def _comment_in(file: BinaryIO) -> str:
    """The comment of an MP4 (ISO/IEC 14496-12; metadata as iTunes has it)."""
    start, end = 0, file.seek(0, io.SEEK_END)
    # `meta` has a version before what is in it; `data` a type and a locale before its text.
    path = {b"moov": 0, b"udta": 0, b"meta": 4, b"ilst": 0, b"\xa9cmt": 0, b"data": 8}
    for wanted, skipped in path.items():
        while True:
            file.seek(start)
            head = file.read(16)
            if len(head) < 8 or start + 8 > end:
                return "{}"
            size, kind = struct.unpack(">I4s", head[:8])
            behind = 8
            if size == 1 and len(head) == 16:
                size, behind = int.from_bytes(head[8:], "big"), 16
            if size < behind or start + size > end:
                return "{}"
            if kind == wanted:
                start, end = start + behind + skipped, start + size
                break
            start += size
    file.seek(start)
    return file.read(max(0, min(end - start, _RECIPE_BYTES))).decode("utf-8", "replace")


def _wav_comment_in(file: BinaryIO) -> str:
    """The comment among the texts of a WAV."""
    file.seek(12)
    for _ in range(_MOST_BLOCKS):
        if len(head := file.read(8)) < 8:
            break
        name, size = struct.unpack("<4sI", head)
        if name != b"LIST" or file.read(4) != b"INFO":
            file.seek(size + size % 2 - (4 if name == b"LIST" else 0), io.SEEK_CUR)
            continue
        texts, at = file.read(max(0, min(size - 4, _RECIPE_BYTES))), 0
        while at + 8 <= len(texts):
            name, size = struct.unpack_from("<4sI", texts, at)
            if name == b"ICMT":
                return texts[at + 8 : at + 8 + size].partition(b"\0")[0].decode("utf-8", "replace")
            at += 8 + size + size % 2
    return "{}"


def _flac_comment_in(file: BinaryIO) -> str:
    """The comment among the tags of a FLAC (RFC 9639, section 8.6)."""
    file.seek(4)
    last = False
    for _ in range(_MOST_BLOCKS):
        if last or len(head := file.read(4)) < 4:
            break
        last, kind, size = head[0] & 0x80 != 0, head[0] & 0x7F, int.from_bytes(head[1:], "big")
        if kind != 4:
            file.seek(size, io.SEEK_CUR)
            continue
        tags = file.read(size)
        at = 4 + int.from_bytes(tags[:4], "little")  # after the name of the program
        count = int.from_bytes(tags[at : at + 4], "little")
        at += 4
        while count and at + 4 <= len(tags):
            size = int.from_bytes(tags[at : at + 4], "little")
            name, _, text = tags[at + 4 : at + 4 + size].partition(b"=")
            if name.upper() == b"COMMENT":
                return text.decode("utf-8", "replace")
            at, count = at + 4 + size, count - 1
    return "{}"


def _note_in(image: Any) -> str:
    try:
        note = image.getexif().get_ifd(_EXIF_IFD).get(_MAKER_NOTE)
    except (SyntaxError, struct.error):  # damaged: so pillow says it
        note = None
    ours = isinstance(note, bytes) and note.startswith(_OURS)
    return note[len(_OURS) :].decode("utf-8", "replace") if ours else "{}"
