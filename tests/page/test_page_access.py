"""Tokens and roles: the page asks for a token, and shows what its role may do."""

from __future__ import annotations

from pathlib import Path

import pytest
from opening import Serve, button, make_token, opened, view
from playwright.sync_api import Browser, Page, expect

from service import Service, run

ROLES = ("observe", "generate", "administer")


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    return {role: make_token(tmp_path / "state", f"my-{role}", role) for role in ROLES}


@pytest.fixture
def guarded(tokens: dict[str, str], serve: Serve, tmp_path: Path) -> Service:
    """A service that asks for a token, with a model in memory and a job that runs."""
    service = serve(state=tmp_path / "state")
    with service.client(token=tokens["administer"]) as client:
        client.load("small")
    return service


def use(page: Page, token: str, remember: bool = False) -> None:
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Token").fill(token)
    if remember:
        dialog.get_by_label("Remember it in this browser").check()
    button(dialog, "Use token").click()


def stored(page: Page) -> list[str | None]:
    kept: list[str | None] = page.evaluate(
        "[sessionStorage.getItem('moored.token'), localStorage.getItem('moored.token')]"
    )
    return kept


def test_the_page_asks_for_a_token(
    browser: Browser, guarded: Service, tokens: dict[str, str]
) -> None:
    with opened(browser, guarded, may_fail=True) as page:
        dialog = page.get_by_role("dialog", name="This service asks for a token")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        use(page, "0123456789abcdef")
        expect(dialog).to_contain_text("The service does not know this token.")
        use(page, "ünïcode")
        expect(dialog).to_be_visible()
        use(page, tokens["generate"])
        expect(dialog).to_be_hidden()
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        expect(page.get_by_text("my-generate")).to_be_visible()
        assert stored(page) == [tokens["generate"], None]
        page.reload()
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        button(page, "Forget token").click()
        expect(dialog).to_be_visible()
        assert stored(page) == [None, None]
        use(page, tokens["observe"], remember=True)
        expect(dialog).to_be_hidden()
        assert stored(page) == [tokens["observe"], tokens["observe"]]


def test_a_link_may_carry_the_token(
    browser: Browser, guarded: Service, tokens: dict[str, str]
) -> None:
    with opened(browser, guarded, f"#token={tokens['administer']}") as page:
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        expect(page.get_by_role("dialog")).to_be_hidden()
        assert "token" not in page.url
        expect(page.get_by_text("my-administer")).to_be_visible()


@pytest.mark.parametrize("role", ROLES)
def test_a_role_sees_what_it_may_do(
    browser: Browser, guarded: Service, tokens: dict[str, str], role: str
) -> None:
    may_generate, may_administer = role != "observe", role == "administer"
    with (
        guarded.client(token=tokens["administer"], client_id="another program") as client,
        client.stream_image("a cube", model="slow", steps=200, count=8) as stream,
        opened(browser, guarded, f"#token={tokens[role]}") as page,
    ):
        next(iter(stream))
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        expect(page.get_by_role("tab", name="Generate")).to_have_count(int(may_generate))
        view(page, "Queue")
        expect(page.locator("[data-job]")).to_have_count(1)
        expect(page.locator("[data-job]").get_by_role("button")).to_have_count(int(may_generate))
        view(page, "Cards")
        expect(page.locator('[data-key="small+full"]')).to_be_visible()
        for name in ("Pin small+full", "Unload small+full"):
            expect(button(page, name)).to_have_count(int(may_administer))
        view(page, "Models")
        expect(page.locator('[data-model="small"]')).to_be_visible()
        expect(button(page, "Load small")).to_have_count(int(may_generate))
        expect(button(page, "Pin small+full")).to_have_count(int(may_administer))
        if role == "observe":
            told = page.locator("main").get_by_role("button").all_inner_texts()
            assert told == ["Look for new models"], told


def test_a_token_that_is_withdrawn_is_asked_for_again(
    browser: Browser, guarded: Service, tokens: dict[str, str], tmp_path: Path
) -> None:
    with opened(browser, guarded, f"#token={tokens['observe']}", may_fail=True) as page:
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        done = run("token", "withdraw", "my-observe", "--state", str(tmp_path / "state"))
        assert done.returncode == 0, done.stderr
        expect(page.get_by_role("dialog")).to_contain_text("The service does not know this token.")
        use(page, tokens["generate"])
        expect(page.get_by_text("1 of 1 card ready")).to_be_visible()
        expect(page.get_by_role("tab", name="Generate")).to_be_visible()
