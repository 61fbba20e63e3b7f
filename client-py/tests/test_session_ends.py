"""The ends of sessions of sound, and who shares one until then."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import grpc
import pytest
from scripted import CHANNELS, WAIT_S, Service, reason, refuse
from talks import (
    CHUNK,
    END,
    Both,
    Player,
    chunk,
    closed,
    items,
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
from moored._generated import errors_pb2, generation_pb2


def test_a_session_that_is_refused(service: Service, both: Both) -> None:
    def refuses(message: Any) -> list[Any]:
        return [
            lambda context: refuse(
                context, grpc.StatusCode.NOT_FOUND, "no such model", reason("MODEL_NOT_FOUND")
            )
        ]

    talk_on(service, refuses)

    async def use(session: Any, now: Any) -> None:
        raise AssertionError("it is not open")

    with pytest.raises(moored.ModelNotFound, match="no such model"):
        both(use, "not/there")


def test_a_refusal_names_the_options(service: Service, both: Both) -> None:
    from moored._generated import rpc_pb2

    bad = rpc_pb2.BadRequest()
    bad.field_violations.add(field="source_media_id", description="is none")

    def refuses(message: Any) -> list[Any]:
        return [
            lambda context: refuse(
                context,
                grpc.StatusCode.INVALID_ARGUMENT,
                "source_media_id: is none",
                reason("INVALID_REQUEST"),
                bad,
            )
        ]

    talk_on(service, refuses)
    with pytest.raises(moored.InvalidRequest, match=r"^source: is none") as caught:
        both(None)
    assert caught.value.violations[0].field == "source"


def test_no_service(both: Both) -> None:
    both._ask.address = "127.0.0.1:1"
    with pytest.raises(moored.ConnectionFailed):
        both(None)


def test_an_older_service(service: Service, both: Both) -> None:
    talk_on(
        service,
        lambda _: [lambda context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "not here")],
    )
    with pytest.raises(moored.NotBuilt):
        both(None)


def test_a_session_that_fails_while_it_plays(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)
    short = errors_pb2.MemoryShortfall(needed_bytes=5)

    async def use(session: Any, now: Any) -> None:
        segment = session.play("x")
        talk.say(
            chunk(0),
            lambda context: refuse(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the card is full",
                reason("MEMORY_TAKEN"),
                short,
            ),
        )
        with pytest.raises(moored.MemoryTaken):
            await now(segment.wait(WAIT_S))
        assert segment.state == "failed"
        with pytest.raises(moored.MemoryTaken):
            session.play("y")
        # What came before it is there.
        assert len(await taken(session, 1)) == 1
        with pytest.raises(moored.MemoryTaken) as caught:
            await taken(session, 1)
        assert caught.value.needed_bytes == 5

    both(use)  # it was told, and is not raised again


def test_a_lost_connection_is_raised_when_the_session_closes(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        talk.say(lambda context: context.abort(grpc.StatusCode.UNAVAILABLE, "gone"))

    with pytest.raises(moored.ConnectionFailed, match="lost"):
        both(use)


def test_a_connection_that_drops_fails_the_session_and_its_segments(
    service: Service, address: str
) -> None:
    """A connection that drops."""
    other = Service()
    talk = talk_on(other, only_opens)
    server, address = other.start()
    with moored.Client(address) as client, client.audio_session() as session:
        segment = session.play("x")
        assert talk.wait_heard(lambda heard: len(heard) == 2)
        server.stop(None)
        with pytest.raises(moored.MooredError) as caught:
            list(session)
        assert isinstance(caught.value, (moored.ConnectionFailed, moored.Cancelled))
        with pytest.raises(type(caught.value)):
            segment.wait(WAIT_S)


@pytest.mark.parametrize(
    ("why", "error"), [("idle", moored.Cancelled), ("shutting_down", moored.ShuttingDown)]
)
def test_the_service_ends_a_session_with_a_report(
    service: Service, both: Both, why: str, error: type
) -> None:
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        segment = session.play("x")
        talk.say(chunk(0), closed(why, samples=CHUNK, gaps=2, gap_ms=1500), END)
        assert len([one async for one in items(session)]) == 1
        assert session.report.reason == why
        assert (session.report.gaps, session.report.gap_seconds) == (2, 1.5)
        with pytest.raises(error, match=why):
            await now(segment.wait(WAIT_S))
        with pytest.raises(error, match=why):
            session.play("y")
        assert (await now(session.close())).reason == why

    both(use)


def test_an_end_without_a_report(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)

    async def use(session: Any, now: Any) -> None:
        talk.end()
        with pytest.raises(moored.InternalError, match="without a report"):
            await taken(session, 1)

    both(use)


def test_leaving_by_an_error_ends_the_call(service: Service, both: Both) -> None:
    talk = talk_on(service, only_opens)
    left = []

    async def use(session: Any, now: Any) -> None:
        left.append(session.play("x"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        both(use)
    assert talk.gone.wait(WAIT_S)
    assert "close" not in kinds(talk)
    assert left[0].state == "failed"


def test_a_session_that_is_not_open(address: str) -> None:
    with moored.Client(address) as client:
        session = client.audio_session()
        for use in (
            lambda: session.play("x"),
            lambda: session.opened,
            lambda: next(iter(session)),
            lambda: session.played(0),
            session.close,
        ):
            with pytest.raises(RuntimeError, match="not open"):
                use()


def test_a_session_is_opened_once(service: Service, client: moored.Client) -> None:
    talk_on(service)
    session = client.audio_session()
    assert session.open() is session
    with pytest.raises(RuntimeError, match="open already"):
        session.open()
    session.close()


def test_a_closed_session_plays_no_segment(service: Service, both: Both) -> None:
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        await now(session.close())
        with pytest.raises(moored.Cancelled, match="closed"):
            session.play("x")

    both(use)
    assert kinds(talk) == ["open", "close"]


def test_close_fails_if_the_service_does_not_confirm(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = talk_on(service, lambda one: [opened()] if one.WhichOneof("message") == "open" else [])
    for module in ("_sessions", "_async_sessions"):
        monkeypatch.setattr(f"moored.{module}.QUICK_S", 0)

    async def use(session: Any, now: Any) -> None:
        with pytest.raises(moored.Deadline, match="did not confirm"):
            await now(session.close())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        both(use)
    assert talk.gone.wait(WAIT_S)


# Threads and tasks.


def test_one_thread_iterates_while_others_play(service: Service, client: moored.Client) -> None:
    player, threads = Player(), 4
    talk = talk_on(service, player)
    with client.audio_session() as session:
        numbers: list[int] = []

        def play() -> None:
            for _ in range(10):
                segment = session.play("x").wait(WAIT_S)
                # Numbers are in the order in which the service heard of them.
                assert segment.seed == segment.number + 40
                numbers.append(segment.number)

        players = [threading.Thread(target=play) for _ in range(threads)]
        for one in players:
            one.start()
        chunks = []
        for one in session:
            chunks.append(one)
            if len(chunks) == 2 * 10 * threads:
                break
        for each in players:
            each.join()
        assert sorted(numbers) == list(range(1, 10 * threads + 1))
        assert [one.first_sample for one in chunks] == [n * CHUNK for n in range(len(chunks))]
    assert kinds(talk).count("segment") == 10 * threads


def test_close_in_another_thread(service: Service, client: moored.Client) -> None:
    talk = talk_on(service)
    with client.audio_session() as session:
        reports = []

        def close() -> None:
            talk.wait_heard(lambda heard: len(heard) == 2)
            reports.append(session.close())

        closer = threading.Thread(target=close)
        closer.start()
        session.play("x")
        assert len(list(session)) == 2
        closer.join()
        assert reports == [session.report]


def test_closing_the_client(service: Service, address: str) -> None:
    talk = talk_on(service)
    client = moored.Client(address)
    session = client.audio_session().open()
    segment = session.play("x").wait(WAIT_S)
    client.close()
    assert talk.gone.wait(WAIT_S)
    with pytest.raises(moored.Cancelled):
        list(session)
    assert segment.state == "ready"
    with pytest.raises(RuntimeError, match="The client is closed"):
        client.audio_session().open()


def test_async_closing_the_client(service: Service, address: str) -> None:
    talk = talk_on(service)

    async def main() -> None:
        client = moored.AsyncClient(address)
        session = await client.audio_session().open()
        reader = asyncio.create_task(taken(session, 1))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(moored.Cancelled):
            await reader
        assert await asyncio.to_thread(talk.gone.wait, WAIT_S)

    asyncio.run(main())


def test_a_cancelled_task_ends_the_session(service: Service, address: str) -> None:
    talk = talk_on(service)

    async def use(client: moored.AsyncClient) -> None:
        async with client.audio_session() as session:
            async for _ in session:
                pass

    async def main() -> None:
        async with moored.AsyncClient(address) as client:
            task = asyncio.create_task(use(client))
            assert await asyncio.to_thread(talk.wait_heard, lambda heard: len(heard) == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(talk.gone.wait, WAIT_S)

    asyncio.run(main())


def test_a_wait_that_is_cancelled_ends_itself_alone(service: Service, address: str) -> None:
    talk = talk_on(service, only_opens)

    async def main() -> None:
        async with (
            moored.AsyncClient(address) as client,
            client.audio_session() as session,
        ):
            segment = session.play("x")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(segment.wait(), 0.01)
            talk.say(ready(1))
            await segment.wait(WAIT_S)

    asyncio.run(main())


def test_a_session_that_nobody_refers_to(service: Service, client: moored.Client) -> None:
    talk = talk_on(service)
    session = client.audio_session().open()
    segment = session.play("x")
    del session
    gc.collect()
    assert talk.gone.wait(WAIT_S)
    assert segment.number == 1


def test_unread_events_are_bounded_by_their_bytes(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sound is: a service may send events without an end."""
    monkeypatch.setattr(_conversation, "UNREAD_BYTES", 3000)
    talk = talk_on(service)
    failures = [
        generation_pb2.SegmentFailed(segment=number, message="x" * 1000) for number in range(1, 51)
    ]

    async def use(session: Any, now: Any) -> None:
        talk.say(*(generation_pb2.StreamAudioResponse(failed=each) for each in failures))
        said = session._said
        await until(lambda: said.is_full)
        assert len(said._unread) == 3
        assert (await now(session.close())).reason == "closed"
        told = [one.segment for one in [one async for one in items(session)]]
        assert told == list(range(1, len(told) + 1))

    both(use)


def test_unread_sound_is_bounded(
    service: Service, both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept up to a limit, then not read; and it does not keep the session from its end."""
    kept = 3 * CHUNK * CHANNELS * 2
    monkeypatch.setattr(_conversation, "UNREAD_BYTES", kept)
    talk = talk_on(service)

    async def use(session: Any, now: Any) -> None:
        talk.say(*(chunk(n) for n in range(50)))
        said = session._said
        await until(lambda: said.is_full)
        assert len(said._unread) == 4
        assert [one.first_sample for one in await taken(session, 10)] == [
            n * CHUNK for n in range(10)
        ]
        assert (await now(session.close())).reason == "closed"
        assert len([one async for one in items(session)]) == 40

    both(use)
