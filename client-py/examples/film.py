#!/usr/bin/env python3
"""Generates a picture, and a film that begins with it: frames are there before the film is.

    python film.py [FILM_MODEL [PICTURE_MODEL]]

The film's model must take a start picture, as FramePack does.
"""

from __future__ import annotations

import sys

import moored

film_model = sys.argv[1] if len(sys.argv) > 1 else "framepack"
picture_model = sys.argv[2] if len(sys.argv) > 2 else None

with moored.Client() as client:
    start = client.generate_image(
        "a small blue star at the left on a white background", model=picture_model, seed=7
    )
    with client.stream_video(
        "the star moves to the right", model=film_model, init_image=start, seconds=1, seed=7
    ) as stream:
        for frame in stream.frames():
            print(f"Frame {frame.number + 1}: {frame.width} x {frame.height}")
        film = stream.result()
    path = film.save("film.mp4")

print(f"Wrote {path}: {len(film.array)} frames, {film.frames_per_second:g} a second")
