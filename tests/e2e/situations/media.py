"""Pictures and sound as cameras, editors, taggers and pipes leave them."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from situations import PROMPT, Check, Place, Refused, Situation, numbers_of

_KEPT = {"prompt": PROMPT, "seed": 5, "steps": 2, "width": 64, "height": 64}
SAMPLES = struct.pack("<8000h", *(number % 1000 for number in range(8000)))
_FMT = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16000, 2, 16)


def drawn(mode: str = "RGB") -> Image.Image:
    """A picture whose corners differ."""
    image = Image.linear_gradient("L").resize((96, 64)).convert("RGB")
    image.paste((200, 30, 60), (0, 0, 32, 16))
    return image.convert(mode)


def kept(place: Place, picture: Any) -> Any:
    """The pixels of a picture that the service has read, and kept through a mask of nothing."""
    made = place.client.generate_image(
        **_KEPT, init_image=picture, mask=np.zeros((64, 64), "uint8")
    )
    return numbers_of(made.image)


def pictures_alike(name: str, ending: str, within: float, **options: Any) -> Situation:
    """A file, and the same opened by pillow, give the same pixels."""
    mode = options.pop("mode", "RGB")

    def make(place: Place) -> None:
        drawn(mode).save(place.media / f"{name}{ending}", **options)

    def call(place: Place) -> Any:
        path = place.media / f"{name}{ending}"
        return kept(place, path) - kept(place, Image.open(path))

    def alike(_: Place, difference: Any) -> None:
        assert np.abs(difference).max() <= within

    return Situation(
        name=f"picture-{name}-by-path-and-opened",
        source="python-pillow/Pillow#2574, AUTOMATIC1111/stable-diffusion-webui#292",
        story="The same picture by its path and as a PIL image must not differ.",
        expected=Check(alike),
        make=make,
        call=call,
    )


def wav(start: bytes, length: int, *chunks: bytes, data: int, samples: bytes = SAMPLES) -> bytes:
    """A WAV that says these lengths."""
    head = start + struct.pack("<I", length) + b"WAVE" + b"".join(chunks)
    return head + b"data" + struct.pack("<I", data) + samples


def sound(name: str, source: str, file: Callable[[], bytes], story: str) -> Situation:
    """A track that is read whole: a second of 8,000 samples."""

    def whole(_: Place, info: Any) -> None:
        assert info.audio.samples == 8000

    return Situation(
        name=f"sound-{name}",
        source=source,
        story=story,
        expected=Check(whole),
        call=lambda place: place.client.put_media(file()),
    )


def refused_sound(name: str, source: str, file: bytes, *says: str) -> Situation:
    """A track that is not read, which the command says before it asks the service."""
    return Situation(
        name=f"sound-{name}",
        source=source,
        story="A format that is not read is named, with the way to convert it.",
        expected=Refused(says),
        make=lambda place: (place.media / name).write_bytes(file) and None,
        command=(
            "play",
            "x",
            "-m",
            "moored/demo-sound",
            "--task",
            "cover",
            "--source",
            f"{{media}}/{name}",
        ),
    )


def tagged_flac() -> bytes:
    """A FLAC of the service's own behind an ID3v2 tag and before an ID3v1 tag: its front alone is ours."""
    stream = struct.pack(">HH", 4096, 4096) + bytes(6)
    # 8,000 samples a second, one channel, 16 bits, 8,000 samples; no checksum.
    stream += (8000 << 44 | 0 << 41 | 15 << 36 | 8000).to_bytes(8, "big") + bytes(16)
    frames = b"".join(frame(number, min(4096, 8000 - 4096 * number)) for number in (0, 1))
    flac = b"fLaC" + bytes([0x80]) + len(stream).to_bytes(3, "big") + stream + frames
    return b"ID3\x04\0\0\0\0\x01\x02" + bytes(130) + flac + b"TAG" + b" " * 125


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    value = 0
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = value << 1 ^ (polynomial if value >> (bits - 1) else 0)
            value &= (1 << bits) - 1
    return value


def frame(number: int, samples: int) -> bytes:
    """A frame of silence (RFC 9639, section 9): one constant subframe."""
    head = bytes([0xFF, 0xF8, 0x70, 0x08, number]) + struct.pack(">H", samples - 1)
    head += bytes([_crc(head, 8, 0x07)])
    whole = head + bytes(3)
    return whole + struct.pack(">H", _crc(whole, 16, 0x8005))


def _turned(place: Place) -> Any:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    drawn().save(file, "PNG", exif=exif)
    upright = drawn().transpose(Image.Transpose.ROTATE_270)
    return kept(place, Image.open(file)) - kept(place, upright)


def _same(_: Place, difference: Any) -> None:
    assert np.abs(difference).max() == 0


def _cut(place: Place) -> Any:
    file = io.BytesIO()
    drawn().save(file, "JPEG")
    half = file.getvalue()[: len(file.getvalue()) // 2 + 200]
    return place.client.generate_image(**_KEPT, init_image=half)


def _masks(place: Place) -> None:
    grey = Image.new("L", (64, 64))
    grey.paste(255, (0, 0, 32, 64))
    grey.save(place.media / "mask-grey.png")
    white = Image.new("RGBA", (64, 64), (255, 255, 255, 255))
    white.putalpha(grey)
    white.save(place.media / "mask-alpha.png")
    drawn().resize((64, 64)).save(place.media / "mask-start.png")


def _start_and_mask(place: Place, mask: str) -> Any:
    start = place.media / "mask-start.png"
    return numbers_of(
        place.client.generate_image(**_KEPT, init_image=start, mask=place.media / mask).image
    )


_PIPE = 0xFFFFFFFF
SITUATIONS = [
    pictures_alike("cmyk", ".jpg", 2, mode="CMYK", quality=95),
    pictures_alike("palette", ".png", 0, mode="P"),
    pictures_alike("two-colours", ".png", 0, mode="1"),
    pictures_alike("grey-and-alpha", ".png", 0, mode="LA"),
    Situation(
        name="picture-turned-by-exif-as-pil-image",
        source="AUTOMATIC1111/stable-diffusion-webui#292, unslothai/unsloth#10553",
        story="A telephone's picture lies on its side where Exif is not heeded.",
        expected=Check(_same),
        call=_turned,
    ),
    Situation(
        name="picture-as-an-array-of-floats",
        source="haraldk/TwelveMonkeys#147",
        story="Arrays of floats from 0 to 1 are what other libraries hand on.",
        expected=Check(_same),
        call=lambda place: kept(place, np.asarray(drawn()) / 255) - kept(place, drawn()),
    ),
    Situation(
        name="picture-of-0-bytes-to-start-from",
        source="MoonshotAI/kimi-code#2249, PennyDreadfulMTG/Penny-Dreadful-Tools#150",
        story="A failed paste leaves an empty file, and the picture is made from the text alone.",
        expected=Refused(("zero.png", "0 bytes")),
        make=lambda place: (place.media / "zero.png").touch(),
        generate=("--init", "{media}/zero.png"),
    ),
    Situation(
        name="picture-of-0-bytes-in-python",
        source="MoonshotAI/kimi-code#2249",
        story="Empty bytes are no picture, and not none.",
        expected=Refused(("init_image", "0 bytes")),
        call=lambda place: place.client.generate_image(**_KEPT, init_image=b""),
    ),
    Situation(
        name="picture-cut-off-jpeg",
        source="an upload that ended early; decoders fill in grey",
        story="What is missing of a JPEG must not become grey without a word.",
        expected=Refused(("init_image", "cut off")),
        call=_cut,
    ),
    Situation(
        name="mask-of-white-paint-on-a-transparent-layer",
        source="kohya-ss/sd-scripts#1269, Mikubill/sd-webui-controlnet#3079",
        story="A mask painted white on an empty layer is taken for a mask of everything.",
        expected=Check(_same),
        make=_masks,
        call=lambda place: (
            _start_and_mask(place, "mask-alpha.png") - _start_and_mask(place, "mask-grey.png")
        ),
    ),
    sound(
        "wav-from-a-pipe",
        "ruuda/hound#39, Borewit/music-metadata#707, naudio/NAudio#688",
        lambda: wav(b"RIFF", _PIPE, _FMT, data=_PIPE),
        "A program that writes to a pipe cannot go back to write the lengths.",
    ),
    sound(
        "wav-without-lengths",
        "gstreamer and recorders that were stopped",
        lambda: wav(b"RIFF", 0, _FMT, data=0),
        "Lengths that were never written are 0.",
    ),
    sound(
        "wav-rf64",
        "what editors write of long recordings",
        lambda: wav(
            b"RF64", _PIPE, b"ds64" + struct.pack("<IQQQI", 28, 0, 16000, 8000, 0), _FMT, data=_PIPE
        ),
        "64-bit lengths are in a chunk of their own.",
    ),
    sound(
        "wav-of-doubles",
        "numpy and SciPy, which write float64 as it is",
        lambda: wav(
            b"RIFF",
            64044,
            b"fmt " + struct.pack("<IHHIIHH", 16, 3, 1, 8000, 64000, 8, 64),
            data=64000,
            samples=np.linspace(-1, 1, 8000).tobytes(),
        ),
        "Samples of 64 bits were refused.",
    ),
    sound(
        "flac-after-an-id3-tag",
        "xiph/opus-tools#106, tinytag/tinytag#46, Taiko2k/Tauon#690",
        tagged_flac,
        "Taggers put ID3 before a FLAC, and readers took it for an MP3.",
    ),
    Situation(
        name="sound-wav-cut-off",
        source="an upload that ended early",
        story="A file with fewer samples than it says is cut off: the missing bytes are told.",
        expected=Refused(("4000 bytes of samples are missing",)),
        call=lambda place: place.client.put_media(
            wav(b"RIFF", 16036, _FMT, data=16000, samples=SAMPLES[:-4000])
        ),
    ),
    refused_sound(
        "song.mp3", "xiph/opus-tools#106", b"\xff\xfb\x90\0" + bytes(400), "an MP3", "ffmpeg -i"
    ),
    refused_sound(
        "song.aiff", "what old editors write", b"FORM\0\0\0\0AIFFCOMM", "an AIFF", "ffmpeg -i"
    ),
    refused_sound("none.wav", "a failed download", b"", "none.wav", "0 bytes"),
]
