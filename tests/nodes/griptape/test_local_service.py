"""A node starts a service on the engine's machine where none answers and no address is set."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headless import Headless

from service import BINARY, ReservedPort


@pytest.fixture
def port(
    nowhere: Headless, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReservedPort]:
    """Where programs look for a service, with `moored` on the PATH and no address in the settings."""
    # The client that the engine has installed for the library.
    local, address = (sys.modules[f"moored.{name}"] for name in ("_local", "_address"))
    port = ReservedPort()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/moored").symlink_to(BINARY)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MOORED_BINARY", raising=False)
    monkeypatch.setattr(address, "DEFAULT_ENDPOINT", port.address)
    nowhere.do(nowhere.settings(endpoint=""))
    yield port
    nowhere.do(nowhere.settings(start_service="while the engine runs"))
    for process in list(local._started_here):
        local._end(process)


def started() -> list[Any]:
    """The processes of services that the library started."""
    return list(sys.modules["moored._local"]._started_here)


def test_a_node_starts_the_service_that_it_needs(nowhere: Headless, port: ReservedPort) -> None:
    node = nowhere.do(nowhere.node("GPUStatus"))
    result = nowhere.do(nowhere.run())
    assert result.succeeded(), node.parameter_output_values.get("result_details")
    (service,) = started()
    assert service.args[1:4] == ["serve", "--listen", port.address]
    assert "--end-with-stdin" in service.args
    assert nowhere.do(nowhere.run()).succeeded()
    assert started() == [service]


@pytest.mark.parametrize("by", ["setting", "address", "environment"])
def test_none_is_started_where_the_user_has_said_otherwise(
    nowhere: Headless, port: ReservedPort, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    match by:
        case "setting":
            nowhere.do(nowhere.settings(start_service="never"))
        case "address":
            nowhere.do(nowhere.settings(endpoint=port.address))
        case "environment":
            monkeypatch.setenv("MOORED_ENDPOINT", port.address)
    node = nowhere.do(nowhere.node("GPUStatus"))
    assert nowhere.do(nowhere.run()).failed()
    assert port.address in node.parameter_output_values["result_details"]
    assert not started()


def test_the_setting_and_the_manifest_name_the_same_values(nowhere: Headless) -> None:
    import json

    from headless import LIBRARY, MANIFEST

    manifest = json.loads((LIBRARY / MANIFEST).read_text(encoding="utf-8"))
    schema = manifest["settings"][0]["schema"]["start_service"]
    text = (LIBRARY / "moored_griptape/connection.py").read_text(encoding="utf-8")
    assert all(f'"{value}"' in text for value in schema["enum"])
    assert schema["default"] == manifest["settings"][0]["contents"]["start_service"]
