"""A model that is missing: said, or pulled first, from a stand-in of a hub."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.hub import Hub, Repository, files_of
from headless import Headless

from service import ROOT, Service

MODEL = "me/mine"
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that has the shipped model under another name."""
    with Hub() as hub:
        hub.repositories[MODEL] = Repository(files_of(ROOT / "demo/model"))
        yield hub


@pytest.fixture
def pulling(nowhere: Headless, hub: Hub, tmp_path: Path) -> Iterator[Headless]:
    """The engine, speaking to a service that has this hub and an empty cache."""
    service = Service(state=tmp_path / "state", environment=hub.environment(tmp_path / "home"))
    service.client().close()
    nowhere.do(nowhere.settings(endpoint=service.address))
    yield nowhere
    service.kill()


def demo_service(engine: Headless, model: str, **values: Any) -> Any:
    """Generate Image behind Diffusion Model."""
    return generating(engine, "GenerateImage", model, **values)


def generating(engine: Headless, kind: str, model: str, **values: Any) -> Any:
    """A node behind Diffusion Model."""
    source = engine.do(engine.node("DiffusionModel", model=model, **values))
    node = engine.do(engine.node(kind, prompt="a red circle", steps=1))
    engine.do(engine.connect(source, "model_handle", node, "model"))
    return node


def test_a_missing_model_is_pulled_where_that_is_asked_for(pulling: Headless, hub: Hub) -> None:
    node = demo_service(pulling, MODEL, if_missing="pull")
    result = pulling.do(pulling.run())
    assert result.succeeded(), result.result_details
    shown = dict(node.parameter_output_values)
    assert "Generated with me/mine" in shown["result_details"]
    assert "Pulled me/mine, 15.8 MB fetched" in shown["logs"]
    assert hub.fetched(TRANSFORMER)


def test_a_film_asks_for_the_values_of_its_model_once_that_was_pulled(pulling: Headless) -> None:
    node = generating(pulling, "GenerateVideo", MODEL, if_missing="pull")
    pulling.do(pulling.set(node, seconds=1.0))
    assert pulling.do(pulling.run()).failed(), "the shipped model makes no films"
    shown = dict(node.parameter_output_values)
    assert "Pulled me/mine" in shown["logs"]
    assert "makes pictures" in shown["result_details"]


def test_a_missing_model_is_not_pulled_unasked(pulling: Headless, hub: Hub) -> None:
    node = demo_service(pulling, MODEL)
    assert pulling.do(pulling.run()).failed()
    said = node.parameter_output_values["result_details"]
    assert said.startswith("there is no model me/mine; choose another one")
    assert said.endswith("or set if_missing of Diffusion Model to `pull`.")
    assert not hub.fetched(TRANSFORMER)


def test_a_pull_that_fails_is_reported_in_a_sentence(pulling: Headless) -> None:
    node = demo_service(pulling, "nobody/nothing", if_missing="pull")
    assert pulling.do(pulling.run()).failed()
    said = node.parameter_output_values["result_details"]
    assert "nobody/nothing" in said
    assert "\n" not in said


def test_a_cancel_ends_the_pull(pulling: Headless, hub: Hub) -> None:
    hub.stall(TRANSFORMER, 1 << 20)
    node = demo_service(pulling, MODEL, if_missing="pull")

    async def cancel_in_the_middle() -> None:
        run = asyncio.create_task(pulling.run())
        while not node.parameter_output_values.get("progress"):
            assert not run.done(), run.result()
            await asyncio.sleep(0.01)
        assert node.parameter_output_values["status"].startswith("Pulling, ")
        assert "so far" in node.parameter_output_values["logs"]
        await pulling.cancel()
        await run

    pulling.do(cancel_in_the_middle())
