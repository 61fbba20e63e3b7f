"""The connection to the service: address, TLS, client name and token."""

from __future__ import annotations

import contextlib
import functools
import getpass
import ipaddress
import os
import socket
import ssl
import weakref
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from ._address import HTTPS, endpoint_of
from ._boxes import Metadata, box_named, boxes_of, headers_of
from ._credentials import kept_for
from ._errors import InvalidRequest, Unauthenticated, UnencryptedToken, refused
from ._files import TEXT_BYTES, TOKEN_BYTES, read_regular, with_home
from ._pinned import Pinned, fingerprint_of, pinned
from ._text import escaped, is_sendable
from ._version import __version__

MAX_MESSAGE_BYTES = 256 * 1024 * 1024

QUICK_S = 30.0
"""Timeout in seconds of calls that wait for nothing but the service itself."""

RETRY_S = 0.1
"""Seconds between two attempts to hear of the service's health."""

NAME_AT_MOST_CHARACTERS = 100
"""Most characters of a client name from MOORED_CLIENT or the default."""


def client_id_of(client_id: str | None) -> str:
    """Who asks: the argument, else MOORED_CLIENT, else user@host.

    Not the address that the service sees: behind a tunnel that is the same for everybody.
    """
    if client_id is None:
        client_id = os.environ.get("MOORED_CLIENT") or f"{_user()}@{socket.gethostname()}"
        # A default must not fail a call.
        client_id = escaped(client_id)[:NAME_AT_MOST_CHARACTERS]
    if not is_sendable(client_id):
        raise refused("client_id", f"{client_id!r} has half of a character, which cannot be sent")
    return client_id


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):
        return "somebody"  # an account without a name, as in some containers


class Process:
    """The process that something was made in. gRPC's connections and threads do not come along by a
    fork, as gunicorn, Celery and multiprocessing do it: what is used after one asks here first."""

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether it is the one that runs."""
        return self._id == os.getpid()

    def check(self, what: str) -> None:
        """Says why what was made before a fork does not work after it."""
        if not self.is_this:
            raise RuntimeError(f"{what} was made before a fork: make one in each process")


class Dropped(Exception):
    """A call was ended on this side, by its stream or its client."""


# Channels that are open, and those of the processes that this one was forked from. The second are
# kept: a channel that goes shuts its sockets down, which are the parent's too.
_OPEN: weakref.WeakSet[object] = weakref.WeakSet()
_OF_PARENTS: list[object] = []


def _keep_those_of_parents() -> None:
    _OF_PARENTS.extend(_OPEN)
    _OPEN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_those_of_parents)


class Line:
    """A service's address, what its channel needs (TLS and its roots, or neither), and what goes
    with each call."""

    def __init__(
        self,
        endpoint: str | None,
        token: str | None,
        token_file: str | os.PathLike[str] | None,
        ca_file: str | os.PathLike[str] | None,
        insecure_token: bool | None,
        fingerprint: str | None = None,
        certificate: str | os.PathLike[str] | None = None,
        certificate_key: str | os.PathLike[str] | None = None,
        box: str | None = None,
    ) -> None:
        self.endpoint = endpoint_of(endpoint)
        self.boxes = boxes_of(self.endpoint)
        self._box = box_named(box)
        # What the environment names is of the service that it names.
        environment = os.environ if self.endpoint == endpoint_of(None) else {}
        kept = kept_for(self.endpoint)
        token_file = token_file or environment.get("MOORED_TOKEN_FILE")
        self._token = metadata_of(token, token_file, kept.token)
        self._target = self.endpoint.removeprefix(HTTPS)
        self._credentials: grpc.ChannelCredentials | None = None
        self._own: tuple[bytes, bytes] | None = None
        self._fingerprint = ""
        self._pinned: Pinned | None = None
        if self.endpoint.startswith(HTTPS):
            pin = fingerprint or environment.get("MOORED_FINGERPRINT") or kept.fingerprint
            # Of two that are given the fingerprint is trusted alone.
            if pin and (fingerprint or ca_file is None):
                self._fingerprint = fingerprint_of(pin)
            self._own = _own_certificate(
                certificate or environment.get("MOORED_CERTIFICATE"),
                certificate_key or environment.get("MOORED_CERTIFICATE_KEY"),
            )
            if not self._fingerprint:
                self._credentials = self._trusting(_roots(ca_file))
        elif given := [
            name
            for name, value in (
                ("ca_file", ca_file),
                # Who names a fingerprint, wherever, means to know who answers.
                (
                    "fingerprint",
                    fingerprint
                    or environment.get("MOORED_FINGERPRINT")
                    or kept.fingerprint
                    or None,
                ),
                ("certificate", certificate),
            )
            if value is not None
        ]:
            raise InvalidRequest(
                f"{given[0]} is for TLS, and {self.endpoint} is reached without it: "
                f"write https://{self.endpoint}"
            )
        elif self._token and not is_local(self.endpoint) and not _allowed(insecure_token):
            raise UnencryptedToken(
                f"The token was not sent: the line to {self.endpoint} is not encrypted, and "
                f"others could read it. Use TLS (https://{self.endpoint}), or a tunnel (ssh -L) "
                "and its end on this machine. To send it all the same: insecure_token=True, or "
                "MOORED_INSECURE_TOKEN=1"
            )

    def metadata(self, request: Any = None, *, box: str = "", model: str = "") -> Metadata:
        """What goes with a call: the token; and for a proxy before several boxes, its model and
        the box that has what it names."""
        return self._token + headers_of(request, self.boxes, box or self._box, model)

    @property
    def is_pinned(self) -> bool:
        """Whether the certificate is known by its fingerprint, and has to be looked at first."""
        return bool(self._fingerprint)

    def look(self) -> None:
        """Looks at the certificate, where one is pinned and it was not done yet. It blocks."""
        if self._fingerprint and self._pinned is None:
            found = pinned(self._target, self.endpoint, self._fingerprint)
            self._credentials = self._trusting(found.pem)
            self._pinned = found

    def open(self) -> grpc.Channel:
        """A channel for threads."""
        channel: grpc.Channel = self._opened(grpc)
        return channel

    def open_async(self) -> grpc.aio.Channel:
        """A channel for the event loop that runs."""
        channel: grpc.aio.Channel = self._opened(grpc.aio)
        return channel

    def _trusting(self, roots: bytes | None) -> grpc.ChannelCredentials:
        chain, key = self._own or (None, None)
        return grpc.ssl_channel_credentials(roots, key, chain)

    def _opened(self, kind: Any) -> Any:
        options = options_for(self._target)
        self.look()
        if self._pinned is not None:
            options.append(("grpc.ssl_target_name_override", self._pinned.name))
        if self._credentials is None:
            channel = kind.insecure_channel(self._target, options)
        else:
            channel = kind.secure_channel(self._target, self._credentials, options)
        _OPEN.add(channel)
        return channel


def _own_certificate(
    certificate: str | os.PathLike[str] | None, key: str | os.PathLike[str] | None
) -> tuple[bytes, bytes] | None:
    """PEM of this client's certificate and of its key, of which neither is of use alone."""
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise InvalidRequest("certificate and certificate_key go together: name both files")
    read = []
    for path in (certificate, key):
        try:
            read.append(read_regular(with_home(path), TEXT_BYTES))
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidRequest(f"The file {path} cannot be read: {reason}") from None
    return read[0], read[1]


def _allowed(insecure_token: bool | None) -> bool:
    if insecure_token is not None:
        return insecure_token
    said = os.environ.get("MOORED_INSECURE_TOKEN", "").strip().lower()
    return said in ("1", "true", "yes", "on")


def _roots(ca_file: str | os.PathLike[str] | None) -> bytes | None:
    """PEM of the authorities to trust: those named, else the system's. None: those of gRPC."""
    path = ca_file or os.environ.get("MOORED_CA_FILE")
    if path:
        try:
            pem = read_regular(with_home(path), TEXT_BYTES)
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidRequest(f"The CA file {path} cannot be read: {reason}") from None
        if b"-----BEGIN CERTIFICATE-----" not in pem:
            raise InvalidRequest(f"The CA file {path} holds no certificate in PEM form")
        return pem
    if os.environ.get("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"):
        return None  # gRPC reads it by itself
    return _system_roots()


@functools.cache
def _system_roots() -> bytes | None:
    """What this machine trusts, an authority of its own firm included; None where none is found."""
    found = set(ssl.create_default_context().get_ca_certs(binary_form=True))
    folder = ssl.get_default_verify_paths().capath
    if not found and folder:
        # OpenSSL reads a folder's authorities one by one, as it meets them: gRPC wants them all.
        for file in Path(folder).glob("*.[0-9]"):
            with contextlib.suppress(OSError, ValueError):
                found.add(ssl.PEM_cert_to_DER_cert(file.read_text("ascii")))
    if not found:
        return None
    return "".join(map(ssl.DER_cert_to_PEM_cert, sorted(found))).encode()


def metadata_of(
    token: str | None, token_file: str | os.PathLike[str] | None, kept: str = ""
) -> Metadata:
    """What goes with every call. The token: the argument, else the file, else what is kept.

    An empty token is none, whatever else is named.
    """
    whose = "The token"
    if token is None and token_file:
        try:
            token = read_regular(with_home(token_file), TOKEN_BYTES).decode("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise Unauthenticated(
                f"The token file {token_file} cannot be read: {reason}"
            ) from error
        whose = f"The token in {token_file}"
        if not token:
            raise Unauthenticated(f"The token file {token_file} is empty")
    if token is None:
        token = kept
    if not (token.isascii() and token.isprintable()):
        # gRPC would refuse each call, and print the token.
        raise Unauthenticated(f"{whose} is not one line of plain letters, digits and signs")
    return (("authorization", f"Bearer {token}"),) if token else ()


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
    if is_local(endpoint):
        # gRPC heeds http_proxy even for localhost, unless no_proxy says otherwise.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def is_local(endpoint: str) -> bool:
    """Whether what is sent there stays on this machine."""
    if endpoint.startswith("unix:"):
        return True
    host = endpoint.rpartition(":")[0].strip("[]").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: 127.example.org is one too
