"""Files of what was made: nothing is overwritten unasked, and the recipe goes along.

The recipe is what the service says of a result: JSON, enough to make it again. It stands in a PNG
as the text `moored`, beside the text `parameters` that other tools read; in a JPEG or WebP as XMP,
and the same parameters as EXIF.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, unescape

from ._extras import pillow

KEYWORD = "moored"
PARAMETERS = "parameters"
_PNG_START = b"\x89PNG\r\n\x1a\n"
_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/">'
    '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description rdf:about="" xmlns:moored="urn:moored:recipe:1">'
    "<moored:recipe>{recipe}</moored:recipe>"
    "</rdf:Description></rdf:RDF></x:xmpmeta>"
)
# How well pictures are kept, of 100, in formats that lose something.
_QUALITY = 95


def write(path: str | os.PathLike[str], data: bytes | memoryview, overwrite: bool) -> None:
    """Writes a file; one that is there already only where that is asked for."""
    try:
        with Path(path).open("wb" if overwrite else "xb") as file:
            file.write(data)
    except FileExistsError:
        raise refused(path) from None


def refuse_existing(path: str | os.PathLike[str], overwrite: bool) -> None:
    """Says so before the work of encoding is done."""
    if not overwrite and Path(path).exists():
        raise refused(path)


def refused(path: str | os.PathLike[str]) -> FileExistsError:
    """The error for a file that is there."""
    return FileExistsError(
        f"{os.fspath(path)} exists already: choose another name, or replace it by overwrite=True"
    )


def recipe_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The recipe that the service sent along; empty where it was asked to leave it out."""
    try:
        recipe = json.loads(metadata.get("recipe", "{}"))
    except ValueError:
        return {}
    return recipe if isinstance(recipe, dict) else {}


def parameters_of(recipe: Mapping[str, Any]) -> str:
    """A recipe as other tools read it: the prompt, and a line of settings."""
    settings = {
        "Steps": recipe.get("steps"),
        "Sampler": "Euler",
        "CFG scale": recipe.get("guidance"),
        "Seed": recipe.get("seed"),
        "Size": f"{recipe.get('width')}x{recipe.get('height')}" if recipe.get("width") else None,
        "Model": recipe.get("model"),
        "Denoising strength": recipe.get("strength"),
        "Version": f"moored {recipe['version']}" if recipe.get("version") else None,
    }
    line = ", ".join(
        f"{name}: {_value(value)}" for name, value in settings.items() if value is not None
    )
    return f"{recipe.get('prompt', '')}\n{line}"


def _value(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    # What would end the value for whoever reads it is quoted.
    return json.dumps(text) if any(sign in text for sign in ",:\n") else text


def with_recipe(png: bytes, metadata: Mapping[str, str]) -> bytes:
    """A PNG with its recipe, and with the parameters that other tools read. What it has stays."""
    recipe = recipe_in(metadata)
    if not recipe:
        return png
    texts = {KEYWORD: metadata["recipe"], PARAMETERS: parameters_of(recipe)}
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
    text = text.replace("\0", "")
    try:
        if keyword == KEYWORD:
            raise UnicodeError  # the service reads it as UTF-8
        kind, data = b"tEXt", keyword.encode() + b"\0" + text.encode("latin-1")
    except UnicodeError:
        kind, data = b"iTXt", keyword.encode() + b"\0\0\0\0\0" + text.encode()
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def tags_of(metadata: Mapping[str, str]) -> dict[str, bytes]:
    """What pillow writes into a JPEG or WebP: the recipe as XMP, the parameters as EXIF."""
    recipe = recipe_in(metadata)
    if not recipe:
        return {}
    exif = pillow().Exif()
    text = parameters_of(recipe).encode("utf-16-be")
    exif.get_ifd(_EXIF_IFD)[_USER_COMMENT] = b"UNICODE\0" + text
    xmp = _XMP.format(recipe=escape(json.dumps(recipe)))
    return {"exif": exif.tobytes(), "xmp": xmp.encode("ascii")}


def picture_file(image: Any, ending: str, metadata: Mapping[str, str]) -> bytes:
    """A PIL image as a JPEG or WebP, with its recipe."""
    file = io.BytesIO()
    name = "WEBP" if ending == ".webp" else "JPEG"
    try:
        image.convert("RGB").save(file, format=name, quality=_QUALITY, **tags_of(metadata))
    except ValueError as error:
        if "too long" not in str(error):
            raise
        raise ValueError(
            f"The prompt is too long for the metadata of a {name}: save a .png"
        ) from None
    return file.getvalue()


def read_recipe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a picture was made with: the recipe in a file that `save` has written.

    Its keys are those of the options of `generate_image`, and `prompt`, `model_key`, `version`.
    Empty where the file has none. Needs `moored[images]`.
    """
    with pillow().open(path) as image:
        image.load()
        text = image.info.get(KEYWORD)
        if text is None:
            xmp = image.info.get("xmp", b"")
            packet = xmp if isinstance(xmp, str) else bytes(xmp).decode("utf-8", "replace")
            found = re.search(r"<moored:recipe>(.*?)</moored:recipe>", packet, re.DOTALL)
            text = unescape(found[1]) if found else "{}"
    return recipe_in({"recipe": text})
