"""What films were measured to take, as rows. Run: pytest tests/gpu."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/gpu")]

import film_rows  # noqa: E402
import peer_rows  # noqa: E402
import sound_rows  # noqa: E402

STEP, DECODE = film_rows.STEP, "decode of 5 latents, 832x480"
WAN = film_rows.WAN_14B


def figure(measure: str, value: float, who: str = "moored", **more: Any) -> peer_rows.Figure:
    known = {"measure": measure, "figure": value, "unit": "ms", "who": who}
    return known | more | {"device": "a card", "date": "2026-11-23"}


def by_measure(*runs: list[peer_rows.Figure]) -> dict[object, dict[str, object]]:
    return {row["measure"]: row for row in peer_rows.rows_of(film_rows.ROWS, runs)}


def test_a_target_is_a_share_of_what_diffusers_took_in_the_same_run() -> None:
    first = [figure(STEP, 1000.0, "diffusers eager"), figure(STEP, 740.0)]
    second = [
        figure(STEP, 900.0, "diffusers eager"),
        figure(STEP, 700.0),
        figure(f"{STEP} fp8", 500.0),
    ]
    rows = by_measure(first, second)
    assert (rows[STEP]["value"], rows[STEP]["target"], rows[STEP]["peer_value"]) == (700, 774, 900)
    assert rows[f"{STEP} fp8"]["target"] == 558


def test_a_later_run_without_diffusers_does_not_replace_one_beside_it() -> None:
    beside = [figure(DECODE, 800.0, "diffusers eager", peak_gib=21.0)]
    rows = by_measure(
        [*beside, figure(DECODE, 300.0, peak_gib=4.0)],
        [figure(DECODE, 290.0, peak_gib=4.5), figure(f"{STEP} nf4", 700.0)],
    )
    assert (rows[DECODE]["value"], rows[DECODE]["peer_value"]) == (300, 800)
    scratch = rows[f"{DECODE}: scratch"]
    assert (scratch["value"], scratch["unit"], scratch["target"]) == (4, "GiB", 5)
    assert scratch["peer_value"] == 21
    assert rows[f"{STEP} nf4"]["target"] is None and rows[f"{STEP} nf4"]["peer"] == ""


def test_wan_is_held_against_the_fastest_of_diffusers() -> None:
    eager = figure(f"{WAN}, eager", 3000.0, "diffusers eager")
    blocks = figure(f"{WAN}, blocks", 2500.0, "diffusers blocks")
    compiled = figure(WAN, 2500.0, "diffusers compiled")
    ours = [figure(WAN, 2400.0), figure(f"{WAN} fp8", 1900.0)]
    rows = by_measure([eager, blocks, compiled, *ours])
    assert [(row["target"], row["peer_value"]) for row in rows.values()] == [
        (2450, 2500),
        (1875, 2500),
    ]
    alone = by_measure([eager, *ours])
    assert [(row["target"], row["peer"]) for row in alone.values()] == [(None, ""), (None, "")]


def test_rows_of_the_file_stay_until_a_run_has_measured_them() -> None:
    beside = [figure(DECODE, 800.0, "diffusers eager"), figure(DECODE, 300.0)]
    first = [*beside, figure(STEP, 700.0), figure(WAN, 2600.0)]
    earlier = peer_rows.rows_of(film_rows.ROWS, [first])
    earlier.append(dict(earlier[0], measure="a figure of which there is no row any more"))
    now = [figure(WAN, 2400.0), figure(DECODE, 290.0)]
    rows = peer_rows.rows_of(film_rows.ROWS, [now], earlier)
    found = [(row["measure"], row["value"]) for row in rows]
    assert found == [(STEP, 700), (DECODE, 300), (WAN, 2400)]


def test_two_cards_are_held_against_one_in_the_same_run() -> None:
    step = f"{film_rows.SAMPLED}, 129 frames"
    run = [figure(f"{step}, one card", 4000.0), figure(f"{step}, two cards", 2100.0)]
    row = by_measure(run)[f"{step}, two cards"]
    assert (row["target"], row["peer"], row["peer_value"]) == (2222, "one card", 4000)


def test_no_row_of_the_docs_would_be_lost() -> None:
    for rows, name in ((film_rows.ROWS, "film"), (sound_rows.ROWS, "sound")):
        written = json.loads((ROOT / f"docs/benchmarks/{name}.json").read_text(encoding="utf-8"))
        assert peer_rows.rows_of(rows, [], written) == written
