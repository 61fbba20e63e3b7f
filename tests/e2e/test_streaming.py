"""Models that are larger than the card: a part of them is on it, and the rest is streamed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored
import pytest
from faults import assert_at_rest
from waiting import wait_until

from service import ROOT, Service

Simulate = Callable[..., Service]

PICTURE: dict[str, Any] = {
    "prompt": "a red cube on a blue plane",
    "model": "mine",
    "width": 64,
    "height": 64,
    "steps": 3,
    "seed": 5,
}
# The shipped model has 20 MiB of transformer in f32, 7 of autoencoder, 3 of text encoders.
CARDS = ("28MiB", "20MiB", "16MiB", "20MiB,remaps=no")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with a copy of the shipped model, `mine`, that may be changed."""
    shutil.copytree(ROOT / "demo/model", tmp_path / "models/mine")
    return tmp_path / "models"


@pytest.fixture
def on_card(simulate: Simulate, models: Path) -> Callable[[str], Service]:
    """A service whose only card is of this size."""

    def start(size: str, *more: str) -> Service:
        options = ("--models", str(models), "--set", "cards.headroom=512KiB", *more)
        return simulate(f"sim:{size}", arguments=options)

    return start


@pytest.fixture
def whole(on_card: Callable[[str], Service]) -> bytes:
    """The pixels of the picture on a card that has all of the model."""
    with on_card("1GiB").client() as client:
        pixels = client.generate_image(**PICTURE).images[0].tobytes()
        assert streamed_parts(client) == {}
    return pixels


def streamed_parts(client: moored.Client) -> dict[str, moored.StreamedComponent]:
    """The components of which a part is on the card."""
    (card,) = client.status().cards
    return {one.component.name: one.streamed for one in card.residents if one.streamed}


@pytest.mark.parametrize("size", CARDS)
def test_a_picture_of_a_model_that_is_larger_than_the_card_has_the_same_pixels(
    on_card: Callable[[str], Service], whole: bytes, size: str
) -> None:
    with on_card(size).client() as client:
        plan = client.plan(**PICTURE)
        assert plan.runs_now
        for _ in range(2):  # from the disk, then from what stayed
            assert client.generate_image(**PICTURE).images[0].tobytes() == whole
        (card,) = client.status().cards
        assert_at_rest(client)
        client.unload()
        (card,) = client.status().cards
        assert not card.residents and card.memory.components == 0


def test_plan_and_status_say_what_is_streamed(
    on_card: Callable[[str], Service], models: Path
) -> None:
    service = on_card("20MiB")
    with service.client() as client:
        plan = client.plan(**PICTURE)
        denoise = next(stage for stage in plan.stages if stage.name == "denoise")
        (part,) = (one for one in denoise.streamed if one.name == "transformer")
        assert part.resident_bytes < part.whole_bytes
        crosses = part.streamed_bytes + part.streamed_once_bytes
        assert part.whole_bytes - part.resident_bytes < crosses < part.whole_bytes
        assert any(
            move.startswith("load ") and move.endswith("and stream the rest")
            for move in denoise.moves
        )
        command = ("plan", PICTURE["prompt"], "--model", "mine", "--width", "64", "--height", "64")
        said = service.run(*command, "--steps", "3").stdout
        assert f"transformer {part.words}" in said
        assert "streamed and" in part.words and "once" in part.words and part.more_seconds is None
        client.load("mine", components=("transformer",))
        found = streamed_parts(client)["transformer"]
        assert found.resident_bytes < found.whole_bytes
        assert found.words in service.run("status").stdout
        client.pin("mine")
        assert streamed_parts(client)["transformer"] == found, "a pinned part stays as it is"


def write_blocks(folder: Path, scale: int) -> None:
    """A model of FLUX's shape, `blocks`, with so many bytes for a billion of its own."""
    parts = {"transformer": (24 * scale, 57), "text_encoder_2": (10 * scale, 24), "vae": (scale, 0)}
    description = {
        "name": "blocks",
        "step_flops": 74_000 * scale,
        "components": [
            {"name": part, "bytes": size, "identity": f"blocks-{part}", "blocks": blocks}
            for part, (size, blocks) in parts.items()
        ],
        "defaults": {"width": 64, "height": 64, "steps": 4},
    }
    (folder / "blocks.instant.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("card", "formats", "said"),
    [
        ("40GiB,speed=24GB/s,compute=100TFLOP/s", "full", "it fits sim:0$"),
        # A step computes for 0.74 s: what streams in less adds nothing.
        ("16GiB,speed=24GB/s,compute=100TFLOP/s", "full", r"full: .* in each step, .*%\)$"),
        ("16GiB,speed=4GB/s,compute=100TFLOP/s", "8-bit", r"full would have .* \(\d{2,3}%\)$"),
        ("6GiB,speed=12GB/s,compute=100TFLOP/s", "8-bit", "in each step, .*; full would have "),
        ("6GiB,speed=12GB/s,compute=900TFLOP/s", "4-bit", "full would have "),
        # A card that multiplies in fp8 gets the 8-bit format in which its steps are faster.
        (
            "6GiB,speed=12GB/s,compute=100TFLOP/s,capability=8.9",
            "text_encoder_2=fp8,transformer=fp8",
            "full would have ",
        ),
        ("6GiB,speed=12GB/s,compute=100TFLOP/s,capability=8.6", "8-bit", "full would have "),
        ("4GiB,speed=2GB/s,compute=100TFLOP/s", "4-bit", "4-bit would have .* formats more$"),
        # Without a speed, what streams in each step is too much.
        ("16GiB", "8-bit", "full would have .* in each step$"),
        ("16GiB,speed=24GB/s", "8-bit", "full would have .* in each step$"),
    ],
)
def test_auto_keeps_what_streams_in_less_than_a_tenth_of_the_time(
    on_card: Callable[..., Service], models: Path, card: str, formats: str, said: str
) -> None:
    write_blocks(models, 10**9)
    with on_card(card).client() as client:
        model = client.plan("a cube", model="blocks+auto").model
        assert model.key == f"blocks+{formats}", model.choice
        assert re.search(said, model.choice), model.choice


def denoise_part(plan: moored.Plan) -> moored.StreamedComponent:
    """The transformer that a plan streams."""
    (part,) = next(stage for stage in plan.stages if stage.name == "denoise").streamed
    return part


def test_plan_and_status_say_what_streaming_costs(
    on_card: Callable[..., Service], models: Path
) -> None:
    write_blocks(models, 10**6)
    options: dict[str, Any] = {"model": "blocks", "steps": 2}
    service = on_card("16MiB,speed=400MB/s,compute=7400GFLOP/s")
    with service.client() as client:
        part = denoise_part(client.plan("a cube", **options))
        # A step computes for 10 ms.
        more = part.streamed_bytes / 400e6 - 0.01
        assert part.link_bytes_per_second == 400e6
        assert part.more_seconds == pytest.approx(more)
        there, streamed = part.resident_bytes / 1e6, part.streamed_bytes / 1e6
        assert part.words == (
            f"{there:.1f} of 24.0 MB resident, {streamed:.1f} streamed at 0.4 GB/s: "
            f"{more:.2f} s more a step than resident"
        )
        client.generate_image("a cube", **options)
        # The decode that came last may have left less of it.
        found = streamed_parts(client)["transformer"]
        assert found.more_seconds == pytest.approx(found.streamed_bytes / 400e6 - 0.01)
        assert found.words.endswith("s more a step than resident")
        assert found.words in service.run("status").stdout


def test_what_a_resident_step_takes_is_learned(
    on_card: Callable[..., Service], models: Path, tmp_path: Path
) -> None:
    write_blocks(models, 10**7)
    options: dict[str, Any] = {"model": "blocks", "steps": 2}
    world = tmp_path / "world"
    with on_card(f"640MiB,speed=4GB/s,world={world}").client() as client:
        made = client.generate_image("a cube", **options)
        client.unload()
        world.write_text("editor 480MiB")
        wait_until(lambda: bool(client.status().cards[0].holders), "the editor has its memory")
        part = denoise_part(client.plan("a cube", **options))
        # How fast it computes is unknown; how long the two passes took is not.
        ran = made.timings["denoise"].run_ms / 1000 / 2
        more = max(0, part.streamed_bytes / 4e9 - ran)
        assert part.more_seconds == pytest.approx(more, abs=0.002)


def test_the_machines_memory_that_streamed_blocks_hold_is_shown_and_given_back(
    on_card: Callable[[str], Service], whole: bytes
) -> None:
    def held(client: moored.Client) -> dict[str, int]:
        (card,) = client.status().cards
        return {one.component.name: one.bytes for one in card.on_host}

    service = on_card("20MiB")
    with service.client() as client:
        assert client.generate_image(**PICTURE).images[0].tobytes() == whole
        part = streamed_parts(client)["transformer"]
        assert held(client)["transformer"] >= part.streamed_bytes + part.streamed_once_bytes
        assert "machine's memory: " in service.run("status").stdout
        client.unload("mine")
        assert held(client) == {}
    with on_card("20MiB", "--set", "cards.host_memory=1MiB").client() as client:
        assert client.generate_image(**PICTURE).images[0].tobytes() == whole
        (card,) = client.status().cards
        assert card.host_limit_bytes == 1 << 20
        assert 0 < sum(held(client).values()) <= 1 << 20


def test_a_streamed_model_whose_file_is_replaced_is_read_anew(
    on_card: Callable[[str], Service], models: Path, whole: bytes
) -> None:
    with on_card("20MiB").client() as client:
        assert client.generate_image(**PICTURE).images[0].tobytes() == whole
        file = models / "mine/transformer/diffusion_pytorch_model.safetensors"
        data = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little")
        for at in range(header + 1, len(data), 2):
            data[at] ^= 0x80  # the sign of each number
        beside = file.with_suffix(".new")
        beside.write_bytes(data)
        beside.rename(file)
        after = client.generate_image(**PICTURE).images[0].tobytes()
        assert after != whole
        assert client.generate_image(**PICTURE).images[0].tobytes() == after


def changed_meanwhile(
    client: moored.Client, times: int, change: Callable[[], None]
) -> tuple[list[str], bytes]:
    """A picture of many steps, with a change of a file in the second step of the first attempts: the
    reasons for which it was tried again, and its pixels."""
    changes, reasons = 0, list[str]()
    with client.stream_image(**PICTURE | {"steps": 120}) as stream:
        for event in stream:
            if isinstance(event, moored.Retrying):
                reasons.append(event.reason)
            if isinstance(event, moored.Step) and changes == len(reasons) < times:
                changes += 1
                change()
        return reasons, stream.result().images[0].tobytes()


def test_a_job_begins_again_if_a_file_changes_while_it_is_streamed(
    on_card: Callable[[str], Service], models: Path
) -> None:
    """Nothing tells a change of times alone from a change of the file, as times can be set back."""
    file = models / "mine/transformer/diffusion_pytorch_model.safetensors"

    def replace() -> None:
        beside = file.with_suffix(".new")
        shutil.copy(file, beside)
        beside.rename(file)

    def link() -> None:
        file.with_suffix(".link").unlink(missing_ok=True)
        os.link(file, file.with_suffix(".link"))

    with on_card("20MiB").client() as client:
        undisturbed = changed_meanwhile(client, 0, replace)
        assert undisturbed[0] == []
        for change in (lambda: os.utime(file), replace, link):
            again = changed_meanwhile(client, 1, change)
            assert again == (["MODEL_CHANGED"], undisturbed[1])
        # Twice: it does not go on for ever.
        with pytest.raises(moored.ModelChanged, match="submit the request again"):
            changed_meanwhile(client, 2, replace)
        assert changed_meanwhile(client, 0, replace) == undisturbed
        assert_at_rest(client)


def test_a_hold_or_a_pin_of_a_streamed_model_does_not_keep_its_own_stages_waiting(
    on_card: Callable[[str], Service], whole: bytes
) -> None:
    # They outlive the test: a stage that waits for one of them waits until its timeout.
    with on_card("20MiB").client() as client:
        for claim in (lambda: client.hold("mine", ttl_s=3600), lambda: client.pin("mine")):
            claim()
            for prompt in (PICTURE["prompt"], "a prompt that is encoded anew"):
                again = PICTURE | {"prompt": prompt}
                plan = client.plan(**again)
                assert plan.runs_now, plan
                made = client.generate_image(**again, timeout=60).images[0].tobytes()
                assert (made == whole) == (prompt == PICTURE["prompt"])
        (card,) = client.status().cards
        assert any(one.pinned for one in card.residents)


def test_a_pinned_model_that_is_streamed_leaves_room_for_another(
    on_card: Callable[[str], Service], models: Path, whole: bytes
) -> None:
    shutil.copytree(models / "mine", models / "other")
    file = models / "other/transformer/diffusion_pytorch_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x80
    file.write_bytes(data)
    with on_card("38MiB").client() as client:
        with client.reserve(12 << 20):
            client.load("mine")
        client.pin("mine")
        before = streamed_parts(client)["transformer"].resident_bytes
        client.generate_image(**PICTURE | {"model": "other"}, timeout=60)
        (card,) = client.status().cards
        pinned = [one for one in card.residents if one.pinned]
        left = next(one for one in pinned if one.component.name == "transformer")
        assert left.streamed is not None and left.streamed.resident_bytes < before
        assert client.generate_image(**PICTURE, timeout=60).images[0].tobytes() == whole
    with on_card("24MiB").client() as client:
        client.load("mine")
        client.pin("mine")
        with pytest.raises(moored.NeverFits, match=r"MiB that are pinned \(unpin a model"):
            client.generate_image(**PICTURE | {"model": "other"}, timeout=60)


def test_a_session_of_a_model_that_is_larger_than_the_card_plays(simulate: Simulate) -> None:
    arguments = ("--models", str(ROOT / "demo"), "--set", "cards.headroom=512KiB")
    with (
        simulate("sim:19MiB", arguments=arguments).client() as client,
        client.audio_session(model="moored/demo-sound") as live,
    ):
        live.play("a soft pad", seed=1, seconds=2.0).wait(60)
        live.play("a hard kick", seed=2, seconds=2.0).wait(60)


def test_a_model_that_fits_in_no_part_is_refused(on_card: Callable[[str], Service]) -> None:
    with on_card("6MiB").client() as client:
        with pytest.raises(moored.MemoryShortage) as refused:
            client.generate_image(**PICTURE)
        assert refused.value.reason == "NEVER_FITS"
