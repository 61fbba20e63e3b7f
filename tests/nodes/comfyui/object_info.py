"""The pack's nodes as a real ComfyUI's `/object_info` shows them: the golden file, and how it is made.

COMFYUI_DIR=... COMFYUI_PYTHON=... python tests/nodes/comfyui/object_info.py --write
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GOLDEN = HERE / "golden" / "object_info.json"

# Says by which name the folder was linked.
FOLDER = "python_module"


def golden() -> dict[str, Any]:
    """The golden file: `comfyui_version`, `taken` (a date), `nodes`.

    `not_taken` names nodes whose entries are the stand-in's word, until the file is written anew.
    """
    taken: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return taken


def comparable(nodes: dict[str, Any]) -> dict[str, Any]:
    """Nodes without what differs from one installation to the next, as JSON has them."""
    kept = {
        name: {key: value for key, value in info.items() if key != FOLDER}
        for name, info in nodes.items()
    }
    plain: dict[str, Any] = json.loads(json.dumps(kept))
    return plain


def main() -> int:
    """Writes the golden file anew, or says whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file; else compare")
    write = parser.parse_args().write
    from real import started

    with tempfile.TemporaryDirectory() as folder:
        pack, client = ROOT / "nodes" / "comfyui", ROOT / "client-py" / "src"
        comfyui = started(pack, client, Path(folder) / "base")
        if comfyui is None:
            print("COMFYUI_DIR is not set: it names a checkout of ComfyUI")
            return 2
        try:
            version, nodes = comfyui.version(), comparable(comfyui.object_info())
        finally:
            comfyui.stop()
    if not write:
        current = golden()["nodes"] == nodes
        print(f"{GOLDEN.name} is {'current' if current else 'not what this ComfyUI says'}")
        return 0 if current else 1
    today = datetime.date.today().isoformat()
    taken = {"comfyui_version": version, "taken": today, "nodes": nodes}
    GOLDEN.write_text(json.dumps(taken, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{GOLDEN} is what ComfyUI {version} says")
    return 0


if __name__ == "__main__":
    sys.exit(main())
