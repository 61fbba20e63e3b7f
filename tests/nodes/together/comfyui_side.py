"""One side: the ComfyUI pack on the stand-in, in an environment of its own.

    python comfyui_side.py ENDPOINT FOLDER

`{"generate": [[PROMPT, SEED], ...], "steps": N}` is one prompt with a Text to Image for each, which ComfyUI
runs at once; `{"cancel": true}` is the interrupt button. Each prompt ends in
`{"status", "error", "texts", "pictures"}`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from lines import commands, say
from PIL import Image

HERE = Path(__file__).resolve().parent
COMFYUI = HERE.parent / "comfyui"
sys.path[:0] = [str(COMFYUI), str(COMFYUI / "standin")]

from prompts import Graph  # noqa: E402
from standin.executor import StandIn  # noqa: E402

if TYPE_CHECKING:
    from runs import Run


def main() -> None:
    """Runs what it is told to."""
    endpoint, folder = sys.argv[1], Path(sys.argv[2])
    comfyui = StandIn(HERE.parents[2] / "nodes" / "comfyui", folder)
    say(ready=True)
    for command in commands():
        if "cancel" in command:
            comfyui.interrupt()
            continue
        graph = Graph(endpoint)
        size = {"width": 128, "height": 128, "steps": command["steps"]}
        shown = []
        for prompt, seed in command["generate"]:
            shown.append(graph.preview([graph.text_to_image(prompt, seed=seed, **size), 0]))
        run = comfyui.queue(graph.prompt)
        threading.Thread(target=report, args=(run, shown, folder), daemon=True).start()
    comfyui.stop()


def report(run: Run, shown: list[str], folder: Path) -> None:
    """Tells how a prompt ended, and where its pictures are."""
    run.done()
    pictures = []
    for node in shown if run.status == "success" else ():
        (pixels,) = run.pictures(node)
        path = folder / f"{run.prompt_id}-{node}.png"
        Image.fromarray(pixels).save(path)
        pictures.append(str(path))
    say(status=run.status, error=run.error, texts=run.texts(), pictures=pictures)


if __name__ == "__main__":
    main()
