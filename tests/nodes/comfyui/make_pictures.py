"""Makes the pictures of docs/COMFYUI.md in chromium: the panel on a simulated card, and examples that ran.

MOORED_BINARY=... [COMFYUI_DIR=... COMFYUI_PYTHON=...] python tests/nodes/comfyui/make_pictures.py

The examples run in the real ComfyUI of COMFYUI_DIR and COMFYUI_PYTHON, and are left out without it.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import moored  # noqa: E402
from browser import DEADLINE_S, PanelPage, chromium, instant_model, opened  # noqa: E402
from real import RealComfyUI, started  # noqa: E402

from service import ROOT, Service  # noqa: E402

DOCS = ROOT / "docs/comfyui"
MODELS = ("black-forest-labs/FLUX.1-dev", "acme/anime-mix")
GIB = 2**30
DARK = "document.body.classList.add('dark-theme')"

PACK = ROOT / "nodes/comfyui"
# The examples, and what shows that their result is on the page.
EXAMPLES = {
    "text_to_image": "[data-node-id='3'] img",
    "first_film": "[data-node-id='5'] video",
    "first_music": "[data-node-id='3'] audio",
}
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.VueNodes.Enabled": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.NodeBadge.NodeSourceBadgeMode": "None",
}
VIEWPORT = {"width": 1900, "height": 1100}
MARGIN = 16
FILM_AT_S = 2.5
LOAD = """async (workflow) => {
    await app.loadGraphData(workflow);
    Object.assign(app.canvas.ds, { scale: 1, offset: [80, 110] });
    app.canvas.setDirty(true, true);
}"""
RUN = """() => new Promise((resolve, reject) => {
    app.api.addEventListener("execution_success", resolve, { once: true });
    app.api.addEventListener("execution_error", (event) => reject(event.detail), { once: true });
    app.queuePrompt(0);
})"""
LOADED = """(shown) =>
    shown.tagName === "IMG" ? shown.complete && shown.naturalWidth > 0 : shown.readyState >= 2"""
SEEK = """(film, second) => new Promise((resolve) => {
    film.addEventListener("seeked", resolve, { once: true });
    film.currentTime = second;
})"""
BOXES = """() => [...document.querySelectorAll("[data-node-id]")].map((node) => {
    const box = node.getBoundingClientRect();
    return [box.left, box.top, box.right, box.bottom];
})"""


def shot(page: Page) -> Image.Image:
    """The panel as it looks now, without what is empty below it."""
    last = "[...document.querySelectorAll('.moored-panel li, .moored-panel .moored-notes')].at(-1)"
    height = page.evaluate(f"{last}.getBoundingClientRect().bottom")
    page.set_viewport_size({"width": 340, "height": int(height) + 12})
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


@contextmanager
def at_work(folder: Path) -> Iterator[Service]:
    """A service with two large models, one at work, and jobs that wait."""
    for name in MODELS:
        instant_model(folder / "models" / name.split("/")[0], name.split("/")[1], steps_ms=2000)
    service = Service(
        "--models",
        str(folder / "models"),
        state=folder / "state",
        devices=("sim:48GiB,foreign=3GiB",),
    )
    clients = [service.client(client_id=name) for name in ("comfyui-studio-4711", "anna@desk")]
    try:
        clients[0].load(MODELS[1])
        clients[0].pin(MODELS[1])
        clients[0].reserve(4 * GIB, label="video editor", ttl_s=600)
        running = clients[0].stream_image("x", model=MODELS[0], steps=100)
        next(event for event in running if isinstance(event, moored.Step))
        waiting = clients[1].stream_image("x", model=MODELS[1], priority="low")
        next(iter(waiting))
        yield service
    finally:
        for client in clients:
            client.close()
        service.kill()


def panels(browser: Browser, page_of: PanelPage, service: Service) -> Image.Image:
    """The panel in both themes, side by side."""
    page_of.settings(endpoint=service.address)
    with opened(browser, page_of) as page:
        page.wait_for_selector("[data-job] >> text=denoising")
        light = shot(page)
        page.evaluate(DARK)
        dark = shot(page)
    both = Image.new("RGB", (light.width + 20 + dark.width, light.height), "white")
    both.paste(light, (0, 0))
    both.paste(dark, (light.width + 20, 0))
    return both


def example(page: Page, name: str) -> Image.Image:
    """An example after it ran, cut to its nodes."""
    page.evaluate(LOAD, json.loads((PACK / f"example_workflows/{name}.json").read_text()))
    page.evaluate(RUN)
    shown = page.locator(EXAMPLES[name]).first
    shown.wait_for(state="attached")
    page.wait_for_function(LOADED, arg=shown.element_handle())
    if name == "first_film":
        shown.evaluate(SEEK, FILM_AT_S)
    page.wait_for_timeout(3000)  # the nodes grow to what they show, and messages above them fade
    boxes = page.evaluate(BOXES)
    left, top = (min(box[side] for box in boxes) - MARGIN for side in (0, 1))
    right, bottom = (max(box[side] for box in boxes) + MARGIN for side in (2, 3))
    clip = {"x": left, "y": top, "width": right - left, "height": bottom - top}
    return Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")


def examples(browser: Browser, comfyui: RealComfyUI, service: Service) -> None:
    """Writes the pictures of the examples."""
    comfyui.post("/settings", SETTINGS | {"moored.endpoint": service.address})
    page = browser.new_page(viewport=VIEWPORT)
    page.set_default_timeout(2 * DEADLINE_S * 1000)
    page.goto(f"http://127.0.0.1:{comfyui.port}/")
    # It opens a workflow of its own when it is ready, and would do so over ours.
    page.wait_for_function("window.app?.extensionManager?.workflow?.activeWorkflow")
    for name in EXAMPLES:
        picture = example(page, name).quantize(256, dither=Image.Dither.NONE)
        picture.save(DOCS / f"{name}.png", optimize=True)
    page.close()


def main() -> None:
    """Writes them."""
    with tempfile.TemporaryDirectory() as temporary, chromium() as browser:
        folder = Path(temporary)
        comfyui = started(PACK, ROOT / "client-py/src", folder / "comfyui")
        if comfyui is not None:
            service = Service(state=folder / "examples")
            try:
                examples(browser, comfyui, service)
            finally:
                comfyui.stop()
                service.kill()
        page_of = PanelPage(folder / "user")
        try:
            with at_work(folder) as service:
                panels(browser, page_of, service).save(DOCS / "panel.png", optimize=True)
        finally:
            page_of.stop()


if __name__ == "__main__":
    main()
