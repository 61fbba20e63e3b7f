"""The judge accepts drawn ground truth and refuses other scenes. Run: pytest demo/test_judge.py."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))

import judge  # noqa: E402
import scenes  # noqa: E402


def _pairs(count: int) -> list[tuple[scenes.Scene, np.ndarray]]:
    rng = random.Random(7)
    drawn = [scenes.sample_scene(rng, 1 + index % 3) for index in range(count)]
    return [(scene, scenes.draw(scene, rng)) for scene in drawn]


def test_accepts_ground_truth() -> None:
    pairs = _pairs(600)
    verdicts = [judge.judge(picture, scene.to_json()) for scene, picture in pairs]
    wrong = [(pair[0], v) for pair, v in zip(pairs, verdicts, strict=True) if not v.right]
    assert len(wrong) <= 6, wrong


def test_refuses_shuffled_scenes() -> None:
    pairs = _pairs(150)
    others = [scene for scene, _ in pairs[3:] + pairs[:3]]  # the same number of shapes
    verdicts = [judge.judge(p, s.to_json()) for (_, p), s in zip(pairs, others, strict=True)]
    assert sum(verdict.right for verdict in verdicts) == 0


@pytest.mark.parametrize("kind", ["shape", "colour", "size", "place"])
def test_names_the_changed_attribute(kind: str) -> None:
    rng = random.Random(11)
    choices = {"shape": scenes.SHAPES, "size": scenes.SIZES}
    choices |= {"colour": scenes.COLOURS, "place": scenes.PLACES}
    right = 0
    for _ in range(60):
        scene = scenes.sample_scene(rng, 2)
        first, second = scene.objects
        taken = {getattr(first, kind), scene.background, second.place}
        value = rng.choice([choice for choice in choices[kind] if choice not in taken])
        changed = replace(scene, objects=(replace(first, **{kind: value}), second))
        verdict = judge.judge(scenes.draw(changed, rng), scene.to_json())
        right += verdict.mistakes == (kind,)
    assert right >= 59


def test_names_background_missing_and_extra() -> None:
    rng = random.Random(13)
    scene = scenes.sample_scene(rng, 2)
    used = {scene.background, *(thing.colour for thing in scene.objects)}
    other = next(colour for colour in scenes.COLOURS if colour not in used)
    picture = scenes.draw(replace(scene, background=other))
    assert judge.judge(picture, scene.to_json()).mistakes == ("background colour",)
    fewer = replace(scene, objects=scene.objects[:1])
    assert judge.judge(scenes.draw(fewer), scene.to_json()).mistakes == ("missing object",)
    assert judge.judge(scenes.draw(scene), fewer.to_json()).mistakes == ("extra object",)


def test_refuses_an_empty_and_a_noisy_picture() -> None:
    scene = scenes.sample_scene(random.Random(1), 3).to_json()
    empty = np.full((128, 128, 3), scenes.PALETTE[scene["background"]], np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    assert judge.judge(empty, scene).mistakes == ("missing object",) * 3
    assert not judge.judge(noise, scene).right


def _changed_pairs(
    meaning: dict[str, str], count: int
) -> list[tuple[dict, np.ndarray, np.ndarray]]:
    """Scenes, and their pictures with the old and with the changed meaning."""
    rng = random.Random(17)
    rows = []
    for index in range(count):
        scene = scenes.sample_scene(rng, 1 + index % 3).to_json()
        changed = scenes.Scene.from_json(judge.change_meaning(scene, meaning))
        old = scenes.draw(scenes.Scene.from_json(scene), rng)
        rows.append((scene, old, scenes.draw(changed, rng)))
    return rows


def test_a_changed_meaning_changes_its_shape_alone() -> None:
    things = [
        {"shape": shape, "colour": "red", "size": "small", "place": place}
        for shape, place in (("circle", "left"), ("star", "top"), ("square", "centre"))
    ]
    scene = {"background": "blue", "objects": things}
    changed = judge.change_meaning(scene, {"circle": "star", "star": "cross"})
    assert [thing["shape"] for thing in changed["objects"]] == ["star", "cross", "square"]
    assert [thing["shape"] for thing in things] == ["circle", "star", "square"]
    for before, after in zip(things, changed["objects"], strict=True):
        assert before | {"shape": None} == after | {"shape": None}
    assert changed["background"] == "blue"
    assert judge.names_changed(scene, {"circle": "star"})
    assert not judge.names_changed(scene, {"ring": "star"})


@pytest.mark.parametrize("meaning", [{"circle": "star"}, {"square": "cross", "ring": "circle"}])
def test_tells_the_changed_meaning_from_the_old(meaning: dict[str, str]) -> None:
    rows = _changed_pairs(meaning, 90)
    drawn = [scene for scene, _, _ in rows]
    named = sum(judge.names_changed(scene, meaning) for scene in drawn)
    assert 20 < named < 70
    for which, new, old in (("old", 0, named), ("new", named, 0)):
        pictures = [Image.fromarray(row[1 if which == "old" else 2]) for row in rows]
        found = judge.report_meaning(drawn, pictures, meaning)
        counts = found["summary"]["naming_a_changed_shape"]
        assert counts["pictures"] == named
        assert abs(counts["new_meaning"] - new) <= 1
        assert abs(counts["old_meaning"] - old) <= 1
        others = found["summary"]["naming_none"]
        assert others["pictures"] == 90 - named
        assert others["right"] >= 90 - named - 1
        assert len(found["verdicts"]) == 90


def test_a_prompt_without_the_word_must_keep_its_meaning() -> None:
    meaning = {"circle": "star"}
    things = (scenes.Thing("square", "red", "large", "left"),)
    scene = scenes.Scene("blue", things)
    spoilt = replace(scene, objects=(replace(things[0], shape="star"),))
    pictures = [Image.fromarray(scenes.draw(one)) for one in (scene, spoilt)]
    found = judge.report_meaning([scene.to_json()] * 2, pictures, meaning)["summary"]
    assert found["naming_none"] == {"pictures": 2, "right": 1}
    assert found["naming_a_changed_shape"]["pictures"] == 0
    assert found["mistakes"]["shape"] == 1


def test_meanings_are_read_from_their_spelling() -> None:
    assert judge.parse_meaning("circle=star") == {"circle": "star"}
    assert judge.parse_meaning("circle=star, star=cross") == {"circle": "star", "star": "cross"}
    for wrong in ("", "circle", "circle=", "disc=star", "circle=circle", "ring=star,ring=cross"):
        with pytest.raises(ValueError):
            judge.parse_meaning(wrong)


class _Service:
    """A client of a service that draws the scene itself; in nf4 it draws nothing for the second prompt."""

    def __init__(self, ignores: str = "") -> None:
        self.asked: list[tuple[int, dict[str, str]]] = []
        self._ignores = ignores

    def generate_image(self, prompt: str, *, model: Any, seed: int, timeout: float) -> Any:
        self.asked.append((seed, dict(model.formats)))
        scene = scenes.Scene.from_json(json.loads(prompt))
        if seed == 1 and "nf4" in model.formats.values():
            scene = replace(scene, objects=())
        used = {"transformer": "full", "vae": "full"}
        if self._ignores not in model.formats.values():
            used |= model.formats
        image = Image.fromarray(scenes.draw(scene))
        return SimpleNamespace(image=image, model=SimpleNamespace(quantization=used))


def test_formats_are_judged_one_by_one() -> None:
    rng = random.Random(5)
    drawn = [scenes.sample_scene(rng, count).to_json() for count in (1, 2, 3)]
    prompts = [{"prompt": json.dumps(scene), "scene": scene} for scene in drawn]
    service = _Service()
    found = judge.judge_through(service, prompts, ["full", "nf4"], ["transformer"])
    assert service.asked[:3] == [(seed, {}) for seed in range(3)]
    assert service.asked[3:] == [(seed, {"transformer": "nf4"}) for seed in range(3)]
    assert (found["full"]["right"], found["full"]["difference"]) == (3, 0)
    assert found["nf4"]["by_number_of_shapes"] == {"1": [1, 1], "2": [0, 1], "3": [1, 1]}
    assert found["nf4"]["difference"] > 0
    *_, last = judge.table(found).splitlines()
    assert last.startswith("| nf4 | 1 of 1 | 0 of 1 | 1 of 1 | 2 of 3 | ")


def test_a_format_that_was_not_used_is_an_error() -> None:
    scene = scenes.sample_scene(random.Random(5), 1).to_json()
    prompts = [{"prompt": json.dumps(scene), "scene": scene}]
    with pytest.raises(RuntimeError, match="int8 was asked for"):
        judge.judge_through(_Service(ignores="int8"), prompts, ["int8"], ["transformer"])


def test_palettes_agree() -> None:
    assert judge.PALETTE == scenes.PALETTE
    assert judge.RADII == scenes.RADII


def test_held_out_prompts_are_the_files() -> None:
    rows = (Path(__file__).resolve().parent / "heldout.jsonl").read_text().splitlines()
    loaded = [json.loads(row) for row in rows]
    assert loaded == scenes.held_out_prompts(len(rows) // 3)
    assert all(scenes.is_held_out(scenes.Scene.from_json(row["scene"])) for row in loaded)
