#!/usr/bin/env python3
"""Measures what calls with the token take while connections and calls without it are attempted.

Eight clients with the token ask for the status again and again: alone, beside 520 connections that say
nothing (each opened again once it is closed), and beside 9 x 150 `Health/Watch` without the token (again and
again too). Each of these connections comes from an address of its own. The same attacks on another service of
this machine show what its processors alone do to calls. The 99th percentile of a call may be twice that of
calls alone, or that of calls beside an attack on another service.

    export MOORED_BINARY=target/release/moored PYTHONPATH=client-py/src:tests:tests/e2e
    .venv/bin/python scripts/bench_doors.py

It prints a row of a table for each, and ends with 1 when the target is missed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path

import moored
from http2 import PREFACE, Http2, message

from service import INSTANT_MODELS, Service, write_secret

TOKEN = "a token of this measure"
EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
CLIENTS = 8
SILENT = 520
WATCHERS, WATCHES = 9, 150
ROUNDS = 3
"""The parts are measured in turn, so that what else the machine does meets all of them."""
PERIOD_S = 0.2
"""Time between two calls of a client: together they leave the two processors mostly idle."""
REOPENED_S = 1.0
"""Time after which attackers look for what was closed, and open it again."""


def source(number: int) -> str:
    return f"127.{1 + number // 60_000 % 200}.{number // 250 % 240}.{number % 250 + 1}"


def calls_of_clients(address: str, seconds: float) -> list[float]:
    """Seconds that each call of all clients took; a failed one ends the measure."""
    took: list[list[float]] = [[] for _ in range(CLIENTS)]

    def ask(own: list[float], begin_s: float) -> None:
        time.sleep(begin_s)
        with moored.Client(address, token=TOKEN) as client:
            client.status()
            end = time.monotonic() + seconds
            while (begin := time.monotonic()) < end:
                client.status()
                own.append(time.monotonic() - begin)
                time.sleep(PERIOD_S)

    starts = [PERIOD_S * number / CLIENTS for number in range(CLIENTS)]
    asking = [threading.Thread(target=ask, args=each) for each in zip(took, starts, strict=True)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert all(took), "a client was not served"
    return [second for own in took for second in own]


def silent_connections(address: str, stop: Event) -> None:
    host, port = address.rsplit(":", 1)
    numbers = count()
    open_ones: list[socket.socket] = []
    while not stop.is_set():
        still = []
        for each in open_ones:
            with suppress(OSError):
                try:
                    if not each.recv(1000):
                        each.close()
                        continue
                except BlockingIOError:
                    pass
                still.append(each)
        open_ones = still
        while len(open_ones) < SILENT and not stop.is_set():
            with suppress(OSError):
                connection = socket.create_connection(
                    (host, int(port)), 5, source_address=(source(next(numbers)), 0)
                )
                connection.sendall(PREFACE + EMPTY_SETTINGS)
                connection.setblocking(False)
                open_ones.append(connection)
        stop.wait(REOPENED_S)
    for each in open_ones:
        each.close()


def health_watches(address: str, stop: Event) -> None:
    numbers = count()
    while not stop.is_set():
        connections = []
        for _ in range(WATCHERS):
            with suppress(OSError, AssertionError):
                connection = Http2(address, source=source(next(numbers)))
                connections.append(connection)
                for _ in range(WATCHES):
                    stream = connection.call("Health/Watch", package="grpc.health.v1")
                    connection.write(stream, message(b""), end=True)
        stop.wait(REOPENED_S)
        for each in connections:
            each.close()


def beside(
    attack: Callable[[str, Event], None] | None, attacked: str, address: str, seconds: float
) -> list[float]:
    stop = multiprocessing.Event()
    # A process of its own: in this one it would keep the clients from their threads.
    attacker = multiprocessing.Process(target=attack, args=(attacked, stop)) if attack else None
    if attacker:
        attacker.start()
    try:
        return calls_of_clients(address, seconds)
    finally:
        stop.set()
        if attacker:
            attacker.join()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", type=float, default=15.0, help="of each part in each round")
    seconds = options.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "token")
        write_secret(file, f"{TOKEN}\n")
        services = [
            Service(
                *("--models", str(INSTANT_MODELS), "--set", f"service.token_file={file}"),
                state=Path(folder, f"state-{number}"),
                devices=("sim:24GiB",),
            )
            for number in range(2)
        ]
        service, other = services
        try:
            attacks = {
                f"{SILENT} silent connections": silent_connections,
                f"{WATCHERS} x {WATCHES} Health/Watch without the token": health_watches,
            }
            parts: dict[str, Callable[[], list[float]]] = {
                "alone": lambda: beside(None, service.address, service.address, seconds)
            }
            for name, attack in attacks.items():
                for where, attacked in (("", service), (", of another service", other)):
                    parts[name + where] = partial(
                        beside, attack, attacked.address, service.address, seconds
                    )
            rounds = [{name: measure() for name, measure in parts.items()} for _ in range(ROUNDS)]
            percentiles = {}
            print("| beside | calls | median | p99 |\n|---|---|---|---|")
            for name in parts:
                took = [second for each in rounds for second in each[name]]
                percentiles[name] = statistics.quantiles(took, n=100)[98] * 1000
                median = statistics.median(took) * 1000
                print(f"| {name} | {len(took)} | {median:.1f} ms | {percentiles[name]:.1f} ms |")
        finally:
            for each in services:
                each.kill()
    quiet = percentiles["alone"]
    limits = {name: max(2 * quiet, percentiles[f"{name}, of another service"]) for name in attacks}
    return int(any(percentiles[name] > limit for name, limit in limits.items()))


if __name__ == "__main__":
    sys.exit(main())
