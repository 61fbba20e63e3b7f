"""Makes the pictures of docs/GRIPTAPE.md: what the template workflows generate, and what a node shows.

MOORED_BINARY=... python tests/nodes/griptape/make_pictures.py
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from headless import ROOT, Headless, clean_environment, client_from_here, library_copy
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(ROOT / "tests"))

from service import INSTANT_MODELS, Service  # noqa: E402

DOCS = ROOT / "docs/griptape"
SIDE = 256
PAPER, INK, FAINT, BLUE = "#ffffff", "#1c2733", "#66717d", "#1f77c9"


async def generate(engine: Headless, workflow: Path) -> dict[str, Any]:
    """Runs a template; its nodes by name."""
    await engine.clear()
    nodes = await engine.load(workflow)
    result = await engine.run()
    assert result.succeeded(), result.result_details
    return nodes


def picture(node: Any) -> Image.Image:
    """The picture that a node gave, large enough to be seen."""
    from griptape_nodes.files.file import File

    place = File(node.parameter_output_values["image"].value).resolve()
    return Image.open(place).convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)


async def waits(engine: Headless, world: Path) -> dict[str, Any]:
    """What Generate Image shows while another program has the memory."""
    await engine.fresh_flow()
    limits = await engine.node("GPUConfiguration")
    node = await engine.node("GenerateImage", prompt="a harbour", model="flux-full")
    await engine.connect(limits, "system_constraints", node, "system_constraints")
    run = asyncio.create_task(engine.run())
    while node.parameter_output_values.get("logs", "").count("Waiting") < 5:
        await asyncio.sleep(0.02)
    shown = dict(node.parameter_output_values)
    world.unlink()
    await run
    return shown


def panel(shown: dict[str, Any]) -> Image.Image:
    """A plain rendering of a node's status, bar and log; no program's window."""
    lines = [line for line in shown["logs"].splitlines() if line]
    image = Image.new("RGB", (620, 74 + 20 * len(lines)), PAPER)
    draw = ImageDraw.Draw(image)
    bold, plain = ImageFont.load_default(16), ImageFont.load_default(13)
    draw.text((16, 12), f"status   {shown['status']}", INK, bold)
    draw.rectangle((16, 44, 604, 50), "#e3e8ee")
    draw.rectangle((16, 44, 16 + int(588 * (shown.get("progress") or 0)), 50), BLUE)
    for row, line in enumerate(lines):
        when, _, words = line.strip().partition("  ")
        told = words or when
        draw.text((16, 62 + 20 * row), when if words else "", FAINT, plain)
        draw.text((80, 62 + 20 * row), told, INK, plain)
    return image


def main() -> None:
    """Makes all of them."""
    home = Path(tempfile.mkdtemp())
    clean_environment(home)
    client_from_here(home)
    manifest = library_copy(home)
    engine = Headless()
    engine.do(engine.start(manifest))
    DOCS.mkdir(exist_ok=True)

    service = Service(state=home / "demo_service")
    service.client().close()
    engine.do(engine.settings(endpoint=service.address))
    nodes = engine.do(generate(engine, manifest.parent / "workflows/moored_edit_image.py"))
    both = Image.new("RGB", (2 * SIDE + 8, SIDE), PAPER)
    both.paste(picture(nodes["Generate Image"]), (0, 0))
    both.paste(picture(nodes["Edit Image"]), (SIDE + 8, 0))
    both.save(DOCS / "pictures.png", optimize=True)
    panel(dict(nodes["Generate Image"].parameter_output_values)).save(
        DOCS / "run.png", optimize=True
    )
    service.kill()

    world = home / "world"
    world.write_text("blender 4242 20GiB")
    device = f"sim:40GiB,world={world}"
    service = Service("--models", str(INSTANT_MODELS), state=home / "simulated", devices=(device,))
    service.client().close()
    engine.do(engine.settings(endpoint=service.address))
    panel(engine.do(waits(engine, world))).save(DOCS / "waiting.png", optimize=True)
    service.kill()
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
