"""Pictures, films and tracks from the page, with the shipped models."""

from __future__ import annotations

import io
import re
import wave
from pathlib import Path

import moored
import pytest
from opening import Serve, button, opened, view
from playwright.sync_api import Browser, Page, expect
from product import start_picture
from waiting import until

from service import Service, slower_model

PROMPT = "a large red circle in the centre on a yellow background"
SLOW = "slower"


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model", exact=True).select_option(label=model)


def fill(page: Page, **fields: object) -> None:
    for name, value in fields.items():
        page.get_by_label(name.capitalize(), exact=True).fill(str(value))


def downloaded(page: Page, name: str) -> tuple[str, bytes]:
    """Name and bytes of a result's download."""
    with page.expect_download() as download:
        page.get_by_role("link", name=f"Download {name}").click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_a_picture_is_the_one_of_the_client(browser: Browser, demo_service: Service) -> None:
    with opened(browser, demo_service) as page:
        choose(page, "moored/demo")
        fill(page, prompt=PROMPT, seed=7, steps=3)
        expect(page.locator(".plan")).to_contain_text("Can run now.")
        button(page, "Generate picture").click()
        # Looked for before anything else: it is shown for seconds only.
        expect(page.get_by_role("status")).to_contain_text(f"Picture ready: {PROMPT}")
        run = page.get_by_role("article", name=PROMPT)
        picture = run.get_by_role("img", name=PROMPT)
        expect(picture).to_be_visible()
        expect(run).to_contain_text("Done in")
        expect(run).to_contain_text("128 × 128, seed 7")
        expect(picture).to_have_js_property("naturalWidth", 128)
        expect(picture).to_have_js_property("naturalHeight", 128)
        name, content = downloaded(page, "a-large-red-circle-in-the-centre-on-a-yellow-bac-7.png")
        assert name == "a-large-red-circle-in-the-centre-on-a-yellow-bac-7.png"
        with demo_service.client() as client:
            same = client.generate_image(PROMPT, model="moored/demo", seed=7, steps=3)
        assert same.pictures[0].data == content


def test_previews_grow_in_the_form_and_in_the_queue(
    browser: Browser, demo_service: Service
) -> None:
    with opened(browser, demo_service) as page:
        choose(page, "moored/demo")
        fill(page, prompt=PROMPT, steps=200, count=8)
        button(page, "Generate picture").click()
        growing = page.get_by_role("img", name="What it looks like so far")
        expect(growing).to_be_visible()
        first = growing.get_attribute("src")
        expect(growing).not_to_have_attribute("src", str(first))
        run = page.get_by_role("article", name=PROMPT)
        expect(run).to_contain_text(re.compile(r"Step \d+ of 200, result [1-8]"))
        view(page, "Queue")
        job = page.locator("[data-job]")
        expect(
            job.get_by_role("img", name=re.compile("What job-.* looks like so far"))
        ).to_be_visible()
        expect(job).to_contain_text(re.compile(r"denoising, step \d+ of 200"))
        job.get_by_role("button").click()
        expect(page.get_by_text("No job is running or queued.")).to_be_visible()
        view(page, "Generate")
        expect(run).to_contain_text("cancelled by web page")
        button(run, f"Remove: {PROMPT}").click()
        expect(run).to_have_count(0)


def test_a_result_starts_another_picture_and_a_film(
    browser: Browser, demo_service: Service
) -> None:
    with opened(browser, demo_service) as page:
        choose(page, "moored/demo")
        fill(page, prompt=PROMPT, seed=7, steps=2)
        button(page, "Generate picture").click()
        button(page, "Start from this").click()
        fill(page, strength=0.5, seed=8)
        button(page, "Generate picture").click()
        expect(page.get_by_role("article")).to_have_count(2)
        expect(page.locator(".run.done")).to_have_count(2)
        changed = page.get_by_role("article").first
        expect(changed).to_contain_text("seed 8")

        choose(page, "moored/demo-film")
        button(page, "Remove picture").click()
        page.get_by_text("More", exact=True).click()
        data = io.BytesIO()
        start_picture().save(data, "PNG")
        upload = {"name": "squares.png", "mimeType": "image/png", "buffer": data.getvalue()}
        page.get_by_label("First frame, a picture").set_input_files([upload])  # type: ignore[list-item]
        expect(page.get_by_text("Starts from squares.png")).to_be_visible()
        fill(page, prompt="a film", steps=1, frames=37)
        button(page, "Generate film").click()
        film = page.locator("video")
        expect(film).to_be_visible()
        expect(film).to_have_js_property("readyState", 4)
        assert film.evaluate("it => it.duration") > 0
        assert film.evaluate("it => it.error") is None
        name, content = downloaded(page, "a-film-8.mp4")
        assert name == "a-film-8.mp4"
        assert content[4:8] == b"ftyp"


def test_a_track_plays(browser: Browser, demo_service: Service) -> None:
    with opened(browser, demo_service) as page:
        choose(page, "moored/demo-sound")
        expect(page.get_by_label("Size")).to_have_count(0)
        fill(page, prompt="a slow melody", seconds=1, steps=2, seed=3)
        button(page, "Generate track").click()
        track = page.locator("audio")
        expect(track).to_be_visible()
        expect(track).to_have_js_property("readyState", 4)
        assert track.evaluate("it => it.duration") == pytest.approx(1.0, abs=0.2)
        name, content = downloaded(page, "a-slow-melody-3.wav")
        assert name == "a-slow-melody-3.wav"
        with wave.open(io.BytesIO(content)) as read:
            assert read.getnframes() > 0


def test_several_results_come_one_by_one_and_their_settings_can_be_used_again(
    browser: Browser, demo_service: Service
) -> None:
    with opened(browser, demo_service) as page:
        choose(page, "moored/demo")
        fill(page, prompt=PROMPT, seed=20, steps=2, count=3)
        page.get_by_label("Size").select_option(label="Other")
        fill(page, width=64, height=96)
        button(page, "Generate picture").click()
        expect(page.get_by_role("img", name=PROMPT)).to_have_count(3)
        for seed in (20, 21, 22):
            expect(page.get_by_text(f"64 × 96, seed {seed}")).to_be_visible()
        fill(page, prompt="something else", seed=1, steps=1)
        page.get_by_label("Size").select_option("square")
        button(page, "Use these settings").click()
        expect(page.get_by_label("Prompt", exact=True)).to_have_value(PROMPT)
        expect(page.get_by_label("Seed")).to_have_value("20")
        expect(page.get_by_label("Width")).to_have_value("64")
        expect(page.get_by_label("Height")).to_have_value("96")


def test_cancel_works_while_a_job_is_here_queued_and_running(
    browser: Browser, serve: Serve, tmp_path: Path
) -> None:
    service = serve(models=slower_model(tmp_path, 100))
    with service.client(client_id="another program") as client, opened(browser, service) as page:
        with client.stream_image("before", model=SLOW, steps=200, count=8) as running:
            next(event for event in running if isinstance(event, moored.Step))
            choose(page, SLOW)
            for name in ("first", "second", "third"):
                fill(page, prompt=name, steps=200)
                button(page, "Generate picture").click()
            runs = {
                name: page.get_by_role("article", name=name)
                for name in ("first", "second", "third")
            }
            expect(runs["first"]).to_contain_text("Queued")
            expect(runs["second"]).to_contain_text("Queued")
            # The browser has few connections: the third goes when one of them has ended.
            expect(runs["third"]).to_contain_text("Waits in this page")
            assert len(client.jobs()) == 3
            button(runs["first"], "Cancel: first").click()
            expect(runs["first"]).to_contain_text("cancelled by web page")
            expect(runs["third"]).to_contain_text("Queued")
            button(runs["second"], "Cancel: second").click()
            expect(runs["second"]).to_contain_text("cancelled by web page")
            running.cancel()
        expect(runs["third"]).to_contain_text(re.compile(r"Step \d+ of 200"))
        button(runs["third"], "Cancel: third").click()
        expect(runs["third"]).to_contain_text("cancelled by web page")
        until(client, lambda status: not status.jobs)


def test_leaving_the_page_ends_its_jobs(browser: Browser, serve: Serve, tmp_path: Path) -> None:
    service = serve(models=slower_model(tmp_path, 100))
    with service.client() as client:
        with opened(browser, service) as page:
            choose(page, SLOW)
            fill(page, prompt="left", steps=200)
            button(page, "Generate picture").click()
            expect(page.get_by_role("article", name="left")).to_contain_text(
                re.compile(r"Step \d+")
            )
            assert len(client.jobs()) == 1
        until(client, lambda status: not status.jobs)


def test_a_wait_names_who_holds_the_memory_and_the_patience_that_is_left(
    browser: Browser, serve: Serve
) -> None:
    service = serve("--set", "queue.patience_foreign=5m", devices=("sim:40GiB,foreign=20GiB",))
    with opened(browser, service) as page:
        choose(page, "flux-full")
        expect(page.locator(".plan")).to_contain_text(
            "Would wait for memory, which another process holds."
        )
        fill(page, prompt="a wait")
        button(page, "Generate picture").click()
        run = page.get_by_role("article", name="a wait")
        expect(run).to_contain_text(re.compile(r"Waits for memory, [45] min of patience left"))
        expect(run).to_contain_text("Held by another process: 20.0 GiB.")
        view(page, "Queue")
        job = page.locator("[data-job]")
        expect(job).to_contain_text(
            re.compile("waits for memory, .* left: another process: 20.0 GiB")
        )
        view(page, "Cards")
        expect(page.locator(".waits")).to_contain_text(
            re.compile("job-.* waits .* for another process: 20.0 GiB")
        )
        view(page, "Generate")
        button(run, "Cancel: a wait").click()
        expect(run).to_contain_text("cancelled by web page")


def test_what_never_fits_says_what_would_and_the_form_takes_it(
    browser: Browser, serve: Serve
) -> None:
    with opened(browser, serve(devices=("sim:24GiB",))) as page:
        choose(page, "huge")
        expect(page.locator(".plan")).to_contain_text("Does not fit")
        fill(page, prompt="too large")
        button(page, "Generate picture").click()
        run = page.get_by_role("article", name="too large")
        expect(run.locator(".problem")).to_be_visible()
        for told, precision in (
            ("quantization 4-bit (nf4)", "4-bit"),
            ("quantization text_encoder_2=nf4-double,transformer=nf4-double", None),
        ):
            button(run, told).click()
            expected = precision or told.removeprefix("quantization ")
            expect(page.get_by_label("Precision")).to_have_value(expected)
            expect(page.locator(".plan")).not_to_contain_text("Does not fit")


def test_what_the_service_refuses_is_told_before_and_after(
    browser: Browser, demo_service: Service
) -> None:
    with opened(browser, demo_service) as page:
        choose(page, "moored/demo-film")
        fill(page, prompt="a film", frames=10)
        expect(page.locator(".plan .problem")).to_contain_text("frames")
        button(page, "Generate film").click()
        expect(page.get_by_role("article", name="a film").locator(".problem")).to_contain_text(
            "frames"
        )


def test_a_field_that_is_folded_away_is_opened_where_it_is_wrong(
    browser: Browser, serve: Serve
) -> None:
    with opened(browser, serve()) as page:
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Negative prompt: what to lead away from").fill("blue")
        page.get_by_text("More", exact=True).click()
        guidance = page.get_by_label("Negative guidance")
        expect(guidance).to_be_hidden()
        button(page, "Generate picture").click()
        expect(guidance).to_be_focused()
        expect(page.get_by_role("article")).to_have_count(0)
