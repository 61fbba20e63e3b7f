"""Converts pictures of every kind that a call accepts to the file that is sent.

One function for all picture arguments. What the service reads of a PIL image or an array has the
same pixels as that picture in a file: upright, and with what is transparent left to the service.
"""

from __future__ import annotations

import array as arrays
import io
import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from ._errors import refused
from ._events import Preview
from ._extras import numpy, pillow
from ._files import PICTURE_BYTES, read_regular
from ._media import Film, Frame, Picture
from ._results import ImageResult, VideoResult

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

ImageInput: TypeAlias = Union[
    bytes,
    bytearray,
    memoryview,
    str,
    "os.PathLike[str]",
    "Image.Image",
    "NDArray[Any]",
    ImageResult,
    Picture,
    Frame,
    Preview,
]
"""A picture: the bytes of a PNG, JPEG or WebP; a path to one; a PIL image of any mode; an array,
[height, width] or [height, width, channels], of uint8, uint16, bool or of floats from 0 to 1; or a
result, of which the first picture is taken."""

WANTED = "bytes, a path, a PIL image, an array or a result"

# Modes that a PNG keeps as they are.
_KEPT = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_INTO = {"PA": "RGBA", "RGBa": "RGBA", "La": "LA"}
_MOST = {"uint8": 0xFF, "uint16": 0xFFFF}
# How far floats may lie outside of 0 to 1: resizing leaves as much.
_ROUNDING = 1e-3


def picture_bytes(picture: ImageInput, option: str, wanted: str = WANTED) -> bytes:
    """The bytes of a picture's file; what is none is refused by the option's name."""
    given: Any = picture
    if isinstance(given, (bytes, bytearray, memoryview)):
        return _some(bytes(given), option, "is empty: it has 0 bytes")
    if isinstance(given, (str, os.PathLike)):
        return _some(
            read_regular(given, PICTURE_BYTES), option, f"{os.fspath(given)} is empty: 0 bytes"
        )
    if isinstance(given, ImageResult):
        given = given._first()
    if isinstance(given, Picture):
        return given._png()
    if isinstance(given, Preview):
        return given.jpeg
    if isinstance(given, Frame):
        return _png(given.image)
    if isinstance(given, (VideoResult, Film)):
        raise TypeError(
            f"{option}: a film is no picture: give one of its frames, such as film.frame(0)"
        )
    if is_array(given):
        return _png(_image_of(given, option))
    if hasattr(given, "convert") and hasattr(given, "mode"):
        return _png(_converted(given, option))
    raise TypeError(f"{option}: {wanted} is wanted, not {_kind(given)}")


def is_array(value: object) -> bool:
    """Whether it is a numpy array. Without numpy in memory there is none."""
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, np.ndarray)


def _kind(given: Any) -> str:
    name = type(given).__name__
    if name == "Tensor":
        return "a Tensor: write tensor.numpy(), as [height, width, channels]"
    return f"a {name}"


def _some(data: bytes, option: str, problem: str) -> bytes:
    if not data:
        raise refused(option, problem)
    return data


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    # Its pixels alone: they are upright and converted already, so a profile or Exif would be wrong.
    image.save(file, format="PNG", exif=b"", icc_profile=None)
    return file.getvalue()


def _converted(image: Any, option: str) -> Any:
    """A PIL image upright, in a mode that a PNG keeps."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image) or image
    mode = image.mode
    if mode in _KEPT:
        return image
    if mode == "F":
        return _of_floats(image, option)
    if mode == "I" or mode.startswith("I;"):
        return _of_whole_numbers(image, option)
    if mode == "LAB":
        return _of_lab(image)
    return image.convert(_INTO.get(mode, "RGB"))


def _of_floats(image: Any, option: str) -> Any:
    # Pillow counts them as it counts bytes.
    lowest, highest = image.getextrema()
    if not (lowest >= 0 and highest <= 255):
        raise refused(
            option,
            f"is a PIL image of mode F with values from {lowest:g} to {highest:g}; 0 to 255 is "
            "read. An array of floats is read from 0 to 1",
        )
    if 0 < highest <= 1:
        raise refused(
            option,
            "is a PIL image of mode F with values up to 1, where Pillow counts to 255: give "
            "numpy.asarray(image), which is read from 0 to 1",
        )
    return image.point(lambda value: value * 1 + 0.5).convert("L")


def _of_whole_numbers(image: Any, option: str) -> Any:
    image = image.convert("I")
    lowest, highest = image.getextrema()
    if not (lowest >= 0 and highest <= 0xFFFF):
        raise refused(
            option,
            f"is a PIL image of mode I with values from {lowest} to {highest}; 16 bits are read, "
            "0 to 65535",
        )
    # Pillow converts by cutting 16 bits to 8: the bytes are put in place instead.
    low = arrays.array("H", memoryview(image.tobytes()).cast("i"))
    if sys.byteorder == "big":
        low.byteswap()
    return pillow().frombytes("I;16", image.size, low.tobytes())


def _of_lab(image: Any) -> Any:
    from PIL import ImageCms

    lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    return ImageCms.profileToProfile(image, lab, rgb, outputMode="RGB")


def _image_of(array: Any, option: str) -> Any:
    """An array as a PIL image."""
    np, shape = numpy(), tuple(array.shape)
    if array.ndim == 3 and shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim == 4 and shape[0] == 1:
        raise ValueError(f"{option}: an array of one picture is wanted, not {[*shape]}: array[0]")
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or channels > 4 or 0 in shape:
        hint = (
            ": write array.transpose(1, 2, 0)" if array.ndim == 3 and shape[0] in (1, 3, 4) else ""
        )
        raise ValueError(
            f"{option}: an array is [height, width] or [height, width, channels], with 1 to 4 "
            f"channels, not {[*shape]}{hint}"
        )
    if array.dtype == "bool":
        array = array.astype("uint8") * 255
    elif array.dtype.kind == "f":
        array = _whole_of_floats(np, array, option)
    elif str(array.dtype) not in _MOST:
        raise ValueError(
            f"{option}: an array is uint8, uint16, bool, or floats from 0 to 1, not "
            f"{array.dtype}: write array.astype('uint8'), if it is 0 to 255"
        )
    if array.dtype == "uint16" and channels > 1:
        # As the service rounds the 16 bits of a file.
        array = ((array.astype("uint32") + 128) // 257).astype("uint8")
    return pillow().fromarray(np.ascontiguousarray(array))


def _whole_of_floats(np: Any, array: Any, option: str) -> Any:
    array = array.astype("float64")
    if not np.isfinite(array).all():
        raise refused(option, "is an array that contains NaN or infinity: replace them first")
    lowest, highest = float(array.min()), float(array.max())
    if lowest < -_ROUNDING or highest > 1 + _ROUNDING:
        remedy = "(array + 1) / 2" if -1.01 <= lowest < 0 and highest <= 1.01 else "array / 255"
        raise refused(
            option,
            f"is an array of floats from {lowest:g} to {highest:g}; 0 to 1 is read: write "
            f"{remedy}, if that is its range",
        )
    return (array.clip(0, 1) * 255).round().astype("uint8")
