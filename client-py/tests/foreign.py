"""Servers that answer in a service's place: proxies, web servers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

# Frames of HTTP/2, and flags of theirs.
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM = ACK = 1
END_HEADERS = 4
PREFACE_BYTES = 24
INTERNAL_ERROR = struct.pack(">I", 2)

Answer = Callable[[int], bytes]
"""The frames for a call, by its stream."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = struct.pack(">I", len(payload))[1:]
    return length + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers(stream: int, status: int, content_type: str, flags: int = 0) -> bytes:
    fields = b""
    for name, value in ((":status", str(status)), ("content-type", content_type)):
        fields += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return frame(HEADERS, END_HEADERS | flags, stream, fields)


def status(status: int) -> Answer:
    """An answer of a proxy's own."""
    return lambda stream: headers(stream, status, "text/html", END_STREAM)


def page(stream: int) -> bytes:
    """One with a page, which may hide its status from gRPC."""
    return headers(stream, 413, "text/html") + frame(DATA, END_STREAM, stream, b"<html>no</html>")


def cut(stream: int) -> bytes:
    """An answer that begins well, and is reset: a proxy's time limit."""
    reset = frame(RST_STREAM, 0, stream, INTERNAL_ERROR)
    return headers(stream, 200, "application/grpc") + reset


def http1(_stream: int) -> bytes:
    """What a server says that does not know HTTP/2."""
    return b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Yields the address of a server that answers every call so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):  # until it is closed
                while True:
                    line, _ = server.accept()
                    threading.Thread(target=serve, args=(line, answer), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def serve(line: socket.socket, answer: Answer) -> None:
    with line, line.makefile("rb") as arriving, contextlib.suppress(OSError):
        arriving.read(PREFACE_BYTES)
        if answer is http1:
            line.sendall(answer(0))
            return
        line.sendall(frame(SETTINGS, 0, 0))
        while len(head := arriving.read(9)) == 9:
            length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
            arriving.read(length)
            if kind == SETTINGS and not flags & ACK:
                line.sendall(frame(SETTINGS, ACK, 0))
            if kind == HEADERS:
                line.sendall(answer(int.from_bytes(head[5:], "big")))
