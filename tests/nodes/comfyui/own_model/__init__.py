"""A pack of the tests: a model of ComfyUI's own, with memory of a simulated card, and a node that blocks.

ComfyUI loads and unloads the model as any other. What it takes is written to the file that lists the other
programs of a simulated card.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy_api.latest import ComfyExtension, io

POLL_S = 0.01

# ComfyUI itself keeps a model only while a node's output has it.
_models: list[Model] = []


class Model(comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    """A small model on the CPU, which is so large on the simulated card."""

    def __init__(self, card: Path, gib: float) -> None:
        cpu = torch.device("cpu")
        super().__init__(torch.nn.Linear(64, 64), cpu, cpu)
        self._card, self._line = card, f"python {os.getpid()} {int(gib * 1024)}MiB\n"

    def load(self, *arguments: Any, **options: Any) -> None:
        """ComfyUI loads it."""
        super().load(*arguments, **options)
        self._write(self._lines() | {self._line})

    def detach(self, unpatch_all: bool = True) -> Any:
        """ComfyUI unloads it."""
        self._write(self._lines() - {self._line})
        return super().detach(unpatch_all)

    def _lines(self) -> set[str]:
        there = self._card.read_text(encoding="utf-8") if self._card.exists() else ""
        return set(there.splitlines(keepends=True))

    def _write(self, lines: set[str]) -> None:
        # Nobody is to read half of it.
        written = self._card.with_suffix(".new")
        written.write_text("".join(lines), encoding="utf-8")
        written.replace(self._card)


class UseOwnModel(io.ComfyNode):  # type: ignore[misc]
    """Loads a model of ComfyUI's own, as a sampler does."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="TestUseOwnModel",
            inputs=[
                io.String.Input("card", tooltip="The file of the simulated card."),
                io.Float.Input("gib", tooltip="How much it takes there."),
                io.AnyType.Input("after", optional=True),
            ],
            outputs=[io.AnyType.Output("passed_on")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, card: str, gib: float, after: Any = None) -> io.NodeOutput:
        """Loads it."""
        model = Model(Path(card), gib)
        _models.append(model)
        comfy.model_management.load_models_gpu([model])
        return io.NodeOutput("used")


class WaitForFile(io.ComfyNode):  # type: ignore[misc]
    """Blocks the prompt until a file is there, as a sampler does until it is done."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            node_id="TestWaitForFile",
            inputs=[io.String.Input("file"), io.AnyType.Input("after", optional=True)],
            outputs=[io.AnyType.Output("passed_on")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, file: str, after: Any = None) -> io.NodeOutput:
        """Waits."""
        while not Path(file).exists():
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(POLL_S)
        return io.NodeOutput("there")


class OwnModel(ComfyExtension):  # type: ignore[misc]
    """What ComfyUI loads."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes."""
        return [UseOwnModel, WaitForFile]


async def comfy_entrypoint() -> OwnModel:
    """Called by ComfyUI."""
    return OwnModel()
