"""Nothing without the token crowds out anybody who has it, and no client takes all that clients share."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import moored
import pytest
from http2 import DATA, GOAWAY, HEADERS, PREFACE, RST_STREAM, Http2, message
from waiting import wait_until

from service import INSTANT_MODELS, Service, clean_environment, write_secret

Simulate = Callable[..., Service]

TOKEN = "a token of these tests"
EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
LIST_SERVICES = b"\x3a\x00"
"""A request of reflection: `list_services` of any host."""
SILENT = 70
NEWCOMERS = 32
"""Connections without a call that are open at a time: half of `limits.connections`, 64."""


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def with_token(simulate: Simulate, folder: Path, *settings: str) -> Service:
    file = folder / "token"
    write_secret(file, f"{TOKEN}\n")
    settings = (f"service.token_file={file}", *settings)
    return simulate(arguments=tuple(word for each in settings for word in ("--set", each)))


def silent_connection(service: Service, source: str) -> socket.socket:
    """A connection that has begun to speak HTTP/2, and says no more."""
    host, port = service.address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), 60, source_address=(source, 0))
    with suppress(OSError):  # it may be closed by now
        connection.sendall(PREFACE + EMPTY_SETTINGS)
    return connection


def answer_of(connection: Http2, package: str, method: str, request: bytes) -> bytes:
    """The answer to a call, empty where it is refused."""
    stream = connection.call(method, package=package)
    connection.write(stream, message(request), end=True)
    ends = ((DATA, stream), (RST_STREAM, stream), (GOAWAY, 0))
    connection.wait_for(lambda: any(end in connection.frames for end in ends))
    return connection.frames.get((DATA, stream), b"")


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("addresses", [1, 250])
def test_connections_that_never_make_a_call_keep_nobody_out(
    simulate: Simulate, opened: ExitStack, tmp_path: Path, addresses: int
) -> None:
    service = with_token(simulate, tmp_path, "limits.handshake=10m", "limits.connections=64")
    before = opened.enter_context(service.client(token=TOKEN))
    silent = []
    for number in range(SILENT):
        source = f"127.0.1.{number % addresses + 1}"
        silent.append(opened.enter_context(silent_connection(service, source)))
    with moored.Client(service.address, token=TOKEN) as after:
        for client in (before, after):
            assert client.status().cards
            client.generate_image("here", model="small", width=64, height=64)
    wait_until(
        lambda: sum(is_closed(each) for each in silent) >= SILENT - NEWCOMERS,
        "the oldest of the silent ones were closed",
    )


def test_a_connection_without_a_call_with_the_token_is_closed_although_it_answers(
    simulate: Simulate, opened: ExitStack, tmp_path: Path
) -> None:
    service = with_token(simulate, tmp_path, "limits.handshake=5s")
    called, answers = (Http2(service.address, token=token) for token in (TOKEN, ""))
    for each in (called, answers):
        opened.callback(each.close)
    stream = called.call("Server/GetServerInfo")
    called.write(stream, message(b""), end=True)
    called.wait_for(lambda: (HEADERS, stream) in called.frames)
    answers.wait_for(lambda: (GOAWAY, 0) in answers.frames)
    assert (GOAWAY, 0) not in called.frames


def test_calls_without_the_token_take_no_places_of_those_with_it(
    simulate: Simulate, opened: ExitStack, tmp_path: Path
) -> None:
    service = with_token(simulate, tmp_path, "limits.calls=16")
    watches: list[tuple[Http2, int]] = []
    for address in range(9):
        connection = Http2(service.address, source=f"127.0.2.{address + 1}")
        opened.callback(connection.close)
        for _ in range(15):
            stream = connection.call("Health/Watch", package="grpc.health.v1")
            connection.write(stream, message(b""), end=True)
            watches.append((connection, stream))
    for connection, stream in watches:
        answered = ((HEADERS, stream), (RST_STREAM, stream))
        connection.wait_for(lambda c=connection, a=answered: any(one in c.frames for one in a))
    served = sum((0, stream) in connection.frames for connection, stream in watches)
    assert 0 < served <= 16, "of 135, half of the calls without the token"
    # Those that last leave places to short ones, at an address with watches and at another.
    for source in ("127.0.2.1", "127.0.3.1"):
        probe = Http2(service.address, source=source)
        opened.callback(probe.close)
        assert answer_of(probe, "grpc.health.v1", "Health/Check", b"")
        reflection = "ServerReflection/ServerReflectionInfo"
        assert answer_of(probe, "grpc.reflection.v1", reflection, LIST_SERVICES)
    with service.client(token=TOKEN) as client:
        client.generate_image("here", model="small", width=64, height=64)
        assert client.health() == "serving", "with the token it is a call like others"
    with moored.Client(service.address, token=TOKEN[::-1]) as stranger:
        with pytest.raises(moored.Unauthenticated):
            stranger.status()


def test_one_client_cannot_fill_the_queue(simulate: Simulate, opened: ExitStack) -> None:
    service = simulate(arguments=("--set", "queue.max_jobs_per_client=3"))

    def submit(client: moored.Client, seed: int) -> None:
        size = {"width": 64, "height": 64, "steps": 200}
        events = client.stream_image("long", model="slow", seed=seed, **size)
        opened.callback(events.close)
        next(iter(events))

    greedy = opened.enter_context(service.client(client_id="greedy"))
    for seed in range(3):
        submit(greedy, seed)
    with pytest.raises(moored.ClientLimit, match=r"queue\.max_jobs_per_client") as refused:
        greedy.load("small")
    assert refused.value.retry_after_s
    other = opened.enter_context(service.client(client_id="another"))
    submit(other, 3)
    assert len(other.jobs()) == 4


def test_names_of_sessions_are_refused(simulate: Simulate) -> None:
    service = simulate()
    with service.client(client_id="session-0123") as client:
        with pytest.raises(moored.InvalidRequest, match="client_id"):
            client.hold("small")


def crc8(data: bytes) -> int:
    remainder = 0
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = (remainder << 1 ^ (7 if remainder & 128 else 0)) & 255
    return remainder


def panicking_flac() -> bytes:
    """A FLAC with a frame of more partitions than samples, at which its decoder panics."""
    description = bytes([0, 16, 0, 16]) + bytes(6)
    description += (48_000 << 12 | 15 << 4).to_bytes(4) + bytes(4) + bytes(16)
    head = bytes([0xFF, 0xF8, 0x60, 0, 0, 15])
    frame = head + bytes([crc8(head), 0x10, 0x3C]) + bytes(6)
    return b"fLaC" + bytes([0x80, 0, 0, 34]) + description + frame


def test_a_file_at_which_a_decoder_panics_writes_no_backtraces(tmp_path: Path) -> None:
    environment = clean_environment() | {"RUST_BACKTRACE": "1"}
    service = Service(
        "--models",
        str(INSTANT_MODELS),
        state=tmp_path / "state",
        devices=("sim:24GiB",),
        environment=environment,
    )
    with service.client() as client:
        for _ in range(5):
            with pytest.raises(moored.InvalidRequest, match="a frame is damaged"):
                client.put_media(panicking_flac(), media_type="audio/flac")
    assert service.stop() == 0
    assert not [line for line in service.log if "panicked" in line]
    assert len("".join(service.log)) < 20_000
