"""Another program that takes memory of the card and gives it back, and says what the driver tells it.

On a simulated card it is a line in the file of the card's world; on a card of NVIDIA's a process that
allocates through the driver (`on_card.py`); system memory is other programs' anyway.
"""

from __future__ import annotations

import sys
from pathlib import Path

from measures import bytes_of
from processes import Companion

NAME, PID = "soak-holder", 4321
REST_SHARE = 0.02
"""Of a card, what it holds at rests: always the same, so that states are equal, and not nothing."""


class SecondProgram:
    """On a card that it cannot touch: it does nothing and knows nothing."""

    total = 0

    @property
    def device(self) -> str:
        """What is added to the service's device for it."""
        return ""

    def hold(self, size: int) -> None:
        """Takes or gives back until it has so many bytes, as far as there is memory."""

    def rest(self) -> None:
        """Holds what it holds at rests."""
        self.hold(int(self.total * REST_SHARE) >> 21 << 21)

    def figures(self) -> dict[str, int]:
        """What the accounts of an empty card must be, by the driver; no entry: nobody knows."""
        return {}

    def end(self) -> None:
        """Gives everything back."""


class OnSimulatedCard(SecondProgram):
    """A file of holders that the card reads with each reading of its memory."""

    def __init__(self, device: str, work: Path) -> None:
        """Holds nothing yet."""
        words = device.removeprefix("sim:").split(",")
        self._options = dict(word.split("=", 1) for word in words[1:])
        self.total = bytes_of(words[0])
        self._world = work / "world.txt"
        self._held = 0
        self.hold(0)

    @property
    def device(self) -> str:
        """See SecondProgram."""
        return f",world={self._world}"

    def hold(self, size: int) -> None:
        """See SecondProgram. The card gives it what is free, and the rest as it comes free."""
        whole = self._world.with_suffix(".new")
        whole.write_text(f"{NAME} {PID} {size}B\n" if size else "", encoding="utf-8")
        whole.rename(self._world)
        self._held = size

    def figures(self) -> dict[str, int]:
        """See SecondProgram. The settings of the card are what its driver goes by."""
        context, workspaces, foreign = (
            bytes_of(self._options.get(name, "0B")) for name in ("context", "workspaces", "foreign")
        )
        held = self._held + foreign
        return {
            "total": self.total,
            "context": context,
            "workspaces": workspaces,
            "foreign": held,
            "free": self.total - context - workspaces - held,
        }

    def end(self) -> None:
        """See SecondProgram."""
        self.hold(0)


class OnCard(SecondProgram):
    """A process of its own with a context on the card; its driver's figures are of the whole card."""

    def __init__(self, device: str) -> None:
        """Starts it. Raises a RuntimeError where there is no such card."""
        script = Path(__file__).with_name("on_card.py")
        index = str(card_index(device))
        self._process = Companion([sys.executable, str(script), "--index", index])
        self.total = int(self._process.first["total"])

    def hold(self, size: int) -> None:
        """See SecondProgram."""
        self._process.ask(f"hold {size}")

    def figures(self) -> dict[str, int]:
        """See SecondProgram."""
        answer = self._process.ask("figures")
        return {"total": int(answer["total"]), "free": int(answer["free"])}

    def end(self) -> None:
        """See SecondProgram."""
        self._process.end()


def card_index(device: str) -> int:
    """The number of an NVIDIA card in `cuda:1,dtype=f32`."""
    number = device.partition(":")[2].partition(",")[0]
    return int(number) if number.isdigit() else 0


def second_program(device: str, work: Path) -> SecondProgram:
    """The one for a device of the service."""
    if device.startswith("sim:"):
        return OnSimulatedCard(device, work)
    return OnCard(device) if device.startswith("cuda") else SecondProgram()
