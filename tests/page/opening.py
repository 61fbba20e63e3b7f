"""How the page's tests open the page of a service, and find what is on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browser import DEADLINE_S
from playwright.sync_api import Browser, Page

from service import Service, run

HUB_MODEL = "me/mine"

Serve = Callable[..., Service]


class Opened:
    """A page that is open, and what it has sent and said."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: self.requests.append(request.url))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)


@contextmanager
def opened(
    browser: Browser,
    service: Service,
    fragment: str = "",
    may_fail: bool = False,
    has_clock: bool = False,
    **options: Any,
) -> Iterator[Page]:
    """The page of a service. What the browser warns of fails the test; `may_fail`: not of its network.

    With `has_clock` the test may stop the page's clock.
    """
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page = context.new_page()
    page.set_default_timeout(DEADLINE_S * 1000)
    seen = Opened(page)
    try:
        if has_clock:
            page.clock.install()
        page.goto(f"http://{service.address}/{fragment}")
        page.get_by_role("tablist").wait_for()
        yield page
        fatal = [
            problem
            for problem in seen.problems
            if not (may_fail and problem.startswith("Failed to load resource"))
        ]
        assert not fatal, fatal
        away = [
            url
            for url in seen.requests
            if not url.startswith((f"http://{service.address}/", "blob:http://", "data:"))
        ]
        assert not away, away
    finally:
        context.close()


def view(page: Page, name: str) -> None:
    """Opens a view: `Cards`."""
    page.get_by_role("tab", name=name).click()


def button(page: Any, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def make_token(state: Path, name: str, role: str) -> str:
    """A token of a service that has its state there."""
    made = run("token", "make", name, "--role", role, "--json", "--state", str(state))
    assert made.returncode == 0, made.stderr
    return str(json.loads(made.stdout)["token"])
