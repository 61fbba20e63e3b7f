"""Clients of the service under test: names, addresses, threads, and the gate that stops them for a rest."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import moored
from job_book import JobBook
from models import FORMATS
from results import Overwritten, Results

CALL_S = 120.0
"""No call may take longer: one that does is lost."""
SPLICE_BYTES = 1 << 16
DEATH_IS_FELT_S = 60.0
"""One that is stopped is found only when it is silent for too long."""


class Gate:
    """Open while load is wanted. Who is inside is known."""

    def __init__(self) -> None:
        """Closed."""
        self._changed = threading.Condition()
        self._open = self._over = False
        self._inside: dict[str, str] = {}

    def open(self) -> None:
        """Lets load begin."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self, within_s: float) -> dict[str, str]:
        """Lets nothing begin, and waits for what has; who has not come out in time, and from what."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._inside, within_s)
            return dict(self._inside)

    def end(self) -> None:
        """For good."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def enter(self, who: str, what: str) -> bool:
        """Waits until it is open; False once everything is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._open or self._over)
            if self._over:
                return False
            self._inside[who] = what
            return True

    def leave(self, who: str) -> None:
        """Is outside again."""
        with self._changed:
            self._inside.pop(who, None)
            self._changed.notify_all()

    def wait_closed(self, seconds: float) -> bool:
        """Passes so much time; True as soon as it is closed or over."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open or self._over, seconds)

    @property
    def is_over(self) -> bool:
        """Whether nothing will begin any more."""
        return self._over


class OtherAddress:
    """A way to the service from another address of loopback, as if from another machine."""

    def __init__(self, service: str, source: str) -> None:
        """Listens, and hands on what comes from `source` (127.0.0.2, say)."""
        host, port = service.rsplit(":", 1)
        self._to, self._source = (host, int(port)), source
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True, name="another address").start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                incoming, _ = self._listener.accept()
                outgoing = socket.create_connection(self._to, source_address=(self._source, 0))
                for one, other in ((incoming, outgoing), (outgoing, incoming)):
                    incoming.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    outgoing.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=_splice, args=(one, other), daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()


def _splice(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(SPLICE_BYTES):
            other.sendall(data)
    for end in (one, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    one.close()


@dataclass
class World:
    """What all clients of a soak share."""

    address: str
    simulated: bool
    on_card: bool
    """Whether it computes on a real card, which takes larger pictures in the same time."""
    card_bytes: int
    book: JobBook
    results: Results
    overwritten: tuple[Overwritten, ...]
    gate: Gate = field(default_factory=Gate)
    formats: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By real model, the formats of its transformer that the device takes."""
    deaths: int = 0
    """Workers that were killed or stopped so far."""
    last_death: float = -1e9
    """When the last was, on the monotonic clock."""
    counts: Counter[str] = field(default_factory=Counter)
    """Actions, by name."""
    unexpected: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note_unexpected(self, words: str) -> None:
        """Notes an error that nobody asked for."""
        with self.lock:
            self.unexpected.append(words)

    def learn_formats(self, client: moored.Client, models: tuple[str, ...]) -> None:
        """Finds out in which formats this device takes each model."""
        for model in models:
            taken = []
            for name in FORMATS:
                try:
                    client.load(
                        moored.ModelRef(model, formats={"transformer": name}), timeout=CALL_S
                    )
                    taken.append(name)
                except (moored.ModelUnsupported, moored.InvalidRequest) as error:
                    print(f"{model} in {name} is left out: {error}", flush=True)
            if taken:
                self.formats[model] = tuple(taken)
            client.unload()


class Visitor(threading.Thread):
    """One client, which does one thing after another, drawn by weights."""

    def __init__(
        self,
        world: World,
        name: str,
        address: str,
        seed: str,
        actions: dict[str, tuple[float, Callable[[Visitor], None]]],
    ) -> None:
        """Begins when it is started and the gate is open."""
        super().__init__(name=name, daemon=True)
        self.world, self.address = world, address
        self.chance = random.Random(f"{seed} {name}")
        self.client = moored.Client(address, client_id=name)
        self._actions = actions

    @property
    def book(self) -> JobBook:
        """Where ends are counted."""
        return self.world.book

    def run(self) -> None:
        """Until everything is over."""
        names = list(self._actions)
        weights = [weight for weight, _ in self._actions.values()]
        while True:
            (action,) = self.chance.choices(names, weights)
            if not self.world.gate.enter(self.name, action):
                break
            try:
                self._act(action)
            finally:
                self.world.gate.leave(self.name)
        self.client.close()

    def _act(self, action: str) -> None:
        began = time.monotonic()
        with self.world.lock:
            self.world.counts[action] += 1
        try:
            self._actions[action][1](self)
        except BaseException as error:
            self.book.error(error)
            if not self._may_happen(error):
                seconds = time.monotonic() - began
                words = f"{action} of {self.name}, after {seconds:.1f} s: {type(error).__name__}: {error}"
                self.world.note_unexpected(words)

    def _may_happen(self, error: BaseException) -> bool:
        # Memory that others hold is a fair answer at any time.
        if isinstance(error, (moored.MemoryTaken, moored.OutOfMemory, moored.QueueFull)):
            return True
        if isinstance(error, (moored.WorkerDied, moored.CardNotReady)):
            return self.world.deaths > 0
        # What is asked of a worker beside jobs, such as a trim, is not asked again of the next one.
        lately = time.monotonic() - self.world.last_death < DEATH_IS_FELT_S
        return isinstance(error, moored.InternalError) and lately
