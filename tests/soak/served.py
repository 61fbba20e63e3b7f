"""The service under test: its process, its worker's, and what its log says of jobs."""

from __future__ import annotations

import json
import subprocess
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from service import Service

# The last lines, for whoever looks into a fault.
KEPT_LINES = 400
KEPT_WARNINGS = 2000

STALL_S = 12
"""A worker that is stopped is found soon; one on a busy machine is not taken for hung."""
STALL_ON_CARD_S = 60
"""A real card loads libraries and kernels, and makes plans, for a first picture."""
SETTINGS = (
    "queue.stall_floor=6s",
    # States at rests are to be equal: what is kept is little, and soon full.
    "queue.text_cache=4MiB",
    # Longer than any action takes, deaths of workers included.
    "queue.latent_ttl=3m",
    "queue.patience_foreign=3s",
    "log.format=json",
)


class Served(Service):
    """A running `moored serve` whose log is read for what it says of jobs."""

    # A real card's driver takes its time with both.
    START_S = 90.0
    STOP_S = 45.0

    def __init__(
        self,
        binary: Path,
        device: str,
        models: Sequence[Path],
        work: Path,
        settings: Sequence[str] = (),
    ) -> None:
        """Starts it and waits until it listens; with these settings beside those of a soak."""
        self.accepted: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.states: dict[str, str] = {}
        self.panics: list[str] = []
        self.errors: list[str] = []
        self.warnings: deque[str] = deque(maxlen=KEPT_WARNINGS)
        self._log_file = (work / "service.log").open("w", encoding="utf-8")
        stall_s = STALL_ON_CARD_S if device.startswith("cuda") else STALL_S
        limits = (f"queue.stall_limit={stall_s}s", f"queue.cancel_limit={stall_s}s")
        arguments = [word for folder in models for word in ("--models", str(folder))]
        arguments += [
            word for setting in (*SETTINGS, *limits, *settings) for word in ("--set", setting)
        ]
        super().__init__(*arguments, state=work / "state", devices=(device,), binary=binary)

    def _heed(self, line: str) -> None:
        """See Service. Of the log of hours the last lines are kept here, and all of them in the file."""
        self.log.append(line)
        del self.log[:-KEPT_LINES]
        self._log_file.write(line)
        try:
            entry = json.loads(line)
        except ValueError:
            if "panicked" in line:
                self.panics.append(line.strip())
        else:
            self._heed_entry(entry, line)

    def _heed_entry(self, entry: dict[str, object], line: str) -> None:
        fields = entry.get("fields")
        if not isinstance(fields, dict):
            return
        message, job = fields.get("message"), fields.get("job")
        if message == "moored is listening":
            self.address = str(fields["address"])
        elif message == "accepted" and job:
            self.accepted[str(job)] += 1
        elif message in ("done", "ended") and job and "total" in fields:
            self.ended[str(job)] += 1
            self.states[str(job)] = str(message)
        if entry.get("level") == "ERROR":
            self.errors.append(line.strip())
        elif entry.get("level") == "WARN":
            self.warnings.append(line.strip())

    def stop(self) -> int:
        """Drains it; its exit code, negative where it had to be ended."""
        with suppress(subprocess.TimeoutExpired):
            super().stop()
        self._log_file.flush()
        return int(self.process.returncode)
