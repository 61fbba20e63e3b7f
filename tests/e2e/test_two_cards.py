"""Films that two cards sample together, on simulated cards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import moored
import pytest
from faults import assert_at_rest, retries

from service import Service

Simulate = Callable[..., Service]

DEADLINE_S = 60.0
TWO = ("sim:24GiB", "sim:24GiB,index=1")


@contextmanager
def two_cards(simulate: Simulate, *devices: str) -> Iterator[moored.Client]:
    """A client of a service whose two cards are ready."""
    with simulate(*(devices or TWO)).client() as client:
        client.wait_until_ready(card="sim:1")
        yield client


def cards_of(film: moored.VideoResult | moored.Done) -> dict[str, str]:
    """Where each stage ran."""
    return {stage.name: stage.card for stage in film.stages}


def test_a_film_is_sampled_on_two_cards_and_is_the_same(simulate: Simulate) -> None:
    with two_cards(simulate) as client:
        alone = client.generate_video("a wave", model="video", seed=7, timeout=DEADLINE_S)
        both = client.generate_video("a wave", model="video", seed=7, cards=2, timeout=DEADLINE_S)
        assert set(cards_of(both)["denoise"].split(" and ")) == {"sim:0", "sim:1"}
        assert " and " not in cards_of(both)["decode"]
        assert " and " not in cards_of(alone)["denoise"]
        assert bytes(both.data) == bytes(alone.data)
        assert_at_rest(client)


def test_films_on_two_cards_and_other_jobs_all_end(simulate: Simulate) -> None:
    with two_cards(simulate) as client:

        def make(seed: int) -> moored.VideoResult:
            asked = {"seed": seed, "cards": 1 + seed % 2, "timeout": DEADLINE_S}
            return client.generate_video("a wave", model="video", **asked)

        with ThreadPoolExecutor(6) as pool:
            films = list(pool.map(make, range(6)))
        for number, film in enumerate(films):
            assert (" and " in cards_of(film)["denoise"]) == (number % 2 == 1)
        assert_at_rest(client)


@pytest.mark.parametrize("number", [0, 1])
def test_a_card_that_dies_costs_what_was_being_sampled(simulate: Simulate, number: int) -> None:
    with two_cards(simulate) as client:
        with client.stream_video("a wave", model="video", steps=40, cards=2) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            os.kill(client.status().cards[number].worker_pid, signal.SIGKILL)
            rest = list(stream)
        assert retries(rest) == [("WORKER_DIED", "denoise")]
        assert isinstance(rest[-1], moored.Done)
        assert " and " in cards_of(rest[-1])["denoise"]
        assert_at_rest(client)


def test_a_film_that_is_cancelled_frees_both_cards(simulate: Simulate) -> None:
    with two_cards(simulate) as client:
        with client.stream_video("a wave", model="video", steps=60, cards=2) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            assert client.cancel(stream.job_id)
            with pytest.raises(moored.Cancelled):
                stream.result()
        assert_at_rest(client)
        for card in ("sim:0", "sim:1"):
            client.generate_image("a cube", model="small", card=card, timeout=DEADLINE_S)


@pytest.mark.parametrize(
    "devices",
    [("sim:24GiB",), ("sim:24GiB", "cpu")],
    ids=["one card", "another kind"],
)
def test_one_card_of_a_kind_is_too_few(simulate: Simulate, devices: tuple[str, ...]) -> None:
    with simulate(*devices).client() as client:
        with pytest.raises(moored.InvalidRequest) as refused:
            client.generate_video("a wave", model="video", cards=2, timeout=DEADLINE_S)
        assert "leave it out, or start the service with two cards of one kind" in str(refused.value)


def test_cards_that_do_not_reach_each_other_sample_alone(simulate: Simulate) -> None:
    with two_cards(simulate, "sim:24GiB", "sim:24GiB,index=1,peers=no") as client:
        with pytest.raises(
            moored.InvalidRequest, match="no two cards that reach each other's memory"
        ):
            client.generate_video("a wave", model="video", cards=2, timeout=DEADLINE_S)
        client.generate_video("a wave", model="video", timeout=DEADLINE_S)


def test_processors_do_not_sample_together(simulate: Simulate) -> None:
    with simulate("cpu").client() as client:
        with pytest.raises(moored.InvalidRequest, match="no card that can run it with another"):
            client.generate_video("a wave", model="video", cards=2, timeout=DEADLINE_S)
