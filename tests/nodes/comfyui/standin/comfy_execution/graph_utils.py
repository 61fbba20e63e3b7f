"""Stand-in: an output that stops what follows it."""

from __future__ import annotations


class ExecutionBlocker:
    """Whoever gets it does not run; the message is told as an error."""

    def __init__(self, message: str | None) -> None:
        self.message = message
