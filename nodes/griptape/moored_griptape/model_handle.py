"""What Diffusion Model hands on: a small JSON object that names a model, and holds nothing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import moored

from moored_griptape.numbers import json_object, listed, number

HANDLE_TYPE = "MooredModel"
DEFAULT_MODEL = "default"
STOP, PULL = "stop with an error", "pull"
LONGEST_KEEP_ALIVE_S = 3600.0

# By the mode that the node offers: the service's preset, and formats of single components.
_FP8 = {"transformer": "fp8", "text_encoder_2": "fp8"}
AUTO, AS_STORED = "auto", "None"
QUANTIZATION_MODES: dict[str, tuple[str, Mapping[str, str]]] = {
    AUTO: ("auto", {}),
    AS_STORED: ("", {}),
    "fp8": ("", _FP8),
    "int8": ("8-bit", {}),
    "int4": ("4-bit", {}),
}


@dataclass(frozen=True)
class ModelHandle:
    """A model and how to use it. A recipe: it outlives both the engine and the service."""

    model: str = ""
    """`owner/name` or the name of a model folder; empty: the service's default model."""
    quantization_mode: str = AS_STORED
    loras: tuple[moored.Adapter, ...] = ()
    keep_alive_s: float = 0.0
    """How long the model stays in after a run; 0: no longer than the memory is wanted."""
    if_missing: str = STOP

    @classmethod
    def parse(cls, value: object) -> Self:
        """From a node's input: the object or its JSON; a bare name is a model; nothing, the default."""
        if value is None or value == "":
            return cls()
        if isinstance(value, str) and not value.strip().startswith("{"):
            return cls(model=_model_name(value))
        value = json_object(value, "The model", "Diffusion Model")
        unknown = sorted(str(name) for name in value if name not in cls.__dataclass_fields__)
        if unknown:
            raise ValueError(
                f"The model handle has no {', '.join(unknown)}: connect a Diffusion Model node of this "
                "version"
            )
        return cls(
            model=_model_name(value.get("model")),
            quantization_mode=_quantization_mode(value.get("quantization_mode")),
            loras=parse_loras(value.get("loras")),
            keep_alive_s=_keep_alive(value.get("keep_alive_s")),
            if_missing=_if_missing(value.get("if_missing")),
        )

    def as_json(self) -> dict[str, Any]:
        """The object that travels between nodes and into saved workflows."""
        return {
            "model": self.model,
            "quantization_mode": self.quantization_mode,
            "loras": [lora_json(one) for one in self.loras],
            "keep_alive_s": self.keep_alive_s,
            "if_missing": self.if_missing,
        }

    @property
    def ref(self) -> moored.ModelRef | None:
        """The model as the client names it; None where everything is left to the service."""
        preset, formats = QUANTIZATION_MODES[self.quantization_mode]
        if not (self.model or preset or formats or self.loras):
            return None
        return moored.ModelRef(
            self.model, quantization=preset, formats=formats, adapters=self.loras
        )

    @property
    def named(self) -> moored.ModelLike:
        """The same for calls that must name a model: the service's default has an empty name."""
        return self.ref or ""

    def in_mode(self, quantization_mode: str) -> moored.ModelRef | None:
        """The same model, quantized as another mode says."""
        return type(self)(self.model, quantization_mode, self.loras).ref


def parse_loras(value: object) -> tuple[moored.Adapter, ...]:
    """LoRAs: names, also as `NAME:STRENGTH`, objects with `id` and `strength`, or a JSON list of them."""
    return tuple(_lora(one) for one in listed(value, "loras", "`id` and `strength`"))


_LORA_KEYS = ("id", "strength", "curve", "text_strength", "ignore_unknown")


def _lora(value: object) -> moored.Adapter:
    match value:
        case str(text):
            name, colon, strength = text.rpartition(":")
            if colon and name.strip():
                return moored.Adapter(name.strip(), number(strength, "strength"))
            return moored.Adapter(text.strip())
        case [str(name), strength]:
            return moored.Adapter(name.strip(), number(strength, "strength"))
        case Mapping() if value.get("id"):
            return _lora_of_object(value)
    raise ValueError(f"{value!r} is no LoRA: give a name, or an object with `id` and `strength`")


def _lora_of_object(value: Mapping[str, Any]) -> moored.Adapter:
    unknown = sorted(str(key) for key in value if key not in _LORA_KEYS)
    if unknown:
        raise ValueError(f"A LoRA has no {', '.join(unknown)}: it has {', '.join(_LORA_KEYS)}")
    curve = []
    for point in value.get("curve") or ():
        if not isinstance(point, Sequence) or isinstance(point, str) or len(point) != 2:
            raise ValueError(
                f"The curve of a LoRA is pairs of position and strength, not {point!r}"
            )
        curve.append((number(point[0], "curve"), number(point[1], "curve")))
    strength, text_strength = value.get("strength"), value.get("text_strength")
    if strength is None and not curve:
        strength = 1.0
    return moored.Adapter(
        str(value["id"]).strip(),
        None if strength is None else number(strength, "strength"),
        tuple(curve),
        None if text_strength is None else number(text_strength, "text_strength"),
        bool(value.get("ignore_unknown")),
    )


def lora_json(lora: moored.Adapter) -> dict[str, Any]:
    """A LoRA as `parse_loras` reads it: what is left to the service is left out."""
    whole: dict[str, Any] = {
        "id": lora.id,
        "strength": lora.strength if lora.strength is not None or lora.curve else 1.0,
        "curve": [list(point) for point in lora.curve] or None,
        "text_strength": lora.text_strength,
        "ignore_unknown": lora.ignore_unknown or None,
    }
    return {key: value for key, value in whole.items() if value is not None}


def lora_words(lora: moored.AttachedAdapter) -> str:
    """What a LoRA changes: `styles/ink: 304 layers of transformer, rank 16; 2 tensors ignored (a, b)`."""
    return f"{lora.id}: {moored.describe(lora) or 'attached'}"


def _model_name(value: object) -> str:
    name = str(value or "").strip()
    return "" if name == DEFAULT_MODEL else name


def _quantization_mode(value: object) -> str:
    mode = "None" if value in (None, "") else str(value)
    if mode not in QUANTIZATION_MODES:
        raise ValueError(f"quantization_mode is one of {', '.join(QUANTIZATION_MODES)}, not {mode}")
    return mode


def _keep_alive(value: object) -> float:
    seconds = number(value or 0, "keep_alive_s")
    if not 0 <= seconds <= LONGEST_KEEP_ALIVE_S:
        raise ValueError(
            f"keep_alive_s is 0 to {LONGEST_KEEP_ALIVE_S:g} seconds, not {seconds:g}: for longer, pin "
            "the model (`moored pin`)"
        )
    return seconds


def _if_missing(value: object) -> str:
    choice = str(value or STOP)
    if choice not in (STOP, PULL):
        raise ValueError(f"if_missing is `{STOP}` or `{PULL}`, not {choice}")
    return choice
