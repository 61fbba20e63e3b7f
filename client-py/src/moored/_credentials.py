"""Tokens and fingerprints that are kept for services, each for one address.

`moored token use` keeps them in a file that only its owner may read. A token goes to the address
that it was kept for, and to no other one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._address import endpoint_of
from ._errors import Unauthenticated
from ._files import TEXT_BYTES, read_regular, with_home

_VERSION = 1
# The rights of others in the mode of a file.
_OF_OTHERS = 0o077


@dataclass(frozen=True)
class Credential:
    """What is kept of one service; both are empty where nothing is."""

    token: str = ""
    fingerprint: str = ""

    def __repr__(self) -> str:
        # A token in a traceback would be a token in a log.
        return "Credential()"


def credentials_file() -> Path | None:
    """MOORED_CREDENTIALS, else the file of this user; None where there is no home."""
    named = os.environ.get("MOORED_CREDENTIALS")
    if named:
        return with_home(named)
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "moored" / "credentials.json"
    base = os.environ.get("XDG_CONFIG_HOME", "")
    folder = Path(base) if base.startswith("/") else home / ".config"
    return folder / "moored" / "credentials.json"


def kept_for(endpoint: str) -> Credential:
    """What is kept for a service, by its address as `Client.endpoint` has it."""
    file = credentials_file()
    if file is None or not _is_there(file):
        return Credential()
    kept = _read(file).get("endpoints")
    found = kept.get(_key(endpoint)) if isinstance(kept, dict) else None
    if not isinstance(found, dict):
        return Credential()
    return Credential(str(found.get("token", "")), str(found.get("fingerprint", "")))


def bound_token(endpoint: str | None, token: str) -> str:
    """The token, if it belongs to this service; else Unauthenticated.

    For programs whose address and token come from settings that others may write. The address is
    written as for a client. A token belongs to the service that it was first used for here, or that
    `moored token use` keeps it for.
    """
    endpoint = endpoint_of(endpoint)
    if not token or kept_for(endpoint).token == token:
        return token
    file = credentials_file()
    if file is None:
        raise Unauthenticated(
            "There is no home folder to keep what a token was used for: set MOORED_CREDENTIALS"
        )
    record = file.with_name("tokens-used.json")
    digest, key = hashlib.sha256(token.encode()).hexdigest(), _key(endpoint)
    used = _read(record) if _is_there(record) else {}
    endpoints = used.get("endpoints", {}) if isinstance(used.get("endpoints", {}), dict) else {}
    belongs_to = endpoints.get(digest)
    if belongs_to is None:
        _write(record, {"version": _VERSION, "endpoints": {**endpoints, digest: key}})
    elif belongs_to != key:
        raise Unauthenticated(
            f"The token was not sent to {key}: it belongs to {belongs_to}, for which it was used "
            f"before. To use it for this one, run `moored token use FILE --endpoint {key}` on this "
            "machine"
        )
    return token


def _is_there(file: Path) -> bool:
    # A home may be that of another account, and not be looked into.
    try:
        return file.exists()
    except OSError:
        return False


def _key(endpoint: str) -> str:
    """`https://host:port` or `http://host:port`, as the command line writes it."""
    if endpoint.startswith("unix:"):
        return endpoint
    address = endpoint.lower()
    return address if "://" in address else f"http://{address}"


def _read(file: Path) -> dict[str, Any]:
    try:
        if os.name == "posix" and file.stat().st_mode & _OF_OTHERS:
            raise Unauthenticated(
                f"Other users may read {file}: take that right away (chmod 600 {file})"
            )
        read = json.loads(read_regular(file, TEXT_BYTES))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Unauthenticated(f"{file} cannot be read: {reason}") from None
    if not isinstance(read, dict) or read.get("version") != _VERSION:
        raise Unauthenticated(
            f"{file} is of a version that this client does not know: use a newer one"
        )
    return read


def _write(file: Path, value: dict[str, Any]) -> None:
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(value, out)
        new.replace(file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Unauthenticated(
            f"The token was not sent: {file}, which keeps what it was used for, cannot be written: "
            f"{reason}"
        ) from None
