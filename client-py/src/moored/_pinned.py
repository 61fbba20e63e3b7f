"""Certificates that are known by their fingerprint.

gRPC for Python asks nobody about a certificate. So it is fetched first, held against the
fingerprint, and is then the only one that the channel trusts.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from ._errors import ConnectionFailed, InvalidRequest

_CONNECT_S = 5.0
_DIGITS = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


@dataclass(frozen=True)
class Pinned:
    """A certificate as gRPC takes it."""

    pem: bytes
    name: str
    """One of the names in it: gRPC compares one."""


def fingerprint_of(text: str) -> str:
    """64 digits of a fingerprint as the service prints it, or openssl with its colons."""
    found = _DIGITS.fullmatch(text.strip().lower().replace("sha256:", "").replace(":", ""))
    if not found:
        raise InvalidRequest(
            f"{text!r} is no SHA-256 fingerprint: write sha256: and 64 digits (0-9, a-f), as the "
            "service prints it"
        )
    return found[1]


def pinned(target: str, endpoint: str, digits: str) -> Pinned:
    """The certificate of the service at `host:port`, which must have this fingerprint."""
    host, _, port = target.rpartition(":")
    address = (host.strip("[]"), int(port))
    try:
        unknown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unknown.check_hostname = False
        unknown.verify_mode = ssl.CERT_NONE
        der, _ = _certificate(address, unknown)
        found = hashlib.sha256(der).hexdigest()
        if found != digits:
            raise ConnectionFailed(
                f"The certificate of {endpoint} is not the expected one: its fingerprint is "
                f"sha256:{found}. If the service got a new certificate, ask who runs it; else "
                "something in between answers in its place",
                cause="certificate",
                endpoint=endpoint,
            )
        pem = ssl.DER_cert_to_PEM_cert(der)
        # Only of a certificate that is trusted are the names told.
        known = ssl.create_default_context(cadata=pem)
        known.check_hostname = False
        known.verify_flags = ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        _, told = _certificate(address, known)
    except ssl.SSLError as error:
        cause = "no_tls" if "WRONG_VERSION_NUMBER" in str(error) else "certificate"
        said = "answers without TLS" if cause == "no_tls" else f"cannot be trusted: {error.reason}"
        raise ConnectionFailed(f"{endpoint} {said}", cause=cause, endpoint=endpoint) from None  # type: ignore[arg-type]
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConnectionFailed(
            f"No service answers at {endpoint}: {reason}", cause="unreachable", endpoint=endpoint
        ) from None
    return Pinned(pem.encode(), _name(told) or address[0])


def _certificate(address: tuple[str, int], context: ssl.SSLContext) -> tuple[bytes, dict[str, Any]]:
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(address, _CONNECT_S) as plain,
        context.wrap_socket(plain, server_hostname=address[0]) as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True) or b"", encrypted.getpeercert() or {}


def _name(told: dict[str, Any]) -> str:
    alternatives = told.get("subjectAltName", ())
    for kind, name in alternatives if isinstance(alternatives, tuple) else ():
        if kind in ("DNS", "IP Address") and not str(name).startswith("*"):
            return str(name)
    subject = told.get("subject", ())
    for group in subject if isinstance(subject, tuple) else ():
        for kind, name in group:
            if kind == "commonName":
                return str(name)
    return ""
