"""Stand-in: where ComfyUI keeps what is a user's."""

from __future__ import annotations

_user_directory = ""


def get_user_directory() -> str:
    """The folder of all users."""
    return _user_directory


def set_user_directory(path: str) -> None:
    """Says which."""
    global _user_directory
    _user_directory = path
