"""Runs one prompt on a stand-in of its own, in a program that a test may kill.

python tests/nodes/comfyui/alone.py FOLDER PROMPT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "standin"), str(HERE.parents[2] / "client-py" / "src")]

from standin.executor import StandIn  # noqa: E402


def main() -> None:
    """Runs it to its end."""
    folder, prompt = Path(sys.argv[1]), Path(sys.argv[2])
    standin = StandIn(HERE.parents[2] / "nodes" / "comfyui", folder, HERE / "own_model")
    standin.queue(json.loads(prompt.read_text(encoding="utf-8"))).succeeded()
    standin.stop()


if __name__ == "__main__":
    main()
