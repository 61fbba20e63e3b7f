from __future__ import annotations

from typing import Any

import grpc
import pytest
from conftest import Ask
from google.protobuf.duration_pb2 import Duration
from scripted import Service, accepted, event, reason, refuse

import moored
from moored import _errors
from moored._generated import errors_pb2, events_pb2, model_pb2, rpc_pb2

CODES = {
    "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "MEMORY_TAKEN": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "SHUTTING_DOWN": grpc.StatusCode.UNAVAILABLE,
    "CARD_NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "DISK_NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "NOT_KEPT": grpc.StatusCode.UNAVAILABLE,
    "CANCELLED": grpc.StatusCode.CANCELLED,
    "DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
}


def refusal(code: grpc.StatusCode, message: str, *details: Any) -> Any:
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        refuse(context, code, message, *details)

    return answer


@pytest.mark.parametrize(("name", "kind"), _errors.BY_REASON.items())
def test_every_reason_raises_its_exception(
    service: Service, ask: Ask, name: str, kind: type[Exception]
) -> None:
    code = CODES.get(name, grpc.StatusCode.FAILED_PRECONDITION)
    service.on("GetStatus", refusal(code, "A sentence.", reason(name, hint="h")))
    service.on("GenerateImage", refusal(code, "A sentence.", reason(name)))
    with pytest.raises(moored.MooredError) as caught:
        ask("status")
    assert type(caught.value) is kind
    assert (str(caught.value), caught.value.reason) == ("A sentence.", name)
    assert caught.value.metadata == {"hint": "h"}
    with pytest.raises(kind):
        ask("generate_image", "x")


@pytest.mark.parametrize("name", ["NEVER_FITS", "MEMORY_TAKEN", "OUT_OF_MEMORY"])
def test_a_shortage_says_by_how_much(service: Service, ask: Ask, name: str) -> None:
    shortfall = errors_pb2.MemoryShortfall(
        needed_bytes=30,
        free_bytes=10,
        capacity_bytes=80,
        holders=[events_pb2.Holder(name="python", pid=4711, bytes=14)],
        fallbacks=[errors_pb2.Fallback(label="512x512", peak_bytes=9, fits_now=True)],
        stage="denoise",
    )
    retry = rpc_pb2.RetryInfo(retry_delay=Duration(seconds=2, nanos=500_000_000))
    refused = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "Short.", reason(name), shortfall, retry)
    service.on("GenerateImage", refused)
    with pytest.raises(moored.MemoryShortage) as caught:
        ask("generate_image", "x")
    error = caught.value
    assert (error.needed_bytes, error.free_bytes, error.capacity_bytes) == (30, 10, 80)
    assert error.holders == (moored.Holder("python", 4711, 14),)
    assert error.fallbacks == (moored.Fallback("512x512", 9, True),)
    assert (error.stage, error.retry_after_s) == ("denoise", 2.5)


def test_a_shortage_without_figures() -> None:
    error = moored.OutOfMemory("Out of memory.")
    assert (error.needed_bytes, error.holders, error.fallbacks) == (0, (), ())


def test_violations(service: Service, ask: Ask) -> None:
    bad = rpc_pb2.BadRequest(
        field_violations=[
            rpc_pb2.BadRequest.FieldViolation(field="width", description="not a multiple of 16")
        ]
    )
    code = grpc.StatusCode.INVALID_ARGUMENT
    service.on("GenerateImage", refusal(code, "Wrong.", bad, reason("INVALID_REQUEST")))
    with pytest.raises(moored.InvalidRequest) as caught:
        ask("generate_image", "x", width=17)
    assert caught.value.violations == (moored.Violation("width", "not a multiple of 16"),)


def test_a_reason_of_a_newer_service(service: Service, ask: Ask) -> None:
    refused = refusal(grpc.StatusCode.UNAVAILABLE, "New.", reason("SOMETHING_NEW"))
    service.on("GetStatus", refused)
    with pytest.raises(moored.MooredError, match=r"New\.") as caught:
        ask("status")
    assert type(caught.value) is moored.MooredError
    assert caught.value.reason == "SOMETHING_NEW"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, moored.Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, moored.Unauthenticated),
        (grpc.StatusCode.INVALID_ARGUMENT, moored.InvalidRequest),
        (grpc.StatusCode.OUT_OF_RANGE, moored.InvalidRequest),
        (grpc.StatusCode.UNIMPLEMENTED, moored.NotBuilt),
        (grpc.StatusCode.CANCELLED, moored.Cancelled),
        (grpc.StatusCode.DEADLINE_EXCEEDED, moored.Deadline),
        (grpc.StatusCode.UNAVAILABLE, moored.ConnectionFailed),
        (grpc.StatusCode.INTERNAL, moored.InternalError),
        (grpc.StatusCode.UNKNOWN, moored.InternalError),
        (grpc.StatusCode.DATA_LOSS, moored.MooredError),
    ],
)
def test_a_status_that_is_not_of_moored(
    service: Service, ask: Ask, code: grpc.StatusCode, kind: type[Exception]
) -> None:
    service.on("GetStatus", lambda request, context: context.abort(code, "by a proxy"))
    with pytest.raises(moored.MooredError) as caught:
        ask("status")
    assert type(caught.value) is kind
    assert caught.value.reason == ""


def test_a_timeout_seen_first_by_the_service_is_a_deadline(service: Service, ask: Ask) -> None:
    code = grpc.StatusCode.CANCELLED
    service.on("GetStatus", lambda request, context: context.abort(code, "Timeout expired"))
    with pytest.raises(moored.Deadline):
        ask("status")


def test_a_message_has_nothing_that_a_terminal_obeys(service: Service, ask: Ask) -> None:
    said = "There is no \x1b]0;owned\x07\u202e model\nA LINE."
    service.on("GetStatus", lambda request, context: context.abort(grpc.StatusCode.NOT_FOUND, said))
    with pytest.raises(moored.MooredError, match="owned") as caught:
        ask("status")
    for text in (str(caught.value), caught.value.message):
        assert text == "There is no \\x1b]0;owned\\x07\\u202e model\\nA LINE."


def test_error_details_of_another_domain_raise_a_plain_error(service: Service, ask: Ask) -> None:
    foreign = rpc_pb2.ErrorInfo(reason="MEMORY_TAKEN", domain="example.com")
    service.on("GetStatus", refusal(grpc.StatusCode.NOT_FOUND, "Elsewhere.", foreign))
    with pytest.raises(moored.MooredError, match="Elsewhere") as caught:
        ask("status")
    assert type(caught.value) is moored.MooredError

    def garbled(request: Any, context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(grpc.StatusCode.INTERNAL, "Garbled.")

    service.on("GetStatus", garbled)
    with pytest.raises(moored.InternalError, match="Garbled"):
        ask("status")


def test_the_error_of_an_unreachable_service_says_why(service: Service, ask: Ask) -> None:
    of_grpc = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:50051: "
    for words, why in (("No route to host", " (No route to host)"), ("Connection refused", "")):

        def refuses(
            request: Any, context: grpc.ServicerContext, said: str = of_grpc + words
        ) -> None:
            context.abort(grpc.StatusCode.UNAVAILABLE, said)

        service.on("GetStatus", refuses)
        with pytest.raises(moored.ConnectionFailed) as caught:
            ask("status")
        assert f"No moored service answers at {caught.value.endpoint}{why}: start" in str(
            caught.value
        )


def test_a_failed_decode_leaves_its_latent(service: Service, ask: Ask) -> None:
    kept = events_pb2.LatentKept(latent=model_pb2.LatentInfo(id="lat-1"))

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        yield accepted()
        yield event(latent=kept)
        refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "Out.", reason("OUT_OF_MEMORY"))

    service.on("GenerateImage", answer)
    with pytest.raises(moored.OutOfMemory) as caught:
        ask("generate_image", "x")
    assert [latent.id for latent in caught.value.latents] == ["lat-1"]
    assert caught.value.job_id == "job-1"


def test_a_violation_is_a_clause_with_the_names_of_a_program() -> None:
    names = {"init_image": "the image", "controls[].mode": "the mode of ControlNet {number}"}
    violations = [
        moored.Violation("init_image", "is missing: name one"),
        moored.Violation("controls[1].mode", "is 7; the modes are 0 to 5"),
        moored.Violation("width", "70 is odd"),
    ]
    error = moored.InvalidRequest("as the service says it", violations=violations)
    assert error.in_words(names) == (
        "the image is missing: name one; "
        "the mode of ControlNet 2 is 7; the modes are 0 to 5; width: 70 is odd"
    )
    assert moored.QueueFull("the queue is full").in_words(names) == "the queue is full"
