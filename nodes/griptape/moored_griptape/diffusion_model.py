"""The node Diffusion Model: which model, in which format, for how long."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import moored
from griptape_nodes.exe_types.core_types import Parameter, ParameterMode
from griptape_nodes.exe_types.node_types import DataNode
from griptape_nodes.exe_types.param_types.parameter_float import ParameterFloat
from griptape_nodes.traits.options import Options

from moored_griptape.choices import ServiceChoices
from moored_griptape.model_handle import (
    AUTO,
    DEFAULT_MODEL,
    HANDLE_TYPE,
    PULL,
    QUANTIZATION_MODES,
    STOP,
    ModelHandle,
)


class MooredDiffusionModel(DataNode):
    """Makes the handle of a model. Loads nothing: the first run that uses it does, or Preload Model."""

    def __init__(self, name: str, metadata: dict[Any, Any] | None = None, **rest: Any) -> None:
        super().__init__(name, metadata, **rest)
        self._models = ServiceChoices(self, "model", DEFAULT_MODEL, _models)
        self.add_parameter(
            self._models.parameter(
                "`owner/name`, or a model folder of the service; default: the service's default "
                "model. The button asks the service for the models that it has."
            )
        )
        self.add_parameter(
            Parameter(
                name="quantization_mode",
                tooltip="Memory for the weights of the transformer and the large text encoder. auto: the "
                "first of None, int8 and int4 that fits the card; the log of a run says which and why. "
                "None: as stored; fp8; int8 (the service's 8-bit); int4 (its 4-bit, nf4).",
                type="str",
                default_value=AUTO,
                traits={Options(choices=list(QUANTIZATION_MODES))},
            )
        )
        self.add_parameter(
            Parameter(
                name="loras",
                tooltip="Names, or objects with `id` and `strength`. The service's API names LoRAs, but "
                "this version has not built them: a run with any is refused, and says so.",
                type="list",
                input_types=["list", "json", "str"],
                default_value=None,
            )
        )
        self.add_parameter(
            ParameterFloat(
                name="keep_alive_s",
                tooltip="Seconds to keep the model in memory after each run, at most 3600. Nobody else "
                "can use that memory meanwhile. 0: it stays until others need the memory.",
                default_value=0.0,
            )
        )
        self.add_parameter(
            Parameter(
                name="if_missing",
                tooltip="If the service does not have the model: stop with an error, or pull: download "
                "it from the hub first.",
                type="str",
                default_value=STOP,
                traits={Options(choices=[STOP, PULL])},
            )
        )
        self.add_parameter(
            Parameter(
                name="model_handle",
                tooltip="The handle: a small JSON object, for the nodes that take a model.",
                output_type=HANDLE_TYPE,
                allowed_modes={ParameterMode.OUTPUT},
            )
        )

    def process(self) -> None:
        """Puts the fields together; a value that makes no sense is said here, not in the run."""
        names = [field.name for field in fields(ModelHandle)]
        given = {name: self.get_parameter_value(name) for name in names}
        self.parameter_output_values["model_handle"] = ModelHandle.parse(given).as_json()


async def _models(client: moored.AsyncClient) -> list[str]:
    return [model.id for model in await client.list_models() if not model.problem]
