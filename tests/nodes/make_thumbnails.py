"""Draws thumbnails of example workflows whose models are too large to make a picture for them: their nodes.

    python tests/nodes/make_thumbnails.py WORKFLOW...

writes beside each workflow, of either pack, a JPEG by its name.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

BOX = (168, 84)
GAP = (44, 28)
MARGIN = 22
INK, FAINT = "#1a1a1a", "#777777"
# Fill and border: of the nodes of this pack, and of ComfyUI's own.
OURS, OTHERS = ("#ebf3fc", "#2f7ebc"), ("#f2f2f2", "#8c8c8c")
LINE = "#2f7ebc"
SHOWN = ("prompt", "model", "image", "lora", "gpu_device")
"""Values that a box shows: the first that its node has."""


def words_of(node: dict[str, Any]) -> tuple[str, str]:
    """The title of a node, and what is set on it."""
    title = node["type"].removeprefix("Moored")
    title = " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]+", title)).replace(" To ", " to ")
    values = node.get("widgets_values_named") or {}
    return title, next((str(values[name]) for name in SHOWN if values.get(name)), "")


def column_of(node: int, links: list[list[Any]]) -> int:
    """How many nodes are before one, at most."""
    return max((1 + column_of(link[1], links) for link in links if link[3] == node), default=0)


def places_of(workflow: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Column and row of each node, from its links; nodes of a column are in the order of their place."""
    places: dict[int, tuple[int, int]] = {}
    for node in sorted(workflow["nodes"], key=lambda node: node["pos"][1]):
        column = column_of(node["id"], workflow["links"])
        row = sum(1 for there, _ in places.values() if there == column)
        places[node["id"]] = (column, row)
    return places


def curve(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[float, float]]:
    """Points from one place to another, level at both."""
    parts = [step / 24 for step in range(25)]
    across, down = end[0] - start[0], end[1] - start[1]
    return [
        (start[0] + across * part, start[1] + down * part**2 * (3 - 2 * part)) for part in parts
    ]


def drawn(workflow: dict[str, Any]) -> Image.Image:
    """A workflow as boxes and lines."""
    places = places_of(workflow)
    columns, rows = (1 + max(place[side] for place in places.values()) for side in (0, 1))
    size = [
        2 * MARGIN + count * box + (count - 1) * gap
        for count, box, gap in zip((columns, rows), BOX, GAP, strict=True)
    ]
    image = Image.new("RGB", (size[0], size[1]), "white")
    draw = ImageDraw.Draw(image)
    corners = {
        node: (MARGIN + column * (BOX[0] + GAP[0]), MARGIN + row * (BOX[1] + GAP[1]))
        for node, (column, row) in places.items()
    }
    for _, source, _, target, into, _ in workflow["links"]:
        (left, top), (right, below) = corners[source], corners[target]
        start, end = (left + BOX[0], top + BOX[1] // 2), (right, below + 18 + 10 * min(into, 4))
        draw.line(curve(start, end), LINE, 2, joint="curve")
    bold, plain = ImageFont.load_default(15), ImageFont.load_default(11)
    for node in workflow["nodes"]:
        left, top = corners[node["id"]]
        fill, border = OURS if node["type"].startswith("Moored") else OTHERS
        draw.rounded_rectangle((left, top, left + BOX[0], top + BOX[1]), 7, fill, border, 2)
        title, value = words_of(node)
        draw.text((left + 9, top + 6), title, INK, bold)
        value = value.replace("/", "/ ") if "/" in value else value
        lines = textwrap.wrap(value, 26, max_lines=3, placeholder=" …")
        draw.multiline_text((left + 9, top + 29), "\n".join(lines), FAINT, plain, spacing=3)
    return image


def comfyui(file: Path) -> dict[str, Any]:
    """A workflow of ComfyUI."""
    workflow: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return workflow


def griptape(file: Path) -> dict[str, Any]:
    """A workflow of Griptape Nodes, in the form of ComfyUI's; lines that order runs are left out."""
    text = file.read_text(encoding="utf-8")
    nodes: dict[str, dict[str, Any]] = {}
    made = r'(node\d+)_name = .*?node_type="(\w+)".*?"y": (-?[\d.]+)'
    for number, (name, kind, y) in enumerate(re.findall(made, text, re.DOTALL)):
        nodes[name] = {"id": number, "type": kind, "pos": [0, float(y)], "widgets_values_named": {}}
    set_ = r'parameter_name="(\w+)",\s+node_name=(node\d+)_name,\s+value=(".*?"|[^,]+),\n'
    for parameter, name, value in re.findall(set_, text):
        if value.startswith('"'):
            nodes[name]["widgets_values_named"][parameter] = json.loads(value)
    line = (
        r'source_node_name=(node\d+)_name,\s+source_parameter_name="(\w+)",\s+'
        r"target_node_name=(node\d+)_name"
    )
    links: list[list[Any]] = []
    for source, parameter, target in re.findall(line, text):
        if parameter != "exec_out":
            into = sum(1 for link in links if link[3] == nodes[target]["id"])
            links.append([len(links), nodes[source]["id"], 0, nodes[target]["id"], into, ""])
    return {"nodes": list(nodes.values()), "links": links}


def main() -> None:
    """Writes them."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for file in map(Path, sys.argv[1:]):
        workflow = griptape(file) if file.suffix == ".py" else comfyui(file)
        drawn(workflow).save(file.with_suffix(".jpg"), quality=90, optimize=True)


if __name__ == "__main__":
    main()
