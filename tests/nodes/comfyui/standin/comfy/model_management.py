"""Stand-in: the interrupt flag of ComfyUI, and the models that it has loaded.

Whoever raises for the flag clears it.
"""

from __future__ import annotations

import threading
from typing import Any

_flag = threading.Event()
_loaded: list[Any] = []


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


def load_models_gpu(models: list[Any]) -> None:
    """Loads models, those that are not loaded."""
    for model in models:
        if model not in _loaded:
            _loaded.append(model)
            model.load(model.load_device)


def loaded_models() -> list[Any]:
    """The models that are loaded."""
    return list(_loaded)


def unload_all_models() -> None:
    """Unloads them."""
    while _loaded:
        _loaded.pop().detach()


def soft_empty_cache() -> None:
    """Gives the memory back that torch keeps for its next use; here it keeps none."""
