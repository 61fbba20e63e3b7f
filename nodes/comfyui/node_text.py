"""The line of text that ComfyUI shows on a node."""

from __future__ import annotations

from server import PromptServer


def show_on(node_id: str | None, text: str) -> None:
    """Shows a text on a node, to whoever queued the prompt.

    To nobody else: others may have another node by this number. Half of a character, as a workflow's JSON
    may have it, is escaped: the frontend is sent UTF-8.
    """
    instance = getattr(PromptServer, "instance", None)
    if node_id is not None and instance is not None and instance.client_id is not None:
        text = text.encode("utf-8", "backslashreplace").decode()
        instance.send_progress_text(text, node_id, instance.client_id)
