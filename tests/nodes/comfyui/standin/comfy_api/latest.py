"""Stand-in: the part of ComfyUI's V3 API that the pack uses."""

from __future__ import annotations

from . import io
from .video import InputImpl, Types


class ComfyExtension:
    """What a pack's entry point gives."""

    async def on_load(self) -> None:
        """Called first."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes."""
        raise NotImplementedError


__all__ = ["ComfyExtension", "InputImpl", "Types", "io"]
