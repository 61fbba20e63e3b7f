"""The errors of the service, as exceptions: one for each reason of errors.proto.

    MooredError
    ├── InvalidRequest        a field is wrong: `.violations`
    ├── ModelNotFound         no such model
    ├── ModelDamaged          its files are damaged or incomplete
    ├── ModelChanged          its files were replaced while the job was under way: submit it again
    ├── ModelUnsupported      its files are no pipeline that the service knows
    ├── NotBuilt              the API names it, this service has not built it yet
    ├── MemoryShortage        `.needed_bytes`, `.free_bytes`, `.holders`, `.fallbacks`
    │   ├── NeverFits         larger than the card can ever hold
    │   ├── MemoryTaken       did not come free within the patience: `.retry_after_s`
    │   └── OutOfMemory       inside a stage, although it was admitted
    ├── QueueFull             `.retry_after_s`
    ├── Deadline              the timeout passed
    ├── Cancelled             by this client, or by somebody else: `.by`, `.how`
    ├── WorkerDied            two worker processes died of this job
    ├── CardNotReady          no card is ready: `.retry_after_s`
    ├── NotFinite             a value that is no number
    ├── LatentNotFound        no such latent, or it has expired
    ├── LatentMismatch        a latent of another VAE, or of another shape
    ├── JobNotFound           no such job
    ├── InUse                 jobs use the model: unload with `force` cancels them
    ├── Unauthenticated       the token is missing or wrong
    │   └── UnencryptedToken  it was not sent: others could have read it on the way
    ├── RoleRequired          the token has a role that may not do this
    ├── OtherSite             a page of another site may have had a browser send it
    ├── TokenLimit            the token may do no more of this now: `.limit`, `.retry_after_s`
    ├── ShuttingDown          the service is shutting down
    ├── KeyReused             the idempotency key belongs to another request
    ├── PullFailed            a model could not be fetched from its hub
    ├── SlowReader            too much of a call's results was left unread
    ├── ClientLimit           this client has too much open; `.retry_after_s`
    ├── DiskFull              what is to be pulled does not fit on the service's disk
    ├── NotKept               the service's disk does not take a job: `.retry_after_s`
    ├── DiskNotReady          a disk of the service does not answer: `.retry_after_s`, `.how`
    ├── Superseded            a later segment of the session sounded before it
    ├── InternalError         a fault of the service
    ├── ConnectionFailed      the service cannot be reached, or was lost
    └── NotStarted            `start_local_service` could not start one

A reason that this version does not know is a plain MooredError, with `.reason`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from . import _wire
from ._generated import errors_pb2, generation_pb2, rpc_pb2
from ._mirror import mirror
from ._records import Fallback, Holder, LatentInfo, MemoryShortfall

DOMAIN = "moored"
DETAILS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of the request that is wrong, and why."""

    field: str
    description: str

    def clause(self, names: Mapping[str, str]) -> str:
        """The violation as a clause, with the field by the name that a program has for it.

        `names` has names by field; of a field in a list, `controls[2].mode`, by `controls[].mode`,
        where `{number}` is the place in the list, from 1. Other fields keep their names.
        """
        places = _PLACE.findall(self.field)
        subject = names.get(_PLACE.sub("[]", self.field), self.field)
        if places:
            subject = subject.replace("{number}", str(int(places[-1]) + 1))
        colon = "" if self.description.partition(" ")[0] in _VERBS else ":"
        return f"{subject}{colon} {self.description}"


_PLACE = re.compile(r"\[(\d+)\]")
_VERBS = frozenset(
    (
        "is",
        "are",
        "was",
        "has",
        "have",
        "names",
        "takes",
        "must",
        "says",
        "comes",
        "ends",
        "does",
        "holds",
    )
)
"""Words with which a description begins that goes on from its field as a sentence."""


_OBEYED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal may obey: control characters, and those that set the direction of text; and
halves of characters, which cannot be written at all."""


def _one_line(text: str) -> str:
    """A text of the service as one line: parts of it are names that others gave."""
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _plain(text: str) -> str:
    """A message with what a terminal would obey escaped: parts of it are names that others gave."""
    return _OBEYED.sub(lambda found: found.group().encode("unicode_escape").decode("ascii"), text)


class MooredError(Exception):
    """Base of all errors of this package; its text is one sentence for people."""

    message: str
    """The sentence."""
    reason: str
    """Stable name of the reason, as in errors.proto; empty where the service named none."""
    retry_after_s: float | None
    """Seconds after which it is worth asking again; None where the service does not say."""
    violations: tuple[Violation, ...]
    """Fields that are wrong."""
    shortfall: MemoryShortfall | None
    """By how much memory is short."""
    metadata: Mapping[str, str]
    """What else the service says, for programs."""
    job_id: str
    """The job that failed; empty where there was none."""
    latents: tuple[LatentInfo, ...]
    """Latents that the job left in the service: a failed decode can be had by `decode_latent`."""
    results: tuple[Any, ...]
    """Of a list of prompts: the results of those before the one that failed, in order."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        retry_after_s: float | None = None,
        violations: Sequence[Violation] = (),
        shortfall: MemoryShortfall | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        message = _plain(message)
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.violations = tuple(violations)
        self.shortfall = shortfall
        self.metadata = dict(metadata or {})
        self.job_id = ""
        self.latents = ()
        self.results = ()

    def in_words(self, names: Mapping[str, str]) -> str:
        """The sentence, with fields by a program's own names: see `Violation.clause`."""
        clauses = [violation.clause(names) for violation in self.violations]
        return "; ".join(clauses) or self.message


class InvalidRequest(MooredError):
    """A field of the request is wrong: see `violations`."""


def refused(option: str, problem: str) -> InvalidRequest:
    """The error for an argument that cannot be used."""
    return InvalidRequest(
        f"{option}: {problem}",
        reason="INVALID_REQUEST",
        violations=[Violation(option, problem)],
    )


class ModelNotFound(MooredError):
    """There is no such model."""


class ModelDamaged(MooredError):
    """The model's files are damaged or incomplete."""


class ModelChanged(MooredError):
    """The model's files were replaced while the job was under way: submit it again."""


class ModelUnsupported(MooredError):
    """The files are no pipeline that this service knows."""


class NotBuilt(MooredError):
    """The API names it, but the service has not built it yet."""


class MemoryShortage(MooredError):
    """Memory is short. All figures are bytes, and 0 where the service sent none."""

    @property
    def needed_bytes(self) -> int:
        """Bytes needed at the peak."""
        return self.shortfall.needed_bytes if self.shortfall else 0

    @property
    def free_bytes(self) -> int:
        """Bytes that were usable."""
        return self.shortfall.free_bytes if self.shortfall else 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the card could give at the most."""
        return self.shortfall.capacity_bytes if self.shortfall else 0

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Who holds memory."""
        return self.shortfall.holders if self.shortfall else ()

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """What would fit instead, closest first."""
        return self.shortfall.fallbacks if self.shortfall else ()

    @property
    def stage(self) -> str:
        """The stage that was short."""
        return self.shortfall.stage if self.shortfall else ""


class NeverFits(MemoryShortage):
    """Larger than the card can ever hold."""


class MemoryTaken(MemoryShortage):
    """Memory did not come free within the patience."""


class OutOfMemory(MemoryShortage):
    """Out of memory inside a stage, although it was admitted."""


class QueueFull(MooredError):
    """The queue is full."""


class ClientLimit(MooredError):
    """This client has more open than the service takes of one: calls, bytes, holds."""


class Deadline(MooredError):
    """The timeout of the call passed."""


class Cancelled(MooredError):
    """The job was cancelled."""

    @property
    def by(self) -> str:
        """The client who cancelled it, or unloaded its model by force; empty where nobody did."""
        return self.metadata.get("by", "")

    @property
    def how(self) -> str:
        """`cancel`, `unload`, `left` or `unread`, as in errors.proto; empty: closed here."""
        return self.metadata.get("how", "")


class WorkerDied(MooredError):
    """Two worker processes died while they ran this job."""


class CardNotReady(MooredError):
    """No card is ready."""


class NotFinite(MooredError):
    """The computation met a value that is not finite."""


class LatentNotFound(MooredError):
    """There is no such latent, or it has expired."""


class LatentMismatch(MooredError):
    """The latent belongs to another VAE, or has another shape."""


class JobNotFound(MooredError):
    """There is no such job."""


class InUse(MooredError):
    """Jobs use the model; `force` would cancel them."""


class Unauthenticated(MooredError):
    """The token is missing or wrong."""


class UnencryptedToken(Unauthenticated):
    """The token was not sent, because the line to another machine is not encrypted."""


class RoleRequired(MooredError):
    """The token has a role that may not do this."""


class OtherSite(MooredError):
    """A page of another site may have had a browser send the request."""


class TokenLimit(MooredError):
    """The token may do no more of this now: jobs, or pixels, seconds or bytes a minute."""

    @property
    def limit(self) -> str:
        """Which limit, as in errors.proto: `jobs`, `pixels_per_minute`, ..."""
        return self.metadata.get("limit", "")


class ShuttingDown(MooredError):
    """The service is shutting down."""


class KeyReused(MooredError):
    """The idempotency key was used before, for another request."""


class PullFailed(MooredError):
    """A model could not be pulled: the hub is out of reach, has it not, or refuses the token."""


class SlowReader(MooredError):
    """Too much of a call's results was left unread."""


class DiskFull(MooredError):
    """What is to be pulled does not fit on the disk of the service."""


class DiskNotReady(MooredError):
    """A disk or a network share of the service does not answer, or too many calls wait for it."""

    @property
    def how(self) -> str:
        """`silent` or `busy`, as in errors.proto."""
        return self.metadata.get("how", "")


class NotKept(MooredError):
    """A detached job, or what it made, cannot be written to the service's disk or read there."""


class Superseded(MooredError):
    """A segment of a session that no longer comes: a later one sounded before it."""


class InternalError(MooredError):
    """A fault of the service."""


class ConnectionFailed(MooredError):
    """The service cannot be reached, or the connection to it was lost."""

    cause: _wire.Cause
    """`unreachable`; `lost` before the job ended; `name`: no such machine; `certificate`, `no_tls`,
    `not_http2`: what is there does not speak as it should; `proxy`: something in front of the
    service answered; `cut`: something in between ended the call."""
    endpoint: str
    """The address that was tried, as `Client.endpoint` has it."""

    def __init__(
        self,
        message: str,
        *,
        cause: _wire.Cause = "unreachable",
        endpoint: str = "",
        reason: str = "",
    ) -> None:
        super().__init__(message, reason=reason)
        self.cause = cause
        self.endpoint = endpoint


class NotStarted(MooredError):
    """A service could not be started on this machine."""


# A test holds this against errors.proto.
BY_REASON: dict[str, type[MooredError]] = {
    "INVALID_REQUEST": InvalidRequest,
    "MODEL_NOT_FOUND": ModelNotFound,
    "MODEL_DAMAGED": ModelDamaged,
    "MODEL_UNSUPPORTED": ModelUnsupported,
    "NOT_BUILT": NotBuilt,
    "NEVER_FITS": NeverFits,
    "MEMORY_TAKEN": MemoryTaken,
    "OUT_OF_MEMORY": OutOfMemory,
    "QUEUE_FULL": QueueFull,
    "DEADLINE": Deadline,
    "CANCELLED": Cancelled,
    "WORKER_DIED": WorkerDied,
    "CARD_NOT_READY": CardNotReady,
    "NOT_FINITE": NotFinite,
    "LATENT_NOT_FOUND": LatentNotFound,
    "LATENT_MISMATCH": LatentMismatch,
    "JOB_NOT_FOUND": JobNotFound,
    "IN_USE": InUse,
    "UNAUTHENTICATED": Unauthenticated,
    "SHUTTING_DOWN": ShuttingDown,
    "INTERNAL": InternalError,
    "KEY_REUSED": KeyReused,
    "PULL_FAILED": PullFailed,
    "DISK_FULL": DiskFull,
    "SLOW_READER": SlowReader,
    "CLIENT_LIMIT": ClientLimit,
    "MODEL_CHANGED": ModelChanged,
    "DISK_NOT_READY": DiskNotReady,
    "NOT_KEPT": NotKept,
    "ROLE_REQUIRED": RoleRequired,
    "OTHER_SITE": OtherSite,
    "TOKEN_LIMIT": TokenLimit,
}

# Where there is no reason of ours, gRPC itself speaks: on either side, or a proxy between.
_BY_CODE: dict[grpc.StatusCode, type[MooredError]] = {
    grpc.StatusCode.UNAVAILABLE: ConnectionFailed,
    grpc.StatusCode.DEADLINE_EXCEEDED: Deadline,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    # What the service's gRPC says of a message that is too large.
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: NotBuilt,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
}

# Of proxies, where it is not that the service is out of reach.
_BY_HTTP_STATUS: dict[int, type[MooredError]] = {
    401: Unauthenticated,
    403: Unauthenticated,
    413: InvalidRequest,
}

# What the service's gRPC says when the caller's timeout is over there a moment before it is here.
_TIMEOUT_OF_THE_SERVICE = "Timeout expired"


def unreachable(endpoint: str, circumstance: str = "") -> ConnectionFailed:
    """The error for a service that does not answer; `circumstance`: for how long, or why."""
    circumstance = circumstance and f" {circumstance}"
    return ConnectionFailed(
        f"No moored service answers at {endpoint}{circumstance}: start one with `moored serve`, or "
        "name its address by MOORED_ENDPOINT",
        endpoint=endpoint,
    )


def not_ready(endpoint: str, said: str, timeout: float) -> MooredError:
    """The error of wait_until_ready; `said` is the service's last word on its health, if any."""
    if not said:
        return unreachable(endpoint, f"within {timeout:g} s")
    return CardNotReady(f"{endpoint} answers {said!r}, still after {timeout:g} s")


def error_of(error: grpc.RpcError, endpoint: str, *, begun: bool = False) -> MooredError:
    """The exception for what gRPC raised; `begun` once the service had answered with something."""
    # Both kinds of RpcError that a call raises are calls too; the base class alone says nothing.
    call: Any = error
    code, text = call.code(), _one_line(call.details() or "")
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            detailed = _from_details(value, text)
            if detailed is not None:
                return detailed
    kind = _BY_CODE.get(code, MooredError)
    if told := _wire.told(code, text, endpoint):
        if refused := _BY_HTTP_STATUS.get(told.http_status):
            return refused(told.message)
        return ConnectionFailed(told.message, cause=told.cause, endpoint=endpoint)
    if code is grpc.StatusCode.CANCELLED and text == _TIMEOUT_OF_THE_SERVICE:
        kind = Deadline
    if kind is ConnectionFailed and begun:
        lost = (
            f"The connection to {endpoint} was lost before the job ended: see whether the service "
            "still runs"
        )
        return ConnectionFailed(lost, cause="lost", endpoint=endpoint)
    if kind is ConnectionFailed:
        why = _wire.why_unreachable(text)
        return unreachable(endpoint, why and f"({why})")
    if kind is Deadline:
        return Deadline(f"The timeout passed before {endpoint} had finished")
    return kind(text or f"{endpoint} answered {code.name}")


def error_of_segment(failed: generation_pb2.SegmentFailed, job_id: str) -> MooredError:
    """The exception for a segment of a session that does not come."""
    codes = {code.value[0]: kind for code, kind in _BY_CODE.items()}
    kind = BY_REASON.get(failed.reason) or codes.get(failed.code, MooredError)
    if failed.reason == "SUPERSEDED":  # of no call, and so not among the reasons
        kind = Superseded
    message = _one_line(failed.message or failed.reason or f"Segment {failed.segment} failed")
    error = kind(
        _as_options(message) if failed.problems else message,
        reason=failed.reason,
        violations=[_violation(one) for one in failed.problems],
    )
    error.job_id = job_id
    return error


def _violation(said: Any) -> Violation:
    """A field's fault as the service says it, by the name of its option."""
    return Violation(_as_options(_one_line(said.field)), _as_options(_one_line(said.description)))


def _from_details(value: bytes, text: str) -> MooredError | None:
    """The exception that a `google.rpc.Status` describes; None when it is not one of ours."""
    info, retry_after_s, shortfall = None, None, None
    violations: list[Any] = []
    try:
        status = rpc_pb2.Status.FromString(value)
        for detail in status.details:
            name = detail.type_url.rpartition("/")[2]
            if name == "google.rpc.ErrorInfo":
                info = rpc_pb2.ErrorInfo.FromString(detail.value)
            elif name == "google.rpc.RetryInfo":
                delay = rpc_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after_s = delay.seconds + delay.nanos / 1e9
            elif name == "google.rpc.BadRequest":
                violations = list(rpc_pb2.BadRequest.FromString(detail.value).field_violations)
            elif name == "moored.v1.MemoryShortfall":
                short = errors_pb2.MemoryShortfall.FromString(detail.value)
                shortfall = mirror(MemoryShortfall, short)
    except DecodeError:
        return None
    if info is None or info.domain != DOMAIN:
        return None
    message = _as_calls(text or _one_line(status.message or info.reason))
    if violations:
        message = _as_options(message)
    return BY_REASON.get(info.reason, MooredError)(
        message,
        reason=info.reason,
        retry_after_s=retry_after_s,
        violations=[_violation(one) for one in violations],
        shortfall=shortfall,
        metadata=dict(info.metadata),
    )


# Fields of a request whose options go by another name.
_OPTIONS = {
    "init_latent_id": "init_latent",
    "init_media_id": "init_media",
    "reference_media_id": "reference",
    "window_start_seconds": "window",
    "window_end_seconds": "window",
    "beats_per_minute": "bpm",
    "source_media_id": "source",
    "idle_seconds": "idle_s",
    "paced_by_client": "paced",
}
_FIELDS = re.compile(rf"\b({'|'.join(_OPTIONS)})\b")


def _as_calls(text: str) -> str:
    """Names the client's call in place of the command that lists models."""
    return text.replace("`moored models`", "`client.list_models()`")


def _as_options(text: str) -> str:
    """Replaces the names of fields that hold a handle with the names of their options."""
    return _FIELDS.sub(lambda found: _OPTIONS[found[0]], text)
