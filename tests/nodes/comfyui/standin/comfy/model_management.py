"""Stand-in: the interrupt flag of ComfyUI. Whoever raises for it clears it."""

from __future__ import annotations

import threading

_flag = threading.Event()


class InterruptProcessingException(BaseException):
    """What marks a prompt interrupted."""


def interrupt_current_processing(value: bool = True) -> None:
    """Sets the flag, or clears it."""
    if value:
        _flag.set()
    else:
        _flag.clear()


def processing_interrupted() -> bool:
    """Looks at the flag."""
    return _flag.is_set()


def throw_exception_if_processing_interrupted() -> None:
    """Raises and clears the flag, if it is set."""
    if _flag.is_set():
        _flag.clear()
        raise InterruptProcessingException
