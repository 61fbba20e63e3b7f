"""Several boxes behind one address: a call says its model, and goes to the box of what it names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import Ask
from scripted import Service
from talks import Both, Player, talk_on

import moored
from moored import _boxes
from moored._boxes import BOX_HEADER, MODEL_HEADER, Boxes, headers_of, ids_in, model_in
from moored._generated import (
    events_pb2,
    generation_pb2,
    hub_pb2,
    jobs_pb2,
    model_pb2,
    residency_pb2,
)

JOB = [
    events_pb2.Event(job_id="job-1", accepted=events_pb2.Accepted()),
    events_pb2.Event(
        job_id="job-1", latent=events_pb2.LatentKept(latent=model_pb2.LatentInfo(id="latent-1"))
    ),
    events_pb2.Event(job_id="job-1", done=events_pb2.Done()),
]


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    yield
    _boxes._BOXES.clear()


def of_box(box: str, answer: Any) -> Any:
    """The answer as a proxy passes it on: it says which box gave it."""

    def answered(_: Any, context: grpc.ServicerContext) -> Any:
        context.send_initial_metadata(((BOX_HEADER, box),))
        return iter(answer) if isinstance(answer, list) else answer

    return answered


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("owner/name", "owner/name"),
        ("owner/name+4-bit", "owner/name"),
        (moored.ModelRef("owner/name", quantization="auto", adapters=("ink",)), "owner/name"),
        ("größe of/it", "gr%C3%B6%C3%9Fe%20of/it"),
        ("line\nbreak", "line%0Abreak"),
        ("a" * 3000, "a" * 256),
    ],
)
def test_a_call_says_its_model(ask: Ask, service: Service, model: Any, told: str) -> None:
    service.on("GenerateImage", JOB)
    ask("generate_image", "x", model=model, latent_only=True)
    assert service.metadata[MODEL_HEADER] == told


def test_every_call_about_a_model_says_it(ask: Ask, service: Service) -> None:
    service.on("Load", JOB)
    service.on("Pin", residency_pb2.PinResponse())
    service.on("Hold", residency_pb2.HoldResponse(hold_id="hold-1"))
    service.on("Plan", residency_pb2.PlanResponse())
    service.on("PutMedia", generation_pb2.MediaInfo(id="media-1"))
    service.on("PutLatent", model_pb2.LatentInfo(id="latent-1"))
    for method, arguments, more in (
        ("load", ["m"], {}),
        ("pin", ["m"], {}),
        ("hold", ["m"], {}),
        ("plan", ["x"], {"model": "m"}),
        ("plan_model", ["m"], {}),
        ("put_media", [b"\x89PNG\r\n\x1a\n"], {"model": "m+4-bit"}),
        ("put_latent", [np.zeros((1, 2), "f4")], {"model": "m", "vae_id": "v"}),
    ):
        service.metadata = {}
        ask(method, *arguments, **more)
        assert service.metadata.get(MODEL_HEADER) == "m", method


def test_what_names_no_model_says_none(ask: Ask, service: Service) -> None:
    service.on("GenerateImage", JOB)
    ask("generate_image", "x", latent_only=True)
    assert MODEL_HEADER not in service.metadata
    assert BOX_HEADER not in service.metadata


def test_a_pull_and_a_session_say_their_model() -> None:
    assert model_in(hub_pb2.PullModelRequest(id="owner/name")) == "owner/name"
    opening = generation_pb2.OpenAudioSession(model=model_pb2.ModelRef(id="m+auto"))
    assert model_in(opening) == "m"


def test_what_a_box_has_is_asked_for_there(ask: Ask, service: Service) -> None:
    service.on("GenerateImage", of_box("b", JOB))
    service.on("DecodeLatent", JOB)
    service.on("Fetch", JOB)
    service.on("Cancel", jobs_pb2.CancelJobResponse())
    service.on("ReleaseLatent", generation_pb2.ReleaseLatentResponse())
    ask("generate_image", "x", latent_only=True)
    # Clients of one program share what they know: packs have a client for each call.
    for method, what in (
        ("fetch", "job-1"),
        ("cancel", "job-1"),
        ("decode_latent", "latent-1"),
        ("release_latent", "latent-1"),
    ):
        service.metadata = {}
        with contextlib.suppress(moored.MooredError):  # the job made no picture
            ask(method, what)
        assert service.metadata.get(BOX_HEADER) == "b", method
    assert moored.Client(ask.address).box_of("latent-1") == "b"
    assert moored.Client(ask.address).box_of("latent-2") == ""


def test_media_a_hold_and_a_reservation_are_remembered(ask: Ask, service: Service) -> None:
    service.on("PutMedia", of_box("a", generation_pb2.MediaInfo(id="media-1")))
    service.on("PutLatent", of_box("b", model_pb2.LatentInfo(id="latent-7")))
    service.on("Hold", of_box("c", residency_pb2.HoldResponse(hold_id="hold-1")))
    service.on("Reserve", of_box("d", residency_pb2.ReserveResponse(reservation_id="r-1")))
    service.on("GenerateImage", JOB)
    media = ask("put_media", b"\x89PNG\r\n\x1a\n")
    ask("put_latent", np.zeros((1, 2), "f4"), vae_id="v")
    ask("hold", "m")
    ask("reserve", 1)
    client = moored.Client(ask.address)
    boxes = [client.box_of(each) for each in (media, "latent-7", "hold-1", "r-1")]
    assert boxes == ["a", "b", "c", "d"]
    ask("generate_image", "x", references=[media], latent_only=True)
    assert service.metadata[BOX_HEADER] == "a"


def test_a_proxy_need_not_repeat_the_box(ask: Ask, service: Service) -> None:
    service.on("PutMedia", of_box("a", generation_pb2.MediaInfo(id="media-1")))
    service.on("GenerateImage", JOB)
    media = ask("put_media", b"\x89PNG\r\n\x1a\n")
    ask("generate_image", "x", references=[media], latent_only=True)
    assert moored.Client(ask.address).box_of("job-1") == "a"


def test_a_client_may_name_its_box(
    address: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.on("List", jobs_pb2.ListJobsResponse())
    with moored.Client(address, box="b") as client:
        client.jobs()
    assert service.metadata[BOX_HEADER] == "b"
    monkeypatch.setenv("MOORED_BOX", "c")
    with moored.Client(address) as client:
        client.jobs()
    assert service.metadata[BOX_HEADER] == "c"
    with pytest.raises(moored.InvalidRequest, match="no name of a box"):
        moored.Client(address, box="b\nx")


def test_a_key_is_asked_for_where_its_job_is(ask: Ask, service: Service, tmp_path: Path) -> None:
    service.on("GenerateImage", of_box("b", JOB))
    ask("generate_image", "x", latent_only=True, idempotency_key="key-1")
    ask("generate_image", "x", latent_only=True, idempotency_key="key-1")
    assert service.metadata[BOX_HEADER] == "b"

    # The file of unfinished jobs has the box for the next program.
    lost = events_pb2.Event(job_id="job-9", accepted=events_pb2.Accepted())
    service.on("GenerateImage", of_box("c", [lost]))
    ask.settings["unfinished"] = tmp_path / "unfinished"
    with pytest.raises(moored.MooredError):
        ask("generate_image", "y", latent_only=True, detach=True)
    _boxes._BOXES.clear()
    with pytest.raises(moored.MooredError):
        ask("generate_image", "y", latent_only=True, detach=True)
    assert service.metadata[BOX_HEADER] == "c"


class AtBox(Player):
    """A session at a box behind a proxy."""

    def __call__(self, message: Any) -> Iterator[Any]:
        if message.WhichOneof("message") == "open":
            yield lambda context: context.send_initial_metadata(((BOX_HEADER, "b"),))
        yield from super().__call__(message)


def test_a_session_is_where_its_source_is_and_its_next_source_too(
    both: Both, service: Service
) -> None:
    talk_on(service, AtBox())
    service.on("PutMedia", of_box("b", generation_pb2.MediaInfo(id="media-1")))
    wav = b"RIFF\0\0\0\0WAVEfmt "

    async def use(session: Any, now: Any) -> None:
        opened = dict(service.metadata)
        assert (opened[MODEL_HEADER], opened[BOX_HEADER]) == ("owner/music", "b")
        await now(session.replace_source(wav))
        assert service.metadata[BOX_HEADER] == "b"
        assert moored.Client(both._ask.address).box_of(session.opened.session_id) == "b"

    both(use, "owner/music+8-bit", source=wav)


def test_no_field_of_pixels_is_read_for_ids() -> None:
    chunk = events_pb2.Event(job_id="job-1", artifact=events_pb2.Artifact(chunk=b"x"))
    assert list(ids_in(chunk)) == []
    assert list(ids_in(JOB[0])) == ["job-1"]
    assert list(ids_in(JOB[1])) == ["job-1", "latent-1"]


def test_old_ids_are_forgotten() -> None:
    boxes = Boxes()
    boxes.remember("a", *(f"job-{number}" for number in range(_boxes.KEPT + 1)))
    assert (boxes.of("job-0"), boxes.of("job-1")) == ("", "a")
    assert headers_of(jobs_pb2.FetchJobRequest(job_id="job-2"), boxes) == ((BOX_HEADER, "a"),)
