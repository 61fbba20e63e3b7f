"""How ComfyUI and the service share a card, told as tests of whatever `comfyui` is, as those of `behaviour`.

The model of ComfyUI's own is that of the pack `own_model`, which `comfyui` has beside the nodes of moored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moored
import pytest
from behaviour import DEADLINE_S, ComfyUI, Serve, residents, shown
from prompts import Graph
from runs import Run
from waiting import until, wait_until

from service import Service, model_as

GIB = 2**30
UNLOADED = "ComfyUI's own models were unloaded"


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The file that lists the other programs of a simulated card."""
    return tmp_path / "card"


@pytest.fixture
def service(serve: Serve, card: Path) -> Service:
    """A service with one card of 40 GiB, which other programs use too."""
    return serve(f"sim:40GiB,world={card}")


@pytest.fixture
def keeps_models(comfyui: ComfyUI) -> Iterator[None]:
    """ComfyUI's settings say that it keeps its models."""
    comfyui.set(unload_own_models=False)
    yield
    comfyui.set(unload_own_models=True)


def use_own_model(comfyui: ComfyUI, client: moored.Client, card: Path, gib: float) -> None:
    """A prompt of ComfyUI's own nodes, whose model stays loaded."""
    own = {"own": {"class_type": "TestUseOwnModel", "inputs": {"card": str(card), "gib": gib}}}
    comfyui.queue(own).succeeded()
    holder = ("python", comfyui.process_id, int(gib * GIB))
    until(client, lambda status: holder in holders(status))


def holders(status: moored.Status) -> set[tuple[str, int, int]]:
    return {(one.name, one.pid, one.bytes) for card in status.cards for one in card.holders}


def reserved(status: moored.Status) -> list[tuple[str, int, int]]:
    """The reservations: card, bytes, process."""
    return [
        (card.id, one.bytes, one.process_id) for card in status.cards for one in card.reservations
    ]


class Room(Graph):
    """A prompt that reserves memory and blocks until the test lets it go on."""

    def __init__(self, service: Service, folder: Path) -> None:
        super().__init__(service.address, model="small")
        self._folder = folder

    def reserve(self, after: list[Any], **options: Any) -> str:
        inputs = {"size_gib": 8.0, "card": "", "patience_s": 30.0, "server": [self.server, 0]}
        return self.add("MooredReserve", after=after, **(inputs | options))

    def release(self, reservation: str, after: str, unload_models: bool = True) -> str:
        links: dict[str, Any] = {"reservation": [reservation, 1], "after": [after, 0]}
        return self.add("MooredRelease", **links, unload_models=unload_models)

    def block(self, name: str, *after: Any) -> str:
        links = {"after": after[0]} if after else {}
        return self.add("TestWaitForFile", file=str(self._folder / name), **links)

    def go_on(self, name: str) -> None:
        """Lets the node go on that waits for this."""
        (self._folder / name).touch()


# A job waits, and ComfyUI holds the memory.


def test_comfyui_unloads_its_models_when_a_job_waits_for_their_memory(
    comfyui: ComfyUI, service: Service, card: Path
) -> None:
    with service.client() as client:
        use_own_model(comfyui, client, card, 20)
        graph = Graph(service.address, model="flux-full")
        generated = graph.text_to_image(patience_s=30.0)
        shown(graph, generated)
        run = comfyui.queue(graph.prompt).succeeded()
        told = [text for text in run.texts(generated) if "ComfyUI's own models" in text]
        waiting = f"python {comfyui.process_id} holds 20.0 GiB"
        assert [waiting in text for text in told[:2]] == [True, True]
        assert told[0].endswith("\nUnloading ComfyUI's own models".replace("\n", "  \n"))
        assert told[1].endswith(UNLOADED)
        assert UNLOADED not in run.texts(generated)[-1]
        assert card.read_text() == ""
        until(client, lambda status: not holders_of(status, comfyui))
        # They are ComfyUI's as before: its next prompt loads them again.
        use_own_model(comfyui, client, card, 1)


def holders_of(status: moored.Status, comfyui: ComfyUI) -> set[tuple[str, int, int]]:
    return {one for one in holders(status) if one[1] == comfyui.process_id}


@pytest.mark.usefixtures("keeps_models")
def test_a_setting_keeps_comfyuis_models_loaded(
    comfyui: ComfyUI, service: Service, card: Path
) -> None:
    with service.client() as client:
        use_own_model(comfyui, client, card, 20)
        graph = Graph(service.address, model="flux-full")
        generated = graph.text_to_image(patience_s=1.0)
        shown(graph, generated)
        run = comfyui.queue(graph.prompt).done()
        assert run.status == "error"
        assert "others hold the rest" in run.error
        assert "own models" not in "".join(run.texts(generated))
        assert "20480MiB" in card.read_text()


def test_comfyuis_models_stay_when_another_program_holds_the_memory(
    comfyui: ComfyUI, service: Service, card: Path, tmp_path: Path
) -> None:
    """ComfyUI uses another card: this one's memory is another program's."""
    other_card = tmp_path / "other-card"
    with service.client() as client:
        own = {
            "own": {"class_type": "TestUseOwnModel", "inputs": {"card": str(other_card), "gib": 2}}
        }
        comfyui.queue(own).succeeded()
        card.write_text(f"blender {comfyui.process_id + 1} 20GiB")
        until(client, lambda status: bool(holders(status)))
        graph = Graph(service.address, model="flux-full")
        generated = graph.text_to_image(patience_s=30.0)
        shown(graph, generated)
        run = comfyui.queue(graph.prompt)
        for _ in range(3):
            assert "own models" not in run.text("Waiting for").what
        card.unlink()
        run.succeeded()
        assert "2048MiB" in other_card.read_text()


# Reserve and Release.


def test_memory_is_reserved_for_comfyuis_nodes_until_release(
    comfyui: ComfyUI, service: Service, card: Path, tmp_path: Path
) -> None:
    """The service's idle models make room; ComfyUI's own node uses it; then a job has all of it again."""
    with service.client() as client:
        client.load("flux-full")
        until(client, lambda status: bool(residents(client)))
        room = Room(service, tmp_path)
        reservation = room.reserve([room.server, 0], size_gib=30.0)
        own = room.add("TestUseOwnModel", card=str(card), gib=20.0, after=[reservation, 0])
        used = room.block("used", [own, 0])
        release = room.release(reservation, used)
        room.block("released", [release, 0])
        run = comfyui.queue(room.prompt)
        held = ("python", comfyui.process_id, 20 * GIB)
        until(client, lambda status: held in holders(status))
        assert reserved(client.status()) == [("sim:0", 30 * GIB, comfyui.process_id)]
        assert "transformer" not in residents(client), "it made room"
        room.go_on("used")
        until(client, lambda status: not reserved(status) and not holders_of(status, comfyui))
        assert not run.status, "the prompt still runs"
        room.go_on("released")
        run.succeeded()
        assert run.texts(reservation)[-1] == "Reserved 30.0 GiB on sim:0"
        assert run.texts(release) == [f"Released 30.0 GiB  \n{UNLOADED}"]


def test_release_leaves_comfyuis_models_loaded_if_it_is_told_so(
    comfyui: ComfyUI, service: Service, card: Path, tmp_path: Path
) -> None:
    room = Room(service, tmp_path)
    reservation = room.reserve([room.server, 0])
    own = room.add("TestUseOwnModel", card=str(card), gib=2.0, after=[reservation, 0])
    release = room.release(reservation, own, unload_models=False)
    run = comfyui.queue(room.prompt).succeeded()
    assert run.texts(release) == ["Released 8.0 GiB"]
    assert "2048MiB" in card.read_text()


def test_what_is_linked_to_reserve_and_release_is_passed_on(
    comfyui: ComfyUI, service: Service, tmp_path: Path
) -> None:
    room = Room(service, tmp_path)
    made = room.text_to_image()
    reservation = room.reserve([made, 0])
    release = room.release(reservation, reservation)
    straight, passed = shown(room, made), shown(room, release)
    run = comfyui.queue(room.prompt).succeeded()
    (one,), (other,) = run.pictures(straight), run.pictures(passed)
    assert (one == other).all()


def end_well(comfyui: ComfyUI, room: Room, run: Run) -> None:
    room.go_on("used")
    run.succeeded()


def end_by_interrupt(comfyui: ComfyUI, room: Room, run: Run) -> None:
    comfyui.interrupt()
    assert run.done().status == "interrupted"


def end_by_failure(comfyui: ComfyUI, room: Room, run: Run) -> None:
    room.go_on("used")
    assert run.done().status == "error"


@pytest.mark.parametrize("end", [end_well, end_by_interrupt, end_by_failure])
def test_memory_is_given_back_at_the_end_of_the_prompt(
    comfyui: ComfyUI, service: Service, tmp_path: Path, end: Any
) -> None:
    """Also without Release, and each prompt reserves anew."""
    room = Room(service, tmp_path)
    reservation = room.reserve([room.server, 0])
    used = room.block("used", [reservation, 0])
    if end is end_by_failure:
        failing = room.reserve([used, 0], size_gib=1000.0)
        room.block("used", [failing, 0])
    with service.client() as client:
        for _ in range(2):
            run = comfyui.queue(room.prompt)
            until(client, lambda status: len(reserved(status)) == 1)
            end(comfyui, room, run)
            until(client, lambda status: not reserved(status))
            (tmp_path / "used").unlink(missing_ok=True)
        if end is end_by_failure:
            assert "1000.0 GiB" in run.error
        assert client.generate_image("others go on", model="small").pictures


def test_reserve_waits_for_another_program_and_says_so(
    comfyui: ComfyUI, service: Service, card: Path, tmp_path: Path
) -> None:
    card.write_text("blender 4242 20GiB")
    room = Room(service, tmp_path)
    with service.client() as client:
        until(client, lambda status: bool(holders(status)))
        reservation = room.reserve([room.server, 0], size_gib=30.0)
        room.block("used", [reservation, 0])
        room.go_on("used")
        run = comfyui.queue(room.prompt)
        text = run.text("Waiting for").what
        assert "(30.0 GiB needed, " in text
        assert "blender 4242 holds 20.0 GiB" in text
        assert not reserved(client.status())
        card.unlink()
        run.succeeded()
        assert run.texts(reservation)[0] == "Reserving 30.0 GiB"
        assert run.texts(reservation)[-1] == "Reserved 30.0 GiB on sim:0"


def test_an_interrupt_while_a_job_is_waited_for_leaves_nothing_reserved(
    comfyui: ComfyUI, serve: Serve, tmp_path: Path
) -> None:
    """The service makes room when the job's stage has ended: after the interrupt."""
    service = serve("sim:40GiB", more_models=model_as(tmp_path, "flux-full", "paced", steps_ms=50))
    room = Room(service, tmp_path)
    reservation = room.reserve([room.server, 0], size_gib=30.0)
    room.block("used", [reservation, 0])
    with service.client() as client:
        with client.stream_image("other", model="paced", steps=200, client_id="other") as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            run = comfyui.queue(room.prompt)
            run.text("Reserving 30.0 GiB")
            comfyui.interrupt()
            assert run.done().status == "interrupted"

        def all_is_free() -> bool:
            # Asked after the prompt's.
            try:
                return client.reserve(39 * GIB, timeout=DEADLINE_S).release()
            except moored.MemoryTaken:
                return False

        wait_until(all_is_free, "what was reserved after the interrupt is given back")


def test_reserve_says_what_would_fit_when_its_patience_has_ended(
    comfyui: ComfyUI, service: Service, card: Path, tmp_path: Path
) -> None:
    card.write_text("blender 4242 20GiB")
    with service.client() as client:
        until(client, lambda status: bool(holders(status)))
    room = Room(service, tmp_path)
    reservation = room.reserve([room.server, 0], size_gib=30.0, patience_s=0.0)
    room.block("used", [reservation, 0])
    run = comfyui.queue(room.prompt).done()
    assert run.status == "error"
    assert re.search(
        r"Reserve needs 30.0 GiB and 19\.\d GiB are free.*: this would fit: 19\.\d GiB", run.error
    )


def test_reserve_has_comfyuis_models_unloaded_when_they_are_in_its_way(
    comfyui: ComfyUI, service: Service, card: Path, tmp_path: Path
) -> None:
    """The models of ComfyUI's last prompt, as they are when the next begins."""
    with service.client() as client:
        use_own_model(comfyui, client, card, 20)
        room = Room(service, tmp_path)
        reservation = room.reserve([room.server, 0], size_gib=30.0)
        room.block("used", [reservation, 0])
        room.go_on("used")
        run = comfyui.queue(room.prompt).succeeded()
        assert any(text.endswith(UNLOADED) for text in run.texts(reservation))
        assert run.texts(reservation)[-1] == "Reserved 30.0 GiB on sim:0"
        assert card.read_text() == ""


def test_reserve_takes_the_card_that_comfyui_uses(
    comfyui: ComfyUI, serve: Serve, card: Path, tmp_path: Path
) -> None:
    """Though the other has more room."""
    service = serve("sim:40GiB", f"sim:40GiB,index=1,world={card}")
    with service.client() as client:
        client.wait_until_ready(card="sim:0")
        use_own_model(comfyui, client, card, 2)
        room = Room(service, tmp_path)
        own, named = room.reserve([room.server, 0]), room.reserve([room.server, 0], card="sim:0")
        room.block("used", [own, 0])
        room.block("used", [named, 0])
        run = comfyui.queue(room.prompt)
        until(client, lambda status: len(reserved(status)) == 2)
        assert {name for name, _, _ in reserved(client.status())} == {"sim:0", "sim:1"}
        room.go_on("used")
        run.succeeded()
        assert run.texts(own)[-1] == "Reserved 8.0 GiB on sim:1"
