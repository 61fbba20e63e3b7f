"""ComfyUI's own models: they leave the card while a job of the service waits for their memory."""

from __future__ import annotations

import logging
import os
from typing import Any

import comfy.model_management
import moored

from . import connection
from .connection import Target

log = logging.getLogger(__name__)

UNLOADING = "Unloading ComfyUI's own models"
UNLOADED = "ComfyUI's own models were unloaded"

# What may come between two of a wait's reports without ending the wait.
_BESIDE_A_WAIT = (moored.Queued, moored.Preview, moored.Artifact)


class OwnModels:
    """What the node of one job asks of ComfyUI: to unload its own models, once in each wait."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._asked = False

    def in_the_way(self, event: Any) -> bool:
        """Whether to unload them now: the first report of a wait for memory that this process holds.

        False where there are none, where the settings say so, and where the service is on another machine.
        In a container of its own ComfyUI has another process id than the service sees, so nobody is asked.
        """
        if not isinstance(event, moored.Waiting):
            self._asked = self._asked and isinstance(event, _BESIDE_A_WAIT)
            return False
        if self._asked or event.cause != "foreign":
            return False
        self._asked = any(holder.pid == os.getpid() for holder in event.holders)
        return (
            self._asked
            and connection.is_on_this_machine(self._target)
            and connection.unloads_own_models()
        )


def loaded() -> int:
    """How many models of ComfyUI itself are loaded."""
    return len(comfy.model_management.loaded_models())


def unload(why: str) -> bool:
    """Unloads all models of ComfyUI itself; whether there were any, and are none now.

    Called on the thread that runs prompts, as ComfyUI's nodes do it. The flags of its queue would be heeded
    after the prompt: too late for a job of this prompt.
    """
    count = loaded()
    try:
        comfy.model_management.unload_all_models()
        # Without a model too: torch keeps memory for its next use.
        comfy.model_management.soft_empty_cache()
    except Exception:
        # Whoever asks goes on without that memory, as before.
        log.exception("ComfyUI's own models could not be unloaded")
        return False
    if count:
        log.info("ComfyUI's own models were unloaded (%d): %s", count, why)
    return count > 0
