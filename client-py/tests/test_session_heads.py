"""What a session of sound says of its play head, and that its client is alive."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import CHANNELS, WAIT_S, Service, Talk
from talks import (
    CHUNK,
    Both,
    Player,
    chunk,
    kinds,
    only_opens,
    opened,
    ready,
    taken,
    talk_on,
    until,
)

import moored
from moored import _conversation


def heads(talk: Talk) -> list[int]:
    return [one.played.sample for one in talk.heard if one.WhichOneof("message") == "played"]


def test_a_paced_session_says_what_was_taken(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        session.play("x")
        # The reader comes for a second and a third chunk: so it has played those before.
        await now(session.play("y").wait(WAIT_S))
        await taken(session, 3)

    both(use, paced=True)
    assert heads(talk) == [CHUNK, 2 * CHUNK]


def test_a_session_by_the_clock_sends_no_play_head(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))
        await taken(session, 2)

    both(use)
    assert heads(talk) == []


def test_played_overrides_the_chunks_that_were_taken(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))
        session.played(17)
        await taken(session, 2)
        with pytest.raises(moored.InvalidRequest, match="sample: -1"):
            session.played(-1)

    both(use, paced=True)
    assert heads(talk) == [17]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(_conversation, "now", lambda: self.now_s)


def test_taking_sound_sends_the_play_head(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    talk = talk_on(service, Player(idle_seconds=30))

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))
        await taken(session, 1)
        clock.now_s += 9.9  # not yet a third
        await taken(session, 1)
        clock.now_s += 0.2
        session.play("y")  # is heard as well
        clock.now_s += 9.9
        await taken(session, 1)
        clock.now_s += 0.2
        await taken(session, 1)

    both(use)
    assert kinds(talk) == ["open", "segment", "segment", "played", "close"]
    assert heads(talk) == [3 * CHUNK]


def test_waiting_for_a_segment_sends_the_play_head(service: Service, both: Both) -> None:
    def answer(message: Any) -> list[Any]:
        if message.WhichOneof("message") == "played":
            return [ready(1)]  # only a sign of life brings it
        if message.WhichOneof("message") == "open":
            return [opened(idle_seconds=1)]
        return only_opens(message)

    talk = talk_on(service, answer)

    async def use(session: Any, now: Any) -> None:
        await now(session.play("x").wait(WAIT_S))

    both(use)
    assert heads(talk)[0] == 0


def test_waiting_for_sound_sends_the_play_head(service: Service, both: Both) -> None:
    def answer(message: Any) -> list[Any]:
        kind = message.WhichOneof("message")
        if kind == "open":
            return [opened(idle_seconds=1)]
        return [chunk(0)] if kind == "played" else only_opens(message)

    talk_on(service, answer)

    async def use(session: Any, now: Any) -> None:
        assert len(await taken(session, 1)) == 1

    both(use)


def test_an_idle_client_sends_nothing(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        clock.now_s += 1000
        talk.say(chunk(0), chunk(1))  # what the service says is no sign of the client's life
        await until(lambda: session._said._unread_bytes == 2 * CHUNK * CHANNELS * 2)
        assert kinds(talk) == ["open"]

    both(use)
