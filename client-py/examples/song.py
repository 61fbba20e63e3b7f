#!/usr/bin/env python3
"""Generates a song, and then another version of its second half.

python song.py [MODEL]
"""

from __future__ import annotations

import sys

import moored

LYRICS = """[verse]
The boat is moored, the tide is low
"""

model = sys.argv[1] if len(sys.argv) > 1 else "ace-step"

with moored.Client() as client:
    song = client.generate_audio("a slow waltz", model=model, lyrics=LYRICS, seconds=4, seed=7)
    print(f"Wrote {song.save('song.flac')}: {song.sample_rate} samples a second")

    track = client.put_media("song.flac")
    other = client.generate_audio(
        "a brass band", model=model, task="repaint", init_media=track, window=(2, 4), seed=8
    )
    client.release_media(track)
    print(f"Wrote {other.save('other-ending.flac')}")
