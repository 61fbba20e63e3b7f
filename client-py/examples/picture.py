#!/usr/bin/env python3
"""Generates a picture, shows how far it is, and saves it with its recipe in the file.

    python picture.py [MODEL]

Without a MODEL the service takes its default. MOORED_ENDPOINT names another service than that of
this machine.
"""

from __future__ import annotations

import sys

import moored

PROMPT = "a large red circle at the top left and a small blue star in the centre on white"

model = sys.argv[1] if len(sys.argv) > 1 else None

with moored.Client() as client:
    stream = client.stream_image(PROMPT, model=model, seed=7)
    picture = moored.progress(stream).result()
    path = picture.save("picture.png")

print(f"Wrote {path}: {picture.model.key}, seed {picture.seed}")
print("Settings in the file:", moored.read_recipe(path)["steps"], "steps")
