"""Clients of a load: what each kind does again and again, and what all of them have seen."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import moored

PICTURE, FILM, TRACK = "load-picture", "load-film", "load-track"
CALL_S = 240.0
"""No job may take longer, its wait for the card included: one that does is an error."""
LIMITS = (moored.ClientLimit, moored.QueueFull, moored.SlowReader, moored.TokenLimit)
"""What a client may be told that asks for too much."""
PROMPTS = ("a boat", "a red cube on a blue plane", "two circles", "rain", "a green tree", "night")
RETRY_S = 1.0
"""Where a limit names no time after which to try again."""
SEGMENT_S = 4.0
LARGE_SIDE = 2048


@dataclass
class Seen:
    """What all clients have seen."""

    done: Counter[str] = field(default_factory=Counter)
    """Jobs by what they make."""
    limits: Counter[str] = field(default_factory=Counter)
    """Limits that were told, by their reason."""
    without_retry: Counter[str] = field(default_factory=Counter)
    """Those of them that did not say when to try again."""
    left: int = 0
    """Streams that clients left before their end."""
    segments: int = 0
    unexpected: list[str] = field(default_factory=list)
    accepted_s: list[float] = field(default_factory=list)
    """From the call to `accepted`, of steady clients."""
    added_s: list[float] = field(default_factory=list)
    """What a job took its steady client beyond what it took the service from its acceptance to its end."""
    card_ms: Counter[str] = field(default_factory=Counter)
    """Milliseconds of the card, by client; those of streams that were left are not known."""

    def add(self, other: Seen) -> None:
        """What others have seen, too."""
        for name in ("done", "limits", "without_retry", "card_ms"):
            getattr(self, name).update(getattr(other, name))
        for name in ("unexpected", "accepted_s", "added_s"):
            getattr(self, name).extend(getattr(other, name))
        self.left += other.left
        self.segments += other.segments


@dataclass
class Visitor:
    """One client. It acts until `over` is set, and then no more."""

    address: str
    name: str
    seen: Seen
    over: asyncio.Event
    chance: random.Random

    def __post_init__(self) -> None:
        self.client = self.connect()

    def connect(self) -> moored.AsyncClient:
        """A connection of its own."""
        return moored.AsyncClient(self.address, client_id=self.name)

    @property
    def is_steady(self) -> bool:
        """Whether it is among those that ask for the same, and are to get the same."""
        return self.name.startswith("steady")

    async def run(self, act: Callable[[Visitor], Awaitable[None]]) -> None:
        """Until everything is over."""
        while not self.over.is_set():
            try:
                await act(self)
            except LIMITS as limit:
                await self.heed(limit)
            except Exception as error:
                self.seen.unexpected.append(f"{self.name}: {type(error).__name__}: {error}")
                await self.pause(RETRY_S)
        await self.client.close()

    async def heed(self, limit: moored.MooredError) -> None:
        """Waits as long as the service has said."""
        self.seen.limits[limit.reason] += 1
        if limit.retry_after_s is None:
            self.seen.without_retry[limit.reason] += 1
        await self.pause(RETRY_S if limit.retry_after_s is None else limit.retry_after_s)

    async def pause(self, seconds: float) -> None:
        """Passes so much time, or what is left of the load."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)

    async def follow(
        self, stream: Any, what: str, *, pause_s: float = 0.0, leave_after: int | None = None
    ) -> None:
        """Reads a job's events to their end, or leaves after some."""
        began, count, done = time.monotonic(), 0, None
        async with stream:
            async for event in stream:
                if isinstance(event, moored.Accepted) and self.is_steady:
                    self.seen.accepted_s.append(time.monotonic() - began)
                if isinstance(event, moored.Done):
                    done = event
                count += 1
                if leave_after is not None and count > leave_after:
                    self.seen.left += 1
                    return
                if pause_s and isinstance(event, moored.Artifact):
                    await self.pause(pause_s)
        if done is None:
            raise AssertionError(f"{what} ended without `done`")
        self.seen.done[what] += 1
        ran = [stage for stage in done.stages if not stage.cached]
        self.seen.card_ms[self.name] += sum(stage.run_ms + stage.move_ms for stage in ran)
        if self.is_steady:
            self.seen.added_s.append(time.monotonic() - began - done.total_ms / 1000)

    def picture(self, **options: Any) -> Any:
        """A picture of another seed each time: nothing of it but its text is known already."""
        return self.client.stream_image(self._prompt(), **self._given(PICTURE, options))

    def film(self, **options: Any) -> Any:
        """A film, as pictures."""
        return self.client.stream_video(self._prompt(), **self._given(FILM, options))

    def track(self, **options: Any) -> Any:
        """A track, as pictures."""
        return self.client.stream_audio(self._prompt(), **self._given(TRACK, options))

    def _prompt(self) -> str:
        return self.chance.choice(PROMPTS)

    def _given(self, model: str, options: dict[str, Any]) -> dict[str, Any]:
        seed = self.chance.randrange(2**32)
        return {"model": model, "seed": seed, "timeout": CALL_S, **options}


# Kinds of clients.


async def steady(v: Visitor) -> None:
    """One job after another, of all media."""
    kind = v.chance.choices(("picture", "film", "track"), (70, 20, 10))[0]
    if kind == "picture":
        await v.follow(v.picture(), "pictures")
    elif kind == "film":
        await v.follow(v.film(output=v.chance.choice(("raw", "mp4"))), "films")
    else:
        await v.follow(v.track(output=v.chance.choice(("raw", "flac"))), "tracks")


async def session(v: Visitor) -> None:
    """Plays something new every few seconds."""
    async with v.client.audio_session(TRACK) as opened:
        opened.play(v._prompt())
        began = time.monotonic()
        async for event in opened:
            if v.over.is_set():
                return
            if time.monotonic() - began > SEGMENT_S and isinstance(event, moored.SoundChunk):
                began = time.monotonic()
                opened.play(v._prompt())
                v.seen.segments += 1


async def slow_reader(v: Visitor) -> None:
    """Reads frames more slowly than they come."""
    stream = v.film(width=128, height=128, output="raw")
    await v.follow(stream, "films read slowly", pause_s=v.chance.uniform(0.05, 0.5))


async def vanishing(v: Visitor) -> None:
    """Leaves its job at some event; every other time it closes its connection."""
    stream = v.chance.choice((v.picture, v.film, v.track))()
    if v.chance.random() < 0.5:
        return await v.follow(stream, "jobs to be left", leave_after=v.chance.randrange(8))
    following = asyncio.ensure_future(v.follow(stream, "jobs to be left"))
    await v.pause(v.chance.uniform(0.0, 3.0))
    await v.client.close()
    with suppress(moored.MooredError, RuntimeError):
        await following
    v.seen.left += 1
    v.client = v.connect()
    await v.pause(v.chance.uniform(0.0, 1.0))


async def greedy(v: Visitor) -> None:
    """Asks for more at once than there are places."""

    async def one() -> None:
        # Its share of the card does not do all of them in the time of the others.
        await v.follow(v.picture(count=2, timeout=None), "pictures of the greedy")

    ends = await asyncio.gather(*(one() for _ in range(48)), return_exceptions=True)
    limits = [end for end in ends if isinstance(end, LIMITS)]
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, LIMITS):
            raise end
    for limit in limits[:-1]:
        v.seen.limits[limit.reason] += 1
    if limits:
        raise limits[-1]


async def uploader(v: Visitor) -> None:
    """Sends large pictures to start from."""
    small = {"width": 64, "height": 64}
    await v.follow(
        v.picture(init_image=LARGE_PNG, strength=0.5, **small), "pictures of large pictures"
    )


def _large_png() -> bytes:
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    lines = Image.linear_gradient("L").resize((LARGE_SIDE, LARGE_SIDE)).convert("RGB")
    lines.save(file, "PNG", compress_level=1)
    return file.getvalue()


LARGE_PNG = _large_png()

# Of twenty clients, how many are of each kind; the others are steady. There is one of each at least.
KINDS: dict[str, tuple[int, Callable[[Visitor], Awaitable[None]]]] = {
    "session": (1, session),
    "slow": (1, slow_reader),
    "vanishing": (2, vanishing),
    "uploader": (1, uploader),
}
GREEDY = 1
"""Of all."""


def visitors(count: int, address: str, seed: str, over: asyncio.Event, seen: Seen) -> list[Any]:
    """All clients, as what they do once they are awaited."""
    kinds = [("greedy", GREEDY, greedy)]
    kinds += [
        (kind, max(1, count * of_twenty // 20), act) for kind, (of_twenty, act) in KINDS.items()
    ]
    kinds.append(("steady", count - sum(own for _, own, _ in kinds), steady))

    def acting(
        name: str, act: Callable[[Visitor], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        chance = random.Random(f"{seed} {name}")
        return lambda: Visitor(address, name, seen, over, chance).run(act)

    return [acting(f"{kind} {number}", act) for kind, own, act in kinds for number in range(own)]


async def act(
    count: int, address: str, seed: str, seconds: float, end_s: float, share: tuple[int, int]
) -> Seen:
    """Every n-th of all clients, from number k on (`share`: k, n), for so many seconds."""
    seen, over = Seen(), asyncio.Event()
    first, every = share
    own = visitors(count, address, seed, over, seen)[first::every]
    tasks = [asyncio.ensure_future(begin()) for begin in own]
    await asyncio.sleep(seconds)
    over.set()
    _, late = await asyncio.wait(tasks, timeout=end_s)
    for task in late:
        task.cancel()
        seen.unexpected.append(f"a client did not end within {end_s:g} s")
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            seen.unexpected.append(f"a client ended with {type(error).__name__}: {error}")
    return seen


def act_in_a_process(*asked: Any) -> Seen:
    """As `act`."""
    return asyncio.run(act(*asked))
