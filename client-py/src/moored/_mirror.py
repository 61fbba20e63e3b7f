"""How a message becomes a frozen dataclass: field by field, by name.

A class says which message it mirrors, and takes the fields that both have. What a newer service
adds is left out. The tests hold every mirror against its descriptor: nothing is missing by mistake.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

T = TypeVar("T")

# Full name of a message -> the class that mirrors it.
MIRRORS: dict[str, type] = {}


def mirrors(message: type[Message]) -> Callable[[type[T]], type[T]]:
    """Registers a dataclass as the mirror of a message."""

    def register(cls: type[T]) -> type[T]:
        MIRRORS[message.DESCRIPTOR.full_name] = cls
        return cls

    return register


def mirror(cls: type[T], message: Message, **more: object) -> T:
    """`message` as a `cls`; `more` are fields that the message has not."""
    known = message.DESCRIPTOR.fields_by_name
    values: dict[str, object] = dict(more)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in values or field.name not in known:
            continue
        # A field whose default is None keeps absent apart from zero.
        if field.default is None and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        enum = known[field.name].enum_type
        values[field.name] = _word(enum, value) if enum is not None else _plain(value)
    return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return mirror(MIRRORS[value.DESCRIPTOR.full_name], value)
    if isinstance(value, (str, bytes, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return tuple(_plain(item) for item in value)


def _word(enum: Any, number: int) -> str:
    """`HIGH` as `high`; an unset value as the empty string; a newer one as its number."""
    if number == 0:
        return ""
    value = enum.values_by_number.get(number)
    return value.name.lower() if value is not None else str(number)
