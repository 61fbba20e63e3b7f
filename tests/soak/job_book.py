"""What clients hear of their jobs: every stream is read through here, so that every end is counted."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import moored
from checks import JobEnds

FINAL = ("done", "failed", "cancelled")
KEPT_FAULTS = 50

Leaves = Callable[[moored.Event], bool]


class JobBook:
    """Ends by job, and what a stream should not have said. Threads share it."""

    def __init__(self) -> None:
        """Knows of no job."""
        self.told: dict[str, list[str]] = defaultdict(list)
        self.seen: dict[str, set[str]] = defaultdict(set)
        self.faults: list[str] = []
        self.errors: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.done = 0
        self._lock = threading.Lock()

    def follow(
        self,
        stream: moored.EventStream[Any],
        leave: Leaves | None = None,
        pause_s: float = 0.0,
        heed: Callable[[moored.Event], object] | None = None,
    ) -> str:
        """Reads a stream to its end, or until it is to be left: `done` or `left`. Its error is raised.

        `pause_s` is how long a slow reader takes for an event; `heed` is told of each.
        """
        done = False
        try:
            with stream:
                for event in stream:
                    if done:
                        self.fault(f"{event.job_id}: {type(event).__name__} behind its end")
                    if isinstance(event, moored.Retrying):
                        self.retries[event.reason] += 1
                    done = done or isinstance(event, moored.Done)
                    if heed is not None:
                        heed(event)
                    if leave is not None and not done and leave(event):
                        self._tell(stream.job_id, "left")
                        return "left"
                    if pause_s:
                        time.sleep(pause_s)
        except moored.MooredError as error:
            job, word = error.job_id or stream.job_id, type(error).__name__
            if done:
                self.fault(f"{job}: {word} behind its end")
            if job:
                self._tell(job, word)
            raise
        if not done:
            self.fault(f"{stream.job_id}: a stream that ended without a word of its job's end")
        self._tell(stream.job_id, "done")
        with self._lock:
            self.done += 1
        return "done"

    def result(self, stream: moored.EventStream[Any], **options: Any) -> Any:
        """The result of a stream that is read to its end."""
        self.follow(stream, **options)
        return stream.result()

    def _tell(self, job: str, word: str) -> None:
        with self._lock:
            self.told[job].append(word)

    def fault(self, words: str) -> None:
        """Notes what must not happen."""
        with self._lock:
            if len(self.faults) < KEPT_FAULTS:
                self.faults.append(words)

    def error(self, error: BaseException) -> None:
        """Counts how an action ended that did not succeed."""
        with self._lock:
            self.errors[type(error).__name__] += 1

    def look(self, jobs: tuple[moored.JobInfo, ...]) -> None:
        """Notes the ends that the list of jobs shows, and jobs that go on after theirs."""
        with self._lock:
            for job in jobs:
                if job.state in FINAL:
                    self.seen[job.id].add(job.state)
                elif job.id in self.seen:
                    self.seen[job.id].add(f"{job.state} after its end")

    def ends(self, accepted: Counter[str], ended: Counter[str], states: dict[str, str]) -> JobEnds:
        """Everything that is known, with what the service's log knows."""
        with self._lock:
            told = {job: list(words) for job, words in self.told.items()}
            seen = {job: set(states) for job, states in self.seen.items()}
        return JobEnds(Counter(accepted), Counter(ended), dict(states), told, seen)
