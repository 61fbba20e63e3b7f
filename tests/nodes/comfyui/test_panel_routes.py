"""The pack's routes, asked as a browser asks, against a real service."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import moored
import pytest
from browser import DEADLINE_S, LONG, PanelPage, instant_model
from conftest import ROOT
from lora_files import instant_adapter
from waiting import until

from service import INSTANT_MODELS, Service

MODEL = "owner/other"
KEY = f"{MODEL}+full"
TOKEN = "a-token-that-nobody-may-see"

Start = Callable[..., Service]
Loaded = tuple[PanelPage, moored.Client]


@pytest.fixture
def start(tmp_path: Path, panel: PanelPage) -> Iterator[Start]:
    """Starts a service on a simulated card, which the panel's settings name."""
    instant_model(tmp_path / "models", MODEL, steps_ms=100)
    started: list[Service] = []

    def begin(*arguments: str, device: str = "sim:40GiB,foreign=2GiB") -> Service:
        models = ("--models", str(tmp_path / "models"))
        service = Service(*models, *arguments, state=tmp_path / "state", devices=(device,))
        started.append(service)
        panel.settings(endpoint=service.address)
        return service

    yield begin
    for service in started:
        service.kill()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """A page, and a service with one model in memory, for what changes nothing."""
    folder = tmp_path_factory.mktemp("loaded")
    instant_model(folder / "models", MODEL)
    arguments = ("--models", str(folder / "models"))
    service = Service(*arguments, state=folder / "state", devices=("sim:40GiB",))
    page = PanelPage(folder / "user")
    page.settings(endpoint=service.address)
    try:
        with service.client() as client:
            client.load(MODEL)
            yield page, client
    finally:
        page.stop()
        service.kill()


def test_a_snapshot_has_every_account_and_every_model(panel: PanelPage, start: Start) -> None:
    with start().client() as client:
        client.load(MODEL)
        client.pin(MODEL)
        code, said = panel.ask("/moored/status")
        card, memory = said["cards"][0], client.status().cards[0].memory
        assert (code, said["reachable"], said["problem"]) == (200, True, "")
        assert card["memory"] == {name: getattr(memory, name) for name in memory.__slots__}
        assert sum(card["memory"].values()) - memory.total - memory.usable == memory.total
        assert card["attention"] == client.status().cards[0].attention == "cpu loops"
        assert card["holders"] == [{"name": "another process", "pid": 0, "bytes": 2 << 30}]
        (entry,) = card["entries"]
        assert (entry["key"], entry["pinned"], entry["jobs"]) == (KEY, True, 0)
        assert entry["bytes"] == sum(part["bytes"] for part in entry["components"])
        assert entry["bytes"] == memory.components
        assert panel.ask("/api/moored/status")[1]["cards"][0]["entries"][0]["key"] == KEY


def test_a_snapshot_says_what_streaming_costs(
    panel: PanelPage, start: Start, tmp_path: Path
) -> None:
    instant_model(tmp_path / "models", "owner/larger", blocks=20)
    service = start(device="sim:8GiB,speed=100GB/s")
    with service.client() as client:
        client.load("owner/larger", components=("transformer",))
        (resident,) = client.status().cards[0].residents
        assert resident.streamed
        (entry,) = panel.ask("/moored/status")[1]["cards"][0]["entries"]
        (part,) = entry["components"]
        assert part["streamed"] == resident.streamed.words
        assert part["streamed"].endswith(" streamed at 100 GB/s")


def test_a_model_that_left_is_not_shown_for_what_others_share_with_it(
    panel: PanelPage, start: Start
) -> None:
    service = start("--models", str(INSTANT_MODELS), device="sim:96GiB")

    def entries() -> dict[str, list[list[str]]]:
        shown = panel.ask("/moored/status")[1]["cards"][0]["entries"]
        return {one["key"]: [part["shared_with"] for part in one["components"]] for one in shown}

    with service.client() as client:
        client.load("flux-full")
        client.load("huge")
        assert entries().keys() == {"flux-full+full", "huge+full"}
        assert sorted(entries()["huge+full"]) == [[], *[["flux-full+full"]] * 3]
        client.pin("huge")
        shown = panel.ask("/moored/status")[1]["cards"][0]["entries"]
        pinned = {one["key"]: one["pinned"] for one in shown}
        assert pinned == {"flux-full+full": False, "huge+full": True}
        client.unpin("huge")
        client.unload("huge")
        assert entries() == {"flux-full+full": [[]] * 4}
        client.pin("flux-full")
        assert entries().keys() == {"flux-full+full"}
        client.unpin("flux-full")
        client.pin("huge")
        assert entries().keys() == {"flux-full+full", "huge+full"}


def test_models_are_named_the_default_first_and_an_error_is_no_empty_list(
    panel: PanelPage, start: Start
) -> None:
    service = start()
    with service.client():
        shipped = ["moored/demo", "moored/demo-film", "moored/demo-sound"]
        assert panel.ask("/moored/models") == (200, [*shipped, MODEL])
    service.kill()
    code, said = panel.ask("/moored/models")
    assert code == 503
    assert said == {"error": down(service.address)}


def test_loras_are_named_and_an_error_is_no_empty_list(
    panel: PanelPage, start: Start, tmp_path: Path
) -> None:
    instant_adapter(tmp_path / "loras", "styles/red", 1 << 20)
    service = start("--set", f"models.adapters={json.dumps([str(tmp_path / 'loras')])}")
    with service.client():
        code, names = panel.ask("/moored/loras")
        assert code == 200
        assert [name for name in names if not name.startswith("moored/")] == ["styles/red"]
    service.kill()
    assert panel.ask("/moored/loras")[0] == 503


def down(address: str) -> str:
    return (
        f"No moored service answers at {address}: start it with `moored serve`, "
        "or set its address in Settings > moored."
    )


def test_no_service_is_started_where_an_address_is_set(panel: PanelPage) -> None:
    panel.settings(endpoint="127.0.0.1:9")
    code, said = panel.ask("/moored/start", {})
    assert code == 503
    assert said["error"].startswith("No service is started here: an address is set")
    code, said = panel.ask("/moored/status")
    assert (code, said["can_start"]) == (200, False)


def test_the_stream_reports_changes_an_end_and_a_new_beginning(
    panel: PanelPage, start: Start
) -> None:
    service = start()
    with panel.events() as events:
        with service.client() as client:
            client.load(MODEL)
        loaded = next(one for one in events if one["cards"] and one["cards"][0]["entries"])
        assert loaded["cards"][0]["entries"][0]["key"] == KEY
        service.kill()
        lost = next(one for one in events if not one["reachable"])
        assert lost["problem"] == down(service.address)
        assert (lost["cards"], lost["jobs"]) == ([], [])
        start("--set", f"service.listen={service.address}")
        assert next(one for one in events if one["reachable"])["endpoint"] == service.address


def test_actions_are_done_and_say_what_they_did(panel: PanelPage, start: Start) -> None:
    with start().client() as client:
        client.load(MODEL)
        assert panel.ask("/moored/pin", {"model": KEY, "pinned": True}) == (200, {"pinned": [KEY]})
        code, said = panel.ask("/moored/unload", {"model": KEY, "force": False})
        assert (code, said["freed_bytes"]) == (200, 0)
        assert {part["reason"] for part in said["kept"]} == {"pinned"}
        assert panel.ask("/moored/pin", {"model": KEY, "pinned": False}) == (200, {"pinned": []})
        said = panel.ask("/moored/unload", {"model": KEY, "force": False})[1]
        assert said == {"freed_bytes": 17_213_415_360, "kept": [], "cancelled_jobs": []}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/moored/unload", {"model": "no/such", "force": False}),
        ("/moored/pin", {"model": "no/such", "pinned": True}),
        ("/moored/cancel", {"job": "none"}),
    ],
)
def test_unknown_models_and_jobs_are_reported(
    loaded: Loaded, route: str, body: dict[str, Any]
) -> None:
    code, said = loaded[0].ask(route, body)
    assert code == 404
    assert "no/such" in said["error"] or "none" in said["error"]


REFUSED: list[tuple[int, dict[str, Any]]] = [
    (403, {"headers": {"Sec-Fetch-Site": "cross-site"}}),
    (403, {"headers": {"Sec-Fetch-Site": "same-site"}}),
    (403, {"headers": {"Origin": "https://elsewhere.example"}}),
    (403, {"headers": {"Origin": "null"}}),
    (415, {"headers": {"Content-Type": "text/plain"}}),
    (415, {"headers": {"Content-Type": "application/x-www-form-urlencoded"}}),
    (400, {"raw": b"{"}),
    (400, {"raw": b"[]"}),
    (400, {"raw": json.dumps({"model": KEY}).encode()}),
    (400, {"raw": json.dumps({"model": KEY, "force": 1}).encode()}),
    (400, {"raw": json.dumps({"model": "", "force": False}).encode()}),
    (400, {"raw": json.dumps({"model": KEY, "force": False, "more": 1}).encode()}),
    (400, {"raw": json.dumps({"model": "x" * 70_000, "force": False}).encode()}),
]


@pytest.mark.parametrize(("code", "request_"), REFUSED)
def test_other_sites_and_wrong_requests_change_nothing(
    loaded: Loaded, code: int, request_: dict[str, Any]
) -> None:
    """An empty model would be all models: nothing vague may get through."""
    panel, client = loaded
    told, said = panel.ask("/moored/unload", {"model": KEY, "force": False}, **request_)
    assert told == code
    assert said["error"].endswith(".")
    assert len(client.status().cards[0].residents) == 4


@pytest.mark.parametrize("route", ["/moored/status", "/moored/models", "/moored/events"])
def test_other_sites_may_not_read(loaded: Loaded, route: str) -> None:
    assert loaded[0].ask(route, headers={"Sec-Fetch-Site": "cross-site"})[0] == 403


def test_this_site_may_ask_by_any_of_the_signs_that_browsers_give(loaded: Loaded) -> None:
    panel, body = loaded[0], {"job": "none"}
    for headers in (
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://proxied.example"},
        {"Origin": f"http://{panel.address}"},
        {},
    ):
        assert panel.ask("/moored/cancel", body, headers)[0] == 404


def test_the_token_is_sent_to_the_service_and_never_to_the_browser(
    panel: PanelPage, start: Start, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    service = start("--set", f"service.token_file={token_file}")
    code, said = panel.ask("/moored/status")
    assert (code, said["reachable"]) == (200, False)
    assert said["problem"].endswith("Set the service's token file in Settings > moored.")
    assert panel.ask("/moored/models")[0] == 502

    own = panel.user_directory / "moored" / "token"
    own.parent.mkdir()
    own.write_text(TOKEN)
    panel.settings(endpoint=service.address, token_file="token")
    with service.client(token=TOKEN) as client:
        client.load(MODEL)
        answers = [
            panel.ask("/moored/status"),
            panel.ask("/moored/models"),
            panel.ask("/moored/pin", {"model": KEY, "pinned": True}),
            panel.ask("/moored/unload", {"model": "no/such", "force": False}),
        ]
    assert [code for code, _ in answers] == [200, 200, 200, 404]
    assert TOKEN not in json.dumps(answers)


def test_a_service_that_is_silent_holds_nothing_else_up(tmp_path: Path) -> None:
    """It takes the connection and never answers: routes give up in seconds, and others go on meanwhile."""
    # On a busy machine others may take longer than the first limit: then the next one decides. Of its own
    # accord gRPC gives a connection up that is silent for twenty seconds.
    for quick_s in (5.0, 15.0):
        page = PanelPage(tmp_path / f"user-{quick_s:g}", quick_s)
        try:
            if others_are_answered_while_a_service_is_silent(page):
                break
        finally:
            page.stop()
    else:
        raise AssertionError("others had to wait")


def others_are_answered_while_a_service_is_silent(page: PanelPage) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        page.settings(endpoint=address)
        answered: list[tuple[int, Any]] = []
        asking = threading.Thread(target=lambda: answered.append(page.ask("/moored/models")))
        asking.start()
        silent.settimeout(DEADLINE_S)
        taken, _ = silent.accept()
        # It is being asked: for as long as that lasts, others are answered. If they had to wait for it,
        # the second would come after its answer.
        for _ in range(2):
            page.ask("/i18n")
        in_time = not answered
        asking.join()
        taken.close()
        code, said = answered[0]
        assert code == 504
        assert said["error"].startswith(f"The service at {address} does not answer")
        return in_time


def test_a_call_that_is_ended_under_way_is_reported_as_ended(
    panel: PanelPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "client-py" / "tests"))
    import foreign

    with foreign.answering(foreign.cut) as address:
        panel.settings(endpoint=address)
        code, said = panel.ask("/moored/models")
    assert code == 503
    assert said["error"].startswith(f"The call to {address} was ended on the way")


def test_a_job_is_shown_with_its_client_and_cancelled(panel: PanelPage, start: Start) -> None:
    service = start()
    with (
        service.client(client_id="anna") as client,
        client.stream_image("x", model=MODEL, **LONG) as stream,
    ):
        until(client, lambda status: any(job.state == "running" for job in status.jobs))
        (job,) = panel.ask("/moored/status")[1]["jobs"]
        assert (job["client"], job["model"], job["kind"]) == ("anna", KEY, "GenerateImage")
        code, said = panel.ask("/moored/cancel", {"job": job["id"]})
        assert (code, said) == (200, {"cancelled": True})
        with pytest.raises(moored.Cancelled):
            stream.result()
        assert panel.ask("/moored/status")[1]["jobs"] == []


def test_a_model_is_in_use_by_its_own_jobs_alone(panel: PanelPage, start: Start) -> None:
    service = start()
    with service.client() as client:
        client.load(moored.ModelRef(MODEL, quantization="4-bit"))
        with client.stream_image("x", model=MODEL, **LONG) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            (card,) = panel.ask("/moored/status")[1]["cards"]
    used = {entry["key"]: entry["in_use"] for entry in card["entries"]}
    assert used.pop(KEY) is True
    assert list(used.values()) == [False], "it shares components, and does not run"


def test_the_values_of_a_model_are_reported_by_the_names_of_inputs(
    panel: PanelPage, start: Start
) -> None:
    start()
    code, said = panel.ask("/moored/defaults")
    assert code == 200
    assert said[MODEL]["steps"] == 20
    assert said[MODEL]["width"] == 64
    assert "frames" not in said[MODEL]


@pytest.mark.parametrize(
    ("of", "told"),
    [
        ({"frames": 145, "frames_per_second": 30.0}, {"fps": 30, "frames": 145, "seconds": 4.8}),
        ({"seconds": 2.5}, {"seconds": 2.5}),
        ({}, {}),
    ],
)
def test_a_length_is_reported_as_the_nodes_ask_for_it(
    pack: ModuleType, of: dict[str, Any], told: dict[str, Any]
) -> None:
    shown = pack.snapshot.defaults(moored.ModelDefaults(4, 1.0, 64, 0, 0, **of))
    assert {name: shown[name] for name in shown if name in ("fps", "frames", "seconds")} == told


def test_snapshots_of_a_page_that_does_not_read_are_dropped(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the newest when it reads again."""
    told: weakref.WeakSet[Any] = weakref.WeakSet()
    one_read, all_told = threading.Event(), threading.Event()

    class News:
        def __init__(self, number: int) -> None:
            self.number = number
            told.add(self)

    class Watch:
        async def __aenter__(self) -> Watch:
            return self

        async def __aexit__(self, *error: object) -> None: ...

        async def __aiter__(self) -> Any:
            yield News(0)
            await asyncio.to_thread(one_read.wait, DEADLINE_S)
            for number in range(1, 1000):
                yield News(number)
            all_told.set()
            await asyncio.Event().wait()

        def watch_status(self, interval_s: float) -> Watch:
            return self

    async def page() -> None:
        statuses = pack.panel._statuses(pack.connection.Target("box:1"))
        assert (await anext(statuses)).number == 0
        one_read.set()
        assert await asyncio.to_thread(all_told.wait, DEADLINE_S)
        await asyncio.sleep(0)
        gc.collect()
        assert len(told) <= 3
        assert (await anext(statuses)).number == 999
        await statuses.aclose()

    monkeypatch.setattr(pack.connection, "_client_of", lambda target: Watch())
    # A heartbeat is no news, however late the news are.
    monkeypatch.setattr(pack.panel, "HEARTBEAT_S", DEADLINE_S)
    asyncio.run(page())
