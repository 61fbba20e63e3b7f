"""The calls of the service on one channel; and grpc.health.v1, which has no stub of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from ._generated import rpc_pb2
from ._generated.generation_pb2_grpc import GenerationStub
from ._generated.hub_pb2_grpc import HubStub
from ._generated.jobs_pb2_grpc import JobsStub
from ._generated.residency_pb2_grpc import ResidencyStub
from ._generated.server_pb2_grpc import ServerStub

if TYPE_CHECKING:
    # Names of the type stubs only.
    from ._generated.generation_pb2_grpc import GenerationAsyncStub
    from ._generated.hub_pb2_grpc import HubAsyncStub
    from ._generated.jobs_pb2_grpc import JobsAsyncStub
    from ._generated.residency_pb2_grpc import ResidencyAsyncStub
    from ._generated.server_pb2_grpc import ServerAsyncStub

_HEALTH: dict[str, Any] = {
    "request_serializer": rpc_pb2.HealthCheckRequest.SerializeToString,
    "response_deserializer": rpc_pb2.HealthCheckResponse.FromString,
}


class Stubs:
    """The calls, sync."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.generation = GenerationStub(channel)
        self.residency = ResidencyStub(channel)
        self.jobs = JobsStub(channel)
        self.server = ServerStub(channel)
        self.hub = HubStub(channel)
        self.check_health = channel.unary_unary("/grpc.health.v1.Health/Check", **_HEALTH)
        self.watch_health = channel.unary_stream("/grpc.health.v1.Health/Watch", **_HEALTH)


if TYPE_CHECKING:

    class AsyncStubs:
        """The calls, async."""

        generation: GenerationAsyncStub
        residency: ResidencyAsyncStub
        jobs: JobsAsyncStub
        server: ServerAsyncStub
        hub: HubAsyncStub
        check_health: grpc.aio.UnaryUnaryMultiCallable[Any, Any]
        watch_health: grpc.aio.UnaryStreamMultiCallable[Any, Any]

        def __init__(self, channel: grpc.aio.Channel) -> None: ...

else:
    AsyncStubs = Stubs  # one class serves both kinds of channel; their types differ
