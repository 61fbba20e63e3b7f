"""Numbers, lists and objects from hand-written JSON and from fields of the editor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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


def json_object(value: object, name: str, node: str) -> Mapping[str, Any]:
    """An object, or the one of a JSON text.

    `name` and `node` are for messages: what it is, and the node that makes one.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name} is no JSON object ({error}): connect a {node} node"
            ) from error
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}, no object: connect a {node} node")
    return value


def listed(value: object, name: str, parts: str) -> Sequence[Any]:
    """The entries of a Python list, a JSON list, or names with commas between them; an object is one entry.

    `name` and `parts` are for messages: the field, and what an object in it has.
    """
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text.startswith(("[", "{")) else text.split(",")
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{name} is no JSON list ({error}): give names, or objects with {parts}"
            ) from error
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise ValueError(f"{name} is a list of names, or of objects with {parts}")
    return [one for one in value if one]
