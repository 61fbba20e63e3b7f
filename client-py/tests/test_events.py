from __future__ import annotations

import dataclasses
import io

import pytest
from conftest import Ask
from scripted import Service, accepted, done, event, resolved, step

import moored
from moored._generated import events_pb2, model_pb2

COMPONENT = model_pb2.Component(id="c1", name="transformer", bytes=11_900_000_000)
MIRRORED = moored.Component("c1", "transformer", 11_900_000_000)
MODEL = moored.ResolvedModel("demo@main", "demo", "main", "flux", {"vae": "full"})
AT = {"job_id": "job-1", "at_ms": 5}

# What the service sends, what the client gives, and how it is put in words.
CASES = [
    (
        event(accepted=events_pb2.Accepted(model=resolved(), joined=True)),
        moored.Accepted(MODEL, True, **AT),
        "Joined",
    ),
    (
        event(accepted=events_pb2.Accepted(model=resolved(choice="8-bit: it fits cuda:0"))),
        moored.Accepted(dataclasses.replace(MODEL, choice="8-bit: it fits cuda:0"), False, **AT),
        "Accepted, 8-bit: it fits cuda:0",
    ),
    (
        event(queued=events_pb2.Queued(position=0)),
        moored.Queued(0, None, **AT),
        "Queued, next",
    ),
    (
        event(queued=events_pb2.Queued(position=2, estimate_ms=12_000)),
        moored.Queued(2, 12_000, **AT),
        "Queued, 2 ahead, about 12 s",
    ),
    (
        event(
            waiting=events_pb2.Waiting(
                needed_bytes=4_200_000_000,
                free_bytes=1_000_000_000,
                holders=[events_pb2.Holder(name="python", pid=4711, bytes=14_000_000_000)],
                patience_left_ms=4000,
                cause="foreign",
                stage="denoise",
            )
        ),
        moored.Waiting(
            4_200_000_000,
            1_000_000_000,
            (moored.Holder("python", 4711, 14_000_000_000),),
            4000,
            "foreign",
            "denoise",
            **AT,
        ),
        "Waiting for 3.0 GiB, python 4711 holds 13.0 GiB, 4.0 s left",
    ),
    (
        event(evicting=events_pb2.Evicting(component=COMPONENT, card="cuda:0")),
        moored.Evicting(MIRRORED, "cuda:0", **AT),
        "Evicting transformer, 11.1 GiB",
    ),
    (
        event(
            loading=events_pb2.Loading(
                component=COMPONENT,
                bytes_done=6_100_000_000,
                bytes_total=11_900_000_000,
                card="cuda:0",
            )
        ),
        moored.Loading(MIRRORED, 6_100_000_000, 11_900_000_000, "cuda:0", **AT),
        "Loading transformer 5.7/11.1 GiB",
    ),
    (
        event(
            retrying=events_pb2.Retrying(
                reason="WORKER_DIED", message="the worker died", stage="decode"
            )
        ),
        moored.Retrying("WORKER_DIED", "the worker died", "decode", **AT),
        "Retrying decode: the worker died",
    ),
    (
        event(
            stage=events_pb2.StageStarted(
                name="decode", index=3, of=3, chunking="strips of 16", card="cpu", item=1
            )
        ),
        moored.StageStarted("decode", 3, 3, "strips of 16", False, "cpu", 1, **AT),
        "Decoding, strips of 16",
    ),
    (
        event(stage=events_pb2.StageStarted(name="encode_text", index=1, of=3, cached=True)),
        moored.StageStarted("encode_text", 1, 3, "", True, "", 0, **AT),
        "Encoding the text, already done",
    ),
    (
        event(step=events_pb2.Step(n=7, of=20, item=1)),
        moored.Step(7, 20, 1, **AT),
        "Step 7/20",
    ),
    (
        event(preview=events_pb2.Preview(jpeg=b"jpeg", step=3, item=1)),
        moored.Preview(b"jpeg", 3, 1, **AT),
        "Preview at step 3",
    ),
    (
        event(
            artifact=events_pb2.Artifact(
                index=1,
                media_type="image/png",
                metadata={"seed": "7"},
                chunk=b"xyz",
                total_bytes=3,
                last=True,
            )
        ),
        moored.Artifact(1, "image/png", {"seed": "7"}, b"xyz", 3, True, **AT),
        "Receiving picture 2",
    ),
    (
        event(
            artifact=events_pb2.Artifact(
                media_type="video/x-raw-rgb",
                total_bytes=192,
                video=events_pb2.VideoFormat(width=8, height=4, frames=2, frames_per_second=23.5),
            )
        ),
        moored.Artifact(
            0,
            "video/x-raw-rgb",
            {},
            b"",
            192,
            False,
            video=moored.VideoFormat(8, 4, 2, 23.5),
            **AT,
        ),
        "Receiving film 1",
    ),
    (
        event(
            artifact=events_pb2.Artifact(
                index=1,
                track="drums",
                audio=events_pb2.AudioTrackFormat(
                    samples_per_second=48_000, channels=2, samples=2**33
                ),
            )
        ),
        moored.Artifact(
            1,
            "",
            {},
            b"",
            0,
            False,
            "drums",
            audio=moored.AudioTrackFormat(48_000, 2, 2**33),
            **AT,
        ),
        "Receiving drums of track 2",
    ),
    (
        event(
            artifact=events_pb2.Artifact(
                media_type="image/x-raw-rgb", image=events_pb2.ImageFormat(width=8, height=4)
            )
        ),
        moored.Artifact(
            0, "image/x-raw-rgb", {}, b"", 0, False, image=moored.ImageFormat(8, 4), **AT
        ),
        "Receiving picture 1",
    ),
    (
        event(
            latent=events_pb2.LatentKept(
                latent=model_pb2.LatentInfo(
                    id="lat-1",
                    shape=[1, 4],
                    dtype="f32",
                    vae_id="vae",
                    expires_in_ms=9,
                    bytes=16,
                ),
                item=1,
            )
        ),
        moored.LatentKept(moored.LatentInfo("lat-1", (1, 4), "f32", "vae", 9, 16), 1, **AT),
        "Latent lat-1 kept",
    ),
    (
        event(
            done=events_pb2.Done(
                seed=2**64 - 1,
                stages=[events_pb2.StageReport(name="denoise", run_ms=5, attention="own kernels")],
                resident_already=["vae"],
                approximations=["tiles of 64"],
                total_ms=3200,
                model=resolved(),
            )
        ),
        moored.Done(
            2**64 - 1,
            (moored.StageReport("denoise", 5, 0, 0, 0, 0, 0, "", False, 0, "", "own kernels"),),
            ("vae",),
            ("tiles of 64",),
            3200,
            MODEL,
            **AT,
        ),
        "Done in 3.2 s, approximated: tiles of 64",
    ),
]


def test_every_event(service: Service, ask: Ask) -> None:
    kinds = {sent.WhichOneof("event") for sent, _, _ in CASES}
    assert len(kinds) == len(events_pb2.Event.DESCRIPTOR.oneofs_by_name["event"].fields)
    service.on("GenerateImage", [sent for sent, _, _ in CASES])
    assert ask.items("stream_image", "x", count=64) == [expected for _, expected, _ in CASES]


@pytest.mark.parametrize(("event", "words"), [(event, words) for _, event, words in CASES])
def test_an_event_in_words(event: moored.Event, words: str) -> None:
    assert moored.describe(event) == words


def test_an_unknown_event_is_passed_over(service: Service, ask: Ask) -> None:
    # Field 99, length-delimited: an event of a newer service. And a known one with a newer field.
    unknown = events_pb2.Event.FromString(event().SerializeToString() + b"\x9a\x06\x02\x08\x01")
    newer = events_pb2.Event.FromString(b"\x8a\x01\x08\x08\x02\x10\x04\x9a\x06\x01x")
    assert unknown.WhichOneof("event") is None
    assert newer.step.n == 2
    service.on("GenerateImage", [accepted(), unknown, newer, done()])
    kinds = [type(event) for event in ask.items("stream_image", "x")]
    assert kinds == [moored.Accepted, moored.Step, moored.Done]


def test_load_and_encode_stream_too(service: Service, ask: Ask) -> None:
    for method in ("EncodeImage", "DecodeLatent", "Load"):
        service.on(method, [accepted(), done()])
    assert len(ask.items("stream_load", "demo")) == 2
    assert len(ask.items("stream_encode", b"png")) == 2
    assert len(ask.items("stream_decode", "lat-1")) == 2


def test_events_can_be_matched(service: Service, client: moored.Client) -> None:
    service.on("GenerateImage", [accepted(), step(1), step(2), done()])
    steps = []
    for event_ in client.stream_image("x"):
        match event_:
            case moored.Step(n, of):
                steps.append((n, of))
    assert steps == [(1, 4), (2, 4)]


def test_a_preview_is_a_picture() -> None:
    image = pytest.importorskip("PIL.Image")
    encoded = io.BytesIO()
    image.new("RGB", (8, 4)).save(encoded, "JPEG")
    assert moored.Preview(encoded.getvalue(), 1, 0).image.size == (8, 4)
