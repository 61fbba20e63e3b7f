"""A node starts a service on ComfyUI's machine where none answers and no address is set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import moored
import pytest
from conftest import PACK
from moored import _address, _local
from prompts import Graph
from standin.executor import StandIn

from service import BINARY, ReservedPort


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReservedPort]:
    """Where programs look for a service; `moored` is on the PATH, and the user's folders are empty."""
    port = ReservedPort()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/moored").symlink_to(BINARY)
    (tmp_path / "ComfyUI/models").mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MOORED_BINARY", raising=False)
    monkeypatch.setattr(_address, "DEFAULT_ENDPOINT", port.address)
    monkeypatch.setattr(folder_paths, "_user_directory", str(tmp_path / "user"))
    monkeypatch.setattr(folder_paths, "base_path", str(tmp_path / "ComfyUI"), raising=False)
    yield port
    for process in list(_local._started_here):
        _local._end(process)


@pytest.fixture
def comfyui(tmp_path: Path, port: ReservedPort) -> Iterator[StandIn]:
    standin = StandIn(PACK, tmp_path)
    yield standin
    standin.stop()


def choose(**settings: str) -> None:
    """ComfyUI's settings."""
    folder = Path(folder_paths.get_user_directory()) / "default"
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"moored.{name}": value for name, value in settings.items()}
    (folder / "comfy.settings.json").write_text(json.dumps(named), encoding="utf-8")


def status_prompt() -> dict[str, Any]:
    """A prompt that asks the usual service for what it has in memory."""
    graph = Graph("")
    graph.add("MooredGPUStatus", server=[graph.server, 0])
    return graph.prompt


def test_a_node_starts_the_service_that_it_needs(
    comfyui: StandIn, port: ReservedPort, tmp_path: Path
) -> None:
    run = comfyui.queue(status_prompt()).succeeded()
    assert "Starting the service on this machine" in run.texts()
    (service,) = _local._started_here
    assert "--end-with-stdin" in service.args
    assert ["--comfyui", str(tmp_path / "ComfyUI")] == service.args[-3:-1]
    again = comfyui.queue(status_prompt()).succeeded()
    assert "Starting the service on this machine" not in again.texts()
    assert _local._started_here == [service]


def test_a_service_is_kept_running_where_the_settings_say_so(
    comfyui: StandIn, port: ReservedPort
) -> None:
    choose(start_service="keep it running")
    comfyui.queue(status_prompt()).succeeded()
    (service,) = _local._started_here
    assert "--end-with-stdin" not in service.args


@pytest.mark.parametrize("by", ["setting", "address", "environment"])
def test_none_is_started_where_the_user_has_said_otherwise(
    comfyui: StandIn, port: ReservedPort, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    match by:
        case "setting":
            choose(start_service="never")
        case "address":
            choose(endpoint=port.address)
        case "environment":
            monkeypatch.setenv("MOORED_ENDPOINT", port.address)
    run = comfyui.queue(status_prompt()).done()
    assert run.status == "error"
    assert port.address in run.error
    assert not _local._started_here


def test_why_it_did_not_start_is_what_the_node_says(
    comfyui: StandIn, port: ReservedPort, tmp_path: Path
) -> None:
    program = tmp_path / "bin/moored"
    program.unlink()
    program.write_text("#!/bin/sh\necho no card of any kind\nexit 1\n")
    program.chmod(0o755)
    run = comfyui.queue(status_prompt()).done()
    assert run.status == "error"
    assert "The service ended as soon as it was started: no card of any kind" in run.error


def test_the_panel_offers_it_where_it_can(pack: ModuleType, port: ReservedPort) -> None:
    target = pack.connection.Target(port.address)
    assert pack.local_service.may_start(target)
    assert not pack.local_service.may_start(pack.connection.Target("box:50051"))
    choose(start_service="never")
    assert not pack.local_service.may_start(target)
    assert isinstance(moored.NotStarted("x"), moored.MooredError)
