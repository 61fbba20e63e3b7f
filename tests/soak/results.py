"""The same request must give the same result after an hour as at first, whatever happened in between."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moored
from models import TINY, Rewritten
from PIL import Image, ImageChops, ImageStat

CLOSE = 3.0
"""Of 255, on the average: kernels of a card that add in another order, not another picture."""
APART = 4.0
"""How much closer a picture is to its own version of a checkpoint than to the other, at least."""
QUICK: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "max_sequence_length": 16}
PIECES, PIECE_PAUSE_S = 3, 0.02


def distance(one: Image.Image, other: Image.Image) -> float:
    """The mean difference of two pictures, of 255."""
    apart = ImageStat.Stat(ImageChops.difference(one.convert("RGB"), other.convert("RGB")))
    return float(sum(apart.mean) / len(apart.mean))


class Results:
    """The first result of each request, and how many differed from theirs."""

    def __init__(self, exact: bool) -> None:
        """`exact`: real models give the same bytes each time, as on a processor."""
        self.exact = exact
        self.compared = 0
        self.faults: list[str] = []
        self._first: dict[Hashable, bytes | Image.Image] = {}
        self._lock = threading.Lock()

    def same_bytes(self, request: Hashable, data: bytes | memoryview) -> None:
        """Holds bytes against those that the same request gave at first."""
        digest = hashlib.sha256(data).digest()
        with self._lock:
            known = self._first.setdefault(request, digest)
            self.compared += 1
            if known != digest:
                self.faults.append(f"other bytes than at first: {request}")

    def same_picture(self, request: Hashable, result: moored.ImageResult, exact: bool) -> None:
        """Holds a picture against the first of its request, unless memory forced an approximation."""
        if result.approximations or not result.pictures:
            return
        if exact or self.exact:
            return self.same_bytes(request, result.image.convert("RGB").tobytes())
        with self._lock:
            known = self._first.setdefault(request, result.image)
            self.compared += 1
        assert isinstance(known, Image.Image)
        if (apart := distance(known, result.image)) > CLOSE:
            with self._lock:
                self.faults.append(f"a picture {apart:.1f} of 255 from the first: {request}")
        return None


@dataclass
class Overwritten:
    """A model of which one file is overwritten while it is used, and what its pictures must be."""

    what: Rewritten
    folder: Path
    """Of all models."""
    versions: list[Image.Image] = field(default_factory=list)
    """What either version gives."""
    current: int = 0
    writes: int = 0
    """Beginnings and ends of writes: odd while one goes on."""
    judged: int = 0
    overwritten: int = 0
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, client: moored.Client) -> None:
        """Has both versions make their picture, of models that stay as they are."""
        for name in (TINY, self.what.inverted):
            made = client.generate_image("a boat", model=name, seed=1, timeout=120, **QUICK)
            self.versions.append(made.image)
        if distance(*self.versions) < 2 * CLOSE:
            raise RuntimeError(f"{self.what.name}: the versions give the same picture")

    def begin(self) -> tuple[int, int]:
        """What is to be known of the file before a request is sent."""
        with self.lock:
            return self.writes, self.current

    def judge(self, before: tuple[int, int], result: moored.ImageResult) -> None:
        """Whether a picture is of the version that was on disk when it was asked for.

        Where the file was being written at some time from then to now, it may be of either.
        """
        if result.approximations or not result.pictures:
            return
        apart = [distance(result.image, version) for version in self.versions]
        nearest = 0 if apart[0] < apart[1] else 1
        clear = APART * apart[nearest] <= apart[1 - nearest]
        with self.lock:
            undisturbed = before[0] == self.writes and before[0] % 2 == 0
            self.judged += 1
            if undisturbed and not (clear and nearest == before[1]):
                self.faults.append(
                    f"{self.what.name}, job {result.job_id}: its file has version {before[1]} since"
                    f" write {before[0] // 2}, and the picture is {apart[0]:.1f} from version 0 and"
                    f" {apart[1]:.1f} from version 1"
                )

    def overwrite(self, by_rename: bool) -> bool:
        """Puts the other version in its place; False where somebody else does so already."""
        with self.lock:
            if self.writes % 2:
                return False
            self.writes += 1
            to = 1 - self.current
        source = self.folder / (self.what.inverted if to else TINY) / self.what.file
        target, data = self.folder / self.what.name / self.what.file, source.read_bytes()
        if by_rename:
            beside = target.with_suffix(".new")
            beside.write_bytes(data)
            os.replace(beside, target)
        else:
            # As a large file is written: readers may come in the middle.
            size = len(data) // PIECES + 1
            with target.open("r+b") as file:
                for at in range(0, len(data), size):
                    file.write(data[at : at + size])
                    file.flush()
                    time.sleep(PIECE_PAUSE_S)
        with self.lock:
            self.current = to
            self.writes += 1
            self.overwritten += 1
        return True
