"""What the nodes share that generate: prompt, steps, guidance, seed, and a file of the project."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import moored
from griptape_nodes.exe_types.core_types import Parameter, ParameterGroup
from griptape_nodes.exe_types.param_components.project_file_parameter import ProjectFileParameter
from griptape_nodes.exe_types.param_components.seed_parameter import SeedParameter
from griptape_nodes.exe_types.param_types.parameter_bool import ParameterBool
from griptape_nodes.exe_types.param_types.parameter_int import ParameterInt
from griptape_nodes.exe_types.param_types.parameter_string import ParameterString
from griptape_nodes.traits.options import Options

from moored_griptape.given_pictures import is_name_of_a_file
from moored_griptape.numbers import number_or_none
from moored_griptape.run_node import RunNode

R = TypeVar("R", bound=moored.JobResult)

UNFOLDED = ("steps", "guidance")
"""Options that stand on the node; others are in a group that is folded."""


class GeneratingNode(RunNode):
    """A node that has the service make something from a prompt, and keeps it as a file."""

    kind_of_options: ClassVar[type]
    """Of the client's calls: of pictures, films or tracks."""
    prompt_tooltip: ClassVar[str]
    prompt_example: ClassVar[str]
    without_prompt: ClassVar[str]
    """What is said where there is none."""
    default_file: ClassVar[str]
    detaches: ClassVar[bool] = False
    """Whether a job goes on where the engine ends before it, unless the node says otherwise."""

    def _add_inputs(self) -> None:
        self.add_parameter(
            ParameterString(
                name="prompt",
                tooltip=self.prompt_tooltip,
                default_value="",
                multiline=True,
                placeholder_text=self.prompt_example,
            )
        )
        self._add_inputs_of_its_own()
        fields = moored.sampling_fields(self.kind_of_options)
        for field in fields:
            if field.option in UNFOLDED:
                self.add_parameter(option_parameter(field))
        self._seed = SeedParameter(self)
        self._seed.add_input_parameters()
        with ParameterGroup(name="Advanced", ui_options={"collapsed": True}) as group:
            for field in fields:
                if field.option not in UNFOLDED:
                    option_parameter(field)
            ParameterBool(
                name="detach",
                tooltip="If the engine ends or restarts, the service finishes the job: run the same again "
                "for its result. Cancelling the run ends it all the same.",
                default_value=self.detaches,
            )
        self.add_node_element(group)
        self._add_inputs_before_the_file()
        self._file = ProjectFileParameter(self, "output_file", default_filename=self.default_file)
        self._file.add_parameter()

    def _add_inputs_of_its_own(self) -> None:
        """Adds what is between the prompt and the steps."""

    def _add_inputs_before_the_file(self) -> None:
        """Adds what is between the seed and the file."""

    def after_value_set(self, parameter: Parameter, value: Any) -> None:
        """A random seed is none to type in."""
        self._seed.after_value_set(parameter, value)
        super().after_value_set(parameter, value)

    def _prompt(self) -> str:
        prompt = str(self.get_parameter_value("prompt") or "").strip()
        if not prompt:
            raise ValueError(self.without_prompt)
        return prompt

    def _options(self) -> dict[str, Any]:
        """The options that a job of any of these nodes has; draws the seed."""
        self._check_file()
        self._seed.preprocess()
        return {
            "model": self._handle.ref,
            **self._sampling(),
            "seed": _unsigned(self._seed.get_seed(), "seed", bits=64),
            "detach": bool(self.get_parameter_value("detach")),
            **self._constraints.job_options,
        }

    def _check_file(self) -> None:
        """Refuses a name that no file can have, before anything is computed that it would be for."""
        name = str(self.get_parameter_value("output_file") or "")
        if not is_name_of_a_file(name):
            raise ValueError(f"output_file: no file can have the name {name!r}")

    def _sampling(self) -> dict[str, Any]:
        """What the parameters of options ask for; what is left open is the model's."""
        values: dict[str, Any] = {}
        for field in moored.sampling_fields(self.kind_of_options):
            value = self.get_parameter_value(field.option)
            match field.kind:
                case "whole":
                    values[field.option] = _unsigned(int(value or 0), field.option, bits=32)
                case "number":
                    values[field.option] = _at_least(field, number_or_none(value, field.option))
                case "text" | "choice":
                    values[field.option] = str(value or "")
                case "truth":
                    values[field.option] = bool(value)
        return moored.asked_options(self.kind_of_options, values)

    async def _made(
        self,
        client: moored.AsyncClient,
        plan: Callable[..., Awaitable[moored.Plan]],
        options: dict[str, Any],
        begin: Callable[[dict[str, Any]], moored.AsyncEventStream[R]],
    ) -> R:
        """Follows the job that `begin` begins with all options, once its plan keeps to the constraints."""
        handle, constraints, prompt = self._handle, self._constraints, self._prompt()

        async def make() -> R:
            whole = options | await self._options_by_model(client)
            await constraints.check(client, plan, handle, prompt, whole, self._shown.line)
            return await self._follow(begin(whole))

        result = await self._with_model(client, handle, make)
        self._shown.done(result)
        return result

    async def _options_by_model(self, client: moored.AsyncClient) -> dict[str, Any]:
        """The options that depend on the model's own values. Asked again once a missing model was pulled."""
        return {}

    def _whole(self, name: str) -> int | None:
        """A number that 0 leaves to the model."""
        return _unsigned(int(self.get_parameter_value(name) or 0), name, bits=32) or None


def option_parameter(field: moored.OptionField) -> Parameter:
    """An option of the client as a parameter; its default leaves it open."""
    match field.kind:
        case "text":
            return ParameterString(
                name=field.option,
                tooltip=f"{field.tooltip} Empty: the model's own.",
                default_value="",
                multiline=True,
            )
        case "truth":
            return ParameterBool(name=field.option, tooltip=field.tooltip, default_value=False)
        case "whole":
            return ParameterInt(
                name=field.option,
                tooltip=f"{field.tooltip} {field.left_open}: the model's default.",
                default_value=int(field.left_open),
            )
        case "number":
            # No ParameterFloat: that makes 0 of a field that was emptied, which is another picture.
            return Parameter(
                name=field.option,
                tooltip=f"{field.tooltip} Empty: the model's own.",
                type="float",
                input_types=["any"],
                output_type="float",
                default_value=None,
            )
        case "choice":
            return Parameter(
                name=field.option,
                tooltip=f"{field.tooltip} {field.left_open}: the model's own.",
                type="str",
                default_value=field.left_open,
                traits={Options(choices=[str(field.left_open), *field.names])},
            )


def _at_least(field: moored.OptionField, value: float | None) -> float | None:
    """A number from the smallest on: what is below it would stand for the model's own, as in other forms."""
    if value is not None and value < field.least:
        raise ValueError(
            f"{field.option} is {field.least} or more, not {value:g}: empty is the model's own"
        )
    return value


def _unsigned(value: int, name: str, bits: int) -> int:
    """Checks that a value fits the protocol's field; the service reports its own limits."""
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{name} is 0 or more, and less than 2^{bits}, not {value}")
    return value
