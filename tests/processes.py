"""Processes beside a service: its children, and programs that answer a line with a line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def children_of(pid: int) -> dict[int, str]:
    """The processes that this one has started, with their states; `Z` is a zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if int(parent) == pid:
            found[int(entry.name)] = state
    return found


def open_files_of(pid: int) -> list[str]:
    """What the descriptors of a process stand for, without those that it closes meanwhile."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(descriptor))
    return found


def threads_of(pid: int) -> list[dict[str, str]]:
    """What Linux says of each thread of a process, without those that end meanwhile."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (thread / "status").read_text(encoding="utf-8")
            lines = (line for line in status.splitlines() if ":\t" in line)
            found.append(dict(line.split(":\t", 1) for line in lines))
    return found


class Companion:
    """A program that says a line of JSON when it is ready, and one as the answer to each line."""

    END_S = 20.0
    """Seconds in which it must end once its input is closed."""

    def __init__(self, command: Sequence[str]) -> None:
        """Starts it and reads its first line. Raises a RuntimeError where it ends instead."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.first = self._answer()

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """Closes its input, and ends it if that is not enough."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(self.END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
