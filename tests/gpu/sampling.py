"""Readings that are taken again and again while something runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def sampled(read: Callable[[], T], every_s: float) -> Iterator[list[T]]:
    """The readings: one at the beginning, and more until the end."""
    over, readings = threading.Event(), [read()]

    def keep_reading() -> None:
        while not over.wait(every_s):
            readings.append(read())

    thread = threading.Thread(target=keep_reading, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        over.set()
        thread.join()
