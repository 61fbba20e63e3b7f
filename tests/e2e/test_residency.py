"""The memory of a card: loads, pins, holds, reservations, plans, and memory of other programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import moored
import pytest
import waiting
from waiting import DEADLINE_S, accounts_sum

from service import Service, as_told

Simulate = Callable[..., Service]

MIB = 1 << 20
GIB = 1 << 30
HEADROOM = 256 * MIB

TRANSFORMER = 23_836_229_632
SHARED = {"text_encoder": 246_415_360, "text_encoder_2": 9_555_673_088, "vae": 170_917_888}
FLUX_BYTES = TRANSFORMER + sum(SHARED.values())
COMPONENTS = {"transformer", *SHARED}


def until(
    client: moored.Client, holds: Callable[[moored.CardStatus], bool], within: float = DEADLINE_S
) -> moored.CardStatus:
    """The first card, once it fulfils the condition. Until then its accounts add up."""
    return waiting.until(client, lambda status: holds(status.cards[0]), within).cards[0]


def resident(card: moored.CardStatus) -> set[str]:
    return {one.component.id for one in card.residents if one.state == "resident"}


def assert_at_rest(client: moored.Client) -> None:
    """Unloads everything, and checks that nothing is left."""
    unloaded = client.unload(timeout=DEADLINE_S)
    assert unloaded.kept == ()
    assert unloaded.freed_bytes == sum(one.booked_bytes for one in unloaded.freed)

    def rests(card: moored.CardStatus) -> bool:
        memory = card.memory
        nothing = (memory.components, memory.scratch, memory.unexplained) == (0, 0, 0)
        return nothing and card.residents == () and card.job_id == ""

    card = until(client, rests)
    assert card.reservations == ()
    assert accounts_sum(card.memory) == card.memory.total
    assert client.jobs() == ()


@contextmanager
def running(stream: moored.EventStream[moored.ImageResult]) -> Iterator[str]:
    """A job that is denoising; its id."""
    with stream:
        next(event for event in stream if isinstance(event, moored.Step))
        yield stream.job_id


def of_kind(events: list[moored.Event], kind: type) -> list[moored.Event]:
    return [event for event in events if isinstance(event, kind)]


# Loads.


def test_a_load_reports_every_byte_and_models_list_residency(simulate: Simulate) -> None:
    with simulate("sim:40GiB,speed=5GiB/s").client() as client:
        listed = {model.id: model for model in client.list_models()}
        assert {"flux-full", "flux-other", "huge", "small", "slow", "moored/demo"} <= set(listed)
        assert listed["flux-full"].resident == ()
        assert listed["flux-full"].family == "instant"
        assert {one.name for one in listed["flux-full"].components} == COMPONENTS
        assert listed["slow"].defaults.steps == 20
        assert [model.id for model in listed.values() if model.is_default] == ["moored/demo"]
        assert all(model.problem == "" for model in listed.values())

        events = list(client.stream_load("flux-full"))
        assert isinstance(events[0], moored.Accepted)
        assert isinstance(events[-1], moored.Done)
        done: dict[str, list[int]] = {}
        for event in events:
            if isinstance(event, moored.Loading):
                assert event.card == "sim:0"
                assert event.bytes_total == event.component.bytes
                done.setdefault(event.component.name, []).append(event.bytes_done)
        # The latest news wins where a client reads slowly: not every component is seen to its end.
        assert {"transformer", "text_encoder_2"} <= set(done) <= COMPONENTS
        for name, bytes_done in done.items():
            assert bytes_done == sorted(bytes_done), name
            assert bytes_done[-1] <= SHARED.get(name, TRANSFORMER), name
        last = of_kind(events, moored.Loading)[-1]
        assert isinstance(last, moored.Loading)
        assert last.bytes_done == last.bytes_total, "the last news is that all is there"
        between = [one for one in done["transformer"] if 0 < one < TRANSFORMER]
        assert len(between) >= 3, "four seconds of loading are seen to go on"

        card = until(client, lambda card: card.memory.components == FLUX_BYTES)
        assert len(resident(card)) == 4
        assert all(one.entries == ("flux-full+full",) for one in card.residents)
        listed = {model.id: model for model in client.list_models()}
        assert set(listed["flux-full"].resident) == COMPONENTS
        assert set(listed["flux-other"].resident) == set(SHARED), "they are the same components"
        assert listed["small"].resident == ()

        again = client.load("flux-full")
        assert set(again.resident_already) == COMPONENTS
        assert_at_rest(client)


def test_named_components_are_loaded_alone(simulate: Simulate) -> None:
    with simulate().client() as client:
        events = list(client.stream_load("small", components=["vae"]))
        loaded = {e.component.name for e in events if isinstance(e, moored.Loading)}
        assert loaded == {"vae"}
        card = until(client, lambda card: bool(card.residents))
        assert resident(card) == {"instant:small-vae"}
        with pytest.raises(moored.InvalidRequest) as refused:
            client.load("small", components=["unet"])
        assert [one.field for one in refused.value.violations] == ["components"]
        assert "transformer" in refused.value.message, "what there is is named"


def test_a_swap_evicts_only_the_transformer(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        client.load("flux-full")
        events = list(client.stream_load("flux-other"))
        evicted = [e.component.id for e in events if isinstance(e, moored.Evicting)]
        loaded = {e.component.id for e in events if isinstance(e, moored.Loading)}
        assert evicted == ["instant:flux-full-transformer"]
        assert loaded == {"instant:flux-other-transformer"}
        done = events[-1]
        assert isinstance(done, moored.Done)
        assert set(done.resident_already) == set(SHARED)
        card = until(client, lambda card: "instant:flux-other-transformer" in resident(card))
        assert resident(card) == {
            "instant:flux-other-transformer",
            "instant:clip-l",
            "instant:t5-xxl",
            "instant:flux-vae",
        }

        events = list(client.stream_image("back again", model="flux-full"))
        evicted = [e.component.id for e in events if isinstance(e, moored.Evicting)]
        assert evicted == ["instant:flux-other-transformer"]
        assert_at_rest(client)


def test_the_exclusive_policy_runs_a_large_model_on_24_gib(simulate: Simulate) -> None:
    with simulate("sim:24GiB", arguments=("--policy", "exclusive")).client() as client:
        assert client.status().cards[0].policy == "exclusive"
        result = client.generate_image("a large one", model="flux-full")
        assert [stage.name for stage in result.stages] == ["encode_text", "denoise", "decode"]
        assert max(stage.peak_bytes for stage in result.stages) <= 24 * GIB - HEADROOM
        assert_at_rest(client)


# Unloads and claims.


def test_an_unload_frees_what_was_booked(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        client.load("flux-full")
        unloaded = client.unload("flux-full")
        assert {one.component.name for one in unloaded.freed} == COMPONENTS
        assert unloaded.kept == ()
        assert unloaded.freed_bytes == FLUX_BYTES
        for one in unloaded.freed:
            assert one.card == "sim:0"
            assert one.freed_bytes == one.booked_bytes == one.component.bytes
        assert client.unload("flux-full").freed == (), "again is harmless"


def test_an_unload_of_formats_without_a_model_unloads_nothing(simulate: Simulate) -> None:
    with simulate("sim:64GiB").client() as client:
        client.load("flux-full")
        with pytest.raises(moored.InvalidRequest, match=r"model.id"):
            client.unload(moored.ModelRef("", quantization="4-bit"))
        assert client.status().cards[0].residents != ()


def test_the_status_is_current_after_a_call(simulate: Simulate) -> None:
    """After a call has returned, the status shows its effect."""
    with simulate("sim:40GiB").client() as client:
        client.load("flux-full")
        assert client.status().cards[0].memory.components == FLUX_BYTES
        assert set(client.list_models()[0].resident) == COMPONENTS
        client.pin("flux-full")
        assert client.list_models()[0].pinned
        client.unpin("flux-full")
        assert not client.list_models()[0].pinned
        client.unload()
        assert client.status().cards[0].memory.components == 0
        assert client.list_models()[0].resident == ()
        with client.reserve(GIB, label="other"):
            assert [one.bytes for one in client.status().cards[0].reservations] == [GIB]


def test_an_unload_keeps_what_another_pinned_model_shares(simulate: Simulate) -> None:
    with simulate("sim:80GiB").client() as client:
        client.load("flux-full")
        client.load("flux-other")
        client.pin("flux-other")
        unloaded = client.unload("flux-full")
        assert [one.component.id for one in unloaded.freed] == ["instant:flux-full-transformer"]
        assert {one.component.name for one in unloaded.kept} == set(SHARED)
        assert {one.reason for one in unloaded.kept} == {"shared with flux-other+full"}
        client.unpin("flux-other")
        assert_at_rest(client)


def test_an_unload_keeps_what_another_resident_model_shares(simulate: Simulate) -> None:
    """Both were loaded ahead of use: unloading one leaves the other complete."""
    with simulate("sim:80GiB").client() as client:
        client.load("flux-full")
        client.load("flux-other")
        unloaded = client.unload("flux-full")
        assert [one.component.id for one in unloaded.freed] == ["instant:flux-full-transformer"]
        assert {one.component.name for one in unloaded.kept} == set(SHARED)
        assert all(one.reason.startswith("shared with flux-other") for one in unloaded.kept)


def test_a_pin_keeps_a_model_until_it_is_taken_off(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        assert client.pin("flux-full") == ("flux-full+full",)
        client.load("flux-full")
        card = until(client, lambda card: len(card.residents) == 4)
        assert all(one.pinned for one in card.residents)

        unloaded = client.unload("flux-full")
        assert unloaded.freed == ()
        assert {one.component.name: one.reason for one in unloaded.kept} == dict.fromkeys(
            COMPONENTS, "pinned"
        )
        with pytest.raises(moored.MemoryShortage) as refused:
            client.generate_image(
                "no memory", model="flux-other", patience_s=0.2, timeout=DEADLINE_S
            )
        assert refused.value.needed_bytes > refused.value.free_bytes
        assert "instant:flux-full-transformer" in resident(client.status().cards[0])

        assert client.unpin("flux-full") == ()
        client.generate_image("memory", model="flux-other")
        assert_at_rest(client)


def test_a_hold_keeps_a_model_for_its_time(simulate: Simulate) -> None:
    with simulate().client() as client:
        client.load("small")
        hold = client.hold("small", ttl_s=8, client_id="ann")
        assert hold.ttl_s == 8
        assert client.hold("small", ttl_s=8, client_id="ann").id == hold.id, "renewed"
        unloaded = client.unload("small")
        assert unloaded.freed == ()
        assert {one.reason for one in unloaded.kept} == {"held by ann"}
        until(client, lambda card: bool(card.residents) and card.residents[0].held)
        until(client, lambda card: not any(one.held for one in card.residents))
        assert hold.release() is False, "it had expired"
        assert len(client.unload("small").freed) == 4


def test_a_hold_can_be_released(simulate: Simulate) -> None:
    with simulate().client() as client:
        client.load("small")
        with client.hold("small", client_id="ann") as hold:
            assert hold.ttl_s == 60
            assert client.unload("small").freed == ()
        assert hold.released is True
        assert len(client.unload("small").freed) == 4
        with pytest.raises(moored.InvalidRequest):
            client.hold("small", ttl_s=3601)


def test_an_unload_waits_for_a_running_job(simulate: Simulate) -> None:
    with simulate().client() as client, ThreadPoolExecutor() as threads:

        def unload() -> tuple[moored.Unloaded, list[str]]:
            unloaded = client.unload("slow", timeout=DEADLINE_S)
            return unloaded, [job.state for job in client.jobs(include_ended=True)]

        stream = client.stream_image("slow", model="slow", steps=60)
        with running(stream):
            asked = threads.submit(unload)
            kinds = [type(event) for event in stream]
        assert kinds[-1] is moored.Done
        unloaded, jobs = asked.result(DEADLINE_S)
        assert jobs == ["done"], "when it was unloaded"
        assert len(unloaded.freed) == 4
        assert unloaded.cancelled_jobs == ()
        assert_at_rest(client)


def test_a_forced_unload_cancels_a_running_job(simulate: Simulate) -> None:
    with simulate().client() as client:
        stream = client.stream_image("slow", model="slow", steps=200)
        with running(stream) as job:
            unloaded = client.unload("slow", force=True, timeout=DEADLINE_S)
            assert unloaded.cancelled_jobs == (job,)
            assert "transformer" in {one.component.name for one in unloaded.freed}
            with pytest.raises(moored.Cancelled):
                stream.result()
        assert_at_rest(client)


def test_an_abandoned_unload_does_not_block_jobs(simulate: Simulate) -> None:
    with simulate().client() as client:
        with running(client.stream_image("slow", model="slow", steps=200)) as job:
            with pytest.raises(moored.Deadline):
                client.unload("slow", timeout=0.3)
            behind = client.stream_image("behind", model="slow", steps=2)
            assert client.cancel(job)
        assert behind.result().pictures
        card = until(client, lambda card: card.state == "ready")
        assert len(resident(card)) == 4, "it was not unloaded after all"
        assert_at_rest(client)


# Plans and reservations.


def test_a_plan_says_what_would_move_and_moves_nothing(simulate: Simulate) -> None:
    with simulate("sim:40GiB,speed=400GiB/s").client() as client:
        plan = client.plan("a plan", model="flux-full")
        assert plan.runs_now
        assert plan.card == "sim:0"
        assert plan.model.key == "flux-full+full"
        assert [stage.name for stage in plan.stages] == ["encode_text", "denoise", "decode"]
        assert [stage.verdict for stage in plan.stages] == ["run"] * 3
        assert [stage.shortfall for stage in plan.stages] == [None] * 3
        assert plan.stages[1].moves == ("load transformer (22.2 GiB)",)
        assert plan.stages[1].component_bytes == TRANSFORMER
        assert plan.stages[1].scratch_bytes == 1536 * MIB
        assert not plan.stages[1].scratch_learned
        assert plan.predicted_move_seconds > 0
        assert client.status().cards[0].residents == ()
        assert client.jobs(include_ended=True) == ()

        client.generate_image("a plan", model="flux-full")
        plan = client.plan("another", model="flux-full")
        assert [stage.moves for stage in plan.stages] == [()] * 3
        assert set(plan.stages[0].resident_already) == {"text_encoder", "text_encoder_2"}
        assert all(stage.scratch_learned for stage in plan.stages)
        assert plan.predicted_move_seconds == 0

        plan = client.plan("a swap", model="flux-other")
        moves = plan.stages[1].moves
        assert moves[0].startswith("evict transformer")
        assert moves[-1].startswith("load transformer")


def test_a_plan_that_never_fits_names_one_that_would(simulate: Simulate) -> None:
    with simulate("sim:24GiB").client() as client:
        plan = client.plan("too large", model="flux-full", width=2048, height=2048)
        assert not plan.runs_now
        assert [stage.verdict for stage in plan.stages] == ["run", "never", "run"]
        shortfall = plan.stages[1].shortfall
        assert shortfall is not None
        assert shortfall.stage == "denoise"
        assert shortfall.needed_bytes == TRANSFORMER + 4 * 1536 * MIB
        assert shortfall.capacity_bytes == 24 * GIB - HEADROOM
        labels = [fallback.label for fallback in shortfall.fallbacks]
        sizes = [label for label in labels if not label.startswith("quantization")]
        assert sizes == ["1024x1024", "512x512"], "the closest first, none that does not fit"
        assert labels[-2:] == sizes, "the model in fewer bytes comes before smaller pictures"

        with pytest.raises(moored.NeverFits) as refused:
            client.generate_image("too large", model="flux-full", width=2048, height=2048)
        assert refused.value.fallbacks == shortfall.fallbacks
        for fallback in refused.value.fallbacks:
            assert fallback.peak_bytes <= shortfall.capacity_bytes
            size = {"width": 2048, "height": 2048}
            client.generate_image("as told", **(size | as_told(fallback.label, "flux-full")))
        assert_at_rest(client)


def test_a_request_that_exceeds_the_card_is_refused_at_once(simulate: Simulate) -> None:
    with simulate("sim:24GiB").client() as client:
        began = time.monotonic()
        with pytest.raises(moored.NeverFits) as refused:
            client.generate_image("huge", model="huge", patience_s=60, timeout=DEADLINE_S)
        assert time.monotonic() - began < 30, "no patience is spent on what cannot be"
        shortfall = refused.value.shortfall
        assert shortfall is not None
        assert shortfall.stage == "denoise"
        assert shortfall.needed_bytes == 40 * GIB + 1536 * MIB
        assert shortfall.capacity_bytes == 24 * GIB - HEADROOM
        labels = [fallback.label for fallback in shortfall.fallbacks]
        assert labels[0] == "quantization 8-bit (int8-convrot)"
        assert all(label.startswith("quantization") for label in labels), (
            "no size makes weights smaller"
        )
        assert refused.value.retry_after_s is None
        with pytest.raises(moored.NeverFits):
            client.load("huge", timeout=DEADLINE_S)
        client.generate_image("the next", model="small")
        assert_at_rest(client)


def test_a_reservation_evicts_and_its_release_frees_memory(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        client.load("flux-full")
        reserved = client.reserve(20 * GIB, ttl_s=60, label="blender")
        assert reserved.bytes == 20 * GIB
        assert reserved.card == "sim:0"
        assert "instant:flux-full-transformer" in {one.component.id for one in reserved.evicted}
        card = until(client, lambda card: bool(card.reservations))
        (shown,) = card.reservations
        assert (shown.id, shown.label, shown.bytes) == (reserved.id, "blender", 20 * GIB)
        assert 0 < shown.expires_in_ms <= 60_000
        memory = until(client, lambda card: card.memory.usable < 20 * GIB).memory
        assert memory.free >= 20 * GIB
        assert memory.usable <= memory.free - 20 * GIB

        plan = client.plan("while reserved", model="flux-full")
        assert not plan.runs_now
        assert plan.stages[1].verdict == "wait"

        with client.stream_image("waits", model="flux-full", patience_s=30) as stream:
            waiting = next(event for event in stream if isinstance(event, moored.Waiting))
            assert waiting.cause == "reservation"
            assert reserved.release() is True
            assert stream.result().pictures
        card = until(client, lambda card: card.reservations == ())
        assert card.memory.components == FLUX_BYTES
        assert_at_rest(client)


def test_a_reservation_whose_caller_has_left_is_given_back(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        with client.stream_image("runs", model="slow", steps=200) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            with pytest.raises(moored.Deadline):
                client.reserve(8 * GIB, label="gone", timeout=0.3)  # it waits for the stage
            stream.cancel()
        with client.reserve(GIB, label="here"):  # after the other
            card = until(client, lambda card: bool(card.reservations))
            assert [one.label for one in card.reservations] == ["here"]


def test_a_reservation_ends_with_its_time(simulate: Simulate) -> None:
    with simulate("sim:40GiB").client() as client:
        reserved = client.reserve(30 * GIB, ttl_s=8)
        until(client, lambda card: bool(card.reservations))
        until(client, lambda card: card.reservations == () and card.memory.usable > 39 * GIB)
        assert reserved.release() is False
        client.generate_image("again", model="flux-full")


@pytest.mark.parametrize("gib", [39.9, 41, 1 << 20])
def test_a_reservation_that_is_too_much_is_refused_and_costs_nothing(
    simulate: Simulate, gib: float
) -> None:
    with simulate("sim:40GiB").client() as client:
        client.load("flux-full")
        with pytest.raises(moored.MemoryShortage) as refused:
            client.reserve(int(gib * GIB), timeout=DEADLINE_S)
        assert refused.value.needed_bytes == int(gib * GIB)
        until(client, lambda card: card.job_id == "" and card.reservations == ())
        plan = client.plan("still there", model="flux-full")
        assert set(plan.stages[1].resident_already) == {"transformer"}, "nothing left for it"


def test_a_reservation_of_nothing_is_refused(simulate: Simulate) -> None:
    with simulate().client() as client:
        with pytest.raises(moored.InvalidRequest) as refused:
            client.reserve(0)
        assert [one.field for one in refused.value.violations] == ["bytes"]
        with pytest.raises(moored.InvalidRequest):
            client.reserve(GIB, ttl_s=90_000)


def test_a_trim_hands_slack_back(simulate: Simulate) -> None:
    service = simulate("sim:40GiB,slack=keep", arguments=("--set", "cards.slack_limit=40GiB"))
    with service.client() as client:
        client.generate_image("leaves slack", model="flux-full")
        slack = until(client, lambda card: card.memory.slack > 0 and card.state == "ready")
        assert slack.memory.slack == 3 * GIB, "the largest stage's activations"
        assert client.trim() == 3 * GIB
        card = until(client, lambda card: card.memory.slack == 0)
        assert accounts_sum(card.memory) == card.memory.total
        assert client.trim("sim:0") == 0


def test_slack_above_the_limit_goes_back_by_itself(simulate: Simulate) -> None:
    with simulate("sim:40GiB,slack=keep").client() as client:
        client.generate_image("leaves slack", model="flux-full")
        until(client, lambda card: card.state == "ready" and card.memory.slack <= 512 * MIB)


# What earlier jobs taught.


def test_the_learned_peak_of_a_stage_does_not_grow_by_repetition(simulate: Simulate) -> None:
    """The same request needs the same memory, however often it is repeated."""
    with simulate().client() as client:
        for number in range(6):
            result = client.generate_image(f"picture {number}", model="small")
            peaks = {stage.name: stage.peak_scratch_bytes for stage in result.stages}
            assert peaks == {"encode_text": MIB, "denoise": 2 * MIB, "decode": 4 * MIB}, number


def test_the_learned_peak_of_a_model_is_not_used_for_another(simulate: Simulate) -> None:
    """The peak of a small model's decode does not apply to a large one of the same family and size."""
    with simulate("sim:40GiB").client() as client:
        before = client.plan("a plan", model="flux-full", width=512, height=512)
        assert not any(stage.scratch_learned for stage in before.stages)
        client.generate_image("a lesson", model="small", width=512, height=512)
        after = client.plan("a plan", model="flux-full", width=512, height=512)
        assert [s.scratch_bytes for s in after.stages] == [s.scratch_bytes for s in before.stages]
        assert not any(stage.scratch_learned for stage in after.stages)


# The ledger.


def test_accounts_add_up_at_every_moment(simulate: Simulate) -> None:
    options = "speed=60GiB/s,lag=1s,slack=keep,context=300MiB,workspaces=100MiB,foreign=1GiB"
    with simulate(f"sim:40GiB,{options}").client() as client:
        ticks: list[moored.CardStatus] = []
        watch = client.watch_status(interval_s=0.001)

        def follow() -> None:
            with suppress(moored.Cancelled):
                ticks.extend(status.cards[0] for status in watch)

        follower = threading.Thread(target=follow)
        follower.start()
        client.generate_image("one", model="flux-full")
        client.generate_image("two", model="flux-other")
        client.generate_image("three", model="slow", steps=30)
        client.trim()
        with client.reserve(2 * GIB):
            client.generate_image("four", model="small")
        client.unload()
        until(client, lambda card: card.memory.components == card.memory.unexplained == 0)
        watch.close()
        follower.join(DEADLINE_S)
        assert not follower.is_alive()

        assert len(ticks) >= 10
        for card in ticks:
            assert accounts_sum(card.memory) == card.memory.total == 40 * GIB, card.memory
            assert card.memory.usable <= card.memory.free + card.memory.slack
            assert card.memory.foreign >= GIB
            assert (card.memory.context, card.memory.workspaces) == (300 * MIB, 100 * MIB)
            booked = sum(one.resident_bytes for one in card.residents if one.state == "resident")
            loading = sum(one.resident_bytes for one in card.residents if one.state == "loading")
            assert booked <= card.memory.components <= booked + loading + TRANSFORMER
        for account in ("components", "scratch", "unexplained", "free"):
            seen = max(getattr(card.memory, account) for card in ticks)
            assert seen > 0, f"{account} was never seen in use"


def test_late_memory_is_waited_for(simulate: Simulate) -> None:
    """Evicted bytes that the driver does not show yet: the job waits, then runs."""
    with simulate("sim:24GiB,lag=700ms").client() as client:
        client.load("flux-full", components=["transformer"])
        began = time.monotonic()
        result = client.generate_image("late", model="flux-other", timeout=20)
        assert time.monotonic() - began >= 0.6
        assert result.pictures


def test_a_reservation_waits_for_late_memory(simulate: Simulate) -> None:
    """Memory that the reservation has evicted is late: that is no reason to refuse."""
    with simulate("sim:40GiB,lag=300ms").client() as client:
        client.load("flux-full")
        reserved = client.reserve(20 * GIB, timeout=DEADLINE_S)
        assert reserved.bytes == 20 * GIB
        assert reserved.release() is True


def test_late_slack_is_not_counted_as_foreign(simulate: Simulate) -> None:
    """Slack that was trimmed and is not shown as free yet is not foreign memory."""
    service = simulate(
        "sim:40GiB,slack=keep,lag=600ms", arguments=("--set", "cards.slack_limit=40GiB")
    )
    with service.client() as client:
        client.generate_image("leaves slack", model="flux-full")
        assert client.status().cards[0].memory.slack == 3 * GIB
        client.trim()
        card = client.status().cards[0]
        assert card.memory.slack == 0
        assert card.memory.foreign == 0, card.memory
        assert card.memory.unexplained + card.memory.free == 40 * GIB - FLUX_BYTES
        until(client, lambda card: card.memory.free == 40 * GIB - FLUX_BYTES)


def test_late_memory_is_unexplained_until_the_driver_shows_it(simulate: Simulate) -> None:
    """Bytes are freed when the driver confirms them; until then they are unexplained."""
    with simulate("sim:40GiB,lag=400ms").client() as client:
        client.load("flux-full")
        unloaded = client.unload("flux-full", timeout=DEADLINE_S)
        assert sum(one.booked_bytes for one in unloaded.freed) == FLUX_BYTES
        assert unloaded.freed_bytes <= FLUX_BYTES
        memory = client.status().cards[0].memory
        assert memory.components == 0
        assert unloaded.freed_bytes == FLUX_BYTES or memory.unexplained > 0
        until(client, lambda card: card.memory.unexplained == 0 and card.memory.free == 40 * GIB)


# Memory that others hold.


def world(tmp_path: Path, *holders: str) -> tuple[str, Path]:
    """A card of 40 GiB on which other programs hold memory, and the file that lists these."""
    script = tmp_path / "world"
    script.write_text("\n".join(holders))
    return f"sim:40GiB,world={script}", script


def test_foreign_memory_is_waited_for_and_its_holder_is_named(
    simulate: Simulate, tmp_path: Path
) -> None:
    device, script = world(tmp_path, "blender 4242 20GiB")
    with simulate(device).client() as client:
        card = until(client, lambda card: card.memory.foreign == 20 * GIB)
        assert ("blender", 4242, 20 * GIB) in {(h.name, h.pid, h.bytes) for h in card.holders}
        plan = client.plan("waits", model="flux-full")
        assert [stage.verdict for stage in plan.stages] == ["run", "wait", "run"]

        with client.stream_image("waits", model="flux-full", patience_s=20) as stream:
            ticks: list[moored.Waiting] = []
            for event in stream:
                if isinstance(event, moored.Waiting):
                    ticks.append(event)
                    if len(ticks) == 4:
                        break
            assert {tick.cause for tick in ticks} == {"foreign"}
            assert {tick.stage for tick in ticks} == {"denoise"}
            for tick in ticks:
                assert tick.needed_bytes == TRANSFORMER + 1536 * MIB
                assert tick.free_bytes < tick.needed_bytes
                named = [holder for holder in tick.holders if holder.name == "blender"]
                assert [(holder.pid, holder.bytes) for holder in named] == [(4242, 20 * GIB)]
            left = [tick.patience_left_ms for tick in ticks]
            assert left[0] <= 20_000
            # Twice a second: never more often, and less often only where some were not read in time.
            between = [earlier - later for earlier, later in pairwise(left)]
            assert 300 <= min(between) <= 1500, left
            (shown,) = client.jobs()
            assert shown.state == "waiting"

            script.unlink()
            result = stream.result()
        assert result.pictures
        waited = {stage.name: stage.wait_ms for stage in result.stages}
        assert waited["denoise"] >= 800
        assert waited["decode"] == 0
        assert_at_rest(client)


def test_the_error_after_the_patience_names_the_holder(simulate: Simulate, tmp_path: Path) -> None:
    device, _ = world(tmp_path, "blender 4242 20GiB", "game 15GiB")
    with simulate(device).client() as client:
        until(client, lambda card: card.memory.foreign == 35 * GIB)
        began = time.monotonic()
        with pytest.raises(moored.MemoryTaken) as refused:
            client.load("flux-full", patience_s=1, timeout=DEADLINE_S)
        assert 0.8 <= time.monotonic() - began < 7, "as asked, and not the service's own patience"
        error = refused.value
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        assert error.needed_bytes > error.free_bytes
        holders = {(holder.name, holder.pid, holder.bytes) for holder in error.holders}
        assert {("blender", 4242, 20 * GIB), ("game", 0, 15 * GIB)} <= holders
        client.generate_image("small fits", model="small")
        assert_at_rest(client)


def test_a_smaller_picture_is_offered_where_others_hold_memory(
    simulate: Simulate, tmp_path: Path
) -> None:
    """A fallback is computed for the memory that there is now: 512x512 fits beside the others."""
    needed = TRANSFORMER + 1536 * MIB
    foreign = (40 * GIB - HEADROOM - needed + 512 * MIB) // MIB
    device, _ = world(tmp_path, f"blender 4242 {foreign}MiB")
    with simulate(device).client() as client:
        until(client, lambda card: card.memory.foreign > 0)
        with pytest.raises(moored.MemoryTaken) as refused:
            client.generate_image("waits", model="flux-full", patience_s=0.5, timeout=DEADLINE_S)
        assert refused.value.fallbacks
        for fallback in refused.value.fallbacks:
            client.generate_image("as told", patience_s=0.5, **as_told(fallback.label, "flux-full"))


def test_a_job_with_allow_low_memory_starts_although_memory_is_short(
    simulate: Simulate, tmp_path: Path
) -> None:
    # Free is enough, but not beyond the headroom.
    needed = TRANSFORMER + 1536 * MIB
    foreign = (40 * GIB - needed) // MIB - 100
    device, _ = world(tmp_path, f"blender 4242 {foreign}MiB")
    with simulate(device).client() as client:
        until(client, lambda card: card.memory.foreign > 0)
        with pytest.raises(moored.MemoryTaken):
            client.generate_image("no", model="flux-full", patience_s=0.5, timeout=DEADLINE_S)
        result = client.generate_image(
            "yes", model="flux-full", allow_low_memory=True, patience_s=0.5
        )
        assert result.pictures
        assert_at_rest(client)


def test_low_memory_that_is_not_enough_ends_only_that_job(
    simulate: Simulate, tmp_path: Path
) -> None:
    device, _ = world(tmp_path, "blender 4242 20GiB")
    with simulate(device).client() as client:
        until(client, lambda card: card.memory.foreign > 0)
        with pytest.raises(moored.OutOfMemory) as failed:
            client.generate_image("risky", model="flux-full", allow_low_memory=True, patience_s=0.5)
        assert failed.value.holders
        client.generate_image("the next", model="small")
        assert client.status().cards[0].worker_restarts == 0
        assert_at_rest(client)


def test_all_memory_is_released_after_mixed_use(simulate: Simulate) -> None:
    with simulate("sim:40GiB,slack=keep").client() as client:
        for model in ("flux-full", "small", "flux-other", "slow", "flux-full"):
            client.generate_image("all of them", model=model, steps=2, count=2)
        with pytest.raises(moored.NeverFits):
            client.generate_image("huge", model="huge")
        stream = client.stream_image("cancelled", model="slow", steps=200)
        with running(stream):
            pass
        assert_at_rest(client)
        assert client.status().latents == 0


# Swaps.


def names(events: list[moored.Event], kind: type) -> list[str]:
    return [event.component.name for event in events if isinstance(event, kind)]  # type: ignore[attr-defined]


def whole(client: moored.Client, model: str) -> bool:
    listed = {one.id: one for one in client.list_models()}
    return set(listed[model].resident) == COMPONENTS


def test_where_both_fit_the_old_model_leaves_when_the_new_one_is_proven(simulate: Simulate) -> None:
    with simulate("sim:80GiB").client() as client:
        client.load("flux-full")
        client.pin("flux-full")
        events = list(client.stream_load("flux-other", replace="flux-full"))
        done = events[-1]
        assert isinstance(done, moored.Done)
        stages = ["load", "encode_text", "denoise", "decode", "unload"]
        assert [stage.name for stage in done.stages] == stages
        (freed,) = done.freed
        assert (freed.component.name, freed.freed_bytes) == ("transformer", TRANSFORMER)
        assert freed.booked_bytes == TRANSFORMER
        began = [event.name for event in events if isinstance(event, moored.StageStarted)]
        assert began == stages[:-1]
        assert names(events, moored.Evicting) == ["transformer"]
        assert not of_kind(events, moored.Artifact)
        assert isinstance(events[-2], moored.Evicting), "the old one leaves last"
        assert whole(client, "flux-other")
        assert not whole(client, "flux-full")
        listed = {one.id: one.pinned for one in client.list_models()}
        assert (listed["flux-full"], listed["flux-other"]) == (False, True)
        client.unpin("flux-other")
        assert_at_rest(client)


@pytest.mark.parametrize(
    ("device", "error", "brought_back"),
    [
        ("sim:80GiB,fail-load=5:damaged", moored.ModelDamaged, False),
        ("sim:40GiB,fail-load=5:damaged", moored.ModelDamaged, True),
        ("sim:80GiB,die-at=denoise:1,die-generations=2", moored.WorkerDied, True),
        ("sim:40GiB,die-at=denoise:1,die-generations=2", moored.WorkerDied, True),
    ],
)
def test_a_failed_swap_restores_the_old_model_before_the_error(
    simulate: Simulate, device: str, error: type[moored.MooredError], brought_back: bool
) -> None:
    with simulate(device).client() as client:
        client.load("flux-full")
        client.pin("flux-full")
        events = []
        with (
            pytest.raises(error),
            client.stream_load("flux-other", replace="flux-full", timeout=60) as stream,
        ):
            events.extend(stream)
        retries = [event for event in events if isinstance(event, moored.Retrying)]
        restorings = [event for event in retries if event.reason == "RESTORING"]
        assert [event.stage for event in restorings] == ["restore"] * brought_back
        if brought_back and "40GiB" in device:  # where both fit, a pin brings it back by itself
            at = events.index(restorings[0])
            assert "transformer" in names(events[at:], moored.Loading), "it is seen to come back"
        assert whole(client, "flux-full")
        assert not whole(client, "flux-other")
        card = until(client, lambda card: card.memory.components == FLUX_BYTES)
        assert all(one.pinned and not one.held for one in card.residents)
        client.unpin("flux-full")
        assert_at_rest(client)


def test_a_swap_that_is_cancelled_is_undone(simulate: Simulate) -> None:
    with simulate("sim:40GiB,speed=5GiB/s").client() as client:
        client.load("flux-full")
        with client.stream_load("flux-other", replace="flux-full") as stream:
            next(event for event in stream if isinstance(event, moored.Loading))
        until(client, lambda card: card.memory.components == FLUX_BYTES and card.job_id == "")
        assert whole(client, "flux-full")
        assert_at_rest(client)


def test_a_swap_on_the_command_line(simulate: Simulate) -> None:
    service = simulate("sim:40GiB")
    with service.client() as client:
        client.load("flux-full")
        swapped = service.run("load", "flux-other", "--replace", "flux-full")
        assert swapped.returncode == 0, swapped.stderr
        assert "flux-other+full is proven and resident in place of flux-full" in swapped.stdout
        proven = service.run("load", "flux-other", "--prove")
        assert "flux-other+full is proven and resident" in proven.stdout
        for wrong in (["--replace", "flux-other"], ["--replace", "no-such-model"]):
            assert service.run("load", "flux-other", *wrong).returncode != 0
        part = service.run("load", "flux-other", "--prove", "--component", "vae")
        assert "--component" in part.stderr
        assert_at_rest(client)


def test_the_shipped_model_passes_its_proof(demo_client: moored.Client) -> None:
    result = demo_client.load("moored/demo", prove=True)
    stages = ["load", "encode_text", "denoise", "decode"]
    assert [stage.name for stage in result.stages] == stages
    with pytest.raises(moored.InvalidRequest, match="components"):
        demo_client.load("moored/demo", components=["vae"], prove=True)
    with pytest.raises(moored.InvalidRequest, match="replace"):
        demo_client.load("moored/demo", replace="moored/demo")
    with pytest.raises(moored.InvalidRequest, match=r"replace\.id"):
        demo_client.load("moored/demo", replace="")
