"""A service that does as it is told: every call of proto/, answered by what the test sets."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message

from moored._generated import (
    events_pb2,
    generation_pb2_grpc,
    hub_pb2_grpc,
    jobs_pb2_grpc,
    model_pb2,
    residency_pb2_grpc,
    rpc_pb2,
    server_pb2_grpc,
)

SERVICES = [
    ("Generation", generation_pb2_grpc),
    ("Residency", residency_pb2_grpc),
    ("Jobs", jobs_pb2_grpc),
    ("Server", server_pb2_grpc),
    ("Hub", hub_pb2_grpc),
]

WAIT_S = 60
"""How long a test waits for what must happen. Nothing takes it unless it fails."""

DEADLINES_S = (0.3, 2.0, 20.0)
"""Deadlines that are to pass after the service has answered. On a busy machine a short one may pass
before it: then the next one decides."""

Answer = Callable[[Any, grpc.ServicerContext], Any]


class Service:
    """Answers by method name; remembers the requests and their metadata."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self.seconds_left: float | None = None
        self.health: Iterable[int] = [rpc_pb2.HealthCheckResponse.SERVING]

    def on(self, method: str, answer: Message | list[Message] | Answer) -> None:
        """Answers `method` by a message, by a stream of them, or by a function."""
        if callable(answer):
            self.answers[method] = answer
        elif isinstance(answer, list):
            self.answers[method] = lambda request, context: iter(answer)
        else:
            self.answers[method] = lambda request, context: answer

    def handle(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        if isinstance(self.answers.get(method), Talk):
            self.metadata = dict(context.invocation_metadata())
            return self.answers[method](request, context)
        if not isinstance(request, Message):
            request = list(request)
        self.requests[method] = request
        self.metadata = dict(context.invocation_metadata())
        self.seconds_left = context.time_remaining()
        return self.answers[method](request, context)

    def start(
        self, address: str = "127.0.0.1:0", tls: grpc.ServerCredentials | None = None
    ) -> tuple[grpc.Server, str]:
        limit = 256 * 1024 * 1024
        server = grpc.server(
            ThreadPoolExecutor(max_workers=16),
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
            ],
        )
        for name, module in SERVICES:
            base = getattr(module, f"{name}Servicer")
            methods = {one: self._method(one) for one in vars(base) if one[0] != "_"}
            servicer = type(name, (base,), methods)()
            getattr(module, f"add_{name}Servicer_to_server")(servicer, server)
        server.add_generic_rpc_handlers((self._health_handler(),))
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls)
        server.start()
        return server, f"127.0.0.1:{port}"

    def _method(self, name: str) -> Callable[..., Any]:
        return lambda _, request, context: self.handle(name, request, context)

    def _health_handler(self) -> grpc.GenericRpcHandler:
        def check(request: Any, context: grpc.ServicerContext) -> Message:
            self.requests["Check"] = request
            return rpc_pb2.HealthCheckResponse(status=next(iter(self.health)))

        def watch(request: Any, context: grpc.ServicerContext) -> Iterator[Message]:
            self.requests["Watch"] = request
            gone = gone_event(context)
            for status in self.health:
                yield rpc_pb2.HealthCheckResponse(status=status)
            gone.wait(WAIT_S)

        codec = {
            "request_deserializer": rpc_pb2.HealthCheckRequest.FromString,
            "response_serializer": rpc_pb2.HealthCheckResponse.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {
                "Check": grpc.unary_unary_rpc_method_handler(check, **codec),
                "Watch": grpc.unary_stream_rpc_method_handler(watch, **codec),
            },
        )


def gone_event(context: grpc.ServicerContext) -> threading.Event:
    """Set when the call is over, for whatever reason."""
    gone = threading.Event()
    if not context.add_callback(gone.set):
        gone.set()
    return gone


class Endless:
    """A job that goes on until its client goes away."""

    def __init__(self, *events: events_pb2.Event) -> None:
        self.events = events
        self.begun = threading.Event()
        self.gone = threading.Event()

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Iterator[events_pb2.Event]:
        # A call that is over takes no callback, and its handler is not resumed after a yield.
        if not context.add_callback(self.gone.set):
            self.gone.set()
        yield from self.events
        self.begun.set()
        self.gone.wait(WAIT_S)


class Talk:
    """A call in both directions. Each message is answered by `answer`; `say` says more."""

    def __init__(self, answer: Callable[[Any], Iterable[Message]] = lambda message: ()) -> None:
        self.answer = answer
        self.heard: list[Any] = []
        self.gone = threading.Event()
        self._changed = threading.Condition()
        self._says: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def say(self, *messages: Message | Callable[[grpc.ServicerContext], None]) -> None:
        """Sends messages, or ends the call by a function of its context."""
        for message in messages:
            self._says.put(message)

    def end(self) -> None:
        """Ends the call well."""
        self._says.put(None)

    def wait_heard(self, wanted: Callable[[list[Any]], bool]) -> bool:
        """Waits until what was heard is as wanted."""
        with self._changed:
            return self._changed.wait_for(lambda: wanted(self.heard), WAIT_S)

    def __call__(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Message]:
        if not context.add_callback(self._leave):
            self._leave()

        def listen() -> None:
            # A client that goes away ends the iterator by an error of gRPC's.
            with contextlib.suppress(Exception):
                for request in requests:
                    with self._changed:
                        self.heard.append(request)
                        self._changed.notify_all()
                    self.say(*self.answer(request))

        threading.Thread(target=listen, daemon=True).start()
        while (message := self._says.get()) is not None:
            if isinstance(message, Message):
                yield message
            else:
                message(context)

    def _leave(self) -> None:
        self.gone.set()
        self.end()


def event(job_id: str = "job-1", at_ms: int = 5, **inner: Message) -> events_pb2.Event:
    return events_pb2.Event(job_id=job_id, at_ms=at_ms, **inner)


def resolved(choice: str = "") -> model_pb2.ResolvedModel:
    return model_pb2.ResolvedModel(
        key="demo@main",
        id="demo",
        revision="main",
        family="flux",
        quantization={"vae": "full"},
        choice=choice,
    )


def accepted() -> events_pb2.Event:
    return event(at_ms=0, accepted=events_pb2.Accepted(model=resolved()))


def step(n: int, of: int = 4) -> events_pb2.Event:
    return event(step=events_pb2.Step(n=n, of=of))


def done(seed: int = 7, **more: Any) -> events_pb2.Event:
    stages = [
        events_pb2.StageReport(name="encode_text", run_ms=3, move_ms=20, chunking="whole"),
        events_pb2.StageReport(name="denoise", run_ms=100, move_ms=40, wait_ms=5),
        events_pb2.StageReport(name="decode", run_ms=10, item=0),
        events_pb2.StageReport(name="decode", run_ms=11, item=1),
    ]
    last = events_pb2.Done(seed=seed, stages=stages, total_ms=200, model=resolved(), **more)
    return event(at_ms=200, done=last)


def pieces(
    data: bytes,
    *,
    index: int = 0,
    size: int = 100,
    media_type: str = "image/png",
    track: str = "",
    format: dict[str, Message] | None = None,
    **metadata: str,
) -> list[events_pb2.Event]:
    """An artifact in chunks of `size` bytes, as the service sends them."""
    starts = range(0, len(data), size)
    return [
        event(
            artifact=events_pb2.Artifact(
                index=index,
                chunk=data[start : start + size],
                last=start == starts[-1],
                media_type=media_type if start == 0 else "",
                metadata=metadata if start == 0 else {},
                total_bytes=len(data) if start == 0 else 0,
                track=track,
                **(format or {} if start == 0 else {}),
            )
        )
        for start in starts
    ]


WIDTH, HEIGHT, FRAMES_PER_SECOND = 4, 2, 24.0
FRAME_BYTES = WIDTH * HEIGHT * 3


def film(frames: int, *, size: int = 100, **more: Any) -> tuple[bytes, list[events_pb2.Event]]:
    """The bytes of a film whose frames all differ, and its pieces."""
    data = b"".join(bytes([number + 1] * FRAME_BYTES) for number in range(frames))
    video = events_pb2.VideoFormat(
        width=WIDTH, height=HEIGHT, frames=frames, frames_per_second=FRAMES_PER_SECOND
    )
    return data, pieces(
        data, size=size, media_type="video/x-raw-rgb", format={"video": video}, **more
    )


SAMPLES_PER_SECOND, CHANNELS = 8000, 2


def sound(samples: int, first: int = 0) -> bytes:
    """Samples of both channels, which all differ."""
    numbers = range(first, first + samples * CHANNELS)
    return b"".join(number.to_bytes(2, "little", signed=True) for number in numbers)


def track(
    data: bytes, *, samples: int, media_type: str = "audio/x-raw-s16le", name: str = "", **more: Any
) -> list[events_pb2.Event]:
    """A track in pieces."""
    audio = events_pb2.AudioTrackFormat(
        samples_per_second=SAMPLES_PER_SECOND, channels=CHANNELS, samples=samples
    )
    return pieces(data, media_type=media_type, track=name, format={"audio": audio}, **more)


def refuse(
    context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Message
) -> None:
    """Ends the call by a status with details, as the service does."""
    status = rpc_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        name = detail.DESCRIPTOR.full_name.replace("moored.wire.", "google.rpc.")
        any_ = Packed(type_url=f"type.googleapis.com/{name}", value=detail.SerializeToString())
        status.details.append(any_)
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


def reason(name: str, **metadata: str) -> rpc_pb2.ErrorInfo:
    return rpc_pb2.ErrorInfo(reason=name, domain="moored", metadata=metadata)
