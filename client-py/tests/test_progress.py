from __future__ import annotations

import asyncio
import io
import sys
import types
from typing import Any

import pytest
from scripted import Service, accepted, done, event, step

import moored
from moored._generated import events_pb2, model_pb2

COMPONENT = model_pb2.Component(id="c", name="vae", bytes=200_000_000)


def loading(bytes_done: int) -> events_pb2.Event:
    inner = events_pb2.Loading(component=COMPONENT, bytes_done=bytes_done, bytes_total=200_000_000)
    return event(loading=inner)


JOB = [
    accepted(),
    event(queued=events_pb2.Queued(position=1)),
    event(queued=events_pb2.Queued(position=0)),
    loading(0),
    loading(200_000_000),
    event(stage=events_pb2.StageStarted(name="denoise", index=1, of=1, chunking="whole")),
    step(1, 2),
    step(2, 2),
    done(),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_has_one_line_a_phase(service: Service, client: moored.Client) -> None:
    service.on("GenerateImage", JOB)
    log = io.StringIO()
    result = moored.progress(client.stream_image("x"), file=log).result()
    assert result.seed == 7
    assert log.getvalue().splitlines() == [
        "Queued, 1 ahead",
        "Loading vae 0.0/0.2 GiB",
        "Denoising",
        "Done in 0.2 s",
    ]


def test_a_log_says_what_the_service_chose() -> None:
    model = moored.ResolvedModel("demo+8-bit", "demo", "", "flux", {}, "8-bit: full needs more")
    log = io.StringIO()
    for _ in moored.progress([moored.Accepted(model, False), moored.Queued(0)], file=log):
        pass
    assert log.getvalue() == "Accepted, 8-bit: full needs more\nQueued, next\n"


def test_a_terminal_is_kept_up_to_date(service: Service, client: moored.Client) -> None:
    service.on("GenerateImage", JOB)
    terminal = Terminal()
    events = list(moored.progress(client.stream_image("x"), file=terminal))
    assert len(events) == len(JOB)
    lines = terminal.getvalue().split("\n")
    assert [line.split("\r\x1b[K")[-1] for line in lines] == [
        "Queued, next",
        "Loading vae 0.2/0.2 GiB",
        "Step 2/2",
        "Done in 0.2 s",
        "",
    ]


def test_async(service: Service, address: str) -> None:
    service.on("GenerateImage", JOB)
    log = io.StringIO()

    async def main() -> None:
        async with moored.AsyncClient(address) as client:
            result = await moored.progress(client.stream_image("x"), file=log).result()
            assert result.seed == 7
            events = [one async for one in moored.progress(client.stream_image("x"), file=log)]
            assert len(events) == len(JOB)

    asyncio.run(main())
    assert len(log.getvalue().splitlines()) == 8


def test_any_iterable_of_events() -> None:
    log = io.StringIO()
    shown = moored.progress([moored.Step(1, 2, 0)], file=log)
    assert [*shown] == [moored.Step(1, 2, 0)]
    assert log.getvalue() == "Step 1/2\n"
    with pytest.raises(TypeError, match="result"):
        shown.result()


def test_a_notebook_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            shown.append(data["text/plain"])

    def display(data: dict[str, str], **options: Any) -> Handle:
        assert options == {"raw": True, "display_id": True}
        return Handle()

    shell = type("ZMQInteractiveShell", (), {})
    ipython, inner = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    ipython.get_ipython = shell  # type: ignore[attr-defined]
    inner.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", inner)
    events = [moored.Queued(0), moored.Step(1, 2, 0), moored.Step(2, 2, 0)]
    assert [*moored.progress(events)] == events
    assert shown == ["Queued, next", "Queued, next\nStep 1/2", "Queued, next\nStep 2/2"]


@pytest.mark.parametrize(
    ("section", "words"),
    [((0, 0), "Step 7/20"), ((1, 1), "Step 7/20"), ((2, 4), "Section 2/4, step 7/20")],
)
def test_a_section_is_reported_where_there_are_several(
    section: tuple[int, int], words: str
) -> None:
    assert moored.describe(moored.Step(7, 20, 0, *section)) == words


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "304 layers of transformer, rank 16"),
        (
            {"layers": {"transformer": 1, "text_encoder": 12}, "rank": 4},
            "12 layers of text_encoder, 1 layer of transformer, rank 4",
        ),
        ({"layers": {}, "rank": 0}, ""),
        (
            {"ignored": ("a",), "ignored_count": 1},
            "304 layers of transformer, rank 16; 1 tensor ignored (a)",
        ),
        (
            {"ignored": ("a", "b", "c", "d"), "ignored_count": 900},
            "304 layers of transformer, rank 16; 900 tensors ignored (a, b, c, ...)",
        ),
    ],
)
def test_what_an_adapter_changes_is_reported_in_a_line(more: dict[str, Any], said: str) -> None:
    settings = {"layers": {"transformer": 304}, "rank": 16} | more
    assert moored.describe(moored.AttachedAdapter("ink", **settings)) == said
