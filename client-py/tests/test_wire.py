"""What is told of a proxy, or of a server of another kind, that answers in the service's place."""

from __future__ import annotations

import asyncio

import pytest
from foreign import Answer, answering, cut, http1, page, status

import moored

ANSWERS = [
    (status(413), moored.InvalidRequest, "client_max_body_size"),
    (status(502), moored.ConnectionFailed, "see whether the service runs there"),
    (status(504), moored.ConnectionFailed, "grpc_read_timeout"),
    (status(503), moored.ConnectionFailed, "try again in a while"),
    (status(403), moored.Unauthenticated, "rules of its own"),
    (status(404), moored.ConnectionFailed, "a web server, not moored"),
    (page, moored.MooredError, "client_max_body_size"),
    (cut, moored.ConnectionFailed, "grpc_read_timeout"),
    (http1, moored.ConnectionFailed, "does not speak HTTP/2"),
]


@pytest.mark.parametrize(("answer", "kind", "words"), ANSWERS)
def test_an_answer_of_somebody_else_is_explained(
    answer: Answer, kind: type[moored.MooredError], words: str
) -> None:
    async def ask() -> None:
        async with moored.AsyncClient(address) as client:
            await client.jobs(timeout=10)

    with answering(answer) as address, moored.Client(address) as client:
        with pytest.raises(kind) as failed:
            client.jobs(timeout=10)
        assert words in str(failed.value)
        assert address in str(failed.value)
        with pytest.raises(kind) as failed:
            list(client.stream_image("a cat"))
        assert words in str(failed.value)
        with pytest.raises(kind) as failed:
            asyncio.run(ask())
        assert words in str(failed.value)
