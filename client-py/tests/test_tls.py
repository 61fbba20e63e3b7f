"""TLS, and that a token leaves this machine on no other line."""

from __future__ import annotations

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
