"""A service on ComfyUI's machine, which is started for those who have set nothing else up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import folder_paths
import moored

from . import connection
from .connection import Target

STARTING = "Starting the service on this machine"


def may_start(target: Target) -> bool:
    """Whether a service may be started for these calls: no address is set, and there is a program for it."""
    return (
        connection.start_setting() is not None
        and connection.is_left_open(target)
        and moored.can_start_local_service()
    )


async def started(target: Target, say: Callable[[str], None] = lambda _: None) -> None:
    """Starts a service if none answers and one may be started, and waits until it is ready.

    `say` is given a text while that goes on.
    """
    if not await asyncio.to_thread(may_start, target):
        return
    if not await asyncio.to_thread(moored.local_service_listens):
        say(STARTING)
    # Also where one listens: another program may have started it, and it may not be ready yet.
    await asyncio.to_thread(_start)


def _start() -> None:
    moored.start_local_service(
        keep=connection.start_setting() == connection.KEEP, arguments=_own_models()
    )


def _own_models() -> list[str]:
    """The service finds the models that ComfyUI has."""
    base = getattr(folder_paths, "base_path", None) or os.devnull
    return ["--comfyui", str(base)] if (Path(base) / "models").is_dir() else []
