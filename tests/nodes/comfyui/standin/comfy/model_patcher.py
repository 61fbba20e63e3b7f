"""Stand-in: a model of ComfyUI's own, as far as it is loaded and unloaded."""

from __future__ import annotations

from typing import Any


class ModelPatcher:
    """A model, and the devices for it."""

    def __init__(self, model: Any, load_device: Any, offload_device: Any) -> None:
        self.model = model
        self.load_device = load_device
        self.offload_device = offload_device

    def load(self, device_to: Any = None, *arguments: Any, **options: Any) -> None:
        """Takes the model to a device."""

    def detach(self, unpatch_all: bool = True) -> Any:
        """Takes it away."""
