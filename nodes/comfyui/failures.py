"""Errors as one sentence that says what happened and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import moored

FALLBACKS_AT_MOST = 3


class Failure(RuntimeError):
    """What a node says when it cannot do its work.

    Never an out-of-memory error of torch: on one of those ComfyUI would unload its own models, which are not
    in the way.
    """

    # ComfyUI shows it. The module's real name is the path of the folder.
    __module__ = "moored_nodes"


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns the client's errors into a Failure."""
    try:
        yield
    except moored.MooredError as error:
        raise Failure(sentence(error)) from error


def sentence(error: moored.MooredError) -> str:
    """What happened, and the remedy that ComfyUI has for it."""
    said = error.message
    if isinstance(error, moored.ConnectionFailed):
        # In brackets is what gRPC says of it, which helps nobody here.
        said = said.partition(" (")[0]
    said = said.rstrip(". ")
    return f"{said[:1].upper()}{said[1:]}{_remedy(error)}."


def _remedy(error: moored.MooredError) -> str:
    match error:
        case moored.MemoryShortage() if error.fallbacks:
            labels = [one.label for one in error.fallbacks[:FALLBACKS_AT_MOST]]
            return f": this would fit: {', or '.join(labels)}"
        case moored.NeverFits() | moored.OutOfMemory():
            return ": choose a smaller picture, or a smaller quantization in Load Model"
        case moored.MemoryTaken():
            return ": queue the prompt again when that memory is free, or raise patience_s"
        case moored.ModelNotFound():
            return ", or choose another model in Load Model, or set its when_missing to pull"
        case moored.Unauthenticated():
            return ": name the right token file in ComfyUI's settings under moored"
        case moored.Cancelled():
            return (
                ": if it was not you, somebody cancelled it in the service; queue the prompt again"
            )
        case (
            moored.QueueFull()
            | moored.ClientLimit()
            | moored.CardNotReady()
            | moored.ShuttingDown()
        ):
            return ": queue the prompt again in a moment"
        case moored.Deadline():
            return ": see whether the service is well, and queue the prompt again"
        case moored.ConnectionFailed() if "MOORED_ENDPOINT" in error.message:
            return " or in ComfyUI's settings under moored"
        case moored.ConnectionFailed():
            return ": see whether the service still runs, and queue the prompt again"
        case moored.LatentNotFound():
            return ": queue the prompt again, and it is made anew"
        case moored.LatentMismatch():
            return ": use the model that the latent was made with"
    return ""
