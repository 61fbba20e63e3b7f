"""The node GPU Configuration: memory limits that a user sets for runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import moored
from griptape_nodes.exe_types.core_types import Parameter, ParameterMode
from griptape_nodes.exe_types.node_types import DataNode
from griptape_nodes.exe_types.param_types.parameter_bool import ParameterBool
from griptape_nodes.exe_types.param_types.parameter_float import ParameterFloat

from moored_griptape.choices import ServiceChoices
from moored_griptape.system_constraints import ANY_DEVICE, SystemConstraints


class MooredGPUConfiguration(DataNode):
    """Makes the `system_constraints` that the nodes of this library take. Asks the service nothing."""

    def __init__(self, name: str, metadata: dict[Any, Any] | None = None, **rest: Any) -> None:
        super().__init__(name, metadata, **rest)
        self._devices = ServiceChoices(self, "gpu_device", ANY_DEVICE, _cards)
        self.add_parameter(
            self._devices.parameter(
                "The card to run on, by the service's name for it (`cuda:0`); any: the service picks "
                "the one that is done first. The button asks the service for its cards."
            )
        )
        self.add_parameter(
            ParameterFloat(
                name="gpu_memory_fraction",
                tooltip="How much of the card a run may need at its peak, weights and activations "
                "together. The service plans the run first; one that needs more is refused before "
                "it takes anything, with what would fit instead.",
                default_value=0.8,
            )
        )
        self.add_parameter(
            ParameterFloat(
                name="cpu_memory_gb",
                tooltip="How many GB of main memory a run may need at its peak, where the card is "
                "the CPU. On a GPU it has no effect, and the log of the run says so.",
                default_value=16.0,
            )
        )
        self.add_parameter(
            ParameterBool(
                name="allow_low_memory",
                tooltip="Run although memory is short, or the limits above are passed. If it then "
                "runs out of memory, only this run ends.",
                default_value=False,
            )
        )
        self.add_parameter(
            ParameterFloat(
                name="release_patience_s",
                tooltip="Seconds to wait for memory that other programs have, before giving up. "
                "Each tick shows in `logs`.",
                default_value=7.0,
            )
        )
        self.add_parameter(
            Parameter(
                name="system_constraints",
                tooltip="For the nodes that generate, and for Preload Model.",
                output_type="dict",
                allowed_modes={ParameterMode.OUTPUT},
            )
        )

    def process(self) -> None:
        """Puts the fields together; a value that makes no sense is said here, not in the run."""
        names = [field.name for field in fields(SystemConstraints)]
        given = {name: self.get_parameter_value(name) for name in names}
        constraints = SystemConstraints.parse(given)
        self.parameter_output_values["system_constraints"] = constraints.as_json()


async def _cards(client: moored.AsyncClient) -> list[str]:
    return [card.id for card in (await client.status()).cards]
