"""Stand-in: the progress bar of ComfyUI, which also looks at the interrupt flag and clears it."""

from __future__ import annotations

from typing import Any

from server import PromptServer

from . import model_management


class ProgressBar:
    """Sends progress and previews of a node."""

    def __init__(self, total: int, node_id: str | None = None) -> None:
        self.total = total
        self.node_id = node_id

    def update_absolute(
        self, value: int, total: int | None = None, preview: tuple[str, Any, int] | None = None
    ) -> None:
        """Sends where it is."""
        if total is not None:
            self.total = total
        model_management.throw_exception_if_processing_interrupted()
        instance = PromptServer.instance
        assert instance is not None
        instance.record("progress", self.node_id, (min(value, self.total), self.total))
        if preview is not None:
            kind, image, longest = preview
            assert kind == "JPEG"
            shown = image.copy()
            shown.thumbnail((longest, longest))
            instance.record("preview", self.node_id, shown.size)
