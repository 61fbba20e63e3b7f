"""Prompts for the nodes of the pack, in the form that ComfyUI's API takes."""

from __future__ import annotations

from typing import Any

Prompt = dict[str, dict[str, Any]]
Link = list[Any]

JOB: dict[str, Any] = {"priority": "normal", "patience_s": -1.0, "allow_low_memory": False}
SAMPLING: dict[str, Any] = {
    "steps": 2,
    "guidance": -1.0,
    "seed": 7,
    "count": 1,
    "latent_only": False,
    "max_sequence_length": 0,
    "preview_every_s": 0.0,
    **JOB,
}
MAKING = {name: value for name, value in SAMPLING.items() if name not in ("count", "latent_only")}
FILMING: dict[str, Any] = {
    "width": 0,
    "height": 0,
    "seconds": 0.0,
    "frames": 0,
    "fps": 0.0,
    "give_frames": False,
    **MAKING,
}
SIZE: dict[str, Any] = {"width": 64, "height": 64}
MODEL: dict[str, Any] = {
    "model": "moored/demo",
    "quantization": "full",
    "residency": "auto",
    "evict_after_s": 60,
    "when_missing": "stop with an error",
    "other_model": "",
    "formats": "",
    "revision": "",
}
RED = "a large red circle in the centre on a yellow background"


class Graph:
    """A prompt that is being written: each call adds a node and gives its number."""

    def __init__(self, endpoint: str, **model: Any) -> None:
        """Server and Load Model are nodes 1 and 2."""
        self.prompt: Prompt = {}
        self.server = self.add("MooredServer", endpoint=endpoint)
        self.model = self.add("MooredLoadModel", **(MODEL | model), server=[self.server, 0])

    def add(self, kind: str, **inputs: Any) -> str:
        """Any node."""
        name = str(len(self.prompt) + 1)
        self.prompt[name] = {"class_type": kind, "inputs": inputs}
        return name

    def lora(self, name: str, strength: float = 1.0, model: str = "", **options: Any) -> str:
        """Load LoRA, behind Load Model or another node with a model."""
        inputs: dict[str, Any] = {
            "model": [model or self.model, 0],
            "lora": name,
            "strength": strength,
            "text_strength": "",
            "ignore_unknown": False,
            "other_lora": "",
        }
        return self.add("MooredLoadLoRA", **(inputs | options))

    def text_to_image(self, prompt: str = RED, model: str = "", **options: Any) -> str:
        """Text to Image."""
        link = [model or self.model, 0]
        inputs = {"model": link, "prompt": prompt} | SIZE | SAMPLING | options
        return self.add("MooredTextToImage", **inputs)

    def image_to_image(self, prompt: str = RED, **options: Any) -> str:
        """Image to Image."""
        inputs: dict[str, Any] = {"model": [self.model, 0], "prompt": prompt, "strength": 0.6}
        return self.add(
            "MooredImageToImage", **(inputs | {"width": 0, "height": 0} | SAMPLING | options)
        )

    def edit(self, image: Link, prompt: str = RED, model: str = "", **options: Any) -> str:
        """Edit Image."""
        inputs = {"model": [model or self.model, 0], "prompt": prompt, "image": image}
        return self.add("MooredEditImage", **(inputs | SIZE | SAMPLING | options))

    def control(self, image: Link, name: str, model: str = "", **options: Any) -> str:
        """Apply ControlNet, behind Load Model or another node with a model."""
        inputs: dict[str, Any] = {
            "model": [model or self.model, 0],
            "image": image,
            "control_net": name,
            "strength": 1.0,
            "start_percent": 0.0,
            "end_percent": 1.0,
            "mode": -1,
            "other_control_net": "",
        }
        return self.add("MooredApplyControlNet", **(inputs | options))

    def encode(self, image: Link, **options: Any) -> str:
        """VAE Encode."""
        inputs = {"model": [self.model, 0], "image": image, "seed": 0} | JOB | options
        return self.add("MooredVAEEncode", **inputs)

    def decode(self, latent: Link, **options: Any) -> str:
        """VAE Decode."""
        inputs = {"model": [self.model, 0], "latent": latent} | JOB | options
        return self.add("MooredVAEDecode", **inputs)

    def text_to_video(self, prompt: str = RED, model: str = "", **options: Any) -> str:
        """Text to Video."""
        inputs: dict[str, Any] = {"model": [model or self.model, 0], "prompt": prompt}
        return self.add("MooredTextToVideo", **(inputs | FILMING | options))

    def image_to_video(self, image: Link, prompt: str = RED, **options: Any) -> str:
        """Image to Video."""
        inputs: dict[str, Any] = {"model": [self.model, 0], "prompt": prompt, "image": image}
        return self.add("MooredImageToVideo", **(inputs | FILMING | options))

    def film_parts(self, film: str) -> str:
        """ComfyUI's own node that takes a film apart: pictures, sound, rate."""
        return self.add("GetVideoComponents", video=[film, 0])

    def text_to_music(self, prompt: str = RED, **options: Any) -> str:
        """Text to Music."""
        return self._music("MooredTextToMusic", prompt, {"seconds": 0.0} | options)

    def repaint_music(self, audio: Link, prompt: str = RED, **options: Any) -> str:
        """Repaint Music."""
        inputs = {"audio": audio, "start_seconds": 0.0, "end_seconds": 0.0}
        return self._music("MooredRepaintMusic", prompt, inputs | options)

    def cover_music(self, audio: Link, prompt: str = RED, **options: Any) -> str:
        """Cover Music."""
        return self._music("MooredCoverMusic", prompt, {"audio": audio} | options)

    def _music(self, node: str, prompt: str, options: dict[str, Any]) -> str:
        inputs = {"model": [self.model, 0], "prompt": prompt, "lyrics": "", "count": 1, "bpm": 0}
        inputs |= dict.fromkeys(("key", "time_signature", "language"), "")
        making = {name: value for name, value in MAKING.items() if name != "preview_every_s"}
        return self.add(node, **(inputs | making | options))

    def preview(self, image: Link) -> str:
        """Shows pictures."""
        return self.add("PreviewImage", images=image)
