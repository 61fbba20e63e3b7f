"""The ComfyUI pack and the Griptape library on one service at the same time, with the shipped model."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import moored
import pytest
from conftest import Side, Watch, at_rest, ended
from PIL import Image, ImageChops

from service import Service

RED = "a large red circle in the centre on a yellow background"
BLUE = "a small blue square in the centre on a white background"
ENDED_EARLY = {"comfyui": "interrupted", "griptape": "cancelled"}

Sides = tuple[Side, Side]


def pictures(side: Side) -> list[Image.Image]:
    """What a side has generated, which went well."""
    said = side.said()
    assert (said["status"], said["error"]) == ("success", ""), said
    return [Image.open(Path(path)).convert("RGB") for path in said["pictures"]]


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and ImageChops.difference(one, other).getbbox() is None


def loads(service: Service) -> Counter[str]:
    """How often the service has loaded each component, by its log."""
    told = (re.search(r"\bloaded component=\"?(\w+)", line) for line in service.log)
    return Counter(found[1] for found in told if found)


def assert_loaded_once(service: Service, client: moored.Client) -> None:
    model = next(model for model in client.list_models() if model.is_default)
    once = Counter(component.name for component in model.components)
    service.wait_for_log(lambda: loads(service).total() >= once.total())
    assert loads(service) == once


def test_both_generate_at_once_and_the_model_is_loaded_once(
    demo_service: Service, client: moored.Client, sides: Sides
) -> None:
    assert loads(demo_service) == {}
    for side in sides:
        side.generate((RED, 1))
    (of_comfyui,), (of_griptape,) = (pictures(side) for side in sides)
    assert same(of_comfyui, of_griptape)
    assert_loaded_once(demo_service, client)


def test_gpu_time_is_shared_between_both_frontends(
    client: moored.Client, sides: Sides, watch: Watch
) -> None:
    comfyui, griptape = sides
    with at_rest(client):
        comfyui.generate(*((RED, seed) for seed in range(8)), steps=8)
        watch.until(lambda: len(watch.jobs) == 8 and bool(watch.running()))
        (crowd,) = {job.client_id for job in watch.jobs.values()}
        griptape.generate((BLUE, 1), (BLUE, 2), steps=8)
        watch.until(lambda: len(watch.jobs) == 9)
    assert len(pictures(griptape)) == 2
    assert len(pictures(comfyui)) == 8

    guests = [name for name in watch.jobs if name not in watch.of(crowd)]
    assert len(watch.of(crowd)) == 8
    assert len({watch.jobs[name].client_id for name in guests}) == 1
    assert len(guests) == 2
    # One at a time: as they ended, they have started.
    order = list(ended(client, watch.jobs))
    # There was a queue to wait for, but no more of it than one job, and one that started just as this came.
    assert len(order) - order.index(guests[0]) > 3, order
    for guest in guests:
        before = order.index(guest) - watch.started_before[guest]
        assert before <= 2, (guest, order)


@pytest.mark.parametrize("which", [0, 1], ids=["comfyui", "griptape"])
@pytest.mark.parametrize("runs", [True, False], ids=["running", "queued"])
def test_cancelling_in_one_frontend_leaves_jobs_of_the_other(
    demo_service: Service, client: moored.Client, sides: Sides, watch: Watch, which: int, runs: bool
) -> None:
    leaves, stays = sides[which], sides[1 - which]
    first, second = (leaves, stays) if runs else (stays, leaves)
    # What is to be cancelled while it runs must not be done by then.
    prompts, steps = {leaves: RED, stays: BLUE}, {leaves: 200, stays: 8}
    with at_rest(client):
        first.generate((prompts[first], 3), steps=steps[first])
        watch.until(lambda: len(watch.running()) == 1)
        second.generate((prompts[second], 3), steps=steps[second])
        watch.until(lambda: len(watch.jobs) == 2)
        assert len(watch.running()) == 1, "the second waits for the first"
        if not runs:
            leaves.cancel()
            assert leaves.said()["status"] == ENDED_EARLY[leaves.name]
            ended(client, list(watch.jobs)[1:])
    if runs:
        watch.until(lambda: any(job.step > 0 for job in watch.running()))
        leaves.cancel()
        assert leaves.said()["status"] == ENDED_EARLY[leaves.name]
    (generated,) = pictures(stays)

    ends = ended(client, watch.jobs)
    states = [ends[name] for name in watch.jobs]
    assert states == (["cancelled", "done"] if runs else ["done", "cancelled"])
    size = {"width": 128, "height": 128}
    undisturbed = client.generate_image(BLUE, seed=3, steps=steps[stays], **size).image
    assert same(generated, undisturbed.convert("RGB"))
    assert_loaded_once(demo_service, client)
