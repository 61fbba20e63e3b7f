"""Measures the page's frames with 200 jobs queued on 4 cards, with the binary of MOORED_BINARY.

Run it where nothing else runs: `python tests/page/measure_frames.py`. It prints for each view the frames a
second, and the gaps between them, over 8 seconds.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "nodes" / "comfyui")]

import moored  # noqa: E402
from browser import chromium  # noqa: E402
from opening import opened, view  # noqa: E402
from waiting import wait_until  # noqa: E402

from service import Service, slower_model  # noqa: E402

CARDS = 4
JOBS = 200 + CARDS
GAPS = """() => new Promise(done => {
    const gaps = [];
    let last = performance.now();
    const end = last + 8000;
    const frame = () => {
        const now = performance.now();
        gaps.push(now - last);
        last = now;
        if (now < end) requestAnimationFrame(frame);
        else done(gaps.slice(1));
    };
    requestAnimationFrame(frame);
})"""


def generate(client: moored.Client) -> None:
    """A job that lasts until the service is killed."""
    with (
        contextlib.suppress(moored.MooredError),
        client.stream_image("a cube", model="slower", steps=200, count=8) as stream,
    ):
        for _ in stream:
            pass


def main() -> None:
    """Measures, and prints."""
    with tempfile.TemporaryDirectory() as folder:
        models = str(slower_model(Path(folder), 50))
        limits = ("queue.max_jobs=400", "queue.max_jobs_per_client=400")
        service = Service(
            *("--models", models),
            *(argument for limit in limits for argument in ("--set", limit)),
            state=Path(folder) / "state",
            devices=tuple(f"sim:24GiB,index={index},foreign=2GiB" for index in range(CARDS)),
        )
        client = service.client(client_id="another program")
        for _ in range(JOBS):
            threading.Thread(target=generate, args=(client,), daemon=True).start()
        wait_until(lambda: len(client.jobs()) == JOBS, "the queue is full")
        try:
            with chromium() as browser, opened(browser, service) as page:
                for name in ("Queue", "Cards", "Models", "Generate"):
                    view(page, name)
                    gaps = sorted(page.evaluate(GAPS))
                    rate = 1000 * len(gaps) / sum(gaps)
                    most = gaps[int(0.99 * len(gaps))]
                    print(
                        f"{name}: {rate:.1f} frames/s; gaps: 99% {most:.1f} ms, longest {gaps[-1]:.1f} ms"
                    )
        finally:
            service.kill()


if __name__ == "__main__":
    main()
