"""Pictures, films, tracks and latents between ComfyUI's tensors and the service's bytes.

ComfyUI has its own torch; this pack imports it only where a tensor has to be made.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import moored
import numpy as np
from PIL import Image

from .failures import Failure
from .schema import MAX_SIDE

if TYPE_CHECKING:
    from numpy.typing import NDArray

SIDE_MULTIPLE = 16
MAX_CHANNELS = 2
# That of broadcasting: 30000/1001 frames a second.
MAX_RATE_DENOMINATOR = 1001

# The factor that ComfyUI multiplies a family's latents by, and the shift that it subtracts before, between
# its LATENT and the transformer. Its LATENT is the output of the VAE; the service's latents are the input of
# the transformer.
LATENT_FORMATS = {"flux": (0.3611, 0.1159), "z-image": (0.3611, 0.1159)}


def image_of(pictures: Sequence[moored.Picture]) -> Any:
    """An IMAGE: float [B, H, W, C], 0 to 1."""
    import torch

    pixels = np.stack([picture.array for picture in pictures], dtype=np.float32)
    pixels /= np.float32(255)
    return torch.from_numpy(pixels)


def frames_of(film: moored.Film) -> Any:
    """A film as an IMAGE: float [frames, H, W, C], 0 to 1."""
    import torch

    pixels = film.array.astype(np.float32)
    pixels /= np.float32(255)  # in place: a film is large
    return torch.from_numpy(pixels)


def video_of(frames: Any, frames_per_second: float, audio: Any = None) -> Any:
    """A VIDEO of an IMAGE's pictures and of an AUDIO, if it has sound."""
    from comfy_api.latest import InputImpl, Types

    # The service's rate is an f32: 23.976 came as 23.97599983.
    rate = Fraction(frames_per_second).limit_denominator(MAX_RATE_DENOMINATOR)
    parts = Types.VideoComponents(images=frames, audio=audio, frame_rate=rate)
    return InputImpl.VideoFromComponents(parts)


def audio_of(tracks: Sequence[moored.Track]) -> Any:
    """An AUDIO: `waveform`, float [B, C, T], -1 to 1, and `sample_rate`."""
    import torch

    samples = np.stack([track.array.T for track in tracks], dtype=np.float32)
    samples /= np.float32(1 << 15)
    return {"waveform": torch.from_numpy(samples), "sample_rate": tracks[0].sample_rate}


def samples_of_audio(audio: Any) -> tuple[NDArray[Any], int]:
    """The first track of an AUDIO: float [samples, channels], and its rate."""
    # numpy has no bfloat16.
    waveform = np.asarray(audio["waveform"].detach().cpu().float().numpy())
    if waveform.ndim == 2:
        waveform = waveform[np.newaxis]
    if waveform.ndim != 3 or 0 in waveform.shape:
        raise Failure("The audio has no samples: link one that has.")
    channels = waveform.shape[1]
    if channels > MAX_CHANNELS:
        raise Failure(
            f"The audio has {channels} channels, and the service accepts one or two: mix it down before."
        )
    # A value that is no number is silent.
    samples = np.nan_to_num(waveform[0].T, nan=0.0, posinf=1.0, neginf=-1.0)
    return samples, int(audio["sample_rate"])


def pngs_of(image: Any) -> list[bytes]:
    """Every picture of an IMAGE as a PNG; of four channels, the three of colour."""
    # numpy has no bfloat16.
    pixels = np.asarray(image.detach().cpu().float().numpy())
    if pixels.ndim == 3:
        pixels = pixels[np.newaxis]
    if not len(pixels):
        raise Failure("The batch has no picture: link one that has.")
    if pixels.shape[-1] == 1:
        pixels = np.repeat(pixels, 3, axis=-1)
    # A value that is no number is black, as it is when ComfyUI saves it.
    pixels = np.nan_to_num(pixels[..., :3], nan=0.0, posinf=1.0, neginf=0.0)
    bytes8 = np.rint(np.clip(pixels, 0.0, 1.0) * 255.0).astype(np.uint8)
    return [_png(picture) for picture in bytes8]


def first_png_of(image: Any) -> bytes:
    """The first picture of an IMAGE as a PNG."""
    return pngs_of(image if len(image.shape) == 3 else image[:1])[0]


def masks_of(mask: Any) -> list[bytes]:
    """Every MASK of a batch ([B, H, W], 1 changes) as a grey PNG."""
    pixels = np.asarray(mask.detach().cpu().float().numpy())
    if pixels.ndim == 2:
        pixels = pixels[np.newaxis]
    if not len(pixels):
        raise Failure("The batch has no mask: link one that has.")
    # A value that is no number keeps the picture as it is.
    pixels = np.nan_to_num(pixels, nan=0.0, posinf=1.0, neginf=0.0)
    return [_png(one) for one in np.rint(np.clip(pixels, 0.0, 1.0) * 255.0).astype(np.uint8)]


def size_of(image: Any) -> tuple[int, int]:
    """Width and height of an IMAGE, each to the nearest multiple that the service takes."""
    height, width = image.shape[-3:-1]
    if max(width, height) > MAX_SIDE:
        raise Failure(
            f"The picture is {width} x {height}, and {MAX_SIDE} is the most on a side: scale it down before, "
            "or name width and height where the node has them."
        )
    return _nearest(width), _nearest(height)


def samples_of(latents: Sequence[NDArray[Any]], family: str) -> Any:
    """A LATENT of ComfyUI from the service's latents, each [1, C, H/8, W/8]."""
    import torch

    scale, shift = _format_of(family)
    shapes = {latent.shape for latent in latents}
    if len(shapes) > 1:
        raise Failure(
            "The latents of this batch have different sizes, and ComfyUI's have one: bring them one by one."
        )
    numbers = np.concatenate(latents).astype(np.float64) / scale + shift
    return {"samples": torch.from_numpy(numbers.astype(np.float32))}


def arrays_of(samples: Any, family: str) -> list[NDArray[Any]]:
    """The service's latents, each [1, C, H/8, W/8] of f32, from a LATENT of ComfyUI."""
    scale, shift = _format_of(family)
    tensor = samples["samples"]
    if len(tensor.shape) != 4:
        raise Failure(
            f"A latent of pictures is [batch, channels, height / 8, width / 8], and this one has "
            f"{len(tensor.shape)} dimensions: it is of another kind of model."
        )
    if not tensor.shape[0]:
        raise Failure("The batch has no latent: link one that has.")
    numbers = np.asarray(tensor.detach().cpu().float().numpy(), dtype=np.float64)
    scaled = ((numbers - shift) * scale).astype("<f4")
    return [scaled[index : index + 1] for index in range(len(scaled))]


def _format_of(family: str) -> tuple[float, float]:
    try:
        return LATENT_FORMATS[family]
    except KeyError:
        raise Failure(
            f"Latents of the family {family!r} are not converted to ComfyUI's, nor from them: use VAE Decode "
            "and VAE Encode (moored)."
        ) from None


def _png(pixels: NDArray[Any]) -> bytes:
    encoded = io.BytesIO()
    # It travels once: small enough soon, not as small as can be.
    Image.fromarray(pixels).save(encoded, format="PNG", compress_level=1)
    return encoded.getvalue()


def _nearest(side: int) -> int:
    return max(SIDE_MULTIPLE, round(side / SIDE_MULTIPLE) * SIDE_MULTIPLE)
