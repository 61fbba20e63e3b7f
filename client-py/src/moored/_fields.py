"""Options as fields of a form: for frontends, whose nodes ask for what a request takes.

They follow from the options themselves, and these from the API: a frontend that asks here has a new
option without a change.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ._generated.request_fields import ResultFields
from ._options import hints_of
from ._requests import JobOptions

FieldKind = Literal["text", "whole", "number", "truth", "choice"]
"""What is entered in a field: words, a whole number, any number, yes or no, or one of the names."""

LEFT_OPEN = "default"
"""The name that is chosen where a choice is left to the model."""

_KINDS: Mapping[type, FieldKind] = {str: "text", int: "whole", float: "number", bool: "truth"}


@dataclass(frozen=True, slots=True)
class OptionField:
    """An option that is text, a number, yes or no, or one of some names, as a field of a form."""

    option: str
    """Its name, as in `generate_image(steps=...)`."""
    kind: FieldKind
    words: str
    """What it is, in a sentence or two."""
    least: int = 0
    """Of a number: the smallest that is taken, as far as it is known."""
    most: int | None = None
    """Of a number: the largest."""
    names: tuple[str, ...] = ()
    """Of a choice: what there is to choose from; `left_open` comes besides."""

    @property
    def tooltip(self) -> str:
        """Its words as plain text, without the default of Python."""
        return self.words.partition("Default: ")[0].replace("`", "").strip()

    @property
    def left_open(self) -> str | int | bool:
        """What stands in the field where it is left to the model: a number below the smallest."""
        match self.kind:
            case "text":
                return ""
            case "choice":
                return LEFT_OPEN
            case "truth":
                return False
            case "whole" | "number":
                return self.least - 1

    def is_left_open(self, value: object) -> bool:
        """Whether a value leaves the option to the model."""
        if value is None or value == "":
            return True
        if self.kind == "text":
            return not str(value).strip()
        return value == self.left_open


def option_fields(options: type) -> tuple[OptionField, ...]:
    """The options of a call that a form can ask for, such as those of `moored.ImageOptions`."""
    fields = []
    for option, hint in hints_of(options).items():
        wanted, words, *more = typing.get_args(hint)
        (kind, *others) = [one for one in typing.get_args(wanted) if one is not type(None)]
        if others:
            continue
        if typing.get_origin(kind) is Literal:
            names = typing.get_args(kind)
            fields.append(OptionField(option, "choice", words, names=names))
        elif kind in _KINDS:
            least, most = more[0] if more else (0, None)
            fields.append(OptionField(option, _KINDS[kind], words, least, most))
    return tuple(fields)


# What forms ask for in ways of their own: sizes and lengths, seeds, starts, results, and jobs.
_OTHERS = frozenset(
    (
        *JobOptions.__annotations__,
        *ResultFields.__annotations__,
        *("seed", "strength", "preview_interval_s", "output", "task"),
        *("width", "height", "frames", "frames_per_second", "seconds", "frames_at_a_time"),
        *("lyrics", "bpm", "key", "time_signature", "language"),
    )
)


def sampling_fields(options: type) -> tuple[OptionField, ...]:
    """Those of them that say how a result is sampled: forms can ask for all in the same way.

    What is new in the API is one of them.
    """
    return tuple(field for field in option_fields(options) if field.option not in _OTHERS)


def asked_options(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the fields of a form say, as options of a call: what is left open is left out.

    `values` may have more than the fields of these options; that is not looked at. True guidance
    leads away from an empty text where there is no negative prompt.
    """
    asked = {
        field.option: values[field.option]
        for field in option_fields(options)
        if field.option in values and not field.is_left_open(values[field.option])
    }
    if asked.get("true_guidance", 0) > 1:
        asked.setdefault("negative_prompt", "")
    return asked
