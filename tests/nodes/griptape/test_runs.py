"""Runs of the nodes, on the real service: what they give, show and say."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moored
import pytest
from headless import Headless
from PIL import ExifTags, Image

from service import INSTANT_MODELS, Service

GIB = 1 << 30
Simulate = Callable[..., moored.Client]


def outputs(node: Any) -> dict[str, Any]:
    return dict(node.parameter_output_values)


def picture(node: Any) -> Image.Image:
    """The picture that a node gave, read as the engine reads it."""
    from griptape.artifacts import ImageUrlArtifact
    from griptape_nodes.files.file import File

    artifact = outputs(node)["image"]
    assert type(artifact) is ImageUrlArtifact
    assert isinstance(artifact.value, str)
    image = Image.open(io.BytesIO(File(artifact.value).read_bytes()))
    image.load()
    return image


def details(node: Any) -> str:
    return str(outputs(node)["result_details"])


def fails(engine: Headless, node: Any) -> str:
    """Runs the workflow, which fails; the sentence that the node says."""
    result = engine.do(engine.run())
    assert result.failed()
    assert outputs(node)["was_successful"] is False
    assert details(node) in str(result.result_details), "the engine says it, too"
    assert outputs(node)["status"] == f"Failed: {details(node)}"
    sentence = details(node)
    assert sentence.endswith("."), sentence
    assert "\n" not in sentence
    return sentence


def succeeds(engine: Headless) -> None:
    result = engine.do(engine.run())
    assert result.succeeded(), result.result_details


def test_a_prompt_becomes_a_picture_by_url(connected: Headless, demo_service: Service) -> None:
    node = connected.do(
        connected.node("GenerateImage", prompt="a red cube on a blue plane", seed=7)
    )
    succeeds(connected)
    with demo_service.client() as client:
        same = client.generate_image("a red cube on a blue plane", seed=7).image
    assert picture(node).convert("RGB").tobytes() == same.convert("RGB").tobytes()
    shown = outputs(node)
    assert shown["was_successful"] is True
    assert shown["progress"] == 1.0
    assert shown["status"] == "Done"
    assert "seed 7" in details(node)
    assert {"encode_text", "denoise", "decode", "total_s"} <= set(shown["timings"])
    assert set(shown["timings"]["denoise"]) == {"run_s", "move_s", "wait_s"}
    for words in ("Denoising", "Step 8/8", "Decoding", "Done in"):
        assert words in shown["logs"]


def test_previews_show_while_it_is_generated(simulate: Simulate, nowhere: Headless) -> None:
    simulate()
    values = {"prompt": "slow", "model": "slow", "steps": 20}
    with_them = nowhere.do(nowhere.node("GenerateImage", **values))
    succeeds(nowhere)
    assert "preview" in outputs(with_them)["preview"].value
    nowhere.do(nowhere.fresh_flow())
    without = nowhere.do(nowhere.node("GenerateImage", previews=False, **values))
    succeeds(nowhere)
    assert "preview" not in outputs(without)


def test_an_edit_starts_from_a_picture(connected: Headless, demo_service: Service) -> None:
    first = connected.do(connected.node("GenerateImage", prompt="a red cube on a blue plane"))
    edit = connected.do(
        connected.node("EditImage", prompt="a green cube on a blue plane", strength=0.7, seed=3)
    )
    connected.do(connected.connect(first, "image", edit, "input_image"))
    succeeds(connected)
    data = io.BytesIO()
    picture(first).save(data, "PNG")
    with demo_service.client() as client:
        same = client.generate_image(
            "a green cube on a blue plane", init_image=data.getvalue(), strength=0.7, seed=3
        ).image
    assert picture(edit).convert("RGB").tobytes() == same.convert("RGB").tobytes()
    assert picture(edit).tobytes() != picture(first).tobytes()


def test_an_edit_keeps_the_pictures_size(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    simulate()
    source = tmp_path / "source.png"
    Image.new("RGB", (90, 135), "teal").save(source)
    edit = nowhere.do(
        nowhere.node("EditImage", prompt="teal", model="small", input_image=str(source))
    )
    succeeds(nowhere)
    assert picture(edit).size == (96, 128)


def test_an_edit_keeps_a_picture_upright_that_its_camera_turned(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    simulate()
    source = tmp_path / "upright.jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (128, 64), "teal").save(source, exif=exif)
    edit = nowhere.do(
        nowhere.node("EditImage", prompt="teal", model="small", input_image=str(source))
    )
    succeeds(nowhere)
    assert picture(edit).size == (64, 128)


def test_a_guidance_that_is_emptied_is_the_models_own_again(
    simulate: Simulate, nowhere: Headless
) -> None:
    simulate()
    node = nowhere.do(nowhere.node("GenerateImage", prompt="x", model="small"))
    succeeds(nowhere)
    own = picture(node).info["moored"]
    for empty in ("", None):
        nowhere.do(nowhere.set(node, guidance=7.5))
        succeeds(nowhere)
        assert picture(node).info["moored"] != own
        nowhere.do(nowhere.set(node, guidance=empty))
        succeeds(nowhere)
        assert picture(node).info["moored"] == own


# Tracks.


def track(node: Any) -> bytes:
    """The file of the track that a node gave, read as the engine reads it."""
    from griptape.artifacts import AudioUrlArtifact
    from griptape_nodes.files.file import File

    artifact = outputs(node)["audio"]
    assert type(artifact) is AudioUrlArtifact
    return bytes(File(artifact.value).read_bytes())


def test_true_guidance_alone_uses_an_empty_negative_prompt(
    connected: Headless, demo_service: Service
) -> None:
    values: dict[str, Any] = {"seed": 7, "steps": 2, "width": 64, "height": 64}
    node = connected.do(
        connected.node("GenerateImage", prompt="a red cube", true_guidance="3", **values)
    )
    succeeds(connected)
    with demo_service.client() as client:
        alone = client.generate_image("a red cube", **values).image
        away = client.generate_image("a red cube", **values, negative_prompt="", true_guidance=3)
    assert picture(node).convert("RGB").tobytes() == away.image.convert("RGB").tobytes()
    assert away.image.tobytes() != alone.tobytes()
    connected.do(connected.set(node, true_guidance="", negative_prompt="a dog"))
    succeeds(connected)
    assert picture(node).convert("RGB").tobytes() == alone.convert("RGB").tobytes()


def test_a_model_without_true_guidance_refuses_it_by_name(connected: Headless) -> None:
    node = connected.do(
        connected.node(
            "GenerateAudio", prompt="a waltz", negative_prompt="drums", true_guidance=3.0
        )
    )
    model = connected.do(connected.node("DiffusionModel", model="moored/demo-sound"))
    connected.do(connected.connect(model, "model_handle", node, "model"))
    sentence = fails(connected, node)
    assert "negative_prompt is not taken" in sentence
    assert "true_guidance is not taken" in sentence


def test_what_is_seldom_set_is_in_a_folded_group(nowhere: Headless) -> None:
    node = nowhere.do(nowhere.node("GenerateImage"))
    group = node.get_group_by_name_or_element_id("Advanced")
    assert group.ui_options["collapsed"]
    folded = {parameter.name for parameter in group.children}
    assert {"negative_prompt", "true_guidance", "max_sequence_length"} <= folded
    assert {"steps", "guidance"}.isdisjoint(folded)


def test_a_prompt_becomes_a_track_by_url(simulate: Simulate, nowhere: Headless) -> None:
    client = simulate()
    values = {"prompt": "a slow waltz", "model": "track", "seed": 7, "steps": 2}
    node = nowhere.do(nowhere.node("GenerateAudio", lyrics="la la", seconds=0.5, **values))
    succeeds(nowhere)
    asked: dict[str, Any] = {"model": "track", "seed": 7, "steps": 2, "lyrics": "la la"}
    same = client.generate_audio("a slow waltz", seconds=0.5, **asked)
    assert track(node) == bytes(same.track().data)
    shown = outputs(node)
    assert shown["audio"].value.endswith(".wav")
    assert (shown["was_successful"], shown["progress"], shown["status"]) == (True, 1.0, "Done")
    assert "seed 7" in details(node)
    assert "0.5 s long" in details(node)
    assert {"encode_text", "denoise", "decode", "total_s"} <= set(shown["timings"])
    for words in ("Denoising", "Step 2/2", "Decoding", "Done in"):
        assert words in shown["logs"]


def test_a_part_of_a_track_is_made_anew_as_flac(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    client = simulate()
    song = client.generate_audio("a song", model="track", seconds=0.5, output="flac")
    path = tmp_path / "song.flac"
    song.save(path)
    metre: dict[str, Any] = {"bpm": 96, "key": "C major", "time_signature": "3", "language": "en"}
    values = {"prompt": "a brass band", "model": "track", "seed": 7, "steps": 2}
    node = nowhere.do(
        nowhere.node(
            "GenerateAudio",
            input_audio=str(path),
            reference_audio=str(path),
            task="repaint",
            start_seconds=0.1,
            end_seconds=0.3,
            file_format="flac",
            **metre,
            **values,
        )
    )
    succeeds(nowhere)
    source = client.put_media(path)
    own: dict[str, Any] = {"model": "track", "seed": 7, "steps": 2, "init_media": source}
    same = client.generate_audio(
        "a brass band",
        task="repaint",
        window=(0.1, 0.3),
        reference=source,
        output="flac",
        **metre,
        **own,
    )
    assert track(node) == same.flac
    assert outputs(node)["audio"].value.endswith(".flac")
    # Of two tracks by name, to the end.
    nowhere.do(
        nowhere.set(node, task="complete", tracks="drums, bass", start_seconds=0, end_seconds=0)
    )
    succeeds(nowhere)
    made = tmp_path / "made.flac"
    made.write_bytes(track(node))
    assert moored.read_recipe(made)["tracks"] == ["drums", "bass"]
    for values, told in (
        ({"task": "extract"}, "tracks"),
        ({"task": "repaint", "tracks": "", "end_seconds": 0.9}, "after the end of the source"),
        ({"end_seconds": 0, "input_audio": None}, "input_audio is missing: repaint"),
        ({"task": "cover", "input_audio": __file__}, "The input_audio cannot be taken"),
    ):
        nowhere.do(nowhere.set(node, **values))
        assert told in fails(nowhere, node)


def test_an_invalid_track_request_fails_with_one_sentence(
    simulate: Simulate, nowhere: Headless
) -> None:
    simulate()
    node = nowhere.do(nowhere.node("GenerateAudio", model="track"))
    assert fails(nowhere, node) == "There is no prompt: say what is to be heard."
    nowhere.do(nowhere.set(node, prompt="x", seconds=1e9))
    assert "seconds" in fails(nowhere, node)
    nowhere.do(nowhere.set(node, seconds=0, model="small"))
    assert "makes pictures" in fails(nowhere, node)
    assert "audio" not in outputs(node)


def test_a_budget_bears_on_tracks_and_on_loads_of_any_model(
    simulate: Simulate, nowhere: Headless
) -> None:
    simulate("sim:1GiB")
    little = {"gpu_memory_fraction": 0.001}
    node = nowhere.do(
        nowhere.node("GenerateAudio", prompt="x", model="track", system_constraints=little)
    )
    assert "gpu_memory_fraction allows" in fails(nowhere, node)
    nowhere.do(nowhere.fresh_flow())
    for model in ("track", "video"):
        node = nowhere.do(nowhere.node("PreloadModel", model=model, system_constraints=little))
        assert "for the whole model" in fails(nowhere, node)
        nowhere.do(nowhere.set(node, system_constraints={"gpu_memory_fraction": 0.5}))
        succeeds(nowhere)
        nowhere.do(nowhere.fresh_flow())


@pytest.mark.parametrize(
    ("mode", "key"),
    [
        ("auto", "full"),
        ("None", "full"),
        ("fp8", "text_encoder_2=fp8,transformer=fp8"),
        ("int8", "8-bit"),
        ("int4", "4-bit"),
    ],
)
def test_quantization_modes_are_the_services_formats(
    connected: Headless, demo_service: Service, mode: str, key: str
) -> None:
    model = connected.do(connected.node("DiffusionModel", quantization_mode=mode))
    node = connected.do(connected.node("GenerateImage", prompt="a red cube", steps=1))
    connected.do(connected.connect(model, "model_handle", node, "model"))
    succeeds(connected)
    with demo_service.client() as client:
        keys = {
            entry
            for card in client.status().cards
            for one in card.residents
            for entry in one.entries
        }
    said = details(node).partition("Generated with ")[2].partition(", seed")[0]
    assert said in keys
    assert said.endswith(f"+{key}")


def test_the_service_chooses_the_mode_unless_it_is_set(
    simulate: Simulate, nowhere: Headless
) -> None:
    simulate("sim:20GiB")
    model = nowhere.do(nowhere.node("DiffusionModel", model="flux-full"))
    node = nowhere.do(nowhere.node("GenerateImage", prompt="a red cube", steps=1))
    nowhere.do(nowhere.connect(model, "model_handle", node, "model"))
    succeeds(nowhere)
    assert outputs(model)["model_handle"]["quantization_mode"] == "auto"
    assert "Generated with flux-full+8-bit, " in details(node)
    first = outputs(node)["logs"].splitlines()[0]
    assert " s  Accepted, 8-bit: full needs " in first
    assert "sim:0 has " in first


def test_a_saved_workflow_without_quantization_mode_stays_at_full(
    simulate: Simulate, nowhere: Headless
) -> None:
    simulate("sim:40GiB")
    node = nowhere.do(nowhere.node("GenerateImage", prompt="x", model={"model": "flux-full"}))
    succeeds(nowhere)
    assert "Generated with flux-full+full, " in details(node)
    assert outputs(node)["logs"].splitlines()[0].endswith(" s  Accepted"), "nothing was chosen"


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (moored.Quantization("8-bit", {}), "quantization_mode int8"),
        (moored.Quantization("4-bit", {}), "quantization_mode int4"),
        (moored.Quantization("full", {"a": "fp8", "b": "fp8"}), "quantization_mode fp8"),
        (moored.Quantization("", {"a": "nf4"}), "quantization_mode int4"),
        (moored.Quantization("8-bit", {"vae": "nf4"}), "as the service says"),
        (moored.Quantization("full", {"a": "nf4", "b": "int8"}), "as the service says"),
        (moored.Quantization("full", {"a": "nf4-double"}), "as the service says"),
        (None, "as the service says"),
    ],
)
def test_an_alternative_that_fits_is_reported_in_the_modes_of_the_nodes(
    engine: Headless, quantization: moored.Quantization | None, words: str
) -> None:
    from moored_griptape.run_node import in_a_sentence

    fallback = moored.Fallback("as the service says", 1, True, quantization)
    short = moored.MemoryShortfall(2, 1, 1, (), (fallback,), "denoise")
    error = moored.NeverFits("too large", reason="NEVER_FITS", shortfall=short)
    assert in_a_sentence(error) == f"too large; what would fit: {words}."


def test_gpu_status_asks_the_service_at_each_run(connected: Headless) -> None:
    status = connected.do(connected.node("GPUStatus"))
    succeeds(connected)
    first = outputs(status)["cards"]["cards"][0]
    assert first["id"] == "cpu"
    assert "cpu" in outputs(status)["report"]
    status.parameter_output_values["report"] = "old"
    succeeds(connected)
    assert outputs(status)["report"] != "old"


def test_a_report_names_who_has_the_memory(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    world = tmp_path / "world"
    world.write_text("blender 4242 20GiB")
    client = simulate(f"sim:40GiB,world={world}")
    client.load("small")
    client.hold("small", ttl_s=60)
    node = nowhere.do(nowhere.node("GPUStatus"))
    succeeds(nowhere)
    lines = outputs(node)["report"].splitlines()
    assert "  attention: cpu loops" in lines
    assert "  blender 4242 has 21.5 GB" in lines
    assert "  transformer 4.2 MB held" in lines
    assert not [line for line in lines if "(held)" in line], "said once"


def test_a_report_says_what_streaming_costs(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    part = {"name": "transformer", "bytes": 20 << 20, "identity": "larger", "blocks": 20}
    models = tmp_path / "models"
    models.mkdir()
    model = json.dumps({"name": "larger", "components": [part]})
    (models / "larger.instant.json").write_text(model)
    settings = ("--models", str(models), "--set", "cards.headroom=512KiB")
    client = simulate("sim:16MiB,speed=100GB/s", *settings)
    client.load("larger")
    (resident,) = client.status().cards[0].residents
    assert resident.streamed and resident.streamed.words.endswith(" streamed at 100 GB/s")
    node = nowhere.do(nowhere.node("GPUStatus"))
    succeeds(nowhere)
    lines = outputs(node)["report"].splitlines()
    assert f"  transformer {resident.streamed.words}" in lines


def test_a_model_is_preloaded_and_leaves_again(simulate: Simulate, nowhere: Headless) -> None:
    client = simulate()
    preload = nowhere.do(nowhere.node("PreloadModel", model="flux-full"))
    unload = nowhere.do(nowhere.node("UnloadModels"))
    nowhere.do(nowhere.connect(preload, "exec_out", unload, "exec_in"))
    succeeds(nowhere)
    assert "flux-full" in details(preload)
    assert outputs(preload)["model"]["model"] == "flux-full"
    assert "Loading transformer, 23.8 GB" in outputs(preload)["logs"]
    assert outputs(unload)["freed_gb"] == pytest.approx(33.8, abs=0.1)
    assert "33.8 GB came free" in details(unload)
    assert not client.status().cards[0].residents


def test_an_unload_reports_what_stays_and_why(simulate: Simulate, nowhere: Headless) -> None:
    client = simulate()
    client.load("small")
    client.hold("small", ttl_s=60)
    unload = nowhere.do(nowhere.node("UnloadModels"))
    succeeds(nowhere)
    assert outputs(unload)["freed_gb"] == 0
    assert "transformer stays: held by somebody else" in details(unload)


# Memory.


def test_the_patience_is_seven_seconds_where_none_is_set(nowhere: Headless) -> None:
    limits = nowhere.do(nowhere.node("GPUConfiguration"))
    succeeds(nowhere)
    assert outputs(limits)["system_constraints"]["release_patience_s"] == 7


def test_waiting_is_reported_tick_by_tick(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    world = tmp_path / "world"
    world.write_text("blender 4242 20GiB")
    client = simulate(f"sim:40GiB,world={world}")
    limits = nowhere.do(nowhere.node("GPUConfiguration", release_patience_s=60))
    node = nowhere.do(nowhere.node("GenerateImage", prompt="waits", model="flux-full"))
    nowhere.do(nowhere.connect(limits, "system_constraints", node, "system_constraints"))

    async def wait_for_three_ticks_then_make_room() -> Any:
        run = asyncio.create_task(nowhere.run())
        while outputs(node).get("logs", "").count("Waiting for") < 3:
            assert not run.done(), run.result()
            await asyncio.sleep(0.02)
        assert outputs(node)["status"].startswith("Waiting for")
        assert [job.state for job in client.jobs()] == ["waiting"]
        world.unlink()
        return await run

    result = nowhere.do(wait_for_three_ticks_then_make_room())
    assert result.succeeded(), result.result_details
    ticks = [line for line in outputs(node)["logs"].splitlines() if "Waiting for" in line]
    assert all("blender 4242 holds 20.0 GiB" in tick for tick in ticks)
    left = [float(tick.rpartition(", ")[2].split()[0]) for tick in ticks]
    assert 50 < left[0] <= 60, "the minute of the node"
    assert left == sorted(left, reverse=True)
    assert outputs(node)["timings"]["denoise"]["wait_s"] >= 0.8


def test_patience_that_ends_names_who_has_the_memory(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    world = tmp_path / "world"
    world.write_text("blender 4242 20GiB")
    simulate(f"sim:40GiB,world={world}")
    limits = nowhere.do(nowhere.node("GPUConfiguration", release_patience_s=0.5))
    node = nowhere.do(nowhere.node("GenerateImage", prompt="waits", model="flux-full"))
    nowhere.do(nowhere.connect(limits, "system_constraints", node, "system_constraints"))
    said = fails(nowhere, node)
    assert outputs(node)["logs"].count("Waiting for") <= 2, "half a second of it"
    assert "blender 4242 has 21.5 GB" in said
    assert "what would fit: quantization_mode int8, quantization_mode fp8" in said


def test_a_budget_refuses_with_an_alternative_that_fits(
    simulate: Simulate, nowhere: Headless
) -> None:
    """Over the fraction: refused before anything moves, and the advice works when it is taken."""
    client = simulate("sim:28GiB")
    limits = nowhere.do(nowhere.node("GPUConfiguration"))
    model = nowhere.do(nowhere.node("DiffusionModel", model="flux-full"))
    node = nowhere.do(nowhere.node("GenerateImage", prompt="large"))
    nowhere.do(nowhere.connect(limits, "system_constraints", node, "system_constraints"))
    nowhere.do(nowhere.connect(model, "model_handle", node, "model"))
    said = fails(nowhere, node)
    assert "gpu_memory_fraction allows 24.1 GB of 30.1 GB" in said
    assert not client.status().cards[0].residents, "nothing was moved"
    assert not client.jobs(include_ended=True)

    assert "take quantization_mode int8 (13.5 GB) or quantization_mode int4 (8.3 GB)" in said

    nowhere.do(nowhere.set(model, quantization_mode="int8"))
    succeeds(nowhere)
    nowhere.do(nowhere.set(model, quantization_mode="None"))
    nowhere.do(nowhere.set(limits, gpu_memory_fraction=1.0))
    succeeds(nowhere)
    nowhere.do(nowhere.set(limits, gpu_memory_fraction=0.8, allow_low_memory=True))
    succeeds(nowhere)
    assert "it runs all the same, by allow_low_memory" in outputs(node)["logs"]


def test_a_budget_counts_the_part_of_a_streamed_model_that_is_on_the_card(
    simulate: Simulate, nowhere: Headless, tmp_path: Path
) -> None:
    model = json.loads((INSTANT_MODELS / "flux-full.instant.json").read_text(encoding="utf-8"))
    model["name"] = "streamed"
    model["components"][0]["blocks"] = 40
    (tmp_path / "models").mkdir()
    (tmp_path / "models/streamed.instant.json").write_text(json.dumps(model), encoding="utf-8")
    simulate("sim:12GiB", "--models", str(tmp_path / "models"))
    node = nowhere.do(
        nowhere.node(
            "GenerateImage",
            prompt="x",
            model="streamed",
            system_constraints={"gpu_memory_fraction": 0.99},
        )
    )
    succeeds(nowhere)
    nowhere.do(nowhere.set(node, system_constraints={"gpu_memory_fraction": 0.5}))
    assert re.search(r"needs 12\.\d GB of .* allows 6\.4 GB of 12\.9 GB", fails(nowhere, node))


def test_main_memory_bounds_a_card_that_is_the_cpu(connected: Headless) -> None:
    limits = connected.do(connected.node("GPUConfiguration", cpu_memory_gb=0.001))
    node = connected.do(connected.node("GenerateImage", prompt="a red cube"))
    connected.do(connected.connect(limits, "system_constraints", node, "system_constraints"))
    said = fails(connected, node)
    assert "cpu_memory_gb allows 1.0 MB" in said


def test_a_limit_without_effect_is_logged(simulate: Simulate, nowhere: Headless) -> None:
    simulate()
    limits = nowhere.do(nowhere.node("GPUConfiguration"))
    node = nowhere.do(nowhere.node("PreloadModel", model="small"))
    nowhere.do(nowhere.connect(limits, "system_constraints", node, "system_constraints"))
    succeeds(nowhere)
    assert "cpu_memory_gb has no effect on sim:0" in outputs(node)["logs"]


def test_a_card_that_is_not_there_is_named(simulate: Simulate, nowhere: Headless) -> None:
    simulate()
    limits = nowhere.do(nowhere.node("GPUConfiguration", gpu_device="cuda:7"))
    node = nowhere.do(nowhere.node("GenerateImage", prompt="x", model="small"))
    nowhere.do(nowhere.connect(limits, "system_constraints", node, "system_constraints"))
    assert fails(nowhere, node) == (
        "The service has no card cuda:7: set gpu_device to `any` or to one of sim:0."
    )


def test_a_model_that_never_fits_is_refused_with_fallbacks(
    simulate: Simulate, nowhere: Headless
) -> None:
    simulate("sim:24GiB")
    node = nowhere.do(nowhere.node("GenerateImage", prompt="x", model="huge"))
    said = fails(nowhere, node)
    assert "denoise needs 41.5 GiB" in said
    assert "quantization_mode int4" in said.partition("what would fit: ")[2]


# What goes wrong.


def test_a_service_that_is_down_is_reported_with_its_address(nowhere: Headless) -> None:
    for kind in ("GenerateImage", "PreloadModel", "UnloadModels", "GPUStatus"):
        nowhere.do(nowhere.fresh_flow())
        values = {"prompt": "x"} if kind == "GenerateImage" else {}
        node = nowhere.do(nowhere.node(kind, **values))
        assert fails(nowhere, node) == (
            "No moored service answers at 127.0.0.1:9: start it there with `moored serve`, or set "
            "its address in the settings, under moored, as endpoint."
        )


def test_a_service_that_did_not_start_is_reported_with_its_address_alone(engine: Headless) -> None:
    from moored_griptape.run_node import in_a_sentence

    with (
        moored.Client("127.0.0.1:9") as client,
        pytest.raises(moored.ConnectionFailed, match=r"within 0\.1 s") as caught,
    ):
        client.wait_until_ready(0.1)
    assert in_a_sentence(caught.value).startswith(
        "No moored service answers at 127.0.0.1:9: start it there"
    )


def test_a_job_that_ends_from_outside_is_reported_and_the_next_one_runs(
    nowhere: Headless, tmp_path: Path
) -> None:
    """Cancelled by somebody else; the service killed, and started again."""
    arguments = ("--models", str(INSTANT_MODELS))
    options: dict[str, Any] = {"state": tmp_path / "state", "devices": ("sim:40GiB",)}
    service = Service(*arguments, **options)
    client = service.client()
    nowhere.do(nowhere.settings(endpoint=service.address))
    node = nowhere.do(nowhere.node("GenerateImage", prompt="x", model="slow", steps=200))

    async def ended_by(what: Callable[[], object]) -> str:
        run = asyncio.create_task(nowhere.run())
        while not outputs(node).get("status", "").startswith("Step"):
            assert not run.done(), run.result()
            await asyncio.sleep(0.01)
        await asyncio.to_thread(what)
        assert (await run).failed()
        return details(node)

    try:
        said = nowhere.do(ended_by(lambda: client.cancel(client.jobs()[0].id)))
        assert said == f"Cancelled by {client.client_id}; run it again."
        said = nowhere.do(ended_by(service.kill))
        assert said.startswith(f"The connection to {service.address} was lost")
        assert said.endswith("run again.")
        service = Service(*arguments, listen=service.address, **options)
        nowhere.do(nowhere.set(node, steps=1))
        succeeds(nowhere)
    finally:
        client.close()
        service.kill()


def test_a_failure_may_be_handled_by_the_workflow(nowhere: Headless) -> None:
    node = nowhere.do(nowhere.node("GenerateImage", prompt="x"))
    after = nowhere.do(nowhere.node("DiffusionModel"))
    nowhere.do(nowhere.connect(node, "failure", after, "exec_in"))
    succeeds(nowhere)
    assert outputs(node)["was_successful"] is False
    assert outputs(after)["model_handle"]["model"] == "", "it went on, by the Failed output"


def test_a_token_is_asked_for_and_comes_from_the_secrets(nowhere: Headless, tmp_path: Path) -> None:
    from griptape_nodes.retained_mode.events.secrets_events import SetSecretValueRequest

    token = "0123456789abcdef-a-token"
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    service = Service("--token-file", str(tmp_path / "token"), state=tmp_path / "state")
    try:
        nowhere.do(nowhere.settings(endpoint=service.address))
        node = nowhere.do(nowhere.node("GPUStatus"))
        assert "MOORED_TOKEN" in fails(nowhere, node)
        nowhere.do(nowhere.ask(SetSecretValueRequest(key="MOORED_TOKEN", value="no töken")))
        assert "MOORED_TOKEN has characters that no token has" in fails(nowhere, node)
        nowhere.do(nowhere.ask(SetSecretValueRequest(key="MOORED_TOKEN", value=token)))
        succeeds(nowhere)
        # The settings of a stranger's workspace lead the token nowhere else.
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            other = f"127.0.0.1:{stranger.getsockname()[1]}"
            nowhere.do(nowhere.settings(endpoint=other))
            assert f"it belongs to http://{service.address}" in fails(nowhere, node)
            stranger.settimeout(0)
            with pytest.raises(BlockingIOError):
                stranger.accept()
    finally:
        nowhere.do(nowhere.ask(SetSecretValueRequest(key="MOORED_TOKEN", value="")))
        service.kill()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": ""}, "There is no prompt: say what the picture is to show."),
        ({"prompt": "x", "width": 100}, "multiple of 16"),
        ({"prompt": "x", "height": -16}, "height is 0 or more"),
        ({"prompt": "x", "steps": 1 << 40}, "steps is 0 or more, and less than 2^32"),
        ({"prompt": "x", "seed": -5}, "seed is 0 or more"),
        ({"prompt": "x", "guidance": "much"}, "guidance is a number"),
        ({"prompt": "x", "guidance": -1}, "guidance is 0 or more, not -1"),
        ({"prompt": "x", "true_guidance": "-1"}, "true_guidance is 0 or more, not -1"),
        (
            {"prompt": "x", "model": '{"quantization_mode": "int3"}'},
            "one of auto, None, fp8, int8, int4",
        ),
        ({"prompt": "x", "model": '{"keep_alive_s": 9999}'}, "0 to 3600 seconds"),
        ({"prompt": "x", "model": '{"keep_alive_s": "long"}'}, "keep_alive_s is a number"),
        ({"prompt": "x", "model": "{broken"}, "connect a Diffusion Model node"),
        ({"prompt": "x", "model": {"quantisation": "int4"}}, "handle has no quantisation"),
        ({"prompt": "x", "model": '{"loras": ["owner/lora"]}'}, '"owner/lora" is not there'),
        ({"prompt": "x", "model": '{"loras": ["ink:much"]}'}, "strength is a number"),
        ({"prompt": "x", "model": {"loras": [{"id": "a", "weight": 1}]}}, "A LoRA has no weight"),
        ({"prompt": "x", "model": {"loras": [7]}}, "7 is no LoRA"),
        ({"prompt": "x", "model": {"loras": [{"id": "a", "curve": [1]}]}}, "curve of a LoRA is"),
        ({"prompt": "x", "model": {"loras": "[1,"}}, "loras is no JSON list"),
        ({"prompt": "x", "model": {"loras": {"id": "a", "strength": []}}}, "strength is a number"),
        ({"prompt": "x", "model": "no/such-model"}, "no/such-model"),
        ({"prompt": "x", "system_constraints": {"gpu_memory_fraction": 1.5}}, "at most 1"),
        ({"prompt": "x", "system_constraints": {"gpu_memory": 1}}, "has no gpu_memory"),
        ({"prompt": "x", "system_constraints": {"gpu_memory": 1, 2: 1}}, "has no 2, gpu_memory"),
        ({"prompt": "x", "system_constraints": {"cpu_memory_gb": "lots"}}, "is a number"),
        ({"prompt": "x", "system_constraints": {"cpu_memory_gb": "nan"}}, "a number over 0"),
        ({"prompt": "x", "system_constraints": {"cpu_memory_gb": "inf"}}, "a number over 0"),
    ],
)
def test_wrong_inputs_are_reported_in_a_sentence(
    connected: Headless, values: dict[str, Any], said: str
) -> None:
    node = connected.do(connected.node("GenerateImage", **values))
    assert said in fails(connected, node)
    assert "image" not in outputs(node)


def test_an_edit_without_a_picture_says_so(connected: Headless, tmp_path: Path) -> None:
    node = connected.do(connected.node("EditImage", prompt="x"))
    assert fails(connected, node).startswith("There is no picture to start from")
    (tmp_path / "notes.png").write_text("no picture")
    connected.do(connected.set(node, input_image=str(tmp_path / "notes.png")))
    assert fails(connected, node).startswith("The input_image is no picture")
    connected.do(connected.set(node, input_image=str(tmp_path / "gone.png")))
    assert "gone.png" in fails(connected, node)
    Image.new("1", (15_000, 15_000)).save(tmp_path / "vast.png")
    connected.do(connected.set(node, input_image=str(tmp_path / "vast.png")))
    assert fails(connected, node).startswith("The input_image is too large")


@pytest.mark.parametrize("name", ["a\0b.png", "a\ud800b.png", "~nobody-of-this-name/b.png"])
@pytest.mark.parametrize("field", ["input_image", "mask", "reference_image"])
def test_a_file_with_an_impossible_path_is_reported(
    connected: Headless, tmp_path: Path, field: str, name: str
) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "start.png")
    given = {"input_image": str(tmp_path / "start.png")} | {field: name}
    node = connected.do(connected.node("EditImage", prompt="x", **given))
    sentence = fails(connected, node)
    assert "b.png" in sentence
    assert sentence.isprintable()


@pytest.mark.parametrize("name", ["a\0b.png", "a\ud800b.png"])
def test_an_impossible_output_file_is_reported_before_anything_is_computed(
    connected: Headless, name: str
) -> None:
    node = connected.do(connected.node("GenerateImage", prompt="x", output_file=name))
    sentence = fails(connected, node)
    assert sentence.startswith("output_file: ")
    assert sentence.isprintable()
    assert "Denoising" not in outputs(node)["logs"]


@pytest.mark.parametrize("endpoint", ["box\0:1", "box\ud800:1"])
def test_an_impossible_address_is_reported(nowhere: Headless, endpoint: str) -> None:
    nowhere.do(nowhere.settings(endpoint=endpoint))
    node = nowhere.do(nowhere.node("GenerateImage", prompt="x"))
    assert "no address of a service" in fails(nowhere, node)


# Choices.


def test_the_buttons_bring_models_and_cards_without_blocking(
    simulate: Simulate, nowhere: Headless
) -> None:
    from griptape_nodes.retained_mode.events.node_events import SendNodeMessageRequest
    from griptape_nodes.traits.options import Options

    async def click(node: Any, parameter: str) -> list[str]:
        await nowhere.ask(
            SendNodeMessageRequest(
                node_name=node.name,
                optional_element_name=parameter,
                message_type="on_click",
                message=None,
            )
        )
        (options,) = node.get_parameter_by_name(parameter).find_elements_by_type(Options)
        until = asyncio.get_running_loop().time() + 30
        while len(options.choices) == 1 and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        return list(options.choices)

    model = nowhere.do(nowhere.node("DiffusionModel"))
    simulate()
    models = nowhere.do(click(model, "model"))
    assert models[0] == "default"
    assert {"flux-full", "small"} <= set(models)
    limits = nowhere.do(nowhere.node("GPUConfiguration"))
    assert nowhere.do(click(limits, "gpu_device")) == ["any", "sim:0"]
    nowhere.do(nowhere.set(model, model="typed/in"))
    assert model.get_parameter_value("model") == "typed/in", "what is typed in stays"
