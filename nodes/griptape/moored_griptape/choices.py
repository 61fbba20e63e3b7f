"""Choices that the service lists: a button loads them, on the engine's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import moored
from griptape_nodes.exe_types.core_types import NodeMessageResult, Parameter
from griptape_nodes.exe_types.node_types import BaseNode
from griptape_nodes.traits.button import Button, ButtonDetailsMessagePayload
from griptape_nodes.traits.options import Options

from moored_griptape.connection import service_client
from moored_griptape.run_node import in_a_sentence

Lister = Callable[[moored.AsyncClient], Awaitable[Sequence[str]]]


class ServiceChoices:
    """A parameter whose choices a button asks the service for; what is typed in is as good."""

    def __init__(self, node: BaseNode, name: str, first: str, lister: Lister) -> None:
        self._node = node
        self._name = name
        self._first = first
        self._lister = lister
        self._asking: asyncio.Task[str] | None = None

    def parameter(self, tooltip: str) -> Parameter:
        """The parameter, with nothing asked yet."""
        return Parameter(
            name=self._name,
            tooltip=tooltip,
            type="str",
            default_value=self._first,
            traits={
                Options(choices=[self._first], allow_custom=True),
                Button(
                    icon="refresh-cw",
                    size="icon",
                    variant="secondary",
                    tooltip="Ask the service",
                    on_click=self._on_click,
                ),
            },
        )

    def _on_click(self, button: Button, details: ButtonDetailsMessagePayload) -> NodeMessageResult:
        """Asks, beside whatever the engine does: the answer changes the choices when it comes."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            words = asyncio.run(self.ask())
        else:
            self._asking = loop.create_task(self.ask())
            words = "Asking the service"
        return NodeMessageResult(success=True, details=words, response=details)

    async def ask(self) -> str:
        """Fills the choices; what came of it, in words, which the parameter's badge shows too."""
        try:
            async with service_client() as client:
                found = list(await self._lister(client))
        except (moored.MooredError, ValueError) as error:
            words = in_a_sentence(error)
            self._show(words, None)
        else:
            words = f"{len(found)} found"
            self._show("", [self._first, *(one for one in found if one != self._first)])
        return words

    def _show(self, problem: str, choices: list[str] | None) -> None:
        parameter = self._node.get_parameter_by_name(self._name)
        if parameter is None:
            return
        if choices is not None:
            parameter.update_ui_options_key("simple_dropdown", choices)
        if problem:
            parameter.set_badge(variant="error", title="The service was asked", message=problem)
        else:
            parameter.clear_badge()
        self._node.emit_parameter_changes()
