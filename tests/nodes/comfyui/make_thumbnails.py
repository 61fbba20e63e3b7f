"""Draws the thumbnails of examples whose models are too large to make a picture for them: their nodes.

    python tests/nodes/comfyui/make_thumbnails.py NAME...

writes `example_workflows/NAME.jpg` for each.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

EXAMPLES = Path(__file__).resolve().parents[3] / "nodes/comfyui/example_workflows"
BOX = (168, 84)
GAP = (44, 28)
MARGIN = 22
INK, FAINT = "#1a1a1a", "#777777"
# Fill and border: of the nodes of this pack, and of ComfyUI's own.
OURS, OTHERS = ("#ebf3fc", "#2f7ebc"), ("#f2f2f2", "#8c8c8c")
LINE = "#2f7ebc"
SHOWN = ("prompt", "model", "image", "lora")
"""Values that a box shows: the first that its node has."""


def words_of(node: dict[str, Any]) -> tuple[str, str]:
    """The title of a node, and what is set on it."""
    title = node["type"].removeprefix("Moored")
    title = "".join(f" {one}" if one.isupper() else one for one in title).strip()
    title = title.replace(" To ", " to ")
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
        lines = textwrap.wrap(value, 28, max_lines=3, placeholder=" …")
        draw.multiline_text((left + 9, top + 29), "\n".join(lines), FAINT, plain, spacing=3)
    return image


def main() -> None:
    """Writes them."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        workflow = json.loads((EXAMPLES / f"{name}.json").read_text(encoding="utf-8"))
        drawn(workflow).save(EXAMPLES / f"{name}.jpg", quality=90, optimize=True)


if __name__ == "__main__":
    main()
