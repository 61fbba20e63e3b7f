"""The service under test: its process, its worker's, and what its log says of jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

START_S = 90.0
STOP_S = 45.0
# The last lines, for whoever looks into a fault.
KEPT_LINES = 400
KEPT_WARNINGS = 2000

FOREIGN = ("MOORED_", "HF_", "HUGGING")

STALL_S = 12
"""A worker that is stopped is found soon; one on a busy machine is not taken for hung."""
STALL_ON_CARD_S = 60
"""The driver of a real card compiles kernels for a first picture."""
SETTINGS = (
    "queue.stall_floor=6s",
    # States at rests are to be equal: what is kept is little, and soon full.
    "queue.text_cache=4MiB",
    # Longer than any action takes, deaths of workers included.
    "queue.latent_ttl=3m",
    "queue.patience_foreign=3s",
    "log.format=json",
)


class Served:
    """A running `moored serve` that ends when this process does."""

    def __init__(self, binary: Path, device: str, models: Sequence[Path], work: Path) -> None:
        """Starts it and waits until it listens. Raises a RuntimeError with its log if it does not."""
        command = [str(binary), "serve", "--listen", "127.0.0.1:0", "--end-with-stdin"]
        command += ["--state", str(work / "state"), "--device", device]
        for folder in models:
            command += ["--models", str(folder)]
        stall_s = STALL_ON_CARD_S if device.startswith("cuda") else STALL_S
        limits = (f"queue.stall_limit={stall_s}s", f"queue.cancel_limit={stall_s}s")
        for setting in (*SETTINGS, *limits):
            command += ["--set", setting]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        environment |= {"HF_HUB_CACHE": str(work / "no-hub"), "HF_HUB_OFFLINE": "1"}
        self.address = ""
        self.accepted: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.states: dict[str, str] = {}
        self.panics: list[str] = []
        self.errors: list[str] = []
        self.warnings: deque[str] = deque(maxlen=KEPT_WARNINGS)
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self._listening = threading.Event()
        self._log = (work / "service.log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._listening.wait(START_S) or not self.address:
            self.stop()
            raise RuntimeError("the service did not start:\n" + "".join(self.last))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.last.append(line)
            self._log.write(line)
            try:
                entry = json.loads(line)
            except ValueError:
                if "panicked" in line:
                    self.panics.append(line.strip())
                continue
            self._heed(entry, line)
        self._listening.set()

    def _heed(self, entry: dict[str, object], line: str) -> None:
        fields = entry.get("fields")
        if not isinstance(fields, dict):
            return
        message, job = fields.get("message"), fields.get("job")
        if message == "moored is listening":
            self.address = str(fields["address"])
            self._listening.set()
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
        """Closes its standard input, which drains it; its exit code, negative where it had to be ended."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
        self._reader.join(10)
        self._log.flush()
        return self.process.returncode
