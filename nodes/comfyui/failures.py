"""Errors as one sentence that says what happened and what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import moored

from .node_text import show_on

FALLBACKS_AT_MOST = 3
INPUTS = {
    "model": "the model",
    "model.id": "the model",
    "model.quantization.preset": "quantization",
    "model.quantization.components": "formats",
    "model.adapters": "the LoRAs",
    "model.adapters[].id": "LoRA {number}",
    "model.adapters[].strength": "the strength of LoRA {number}",
    "init_image": "the image",
    "end_image": "end_image",
    "init_latent": "the latent",
    "init_media": "the audio",
    "references": "the reference images",
    "controls": "the ControlNets",
    "controls[].id": "ControlNet {number}",
    "controls[].image": "the image of ControlNet {number}",
    "controls[].mode": "the mode of ControlNet {number}",
    "controls[].scale": "the strength of ControlNet {number}",
    "controls[].start": "the start_percent of ControlNet {number}",
    "controls[].end": "the end_percent of ControlNet {number}",
    "frames_per_second": "fps",
    "window": "the part from start_seconds to end_seconds",
}
"""Inputs of the nodes, by the fields of a request that go by another name."""


class Failure(RuntimeError):
    """What a node says when it cannot do its work.

    Never an out-of-memory error of torch: on one of those ComfyUI would unload its own models, which are not
    in the way.
    """

    # ComfyUI shows it. The module's real name is the path of the folder.
    __module__ = "moored_nodes"


@contextlib.contextmanager
def told(node_id: str | None) -> Iterator[None]:
    """Turns the client's errors into a Failure, and shows it on the node itself."""
    try:
        yield
    except Failure as failure:
        show_on(node_id, str(failure))
        raise
    except moored.MooredError as error:
        said = sentence(error)
        show_on(node_id, said)
        # A refusal is no fault: only of a fault it helps to see where it came from.
        raise Failure(said) from (error if isinstance(error, moored.InternalError) else None)


def sentence(error: moored.MooredError) -> str:
    """What happened, and the remedy that ComfyUI has for it."""
    return f"{_capitalised(_said(error).rstrip('. '))}{_remedy(error)}."


def _capitalised(text: str) -> str:
    """A sentence that begins with a word begins with a capital; an address or a name stays as it is."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+(?:'s)?:?(?:[\s,]|$)", text) else text


def _said(error: moored.MooredError) -> str:
    """The words of an error; of a missing model without the call of Python that lists models."""
    model = error.metadata.get("model") if isinstance(error, moored.ModelNotFound) else None
    return f"there is no model {model}" if model else error.in_words(INPUTS)


def _lacks_picture(error: moored.InvalidRequest) -> bool:
    """Whether a film needs a picture: of the nodes that make films, Text to Video gives none."""
    return any(
        one.field == "init_image" and one.description.startswith("is missing")
        for one in error.violations
    )


def _remedy(error: moored.MooredError) -> str:
    match error:
        case moored.InvalidRequest() if _lacks_picture(error):
            return ": use Image to Video"
        case moored.MemoryShortage() if error.fallbacks:
            labels = [one.label for one in error.fallbacks[:FALLBACKS_AT_MOST]]
            return f": this would fit: {', or '.join(labels)}"
        case moored.NeverFits():
            return ": no smaller size and no quantization of it fits, so choose another model in Load Model"
        case moored.OutOfMemory():
            return ": choose a smaller picture, or another model in Load Model"
        case moored.MemoryTaken():
            return ": queue the prompt again when that memory is free, or raise patience_s"
        case moored.ModelNotFound():
            return ", or choose another model in Load Model, or set its `if missing` to pull"
        case moored.UnencryptedToken():
            return ", where ComfyUI is started"
        case moored.Unauthenticated():
            return (
                ": put the token's file into user/moored of ComfyUI, and write its name in the settings "
                "under moored"
            )
        case moored.Cancelled():
            return ": queue the prompt again"
        case (
            moored.QueueFull()
            | moored.ClientLimit()
            | moored.CardNotReady()
            | moored.DiskNotReady()
            | moored.ShuttingDown()
        ):
            return ": queue the prompt again in a moment"
        case moored.Deadline():
            return ": see whether the service is well, and queue the prompt again"
        case moored.ConnectionFailed(cause="unreachable"):
            return " or in ComfyUI's settings under moored"
        case moored.ConnectionFailed(cause="lost"):
            return ", and queue the prompt again"
        case moored.ConnectionFailed(cause="proxy" | "cut"):
            return ""
        case moored.ConnectionFailed():
            return ", or see the address in ComfyUI's settings under moored"
        case moored.LatentNotFound():
            return ": queue the prompt again, and it is made anew"
        case moored.LatentMismatch():
            return ": use the model that the latent was made with"
    return ""
