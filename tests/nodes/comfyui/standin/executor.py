"""Stand-in: runs prompts as ComfyUI does.

One at a time, in a thread of its own, each in a fresh event loop; nodes that need nothing of each other run
at once; what has not changed comes from the cache; what the next prompt does not name leaves it; the first
failure ends the prompt, and what still runs then is cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import inspect
import itertools
import json
import os
import queue
import sys
import threading
import wave
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import numpy as np
import torch
from comfy import model_management
from comfy_api import io
from comfy_api.video import VideoFromComponents
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image
from runs import Message, Run
from server import PromptServer

Prompt = dict[str, dict[str, Any]]


class StandIn:
    """A ComfyUI that is none, with the pack, and others beside it."""

    process_id = os.getpid()

    def __init__(self, pack: Path, folder: Path, *others: Path) -> None:
        self.folder = folder
        if not folder_paths.get_user_directory():
            folder_paths.set_user_directory(str(folder / "user"))
        self.server = PromptServer()
        self.server.send = self._send
        PromptServer.instance = self.server
        self._of_pack = asyncio.run(_loaded(pack))
        self.nodes = CORE | self._of_pack
        for other in others:
            self.nodes |= asyncio.run(_loaded(other))
        self.cache: dict[Any, tuple[Any, ...]] = {}
        self._runs: list[Run] = []
        self._running: Run | None = None
        self._numbers = itertools.count()
        self._queue: queue.Queue[tuple[Prompt, Run] | None] = queue.Queue()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    # What a frontend does.

    def queue(self, prompt: Prompt, client_id: str = "a") -> Run:
        """Queues a prompt, once it is valid."""
        self._validate(prompt)
        run = Run(f"prompt-{next(self._numbers)}", client_id)
        self._runs.append(run)
        self._queue.put((prompt, run))
        return run

    def interrupt(self) -> None:
        """The interrupt button."""
        model_management.interrupt_current_processing()

    def free(self) -> None:
        """`/free`: the cache is emptied."""
        self.cache.clear()
        gc.collect()

    def set(self, **settings: Any) -> None:
        """Changes settings of the pack, without the `moored.` before them."""
        file = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        named = {f"moored.{name}": value for name, value in settings.items()}
        file.write_text(json.dumps(named), encoding="utf-8")

    def upload(self, name: str, image: Image.Image) -> str:
        """Brings a picture that LoadImage can load."""
        image.save(self.folder / name)
        return name

    def object_info(self) -> dict[str, Any]:
        """The nodes of the pack, as ComfyUI shows them."""
        schemas = (node.define_schema() for node in self._of_pack.values())
        return {schema.node_id: schema.info() for schema in schemas}

    def stop(self) -> None:
        """Ends the thread."""
        self._queue.put(None)
        self._worker.join(60)
        PromptServer.instance = None

    # What the executor does.

    def _send(self, to: str | None, kind: str, node: str | None, what: Any) -> None:
        for run in self._runs:
            if to in (None, run.client_id):
                keep = run.add if run is self._running else run.strays.append
                keep(Message(kind, node, what))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            prompt, run = item
            model_management.interrupt_current_processing(False)
            self.server.client_id = run.client_id
            self._running = run
            status = "success"
            try:
                asyncio.run(_Execution(self, prompt, run).all())
            except model_management.InterruptProcessingException:
                status = "interrupted"
            except Exception as failure:
                status, run.error = "error", str(failure)
            self._running = None
            self.server.client_id = None
            gc.collect()
            run.end(status)

    def _validate(self, prompt: Prompt) -> None:
        for node in prompt.values():
            schema = self.nodes[node["class_type"]].define_schema()
            checked = getattr(self.nodes[node["class_type"]], "validate_inputs", None)
            skipped = inspect.signature(checked).parameters if checked else {}
            for one in schema.inputs:
                if one.id not in node["inputs"]:
                    assert one.optional, f"required input missing: {one.id}"
                    continue
                value = node["inputs"][one.id]
                if isinstance(value, list) or one.id in skipped:
                    continue
                low, high = one.options.get("min"), one.options.get("max")
                assert low is None or value >= low, f"{one.id} is below {low}"
                assert high is None or value <= high, f"{one.id} is above {high}"
                options = one.options.get("options")
                assert options is None or value in options, f"{one.id}: {value!r} not in {options}"


class _Execution:
    """One prompt, in its loop."""

    def __init__(self, comfyui: StandIn, prompt: Prompt, run: Run) -> None:
        self.comfyui = comfyui
        self.prompt = prompt
        self.run = run
        self.tasks: dict[str, asyncio.Task[tuple[Any, ...]]] = {}
        self.keys = {node: self._key(node) for node in prompt}

    async def all(self) -> None:
        """Runs what leads to outputs."""
        cache = self.comfyui.cache
        for key in [key for key in cache if key not in self.keys.values()]:
            del cache[key]
        gc.collect()
        wanted = [
            node
            for node, said in self.prompt.items()
            if self.comfyui.nodes[said["class_type"]].define_schema().is_output_node
        ]
        await asyncio.gather(*(self._output(node) for node in wanted))

    def _key(self, node: str) -> Any:
        said = self.prompt[node]
        kind = self.comfyui.nodes[said["class_type"]]
        marks = []
        for name, value in sorted(said["inputs"].items()):
            is_link = isinstance(value, list)
            marks.append((name, (self._key(value[0]), value[1]) if is_link else value))
        changed = getattr(kind, "fingerprint_inputs", None)
        # A number that is no number never equals itself: so the node is never found in the cache.
        return (node, said["class_type"], tuple(marks), changed() if changed else None)

    async def _output(self, node: str) -> tuple[Any, ...]:
        if node not in self.tasks:
            self.tasks[node] = asyncio.ensure_future(self._run(node))
        return await self.tasks[node]

    async def _run(self, node: str) -> tuple[Any, ...]:
        said = self.prompt[node]
        kind = self.comfyui.nodes[said["class_type"]]
        links = {k: v for k, v in said["inputs"].items() if isinstance(v, list)}
        outputs = await asyncio.gather(*(self._output(source) for source, _ in links.values()))
        inputs = dict(said["inputs"])
        for (name, (_, slot)), values in zip(links.items(), outputs, strict=True):
            inputs[name] = values[slot]
        key = self.keys[node]
        if key in self.comfyui.cache:
            return self.comfyui.cache[key]
        model_management.throw_exception_if_processing_interrupted()
        for value in inputs.values():
            if isinstance(value, ExecutionBlocker):
                # Told, but no failure of the prompt.
                self.run.error = f"Execution Blocked: {value.message}"
                return (ExecutionBlocker(None),) * len(kind.define_schema().outputs)
        hidden = io.HiddenHolder(unique_id=node)
        clone = type(kind.__name__, (kind,), {"hidden": hidden})
        given = clone.execute(**inputs)
        if inspect.isawaitable(given):
            given = await given
        if given.ui is not None:
            self.run.outputs[node] = given.ui
        self.comfyui.cache[key] = given.args
        return given.args


async def _loaded(pack: Path) -> dict[str, type[Any]]:
    """The nodes of a pack, which is imported as ComfyUI does: from its folder, whatever that is called."""
    extension = await imported(pack, str(pack).replace(".", "_x_")).comfy_entrypoint()
    await extension.on_load()
    return {node.define_schema().node_id: node for node in await extension.get_node_list()}


def imported(pack: Path, name: str) -> ModuleType:
    """A pack as a package of this name."""
    spec = importlib.util.spec_from_file_location(name, pack / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# The few of ComfyUI's own nodes that the tests use.


class LoadImage(io.ComfyNode):
    """A picture that was brought."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            "LoadImage",
            inputs=[io.String.Input("image")],
            outputs=[io.Image.Output(), io.Mask.Output()],
        )

    @classmethod
    def execute(cls, image: str) -> io.NodeOutput:
        """Loads it."""
        server = PromptServer.instance
        assert server is not None
        folder = server.send.__self__.folder  # type: ignore[attr-defined]
        brought = Image.open(folder / image)
        pixels = np.asarray(brought.convert("RGB"), dtype=np.float32)
        alpha = np.asarray(brought.convert("RGBA").getchannel("A"), dtype=np.float32)
        # What is transparent is masked.
        mask = 1 - alpha[np.newaxis] / np.float32(255)
        pixels = pixels[np.newaxis] / np.float32(255)
        return io.NodeOutput(torch.from_numpy(pixels), torch.from_numpy(mask))


class ImageBatch(io.ComfyNode):
    """Two batches as one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        inputs = [io.Image.Input("image1"), io.Image.Input("image2")]
        return io.Schema("ImageBatch", inputs=inputs, outputs=[io.Image.Output()])

    @classmethod
    def execute(cls, image1: torch.Tensor, image2: torch.Tensor) -> io.NodeOutput:
        """Joins them."""
        return io.NodeOutput(torch.cat([image1, image2]))


class PreviewImage(io.ComfyNode):
    """Shows pictures; cuts fractions off, as ComfyUI does when it saves one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema("PreviewImage", inputs=[io.Image.Input("images")], is_output_node=True)

    @classmethod
    def execute(cls, images: torch.Tensor) -> io.NodeOutput:
        """Shows them."""
        pixels = images.numpy()
        assert pixels.dtype == np.float32
        assert pixels.ndim == 4
        return io.NodeOutput(ui={"pictures": list((255.0 * pixels).clip(0, 255).astype(np.uint8))})


class PreviewAudio(io.ComfyNode):
    """Plays tracks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema("PreviewAudio", inputs=[io.Audio.Input("audio")], is_output_node=True)

    @classmethod
    def execute(cls, audio: dict[str, Any]) -> io.NodeOutput:
        """Plays them."""
        samples = audio["waveform"].numpy()
        assert samples.dtype == np.float32
        assert samples.ndim == 3, "[B, C, T]"
        return io.NodeOutput(ui={"audio": [(samples, audio["sample_rate"])]})


class GetVideoComponents(io.ComfyNode):
    """A film as its parts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        outputs = [io.Image.Output("images"), io.Audio.Output("audio"), io.Float.Output("fps")]
        return io.Schema("GetVideoComponents", inputs=[io.Video.Input("video")], outputs=outputs)

    @classmethod
    def execute(cls, video: VideoFromComponents) -> io.NodeOutput:
        """Takes it apart."""
        parts = video.get_components()
        return io.NodeOutput(parts.images, parts.audio, float(parts.frame_rate))


class PreviewAny(io.ComfyNode):
    """Shows anything as text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema("PreviewAny", inputs=[io.AnyType.Input("source")], is_output_node=True)

    @classmethod
    def execute(cls, source: Any) -> io.NodeOutput:
        """Shows it."""
        return io.NodeOutput(ui={"text": (str(source),)})


class SolidMask(io.ComfyNode):
    """A mask of one value."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        inputs = [io.Float.Input("value"), io.Int.Input("width"), io.Int.Input("height")]
        return io.Schema("SolidMask", inputs=inputs, outputs=[io.Mask.Output()])

    @classmethod
    def execute(cls, value: float, width: int, height: int) -> io.NodeOutput:
        """Makes it."""
        return io.NodeOutput(torch.from_numpy(np.full((1, height, width), value, np.float32)))


class MaskComposite(io.ComfyNode):
    """A mask added to a part of another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        inputs = [io.Mask.Input("destination"), io.Mask.Input("source")]
        inputs += [io.Int.Input("x"), io.Int.Input("y"), io.String.Input("operation")]
        return io.Schema("MaskComposite", inputs=inputs, outputs=[io.Mask.Output()])

    @classmethod
    def execute(
        cls, destination: torch.Tensor, source: torch.Tensor, x: int, y: int, operation: str
    ) -> io.NodeOutput:
        """Adds it."""
        assert operation == "add"
        mask = destination.numpy().copy()
        down, across = source.shape[-2:]
        part = mask[:, y : y + down, x : x + across]
        part += source.numpy()[:, : part.shape[1], : part.shape[2]]
        return io.NodeOutput(torch.from_numpy(mask.clip(0, 1)))


class LatentFlip(io.ComfyNode):
    """A latent upside down."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        inputs = [io.Latent.Input("samples"), io.String.Input("flip_method")]
        return io.Schema("LatentFlip", inputs=inputs, outputs=[io.Latent.Output()])

    @classmethod
    def execute(cls, samples: dict[str, Any], flip_method: str) -> io.NodeOutput:
        """Flips it."""
        assert flip_method.startswith("x-axis")
        flipped = np.ascontiguousarray(samples["samples"].numpy()[..., ::-1, :])
        return io.NodeOutput(samples | {"samples": torch.from_numpy(flipped)})


class Canny(io.ComfyNode):
    """Edges of a picture: where it changes from a pixel to the next."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        inputs = [io.Image.Input("image")]
        inputs += [io.Float.Input("low_threshold"), io.Float.Input("high_threshold")]
        return io.Schema("Canny", inputs=inputs, outputs=[io.Image.Output()])

    @classmethod
    def execute(
        cls, image: torch.Tensor, low_threshold: float, high_threshold: float
    ) -> io.NodeOutput:
        """Finds them."""
        grey = image.numpy().mean(axis=-1, keepdims=True)
        edges = np.abs(np.diff(grey, axis=2, prepend=grey[:, :, :1])) > low_threshold
        return io.NodeOutput(torch.from_numpy(np.repeat(edges, 3, axis=-1).astype(np.float32)))


class LoadAudio(io.ComfyNode):
    """A track that was brought, a WAV of 16 bits."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        return io.Schema(
            "LoadAudio", inputs=[io.String.Input("audio")], outputs=[io.Audio.Output()]
        )

    @classmethod
    def execute(cls, audio: str) -> io.NodeOutput:
        """Loads it."""
        server = PromptServer.instance
        assert server is not None
        folder = server.send.__self__.folder  # type: ignore[attr-defined]
        with wave.open(str(folder / audio)) as track:
            samples = np.frombuffer(track.readframes(track.getnframes()), "<i2")
            samples = samples.reshape(1, -1, track.getnchannels()).transpose(0, 2, 1)
            waveform = torch.from_numpy(samples.astype(np.float32) / np.float32(2**15))
            return io.NodeOutput({"waveform": waveform, "sample_rate": track.getframerate()})


CORE: dict[str, type[Any]] = {
    "SolidMask": SolidMask,
    "MaskComposite": MaskComposite,
    "LatentFlip": LatentFlip,
    "Canny": Canny,
    "LoadAudio": LoadAudio,
    "LoadImage": LoadImage,
    "ImageBatch": ImageBatch,
    "GetVideoComponents": GetVideoComponents,
    "PreviewImage": PreviewImage,
    "PreviewAudio": PreviewAudio,
    "PreviewAny": PreviewAny,
}
