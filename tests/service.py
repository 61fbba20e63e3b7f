"""What everything that runs the real binary shares: it is started as a user would start it.

Services listen on a free port of loopback, keep their state in a folder of their own, and end when the
test process does (`--end-with-stdin`), however that happens.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored

ROOT = Path(__file__).resolve().parents[1]
BINARY = Path(os.environ.get("MOORED_BINARY", ROOT / "target/debug/moored"))
INSTANT_MODELS = ROOT / "tests/models/instant"
START_TIMEOUT_S = 60
LOG_TIMEOUT_S = 60


def model_as(folder: Path, base: str, name: str, **changes: Any) -> Path:
    """A folder of models, made in `folder`, with `name`: as the instant model `base`, but for the changes."""
    models = folder / "models"
    models.mkdir()
    model = json.loads((INSTANT_MODELS / f"{base}.instant.json").read_text(encoding="utf-8"))
    model |= {"name": name, **changes}
    (models / f"{name}.instant.json").write_text(json.dumps(model), encoding="utf-8")
    return models


def slower_model(folder: Path, steps_ms: int) -> Path:
    """A folder of models, made in `folder`, with `slower`: as `slow`, with steps that take this long."""
    return model_as(folder, "slow", "slower", steps_ms=steps_ms)


class ReservedPort:
    """A port of loopback that is given to nobody else while this is there, but to who asks for it by number.

    A socket is bound to it that never listens: others get neither the port nor an answer there.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        # With it, a server that sets the same may listen there: all that we start do.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.number = int(self._socket.getsockname()[1])
        self.address = f"127.0.0.1:{self.number}"

    def __del__(self) -> None:
        self._socket.close()


class Service:
    """A running `moored serve`."""

    START_S = float(START_TIMEOUT_S)
    """Seconds until it must listen."""
    STOP_S = 30.0
    """Seconds in which it must end."""

    def __init__(
        self,
        *arguments: str,
        state: Path,
        devices: tuple[str, ...] = ("cpu",),
        listen: str | None = None,
        binary: Path = BINARY,
        folder: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Starts it and waits until it listens; of no devices, on those that it finds."""
        # For as long as this is there: whoever follows at the same address must find it free.
        self._port = ReservedPort() if listen is None else None
        at = self._port.address if self._port else str(listen)
        command = [str(binary), "serve", "--listen", at, "--end-with-stdin"]
        command += ["--state", str(state)]
        for device in devices:
            command += ["--device", device]
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._listening = threading.Event()
        self.address = ""
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment() if environment is None else environment,
            cwd=folder,
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._listening.wait(self.START_S) or not self.address:
            self.kill()
            raise AssertionError("the service did not start:\n" + "".join(self.log))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._logged:
                self._heed(line)
                self._logged.notify_all()
            if self.address:
                self._listening.set()
        self._listening.set()

    def _heed(self, line: str) -> None:
        """Takes a line of the log; the one that says so has the address."""
        self.log.append(line)
        if found := re.search(r"moored is listening address=(\S+)", line):
            self.address = found[1]

    def wait_for_log(self, so: Callable[[], bool]) -> None:
        """Waits until the log is so: what has been written of it may not have been read yet."""
        with self._logged:
            assert self._logged.wait_for(so, LOG_TIMEOUT_S), "".join(self.log)

    def client(self, **options: Any) -> moored.Client:
        """A client of this service, once a card is ready."""
        client = moored.Client(self.address, **options)
        client.wait_until_ready(START_TIMEOUT_S)
        return client

    def run(self, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        """A command of the same binary against this service."""
        return run(*arguments, "--endpoint", f"http://{self.address}", **options)

    def stop(self) -> int:
        """Closes its standard input, which drains it; the exit code. One that does not end is an error."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            return self.process.wait(self.STOP_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(10)


def as_told(label: str, model: str) -> dict[str, Any]:
    """The options of a request that a fallback's label asks for."""
    words = label.split()
    if words[0] != "quantization":
        width, height = (int(side) for side in label.split("x"))
        return {"model": model, "width": width, "height": height}
    if "=" in words[1]:
        formats = dict(each.split("=") for each in words[1].split(","))
        return {"model": moored.ModelRef(model, formats=formats)}
    return {"model": moored.ModelRef(model, quantization=words[1])}


def write_secret(file: Path, text: str) -> None:
    """A token or a key as the service takes it: nobody else may read it."""
    file.write_text(text, encoding="utf-8")
    file.chmod(0o600)


def clean_environment() -> dict[str, str]:
    """The environment without settings of a user's own, nor models of a hub; see `e2e/hub.py`."""
    foreign = ("MOORED_", "HF_", "HUGGING")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    clean["HF_HUB_CACHE"] = str(ROOT / "target/no-hub-cache")
    clean["HF_HUB_OFFLINE"] = "1"
    clean["MOORED_CREDENTIALS"] = str(ROOT / "target/no-credentials.json")
    return clean


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A command of the binary."""
    return _run([str(BINARY), *arguments], options)


def run_with_a_full_disk(
    *arguments: str, most_bytes: int = 0, **options: object
) -> subprocess.CompletedProcess[str]:
    """A command that can write no file of more bytes; pipes take what they are given.

    A shell sets that: between fork and exec Python would run in a process that has lost gRPC's threads, and
    gRPC aborts there.
    """
    limited = f'trap \'\' XFSZ; ulimit -f {most_bytes // 512}; exec "$0" "$@"'
    return _run(["sh", "-c", limited, str(BINARY), *arguments], options)


def _run(command: list[str], options: dict[str, object]) -> subprocess.CompletedProcess[str]:
    settings: dict[str, object] = {
        "capture_output": True,
        "text": True,
        "timeout": 120,
        "env": clean_environment(),
    }
    return subprocess.run(command, **(settings | options))  # type: ignore[call-overload]
