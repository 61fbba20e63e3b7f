"""Where the service is, how it is spoken to, and by which name and token."""

from __future__ import annotations

import os
from pathlib import Path

from ._errors import Unauthenticated
from ._version import __version__

DEFAULT_ENDPOINT = "localhost:50051"
DEFAULT_PORT = 50051
MAX_MESSAGE_BYTES = 256 * 1024 * 1024

QUICK_S = 30.0
"""Timeout in seconds of calls that wait for nothing but the service itself."""

RETRY_S = 0.1
"""Seconds between two attempts to hear of the service's health."""

Metadata = tuple[tuple[str, str], ...]


def endpoint_of(endpoint: str | None) -> str:
    """The address to dial: the argument, else MOORED_ENDPOINT, else localhost:50051."""
    address = endpoint or os.environ.get("MOORED_ENDPOINT") or DEFAULT_ENDPOINT
    if address.startswith("https://"):
        raise ValueError(
            f"{address}: moored speaks plain HTTP/2. Reach a distant service through a tunnel, "
            "and name the tunnel's end on this machine."
        )
    if address.startswith("unix:"):
        return address
    address = address.removeprefix("http://").rstrip("/")
    host, colon, _ = address.rpartition(":")
    named_port = bool(colon) and not address.endswith("]") and (":" not in host or "]" in host)
    if named_port:
        return address
    if address.count(":") > 1 and not address.startswith("["):
        address = f"[{address}]"
    return f"{address}:{DEFAULT_PORT}"


def metadata_of(token: str | None, token_file: str | os.PathLike[str] | None) -> Metadata:
    """What goes with every call. The token: the argument, else the file, else MOORED_TOKEN_FILE."""
    whose = "The token"
    if token is None:
        path = token_file or os.environ.get("MOORED_TOKEN_FILE")
        if not path:
            return ()
        try:
            token = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise Unauthenticated(f"The token file {path} cannot be read: {reason}") from error
        whose = f"The token in {path}"
    if not (token.isascii() and token.isprintable()):
        # gRPC would refuse each call, and print the token.
        raise Unauthenticated(f"{whose} is not one line of plain letters, digits and signs")
    return (("authorization", f"Bearer {token}"),)


def options_for(endpoint: str) -> list[tuple[str, str | int]]:
    """The channel's options."""
    options: list[tuple[str, str | int]] = [
        ("grpc.primary_user_agent", f"moored-python/{__version__}"),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A stream may be silent for minutes, in a queue: a dead peer is noticed all the same.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A service that was restarted is found again within two seconds, not two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Two clients of one process do not share a connection: closing one must not slow the other.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if _is_loopback(endpoint):
        # gRPC heeds http_proxy even for localhost, unless no_proxy says otherwise.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0]
    return host in ("localhost", "[::1]", "unix") or host.startswith(("127.", "unix:"))
