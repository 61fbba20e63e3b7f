"""What answers at an address may be anything: no size of it is believed, no name shown as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from moored._generated import (
    events_pb2,
    generation_pb2,
    hub_pb2,
    jobs_pb2,
    model_pb2,
    residency_pb2,
    server_pb2,
)

from service import ROOT, run

OBEYED = "\x1b]0;owned\x07"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, str]]:
    """A service that does as it is told, and its address."""
    monkeypatch.syspath_prepend(str(ROOT / "client-py" / "tests"))
    from scripted import Service as Scripted

    service = Scripted()
    server, address = service.start()
    yield service, address
    server.stop(None).wait()


def picture(**artifact: Any) -> events_pb2.Event:
    """A part of a result."""
    return events_pb2.Event(artifact=events_pb2.Artifact(media_type="image/png", **artifact))


DONE = events_pb2.Event(done=events_pb2.Done(seed=1))


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([DONE], "sent no result"),
        ([picture(), DONE], "not complete"),
        ([picture(chunk=b"x", offset=2**64 - 1), DONE], "has more than its"),
        ([picture(chunk=b"x", offset=10 << 30), DONE], "has more than its"),
        ([picture(chunk=b"x", total_bytes=2**63), DONE], "are the most for what was asked"),
        ([picture(chunk=b"x", total_bytes=2**20), DONE], "not complete"),
        ([picture(chunk=b"x", index=1), DONE], "1 were asked for"),
        ([picture(chunk=b"GIF89a", total_bytes=6), DONE], "other bytes"),
    ],
)
def test_a_result_is_what_came_and_nothing_else_is_written(
    scripted: tuple[Any, str], tmp_path: Path, events: list[Any], says: str
) -> None:
    service, address = scripted
    service.on("GenerateImage", events)
    out = tmp_path / "x.png"
    done = run("generate", "a cat", "-m", "any", "-o", str(out), "--endpoint", f"http://{address}")
    assert done.returncode == 1, done.stderr
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_name_of_a_service_reaches_the_terminal_as_it_is(scripted: tuple[Any, str]) -> None:
    service, address = scripted
    card = residency_pb2.CardStatus(
        id=f"cpu{OBEYED}",
        name=OBEYED,
        attention=f"{OBEYED}\nA LINE",
        reservations=[residency_pb2.Reservation(id="1", label=f"a{OBEYED}\nA LINE", bytes=1)],
    )
    service.on("GetStatus", residency_pb2.Status(cards=[card]))
    service.on(
        "ListModels",
        lambda request, context: context.abort(grpc.StatusCode.NOT_FOUND, f"{OBEYED}\nA LINE"),
    )
    freed = model_pb2.FreedComponent(card=f"a{OBEYED}\nA LINE")
    service.on("Unload", residency_pb2.UnloadResponse(freed=[freed]))
    for command, code in [
        (("status",), 0),
        (("status", "--json"), 0),
        (("models",), 1),
        (("unload", "a"), 0),
    ]:
        done = run(*command, "--endpoint", f"http://{address}")
        told = done.stdout + done.stderr
        assert done.returncode == code, told
        assert "owned" in told
        assert "\x1b" not in told and "\x07" not in told and "\u202e" not in told
        assert not [line for line in told.splitlines() if line.startswith("A LINE")]


FD = FieldDescriptor
NUMBERS = {
    "highest": {
        FD.TYPE_UINT64: 2**64 - 1,
        FD.TYPE_INT64: 2**63 - 1,
        FD.TYPE_UINT32: 2**32 - 1,
        FD.TYPE_INT32: 2**31 - 1,
        FD.TYPE_ENUM: 2**31 - 1,
        FD.TYPE_DOUBLE: float("inf"),
        FD.TYPE_FLOAT: float("inf"),
    },
    "lowest": {
        FD.TYPE_UINT64: 0,
        FD.TYPE_INT64: -(2**63),
        FD.TYPE_UINT32: 0,
        FD.TYPE_INT32: -(2**31),
        FD.TYPE_ENUM: -1,
        FD.TYPE_DOUBLE: float("-inf"),
        FD.TYPE_FLOAT: float("nan"),
    },
}
OTHERS = {FD.TYPE_BOOL: True, FD.TYPE_STRING: "name", FD.TYPE_BYTES: b"bytes"}


def fill(message: Any, numbers: dict[int, Any], depth: int = 5) -> Any:
    """Sets every number of a message to an extreme one, and puts two of everything that repeats."""
    for field in message.DESCRIPTOR.fields:
        inner, place = field.message_type, getattr(message, field.name)
        if inner is not None and inner.GetOptions().map_entry:
            continue
        if inner is None:
            value = (numbers | OTHERS)[field.type]
            if field.is_repeated:
                place.extend([value] * 2)
            else:
                setattr(message, field.name, value)
        elif depth > 0 and field.is_repeated:
            for _ in range(2):
                fill(place.add(), numbers, depth - 1)
        elif depth > 0:
            place.SetInParent()
            fill(place, numbers, depth - 1)
    return message


def each_event(numbers: dict[int, Any]) -> list[Any]:
    """One event of every kind, the last ones last."""
    events = []
    for field in events_pb2.Event.DESCRIPTOR.oneofs_by_name["event"].fields:
        event = events_pb2.Event(job_id="job", at_ms=numbers[FD.TYPE_UINT64])
        fill(getattr(event, field.name), numbers)
        getattr(event, field.name).SetInParent()
        events.append((field.name == "done", field.name == "artifact", event))
    return [event for *_, event in sorted(events, key=lambda each: each[:2])]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_of_a_service_ends_a_command_in_a_fault(
    scripted: tuple[Any, str], tmp_path: Path, name: str
) -> None:
    service, address = scripted
    numbers = NUMBERS[name]
    for file in (generation_pb2, residency_pb2, jobs_pb2, server_pb2, hub_pb2):
        for methods in file.DESCRIPTOR.services_by_name.values():
            for method in methods.methods:
                answer = fill(GetMessageClass(method.output_type)(), numbers)
                is_of_events = method.output_type is events_pb2.Event.DESCRIPTOR
                events = each_event(numbers) if is_of_events else [answer]
                service.on(method.name, events if method.server_streaming else answer)
    for command in [
        ("status",),
        ("models",),
        ("models", "--adapters"),
        ("models", "--available"),
        ("jobs", "--all"),
        ("plan", "a cat", "-m", "any"),
        ("load", "any"),
        ("unload", "any"),
        ("trim",),
        ("reserve", "1GiB"),
        ("recycle",),
        ("generate", "a cat", "-m", "any"),
        ("film", "a cat", "-m", "any"),
        ("play", "a cat", "-m", "any"),
        ("doctor",),
    ]:
        for form in ((), ("--json",)):
            done = run(*command, *form, "--endpoint", f"http://{address}", cwd=tmp_path)
            told = f"{command}: {done.stdout}{done.stderr}"
            assert done.returncode in (0, 1, 6), told
            assert "panicked" not in told
            assert "panicked" not in told
