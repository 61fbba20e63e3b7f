"""gRPC-Web, the gRPC of pages: the same methods and tokens, and nothing for pages of other sites."""

from __future__ import annotations

import struct
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from moored._generated import residency_pb2, server_pb2
from test_access import make_token

from service import Service

Simulate = Callable[..., Service]
KIND = "application/grpc-web+proto"
INFO = "moored.v1.Server/GetServerInfo"


def call(
    service: Service, method: str, message: Any, kind: str = KIND, **headers: str
) -> tuple[list[bytes], dict[str, str]]:
    """The messages of an answer, and its trailers, which may be among the headers."""
    data = message.SerializeToString()
    body = struct.pack(">BI", 0, len(data)) + data
    request = urllib.request.Request(
        f"http://{service.address}/{method}", data=body, headers={"Content-Type": kind} | headers
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        trailers = {name.lower(): value for name, value in answer.headers.items()}
        rest, messages = answer.read(), []
    while rest:
        flags, length = struct.unpack(">BI", rest[:5])
        part, rest = rest[5 : 5 + length], rest[5 + length :]
        if flags & 0x80:
            lines = part.decode().strip().split("\r\n")
            trailers |= dict(line.split(":", 1) for line in lines)
        else:
            messages.append(part)
    return messages, trailers


def test_a_page_makes_the_calls_of_every_client(simulate: Simulate) -> None:
    service = simulate("sim:24GiB")
    (message,), trailers = call(service, INFO, server_pb2.GetServerInfoRequest())
    info = server_pb2.ServerInfo.FromString(message)
    assert trailers["grpc-status"].strip() == "0"
    assert (info.account, info.role) == ("", "administer")
    with service.client() as client:
        assert info.version == client.server_info().version
        client.load("small")
    events, trailers = call(
        service, "moored.v1.Residency/Unload", residency_pb2.UnloadRequest(client_id="page")
    )
    assert trailers["grpc-status"].strip() == "0"
    assert residency_pb2.UnloadResponse.FromString(events[0]).freed


def test_a_token_is_asked_for_and_its_role_holds(simulate: Simulate, tmp_path: Path) -> None:
    token = make_token(tmp_path / "state-0", "watcher", role="observe")
    service = simulate("sim:24GiB")
    messages, trailers = call(service, INFO, server_pb2.GetServerInfoRequest())
    assert (messages, trailers["grpc-status"].strip()) == ([], "16")
    with_token = {"Authorization": f"Bearer {token}"}
    (message,), _ = call(service, INFO, server_pb2.GetServerInfoRequest(), **with_token)
    info = server_pb2.ServerInfo.FromString(message)
    assert (info.account, info.role) == ("watcher", "observe")
    messages, trailers = call(
        service, "moored.v1.Residency/Unload", residency_pb2.UnloadRequest(), **with_token
    )
    assert (messages, trailers["grpc-status"].strip()) == ([], "7")


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example:50051"}],
    ids=["origin", "null", "host"],
)
def test_a_page_of_another_site_is_refused(simulate: Simulate, headers: dict[str, str]) -> None:
    service = simulate("sim:24GiB")
    with service.client() as client:
        client.load("small")
        request = residency_pb2.UnloadRequest()
        messages, trailers = call(service, "moored.v1.Residency/Unload", request, **headers)
        assert (messages, trailers["grpc-status"].strip()) == ([], "7")
        assert "OTHER_SITE" in str(trailers) or trailers["grpc-message"]
        assert any(card.residents for card in client.status().cards)


def test_grpc_itself_is_not_taken_over_http_1(simulate: Simulate) -> None:
    """A page could send it under a name that it has given this machine's address."""
    service = simulate("sim:24GiB")
    for kind in ("application/grpc", "application/grpc+proto"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            call(service, INFO, server_pb2.GetServerInfoRequest(), kind)
        assert refused.value.code in (404, 405)
