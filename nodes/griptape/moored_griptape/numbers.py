"""Numbers from hand-written JSON and from fields of the editor."""

from __future__ import annotations

from typing import Any


def number(value: Any, name: str) -> float:
    """The number that a field gives, by value: a workflow may carry it as a word."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is a number, not {value!r}") from error


def number_or_none(value: Any, name: str) -> float | None:
    """The same; a field that is empty gives none."""
    return None if value is None or value == "" else number(value, name)
