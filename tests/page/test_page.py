"""The page itself: how it is sent, who can use it, and what happens when the service goes."""

from __future__ import annotations

import http.client
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import moored
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import instant_model
from opening import Serve, button, make_token, opened, view
from playwright.sync_api import Browser, Page, expect

from service import ReservedPort, Service

VIEWS = ("Generate", "Cards", "Queue", "Models")
HOSTILE = "<img src=x onerror=window.hacked=1>"
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
}


def test_the_page_needs_no_internet_and_runs_its_own_scripts_alone(demo_service: Service) -> None:
    connection = http.client.HTTPConnection(demo_service.address)
    connection.request("GET", "/")
    answer = connection.getresponse()
    html = answer.read().decode()
    assert answer.status == 200
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    for name in re.findall(r"(?:src|href)=\"([^\"]*)\"", html):
        connection.request("GET", name, headers={"Accept-Encoding": "gzip"})
        file = connection.getresponse()
        file.read()
        assert file.status == 200, name
        assert file.headers["X-Content-Type-Options"] == "nosniff", name


def test_every_view_opens_without_a_word_in_the_console(
    browser: Browser, demo_service: Service
) -> None:
    with opened(browser, demo_service) as page:
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        for name in VIEWS:
            view(page, name)
            expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
            assert page.url.endswith(f"#{name.lower()}")
        page.reload()
        expect(page.get_by_role("tabpanel", name="Models")).to_be_visible()


def findings(page: Page) -> str:
    """What axe finds on the page, in words; empty: nothing."""
    results = Axe().run(page)
    return results.generate_report() if results.violations_count else ""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_in_any_view(browser: Browser, serve: Serve, colours: str) -> None:
    service = serve(devices=("sim:40GiB,foreign=4GiB", "sim:80GiB,index=1"))
    with service.client(client_id="another program") as client:
        client.wait_until_ready(card="sim:1")  # the larger one: both go there
        client.load("flux-full")
        client.pin("flux-full")
        client.reserve(6 * 2**30, label="a game")
        with (
            client.stream_image("a cube", model="slow", steps=200, count=64) as first,
            client.stream_image("a cube", model="slow", steps=200, count=64) as second,
            client.stream_image("a cube", model="slow", steps=200, count=64) as third,
            opened(browser, service, color_scheme=colours, reduced_motion="reduce") as page,
        ):
            for stream in (first, second, third):
                next(iter(stream))
            page.get_by_label("Model", exact=True).select_option(label="slow")
            page.get_by_label("Prompt", exact=True).fill("a cube")
            page.get_by_label("Steps").fill("200")
            page.get_by_text("More", exact=True).click()
            button(page, "Generate picture").click()
            expect(page.get_by_role("article", name="a cube")).to_be_visible()
            expect(page.locator(".plan")).not_to_be_empty()
            for name in VIEWS:
                view(page, name)
                if name == "Cards":
                    page.get_by_text("The timeline as a table").first.click()
                    expect(page.get_by_role("table")).to_be_visible()
                if name == "Queue":
                    expect(page.locator("[data-job]")).to_have_count(4)
                assert findings(page) == "", name


def test_axe_finds_nothing_where_a_result_and_an_error_are_shown(
    browser: Browser, demo_service: Service
) -> None:
    # What fades in has less contrast until it is there.
    with opened(browser, demo_service, reduced_motion="reduce") as page:
        page.get_by_label("Model", exact=True).select_option(label="moored/demo")
        page.get_by_label("Prompt", exact=True).fill("a red circle")
        page.get_by_label("Steps").fill("2")
        button(page, "Generate picture").click()
        expect(page.locator(".run.done")).to_be_visible()
        page.get_by_label("Model", exact=True).select_option(label="moored/demo-film")
        page.get_by_label("Frames", exact=True).fill("10")
        expect(page.locator(".plan .problem")).to_be_visible()
        button(page, "Generate film").click()
        expect(page.locator(".run.failed")).to_be_visible()
        assert findings(page) == ""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing_in_the_dialog_of_the_token(
    browser: Browser, serve: Serve, tmp_path: Path, colours: str
) -> None:
    make_token(tmp_path / "state", "somebody", "observe")
    service = serve(state=tmp_path / "state")
    with opened(browser, service, may_fail=True, color_scheme=colours) as page:
        expect(page.get_by_role("dialog")).to_be_visible()
        assert findings(page) == ""


def test_a_phone_has_the_tabs_below_and_nothing_beside_the_screen(
    browser: Browser, serve: Serve
) -> None:
    service = serve(devices=("sim:40GiB,foreign=4GiB", "sim:80GiB,index=1"))
    with service.client(client_id="x" * 64) as client:
        client.load("flux-full")
        with (
            client.stream_image("a cube", model="slow", steps=200, count=8) as stream,
            opened(browser, service, **PHONE) as page,
        ):
            next(iter(stream))
            page.get_by_label("Prompt", exact=True).fill("x" * 200)
            button(page, "Generate picture").tap()
            expect(page.get_by_role("article", name="x" * 200)).to_be_visible()
            for name in VIEWS:
                page.get_by_role("tab", name=name).tap()
                expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= PHONE["viewport"]["width"], (name, wide)
            tabs = page.get_by_role("tablist").bounding_box()
            assert tabs is not None
            assert tabs["y"] + tabs["height"] == pytest.approx(PHONE["viewport"]["height"], abs=1)
            small = page.locator("[role=tab]").evaluate_all(
                "all => all.filter(it => it.clientHeight < 44).map(it => it.id)"
            )
            assert small == []


def test_everything_works_by_the_keyboard(browser: Browser, demo_service: Service) -> None:
    with opened(browser, demo_service, "#generate") as page:
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        keyboard = page.keyboard
        keyboard.press("Tab")
        generate = page.get_by_role("tab", name="Generate")
        expect(generate).to_be_focused()
        for key, name in (
            ("ArrowRight", "Cards"),
            ("End", "Models"),
            ("ArrowRight", "Generate"),
            ("ArrowLeft", "Models"),
            ("Home", "Generate"),
        ):
            keyboard.press(key)
            expect(page.get_by_role("tab", name=name)).to_be_focused()
            expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
        # The choice of colours, the panel, the prompt.
        prompt = page.get_by_label("Prompt", exact=True)
        for _ in range(5):
            keyboard.press("Tab")
            if prompt.evaluate("it => it === document.activeElement"):
                break
        expect(prompt).to_be_focused()
        keyboard.type("by keyboard")
        keyboard.press("Tab")
        model = page.get_by_label("Model", exact=True)
        expect(model).to_be_focused()
        keyboard.press("End")
        keyboard.press("Home")
        expect(model).to_have_value("moored/demo")
        keyboard.press("Tab")
        keyboard.press("Tab")
        expect(page.get_by_label("Steps")).to_be_focused()
        keyboard.type("2")
        keyboard.press("Control+Enter")
        expect(page.locator(".run.done")).to_be_visible()
        # What has the focus is seen.
        button(page, "Use these settings").focus()
        keyboard.press("Tab")
        focused = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert focused == "solid"
        keyboard.press("Enter")
        expect(page.locator(".run")).to_have_count(0)


def test_the_page_follows_a_service_that_ends_and_comes_back(
    browser: Browser, serve: Serve
) -> None:
    port = ReservedPort()
    first = serve(listen=port.address)
    with opened(browser, first, may_fail=True) as page:
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        page.get_by_label("Model", exact=True).select_option(label="slow")
        page.get_by_label("Prompt", exact=True).fill("lost")
        page.get_by_label("Steps").fill("200")
        button(page, "Generate picture").click()
        run = page.get_by_role("article", name="lost")
        expect(run).to_contain_text(re.compile(r"Step \d+ of 200"))
        first.kill()
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text(f"No service answers at {first.address}.")
        expect(page.get_by_text("No connection")).to_be_visible()
        expect(run).to_contain_text(
            "The connection to the service was lost. The job has ended with it."
        )
        again = serve(listen=port.address, devices=("sim:24GiB", "sim:24GiB,index=1"))
        assert again.address == first.address
        expect(page.get_by_text("2 of 2 cards ready")).to_be_visible()
        expect(alert).to_be_empty()
        # The prompt is still there.
        expect(page.get_by_label("Prompt", exact=True)).to_have_value("lost")
        button(page, "Generate picture").click()
        expect(page.get_by_role("article", name="lost").first).to_contain_text(
            re.compile(r"Step \d+")
        )


def test_try_now_does_not_wait_for_the_pause(browser: Browser, serve: Serve) -> None:
    port = ReservedPort()
    service = serve(listen=port.address)
    with opened(browser, service, may_fail=True, has_clock=True) as page:
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        service.kill()
        expect(button(page, "Try now")).to_be_visible()
        # From here on no pause of the page ends by itself.
        page.clock.pause_at(datetime.now() + timedelta(minutes=1))
        serve(listen=port.address)
        button(page, "Try now").click()
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()


def test_hostile_names_are_text(browser: Browser, serve: Serve, tmp_path: Path) -> None:
    models = tmp_path / "models"
    instant_model(models, HOSTILE, steps_ms=100)
    service = serve(models=models, devices=("sim:40GiB",))
    with (
        moored.Client(service.address, client_id=HOSTILE) as client,
        opened(browser, service) as page,
        client.stream_image(HOSTILE, model=HOSTILE, steps=200, count=8) as stream,
    ):
        next(event for event in stream if isinstance(event, moored.Step))
        client.reserve(2**30, label=HOSTILE)
        page.get_by_label("Model", exact=True).select_option(label=HOSTILE)
        page.get_by_label("Prompt", exact=True).fill(HOSTILE)
        page.get_by_label("Steps").fill("200")
        page.get_by_label("Count").fill("8")
        button(page, "Generate picture").click()
        expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
        view(page, "Cards")
        expect(page.get_by_text(f"reserved for {HOSTILE}")).to_be_visible()
        cards = page.get_by_role("tabpanel", name="Cards")
        expect(cards.get_by_text(f"{HOSTILE}+full", exact=True)).to_be_visible()
        view(page, "Queue")
        expect(page.get_by_text(f"from {HOSTILE}")).to_be_visible()
        view(page, "Models")
        expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0


def test_the_colours_are_those_of_the_system_until_one_is_chosen(
    browser: Browser, demo_service: Service
) -> None:
    def back(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))

    with opened(browser, demo_service, color_scheme="dark") as page:
        dark = back(page)
        page.get_by_label("Colours").select_option("light")
        light = back(page)
        assert light != dark
        page.reload()
        page.get_by_role("tablist").wait_for()
        assert back(page) == light
        page.get_by_label("Colours").select_option("system")
        assert back(page) == dark
    with opened(browser, demo_service, color_scheme="light") as page:
        assert back(page) == light
        page.get_by_label("Colours").select_option("dark")
        assert back(page) == dark
