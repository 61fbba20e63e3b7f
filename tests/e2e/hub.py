"""A stand-in of a model hub's HTTP, on loopback: what a client of the real one meets, and faults on demand.

Two servers, as real hubs have: the hub itself, and a store of large files at another address, to which the
hub redirects. Small files are redirected too, within the hub. What it has and how it answers is set
by the test; its requests, and how many bytes it sent, are kept in `requests`.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PIECE_BYTES = 64 << 10
WAIT_S = 30
LARGE = (".safetensors", ".bin", ".gguf", ".onnx", ".msgpack")
"""What is stored as a large file, by the end of its name."""


@dataclass
class Repository:
    """A model: the same files at every revision."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=dict)
    """Branches and tags with their commits; all commits are known."""
    private: bool = False
    """Shown to tokens only."""
    gated: bool = False
    """Its files are for `accepted` tokens."""
    accepted: set[str] = field(default_factory=set)
    card: dict[str, Any] = field(default_factory=dict)
    """The facts of its page."""

    def __post_init__(self) -> None:
        self.revisions.setdefault("main", hashlib.sha1(b"main").hexdigest())


@dataclass
class Asked:
    """One request, and how it was answered."""

    server: str
    """`hub` or `store`."""
    path: str
    start: int
    """Of the range that was asked for."""
    token: str
    sent: int = 0
    """Bytes of content."""


def sha256(content: bytes) -> str:
    """The name of a large file: its SHA-256."""
    return hashlib.sha256(content).hexdigest()


def git_blob(content: bytes) -> str:
    """The name of a small file: git's SHA-1 of a blob."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str) -> bool:
    """Whether a file is in the store, rather than in the hub."""
    return path.endswith(LARGE)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class Hub:
    """A hub with its store. `with Hub() as hub:`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.requests: list[Asked] = []
        # Faults, by the name of a file: taken when they have happened.
        self.cuts: dict[str, list[tuple[int, bool]]] = {}
        self.limits: dict[str, int] = {}
        self.stalls: dict[str, int] = {}
        self.corrupted: dict[str, int] = {}
        self.announced: dict[str, int] = {}
        self.lists_sizes = True
        self.sends_parts = True
        self.released = threading.Event()
        self.stalled = threading.Event()
        self.left = threading.Event()
        self._lock = threading.Lock()
        self._servers = [self._serve(name) for name in ("hub", "store")]
        self.url, self.store = (f"http://127.0.0.1:{one.server_port}" for one in self._servers)

    def cut(self, path: str, at: int, *, reset: bool = False) -> None:
        """Ends the next answer with this file at a byte of it: quietly, or by a reset."""
        self.cuts.setdefault(path, []).append((at, reset))

    def limit(self, path: str, at: int) -> None:
        """Ends every answer with this file at a byte of it."""
        self.limits[path] = at

    def stall(self, path: str, at: int) -> None:
        """Sends this file up to a byte, and goes on when `released`."""
        self.stalls[path] = at

    def corrupt(self, path: str, times: int) -> None:
        """Changes a byte of this file, in so many answers."""
        self.corrupted[path] = times

    def announce(self, path: str, size: int) -> None:
        """Lists this file with a size of its own."""
        self.announced[path] = size

    def fetched(self, path: str) -> list[Asked]:
        """The requests that were answered with bytes of a file."""
        return [one for one in self.requests if one.path == path and one.sent]

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """The environment of a program that uses this hub, with a cache of its own."""
        foreign = ("MOORED_", "HF_", "HUGGING")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        # A proxy of this machine's own has no business here.
        ours = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
        return clean | ours | {"no_proxy": "127.0.0.1"} | more

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _serve(self, name: str) -> ThreadingHTTPServer:
        hub = self

        class Handler(_Handler):
            def __init__(self, *arguments: Any) -> None:
                self.hub, self.name = hub, name
                super().__init__(*arguments)

        server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    def note(self, asked: Asked) -> None:
        with self._lock:
            self.requests.append(asked)

    def cut_of(self, path: str, start: int) -> tuple[int, bool] | None:
        """Where an answer is to be cut, if anywhere: a cut happens once, a limit in every answer."""
        with self._lock:
            if path in self.limits:
                return max(self.limits[path], start), False
            ahead = [one for one in self.cuts.get(path, []) if one[0] > start]
            if ahead:
                self.cuts[path].remove(ahead[0])
            return ahead[0] if ahead else None

    def is_corrupted(self, path: str) -> bool:
        with self._lock:
            left = self.corrupted.get(path, 0)
            self.corrupted[path] = max(0, left - 1)
            return left > 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a client that has disconnected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    name: str

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        self._head(200, {"Content-Length": "0"})

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        self.query = parse_qs(url.query)
        if not self.hub.sends_parts:
            del self.headers["Range"]
        said = self.headers.get("Range", "bytes=0-")
        start, _, last = said.removeprefix("bytes=").partition("-")
        self.start = int(start)
        self.last = int(last) if last else None
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.asked = Asked(self.name, url.path, self.start, self.token)
        self.hub.note(self.asked)
        if self.name == "store":
            self._from_store(parts)
        elif parts == ["api", "whoami-v2"]:
            self._head(200 if self.token in self.hub.tokens else 401, {"Content-Length": "0"})
        elif parts[:2] == ["api", "models"]:
            self._listing("/".join(parts[2:4]), parts[5])
        elif parts[:2] == ["api", "resolve-cache"]:
            self._small("/".join(parts[3:5]), "/".join(parts[6:]))
        else:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        headers = {"Content-Length": str(len(body)), "X-Error-Message": message}
        self._head(status, headers | ({"X-Error-Code": code} if code else {}))
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _repository(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """A repository that this token may see, and the commit; `None` after a refusal was sent."""
        if self.token and self.token not in self.hub.tokens:
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self.token):
            # Strangers are not told what there is.
            self._refuse(404 if self.token else 401, "RepoNotFound", "Repository not found")
            return None
        commit = found.revisions.get(revision, revision)
        if commit not in found.revisions.values():
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return found, commit

    def _listing(self, name: str, revision: str) -> None:
        if (known := self._repository(name, revision)) is None:
            return
        repository, commit = known
        with_blobs = "blobs" in self.query and self.hub.lists_sizes
        siblings = []
        for path, content in repository.files.items():
            one: dict[str, Any] = {"rfilename": path}
            if with_blobs:
                size = self.hub.announced.get(path, len(content))
                one |= {"size": size, "blobId": git_blob(content)}
                if is_large(path):
                    one["lfs"] = {"sha256": sha256(content), "size": size, "pointerSize": 134}
            siblings.append(one)
        gated = "manual" if repository.gated else False
        body = {"id": name, "sha": commit, "gated": gated, "siblings": siblings}
        body |= {"cardData": repository.card} if repository.card else {}
        text = json.dumps(body).encode()
        self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(text))})
        self.wfile.write(text)

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if (known := self._repository(name, revision)) is None:
            return
        repository, commit = known
        if repository.gated and self.token not in repository.accepted:
            self._refuse(403 if self.token else 401, "GatedRepo", f"Access to {name} is restricted")
            return
        content = repository.files.get(path)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit, "Content-Length": "0"}
        if is_large(path):
            headers |= {
                "X-Linked-Etag": f'"{sha256(content)}"',
                "X-Linked-Size": str(len(content)),
                "Location": f"{self.hub.store}/{name}/{path}?signature=secret",
            }
            self._head(302, headers)
        else:
            self._head(
                307, headers | {"Location": f"/api/resolve-cache/models/{name}/{commit}/{path}"}
            )

    def _small(self, name: str, path: str) -> None:
        content = self.hub.repositories[name].files[path]
        self._content(path, content, git_blob(content))

    def _from_store(self, parts: list[str]) -> None:
        name, path = "/".join(parts[:2]), "/".join(parts[2:])
        assert self.query == {"signature": ["secret"]}
        content = self.hub.repositories[name].files[path]
        self._content(path, content, sha256(content))

    def _content(self, path: str, content: bytes, etag: str) -> None:
        self.asked.path = path
        if self.start > len(content):
            self._head(416, {"Content-Length": "0"})
            return
        if self.hub.is_corrupted(path):
            content = content[:-1] + bytes([content[-1] ^ 1])
        whole = len(content)
        content = content[: None if self.last is None else self.last + 1]
        headers = {
            "ETag": f'"{etag}"',
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(content) - self.start),
        }
        if "Range" in self.headers:
            headers["Content-Range"] = f"bytes {self.start}-{len(content) - 1}/{whole}"
        self._head(206 if "Range" in self.headers else 200, headers)
        self._send(path, content)

    def _send(self, path: str, content: bytes) -> None:
        cut = self.hub.cut_of(path, self.start)
        end = len(content) if cut is None else cut[0]
        stall = self.hub.stalls.get(path)
        stops = sorted(
            {end} | ({stall} if stall is not None and self.start < stall < end else set())
        )
        position = self.start
        for stop in stops:
            for piece in _pieces(position, stop):
                # Counted first: who has the bytes may ask for the count before this thread goes on.
                self.asked.sent += piece.stop - piece.start
                self.wfile.write(content[piece])
            position = stop
            if stop == stall:
                self._stall()
        if cut is not None:
            self.close_connection = True
            if cut[1]:
                # No farewell: what is closed so is reset.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                os.close(self.connection.detach())

    def _stall(self) -> None:
        self.hub.stalled.set()
        while not self.hub.released.wait(0.01):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.hub.left.set()
                return


def _pieces(start: int, end: int) -> Iterator[slice]:
    for begin in range(start, end, PIECE_BYTES):
        yield slice(begin, min(begin + PIECE_BYTES, end))
