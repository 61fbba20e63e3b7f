"""Text that can be written and sent.

A str of Python may hold half of a surrogate pair, for which UTF-8 has no bytes: JSON yields one
(`"\\ud800"`), and so does a name of a file that is no UTF-8. One rule: what comes from others is
escaped where it is taken, as the six characters `\\ud800`; what a caller gives is refused by its
name.
"""

from __future__ import annotations

import os
from typing import Any


def escaped(text: str) -> str:
    """The text with each lone surrogate as six plain characters: `\\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode()


def escaped_values(value: Any) -> Any:
    """The same of every text in what JSON held: keys too."""
    match value:
        case str():
            return escaped(value)
        case dict():
            return {escaped(key): escaped_values(each) for key, each in value.items()}
        case list():
            return [escaped_values(each) for each in value]
    return value


def is_sendable(text: str) -> bool:
    """Whether it has no lone surrogate."""
    return escaped(text) == text


def is_name_of_a_file(text: str) -> bool:
    """Whether a file can have it as its path, or as a part of it."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
