"""What a prompt showed and gave, whoever ran it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Message:
    """Something that a client was shown: `text`, `progress` (value, of), or `preview` (width, height)."""

    kind: str
    node: str | None
    what: Any


class Run:
    """A prompt, from its queueing to its end."""

    def __init__(self, prompt_id: str, client_id: str) -> None:
        self.prompt_id = prompt_id
        self.client_id = client_id
        self.status = ""
        """`success`, `error` or `interrupted`; empty before the end."""
        self.error = ""
        self.messages: list[Message] = []
        self.strays: list[Message] = []
        """What its client was shown while another prompt ran."""
        self.outputs: dict[str, dict[str, Any]] = {}
        self._news: queue.Queue[Message | None] = queue.Queue()
        self._ended = threading.Event()

    # Whoever runs it.

    def add(self, message: Message) -> None:
        """It showed something."""
        self.messages.append(message)
        self._news.put(message)

    def end(self, status: str) -> None:
        """It ended."""
        self.status = status
        self._ended.set()
        self._news.put(None)

    # Whoever waits for it.

    def until(self, so: Callable[[Message], bool]) -> Message:
        """The next message that is so."""
        for message in self._coming():
            if so(message):
                return message
        raise AssertionError(f"it ended before: {self.status} {self.error}; texts: {self.texts()}")

    def text(self, start: str) -> Message:
        """The next text that starts so."""
        return self.until(lambda message: message.kind == "text" and message.what.startswith(start))

    def done(self) -> Run:
        """Waits for its end."""
        assert self._ended.wait(DEADLINE_S), f"not in {DEADLINE_S} s; texts: {self.texts()}"
        return self

    def succeeded(self) -> Run:
        """Waits for its end, which is a good one."""
        self.done()
        assert (self.status, self.error) == ("success", ""), self.texts()
        return self

    def texts(self, node: str | None = None) -> list[str]:
        """What nodes said."""
        told = [one for one in self.messages if one.kind == "text"]
        return [one.what for one in told if node is None or one.node == node]

    def pictures(self, node: str) -> list[NDArray[np.uint8]]:
        """The pictures of a PreviewImage."""
        return list(self.outputs[node]["pictures"])

    def _coming(self) -> Iterator[Message]:
        while True:
            try:
                message = self._news.get(timeout=DEADLINE_S)
            except queue.Empty:
                raise AssertionError(f"silent for {DEADLINE_S} s; texts: {self.texts()}") from None
            if message is None:
                return
            yield message
