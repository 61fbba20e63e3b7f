"""Commands of the binary as a person gives them, where no service runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

LARGE_ID = "Tongyi-MAI/Z-Image-Turbo"
"""The name that the shipped model has at the hub of the tests."""

Completed = subprocess.CompletedProcess[str]
Run = Callable[..., Completed]


def good(done: Completed) -> str:
    """The output of a command that succeeded."""
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout
