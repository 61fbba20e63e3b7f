"""A model that is kept alive, and a handle that outlives the engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored
from headless import Headless, restarted
from waiting import wait_until

Simulate = Callable[..., moored.Client]


def held(client: moored.Client) -> bool:
    residents = client.status().cards[0].residents
    return bool(residents) and all(one.held for one in residents)


def handle(engine: Headless, **values: Any) -> dict[str, Any]:
    """The handle that a Diffusion Model node with these values gives."""
    node = engine.do(engine.node("DiffusionModel", **values))
    assert engine.do(engine.run()).succeeded()
    given = dict(node.parameter_output_values["model_handle"])
    engine.do(engine.fresh_flow())
    return given


def generate(engine: Headless, model: object) -> dict[str, Any]:
    """Generates with a model; what the node shows."""
    node = engine.do(engine.node("GenerateImage", prompt="x", model=model))
    result = engine.do(engine.run())
    assert result.succeeded(), result.result_details
    shown = dict(node.parameter_output_values)
    engine.do(engine.fresh_flow())
    return shown


def test_a_model_stays_in_for_as_long_as_it_is_kept_alive(
    simulate: Simulate, nowhere: Headless
) -> None:
    client = simulate()
    generate(nowhere, handle(nowhere, model="small", keep_alive_s=600))
    assert held(client)
    assert client.unload("small").kept, "it cannot be unloaded by others"
    kept = handle(nowhere, model="small", keep_alive_s=2)
    generate(nowhere, kept)
    until = time.monotonic() + 2
    generate(nowhere, kept)
    wait_until(lambda: not held(client), "it is given up by itself", 30)
    assert time.monotonic() > until, "the second run began the time anew"
    assert client.unload("small").freed


def test_keep_alive_of_0_ends_an_earlier_hold(simulate: Simulate, nowhere: Headless) -> None:
    client = simulate()
    generate(nowhere, handle(nowhere, model="small", keep_alive_s=600))
    assert held(client)
    generate(nowhere, handle(nowhere, model="small"))
    assert not held(client)


def test_unload_gives_own_holds_up_first(simulate: Simulate, nowhere: Headless) -> None:
    client = simulate()
    for all_models in (True, False):
        generate(nowhere, handle(nowhere, model="small", keep_alive_s=600))
        assert held(client)
        values = {} if all_models else {"model": "small"}
        node = nowhere.do(nowhere.node("UnloadModels", all_models=all_models, **values))
        assert nowhere.do(nowhere.run()).succeeded()
        assert node.parameter_output_values["freed_gb"] > 0
        assert not client.status().cards[0].residents
        nowhere.do(nowhere.fresh_flow())


def test_a_handle_is_json_and_outlives_the_engine(
    simulate: Simulate, nowhere: Headless, manifest: Path
) -> None:
    client = simulate()
    kept = handle(nowhere, model="small", keep_alive_s=600, quantization_mode="None")
    generate(nowhere, kept)
    text = json.dumps(kept)
    assert len(text) < 200

    with restarted(nowhere, manifest) as engine:
        engine.do(engine.fresh_flow())
        shown = generate(engine, text)
    assert "Generated with small" in shown["result_details"]
    assert "Loading" not in shown["logs"], "it had stayed in"
    assert held(client)
