"""Where a node finds its service, which token goes there, and the thread that speaks to it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import grpc
import moored
import pytest
import trustme
from conftest import CLIENT, HERE, PACK, ROOT
from moored._generated import residency_pb2

from service import Service

Settings = Callable[..., None]

DEADLINE_S = 60.0


@pytest.fixture
def connection(pack: ModuleType) -> Any:
    """The pack's module."""
    return pack.connection


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """ComfyUI's settings: `settings(endpoint="...")`."""
    folder_paths.set_user_directory(str(tmp_path))

    def write(**values: str) -> None:
        (tmp_path / "default").mkdir(exist_ok=True)
        named = {f"moored.{name}": value for name, value in values.items()}
        path = tmp_path / "default" / "comfy.settings.json"
        path.write_text(json.dumps({"Comfy.Other": True} | named))

    return write


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A file in the folder for tokens; the setting is its name."""
    path = tmp_path / "moored" / "token"
    path.parent.mkdir()
    path.write_text("secret\n")
    return "token"


def test_without_settings_it_is_the_clients_own_rule(
    connection: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connection.target() == connection.Target("127.0.0.1:50051", None)
    monkeypatch.setenv("MOORED_ENDPOINT", "box:1")
    assert connection.target() == connection.Target("box:1", None)


def test_settings_are_stronger_than_the_environment_and_a_node_than_both(
    connection: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOORED_ENDPOINT", "box:1")
    settings(endpoint=" box:2 ")
    assert connection.target().endpoint == "box:2"
    assert connection.target(connection.Server(" ")).endpoint == "box:2"
    assert connection.target(connection.Server("http://box:3/")).endpoint == "box:3"


def test_the_token_goes_to_the_usual_service_alone(
    connection: Any, settings: Settings, token_file: str
) -> None:
    settings(endpoint="box:2", token_file=token_file)
    assert connection.target().token == "secret"
    assert connection.target(connection.Server("http://box:2")).token == "secret"
    assert connection.target(connection.Server("elsewhere:2")).token is None
    assert "secret" not in repr(connection.target())


def test_a_token_of_the_settings_stays_with_the_service_it_was_first_used_for(
    connection: Any, settings: Settings, token_file: str
) -> None:
    """Everybody who opens ComfyUI's page may write its settings."""
    settings(endpoint="box:2", token_file=token_file)
    assert connection.target().token == "secret"
    for other in ("stranger:2", "https://box:2", "box:3"):
        settings(endpoint=other, token_file=token_file)
        with pytest.raises(moored.Unauthenticated, match="belongs to http://box:2") as refused:
            connection.target()
        assert "secret" not in str(refused.value)
    settings(endpoint="box:2", token_file=token_file)
    assert connection.target().token == "secret"


@pytest.mark.parametrize("named", ["a node", "the settings"])
def test_what_is_sent_to_a_service_that_a_stranger_names(
    connection: Any,
    settings: Settings,
    token_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
) -> None:
    """Nothing of the settings and of the environment; what is kept for exactly that address."""
    monkeypatch.syspath_prepend(str(ROOT / "client-py" / "tests"))
    from scripted import Service as Scripted

    scripted = Scripted()
    scripted.on("GetStatus", residency_pb2.Status(uptime_ms=3))
    server, address = scripted.start()
    monkeypatch.setenv("MOORED_TOKEN_FILE", str(tmp_path / "moored" / "token"))
    monkeypatch.setenv("MOORED_ENDPOINT", "box:1")
    kept = tmp_path / "kept.json"
    monkeypatch.setenv("MOORED_CREDENTIALS", str(kept))

    def sent() -> Any:
        if named == "the settings":
            settings(endpoint=address)
            target = connection.target()
        else:
            settings(endpoint="box:2", token_file=token_file)
            target = connection.target(connection.Server(address))
        asyncio.run(connection.run(lambda client: client.status(), target))
        return scripted.metadata.get("authorization")

    try:
        assert sent() is None
        for key, token in ((f"https://{address}", None), (f"http://{address}", "Bearer of-it")):
            endpoints = {key: {"token": "of-it"}}
            kept.write_text(json.dumps({"version": 1, "endpoints": endpoints}))
            kept.chmod(0o600)
            connection._clients.clear()
            assert sent() == token
    finally:
        server.stop(None).wait()


def test_the_token_of_the_environment_does_not_go_to_a_service_of_the_settings(
    connection: Any, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "elsewhere"
    path.write_text("of the environment\n")
    monkeypatch.setenv("MOORED_TOKEN_FILE", str(path))
    monkeypatch.setenv("MOORED_ENDPOINT", "box:1")
    assert connection.target().token == "of the environment"
    settings(endpoint="http://box:1")
    assert connection.target().token == "of the environment"
    settings(endpoint="stranger:1")
    assert connection.target().token is None


@pytest.mark.parametrize("named_by", ["settings", "environment"])
@pytest.mark.parametrize("content", ["x" * 5000, "first\nsecond", "\x00\x01", "schlüssel"])
def test_an_invalid_token_file_is_not_sent(
    connection: Any,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    named_by: str,
) -> None:
    path = tmp_path / "moored" / "other"
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    if named_by == "settings":
        settings(token_file="other")
    else:
        monkeypatch.setenv("MOORED_TOKEN_FILE", str(path))
    with pytest.raises(moored.Unauthenticated, match="is not one line of plain letters") as refused:
        connection.target()
    assert content not in str(refused.value)


def test_a_token_file_that_is_missing_is_named(connection: Any, settings: Settings) -> None:
    settings(token_file="none-there")
    with pytest.raises(moored.Unauthenticated, match="none-there .*No such file"):
        connection.target()


@pytest.mark.parametrize("named", ["{elsewhere}", "../elsewhere", "link", "~/elsewhere", "."])
def test_the_settings_name_no_file_outside_of_the_folder_for_tokens(
    connection: Any, settings: Settings, tmp_path: Path, token_file: str, named: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("password\n")
    (tmp_path / "moored" / "link").symlink_to(elsewhere)
    settings(endpoint="https://stranger", token_file=named.format(elsewhere=elsewhere))
    with pytest.raises(moored.Unauthenticated, match="has to lie in .*MOORED_TOKEN_FILE"):
        connection.target()


@pytest.mark.parametrize("named", ["a\0b", "a\ud800b", "~\0", "~nobody-of-this-name"])
def test_a_token_file_with_an_impossible_path_is_reported(
    connection: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    settings(token_file=named)
    with pytest.raises(moored.Unauthenticated, match="has to lie in|cannot be read"):
        connection.target()


def test_a_token_file_that_is_a_link_to_itself_is_reported(
    connection: Any, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "moored").mkdir()
    (tmp_path / "moored" / "ring").symlink_to(tmp_path / "moored" / "ring")
    settings(token_file="ring")
    with pytest.raises(moored.Unauthenticated, match="has to lie in|cannot be read"):
        connection.target()


@pytest.mark.parametrize("address", ["box\0:1", "box\ud800:1", "bo\nx:1", "unix:\ud800"])
def test_an_address_with_impossible_characters_is_reported_on_the_node(
    pack: ModuleType, connection: Any, settings: Settings, address: str
) -> None:
    for wrong in (lambda: connection.target(connection.Server(address)), connection.target):
        with pytest.raises(pack.failures.Failure) as told, pack.failures.told(None):
            wrong()
        str(told.value).encode()
        settings(endpoint=address)


@pytest.mark.parametrize("address", ["unix:/var/run/docker.sock", "UNIX:/run/x"])
def test_sockets_are_named_by_the_environment_alone(
    connection: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    with pytest.raises(moored.InvalidRequest, match="MOORED_ENDPOINT"):
        connection.target(connection.Server(address))
    settings(endpoint=address)
    with pytest.raises(moored.InvalidRequest, match="MOORED_ENDPOINT"):
        connection.target()
    settings()
    monkeypatch.setenv("MOORED_ENDPOINT", "unix:/run/moored.sock")
    assert connection.target().endpoint == "unix:/run/moored.sock"


def test_a_host_name_may_begin_like_a_socket_address(connection: Any, settings: Settings) -> None:
    settings()
    assert connection.target(connection.Server("unixbox:50051")).endpoint == "unixbox:50051"
    with pytest.raises(moored.InvalidRequest, match="no address of a service"):
        connection.target(connection.Server("unix-abstract:a"))


def test_an_invalid_address_is_reported(connection: Any, settings: Settings) -> None:
    with pytest.raises(moored.InvalidRequest, match="write host:port or https://host:port"):
        connection.target(connection.Server("https://box/path"))


def test_an_https_address_is_tls_and_its_token_travels(
    connection: Any,
    settings: Settings,
    token_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "client-py" / "tests"))
    from scripted import Service as Scripted

    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    made = authority.issue_cert("localhost")
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    scripted = Scripted()
    scripted.on("GetStatus", residency_pb2.Status(uptime_ms=3))
    tls = grpc.ssl_server_credentials([(made.private_key_pem.bytes(), chain)])
    server, address = scripted.start(tls=tls)
    settings(endpoint=f"https://localhost:{address.rpartition(':')[2]}", token_file=token_file)
    monkeypatch.setenv("MOORED_CA_FILE", str(tmp_path / "authority.pem"))

    async def ask() -> moored.Status:
        return await connection.run(lambda client: client.status(), connection.target())

    try:
        assert asyncio.run(ask()).uptime_ms == 3
    finally:
        server.stop(None).wait()
    assert scripted.metadata["authorization"] == "Bearer secret"


def test_a_token_does_not_leave_this_machine_unencrypted(
    pack: ModuleType, connection: Any, settings: Settings, token_file: str
) -> None:
    settings(endpoint="box:2", token_file=token_file)

    async def ask() -> moored.Status:
        with pack.failures.told(None):
            return await connection.run(lambda client: client.status(), connection.target())

    with pytest.raises(pack.failures.Failure, match="https://box:2.*where ComfyUI is started"):
        asyncio.run(ask())


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_damaged_settings_file_is_ignored(
    connection: Any, settings: Settings, tmp_path: Path, content: str
) -> None:
    settings()
    (tmp_path / "default" / "comfy.settings.json").write_text(content)
    assert connection.target().endpoint == "127.0.0.1:50051"


def test_one_client_serves_every_loop(connection: Any, demo_service: Service) -> None:
    target = connection.Target(demo_service.address)
    seen: list[tuple[moored.AsyncClient, int]] = []

    async def work(client: moored.AsyncClient) -> str:
        seen.append((client, threading.get_ident()))
        return await client.health()

    for _ in range(3):
        assert asyncio.run(connection.run(work, target)) == "serving"
    assert len(set(seen)) == 1
    assert seen[0][1] != threading.get_ident()


def test_cancelling_the_awaiting_task_cancels_the_work(
    connection: Any, demo_service: Service
) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def work(client: moored.AsyncClient) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def prompt() -> None:
        task = asyncio.ensure_future(connection.run(work, connection.Target(demo_service.address)))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(prompt())
    assert cancelled.wait(DEADLINE_S)


def test_a_service_that_is_back_is_found_at_once(
    connection: Any, serve: Callable[..., Service]
) -> None:
    service = serve("sim:24GiB")
    target = connection.Target(service.address)

    async def work(client: moored.AsyncClient) -> str:
        return await client.health()

    assert asyncio.run(connection.run(work, target))
    service.kill()
    for _ in range(3):
        with pytest.raises(moored.ConnectionFailed):
            asyncio.run(connection.run(work, target))
    serve("sim:24GiB", listen=service.address)
    assert asyncio.run(connection.run(work, target)) == "serving"


def test_without_the_client_it_says_what_to_install() -> None:
    """ComfyUI shows the last line in its log, and starts without the nodes."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys\nsys.modules['moored'] = None\n" + IMPORT, str(PACK)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(HERE / "standin")},
    )
    assert done.returncode == 1
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("ImportError: The nodes of moored need its client")
    assert told.endswith(f"{sys.executable} -m pip install '{ROOT / 'client-py'}[images]'")


IMPORT = """
import asyncio, importlib.util, json, sys, threading
spec = importlib.util.spec_from_file_location("pack", sys.argv[1] + "/__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules["pack"] = module
spec.loader.exec_module(module)
extension = asyncio.run(module.comfy_entrypoint())
asyncio.run(extension.on_load())
nodes = asyncio.run(extension.get_node_list())
threads = [thread.name for thread in threading.enumerate()]
print(json.dumps([len(nodes), "torch" in sys.modules, threads]))
"""


def test_loading_the_pack_opens_no_connection_and_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(PACK)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": f"{CLIENT}:{HERE / 'standin'}", "MOORED_ENDPOINT": "192.0.2.1:9"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [22, False, ["MainThread"]]
