"""Latents in the service: kept, decoded, downloaded, uploaded, refused, and not lost by a fault."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from http2 import DATA, Http2, message
from moored._generated import generation_pb2, model_pb2
from numpy.typing import NDArray
from PIL import Image
from waiting import until, wait_until

from service import INSTANT_MODELS, Service

PROMPT = "a large red circle in the centre on a yellow background"
QUICK: dict[str, Any] = {"width": 64, "height": 64, "steps": 2}
NO_SUCH_LATENT = "latent-that-never-was"
LATENT_OF_SMALL_BYTES = 1024

Simulate = Callable[..., Service]


def wait_for_latents(client: moored.Client, expected: int) -> None:
    """Waits until so many are kept: a status is up to 0.1 s old."""
    until(client, lambda status: status.latents == expected)


def kept(client: moored.Client, **options: Any) -> moored.ImageResult:
    """A picture whose latent stays in the service."""
    return client.generate_image(PROMPT, seed=1, keep_latent=True, **QUICK, **options)


# On the shipped model.


def test_a_kept_latent_decodes_to_its_picture(demo_client: moored.Client) -> None:
    result = kept(demo_client)
    (latent,) = result.latents
    assert latent.shape == (1, 16, 8, 8)
    assert latent.dtype == "f32"
    assert latent.bytes == 16 * 8 * 8 * 4
    assert latent.expires_in_ms > 0
    decoded = demo_client.decode_latent(latent)
    assert np.array_equal(decoded.pictures[0].array, result.pictures[0].array)
    raw = demo_client.decode_latent(latent.id, output="raw")
    assert raw.pictures[0].data == result.image.convert("RGB").tobytes()


def test_every_picture_of_several_has_its_own(demo_client: moored.Client) -> None:
    result = kept(demo_client, count=2)
    assert len({latent.id for latent in result.latents}) == 2
    for latent, picture in zip(result.latents, result.pictures, strict=True):
        decoded = demo_client.decode_latent(latent)
        assert np.array_equal(decoded.pictures[0].array, picture.array)


def test_a_latent_alone_comes_without_a_picture(demo_client: moored.Client) -> None:
    stream = demo_client.stream_image(PROMPT, seed=1, latent_only=True, **QUICK)
    stages = [event.name for event in stream if isinstance(event, moored.StageStarted)]
    result = stream.result()
    assert stages == ["encode_text", "denoise"]
    assert result.pictures == ()
    (latent,) = result.latents
    decoded = demo_client.decode_latent(latent)
    assert np.array_equal(decoded.pictures[0].array, kept(demo_client).pictures[0].array)


def test_a_latent_is_downloaded_and_uploaded_unchanged(demo_client: moored.Client) -> None:
    result = kept(demo_client)
    read = demo_client.get_latent(result.latents[0])
    assert read.info.id == result.latents[0].id
    assert read.array.shape == read.info.shape
    assert np.isfinite(read.array).all()
    brought = demo_client.put_latent(read)
    assert brought.id != read.info.id
    assert (brought.shape, brought.vae_id) == (read.info.shape, read.info.vae_id)
    assert demo_client.get_latent(brought).data == read.data
    from_array = demo_client.put_latent(read.array, vae_id=read.info.vae_id)
    assert demo_client.get_latent(from_array).data == read.data
    decoded = demo_client.decode_latent(brought)
    assert np.array_equal(decoded.pictures[0].array, result.pictures[0].array)


def test_a_latent_of_several_messages_is_uploaded_unchanged(demo_client: moored.Client) -> None:
    vae_id = kept(demo_client).latents[0].vae_id
    # 2.25 MiB: three chunks each way. Never decoded.
    numbers = np.random.default_rng(1).standard_normal((1, 16, 192, 192)).astype("<f4")
    brought = demo_client.put_latent(numbers, vae_id=vae_id)
    assert np.array_equal(demo_client.get_latent(brought).array, numbers)


def test_a_latent_of_many_tensors_is_uploaded_unchanged(demo_client: moored.Client) -> None:
    vae_id = kept(demo_client).latents[0].vae_id
    # As of a long film in sections, each a tensor; more than a picture of 4096 x 4096 has. Never decoded.
    numbers = np.zeros((1, 16, 1, 60, 104), dtype="<f4")
    sections = {f"latent.{number}": numbers + number for number in range(70)}
    brought = demo_client.put_latent(sections, vae_id=vae_id)
    read = demo_client.get_latent(brought)
    assert read.arrays.keys() == sections.keys()
    for name, section in sections.items():
        assert np.array_equal(read.arrays[name], section)


def test_a_latent_has_as_many_bytes_as_the_store_at_the_most(simulate: Simulate) -> None:
    one = LATENT_OF_SMALL_BYTES
    with simulate(arguments=("--set", f"queue.latents={one}B")).client() as client:
        latent = client.generate_image("", model="small", latent_only=True).latents[0]
        numbers = client.get_latent(latent).array
        assert client.put_latent(numbers, vae_id=latent.vae_id).bytes == one
        with pytest.raises(moored.InvalidRequest, match=r"queue\.latents"):
            client.put_latent(np.concatenate([numbers, numbers]), vae_id=latent.vae_id)


def test_a_changed_latent_decodes_to_another_picture(demo_client: moored.Client) -> None:
    result = kept(demo_client)
    read = demo_client.get_latent(result.latents[0])
    mirrored = demo_client.put_latent(read.array[..., ::-1], vae_id=read.info.vae_id)
    decoded = demo_client.decode_latent(mirrored)
    assert not np.array_equal(decoded.pictures[0].array, result.pictures[0].array)


def test_an_encoded_picture_can_be_the_start_of_a_generation(
    demo_client: moored.Client,
) -> None:
    start = Image.new("RGB", (64, 64), (220, 30, 40))
    encoded = demo_client.encode_image(start, seed=3)
    assert encoded.latent.shape == (1, 16, 8, 8)
    assert "encode_image" in encoded.timings
    again = demo_client.encode_image(start, seed=3)
    other = demo_client.encode_image(start, seed=4)
    data = [demo_client.get_latent(one.latent).data for one in (encoded, again, other)]
    assert data[0] == data[1] != data[2]
    stream = demo_client.stream_image(
        PROMPT, seed=1, init_latent=encoded.latent, strength=0.5, **QUICK
    )
    stages = [event.name for event in stream if isinstance(event, moored.StageStarted)]
    assert stages == ["encode_text", "denoise", "decode"]
    from_noise = demo_client.generate_image(PROMPT, seed=1, **QUICK)
    assert stream.result().pictures[0].data != from_noise.pictures[0].data


def test_a_picture_survives_its_encoding(demo_client: moored.Client) -> None:
    start = Image.new("RGB", (64, 64), (220, 30, 40))
    encoded = demo_client.encode_image(start)
    decoded = demo_client.decode_latent(encoded.latent)
    difference = decoded.pictures[0].array.astype(float) - np.asarray(start, dtype=float)
    assert np.abs(difference).mean() < 20


def test_an_encoding_is_scaled_when_asked(demo_client: moored.Client) -> None:
    start = Image.new("RGB", (50, 70), (220, 30, 40))
    with pytest.raises(moored.InvalidRequest, match="50x70") as refused:
        demo_client.encode_image(start)
    assert [violation.field for violation in refused.value.violations] == ["image"]
    scaled = demo_client.encode_image(start, width=96, height=64)
    assert scaled.latent.shape == (1, 16, 8, 12)


# Refused.


def bring_and_decode(client: moored.Client, numbers: NDArray[Any], vae_id: str) -> None:
    """Uploads and decodes a latent. The decode is refused if the latent does not suit the model."""
    client.decode_latent(client.put_latent(numbers, vae_id=vae_id))


@pytest.mark.parametrize("handle", [NO_SUCH_LATENT, ""])
def test_an_unknown_handle_is_not_found(demo_client: moored.Client, handle: str) -> None:
    with pytest.raises(moored.LatentNotFound):
        demo_client.get_latent(handle)
    with pytest.raises(moored.LatentNotFound):
        demo_client.decode_latent(handle)


def test_an_unknown_start_is_not_found(demo_client: moored.Client) -> None:
    with pytest.raises(moored.LatentNotFound, match=NO_SUCH_LATENT):
        demo_client.generate_image(PROMPT, init_latent=NO_SUCH_LATENT, **QUICK)


def test_a_latent_of_another_vae_is_refused(demo_client: moored.Client) -> None:
    numbers = np.zeros((1, 16, 8, 8), dtype="<f4")
    with pytest.raises(moored.LatentMismatch, match="the VAE of somebody else"):
        bring_and_decode(demo_client, numbers, "the VAE of somebody else")


@pytest.mark.parametrize(
    "shape",
    [(1, 4, 8, 8), (16, 8, 8), (2, 16, 8, 8), (1, 16, 0, 8), (), (64,)],
    ids=str,
)
def test_a_latent_of_another_shape_is_refused(
    demo_client: moored.Client, shape: tuple[int, ...]
) -> None:
    vae_id = kept(demo_client).latents[0].vae_id
    numbers = np.zeros(shape, dtype="<f4")
    with pytest.raises((moored.LatentMismatch, moored.InvalidRequest)):
        bring_and_decode(demo_client, numbers, vae_id)
    # The card did not mind.
    assert kept(demo_client).pictures


def test_a_start_latent_of_another_size_is_refused(demo_client: moored.Client) -> None:
    latent = kept(demo_client).latents[0]
    with pytest.raises((moored.LatentMismatch, moored.InvalidRequest)) as refused:
        demo_client.generate_image(
            PROMPT, init_latent=latent, width=128, height=64, steps=2, strength=0.5
        )
    assert "[1, 16, 8, 8]" in refused.value.message
    assert "[1, 16, 8, 16]" in refused.value.message


def put_raw(client: moored.Client, *chunks: generation_pb2.LatentChunk) -> model_pb2.LatentInfo:
    """PutLatent with messages that the client itself would not send."""
    return client._unary(client._stubs.generation.PutLatent, iter(chunks), 30)


def chunk(data: bytes, **info: Any) -> generation_pb2.LatentChunk:
    described = model_pb2.LatentInfo(**info) if info else None
    return generation_pb2.LatentChunk(info=described, chunk=data)


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ([], "info"),
        ([chunk(b"\0" * 4096)], "info"),
        ([chunk(b"\0" * 2048, shape=[1, 16, 8, 8], dtype="f16", vae_id="V")], "info.dtype"),
        ([chunk(b"\0" * 4096, shape=[1, 16, 8, 8], dtype="", vae_id="V")], "info.dtype"),
        ([chunk(b"\0" * 4095, shape=[1, 16, 8, 8], dtype="f32", vae_id="V")], ""),
        ([chunk(b"\0" * 8192, shape=[1, 16, 8, 8], dtype="f32", vae_id="V")], ""),
        ([chunk(b"", shape=[1, 16, 2**31, 2**31], dtype="f32", vae_id="V")], ""),
    ],
    ids=[
        "nothing",
        "no info",
        "another dtype",
        "no dtype",
        "a byte short",
        "twice as long",
        "an absurd shape",
    ],
)
def test_a_latent_that_is_not_what_it_says_is_refused(
    demo_client: moored.Client, sent: list[generation_pb2.LatentChunk], field: str
) -> None:
    vae_id = kept(demo_client).latents[0].vae_id
    for chunk in sent:
        if chunk.info.vae_id:
            chunk.info.vae_id = vae_id
    with pytest.raises((moored.InvalidRequest, moored.LatentMismatch)) as refused:
        put_raw(demo_client, *sent)
    if field:
        assert field in [violation.field for violation in refused.value.violations]


def test_a_latent_without_a_vae_is_refused(demo_client: moored.Client) -> None:
    sent = chunk(b"\0" * 4096, shape=[1, 16, 8, 8], dtype="f32", vae_id="")
    with pytest.raises((moored.InvalidRequest, moored.LatentMismatch)):
        demo_client.decode_latent(put_raw(demo_client, sent).id)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_latent_that_is_not_finite_is_refused(demo_client: moored.Client, number: float) -> None:
    vae_id = kept(demo_client).latents[0].vae_id
    numbers = np.full((1, 16, 8, 8), number, dtype="<f4")
    with pytest.raises((moored.NotFinite, moored.InvalidRequest)):
        bring_and_decode(demo_client, numbers, vae_id)
    assert kept(demo_client).pictures


# On simulated cards.


def test_a_latent_expires_and_use_renews_it(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "queue.latent_ttl=8s"))
    with service.client() as client:
        latent = client.generate_image("", model="small", latent_only=True).latents[0]
        assert latent.expires_in_ms <= 8000
        # Status is no use of a latent: it does not renew it.
        wait_for_latents(client, 1)
        wait_for_latents(client, 0)
        assert client.status().latent_bytes == 0
        with pytest.raises(moored.LatentNotFound, match=latent.id):
            client.get_latent(latent)

        renewed = client.generate_image("", model="small", latent_only=True).latents[0]
        end = time.monotonic() + 12
        while time.monotonic() < end:
            client.get_latent(renewed)
            time.sleep(0.02)
        assert client.decode_latent(renewed, model="small").pictures


def test_a_released_latent_is_gone_once_no_job_needs_it(simulate: Simulate) -> None:
    with simulate().client() as client:
        result = client.generate_image("a red cube", model="small", keep_latent=True)
        (latent,) = result.latents
        assert client.release_latent(latent) is True
        assert client.release_latent(latent.id) is False
        wait_for_latents(client, 0)
        with pytest.raises(moored.LatentNotFound):
            client.get_latent(latent)
        with pytest.raises(moored.LatentNotFound):
            client.decode_latent(latent, model="small")
        # Given up while its own job has the decode still before it, and by a job that is queued.
        with client.stream_image("a dog", model="small", count=2, keep_latent=True) as stream:
            own = next(one.latent for one in stream if isinstance(one, moored.LatentKept))
            assert client.release_latent(own) is True
            assert len(stream.result().pictures) == 2
        (other,) = (one for one in stream.latents if one.id != own.id)
        with client.stream_decode(other, model="small") as stream:
            assert isinstance(next(stream), moored.Accepted)
            client.release_latent(other)
            assert len(stream.result().pictures) == 1
        wait_for_latents(client, 0)
        assert client.release_latent(NO_SUCH_LATENT) is False


def test_only_what_is_asked_for_is_kept(simulate: Simulate) -> None:
    with simulate().client() as client:
        assert client.generate_image("", model="small").latents == ()
        with pytest.raises((moored.InvalidRequest, moored.LatentMismatch)):
            put_raw(client, chunk(b"short", shape=[1, 16, 8, 8], dtype="f32", vae_id="V"))
        # The one that counts comes last: a status that tells of it tells of all before.
        kept_one = client.generate_image("", model="small", keep_latent=True)
        assert len(kept_one.latents) == 1
        wait_for_latents(client, 1)


def test_the_store_is_bounded(simulate: Simulate) -> None:
    one = LATENT_OF_SMALL_BYTES
    service = simulate(arguments=("--set", f"queue.latents={4 * one}B"))
    with service.client() as client:
        latents = [
            client.generate_image("", model="small", seed=seed, latent_only=True).latents[0]
            for seed in range(5)
        ]
        assert {latent.bytes for latent in latents} == {one}
        wait_for_latents(client, 3)  # one client has seven eighths of the store at the most
        assert client.status().latent_bytes == 3 * one
        with pytest.raises(moored.LatentNotFound):
            client.get_latent(latents[0])
        assert client.get_latent(latents[-1]).info.id == latents[-1].id


def test_a_decode_that_kills_two_workers_leaves_its_latent(simulate: Simulate) -> None:
    # Generations of the card's process: two die when they decode, the third lives.
    service = simulate("sim:24GiB,die-at=decode:1,die-generations=2")
    with service.client() as client:
        stream = client.stream_image("a red cube", model="small", seed=4)
        events: list[moored.Event] = []
        with pytest.raises(moored.WorkerDied) as died:
            events.extend(stream)
        (latent,) = died.value.latents
        assert died.value.job_id
        client.wait_until_ready()
        decoded = client.decode_latent(latent, model="small")
        whole = client.generate_image("a red cube", model="small", seed=4)
        assert np.array_equal(decoded.pictures[0].array, whole.pictures[0].array)


def test_a_decode_that_runs_out_of_memory_leaves_its_latent(
    simulate: Simulate, tmp_path: Path
) -> None:
    # `greedy` takes more for its decode than the card has, whatever it says before; `small` has
    # the same VAE and is honest.
    greedy = json.loads((INSTANT_MODELS / "small.instant.json").read_text(encoding="utf-8"))
    greedy["name"] = "greedy"
    greedy["real_scratch"] = {"decode": 2**40}
    models = tmp_path / "models"
    models.mkdir()
    (models / "greedy.instant.json").write_text(json.dumps(greedy), encoding="utf-8")
    service = simulate(arguments=("--models", str(models)))
    with service.client() as client:
        with pytest.raises(moored.OutOfMemory) as failed:
            client.generate_image("a red cube", model="greedy", seed=4)
        (latent,) = failed.value.latents
        assert failed.value.stage == "decode"
        decoded = client.decode_latent(latent, model="small")
        whole = client.generate_image("a red cube", model="small", seed=4)
        assert np.array_equal(decoded.pictures[0].array, whole.pictures[0].array)
        (card,) = client.status().cards
        assert card.memory.scratch == 0
        assert card.worker_restarts == 0


def test_latents_that_are_sent_and_not_read_are_bounded(simulate: Simulate) -> None:
    service = simulate(arguments=("--set", "queue.latents=8MiB"))
    with service.client() as client:
        data = np.zeros((1, 16, 300, 300), np.float32)  # more than half of it
        name = client.put_latent(data, vae_id="a vae").id.encode()
        reader = Http2(service.address, window=1000)
        stream = reader.call("Generation/GetLatent")
        reader.write(stream, message(b"\x0a" + bytes([len(name)]) + name), end=True)
        reader.wait_for(lambda: (DATA, stream) in reader.frames)
        with pytest.raises(moored.ClientLimit, match="being read"):
            client.get_latent(name.decode())
        reader.close()

        def is_read() -> bool:
            try:
                return client.get_latent(name.decode()).info.bytes == data.nbytes
            except moored.ClientLimit:
                return False

        wait_until(is_read, "the latent can be read")
