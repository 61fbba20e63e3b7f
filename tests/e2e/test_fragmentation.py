"""Cards that do not remap memory: free bytes serve a stage only where they lie in one piece."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import moored
import numpy as np

from service import Service

HALF_GIB = 1 << 29

# As reported for a card of 24 GB from AMD: 2 GB are free, in pieces of 500 MB, and 1.5 GB in one piece
# cannot be had. What is loaded in this order fills the card but for one piece; then all of `gaps` leaves.
# In units of 512 MiB.
REPORT = {
    "film": {"transformer": 24, "text_encoder": 2, "text_encoder_2": 8, "vae": 3},
    "other": {"transformer": 7},
    "gaps": {"text_encoder": 1, "text_encoder_2": 1, "vae": 1},
}
ORDER = (
    ("film", "transformer"),
    ("gaps", "text_encoder"),
    ("film", "text_encoder"),
    ("gaps", "text_encoder_2"),
    ("film", "text_encoder_2"),
    ("gaps", "vae"),
    ("film", "vae"),
    ("other", "transformer"),
)
SCRATCH = {"encode_text": 1 << 20, "denoise": 3 * HALF_GIB, "decode": 1 << 20}


def models(folder: Path) -> Path:
    folder.mkdir()
    for name, sizes in REPORT.items():
        components = [
            {"name": component, "bytes": units * HALF_GIB, "identity": f"{name}-{component}"}
            for component, units in sizes.items()
        ]
        model = {
            "name": name,
            "components": components,
            "scratch": SCRATCH,
            "defaults": {"steps": 2, "width": 64, "height": 64},
        }
        (folder / f"{name}.instant.json").write_text(json.dumps(model), encoding="utf-8")
    return folder


def resident(client: moored.Client) -> set[str]:
    return {one.component.id for one in client.status().cards[0].residents}


def test_a_stage_gets_memory_in_one_piece_where_free_memory_is_scattered(
    simulate: Callable[..., Service], tmp_path: Path
) -> None:
    folder = ("--models", str(models(tmp_path / "models")))
    with simulate("sim:48GiB", arguments=folder).client() as client:
        expected = client.generate_image("a film", model="film", seed=3).image
    with simulate("sim:24GiB,remaps=no", arguments=folder).client() as client:
        for model, component in ORDER:
            client.load(model, components=[component])
        client.unload("gaps")
        before = resident(client)
        memory = client.status().cards[0].memory
        assert memory.free == 4 * HALF_GIB, "more than the stage needs, in four pieces"

        stream = client.stream_image("a film", model="film", seed=3)
        assert not [event for event in stream if isinstance(event, moored.Retrying)]
        # What lies between two of the pieces is the cheapest to load again: the smallest.
        assert before - resident(client) == {"instant:film-text_encoder"}
        assert np.array_equal(stream.result().image, expected)

        # Nothing is left of it, and all of the card is one piece again.
        client.unload()
        client.load("film")
        assert client.status().cards[0].memory.free == 11 * HALF_GIB
