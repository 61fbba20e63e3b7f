"""Files that a user names, read within bounds: a device has no end, and a pipe waits for ever."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ._text import is_name_of_a_file

PICTURE_BYTES = 1 << 30
"""Most bytes of a picture: more than a service takes."""
TEXT_BYTES = 16 << 20
"""Most bytes of certificates."""
TOKEN_BYTES = 64 << 10
"""Most bytes of a token."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises OSError for what is no regular file, or is not there."""
    if not is_name_of_a_file(os.fspath(path)):
        raise OSError(errno.EINVAL, "no file can have this name", path)
    Path(path).stat()
    if not Path(path).is_file():
        raise OSError(f"{os.fspath(path)} is no regular file (a pipe, a device or a folder)")


def with_home(path: str | os.PathLike[str]) -> Path:
    """The path, with `~` as the home; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """The bytes of a regular file; OSError where it is none, or is longer than `most_bytes`."""
    check_regular(path)
    with Path(path).open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(f"{os.fspath(path)} has more than {most_bytes} bytes, which are the most")
    return data
