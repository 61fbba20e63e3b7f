"""What a node shows while the service works: a bar, one line of status, a log, and timings at the end."""

from __future__ import annotations

from typing import Any

import moored
from griptape_nodes.exe_types.core_types import Parameter, ParameterMode
from griptape_nodes.exe_types.node_types import BaseNode
from griptape_nodes.exe_types.param_components.log_parameter import LogParameter
from griptape_nodes.exe_types.param_components.progress_bar_component import ProgressBarComponent

from moored_griptape.model_handle import lora_words
from moored_griptape.sizes import in_words


class ProgressLog:
    """The parameters `progress`, `status`, `logs` and `timings` of a node, and what fills them."""

    def __init__(self, node: BaseNode) -> None:
        self._node = node
        self._bar = ProgressBarComponent(node)
        self._log = LogParameter(node)
        self._shown = (0, 0)
        self._phase: object = None

    def add_parameters(self) -> None:
        """Adds them to the node, below what it has."""
        self._bar.add_property_parameters()
        self._node.add_parameter(
            Parameter(
                name="status",
                tooltip="What happens now: place in the queue, what is waited for, loads, steps.",
                output_type="str",
                allowed_modes={ParameterMode.OUTPUT},
                settable=False,
            )
        )
        self._log.add_output_parameters()
        self._node.add_parameter(
            Parameter(
                name="timings",
                tooltip="Seconds of each stage: computing, moving weights, waiting for memory.",
                output_type="dict",
                allowed_modes={ParameterMode.OUTPUT},
                settable=False,
                ui_options={"hide_property": True},
            )
        )

    def begin(self) -> None:
        """Empties them for a new run."""
        self._shown, self._phase = (0, 0), None
        self._bar.reset()
        self._log.clear_logs()
        self._publish("timings", {})
        self.status("Asking the service")

    def status(self, text: str) -> None:
        """Says what happens now."""
        self._publish("status", text)

    def line(self, text: str) -> None:
        """Adds a line to the log."""
        self._log.append_to_logs(f"{text}\n")

    def bar(self, done: int, total: int) -> None:
        """How far the present phase is: steps, or bytes."""
        before, of = self._shown
        if total != of or done < before:
            self._bar.initialize(total)
            before = 0
        self._bar.increment(min(done, total) - before)
        self._shown = (min(done, total), total)

    def event(self, event: moored.Event) -> None:
        """Shows an event of a job: the latest drives the status, each tick of a wait is logged."""
        if isinstance(event, (moored.Preview, moored.Artifact, moored.LatentKept)):
            return
        text = moored.describe(event)
        self.status(text)
        phase = _phase(event)
        if phase is not None and (phase != self._phase or isinstance(event, moored.Waiting)):
            if isinstance(event, moored.Loading):  # the status shows the progress
                text = f"Loading {event.component.name}, {in_words(event.bytes_total)}"
            self.line(f"{event.at_ms / 1000:8.1f} s  {text}")
            self._phase = phase
        match event:
            case moored.Step():
                before = max(event.part - 1, 0) * event.of
                self.bar(before + event.n, max(event.parts, 1) * event.of)
            case moored.Loading():
                self.bar(event.bytes_done, event.bytes_total)
            case moored.Waiting() | moored.Queued():
                self.bar(0, 1)

    def pulling(self, progress: moored.PullProgress) -> None:
        """Shows how far a pull is."""
        if not progress.bytes_total:
            return  # the hub has not answered yet
        sizes = f"{in_words(progress.bytes_done)} of {in_words(progress.bytes_total)}"
        files = f"{progress.files_done} of {progress.files_total} files"
        self.status(f"Pulling, {sizes}, {files}")
        if self._phase != ("pull", progress.file):
            self.line(f"Pulling{f' {progress.file}' if progress.file else ''}, {sizes} so far")
        self._phase = ("pull", progress.file)
        self.bar(progress.bytes_done, progress.bytes_total)

    def done(self, result: moored.JobResult) -> None:
        """Shows the times of a job."""
        timings: dict[str, Any] = {
            name: {
                "run_s": stage.run_ms / 1000,
                "move_s": stage.move_ms / 1000,
                "wait_s": stage.wait_ms / 1000,
            }
            for name, stage in result.timings.items()
        }
        self.timings({**timings, "total_s": result.total_ms / 1000})
        for adapter in result.model.adapters:
            self.line(f"LoRA {lora_words(adapter)}")
        for left_out in result.left_out:
            self.line(f"Left out: {left_out.message}")
        for one in result.approximations:
            self.line(f"An approximation: {one}")

    def timings(self, timings: dict[str, Any]) -> None:
        """Publishes the times of a run."""
        self._publish("timings", timings)

    def _publish(self, name: str, value: object) -> None:
        self._node.publish_update_to_parameter(name, value)


def _phase(event: moored.Event) -> object:
    """What shares a line of the log with it; None: the status is enough."""
    match event:
        case moored.Loading():
            return ("load", event.component.id)
        case moored.Evicting():
            return ("evict", event.component.id)
        case moored.Step():
            return ("steps", event.item, event.part) if event.n == event.of else None
        case moored.Queued():
            return ("queue", event.position)
        case moored.StageStarted():
            return (event.name, event.item, event.cached, event.part)
        case _:
            return type(event)
