from __future__ import annotations

import asyncio
import inspect

import pytest
from conftest import Ask
from google.protobuf.duration_pb2 import Duration
from scripted import Service, accepted, done, resolved

import moored
from moored._generated import (
    errors_pb2,
    events_pb2,
    generation_pb2,
    jobs_pb2,
    model_pb2,
    residency_pb2,
    server_pb2,
)

COMPONENT = model_pb2.Component(id="c1", name="vae", bytes=100)
MIRRORED = moored.Component("c1", "vae", 100)
FREED = model_pb2.FreedComponent(component=COMPONENT, card="cpu", booked_bytes=100, freed_bytes=99)


def test_models(service: Service, ask: Ask) -> None:
    model = residency_pb2.ModelInfo(
        id="demo",
        family="flux",
        components=[COMPONENT],
        defaults=residency_pb2.ModelDefaults(steps=4, guidance=3.5, width=64, height=32),
        is_default=True,
        media="image",
        resident=["vae"],
        quantization={"vae": "full"},
        choices=[residency_pb2.QuantizationChoice(preset="4-bit", bytes=30)],
    )
    service.on("ListModels", residency_pb2.ListModelsResponse(models=[model]))
    (seen,) = ask("list_models")
    assert (seen.id, seen.components, seen.resident) == ("demo", (MIRRORED,), ("vae",))
    assert seen.defaults == moored.ModelDefaults(4, 3.5, 0, 64, 32)
    assert (seen.is_default, seen.pinned, seen.problem) == (True, False, "")
    assert seen.media == "image"
    assert (seen.quantization, seen.choices) == (
        {"vae": "full"},
        (moored.QuantizationChoice("4-bit", 30),),
    )


def test_what_models_generate(service: Service, ask: Ask) -> None:
    models = [
        residency_pb2.ModelInfo(
            media="video",
            defaults=residency_pb2.ModelDefaults(
                width=64, height=32, frames=25, frames_per_second=23.5
            ),
        ),
        residency_pb2.ModelInfo(
            media="audio", defaults=residency_pb2.ModelDefaults(steps=8, seconds=2.5)
        ),
    ]
    service.on("ListModels", residency_pb2.ListModelsResponse(models=models))
    video, audio = ask("list_models")
    assert (video.media, audio.media) == ("video", "audio")
    assert video.defaults == moored.ModelDefaults(0, 0, 0, 64, 32, 25, 23.5)
    assert audio.defaults == moored.ModelDefaults(8, 0, 0, 0, 0, seconds=2.5)


@pytest.mark.parametrize(
    ("picture", "named", "own", "size"),
    [
        ((4000, 3000), (0, 0), (640, 640), (736, 560)),
        ((3000, 4000), (0, 0), (640, 640), (560, 736)),
        ((30, 20), (0, 0), (64, 64), (80, 48)),
        ((4000, 3000), (640, 0), (640, 640), (640, 480)),
        ((4000, 3000), (0, 48), (640, 640), (64, 48)),
        ((4000, 3000), (16, 16), (640, 640), (16, 16)),
        ((90, 100), (0, 0), (0, 0), (96, 96)),
        ((4000, 10), (0, 0), (640, 640), (4096, 32)),
        ((1, 3000), (0, 0), (64, 64), (16, 3504)),
    ],
)
def test_a_film_has_the_shape_of_its_picture(
    picture: tuple[int, int], named: tuple[int, int], own: tuple[int, int], size: tuple[int, int]
) -> None:
    assert moored.ModelDefaults(1, 1.0, 1, *own).film_size(picture, *named) == size


def test_a_model_in_other_formats_may_be_loaded_replaced_and_unloaded(
    service: Service, ask: Ask
) -> None:
    service.on("Load", [accepted(), done()])
    service.on("Unload", residency_pb2.UnloadResponse())
    small = moored.ModelRef("demo", quantization="4-bit", formats={"text_encoder_2": "int8"})
    asked = model_pb2.Quantization(preset="4-bit", components={"text_encoder_2": "int8"})
    ask("load", small, replace="demo")
    request = service.requests["Load"]
    assert (request.model.id, request.model.quantization) == ("demo", asked)
    assert not request.replace.HasField("quantization")
    ask("unload", small)
    assert service.requests["Unload"].model.quantization == asked


def test_load(service: Service, ask: Ask) -> None:
    service.on("Load", [accepted(), done()])
    result = ask("load", "demo", components=["vae"], card="cuda:0")
    assert result.model.family == "flux"
    request = service.requests["Load"]
    assert (list(request.components), request.options.card) == (["vae"], "cuda:0")
    with pytest.raises(moored.InvalidRequest):
        ask("load", "demo", components="vae")


def test_a_load_may_replace_and_prove(service: Service, ask: Ask) -> None:
    kept = model_pb2.KeptComponent(component=COMPONENT, card="cpu", reason="shared with b")
    service.on("Load", [accepted(), done(freed=[FREED], kept=[kept])])
    result = ask("load", "new", replace=moored.ModelRef("old", revision="r"))
    request = service.requests["Load"]
    assert (request.replace.id, request.replace.revision, request.prove) == ("old", "r", False)
    assert result.freed == (moored.FreedComponent(MIRRORED, "cpu", 100, 99),)
    assert result.done.kept == (moored.KeptComponent(MIRRORED, "cpu", "shared with b"),)
    ask("load", "new", prove=True)
    request = service.requests["Load"]
    assert request.prove
    assert not request.HasField("replace")
    assert len(ask.items("stream_load", "new", replace="old")) == 2
    assert service.requests["Load"].replace.id == "old"


def test_every_field_of_a_load_has_an_argument() -> None:
    arguments = set(inspect.signature(moored.Client.load).parameters) - {"self", "timeout"}
    arguments -= set(moored.JobOptions.__annotations__)
    assert arguments == set(residency_pb2.LoadRequest.DESCRIPTOR.fields_by_name) - {"options"}


def test_unload(service: Service, ask: Ask) -> None:
    kept = model_pb2.KeptComponent(component=COMPONENT, card="cpu", reason="pinned")
    response = residency_pb2.UnloadResponse(freed=[FREED], kept=[kept], cancelled_jobs=["j"])
    service.on("Unload", response)
    unloaded = ask("unload", "demo", force=True)
    assert unloaded.freed == (moored.FreedComponent(MIRRORED, "cpu", 100, 99),)
    assert unloaded.kept == (moored.KeptComponent(MIRRORED, "cpu", "pinned"),)
    assert (unloaded.cancelled_jobs, unloaded.freed_bytes) == (("j",), 99)
    assert service.requests["Unload"].force
    ask("unload")
    assert not service.requests["Unload"].HasField("model")


def test_pins(service: Service, ask: Ask) -> None:
    service.on("Pin", residency_pb2.PinResponse(pinned=["demo@main"]))
    assert ask("pin", "demo") == ("demo@main",)
    assert not service.requests["Pin"].unpin
    assert ask("unpin", "demo") == ("demo@main",)
    assert service.requests["Pin"].unpin


def test_a_hold(service: Service, ask: Ask, client: moored.Client, address: str) -> None:
    granted = residency_pb2.HoldResponse(hold_id="h1", ttl=Duration(seconds=90))
    service.on("Hold", granted)
    service.on("ReleaseHold", residency_pb2.ReleaseHoldResponse(released=True))
    ask.settings["client_id"] = "me"
    hold = ask("hold", "demo", ttl_s=1.5)
    assert (hold.id, hold.ttl_s, hold.released) == ("h1", 90.0, None)
    request = service.requests["Hold"]
    assert (request.client_id, request.ttl.seconds, request.ttl.nanos) == ("me", 1, 500_000_000)
    with client.hold("demo") as hold:
        assert not service.requests["Hold"].HasField("ttl")
    assert hold.released
    assert hold.release() is True
    assert service.requests.pop("ReleaseHold").hold_id == "h1"

    async def main() -> None:
        async with moored.AsyncClient(address) as other, await other.hold("demo"):
            assert "ReleaseHold" not in service.requests
        assert "ReleaseHold" in service.requests

    asyncio.run(main())


def test_a_reservation(service: Service, ask: Ask, client: moored.Client, address: str) -> None:
    made = residency_pb2.ReserveResponse(
        reservation_id="r1", bytes=500, evicted=[FREED], card="cuda:0"
    )
    service.on("Reserve", made)
    service.on("ReleaseReservation", residency_pb2.ReleaseReservationResponse(released=False))
    reserved = ask("reserve", 500, ttl_s=10, label="training", card="cuda:0")
    assert (reserved.id, reserved.bytes, reserved.card) == ("r1", 500, "cuda:0")
    assert reserved.evicted[0].freed_bytes == 99
    request = service.requests["Reserve"]
    assert (request.bytes, request.ttl.seconds, request.label) == (500, 10, "training")
    with client.reserve(500) as reserved:
        assert reserved.released is None
    assert reserved.release() is False
    assert service.requests.pop("ReleaseReservation").reservation_id == "r1"

    async def main() -> None:
        async with moored.AsyncClient(address) as other, await other.reserve(1) as mine:
            assert mine.bytes == 500
        assert mine.released is False

    asyncio.run(main())
    with pytest.raises(moored.InvalidRequest):
        ask("reserve", -1)


def test_a_reservation_is_renewed_by_its_id(service: Service, ask: Ask) -> None:
    service.on("Reserve", residency_pb2.ReserveResponse(reservation_id="r1", bytes=700))
    assert ask("renew_reservation", "r1", 700, ttl_s=10) == 700
    request = service.requests["Reserve"]
    assert (request.reservation_id, request.bytes, request.ttl.seconds) == ("r1", 700, 10)


def test_a_worker_is_recycled(service: Service, ask: Ask) -> None:
    ask.settings["client_id"] = "me"
    service.on("Recycle", residency_pb2.RecycleResponse(cards=["cuda:0"]))
    assert ask("recycle", "cuda:0", force=True) == ["cuda:0"]
    assert service.requests["Recycle"] == residency_pb2.RecycleRequest(
        card="cuda:0", force=True, client_id="me"
    )


def test_a_plan(service: Service, ask: Ask) -> None:
    stages = [
        residency_pb2.PlannedStage(name="decode", components=[COMPONENT], verdict="run"),
        residency_pb2.PlannedStage(
            name="denoise",
            verdict="never",
            moves=["evict vae (100)"],
            shortfall=errors_pb2.MemoryShortfall(needed_bytes=5),
        ),
    ]
    planned = residency_pb2.PlanResponse(
        model=resolved(), card="cpu", stages=stages, predicted_move_seconds=0.5
    )
    service.on("Plan", planned)
    plan = ask("plan", "x", width=64, card="cpu")
    assert (plan.card, plan.runs_now, plan.predicted_move_seconds) == ("cpu", False, 0.5)
    run, never = plan.stages
    assert (run.verdict, run.shortfall, run.components) == ("run", None, (MIRRORED,))
    assert never.shortfall is not None
    assert (never.shortfall.needed_bytes, never.moves) == (5, ("evict vae (100)",))
    request = service.requests["Plan"]
    assert (request.generate.width, request.card) == (64, "cpu")
    assert ask("plan_video", "x", frames=9, card="cpu") == plan
    request = service.requests["Plan"]
    assert (request.WhichOneof("request"), request.video.frames) == ("video", 9)
    assert (request.card, request.video.options.card) == ("cpu", "cpu")
    assert ask("plan_audio", "x", seconds=2.5, card="cpu") == plan
    request = service.requests["Plan"]
    assert (request.WhichOneof("request"), request.audio.seconds) == ("audio", 2.5)
    assert (request.card, request.audio.options.card) == ("cpu", "cpu")
    assert ask("plan_model", moored.ModelRef("me/film", quantization="auto"), card="cpu") == plan
    request = service.requests["Plan"]
    assert (request.WhichOneof("request"), request.model.id) == ("model", "me/film")
    assert (request.model.quantization.preset, request.card) == ("auto", "cpu")


def status(uptime_ms: int = 9) -> residency_pb2.Status:
    memory = events_pb2.MemoryAccounts(total=10, components=4, free=6, usable=5)
    resident = residency_pb2.ResidentComponent(
        component=COMPONENT, state="resident", pinned=True, entries=["demo"]
    )
    card = residency_pb2.CardStatus(
        id="cuda:0",
        state="ready",
        memory=memory,
        residents=[resident],
        policy="shared",
        attention="cudnn 9.19.0",
    )
    job = residency_pb2.JobInfo(id="j", priority=generation_pb2.HIGH, state="queued")
    return residency_pb2.Status(cards=[card], jobs=[job], uptime_ms=uptime_ms)


def test_status(service: Service, ask: Ask) -> None:
    service.on("GetStatus", status())
    seen = ask("status")
    assert seen.cards[0].memory.usable == 5
    assert seen.cards[0].attention == "cudnn 9.19.0"
    assert seen.cards[0].residents[0].component == MIRRORED
    assert seen.cards[0].residents[0].entries == ("demo",)
    assert (seen.jobs[0].priority, seen.uptime_ms) == ("high", 9)


def test_watch_status(service: Service, ask: Ask) -> None:
    service.on("WatchStatus", [status(1), status(2)])
    assert [one.uptime_ms for one in ask.items("watch_status", interval_s=0.5)] == [1, 2]
    assert service.requests["WatchStatus"].interval_ms == 500


def test_trim_jobs_cancel(service: Service, ask: Ask) -> None:
    ask.settings["client_id"] = "me"
    service.on("Trim", residency_pb2.TrimResponse(freed_bytes=77))
    service.on("List", jobs_pb2.ListJobsResponse(jobs=[residency_pb2.JobInfo(id="j")]))
    service.on("Cancel", jobs_pb2.CancelJobResponse(cancelled=True))
    assert ask("trim", "cuda:0") == 77
    assert service.requests["Trim"].card == "cuda:0"
    assert [job.id for job in ask("jobs", include_ended=True)] == ["j"]
    assert service.requests["List"].include_ended
    assert ask("cancel", "j") is True
    assert service.requests["Cancel"] == jobs_pb2.CancelJobRequest(job_id="j", client_id="me")
    assert ask("cancel", "j", release_latents=True) is True
    assert service.requests["Cancel"].release_latents


def test_server_info(service: Service, ask: Ask) -> None:
    card = server_pb2.CardInfo(id="cpu", name="CPU", kind="cpu", total_bytes=5)
    info = server_pb2.ServerInfo(version="0.1.0", cards=[card], families=["flux"])
    service.on("GetServerInfo", info)
    seen = ask("server_info")
    assert (seen.version, seen.families) == ("0.1.0", ("flux",))
    assert seen.cards[0].total_bytes == 5
