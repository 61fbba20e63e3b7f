"""How the service starts, is refused, drains and ends; and who may use it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import moored
import pytest

from service import (
    BINARY,
    INSTANT_MODELS,
    ReservedPort,
    Service,
    clean_environment,
    run,
    write_secret,
)

Simulate = Callable[..., Service]

DEADLINE_S = 60.0
TOKEN = "0123456789abcdef-a-token"
CALLS_OF_A_FULL_LOG = 150
"""So many pictures log more than a pipe and the queue of lines hold together."""


@contextmanager
def end_of(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits some seconds for the end of a process, child or not; whether it ended."""
    process = os.pidfd_open(pid)
    try:
        yield lambda within: bool(select.select([process], [], [], within)[0])
    finally:
        os.close(process)


@contextmanager
def running(client: moored.Client, steps: int) -> Iterator[moored.EventStream[moored.ImageResult]]:
    """A slow job that is denoising."""
    with client.stream_image("slow", model="slow", steps=steps) as stream:
        next(event for event in stream if isinstance(event, moored.Step))
        yield stream


def worker_pid(client: moored.Client) -> int:
    client.wait_until_ready(card=client.status().cards[0].id)
    pid = client.status().cards[0].worker_pid
    assert pid > 0
    return pid


def wait_for_log(service: Service, words: str) -> None:
    """Waits for a line of the log."""
    service.wait_for_log(lambda: any(words in line for line in service.log))


def refused(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A `moored serve` that must end by itself, with a message and no backtrace."""
    result = run(
        "serve",
        *arguments,
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        env=clean_environment() | (environment or {}),
    )
    assert result.returncode in (1, 2), result.stderr
    assert "panicked" not in result.stderr
    assert result.stdout == ""
    return result


# Ending.


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_lets_running_jobs_finish(simulate: Simulate, sign: signal.Signals) -> None:
    """SIGHUP comes when the terminal is closed, SIGQUIT from some supervisors."""
    service = simulate()
    with service.client() as client, end_of(worker_pid(client)) as worker_ended:
        with running(client, steps=100) as stream:
            service.process.send_signal(sign)
            wait_for_log(service, "stopping: waiting")
            with pytest.raises((moored.ShuttingDown, moored.ConnectionFailed)) as late:
                client.generate_image("too late", model="small", timeout=DEADLINE_S)
            assert isinstance(late.value, moored.ShuttingDown), "it is told why"
            events = list(stream)
        assert isinstance(events[-1], moored.Done)
        assert len(stream.pictures) == 1
        assert service.process.wait(DEADLINE_S) == 0
        assert worker_ended(DEADLINE_S)


def test_state_is_private_and_workers_have_no_secrets(tmp_path: Path) -> None:
    state = tmp_path / "state"
    names = ("HF_TOKEN", "HUGGINGFACE_TOKEN", "AWS_SECRET_ACCESS_KEY", "MOORED_TOKEN_FILE")
    secrets = {name: "/nowhere/secret-5e1f" for name in names}
    before = os.umask(0)
    try:
        service = Service(state=state, environment=clean_environment() | secrets)
    finally:
        os.umask(before)
    with service.client(token="") as client:
        worker = Path(f"/proc/{worker_pid(client)}/environ").read_text()
    assert "5e1f" not in worker
    assert "PATH=" in worker
    assert state.stat().st_mode & 0o777 == 0o700
    files = [path for path in state.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    assert service.stop() == 0


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    port = ReservedPort()
    state = ("--state", str(tmp_path / "state"))
    models = ("--models", str(INSTANT_MODELS), "--device", "sim:24GiB")
    # As a full disk: every line of the log fails.
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [BINARY, "serve", "--listen", port.address, *state, *models, "--end-with-stdin"],
            stdin=subprocess.PIPE,
            stderr=full,
            env=clean_environment(),
        )
    try:
        with moored.Client(port.address) as client:
            client.wait_until_ready(DEADLINE_S)
            assert len(client.generate_image("a cat", model="small").pictures) == 1
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_a_log_that_nobody_reads_stops_nothing_and_reports_what_was_dropped(tmp_path: Path) -> None:
    port = ReservedPort()
    state = ("--state", str(tmp_path / "state"))
    models = ("--models", str(INSTANT_MODELS), "--device", "sim:24GiB")
    # Each call logs some dozens of lines.
    noisy = ("--set", "log.filter=trace,h2=trace,hyper=trace,tonic=trace")
    process = subprocess.Popen(
        [BINARY, "serve", "--listen", port.address, *state, *models, *noisy, "--end-with-stdin"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    try:
        assert process.stderr is not None
        with moored.Client(port.address) as client:
            client.wait_until_ready(DEADLINE_S)
            for seed in range(CALLS_OF_A_FULL_LOG):
                client.generate_image("a cat", model="small", seed=seed)
        told = next(line for line in process.stderr if b"lines of the log were dropped" in line)
        dropped = re.search(rb"dropped(?:\x1b\[\S*?m)*=(?:\x1b\[\S*?m)*(\d+)", told)
        assert dropped and int(dropped[1]) > 0, told
        # Nobody reads again, and it ends all the same.
        with moored.Client(port.address) as client:
            for seed in range(CALLS_OF_A_FULL_LOG):
                client.generate_image("a cat", model="small", seed=seed)
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()


def test_sigterm_without_jobs_ends_at_once(simulate: Simulate) -> None:
    service = simulate()
    with service.client() as client, client.watch_status() as watch:
        next(watch)
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(DEADLINE_S) == 0, "an endless stream does not hold it up"
        assert time.monotonic() - began < 20, "draining may take 30 seconds"


def test_running_jobs_are_cancelled_when_the_drain_time_is_over(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "service.drain=500ms"))
    with service.client() as client, running(client, steps=200) as stream:
        service.process.send_signal(signal.SIGTERM)
        with pytest.raises(moored.ShuttingDown):
            stream.result()
        assert service.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_running_jobs_at_once(
    simulate: Simulate, sign: signal.Signals
) -> None:
    service = simulate()
    with service.client() as client, end_of(worker_pid(client)) as worker_ended:
        with running(client, steps=200) as stream:
            service.process.send_signal(sign)
            wait_for_log(service, "stopping: waiting")
            began = time.monotonic()
            service.process.send_signal(sign)
            with pytest.raises(moored.ShuttingDown):
                stream.result()
            assert service.process.wait(DEADLINE_S) == 0
            assert time.monotonic() - began < 20
        assert worker_ended(DEADLINE_S)


def test_the_end_of_standard_input_ends_the_service(simulate: Simulate) -> None:
    service = simulate()
    with service.client() as client, end_of(worker_pid(client)) as worker_ended:
        assert service.stop() == 0
        assert worker_ended(DEADLINE_S)


def test_the_worker_ends_when_its_supervisor_is_killed(simulate: Simulate) -> None:
    service = simulate()
    with (
        service.client() as client,
        end_of(worker_pid(client)) as worker_ended,
        running(client, steps=200) as stream,
    ):
        service.process.send_signal(signal.SIGKILL)
        assert worker_ended(8), "in the middle of a stage, which takes ten seconds, too"
        with pytest.raises(moored.ConnectionFailed) as lost:
            stream.result()
        assert "lost" in lost.value.message


def test_a_panic_of_the_queue_ends_the_process_with_its_workers(
    simulate: Simulate, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    component = {"name": "transformer", "bytes": 8 << 30, "identity": "t"}
    faulty = {"name": "faulty", "components": [component], "panic_at": "smaller"}
    (folder / "faulty.instant.json").write_text(json.dumps(faulty))
    service = simulate("sim:4GiB", arguments=("--models", str(folder)))
    with service.client() as client:
        pid = worker_pid(client)
        with end_of(pid) as ends:
            # What would fit instead is looked for by the queue itself.
            with pytest.raises(moored.MooredError):
                client.generate_image("a cube", model="faulty", timeout=DEADLINE_S)
            assert service.process.wait(DEADLINE_S) == 1
            assert ends(DEADLINE_S)
    service.wait_for_log(lambda: any("the queue has ended" in line for line in service.log))


def test_a_killed_service_can_be_started_again_on_its_state(tmp_path: Path) -> None:
    service = Service(state=tmp_path)
    with service.client() as client:
        pid = worker_pid(client)
        with end_of(pid) as worker_ended:
            service.kill()
            assert worker_ended(DEADLINE_S)
    again = Service(state=tmp_path)
    with again.client() as client:
        assert worker_pid(client) != pid
    assert again.stop() == 0


# Starts that are refused.


def test_a_second_service_on_the_card_is_refused(tmp_path: Path) -> None:
    first = Service(state=tmp_path)
    try:
        for device in ("cpu", "cpu:1GiB"):
            result = refused(
                "--listen", "127.0.0.1:0", "--state", str(tmp_path), "--device", device
            )
            assert f"pid {first.process.pid}" in result.stderr, result.stderr
            assert "cpu" in result.stderr
            assert "stop it" in result.stderr, "what to do is told"
        with first.client() as client:
            assert client.health() == "serving", "the first is unharmed"
    finally:
        assert first.stop() == 0


def test_two_simulated_cards_of_one_number_are_distinguished(tmp_path: Path) -> None:
    """The id names a card in status, health and errors, so it has to be unique."""
    arguments = ("--listen", "127.0.0.1:0", "--state", str(tmp_path))
    result = refused(*arguments, "--device", "sim:1GiB", "--device", "sim:2GiB")
    assert "sim:0" in result.stderr or "twice" in result.stderr, result.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = refused("--listen", f"127.0.0.1:{port}", "--state", str(tmp_path))
        assert f"127.0.0.1:{port}" in result.stderr
        assert "in use" in result.stderr
        assert "--listen" in result.stderr, "what to do is told"


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    state = tmp_path / "file" / "state"
    result = refused("--listen", "127.0.0.1:0", "--state", str(state))
    assert str(state) in result.stderr
    assert "service.state" in result.stderr


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_an_address_beyond_loopback_needs_a_token_and_a_certificate(
    tmp_path: Path, address: str
) -> None:
    result = refused("--listen", address, "--state", str(tmp_path))
    assert "token" in result.stderr
    assert "service.token_file" in result.stderr
    assert "service.allow_without_tls" in result.stderr


def test_an_address_beyond_loopback_with_a_token_is_served(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", TOKEN)
    service = Service(
        *("--set", "service.listen=0.0.0.0:0", "--token-file", str(tmp_path / "token")),
        *("--set", "service.allow_without_tls=true"),
        state=tmp_path / "state",
        devices=("sim:1GiB",),
    )
    port = service.address.rpartition(":")[2]
    with moored.Client(f"127.0.0.1:{port}", token=TOKEN) as client:
        client.wait_until_ready()
        assert client.server_info().version
    assert service.stop() == 0


@pytest.mark.parametrize(
    ("contents", "words"), [("short", "16"), (None, "cannot be used: No such file")]
)
def test_an_invalid_token_file_is_refused(tmp_path: Path, contents: str | None, words: str) -> None:
    token = tmp_path / "token"
    if contents is not None:
        write_secret(token, contents)
    result = refused(
        *("--listen", "127.0.0.1:0", "--state", str(tmp_path), "--token-file", str(token))
    )
    assert words in result.stderr
    assert str(token) in result.stderr
    assert "short" not in result.stderr.replace("shorter", ""), "a token is never printed"


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "moored.toml"
    file.write_text('[queue]\nmax_jobs = 0\nno_such_setting = 1\n[cards]\npolicy = "mine"\n')
    result = refused(
        *("--config", str(file), "--state", str(tmp_path), "--listen", "nowhere"),
        *("--device", "tpu:3", "--device", "sim:24GiB,die-at=", "--set", "service.drain=never"),
        environment={"MOORED_QUEUE_TEXT_CACHE": "a lot"},
    )
    for setting, source in {
        "queue.max_jobs": "moored.toml",
        "queue.no_such_setting": "moored.toml",
        "cards.policy": "moored.toml",
        "service.listen": "",
        "cards.devices": "",
        "service.drain": "",
        "queue.text_cache": "MOORED_QUEUE_TEXT_CACHE",
    }.items():
        lines = [line for line in result.stderr.splitlines() if setting in line]
        assert lines, f"{setting} is not told of in:\n{result.stderr}"
        assert any(source in line for line in lines), lines
    for wrong in ("mine", "nowhere", "never", "tpu", "a lot"):
        assert wrong in result.stderr
    assert "config --defaults" in result.stderr


def test_more_headroom_than_a_card_has_is_refused(tmp_path: Path) -> None:
    card = ("--device", "sim:1GiB", "--set", "cards.headroom=2GiB")
    result = refused(*card, "--listen", "127.0.0.1:0", "--state", str(tmp_path))
    assert "cards.headroom is 2.0 GiB, and sim:0 has 1.0 GiB" in result.stderr


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    result = refused("--config", str(tmp_path / "none.toml"))
    assert str(tmp_path / "none.toml") in result.stderr


def test_an_invalid_configuration_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("[queue]\nmax_jobs = = 3\n")
    result = refused("--config", str(file))
    assert "broken.toml" in result.stderr
    assert "2" in result.stderr


def test_any_setting_can_be_set_by_name(tmp_path: Path) -> None:
    """Numbers and lists too: the help says `--set queue.max_jobs=64`."""
    service = Service(
        *("--set", "queue.max_jobs=1", "--set", "cards.slack_limit=1GiB"),
        *("--models", str(Path(__file__).resolve().parents[1] / "models/instant")),
        state=tmp_path,
        devices=("sim:1GiB",),
    )
    with service.client() as client, running(client, steps=200) as first:
        second = client.stream_image("one too many", model="slow")
        with pytest.raises(moored.QueueFull):
            second.result()
        first.close()
    assert service.stop() == 0


# Tokens.


def test_every_call_but_health_needs_the_token(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_secret(file, TOKEN + "\n")
    service = Service(
        *("--token-file", str(file)), state=tmp_path / "state", devices=("sim:24GiB",)
    )
    try:
        for token in (None, "0123456789abcdef-another", TOKEN[:-1], ""):
            with moored.Client(service.address, token=token) as client:
                client.wait_until_ready()
                assert client.health() == "serving"
                assert client.health("sim:0") == "serving"
                calls: list[Callable[[], object]] = [
                    client.server_info,
                    client.status,
                    client.list_models,
                    client.jobs,
                    client.trim,
                    client.unload,
                    lambda client=client: client.generate_image("no"),  # type: ignore[misc]
                    lambda client=client: client.load("moored/demo"),  # type: ignore[misc]
                    lambda client=client: client.get_latent("none"),  # type: ignore[misc]
                    lambda client=client: next(client.watch_status()),  # type: ignore[misc]
                ]
                for call in calls:
                    with pytest.raises(moored.Unauthenticated) as kept_out:
                        call()
                    assert kept_out.value.reason == "UNAUTHENTICATED"
                    assert TOKEN not in kept_out.value.message
        for options in ({"token": TOKEN}, {"token_file": str(file)}):
            with service.client(**options) as client:
                assert client.server_info().version
                client.unload()

        without = service.run("status")
        assert without.returncode == 7
        assert "--token-file" in without.stderr, "what to do is told"
        with_token = service.run("status", "--token-file", str(file))
        assert with_token.returncode == 0, with_token.stderr
        assert not any(TOKEN in line for line in service.log)
    finally:
        assert service.stop() == 0


# What it says of itself.


def test_server_info_lists_version_cards_and_capabilities(simulate: Simulate) -> None:
    service = simulate("sim:24GiB", "cpu:2GiB")
    with service.client() as client:
        info = client.server_info()
    version = run("-V").stdout.split()[-1]
    assert info.version == version
    assert {"text_to_image", "image_to_image", "encode_image", "decode_latent"} <= set(
        info.capabilities
    )
    assert {"preview", "latents", "reserve", "quantization", "adapters"} <= set(info.capabilities)
    assert not info.not_built
    assert not set(info.capabilities) & set(info.not_built)
    assert info.default_model == "moored/demo"
    assert set(info.families) == {
        "ace-step",
        "flux",
        "flux2",
        "hunyuan-video",
        "instant",
        "ovi",
        "qwen-image",
        "sdxl",
        "wan",
        "z-image",
    }
    assert info.max_message_bytes == 64 << 20
    simulated, cpu = info.cards
    assert (simulated.id, simulated.kind, simulated.total_bytes) == (
        "sim:0",
        "simulated",
        24 << 30,
    )
    assert (cpu.id, cpu.kind, cpu.total_bytes) == ("cpu", "cpu", 2 << 30)
    assert cpu.compute_dtype == "f32"
    assert cpu.name


def test_the_binary_without_a_command_prints_its_usage() -> None:
    result = subprocess.run(
        [str(BINARY)], capture_output=True, text=True, env=clean_environment(), timeout=30
    )
    assert result.returncode == 2
    assert "Usage" in result.stderr
