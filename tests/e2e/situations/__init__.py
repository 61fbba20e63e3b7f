"""What people of this field report, as data: what they have, what they do with it, and what is right.

A module of this package has rows of one kind in its `SITUATIONS`; `test_situations.py` runs them all against
one service with the shipped models. A row is an input of our own, made after what the public threads in its
`source` tell.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moored
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from service import ROOT, Service

PROMPT = "a large red circle at the top left and a small blue square in the centre on a yellow background"
SMALL = ("--seed", "5", "--steps", "2", "--width", "64", "--height", "64")
"""Options of a picture that costs little."""


@dataclass
class Place:
    """A service and its folders, which all rows of a process share: each row names files of its own."""

    root: Path
    service: Service
    client: moored.Client
    _pictures: dict[tuple[str, ...], NDArray[np.float32]] = field(default_factory=dict)

    @property
    def models(self) -> Path:
        """The folder of models."""
        return self.root / "models"

    @property
    def adapters(self) -> Path:
        """The folder of adapters."""
        return self.root / "adapters"

    @property
    def media(self) -> Path:
        """A folder of pictures and sounds, which the service does not know."""
        return self.root / "media"

    @property
    def demo(self) -> Path:
        """The shipped picture model."""
        return ROOT / "demo/model"

    def command(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A command of the program against the service; `{models}`, `{adapters}`, `{media}`: folders."""
        folders = {"models": self.models, "adapters": self.adapters, "media": self.media}
        told = [str(argument) for argument in arguments]
        for name, folder in folders.items():
            told = [argument.replace("{" + name + "}", str(folder)) for argument in told]
        return self.service.run(*told, **options)

    def picture(self, *options: str) -> NDArray[np.float32]:
        """The picture of `moored generate PROMPT` with these options, 0 to 255; each is made once."""
        if options not in self._pictures:
            output = self.root / f"picture-{len(self._pictures)}.png"
            done = self.command("generate", PROMPT, *SMALL, "-o", str(output), *options)
            assert done.returncode == 0, done.stderr
            self._pictures[options] = numbers_of(output)
        return self._pictures[options]


def numbers_of(picture: Path | Image.Image) -> NDArray[np.float32]:
    """The pixels of a picture, from 0 to 255."""
    opened = picture if isinstance(picture, Image.Image) else Image.open(picture)
    return np.asarray(opened.convert("RGB"), np.float32)


@dataclass(frozen=True)
class Same:
    """The picture is that of these other options of `moored generate`, in the mean within so many of 255."""

    options: tuple[str, ...]
    within: float = 0.0


@dataclass(frozen=True)
class Refused:
    """It ends with this exit code (`None`: any but 0) and says all of `says`, and none of `never`."""

    says: tuple[str, ...]
    exit_code: int | None = None
    never: tuple[str, ...] = ("is damaged", "panicked", "Traceback")


@dataclass(frozen=True)
class Done:
    """It succeeds and prints all of `says`, and none of `never`."""

    says: tuple[str, ...] = ()
    never: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """This function asserts it of the place, and of what the command left or the call returned."""

    holds: Callable[[Place, Any], None]


Expected = Same | Refused | Done | Check


@dataclass(frozen=True)
class Situation:
    """One row: somebody has files, does one thing, and expects one thing."""

    name: str
    """Of the test: words joined by dashes."""
    source: str
    """Public threads that tell of it (`owner/name#number`), or where the input comes from."""
    story: str
    """What people do and what goes wrong elsewhere, in a sentence."""
    expected: Expected
    generate: tuple[str, ...] | None = None
    """Options of `moored generate PROMPT`. Exactly one of `generate`, `command` and `call` is there."""
    command: tuple[str, ...] | None = None
    """Another command of the program."""
    call: Callable[[Place], Any] | None = None
    """A call of the Python client; what it raises is what it says."""
    make: Callable[[Place], None] | None = None
    """Makes the files that somebody has."""
    environment: Mapping[str, str] | None = None
    """Of the command, beside the usual."""
