"""What the nodes say of themselves: in `locales/<language>/nodeDefs.json`, on help pages, and in examples.

    python tests/nodes/comfyui/node_texts.py --write

writes all of that anew, from the golden file: the English texts, the lists of inputs and outputs of the help
pages, and inputs that the examples lack, at their defaults. Other languages are written by people, with the
same keys.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from object_info import golden

PACK = Path(__file__).resolve().parents[3] / "nodes/comfyui"
LOCALES = PACK / "locales"
PAGES = PACK / "web/docs"
EXAMPLES = PACK / "example_workflows"


def texts() -> dict[str, Any]:
    """The English texts, by node."""
    return {name: texts_of(info) for name, info in golden()["nodes"].items()}


def texts_of(info: dict[str, Any]) -> dict[str, Any]:
    """The texts of a node of `/object_info`."""
    inputs = {name: spec[1] for name, spec in inputs_of(info).items()}
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


def with_lists(page: str, info: dict[str, Any]) -> str:
    """A help page with the inputs and the outputs of its node; what has no tooltip keeps its words."""
    about = texts_of(info)
    for title, ports in (("Inputs", inputs_of(info)), ("Outputs", info["output_name"])):
        head, _, rest = page.partition(f"## {title}\n\n")
        section, _, rest = rest.partition("\n\n")
        before = dict(re.findall(r"^- `(\w+)`: (.*)$", section, re.MULTILINE))
        rows = [
            f"- `{name}`: {one.get('tooltip') or before.get(name, '')}"
            for name, one in zip(ports, about[title.lower()].values(), strict=True)
        ]
        section = "\n".join(rows)
        page = f"{head}## {title}\n\n{section}\n{rest and chr(10)}{rest}"
    return page


def inputs_of(info: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a node, in their order: type and options, by name."""
    groups = (info["input"].get(group, {}) for group in ("required", "optional"))
    return {name: spec for group in groups for name, spec in group.items()}


def with_ports(workflow: dict[str, Any]) -> dict[str, Any]:
    """An example whose nodes have all of their ports; the inputs that it lacks are at their defaults."""
    for node in workflow["nodes"]:
        info = golden()["nodes"].get(node["type"])
        there = {each["name"] for each in node["inputs"]}
        for name, (kind, options) in inputs_of(info).items() if info else ():
            if name in there:
                continue
            port = {"localized_name": name, "name": name, "shape": 7, "type": kind, "link": None}
            # What can only be linked has no value of its own.
            if "default" in options:
                port["widget"] = {"name": name}
                node["widgets_values"].append(options["default"])
                node["widgets_values_named"][name] = options["default"]
            node["inputs"].append(port)
        made = zip(info["output_name"], info["output"], strict=True) if info else ()
        for name, kind in made:
            if name not in {each["name"] for each in node["outputs"]}:
                node["outputs"].append(
                    {"localized_name": name, "name": name, "type": kind, "links": None}
                )
    return workflow


def write() -> None:
    """Writes the files."""
    path = LOCALES / "en/nodeDefs.json"
    path.write_text(json.dumps(texts(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, info in golden()["nodes"].items():
        page = PAGES / f"{name}.md"
        page.write_text(with_lists(page.read_text("utf-8"), info), "utf-8")
    for example in EXAMPLES.glob("*.json"):
        workflow = with_ports(json.loads(example.read_text("utf-8")))
        example.write_text(json.dumps(workflow, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
