"""The line of text that ComfyUI shows on a node."""

from __future__ import annotations

from server import PromptServer


def show_on(node_id: str | None, text: str) -> None:
    """Shows a text on a node, to whoever queued the prompt.

    To nobody else: others may have another node by this number.
    """
    instance = getattr(PromptServer, "instance", None)
    if node_id is not None and instance is not None and instance.client_id is not None:
        instance.send_progress_text(text, node_id, instance.client_id)
