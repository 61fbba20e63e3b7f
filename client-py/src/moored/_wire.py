"""Explains failed connections: TLS, a proxy, or another server in place of the service.

gRPC for Python reports it only in words, which differ between versions: they are read here,
and nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import grpc

Cause = Literal["unreachable", "lost", "name", "certificate", "no_tls", "not_http2", "cut", "proxy"]

_HTTP_STATUS = re.compile(r"http2 header with status: (\d{3})")

_ADVICE = {
    401: "a proxy in front of the service does not let this client in: it has rules of its own, "
    "beside the service's token. Ask who runs it",
    413: "a proxy in front of the service does not take a request as large as this: raise its "
    "limit (nginx: client_max_body_size 0)",
    502: "a proxy does not reach the service behind it: see whether the service runs there, and "
    "whether the proxy speaks HTTP/2 to it (nginx: grpc_pass)",
    503: "a proxy in front of the service takes no more calls now: try again in a while",
    504: "the service did not answer a proxy in time: see whether the service still runs, and "
    "raise the proxy's time limit (nginx: grpc_read_timeout)",
}
_ADVICE[403], _ADVICE[429] = _ADVICE[401], _ADVICE[503]
_NO_SERVICE = (
    "a web server, not moored: see whether that is the service's address. A proxy in front of it "
    "has to hand gRPC on (nginx: grpc_pass)"
)

# Codes of a call that ended without a gRPC status.
_NO_STATUS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)

# Nothing listens at an address: that is what a service out of reach is taken for.
_NOTHING_LISTENS = ("connection refused", "no such file")


@dataclass(frozen=True, slots=True)
class Told:
    """Why no answer of the service itself arrives."""

    cause: Cause
    message: str
    http_status: int = 0
    """Of a proxy's answer; 0 where there was none."""


def told(code: grpc.StatusCode, said: str, endpoint: str) -> Told | None:
    """What gRPC's words say of the line to this endpoint; None: nothing that is known."""
    if found := _HTTP_STATUS.search(said):
        status = int(found[1])
        advice = _ADVICE.get(status, _NO_SERVICE)
        return Told("proxy", f"{endpoint} answers HTTP {status}: {advice}", status)
    words = said.lower()
    if "wrong_version_number" in words:
        return Told(
            "no_tls",
            f"{endpoint} answers without TLS: write http:// instead of https://, or name the proxy "
            "that has the certificate",
        )
    if any(one in words for one in ("certificate_verify", "peer certificate", "hostname verif")):
        return Told(
            "certificate",
            f"The certificate of {endpoint} is not trusted: name the PEM file of its authority by "
            "MOORED_CA_FILE, and the service by the name in its certificate",
        )
    if any(
        one in words
        for one in ("http1.x server", "failed parsing http/2", "no_application_protocol")
    ):
        return Told(
            "not_http2",
            f"{endpoint} does not speak HTTP/2, which moored needs: see whether that is the "
            "service's address. A proxy in front of it has to take HTTP/2 (nginx: http2 in listen)",
        )
    # "Stream removed" may be all that gRPC reports of an HTTP page. With another code, such as
    # DEADLINE_EXCEEDED, it is a prefix, and the code is the cause.
    has_no_status = code in _NO_STATUS and "stream removed" in words
    if "received rst_stream" in words or has_no_status:
        return Told(
            "cut",
            f"The call to {endpoint} was ended on the way, and not by the service: a proxy in "
            "between may have a limit of size or time (nginx: client_max_body_size, "
            "grpc_read_timeout), or the service behind it has ended",
        )
    # Versions of gRPC word it differently.
    if any(one in words for one in ("dns resolution failed", "name not found", "resolving")):
        return Told("name", f"There is no machine by the name of {endpoint}: see how it is spelt")
    return None


def why_unreachable(said: str) -> str:
    """Why a service is out of reach, in gRPC's words; empty where nothing listens."""
    if any(one in said.lower() for one in _NOTHING_LISTENS):
        return ""
    return said.rpartition(": ")[2].strip()[:100]
