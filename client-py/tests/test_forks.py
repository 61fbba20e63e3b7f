"""A client that is used after a fork works, or says why; and the parent's goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")

PROGRAM = """
import os, sys, moored
client = moored.Client(sys.argv[1])
asked = lambda: client.health()
with client:
    first = asked()
    stream = client.watch_status()
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(20)
        try:
            assert asked() == first
            try:
                next(stream)
            except RuntimeError as error:
                assert "before a fork" in str(error), error
            else:
                raise AssertionError("the stream gave something")
            stream.close()
            client.close()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
    assert asked() == first
    next(stream)
print("fine")
"""


def test_a_client_works_after_a_fork(address: str, service: object, tmp_path: Path) -> None:
    from scripted import Service

    from moored._generated import residency_pb2

    assert isinstance(service, Service)
    service.on("WatchStatus", [residency_pb2.Status(latents=1)])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr
    assert signal.SIGALRM
