"""Several boxes behind one address: what a proxy needs to know of a call, and what it tells.

Every call that is about a model names it in a header, so that a proxy can send equal models to one
box. A proxy says in a header of each answer which box gave it. Latents, media, holds, reservations
and jobs are at one box alone: a later call that names one of them also names its box. Without a
proxy nothing of this is read.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ._errors import InvalidRequest
from ._generated import events_pb2

MODEL_HEADER = "x-moored-model"
BOX_HEADER = "x-moored-box"

KEPT = 20_000
"""Most ids whose boxes are remembered for an address; the oldest are forgotten."""

NAME_AT_MOST_BYTES = 256
"""Most bytes of a model's name in the header. Those that are equal so far are at one box."""

Metadata = tuple[tuple[str, str], ...]
Headers = Iterable[tuple[str, Any]] | None

# Ids that are of no box.
_OTHER_IDS = ("client_id", "vae_id")
_WITH_ID = ("LatentInfo", "MediaInfo")
# The events of a job that say what is new at its box. Others have pixels, and come often.
_TELLING = ("accepted", "latent")


class Boxes:
    """Where what has an id is, of the boxes at one address."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, what: str) -> str:
        """The box of an id, or of a job's idempotency key; empty: not known here."""
        with self._lock:
            return self._of.get(what, "")

    def learn(self, asked: Headers, answered: Headers, *messages: Any) -> None:
        """Remembers which box has told of these: the one that a proxy names in the answer, or that
        which was asked, as some proxies do not repeat its name."""
        box = _box_in(answered) or _box_in(asked)
        if box:
            self.remember(box, *(each for message in messages for each in ids_in(message)))

    def remember(self, box: str, *ids: str) -> None:
        """Remembers that these are at a box."""
        with self._lock:
            for each in filter(None, ids if box else ()):
                self._of[each] = box
                self._of.move_to_end(each)
            while len(self._of) > KEPT:
                self._of.popitem(last=False)


def _box_in(headers: Headers) -> str:
    found = (value for name, value in headers or () if name == BOX_HEADER)
    return next((value for value in found if isinstance(value, str)), "")


_BOXES: dict[str, Boxes] = {}


def boxes_of(endpoint: str) -> Boxes:
    """What is known of the boxes at an address: all clients of this program share it."""
    return _BOXES.setdefault(endpoint, Boxes())


def box_named(box: str | None) -> str:
    """The box that all calls are for: the argument, else MOORED_BOX; empty: each goes its way."""
    name = os.environ.get("MOORED_BOX", "") if box is None else box
    if not (name.isascii() and name.isprintable()) or len(name) > NAME_AT_MOST_BYTES:
        raise InvalidRequest(
            f"box: {name!r} is no name of a box: plain letters, digits and signs are wanted, "
            f"at most {NAME_AT_MOST_BYTES}"
        )
    return name


def headers_of(request: Any, boxes: Boxes, box: str = "", model: str = "") -> Metadata:
    """What a proxy needs to know of a call: its model, and the box that has what it names."""
    model = model or model_in(request)
    box = box or next(filter(None, map(boxes.of, ids_in(request))), "")
    named = ((MODEL_HEADER, _sendable(model)), (BOX_HEADER, box))
    return tuple((name, value) for name, value in named if value)


def model_in(request: Any) -> str:
    """The model that a request is about, whatever its formats and adapters; empty: none is named.

    All formats of a model have the same key, since they share components, and since the service
    chooses one of them for `auto`.
    """
    if not isinstance(request, Message):
        return ""
    name = request.DESCRIPTOR.name
    if name == "PullModelRequest":
        return _base(request.id)  # type: ignore[attr-defined]
    for field in request.DESCRIPTOR.fields:
        if field.type != FieldDescriptor.TYPE_MESSAGE or _is_repeated(field):
            continue
        if request.HasField(field.name):
            part = getattr(request, field.name)
            if field.name == "model":
                return _base(part.id)
            # What is to be planned is a request of its own.
            if name == "PlanRequest" and (found := model_in(part)):
                return found
    return ""


def ids_in(message: Any) -> Iterator[str]:
    """The ids in a message of what is at one box alone, and the idempotency key of a job."""
    if isinstance(message, events_pb2.Event) and message.WhichOneof("event") not in _TELLING:
        return
    if isinstance(message, Message):
        yield from _ids_in(message)


def _ids_in(message: Message) -> Iterator[str]:
    descriptor = message.DESCRIPTOR
    fields: Any = descriptor.fields
    for field in fields:
        if field.type == FieldDescriptor.TYPE_STRING and not _is_repeated(field):
            is_id = field.name.endswith("_id") and field.name not in _OTHER_IDS
            if is_id or field.name == "idempotency_key" or _is_own_id(descriptor.name, field.name):
                value = getattr(message, field.name)
                if value:
                    yield value
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if _is_repeated(field):
                if not field.message_type.GetOptions().map_entry:
                    for each in getattr(message, field.name):
                        yield from _ids_in(each)
            elif message.HasField(field.name):
                yield from _ids_in(getattr(message, field.name))


def _is_own_id(message: str, field: str) -> bool:
    return field == "id" and message in _WITH_ID


def _is_repeated(field: Any) -> bool:
    # `label` is of older protobuf, `is_repeated` of newer.
    newer = getattr(field, "is_repeated", None)
    repeated: int = FieldDescriptor.LABEL_REPEATED
    return bool(newer) if newer is not None else bool(field.label == repeated)


def _base(model: str) -> str:
    """A model's name without formats and adapters: they follow a plus."""
    return model.partition("+")[0]


def _sendable(model: str) -> str:
    """A name as a header may have it: what is no plain letter, digit or sign is escaped."""
    return quote(model, safe="/:@!$'()*,;=&")[:NAME_AT_MOST_BYTES]
