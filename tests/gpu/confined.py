"""Whether a confined worker works on a card, and what it costs.

    MOORED_BINARY=moored python tests/gpu/confined.py --out confined.json

For each of `service.confine_workers` = "never", "auto" and "always" it starts a service twice on one
state folder, and makes a picture, a film and a track of the shipped models. One line of JSON for each
start: how the worker is confined, seconds until it is ready, the first and the fastest of some pictures,
and digests of what was made. It fails where these differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client-py/src"), str(ROOT / "tests")]

import moored  # noqa: E402

from service import Service  # noqa: E402

PICTURES = 20
PROMPT = "a red circle on the left of a blue square"
MODELS = ("model", "film/model", "sound/model")


def measured(mode: str, state: Path, device: str) -> dict[str, Any]:
    """One start: what it took, and digests of what it made."""
    settings = [f"service.confine_workers={mode}", "log.filter=info"]
    arguments = [word for each in settings for word in ("--set", each)]
    arguments += [word for model in MODELS for word in ("--models", str(ROOT / "demo" / model))]
    began = time.monotonic()
    service = Service(*arguments, state=state, devices=(device,), environment=None)
    row: dict[str, Any] = {"mode": mode}
    try:
        with service.client() as client:
            client.wait_until_ready(120)
            row["ready_s"] = round(time.monotonic() - began, 2)
            names = {listed.media: listed.id for listed in client.list_models()}
            times, digests = [], []
            for _ in range(PICTURES):
                asked = time.monotonic()
                picture = client.generate_image(PROMPT, model=names["image"], seed=1, output="raw")
                times.append(time.monotonic() - asked)
                digests.append(hashlib.sha256(picture.data).hexdigest()[:12])
            row["first_picture_s"], row["picture_s"] = round(times[0], 3), round(min(times), 4)
            assert len(set(digests)) == 1, "pictures of one seed differ"
            first = client.generate_image(PROMPT, model=names["image"], seed=1).data
            film = client.generate_video(
                PROMPT, seed=1, model=names["video"], init_image=first, output="raw"
            )
            digests.append(hashlib.sha256(film.film.data).hexdigest()[:12])
            track = client.generate_audio("a flute", seed=1, seconds=4, model=names["audio"])
            digests.append(hashlib.sha256(track.track().data).hexdigest()[:12])
            row["made"] = digests[-3:]
            status = client.status()
            row["restarts"] = [card.worker_restarts for card in status.cards]
    except moored.MooredError as error:
        row["error"] = f"{type(error).__name__}: {error}"
    finally:
        row["exit"] = service.stop()
    row["log"] = [
        line.strip() for line in service.log if "confine" in line.lower() or " WARN" in line
    ]
    return row


def main() -> int:
    """Measures; 1 where a confined worker does not do what one with all rights does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--modes", default="never,always,auto")
    asked = parser.parse_args()
    rows = []
    for mode in asked.modes.split(","):
        with tempfile.TemporaryDirectory() as state:
            for _ in range(2):
                rows.append(measured(mode, Path(state), asked.device))
                print(json.dumps(rows[-1]), flush=True)
    asked.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    made = {json.dumps(row.get("made")) for row in rows}
    return 0 if len(made) == 1 and not any("error" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
