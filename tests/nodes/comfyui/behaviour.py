"""What the pack does, told as tests of whatever `comfyui` is: the stand-in, or a real one.

`test_standin.py` and `test_real_comfyui.py` import them all, each with a fixture `comfyui` of its own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import moored
import numpy as np
import pytest
from conftest import HUB_MODEL
from lora_files import LAYERS, RANK, instant_adapter, random_lora, write_safetensors
from PIL import Image
from product import CASES, SEED, Row, generated, name_of, numbers_of, start_picture
from prompts import RED, SIZE, Graph, Prompt
from runs import Run
from tiny_models import FIXTURES, picture_models
from waiting import until

from service import Service, model_as, slower_model

Serve = Callable[..., Service]

DEADLINE_S = 60.0

# More than a minute on the model "slow": such a job ends before only if it is ended.
LONG: dict[str, Any] = {"steps": 200, "count": 8}

# What ends a line of a text on classic nodes, which show HTML, and on those of Nodes 2.0: Markdown.
BREAK = "  \n"

# So that half of the start is left: with all of the schedule, none of it would be.
HALF: dict[str, Any] = {"strength": 0.5, "steps": 4}


class ComfyUI(Protocol):
    """What a frontend can do with ComfyUI."""

    process_id: int

    def queue(self, prompt: Prompt, client_id: str = "a") -> Run: ...
    def interrupt(self) -> None: ...
    def free(self) -> None: ...
    def set(self, **settings: Any) -> None: ...
    def upload(self, name: str, image: Image.Image) -> str: ...


def shown(graph: Graph, node: str, slot: int = 0) -> str:
    """Adds a node that shows a node's pictures."""
    return graph.preview([node, slot])


def same(pictures: list[Any], expected: list[Any]) -> None:
    """Pixel by pixel."""
    assert len(pictures) == len(expected)
    for picture, other in zip(pictures, expected, strict=True):
        assert np.array_equal(picture, other)


@contextmanager
def busy(client: moored.Client) -> Iterator[None]:
    """A card that generates for somebody else."""
    with client.stream_image("other", model="slow", **LONG, client_id="other") as stream:
        next(event for event in stream if isinstance(event, moored.Step))
        yield


def scene(seed: int) -> Image.Image:
    """A picture to start from."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST)


# The product: every shipped model in every precision.


def add_row(comfyui: ComfyUI, graph: Graph, row: Row) -> str:
    """The node that generates what a row of the product asks for."""
    options = row.options | {"seed": SEED, "steps": row.steps}
    match row.medium:
        case "image":
            return graph.text_to_image(row.prompt, **options)
        case "video" if row.needs_picture:
            start = graph.add("LoadImage", image=comfyui.upload("start.png", start_picture()))
            return graph.image_to_video([start, 0], row.prompt, give_frames=True, **options)
        case "video":
            return graph.text_to_video(row.prompt, give_frames=True, **options)
        case "audio":
            return graph.text_to_music(row.prompt, **options)


@pytest.mark.parametrize(("row", "precision"), CASES, ids=name_of)
def test_a_shipped_model_generates_as_the_client_does(
    comfyui: ComfyUI,
    demo_service: Service,
    client: moored.Client,
    row: Row,
    precision: str,
) -> None:
    graph = Graph(demo_service.address, model=row.model, quantization=precision)
    made = add_row(comfyui, graph, row)
    expected = numbers_of(generated(client, row, precision))
    match row.medium:
        case "image":
            show = shown(graph, made)
            same(comfyui.queue(graph.prompt).succeeded().pictures(show), [expected])
        case "video":
            show = shown(graph, made, 1)
            same(comfyui.queue(graph.prompt).succeeded().pictures(show), list(expected))
        case "audio":
            graph.add("PreviewAudio", audio=[made, 0])
            run = comfyui.queue(graph.prompt).succeeded()
            assert run.texts(made)[-1].startswith("Done in")


# Pictures.


def test_text_to_image_gives_the_same_picture_as_the_client(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    show = shown(graph, graph.text_to_image())
    run = comfyui.queue(graph.prompt).succeeded()
    same(
        run.pictures(show),
        [client.generate_image(RED, seed=7, steps=2, **SIZE).pictures[0].array],
    )


def test_true_guidance_alone_uses_an_empty_negative_prompt(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    guided = shown(graph, graph.text_to_image(true_guidance=3.0))
    alone = shown(graph, graph.text_to_image(negative_prompt="a dog"))
    run = comfyui.queue(graph.prompt).succeeded()
    options: dict[str, Any] = {"seed": 7, "steps": 2, **SIZE}
    away = client.generate_image(RED, negative_prompt="", true_guidance=3.0, **options)
    same(run.pictures(guided), [away.pictures[0].array])
    same(run.pictures(alone), [client.generate_image(RED, **options).pictures[0].array])
    assert not np.array_equal(run.pictures(guided)[0], run.pictures(alone)[0])


def test_a_model_without_true_guidance_refuses_it_by_name(
    comfyui: ComfyUI, demo_service: Service
) -> None:
    graph = Graph(demo_service.address, model="moored/demo-sound")
    made = graph.text_to_music(negative_prompt="drums", true_guidance=3.0)
    graph.add("PreviewAudio", audio=[made, 0])
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert re.search(r"negative_prompt is not taken .*true_guidance is not taken", run.error, re.I)
    assert run.texts(made)[-1] in run.error


def test_several_pictures_come_as_a_batch(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    show = shown(graph, graph.text_to_image(count=3, seed=2**64 - 2))
    run = comfyui.queue(graph.prompt).succeeded()
    seeds = [2**64 - 2, 2**64 - 1, 0]
    expected = [client.generate_image(RED, seed=s, steps=2, **SIZE) for s in seeds]
    same(run.pictures(show), [one.pictures[0].array for one in expected])


def test_image_to_image_makes_count_pictures_of_each_picture_of_a_batch(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    loaded = [graph.add("LoadImage", image=comfyui.upload(f"{n}.png", scene(n))) for n in (1, 2)]
    batch = graph.add("ImageBatch", image1=[loaded[0], 0], image2=[loaded[1], 0])
    show = shown(graph, graph.image_to_image(image=[batch, 0], count=2, seed=5, **HALF))
    run = comfyui.queue(graph.prompt).succeeded()
    expected = [
        client.generate_image(RED, init_image=scene(n), seed=seed, **HALF, **SIZE)
        for n, seed in ((1, 5), (1, 6), (2, 7), (2, 8))
    ]
    same(run.pictures(show), [one.pictures[0].array for one in expected])


def test_a_picture_of_any_size_is_taken(comfyui: ComfyUI, demo_service: Service) -> None:
    graph = Graph(demo_service.address)
    odd = comfyui.upload("odd.png", scene(1).resize((75, 50)))
    loaded = graph.add("LoadImage", image=odd)
    repainted = shown(graph, graph.image_to_image(image=[loaded, 0]))
    decoded = shown(graph, graph.decode([graph.encode([loaded, 0]), 0]))
    run = comfyui.queue(graph.prompt).succeeded()
    assert run.pictures(repainted)[0].shape == (48, 80, 3)
    assert run.pictures(decoded)[0].shape == (48, 80, 3)


def test_a_latent_is_decoded_and_repainted(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    generated = graph.text_to_image(count=2)
    at_once = shown(graph, generated)
    later = shown(graph, graph.decode([generated, 1]))
    again = shown(graph, graph.image_to_image(latent=[generated, 1], seed=3, **HALF))
    run = comfyui.queue(graph.prompt).succeeded()
    same(run.pictures(later), run.pictures(at_once))
    expected = []
    for seed in (7, 8):
        kept = client.generate_image(RED, seed=seed, steps=2, keep_latent=True, **SIZE).latents[0]
        one = client.generate_image(RED, seed=seed - 4, init_latent=kept, **HALF, **SIZE)
        expected.append(one.pictures[0].array)
    same(run.pictures(again), expected)


def test_an_encoded_picture_comes_back(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    loaded = graph.add("LoadImage", image=comfyui.upload("encoded.png", scene(3)))
    show = shown(graph, graph.decode([graph.encode([loaded, 0], seed=4), 0]))
    run = comfyui.queue(graph.prompt).succeeded()
    latent = client.encode_image(scene(3), seed=4).latent
    same(run.pictures(show), [client.decode_latent(latent).pictures[0].array])


def test_a_latent_goes_to_comfyui_and_back(comfyui: ComfyUI, demo_service: Service) -> None:
    graph = Graph(demo_service.address)
    generated = graph.text_to_image(count=2)
    before = shown(graph, generated)
    samples = graph.add("MooredLatentToComfyUI", latent=[generated, 1])
    link = {"model": [graph.model, 0], "samples": [samples, 0]}
    after = shown(graph, graph.decode([graph.add("MooredLatentFromComfyUI", **link), 0]))
    run = comfyui.queue(graph.prompt).succeeded()
    for one, other in zip(run.pictures(before), run.pictures(after), strict=True):
        # Scaled and back in f32: a rounding here and there.
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1


def test_a_latent_alone_is_generated_and_says_where_it_belongs(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    generated = graph.text_to_image(latent_only=True, seed=11)
    decoded = shown(graph, graph.decode([generated, 1]))
    run = comfyui.queue(graph.prompt).succeeded()
    expected = client.generate_image(RED, seed=11, steps=2, **SIZE).pictures[0].array
    same(run.pictures(decoded), [expected])
    assert not [text for text in run.texts(generated) if text.startswith("Decoding")]
    shown(graph, generated)
    assert "VAE Decode" in comfyui.queue(graph.prompt).done().error


# LoRAs.


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped model and LoRAs for it."""
    folder = tmp_path_factory.mktemp("loras")
    tensors = random_lora()
    write_safetensors(folder / "styles" / "ink.safetensors", tensors)
    write_safetensors(folder / "oil.safetensors", random_lora(seed=2))
    unknown = {f"transformer.none.lora_{part}.weight": tensors.popitem()[1] for part in "BA"}
    write_safetensors(folder / "unknown.safetensors", tensors | unknown)
    arguments = ("--set", f"models.adapters={json.dumps([str(folder)])}")
    service = Service(*arguments, state=tmp_path_factory.mktemp("adapting"))
    with service.client():
        pass
    yield service
    assert service.stop() == 0


def test_chained_loras_give_the_same_picture_as_the_client(
    comfyui: ComfyUI, adapting: Service
) -> None:
    graph = Graph(adapting.address)
    first = graph.lora("styles/ink", 0.5)
    second = graph.lora("", text_strength=" 0 ", other_lora=" oil ", model=first)
    shows = [shown(graph, graph.text_to_image(model=model)) for model in ("", first, second)]
    run = comfyui.queue(graph.prompt).succeeded()
    ink, oil = moored.Adapter("styles/ink", 0.5), moored.Adapter("oil", 1, text_strength=0)
    with adapting.client() as client:
        for show, adapters in zip(shows, ([], [ink], [ink, oil]), strict=True):
            own = client.generate_image(RED, seed=7, steps=2, adapters=adapters, **SIZE)
            same(run.pictures(show), [own.pictures[0].array])
    assert not np.array_equal(run.pictures(shows[0])[0], run.pictures(shows[1])[0])
    said = f"{LAYERS} layers of transformer, rank {RANK}"
    assert [run.texts(node)[-1] for node in (first, second)] == [said, said]


def test_a_lora_of_strength_0_is_left_out(comfyui: ComfyUI, adapting: Service) -> None:
    graph = Graph(adapting.address)
    lora = graph.lora("styles/ink", 0.0)
    shows = [shown(graph, graph.text_to_image(model=model)) for model in ("", lora)]
    run = comfyui.queue(graph.prompt).succeeded()
    same(run.pictures(shows[0]), run.pictures(shows[1]))
    assert run.texts(lora)[-1] == "Strength 0: left out"


def test_a_lora_says_which_tensors_it_ignored(comfyui: ComfyUI, adapting: Service) -> None:
    graph = Graph(adapting.address)
    lora = graph.lora("unknown", ignore_unknown=True)
    shown(graph, graph.text_to_image(model=lora))
    run = comfyui.queue(graph.prompt).succeeded()
    assert run.texts(lora)[-1] == (
        f"{LAYERS - 1} layers of transformer, rank {RANK}; 2 tensors ignored "
        "(transformer.none.lora_A.weight, transformer.none.lora_B.weight)"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "No LoRA is chosen"),
        ({"name": "gone"}, "gone.* is not there"),
        ({"name": "unknown"}, r"transformer\.none\.lora_A\.weight"),
        ({"name": "oil", "text_strength": "much"}, "text_strength is a number.*'much'"),
        ({"name": "oil", "text_strength": "nan"}, "text_strength is a number"),
        ({"name": "oil", "text_strength": "11"}, "text_strength is a number from -10 to 10"),
    ],
)
def test_a_lora_that_cannot_be_used_is_a_sentence_on_its_node(
    comfyui: ComfyUI, adapting: Service, options: dict[str, Any], said: str
) -> None:
    graph = Graph(adapting.address)
    lora = graph.lora(**options)
    shown(graph, graph.text_to_image(model=lora))
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert re.search(said, run.error), run.error
    assert "Traceback" not in run.error
    assert run.texts(lora)[-1] in run.error


def test_a_model_with_a_lora_is_held_and_unloaded_as_such(
    comfyui: ComfyUI, serve: Serve, tmp_path: Path
) -> None:
    instant_adapter(tmp_path / "loras", "red", 1 << 20)
    service = serve("sim:24GiB", adapters=tmp_path / "loras")
    with service.client() as client:
        graph = Graph(service.address, model="small", residency="hold")
        lora = graph.lora("red")
        graph.add("MooredPreload", model=[lora, 0], prove=False)
        comfyui.queue(graph.prompt).succeeded()
        held = {one.component.name: one.held for one in client.status().cards[0].residents}
        assert held["adapter:red:transformer"]
        assert all(held.values())
        gone = Graph(service.address, model="small", residency="hold")
        gone.add("MooredUnload", model=[gone.lora("red"), 0], force=False)
        comfyui.queue(gone.prompt).succeeded()
        there = {one.component.name for one in client.status().cards[0].residents}
        assert "adapter:red:transformer" not in there


# Masks, references and ControlNets.


@pytest.fixture(scope="module")
def editing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the tiny models of pictures, and two ControlNets."""
    models, nets = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("nets")
    picture_models(models)
    for name in ("single", "union"):
        shutil.copytree(FIXTURES / "flux-controlnet-tiny" / name, nets / name)
    arguments = ("--models", str(models), "--set", f"models.adapters={json.dumps([str(nets)])}")
    service = Service(*arguments, state=tmp_path_factory.mktemp("editing"))
    with service.client():
        pass
    yield service
    assert service.stop() == 0


def masked(seed: int) -> Image.Image:
    """A picture whose left half is transparent, as the mask editor writes it."""
    picture = scene(seed).convert("RGBA")
    picture.paste((0, 0, 0, 0), (0, 0, 32, 64))
    return picture


def test_a_mask_keeps_what_it_does_not_cover(
    comfyui: ComfyUI, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(demo_service.address)
    loaded = graph.add("LoadImage", image=comfyui.upload("start.png", scene(1)))
    cover = graph.add("LoadImage", image=comfyui.upload("masked.png", masked(1)))
    inputs: dict[str, Any] = {"image": [loaded, 0], "mask": [cover, 1], "count": 2, **HALF}
    show = shown(graph, graph.image_to_image(**inputs))
    run = comfyui.queue(graph.prompt).succeeded()
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (0, 0, 32, 64))
    own = [
        client.generate_image(RED, init_image=scene(1), mask=mask, seed=seed, **HALF, **SIZE)
        for seed in (7, 8)
    ]
    same(run.pictures(show), [one.pictures[0].array for one in own])
    for picture in run.pictures(show):
        assert np.array_equal(picture[:, 32:], np.asarray(scene(1))[:, 32:])


def test_a_mask_goes_with_a_latent(comfyui: ComfyUI, demo_service: Service) -> None:
    graph = Graph(demo_service.address)
    loaded = graph.add("LoadImage", image=comfyui.upload("masked.png", masked(1)))
    encoded = graph.encode([loaded, 0])
    inputs = {"latent": [encoded, 0], "mask": [loaded, 1], **HALF}
    generated = graph.image_to_image(**inputs)
    show = shown(graph, graph.decode([generated, 1]))
    before = comfyui.queue(graph.prompt).succeeded().pictures(show)
    free = Graph(demo_service.address)
    again = free.add("LoadImage", image=comfyui.upload("masked.png", masked(1)))
    other = shown(free, free.image_to_image(latent=[free.encode([again, 0]), 0], **HALF))
    without = comfyui.queue(free.prompt).succeeded().pictures(other)
    assert not np.array_equal(before[0], without[0])


def test_a_picture_is_edited_by_kontext(comfyui: ComfyUI, editing: Service) -> None:
    graph = Graph(editing.address, model="kontext")
    loaded = graph.add("LoadImage", image=comfyui.upload("edited.png", scene(2)))
    edited = graph.edit([loaded, 0], steps=1)
    show = shown(graph, edited)
    run = comfyui.queue(graph.prompt).succeeded()
    with editing.client() as client:
        options: dict[str, Any] = {"model": "kontext", "steps": 1, "seed": 7, **SIZE}
        own = client.generate_image(RED, references=[scene(2)], **options)
    same(run.pictures(show), [own.pictures[0].array])
    plain = Graph(editing.address, model="plain")
    loaded = plain.add("LoadImage", image=comfyui.upload("edited.png", scene(2)))
    shown(plain, plain.edit([loaded, 0], steps=1))
    run = comfyui.queue(plain.prompt).done()
    assert run.status == "error"
    assert "name a model that takes them" in run.error


def test_a_model_with_several_samplers_takes_the_one_that_is_chosen(
    comfyui: ComfyUI, editing: Service
) -> None:
    graph = Graph(editing.address, model="sdxl")
    chosen = ("default", "euler_ancestral", "dpmpp_2m_karras")
    shows = [shown(graph, graph.text_to_image(steps=3, sampler=name)) for name in chosen]
    run = comfyui.queue(graph.prompt).succeeded()
    options: dict[str, Any] = {"model": "sdxl", "steps": 3, "seed": 7, **SIZE}
    with editing.client() as client:
        own = [
            client.generate_image(RED, sampler=name, **options).pictures[0].array
            for name in (None, "euler_ancestral", "dpmpp_2m_karras")
        ]
    same([run.pictures(show)[0] for show in shows], own)
    assert len({picture.tobytes() for picture in own}) == len(own)
    plain = Graph(editing.address, model="plain")
    shown(plain, plain.text_to_image(steps=1, sampler="euler"))
    run = comfyui.queue(plain.prompt).done()
    assert run.status == "error"
    assert "sampler is not taken" in run.error.lower()


def test_pictures_are_edited_together_by_klein(comfyui: ComfyUI, editing: Service) -> None:
    """Each of a batch, with the first of each further input; one that is not linked is left out."""
    graph = Graph(editing.address, model="klein")
    batch = graph.text_to_image(steps=1, count=2)
    loaded = graph.add("LoadImage", image=comfyui.upload("further.png", scene(2)))
    further = {"image_2": [loaded, 0], "image_4": [batch, 0]}
    show = shown(graph, graph.edit([batch, 0], steps=1, **further))
    run = comfyui.queue(graph.prompt).succeeded()
    options: dict[str, Any] = {"model": "klein", "steps": 1, **SIZE}
    with editing.client() as client:
        made = client.generate_image(RED, seed=7, count=2, **options).pictures
        pictures = [one.image for one in made]
        own = [
            client.generate_image(
                RED, references=[one, scene(2), pictures[0]], seed=seed, **options
            )
            for seed, one in zip((7, 8), pictures, strict=True)
        ]
        turned = [scene(2), *pictures[:1] * 2]
        other = client.generate_image(RED, references=turned, seed=7, **options)
    same(run.pictures(show), [one.pictures[0].array for one in own])
    assert not np.array_equal(own[0].pictures[0].array, other.pictures[0].array), "order counts"


def test_further_pictures_are_refused_by_a_model_that_takes_one(
    comfyui: ComfyUI, editing: Service
) -> None:
    graph = Graph(editing.address, model="kontext")
    loaded = graph.add("LoadImage", image=comfyui.upload("edited.png", scene(2)))
    edited = graph.edit([loaded, 0], steps=1, image_3=[loaded, 0])
    shown(graph, edited)
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert "The reference images are 2; this model takes 1" in run.error
    assert run.texts(edited)[-1] in run.error


def test_chained_control_nets_give_the_same_picture_as_the_client(
    comfyui: ComfyUI, editing: Service
) -> None:
    graph = Graph(editing.address, model="plain")
    loaded = graph.add("LoadImage", image=comfyui.upload("edges.png", scene(3)))
    edges = [loaded, 0]
    none = graph.control(edges, "single", strength=0.0)
    first = graph.control(edges, "single", strength=0.5, end_percent=0.5)
    second = graph.control(
        edges, "", other_control_net=" union ", mode=2, start_percent=0.25, model=first
    )
    shows = [shown(graph, graph.text_to_image(model=model)) for model in (none, first, second)]
    run = comfyui.queue(graph.prompt).succeeded()
    single = moored.Control("single", scene(3), 0.5, 0.0, 0.5)
    union = moored.Control("union", scene(3), 1.0, 0.25, 1.0, 2)
    with editing.client() as client:
        for show, controls in zip(shows, ([], [single], [single, union]), strict=True):
            own = client.generate_image(
                RED, model="plain", seed=7, steps=2, controls=controls, **SIZE
            )
            same(run.pictures(show), [own.pictures[0].array])
    assert run.texts(none)[-1] == "Strength 0: left out"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("", {}, "No ControlNet is chosen"),
        ("gone", {}, "gone.* is not there"),
        ("union", {}, "modes (of union )?are 0 to 3"),
        ("union", {"mode": 4}, "modes (of union )?are 0 to 3"),
        ("single", {"start_percent": 0.5, "end_percent": 0.25}, "part of the steps"),
    ],
)
def test_a_control_net_that_cannot_be_used_is_a_sentence_on_its_node(
    comfyui: ComfyUI, editing: Service, name: str, options: dict[str, Any], said: str
) -> None:
    graph = Graph(editing.address, model="plain")
    loaded = graph.add("LoadImage", image=comfyui.upload("edges.png", scene(3)))
    control = graph.control([loaded, 0], name, **options)
    shown(graph, graph.text_to_image(model=control))
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert re.search(said, run.error), run.error
    assert "Traceback" not in run.error
    assert run.texts(control)[-1] in run.error


# Films.


def film_model(folder: Path, steps_ms: int, *, sound: bool = False) -> Path:
    """A folder of models, made in `folder`, with `film`: as `video`, with pieces so far apart."""
    return model_as(folder, "video", "film", steps_ms=steps_ms, sound=sound)


def test_a_film_is_the_clients_own(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="video")
        film = graph.text_to_video()
        show = shown(graph, graph.film_parts(film))
        named = {"frames": 3, "width": 96, "height": 32, "fps": 12.0, "seed": 8}
        sized = graph.text_to_video(**named, give_frames=True)
        batch = shown(graph, sized, 1)
        taken_apart = shown(graph, graph.film_parts(sized))
        run = comfyui.queue(graph.prompt).succeeded()
        own = client.generate_video(RED, model="video", seed=7, steps=2)
        same(run.pictures(show), list(own.array))
        small = {"frames": 3, "width": 96, "height": 32, "frames_per_second": 12.0}
        own = client.generate_video(RED, model="video", seed=8, steps=2, **small)
        same(run.pictures(batch), list(own.array))
        same(run.pictures(taken_apart), list(own.array))


def test_a_film_has_its_sound(comfyui: ComfyUI, serve: Serve, tmp_path: Path) -> None:
    service = serve("sim:24GiB", more_models=film_model(tmp_path, 0, sound=True))
    with service.client() as client:
        graph = Graph(service.address, model="film")
        film = graph.text_to_video()
        alone = graph.add("PreviewAudio", audio=[film, 2])
        of_video = graph.add("PreviewAudio", audio=[graph.film_parts(film), 1])
        run = comfyui.queue(graph.prompt).succeeded()
        own = client.generate_video(RED, model="film", seed=7, steps=2).audio
        assert own is not None
        for node in (alone, of_video):
            (heard,) = run.outputs[node]["audio"]
            # A real ComfyUI saves a file of it.
            if not isinstance(heard, dict):
                samples, rate = heard
                assert rate == own.sample_rate
                assert (samples[0].T * (1 << 15) == own.array).all()
        silent = Graph(service.address, model="video")
        made = silent.text_to_video(frames=2)
        silent.add("PreviewAudio", audio=[made, 2])
        run = comfyui.queue(silent.prompt).done()
        assert "has no sound" in run.error


def test_an_end_picture_that_a_model_does_not_take_is_refused(
    comfyui: ComfyUI, serve: Serve
) -> None:
    graph = Graph(serve("sim:24GiB").address, model="video")
    start = graph.add("LoadImage", image=comfyui.upload("start.png", scene(1)))
    film = graph.image_to_video([start, 0], frames=2, end_image=[start, 0])
    shown(graph, graph.film_parts(film))
    run = comfyui.queue(graph.prompt).done()
    assert re.search("end_image is not taken", run.error, re.I), run.error


def test_frames_are_given_where_they_are_asked_for(comfyui: ComfyUI, serve: Serve) -> None:
    graph = Graph(serve("sim:24GiB").address, model="video")
    film = graph.text_to_video(frames=2)
    show = shown(graph, film, 1)
    run = comfyui.queue(graph.prompt).done()
    assert "give_frames" in run.error
    assert show not in run.outputs


def test_a_film_is_as_long_as_its_seconds(comfyui: ComfyUI, serve: Serve) -> None:
    graph = Graph(serve("sim:24GiB").address, model="video")
    films = {
        film: frames
        for film, frames in (
            (graph.text_to_video(seconds=0.5), 12),  # of the 24 that the model makes a second
            (graph.text_to_video(seconds=0.5, fps=10.0), 5),
            (graph.text_to_video(seconds=0.1, fps=1.0), 1),
        )
    }
    shows = {shown(graph, graph.film_parts(film)): frames for film, frames in films.items()}
    run = comfyui.queue(graph.prompt).succeeded()
    assert {show: len(run.pictures(show)) for show in shows} == shows
    graph = Graph(serve("sim:24GiB").address, model="video")
    twice = graph.text_to_video(seconds=0.5, frames=3)
    shown(graph, graph.film_parts(twice))
    run = comfyui.queue(graph.prompt).done()
    assert "either seconds or frames" in run.error
    assert run.texts(twice)[-1] in run.error


def test_a_film_starts_from_a_picture_of_any_size(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    graph = Graph(service.address, model="video")
    # The model's own size is 64 x 64.
    large, small = (
        graph.add(
            "LoadImage", image=comfyui.upload(f"{side}.png", scene(1).resize((side, side * 2 // 3)))
        )
        for side in (750, 30)
    )
    batch = graph.add("ImageBatch", image1=[large, 0], image2=[large, 0])
    films = {
        graph.image_to_video([large, 0], frames=2): (48, 80),
        graph.image_to_video([small, 0], frames=2): (48, 80),
        graph.image_to_video([batch, 0], frames=2): (48, 80),
        graph.image_to_video([large, 0], frames=2, width=96): (64, 96),
        graph.image_to_video([large, 0], frames=2, height=32): (32, 48),
        graph.image_to_video([large, 0], frames=2, width=32, height=64): (64, 32),
    }
    shows = {film: shown(graph, graph.film_parts(film)) for film in films}
    run = comfyui.queue(graph.prompt).succeeded()
    for film, size in films.items():
        assert [frame.shape for frame in run.pictures(shows[film])] == [(*size, 3)] * 2
        assert "Encoding the picture" in run.texts(film)
        assert run.texts(film)[-1].startswith("Done in")


def test_a_lora_changes_a_film(comfyui: ComfyUI, serve: Serve, tmp_path: Path) -> None:
    instant_adapter(tmp_path / "loras", "red", 1 << 20)
    service = serve("sim:24GiB", adapters=tmp_path / "loras")
    graph = Graph(service.address, model="video")
    lora = graph.lora("red")
    films = [graph.text_to_video(model=model, frames=1) for model in ("", lora)]
    shows = [shown(graph, graph.film_parts(film)) for film in films]
    run = comfyui.queue(graph.prompt).succeeded()
    with service.client() as client:
        for show, adapters in zip(shows, ([], ["red"]), strict=True):
            own = client.generate_video(
                RED, model="video", seed=7, steps=2, frames=1, adapters=adapters
            )
            same(run.pictures(show), list(own.array))
    assert not np.array_equal(run.pictures(shows[0])[0], run.pictures(shows[1])[0])


def test_a_film_takes_no_control_nets(comfyui: ComfyUI, editing: Service) -> None:
    graph = Graph(editing.address, model="plain")
    loaded = graph.add("LoadImage", image=comfyui.upload("edges.png", scene(3)))
    film = graph.text_to_video(model=graph.control([loaded, 0], "single"))
    shown(graph, graph.film_parts(film))
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert "ControlNets are for pictures" in run.error
    assert run.texts(film)[-1] in run.error


def test_steps_and_previews_of_a_film_are_shown(comfyui: ComfyUI, serve: Serve) -> None:
    graph = Graph(serve("sim:24GiB").address, model="video")
    film = graph.text_to_video(steps=8, preview_every_s=0.1, width=96, height=48)
    shown(graph, graph.film_parts(film))
    run = comfyui.queue(graph.prompt).succeeded()
    assert {"Step 8/8", "Decoding"} <= set(run.texts(film))
    bar = [one.what for one in run.messages if one.kind == "progress" and one.node == film]
    assert bar[-1] == (8, 8)
    assert [value for value, _ in bar] == sorted(value for value, _ in bar)
    previews = [one.what for one in run.messages if one.kind == "preview"]
    assert len(previews) > 1, "while it is sampled, too"
    assert previews[-1] == (96, 48), "a frame of the finished film"


def test_an_interrupt_ends_a_film_within_a_step(
    comfyui: ComfyUI, serve: Serve, tmp_path: Path
) -> None:
    service = serve("sim:24GiB", more_models=film_model(tmp_path, steps_ms=6000))
    with service.client() as client:
        graph = Graph(service.address, model="film")
        film = graph.text_to_video(steps=100)
        shown(graph, graph.film_parts(film))
        run = comfyui.queue(graph.prompt)
        run.text("Step ")
        (before,) = client.jobs()
        (job,) = interrupted(comfyui, client, run)
        assert job.step - before.step <= 1
        assert re.fullmatch(r"Interrupted at step \d+ of 100", run.texts(film)[-1])
        assert client.status().latents == 0


def test_an_interrupt_ends_a_film_that_is_decoded(
    comfyui: ComfyUI, serve: Serve, tmp_path: Path
) -> None:
    service = serve("sim:24GiB", more_models=film_model(tmp_path, steps_ms=3000))
    with service.client() as client:
        graph = Graph(service.address, model="film")
        shown(graph, graph.film_parts(graph.text_to_video(steps=1)))
        run = comfyui.queue(graph.prompt)
        run.text("Decoding")
        (job,) = interrupted(comfyui, client, run)
        assert job.stage == "decode"
        assert client.status().latents == 0


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_a_model_of_another_medium_is_reported(
    comfyui: ComfyUI, demo_service: Service, seconds: float
) -> None:
    graph = Graph(demo_service.address)
    shown(graph, graph.film_parts(graph.text_to_video(seconds=seconds)))
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert "makes pictures" in run.error
    assert "Traceback" not in run.error


# What is shown.


def test_steps_previews_and_phases_are_shown(comfyui: ComfyUI, demo_service: Service) -> None:
    graph = Graph(demo_service.address)
    generated = graph.text_to_image(steps=20, count=2, width=128, height=128, preview_every_s=0.1)
    shown(graph, generated)
    run = comfyui.queue(graph.prompt).succeeded()
    texts = run.texts(generated)
    assert "Encoding the text" in texts[0] or texts[0].startswith(("Loading", "Queued"))
    # Of the steps of a picture only the last is told for certain, however slowly the rest is read.
    assert "Step 20/20" in texts
    assert any(re.fullmatch(r"Step 1?\d/20", text) for text in texts)
    assert texts[-1].startswith("Done in")
    bar = [one.what for one in run.messages if one.kind == "progress" and one.node == generated]
    assert bar[-1] == (40, 40)
    assert [value for value, _ in bar] == sorted(value for value, _ in bar)
    previews = [one.what for one in run.messages if one.kind == "preview"]
    assert previews
    assert max(max(size) for size in previews) <= 512
    assert previews[-1] == (128, 128), "the finished picture, at its own size"
    # A real ComfyUI does not say of which node a preview is.
    kinds = [
        one.kind
        for one in run.messages
        if one.kind == "preview" or (one.kind == "progress" and one.node == generated)
    ]
    assert kinds[-1] == "preview"


def test_quantization_auto_says_on_the_nodes_what_was_chosen_and_why(
    comfyui: ComfyUI, serve: Serve
) -> None:
    service = serve("sim:20GiB")
    graph = Graph(service.address, model="flux-full", quantization="auto")
    generated = graph.text_to_image()
    shown(graph, generated)
    run = comfyui.queue(graph.prompt).succeeded()
    (chosen,) = run.texts(graph.model)
    assert re.match(r"8-bit: full needs [\d.]+ GiB in its denoise stage, and sim:0 has ", chosen)
    texts = run.texts(generated)
    assert texts[0] == chosen, "as soon as it is known"
    assert re.fullmatch(rf"Done in [\d.]+ s{BREAK}" + re.escape(chosen), texts[-1]), (
        "and in the end"
    )
    with service.client() as client:
        (job,) = client.jobs(include_ended=True)
        assert job.model_key == "flux-full+8-bit"


@pytest.mark.parametrize("quantization", ["full", "8-bit", "4-bit"])
def test_a_quantization_of_a_saved_workflow_is_what_it_names(
    comfyui: ComfyUI, serve: Serve, quantization: str
) -> None:
    service = serve("sim:40GiB")
    graph = Graph(service.address, model="flux-full", quantization=quantization)
    generated = graph.text_to_image()
    shown(graph, generated)
    run = comfyui.queue(graph.prompt).succeeded()
    assert not run.texts(graph.model)
    assert "\n" not in run.texts(generated)[-1], "nothing was chosen"
    with service.client() as client:
        (job,) = client.jobs(include_ended=True)
        assert job.model_key == f"flux-full+{quantization}"


def test_formats_are_not_taken_with_quantization_auto(
    comfyui: ComfyUI, demo_service: Service
) -> None:
    graph = Graph(demo_service.address, quantization="auto", formats="transformer=int8")
    shown(graph, graph.text_to_image())
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert "leave formats empty, or choose full, 8-bit or 4-bit" in run.error


def test_loading_is_reported_by_bytes(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:40GiB,speed=12GiB/s")
    graph = Graph(service.address, model="flux-full")
    graph.add("MooredPreload", model=[graph.model, 0], prove=False)
    run = comfyui.queue(graph.prompt).succeeded()
    loading = [text for text in run.texts() if text.startswith("Loading transformer")]
    assert loading
    assert all(text.endswith("/22.2 GiB") for text in loading)
    with service.client() as client:
        assert residents(client).keys() >= {"transformer", "vae"}


def test_a_place_in_the_queue_is_reported(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client, busy(client):
        graph = Graph(service.address, model="small")
        shown(graph, graph.text_to_image())
        run = comfyui.queue(graph.prompt)
        run.text("Queued 1st")
        (ours,) = [job for job in client.jobs() if job.client_id != "other"]
        assert ours.client_id.startswith("comfyui-")
        comfyui.interrupt()
        assert run.done().status == "interrupted"


def test_waiting_is_reported_with_who_holds_the_memory(
    comfyui: ComfyUI, serve: Serve, tmp_path: Any
) -> None:
    world = tmp_path / "world"
    world.write_text("blender 4242 20GiB")
    service = serve(f"sim:40GiB,world={world}")
    graph = Graph(service.address, model="flux-full")
    shown(graph, graph.text_to_image(patience_s=30.0))
    run = comfyui.queue(graph.prompt)
    text = run.text("Waiting for").what
    assert "GiB needed" in text
    assert "GiB free" in text
    assert "blender 4242 holds 20.0 GiB" in text
    assert " s left" in text
    world.unlink()
    run.succeeded()


# The interrupt button.


def interrupted(comfyui: ComfyUI, client: moored.Client, run: Run) -> list[moored.JobInfo]:
    """Presses the button; the jobs that it has ended, all of them before they were done."""
    comfyui.interrupt()
    until(client, lambda status: not status.jobs)
    assert run.done().status == "interrupted"
    ended = client.jobs(include_ended=True)
    assert {job.state for job in ended} == {"cancelled"}
    return list(ended)


def test_an_interrupt_ends_a_job_within_a_step(
    comfyui: ComfyUI, serve: Serve, tmp_path: Path
) -> None:
    # So long a step that the button is pressed and heard within it, or in the next.
    service = serve("sim:24GiB", more_models=slower_model(tmp_path, steps_ms=6000))
    with service.client() as client:
        graph = Graph(service.address, model="slower")
        generated = graph.text_to_image(**LONG)
        show = shown(graph, generated)
        run = comfyui.queue(graph.prompt)
        run.text("Step ")
        (before,) = client.jobs()
        (job,) = interrupted(comfyui, client, run)
        assert job.step - before.step <= 1
        assert re.fullmatch(r"Interrupted at step \d+ of 200", run.texts(generated)[-1])
        # The next prompt knows nothing of it.
        graph.prompt[generated]["inputs"] |= {"steps": 1, "count": 1}
        graph.prompt[graph.model]["inputs"]["model"] = "small"
        assert len(comfyui.queue(graph.prompt).succeeded().pictures(show)) == 1


def test_an_interrupt_ends_a_job_that_is_queued(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="small")
        shown(graph, graph.text_to_image())
        with busy(client):
            run = comfyui.queue(graph.prompt)
            run.text("Queued")
            comfyui.interrupt()
            until(client, lambda status: [job.client_id for job in status.jobs] == ["other"])
            assert run.done().status == "interrupted"


def test_an_interrupt_ends_a_job_that_loads(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:40GiB,speed=512MiB/s")
    with service.client() as client:
        graph = Graph(service.address, model="flux-full")
        shown(graph, graph.text_to_image())
        run = comfyui.queue(graph.prompt)
        run.text("Loading")
        interrupted(comfyui, client, run)
        assert "text_encoder_2" not in residents(client), "not at the end of the load"


def test_an_interrupt_ends_a_job_that_waits(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:40GiB,foreign=20GiB")
    with service.client() as client:
        graph = Graph(service.address, model="flux-full")
        shown(graph, graph.text_to_image(patience_s=600.0))
        run = comfyui.queue(graph.prompt)
        run.text("Waiting")
        interrupted(comfyui, client, run)


def test_an_interrupt_ends_two_jobs_of_one_prompt(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB", "sim:24GiB,index=1")
    with service.client() as client:
        client.wait_until_ready(card="sim:1")
        graph = Graph(service.address, model="slow")
        generated = [graph.text_to_image(**LONG, seed=seed) for seed in (1, 2)]
        for one in generated:
            shown(graph, one)
        run = comfyui.queue(graph.prompt)
        until(client, lambda status: len(status.jobs) == 2)
        run.text("Step ")
        assert len(interrupted(comfyui, client, run)) == 2


# Errors.


def test_without_a_service_the_prompt_says_how_to_start_it(
    comfyui: ComfyUI, serve: Serve, unused_port: int
) -> None:
    address = f"127.0.0.1:{unused_port}"
    graph = Graph(address)
    show = shown(graph, graph.text_to_image())
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert run.error.strip() == (
        f"No moored service answers at {address}: start one with `moored serve`, or name its address by "
        "MOORED_ENDPOINT or in ComfyUI's settings under moored."
    )
    assert run.texts(graph.model)[-1] == run.error.strip(), "it is said on the node too"
    serve(listen=address)
    assert len(comfyui.queue(graph.prompt).succeeded().pictures(show)) == 1


def test_a_service_that_dies_in_a_job_is_reported(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    graph = Graph(service.address, model="slow")
    generated = graph.text_to_image(**LONG)
    show = shown(graph, generated)
    run = comfyui.queue(graph.prompt)
    run.text("Step ")
    service.kill()
    assert run.done().error == (
        f"The connection to {service.address} was lost before the job ended: see whether the service "
        "still runs, and queue the prompt again."
    )
    serve("sim:24GiB", listen=service.address)
    graph.prompt[generated]["inputs"] |= {"steps": 3, "count": 1}
    assert len(comfyui.queue(graph.prompt).succeeded().pictures(show)) == 1


def test_a_model_that_is_not_there_is_reported_with_a_remedy(
    comfyui: ComfyUI, demo_service: Service
) -> None:
    graph = Graph(demo_service.address, model="nobody/nothing")
    shown(graph, graph.text_to_image())
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert run.error.startswith("There is no model nobody/nothing")
    assert "`if missing` to pull" in run.error
    assert run.texts(graph.model)[-1] == run.error.strip()


def test_a_request_that_never_fits_is_refused_with_an_alternative(
    comfyui: ComfyUI, serve: Serve
) -> None:
    service = serve("sim:24GiB")
    graph = Graph(service.address, model="huge")
    shown(graph, graph.text_to_image())
    run = comfyui.queue(graph.prompt).done()
    assert run.status == "error"
    assert run.error.strip().endswith(".")
    assert "Traceback" not in run.error


def test_image_to_image_starts_from_one_thing(comfyui: ComfyUI, demo_service: Service) -> None:
    graph = Graph(demo_service.address)
    shown(graph, graph.image_to_image())
    run = comfyui.queue(graph.prompt).done()
    assert "link one of the two" in run.error
    assert run.texts()[-1] == run.error.strip()


def test_load_model_needs_a_name(comfyui: ComfyUI, demo_service: Service) -> None:
    """With the service down the list is empty, and a new node has nothing chosen."""
    graph = Graph(demo_service.address, model="")
    shown(graph, graph.text_to_image())
    assert "No model is chosen" in comfyui.queue(graph.prompt).done().error


def test_an_unknown_format_is_reported(comfyui: ComfyUI, demo_service: Service) -> None:
    graph = Graph(demo_service.address, formats="transformer:int8")
    shown(graph, graph.text_to_image())
    assert "component=format" in comfyui.queue(graph.prompt).done().error
    graph = Graph(demo_service.address, formats="transformer=int9")
    shown(graph, graph.text_to_image())
    assert '"int9" is none of' in comfyui.queue(graph.prompt).done().error


# Models that are missing.


def test_a_missing_model_is_pulled_on_request(
    comfyui: ComfyUI, puller: Service, demo_service: Service, client: moored.Client
) -> None:
    graph = Graph(puller.address, model="", other_model=HUB_MODEL)
    show = shown(graph, graph.text_to_image())
    refused = comfyui.queue(graph.prompt).done()
    assert refused.status == "error"
    assert f"There is no model {HUB_MODEL}" in refused.error
    assert "set its `if missing` to pull" in refused.error

    graph.prompt[graph.model]["inputs"]["when_missing"] = "pull"
    run = comfyui.queue(graph.prompt).succeeded()
    assert [text for text in run.texts(graph.model) if text.startswith("Pulling")]
    own = client.generate_image(RED, seed=7, steps=2, **SIZE)
    same(run.pictures(show), [own.pictures[0].array])


def test_an_interrupt_ends_a_pull(comfyui: ComfyUI, hub: Any, puller: Service) -> None:
    hub.stall("transformer/diffusion_pytorch_model.safetensors", 6_000_000)
    graph = Graph(puller.address, model=HUB_MODEL, when_missing="pull")
    shown(graph, graph.text_to_image())
    run = comfyui.queue(graph.prompt)
    run.text("Pulling")
    assert hub.stalled.wait(DEADLINE_S)
    comfyui.interrupt()
    assert run.done().status == "interrupted"
    assert hub.left.wait(DEADLINE_S), "the service let go of the hub"


# Several prompts.


def test_two_prompts_in_a_row(comfyui: ComfyUI, demo_service: Service) -> None:
    graph = Graph(demo_service.address)
    generated = graph.text_to_image(seed=21)
    show = shown(graph, generated)
    first = comfyui.queue(graph.prompt).succeeded().pictures(show)
    graph.prompt[generated]["inputs"]["seed"] = 22
    second = comfyui.queue(graph.prompt).succeeded().pictures(show)
    assert not np.array_equal(first[0], second[0])


def test_two_people_at_once(comfyui: ComfyUI, demo_service: Service) -> None:
    runs = []
    for client_id, seed in (("ann", 31), ("bob", 32)):
        graph = Graph(demo_service.address)
        show = shown(graph, graph.text_to_image(seed=seed, steps=6))
        runs.append(comfyui.queue(graph.prompt, client_id))
    ann, bob = (run.succeeded() for run in runs)
    assert not np.array_equal(ann.pictures(show)[0], bob.pictures(show)[0])
    assert "Step 6/6" in ann.texts()
    assert "Step 6/6" in bob.texts()
    strays = [one.what for run in (ann, bob) for one in run.strays if one.kind == "text"]
    assert strays == [], "nobody is shown what is another's"


# What handles claim.


def test_free_gives_up_holds_and_latents(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve()
    with service.client() as client:
        graph = Graph(service.address, residency="hold")
        shown(graph, graph.text_to_image(count=2))
        comfyui.queue(graph.prompt).succeeded()
        status = until(client, lambda status: status.latents == 2)
        assert all(one.held for one in status.cards[0].residents)
        assert {one.reason.split()[0] for one in client.unload("moored/demo").kept} == {"held"}
        comfyui.free()
        until(client, lambda status: status.latents == 0)
        until(client, lambda status: not any(one.held for one in status.cards[0].residents))
        assert client.unload("moored/demo").kept == ()


def test_an_interrupt_leaves_no_latents(comfyui: ComfyUI, serve: Serve) -> None:
    """Neither of the jobs that were done before, nor of the pictures of the one that it ends."""
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="slow")
        loaded = graph.add("LoadImage", image=comfyui.upload("again.png", scene(1)))
        two = graph.add("ImageBatch", image1=[loaded, 0], image2=[loaded, 0])
        batch = graph.add("ImageBatch", image1=[two, 0], image2=[two, 0])
        # Most of what the second job generates is still to come when its first latent is there, and two
        # more jobs after it.
        options = {"image": [batch, 0], "steps": 8, "strength": 1.0, "count": 8}
        generated = graph.image_to_image(**options, latent_only=True)
        shown(graph, graph.decode([generated, 1]))
        run = comfyui.queue(graph.prompt)
        run.until(lambda message: message.kind == "progress" and message.what[0] > 9 * 8)
        assert client.status().latents > 8
        comfyui.interrupt()
        assert run.done().status == "interrupted"
        until(client, lambda status: status.latents == 0)


def test_a_latent_outlives_its_service(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve()
    address = service.address
    graph = Graph(address)
    loaded = graph.add("LoadImage", image=comfyui.upload("kept.png", scene(5)))
    sources = {
        "generated": [graph.text_to_image(count=2, latent_only=True), 1],
        "encoded": [graph.encode([loaded, 0]), 0],
    }
    start = graph.text_to_image(latent_only=True, seed=3)
    repainted = graph.image_to_image(latent=[start, 1], latent_only=True, **HALF)
    sources["repainted"] = [repainted, 1]
    samples = graph.add("MooredLatentToComfyUI", latent=[start, 1])
    link = {"model": [graph.model, 0], "samples": [samples, 0]}
    sources["brought"] = [graph.add("MooredLatentFromComfyUI", **link), 0]
    decoders = {name: graph.decode(latent) for name, latent in sources.items()}
    shows = {name: shown(graph, decoder) for name, decoder in decoders.items()}
    before = comfyui.queue(graph.prompt).succeeded()

    assert service.stop() == 0
    serve(listen=address)
    # Another priority: the decoders run again, on latents that ComfyUI remembers and the service does not.
    for decoder in decoders.values():
        graph.prompt[decoder]["inputs"]["priority"] = "high"
    after = comfyui.queue(graph.prompt).succeeded()
    for name, show in shows.items():
        same(after.pictures(show), before.pictures(show))
        told = after.texts(decoders[name])
        made = [text for text in told if text.startswith("Making the latent again: Step")]
        assert bool(made) == (name in ("generated", "repainted")), (name, told)
        assert told[-1].startswith("Done in")


# What stays in memory.


def residents(client: moored.Client) -> dict[str, moored.ResidentComponent]:
    """Component name -> what is on the card."""
    return {one.component.name: one for one in client.status().cards[0].residents}


def test_pin_preload_and_unload_pass_on_what_they_get(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="small")
        preload = graph.add("MooredPreload", model=[graph.model, 0], prove=True)
        pin = graph.add("MooredPin", model=[preload, 0], pinned=True)
        generated = graph.text_to_image(model=pin)
        show = shown(graph, generated)
        run = comfyui.queue(graph.prompt).succeeded()
        assert len(run.pictures(show)) == 1
        until(client, lambda status: all(one.pinned for one in status.cards[0].residents))
        assert len(residents(client)) == 4

        graph.prompt[pin]["inputs"]["pinned"] = False
        unload = graph.add("MooredUnload", model=[pin, 0], after=[generated, 0], force=False)
        passed = shown(graph, unload, slot=1)
        run = comfyui.queue(graph.prompt).succeeded()
        same(run.pictures(passed), run.pictures(show))
        assert [text for text in run.texts(unload) if text.startswith("Freed 8.0 MiB")]
        until(client, lambda status: not status.cards[0].residents)


def test_unload_says_what_stayed_and_why(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    graph = Graph(service.address, model="small", residency="pin")
    preload = graph.add("MooredPreload", model=[graph.model, 0], prove=False)
    unload = graph.add("MooredUnload", model=[preload, 0], force=False)
    run = comfyui.queue(graph.prompt).succeeded()
    (told,) = [text for text in run.texts(unload) if text.startswith("Freed")]
    freed, *kept = told.split(BREAK)
    assert freed == "Freed 0.0 MiB"
    assert any(line.startswith("Kept ") and line.endswith(": pinned") for line in kept), kept
    assert len(kept) == 1, "what stayed for one reason is one line"


def test_an_unload_is_done_each_time(comfyui: ComfyUI, serve: Serve) -> None:
    """Somebody else may have brought the model back since."""
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="small")
        graph.add("MooredUnload", model=[graph.model, 0], force=False)
        for _ in range(2):
            client.load("small")
            comfyui.queue(graph.prompt).succeeded()
            assert residents(client) == {}


def test_unload_releases_the_nodes_own_hold(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="small", residency="hold")
        preload = graph.add("MooredPreload", model=[graph.model, 0], prove=False)
        comfyui.queue(graph.prompt).succeeded()
        assert all(one.held for one in residents(client).values())
        graph.add("MooredUnload", model=[preload, 0], force=False)
        comfyui.queue(graph.prompt).succeeded()
        assert residents(client) == {}


def test_load_model_pins_its_model(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="small", residency="pin")
        status = {"after": [graph.model, 0], "server": [graph.server, 0]}
        graph.add("MooredGPUStatus", **status)
        comfyui.queue(graph.prompt).succeeded()
        assert [model.id for model in client.list_models() if model.pinned] == ["small"]


def test_a_model_leaves_when_its_time_is_over(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        graph = Graph(service.address, model="small", residency="evict after", evict_after_s=0)
        shown(graph, graph.text_to_image())
        comfyui.queue(graph.prompt).succeeded()
        until(client, lambda status: not status.cards[0].residents)
        graph = Graph(service.address, model="slow", residency="evict after", evict_after_s=3600)
        shown(graph, graph.text_to_image())
        comfyui.queue(graph.prompt).succeeded()
        assert len(residents(client)) == 4


def test_naming_a_model_again_does_not_keep_it(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    with service.client() as client:
        said = {"model": "small", "residency": "evict after", "evict_after_s": 1}
        graph = Graph(service.address, **said)
        graph.add("MooredPreload", model=[graph.model, 0], prove=False)
        comfyui.queue(graph.prompt).succeeded()
        graph = Graph(service.address, **said, revision=" ")
        status = {"after": [graph.model, 0], "server": [graph.server, 0]}
        graph.add("MooredGPUStatus", **status)
        comfyui.queue(graph.prompt).succeeded()
        until(client, lambda status: not status.cards[0].residents)


def test_the_status_is_asked_for_each_time(comfyui: ComfyUI, serve: Serve) -> None:
    service = serve("sim:24GiB")
    graph = Graph(service.address, model="small")
    status = graph.add("MooredGPUStatus", server=[graph.server, 0])
    (before,) = comfyui.queue(graph.prompt).succeeded().outputs[status]["text"]
    assert "transformer" not in before
    with service.client() as client:
        client.load("small")
        client.pin("small")
    run = comfyui.queue(graph.prompt).succeeded()
    (after,) = run.outputs[status]["text"]
    assert "\n  transformer of small+full: 4.0 MiB (pinned)\n" in after
    shown = f"{BREAK}\u00a0\u00a0transformer of small+full: 4.0 MiB (pinned){BREAK}"
    assert shown in run.texts(status)[-1]
