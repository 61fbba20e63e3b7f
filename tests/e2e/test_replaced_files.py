"""A model whose files are replaced while a job of it waits or runs."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored
import pytest
from faults import assert_at_rest, retries

from service import ROOT, Service

Simulate = Callable[..., Service]

QUICK: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 1}
TRANSFORMER = Path("transformer/diffusion_pytorch_model.safetensors")
VAE = Path("vae/diffusion_pytorch_model.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that may be overwritten, named `mine`."""
    folder = tmp_path / "models" / "mine"
    left_out = shutil.ignore_patterns("expected")
    shutil.copytree(ROOT / "service/pipelines/fixtures/flux-tiny", folder, ignore=left_out)
    return folder


def replace(file: Path) -> None:
    """Puts another file in its place, of the same size: the sign of each of its numbers is another."""
    data = bytearray(file.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    for at in range(begin + 3, len(data), 4):
        data[at] ^= 0x80
    beside = file.with_suffix(".new")
    beside.write_bytes(data)
    os.replace(beside, file)


def generate(client: moored.Client) -> bytes:
    return client.generate_image("a boat", model="mine", **QUICK).images[0].tobytes()


def test_a_job_that_waits_begins_again_with_the_files_that_are_there_now(
    simulate: Simulate, model: Path
) -> None:
    service = simulate(arguments=("--models", str(model.parent)))
    with service.client() as client:
        before = generate(client)
        client.unload()
        with client.stream_image("first", model="slow", steps=200) as first:
            next(event for event in first if isinstance(event, moored.Step))
            with client.stream_image("a boat", model="mine", **QUICK) as stream:
                events = [next(iter(stream))]
                assert isinstance(events[0], moored.Accepted)
                replace(model / TRANSFORMER)
                client.cancel(first.job_id)
                events += stream
            assert [reason for reason, _ in retries(events)] == ["MODEL_CHANGED"]
            after = stream.result().images[0].tobytes()
        assert after != before
        assert after == generate(client)
        assert_at_rest(client)


def test_a_job_goes_on_with_what_is_resident_of_the_model_that_it_began_with(
    simulate: Simulate, model: Path
) -> None:
    service = simulate(arguments=("--models", str(model.parent)))
    with service.client() as client:
        before = generate(client)
        with client.stream_image("first", model="slow", steps=200) as first:
            next(event for event in first if isinstance(event, moored.Step))
            with client.stream_image("a boat", model="mine", **QUICK) as stream:
                events = [next(iter(stream))]
                replace(model / TRANSFORMER)
                client.cancel(first.job_id)
                events += stream
            assert retries(events) == []
            assert stream.result().images[0].tobytes() == before
        assert generate(client) != before, "asked for after the files were replaced"
        assert_at_rest(client)


def test_the_error_of_a_job_that_has_sampled_says_to_submit_it_again(
    simulate: Simulate, model: Path
) -> None:
    service = simulate(arguments=("--models", str(model.parent)))
    with service.client() as client:
        client.load("mine", components=["text_encoder", "text_encoder_2", "transformer"])
        # It goes on for long enough that the file is another before the sampling ends.
        asked = QUICK | {"width": 256, "height": 256, "steps": 200}
        stream, replaced = client.stream_image("a boat", model="mine", **asked), False
        with stream, pytest.raises(moored.ModelChanged, match="submit the request again") as failed:
            for event in stream:
                if isinstance(event, moored.Step) and not replaced:
                    replace(model / VAE)
                    replaced = True
        assert failed.value.latents, "what was sampled is there still"
        assert generate(client)
        assert_at_rest(client)


def test_a_model_whose_files_are_gone_can_be_unpinned_and_unloaded(
    simulate: Simulate, model: Path
) -> None:
    service = simulate(arguments=("--models", str(model.parent)))
    with service.client() as client:
        client.load("mine")
        assert client.pin("mine") == ("mine+full",)
        shutil.rmtree(model)
        with pytest.raises((moored.ModelNotFound, moored.ModelDamaged, moored.ModelUnsupported)):
            generate(client)
        assert client.unpin("mine") == ()
        assert client.unload("mine").freed
        assert client.status().cards[0].residents == ()
        assert_at_rest(client)


def test_an_unload_frees_what_is_in_use_though_its_files_were_replaced(
    simulate: Simulate, model: Path
) -> None:
    service = simulate(arguments=("--models", str(model.parent)))
    with service.client() as client:
        client.load("mine")
        replace(model / TRANSFORMER)
        freed = client.unload("mine").freed
        assert {one.component.name for one in freed} >= {"transformer", "vae"}
        assert client.status().cards[0].residents == ()
        assert_at_rest(client)
