"""The address of a service, as it is written."""

from __future__ import annotations

import ipaddress
import os
import re

from ._errors import InvalidRequest

# Not a name: another account of this machine could listen at the other address that localhost has.
DEFAULT_ENDPOINT = "127.0.0.1:50051"
DEFAULT_PORT = 50051
HTTPS = "https://"
HTTPS_PORT = 443

# Of gRPC's own spellings of addresses, those that are no host and port.
_OTHER_SCHEMES = ("unix-abstract:", "vsock:", "ipv4:", "ipv6:", "dns:", "xds:", "passthrough:")


def endpoint_of(endpoint: str | None) -> str:
    """The address as it is written out: the argument, else MOORED_ENDPOINT, else 127.0.0.1:50051.

    `https://host:port` where it is to be TLS, else `host:port` or `unix:path`. The command line
    reads addresses by the same rule (`service/config/src/address.rs`); `tests/addresses.json` holds
    both to it.
    """
    address = (endpoint or os.environ.get("MOORED_ENDPOINT") or DEFAULT_ENDPOINT).strip()
    if not address.isprintable():
        raise InvalidRequest(
            f"{address!r} is no address of a service: it has characters that no address has"
        )
    if address.startswith("unix:"):
        return address
    if address.lower().startswith(_OTHER_SCHEMES):
        raise InvalidRequest(
            f"{address} is no address of a service: write host:port or https://host:port"
        )
    scheme, named, rest = address.partition("://")
    if not named:
        bare = f"[{address}]" if _is_ipv6(address) else address
        return _with_port(bare, DEFAULT_PORT, address)
    match scheme.lower():
        case "https":
            return HTTPS + _with_port(rest.rstrip("/"), HTTPS_PORT, address)
        case "http":
            return _with_port(rest.rstrip("/"), DEFAULT_PORT, address)
    raise InvalidRequest(
        f"{address}: write host:port, https://host:port for TLS, or unix:path for a socket"
    )


_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,9}))?")


def _with_port(text: str, port: int, written: str) -> str:
    """A host and its port, else this one."""
    found = _HOST_AND_PORT.fullmatch(text)
    named = int(found[2] or port) if found else 0
    if (
        not found
        or not 0 < named < 1 << 16
        or (found[1].startswith("[") and not _is_ipv6(found[1][1:-1]))
    ):
        raise InvalidRequest(
            f"{written} is no address of a service: write host:port or https://host:port"
        )
    return f"{found[1]}:{named}"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
