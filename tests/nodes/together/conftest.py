"""One service, and both packs at once: each in a process and an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import moored
import pytest

from service import ROOT, Service, clean_environment

HERE = Path(__file__).resolve().parent
DEADLINE_S = 60.0

START_LIMIT_S = 300.0
"""Seconds that both sides have to start, at once: one builds a wheel and starts an engine."""


class Side:
    """A frontend, which generates and cancels when it is told to."""

    def __init__(self, name: str, endpoint: str, folder: Path) -> None:
        own = ROOT / f".venv-{name}/bin/python"
        python = Path(os.environ.get(f"{name.upper()}_SIDE", own))
        assert python.is_file(), f"{python} is missing: scripts/test nodes makes it"
        folder.mkdir()
        self.name = name
        self._log = (folder / "log").open("w+", encoding="utf-8")
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._process = subprocess.Popen(
            [str(python), str(HERE / f"{name}_side.py"), endpoint, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=clean_environment(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def _tell(self, **words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()

    def generate(self, *pictures: tuple[str, int], steps: int = 4) -> None:
        """Starts on pictures of these prompts and seeds."""
        self._tell(generate=pictures, steps=steps)

    def cancel(self) -> None:
        """Presses its button."""
        self._tell(cancel=True)

    def said(self, within_s: float = DEADLINE_S) -> dict[str, Any]:
        """The next that it says: that it is ready, or how what it was told ended."""
        try:
            said = self._said.get(timeout=within_s)
        except queue.Empty:
            said = None
        assert said is not None, f"{self.name} is silent:\n{Path(self._log.name).read_text()}"
        return said

    def stop(self) -> None:
        """Lets it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(10)
        self._log.close()


@contextlib.contextmanager
def at_rest(client: moored.Client) -> Iterator[None]:
    """Nothing is computed inside of this: what has come by its end has waited."""
    (card,) = client.status().cards
    os.kill(card.worker_pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(card.worker_pid, signal.SIGCONT)


def ended(client: moored.Client, names: Collection[str]) -> dict[str, str]:
    """How these jobs have ended, in the order of their ends; waits until they have."""
    ends: dict[str, str] = {}
    with client.watch_status(interval_s=0.02, timeout=DEADLINE_S) as changes:
        for _ in changes:
            jobs = {job.id: job.state for job in reversed(client.jobs(include_ended=True))}
            ends = {name: state for name, state in jobs.items() if name in names}
            if len(ends) == len(names) and set(ends.values()) <= {"done", "failed", "cancelled"}:
                return ends
    raise AssertionError(f"the service has left: {ends}")


class Watch:
    """The new jobs of a service as its status shows them: when each came, and which started before."""

    def __init__(self, client: moored.Client) -> None:
        self.jobs: dict[str, moored.JobInfo] = {}
        """The latest of each job, in the order in which they came."""
        self.started_before: dict[str, int] = {}
        """How many had started when a job came."""
        # The status may show for a moment longer what has ended.
        self._old = {job.id for job in client.jobs(include_ended=True)}
        self._news = threading.Condition()
        self._stream = client.watch_status(interval_s=0.02)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(moored.Cancelled):  # by `stop`
            for status in self._stream:
                with self._news:
                    # What is not shown any more has ended, maybe between two looks: so it had started.
                    waiting = {job.id for job in status.jobs if job.state != "running"}
                    for job in status.jobs:
                        if job.id not in self._old:
                            self.started_before.setdefault(job.id, len(self.jobs.keys() - waiting))
                            self.jobs[job.id] = job
                    self._news.notify_all()

    def until(self, so: Callable[[], bool]) -> None:
        """Waits until it is so."""
        with self._news:
            assert self._news.wait_for(so, DEADLINE_S), self.jobs

    def running(self) -> list[moored.JobInfo]:
        """The jobs that ran when they were last seen."""
        return [job for job in self.jobs.values() if job.state == "running"]

    def of(self, client_id: str) -> list[str]:
        """The jobs of a client, in the order in which they came."""
        return [name for name, job in self.jobs.items() if job.client_id == client_id]

    def stop(self) -> None:
        """Ends it."""
        self._stream.close()
        self._reader.join(10)


@pytest.fixture(scope="module")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped model on the CPU; nothing is loaded yet."""
    # A card at rest is not to count as one that hangs.
    patient = ("--set", "queue.stall_floor=5m")
    service = Service(*patient, state=tmp_path_factory.mktemp("demo_service"))
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def client(demo_service: Service) -> Iterator[moored.Client]:
    """A client of it, to see what it does."""
    with demo_service.client() as client:
        yield client


@pytest.fixture(scope="module")
def sides(
    demo_service: Service, client: moored.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Side, Side]]:
    """ComfyUI's side and Griptape's, both ready."""
    folder = tmp_path_factory.mktemp("sides")
    started = [Side(name, demo_service.address, folder / name) for name in ("comfyui", "griptape")]
    for side in started:
        assert side.said(START_LIMIT_S) == {"ready": True}
    comfyui, griptape = started
    yield comfyui, griptape
    for side in started:
        side.stop()


@pytest.fixture
def watch(client: moored.Client) -> Iterator[Watch]:
    """What the jobs of this test do."""
    watch = Watch(client)
    yield watch
    watch.stop()
