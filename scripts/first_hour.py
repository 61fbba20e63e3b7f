"""Measures how long a new user waits for first pictures, once the program is built (docs/BENCHMARKS.md).

    .venv-comfyui/bin/python scripts/first_hour.py [--binary target/release/moored]

A hub and a ComfyUI stand in for the real ones, on loopback: what is measured is what moored does between a
command and its picture, not the line to the hub.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMFYUI = ROOT / "tests/nodes/comfyui"
RUNS = 3

Command = tuple[str, ...]


def seconds_to_first_line(command: Command, folder: Path, environment: dict[str, str]) -> float:
    """From the command to the first line that it prints: a picture that is written."""
    began = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.monotonic() - began
        process.stdout.read()
    if process.returncode or not line:
        sys.exit(f"{' '.join(command)} failed")
    return took


def demo(binary: Path, folder: Path) -> float:
    from service import clean_environment

    command = (str(binary), "demo", "--device", "cpu")
    return seconds_to_first_line(command, folder, clean_environment())


def pulled(binary: Path, folder: Path) -> float:
    """`moored run` of a model that is not here, where no service runs."""
    from hub import Hub, Repository, files_of

    from service import ReservedPort

    port = ReservedPort()
    with Hub() as hub:
        hub.repositories["me/mine"] = Repository(files_of(ROOT / "demo/model"))
        environment = hub.environment(folder / "home") | {
            "MOORED_ENDPOINT": f"http://{port.address}",
            "MOORED_SERVICE_STATE": str(folder / "state"),
        }
        command = (str(binary), "run", "me/mine", "a red circle", "--device", "cpu")
        return seconds_to_first_line(command, folder, environment)


def in_comfyui(binary: Path, folder: Path) -> float:
    """From `moored serve` and the start of ComfyUI to the picture of the first prompt."""
    from prompts import Graph
    from standin.executor import StandIn

    from service import Service

    began = time.monotonic()
    service = Service(state=folder / "state", binary=binary)
    linked = folder / "moored"
    linked.symlink_to(ROOT / "nodes/comfyui")
    comfyui = StandIn(linked, folder)
    graph = Graph(service.address, model="moored/demo")
    graph.add("PreviewImage", images=[graph.text_to_image(), 0])
    comfyui.queue(graph.prompt).succeeded()
    took = time.monotonic() - began
    comfyui.stop()
    service.stop()
    return took


MEASURES: dict[str, Callable[[Path, Path], float]] = {
    "`moored demo`: the first picture": demo,
    "`moored run owner/name PROMPT`: the picture of a model that is downloaded": pulled,
    "ComfyUI: the first picture, with the start of both": in_comfyui,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/moored")
    binary: Path = parser.parse_args().binary.resolve()
    print(f"{binary}, {os.cpu_count()} cores, the best and the worst of {RUNS} runs")
    for name, measure in MEASURES.items():
        took = []
        for _ in range(RUNS):
            with tempfile.TemporaryDirectory() as folder:
                took.append(measure(binary, Path(folder)))
        print(f"{name}: {min(took):.1f} to {max(took):.1f} s")


if __name__ == "__main__":
    for folder in (COMFYUI / "standin", COMFYUI, ROOT / "tests/e2e", ROOT / "tests"):
        sys.path.insert(0, str(folder))
    main()
