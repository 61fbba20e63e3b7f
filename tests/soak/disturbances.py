"""What happens to the service from outside: its worker is killed or stopped, and memory is taken."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress

import moored
from clients import World
from second_program import SecondProgram

FROM_SHARE, TO_SHARE = 0.4, 0.6
"""Of the whole time, when workers are killed. Before and after, one worker lives long enough to be judged."""
PAUSE_S = (5.0, 15.0)
STOPPED_SHARE = 0.3
"""Of the signals, those that stop a worker instead of ending it."""
LEAVE_BYTES = 512 << 20
"""Where it takes nearly all: twice of what the service never plans into, so that a worker can start."""


class Killer(threading.Thread):
    """Kills or stops the worker now and then."""

    def __init__(self, world: World, whole_s: float, seed: str) -> None:
        """Counts its time from its start."""
        super().__init__(name="killer", daemon=True)
        self._world, self._whole_s = world, whole_s
        self._chance = random.Random(f"{seed} killer")
        self._frozen = 0
        self.killed = self.stopped = 0

    def run(self) -> None:
        """Until its time is over."""
        client = moored.Client(self._world.address, client_id="killer")
        began = time.monotonic()
        longest = min(PAUSE_S[1], (TO_SHARE - FROM_SHARE) * self._whole_s / 3)
        time.sleep(FROM_SHARE * self._whole_s)
        is_due = True  # once in any case: a rest may last until after its time
        while is_due and not self._world.gate.is_over:
            self._kill(client)
            time.sleep(self._chance.uniform(min(PAUSE_S[0], longest), longest))
            is_due = time.monotonic() - began < TO_SHARE * self._whole_s
        client.close()

    def _kill(self, client: moored.Client) -> None:
        if not self._world.gate.enter(self.name, "kill"):
            return
        try:
            pid = client.status().cards[0].worker_pid
            # One that is stopped is the service's to find.
            if pid in (0, self._frozen):
                return
            stops = self._chance.random() < STOPPED_SHARE
            with self._world.lock:
                self._world.deaths += 1
                self._world.last_death = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
                self.stopped, self.killed = self.stopped + stops, self.killed + (not stops)
                self._frozen = pid if stops else 0
        finally:
            self._world.gate.leave(self.name)


class Pressure(threading.Thread):
    """Has the second program take and give memory while the gate is open."""

    def __init__(self, world: World, program: SecondProgram, seed: str) -> None:
        """Begins when it is started and the gate is open."""
        super().__init__(name="pressure", daemon=True)
        self._world, self._program = world, program
        self._chance = random.Random(f"{seed} pressure")
        self.changes = 0
        self.failed = ""

    def run(self) -> None:
        """Until everything is over. Between, at rests, it holds what it holds there."""
        gate, chance = self._world.gate, self._chance
        try:
            while gate.enter(self.name, "hold"):
                try:
                    self._program.hold(self._size())
                    self.changes += 1
                    gate.wait_closed(chance.uniform(0.5, 3.0))
                    self._program.rest()
                finally:
                    gate.leave(self.name)
                # A pause between two demands, so that what is large comes to its turn.
                gate.wait_closed(chance.uniform(0.5, 3.0))
        except Exception as error:  # a second program that is gone is the soak's fault, and is told
            self.failed = f"{type(error).__name__}: {error}"

    def _size(self) -> int:
        """Mostly a part of the card, sometimes nearly all of it."""
        total = self._program.total
        if self._chance.random() < 0.15:
            return max(0, total - LEAVE_BYTES)
        return int(total * self._chance.uniform(0.1, 0.7)) >> 21 << 21


class JobWatcher(threading.Thread):
    """Reads the list of jobs again and again."""

    def __init__(self, world: World) -> None:
        """Begins when it is started."""
        super().__init__(name="job watcher", daemon=True)
        self._world = world

    def run(self) -> None:
        """Until everything is over."""
        with moored.Client(self._world.address, client_id="watcher") as client:
            while not self._world.gate.is_over:
                with suppress(moored.MooredError):
                    self._world.book.look(client.jobs(include_ended=True))
                time.sleep(0.5)
