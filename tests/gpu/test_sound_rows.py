"""What sessions were measured to take, as rows. Run: pytest tests/gpu."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/gpu")]

import peer_rows  # noqa: E402
import sound_rows  # noqa: E402


def figure(measure: str, value: float) -> peer_rows.Figure:
    of_card = {"device": "a card", "date": "2026-11-29"}
    return {"measure": measure, "figure": value, "unit": "ms", "who": "moored"} | of_card


def test_steps_with_loras_and_prompts_are_held_against_one_without_in_the_same_run() -> None:
    alike = sound_rows.step_of(10)
    loras, prompts = alike + sound_rows.WITH_LORAS, alike + sound_rows.WITH_PROMPTS
    first = [figure(alike, 5.0), figure(loras, 6.0)]
    second = [figure(alike, 4.5), figure(prompts, 4.4), figure(loras, 5.5)]
    rows = {row["measure"]: row for row in peer_rows.rows_of(sound_rows.ROWS, [first, second])}
    assert [(row["value"], row["target"], row["peer_value"]) for row in rows.values()] == [
        (4.5, None, None),
        (4.4, None, 4.5),
        (5.5, 4.95, 4.5),
    ]
    assert rows[loras]["peer"] == "alike"


def test_rows_of_an_earlier_run_stay() -> None:
    earlier = peer_rows.rows_of(sound_rows.ROWS, [[figure(sound_rows.step_of(60), 18.0)]])
    rows = peer_rows.rows_of(sound_rows.ROWS, [[figure(sound_rows.step_of(10), 4.5)]], earlier)
    assert [row["measure"] for row in rows] == [sound_rows.step_of(10), sound_rows.step_of(60)]
