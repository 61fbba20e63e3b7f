"""Measures for how long a card has no work in a session of sound, on a simulated card.

    PYTHONPATH=tests python scripts/bench_sessions.py --binary target/release/moored

A session has segments of ten seconds made by a model of the `instant` family, whose steps take a few
milliseconds, twice as many under way as it has slots. Between the end of an order and the beginning of
the next a card is idle: that time is the service's own. The log of the worker tells it (`timeline`). One
line of JSON for each number of slots. Two programs are compared on one machine, one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from service import Service, model_as

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/gpu"))
from timeline import Entry, entries

SECONDS = 10.0
STAGES = ("encode_text", "denoise", "decode")
WARM_UP = 2
SEGMENTS = 60


def orders_of(found: list[Entry]) -> list[Entry]:
    """The orders of a log, in their order."""
    return [one for one in found if one.of in STAGES and one.part == "whole"]


def idle_ms(orders: list[Entry]) -> list[float]:
    """The time between each order and the next, in milliseconds."""
    pairs = zip(orders, orders[1:], strict=False)
    return [1e3 * (after.began_s - before.ended_s) for before, after in pairs]


def measure(binary: Path, slots: int, step_ms: int, segments: int) -> dict[str, float]:
    """Has so many segments made, and says where the time went."""
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"steps": 8, "max_sequence_length": 64, "seconds": SECONDS}
        models = model_as(Path(folder), "track", "quick", steps_ms=step_ms, defaults=defaults)
        service = Service(
            *("--models", str(models), "--set", "log.filter=info,timeline=debug"),
            state=Path(folder) / "state",
            devices=("sim:32GiB",),
            binary=binary,
        )
        try:
            with service.client() as client, client.audio_session("quick", slots=slots) as live:
                for seed in range(WARM_UP * slots):
                    live.play("a waltz", seconds=SECONDS, steps=8, seed=seed).wait(60)
                wait = [
                    live.play("a waltz", seconds=SECONDS, steps=8, seed=9) for _ in range(2 * slots)
                ]
                wait.pop(0).wait(60)
                lines, began = len(service.log), time.perf_counter()
                for seed in range(segments):
                    wait.append(live.play("a waltz", seconds=SECONDS, steps=8, seed=100 + seed))
                    wait.pop(0).wait(60)
                took, logged = time.perf_counter() - began, service.log[lines:]
        finally:
            service.stop()
    orders = orders_of(entries(logged))
    idle = idle_ms(orders)
    return {
        "slots": slots,
        "step_ms": step_ms,
        "segments_a_second": round(segments / took, 2),
        "orders_a_second": round(len(orders) / took, 1),
        "orders_a_segment": round(len(orders) / segments, 2),
        "idle_share": round(sum(idle) / 1e3 / took, 3),
        "idle_ms_median": round(statistics.median(idle), 2),
        "idle_ms_after_a_decode": round(after("decode", orders, idle), 2),
        "idle_ms_after_a_pass": round(after("denoise", orders, idle), 2),
    }


def after(stage: str, orders: list[Entry], idle: list[float]) -> float:
    """The median of the idle times that follow a stage."""
    times = [ms for order, ms in zip(orders, idle, strict=False) if order.of == stage]
    return statistics.median(times) if times else 0.0


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Measure the idle time between orders of a session."
    )
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--slots", default="4,8")
    parser.add_argument("--step-ms", type=int, default=5)
    parser.add_argument("--segments", type=int, default=SEGMENTS)
    settings = parser.parse_args()
    for slots in map(int, settings.slots.split(",")):
        found = measure(settings.binary, slots, settings.step_ms, settings.segments)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
