"""Every shipped model, in every precision, by the nodes of the library: see `product.py`."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headless import Headless
from numpy.typing import NDArray
from PIL import Image
from product import CASES, SEED, Row, generated, name_of, numbers_of, start_picture

from service import Service

MODES = {"full": "full", "auto": "auto", "8-bit": "int8", "4-bit": "int4"}
"""`quantization_mode` of Diffusion Model, by what the client calls it."""
NODES = {
    "image": ("GenerateImage", "image"),
    "video": ("GenerateVideo", "video"),
    "audio": ("GenerateAudio", "audio"),
}
"""The node for a medium, and its output."""
FILM_LOSS_AT_MOST = 12.0
"""Of 255, in the mean: the frames of a lossy file beside those of the client."""


def made(engine: Headless, row: Row, precision: str, folder: Path) -> bytes:
    """The file that the library's nodes give."""
    from griptape_nodes.files.file import File

    model = engine.do(
        engine.node("DiffusionModel", model=row.model, quantization_mode=MODES[precision])
    )
    kind, output = NODES[row.medium]
    values: dict[str, Any] = row.options | {
        "prompt": row.prompt,
        "seed": SEED,
        "steps": row.steps,
    }
    if row.needs_picture:
        start = folder / "start.png"
        start_picture().save(start)
        values["input_image"] = str(start)
    node = engine.do(engine.node(kind, **values))
    engine.do(engine.connect(model, "model_handle", node, "model"))
    result = engine.do(engine.run())
    assert result.succeeded(), node.parameter_output_values.get("result_details")
    return File(node.parameter_output_values[output].value).read_bytes()


def samples_of(data: bytes) -> NDArray[np.int16]:
    """The samples of a WAV."""
    with wave.open(io.BytesIO(data)) as track:
        samples = np.frombuffer(track.readframes(track.getnframes()), "<i2")
        return samples.reshape(-1, track.getnchannels())


@pytest.mark.parametrize(("row", "precision"), CASES, ids=name_of)
def test_a_shipped_model_generates_as_the_client_does(
    connected: Headless, demo_service: Service, tmp_path: Path, row: Row, precision: str
) -> None:
    with demo_service.client() as client:
        expected = numbers_of(generated(client, row, precision))
    data = made(connected, row, precision, tmp_path)
    match row.medium:
        case "image":
            with Image.open(io.BytesIO(data)) as image:
                assert np.array_equal(np.asarray(image.convert("RGB")), expected)
        case "video":
            # Its file loses what nobody sees.
            first = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.float32)
            assert np.abs(first - expected[0]).mean() < FILM_LOSS_AT_MOST
        case "audio":
            assert np.array_equal(samples_of(data), expected)
