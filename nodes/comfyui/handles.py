"""The values on the links between nodes: models and latents as recipes.

A handle is plain data with what is needed to make its thing again, so that it outlives a restart of the
service, and a pickle. Whoever computed a handle owns what it stands for: when the handle goes (ComfyUI drops
it from its cache, or frees its memory), its latents and its hold on the model are released.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import moored

from .connection import Server
from .failures import Failure

Residency = Literal["auto", "hold", "pin", "evict after"]
RESIDENCIES: tuple[Residency, ...] = get_args(Residency)

AUTO = "auto"
QUANTIZATIONS = (AUTO, "full", "8-bit", "4-bit")


@dataclass(frozen=True)
class ModelRecipe:
    """A model of a service, how its weights are held, for how long it stays, and its adapters."""

    server: Server | None
    id: str
    quantization: str = "full"
    formats: tuple[tuple[str, str], ...] = ()
    revision: str = ""
    residency: Residency = "auto"
    evict_after_s: int = 0
    adapters: tuple[moored.Adapter, ...] = ()

    @property
    def ref(self) -> moored.ModelRef:
        """The model as the client names it."""
        return moored.ModelRef(
            self.id,
            quantization="" if self.quantization == "full" else self.quantization,
            formats=dict(self.formats),
            revision=self.revision,
            adapters=self.adapters,
        )


@dataclass(eq=False)
class ModelHandle:
    """A MOORED_MODEL."""

    recipe: ModelRecipe
    controls: tuple[moored.Control, ...] = ()
    """ControlNets of whatever is generated with it, and what they read."""


@dataclass(frozen=True)
class Generation:
    """How one picture is generated: the options of `generate_image`, with a seed and a count of one."""

    prompt: str
    options: tuple[tuple[str, Any], ...]
    start: bytes | KeptLatent | None = None
    """What it starts from: a picture as PNG, or a latent."""


@dataclass(frozen=True)
class Encoding:
    """How one picture was encoded."""

    png: bytes = field(repr=False)
    width: int
    height: int
    seed: int
    job: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Bringing:
    """Numbers of another origin: f32, little-endian, as the service scales them."""

    data: bytes = field(repr=False)
    shape: tuple[int, ...]


@dataclass(eq=False)
class KeptLatent:
    """One latent of a service: where it is, and how it is made again when it is gone."""

    model: ModelRecipe
    recipe: Generation | Encoding | Bringing
    id: str = ""
    """Its name in the service; empty: it has to be made."""
    family: str = ""
    """Family of the model that made it: it says how ComfyUI scales such latents."""


@dataclass(eq=False)
class LatentHandle:
    """A MOORED_LATENT: a batch of latents."""

    latents: list[KeptLatent]


def chosen_name(other: str, listed: str | None, kind: str, node: str) -> str:
    """The name that was typed, else the one of the list; for a message, of what kind and in which node."""
    name = other.strip() or (listed or "").strip()
    if not name:
        raise Failure(
            f"No {kind} is chosen: choose one in {node}, after a refresh if its list is empty."
        )
    return name


def formats_of(text: str) -> tuple[tuple[str, str], ...]:
    """The formats of components that somebody typed: `text_encoder_2=int8, transformer=nf4`."""
    formats = []
    for part in re.split(r"[,\s]+", text.strip()):
        if not part:
            continue
        component, equals, name = part.partition("=")
        if not (component and equals and name):
            raise moored.InvalidRequest(
                f"The format {part!r} is not of the form component=format, as in text_encoder_2=int8"
            )
        formats.append((component, name))
    return tuple(formats)
