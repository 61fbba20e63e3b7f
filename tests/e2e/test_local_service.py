"""A program starts a service for its user: once for the machine, and not where an address is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import moored
import pytest
from moored import _address
from waiting import wait_until

from service import BINARY, ReservedPort, clean_environment

Run = Callable[..., "subprocess.Popen[str]"]
# Says what came of it; ends when its standard input does.
PROGRAM = """
import sys
import moored
from moored import _address
_address.DEFAULT_ENDPOINT = sys.argv[1]
local = moored.start_local_service(keep=sys.argv[2] == "keep", arguments=["--device", "cpu"])
with moored.Client(local.endpoint) as client:
    print(local.was_started, client.health(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def port() -> Iterator[ReservedPort]:
    yield ReservedPort()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which `moored` is on the PATH, and the folders of the user are empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "moored").symlink_to(BINARY)
    own = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path / "home")}
    own["MOORED_TOKEN"] = "of another service"  # as the Griptape library keeps it
    return clean_environment() | own | {"XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def run(environment: dict[str, str], port: ReservedPort) -> Iterator[Run]:
    """Starts `PROGRAM` in a process of its own."""
    running: list[subprocess.Popen[str]] = []

    def start(keep: str = "no") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, port.address, keep],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """The line that the program prints once it has a service."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        process.kill()
        raise AssertionError(process.communicate()[1])
    return line


def services_at(address: str) -> list[int]:
    """The processes that serve there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if b"serve" in words and address.encode() in words:
            found.append(int(folder.name))
    return found


def test_several_programs_start_one_service_which_ends_with_the_one_that_started_it(
    run: Run, port: ReservedPort
) -> None:
    programs = [run() for _ in range(3)]
    lines = [said(one) for one in programs]
    assert sorted(lines) == ["False serving", "False serving", "True serving"]
    assert len(services_at(port.address)) == 1
    starter = programs.pop(lines.index("True serving"))
    for other in programs:
        other.communicate()
    assert len(services_at(port.address)) == 1
    starter.send_signal(signal.SIGKILL)  # however it ends
    wait_until(lambda: not services_at(port.address), "the service has ended")


def test_a_service_that_is_kept_outlives_the_program(run: Run, port: ReservedPort) -> None:
    first = run("keep")
    assert said(first) == "True serving"
    first.communicate()
    (service,) = services_at(port.address)
    try:
        assert said(run()) == "False serving"
    finally:
        os.kill(service, signal.SIGTERM)
    wait_until(lambda: not services_at(port.address), "the service has ended")


def here(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], port: ReservedPort) -> None:
    """This process has that environment, and `port` where programs look for a service."""
    for name in ("PATH", "HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, environment[name])
    for name in ("MOORED_ENDPOINT", "MOORED_BINARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_address, "DEFAULT_ENDPOINT", port.address)


def test_none_is_started_beside_an_address_that_is_named(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], port: ReservedPort
) -> None:
    here(monkeypatch, environment, port)
    assert moored.can_start_local_service()
    monkeypatch.setenv("MOORED_ENDPOINT", "box:50051")
    assert not moored.can_start_local_service()
    with pytest.raises(moored.NotStarted, match="MOORED_ENDPOINT names the service"):
        moored.start_local_service()
    assert not services_at(port.address)


def test_what_the_service_said_last_is_told_where_it_does_not_start(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], port: ReservedPort
) -> None:
    here(monkeypatch, environment, port)
    with pytest.raises(moored.NotStarted, match="as soon as it was started: .*queue.max_jbs"):
        moored.start_local_service(arguments=["--set", "queue.max_jbs=1"])


def test_a_service_that_this_program_started_can_be_ended_by_it(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], port: ReservedPort
) -> None:
    here(monkeypatch, environment, port)
    local = moored.start_local_service(arguments=["--device", "cpu"])
    assert local.was_started
    assert local.log is not None
    assert "moored is listening" in local.log.read_text(encoding="utf-8")
    assert not moored.start_local_service().was_started
    local.stop()
    assert not services_at(port.address)


def test_without_a_program_it_is_said_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], port: ReservedPort
) -> None:
    here(monkeypatch, environment | {"PATH": "/nowhere"}, port)
    assert moored.local_program() is None
    assert not moored.can_start_local_service()
    with pytest.raises(moored.NotStarted, match="install the package moored-service for"):
        moored.start_local_service()


def test_the_program_of_the_package_comes_before_the_one_on_the_path(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], port: ReservedPort, tmp_path: Path
) -> None:
    here(monkeypatch, environment, port)
    assert moored.local_program() == Path(environment["PATH"].split(os.pathsep)[0]) / "moored"
    about = tmp_path / "lib/moored_service-0.1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moored-service\nVersion: 0.1.0\n")
    (about / "RECORD").write_text("../scripts/moored,,\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/moored").touch()
    monkeypatch.syspath_prepend(about.parent)
    assert moored.local_program() == tmp_path / "scripts/moored"
