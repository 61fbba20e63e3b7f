"""What the pack's nodes say of themselves: held against what a real ComfyUI made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moored
import pytest
import tomllib
from conftest import PACK
from node_texts import texts_of
from object_info import comparable, golden
from standin.executor import StandIn


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIn]:
    standin = StandIn(PACK, tmp_path_factory.mktemp("standin"))
    yield standin
    standin.stop()


def test_the_nodes_are_those_of_the_golden_file(standin: StandIn) -> None:
    """After a change of a node: object_info.py --write, with a real ComfyUI."""
    now, taken = comparable(standin.object_info()), golden()["nodes"]
    assert sorted(now) == sorted(taken)
    for name, info in now.items():
        assert info == taken[name], name
        assert info["input_order"] == taken[name]["input_order"]


def test_the_golden_file_says_where_it_is_from() -> None:
    taken = golden()
    assert taken["comfyui_version"]
    assert taken["taken"]


def words_of(info: dict[str, Any]) -> Iterator[str]:
    yield info["display_name"]
    yield info["description"]
    for group in ("required", "optional"):
        for _, options in info["input"].get(group, {}).values():
            yield options.get("tooltip", "")


def test_the_service_chooses_the_quantization_unless_it_is_named(standin: StandIn) -> None:
    _, options = standin.object_info()["MooredLoadModel"]["input"]["required"]["quantization"]
    assert options["default"] == "auto"
    assert options["options"] == ["auto", "full", "8-bit", "4-bit"]


def test_every_node_and_input_says_what_it_is(standin: StandIn) -> None:
    for name, info in standin.object_info().items():
        for words in words_of(info):
            assert words, name
        assert info["api_node"] is False


@pytest.mark.parametrize("path", sorted(PACK.glob("locales/*/nodeDefs.json")), ids=str)
def test_every_locale_has_the_words_of_every_node(standin: StandIn, path: Path) -> None:
    locale = json.loads(path.read_text(encoding="utf-8"))
    for name, info in standin.object_info().items():
        words, found = texts_of(info), locale[name]
        assert sorted(found["inputs"]) == sorted(words["inputs"]), name
        if path.parent.name == "en":
            assert found["description"] == words["description"]
            assert found["display_name"] == words["display_name"]
            for one, said in words["inputs"].items():
                assert found["inputs"][one]["tooltip"] == said["tooltip"]


def test_the_pack_has_the_version_of_its_client() -> None:
    about = tomllib.loads((PACK / "pyproject.toml").read_text(encoding="utf-8"))
    assert about["project"]["version"] == moored.__version__
    assert "comfyui" not in about["project"]["name"].lower(), "the registry does not take that"


def test_prompts_of_the_examples_name_nodes_that_there_are(standin: StandIn) -> None:
    nodes = standin.object_info()
    examples: list[Path] = sorted((PACK / "example_workflows").glob("*.json"))
    for example in examples:
        for node in json.loads(example.read_text(encoding="utf-8"))["nodes"]:
            if node["type"].startswith("Moored"):
                assert node["type"] in nodes, example.name
