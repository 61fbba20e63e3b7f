"""TLS, and that a token leaves this machine on no other line."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from conftest import Ask
from scripted import WAIT_S, Service, accepted, done

import moored
from moored import _channel
from moored._generated import residency_pb2

CLIENTS = [moored.Client, moored.AsyncClient]


@pytest.fixture(autouse=True)
def _as_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    _channel._system_roots.cache_clear()
    yield
    _channel._system_roots.cache_clear()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(path)
    return str(path)


@pytest.fixture
def encrypted(service: Service, authority: trustme.CA) -> Iterator[str]:
    """The address of a service behind TLS, with a certificate for localhost."""
    made = authority.issue_cert("localhost")
    key = made.private_key_pem.bytes()
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    tls = grpc.ssl_server_credentials([(key, chain)])
    service.on("GetStatus", residency_pb2.Status(uptime_ms=3))
    service.on("GenerateImage", [accepted(), done()])
    server, address = service.start(tls=tls)
    yield f"https://localhost:{address.rpartition(':')[2]}"
    server.stop(None).wait()


@pytest.fixture(params=["sync", "async"])
def asked(request: pytest.FixtureRequest, encrypted: str) -> Ask:
    return Ask(request.param, encrypted, {})


def test_https_is_tls_with_the_authority_that_is_named(
    service: Service, asked: Ask, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.settings = {"ca_file": ca_file, "token": "secret"}
    assert asked("status").uptime_ms == 3
    assert service.metadata["authorization"] == "Bearer secret"
    monkeypatch.setenv("MOORED_CA_FILE", ca_file)
    asked.settings = {}
    assert asked("status").uptime_ms == 3
    assert asked("generate_image", "x").seed == 7
    assert asked("health") == "serving"


def test_https_trusts_what_the_machine_trusts(
    asked: Ask, ca_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", ca_file)
    assert asked("status").uptime_ms == 3


def test_a_folder_of_authorities_is_what_the_machine_trusts_too(
    asked: Ask, ca_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "certs"
    folder.mkdir()
    Path(ca_file).rename(folder / "0a1b2c3d.0")
    (folder / "ffffffff.0").write_bytes(b"no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(folder))
    assert asked("status").uptime_ms == 3


def test_an_untrusted_certificate_is_refused_before_anything_is_sent(
    service: Service, asked: Ask
) -> None:
    asked.settings = {"token": "secret"}
    with pytest.raises(moored.ConnectionFailed, match=r"not trusted.*MOORED_CA_FILE"):
        asked("status", timeout=WAIT_S)
    assert not service.requests


def test_a_certificate_of_another_name_is_refused(
    service: Service, asked: Ask, ca_file: str
) -> None:
    asked.address = asked.address.replace("localhost", "127.0.0.1")
    asked.settings = {"ca_file": ca_file, "token": "secret"}
    with pytest.raises(moored.ConnectionFailed, match="not trusted"):
        asked("status", timeout=WAIT_S)
    assert not service.requests


def fingerprint(authority: trustme.CA, name: str = "localhost") -> tuple[trustme.LeafCert, str]:
    made = authority.issue_cert(name)
    der = ssl.PEM_cert_to_DER_cert(made.cert_chain_pems[0].bytes().decode())
    return made, f"sha256:{hashlib.sha256(der).hexdigest()}"


@pytest.fixture
def pinned(service: Service, authority: trustme.CA) -> Iterator[tuple[str, str]]:
    """The address of a service whose certificate names another machine, and its fingerprint."""
    made, digits = fingerprint(authority, "box.example")
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    tls = grpc.ssl_server_credentials([(made.private_key_pem.bytes(), chain)])
    service.on("GetStatus", residency_pb2.Status(uptime_ms=3))
    service.on("WatchStatus", [residency_pb2.Status(uptime_ms=3)])
    server, address = service.start(tls=tls)
    yield f"https://127.0.0.1:{address.rpartition(':')[2]}", digits
    server.stop(None).wait()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_pinned_certificate_is_trusted_without_authority_and_name(
    service: Service,
    pinned: tuple[str, str],
    kind: str,
    ca_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, digits = pinned
    pairs = ":".join(re.findall("..", digits.removeprefix("sha256:").upper()))
    for written in (digits, pairs):
        ask = Ask(kind, address, {"fingerprint": written, "token": "secret"})
        assert ask("status").uptime_ms == 3
    # Its name is not the address's: the authority alone would not do.
    both = Ask(kind, address, {"fingerprint": digits, "ca_file": ca_file})
    assert both("status").uptime_ms == 3
    monkeypatch.setenv("MOORED_FINGERPRINT", digits)
    monkeypatch.setenv("MOORED_ENDPOINT", address)
    assert Ask(kind, address, {})("status").uptime_ms == 3
    service.requests.clear()
    other = Ask(kind, address, {"fingerprint": "0" * 64, "token": "secret"})
    with pytest.raises(moored.ConnectionFailed, match="not the expected one") as refused:
        other("status", timeout=WAIT_S)
    assert refused.value.cause == "certificate"
    assert not service.requests, "nothing was sent"


@pytest.mark.parametrize("wrong", ["", "sha256:", "0" * 63, "0" * 65, "x" * 64])
def test_a_fingerprint_that_is_none_is_said_at_once(wrong: str) -> None:
    if not wrong:
        moored.Client("https://box", fingerprint=wrong)  # none is pinned
        return
    with pytest.raises(moored.InvalidRequest, match="no SHA-256 fingerprint"):
        moored.Client("https://box", fingerprint=wrong)


def test_a_pin_is_not_asked_for_without_tls(address: str) -> None:
    with pytest.raises(moored.InvalidRequest, match="fingerprint is for TLS"):
        moored.Client(address, fingerprint="0" * 64)
    with (
        moored.Client(f"https://{address}", fingerprint="0" * 64) as client,
        pytest.raises(moored.ConnectionFailed, match="answers without TLS"),
    ):
        client.status(timeout=WAIT_S)


def test_a_pin_of_the_environment_or_of_a_kept_token_is_not_dropped_without_tls(
    address: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(kept, {f"http://{address}": {"token": "secret", "fingerprint": "0" * 64}})
    for kind in CLIENTS:
        with pytest.raises(moored.InvalidRequest, match="fingerprint is for TLS"):
            kind(address)
    write(kept, {})
    monkeypatch.setenv("MOORED_ENDPOINT", address)
    monkeypatch.setenv("MOORED_FINGERPRINT", "0" * 64)
    with pytest.raises(moored.InvalidRequest, match="fingerprint is for TLS"):
        moored.Client()
    moored.Client("127.0.0.1:7")  # another service than that of the environment


def test_the_loop_goes_on_while_a_certificate_is_looked_at(
    pinned: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, digits = pinned
    looking, look = threading.Event(), threading.Event()
    as_before = _channel.pinned

    def slow(*arguments: Any) -> Any:
        looking.set()
        assert look.wait(WAIT_S), "the loop did not go on"
        return as_before(*arguments)

    monkeypatch.setattr(_channel, "pinned", slow)

    async def ask() -> None:
        async with moored.AsyncClient(address, fingerprint=digits) as client:
            calls = [asyncio.create_task(client.status()) for _ in range(3)]
            left = asyncio.create_task(client.status())
            assert await asyncio.to_thread(looking.wait, WAIT_S)
            left.cancel()
            watched = client.watch_status()
            first = asyncio.create_task(anext(watched))
            await asyncio.sleep(0)
            look.set()
            assert [status.uptime_ms for status in await asyncio.gather(*calls)] == [3, 3, 3]
            with pytest.raises(asyncio.CancelledError):
                await left
            assert (await first).uptime_ms == 3

    asyncio.run(ask())


def test_a_certificate_that_could_not_be_looked_at_is_looked_at_again(
    pinned: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, digits = pinned
    as_before = _channel.pinned
    failures = [moored.ConnectionFailed("not there yet", cause="unreachable", endpoint=address)]

    def sometimes(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return as_before(*arguments)

    monkeypatch.setattr(_channel, "pinned", sometimes)

    async def ask() -> None:
        async with moored.AsyncClient(address, fingerprint=digits) as client:
            with pytest.raises(moored.ConnectionFailed, match="not there yet"):
                await client.status()
            assert (await client.status()).uptime_ms == 3

    asyncio.run(ask())


def test_a_certificate_of_the_client_is_shown(
    service: Service, authority: trustme.CA, ca_file: str, tmp_path: Path
) -> None:
    made, digits = fingerprint(authority)
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    tls = grpc.ssl_server_credentials(
        [(made.private_key_pem.bytes(), chain)], authority.cert_pem.bytes(), True
    )
    service.on("GetStatus", residency_pb2.Status(uptime_ms=3))
    server, address = service.start(tls=tls)
    endpoint = f"https://localhost:{address.rpartition(':')[2]}"
    own = authority.issue_cert("alice")
    own.cert_chain_pems[0].write_to_path(tmp_path / "alice.pem")
    own.private_key_pem.write_to_path(tmp_path / "alice-key.pem")
    shown = {"certificate": tmp_path / "alice.pem", "certificate_key": tmp_path / "alice-key.pem"}
    for trusted in ({"ca_file": ca_file}, {"fingerprint": digits}):
        with moored.Client(endpoint, **trusted, **shown) as client:  # type: ignore[arg-type]
            assert client.status().uptime_ms == 3
        service.requests.clear()
        with (
            moored.Client(endpoint, **trusted) as client,  # type: ignore[arg-type]
            pytest.raises(moored.ConnectionFailed),
        ):
            client.status(timeout=WAIT_S)
        assert not service.requests
    server.stop(None).wait()
    with pytest.raises(moored.InvalidRequest, match="go together"):
        moored.Client("https://box", certificate=tmp_path / "alice.pem")


# Whose a token is.


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of credentials of this user."""
    file = tmp_path / "own" / "credentials.json"
    monkeypatch.setenv("MOORED_CREDENTIALS", str(file))
    return file


def write(file: Path, endpoints: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"version": 1, "endpoints": endpoints}))
    file.chmod(0o600)


def test_the_token_of_the_environment_goes_to_the_endpoint_of_the_environment_alone(
    service: Service, address: str, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.on("GetStatus", residency_pb2.Status())
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("MOORED_TOKEN_FILE", str(tmp_path / "token"))
    for own, sent in ((address, "Bearer secret"), ("box:7", None), ("", None)):
        monkeypatch.setenv("MOORED_ENDPOINT", own)
        with moored.Client(address) as client:
            client.status()
        assert service.metadata.get("authorization") == sent, own


def test_a_kept_token_goes_to_its_own_address_alone(
    service: Service, address: str, kept: Path
) -> None:
    service.on("GetStatus", residency_pb2.Status())
    host, _, port = address.rpartition(":")
    for key, sent in (
        (f"http://{address}", "Bearer secret"),
        (f"https://{address}", None),
        (f"http://{host}:{int(port) + 1}", None),
        (address, None),
    ):
        write(kept, {key: {"token": "secret"}})
        with moored.Client(address) as client:
            client.status()
        assert service.metadata.get("authorization") == sent, key
    with moored.Client(address, token="") as client:
        client.status()
    assert "authorization" not in service.metadata


def test_kept_tokens_that_others_may_read_are_refused(kept: Path) -> None:
    write(kept, {"http://box:1": {"token": "secret"}})
    kept.chmod(0o644)
    with pytest.raises(moored.Unauthenticated, match="chmod 600"):
        moored.Client("localhost:1")


def test_a_home_of_another_account_keeps_nothing(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "not yours", path)

    monkeypatch.setattr(Path, "exists", refuse)
    moored.Client("localhost:1")


def test_a_token_of_a_pack_stays_with_the_first_service_it_was_used_for(kept: Path) -> None:
    assert moored.bound_token("box:1", "secret") == "secret"
    assert moored.bound_token("box:1", "secret") == "secret"
    assert moored.bound_token("other:1", "another") == "another"
    assert moored.bound_token("other:1", "") == ""
    for other in ("other:1", "https://box:1", "box:2"):
        with pytest.raises(moored.Unauthenticated, match="belongs to http://box:1") as refused:
            moored.bound_token(other, "secret")
        assert "secret" not in str(refused.value)
    record = kept.with_name("tokens-used.json")
    assert "secret" not in record.read_text()
    assert record.stat().st_mode & 0o777 == 0o600
    write(kept, {"https://box:1": {"token": "secret"}})
    assert moored.bound_token("https://box:1", "secret") == "secret"


def test_https_to_a_service_without_tls_says_so(service: Service, address: str) -> None:
    with (
        moored.Client(f"https://{address}") as client,
        pytest.raises(moored.ConnectionFailed, match="answers without TLS"),
    ):
        client.status(timeout=WAIT_S)
    assert not service.requests


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("endpoint", ["box:1", "192.0.2.1:1", "127.box.example:1", "[2001:db8::1]"])
def test_a_token_is_not_sent_unencrypted_to_another_machine(kind: Any, endpoint: str) -> None:
    with pytest.raises(moored.UnencryptedToken) as refused:
        kind(endpoint, token="secret")
    said = str(refused.value)
    assert "secret" not in said
    for remedy in ("https://", "ssh -L", "insecure_token=True", "MOORED_INSECURE_TOKEN=1"):
        assert remedy in said


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize(
    "endpoint", ["localhost:1", "127.0.0.2:1", "[::1]:1", "unix:/run/moored.sock", "https://box"]
)
def test_a_token_is_sent_on_this_machine_and_over_tls(kind: Any, endpoint: str) -> None:
    kind(endpoint, token="secret")


@pytest.mark.parametrize("kind", CLIENTS)
def test_insecure_token_sends_a_token_unencrypted(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind("box", token="secret", insecure_token=True)
    monkeypatch.setenv("MOORED_INSECURE_TOKEN", "1")
    kind("box", token="secret")
    with pytest.raises(moored.UnencryptedToken):
        kind("box", token="secret", insecure_token=False)
    monkeypatch.setenv("MOORED_INSECURE_TOKEN", "0")
    with pytest.raises(moored.UnencryptedToken):
        kind("box", token="secret")
    kind("box")
    kind("box", token="")


def test_a_ca_file_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(moored.InvalidRequest, match=r"CA file .*gone"):
        moored.Client("https://box", ca_file=tmp_path / "gone")
    (tmp_path / "other").write_text("hello")
    with pytest.raises(moored.InvalidRequest, match="holds no certificate"):
        moored.Client("https://box", ca_file=tmp_path / "other")
    with pytest.raises(moored.InvalidRequest, match="write https://box:50051"):
        moored.Client("box", ca_file=tmp_path / "other")
