"""What all nodes share that ask the service for something: the run, its errors, holds, and pulls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import moored
from griptape_nodes.exe_types.core_types import Parameter, ParameterMode
from griptape_nodes.exe_types.node_types import SuccessFailureNode
from griptape_nodes.files.file import FileLoadError, FileWriteError

from moored_griptape.connection import service_client
from moored_griptape.model_handle import HANDLE_TYPE, PULL, QUANTIZATION_MODES, ModelHandle
from moored_griptape.progress_log import ProgressLog
from moored_griptape.sizes import in_words
from moored_griptape.system_constraints import OverBudget, SystemConstraints

R = TypeVar("R")

# All of these have one sentence for a person; anything else is a fault of ours, and shows as one.
_TOLD = (moored.MooredError, OverBudget, ValueError, FileLoadError, FileWriteError)
_HOLD_TIMEOUT_S = 5.0
# How long a hold lasts if its release fails.
_GIVEN_UP_S = 1.0


class RunNode(SuccessFailureNode):
    """A node that asks the service for something, over a channel that lives as long as the run.

    Cancelling the run cancels the job. A failure is one sentence in `result_details`; it follows
    the node's Failed output where that is connected, and ends the workflow where it is not.
    """

    takes_model: ClassVar[bool] = True
    takes_constraints: ClassVar[bool] = True

    def __init__(self, name: str, metadata: dict[Any, Any] | None = None, **rest: Any) -> None:
        super().__init__(name, metadata, **rest)
        if self.takes_model:
            self.add_parameter(_model_input())
        if self.takes_constraints:
            self.add_parameter(_constraints_input())
        self._add_inputs()
        self._add_outputs()
        self._shown = ProgressLog(self)
        self._shown.add_parameters()
        self._create_status_parameters(
            result_details_tooltip="What came of it, or what went wrong and what to do.",
            result_details_placeholder="Tells what came of it.",
        )

    def _add_inputs(self) -> None:
        """Adds the other settings of the node."""

    def _add_outputs(self) -> None:
        """Adds the outputs of the node."""

    async def _run(self, client: moored.AsyncClient) -> str:
        """Does the work, and returns the outcome in a sentence."""
        raise NotImplementedError

    async def aprocess(self) -> None:
        """Runs the node on the engine's event loop, which it never blocks."""
        self._clear_execution_status()
        self._shown.begin()
        began = time.monotonic()
        try:
            async with service_client(self._shown.status) as client:
                summary = await self._run(client)
        except asyncio.CancelledError:
            self._end(False, "Cancelled", "Cancelled. The service has ended the job.")
            raise
        except _TOLD as error:
            sentence = in_a_sentence(error)
            self._end(False, "Failed", sentence)
            self._handle_failure_exception(RuntimeError(sentence))
        else:
            if not self.parameter_output_values.get("timings"):
                self._shown.timings({"total_s": time.monotonic() - began})
            self._shown.bar(1, 1)
            self._end(True, "Done", summary)

    def _end(self, was_successful: bool, status: str, details: str) -> None:
        self._shown.status(f"{status}: {details}" if status == "Failed" else status)
        self._shown.line(details)
        self._set_status_results(was_successful=was_successful, result_details=details)

    @property
    def _handle(self) -> ModelHandle:
        return ModelHandle.parse(self.get_parameter_value("model"))

    @property
    def _constraints(self) -> SystemConstraints:
        return SystemConstraints.parse(self.get_parameter_value("system_constraints"))

    async def _with_model(
        self, client: moored.AsyncClient, handle: ModelHandle, work: Callable[[], Awaitable[R]]
    ) -> R:
        """Does `work` with the model held as the handle says, pulled first where that is asked for."""
        try:
            result = await self._held(client, handle, work)
        except moored.ModelNotFound:
            if handle.if_missing != PULL or not handle.model:
                raise
            await self._pull(client, handle.model)
            result = await self._held(client, handle, work)
        return result

    async def _held(
        self, client: moored.AsyncClient, handle: ModelHandle, work: Callable[[], Awaitable[R]]
    ) -> R:
        if handle.keep_alive_s:
            # In the queue, too, it is not to leave.
            await client.hold(handle.named, ttl_s=handle.keep_alive_s, timeout=_HOLD_TIMEOUT_S)
        result = await work()
        await self._keep_alive(client, handle)
        return result

    async def _keep_alive(self, client: moored.AsyncClient, handle: ModelHandle) -> None:
        """From now on, for as long as the handle says; 0 gives an earlier hold up."""
        model, ttl_s = handle.named, handle.keep_alive_s
        try:
            if ttl_s:
                hold = await client.hold(model, ttl_s=ttl_s, timeout=_HOLD_TIMEOUT_S)
                self._shown.line(f"The model stays in memory for {hold.ttl_s:g} s")
            else:
                await self._give_up(client, model, timeout_s=_HOLD_TIMEOUT_S)
        except moored.MooredError as error:
            # The work is done, and stands.
            self._shown.line(f"The model could not be kept in memory: {error}")

    async def _give_up(
        self, client: moored.AsyncClient, model: moored.ModelLike, timeout_s: float | None = None
    ) -> None:
        """Releases our hold. A hold is known by its client and model: asking again returns its id."""
        hold = await client.hold(model, ttl_s=_GIVEN_UP_S, timeout=timeout_s)
        await hold.release()

    async def _pull(self, client: moored.AsyncClient, model: str) -> None:
        self._shown.status(f"Pulling {model}")
        async with client.stream_pull(model) as stream:
            async for progress in stream:
                self._shown.pulling(progress)
        pulled = await stream.result()
        self._shown.line(f"Pulled {pulled.id}, {in_words(pulled.bytes_fetched)} fetched")

    async def _follow(self, stream: moored.AsyncEventStream[R]) -> R:
        """The result of a job, whose events are shown as they come."""
        try:
            async with stream:
                async for event in stream:
                    self._shown.event(event)
                    if isinstance(event, moored.Preview):
                        await self._show_preview(event)
            return await stream.result()
        except asyncio.CancelledError:
            # It may be detached. What is not ended here ends with its stream, or is in the list of jobs.
            with contextlib.suppress(moored.MooredError):
                await stream.cancel(release_latents=True)
            raise

    async def _show_preview(self, preview: moored.Preview) -> None:
        """Shows what the picture looks like so far."""


def _model_input() -> Parameter:
    return Parameter(
        name="model",
        tooltip="From Diffusion Model. Not connected: the service's default model.",
        type=HANDLE_TYPE,
        input_types=[HANDLE_TYPE, "dict", "json", "str"],
        output_type=HANDLE_TYPE,
        default_value=None,
        allowed_modes={ParameterMode.INPUT, ParameterMode.OUTPUT},
    )


def _constraints_input() -> Parameter:
    return Parameter(
        name="system_constraints",
        tooltip="From GPU Configuration. Not connected: no limits but the service's own.",
        type="dict",
        input_types=["dict", "json"],
        default_value=None,
        allowed_modes={ParameterMode.INPUT},
    )


_INPUTS = {
    "model": "the model",
    "model.id": "the model",
    "model.quantization.preset": "quantization_mode",
    "model.quantization.components": "quantization_mode",
    "model.adapters": "the LoRAs",
    "model.adapters[].id": "LoRA {number}",
    "model.adapters[].strength": "the strength of LoRA {number}",
    "init_image": "input_image",
    "init_media": "input_audio",
    "references": "the reference images",
    "references[]": "reference image {number}",
    "controls": "the ControlNets",
    "controls[].id": "ControlNet {number}",
    "controls[].image": "control_image",
    "controls[].mode": "the mode of ControlNet {number}",
    "frames_per_second": "fps",
}
"""Inputs of the nodes, by the fields of a request that go by another name."""


def in_a_sentence(error: Exception) -> str:
    """What went wrong and what to do, for a person in front of the editor."""
    text = " ".join(_said(error).split()).rstrip(".")
    more: list[str] = []
    match error:
        case moored.ConnectionFailed(job_id="", cause="unreachable"):
            return (
                f"No moored service answers at {error.endpoint}: start it there with `moored "
                "serve`, or set its address in the settings, under moored, as endpoint."
            )
        case moored.ConnectionFailed(cause="lost"):
            more = ["see whether `moored serve` still runs there, and run again"]
        case moored.Unauthenticated():
            more = ["set the secret MOORED_TOKEN to the service's token"]
        case moored.Cancelled():
            return f"{text[:1].upper()}{text[1:]}; run it again."
        case moored.ModelNotFound():
            more = [f"choose another one, or set if_missing of Diffusion Model to `{PULL}`"]
        case moored.MemoryShortage():
            more = _shortage(error)
    return "; ".join([text, *more]) + "."


def _said(error: Exception) -> str:
    """The words of an error; of a missing model without the call of Python that lists models."""
    model = error.metadata.get("model") if isinstance(error, moored.ModelNotFound) else None
    if model:
        return f"there is no model {model}"
    return error.in_words(_INPUTS) if isinstance(error, moored.MooredError) else str(error)


def _shortage(error: moored.MemoryShortage) -> list[str]:
    """Who has the memory, and what would fit, in the words of the nodes."""
    has = [
        f"{one.name}{f' {one.pid}' if one.pid else ''} has {in_words(one.bytes)}"
        for one in sorted(error.holders, key=lambda one: -one.bytes)[:2]
    ]
    fits = [_in_node_words(one) for one in error.fallbacks[:3]]
    return [*has, *([f"what would fit: {', '.join(fits)}"] if fits else [])]


_MODE_OF_PRESET = {preset: mode for mode, (preset, _) in QUANTIZATION_MODES.items() if preset}
# The mode of these nodes for what a service calls a format, where all that is quantized has that one.
_MODE_OF_FORMAT = {"fp8": "fp8", "int8-convrot": "int8", "nf4": "int4"}


def _in_node_words(fallback: moored.Fallback) -> str:
    """8 bits are `quantization_mode int8` to these nodes; other words are the service's."""
    mode = _mode_of(fallback.quantization) if fallback.quantization is not None else None
    return fallback.label if mode is None else f"quantization_mode {mode}"


def _mode_of(quantization: moored.Quantization) -> str | None:
    """A preset alone, or one format of components beside which all is as stored."""
    formats = set(quantization.components.values())
    if not formats:
        return _MODE_OF_PRESET.get(quantization.preset)
    if len(formats) > 1 or quantization.preset not in ("", "full"):
        return None
    return _MODE_OF_FORMAT.get(formats.pop())
