"""Brings the service to rest, always to the same state, and measures it there."""

from __future__ import annotations

import time
from contextlib import suppress

import moored
from checks import account_faults
from clients import CALL_S, World
from measures import CardSample, ProcessSample, Rest, accounts_of, process_sample
from models import TINY
from processes import children_of
from second_program import SecondProgram

COME_OUT_S = CALL_S + 30.0
SETTLE_S = 20.0
AGREE_S = 40.0
"""Where the driver names nobody, what others take while ours leaves is told apart after 30 s."""
STEADY_BYTES = 64 << 10
LOOK_S = 0.25
STEADY_LOOKS = 4


class NeverRests(Exception):
    """The service did not come to rest: the soak cannot go on."""


class Rester:
    """Knows the service's process and the card's witness."""

    def __init__(self, world: World, supervisor_pid: int, program: SecondProgram) -> None:
        """Connects a client of its own, which stays."""
        self._world, self._pid, self._program = world, supervisor_pid, program
        self._client = moored.Client(world.address, client_id="rester")
        self._workers: list[int] = []
        self.restarts = 0
        """Workers that have ended, as the status says at the last rest."""

    def rest(self, at_s: float) -> Rest:
        """Ends all load, unloads everything, and measures. Raises NeverRests."""
        inside = self._world.gate.close(COME_OUT_S)
        if inside:
            raise NeverRests(f"after {COME_OUT_S:g} s there are still {inside}")
        self._program.rest()
        left = self._let_jobs_end()
        self._empty()
        card = self._settled()
        left += self._left_behind(card)
        pid, self.restarts = card.worker_pid, card.worker_restarts
        if pid not in self._workers:
            self._workers.append(pid)
        supervisor, worker = self._steady(pid)
        # The card's last, as what came free meanwhile is to be there.
        sample = self._agreed()
        return Rest(
            at_s=at_s,
            generation=self._workers.index(pid),
            supervisor=supervisor,
            worker=worker,
            card=sample,
            left=tuple(left),
        )

    def _let_jobs_end(self) -> list[str]:
        """Nobody listens any more: what runs now was left, and ends soon."""
        until = time.monotonic() + COME_OUT_S
        while jobs := self._client.jobs():
            if time.monotonic() > until:
                return [
                    f"job {one.id} ({one.kind}, {one.state}) of {one.client_id}" for one in jobs
                ]
            time.sleep(LOOK_S / 5)
        return []

    def _empty(self) -> None:
        """Unloads and trims; a worker that was stopped is found by that, and another one asked."""
        until = time.monotonic() + COME_OUT_S
        while True:
            try:
                self._client.wait_until_ready(COME_OUT_S)
                self._unpin()
                self._client.unload(timeout=CALL_S)
                # What left last is the same at each rest: a worker gives freed memory back to the system when
                # real weights leave, and on a simulated card not when only pretended ones do.
                self._client.load(TINY, timeout=CALL_S)
                self._client.unload(timeout=CALL_S)
                self._client.trim(timeout=CALL_S)
                return
            except moored.MooredError as error:
                if time.monotonic() > until:
                    raise NeverRests(f"it cannot be emptied: {error}") from error
                time.sleep(LOOK_S)

    def _unpin(self) -> None:
        """A pin goes over to the model that replaces its own, where whoever made it does not find it."""
        residents = self._client.status().cards[0].residents
        for entry in {entry for one in residents if one.pinned for entry in one.entries}:
            self._client.unpin(entry, timeout=CALL_S)

    def _settled(self) -> moored.CardStatus:
        """The card once it is ready and empty, or as it is when it does not come to that."""
        until = time.monotonic() + SETTLE_S
        while True:
            card = self._client.status().cards[0]
            empty = card.state == "ready" and not card.residents and not card.reservations
            if (empty and card.worker_pid) or time.monotonic() > until:
                return card
            if card.residents:
                with suppress(moored.MooredError):
                    self._client.unload(timeout=CALL_S)
            time.sleep(LOOK_S)

    def _left_behind(self, card: moored.CardStatus) -> list[str]:
        left = [f"{one.component.name} of {one.entries} is resident" for one in card.residents]
        left += [f"a reservation of {one.bytes} B" for one in card.reservations]
        if card.state != "ready":
            left.append(f"the card is {card.state}")
        processes = children_of(self._pid)
        if set(processes) != {card.worker_pid} or "Z" in processes.values():
            left.append(f"processes {processes} beside the worker {card.worker_pid}")
        return left

    def _steady(self, worker_pid: int) -> tuple[ProcessSample, ProcessSample]:
        """Both processes once neither grows nor shrinks; memory goes back within seconds."""
        until, looks = time.monotonic() + SETTLE_S, 0
        last = (process_sample(self._pid), process_sample(worker_pid))
        while looks < STEADY_LOOKS and time.monotonic() < until:
            time.sleep(LOOK_S)
            now = (process_sample(self._pid), process_sample(worker_pid))
            same = all(
                abs(one.rss_bytes - two.rss_bytes) <= STEADY_BYTES
                and (one.descriptors, one.threads) == (two.descriptors, two.threads)
                for one, two in zip(now, last, strict=True)
            )
            looks = looks + 1 if same else 0
            last = now
        return last

    def _agreed(self) -> CardSample:
        """The card once nothing is wrong with its accounts, or as it is after a while."""
        until = time.monotonic() + AGREE_S
        while True:
            card = self._client.status().cards[0]
            sample = CardSample(
                accounts=accounts_of(card.memory),
                booked=sum(one.resident_bytes for one in card.residents),
                expected=self._program.figures(),
            )
            if not account_faults(sample) or time.monotonic() > until:
                return sample
            time.sleep(LOOK_S)

    def close(self) -> None:
        """Ends its connection."""
        self._client.close()
