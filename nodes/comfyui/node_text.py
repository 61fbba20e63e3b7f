"""The text that ComfyUI shows on a node."""

from __future__ import annotations

import re

from server import PromptServer


def show_on(node_id: str | None, text: str) -> None:
    """Shows a text on a node, to the client that queued the prompt.

    To nobody else: others may have another node by this number. Half of a character, as a workflow's JSON
    may have it, is escaped: the frontend is sent UTF-8.
    """
    instance = getattr(PromptServer, "instance", None)
    if node_id is not None and instance is not None and instance.client_id is not None:
        instance.send_progress_text(_in_markdown(text), node_id, instance.client_id)


def _in_markdown(text: str) -> str:
    """A text whose lines stay lines, on classic nodes (HTML) and on those of Nodes 2.0 (Markdown).

    Markdown joins lines that do not end in two spaces, and both leave out spaces at the beginning of one.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    text = re.sub(r"^ +", lambda spaces: "\u00a0" * len(spaces.group()), text, flags=re.MULTILINE)
    return text.replace("\n", "  \n")
