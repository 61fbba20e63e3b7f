#!/usr/bin/env python3
"""Keeps the latent of a picture in the service, decodes it later, and starts another job from it.

python latent.py [MODEL]
"""

from __future__ import annotations

import sys

import moored

PROMPT = "a large red circle in the centre on a black background"

model = sys.argv[1] if len(sys.argv) > 1 else None

with moored.Client() as client:
    made = client.generate_image(PROMPT, model=model, seed=7, latent_only=True)
    (latent,) = made.latents
    print(f"Kept {latent.id}: {client.get_latent(latent).array.shape}")

    decoded = client.decode_latent(latent, model=model)
    print(f"Wrote {decoded.save('decoded.png')}")

    changed = client.generate_image(
        PROMPT.replace("circle", "star"), model=model, init_latent=latent, strength=0.8
    )
    print(f"Wrote {changed.save('changed.png')}")
    client.release_latent(latent)
