"""What the nodes say of themselves, in the shape of `locales/<language>/nodeDefs.json`.

    python tests/nodes/comfyui/node_texts.py --write

writes the English file anew, from the golden file. Other languages are written by people, with the same keys.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from object_info import golden

LOCALES = Path(__file__).resolve().parents[3] / "nodes/comfyui/locales"


def texts() -> dict[str, Any]:
    """The English texts, by node."""
    return {name: texts_of(info) for name, info in golden()["nodes"].items()}


def texts_of(info: dict[str, Any]) -> dict[str, Any]:
    """The texts of a node of `/object_info`."""
    groups = (info["input"].get(group, {}) for group in ("required", "optional"))
    inputs = {name: spec[1] for group in groups for name, spec in group.items()}
    outputs = zip(info["output_name"], info["output_tooltips"], strict=True)
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {
            name: _named(options.get("display_name") or name, options["tooltip"])
            for name, options in inputs.items()
        },
        "outputs": {str(n): _named(name, tip) for n, (name, tip) in enumerate(outputs)},
    }


def _named(name: str, tooltip: str | None) -> dict[str, str]:
    return {"name": name} | ({"tooltip": tooltip} if tooltip else {})


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    path = LOCALES / "en/nodeDefs.json"
    path.write_text(json.dumps(texts(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
