"""The package and proto/ say the same: nothing is forgotten when either changes."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import typing

import pytest

import moored
from moored import _errors, _events, _mirror, _records, _requests
from moored._generated import errors_pb2, events_pb2, generation_pb2, model_pb2

MIRRORS = sorted(_mirror.MIRRORS.items())


def descriptor(name: str) -> typing.Any:
    pool = events_pb2.DESCRIPTOR.pool
    return pool.FindMessageTypeByName(name)


@pytest.mark.parametrize(("name", "cls"), MIRRORS, ids=[name for name, _ in MIRRORS])
def test_a_mirror_has_the_fields_of_its_message(name: str, cls: type) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    if issubclass(cls, moored.BaseEvent):
        fields -= {"job_id", "at_ms"}
    assert fields == set(descriptor(name).fields_by_name)


def test_every_event_is_mirrored() -> None:
    oneof = events_pb2.Event.DESCRIPTOR.oneofs_by_name["event"]
    assert set(_events.EVENTS) == {field.name for field in oneof.fields}
    for field in oneof.fields:
        assert _mirror.MIRRORS[field.message_type.full_name] is _events.EVENTS[field.name]
    assert set(_events.EVENTS.values()) == set(typing.get_args(_events.Event))


def test_every_reason_has_its_exception() -> None:
    reasons = {name for name in errors_pb2.Reason.keys() if name != "REASON_UNSPECIFIED"}  # noqa: SIM118
    assert set(_errors.BY_REASON) == reasons
    assert len(set(_errors.BY_REASON.values())) == len(reasons)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = _errors.__doc__ or ""
    for name, thing in vars(_errors).items():
        if isinstance(thing, type) and issubclass(thing, moored.MooredError):
            assert f" {name} " in drawn or f" {name}\n" in drawn, name
            assert getattr(moored, name) is thing


def test_every_field_of_a_request_has_an_argument() -> None:
    renamed = {"patience_s": "patience_ms"}
    options = {renamed.get(name, name) for name in _requests.JobOptions.__annotations__}
    assert options == set(generation_pb2.JobOptions.DESCRIPTOR.fields_by_name)

    renamed = {
        "preview_interval_s": "preview_interval_ms",
        "init_latent": "init_latent_id",
        "init_media": "init_media_id",
        "reference": "reference_media_id",
        "bpm": "beats_per_minute",
        "window": "window_start_seconds",  # and the end
    }
    for said, request in [
        (_requests.ImageOptions, generation_pb2.GenerateImageRequest),
        (_requests.VideoOptions, generation_pb2.GenerateVideoRequest),
        (_requests.AudioOptions, generation_pb2.GenerateAudioRequest),
    ]:
        own = {
            renamed.get(name, name)
            for name in said.__annotations__
            if name not in _requests.JobOptions.__annotations__
        } - {"adapters"}  # a part of the model
        fields = set(request.DESCRIPTOR.fields_by_name) - {"window_end_seconds"}
        assert own | {"prompt", "options"} == fields

    renamed = {"quantization": "quantization", "formats": "quantization"}
    named = {renamed.get(f.name, f.name) for f in dataclasses.fields(moored.ModelRef)}
    assert named == set(model_pb2.ModelRef.DESCRIPTOR.fields_by_name)
    named = {field.name for field in dataclasses.fields(moored.Adapter)}
    assert named == set(model_pb2.Adapter.DESCRIPTOR.fields_by_name)
    named = {field.name for field in dataclasses.fields(moored.Control)}
    assert named == set(generation_pb2.Control.DESCRIPTOR.fields_by_name)


def test_both_clients_have_the_same_methods() -> None:
    def surface(cls: type) -> dict[str, list[str]]:
        return {
            name: [str(one) for one in inspect.signature(thing).parameters.values()]
            for name, thing in vars(cls).items()
            if name[0] != "_"
        }

    assert surface(moored.Client) == surface(moored.AsyncClient)


@pytest.mark.parametrize("name", moored.__all__)
def test_everything_public_is_documented_and_flat(name: str) -> None:
    thing = getattr(moored, name)
    if not isinstance(thing, type) and not inspect.isfunction(thing):
        return
    assert thing.__module__ == "moored"
    assert inspect.getdoc(thing)
    for member_name, member in vars(thing).items():
        if member_name[0] != "_" and (inspect.isfunction(member) or isinstance(member, property)):
            assert inspect.getdoc(member), f"{name}.{member_name}"


def test_what_it_gives_can_be_pickled() -> None:
    step = moored.Step(1, 4, 0, job_id="a", at_ms=2)
    assert pickle.loads(pickle.dumps(step)) == step
    shortfall = _records.MemoryShortfall(2, 1, 3, (), (), "denoise")
    error = moored.MemoryTaken("short", reason="MEMORY_TAKEN", shortfall=shortfall)
    back = pickle.loads(pickle.dumps(error))
    assert isinstance(back, moored.MemoryTaken)
    assert (str(back), back.needed_bytes) == ("short", 2)
