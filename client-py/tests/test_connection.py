from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from conftest import Ask
from scripted import (
    DEADLINES_S,
    WAIT_S,
    Service,
    accepted,
    done,
    gone_event,
    pieces,
    reason,
    refuse,
)

import moored
from moored import _channel, _credentials
from moored._generated import residency_pb2, rpc_pb2

SERVING = rpc_pb2.HealthCheckResponse.SERVING
NOT_SERVING = rpc_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nothing listens, nor can while the test runs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def later() -> Iterator[str]:
    """An address where nothing listens yet, and that the kernel gives to nobody else meanwhile."""
    with socket.socket() as held:
        # With it, a server that sets the same may listen there, as all of gRPC do.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, "127.0.0.1:50051"),
        ("box", "box:50051"),
        ("box:1", "box:1"),
        ("http://box:1/", "box:1"),
        ("127.0.0.1", "127.0.0.1:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:1", "[::1]:1"),
        ("::1", "[::1]:50051"),
        ("unix:/run/moored.sock", "unix:/run/moored.sock"),
        ("https://box", "https://box:443"),
        ("HTTPS://box:8443/", "https://box:8443"),
        ("https://[::1]:1", "https://[::1]:1"),
    ],
)
def test_endpoints(given: str | None, meant: str) -> None:
    assert _channel.endpoint_of(given) == meant


CASES = json.loads(Path(__file__).with_name("addresses.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=[case["written"] for case in CASES])
def test_addresses_are_read_as_the_command_line_reads_them(case: dict[str, str | None]) -> None:
    written, key = case["written"] or "", case["key"]
    if key is None:
        with pytest.raises(moored.InvalidRequest):
            _channel.endpoint_of(written)
        return
    assert _credentials._key(_channel.endpoint_of(written)) == key
    assert _credentials._key(_channel.endpoint_of(key)) == key, "it is read again as itself"


def test_the_path_of_a_socket_is_kept_as_it_is() -> None:
    assert _credentials._key(_channel.endpoint_of("unix:/run/Box")) == "unix:/run/Box"


def test_both_programs_look_for_a_service_at_the_same_address() -> None:
    defaults = Path(__file__).parents[2] / "service" / "config" / "src" / "default.toml"
    own = _credentials._key(_channel.endpoint_of(None))
    assert f'endpoint = "{own}"' in defaults.read_text(encoding="utf-8")


def test_where_the_endpoint_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORED_ENDPOINT", "box:7")
    assert moored.Client().endpoint == "box:7"
    assert moored.AsyncClient("other:8").endpoint == "other:8"
    assert repr(moored.Client()) == "Client('box:7')"


@pytest.mark.parametrize("wrong", ["ftp://box", "https://box/path", "https://", "http://me@box"])
def test_an_address_that_is_none_is_refused_with_what_to_write(wrong: str) -> None:
    for kind in (moored.Client, moored.AsyncClient):
        with pytest.raises(moored.InvalidRequest, match="https://host:port"):
            kind(wrong)


def test_the_default_client_id_is_user_at_host(
    service: Service, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.on("GenerateImage", [accepted(), done()])

    def name() -> str:
        ask("generate_image", "x")
        return service.requests["GenerateImage"].options.client_id

    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    assert name() == "ann@box"
    monkeypatch.setenv("MOORED_CLIENT", "nightly")
    assert name() == "nightly"
    ask.settings["client_id"] = "ben"
    assert name() == "ben"
    ask.settings["client_id"] = ""
    assert name() == "", "the address that the service sees"


def test_an_account_without_a_name_can_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 10001")

    monkeypatch.setattr("getpass.getuser", nobody)
    monkeypatch.setattr("socket.gethostname", lambda: "b" * 500)
    name = moored.Client().client_id
    assert name.startswith("somebody@b")
    assert len(name) == 100


def test_http_proxies_are_not_used_for_loopback() -> None:
    off = ("grpc.enable_http_proxy", 0)
    for endpoint in ("localhost:1", "127.0.0.1:1", "[::1]:1", "unix:/a"):
        assert off in _channel.options_for(endpoint)
    for endpoint in ("box:1", "127.box.example:1"):
        assert off not in _channel.options_for(endpoint)


def test_the_token_comes_from_the_argument_else_the_file(
    service: Service, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.on("GetStatus", residency_pb2.Status())
    service.on("GenerateImage", [accepted()])
    ask("status")
    assert "authorization" not in service.metadata
    assert service.metadata["user-agent"].startswith("moored-python/")
    (tmp_path / "token").write_text("from-file\n")
    monkeypatch.setenv("MOORED_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("MOORED_ENDPOINT", ask.address)
    ask("status")
    assert service.metadata["authorization"] == "Bearer from-file"
    ask.settings["token"] = "given"
    ask.items("stream_image", "x")
    assert service.metadata["authorization"] == "Bearer given"
    with pytest.raises(moored.Unauthenticated, match="gone"):
        moored.Client(token_file=tmp_path / "gone")


@pytest.mark.parametrize(
    "content", [b"two\nlines\n", "schlüssel".encode(), b"\x00\x01", b"\xff\xfe"]
)
def test_an_invalid_token_file_is_named_and_its_content_is_not_shown(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(moored.Unauthenticated, match=r"token.*token") as refused:
        moored.Client(token_file=tmp_path / "token")
    assert "lines" not in str(refused.value)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_call_without_a_service_says_how_to_start_one(nowhere: str, kind: str) -> None:
    ask = Ask(kind, nowhere, {})
    for method, *args in (["status"], ["generate_image", "x"], ["get_latent", "l"], ["health"]):
        with pytest.raises(moored.ConnectionFailed, match="moored serve") as caught:
            ask(method, *args)
        assert str(caught.value) == (
            f"No moored service answers at {nowhere}: start one with `moored serve`, or name its "
            "address by MOORED_ENDPOINT"
        )
        assert (caught.value.cause, caught.value.endpoint) == ("unreachable", nowhere)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_wait_until_ready_fails_after_its_timeout(nowhere: str, kind: str) -> None:
    with pytest.raises(moored.ConnectionFailed, match=r"within 0\.2 s") as caught:
        Ask(kind, nowhere, {})("wait_until_ready", 0.2)
    assert caught.value.endpoint == nowhere


def test_a_lost_connection() -> None:
    service, begun = Service(), threading.Event()

    def answer(request: object, context: grpc.ServicerContext) -> object:
        gone = gone_event(context)
        yield accepted()
        begun.set()
        gone.wait(WAIT_S)

    service.on("GenerateImage", answer)
    server, address = service.start()
    with moored.Client(address) as client:
        stream = client.stream_image("x")
        next(stream)
        assert begun.wait(WAIT_S)
        server.stop(None).wait()
        with pytest.raises((moored.ConnectionFailed, moored.Cancelled)) as caught:
            next(stream)
        assert caught.value.job_id == "job-1"
        if isinstance(caught.value, moored.ConnectionFailed):
            assert "was lost before the job ended: see whether" in str(caught.value)
            assert (caught.value.cause, caught.value.endpoint) == ("lost", address)


def test_a_machine_that_is_not_there_is_named() -> None:
    with pytest.raises(moored.ConnectionFailed, match="no machine by the name of nothing"):
        moored.Client("nothing.invalid:1").status(timeout=WAIT_S)


def test_health(service: Service, ask: Ask) -> None:
    assert ask("health") == "serving"
    assert service.requests["Check"].service == ""
    service.health = [NOT_SERVING]
    assert ask("health", "cuda:0") == "not_serving"
    assert service.requests["Check"].service == "moored.card.cuda:0"


def test_wait_until_ready(service: Service, ask: Ask) -> None:
    service.health = [NOT_SERVING, NOT_SERVING, SERVING]
    assert ask("wait_until_ready", WAIT_S, card="cpu") is None
    assert service.requests["Watch"].service == "moored.card.cpu"
    service.health = [NOT_SERVING]
    for timeout in DEADLINES_S:
        with pytest.raises((moored.CardNotReady, moored.ConnectionFailed)) as caught:
            ask("wait_until_ready", timeout)
        if caught.type is not moored.ConnectionFailed:
            break
    assert caught.type is moored.CardNotReady
    assert "not_serving" in str(caught.value)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_service_that_starts_late(later: str, kind: str) -> None:
    service, failed = Service(), []

    def wait() -> None:
        try:
            Ask(kind, later, {})("wait_until_ready", WAIT_S)
        except moored.MooredError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    server, _ = service.start(later)
    waiting.join()
    server.stop(None).wait()
    assert not failed


def test_a_service_that_was_restarted(later: str) -> None:
    service = Service()
    service.on("GetStatus", residency_pb2.Status(uptime_ms=3))
    with moored.Client(later) as client:
        for _ in range(2):
            server, _ = service.start(later)
            client.wait_until_ready(WAIT_S)
            assert client.status().uptime_ms == 3
            server.stop(None).wait()
            with pytest.raises(moored.ConnectionFailed):
                client.status()


def test_a_wrong_token_fails_without_a_retry(service: Service, ask: Ask) -> None:
    def refused(request: object, context: grpc.ServicerContext) -> None:
        refuse(context, grpc.StatusCode.UNAUTHENTICATED, "Whose token?", reason("UNAUTHENTICATED"))

    service.on("GetStatus", refused)
    with pytest.raises(moored.Unauthenticated, match="Whose"):
        ask("status")


def test_large_messages_pass(service: Service, ask: Ask) -> None:
    # Over the 4 MiB that gRPC takes unless told otherwise.
    data = bytes(5_000_000)
    service.on("GenerateImage", lambda request, context: iter([*pieces(data, size=len(data))]))
    (artifact,) = ask.items("stream_image", "x", init_image=data)
    assert len(artifact.chunk) == len(data)
    assert len(service.requests["GenerateImage"].init_image) == len(data)


def test_an_async_client_can_be_made_without_a_loop(service: Service, address: str) -> None:
    service.on("GetStatus", residency_pb2.Status(uptime_ms=3))
    client = moored.AsyncClient(address)

    async def main() -> int:
        async with client:
            return (await client.status()).uptime_ms

    assert asyncio.run(main()) == 3
