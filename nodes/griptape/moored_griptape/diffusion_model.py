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
from moored_griptape.connection import service_client
from moored_griptape.model_handle import (
    AUTO,
    DEFAULT_MODEL,
    HANDLE_TYPE,
    PULL,
    QUANTIZATION_MODES,
    STOP,
    ModelHandle,
    lora_json,
    lora_words,
    parse_loras,
)
from moored_griptape.run_node import in_a_sentence

NO_LORA = "none"


class MooredDiffusionModel(DataNode):
    """Makes the handle of a model. Loads nothing: the first run that uses it does, or Preload Model.

    With LoRAs it asks the service whether they fit the model, and shows what they change.
    """

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
        self._loras = ServiceChoices(self, "lora", NO_LORA, _lora_names)
        self.add_parameter(
            self._loras.parameter(
                "A LoRA of the service. The button asks the service for those that it has. For several, "
                "use loras."
            )
        )
        self.add_parameter(
            ParameterFloat(
                name="lora_strength",
                tooltip="How strongly the LoRA changes the model. 1: as trained. 0: not at all.",
                default_value=1.0,
            )
        )
        self.add_parameter(
            Parameter(
                name="loras",
                tooltip="More LoRAs, in order: names, NAME:STRENGTH, or objects with `id`, `strength`, "
                "`text_strength` and `ignore_unknown`.",
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

        self.add_parameter(
            Parameter(
                name="lora_report",
                tooltip="What each LoRA changes in the model, and what was ignored of it.",
                output_type="str",
                allowed_modes={ParameterMode.OUTPUT},
                settable=False,
            )
        )

    async def aprocess(self) -> None:
        """Puts the fields together; a value that makes no sense is said here, not in the run."""
        names = [field.name for field in fields(ModelHandle)]
        given = {name: self.get_parameter_value(name) for name in names}
        handle = ModelHandle.parse(given | {"loras": self._all_loras()})
        report = ""
        if handle.loras:
            try:
                report = await _report(handle)
            except (moored.MooredError, ValueError) as error:
                raise RuntimeError(in_a_sentence(error)) from None
        self.publish_update_to_parameter("lora_report", report)
        self.parameter_output_values["lora_report"] = report
        self.parameter_output_values["model_handle"] = handle.as_json()

    def _all_loras(self) -> list[Any]:
        """The LoRA of the list, and after it the others."""
        first = str(self.get_parameter_value("lora") or "").strip()
        more = [lora_json(one) for one in parse_loras(self.get_parameter_value("loras"))]
        if first in ("", NO_LORA):
            return more
        strength = self.get_parameter_value("lora_strength")
        return [{"id": first, "strength": 1.0 if strength is None else strength}, *more]


async def _report(handle: ModelHandle) -> str:
    """What the LoRAs change, a line for each; raises where they do not fit the model."""
    async with service_client() as client:
        try:
            plan = await client.plan_model(handle.ref)
        except moored.ModelNotFound:
            if handle.if_missing != PULL:
                raise
            return "Known when the model has been pulled"
        except (moored.MemoryShortage, moored.CardNotReady):
            # Whether memory is short is asked when it runs.
            return ""
    told = [lora_words(one) for one in plan.model.adapters]
    # The service leaves out those that change nothing.
    left_out = len(handle.loras) - len(told)
    return "\n".join([*told, *([f"{left_out} of strength 0 left out"] if left_out else [])])


async def _lora_names(client: moored.AsyncClient) -> list[str]:
    return [one.id for one in await client.list_adapters() if one.kind != "controlnet"]


async def _models(client: moored.AsyncClient) -> list[str]:
    return [model.id for model in await client.list_models() if not model.problem]
