"""Where the service is, and the one thread of this pack that speaks to it.

ComfyUI runs every prompt in an event loop of its own, and a gRPC channel dies with the loop that it was made
in. So all calls, of nodes and of routes, go through one background thread with one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import folder_paths
import moored

T = TypeVar("T")

ENDPOINT_SETTING = "moored.endpoint"
TOKEN_FILE_SETTING = "moored.token_file"
UNLOAD_OWN_MODELS_SETTING = "moored.unload_own_models"
START_SETTING = "moored.start_service"
# What it may be; any other value, and none, is the first.
WHILE_COMFYUI_RUNS, KEEP, NEVER = "while ComfyUI runs", "keep it running", "never"

# The folder of ComfyUI's user directory that token files named in the settings lie in.
TOKEN_FOLDER = "moored"

# In ComfyUI's user directory: jobs that outlive ComfyUI.
UNFINISHED_FILE = "moored-unfinished.json"

# A token is a line of text. What is longer is another file, and must not leave this machine.
TOKEN_AT_MOST_CHARACTERS = 4096


@dataclass(frozen=True)
class Server:
    """What the node Server says: the address of a service, as it was typed; empty: the usual one."""

    endpoint: str = ""


@dataclass(frozen=True)
class Target:
    """A service, and the settings of the connection to it.

    `token` is None where nobody named one: then it is what the client keeps for that address.
    """

    endpoint: str
    token: str | None = None

    def __repr__(self) -> str:
        # A token in a traceback would be a token in a log.
        return f"Target({self.endpoint!r})"


def target(server: Server | None = None) -> Target:
    """The service that a node means: its own input, else ComfyUI's settings, else the environment.

    A token goes to its own service: that of the environment to the one that the environment names, one
    that `moored token use` keeps to its address, and that of the settings to the one that it was first
    used for. Workflows come from strangers, and everybody who opens ComfyUI's page may write its
    settings: neither leads a token elsewhere.
    """
    settings = _settings()
    usual = _address(str(settings.get(ENDPOINT_SETTING) or "").strip())
    named = _address(server.endpoint.strip()) if server and server.endpoint.strip() else usual
    if named != usual:
        return Target(named)
    set_file = str(settings.get(TOKEN_FILE_SETTING) or "").strip()
    # Read here, each time: a client reads its file once, and however long it is.
    if set_file:
        return Target(named, moored.bound_token(named, _token(str(_in_token_folder(set_file)))))
    if named != _address(""):
        return Target(named)
    token_file = os.environ.get("MOORED_TOKEN_FILE", "")
    return Target(named, _token(token_file) if token_file else None)


def is_on_this_machine(target: Target) -> bool:
    """Whether the service is on ComfyUI's machine, by its address: a socket, or one of loopback."""
    if target.endpoint.startswith("unix:"):
        return True
    host = target.endpoint.removeprefix("https://").rpartition(":")[0].strip("[]").lower()
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name


def unloads_own_models() -> bool:
    """Whether ComfyUI unloads its own models for a job that waits for their memory: so by default."""
    return _settings().get(UNLOAD_OWN_MODELS_SETTING) is not False


def is_left_open(target: Target) -> bool:
    """Whether it is the usual service, and neither the settings nor the environment name one."""
    named = str(_settings().get(ENDPOINT_SETTING) or "").strip() or os.environ.get(
        "MOORED_ENDPOINT"
    )
    return not named and target.endpoint == _address("")


def start_setting() -> str | None:
    """How a service is started where none answers; None: it is not."""
    chosen = _settings().get(START_SETTING)
    if chosen == NEVER:
        return None
    return KEEP if chosen == KEEP else WHILE_COMFYUI_RUNS


async def run(work: Callable[[moored.AsyncClient], Awaitable[T]], target: Target) -> T:
    """Awaits `work(client)` on the pack's thread, from any event loop.

    Cancelling the task that awaits this cancels the work.
    """
    return await asyncio.wrap_future(start_with_client(work, target))


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Starts `work` on the pack's thread and does not wait."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def start_with_client(
    work: Callable[[moored.AsyncClient], Awaitable[T]], target: Target
) -> Future[T]:
    """Starts `work(client)` on the pack's thread and does not wait."""
    return start(with_client(work, target))


def client_id() -> str:
    """Who asks, for fair shares and for holds: this process of ComfyUI."""
    return f"comfyui-{socket.gethostname()}-{os.getpid()}"


# The thread.

# The collector may end a handle, and so come here, while its thread is here already.
_starting = threading.RLock()
_running: asyncio.AbstractEventLoop | None = None


def _loop() -> asyncio.AbstractEventLoop:
    """The loop of the pack's thread, which starts when it is first needed."""
    global _running
    with _starting:
        if _running is None:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True, name="moored").start()
            _running = loop
        return _running


# Clients, in the pack's thread alone.

_clients: dict[Target, moored.AsyncClient] = {}


async def with_client(work: Callable[[moored.AsyncClient], Awaitable[T]], target: Target) -> T:
    """Awaits `work(client)`, in the pack's thread. Where it cannot connect, later work gets a new client."""
    client = _client_of(target)
    try:
        return await work(client)
    except (moored.ConnectionFailed, moored.Unauthenticated):
        _forget(target, client)
        raise


async def attempt(work: Callable[[moored.AsyncClient], Awaitable[T]], target: Target) -> T | None:
    """As `with_client`, for what the service would do by itself in time: None where it fails."""
    with contextlib.suppress(moored.MooredError):
        return await with_client(work, target)
    return None


def _client_of(target: Target) -> moored.AsyncClient:
    if target not in _clients:
        _clients[target] = moored.AsyncClient(
            target.endpoint,
            token=target.token,
            client_id=client_id(),
            unfinished=Path(folder_paths.get_user_directory()) / UNFINISHED_FILE,
        )
    return _clients[target]


def _forget(target: Target, client: moored.AsyncClient) -> None:
    # A channel that lost its service waits before it dials again, and a token is read once: the next prompt
    # gets a new client. This one is not closed: others may still read from it. It goes when nobody does.
    if _clients.get(target) is client:
        del _clients[target]


# Settings.


def _settings() -> dict[str, Any]:
    """ComfyUI's settings of its default user; none where there are none."""
    path = Path(folder_paths.get_user_directory()) / "default" / "comfy.settings.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _in_token_folder(named: str) -> Path:
    """The token file that the settings name: one that lies in the folder for them.

    Whoever opens ComfyUI's page may write its settings, the address too: any other file would be
    one that they can have sent to them.
    """
    folder = Path(folder_paths.get_user_directory()) / TOKEN_FOLDER
    file = folder / _with_home(named)
    try:
        lies_there = file.resolve().parent == folder.resolve()
    except (OSError, RuntimeError, ValueError):
        lies_there = False  # no file can have this name, or its links go round in a ring
    if not lies_there:
        raise moored.Unauthenticated(
            f"The token file of the settings has to lie in {folder}: put it there and write its name "
            f"alone, or set MOORED_TOKEN_FILE where ComfyUI is started. {named} is not read"
        )
    return file


def _address(endpoint: str) -> str:
    """An endpoint as the client spells it; empty: MOORED_ENDPOINT, else localhost."""
    if endpoint.strip().lower().startswith("unix:"):
        raise moored.InvalidRequest(
            f"{endpoint} is a socket of this machine, which a workflow or a setting may not name: set "
            "MOORED_ENDPOINT where ComfyUI is started"
        )
    return moored.AsyncClient(endpoint or None, token="").endpoint


def _with_home(path: str) -> Path:
    """The path, with `~` as the home; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def _token(path: str) -> str:
    file = _with_home(path)
    try:
        if file.exists() and not file.is_file():
            raise moored.Unauthenticated(f"The token file {path} is no file with text in it")
        with file.open(encoding="utf-8") as opened:
            text = opened.read(TOKEN_AT_MOST_CHARACTERS + 2).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise moored.Unauthenticated(f"The token file {path} cannot be read: {reason}") from error
    if len(text) > TOKEN_AT_MOST_CHARACTERS or not (text.isascii() and text.isprintable()):
        raise moored.Unauthenticated(
            f"The token file {path} is not one line of plain letters, digits and signs, as a token is"
        )
    return text
