"""Cards, models and the queue: what they show, and what their buttons do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moored
from browser import instant_model
from opening import HUB_MODEL, Serve, button, opened, view
from playwright.sync_api import Browser, Page, expect
from waiting import until

from service import Service

KEY = "flux-full+full"


@contextmanager
def generating(
    service: Service, model: str = "slow"
) -> Iterator[moored.EventStream[moored.ImageResult]]:
    """A job of another program, which is running when this is entered."""
    with moored.Client(service.address, client_id="another program") as client:
        with client.stream_image("a cube", model=model, steps=200, count=8) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            yield stream


def shares(page: Page, card: str) -> dict[str, float]:
    """The parts of a card as they are drawn: looks, and share of the width of the largest card."""
    drawn: dict[str, float] = page.locator(f'[data-card="{card}"] .map').evaluate(
        """map => {
            const widthOf = it => it.getBoundingClientRect().width;
            const whole = widthOf(map.parentElement.querySelector(".legend"));
            const parts = [...map.children].map(part => [part.title.split(":")[0], widthOf(part) / whole]);
            return Object.fromEntries(parts);
        }"""
    )
    return drawn


def test_cards_are_drawn_to_scale_with_their_contents(browser: Browser, serve: Serve) -> None:
    service = serve(devices=("sim:40GiB,foreign=4GiB", "sim:80GiB,index=1"))
    with service.client() as client, opened(browser, service, "#cards") as page:
        client.wait_until_ready(card="sim:1")
        client.load("flux-full")
        on = next(card for card in client.status().cards if card.residents)
        client.reserve(2 * 2**30, label="a game", card=on.id)
        card = page.locator(f'[data-card="{on.id}"]')
        expect(card.locator(".legend [data-account=reserved]")).to_contain_text("2.0 GiB")
        expect(card.locator(".legend [data-account=all-models]")).to_contain_text("31.5 GiB")
        expect(card.locator(f'[data-key="{KEY}"]')).to_contain_text("transformer 22.2 GiB")
        drawn = shares(page, on.id)
        whole = 80.0
        assert abs(drawn["transformer of flux-full+full"] - 22.2 / whole) < 0.02, drawn
        assert abs(drawn["Reserved"] - 2 / whole) < 0.02, drawn
        expect(page.locator('[data-card="sim:0"]')).to_contain_text(
            "4.0 GiB held by another process"
        )
        foreign = shares(page, "sim:0")
        assert abs(sum(foreign.values()) - 0.5) < 0.02, foreign
        assert abs(foreign["another process"] - 4 / whole) < 0.02, foreign
        expect(page.locator('[data-card="sim:0"] .map')).to_have_attribute(
            "aria-label", re.compile("another process: 4.0 GiB")
        )
        button(card, "End the reservation for a game").click()
        expect(card.locator("[data-reservation]")).to_have_count(0)
        assert not any(each.reservations for each in client.status().cards)


def test_a_model_of_which_a_part_is_there_is_shown_as_streamed(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    instant_model(models, "large", steps_ms=100, blocks=40)
    service = serve(models=models, devices=("sim:10GiB",))
    with opened(browser, service, "#cards") as page, generating(service, "large") as stream:
        with service.client() as client:
            (part,) = [part for part in client.status().cards[0].residents if part.streamed]
        assert part.streamed is not None
        segment = page.locator(".segment.streamed")
        expect(segment).to_have_attribute(
            "title", re.compile("transformer of large.full, streamed: [0-9.]+ GiB")
        )
        expect(page.locator(".card")).to_contain_text("transformer is streamed: ")
        expect(page.locator(".card")).to_contain_text("of streamed models in the machine's memory")
        stream.cancel()


def test_unload_and_pin(browser: Browser, serve: Serve) -> None:
    service = serve(devices=("sim:40GiB",))
    with service.client() as client, opened(browser, service, "#models") as page:
        button(page, "Load flux-full").click()
        expect(page.get_by_role("status")).to_contain_text("Loaded flux-full")
        model = page.locator('[data-model="flux-full"]')
        button(model, f"Pin {KEY}").click()
        expect(page.get_by_role("status")).to_contain_text(f"Pinned {KEY}.")
        assert all(part.pinned for part in client.status().cards[0].residents)
        view(page, "Cards")
        entry = page.locator(f'.entry[data-key="{KEY}"]')
        expect(entry).to_contain_text("pinned")
        button(page, f"Unload {KEY}").click()
        expect(page.get_by_role("status")).to_contain_text("transformer (pinned)")
        button(page, f"Unpin {KEY}").click()
        expect(page.get_by_role("status")).to_contain_text(f"Unpinned {KEY}.")
        button(page, f"Unload {KEY}").click()
        expect(page.get_by_role("status")).to_contain_text(f"Unloaded {KEY}: 31.5 GiB came free.")
        expect(entry).to_have_count(0)
        expect(page.get_by_text("No model is in memory.")).to_be_visible()
        assert client.status().cards[0].residents == ()


def test_unload_asks_first_where_jobs_use_the_model(browser: Browser, serve: Serve) -> None:
    service = serve()
    with service.client() as client, opened(browser, service, "#cards") as page:
        with generating(service) as stream:
            unload = button(page, "Unload slow+full")
            unload.focus()
            page.keyboard.press("Enter")
            question = page.get_by_role("alertdialog")
            expect(question).to_contain_text("Jobs use slow+full: 1. Unloading cancels them.")
            expect(button(page, "Keep")).to_be_focused()
            page.keyboard.press("Escape")
            expect(question).to_be_hidden()
            expect(unload).to_be_focused()
            assert [job.state for job in client.jobs()] == ["running"]
            page.keyboard.press("Enter")
            button(page, "Cancel jobs and unload").click()
            try:
                stream.result()
                raise AssertionError("the job was not cancelled")
            except moored.Cancelled:
                pass
        expect(page.get_by_role("status")).to_contain_text("Unloaded slow+full")


def test_the_queue_shows_jobs_of_all_and_cancels_them(browser: Browser, serve: Serve) -> None:
    service = serve()
    with (
        service.client(client_id="a second one") as client,
        opened(browser, service, "#queue") as page,
        generating(service) as running,
        client.stream_image("behind", model="slow", steps=200, priority="low") as queued,
    ):
        next(event for event in queued if isinstance(event, moored.Queued))
        first = page.locator(f'[data-job="{running.job_id}"]')
        expect(first).to_contain_text(re.compile(r"denoising, step \d+ of 200"))
        expect(first).to_contain_text("from another program, on sim:0")
        second = page.locator(f'[data-job="{queued.job_id}"]')
        expect(second).to_contain_text("queued, next")
        expect(second).to_contain_text("from a second one, low priority")
        expect(page.get_by_role("tab", name="Queue")).to_contain_text("2")
        button(second, f"Cancel {queued.job_id}").click()
        expect(page.get_by_role("status")).to_contain_text(f"Cancelled {queued.job_id}.")
        expect(second).to_have_count(0)
        button(first, f"Cancel {running.job_id}").click()
        expect(page.get_by_text("No job is running or queued.")).to_be_visible()
        until(client, lambda status: not status.jobs)
        ended = page.locator(".ended")
        expect(ended).to_contain_text("Ended: 2 jobs")
        ended.locator("summary").click()
        expect(ended).to_contain_text("cancelled by web page")


def test_rows_that_do_not_change_are_not_drawn_again(browser: Browser, serve: Serve) -> None:
    """With a long queue the page keeps its pace because a status touches only what it changes."""
    service = serve()
    with (
        service.client() as client,
        opened(browser, service, "#queue") as page,
        generating(service) as running,
        client.stream_image("behind", model="slow", steps=200) as queued,
    ):
        next(event for event in queued if isinstance(event, moored.Queued))
        row = page.locator(f'[data-job="{queued.job_id}"]')
        expect(row).to_be_visible()
        row.evaluate(
            """row => {
                window.touched = 0;
                const all = { subtree: true, childList: true, characterData: true, attributes: true };
                new MutationObserver(changes => (window.touched += changes.length)).observe(row, all);
            }"""
        )
        bar = page.locator(f'[data-job="{running.job_id}"] progress')
        value = bar.evaluate("it => it.value")
        for _ in range(3):
            expect(bar).not_to_have_attribute("value", str(value))
            value = bar.get_attribute("value")
        assert page.evaluate("window.touched") == 0


def test_the_timeline_has_a_table(browser: Browser, serve: Serve) -> None:
    service = serve(devices=("sim:40GiB,foreign=2GiB",))
    with service.client() as client, opened(browser, service, "#cards") as page:
        expect(page.locator(".card")).to_be_visible()
        client.load("flux-full")
        chart = page.get_by_role("img", name=re.compile("^Timeline of sim:0"))
        expect(chart).to_be_visible()
        page.get_by_text("The timeline as a table").click()
        table = page.get_by_role("region", name="Table of the memory of sim:0")
        expect(table).to_contain_text("transformer of flux-full+full")
        expect(table).to_contain_text("Other programs")
        expect(table.get_by_role("row").nth(1)).to_contain_text("22.2 GiB")
        client.unload("flux-full")
        expect(table.get_by_role("row").nth(1)).not_to_contain_text("22.2 GiB")


def test_a_model_is_pulled_from_the_hub(
    browser: Browser, serve: Serve, hub: Any, tmp_path: Path
) -> None:
    service = serve(environment=hub.environment(tmp_path / "home"))
    with opened(browser, service, "#models") as page:
        form = page.get_by_role("form", name="Pull a model")
        form.get_by_label("Name, as in owner/name").fill("no/such")
        button(form, "Pull").click()
        expect(page.get_by_role("status")).to_contain_text("no/such")
        expect(page.locator(".announcement.error")).to_be_visible()
        form.get_by_label("Name, as in owner/name").fill(HUB_MODEL)
        button(form, "Pull").click()
        expect(page.get_by_role("status")).to_contain_text(f"Pulled {HUB_MODEL}")
        expect(page.locator(f'[data-model="{HUB_MODEL}"]')).to_be_visible()
