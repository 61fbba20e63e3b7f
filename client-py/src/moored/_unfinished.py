"""Jobs that were asked for with `detach` and whose end was not received, in a file.

A program that ends before its job does finds the job's key there when it asks for the same again,
and joins the job instead of starting another. Once an end was received, or the job was cancelled,
the same request is a new job.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ._boxes import Boxes, boxes_of

VERSION = 1
# For longer the service keeps no results, unless it is set to.
KEPT_S = 7 * 24 * 3600.0

Jobs = dict[str, dict[str, Any]]
_LOCK = threading.Lock()


class Unfinished:
    """The file, by what was asked for. Clients of a program may share one, programs may not."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def begin(self, endpoint: str, request: Any) -> Note:
        """Gives a request the key of its unfinished job, or one of its own that is noted."""
        asked = type(request)()
        asked.CopyFrom(request)
        asked.options.client_id = ""  # may have the number of a process
        begin = f"{endpoint}\0{type(request).__name__}\0".encode()
        what = hashlib.sha256(begin + asked.SerializeToString(deterministic=True)).hexdigest()
        with _LOCK:
            jobs = self._read()
            if what not in jobs:
                jobs[what] = {"key": secrets.token_hex(16), "job": "", "box": ""}
            jobs[what]["at"] = time.time()
            self._write(jobs)
        request.options.idempotency_key = jobs[what]["key"]
        boxes = boxes_of(endpoint)
        boxes.remember(jobs[what]["box"], jobs[what]["key"], jobs[what]["job"])
        return Note(self, what, boxes)

    def accepted(self, what: str, job_id: str, box: str) -> None:
        """Notes the job's id, by which it may be cancelled, and the box that has it."""
        with _LOCK:
            jobs = self._read()
            if what in jobs and jobs[what]["job"] != job_id:
                jobs[what] |= {"job": job_id, "box": box}
                self._write(jobs)

    def forget(self, what: str) -> None:
        """The same request is a new job from now on."""
        with _LOCK:
            jobs = self._read()
            if jobs.pop(what, None):
                self._write(jobs)

    def forget_job(self, job_id: str) -> None:
        """Of a job that was cancelled."""
        with _LOCK:
            jobs = self._read()
            left = {what: job for what, job in jobs.items() if job["job"] != job_id}
            if len(left) < len(jobs):
                self._write(left)

    def _read(self) -> Jobs:
        """What is noted. A file that is damaged, or of another version, has nothing."""
        try:
            read = json.loads(self._path.read_text(encoding="utf-8"))
            if read["version"] != VERSION:
                return {}
            begun = time.time() - KEPT_S
            return {
                what: {
                    "key": str(job["key"]),
                    "job": str(job["job"]),
                    "box": str(job.get("box", "")),
                    "at": float(job["at"]),
                }
                for what, job in read["jobs"].items()
                if float(job["at"]) > begun
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self, jobs: Jobs) -> None:
        """Replaces the file. Where it cannot be written, the job is only not found again."""
        text = json.dumps({"version": VERSION, "jobs": jobs})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Private to its owner: whoever knows a key may join its job.
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        except OSError:
            return
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self._path)
        except OSError:
            Path(name).unlink(missing_ok=True)


class Note:
    """An unfinished job, as its stream knows it."""

    def __init__(self, unfinished: Unfinished, what: str, boxes: Boxes) -> None:
        self._unfinished = unfinished
        self._what = what
        self._boxes = boxes

    def accepted(self, job_id: str) -> None:
        """The service has the job."""
        self._unfinished.accepted(self._what, job_id, self._boxes.of(job_id))

    def ended(self) -> None:
        """Its end was received, or its id: the same request is a new job."""
        self._unfinished.forget(self._what)
