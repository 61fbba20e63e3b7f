"""Workers that end at every point of their lives: killed, crashed, frozen, lost with their card.

Whatever the point, the card comes back with another worker, the job that ran has its stage tried
again once, jobs behind it finish, what was pinned is there again, accounts add up, everything can be
unloaded, and no process is left over.
"""

from __future__ import annotations

import array
import fcntl
import os
import signal
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import moored
import pytest
from faults import assert_at_rest, retries
from PIL import Image
from processes import children_of
from waiting import accounts_sum, until, wait_until

from service import INSTANT_MODELS, Service, slower_model

# The pinned model of every point, and a model that nothing else uses for the job behind.
PINNED, BEHIND = "steady", "small"
PINNED_IDS = {f"instant:steady-{kind}" for kind in ("transformer", "clip", "t5", "vae")}
# As `slow`, but each step takes long enough for a test to come in the middle of a certain one.
SLOWER = "slower"

# Once a worker is silent for so long it is taken for hung; one that is held up for a second is not.
IMPATIENT = ("--set", "queue.stall_limit=6s", "--set", "queue.stall_floor=3s")

WITHIN_S = 60.0
# A service waits longer from one early death of a worker to the next: so many are quick.
KILLS_A_SERVICE = 3

Images = moored.EventStream[moored.ImageResult]
Moment = Callable[["Scene"], None]


# Processes.


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def unread_bytes(pid: int) -> int:
    """What a process has been sent on its standard input and has not read."""
    waiting = array.array("i", [0])
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]


# A service, a job on it, and a worker that ends.


class Services:
    """Services that are shared by several points, as long as no test failed on them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        slower = slower_model(folder, steps_ms=3000)
        self._models = ("--models", str(INSTANT_MODELS), "--models", str(slower))
        self._idle: dict[tuple[str, ...], tuple[Service, int]] = {}
        self._count = 0

    @contextmanager
    def __call__(self, *devices: str, arguments: tuple[str, ...] = ()) -> Iterator[Service]:
        key = (*devices, *arguments)
        service, used = self._idle.pop(key, (None, 0))
        if service is None:
            self._count += 1
            state = self._folder / f"state-{self._count}"
            service = Service(*self._models, *arguments, state=state, devices=devices)
        try:
            yield service
        except BaseException:
            service.kill()
            raise
        # What a card does by its settings it does in its first process only.
        if used + 1 < KILLS_A_SERVICE and not any("-at=" in device for device in devices):
            self._idle[key] = (service, used + 1)
        else:
            self.stop(service)

    @staticmethod
    def stop(service: Service) -> None:
        workers = children_of(service.process.pid)
        assert service.stop() == 0
        wait_until(lambda: all(map(is_gone, workers)), "workers end with their service")

    def close(self) -> None:
        for service, _ in self._idle.values():
            service.kill()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    services = Services(tmp_path_factory.mktemp("kills"))
    yield services
    services.close()


@dataclass
class Scene:
    """A service in the state that a point describes."""

    service: Service
    client: moored.Client
    events: list[moored.Event]
    stream: moored.EventStream[object] | None = None
    workers: dict[int, int] = field(default_factory=dict)
    """Process ids by card, as they were when `look` looked."""

    def look(self) -> moored.Status:
        """The status; records the pids of the workers, so that no call is needed to kill one."""
        status = self.client.status()
        self.workers = {index: card.worker_pid for index, card in enumerate(status.cards)}
        return status

    def await_event(self, holds: Callable[[moored.Event], bool]) -> None:
        assert self.stream is not None
        for event in self.stream:
            self.events.append(event)
            if holds(event):
                return
        raise AssertionError(f"it never happened in {self.events}")

    def kill(self, how: signal.Signals = signal.SIGKILL, card: int = 0) -> int:
        """Sends the card's worker a signal; its process id."""
        pid = self.workers.pop(card, 0) or self.client.status().cards[card].worker_pid
        assert pid > 0
        os.kill(pid, how)
        if how == signal.SIGSTOP:
            wait_until(lambda: children_of(self.service.process.pid)[pid] == "T", "it stops")
        return pid

    def hold(self) -> int:
        """Stops the worker by SIGSTOP, so that it makes no progress until the test ends it."""
        return self.kill(signal.SIGSTOP)


def end(pid: int, how: signal.Signals) -> None:
    """Ends a worker that is held by a signal, which is the first that it meets when it goes on."""
    os.kill(pid, how)
    with suppress(ProcessLookupError):  # it may be gone already
        os.kill(pid, signal.SIGCONT)


def at(kind: type[moored.Event], **fields: object) -> Moment:
    """A point: the job's stream has an event of this type."""

    def happened(event: moored.Event) -> bool:
        return isinstance(event, kind) and all(
            getattr(event, name) == value for name, value in fields.items()
        )

    return lambda scene: scene.await_event(happened)


def at_step(n: int, item: int = 0) -> Moment:
    """A point: at least so many steps are done; of fast steps only the latest is sent."""

    def happened(event: moored.Event) -> bool:
        return isinstance(event, moored.Step) and event.item == item and n <= event.n < event.of

    return lambda scene: scene.await_event(happened)


def amid_the_load_of(component: str) -> Moment:
    """A point: some bytes of a component are loaded, and not all."""

    def happened(event: moored.Event) -> bool:
        return (
            isinstance(event, moored.Loading)
            and event.component.name == component
            and 0 < event.bytes_done < event.bytes_total
        )

    return lambda scene: scene.await_event(happened)


def once(holds: Callable[[moored.Status], bool]) -> Moment:
    """A point: the status fulfils the condition."""
    return lambda scene: drop(until(scene.client, holds))


def drop(_: object) -> None:
    pass


def loading(component: str) -> Moment:
    """A point: the memory of this component is booked, and it is not resident."""
    return once(
        lambda status: any(
            one.state == "loading" and one.component.name == component
            for one in status.cards[0].residents
        )
    )


def evicting() -> Moment:
    return once(lambda status: any(one.state == "evicting" for one in status.cards[0].residents))


def leased(stage: str) -> Moment:
    """A point: this stage has begun; stages before it have leases too, for a moment."""
    return once(
        lambda status: (
            any(one.leases > 0 for one in status.cards[0].residents)
            and any(job.stage == stage for job in status.jobs)
        )
    )


def at_once(scene: Scene) -> None:
    """A point: before the job has begun."""


Job = Callable[[moored.Client], moored.EventStream[object]]


def generate(model: str, **options: object) -> Job:
    return lambda client: client.stream_image("a kill", model=model, **options)  # type: ignore[arg-type]


def load(model: str) -> Job:
    return lambda client: client.stream_load(model)


def repaint(client: moored.Client) -> moored.EventStream[object]:
    """Generates a picture from a picture, which is encoded."""
    return generate("small", init_image=picture())(client)


def replace(old: str, new: str) -> Job:
    """Generates with a model for which another has to be evicted."""

    def start(client: moored.Client) -> moored.EventStream[object]:
        client.load(old)
        return client.stream_image("a kill", model=new)

    return start


def picture() -> Image.Image:
    return Image.new("RGB", (64, 64), (200, 30, 40))


@dataclass(frozen=True)
class Point:
    """Where a worker ends, and what becomes of the job."""

    name: str
    card: str
    job: Job
    where: Moment
    """When the signal is sent."""
    stage: str
    """Which stage is tried again; empty: none."""
    how: signal.Signals | None = signal.SIGKILL
    """None: the card sees to it itself."""
    arguments: tuple[str, ...] = ()
    fails: type[moored.MooredError] | None = None


CARD = "sim:24GiB"
BIG = "sim:40GiB,speed=6GiB/s"
UNHURRIED = "sim:40GiB,speed=4GiB/s"
TIGHT = "sim:40GiB,release=1500ms"
LATE = "sim:40GiB,lag=1500ms"

# The pinned model has four components: the fifth load is the job's first.
POINTS = [
    # While loading each component: as a job of its own, and for a stage.
    Point(
        "load text_encoder",
        CARD + ",hang-at=load:6",
        load("small"),
        loading("text_encoder"),
        "load",
    ),
    Point(
        "load text_encoder_2",
        CARD + ",hang-at=load:7",
        load("small"),
        loading("text_encoder_2"),
        "load",
    ),
    Point(
        "load transformer", CARD + ",hang-at=load:5", load("small"), loading("transformer"), "load"
    ),
    Point("load vae", CARD + ",hang-at=load:8", load("small"), loading("vae"), "load"),
    Point(
        "encoder for encode_text",
        UNHURRIED,
        generate("flux-full"),
        amid_the_load_of("text_encoder_2"),
        "encode_text",
    ),
    Point(
        "transformer for denoise",
        BIG,
        generate("flux-full"),
        amid_the_load_of("transformer"),
        "denoise",
    ),
    Point("vae for decode", CARD + ",hang-at=load:8", generate("small"), loading("vae"), "decode"),
    Point(
        "vae for encode_image", CARD + ",hang-at=load:7", repaint, loading("vae"), "encode_image"
    ),
    # In each stage.
    Point(
        "encode_text",
        CARD + ",hang-at=encode_text:1",
        generate("small"),
        leased("encode_text"),
        "encode_text",
    ),
    Point(
        "before the first step",
        CARD + ",hang-at=denoise:1",
        generate("small"),
        leased("denoise"),
        "denoise",
    ),
    Point("first step", CARD, generate("slow", steps=60), at_step(1), "denoise"),
    Point("middle step", CARD, generate("slow", steps=80), at_step(20), "denoise"),
    Point("last step", CARD, generate(SLOWER, steps=2), at_step(1), "denoise"),
    Point(
        "preview",
        CARD,
        generate("slow", steps=60, preview_interval_s=0.1),
        at(moored.Preview),
        "denoise",
    ),
    Point("decode", CARD + ",hang-at=decode:1", generate("small"), leased("decode"), "decode"),
    Point(
        "encode_image",
        CARD + ",hang-at=encode_image:1",
        repaint,
        leased("encode_image"),
        "encode_image",
    ),
    Point(
        "denoise of the second picture",
        CARD,
        generate("slow", steps=60, count=2),
        at_step(2, item=1),
        "denoise",
    ),
    Point(
        "decode of the second picture",
        CARD + ",hang-at=decode:2",
        generate("small", count=2),
        at(moored.StageStarted, name="decode", item=1),
        "decode",
    ),
    # Signals of another kind.
    Point("abort", CARD, generate("slow", steps=60), at_step(5), "denoise", signal.SIGABRT),
    Point(
        "illegal instruction",
        CARD,
        generate("slow", steps=60),
        at_step(5),
        "denoise",
        signal.SIGILL,
    ),
    Point("terminated", CARD, generate("slow", steps=60), at_step(5), "denoise", signal.SIGTERM),
    Point(
        "frozen while denoising",
        CARD,
        generate("slow", steps=60),
        at_step(5),
        "denoise",
        signal.SIGSTOP,
        IMPATIENT,
    ),
    Point(
        "frozen while loading",
        BIG,
        load("flux-full"),
        amid_the_load_of("transformer"),
        "load",
        signal.SIGSTOP,
        IMPATIENT,
    ),
    Point(
        "frozen while idle",
        CARD,
        generate("small"),
        at_once,
        "encode_text",
        signal.SIGSTOP,
        IMPATIENT,
    ),
    # While a component leaves for another.
    Point(
        "evicting for a stage",
        TIGHT,
        replace("flux-full", "flux-other"),
        at(moored.Evicting),
        "denoise",
    ),
    Point(
        "evicting in exclusive",
        TIGHT,
        replace("flux-full", "flux-other"),
        at(moored.Evicting),
        "encode_text",
        arguments=("--set", "cards.policy=exclusive"),
    ),
    # While the card computes or loads nothing, as memory is short.
    Point(
        "waiting for a late eviction",
        LATE,
        replace("flux-full", "flux-other"),
        at(moored.Waiting, cause="late_eviction"),
        "",
    ),
    # As the card's settings say.
    Point("crash in a load", CARD + ",die-at=load:6", load("small"), at_once, "load", None),
    Point(
        "crash in encode_image",
        CARD + ",die-at=encode_image:1",
        repaint,
        at_once,
        "encode_image",
        None,
    ),
    Point("card lost in a load", CARD + ",lose-at=load:5", load("small"), at_once, "load", None),
    Point(
        "card lost in encode_text",
        CARD + ",lose-at=encode_text:1",
        generate("small"),
        at_once,
        "encode_text",
        None,
    ),
    Point(
        "card lost in decode",
        CARD + ",lose-at=decode:1",
        generate("small"),
        at_once,
        "decode",
        None,
    ),
    Point(
        "hang in a load", CARD + ",hang-at=load:6", load("small"), at_once, "load", None, IMPATIENT
    ),
    Point(
        "hang in encode_text",
        CARD + ",hang-at=encode_text:1",
        generate("small"),
        at_once,
        "encode_text",
        None,
        IMPATIENT,
    ),
    Point(
        "hang in decode",
        CARD + ",hang-at=decode:1",
        generate("small"),
        at_once,
        "decode",
        None,
        IMPATIENT,
    ),
    # Twice at the same job.
    Point(
        "crash, and again",
        CARD + ",die-at=encode_text:1,die-generations=2",
        generate("small"),
        at_once,
        "encode_text",
        None,
        fails=moored.WorkerDied,
    ),
    Point(
        "hang, and again",
        CARD + ",hang-at=decode:1,die-generations=2",
        generate("small"),
        at_once,
        "decode",
        None,
        IMPATIENT,
        fails=moored.WorkerDied,
    ),
]


def pin(client: moored.Client) -> None:
    client.pin(PINNED)
    client.load(PINNED)


def pinned_is_back(card: moored.CardStatus) -> bool:
    there = {one.component.id for one in card.residents if one.pinned and one.state == "resident"}
    return there >= PINNED_IDS


def assert_recovered(
    scene: Scene, before: moored.Status, dead: tuple[int, ...] = (0,), deaths: int = 1
) -> None:
    """Cards whose worker died have another, the others the same; the dead processes are reaped."""

    def is_back(status: moored.Status) -> bool:
        for index, (was, card) in enumerate(zip(before.cards, status.cards, strict=True)):
            assert accounts_sum(card.memory) == card.memory.total
            restarts = card.worker_restarts - was.worker_restarts
            if index not in dead:
                assert (card.worker_pid, restarts) == (was.worker_pid, 0)
                continue
            alive = card.state in ("ready", "busy") and card.worker_pid not in (0, was.worker_pid)
            if not alive or restarts < deaths:
                return False
            assert restarts == deaths
        return True

    status = until(scene.client, is_back, WITHIN_S)
    pids = {card.worker_pid for card in status.cards}
    alive = children_of(scene.service.process.pid)
    assert set(alive) == pids, "the workers are the only processes: the dead are reaped"
    assert "Z" not in alive.values()


def assert_as_before(scene: Scene) -> None:
    """What was pinned is resident, and can be unloaded."""
    until(scene.client, lambda status: pinned_is_back(status.cards[0]), WITHIN_S)
    scene.client.unpin(PINNED)
    assert_at_rest(scene.client)


@contextmanager
def scene_of(services: Services, *devices: str, arguments: tuple[str, ...] = ()) -> Iterator[Scene]:
    with services(*devices, arguments=arguments) as service, service.client() as client:
        for card in client.status().cards:
            client.wait_until_ready(card=card.id)
        yield Scene(service, client, [])


def in_background(threads: ThreadPoolExecutor, scene: Scene) -> Future[moored.ImageResult]:
    """Submits a job of another client, behind the running one."""
    seen = len(scene.client.jobs(include_ended=True))
    job = threads.submit(
        scene.client.generate_image, "behind", model=BEHIND, width=128, timeout=WITHIN_S
    )
    wait_until(lambda: len(scene.client.jobs(include_ended=True)) > seen, "it is in the queue")
    return job


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name.replace(" ", "-"))
def test_a_worker_that_ends_at_any_point_is_replaced(services: Services, point: Point) -> None:
    with scene_of(services, point.card, arguments=point.arguments) as scene:
        client = scene.client
        pin(client)
        before = scene.look()
        if point.where is at_once and point.how is not None:
            scene.kill(point.how)
        with point.job(client) as scene.stream, ThreadPoolExecutor() as threads:
            at(moored.Accepted)(scene)  # before the job behind it is asked for
            point.where(scene)
            held = None
            if point.where is not at_once and point.how is not None:
                held = scene.hold()
            behind = in_background(threads, scene)
            if held is not None and point.how not in (None, signal.SIGSTOP):
                end(held, point.how)
            if point.fails is None:
                scene.events.extend(scene.stream)
                assert isinstance(scene.events[-1], moored.Done)
            else:
                with pytest.raises(point.fails) as failed:
                    scene.events.extend(scene.stream)
                assert failed.value.job_id
                assert point.stage in failed.value.message
            assert behind.result(WITHIN_S).pictures
        expected = [("WORKER_DIED", point.stage)] if point.stage else []
        assert retries(scene.events) == expected
        assert_recovered(scene, before, deaths=1 if point.fails is None else 2)
        assert_as_before(scene)


# While something else than a job is done.


@dataclass(frozen=True)
class Errand:
    """A command to a worker beside jobs, and its outcome when the worker ends in it."""

    name: str
    ask: Callable[[moored.Client], object]
    where: Moment | None
    """When its worker is stopped; none: before it is asked, so that it has not begun."""
    fails: type[moored.MooredError] | None
    arguments: tuple[str, ...] = ()


ERRANDS = [
    Errand("unload", lambda client: client.unload("small"), evicting(), None),
    Errand("unload of everything", lambda client: client.unload(), evicting(), None),
    Errand("trim", lambda client: client.trim(), None, moored.InternalError),
    Errand(
        "reserve",
        lambda client: client.reserve((24 << 30) - (268 << 20), label="blender"),
        evicting(),
        moored.InternalError,
    ),
    Errand(
        "keep-alive",
        lambda client: None,
        evicting(),
        None,
        ("--set", "queue.keep_alive=1s"),
    ),
]


@pytest.mark.parametrize("errand", ERRANDS, ids=lambda errand: errand.name.replace(" ", "-"))
def test_a_worker_that_ends_in_a_command_beside_jobs(services: Services, errand: Errand) -> None:
    card = "sim:24GiB,slack=keep,release=800ms"
    with scene_of(services, card, arguments=errand.arguments) as scene:
        pin(scene.client)
        scene.client.load("small")
        before = scene.look()
        with ThreadPoolExecutor() as threads:
            if errand.where is None:
                held = scene.hold()
                unread = unread_bytes(held)
                asked = threads.submit(errand.ask, scene.client)
                wait_until(lambda: unread_bytes(held) > unread, "it is asked")
            else:
                asked = threads.submit(errand.ask, scene.client)
                errand.where(scene)
                held = scene.hold()
            end(held, signal.SIGKILL)
            behind = in_background(threads, scene)
            if errand.fails is None:
                asked.result(WITHIN_S)
            else:
                with pytest.raises(errand.fails):
                    asked.result(WITHIN_S)
            assert behind.result(WITHIN_S).pictures
        assert_recovered(scene, before)
        assert scene.client.status().cards[0].reservations == ()
        assert_as_before(scene)


def test_an_unload_that_leaves_bytes_behind_ends_the_worker(services: Services) -> None:
    """The last rung of the ladder: bytes that nothing else frees are freed by the end of the process."""
    with scene_of(services, "sim:24GiB,leak-at=unload:1") as scene:
        pin(scene.client)
        scene.client.load("small")
        before = scene.client.status()
        freed = scene.client.unload("small").freed
        assert len(freed) == 4
        assert all(one.freed_bytes == one.booked_bytes > 0 for one in freed)
        assert_recovered(scene, before)
        assert_as_before(scene)


@pytest.mark.parametrize("loaded", [False, True], ids=["empty", "loaded"])
def test_a_worker_that_ends_while_it_is_idle(services: Services, loaded: bool) -> None:
    with scene_of(services, "sim:24GiB") as scene:
        pin(scene.client)
        if loaded:
            scene.client.load("small")
        before = scene.client.status()
        scene.kill()
        assert_recovered(scene, before)
        until(scene.client, lambda status: pinned_is_back(status.cards[0]))
        there = {one.component.id for one in scene.client.status().cards[0].residents}
        assert there == PINNED_IDS, "nobody asked for more"
        assert scene.client.generate_image("next", model="small").pictures
        assert_as_before(scene)


def test_a_job_keeps_waiting_for_foreign_memory_with_the_next_worker(
    services: Services, tmp_path: Path
) -> None:
    world = tmp_path / "world"
    world.write_text("blender 41 20GiB\n")
    with scene_of(services, f"sim:40GiB,world={world}") as scene:
        pin(scene.client)
        before = scene.client.status()
        job = scene.client.stream_image("waits", model="flux-full", patience_s=60)
        with job as scene.stream, ThreadPoolExecutor() as threads:
            at(moored.Waiting, cause="foreign")(scene)
            behind = in_background(threads, scene)
            scene.kill()
            assert behind.result(WITHIN_S).pictures, "it fits beside what others have"
            assert_recovered(scene, before)
            at(moored.Waiting, cause="foreign")(scene)
            world.write_text("")
            scene.events.extend(scene.stream)
        assert isinstance(scene.events[-1], moored.Done)
        assert retries(scene.events) == [], "it had not begun"
        assert_as_before(scene)


def test_a_reservation_outlives_its_worker(services: Services) -> None:
    with scene_of(services, "sim:40GiB") as scene:
        pin(scene.client)
        before = scene.client.status()
        reserved = scene.client.reserve(20 << 30, label="blender")
        with scene.client.stream_image("waits", model="flux-full", patience_s=60) as scene.stream:
            at(moored.Waiting, cause="reservation")(scene)
            scene.kill()
            assert_recovered(scene, before)
            assert len(scene.client.status().cards[0].reservations) == 1
            assert reserved.release()
            scene.events.extend(scene.stream)
        assert isinstance(scene.events[-1], moored.Done)
        assert_as_before(scene)


# More than once.


def kill_next_worker(scene: Scene, known: set[int]) -> None:
    """Kills the next worker as soon as its process is there, before it can be ready."""
    found: set[int] = set()

    def is_there() -> bool:
        found.update(set(children_of(scene.service.process.pid)) - known)
        return bool(found)

    wait_until(is_there, "another worker is started")
    os.kill(found.pop(), signal.SIGKILL)


@pytest.mark.parametrize("waits", [False, True], ids=["idle", "with-a-job"])
def test_workers_that_end_while_they_start(services: Services, waits: bool) -> None:
    with scene_of(services, "sim:24GiB,context=1GiB") as scene, ThreadPoolExecutor() as threads:
        pin(scene.client)
        before = scene.client.status()
        known = set(children_of(scene.service.process.pid))
        # The next worker may be ready before a job is queued here, so that it is looked for first.
        killed = threads.submit(kill_next_worker, scene, known)
        scene.kill()
        behind = in_background(threads, scene) if waits else None
        killed.result(WITHIN_S)
        assert behind is None or behind.result(WITHIN_S).pictures
        assert_recovered(scene, before, deaths=2)
        assert_as_before(scene)


def test_a_worker_that_ends_while_it_brings_the_pinned_set_back(services: Services) -> None:
    with scene_of(services, BIG) as scene, ThreadPoolExecutor() as threads:
        pin(scene.client)
        scene.client.pin("flux-full")
        scene.client.load("flux-full")
        before = scene.client.status()
        first = scene.kill()

        def brings_back(status: moored.Status) -> bool:
            card = status.cards[0]
            return card.worker_pid not in (0, first) and any(
                one.state == "loading" and one.component.name == "transformer"
                for one in card.residents
            )

        until(scene.client, brings_back)
        behind = in_background(threads, scene)
        scene.kill()
        assert behind.result(WITHIN_S).pictures
        assert_recovered(scene, before, deaths=2)

        def is_back(status: moored.Status) -> bool:
            there = status.cards[0].residents
            flux = [one for one in there if one.entries == ("flux-full+full",)]
            return len(flux) == 4 and all(one.pinned and one.state == "resident" for one in flux)

        until(scene.client, is_back)
        scene.client.unpin("flux-full")
        assert_as_before(scene)


def test_a_job_whose_worker_is_killed_twice_is_given_up_and_the_next_is_not(
    services: Services,
) -> None:
    with scene_of(services, "sim:24GiB") as scene, ThreadPoolExecutor() as threads:
        pin(scene.client)
        before = scene.look()
        with scene.client.stream_image("deadly", model="slow", steps=200) as scene.stream:
            at_step(3)(scene)
            held = scene.hold()
            behind = in_background(threads, scene)
            end(held, signal.SIGKILL)
            at(moored.Retrying)(scene)
            at_step(3)(scene)
            scene.kill()
            with pytest.raises(moored.WorkerDied, match="denoise"):
                scene.events.extend(scene.stream)
        assert retries(scene.events) == [("WORKER_DIED", "denoise")]
        assert behind.result(WITHIN_S).pictures
        assert_recovered(scene, before, deaths=2)
        assert_as_before(scene)


def test_two_jobs_survive_the_death_of_a_worker_each(services: Services) -> None:
    with scene_of(services, "sim:24GiB") as scene:
        pin(scene.client)
        for prompt in ("one", "two"):
            before = scene.look()
            scene.events.clear()
            with scene.client.stream_image(prompt, model="slow", steps=60) as scene.stream:
                at_step(3)(scene)
                scene.kill()
                scene.events.extend(scene.stream)
            assert isinstance(scene.events[-1], moored.Done)
            assert retries(scene.events) == [("WORKER_DIED", "denoise")]
            assert_recovered(scene, before)
        assert_as_before(scene)


# While somebody does not want it any more.


def kill_unless_replaced(pid: int) -> None:
    """Kills a worker that hangs in what was cancelled; the service does so too, after two seconds."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_cancelled_job_is_not_tried_again(services: Services) -> None:
    with scene_of(services, "sim:24GiB,hang-at=denoise:1") as scene:
        pin(scene.client)
        before = scene.look()
        with scene.client.stream_image("cancelled", model="small") as scene.stream:
            at(moored.Accepted)(scene)
            leased("denoise")(scene)
            assert scene.client.cancel(scene.stream.job_id)
            kill_unless_replaced(before.cards[0].worker_pid)
            with pytest.raises(moored.Cancelled):
                scene.events.extend(scene.stream)
        assert retries(scene.events) == []
        assert_recovered(scene, before)
        assert_as_before(scene)


def test_a_job_without_a_listener_is_not_tried_again(services: Services) -> None:
    with scene_of(services, "sim:24GiB,hang-at=denoise:1") as scene:
        pin(scene.client)
        before = scene.look()
        with scene.client.stream_image("left", model="small") as scene.stream:
            at(moored.Accepted)(scene)
            leased("denoise")(scene)
            job = scene.stream.job_id
        kill_unless_replaced(before.cards[0].worker_pid)
        assert_recovered(scene, before)
        until(scene.client, lambda status: status.jobs == ())
        ended = {one.id: one.state for one in scene.client.jobs(include_ended=True)}
        assert ended[job] == "cancelled"
        assert_as_before(scene)


def test_a_detached_job_outlives_its_worker(services: Services) -> None:
    with scene_of(services, "sim:24GiB") as scene:
        pin(scene.client)
        before = scene.look()
        again: dict[str, object] = {"model": "slow", "steps": 60, "seed": 5, "detach": True}
        key = f"detached {time.monotonic()}"
        with scene.client.stream_image(
            "goes on",
            idempotency_key=key,
            **again,  # type: ignore[arg-type]
        ) as scene.stream:
            at_step(3)(scene)
            job = scene.stream.job_id
        scene.kill()
        assert_recovered(scene, before)
        result = scene.client.generate_image("goes on", idempotency_key=key, **again)  # type: ignore[arg-type]
        assert result.job_id == job
        assert result.pictures
        assert_as_before(scene)


# With two cards.


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_the_other_card_keeps_running(services: Services, how: signal.Signals, busy: bool) -> None:
    devices = ("sim:24GiB", "sim:24GiB,index=1")
    with scene_of(services, *devices, arguments=IMPATIENT) as scene:
        client = scene.client
        client.pin(PINNED)
        client.load(PINNED, card="sim:0")
        before = scene.look()
        with client.stream_image("lives", model="slow", steps=80, card="sim:1") as lives:
            next(event for event in lives if isinstance(event, moored.Step))
            if busy:
                dies = client.stream_image("dies", model="slow", steps=60, card="sim:0")
                with dies as scene.stream:
                    at_step(3)(scene)
                    scene.kill(how)
                    scene.events.extend(scene.stream)
                assert retries(scene.events) == [("WORKER_DIED", "denoise")]
            else:
                scene.kill(how)
                if how == signal.SIGSTOP:
                    # Who asks nothing of a frozen worker does not notice.
                    with pytest.raises(moored.InternalError):
                        client.trim("sim:0")
            assert_recovered(scene, before)
            events = list(lives)
        assert retries(events) == []
        assert isinstance(events[-1], moored.Done)
        assert {stage.card for stage in events[-1].stages} == {"sim:1"}
        assert_as_before(scene)


def test_workers_of_both_cards_that_end_at_once_are_replaced(services: Services) -> None:
    with scene_of(services, "sim:24GiB", "sim:24GiB,index=1") as scene:
        client = scene.client
        client.pin(PINNED)
        client.load(PINNED, card="sim:0")
        before = scene.look()
        with (
            client.stream_image("one", model="slow", steps=100, card="sim:0") as one,
            client.stream_image("two", model="slow", steps=100, card="sim:1") as two,
        ):
            for stream in (one, two):
                next(event for event in stream if isinstance(event, moored.Step))
            scene.kill(card=0)
            scene.kill(card=1)
            for stream in (one, two):
                events = list(stream)
                assert isinstance(events[-1], moored.Done)
                assert retries(events) == [("WORKER_DIED", "denoise")]
        assert_recovered(scene, before, (0, 1))
        assert_as_before(scene)


# While the service goes down.


def test_a_worker_that_ends_while_the_service_drains(services: Services) -> None:
    with scene_of(services, "sim:24GiB,context=2GiB") as scene:
        scene.look()
        with scene.client.stream_image("drained", model="slow", steps=60) as scene.stream:
            at_step(2)(scene)
            pid = scene.hold()
            scene.service.process.send_signal(signal.SIGTERM)
            wait_until(
                lambda: any("stopping: waiting" in line for line in scene.service.log), "it drains"
            )
            end(pid, signal.SIGKILL)
            scene.events.extend(scene.stream)
        assert isinstance(scene.events[-1], moored.Done)
        assert retries(scene.events) == [("WORKER_DIED", "denoise")]
        assert scene.service.process.wait(WITHIN_S) == 0
        assert is_gone(pid)


def end_supervisor(service: Service) -> None:
    """Kills the supervisor by SIGKILL."""
    workers = children_of(service.process.pid)
    assert workers
    service.process.send_signal(signal.SIGKILL)
    service.process.wait(WITHIN_S)
    wait_until(lambda: all(map(is_gone, workers)), "the workers end with their supervisor")


@pytest.mark.parametrize(
    ("card", "job", "where"),
    [
        ("sim:24GiB", None, at_once),
        ("sim:24GiB", generate("slow", steps=200), at_step(2)),
        ("sim:40GiB,speed=4GiB/s", load("flux-full"), amid_the_load_of("transformer")),
        ("sim:24GiB,hang-at=decode:1", generate("small"), leased("decode")),
    ],
    ids=["idle", "denoising", "loading", "hung"],
)
def test_a_worker_ends_when_its_supervisor_does(
    simulate: Callable[..., Service], card: str, job: Job | None, where: Moment
) -> None:
    # Both are alike: which of them is ready first, and gets the job, is open.
    service = simulate(card, f"{card},index=1")
    with service.client() as client:
        scene = Scene(service, client, [])
        if job is None:
            end_supervisor(service)
            return
        with job(client) as scene.stream:
            where(scene)
            end_supervisor(service)
