from __future__ import annotations

from typing import Any

import grpc
import pytest
from conftest import Ask
from scripted import Service, reason, refuse

import moored
from moored._generated import generation_pb2, model_pb2

np = pytest.importorskip("numpy")


class Store:
    """Keeps what PutLatent brings, and gives it back in odd pieces."""

    def __init__(self, service: Service) -> None:
        self.chunks: list[generation_pb2.LatentChunk] = []
        service.on("PutLatent", self.put)
        service.on("GetLatent", self.get)

    def put(self, chunks: list[generation_pb2.LatentChunk], context: Any) -> Any:
        self.chunks = chunks
        self.info = model_pb2.LatentInfo()
        self.info.CopyFrom(chunks[0].info)
        self.info.id = "lat-1"
        return self.info

    def get(self, request: generation_pb2.GetLatentRequest, context: Any) -> Any:
        assert request.latent_id == "lat-1"
        data = b"".join(chunk.chunk for chunk in self.chunks)
        yield generation_pb2.LatentChunk(info=self.info, chunk=data[:7])
        for start in range(7, len(data), 300_001):
            yield generation_pb2.LatentChunk(chunk=data[start : start + 300_001])


def test_a_latent_is_uploaded_and_downloaded_unchanged(service: Service, ask: Ask) -> None:
    store = Store(service)
    # More than one chunk each way, and not in row-major order.
    array = (
        np.random.default_rng(3).normal(size=(1, 16, 200, 100)).astype("f4").transpose(0, 1, 3, 2)
    )
    info = ask("put_latent", array, vae_id="vae-a")
    assert (info.id, info.shape, info.dtype) == ("lat-1", (1, 16, 100, 200), "f32")
    assert info.bytes == array.nbytes
    assert len(store.chunks) > 1
    assert all(len(chunk.chunk) <= 1024 * 1024 for chunk in store.chunks)
    assert not any(chunk.HasField("info") for chunk in store.chunks[1:])
    latent = ask("get_latent", info)
    assert latent.info == info
    assert latent.array.dtype == np.float32
    np.testing.assert_array_equal(latent.array, array)
    again = ask("put_latent", latent)
    assert again.vae_id == "vae-a"


def test_other_numbers_become_f32(service: Service, ask: Ask) -> None:
    Store(service)
    info = ask("put_latent", np.ones((1, 2), dtype="f8"), vae_id="v")
    assert (info.dtype, info.bytes) == ("f32", 8)
    assert ask("get_latent", "lat-1").array.tolist() == [[1.0, 1.0]]


def test_several_tensors_there_and_back(service: Service, ask: Ask) -> None:
    store = Store(service)
    arrays = {
        "video": np.arange(24, dtype="f4").reshape(1, 2, 3, 4),
        "sound": np.arange(400_000, dtype="f4").reshape(1, 400_000) + 100,
    }
    info = ask("put_latent", arrays, vae_id="v")
    sent = store.chunks[0].info
    assert [(one.name, list(one.shape)) for one in sent.tensors] == [
        ("video", [1, 2, 3, 4]),
        ("sound", [1, 400_000]),
    ]
    assert info.shape == (1, 2, 3, 4)
    latent = ask("get_latent", info)
    assert list(latent.arrays) == ["video", "sound"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(latent.arrays[name], array)
    with pytest.raises(ValueError, match="video, sound"):
        _ = latent.array
    again = ask("put_latent", latent)
    assert again.tensors == info.tensors
    # One alone keeps its name.
    alone = ask("put_latent", {"latent": arrays["video"]}, vae_id="v")
    assert alone.tensors == (moored.TensorInfo("latent", (1, 2, 3, 4)),)
    np.testing.assert_array_equal(ask("get_latent", alone).array, arrays["video"])


def test_a_latent_whose_shapes_are_not_its_numbers() -> None:
    info = moored.LatentInfo("l", (3,), "f32", "v", 0, 8)
    with pytest.raises(moored.InternalError, match="2 numbers; its shapes say 3"):
        _ = moored.Latent(info, bytes(8)).array


def test_release(service: Service, ask: Ask) -> None:
    there = {"lat-1"}

    def release(request: Any, context: grpc.ServicerContext) -> Any:
        released = request.latent_id in there
        there.discard(request.latent_id)
        return generation_pb2.ReleaseLatentResponse(released=released)

    service.on("ReleaseLatent", release)
    info = moored.LatentInfo("lat-1", (1, 2), "f32", "v", 0, 8)
    assert ask("release_latent", info) is True
    assert ask("release_latent", "lat-1") is False


def test_half_precision() -> None:
    def latent(dtype: str, data: bytes) -> Any:
        return moored.Latent(moored.LatentInfo("l", (2,), dtype, "v", 0, len(data)), data)

    assert latent("f16", np.array([1, -2], "<f2").tobytes()).array.tolist() == [1, -2]
    assert latent("bf16", b"\x80\x3f\x00\xc0").array.tolist() == [1, -2]
    with pytest.raises(moored.InternalError, match="fp4"):
        _ = latent("fp4", b"").array


def test_an_array_must_say_whose_vae_it_is_of(client: moored.Client) -> None:
    with pytest.raises(ValueError, match="vae_id"):
        client.put_latent(np.zeros((1, 2)))
    with pytest.raises(ValueError, match="one tensor"):
        client.put_latent({}, vae_id="v")


def test_refused_latents_raise_typed_errors(service: Service, ask: Ask) -> None:
    def missing(request: Any, context: grpc.ServicerContext) -> Any:
        refuse(context, grpc.StatusCode.NOT_FOUND, "No such latent.", reason("LATENT_NOT_FOUND"))

    def mismatch(request: Any, context: grpc.ServicerContext) -> Any:
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "No.", reason("LATENT_MISMATCH"))

    service.on("GetLatent", missing)
    service.on("PutLatent", mismatch)
    with pytest.raises(moored.LatentNotFound):
        ask("get_latent", "lat-7")
    with pytest.raises(moored.LatentMismatch):
        ask("put_latent", np.zeros((1, 2)), vae_id="v")
    service.on("GetLatent", [])
    with pytest.raises(moored.InternalError):
        ask("get_latent", "lat-7")
