"""Stand-in: what of ComfyUI's server nodes and routes see. It keeps what it would send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from aiohttp import web


class PromptServer:
    """The server; `instance` is the one that runs."""

    instance: ClassVar[PromptServer | None] = None

    def __init__(self) -> None:
        self.routes = web.RouteTableDef()
        self.client_id: str | None = None
        """Who queued the prompt that runs."""
        self.send: Callable[[str | None, str, str | None, Any], None] = lambda *_: None
        """Takes what goes to a client: to whom (None: to all), kind, node, what."""

    def record(self, kind: str, node: str | None, what: Any) -> None:
        """Sends something to whoever queued the prompt."""
        self.send(self.client_id, kind, node, what)

    def send_progress_text(self, text: str, node_id: str, sid: str | None = None) -> None:
        """Shows a text on a node: of one client, or of all."""
        self.send(sid, "text", node_id, text)
