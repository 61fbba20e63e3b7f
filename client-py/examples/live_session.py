#!/usr/bin/env python3
"""Plays a session of music live, and writes what it played.

    python live_session.py --model owner/music "a slow waltz, accordion"

Each line that you enter is a new prompt: it sounds as soon as it is made, at the place where the
music is. Ctrl-C ends it. Sound comes out by the package `sounddevice` where it is installed. In a
pipe it prints plain lines:

    echo "a brass band" | python live_session.py --seconds 30 --output band.wav
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import shutil
import sys
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import moored

LOWEST_DB = -48
BLOCKS = " ▏▎▍▌▋▊▉█"
GREEN, YELLOW, RED, DIM, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


def level_db(chunk: moored.SoundChunk) -> float:
    """The loudest sample of a chunk, in decibels of full scale."""
    loudest = max((abs(one) for one in memoryview(chunk.samples).cast("h")), default=0)
    return 20 * math.log10(max(loudest, 1) / 32768)


class Lines:
    """Where no terminal is: one line an event."""

    def show(self, line: str, colour: str = "") -> None:
        """Prints a line."""
        print(line, flush=True)

    def meter(self, seconds: float, level: float) -> None:
        """Shows how loud it is: not here."""

    def ask(self) -> None:
        """Is ready for the next prompt."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class Screen(Lines):
    """A terminal: events scroll, and below them stand the level and the line that is entered."""

    def __init__(self) -> None:
        self._size = (0, 0)
        self._lock = threading.Lock()

    def show(self, line: str, colour: str = "") -> None:
        """Scrolls a line in, and leaves the cursor where it is typed."""
        columns, rows = self._fit()
        self._write(f"\x1b7\x1b[{rows - 2};1H\n\x1b[K{colour}{line[:columns]}{PLAIN}\x1b8")

    def meter(self, seconds: float, level: float) -> None:
        """Draws the level: green, from -12 dB yellow, from -3 dB red."""
        columns, rows = self._fit()
        time = f" {int(seconds) // 60}:{seconds % 60:04.1f}  "
        width = max(8, min(60, columns - len(time) - 12))
        eighths = round(8 * width * max(0.0, 1 - level / LOWEST_DB))
        whole, part = divmod(min(eighths, 8 * width), 8)
        bar = "█" * whole + (BLOCKS[part] if whole < width else "")
        colour = GREEN if level < -12 else YELLOW if level < -3 else RED
        line = f"{time}{colour}{bar:<{width}}{PLAIN}{DIM} {level:5.1f} dB{PLAIN}"
        self._write(f"\x1b7\x1b[{rows - 1};1H\x1b[K{line}\x1b8")

    def ask(self) -> None:
        """Puts the cursor to where a prompt is entered."""
        _, rows = self._fit()
        self._write(f"\x1b[{rows};1H\x1b[K{DIM}play>{PLAIN} ")

    def __enter__(self) -> Screen:
        self.ask()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _, rows = self._size
        self._write(f"\x1b[r\x1b[{rows};1H\x1b[K\x1b[{rows - 1};1H\x1b[K")

    def _fit(self) -> tuple[int, int]:
        size = shutil.get_terminal_size()
        if size != self._size:
            # All but the last two lines scroll.
            self._size = (size.columns, size.lines)
            self._write(f"\x1b7\x1b[1;{size.lines - 2}r\x1b8")
        return self._size

    def _write(self, text: str) -> None:
        with self._lock:
            sys.stdout.write(text)
            sys.stdout.flush()


@contextlib.contextmanager
def loudspeaker(session: moored.AudioSession, device: Any) -> Iterator[Any]:
    """What plays samples, and takes as long as they sound; None where there is no sound."""
    if device is None:
        yield None
        return
    with device.RawOutputStream(
        session.sample_rate, channels=session.channels, dtype="int16"
    ) as out:
        yield out


def sound_package() -> Any:
    """`sounddevice`, where it is installed and finds a device."""
    try:
        device = importlib.import_module("sounddevice")
        device.check_output_settings()
    except Exception:  # of the package, of the library below it, or of the machine
        return None
    return device


def listen(session: moored.AudioSession, screen: Lines) -> None:
    """Plays each line that is entered."""
    # Unbuffered: at its end Python waits for no lock that a thread of reading holds.
    with open(0, "rb", buffering=0, closefd=False) as typed:
        for line in typed:
            screen.ask()
            prompt = line.decode(errors="replace").strip()
            if prompt and not play(session, prompt):
                return


def play(session: moored.AudioSession, prompt: str) -> bool:
    """Plays a prompt; False: the session is over, and who reads it says why."""
    try:
        session.play(prompt, at="now")
    except moored.MooredError:
        return False
    return True


def run(asked: argparse.Namespace, screen: Lines) -> moored.AudioSessionClosed:
    """Plays until Ctrl-C, or for the seconds that are asked for."""
    device = None if asked.silent else sound_package()
    with (
        moored.Client(asked.endpoint) as client,
        client.audio_session(
            asked.model, source=asked.source, lead_s=asked.lead, paced=device is not None
        ) as session,
        moored.WavWriter(
            asked.output, session.sample_rate, session.channels, overwrite=asked.overwrite
        ) as file,
        loudspeaker(session, device) as out,
        screen,
    ):
        screen.show(f"{session.model.key}, {session.sample_rate} Hz, to {asked.output}")
        if asked.prompt:
            session.play(asked.prompt)
        threading.Thread(target=listen, args=(session, screen), daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            for event in session.events():
                match event:
                    case moored.SoundChunk():
                        file.write(event)
                        screen.meter(file.seconds, level_db(event))
                        if out is not None:
                            out.write(event.samples)
                        if asked.seconds is not None and file.seconds >= asked.seconds:
                            break
                    case moored.SegmentFailed():
                        screen.show(moored.describe(event), RED)
                    case moored.SegmentProgress(event=moored.Step(n, of)) if n < of:
                        pass  # the last one is enough
                    case moored.SegmentProgress():
                        screen.show(moored.describe(event), DIM)
                    case _:
                        screen.show(moored.describe(event))
        return session.close()


def main() -> int:
    """Runs it by the command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Each line of the input is a new prompt. Ctrl-C ends it.",
    )
    parser.add_argument("prompt", nargs="?", help="what to begin with")
    parser.add_argument("-m", "--model", help="default: the service's")
    parser.add_argument("--source", metavar="FILE", help="a WAV or FLAC to start from")
    parser.add_argument("-o", "--output", default="played.wav", metavar="FILE")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    parser.add_argument("--seconds", type=float, help="end after so much sound")
    parser.add_argument(
        "--lead", type=float, default=1.0, help="seconds of sound ahead; default: 1"
    )
    parser.add_argument("--silent", action="store_true", help="write the file alone")
    parser.add_argument("--endpoint", help="default: MOORED_ENDPOINT, else 127.0.0.1:50051")
    asked = parser.parse_args()
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    print("Opening a session", file=sys.stderr)
    try:
        report = run(asked, Screen() if is_terminal else Lines())
    except (moored.MooredError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(moored.describe(report))
    print(f"Wrote {asked.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
