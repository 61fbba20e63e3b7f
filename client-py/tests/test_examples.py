"""The examples do what they say, in a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import grpc
import pytest
from scripted import SAMPLES_PER_SECOND, WAIT_S, Service, reason, refuse
from talks import CHUNK, Player, talk_on

LIVE = Path(__file__).parent.parent / "examples" / "live_session.py"


def live(address: str, path: Path, *arguments: str) -> list[str]:
    command = [sys.executable, LIVE, "--endpoint", address, "-o", path, "--silent", *arguments]
    return [str(one) for one in command]


def test_live_in_a_pipe(service: Service, address: str, tmp_path: Path) -> None:
    talk = talk_on(service, Player(chunks_each=40))
    path = tmp_path / "played.wav"
    seconds = str(60 * CHUNK / SAMPLES_PER_SECOND)
    ran = subprocess.run(
        live(address, path, "a slow waltz", "--seconds", seconds),
        input="\na brass band\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines == [
        f"demo@main, 8000 Hz, to {path}",
        "Segment 1: accepted, seed 41",
        "Segment 1: ready in 0.2 s",
        "Segment 2: accepted, seed 42",
        "Closed (closed), 2 segments, 0 gaps",
        f"Wrote {path}",
    ]
    said = [one.segment.track.prompt for one in talk.heard if one.HasField("segment")]
    assert said == ["a slow waltz", "a brass band"]
    with wave.open(str(path)) as written:
        assert written.getnframes() == 60 * CHUNK


@pytest.mark.usefixtures("interruptible")
def test_live_in_a_terminal(service: Service, address: str, tmp_path: Path) -> None:
    talk = talk_on(service, Player())
    path = tmp_path / "played.wav"
    ours, its = pty.openpty()
    running = subprocess.Popen(
        live(address, path),
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "COLUMNS": "80", "LINES": "24"},
    )
    os.close(its)
    shown = b""
    try:
        os.write(ours, b"a slow waltz\n")
        assert talk.wait_heard(lambda heard: len(heard) == 2)
        while b"ready in" not in shown:
            shown += os.read(ours, 65536)
        running.send_signal(signal.SIGINT)
        # Linux ends what is read of a terminal that nobody has open by an error.
        while piece := read(ours):
            shown += piece
        assert running.wait(WAIT_S) == 0
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    assert talk.heard[1].segment.track.prompt == "a slow waltz"
    assert talk.heard[1].segment.start == 2
    assert "█".encode() in shown
    assert b"dB" in shown
    # The terminal scrolls as a whole again, and says how it ended.
    assert b"\x1b[r" in shown
    assert b"Closed (closed), 1 segments, 0 gaps" in shown
    with wave.open(str(path)) as written:
        assert written.getnframes() == 2 * CHUNK


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def test_live_says_what_is_wrong(service: Service, address: str, tmp_path: Path) -> None:
    def refuses(message: Any) -> list[Any]:
        why = reason("MODEL_NOT_FOUND")
        return [lambda context: refuse(context, grpc.StatusCode.NOT_FOUND, "no such model", why)]

    talk_on(service, refuses)
    path = tmp_path / "played.wav"
    ran = subprocess.run(live(address, path), input="", capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.endswith("error: no such model\n")
    assert not path.exists()
