"""A client that is used after a fork works, or says why; and the parent's goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from scripted import Service

import moored
from moored._generated import residency_pb2

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")

PROGRAM = """
import os, sys, moored
client = moored.Client(sys.argv[1])
asked = lambda: client.health()
with client:
    first = asked()
    child = os.fork()
    if child == 0:
        import signal
        signal.alarm(50)
        try:
            assert asked() == first
            client.close()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
    assert asked() == first
print("fine")
"""


def test_a_client_works_after_a_fork(address: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "fine\n"), ran.stderr


def test_a_stream_of_before_a_fork_says_so(
    address: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not forked for it: gRPC itself may crash a child that is forked in the middle of a call."""
    service.on("WatchStatus", [residency_pb2.Status(latents=1)])
    with moored.Client(address) as client:
        stream = client.watch_status()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(RuntimeError, match="before a fork"):
                next(stream)
        assert next(stream).latents == 1
        stream.close()
