"""What every part has: a service, a witness of the card's memory, its other holder, where figures go."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import moored
from figures import MIB, Recorder
from processes import Companion
from sampling import sampled

from service import INSTANT_MODELS, ROOT, START_TIMEOUT_S, Service, clean_environment

BESIDE = Path(__file__).with_name("beside.py")
SIMULATED_WORLD = "world.txt"
GIB = 1 << 30
SAMPLE_S = 0.02


class NeedsCard(Exception):
    """This part can only be run on a real card, and the run is a small one."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    load_rounds: int
    unload_rounds: int
    small_unload_rounds: int
    swap_rounds: int
    drift_cycles: int
    drift_seconds: float
    jobs: int
    job_seconds: float
    cancel_rounds: int
    picture: int
    """Width and height of a large picture."""
    job_picture: int
    """Width and height of the picture of a small job."""
    stall_limit_s: float
    """The watchdog's limit where a worker hangs."""
    cpu_steps: int
    """Steps of the jobs on the CPU card beside a worker that ends."""
    tight_bytes: int
    """What the other program leaves for a decode."""
    hopeless_bytes: int
    """What it leaves where a decode cannot be done."""
    job_bytes: int
    """What the other program leaves for a job whose components are resident."""
    waiting_bytes: int
    """What the other program leaves where a job must wait."""
    format_rounds: int
    """Loads of the transformer in each format."""
    format_steps: int
    """Steps that are timed in each format, after one that is not."""
    kept_rounds: int
    """Loads of each kept copy."""
    mixed_cycles: int
    mixed_seconds: float
    peer_rounds: int
    """Loads of each format by another program."""
    peer_seconds: float
    """The most that each of its formats may take."""
    speed_steps: int
    """Steps of a job of which each is timed but the first."""
    speed_rounds: int
    """Decodes, encodes, prompts, and calls of other programs."""
    request_steps: int
    request_rounds: int
    """Whole requests in each format."""
    first_rounds: int
    """New processes, with empty caches and with those that the one before left."""
    cpu_rounds: int
    """Pictures of each size on the CPU."""
    stream_jobs: int
    """Mixed jobs on each small card."""
    stream_swaps: int
    """Swaps there and back, of which each part is timed."""
    cold_rounds: int
    """Loads of a cold model, alone and with the first step."""
    film_llama_layers: int
    """Layers of the text encoder of films, of which two are not computed."""
    settings: tuple[str, ...] = ()


FULL = Scale(
    load_rounds=8,
    unload_rounds=24,
    small_unload_rounds=40,
    swap_rounds=5,
    drift_cycles=1000,
    drift_seconds=240.0,
    jobs=1000,
    job_seconds=255.0,
    cancel_rounds=6,
    picture=1024,
    job_picture=256,
    stall_limit_s=4.0,
    cpu_steps=200,
    tight_bytes=1 << 30,
    hopeless_bytes=16 << 20,
    job_bytes=4 << 30,
    # Less than the ring and the activations of any part of the transformer need: the job has to wait.
    waiting_bytes=256 << 20,
    format_rounds=6,
    format_steps=4,
    kept_rounds=5,
    mixed_cycles=200,
    mixed_seconds=170.0,
    peer_rounds=3,
    peer_seconds=75.0,
    # A whole job's: the card's clock goes up and down over some ten steps.
    speed_steps=28,
    speed_rounds=12,
    request_steps=28,
    request_rounds=3,
    first_rounds=2,
    cpu_rounds=7,
    stream_jobs=50,
    stream_swaps=10,
    cold_rounds=5,
    film_llama_layers=32,
)
SMALL = Scale(
    load_rounds=3,
    unload_rounds=3,
    small_unload_rounds=3,
    swap_rounds=2,
    drift_cycles=40,
    drift_seconds=20.0,
    jobs=20,
    job_seconds=20.0,
    cancel_rounds=2,
    picture=256,
    job_picture=64,
    stall_limit_s=8.0,
    cpu_steps=40,
    tight_bytes=24 << 20,
    hopeless_bytes=1 << 20,
    job_bytes=200 << 20,
    waiting_bytes=2 << 20,
    format_rounds=2,
    format_steps=2,
    kept_rounds=2,
    mixed_cycles=40,
    mixed_seconds=30.0,
    peer_rounds=2,
    peer_seconds=60.0,
    speed_steps=3,
    speed_rounds=2,
    request_steps=2,
    request_rounds=2,
    first_rounds=1,
    cpu_rounds=1,
    stream_jobs=30,
    stream_swaps=2,
    cold_rounds=2,
    film_llama_layers=3,
    settings=("cards.headroom=1MiB",),
)


@dataclass
class Peak:
    """The most bytes of a card that were used, once they are known."""

    bytes: int
    at: float = 0.0
    """When, on the monotonic clock."""

    @property
    def told(self) -> str:
        """When, as logs say it."""
        wall = time.time() - (time.monotonic() - self.at)
        return datetime.fromtimestamp(wall, timezone.utc).strftime("%H:%M:%S.%f")[:-3]


@dataclass
class Running:
    """A service with a client of it, and what is known of its card."""

    service: Service
    client: moored.Client
    card: str
    _witness: Companion | None
    """What reads a real card's memory by NVML; None on a simulated one."""

    def used(self) -> int:
        """Bytes of the card that are used, by a second process's reading."""
        if self._witness is not None:
            return int(self._witness.ask("used")["used"])
        memory = self.status().memory
        return memory.total - memory.free

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """Finds the most that is used while it lasts. Nothing else may ask the witness meanwhile."""
        peak = Peak(self.used())
        if self._witness is not None:
            yield peak
            found = self._witness.ask("most")
            peak.bytes, peak.at = int(found["most"]), float(found["most_at"])
            return
        with sampled(self.used, SAMPLE_S) as readings:
            yield peak
        peak.bytes = max(readings)

    def settled(self, tolerance_bytes: int = 0, within_s: float = 2.0) -> int:
        """The same once two readings 50 ms apart agree."""
        until, last = time.monotonic() + within_s, self.used()
        while time.monotonic() < until:
            time.sleep(0.05)
            now = self.used()
            if abs(now - last) <= tolerance_bytes:
                return now
            last = now
        return last

    def back_at(self, bytes_used: int, since: float, within_s: float = 3.0) -> float:
        """Seconds since a moment until no more than so much is used; `within_s` if it does not come to it."""
        while time.monotonic() - since < within_s:
            if self.used() <= bytes_used:
                return time.monotonic() - since
            time.sleep(0.002)
        return within_s

    def status(self) -> moored.CardStatus:
        """The card's own entry of the status."""
        return next(card for card in self.client.status().cards if card.id == self.card)


@dataclass
class Bench:
    """One part's surroundings."""

    binary: Path
    work: Path
    out: Path
    device: str
    small: bool
    torch_python: str
    threads: int
    record: Recorder
    scale: Scale
    models_made: int = 2
    """How many of the checkpoints are made, or are there."""
    services: list[Service] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        """Whether the card exists in arithmetic only."""
        return not self.device.startswith("cuda")

    @property
    def index(self) -> int:
        """Number of the card."""
        number = self.device.partition(":")[2].partition(",")[0]
        return int(number) if not self.simulated and number.isdigit() else 0

    @property
    def models(self) -> Path:
        """The folder of the checkpoints."""
        return self.work / "models"

    def spec(self, *options: str) -> str:
        """The device with options. A simulated card is lost where a real one is given an illegal address."""
        told = [
            option.replace("poison-at", "lose-at") if self.simulated else option
            for option in options
            if not (self.simulated and option.startswith("dtype="))
        ]
        if self.simulated:
            told.append(f"world={self.world}")
        return ",".join([self.device, *told])

    def small_card(self, size: int) -> str:
        """The device with no more than so many bytes of memory."""
        card, *options = self.device.split(",")
        memory = f"{size // GIB}GiB" if size % GIB == 0 else f"{size // MIB}MiB"
        if not self.simulated:
            return ",".join([f"{card}={memory}", *options])
        return ",".join([f"sim:{memory}", *options, f"world={self.world}"])

    def foreign_bytes(self) -> int:
        """What the card shows as used while this program has nothing on it."""
        if self.simulated:
            return 0
        witness = self.witness()
        try:
            return int(witness.ask("used")["used"])
        finally:
            witness.end()

    @property
    def world(self) -> Path:
        """Who else is on a simulated card."""
        return self.work / SIMULATED_WORLD

    def needs_card(self) -> None:
        """Ends this part here if there is no card, and names the card."""
        if self.simulated:
            raise NeedsCard("needs a card")
        witness = self.witness()
        witness.end()

    def witness(self) -> Companion:
        """A process that reads the card's memory; the figures are of its card."""
        witness = self.companion(sys.executable, "witness")
        self.record.device(f"{witness.first['name']}, {self.cores} cores")
        return witness

    def companion(self, python: str, program: str) -> Companion:
        """A program of beside.py that goes on beside the service."""
        return Companion([python, str(BESIDE), program, "--index", str(self.index)])

    @property
    def cores(self) -> int:
        """Processors that this process may use."""
        return len(os.sched_getaffinity(0))

    def beside(self, program: str, *arguments: str, timeout_s: float = 300) -> dict[str, Any]:
        """The answer of a program that runs once."""
        command = [self.torch_python, str(BESIDE), program, "--index", str(self.index), *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
        if done.returncode != 0:
            raise RuntimeError(f"{program} ended with {done.returncode}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def knows(self, setting: str) -> bool:
        """Whether the program has a setting of this name."""
        command = [str(self.binary), "config", "--defaults"]
        text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        name = setting.rpartition(".")[2]
        return re.search(rf"^{name}\s*=", text, re.MULTILINE) is not None

    def start(
        self,
        *devices: str,
        settings: tuple[str, ...] = (),
        state: Path | None = None,
        variables: dict[str, str] | None = None,
    ) -> Service:
        """A service on these devices, by default on the card, with these environment variables besides."""
        self.world.write_text("")
        arguments = ["--models", str(self.models)]
        if self.simulated:
            arguments += ["--models", str(INSTANT_MODELS)]
        for setting in (*self.scale.settings, *settings):
            arguments += ["--set", setting]
        service = Service(
            *arguments,
            state=state or self.work / "state",
            devices=devices or (self.spec(),),
            binary=self.binary,
            folder=ROOT,
            environment=clean_environment() | (variables or {}),
        )
        self.services.append(service)
        return service

    @contextmanager
    def serve(self, *devices: str, settings: tuple[str, ...] = ()) -> Iterator[Running]:
        """A service on these devices, by default on the card, once its card is ready."""
        service = self.start(*devices, settings=settings)
        witness: Companion | None = None
        try:
            with moored.Client(service.address) as client:
                client.wait_until_ready(START_TIMEOUT_S)
                cards = client.server_info().cards
                card = next((c for c in cards if c.kind != "cpu"), cards[0])
                client.wait_until_ready(START_TIMEOUT_S, card=card.id)
                if card.kind == "cuda":
                    witness = self.witness()
                else:
                    self.record.device(f"{card.name}, {self.cores} cores")
                yield Running(service, client, card.id, witness)
        finally:
            if witness is not None:
                witness.end()
            service.stop()

    @contextmanager
    def holder(self, running: Running) -> Iterator[MemoryHolder]:
        """Another program on the card."""
        holder = SimulatedHolder(self.world, running) if self.simulated else CardHolder(self)
        try:
            yield holder
        finally:
            holder.end()


class MemoryHolder:
    """Another program that takes the card's memory."""

    def hold(self, leave_bytes: int) -> int:
        """Takes memory until so much is free; how much it holds."""
        raise NotImplementedError

    def free(self) -> float:
        """Gives all of it back; when that was done, on the monotonic clock."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends it."""


class CardHolder(MemoryHolder):
    """PyTorch in a process of its own."""

    def __init__(self, bench: Bench) -> None:
        """Starts it, holding nothing but its context."""
        self._process = bench.companion(bench.torch_python, "holder")

    def hold(self, leave_bytes: int) -> int:
        """See MemoryHolder."""
        return int(self._process.ask(f"hold {leave_bytes}")["held"])

    def free(self) -> float:
        """See MemoryHolder."""
        return float(self._process.ask("free")["at"])

    def end(self) -> None:
        """See MemoryHolder."""
        self._process.end()


class SimulatedHolder(MemoryHolder):
    """A line in the file that a simulated card reads."""

    def __init__(self, world: Path, running: Running) -> None:
        """Holds nothing yet."""
        self._world, self._running = world, running

    def hold(self, leave_bytes: int) -> int:
        """See MemoryHolder."""
        held = self._running.status().memory.free - leave_bytes
        self._write(f"holder {held}B\n")
        return held

    def free(self) -> float:
        """See MemoryHolder."""
        self._write("")
        return time.monotonic()

    def end(self) -> None:
        """See MemoryHolder."""
        self._write("")

    def _write(self, text: str) -> None:
        whole = self._world.with_suffix(".new")
        whole.write_text(text)
        whole.rename(self._world)


def takes_replace(client: moored.Client) -> bool:
    """Whether this client can swap one model for another in one call."""
    return "replace" in inspect.signature(client.load).parameters


def gigabytes(count: int) -> float:
    """Bytes as GB."""
    return count / 1e9
