"""What the panel's tests share: the page in a process of its own, and Debian's chromium to look at it.

A browser that is missing is an error, never a skip: the panel is seen in one or not at all.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from service import clean_environment

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PAGE = Path(__file__).resolve().parent / "browser_page.py"

DEADLINE_S = 60.0

# What is expected of a page has as long as everything else: of its own accord it would have five seconds.
expect.set_options(timeout=DEADLINE_S * 1000)

# Longer than any test, on models whose steps take their time: such a job ends only if it is ended.
LONG: dict[str, Any] = {"steps": 200, "count": 8}


class PanelPage:
    """The stand-in of ComfyUI's page, running."""

    def __init__(self, user_directory: Path, quick_s: float = 50.0) -> None:
        """`quick_s`: how long the service may take to answer it, where that is to be quick."""
        self.user_directory = user_directory
        self.process = subprocess.Popen(
            [sys.executable, str(PAGE), str(user_directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment()
            | {"MOORED_CREDENTIALS": str(user_directory / "credentials" / "kept.json")}
            | {"PANEL_QUICK_S": str(quick_s)},
        )
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        assert port, "the page did not start"
        self.address = f"127.0.0.1:{port}"

    def settings(self, **settings: str) -> None:
        """What ComfyUI would store when they are typed: `endpoint`, `token_file`."""
        folder = self.user_directory / "default"
        folder.mkdir(parents=True, exist_ok=True)
        stored = {f"moored.{name}": value for name, value in settings.items()}
        new = folder / "new.json"
        new.write_text(json.dumps(stored), encoding="utf-8")
        new.replace(folder / "comfy.settings.json")

    def ask(
        self,
        route: str,
        body: object | None = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> tuple[int, Any]:
        """Status and JSON of an answer; a `body` is posted as JSON, `raw` as it is."""
        sent = raw if raw is not None else None if body is None else json.dumps(body).encode()
        json_type = {} if sent is None else {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self.address, timeout=DEADLINE_S)
        try:
            method = "GET" if sent is None else "POST"
            connection.request(method, route, sent, json_type | (headers or {}))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    @contextmanager
    def events(self) -> Iterator[Iterator[dict[str, Any]]]:
        """The snapshots of the stream."""
        connection = http.client.HTTPConnection(self.address, timeout=DEADLINE_S)
        try:
            connection.request("GET", "/moored/events")
            answer = connection.getresponse()
            assert answer.getheader("Content-Type") == "text/event-stream"
            yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))
        finally:
            connection.close()

    def stop(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, panel: PanelPage, query: str = "") -> Iterator[Page]:
    """The page with the panel open. An error in its scripts fails the test."""
    page = browser.new_page(viewport={"width": 340, "height": 900})
    page.set_default_timeout(DEADLINE_S * 1000)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"http://{panel.address}/{query}")
    page.wait_for_selector("body[data-ready]", state="attached")
    page.evaluate("app.openTab('moored')")
    try:
        yield page
        assert not errors, errors
    finally:
        page.close()


def instant_model(folder: Path, name: str, steps_ms: int = 0, blocks: int = 0) -> None:
    """Writes a model for simulated cards: the sizes of a large one, and steps that take their time.

    With blocks its transformer may be larger than the card.
    """
    path = folder / f"{name}.instant.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = {
        "transformer": 11_900_000_000,
        "text_encoder": 246_415_360,
        "text_encoder_2": 4_900_000_000,
        "vae": 167_000_000,
    }
    parts: list[dict[str, Any]] = [
        {"name": part, "bytes": size, "identity": f"{name}-{part}"} for part, size in sizes.items()
    ]
    parts[0]["blocks"] = blocks
    scratch = {
        "encode_text": 536_870_912,
        "encode_image": 2_147_483_648,
        "denoise": 1_610_612_736,
        "decode": 3_221_225_472,
    }
    defaults = {"steps": 20, "width": 64, "height": 64, "max_sequence_length": 64}
    model = {"name": path.name, "components": parts, "scratch": scratch, "defaults": defaults}
    path.write_text(json.dumps(model | ({"steps_ms": steps_ms} if steps_ms else {})))
