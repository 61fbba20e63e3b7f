"""What the kernel says of the machine's memory, and of a service's processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from processes import children_of

KIB = 1024
PAGE_BYTES = 4 * KIB
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes, of the machine or of processes together; 0 where the kernel does not say."""

    resident: int = 0
    """Of the processes: all that they have mapped and that is in memory."""
    anonymous: int = 0
    """Of these, what is no file's."""
    files: int = 0
    """Of these, pages of files, those in shared memory included."""
    proportional: int = 0
    """Of the processes, with what several share counted once."""
    locked: int = 0
    """Of the processes, by mlock."""
    pinned: int = 0
    """Of the processes, as the kernel's drivers book it (VmPin)."""
    available: int = 0
    """Of the machine."""
    pages_pinned: int = 0
    """Of the machine: pages that drivers hold for devices, a page counted once for each time."""
    unevictable: int = 0
    """Of the machine."""
    of_group: int = 0
    """Of the control group, the page cache that it has filled included."""

    def __sub__(self, other: Memory) -> Memory:
        """How much more than before."""
        names = (one.name for one in fields(self))
        return Memory(**{name: getattr(self, name) - getattr(other, name) for name in names})

    @staticmethod
    def most(readings: Iterable[Memory]) -> Memory:
        """The most of each figure."""
        found = list(readings)
        names = [one.name for one in fields(Memory)]
        return Memory(**{name: max(getattr(one, name) for one in found) for name in names})


def read(pids: Iterable[int]) -> Memory:
    """The machine's memory, and that of these processes; one that has ended counts nothing."""
    machine = kilobytes(_text(PROC / "meminfo"))
    counts = numbers(_text(PROC / "vmstat"))
    held = counts.get("nr_foll_pin_acquired", 0) - counts.get("nr_foll_pin_released", 0)
    status: dict[str, int] = {}
    rollup: dict[str, int] = {}
    for pid in pids:
        _add(status, kilobytes(_text(PROC / f"{pid}/status")))
        _add(rollup, kilobytes(_text(PROC / f"{pid}/smaps_rollup")))
    return Memory(
        resident=status.get("VmRSS", 0),
        anonymous=status.get("RssAnon", 0),
        files=status.get("RssFile", 0) + status.get("RssShmem", 0),
        proportional=rollup.get("Pss", 0),
        locked=status.get("VmLck", 0),
        pinned=status.get("VmPin", 0),
        available=machine.get("MemAvailable", 0),
        pages_pinned=max(held, 0) * PAGE_BYTES,
        unevictable=machine.get("Unevictable", 0),
        of_group=_of_group(),
    )


def family_of(pid: int) -> tuple[int, ...]:
    """A process and those that it has started."""
    return (pid, *children_of(pid))


def kilobytes(text: str) -> dict[str, int]:
    """Bytes by their names, of lines such as `VmRSS:  12 kB`."""
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    return {name: int(number) * KIB for name, number in found}


def numbers(text: str) -> dict[str, int]:
    """Numbers by their names, of lines such as `nr_dirty 12`."""
    return {name: int(number) for name, number in re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE)}


def _add(sums: dict[str, int], more: Mapping[str, int]) -> None:
    for name, number in more.items():
        sums[name] = sums.get(name, 0) + number


def _of_group() -> int:
    for name in ("memory.current", "memory/memory.usage_in_bytes"):
        if text := _text(CGROUP / name).strip():
            return int(text)
    return 0


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
