"""HTTP/2 of which every frame is written by hand.

gRPC's own library leaves no call unfinished, and does not choose the address that it connects from.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

DEADLINE_S = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4


class Http2:
    """A connection of which every frame is written by hand; what comes is read in the background."""

    def __init__(
        self, address: str, window: int | None = None, source: str = "", token: str = ""
    ) -> None:
        """Connects; from the address `source` if one is given, and with `token` in all calls."""
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection(
            (host, int(port)), timeout=DEADLINE_S, source_address=(source, 0)
        )
        self._token = token
        settings = b"" if window is None else struct.pack("!HI", INITIAL_WINDOW_SIZE, window)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self.frames: dict[tuple[int, int], bytes] = {}
        self._answered: set[int] = set()
        self._may_send = {0: 65_535}
        self._stream_window = 65_535
        self._socket.sendall(PREFACE)
        self._send(SETTINGS, 0, 0, settings)
        self._next = 1
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_for(lambda: (SETTINGS, 0) in self.frames)

    def _send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        head = (
            struct.pack("!I", len(payload))[1:] + bytes([kind, flags]) + struct.pack("!I", stream)
        )
        with self._lock:
            self._socket.sendall(head + payload)

    def _receive(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            more = self._socket.recv(size - len(got))
            if not more:
                raise ConnectionError
            got += more
        return got

    def _read(self) -> None:
        with suppress(OSError):
            while True:
                head = self._receive(9)
                payload = self._receive(int.from_bytes(head[:3]))
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
                if kind == SETTINGS and not flags & ACK:
                    self._send(SETTINGS, ACK, 0)
                if kind == PING and not flags & ACK:
                    self._send(PING, ACK, 0, payload)
                with self._changed:
                    self._heed(kind, flags, stream, payload)
                    self._changed.notify_all()
        with self._changed:
            self.frames[(GOAWAY, 0)] = b"closed"
            self._changed.notify_all()

    def _heed(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack("!HI", payload[at : at + 6])
                if name == INITIAL_WINDOW_SIZE:
                    self._stream_window = value
        if kind == WINDOW_UPDATE:
            self._may_send[stream] = self._may_send.get(
                stream, self._stream_window
            ) + int.from_bytes(payload)
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            self._answered.add(stream)
        self.frames[(kind, stream)] = self.frames.get((kind, stream), b"") + payload

    def wait_for(self, so: Callable[[], bool], seconds: float = DEADLINE_S) -> None:
        with self._changed:
            assert self._changed.wait_for(so, seconds), sorted(self.frames)

    def is_answered(self, stream: int) -> bool:
        """Whether the service has said all that it says on a stream."""
        with self._changed:
            return stream in self._answered

    def ended(self, stream: int) -> bool:
        """Whether the service has closed a stream, or the connection."""
        with self._changed:
            return (RST_STREAM, stream) in self.frames or (GOAWAY, 0) in self.frames

    def call(self, method: str, package: str = "moored.v1") -> int:
        """Begins a call; the number of its stream."""
        stream, self._next = self._next, self._next + 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{package}.{method}",
            ":authority": "test",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        block = b""
        for name, value in headers.items():
            block += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        self._may_send[stream] = self._stream_window
        self._send(HEADERS, END_HEADERS, stream, block)
        return stream

    def _room(self, stream: int) -> int:
        return min(self._may_send[0], self._may_send[stream])

    def open_window(self, stream: int = 0) -> None:
        """Lets the service send as much as it likes on all streams together, or on one."""
        self._send(WINDOW_UPDATE, 0, stream, struct.pack("!I", 2**30))

    def write(self, stream: int, data: bytes, end: bool = False) -> bool:
        """Writes data as the service's windows allow. False: the service has ended the stream."""
        at = 0
        while at < len(data):
            with self._changed:
                self.wait_for(lambda: self._room(stream) > 0 or self.ended(stream))
                if self.ended(stream):
                    return False
                size = min(self._room(stream), 16_384, len(data) - at)
                self._may_send[0] -= size
                self._may_send[stream] -= size
            try:
                self._send(DATA, 0, stream, data[at : at + size])
            except OSError:
                return False
            at += size
        if end:
            self._send(DATA, END_STREAM, stream)
        return True

    def close(self) -> None:
        self._socket.close()


def message(body: bytes) -> bytes:
    return b"\0" + struct.pack("!I", len(body)) + body
