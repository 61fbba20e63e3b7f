"""A job ends when its client goes away, in whatever way that is."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc.aio
import pytest
from conftest import Ask
from scripted import DEADLINES_S, WAIT_S, Endless, Service, accepted, done, step

import moored
from moored._generated import generation_pb2_grpc


@pytest.fixture
def endless(service: Service) -> Endless:
    answer = Endless(accepted(), step(1))
    service.on("GenerateImage", answer)
    return answer


def test_break_cancels_the_job(endless: Endless, client: moored.Client) -> None:
    for event in client.stream_image("x"):
        if isinstance(event, moored.Step):
            break
    assert endless.gone.wait(WAIT_S)


def test_close(endless: Endless, client: moored.Client) -> None:
    stream = client.stream_image("x")
    assert isinstance(next(stream), moored.Accepted)
    stream.close()
    stream.close()
    assert endless.gone.wait(WAIT_S)
    assert list(stream) == []
    with pytest.raises(moored.Cancelled) as caught:
        stream.result()
    assert caught.value.job_id == "job-1"


def test_leaving_the_with_block_cancels_the_job(endless: Endless, client: moored.Client) -> None:
    with contextlib.suppress(ZeroDivisionError), client.stream_image("x") as stream:
        next(stream)
        raise ZeroDivisionError
    assert endless.gone.wait(WAIT_S)


def test_close_in_another_thread(endless: Endless, client: moored.Client) -> None:
    stream = client.stream_image("x")

    def close() -> None:
        endless.begun.wait(WAIT_S)
        stream.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(moored.Cancelled):
        stream.result()
    closer.join()
    assert endless.gone.wait(WAIT_S)


@pytest.mark.usefixtures("interruptible")
def test_interrupt(endless: Endless, client: moored.Client) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        endless.begun.wait(WAIT_S)
        # A real Ctrl-C, wherever the main thread is just then.
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        client.generate_image("x")
    interrupter.join()
    assert endless.gone.wait(WAIT_S)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_while_the_call_begins(
    endless: Endless, client: moored.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, sent = threading.get_ident(), threading.Event()
    begins, calls = client._stubs.generation.GenerateImage, []

    def begins_slowly(*args: Any, **more: Any) -> Any:
        # As inside of gRPC, which knows of the call before its caller does.
        calls.append(begins(*args, **more))
        sent.wait(WAIT_S)
        return calls[0]

    def interrupt() -> None:
        endless.begun.wait(WAIT_S)
        signal.pthread_kill(main, signal.SIGINT)
        sent.set()

    monkeypatch.setattr(client._stubs.generation, "GenerateImage", begins_slowly)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        client.generate_image("x")
    interrupter.join()
    assert endless.gone.wait(WAIT_S)


def test_closing_the_client(endless: Endless, address: str) -> None:
    client = moored.Client(address)
    stream = client.stream_image("x")
    assert isinstance(next(stream), moored.Accepted)
    client.close()
    client.close()
    assert endless.gone.wait(WAIT_S)
    with pytest.raises(moored.Cancelled):
        list(stream)
    with pytest.raises(RuntimeError, match="closed"):
        client.status()
    with pytest.raises(RuntimeError, match="closed"):
        client.stream_image("x")


def test_deadline(service: Service, ask: Ask) -> None:
    for timeout in DEADLINES_S:
        endless = Endless(accepted(), step(1))
        service.on("GenerateImage", endless)
        with pytest.raises(moored.Deadline) as caught:
            ask("generate_image", "x", timeout=timeout)
        if caught.value.job_id:
            break
    assert caught.value.job_id == "job-1"
    assert service.seconds_left is not None
    assert service.seconds_left < timeout + 0.7
    assert endless.gone.wait(WAIT_S)


def test_no_deadline(service: Service, ask: Ask) -> None:
    service.on("GenerateImage", [accepted(), done()])
    ask("generate_image", "x")
    # Python's server reads "none" as some centuries.
    assert service.seconds_left is None or service.seconds_left > 1e6


def test_cancelled_task(endless: Endless, address: str) -> None:
    async def main() -> None:
        async with moored.AsyncClient(address) as client:
            task = asyncio.create_task(client.generate_image("x"))
            await asyncio.to_thread(endless.begun.wait, WAIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()
            assert await asyncio.to_thread(endless.gone.wait, WAIT_S)

    asyncio.run(main())


def test_timeout_around_a_job(service: Service, address: str) -> None:
    async def main() -> None:
        async with moored.AsyncClient(address) as client:
            for timeout in DEADLINES_S:
                endless = Endless(accepted(), step(1))
                service.on("GenerateImage", endless)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(client.generate_image("x"), timeout)
                if endless.begun.is_set():
                    break
            assert await asyncio.to_thread(endless.gone.wait, WAIT_S)

    asyncio.run(main())


def test_async_break_and_close(endless: Endless, address: str) -> None:
    async def main() -> None:
        async with moored.AsyncClient(address) as client:
            async for event in client.stream_image("x"):
                if isinstance(event, moored.Step):
                    break
            assert await asyncio.to_thread(endless.gone.wait, WAIT_S)
            endless.gone.clear()
            async with client.stream_image("x") as stream:
                assert isinstance(await anext(stream), moored.Accepted)
            assert await asyncio.to_thread(endless.gone.wait, WAIT_S)
            await stream.close()
            await stream.aclose()
            assert [event async for event in stream] == []
            with pytest.raises(moored.Cancelled):
                await stream.result()

    asyncio.run(main())


def test_async_close_by_another_task(endless: Endless, address: str) -> None:
    async def main() -> None:
        async with moored.AsyncClient(address) as client:
            stream = client.stream_image("x")
            reader = asyncio.create_task(stream.result())
            await asyncio.to_thread(endless.begun.wait, WAIT_S)
            await stream.close()
            with pytest.raises(moored.Cancelled):
                await reader
            assert await asyncio.to_thread(endless.gone.wait, WAIT_S)

    asyncio.run(main())


def test_async_closing_the_client(endless: Endless, address: str) -> None:
    async def main() -> None:
        client = moored.AsyncClient(address)
        stream = client.stream_image("x")
        await anext(stream)
        await client.close()
        await client.close()
        assert await asyncio.to_thread(endless.gone.wait, WAIT_S)
        with pytest.raises(moored.Cancelled):
            [event async for event in stream]
        with pytest.raises(RuntimeError, match="closed"):
            await client.status()

    asyncio.run(main())


def test_an_async_client_belongs_to_its_loop(service: Service, address: str) -> None:
    service.on("GenerateImage", [accepted(), done()])
    client = moored.AsyncClient(address)

    async def use() -> None:
        await client.generate_image("x")

    async def use_and_close() -> None:
        with pytest.raises(RuntimeError, match="event loop"):
            await client.status()

    asyncio.run(use())
    asyncio.run(use_and_close())


def test_threads_share_a_client(service: Service, client: moored.Client) -> None:
    service.on("GenerateImage", [accepted(), step(1), done()])
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(client.generate_image, [str(n) for n in range(40)]))
    assert {result.seed for result in results} == {7}


def test_an_async_server_sees_it_too() -> None:
    class Generation(generation_pb2_grpc.GenerationServicer):
        def __init__(self) -> None:
            self.begun, self.gone = asyncio.Event(), asyncio.Event()

        async def GenerateImage(self, request: Any, context: Any) -> Any:
            yield accepted()
            self.begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.gone.set()

    async def main() -> None:
        server, generation = grpc.aio.server(), Generation()
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with moored.AsyncClient(f"127.0.0.1:{port}") as client:
            task = asyncio.create_task(client.generate_image("x"))
            await asyncio.wait_for(generation.begun.wait(), WAIT_S)
            task.cancel()
            await asyncio.wait_for(generation.gone.wait(), WAIT_S)
        await server.stop(None)

    asyncio.run(main())
