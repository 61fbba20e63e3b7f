"""The judge accepts true films and refuses others. Run: pytest demo/film."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import film_judge  # noqa: E402
import films  # noqa: E402
import scenes  # noqa: E402


def _sampled(count: int, seed: int = 7) -> list[films.Film]:
    rng = random.Random(seed)
    return [films.sample_film(rng) for _ in range(count)]


def _three_frames(film: films.Film, rng: random.Random | None = None) -> list[np.ndarray]:
    return [films.draw(film, share, rng) for share in (0.0, 0.5, 1.0)]


def _mistakes(frames: list[np.ndarray], film: films.Film) -> list[str]:
    shares = (0.0, 0.5, 1.0)
    return [
        m
        for f, s in zip(frames, shares, strict=True)
        for m in film_judge.judge_frame(f, film, s)[0]
    ]


def test_accepts_true_frames() -> None:
    rng = random.Random(1)
    wrong = [film for film in _sampled(150) if _mistakes(_three_frames(film, rng), film)]
    assert len(wrong) <= 1, wrong


@pytest.mark.parametrize("sections", [1, 2, 3, 4, 5])
def test_accepts_a_whole_true_film_of_any_length(sections: int) -> None:
    (film,) = _sampled(1, seed=sections)
    frames = films.draw_film(film, sections)
    assert frames.shape == (36 * sections + 1, 64, 64, 3)
    assert film_judge.judge_film(frames, film).right


@pytest.mark.parametrize("kind", ["shape", "colour", "background", "start", "end"])
def test_names_the_changed_attribute(kind: str) -> None:
    rng = random.Random(11)
    choices = {"shape": scenes.SHAPES, "colour": scenes.COLOURS, "background": scenes.COLOURS}
    right = 0
    for film in _sampled(40, seed=3):
        taken = {getattr(film, kind), film.start, film.end, film.colour, film.background}
        others = [c for c in choices.get(kind, scenes.PLACES) if c not in taken]
        shown = replace(film, **{kind: rng.choice(others)})
        mistakes = set(_mistakes(_three_frames(shown), film))
        expected = {"background": "background colour", "start": "place", "end": "place"}
        right += mistakes == {expected.get(kind, kind)}
    assert right >= 39


def test_refuses_a_still_film_and_one_played_backwards() -> None:
    film = films.Film("circle", "red", "blue", "left", "right")
    frames = films.draw_film(film, 3)
    still = np.repeat(frames[:1], len(frames), 0)
    assert film_judge.judge_film(still, film).mistakes == ("middle: place", "end: place")
    assert film_judge.judge_film(frames[::-1], film).mistakes == ("start: place", "end: place")


def test_refuses_an_empty_frame_and_two_objects() -> None:
    film = films.Film("star", "pink", "black", "top", "bottom left")
    empty = np.full((64, 64, 3), scenes.PALETTE["black"], np.uint8)
    assert film_judge.judge_frame(empty, film, 0.0)[0] == ["missing object"]
    two = np.maximum(films.draw(film, 0.0), films.draw(film, 1.0))
    assert film_judge.judge_frame(two, film, 0.0)[0] == ["extra object"]


def test_refuses_lengths_that_no_section_count_gives() -> None:
    film = films.Film("ring", "white", "green", "centre", "top left")
    for count in (0, 1, 36, 38, 108):
        with pytest.raises(ValueError, match="36 for each section"):
            film_judge.judge_film(np.zeros((count, 64, 64, 3), np.uint8), film)


def test_held_out_prompts_are_held_out_and_neighbours_end_elsewhere() -> None:
    rows = [json.loads(line) for line in (HERE / "heldout.jsonl").read_text().splitlines()]
    assert rows == films.held_out_prompts(len(rows)) and len(rows) == 100
    wanted = [films.Film.from_json(row["film"]) for row in rows]
    assert all(films.is_held_out(film) for film in wanted)
    assert all(a.end != b.end for a, b in zip(wanted, wanted[1:] + wanted[:1], strict=True))


def test_one_film_in_ten_is_held_out_and_none_is_trained_on() -> None:
    rng = random.Random(5)
    share = sum(films.is_held_out(films.sample_film(rng)) for _ in range(5000)) / 5000
    assert 0.07 < share < 0.13
    assert not any(films.is_held_out(films.sample_training_film(rng)) for _ in range(500))


def test_prompts_use_the_languages_words_and_name_the_end() -> None:
    rng, words = random.Random(9), set(films.language_words())
    for film in _sampled(400):
        prompt = films.write_prompt(rng, film)
        assert set(prompt.replace(",", "").split()) <= words
        assert any(
            f"to {end}" in prompt.replace("to the ", "to ") for end in films.PLACE_WORDS[film.end]
        )


def test_motion_covers_the_way_once_whatever_the_number_of_sections() -> None:
    for sections in range(1, 9):
        bounds = films.boundaries(sections)
        assert len(bounds) == sections + 1 and bounds[0] == 0 and bounds[-1] == 1
        assert bounds == sorted(set(bounds))
    assert films.boundaries(4) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert films.progress(3, 54) == pytest.approx(0.5)


def test_a_film_can_be_in_place_though_it_is_not_right() -> None:
    film = films.Film("square", "cyan", "purple", "right", "top left")
    recoloured = film_judge.judge_film(films.draw_film(replace(film, colour="red"), 1), film)
    assert recoloured.in_place and not recoloured.right
    elsewhere = film_judge.judge_film(films.draw_film(replace(film, end="bottom"), 1), film)
    assert not elsewhere.in_place
    empty = film_judge.judge_film(np.zeros((37, 64, 64, 3), np.uint8), film)
    assert not empty.in_place


def test_folders_of_arrays_and_of_pictures_are_read(tmp_path: Path) -> None:
    from PIL import Image

    film = films.Film("square", "cyan", "purple", "right", "top left")
    frames = films.draw_film(film, 1)
    np.save(tmp_path / "0000.npy", frames)
    np.savez_compressed(tmp_path / "0001.npz", frames=frames)
    (tmp_path / "0002").mkdir()
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / "0002" / f"{index:04d}.png")
    result = film_judge.judge_films(film_judge.open_folder(tmp_path, 3), [film] * 3)
    assert result["summary"]["right"] == 3
    assert Counter(len(v["mistakes"]) for v in result["verdicts"]) == {0: 3}
