"""What the pack ships besides code: example workflows, help pages, languages. All of it fits the nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
from node_texts import LOCALES, PACK, PAGES, inputs_of, texts, with_lists
from object_info import golden
from PIL import Image

from service import ROOT

NODES = golden()["nodes"]
WORKFLOWS = sorted((PACK / "example_workflows").glob("*.json"))
LANGUAGES = sorted(folder.name for folder in LOCALES.iterdir())
PICTURE_AT_MOST_BYTES = 150_000

# Nodes of ComfyUI itself that the examples use: their outputs, by type.
CORE = {
    "LoadImage": ["IMAGE", "MASK"],
    "SaveImage": ["IMAGE"],
    "PreviewImage": ["IMAGE"],
    "LatentFlip": ["LATENT"],
    "Canny": ["IMAGE"],
    "SolidMask": ["MASK"],
    "MaskComposite": ["MASK"],
    "SaveVideo": [],
    "LoadAudio": ["AUDIO"],
    "SaveAudioAdvanced": [],
}
SEED_CONTROL = "control_after_generate"


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def widgets_of(node: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The widgets in the order in which the frontend has them: name, type, options."""
    for name, (kind, options) in inputs_of(NODES[node]).items():
        if kind in ("COMBO", "STRING", "INT", "FLOAT", "BOOLEAN"):
            yield name, kind, options
            if options.get(SEED_CONTROL):
                yield SEED_CONTROL, "COMBO", {"options": ["fixed", "randomize"]}


def fits(value: Any, kind: str, options: dict[str, Any]) -> bool:
    if kind == "COMBO":
        # Which models there are is the service's to say.
        return value in options["options"] or (options["options"] == [] and bool(value))
    if kind in ("INT", "FLOAT"):
        right = isinstance(value, int if kind == "INT" else (int, float))
        return right and options["min"] <= value <= options["max"]
    return isinstance(value, bool if kind == "BOOLEAN" else str)


def test_there_are_examples_for_what_people_begin_with() -> None:
    pictures = {"text_to_image", "image_to_image", "inpaint", "control_net", "lora"}
    pictures |= {"kontext_edit", "klein_edit", "qwen_image", "qwen_edit", "sdxl"}
    films = {"first_film", "text_to_video", "image_to_video"}
    films |= {"between_two_pictures", "film_with_sound"}
    music = {"first_music", "text_to_music", "repaint_music", "cover_music"}
    names = {path.stem for path in WORKFLOWS}
    assert names == pictures | films | music | {"low_memory", "latent_round_trip"}


def test_examples_name_models_as_the_service_lists_them() -> None:
    """Lists have the ids of the hub, also of a model that was pulled by its short name."""
    catalogue = tomllib.loads((ROOT / "service/hub/src/catalogue.toml").read_text(encoding="utf-8"))
    short = {model["id"] for model in catalogue["models"]}
    for path in WORKFLOWS:
        nodes = (node for node in load(path)["nodes"] if node["type"] == "MooredLoadModel")
        for name in (node["widgets_values"][0] for node in nodes):
            others = name.startswith("moored/") or name == "black-forest-labs/FLUX.1-Kontext-dev"
            assert others or name in short, f"{path.stem}: {name}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_example_fits_the_nodes(path: Path) -> None:
    workflow = load(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for node in nodes.values():
        if node["type"] in CORE:
            continue
        assert node["type"] in NODES
        there = {each["name"] for each in node["inputs"]}
        assert there == inputs_of(NODES[node["type"]]).keys()
        assert [out["name"] for out in node["outputs"]] == NODES[node["type"]]["output_name"]
        widgets = list(widgets_of(node["type"]))
        assert len(node.get("widgets_values", [])) == len(widgets)
        named = node.get("widgets_values_named", {})
        for value, (name, kind, options) in zip(
            node.get("widgets_values", []), widgets, strict=True
        ):
            assert fits(value, kind, options), f"{node['type']}.{name} = {value!r}"
            assert named[name] == value
    for _, source, out, target, into, _ in workflow["links"]:
        given = nodes[source]["outputs"][out]["type"]
        wanted = nodes[target]["inputs"][into]["type"]
        assert given == wanted or "*" in (given, wanted), (nodes[source]["type"], given, wanted)
        kinds = NODES.get(nodes[source]["type"], {}).get("output", CORE.get(nodes[source]["type"]))
        assert kinds[out] == given


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_example_has_what_it_needs_linked_and_a_picture(path: Path) -> None:
    workflow = load(path)
    for node in workflow["nodes"]:
        required = NODES.get(node["type"], {}).get("input", {}).get("required", {})
        for each in node["inputs"]:
            if each["name"] in required and "widget" not in each:
                assert each["link"] is not None, f"{node['type']}.{each['name']}"
    picture = path.with_suffix(".jpg")
    assert picture.stat().st_size < PICTURE_AT_MOST_BYTES
    with Image.open(picture) as image:
        assert image.format == "JPEG"


@pytest.mark.parametrize("node", NODES)
def test_a_help_page_says_of_every_input_and_output_what_the_node_says(node: str) -> None:
    """Written by `node_texts.py --write`."""
    page = (PAGES / f"{node}.md").read_text(encoding="utf-8")
    assert with_lists(page, NODES[node]) == page
    assert not re.search(r"^- `\w+`: *$", page, re.MULTILINE), "what has no tooltip has words here"


def test_every_help_page_is_of_a_node() -> None:
    assert {path.stem for path in (PACK / "web/docs").iterdir()} == NODES.keys()


def test_the_english_texts_are_those_of_the_nodes() -> None:
    """Written by `node_texts.py --write`."""
    assert load(LOCALES / "en/nodeDefs.json") == texts()


def shape(tree: Any) -> Any:
    """A tree of texts without the texts."""
    return {key: shape(value) for key, value in tree.items()} if isinstance(tree, dict) else None


def leaves(tree: Any) -> Iterator[str]:
    for value in tree.values():
        yield from leaves(value) if isinstance(value, dict) else [value]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_has_every_text(language: str) -> None:
    assert shape(load(LOCALES / language / "nodeDefs.json")) == shape(texts())
    english = load(LOCALES / "en/main.json")
    said = load(LOCALES / language / "main.json")
    assert shape({key: said[key] for key in english}) == shape(english)
    settings = load(LOCALES / language / "settings.json")
    script = (PACK / "web/moored.js").read_text(encoding="utf-8")
    ids = re.findall(r'id: "(moored\.\w+)"', script)
    assert len(ids) == 5
    assert settings.keys() == {each.replace(".", "_") for each in ids}
    named = load(LOCALES / "en/settings.json")
    assert shape(settings) == shape(named)
    assert all(one.keys() - {"options"} == {"name", "tooltip"} for one in settings.values())
    for option in named["moored_start_service"]["options"]:
        assert f'"{option}"' in script
    for name in ("main.json", "nodeDefs.json", "settings.json"):
        assert all(text.strip() for text in leaves(load(LOCALES / language / name)))


def test_the_pack_says_what_the_registry_asks_for() -> None:
    """By the registry's specification. `scripts/packs` has its own program look, and adds addresses."""
    about = tomllib.loads((PACK / "pyproject.toml").read_text(encoding="utf-8"))
    project, comfy = about["project"], about["tool"]["comfy"]
    assert re.fullmatch(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*", project["name"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["license"] == {"file": "LICENSE"}
    assert (PACK / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert all(
        one.startswith(("Operating System :: ", "Environment :: "))
        for one in project["classifiers"]
    )
    wanted = (PACK / "requirements.txt").read_text(encoding="utf-8").split()
    assert wanted == project["dependencies"], "ComfyUI-Manager installs those"
    assert comfy["PublisherId"]
    assert comfy["DisplayName"]
    assert re.fullmatch(r">=\d+\.\d+\.\d+", comfy["requires-comfyui"])
    script = (ROOT / "scripts/packs").read_text(encoding="utf-8")
    for field, name, (width, height) in (
        ("Icon", "icon.svg", (1, 1)),
        ("Banner", "banner.svg", (21, 9)),
    ):
        assert comfy[field] == ""
        assert f"nodes/comfyui/{name}" in script
        head = re.search(r'viewBox="0 0 (\d+) (\d+)"', (PACK / name).read_text())
        assert head
        assert int(head[1]) * height == int(head[2]) * width, "the registry's shape"


def test_there_is_more_than_english() -> None:
    assert len(LANGUAGES) > 1
