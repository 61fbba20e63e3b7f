"""Ctrl-C and SIGTERM: how a command that waits ends, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import moored
import pytest
from PIL import Image
from processes import children_of
from test_lifecycle import end_of, running
from waiting import wait_until

from service import BINARY, ReservedPort, Service, clean_environment

Simulate = Callable[..., Service]

WAIT_S = 60


@contextlib.contextmanager
def begun(
    *arguments: str, folder: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in this folder, and is ended with the test."""
    process = subprocess.Popen(
        [str(BINARY), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=clean_environment() | {"TMPDIR": str(folder / "tmp")} | (environment or {}),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes a connection, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        yield server


def wait_for_a_call(server: socket.socket) -> socket.socket:
    line, _ = server.accept()
    line.settimeout(WAIT_S)
    assert line.recv(1), "it asks"
    return line


def listens_to(sign: signal.Signals, pid: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> sign - 1 & 1)


@pytest.mark.parametrize(
    "command",
    [
        "run moored/demo star",
        "generate star",
        "film star",
        "play star",
        "plan star",
        "load small",
        "unload --all",
        "pin small",
        "trim",
        "reserve 1MiB",
        "release one",
        "recycle",
        "status",
        "status --watch",
        "models",
        "jobs",
        "cancel job-1",
    ],
)
def test_a_command_that_waits_for_a_service_ends_on_ctrl_c(
    command: str, silent: socket.socket, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
    with (
        begun(*command.split(), "--endpoint", endpoint, folder=tmp_path) as process,
        wait_for_a_call(silent),
    ):
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"], "it writes nothing"


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pull_ends_on_a_signal_before_the_hub_answers(
    sign: signal.Signals, code: int, silent: socket.socket, tmp_path: Path
) -> None:
    hub = {
        "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "0",
    }
    with (
        begun("pull", "me/mine", folder=tmp_path, environment=hub) as process,
        wait_for_a_call(silent),
    ):
        process.send_signal(sign)
        assert process.wait(WAIT_S) == code


def test_sigterm_cancels_a_job_and_the_list_says_how(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate()
    at = ("--endpoint", f"http://{service.address}")
    slow = ("generate", "x", "-m", "slow", "-s", "200", "-o", "never.png")
    with service.client() as client, begun(*slow, *at, folder=tmp_path) as process:
        with client.watch_status(timeout=WAIT_S) as watch:
            job = next(jobs[0].id for jobs in (s.jobs for s in watch) if jobs and jobs[0].step)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
        with client.watch_status(timeout=WAIT_S) as watch:
            next(status for status in watch if not status.jobs)
        (ended,) = [one for one in client.jobs(include_ended=True) if one.id == job]
        assert (ended.state, ended.error) == (
            "cancelled",
            "cancelled: its client left, or the connection to it was lost",
        )
    assert not (tmp_path / "never.png").exists()


def test_an_unload_that_waits_is_left_and_the_job_goes_on(
    simulate: Simulate, tmp_path: Path
) -> None:
    service = simulate()
    at = ("--endpoint", f"http://{service.address}")
    with service.client() as client, running(client, steps=160) as stream:
        with begun("unload", "slow", *at, folder=tmp_path) as process:
            wait_until(lambda: listens_to(signal.SIGINT, process.pid), "it listens to SIGINT")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 130
        assert stream.result().pictures


@pytest.mark.parametrize("when", ["starts", "generates"])
def test_run_ends_the_service_that_it_has_started(when: str, tmp_path: Path) -> None:
    port = ReservedPort()
    environment = {
        "MOORED_ENDPOINT": f"http://{port.address}",
        "MOORED_SERVICE_STATE": str(tmp_path / "state"),
        "MOORED_CARDS_DEVICES": "cpu",
    }
    command = ("run", "moored/demo", "a red circle", "-s", "200", "-o", "never.png")
    with begun(*command, folder=tmp_path, environment=environment) as process:
        assert process.stderr is not None
        words = {"starts": "starting one", "generates": "step "}[when]
        while words not in (line := process.stderr.readline()):
            assert line, "it ended"
        while not (workers := list(children_of(process.pid))):
            assert process.poll() is None
        with end_of(workers[0]) as ended:
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 130
            assert ended(WAIT_S), "no worker is left"
    assert not (tmp_path / "never.png").exists()


def test_demo_leaves_whole_pictures_and_no_state(tmp_path: Path) -> None:
    with begun("demo", "--out", "out", "--device", "cpu", folder=tmp_path) as process:
        assert process.stdout is not None
        assert "01.png" in process.stdout.readline()
        (worker, *_) = children_of(process.pid)
        with end_of(worker) as ended:
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 130
            assert ended(WAIT_S), "no worker is left"
    assert list((tmp_path / "tmp").iterdir()) == []
    for path in (tmp_path / "out").iterdir():
        with Image.open(path) as picture:
            picture.load()


def test_the_error_of_a_cancelled_job_names_the_client_that_cancelled_it(
    simulate: Simulate,
) -> None:
    service = simulate()
    with service.client() as client, service.client(client_id="bob@desk") as bob:
        with running(client, steps=200) as stream:
            assert bob.cancel(stream.job_id)
            with pytest.raises(moored.Cancelled, match="cancelled by bob@desk") as cancelled:
                stream.result()
            assert (cancelled.value.by, cancelled.value.how) == ("bob@desk", "cancel")
        with running(client, steps=200) as stream:
            ann = clean_environment() | {"MOORED_CLIENT": "ann@box"}
            assert service.run("unload", "slow", "--force", env=ann).returncode == 0
            with pytest.raises(moored.Cancelled, match="ann@box unloaded slow") as cancelled:
                stream.result()
            assert (cancelled.value.by, cancelled.value.how) == ("ann@box", "unload")
        told = [job.error for job in client.jobs(include_ended=True) if job.state == "cancelled"]
        assert told[1] == "cancelled by bob@desk"
    service.wait_for_log(lambda: any("cancelled by bob@desk" in line for line in service.log))
