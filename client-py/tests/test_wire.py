"""What is told of a proxy, or of a server of another kind, that answers in the service's place."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from foreign import Answer, answering, cut, http1, page, status

import moored
from moored import _wire

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


@pytest.mark.parametrize(
    "words",
    [
        "Received RST_STREAM with error code 2",
        "Stream removed",
        "Stream removed (Data frame with END_STREAM flag received)",
        "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))",
    ],
)
def test_a_cut_call_is_recognised_in_the_words_of_each_grpc_version(words: str) -> None:
    told = _wire.told(grpc.StatusCode.UNKNOWN, words, "http://127.0.0.1:50051")
    assert told is not None
    assert told.cause == "cut"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.CANCELLED, "Stream removed (Channel closed!)"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)"),
    ],
)
def test_a_call_that_the_client_ended_is_not_reported_as_cut(
    code: grpc.StatusCode, words: str
) -> None:
    assert _wire.told(code, words, "http://127.0.0.1:50051") is None
