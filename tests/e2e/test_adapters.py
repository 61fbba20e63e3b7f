"""Adapters (LoRA): one base for all of them, what a strength does, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from lora_files import (
    LAYERS,
    RANK,
    WIDTH,
    instant_adapter,
    random_lora,
    random_text_lora,
    write_safetensors,
)

from service import Service

ADAPTERS = 20
CLIENTS = 4
JOBS = 200
ADAPTER_BYTES = 1 << 20

PROMPT = "a large red circle in the centre on a black background"
SMALL: dict[str, Any] = {"seed": 7, "width": 64, "height": 64, "steps": 3}
BASE = {"transformer", "text_encoder", "text_encoder_2", "vae"}

Simulate = Callable[..., Service]
Refused = moored.InvalidRequest


def name_of(number: int) -> str:
    return f"styles/red-{number:02}"


@pytest.fixture
def simulated(simulate: Simulate, tmp_path: Path) -> Callable[[str], Service]:
    """Starts a service on a simulated card, with twenty adapters of the family `instant`."""
    folder = tmp_path / "adapters"
    for number in range(ADAPTERS):
        instant_adapter(folder, name_of(number), ADAPTER_BYTES)

    def start(card: str = "sim:24GiB") -> Service:
        return simulate(card, arguments=("--set", f"models.adapters={json.dumps([str(folder)])}"))

    return start


def residents(client: moored.Client) -> dict[str, moored.ResidentComponent]:
    """What is on the card, by the components' names."""
    return {one.component.name: one for one in client.status().cards[0].residents}


def component_of(adapter: str) -> str:
    return f"adapter:{adapter}:transformer"


def pixels(client: moored.Client, **options: Any) -> bytes:
    """A picture of `small`, as its pixels."""
    picture = client.generate_image("x", model="small", seed=1, output="raw", **options)
    return bytes(picture.pictures[0].data)


def loaded(stream: moored.EventStream[moored.ImageResult]) -> Counter[str]:
    """How often each component's loading began in a job."""
    begun: Counter[str] = Counter()
    last = ""
    for event in stream:
        if isinstance(event, moored.Loading):
            if event.component.id != last:
                begun[event.component.name] += 1
            last = event.component.id
    stream.result()
    return begun


# On a simulated card.


def test_adapters_are_listed_with_the_models(simulated: Callable[[], Service]) -> None:
    service = simulated()
    with service.client() as client:
        listed = {one.id: one.bytes for one in client.list_adapters()}
        own = {name: size for name, size in listed.items() if name.startswith("styles/")}
        assert list(own) == [name_of(number) for number in range(ADAPTERS)]
        assert all(size > 0 for size in own.values())
        info = client.server_info()
        assert "adapters" in info.capabilities
        assert not info.not_built
    shown = service.run("models", "--adapters")
    assert shown.returncode == 0
    assert name_of(3) in shown.stdout


def test_clients_with_different_adapters_share_one_base(simulated: Callable[[], Service]) -> None:
    service = simulated()

    def generate(number: int) -> Counter[str]:
        with service.client(client_id=f"client-{number}") as client:
            adapters = [name_of(number)]
            with client.stream_image("x", model="small", adapters=adapters, seed=1) as stream:
                return loaded(stream)

    with service.client() as client:
        with ThreadPoolExecutor(CLIENTS) as pool:
            begun = sum(pool.map(generate, range(CLIENTS)), Counter())
        assert all(begun[name] == 1 for name in BASE), begun
        there = residents(client)
        assert there.keys() == BASE | {component_of(name_of(n)) for n in range(CLIENTS)}
        assert {f"small+full&{name_of(n)}" for n in range(CLIENTS)} <= {
            *there["transformer"].entries
        }
        assert there[component_of(name_of(0))].component.bytes == ADAPTER_BYTES


def test_a_strength_of_0_is_the_base_and_needs_no_adapter(
    simulated: Callable[[], Service],
) -> None:
    with simulated().client() as client:
        base = pixels(client)
        for adapter in ((name_of(0), 0.0), moored.Adapter(name_of(0), curve=[(0, 0), (1, 0)])):
            assert pixels(client, adapters=[adapter]) == base
            assert residents(client).keys() == BASE
            plan = client.plan("x", model="small", adapters=[adapter])
            assert plan.model.key == "small+full"
            assert plan.model.adapters == ()
        full, half = (pixels(client, adapters=[(name_of(0), s)]) for s in (1.0, 0.5))
        assert len({base, full, half}) == 3
        assert pixels(client, adapters=[name_of(0)]) == full
        assert pixels(client) == base, "the base is as it was"


def test_a_job_with_adapters_is_unloaded_held_and_pinned_by_them(
    simulated: Callable[[], Service],
) -> None:
    red = moored.ModelRef("small", adapters=(name_of(0),))
    other = moored.ModelRef("small", adapters=(name_of(1),))
    with simulated().client() as client:
        client.load(red)
        client.load(other)
        assert residents(client).keys() == BASE | {component_of(name_of(n)) for n in (0, 1)}
        unloaded = client.unload(red)
        assert [one.component.name for one in unloaded.freed] == [component_of(name_of(0))]
        assert {one.component.name for one in unloaded.kept} == BASE
        assert {one.cause for one in unloaded.kept} == {"shared"}
        with client.hold(other, client_id="holder"):
            kept = client.unload(other)
            assert {one.cause for one in kept.kept} == {"held"}
        assert client.pin(other) == (f"small+full&{name_of(1)}",)
        assert residents(client)[component_of(name_of(1))].pinned
        assert client.unpin(other) == ()
        assert client.unload(other).freed_bytes > ADAPTER_BYTES
        assert residents(client) == {}


def test_a_key_generates_with_its_adapters(simulated: Callable[[], Service]) -> None:
    with simulated().client() as client:
        adapters = [name_of(0), name_of(1)]
        key = client.plan("x", model="small", adapters=adapters).model.key
        by_key = client.generate_image("x", model=key, seed=1, output="raw").pictures[0].data
        assert bytes(by_key) == pixels(client, adapters=adapters) != pixels(client)


def test_an_entry_is_named_by_its_key(simulated: Callable[[], Service]) -> None:
    with simulated().client() as client:
        key = client.generate_image("x", model="small", adapters=[name_of(0), name_of(1)]).model.key
        assert key == f"small+full&{name_of(0)}&{name_of(1)}"
        again = client.plan("x", model=key)
        assert again.model.key == key
        client.unload(key)
        assert residents(client) == {}


def test_an_adapter_without_room_is_read_from_the_machines_memory(
    simulate: Simulate, tmp_path: Path
) -> None:
    instant_adapter(tmp_path, "huge", 40 << 30)
    setting = f"models.adapters={json.dumps([str(tmp_path)])}"
    with simulate("sim:24GiB", arguments=("--set", setting)).client() as client:
        base = client.generate_image("x", model="small", seed=1)
        result = client.generate_image("x", model="small", seed=1, adapters=["huge"])
        assert result.pictures[0].data != base.pictures[0].data
        (denoise,) = [stage for stage in result.done.stages if stage.name == "denoise"]
        assert denoise.chunking == "adapters from the machine's memory"
        assert not result.done.approximations
        there = residents(client)
        assert component_of("huge") not in there and there.keys() >= BASE


def test_adapters_leave_where_room_is_needed(simulate: Simulate, tmp_path: Path) -> None:
    for number in range(6):
        instant_adapter(tmp_path, f"red-{number}", 4 << 30)
    setting = f"models.adapters={json.dumps([str(tmp_path)])}"
    with simulate("sim:24GiB", arguments=("--set", setting)).client() as client:
        for number in range(6):
            client.generate_image("x", model="small", adapters=[f"red-{number}"])
        there = residents(client)
        assert component_of("red-5") in there
        assert component_of("red-0") not in there, "the oldest left"
        assert there.keys() >= BASE
        client.generate_image("x", model="small", adapters=["red-0"])
        assert component_of("red-0") in residents(client)


@pytest.mark.parametrize(
    ("adapters", "field", "said"),
    [
        (["none"], "model.adapters[0].id", "none"),
        ([name_of(0), "../red"], "model.adapters[1].id", "../red"),
        ([""], "model.adapters[0].id", "is not there"),
        (["/etc/passwd"], "model.adapters[0].id", "passwd"),
        ([(name_of(0), 1000)], "model.adapters[0].strength", "100"),
        ([(name_of(0), float("nan"))], "model.adapters[0].strength", ""),
        ([moored.Adapter(name_of(0), text_strength=-101)], "model.adapters[0].text_strength", ""),
        ([moored.Adapter(name_of(0), 1, curve=[(0, 1)])], "model.adapters[0].curve", "leave one"),
        ([moored.Adapter(name_of(0), curve=[(2, 1)])], "model.adapters[0].curve", ""),
        ([moored.Adapter(name_of(0), curve=[(1, 1), (0, 1)])], "model.adapters[0].curve", ""),
        ([name_of(n) for n in range(17)], "model.adapters", "16"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_field(
    simulated: Callable[[], Service], adapters: Any, field: str, said: str
) -> None:
    model = moored.ModelRef("small", adapters=tuple(adapters))
    with simulated().client() as client:
        calls: list[Callable[[], object]] = [
            lambda: client.generate_image("x", model="small", adapters=adapters),
            lambda: client.plan("x", model=model),
            lambda: client.load(model),
            lambda: client.pin(model),
            lambda: client.hold(model),
            lambda: client.unload(model),
        ]
        for call in calls:
            with pytest.raises(Refused) as refused:
                call()
            assert [one.field for one in refused.value.violations] == [field]
            assert said in refused.value.message
        assert residents(client) == {}


def test_a_service_without_adapters_says_where_they_are_looked_for(simulate: Simulate) -> None:
    with simulate().client() as client, pytest.raises(Refused) as refused:
        client.generate_image("x", model="small", adapters=["ink"])
    assert "models.adapters" in refused.value.message or "moored models" in refused.value.message


def test_many_jobs_of_many_adapters_load_the_base_once_and_leave_nothing(
    simulated: Callable[[], Service],
) -> None:
    service = simulated()

    def work(number: int) -> Counter[str]:
        choice = random.Random(number)
        begun: Counter[str] = Counter()
        with service.client(client_id=f"client-{number}") as client:
            for _ in range(JOBS // CLIENTS):
                count = choice.randint(0, 3)
                names = [name_of(n) for n in choice.sample(range(ADAPTERS), count)]
                adapters = [(name, choice.choice([0.0, 0.5, 1.0])) for name in names]
                with client.stream_image(
                    "x", model="small", adapters=adapters, seed=1, output="raw", steps=1
                ) as stream:
                    begun += loaded(stream)
                red = bytes(stream.result().pictures[0].data)[0]
                strength = sum(strength for _, strength in adapters)
                generated[strength].add(red)
        return begun

    generated: dict[float, set[int]] = {n / 2: set() for n in range(7)}
    with service.client() as client:
        with ThreadPoolExecutor(CLIENTS) as pool:
            begun = sum(pool.map(work, range(CLIENTS)), Counter())
        assert {name: begun[name] for name in BASE} == dict.fromkeys(BASE, 1)
        assert set(begun.values()) == {1}, "adapters too were loaded once each"
        assert all(len(reds) <= 1 for reds in generated.values()), "a strength is always the same"
        assert len(set.union(*generated.values())) > 3
        client.unload()
        (card,) = client.status().cards
        assert (card.residents, card.memory.components) == ((), 0)


# The shipped model, on the CPU.


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters for the shipped model: good ones, and some that are damaged."""
    folder = tmp_path_factory.mktemp("loras")
    good = random_lora()
    write_safetensors(folder / "styles" / "random.safetensors", good)
    write_safetensors(folder / "other.safetensors", random_lora(seed=2))
    layer = "transformer.transformer_blocks.0.attn.to_q"
    wrong = good | {f"{layer}.lora_B.weight": np.zeros((WRONG_SIDE, RANK), np.float32)}
    write_safetensors(folder / "wrong-shape.safetensors", wrong)
    text = random_text_lora()
    write_safetensors(folder / "text.safetensors", text)
    write_safetensors(folder / "whole.safetensors", good | text)
    infinite = good | {f"{layer}.lora_A.weight": np.full((RANK, WIDTH), np.inf, np.float32)}
    write_safetensors(folder / "not-finite.safetensors", infinite)
    half = {name: one for name, one in good.items() if name != f"{layer}.lora_A.weight"}
    write_safetensors(folder / "half.safetensors", half)
    unknown = {"transformer.no_such_layer.lora_A.weight": np.zeros((RANK, 8), np.float32)}
    unknown["transformer.no_such_layer.lora_B.weight"] = np.zeros((8, RANK), np.float32)
    write_safetensors(folder / "unknown.safetensors", good | unknown)
    write_safetensors(folder / "foreign.safetensors", unknown)
    (folder / "cut.safetensors").write_bytes((folder / "other.safetensors").read_bytes()[: 1 << 14])
    (folder / "prose.safetensors").write_text("no tensors")
    return folder


WRONG_SIDE = 100


@pytest.fixture(scope="module")
def adapting(loras: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped model and those adapters."""
    service = Service(
        *("--set", f"models.adapters={json.dumps([str(loras)])}"),
        state=tmp_path_factory.mktemp("adapting"),
    )
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def client(adapting: Service) -> Iterator[moored.Client]:
    with adapting.client() as client:
        yield client


def generated(client: moored.Client, **options: Any) -> bytes:
    """The pixels of one picture."""
    result = client.generate_image(PROMPT, output="raw", **(SMALL | options))
    return bytes(result.pictures[0].data)


def test_a_lora_changes_the_picture_by_its_strength(client: moored.Client) -> None:
    base = generated(client)
    full = generated(client, adapters=["styles/random"])
    pictures = {
        base,
        full,
        generated(client, adapters=[("styles/random", 0.5)]),
        generated(client, adapters=[("styles/random", -1)]),
        generated(client, adapters=[moored.Adapter("styles/random", curve=[(0, 1), (1, 0)])]),
        generated(client, adapters=["styles/random", "other"]),
    }
    assert len(pictures) == 6
    assert generated(client, adapters=["styles/random.safetensors"]) == full
    assert generated(client, adapters=[("styles/random", 0)]) == base
    both = [("styles/random", 1.0), ("other", 0.0)]
    assert generated(client, adapters=both) == full
    assert generated(client) == base


def test_a_curve_is_the_strength_of_each_step(client: moored.Client) -> None:
    constant = moored.Adapter("styles/random", curve=[(0, 0.5), (1, 0.5)])
    assert generated(client, adapters=[constant]) == generated(
        client, adapters=[("styles/random", 0.5)]
    )
    # Of one step there is the first alone.
    fading = moored.Adapter("styles/random", curve=[(0, 1), (1, 0)])
    assert generated(client, steps=1, adapters=[fading]) == generated(
        client, steps=1, adapters=["styles/random"]
    )


def test_text_encoders_have_a_strength_of_their_own(client: moored.Client) -> None:
    whole, text = "whole", "text"
    assert generated(client, adapters=[moored.Adapter(whole, 1, text_strength=0)]) == generated(
        client, adapters=["styles/random"]
    )
    only_text = generated(client, adapters=[moored.Adapter(whole, 0, text_strength=1)])
    assert only_text == generated(client, adapters=[text])
    # An encoding that is remembered is of its strength.
    half = generated(client, adapters=[moored.Adapter(whole, 0, text_strength=0.5)])
    assert len({half, only_text, generated(client)}) == 3
    fading = moored.Adapter(text, curve=[(0, 0.5), (1, 0)])
    assert generated(client, adapters=[fading]) == half, "the first step's"
    told = client.plan(PROMPT, adapters=[whole]).model.adapters[0].layers
    assert told.keys() == {"transformer", "text_encoder"}


def test_a_file_that_is_written_anew_is_another_adapter(client: moored.Client, loras: Path) -> None:
    write_safetensors(loras / "changing.safetensors", random_lora(seed=4))
    before = generated(client, adapters=["changing"])
    write_safetensors(loras / "changing.safetensors", random_lora(seed=5))
    after = generated(client, adapters=["changing"])
    assert after not in (before, generated(client))
    assert generated(client, adapters=["changing"]) == after


def test_a_model_is_unloaded_with_an_adapter_whose_file_is_gone(
    client: moored.Client, loras: Path
) -> None:
    write_safetensors(loras / "going.safetensors", random_lora(seed=6))
    model = moored.ModelRef("moored/demo", adapters=("going",))
    client.load(model)
    (loras / "going.safetensors").unlink()
    try:
        client.unload(model)
        assert component_of("going") not in residents(client)
    finally:
        client.unload()


def test_a_lora_that_is_not_finite_fails_its_job_alone(client: moored.Client) -> None:
    base = generated(client)
    with pytest.raises(moored.NotFinite) as failed:
        generated(client, adapters=["not-finite"])
    assert "not-finite" in failed.value.message
    assert generated(client) == base


def test_a_result_says_what_was_changed(client: moored.Client) -> None:
    plan = client.plan(PROMPT, adapters=["styles/random"])
    (told,) = plan.model.adapters
    assert told.id == "styles/random"
    assert told.layers == {"transformer": LAYERS}
    assert (told.rank, told.ignored, told.ignored_count) == (RANK, (), 0)
    result = client.generate_image(PROMPT, **SMALL, adapters=["styles/random"])
    assert result.model.adapters == plan.model.adapters
    assert result.pictures[0].recipe["adapters"] == [{"id": "styles/random", "strength": 1.0}]


def test_the_same_lora_changes_the_model_in_4_bits(client: moored.Client) -> None:
    model = moored.ModelRef("moored/demo", quantization="4-bit")
    base = generated(client, model=model)
    assert base != generated(client)
    changed = generated(client, model=model, adapters=["styles/random"])
    assert changed not in (base, generated(client, adapters=["styles/random"]))
    assert generated(client, model=model, adapters=[("styles/random", 0)]) == base
    small, full = (
        {one.component.id for one in residents(client).values() if component in one.entries}
        for component in ("moored/demo+4-bit&styles/random", "moored/demo+full&styles/random")
    )
    assert any("adapter" in name or name in full for name in small)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong-shape", r"transformer_blocks\.0\.attn\.to_q.*100"),
        ("half", r"transformer_blocks\.0\.attn\.to_q"),
        ("unknown", r"no_such_layer.*ignore"),
        ("foreign", r"no_such_layer"),
        ("cut", r"cut"),
        ("prose", r"prose"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused_with_the_tensors_name(
    client: moored.Client, name: str, said: str
) -> None:
    before = generated(client)
    with pytest.raises(Refused) as refused:
        generated(client, adapters=["styles/random", name])
    assert re.search(said, refused.value.message, re.DOTALL), refused.value.message
    (violation,) = refused.value.violations
    assert "adapters[" in violation.field
    assert generated(client) == before


def test_unknown_tensors_are_ignored_where_that_is_asked_for(client: moored.Client) -> None:
    lenient = moored.Adapter("unknown", ignore_unknown=True)
    result = client.generate_image(PROMPT, output="raw", **SMALL, adapters=[lenient])
    assert bytes(result.pictures[0].data) == generated(client, adapters=["styles/random"])
    (told,) = result.model.adapters
    assert told.ignored_count == 2
    assert set(told.ignored) == {
        f"transformer.no_such_layer.lora_{part}.weight" for part in ("A", "B")
    }
    assert told.layers == {"transformer": LAYERS}


def test_previews_latents_and_starts_take_adapters(client: moored.Client) -> None:
    adapters = ["styles/random"]
    kept = client.generate_image(PROMPT, **SMALL, adapters=adapters, keep_latent=True)
    assert client.decode_latent(kept.latents[0]).pictures[0].array.tolist() == (
        kept.pictures[0].array.tolist()
    )
    start = {"init_image": kept.pictures[0].image, "strength": 0.7, "steps": 4}
    assert generated(client, **start) != generated(client, adapters=adapters, **start)


# The command line.


def generate(service: Service, *arguments: str) -> None:
    done = service.run("generate", *arguments)
    assert done.returncode == 0, done.stderr


QUICK = ("--seed", "7", "--width", "64", "--height", "64", "--steps", "3")


@pytest.mark.parametrize(
    "lora",
    ["styles/random:0.5", "styles/random", "styles/random:1,0", "styles/random:0.8:0"],
)
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_the_command_line_takes_a_lora_and_repeats_a_picture_with_it(
    adapting: Service, client: moored.Client, tmp_path: Path, lora: str, ending: str
) -> None:
    first, again = tmp_path / f"first.{ending}", tmp_path / f"again.{ending}"
    generate(adapting, PROMPT, *QUICK, "--lora", lora, "-o", str(first))
    generate(adapting, "--from", str(first), "-o", str(again))
    with_first, with_again = moored.read_recipe(first), moored.read_recipe(again)
    assert with_first == with_again
    assert with_first["model_key"] == "moored/demo+full"
    name, _, strengths = lora.partition(":")
    expected: dict[str, Any] = {
        "": {"strength": 1.0},
        "0.5": {"strength": 0.5},
        "1,0": {"strength": 1.0, "curve": [[0.0, 1.0], [1.0, 0.0]]},
        "0.8:0": {"strength": 0.8, "text_strength": 0.0},
    }[strengths]
    assert with_first["adapters"] == [{"id": name} | expected]
    if ending == "png":
        assert first.read_bytes() == again.read_bytes()
        image = client.generate_image(PROMPT, **SMALL, adapters=with_first["adapters"])
        image.save(tmp_path / "client.png")
        assert (tmp_path / "client.png").read_bytes() == first.read_bytes()


def test_a_picture_that_ignored_tensors_is_made_again(adapting: Service, tmp_path: Path) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    arguments = ("--lora", "unknown", "--lora-ignore-unknown")
    generate(adapting, PROMPT, *QUICK, *arguments, "-o", str(first))
    generate(adapting, "--from", str(first), "-o", str(again))
    assert first.read_bytes() == again.read_bytes()


def test_the_command_line_takes_the_path_of_a_lora(
    adapting: Service, loras: Path, tmp_path: Path
) -> None:
    path = str(loras / "other.safetensors")
    generate(adapting, PROMPT, *QUICK, "--lora", path, "-o", str(tmp_path / "one.png"))
    assert moored.read_recipe(tmp_path / "one.png")["adapters"][0]["id"] == "other"


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ("none", "model.adapters[0].id"),
        ("wrong-shape", "transformer_blocks.0.attn.to_q"),
        ("styles/random:101", "model.adapters[0].strength"),
        ("styles/random:strong", "strength"),
    ],
)
def test_the_command_line_says_what_is_wrong_with_a_lora(
    adapting: Service, tmp_path: Path, lora: str, said: str
) -> None:
    done = adapting.run("generate", PROMPT, *QUICK, "--lora", lora, "-o", str(tmp_path / "x.png"))
    assert done.returncode not in (0, 101)
    assert said in done.stderr
    assert not (tmp_path / "x.png").exists()
