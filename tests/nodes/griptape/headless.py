"""The real Griptape Nodes engine, headless: a flow, nodes in it, and what they show.

The engine reads its folders and settings when it is first imported: `clean_environment` comes before.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ROOT / "nodes/griptape"
LIBRARY_NAME = "moored"
MANIFEST = "griptape_nodes_library.json"
LIMIT_S = 60.0

START_LIMIT_S = 300.0
"""Seconds that an engine has to start: ten of a processor, and others may have the processors."""


def clean_environment(home: Path) -> None:
    """Folders of its own, no account, and the interpreter of the tests for the library's packages."""
    cache = os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache/uv"
    for name in list(os.environ):
        if name.startswith(("GT_CLOUD_", "GTN_", "XDG_", "MOORED_")) and name != "MOORED_BINARY":
            del os.environ[name]
    for name, folder in {
        "HOME": "home",
        "XDG_CONFIG_HOME": "config",
        "XDG_DATA_HOME": "data",
        "XDG_CACHE_HOME": "cache",
        "XDG_STATE_HOME": "state",
    }.items():
        os.environ[name] = str(home / folder)
        (home / folder / "griptape_nodes").mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "PATH": f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}",
        "GTN_MCP_SERVER_PORT": "0",
        "UV_CACHE_DIR": str(cache),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_SYSTEM_CERTS": "1",
    }
    # The usual 10 is for libraries with torch; this environment has a few MB. Old engines take no number
    # from a variable.
    settings = home / "config/griptape_nodes/griptape_nodes_config.json"
    settings.write_text(json.dumps({"minimum_disk_space_gb_libraries": 0.5}), encoding="utf-8")
    workspace = home / "workspace"
    workspace.mkdir(exist_ok=True)
    os.environ["GTN_CONFIG_WORKSPACE_DIRECTORY"] = str(workspace)


def library_copy(folder: Path) -> Path:
    """The library as a user installs it: the folder alone, the manifest as it is. Its manifest."""
    ignored = shutil.ignore_patterns(".venv*", "__pycache__")
    return shutil.copytree(LIBRARY, folder / "library", ignore=ignored) / MANIFEST


def client_from_here(folder: Path) -> None:
    """Has the library's `moored` be the one of this checkout, as no registry has it yet."""
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*wheel, "-w", str(folder), str(ROOT / "client-py")], check=True)
    (built,) = folder.glob("moored-*.whl")
    constraint = folder / "constraints.txt"
    constraint.write_text(f"moored @ {built.as_uri()}\n")
    os.environ["UV_CONSTRAINT"] = str(constraint)


class Headless:
    """One engine on an event loop of its own. What tests do with it is a coroutine, by `do`."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.flow = ""

    def do(self, work: Coroutine[Any, Any, R], limit_s: float = LIMIT_S) -> R:
        """Runs `work` on the engine's loop."""
        return self.loop.run_until_complete(asyncio.wait_for(work, limit_s))

    async def start(self, manifest: Path) -> None:
        """Starts the engine and registers the library, which must be loaded whole."""
        from griptape_nodes.retained_mode.events.app_events import AppInitializationComplete
        from griptape_nodes.retained_mode.events.library_events import (
            RegisterLibraryFromFileRequest,
            RegisterLibraryFromFileResultSuccess,
        )
        from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

        GriptapeNodes.EventManager().initialize_queue()
        await GriptapeNodes.abroadcast_app_event(
            AppInitializationComplete(skip_library_loading=True, workflows_to_register=[])
        )
        request = RegisterLibraryFromFileRequest(file_path=str(manifest))
        result = await GriptapeNodes.ahandle_request(request)
        assert isinstance(result, RegisterLibraryFromFileResultSuccess), result.result_details

    async def settings(self, **values: str) -> None:
        """Sets the library's settings, as the editor does."""
        from griptape_nodes.retained_mode.events.config_events import SetConfigValueRequest

        for name, value in values.items():
            await self.ask(SetConfigValueRequest(category_and_key=f"moored.{name}", value=value))

    async def ask(self, request: Any) -> Any:
        """What the engine answers, which must be a success."""
        from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

        result = await GriptapeNodes.ahandle_request(request)
        assert result.succeeded(), result.result_details
        return result

    async def clear(self) -> None:
        """Forgets the workflow that is open."""
        from griptape_nodes.retained_mode.events.object_events import ClearAllObjectStateRequest

        await self.ask(ClearAllObjectStateRequest(i_know_what_im_doing=True))

    async def fresh_flow(self) -> None:
        """An empty workflow."""
        from griptape_nodes.retained_mode.events.flow_events import CreateFlowRequest
        from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

        await self.clear()
        GriptapeNodes.ContextManager().push_workflow(workflow_name="test")
        made = await self.ask(CreateFlowRequest(parent_flow_name=None, set_as_new_context=True))
        self.flow = made.flow_name

    async def node(self, kind: str, *, at: tuple[int, int] = (0, 0), **values: Any) -> Any:
        """A node of the library, with values set as the editor sets them."""
        from griptape_nodes.retained_mode.events.node_events import CreateNodeRequest
        from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

        request = CreateNodeRequest(
            node_type=f"Moored{kind}",
            specific_library_name=LIBRARY_NAME,
            metadata={"position": {"x": at[0], "y": at[1]}},
            create_error_proxy_on_failure=False,
        )
        name = (await self.ask(request)).node_name
        node = GriptapeNodes.ObjectManager().attempt_get_object_by_name(name)
        await self.set(node, **values)
        return node

    async def set(self, node: Any, **values: Any) -> None:
        """Sets values of a node."""
        from griptape_nodes.retained_mode.events.parameter_events import SetParameterValueRequest

        for name, value in values.items():
            await self.ask(
                SetParameterValueRequest(node_name=node.name, parameter_name=name, value=value)
            )

    async def connect(self, source: Any, output: str, target: Any, into: str) -> None:
        """Draws a line from an output to an input."""
        from griptape_nodes.retained_mode.events.connection_events import CreateConnectionRequest

        await self.ask(
            CreateConnectionRequest(
                source_node_name=source.name,
                source_parameter_name=output,
                target_node_name=target.name,
                target_parameter_name=into,
            )
        )

    async def run(self) -> Any:
        """Runs the workflow as the editor does, to its end; what the engine answers."""
        from griptape_nodes.retained_mode.events.execution_events import StartFlowRequest
        from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

        return await GriptapeNodes.ahandle_request(StartFlowRequest(flow_name=self.flow))

    async def load(self, workflow: Path) -> dict[str, Any]:
        """Loads a saved workflow, which must be whole; its nodes by name."""
        from griptape_nodes.exe_types.flow import ControlFlow
        from griptape_nodes.exe_types.node_types import ErrorProxyNode
        from griptape_nodes.retained_mode.events.workflow_events import (
            RunWorkflowFromScratchRequest,
        )
        from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes

        await self.ask(RunWorkflowFromScratchRequest(file_path=str(workflow)))
        (self.flow,) = GriptapeNodes.ObjectManager().get_filtered_subset(type=ControlFlow)
        nodes = dict(GriptapeNodes.FlowManager().get_flow_by_name(self.flow).nodes)
        placeholders = [node for node in nodes.values() if isinstance(node, ErrorProxyNode)]
        assert nodes, "it is empty"
        assert not placeholders, placeholders
        return nodes

    async def cancel(self) -> None:
        """Cancels what runs, as the editor does."""
        from griptape_nodes.retained_mode.events.execution_events import CancelFlowRequest

        await self.ask(CancelFlowRequest(flow_name=self.flow))


@contextmanager
def restarted(before: Headless, manifest: Path) -> Iterator[Headless]:
    """Another engine in place of one, as after a restart; the first is back in its place after it."""
    from griptape_nodes.node_library.library_registry import LibraryRegistry
    from griptape_nodes.retained_mode import engine as engines

    root, libraries = engines.current_engine(), dict(LibraryRegistry._libraries)
    engines.reset_root_engine()
    LibraryRegistry._clear()
    engine = Headless()
    try:
        assert engines.current_engine() is not root
        engine.do(engine.start(manifest), START_LIMIT_S)
        yield engine
    finally:
        engine.loop.close()
        engines._root_engine = root
        LibraryRegistry._libraries.update(libraries)
