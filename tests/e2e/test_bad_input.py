"""Wrong, broken and hostile input: a typed error that names what is wrong, and the service goes on.

After every case a valid request works, no worker has died, and the memory accounts are as before.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import moored
import pytest
from moored._errors import error_of
from moored._generated import events_pb2, generation_pb2, model_pb2, residency_pb2
from PIL import Image
from waiting import until

from service import ROOT, Service, clean_environment

TINY = ROOT / "service/pipelines/fixtures/flux-tiny"
GOOD = "good"
QUICK: dict[str, Any] = {"width": 32, "height": 32, "steps": 1, "max_sequence_length": 16}
MESSAGE_LIMIT_BYTES = 64 * 2**20
# On the CPU, the worker's own memory (tokenizers of opened models) may count as scratch to some
# degree; test_at_rest_no_scratch_is_booked is strict. No case may leave a stage's worth.
TOLERANCE_BYTES = 2**24

Breaker = Callable[[Path], None]


def copy_tiny(folder: Path) -> Path:
    """Copies the tiny random pipeline, to be damaged by a test."""
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("expected"))
    return folder


# The service under test: one for all cases, so that what a case leaves behind meets the next.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    copy_tiny(folder / GOOD)
    for name, (breaker, *_) in BROKEN.items():
        breaker(copy_tiny(folder / name))
    (folder / "empty-folder").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes/README.md").write_text("No model.", encoding="utf-8")
    (folder / "lone-garbage.safetensors").write_bytes(random.Random(1).randbytes(5000))
    (folder / "lone-empty.safetensors").write_bytes(b"")
    (folder / "bad.instant.json").write_text('{"name": "bad", ', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def service(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(
        "--models",
        str(models),
        "--set",
        f"models.default={GOOD}",
        state=tmp_path_factory.mktemp("state"),
    )
    yield service
    assert service.stop() == 0


def at_rest(client: moored.Client) -> moored.Status:
    """The status once no job is left and every card is ready."""
    return until(
        client,
        lambda status: not status.jobs and all(card.state == "ready" for card in status.cards),
    )


def wait_for_no_scratch(client: moored.Client) -> None:
    """Waits until ended jobs have released theirs, by the accounts."""
    until(client, lambda status: not status.jobs and not status.cards[0].memory.scratch)


@pytest.fixture(scope="module")
def rest(service: Service) -> moored.Status:
    """The status after one valid request."""
    with service.client() as client:
        client.generate_image("a good request", **QUICK)
        client.encode_image(Image.new("RGB", (32, 32)))
        deadline = time.monotonic() + 0.5  # a status is published within a tenth
        while time.monotonic() < deadline:
            at_rest(client)
        return at_rest(client)


@pytest.fixture
def client(service: Service, rest: moored.Status) -> Iterator[moored.Client]:
    """A client; after the test the service has to be in the state of before."""
    with service.client() as client:
        yield client
    # Anew: a connection may have been the victim.
    with service.client() as other:
        result = other.generate_image("a good request", seed=1, **QUICK)
        assert result.image.size == (32, 32)
        status = at_rest(other)
        assert status.jobs == ()
        (card,), (card_before,) = status.cards, rest.cards
        assert (card.state, card.worker_restarts) == ("ready", 0)
        assert card.memory.scratch <= card_before.memory.scratch + TOLERANCE_BYTES
        assert card.reservations == ()
        assert not any(resident.leases for resident in card.residents)
    assert service.process.poll() is None


def test_at_rest_no_scratch_is_booked(service: Service, rest: moored.Status) -> None:
    with service.client() as client:
        client.unload()
        wait_for_no_scratch(client)


# Requests.


def send(client: moored.Client, **fields: Any) -> list[events_pb2.Event]:
    """Calls GenerateImage without the checks and conversions of the client."""
    request = generation_pb2.GenerateImageRequest(**({"prompt": "x"} | QUICK | fields))
    try:
        return list(client._stubs.generation.GenerateImage(request, timeout=60))
    except grpc.RpcError as error:
        raise error_of(error, client.endpoint) from error


def fields_of(error: moored.MooredError) -> list[str]:
    return [violation.field for violation in error.violations]


NAN = float("nan")
INFINITY = float("inf")

WRONG_FIELDS: list[tuple[dict[str, Any], set[str]]] = [
    ({"width": 17}, {"width"}),
    ({"height": 8}, {"height"}),
    ({"width": 130, "height": 130}, {"width", "height"}),
    ({"width": 2**32 - 1}, {"width"}),
    ({"width": 2**32 - 16, "height": 2**32 - 16}, {"width", "height"}),
    ({"height": 1 << 20}, {"height"}),
    ({"steps": 201}, {"steps"}),
    ({"steps": 2**32 - 1}, {"steps"}),
    ({"guidance": NAN}, {"guidance"}),
    ({"guidance": INFINITY}, {"guidance"}),
    ({"guidance": -1.0}, {"guidance"}),
    ({"max_sequence_length": 513}, {"max_sequence_length"}),
    ({"max_sequence_length": 2**32 - 1}, {"max_sequence_length"}),
    ({"count": 65}, {"count"}),
    ({"count": 1000}, {"count"}),
    ({"strength": NAN}, {"strength"}),
    ({"strength": 0.0}, {"strength"}),
    ({"strength": -0.5}, {"strength"}),
    ({"strength": 1.5}, {"strength"}),
    ({"strength": INFINITY}, {"strength"}),
    ({"preview_interval_ms": 1}, {"preview_interval_ms"}),
    ({"prompt": "x" * 100_000}, {"prompt"}),
    ({"prompt": "🟥" * 100_000}, {"prompt"}),
    ({"init_image": b"x", "init_latent_id": "y"}, {"init_latent"}),
    ({"init_image": b"x", "init_media_id": "y"}, {"init_media"}),
    ({"init_media_id": "x" * 300}, {"init_media"}),
    (
        {"model": {"id": GOOD, "quantization": {"preset": "5-bit"}}},
        {"model.quantization.preset"},
    ),
    (
        {"model": {"id": GOOD, "quantization": {"components": {"vae": "int7"}}}},
        {"model.quantization.components"},
    ),
    (
        {"width": 17, "count": 1000, "strength": NAN, "prompt": "x" * 100_000},
        {"width", "count", "strength", "prompt"},
    ),
]


@pytest.mark.parametrize(
    ("wrong", "fields"),
    WRONG_FIELDS,
    ids=lambda value: f"{(sorted(value) if isinstance(value, set) else value)!r:.50}",
)
def test_a_wrong_field_is_named(
    client: moored.Client, wrong: dict[str, Any], fields: set[str]
) -> None:
    with pytest.raises(moored.InvalidRequest) as refused:
        send(client, **wrong)
    assert refused.value.reason == "INVALID_REQUEST"
    assert set(fields_of(refused.value)) == fields
    # A sentence for people, not an echo of what was sent.
    assert 0 < len(refused.value.message) < 1000


def test_a_size_left_open_is_the_models_default(client: moored.Client) -> None:
    (model,) = (model for model in client.list_models() if model.id == GOOD)
    plan = client.plan("x")
    own = client.plan("x", width=model.defaults.width, height=model.defaults.height)
    scratch = [[stage.scratch_bytes for stage in one.stages] for one in (plan, own)]
    assert scratch[0] == scratch[1]


@pytest.mark.parametrize(
    "options",
    [
        {"width": -16},
        {"steps": -1},
        {"count": -1},
        {"seed": -1},
        {"seed": 2**64},
        {"width": 2**32},
        {"priority": "urgent"},
        {"output": "bmp"},
    ],
    ids=str,
)
def test_the_client_refuses_values_that_no_message_can_hold(
    client: moored.Client, options: dict[str, Any]
) -> None:
    with pytest.raises(moored.InvalidRequest):
        client.generate_image("x", **(QUICK | options))


@pytest.mark.parametrize(
    "prompt",
    ["", " ", "\0", "\n\t" * 50, "🟥" * 2000, "\u202ecircle", "x" * 10_000],
    ids=["empty", "blank", "nul", "control", "emoji", "right to left", "longest"],
)
def test_unusual_prompts_are_generated(client: moored.Client, prompt: str) -> None:
    result = client.generate_image(prompt, **QUICK)
    assert json.loads(result.image.info["moored"])["prompt"] == prompt


@pytest.mark.parametrize(
    "job",
    [
        {"patience_ms": 2**64 - 1},
        {"priority": 77},
        {"card": "no such card"},
        {"client_id": "x" * 100_000},
        {"idempotency_key": "\0" * 1000},
    ],
    ids=lambda job: next(iter(job)),
)
def test_unusual_job_options_are_accepted_or_refused(
    client: moored.Client, job: dict[str, Any]
) -> None:
    with suppress(moored.InvalidRequest):
        assert send(client, options=job)


@pytest.mark.parametrize(
    "name",
    [
        "no/such-model",
        "../../etc/passwd",
        "/etc",
        ".",
        "good/",
        "empty-folder",
        "notes",
        "x" * 9999,
    ],
    ids=lambda name: f"{name:.20}",
)
def test_an_unknown_model_is_named(client: moored.Client, name: str) -> None:
    with pytest.raises(moored.ModelNotFound) as refused:
        client.generate_image("x", model=name, **QUICK)
    assert name[:100] in refused.value.message


@pytest.mark.parametrize(
    "name", ["", "a/b", "../../etc/passwd", "/etc/passwd", "x" * 9999, "\0", "&"]
)
def test_an_adapter_that_is_not_there_is_refused(client: moored.Client, name: str) -> None:
    for strength in (None, 0.0, NAN, 1e38):
        with pytest.raises(moored.InvalidRequest) as refused:
            client.generate_image("x", model=GOOD, adapters=[(name, strength)], **QUICK)
        (violation,) = refused.value.violations
        assert violation.field == "model.adapters[0].id"


def test_claims_out_of_bounds_are_refused(client: moored.Client) -> None:
    for ttl_s in (-5.0, 0.0, 1e15):
        with pytest.raises(moored.InvalidRequest, match="ttl"):
            client.hold(GOOD, ttl_s=ttl_s, client_id="x")
        with pytest.raises(moored.InvalidRequest, match="ttl"):
            client.reserve(1, ttl_s=ttl_s)
    with pytest.raises((moored.InvalidRequest, moored.MemoryShortage)):
        client.reserve(2**64 - 1)
    with pytest.raises(moored.InvalidRequest, match="nonsense"):
        client.load(GOOD, components=["nonsense"])
    with pytest.raises(moored.JobNotFound, match="no-such-job"):
        client.cancel("no-such-job")


def test_formats_without_a_model_unload_nothing(client: moored.Client) -> None:
    client.load(GOOD)
    before = client.status().cards[0].residents
    for nameless in (
        moored.ModelRef("", quantization="4-bit"),
        moored.ModelRef("", revision="main"),
    ):
        with pytest.raises(moored.InvalidRequest, match="model.id"):
            client.unload(nameless)
    after = client.status().cards[0].residents
    assert [one.component.id for one in after] == [one.component.id for one in before]


# Pictures.


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG whose header has this size, with these chunks after it."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + b"".join(chunks)


def zeros(size: int) -> bytes:
    """So many zeros, deflated to a thousandth."""
    deflate = zlib.compressobj(9)
    pieces = [deflate.compress(bytes(2**20)) for _ in range(size >> 20)]
    return b"".join(pieces) + deflate.flush()


def whole_png() -> bytes:
    file = io.BytesIO()
    pixels = random.Random(1).randbytes(64 * 64 * 3)
    Image.frombytes("RGB", (64, 64), pixels).save(file, format="PNG")
    return file.getvalue()


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


END = png_chunk(b"IEND", b"")
PICTURES: dict[str, Callable[[], bytes]] = {
    "text": lambda: b"This is a text file.\n" * 100,
    "garbage": lambda: random.Random(2).randbytes(10_000),
    "truncated png": lambda: whole_png()[:2000],
    "png header alone": lambda: whole_png()[:33],
    "png signature alone": lambda: whole_png()[:8],
    "damaged png": lambda: flipped(whole_png()),
    "40,000 pixels": lambda: png(40_000, 40_000, png_chunk(b"IDAT", zeros(2**20)), END),
    "2^31 pixels": lambda: png(2**31 - 1, 2**31 - 1, END),
    "no pixels": lambda: png(0, 0, END),
    "no width": lambda: png(0, 64, png_chunk(b"IDAT", zeros(2**20)), END),
    # 8192 x 8192 of 16-bit RGBA: 512 MiB from half a megabyte.
    "bomb": lambda: png(
        8192, 8192, png_chunk(b"IDAT", zeros(513 * 2**20)), END, depth=16, colour=6
    ),
    "text bomb": lambda: png(64, 64, png_chunk(b"zTXt", b"Comment\0\0" + zeros(400 * 2**20)), END),
    "truncated jpeg": lambda: b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01",
    "truncated webp": lambda: b"RIFF\xff\xff\xff\x7fWEBPVP8L\xff\xff\xff\x7f/\xff\xff\xff\xff",
    "gif": lambda: b"GIF89a\x01\x00\x01\x00\x00\x00\x00;",
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>',
}


@pytest.mark.parametrize("name", PICTURES)
def test_an_unreadable_init_image_is_refused(client: moored.Client, name: str) -> None:
    data = PICTURES[name]()
    with pytest.raises(moored.InvalidRequest) as refused:
        client.generate_image("x", init_image=data, **QUICK)
    assert fields_of(refused.value) == ["init_image"]
    with pytest.raises(moored.InvalidRequest) as refused:
        client.encode_image(data, width=32, height=32)
    assert fields_of(refused.value) == ["image"]


def test_encoding_an_empty_picture_is_refused(client: moored.Client) -> None:
    with pytest.raises(moored.InvalidRequest) as refused:
        client.encode_image(b"", width=32, height=32)
    assert fields_of(refused.value) == ["image"]


def test_decompression_bombs_take_no_memory(service: Service, client: moored.Client) -> None:
    """Of the supervisor, which decodes them; the peak since it started."""
    for name in ("bomb", "text bomb", "40,000 pixels"):
        with pytest.raises(moored.InvalidRequest):
            client.encode_image(PICTURES[name]())
    status = Path(f"/proc/{service.process.pid}/status").read_text(encoding="utf-8")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) * 1024 < 400 * 2**20, peak


def test_a_message_over_the_limit_is_refused(client: moored.Client) -> None:
    assert client.server_info().max_message_bytes == MESSAGE_LIMIT_BYTES
    with pytest.raises(moored.InvalidRequest) as refused:
        client.generate_image("x", init_image=bytes(MESSAGE_LIMIT_BYTES + 2**20), **QUICK)
    assert "large" in refused.value.message or "limit" in refused.value.message


# Models.


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits the header of a safetensors file, and leaves its tensors unchanged."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])


def largest(header: dict[str, Any]) -> str:
    """The name of the largest tensor."""
    names = [name for name in header if name != "__metadata__"]
    return max(names, key=lambda name: header[name]["data_offsets"][1])


def edit(path: str, change: Callable[[dict[str, Any]], None]) -> Breaker:
    """A breaker that edits a header."""
    return lambda folder: rewrite_header(folder / path, change)


def shift_offsets(header: dict[str, Any]) -> None:
    for name, tensor in header.items():
        if name != "__metadata__":
            tensor["data_offsets"] = [offset + 2**40 for offset in tensor["data_offsets"]]


def absurd_shape(header: dict[str, Any]) -> None:
    header[largest(header)]["shape"] = [2**62, 2**62]


def turned_shape(header: dict[str, Any]) -> None:
    tensor = next(
        tensor
        for name, tensor in header.items()
        if name != "__metadata__"
        and len(tensor["shape"]) == 2
        and tensor["shape"][0] != tensor["shape"][1]
    )
    tensor["shape"].reverse()


def backward_offsets(header: dict[str, Any]) -> None:
    header[largest(header)]["data_offsets"].reverse()


def strange_dtype(header: dict[str, Any]) -> None:
    header[largest(header)]["dtype"] = "F1"


def rename(name: str) -> Callable[[dict[str, Any]], None]:
    """Renames a tensor, so that one is missing and one is unknown."""

    def change(header: dict[str, Any]) -> None:
        header["nobody_asks_for.this"] = header.pop(name)

    return change


def cut(path: str, part: float) -> Breaker:
    def breaker(folder: Path) -> None:
        size = (folder / path).stat().st_size
        os.truncate(folder / path, int(size * part))

    return breaker


def write(path: str, data: bytes) -> Breaker:
    def breaker(folder: Path) -> None:
        (folder / path).write_bytes(data)

    return breaker


def remove(path: str) -> Breaker:
    def breaker(folder: Path) -> None:
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return breaker


def configure(path: str, **values: Any) -> Breaker:
    def breaker(folder: Path) -> None:
        config = json.loads((folder / path).read_text(encoding="utf-8"))
        (folder / path).write_text(json.dumps(config | values), encoding="utf-8")

    return breaker


TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
CLIP = "text_encoder/model.safetensors"
DAMAGED = (moored.ModelDamaged,)
# A configuration of something else may be either.
STRANGE = (moored.ModelDamaged, moored.ModelUnsupported)

# By name: how a pipeline is broken, which errors are right, and what the sentence has to name.
BROKEN: dict[str, tuple[Breaker, tuple[type[moored.MooredError], ...], str]] = {
    "half-a-transformer": (cut(TRANSFORMER, 0.5), DAMAGED, TRANSFORMER),
    "half-a-vae": (cut(VAE, 0.5), DAMAGED, VAE),
    "half-an-encoder": (cut(CLIP, 0.9), DAMAGED, CLIP),
    "empty-weights": (write(TRANSFORMER, b""), DAMAGED, TRANSFORMER),
    "garbage-weights": (write(TRANSFORMER, random.Random(3).randbytes(9999)), DAMAGED, TRANSFORMER),
    "page-for-weights": (
        write(TRANSFORMER, b"<!DOCTYPE html><html>"),
        (moored.ModelUnsupported,),
        TRANSFORMER,
    ),
    "pointer-for-weights": (
        write(TRANSFORMER, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        DAMAGED,
        TRANSFORMER,
    ),
    "header-of-2^63": (write(VAE, struct.pack("<Q", 2**63) + b"{}"), DAMAGED, VAE),
    "header-past-the-end": (write(VAE, struct.pack("<Q", 99) + b"{}"), DAMAGED, VAE),
    "header-of-no-json": (write(VAE, struct.pack("<Q", 4) + b"nope"), DAMAGED, VAE),
    "header-too-deep": (
        write(VAE, struct.pack("<Q", 200_000) + b'{"a":' * 40_000),
        DAMAGED,
        VAE,
    ),
    "offsets-past-the-end": (edit(TRANSFORMER, shift_offsets), DAMAGED, TRANSFORMER),
    "offsets-backwards": (edit(TRANSFORMER, backward_offsets), DAMAGED, TRANSFORMER),
    "shape-of-2^124": (edit(TRANSFORMER, absurd_shape), DAMAGED, TRANSFORMER),
    "shape-turned": (edit(TRANSFORMER, turned_shape), DAMAGED, TRANSFORMER),
    "dtype-of-none": (edit(VAE, strange_dtype), STRANGE, VAE),
    "tensor-missing": (
        edit(VAE, rename("decoder.conv_out.weight")),
        DAMAGED,
        "vae/diffusion_pytorch_model.safetensors is damaged: tensor decoder.conv_out.weight",
    ),
    "no-transformer-file": (remove(TRANSFORMER), DAMAGED, "transformer"),
    "no-transformer": (remove("transformer"), DAMAGED, "transformer"),
    "no-vae": (remove("vae"), DAMAGED, "vae"),
    "no-vae-config": (remove("vae/config.json"), DAMAGED, "vae/config.json"),
    "no-encoder-config": (
        remove("text_encoder_2/config.json"),
        DAMAGED,
        "text_encoder_2/config.json",
    ),
    "no-vocabulary": (remove("tokenizer/vocab.json"), DAMAGED, "tokenizer/vocab.json"),
    "no-tokenizer": (remove("tokenizer_2"), DAMAGED, "tokenizer_2"),
    "no-scheduler": (remove("scheduler"), DAMAGED, "scheduler"),
    "garbage-config": (write("vae/config.json", b"\xff\xfe{"), DAMAGED, "vae/config.json"),
    "list-for-config": (write("vae/config.json", b"[]"), DAMAGED, "vae/config.json"),
    "garbage-vocabulary": (
        write("tokenizer_2/tokenizer.json", b'{"model": 7}'),
        DAMAGED,
        "tokenizer_2/tokenizer.json",
    ),
    "endless-layers": (
        configure("transformer/config.json", num_layers=2**31 - 1),
        STRANGE,
        "transformer",
    ),
    "no-heads": (
        configure("transformer/config.json", num_attention_heads=0),
        STRANGE,
        "transformer",
    ),
    "negative-layers": (
        configure("transformer/config.json", num_layers=-1),
        STRANGE,
        "transformer",
    ),
    "no-groups": (configure("vae/config.json", norm_num_groups=0), STRANGE, "vae"),
    "endless-channels": (
        configure("vae/config.json", block_out_channels=[2**40] * 4),
        STRANGE,
        "vae",
    ),
    "another-pipeline": (
        configure("model_index.json", _class_name="StableDiffusionPipeline"),
        (moored.ModelUnsupported,),
        "StableDiffusionPipeline",
    ),
    "garbage-index": (write("model_index.json", b"{"), STRANGE, "model_index.json"),
    "empty-index": (write("model_index.json", b"{}"), STRANGE, "model_index.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_error_of_a_broken_model_names_its_file(client: moored.Client, name: str) -> None:
    _, expected, file = BROKEN[name]
    with pytest.raises(expected) as refused:
        client.generate_image("x", model=name, **QUICK)
    assert file in refused.value.message
    # Again: the first time may have been special.
    with pytest.raises(expected):
        client.generate_image("x", model=name, **QUICK)


def test_an_incomplete_vae_is_reported_at_the_latest_when_it_encodes(
    client: moored.Client, models: Path
) -> None:
    edit(VAE, rename("encoder.conv_in.weight"))(copy_tiny(models / "no-encoder"))
    with pytest.raises(moored.ModelDamaged, match=r"encoder\.conv_in\.weight"):
        client.encode_image(Image.new("RGB", (32, 32)), model="no-encoder")
    shutil.rmtree(models / "no-encoder")


@pytest.mark.parametrize("name", ["lone-garbage", "lone-empty", "bad"])
def test_the_error_of_a_broken_single_file_names_it(client: moored.Client, name: str) -> None:
    with pytest.raises(STRANGE, match=name):
        client.generate_image("x", model=name, **QUICK)


def test_broken_models_are_listed_with_their_problem(client: moored.Client) -> None:
    models = {model.id: model for model in client.list_models()}
    assert models[GOOD].problem == ""
    assert set(BROKEN) <= set(models)
    for name in ("no-transformer", "another-pipeline", "garbage-index"):
        assert models[name].problem


def test_weights_truncated_while_the_service_runs_are_reported(
    client: moored.Client, models: Path
) -> None:
    copy_tiny(models / "later")
    # Other numbers than the good one's, or its components would be shared.
    for path in (TRANSFORMER, VAE, CLIP):
        with (models / "later" / path).open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x00\x00\x80\x3c")
    assert client.generate_image("x", model="later", **QUICK).pictures
    client.unload("later")
    cut(TRANSFORMER, 0.5)(models / "later")
    with pytest.raises(moored.ModelDamaged, match="transformer"):
        client.generate_image("x", model="later", **QUICK)
    shutil.rmtree(models / "later")


# The wire.


def raw_bytes(service: Service, data: bytes) -> bytes:
    """Sends bytes to the port; what comes back until the service hangs up or falls silent."""
    host, port = service.address.rsplit(":", 1)
    answer = b""
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=2) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            answer += piece
    return answer


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        random.Random(4).randbytes(100_000),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE[:10],
        PREFACE,
        PREFACE + random.Random(5).randbytes(100_000),
        PREFACE + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff" * 9,
        PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    ],
    ids=[
        "nothing",
        "garbage",
        "http 1",
        "half a preface",
        "preface",
        "preface and garbage",
        "bad frame",
        "frame too large",
        "tls",
    ],
)
def test_the_service_survives_garbage_on_its_port(
    service: Service, client: moored.Client, data: bytes
) -> None:
    raw_bytes(service, data)
    assert client.health() == "serving"


def raw_call(client: moored.Client, method: str, *messages: bytes) -> grpc.StatusCode:
    """A call with any bytes for messages; the status that it ends with."""
    call: Any = client._connection._channel.stream_stream(f"/moored.v1.{method}", None, None)
    try:
        list(call(iter(messages), timeout=30))
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    "method",
    [
        "Generation/GenerateImage",
        "Generation/EncodeImage",
        "Generation/DecodeLatent",
        "Generation/PutLatent",
        "Generation/PutMedia",
        "Residency/Load",
        "Residency/Reserve",
        "Jobs/Cancel",
    ],
)
def test_malformed_messages_are_refused(client: moored.Client, method: str) -> None:
    for message in (b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", random.Random(6).randbytes(5000)):
        code = raw_call(client, method, message)
        assert code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


def test_a_call_without_a_message_is_refused_and_a_second_one_does_no_harm(
    client: moored.Client,
) -> None:
    good = residency_pb2.LoadRequest(model=model_pb2.ModelRef(id=GOOD)).SerializeToString()
    assert raw_call(client, "Residency/Load") != grpc.StatusCode.OK
    raw_call(client, "Residency/Load", good, good)  # a second message may be ignored


def test_an_unknown_method_is_unimplemented(client: moored.Client) -> None:
    for method in ("Generation/GenerateOpera", "Opera/Sing"):
        assert raw_call(client, method, b"") == grpc.StatusCode.UNIMPLEMENTED


VANISHING_CLIENT = """
import sys
import moored

client = moored.Client(sys.argv[1])
for event in client.stream_image("x", model="slow", steps=200):
    if isinstance(event, moored.Step):
        print(event.job_id, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_client_that_vanishes_in_mid_stream_ends_its_job_alone(
    simulate: Callable[..., Service], how: signal.Signals
) -> None:
    service = simulate()
    vanishing = subprocess.Popen(
        [sys.executable, "-c", VANISHING_CLIENT, service.address],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    try:
        assert vanishing.stdout is not None
        job = vanishing.stdout.readline().strip()
        assert job
        vanishing.send_signal(how)
        with service.client() as client:
            if how == signal.SIGSTOP:
                # Nobody reads its events; others are served all the same.
                assert client.generate_image("x", model="small", timeout=60).pictures
                client.cancel(job)
            status = at_rest(client)
            assert status.jobs == ()
            ended = {one.id: one.state for one in client.jobs(include_ended=True)}
            # A frozen one is still there, for all that the service can know.
            assert ended[job] in ("cancelled", "done")
            assert how == signal.SIGSTOP or ended[job] == "cancelled"
            assert client.generate_image("x", model="small").pictures
            wait_for_no_scratch(client)
            (card,) = client.status().cards
            assert card.worker_restarts == 0
            assert not any(resident.leases for resident in card.residents)
    finally:
        vanishing.kill()
        vanishing.wait()
        if vanishing.stdout:
            vanishing.stdout.close()
