"""What is measured of processes and cards at a rest, as plain numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import moored

OURS = ("components", "scratch", "slack", "workspaces", "context")
OTHERS = ("foreign", "unexplained", "free")


@dataclass(frozen=True)
class ProcessSample:
    """A process at one moment."""

    pid: int
    rss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class CardSample:
    """The accounts of a card at one moment, and what its driver says then."""

    accounts: dict[str, int]
    """`total` and every account of `OURS` and `OTHERS`, in bytes."""
    booked: int
    """Bytes of the components that are listed as resident."""
    expected: dict[str, int]
    """What accounts must be by a witness that is not the service; no entry: nobody knows."""


@dataclass(frozen=True)
class Rest:
    """A moment in which nothing is asked for and nothing is loaded."""

    at_s: float
    """Since the load began."""
    generation: int
    """How many workers have ended before this one."""
    supervisor: ProcessSample
    worker: ProcessSample
    card: CardSample
    left: tuple[str, ...] = field(default=())
    """What should not be there at a rest, in words."""


def process_sample(pid: int) -> ProcessSample:
    """Reads a process from /proc. Raises an OSError where it is gone."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    rss = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return ProcessSample(
        pid=pid,
        rss_bytes=int(rss[1]) * 1024 if rss else 0,
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
    )


def accounts_of(memory: moored.MemoryAccounts) -> dict[str, int]:
    """The accounts of a card by their names."""
    return {name: int(getattr(memory, name)) for name in ("total", *OURS, *OTHERS)}


_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6}
_UNITS |= {"GB": 10**9}


def bytes_of(text: str) -> int:
    """A size as the service writes it: `24GiB`, `512MB`, `7B`, `7`."""
    found = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text)
    if not found or (found[2] or "B") not in _UNITS:
        raise ValueError(f"{text!r} is no size such as 24GiB")
    return int(float(found[1]) * _UNITS[found[2] or "B"])
