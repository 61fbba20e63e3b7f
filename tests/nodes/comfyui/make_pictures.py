"""Makes the pictures of docs/COMFYUI.md that show the panel, in chromium, on a simulated card.

MOORED_BINARY=... python tests/nodes/comfyui/make_pictures.py
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from browser import PanelPage, chromium, instant_model, opened  # noqa: E402

import moored  # noqa: E402
from service import ROOT, Service  # noqa: E402

DOCS = ROOT / "docs/comfyui"
MODELS = ("black-forest-labs/FLUX.1-dev", "acme/anime-mix")
GIB = 2**30
DARK = "document.body.classList.add('dark-theme')"


def shot(page: Page) -> Image.Image:
    """The panel as it looks now, without what is empty below it."""
    height = page.evaluate("document.querySelector('.moored-panel').scrollHeight")
    page.set_viewport_size({"width": 340, "height": int(height) + 12})
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


@contextmanager
def at_work(folder: Path) -> Iterator[Service]:
    """A service with two large models, one at work, and jobs that wait."""
    for name in MODELS:
        instant_model(folder / "models" / name.split("/")[0], name.split("/")[1], steps_ms=2000)
    service = Service(
        "--models", str(folder / "models"), state=folder / "state", devices=("sim:48GiB",)
    )
    clients = [
        service.client(client_id=name)
        for name in ("comfyui-studio-4711", "anna@desk", "comfyui-studio-4711")
    ]
    try:
        clients[0].load(MODELS[1])
        clients[0].pin(MODELS[1])
        clients[0].reserve(4 * GIB, label="video editor", ttl_s=600)
        streams = [clients[0].stream_image("x", model=MODELS[0], steps=100)]
        for event in streams[0]:
            if isinstance(event, moored.Step):
                break
        streams.append(clients[1].stream_image("x", model=MODELS[1], priority="low"))
        next(iter(streams[1]))
        yield service
        for stream in streams:
            stream.cancel()
    finally:
        for client in clients:
            client.close()
        service.kill()


def panels(browser: Browser, page_of: PanelPage, service: Service) -> Image.Image:
    """The panel in both themes, side by side."""
    page_of.settings(endpoint=service.address)
    with opened(browser, page_of) as page:
        page.wait_for_selector(".moored-panel >> text=running")
        light = shot(page)
        page.evaluate(DARK)
        dark = shot(page)
    both = Image.new("RGB", (light.width + 20 + dark.width, light.height), "white")
    both.paste(light, (0, 0))
    both.paste(dark, (light.width + 20, 0))
    return both


def main() -> None:
    """Writes them."""
    with tempfile.TemporaryDirectory() as temporary, chromium() as browser:
        folder = Path(temporary)
        page_of = PanelPage(folder / "user")
        try:
            with at_work(folder) as service:
                panels(browser, page_of, service).save(DOCS / "panel.png", optimize=True)
        finally:
            page_of.stop()


if __name__ == "__main__":
    main()
