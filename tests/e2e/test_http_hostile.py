"""Hostile requests over HTTP: each is answered or closed soon, and none is an error of the service.

Nothing is left of them. Some are generated from the OpenAPI document, by schemathesis; the rest is what it
does not make: bodies that end early, pause or lie about their length, bombs, floods, and clients that leave.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import moored
import pytest
import requests
import schemathesis
from faults import assert_at_rest, ended
from http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
)
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup
from test_access import make_token
from test_http import png
from test_http_clients import Part, form_of, send
from waiting import until

from service import INSTANT_MODELS, Service

Simulate = Callable[..., Service]

BOUND_S = 20.0
"""Seconds in which every request must be answered, or its connection closed."""
UPLOADS_BYTES = 8 << 20
FREE_BYTES = UPLOADS_BYTES // 8 * 7 - 4096
"""The last eighth is kept for clients that have nothing there."""
SMALL: dict[str, Any] = {"model": "small", "prompt": "a boat", "size": "64x64"}
IMAGES, EDITS = "/v1/images/generations", "/v1/images/edits"
VIDEOS, MUSIC = "/v1/videos", "/v1/music/generations"
TXT2IMG, IMG2IMG = "/sdapi/v1/txt2img", "/sdapi/v1/img2img"
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all requests, so that what one leaves behind meets the next."""
    limits = ("service.max_message=8MiB", "limits.uploads=8MiB", "limits.uploads_per_client=8MiB")
    limits += ("models.default=small",)
    service = Service(
        "--models",
        str(INSTANT_MODELS),
        *(word for setting in limits for word in ("--set", setting)),
        state=tmp_path_factory.mktemp("state"),
        devices=("sim:24GiB",),
    )
    yield service
    assert service.stop() == 0


@pytest.fixture(autouse=True)
def _nothing_is_left(service: Service) -> Iterator[None]:
    """After each test: no job, no scratch, no lease, all bytes of uploads free, and pictures are made."""
    yield
    assert service.process.poll() is None
    assert send(service, "POST", IMAGES, SMALL).status == 200
    # All bytes of uploads that one client may have: it is read to its end, and is no picture.
    upload = form_of([text("prompt", "a"), ("image", bytes(FREE_BYTES), "a.png", None)], "x")
    told = send(service, "POST", EDITS, upload, FORM).json()["error"]["message"]
    assert "PNG" in told, told
    for film in send(service, "GET", VIDEOS).json()["data"]:
        assert send(service, "DELETE", f"{VIDEOS}/{film['id']}").status == 200
    with service.client() as client:
        assert_at_rest(client)
        (card,) = client.status().cards
        assert (card.worker_restarts, card.reservations) == (0, ())


# Requests that are made from the document.

WITH_BODY, WITHOUT_BODY = 14, 7
"""Most requests of an operation, for each mode of generation."""
CONFORMANCE = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
MODELS = {VIDEOS: "video", MUSIC: "track"}
"""Models that take no time, for requests that name none; for all others `small`."""


class Attack(NamedTuple):
    """A request that was sent, and what came of it."""

    request: str
    status: int
    seconds: float
    differences: list[str]
    """From the document."""


def cases_of(operation: Any, mode: GenerationMode) -> list[Any]:
    """Different requests of an operation: the same ones each time."""
    found: dict[str, Any] = {}
    most = WITH_BODY if list(operation.body) else WITHOUT_BODY

    @settings(
        max_examples=2 * most,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        if isinstance(case.body, dict) and not case.body.get("model"):
            case.body["model"] = MODELS.get(operation.path, "small")
        found.setdefault(repr((case.path_parameters, case.query, case.media_type, case.body)), case)

    collect()
    return list(found.values())[:most]


@pytest.fixture(scope="module")
def attacks(service: Service) -> list[Attack]:
    """Valid and invalid requests of every operation of the document, one after another."""
    document = send(service, "GET", "/openapi.json").json()
    made = []
    with requests.Session() as session:
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = result.ok()
            for mode in modes_of(operation):
                for case in cases_of(operation, mode):
                    made.append(attack(case, service, session))
    return made


def modes_of(operation: Any) -> list[GenerationMode]:
    """An id in a path may be any text: only a body and a query can be wrong."""
    may_be_wrong = bool(list(operation.body)) or operation.path == VIDEOS
    return list(GenerationMode) if may_be_wrong else [GenerationMode.POSITIVE]


def attack(case: Any, service: Service, session: requests.Session) -> Attack:
    base = f"http://{service.address}"
    began = time.monotonic()
    answer = case.call(base_url=base, session=session, timeout=BOUND_S)
    seconds = time.monotonic() - began
    differences = []
    for check in CHECKS.get_by_names(CONFORMANCE):
        try:
            case.validate_response(answer, checks=[check])
        except FailureGroup as group:
            differences += [f"{problem.title}: {problem.message}" for problem in group.exceptions]
    told = f"{case.as_curl_command()} -> {answer.status_code} {answer.content[:300]!r}"
    return Attack(told, answer.status_code, seconds, differences)


def test_no_request_of_the_document_is_an_error_of_the_service(attacks: list[Attack]) -> None:
    assert len(attacks) >= 200
    assert not [one.request for one in attacks if one.status >= 500]
    assert max(attacks, key=lambda one: one.seconds).seconds < BOUND_S
    # Both are tested: what is taken, and what is refused.
    taken = sum(one.status == 200 for one in attacks)
    assert 20 < taken < len(attacks) - 20


def test_answers_are_as_the_document_says(attacks: list[Attack]) -> None:
    assert not [(one.differences, one.request) for one in attacks if one.differences]


def test_the_document_is_one_that_generators_of_clients_take(service: Service) -> None:
    """Parameters are where they are read, and every operation has a name of its own."""
    document = send(service, "GET", "/openapi.json").json()
    wrong = []
    names = set()
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            if operation["operationId"] in names:
                wrong.append(f"{verb} {path}: {operation['operationId']} is not unique")
            names.add(operation["operationId"])
            for parameter in operation.get("parameters", []):
                if (parameter["in"] == "path") != (f"{{{parameter['name']}}}" in path):
                    wrong.append(f"{verb} {path}: {parameter['name']} in {parameter['in']}")
    assert not wrong


# Bytes that are written by hand.


class Raw(NamedTuple):
    """An answer, as far as there is one: a status of 0 is a connection that was closed without."""

    status: int
    kind: str
    body: bytes

    def error(self) -> Any:
        """Its error, which is JSON whatever was wrong."""
        assert self.kind == "application/json", self
        return json.loads(self.body)["error"]


def connect(service: Service) -> socket.socket:
    host, _, port = service.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=BOUND_S)


def exchange(service: Service, data: bytes, *, ends: bool = False, verb: str = "GET") -> Raw:
    """Writes these bytes and reads an answer. `ends`: no more follow."""
    with connect(service) as line:
        with suppress(OSError):  # it may be refused while it is written
            line.sendall(data)
            if ends:
                line.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(line, method=verb)
        try:
            answer.begin()
            return Raw(answer.status, str(answer.headers.get_content_type()), answer.read())
        except ConnectionError:
            return Raw(0, "", b"")


def head(verb: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"{verb} {path} HTTP/{version}", "Host: 127.0.0.1", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def post(path: str, body: bytes, kind: str = "application/json") -> bytes:
    return head("POST", path, f"Content-Type: {kind}", f"Content-Length: {len(body)}") + body


def text(name: str, value: str) -> Part:
    return (name, value.encode(), None, None)


def edit(service: Service, *parts: Part) -> Raw:
    """An edit of a picture by a form with these parts besides the model and the prompt."""
    form = form_of([text("model", "small"), text("prompt", "a boat"), *parts], "x")
    return exchange(service, post(EDITS, form, FORM["Content-Type"]))


PICTURE: Part = ("image", png(), "a.png", "image/png")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (IMAGES, b'{"model": "small", "prompt": "a", "guidance": NaN}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "guidance": 1e999}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "guidance": 1e39}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "n": 1000000000}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "n": -1}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "n": 1, "n": 2}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "steps": -1}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "size": "99999999x1"}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "size": "4294967280x4294967280"}'),
        (IMAGES, b'{"model": "small", "prompt": "a", "seed": 18446744073709551616}'),
        (IMAGES, b'{"model": "small", "prompt": "\xff\xfe"}'),
        (IMAGES, b'{"model": "small", "prompt": "\\ud800"}'),
        (IMAGES, b'{"prompt": "a", "model": ["small"]}'),
        (IMAGES, b"[" * 100_000),
        (IMAGES, b'{"prompt":' * 100_000),
        (IMAGES, b'{"model": "small"} x'),
        (IMAGES, b""),
        (IMAGES, "{}".encode("utf-16")),
        (VIDEOS, b'{"model": "video", "prompt": "a", "seconds": "nan"}'),
        (VIDEOS, b'{"model": "video", "prompt": "a", "seconds": "inf"}'),
        (VIDEOS, b'{"model": "video", "prompt": "a", "seconds": 1e30}'),
        (VIDEOS, b'{"model": "video", "prompt": "a", "frames": 4294967295}'),
        (VIDEOS, b'{"model": "small", "prompt": "a"}'),
        (MUSIC, b'{"model": "track", "prompt": "a", "seconds": -1}'),
        (MUSIC, b'{"model": "track", "prompt": "a", "n": 65}'),
    ],
)
def test_a_wrong_body_is_refused(service: Service, path: str, body: bytes) -> None:
    answer = exchange(service, post(path, body))
    assert answer.status == 400, answer
    error = answer.error()
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500


def test_an_array_is_no_request(service: Service) -> None:
    for path in (IMAGES, VIDEOS, MUSIC, TXT2IMG):
        for body in (b'["a boat"]', b"[]"):
            assert exchange(service, post(path, body)).status == 400, (path, body)


def test_fields_that_are_not_read_may_have_any_value(service: Service) -> None:
    """JSON that is nested deep within a field that has no meaning here, and a great many fields of a form."""
    nested = (
        b'{"model": "small", "prompt": "a", "size": "64x64", "x": '
        + b"[" * 50_000
        + b"]" * 50_000
        + b"}"
    )
    assert exchange(service, post(IMAGES, nested)).status == 200
    many = [text(f"field-{at}", "") for at in range(5000)]
    assert edit(service, *many, PICTURE).status == 200
    away = ("image", png(), "../../../etc/passwd", "image/png")
    assert edit(service, away).status == 200


def black_png(side: int) -> bytes:
    """A whole picture of this size in a thousandth of its bytes: zeros, whose pieces are compressed alike."""
    size = side * (side * 3 + 1)
    piece = bytes(1 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    rest = zlib.compressobj(9, zlib.DEFLATED, -15)
    last = rest.compress(bytes(size % len(piece))) + rest.flush()
    checksum = struct.pack(">I", (size % 65521) << 16 | 1)  # Adler-32 of zeros
    data = b"\x78\xda" + packed * (size // len(piece)) + last + checksum

    def chunk(kind: bytes, content: bytes) -> bytes:
        summed = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + summed

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = (chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_decompression_bomb_is_refused_by_its_size(service: Service) -> None:
    bomb = black_png(30_000)
    assert len(bomb) < 4 << 20
    with service.client() as client:
        before = client.status().cards[0].memory.components
    for parts in (
        [("image", bomb, "a.png", "image/png")],
        [text("size", "64x64"), ("image", bomb, "a.png", "image/png")],
        [PICTURE, ("mask", bomb, "m.png", "image/png")],
    ):
        answer = edit(service, *parts)
        assert answer.status == 400
        assert "8192" in answer.error()["message"]
    parts = [text("model", "video"), text("prompt", "a"), ("input_reference", bomb, "a.png", None)]
    form = form_of(parts, "x")
    answer = exchange(service, post(VIDEOS, form, FORM["Content-Type"]))
    assert (answer.status, "8192" in answer.error()["message"]) == (400, True)
    for fields in ({"init_images": [bomb]}, {"init_images": [png()], "mask": bomb}):
        encoded = json.dumps({"model": "small", "prompt": "a", **fields}, default=in_base64)
        answer = exchange(service, post(IMG2IMG, encoded.encode()))
        assert (answer.status, "8192" in answer.error()["message"]) == (400, True)
    with service.client() as client:
        assert client.status().cards[0].memory.components == before


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("image", b"", "a.png", "image/png")],
        [("image", b"GIF89a\1\0\1\0\0\0\0;", "a.gif", "image/gif")],
        [("image", png(), None, None)],
        [PICTURE, text("n", "nan")],
        [PICTURE, text("guidance", "nan")],
        [PICTURE, text("guidance", "inf")],
        [PICTURE, text("strength", "nan")],
        [PICTURE, text("stream", "perhaps")],
        [PICTURE, text("seed", "-1")],
        [PICTURE, text("output_format", "svg")],
        [PICTURE, ("mask", b"no mask", "m.png", "image/png")],
    ],
)
def test_a_wrong_field_of_a_form_is_refused(service: Service, parts: list[Part]) -> None:
    answer = edit(service, *parts)
    assert answer.status == 400, answer
    assert answer.error()["message"]


WHOLE = form_of([text("model", "small"), text("prompt", "a boat"), PICTURE], "x")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (WHOLE, "multipart/form-data; boundary="),
        (WHOLE, "multipart/form-data; boundary=y"),
        (WHOLE[:-10], "multipart/form-data; boundary=x"),
        (WHOLE[:200], "multipart/form-data; boundary=x"),
        (b"--x\r\n\r\nno head\r\n--x--\r\n", "multipart/form-data; boundary=x"),
        (b"--x\r\nno head\r\n\r\na\r\n--x--\r\n", "multipart/form-data; boundary=x"),
        (WHOLE, "multipart/form-data"),
        (b"{}", "application/json"),
    ],
)
def test_a_broken_form_is_refused(service: Service, body: bytes, kind: str) -> None:
    answer = exchange(service, post(EDITS, body, kind))
    assert 400 <= answer.status < 500, answer
    assert answer.error()["type"] == "invalid_request_error"


UNFINISHED = {
    "json": head("POST", IMAGES, "Content-Type: application/json", "Content-Length: 1000") + b"{",
    "form": head("POST", EDITS, "Content-Type: " + FORM["Content-Type"], "Content-Length: 1000")
    + b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na',
    "form of a film": head(
        "POST", VIDEOS, "Content-Type: " + FORM["Content-Type"], "Transfer-Encoding: chunked"
    )
    + b'42\r\n--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na boat\r\n-\r\n',
}


@pytest.mark.parametrize("kind", UNFINISHED)
def test_a_body_that_ends_early_is_a_fault_of_the_client(service: Service, kind: str) -> None:
    """The words are those of the service, and not of its libraries."""
    answer = exchange(service, UNFINISHED[kind], ends=True)
    assert answer.status == 400
    assert_told_in_own_words(answer)


def test_a_body_that_pauses_is_ended(simulate: Simulate) -> None:
    idle = simulate("sim:24GiB", arguments=("--set", "limits.upload_idle=500ms"))
    for data in UNFINISHED.values():
        answer = exchange(idle, data)
        assert (answer.status, answer.error()["code"]) == (429, "client_limit")
        assert "500ms" in answer.error()["message"]
        assert_told_in_own_words(answer)


def assert_told_in_own_words(answer: Raw) -> None:
    message = answer.error()["message"]
    assert not any(word in message for word in ("code:", "hyper", "stream", "buffer")), message


@pytest.mark.parametrize(
    "data",
    [
        post(IMAGES, json.dumps({"x": "a" * (2 << 20)}).encode()),
        post(
            EDITS,
            form_of([("image", bytes(UPLOADS_BYTES + 1), "a", None)], "x"),
            FORM["Content-Type"],
        ),
        post(
            VIDEOS,
            form_of([("input_reference", bytes(9 << 20), "a", None)], "x"),
            FORM["Content-Type"],
        ),
    ],
    ids=["json", "form", "form of a film"],
)
def test_a_body_that_is_too_long_is_refused_by_its_length(service: Service, data: bytes) -> None:
    answer = exchange(service, data)
    assert answer.status in (413, 429), answer
    assert answer.error()["code"] == "client_limit"


@pytest.mark.parametrize("expects", [False, True])
def test_a_length_that_is_too_much_is_refused_at_once(service: Service, expects: bool) -> None:
    """Before anything of the body is sent."""
    headers = ["Content-Type: application/json", "Content-Length: 1000000000000000000"]
    headers += ["Expect: 100-continue"] * expects
    answer = exchange(service, head("POST", IMAGES, *headers))
    assert (answer.status, answer.error()["code"]) == (413, "client_limit")


GOOD = json.dumps(SMALL).encode()
TYPED = "Content-Type: application/json"
CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (head("POST", IMAGES, TYPED, CHUNKED) + b"zz\r\n{}\r\n0\r\n\r\n", {400}),
        (head("POST", IMAGES, TYPED, CHUNKED) + b"fffffffffffffffff\r\n{", {400}),
        (head("POST", IMAGES, TYPED, CHUNKED, "Transfer-Encoding: identity") + b"0\r\n\r\n", {400}),
        (head("POST", IMAGES, TYPED, "Transfer-Encoding: xchunked") + b"0\r\n\r\n", {400}),
        (head("POST", IMAGES, TYPED, "Content-Length: 2", "Content-Length: 3") + b"{}", {400}),
        (head("POST", IMAGES, TYPED, "Content-Length: -2") + b"{}", {400}),
        (post(IMAGES, GOOD, "text/plain"), {415}),
        (post(IMAGES, GOOD, "application/x-www-form-urlencoded"), {415}),
        (head("POST", IMAGES, f"Content-Length: {len(GOOD)}") + GOOD, {415}),
        (post(IMAGES, zlib.compress(GOOD), "application/json"), {400}),
        (head("GET", "/livez", *(f"X-{at}: a" for at in range(5000))), {431}),
        (head("GET", "/livez", "X: " + "a" * 1_000_000), {431}),
        (head("GET", "/livez", "X: a\0b"), {400}),
        (head("GET", "/livez", "X : a"), {400}),
        (head("GET", "/livez", "X: a\r\n b"), {400}),
        (head("GET", "/livez", version="3.0"), {400}),
        (b"GET /livez\r\n\r\n", {400}),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), {400}),
        (head("GET", "/v1/videos/" + "a" * 100_000), {414}),
        (head("GET", "http://evil.example/v1/models"), {403}),
        (b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n", {400, 403}),
        (head("CONNECT", "evil.example:443"), {403, 404, 405}),
        (head("TRACE", "/v1/models"), {405}),
        (head("PATCH", "/v1/videos"), {405}),
        (head("OPTIONS", IMAGES, "Origin: http://evil.example"), {403}),
        (head("GET", "/v1/videos?limit=-1"), {400}),
        (head("GET", "/v1/videos?limit=1&limit=2"), {400}),
        (head("GET", "/livez", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"), {200}),
    ],
)
def test_what_is_no_http_or_not_of_the_api_is_refused(
    service: Service, data: bytes, statuses: set[int]
) -> None:
    answer = exchange(service, data, ends=data.startswith(b"\x16"))
    assert answer.status in statuses, answer


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", "/v1/nothing"),
        ("GET", IMAGES),
        ("POST", "/v1/models"),
        ("POST", "/livez"),
        ("GET", "/sdapi/v1/nothing"),
        ("GET", TXT2IMG),
        ("POST", "/sdapi/v1/nothing"),
        ("PUT", "/sdapi/v1/options"),
    ],
)
def test_an_unknown_path_is_refused_in_json(service: Service, verb: str, path: str) -> None:
    answer = exchange(service, head(verb, path))
    assert answer.status in (404, 405)
    assert answer.error()["code"] in ("not_found", "method_not_allowed")


def test_a_second_request_in_a_body_is_not_taken_for_one(service: Service) -> None:
    """A length beside chunks: a program before the service might take the rest for another request."""
    hidden = b"DELETE /v1/videos/a HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    data = head("POST", IMAGES, TYPED, CHUNKED, "Content-Length: 4") + chunk + hidden
    with connect(service) as line:
        line.sendall(data)
        answers = b"".join(iter(lambda: line.recv(65536), b""))
    assert answers.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/models",
        "..%5c..%5cmodels",
        "%00",
        "a%0d%0aX: b",
        "%zz",
        "job-0000000000000000",
        "a" * 60_000,
    ],
    ids=range(9),
)
def test_an_id_is_a_name_and_no_path(service: Service, name: str) -> None:
    for verb, path in [
        ("GET", f"/v1/models/{name}"),
        ("GET", f"/v1/videos/{name}"),
        ("GET", f"/v1/videos/{name}/content"),
        ("DELETE", f"/v1/videos/{name}"),
        ("GET", f"/sdapi/v1/{name}"),
        ("GET", f"/assets/{name}"),
    ]:
        answer = exchange(service, head(verb, path.replace(" ", "%20")))
        assert answer.status == 404, answer
        assert answer.error()["code"] in ("not_found", "model_not_found", "job_not_found")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/%ff",
        "/v1/videos/%ff",
        "/v1/videos/%ff/content",
        "/sdapi/v1/%ff",
    ],
)
def test_an_id_that_is_no_text_is_refused_in_json(service: Service, path: str) -> None:
    answer = exchange(service, head("GET", path))
    assert answer.status in (400, 404)
    assert answer.error()["message"]


def test_an_error_does_not_repeat_what_is_long(service: Service) -> None:
    for data in (
        post(IMAGES, json.dumps(SMALL | {"model": "m" * 100_000}).encode()),
        post(IMAGES, json.dumps(SMALL | {"size": "m" * 100_000}).encode()),
        head("GET", "/v1/videos/" + "a" * 60_000),
        head("GET", "/" + "a" * 60_000),
    ):
        assert len(exchange(service, data).body) < 3000


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (IMAGES, {"prompt": "a", "model": "small", "steps": -1}, "steps"),
        (IMAGES, {"prompt": "a", "model": "small", "size": "17x16"}, "size"),
        (IMAGES, {"prompt": "a", "model": "small+nothing"}, "model"),
        (IMAGES, {"prompt": "a", "model": "small", "output_format": "svg"}, "output_format"),
        (MUSIC, {"prompt": "a", "model": "track", "n": 65}, "n"),
        (VIDEOS, {"prompt": "a", "model": "video", "cards": 3}, "cards"),
        (EDITS, {"prompt": "a", "model": "small", "image": b"no picture"}, "image"),
        (
            VIDEOS,
            {"prompt": "a", "model": "video", "input_reference": b"no picture"},
            "input_reference",
        ),
    ],
)
def test_a_wrong_field_is_named_as_the_client_has_it(
    service: Service, path: str, body: dict[str, Any], field: str
) -> None:
    if any(isinstance(value, bytes) for value in body.values()):
        parts: list[Part] = [
            (name, value, "a.png", None) if isinstance(value, bytes) else text(name, value)
            for name, value in body.items()
        ]
        answer = send(service, "POST", path, form_of(parts, "x"), FORM)
    else:
        answer = send(service, "POST", path, body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, field)


def test_head_and_expect_are_answered(service: Service) -> None:
    for path, status in (("/v1/models", 200), ("/metrics", 200), (IMAGES, 405), ("/a", 404)):
        asked = exchange(service, head("HEAD", path), verb="HEAD")
        assert (asked.status, asked.body) == (status, b"")
    with connect(service) as line:
        length = f"Content-Length: {len(GOOD)}"
        line.sendall(head("POST", IMAGES, TYPED, length, "Expect: 100-continue"))
        assert line.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(GOOD)
        assert line.recv(100).startswith(b"HTTP/1.1 200")


def test_options_lists_the_methods(service: Service) -> None:
    """SillyTavern takes a service for one of pictures by this."""
    answer = send(service, "OPTIONS", IMAGES)
    assert 200 <= answer.status < 300
    assert "POST" in str(answer.headers["Allow"])


# Clients that leave.


@pytest.mark.parametrize(
    ("streams", "read"),
    [(False, "nothing"), (True, "nothing"), (True, "head"), (True, "partial picture")],
)
def test_a_client_that_leaves_ends_its_job(service: Service, streams: bool, read: str) -> None:
    awaited = {"nothing": b"", "head": b"\r\n\r\n", "partial picture": b"partial_image"}[read]
    asked = SMALL | {"model": "slow", "steps": 200, "stream": streams, "partial_images": 3}
    with service.client() as client:
        with connect(service) as line:
            line.sendall(post(IMAGES, json.dumps(asked).encode()))
            (left,) = until(client, lambda status: has_one_that_runs(status.jobs)).jobs
            got = b""
            while awaited not in got:
                got += line.recv(65536)
        until(client, lambda status: not status.jobs)
        assert ended(client, left.id).state == "cancelled"


def has_one_that_runs(jobs: tuple[moored.JobInfo, ...]) -> bool:
    return [job.state for job in jobs] == ["running"]


def test_uploads_that_are_left_give_their_bytes_back(service: Service) -> None:
    """More of them, one after another and at the same time, than may be under way."""
    begun = post(EDITS, bytes(1 << 20), FORM["Content-Type"]).replace(
        b"Content-Length: 1048576", b"Content-Length: 2097152"
    )
    for _ in range(12):
        with connect(service) as line:
            line.sendall(begun)
    with ExitStack() as opened:
        lines = [opened.enter_context(connect(service)) for _ in range(6)]
        for line in lines:
            line.sendall(begun)


def test_contents_are_whole_or_the_range_that_is_asked_for(service: Service) -> None:
    film = send(service, "POST", VIDEOS, {"model": "video", "prompt": "a", "seconds": 1}).json()
    path = f"{VIDEOS}/{film['id']}/content"
    with connect(service) as line:  # it leaves before the film is complete
        line.sendall(head("GET", path))
    whole = send(service, "GET", path).body  # waits
    assert whole[4:8] == b"ftyp"
    assert send(service, "GET", f"{VIDEOS}/{film['id']}").json()["status"] == "completed"
    for asked, part in [
        ("bytes=0-3", whole[:4]),
        ("bytes=-4", whole[-4:]),
        ("bytes=8-", whole[8:]),
    ]:
        answer = send(service, "GET", path, headers={"Range": asked})
        assert (answer.status, answer.body) == (206, part)
    end = send(service, "GET", path, headers={"Range": "bytes=0-18446744073709551615"})
    assert (end.status, end.body) == (206, whole)
    for beyond in ("bytes=999999999-", "bytes=18446744073709551615-", "bytes=-0"):
        answer = send(service, "GET", path, headers={"Range": beyond})
        assert (answer.status, answer.body) == (416, b"")
    for wrong in ("bytes=3-1", "lines=1-2", "bytes=a-b", "bytes=-", "bytes=0-18446744073709551616"):
        answer = send(service, "GET", path, headers={"Range": wrong})
        assert (answer.status, answer.body) == (200, whole)
    assert send(service, "HEAD", path).headers["Content-Length"] == str(len(whole))


def test_a_film_that_is_deleted_is_gone(service: Service) -> None:
    film = send(service, "POST", VIDEOS, {"model": "video", "prompt": "a", "steps": 100}).json()
    path = f"{VIDEOS}/{film['id']}"
    assert send(service, "DELETE", path).json()["deleted"] is True
    assert send(service, "GET", path).status == 404
    assert send(service, "DELETE", path).status == 404


# HTTP/2, of which every frame is written by hand.


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack("!I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack("!I", stream)
        + payload
    )


def literal(name: str, value: str) -> bytes:
    """A header that refers to no table; up to 126 bytes each."""
    out = b"\0"
    for part in (name.encode(), value.encode("latin-1")):
        out += bytes([len(part)]) + part
    return out


def headers_of(path: str, verb: str = "GET", authority: str = "127.0.0.1", **more: str) -> bytes:
    fields = {":method": verb, ":scheme": "http", ":path": path, ":authority": authority}
    fields |= {name.replace("_", "-"): value for name, value in more.items()}
    return b"".join(literal(*field) for field in fields.items())


def frames_after(service: Service, sent: bytes) -> list[tuple[int, int, bytes]]:
    """Kinds, streams and payloads of what comes, up to the end of a stream or of the connection."""
    got: list[tuple[int, int, bytes]] = []
    with connect(service) as line, suppress(ConnectionError):
        line.sendall(PREFACE + frame(SETTINGS, 0, 0) + sent)
        reader = line.makefile("rb")
        while len(top := reader.read(9)) == 9:
            payload = reader.read(int.from_bytes(top[:3]))
            kind, flags, stream = top[3], top[4], int.from_bytes(top[5:])
            got.append((kind, stream, payload))
            if kind == SETTINGS and not flags & ACK:
                line.sendall(frame(SETTINGS, ACK, 0))
            is_end = kind in (DATA, HEADERS) and flags & END_STREAM
            if is_end or kind in (RST_STREAM, GOAWAY):
                break
    return got


WHOLE_HEAD = END_HEADERS | END_STREAM


@pytest.mark.parametrize(
    "sent",
    [
        frame(HEADERS, WHOLE_HEAD, 1, headers_of("/livez") + literal(":path", "/metrics")),
        frame(HEADERS, WHOLE_HEAD, 1, headers_of("/livez", connection="close")),
        frame(HEADERS, WHOLE_HEAD, 1, headers_of("/livez", X_Upper="a")),
        frame(HEADERS, WHOLE_HEAD, 1, headers_of("/livez", x="a\r\nb: c")),
        frame(HEADERS, WHOLE_HEAD, 1, headers_of("livez")),
        frame(HEADERS, WHOLE_HEAD, 2, headers_of("/livez")),
        frame(HEADERS, WHOLE_HEAD, 1, b"\xff" * 6),
        frame(HEADERS, END_HEADERS, 1, headers_of(IMAGES, "POST", content_length="5"))
        + frame(DATA, END_STREAM, 1, GOOD),
        frame(HEADERS, END_HEADERS, 1, headers_of(IMAGES, "POST", content_length="5000"))
        + frame(DATA, END_STREAM, 1, GOOD),
        frame(HEADERS, END_STREAM, 1, headers_of("/livez"))
        + frame(9, 0, 1, literal("x", "a" * 100)) * 5000,
        frame(DATA, END_STREAM, 0, b"a"),
        frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 2**31 - 1)),
        frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 2**32 - 1)),
        b"".join(
            frame(
                HEADERS,
                END_HEADERS,
                at,
                headers_of(IMAGES, "POST", content_type="application/json"),
            )
            + frame(RST_STREAM, 0, at, struct.pack("!I", 8))
            for at in range(1, 4001, 2)
        ),
    ],
    ids=range(14),
)
def test_what_is_no_http_2_ends_its_stream_or_its_connection(service: Service, sent: bytes) -> None:
    got = frames_after(service, sent)
    assert not any(kind == DATA for kind, _, _ in got)
    answered = frames_after(service, frame(HEADERS, WHOLE_HEAD, 1, headers_of("/livez")))
    assert answered[-1][2] == b"ok\n"


def test_the_address_of_http_2_is_the_host_that_is_checked(service: Service) -> None:
    for authority, more in (("evil.example", {}), ("evil.example", {"host": "127.0.0.1"})):
        sent = headers_of("/v1/models", authority=authority, **more)
        *_, (kind, _, body) = frames_after(service, frame(HEADERS, WHOLE_HEAD, 1, sent))
        assert kind == DATA
        assert json.loads(body)["error"]["code"] == "other_site"


def test_more_streams_than_are_allowed_are_refused_one_by_one(service: Service) -> None:
    sent = headers_of(IMAGES, "POST", content_type="application/json")
    got = frames_after(
        service, b"".join(frame(HEADERS, END_HEADERS, at, sent) for at in range(1, 1201, 2))
    )
    assert any(kind == RST_STREAM and code == struct.pack("!I", 7) for kind, _, code in got)


# Tokens.


@pytest.fixture
def holders(simulate: Simulate, tmp_path: Path) -> tuple[Service, dict[str, str]]:
    """A service with tokens, and those of an observer."""
    token = make_token(tmp_path / "state-0", "olga", role="observe")
    return simulate("sim:24GiB"), {"Authorization": f"Bearer {token}"}


def test_a_path_that_is_spelt_otherwise_needs_no_smaller_role(
    holders: tuple[Service, dict[str, str]],
) -> None:
    service, observer = holders
    for path in (
        "/v1/images/generations",
        "/v1/images/generation%73",
        "/v1//images/generations",
        "//v1/images/generations",
        "/v1/images/generations/",
        "/v1/images/./generations",
        "/v1/models/../images/generations",
        "/v1/images/generations;a",
        "/V1/images/generations",
    ):
        answer = send(service, "POST", path, SMALL, observer)
        assert answer.status in (403, 404, 405), path
    override = {"X-HTTP-Method-Override": "DELETE", "X-Original-URL": IMAGES} | observer
    assert send(service, "GET", "/v1/models", headers=override).status == 200
    for wrong in ({}, {"Authorization": "Bearer a"}, {"Authorization": "Bearer \xff"}):
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            assert send(service, "GET", path, headers=wrong).status == 401
    with service.client(token=observer["Authorization"].split()[1]) as client:
        assert not client.jobs(include_ended=True)


def test_an_unknown_path_is_not_found_for_every_role(
    holders: tuple[Service, dict[str, str]],
) -> None:
    service, observer = holders
    assert send(service, "GET", "/v1/nothing", headers=observer).status == 404
    assert send(service, "GET", IMAGES, headers=observer).status == 405
    refused = send(service, "DELETE", "/v1/videos/a", headers=observer).json()["error"]["message"]
    assert "DELETE /v1/videos/{id} needs" in refused
