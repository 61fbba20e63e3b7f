"""What answers at an address may be anything: no size of it is believed, no name shown as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from moored._generated import events_pb2, model_pb2, residency_pb2

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
