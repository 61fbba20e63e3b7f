"""What scripts and web applications do with the Python client."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np

from situations import PROMPT, Check, Place, Refused, Situation

_SMALL: dict[str, Any] = {"prompt": PROMPT, "seed": 5, "steps": 1, "width": 64, "height": 64}

_FORK = """
import os, sys, moored
with moored.Client(sys.argv[1]) as client:
    client.status()
    child = os.fork()
    if child == 0:
        try:
            client.generate_image("x", steps=1, width=64, height=64)
        except BaseException as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    client.status()
"""


def _forked(place: Place) -> Any:
    return subprocess.run(
        [sys.executable, "-c", _FORK, place.client.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _ended_well(_: Place, ran: Any) -> None:
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _seeds(place: Place) -> Any:
    seeds = (2**63, 2**64 - 1, 2**53 + 1)
    return [(seed, place.client.generate_image(**{**_SMALL, "seed": seed}).seed) for seed in seeds]


def _exact(_: Place, pairs: Any) -> None:
    assert all(asked == told for asked, told in pairs)


def _chained(place: Place) -> Any:
    first = place.client.generate_image(**_SMALL)
    black = np.zeros((64, 64), "uint8")
    again = place.client.generate_image(**_SMALL, init_image=first, mask=black)
    return np.abs(np.asarray(first.image).astype(int) - np.asarray(again.image).astype(int)).max()


def _nothing_differs(_: Place, difference: Any) -> None:
    assert difference == 0


def _saved_song(place: Place) -> Any:
    song = place.client.generate_audio("a waltz", model="moored/demo-sound", steps=1, seconds=1)
    return [song.save(place.root / f"song{ending}") for ending in (".flac", ".wav")]


def _are_files(_: Place, paths: Any) -> None:
    assert all(path.stat().st_size > 1000 for path in paths)


SITUATIONS = [
    Situation(
        name="client-made-before-a-fork",
        source="grpc/grpc#12455, grpc/grpc#18075",
        story="gunicorn, Celery and multiprocessing fork after the client was made.",
        expected=Check(_ended_well),
        call=_forked,
    ),
    Situation(
        name="seeds-of-64-bits-in-python",
        source="numz/ComfyUI-SeedVR2_VideoUpscaler#385, n0va39/ComfyUI-EasyUseAnima#784",
        story="Seeds beyond 2^53 lose digits where they pass through floats.",
        expected=Check(_exact),
        call=_seeds,
    ),
    Situation(
        name="seed-that-is-text-in-python",
        source="n0va39/ComfyUI-EasyUseAnima#784",
        story="A seed from a form is text.",
        expected=Refused(("seed", "a whole number is wanted")),
        call=lambda place: place.client.generate_image(**{**_SMALL, "seed": "7"}),
    ),
    Situation(
        name="steps-of-0-in-python",
        source="a slider at its end",
        story="0 steps ran with the model's default.",
        expected=Refused(("steps is 0",)),
        call=lambda place: place.client.generate_image(**{**_SMALL, "steps": 0}),
    ),
    Situation(
        name="result-starts-the-next-picture",
        source="the first thing that people chain",
        story="A result was no picture to start from.",
        expected=Check(_nothing_differs),
        call=_chained,
    ),
    Situation(
        name="song-saved-as-flac-and-wav",
        source="the README's own example, with music",
        story="What was computed was lost at save, for the ending of its name.",
        expected=Check(_are_files),
        call=_saved_song,
    ),
]
