"""A file whose opening blocks, and a worker that does not exit: everything else keeps working."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import moored
import pytest

from service import INSTANT_MODELS, ROOT, Service

TINY = ROOT / "service/pipelines/fixtures/flux-tiny"
DEADLINE_S = 60.0
# What the end of the service may take at the most: its threads have a second, its connections two.
END_S = 20.0


@contextmanager
def unanswering(file: Path) -> Iterator[None]:
    """Opening this file waits, as on a network share that is gone: for 45 seconds by the kernel's default."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = os.open(file, os.O_RDONLY)
    try:
        fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, before)


@pytest.fixture
def service_and_folder(tmp_path: Path) -> Iterator[tuple[Service, Path]]:
    """A service with `small` and a pipeline in `dead`."""
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(INSTANT_MODELS / "small.instant.json", models)
    dead = models / "dead"
    shutil.copytree(TINY, dead, ignore=shutil.ignore_patterns("expected"))
    service = Service("--models", str(models), state=tmp_path / "state", devices=("sim:24GiB",))
    yield service, dead
    service.kill()


def test_a_model_on_a_blocked_disk_blocks_nothing_else(
    service_and_folder: tuple[Service, Path],
) -> None:
    service, dead = service_and_folder
    with (
        service.client() as client,
        unanswering(dead / "transformer/config.json"),
        ThreadPoolExecutor(64) as threads,
    ):
        assert client.generate_image("before", model="small").pictures

        def ask() -> None:
            with pytest.raises(moored.Deadline):
                client.generate_image("never", model="dead", timeout=0.5)

        # More than there are threads to open models with.
        for asked in [threads.submit(ask) for _ in range(600)]:
            asked.result()
        assert client.generate_image("behind", model="small", timeout=DEADLINE_S).pictures
        listed = {model.id: model for model in client.list_models(timeout=DEADLINE_S)}
        assert "not answered" in listed["dead"].problem
        assert listed["small"].problem == ""
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(END_S) == 0


def test_a_model_that_is_no_regular_file_is_refused(
    service_and_folder: tuple[Service, Path],
) -> None:
    service, dead = service_and_folder
    with service.client() as client:
        for name in ["transformer/config.json", "tokenizer_2/tokenizer.json", "model_index.json"]:
            file = dead / name
            whole = file.read_bytes()
            for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
                file.unlink()
                make(file)
                with pytest.raises(moored.MooredError) as refused:
                    client.generate_image("never", model="dead", timeout=DEADLINE_S)
                assert not isinstance(refused.value, moored.Deadline), name
            file.unlink()
            file.write_bytes(whole)
        weights = dead / "vae/diffusion_pytorch_model.safetensors"
        weights.unlink()
        os.mkfifo(weights)
        with pytest.raises(moored.MooredError) as refused:
            client.generate_image("never", model="dead", timeout=DEADLINE_S)
        assert not isinstance(refused.value, moored.Deadline)
        assert client.generate_image("after", model="small", timeout=DEADLINE_S).pictures


TRACER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[1])
if libc.ptrace(0x4206, pid, None, None) != 0:  # PTRACE_SEIZE
    sys.exit(os.strerror(ctypes.get_errno()))
print("traced", flush=True)
sys.stdin.read()
"""


@contextmanager
def never_ending(pid: int) -> Iterator[None]:
    """Keeps the exit of a process from its parent, as for one that is stuck in the driver."""
    tracer = subprocess.Popen(
        [sys.executable, "-c", TRACER, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert tracer.stdin is not None and tracer.stdout is not None
    try:
        if not tracer.stdout.readline():
            pytest.skip("processes cannot be traced here")
        yield
    finally:
        tracer.stdin.close()
        tracer.wait(10)


Simulate = Callable[..., Service]


def test_a_worker_that_does_not_exit_blocks_its_card_alone(simulate: Simulate) -> None:
    service = simulate("sim:24GiB", "sim:24GiB,index=1")
    with service.client() as client:
        client.wait_until_ready()
        with client.stream_image("moves on", model="slow", steps=100, timeout=DEADLINE_S) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            busy = next(card for card in client.status().cards if card.job_id)
            with never_ending(busy.worker_pid):
                os.kill(busy.worker_pid, signal.SIGKILL)
                events = list(stream)
                assert isinstance(events[-1], moored.Done)
                states = {card.id: card.state for card in client.status().cards}
                assert states.pop(busy.id) == "restarting"
                service.wait_for_log(lambda: any("does not end" in line for line in service.log))
        # Once it has ended, its card comes back.
        with client.watch_status(interval_s=0.05, timeout=DEADLINE_S) as watch:
            assert next(tick for tick in watch if all(c.state == "ready" for c in tick.cards))


def test_the_service_ends_after_its_workers(simulate: Simulate) -> None:
    service = simulate("sim:24GiB", "sim:24GiB,index=1")
    with service.client() as client:
        with client.watch_status(interval_s=0.05, timeout=DEADLINE_S) as watch:
            next(tick for tick in watch if all(c.state == "ready" for c in tick.cards))
        pids = [card.worker_pid for card in client.status().cards]
        # One of them has to be killed.
        os.kill(pids[1], signal.SIGSTOP)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(END_S) == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
