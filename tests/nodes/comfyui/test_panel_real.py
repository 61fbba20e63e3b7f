"""The panel, the list of models and the examples in ComfyUI's own frontend, where there is a real ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DEADLINE_S, chromium
from conftest import CLIENT, PACK, ROOT
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from real import RealComfyUI, started

from service import Service

WORKFLOWS = sorted((PACK / "example_workflows").glob("*.json"))
START_S = 120.0
SHIPPED_MODEL = "moored/demo"

LOAD = """async (workflow) => {
    await app.loadGraphData(workflow);
    const node = app.graph.nodes.find((each) => each.type === "MooredLoadModel");
    return [node?.widgets[0].value, (await app.graphToPrompt()).output];
}"""


@pytest.fixture(scope="module")
def comfyui(
    tmp_path_factory: pytest.TempPathFactory, demo_service: Service
) -> Iterator[RealComfyUI]:
    """A ComfyUI of its own, whose settings name the service."""
    comfyui = started(PACK, CLIENT, tmp_path_factory.mktemp("comfyui") / "base")
    if comfyui is None:
        pytest.skip("COMFYUI_DIR and COMFYUI_PYTHON are not set")
    comfyui.post(
        "/settings", {"moored.endpoint": demo_service.address, "Comfy.TutorialCompleted": True}
    )
    with Image.open(ROOT / "docs/demo.png") as picture:
        comfyui.upload("example.png", picture)
    yield comfyui
    comfyui.stop()


@pytest.fixture(scope="module")
def browser(comfyui: RealComfyUI) -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def page(browser: Browser, comfyui: RealComfyUI) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"http://127.0.0.1:{comfyui.port}/")
    page.wait_for_function(
        "window.app?.extensionManager?.getSidebarTabs().some((tab) => tab.id === 'moored')",
        timeout=START_S * 1000,
    )
    # It opens a workflow of its own when it is ready, and would do so over ours.
    page.wait_for_function("app.extensionManager.workflow?.activeWorkflow", timeout=START_S * 1000)
    expect(page.locator("#graph-canvas")).to_be_visible(timeout=START_S * 1000)
    yield page
    page.close()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_example_loads_and_runs(page: Page, comfyui: RealComfyUI, path: Path) -> None:
    """It runs where its model is the shipped one."""
    workflow = json.loads(path.read_text(encoding="utf-8"))
    loaders = [node for node in workflow["nodes"] if node["type"] == "MooredLoadModel"]
    model, prompt = page.evaluate(LOAD, workflow)
    assert model == loaders[0]["widgets_values_named"]["model"]
    assert {node["class_type"] for node in prompt.values()} == {
        node["type"] for node in workflow["nodes"]
    }
    if model == SHIPPED_MODEL:
        comfyui.queue(prompt, client_id=path.stem).succeeded()


def with_model(model: str) -> Any:
    workflow = json.loads((PACK / "example_workflows/text_to_image.json").read_text())
    for node in workflow["nodes"]:
        if node["type"] == "MooredLoadModel":
            node["widgets_values"][0] = node["widgets_values_named"]["model"] = model
    return workflow


def test_a_saved_model_stays_whatever_the_service_has(page: Page) -> None:
    model, prompt = page.evaluate(LOAD, with_model("owner/elsewhere"))
    assert model == "owner/elsewhere"
    # The list is here by now, and nothing has changed.
    names = "app.graph.nodes.find((it) => it.type === 'MooredLoadModel').widgets[0].options.values"
    page.wait_for_function(f"{names}.includes('moored/demo')")
    model, prompt = page.evaluate(
        "async () => [app.graph.serialize().nodes.find((it) => it.type === 'MooredLoadModel')"
        ".widgets_values[0], (await app.graphToPrompt()).output]"
    )
    assert model == "owner/elsewhere"
    inputs = next(it["inputs"] for it in prompt.values() if it["class_type"] == "MooredLoadModel")
    assert inputs["model"] == "owner/elsewhere"
    assert "refresh" not in inputs


def test_the_panel_opens_and_its_stream_ends_with_it(page: Page) -> None:
    toggle = "app.extensionManager.sidebarTab.toggleSidebarTab('moored')"
    is_stream = lambda request: request.url.endswith("/moored/events")  # noqa: E731
    page.evaluate(toggle)
    expect(page.locator(".moored-card")).to_be_visible(timeout=DEADLINE_S * 1000)
    with page.expect_event("requestfailed", is_stream):
        page.evaluate(toggle)
    expect(page.locator(".moored-panel")).to_have_count(0)


def test_the_list_of_a_node_that_is_html_has_the_models_too(page: Page) -> None:
    """The frontend has two kinds of nodes: drawn ones, and newer ones made of elements."""
    page.evaluate("app.extensionManager.setting.set('Comfy.VueNodes.Enabled', true)")
    try:
        page.evaluate(LOAD, with_model("owner/elsewhere"))
        page.get_by_role("combobox", name="model", exact=True).click()
        for name in ("moored/demo", "owner/elsewhere"):
            expect(page.get_by_role("option", name=name, exact=True)).to_be_visible()
        page.get_by_role("option", name="moored/demo", exact=True).click()
        model = "app.graph.nodes.find((it) => it.type === 'MooredLoadModel').widgets[0].value"
        page.wait_for_function(f"{model} === 'moored/demo'")
    finally:
        page.evaluate("app.extensionManager.setting.set('Comfy.VueNodes.Enabled', false)")


SETTING = """() => {
    const id = "moored.unload_own_models";
    return [app.extensionManager.setting.get(id), app.ui.settings.settingsLookup?.[id]?.type];
}"""


def test_comfyui_unloads_its_models_for_jobs_by_default(page: Page) -> None:
    assert page.evaluate(SETTING) == [True, "boolean"]
