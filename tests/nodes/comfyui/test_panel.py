"""The sidebar panel in a real browser, against the pack's routes and a real service."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moored
import pytest
from browser import DEADLINE_S, LONG, PanelPage, chromium, instant_model, opened
from lora_files import instant_adapter
from playwright.sync_api import Browser, Page, expect
from waiting import until

from service import Service

MODEL = "owner/paced"
KEY = f"{MODEL}+full"
HOSTILE = "<img src=x onerror=window.hacked=1>"
LEGEND = {
    "components": ("components",),
    "scratch": ("scratch",),
    "foreign": ("foreign",),
    "other": ("context", "workspaces", "slack", "unexplained"),
    "free": ("free",),
}

Start = Callable[..., Service]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def start(tmp_path: Path, panel: PanelPage) -> Iterator[Start]:
    """Starts a service on a simulated card, which the panel's settings name."""
    models = tmp_path / "models"
    instant_model(models, MODEL, steps_ms=100)
    instant_model(models, HOSTILE)
    started: list[Service] = []

    def begin(*arguments: str, device: str = "sim:40GiB") -> Service:
        service = Service(
            "--models", str(models), *arguments, state=tmp_path / "state", devices=(device,)
        )
        started.append(service)
        panel.settings(endpoint=service.address)
        return service

    yield begin
    for service in started:
        service.kill()


# A stream with one snapshot: no service, and whether one can be started.
ONE_SNAPSHOT = """(canStart) => {
    const down = { reachable: false, can_start: canStart, endpoint: "127.0.0.1:50051", problem: "none" };
    window.EventSource = class {
        constructor() { setTimeout(() => this.onmessage({ data: JSON.stringify(down) })); }
        close() {}
    };
}"""


@contextmanager
def generating(service: Service) -> Iterator[moored.EventStream[moored.ImageResult]]:
    """A job of another program, which is running when this is entered."""
    with moored.Client(service.address, client_id="another program") as client:
        with client.stream_image("a cube", model=MODEL, **LONG) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            yield stream


def entry(page: Page, key: str = KEY) -> Any:
    return page.locator(f'[data-key="{key}"]')


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def gigabytes(memory: moored.MemoryAccounts, account: str) -> str:
    size = sum(getattr(memory, each) for each in LEGEND[account])
    if size == 0:
        return "0"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def test_bars_follow_a_job_and_end_at_the_figures_of_the_service(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    service = start(device="sim:40GiB,foreign=2GiB")
    with service.client() as client, opened(browser, panel) as page:
        expect(page.get_by_text("No model is in memory.")).to_be_visible()
        expect(page.get_by_text("No job is running or queued.")).to_be_visible()
        expect(page.get_by_title("Attention: cpu loops")).to_be_visible()
        expect(page.locator(".moored-notes")).to_have_text("2.0 GiB held by another process")
        bar = page.locator(".moored-bar")
        with generating(service):
            job = page.locator("[data-job]")
            expect(job).to_contain_text(KEY)
            expect(job).to_contain_text("running")
            expect(job).to_contain_text("from another program")
            expect(job).to_contain_text(re.compile(r"denoising, step \d+ of 200"))
            step = job.locator("progress").evaluate("it => it.value")
            page.wait_for_function(
                "step => document.querySelector('[data-job] progress').value > step", arg=step
            )
            expect(page.locator("[data-account=scratch] .moored-number")).to_have_text("1.5 GiB")
            expect(bar).to_have_attribute(
                "aria-label", re.compile("Models 1[156].*Working memory 1.5")
            )
            expect(page.locator(".moored-notes")).to_have_text("2.0 GiB held by another process")
            expect(page.locator(".moored-card")).to_contain_text("busy")
        until(client, lambda status: not status.jobs and status.cards[0].state == "ready")
        expect(page.locator("[data-job]")).to_have_count(0)
        memory = client.status().cards[0].memory
        for account in LEGEND:
            told = page.locator(f'[data-account="{account}"] .moored-number')
            expect(told).to_have_text(gigabytes(memory, account))
        # The bar moves to where it belongs, and takes its time.
        page.wait_for_function(
            """share => {
                const bar = document.querySelector(".moored-bar");
                const full = bar.querySelector(".moored-components");
                return Math.abs(full.clientWidth / bar.clientWidth - share) < 0.03;
            }""",
            arg=memory.components / memory.total,
        )


def test_unload_frees_a_model(browser: Browser, panel: PanelPage, start: Start) -> None:
    with start().client() as client, opened(browser, panel) as page:
        client.load(MODEL)
        expect(entry(page)).to_contain_text("16.0 GiB")
        expect(entry(page)).to_contain_text("transformer")
        button(page, f"Unload {KEY}").click()
        expect(page.get_by_role("status")).to_have_text(f"Unloaded {KEY}: 16.0 GiB came free.")
        assert client.status().cards[0].residents == ()
        expect(entry(page)).to_have_count(0)


def test_unload_asks_first_where_jobs_use_it(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    service = start()
    with service.client() as client, opened(browser, panel) as page:
        with generating(service) as stream:
            unload = button(page, f"Unload {KEY}")
            unload.focus()
            page.keyboard.press("Enter")
            question = page.get_by_role("alertdialog")
            expect(question).to_contain_text("Jobs use it: 1. Unloading cancels them.")
            expect(button(page, "Keep")).to_be_focused()
            page.keyboard.press("Escape")
            expect(question).to_be_hidden()
            expect(unload).to_be_focused()
            assert [job.state for job in client.jobs()] == ["running"]

            page.keyboard.press("Enter")
            button(page, "Cancel jobs and unload").click()
            with pytest.raises(moored.Cancelled):
                stream.result()
        expect(page.get_by_role("status")).to_contain_text(f"Unloaded {KEY}")
        assert client.status().cards[0].residents == ()


def test_pin_keeps_a_model_and_unpin_lets_it_go(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    with start().client() as client, opened(browser, panel) as page:
        client.load(MODEL)
        button(page, f"Pin {KEY}").click()
        expect(page.get_by_role("status")).to_have_text(f"Pinned {KEY}.")
        expect(entry(page)).to_contain_text("pinned")
        assert all(part.pinned for part in client.status().cards[0].residents)

        button(page, f"Unload {KEY}").click()
        expect(page.get_by_role("status")).to_contain_text("transformer (pinned)")
        assert client.status().cards[0].residents

        button(page, f"Unpin {KEY}").click()
        expect(page.get_by_role("status")).to_have_text(f"Unpinned {KEY}.")
        assert not any(part.pinned for part in client.status().cards[0].residents)


def test_cancel_ends_what_runs_and_what_waits(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    service = start()
    with (
        service.client(client_id="a second one") as client,
        opened(browser, panel) as page,
        generating(service) as running,
        client.stream_image("behind", model=MODEL, **LONG, priority="low") as queued,
    ):
        next(event for event in queued if isinstance(event, moored.Queued))
        second = page.locator(f'[data-job="{queued.job_id}"]')
        expect(second).to_contain_text("queued, next")
        expect(second).to_contain_text("from a second one, low priority")
        second.get_by_role("button").click()
        with pytest.raises(moored.Cancelled):
            queued.result()
        expect(page.get_by_role("status")).to_have_text(f"Cancelled {queued.job_id}.")
        expect(second).to_have_count(0)
        assert [job.id for job in client.jobs()] == [running.job_id]

        page.locator(f'[data-job="{running.job_id}"]').get_by_role("button").click()
        with pytest.raises(moored.Cancelled):
            running.result()
        expect(page.get_by_text("No job is running or queued.")).to_be_visible()


def test_a_service_that_is_killed_is_reported_with_the_remedy_and_found_again(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    service = start()
    with opened(browser, panel) as page:
        expect(page.locator(".moored-card")).to_be_visible()
        service.kill()
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text(
            f"No moored service answers at {service.address}: start it with `moored serve`, "
            "or set its address in Settings > moored."
        )
        expect(page.locator(".moored-card")).to_be_hidden()
        again = start("--set", f"service.listen={service.address}")
        assert again.address == service.address
        expect(page.locator(".moored-card")).to_be_visible()
        expect(alert).to_be_hidden()


def test_a_service_can_be_started_from_the_panel(browser: Browser, panel: PanelPage) -> None:
    asked: list[Any] = []
    panel.settings(endpoint="127.0.0.1:9")

    def start(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(status=503, json={"error": "it ended: no card"})

    with opened(browser, panel) as page:
        page.route("**/moored/start", start)
        page.evaluate(ONE_SNAPSHOT, True)
        button(page, "Try now").click()
        button(page, "Start one here").click()
        expect(page.get_by_role("status").filter(has_text="no card")).to_be_visible()
        assert asked == [{}]
        page.evaluate(ONE_SNAPSHOT, False)
        button(page, "Try now").click()
        expect(button(page, "Start one here")).to_be_hidden()


def test_a_new_address_in_the_settings_is_used_at_once(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    panel.settings(endpoint="127.0.0.1:1")
    with opened(browser, panel) as page:
        expect(page.get_by_role("alert")).to_contain_text("127.0.0.1:1")
        service = start()
        page.evaluate("app.extensions[0].settings[0].onChange()")
        expect(page.locator(".moored-card")).to_be_visible()
        expect(page.get_by_text(service.address)).to_be_visible()


def test_a_hostile_name_is_text(browser: Browser, panel: PanelPage, start: Start) -> None:
    with (
        start().client(client_id=HOSTILE) as client,
        opened(browser, panel) as page,
        client.stream_load(HOSTILE) as stream,
    ):
        stream.result()
        expect(page.get_by_text(f"{HOSTILE}+full", exact=True)).to_be_visible()
        button(page, f"Pin {HOSTILE}+full").click()
        expect(page.get_by_role("status")).to_have_text(f"Pinned {HOSTILE}+full.")
        assert page.locator("img").count() == 0
        assert page.evaluate("window.hacked") is None


def test_the_stream_ends_when_the_tab_is_closed_or_hidden(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    start()
    is_stream = lambda request: request.url.endswith("/moored/events")  # noqa: E731
    with opened(browser, panel) as page:
        expect(page.locator(".moored-card")).to_be_visible()
        hide = """hidden => {
            Object.defineProperty(document, "hidden", { configurable: true, value: hidden });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
        with page.expect_event("requestfailed", is_stream):
            page.evaluate(hide, True)
        with page.expect_request(is_stream):
            page.evaluate(hide, False)
        with page.expect_event("requestfailed", is_stream):
            page.evaluate("app.closeTab()")
        assert page.locator(".moored-panel").count() == 0
        page.evaluate("app.openTab('moored')")
        expect(page.locator(".moored-card")).to_be_visible()


def test_a_focused_button_stays_the_same_while_figures_change(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    service = start()
    with service.client() as client, opened(browser, panel) as page:
        client.load(MODEL)
        unload = button(page, f"Unload {KEY}")
        unload.focus()
        unload.evaluate("it => { window.focused = it; }")
        with generating(service):
            expect(entry(page)).to_contain_text("in use")
        client.load(HOSTILE)
        expect(entry(page, f"{HOSTILE}+full")).to_be_visible()
        assert page.evaluate("document.activeElement === window.focused")


def test_the_words_are_those_of_the_language(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    start()
    with opened(browser, panel, "?locale=zh") as page:
        expect(page.get_by_text("显存中没有模型。")).to_be_visible()


def test_every_language_has_every_text_and_the_same_placeholders(
    browser: Browser, panel: PanelPage
) -> None:
    def flat(tree: dict[str, Any], path: str = "") -> dict[str, set[str]]:
        """Path of each text, and its blanks."""
        found: dict[str, set[str]] = {}
        for key, value in tree.items():
            if isinstance(value, dict):
                found |= flat(value, f"{path}{key}.")
            else:
                found[f"{path}{key}"] = set(re.findall(r"\{\w+\}", value))
        return found

    code, translations = panel.ask("/i18n")
    with opened(browser, panel) as page:
        english = page.evaluate("import('/extensions/moored/panel/words.js').then(it => it.words)")
        others = {name: said["moored"] for name, said in translations.items() if name != "en"}
        assert others
        for name, said in others.items():
            assert flat(said) == flat(english), name


LOAD_MODEL = {
    "name": "MooredLoadModel",
    "input": {"required": {"model": ["COMBO", {"options": [], "remote": {"route": "/x"}}]}},
}


def test_the_settings_test_says_what_answers_there_or_why_not(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    service = start()
    with opened(browser, panel) as page:
        page.evaluate(
            """() => {
                const setting = app.extensions[0].settings.find((one) => one.id === "moored.test");
                document.body.append(setting.type());
            }"""
        )
        told = page.locator(".moored-tested")
        button(page, "Test").click()
        with service.client() as client:
            version = client.server_info().version
        expect(told).to_have_text(
            f"moored {version} at {service.address}: simulated card of 40.0 GiB"
        )
        expect(told).to_have_attribute("data-answers", "true")
        service.kill()
        button(page, "Test").click()
        expect(told).to_contain_text("No moored service answers")
        expect(told).to_have_attribute("data-answers", "false")


GRAPH = """() => {
    const widget = (name, value, options = {}) => ({ name, value, options });
    const graph = {
        links: { 1: { origin_id: 1 } },
        getNodeById: (id) => graph.nodes.find((node) => node.id === id),
    };
    graph.nodes = [
        { id: 1, graph, comfyClass: "MooredLoadModel", widgets: [widget("model", "%s")] },
        {
            id: 2,
            graph,
            comfyClass: "MooredTextToImage",
            inputs: [{ name: "model", link: 1 }],
            widgets: [
                widget("width", 0),
                widget("steps", 0),
                widget("seed", 0),
                widget("priority", "normal", { advanced: true }),
            ],
            size: [300, 900],
            computeSize: () => [200, 150],
            setSize(size) { this.size = size; },
        },
    ];
    app.graph = graph;
    for (const node of graph.nodes) app.extensions[0].nodeCreated(node);
    app.extensions[0].afterConfigureGraph();
    window.demo_service = graph.nodes[1];
}"""


def test_a_node_shows_the_values_of_its_model_and_folds_what_is_for_experts(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    start()
    with opened(browser, panel) as page:
        page.evaluate(GRAPH % MODEL)
        page.wait_for_function("demo_service.widgets[1].label === 'steps (0: 20)'")
        labels = page.evaluate("demo_service.widgets.map((each) => each.label ?? each.name)")
        assert labels == ["width (0: 64)", "steps (0: 20)", "seed", "priority"]
        assert page.evaluate("demo_service.widgets.map((each) => each.advanced === true)") == [
            *[False] * 3,
            True,
        ]
        assert page.evaluate("demo_service.size") == [300, 150], "no gap where they were"
        # Without its model it says nothing.
        page.evaluate("demo_service.inputs[0].link = null; demo_service.onConnectionsChange()")
        page.wait_for_function("demo_service.widgets[1].label === 'steps'")


def test_long_names_wrap_after_punctuation(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    with start().client() as client, opened(browser, panel) as page:
        client.load(MODEL)
        name = entry(page).locator(".moored-name")
        expect(name).to_have_text(KEY)
        assert name.evaluate("it => it.querySelectorAll('wbr').length") == 3


def test_load_model_lists_the_service_and_keeps_what_was_saved(
    browser: Browser, panel: PanelPage, start: Start
) -> None:
    """The list of a node: a new one takes the default, a saved one keeps its model, here or not."""
    create = """async ([definition, saved]) => {
        const node = await app.createNode(definition, saved);
        window.nodes = [...(window.nodes ?? []), node];
        return definition.input.required.model[1];
    }"""
    values = "nodes.map(({widgets: [it]}) => [it.value, it.options.values])"
    panel.settings(endpoint="127.0.0.1:1")
    with opened(browser, panel) as page:
        for saved in (None, MODEL, "gone/away"):
            options = page.evaluate(create, [LOAD_MODEL, *([saved] if saved else [])])
            assert options == {"options": []}
        expect(page.get_by_role("alert")).to_be_visible()
        assert page.evaluate(values) == [["", []], [MODEL, [MODEL]], ["gone/away", ["gone/away"]]]
        start()
        page.evaluate("app.extensions[0].refreshComboInNodes()")
        listed = ["moored/demo", HOSTILE, "moored/demo-film", "moored/demo-sound", MODEL]
        assert page.evaluate(values) == [
            ["moored/demo", listed],
            [MODEL, listed],
            ["gone/away", [*listed, "gone/away"]],
        ]


@pytest.mark.parametrize(
    ("node", "adapter_input"), [("LoadLoRA", "lora"), ("ApplyControlNet", "control_net")]
)
def test_a_list_of_adapters_is_the_services_and_keeps_what_was_saved(
    browser: Browser, panel: PanelPage, start: Start, tmp_path: Path, node: str, adapter_input: str
) -> None:
    definition = {
        "name": f"Moored{node}",
        "input": {
            "required": {adapter_input: ["COMBO", {"options": [], "remote": {"route": "/x"}}]}
        },
    }
    create = """async ([definition, saved]) => {
        const node = await app.createNode(definition, saved);
        window.nodes = [...(window.nodes ?? []), node];
        return Object.values(definition.input.required)[0][1];
    }"""
    values = "nodes.map(({widgets: [it]}) => [it.value, it.options.values])"
    for name in ("ink", "styles/oil"):
        instant_adapter(tmp_path / "loras", name, 1 << 20)
    panel.settings(endpoint="127.0.0.1:1")
    with opened(browser, panel) as page:
        for saved in (None, "styles/oil", "gone/away"):
            options = page.evaluate(create, [definition, *([saved] if saved else [])])
            assert options == {"options": []}
        expect(page.get_by_role("alert")).to_be_visible()
        service = start("--set", f"models.adapters={json.dumps([str(tmp_path / 'loras')])}")
        with service.client() as client:
            listed = [one.id for one in client.list_adapters()]
        assert {"ink", "styles/oil"} <= {*listed}
        page.evaluate("app.extensions[0].refreshComboInNodes()")
        assert page.evaluate(values) == [
            [listed[0], listed],
            ["styles/oil", listed],
            ["gone/away", [*listed, "gone/away"]],
        ]


def test_the_demo_model_is_seen_at_work(browser: Browser, panel: PanelPage, tmp_path: Path) -> None:
    """The shipped model on the CPU: real steps, real bytes."""
    service = Service(state=tmp_path / "demo_service")
    panel.settings(endpoint=service.address)
    try:
        with service.client() as client, opened(browser, panel) as page:
            expect(page.locator(".moored-card")).to_be_visible()
            # The page remembers what it showed: a look from here may come when the job is done.
            page.evaluate("""() => {
                window.seen = new Set();
                new MutationObserver(() => {
                    const shown = document.querySelectorAll("[data-job], .moored-doing");
                    for (const each of shown) seen.add(each.textContent);
                }).observe(document.querySelector(".moored-panel"), {subtree: true, childList: true,
                    characterData: true});
            }""")
            client.generate_image("a red cube", steps=40, count=3, timeout=DEADLINE_S * 3)
            expect(page.locator("[data-job]")).to_have_count(0)
            seen = page.evaluate("[...seen]")
            assert any("moored/demo" in each for each in seen), seen
            assert any(re.fullmatch(r"denoising, step \d+ of 40", each) for each in seen), seen
            residents = client.status().cards[0].residents
            size = sum(part.resident_bytes for part in residents)
            expect(page.locator("[data-key]")).to_contain_text(f"{size / 2**20:.1f} MiB")
    finally:
        service.kill()
