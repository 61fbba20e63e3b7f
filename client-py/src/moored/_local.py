"""A service of this machine, which a program starts for its user where none is running."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from . import _address
from ._client import Client
from ._errors import NotStarted

PACKAGE = "moored-service"
PROGRAM = "moored.exe" if sys.platform == "win32" else "moored"
START_S = 120.0
# How often it is looked whether the service listens, or has ended.
_POLL_S = 0.05
_CONNECT_S = 1.0
_STOP_S = 60.0
# Of its log, in an error.
_LAST_LINES = 8

# Of programs that use a service (the name that the Griptape library gives its secret). The service
# takes every MOORED_ variable for one of its settings, and refuses this one.
_OF_CLIENTS = ("MOORED_TOKEN",)

# What this program has started. One whose standard input is closed ends: it may not be forgotten.
_started_here: list[subprocess.Popen[bytes]] = []


class LocalService:
    """A service of this machine, as `start_local_service` found or started it."""

    endpoint: str
    """Its address."""
    log: Path | None
    """The file with its messages, where this program has started it."""

    def __init__(
        self, endpoint: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None
    ) -> None:
        self.endpoint = endpoint
        self.log = log
        self._process = process

    @property
    def was_started(self) -> bool:
        """Whether this call has started it; else it was there."""
        return self._process is not None

    def stop(self) -> None:
        """Ends it once its jobs have ended, if this call has started it."""
        if self._process is not None:
            _end(self._process)

    def __repr__(self) -> str:
        return f"LocalService({self.endpoint!r}, was_started={self.was_started})"


def local_program() -> Path | None:
    """The program of moored: that of the package `moored-service`, else the one on the PATH."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        program = Path(str(file.locate()))
        if file.name == PROGRAM and program.is_file():
            return program.resolve()
    found = shutil.which(PROGRAM)
    return Path(found) if found else None


def can_start_local_service() -> bool:
    """Whether `start_local_service` has a program to start, and no other address is named."""
    return not os.environ.get("MOORED_ENDPOINT") and local_program() is not None


def local_service_listens() -> bool:
    """Whether somebody listens on this machine where programs look for a service."""
    return _listens_at(_address.DEFAULT_ENDPOINT)


def start_local_service(
    *, keep: bool = False, arguments: Sequence[str] = (), timeout_s: float = START_S
) -> LocalService:
    """Starts a service on this machine, unless one answers; returns once it is ready.

    It listens where programs look for one, at 127.0.0.1:50051, as `moored serve` does, and all
    programs of the machine share it: several that start one at the same time get the same. With
    MOORED_ENDPOINT set nothing is started. It ends with this program, or with `keep` it goes on.
    `arguments` are further ones of `moored serve`. Blocks; in asyncio call it by `to_thread`.

    Raises NotStarted, with what to do.
    """
    endpoint = _address.DEFAULT_ENDPOINT
    if os.environ.get("MOORED_ENDPOINT"):
        raise NotStarted(
            "MOORED_ENDPOINT names the service to use, so none is started here: unset it, or "
            "start that one"
        )
    if _listens_at(endpoint):
        # A program that is starting it has the lock until it is ready.
        with contextlib.suppress(NotStarted, OSError), _one_at_a_time():
            pass
        return LocalService(endpoint)
    program = local_program()
    if program is None:
        raise NotStarted(
            f"There is no program to start a service with: install the package {PACKAGE} for "
            f"{sys.executable}, or put `moored` on the PATH"
        )
    until = time.monotonic() + timeout_s
    with _one_at_a_time() as folder:
        if _listens_at(endpoint):
            return LocalService(endpoint)
        log = folder / "started.log"
        process = _started(program, endpoint, keep, arguments, log)
        try:
            _wait_for(process, endpoint, until, log)
        except BaseException:
            _end(process)
            raise
    return LocalService(endpoint, process, log)


def _started(
    program: Path, endpoint: str, keep: bool, arguments: Sequence[str], log: Path
) -> subprocess.Popen[bytes]:
    command = [str(program), "serve", "--listen", endpoint, *arguments]
    command += [] if keep else ["--end-with-stdin"]
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env={name: value for name, value in os.environ.items() if name not in _OF_CLIENTS},
                stdin=subprocess.DEVNULL if keep else subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for this program: the service ends when this one has.
                start_new_session=True,
            )
    except OSError as error:
        raise NotStarted(f"{program} cannot be started: {error.strerror or error}") from None
    _started_here.append(process)
    return process


def _wait_for(process: subprocess.Popen[bytes], endpoint: str, until: float, log: Path) -> None:
    """Waits until it listens and a card is ready."""
    while not _listens_at(endpoint):
        if process.poll() is not None:
            raise NotStarted(
                f"The service ended as soon as it was started: {_last_lines(log)} "
                "(`moored doctor` checks this machine)"
            )
        if time.monotonic() > until:
            raise NotStarted(f"The service was started and does not answer: see {log}")
        time.sleep(_POLL_S)
    with Client(endpoint) as client:
        client.wait_until_ready(max(until - time.monotonic(), _CONNECT_S))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process as the service is to be ended, and waits for that."""
    if process.stdin is not None:
        process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process in _started_here:
        _started_here.remove(process)


def _listens_at(endpoint: str) -> bool:
    """Whether somebody does at the address."""
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_S):
            return True
    except OSError:
        return False


def _state_folder() -> Path:
    """Where the service keeps its own files, made if it is not there."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
        folder = folder / "moored"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} may not be written to")
    except (OSError, RuntimeError) as error:
        raise NotStarted(
            f"There is no folder for the service's files: {error}; set XDG_STATE_HOME to one"
        ) from None
    return folder


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[Path]:
    """Waits until no other program of this user is starting a service; gives the state folder."""
    folder = _state_folder()
    if sys.platform == "win32":
        yield folder  # of two that start at the same time the second finds the port taken, and ends
        return
    import fcntl

    with (folder / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _last_lines(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    return " | ".join(text.splitlines()[-_LAST_LINES:]) or "it said nothing"
