"""`https://` is TLS, and a token is not sent to another machine unencrypted."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from service import BINARY, Service, clean_environment, run

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of `localhost`, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


class Proxy(grpc.GenericRpcHandler):
    """A stand-in of a proxy with TLS: answers every call with nothing, and keeps what it received."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        self.sent.append(dict(details.invocation_metadata) | {":path": details.method})
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


@pytest.fixture
def proxy(certificate: tuple[Path, Path]) -> Iterator[tuple[Proxy, int]]:
    handler = Proxy()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    chain, key = (path.read_bytes() for path in certificate)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    yield handler, port
    server.stop(None).wait()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return file


def test_https_is_encrypted_and_trusted_by_the_given_certificates(
    proxy: tuple[Proxy, int], certificate: tuple[Path, Path], token_file: Path
) -> None:
    handler, port = proxy
    env = clean_environment() | {"MOORED_CA_FILE": str(certificate[0])}
    given = ("jobs", "--token-file", str(token_file))
    for host in ("localhost", "127.0.0.1"):
        done = run(*given, "--endpoint", f"https://{host}:{port}", env=env)
        assert (done.returncode, done.stdout) == (0, "no jobs\n"), done.stderr
    assert [sent["authorization"] for sent in handler.sent] == [f"Bearer {TOKEN}"] * 2


def test_an_untrusted_certificate_is_refused(proxy: tuple[Proxy, int], token_file: Path) -> None:
    handler, port = proxy
    endpoint = f"https://localhost:{port}"
    done = run("jobs", "--token-file", str(token_file), "--endpoint", endpoint)
    assert done.returncode == 3
    assert "certificate" in done.stderr
    assert "MOORED_CA_FILE" in done.stderr, "what to do is told"
    assert handler.sent == []


def test_https_to_a_plain_text_service_fails(tmp_path: Path) -> None:
    service = Service(state=tmp_path / "state")
    try:
        done = run("status", "--endpoint", f"https://{service.address}")
        assert done.returncode == 3, done.stdout
    finally:
        service.kill()


def test_a_token_is_sent_unencrypted_only_with_insecure_token(token_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # The same machine under a name that is not loopback's.
        endpoint = f"http://0.0.0.0:{listener.getsockname()[1]}"
        given = ("status", "--token-file", str(token_file), "--endpoint", endpoint)
        for command in (given, (*given, "--json")):
            done = run(*command)
            assert done.returncode == 7
            said = done.stdout + done.stderr
            for word in ("https://", "ssh -L", "--insecure-token"):
                assert word in said
            assert TOKEN not in said
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
        told = clean_environment() | {"MOORED_INSECURE_TOKEN": "1"}
        for command, env in ((given, told), ((*given, "--insecure-token"), clean_environment())):
            listener.settimeout(30)
            asking = subprocess.Popen(
                [str(BINARY), *command], env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE
            )
            connection, _ = listener.accept()
            connection.close()
            asking.kill()
            asking.communicate()
