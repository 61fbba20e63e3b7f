"""Situations that people of this field report: each is a row of `situations`, tried on the real program."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
from collections.abc import Iterator
from typing import Any

import moored
import numpy as np
import pytest
import situations
from situations import PROMPT, SMALL, Check, Done, Place, Refused, Same, Situation

from service import Service, clean_environment

EVERY: list[Situation] = [
    row
    for module in pkgutil.iter_modules(situations.__path__)
    for row in getattr(importlib.import_module(f"situations.{module.name}"), "SITUATIONS", ())
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("situations")
    for name in ("models", "adapters", "media"):
        (root / name).mkdir()
    service = Service(
        *("--models", str(root / "models")),
        *("--set", f'models.adapters=["{root / "adapters"}"]'),
        state=root / "state",
    )
    with service.client() as client:
        yield Place(root, service, client)
    assert service.stop() == 0


def test_every_situation_has_a_name_of_its_own() -> None:
    names = [row.name for row in EVERY]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_situation(place: Place, row: Situation) -> None:
    ways = [row.generate, row.command, row.call]
    assert sum(way is not None for way in ways) == 1, "a row does one thing"
    if row.make:
        row.make(place)
    match row.expected:
        case Same(options, within):
            assert row.generate is not None, "a picture is compared"
            difference = float(
                np.abs(place.picture(*row.generate) - place.picture(*options)).mean()
            )
            assert difference <= within, f"{difference} of 255 from the right picture"
        case Refused(says, exit_code, never):
            code, told = outcome(place, row)
            assert code != 0, f"it was taken: {told}"
            assert exit_code in (None, code), f"{code}: {told}"
            holds(told, says, never)
        case Done(says, never):
            code, told = outcome(place, row)
            assert code == 0, told
            holds(told, says, never)
        case Check(check):
            check(place, row.call(place) if row.call else carried_out(place, row))


def carried_out(place: Place, row: Situation) -> subprocess.CompletedProcess[str]:
    """What the command of a row did."""
    environment = clean_environment() | dict(row.environment or {})
    if row.command is not None:
        return place.command(*row.command, env=environment)
    output = place.root / f"{row.name}.png"
    options = row.generate or ()
    return place.command("generate", PROMPT, *SMALL, "-o", str(output), *options, env=environment)


def outcome(place: Place, row: Situation) -> tuple[int, str]:
    """The exit code of a row's command, and all that it printed; of a call 0, or 1 and its error."""
    if row.call is None:
        done = carried_out(place, row)
        return done.returncode, done.stdout + done.stderr
    try:
        returned: Any = row.call(place)
    except (moored.MooredError, TypeError, ValueError) as error:
        return 1, f"{type(error).__name__}: {error}"
    return 0, repr(returned)


def holds(told: str, says: tuple[str, ...], never: tuple[str, ...]) -> None:
    """Holds a text to the parts that it must have and must not have, however its lines are broken."""
    words = " ".join(told.split())
    for part in says:
        assert part in words, f"{part!r} is missing: {told}"
    for part in never:
        assert part not in words, f"{part!r} is there: {told}"
