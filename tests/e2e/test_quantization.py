"""Quantized models: formats in requests, keys of entries, shared components, and fallbacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import moored
import pytest

from service import Service, as_told

Simulate = Callable[..., Service]

GIB = 1 << 30
DEADLINE_S = 60.0
FOUR_BITS = "small+4-bit"
FULL_BYTES = {
    "transformer": 4 << 20,
    "text_encoder": 1 << 20,
    "text_encoder_2": 2 << 20,
    "vae": 1 << 20,
}
"""Of the model `small`, in bf16."""


def small(preset: str = "", **formats: str) -> moored.ModelRef:
    return moored.ModelRef("small", quantization=preset, formats=formats)


def residents(client: moored.Client) -> dict[str, moored.ResidentComponent]:
    """Resident components by identity."""
    return {one.component.id: one for one in client.status().cards[0].residents}


def entries_of_transformers(client: moored.Client) -> list[tuple[str, ...]]:
    there = residents(client).values()
    return [one.entries for one in there if one.component.name == "transformer"]


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (small(), "small+full"),
        (small("full", vae="full"), "small+full"),
        (small("4-bit", transformer="full", text_encoder_2="full"), "small+full"),
        (small("4-bit"), FOUR_BITS),
        (small(transformer="nf4", text_encoder_2="nf4"), FOUR_BITS),
        (small("8-bit", transformer="nf4", text_encoder_2="nf4"), FOUR_BITS),
        (small("8-bit"), "small+8-bit"),
        (small("4-bit", text_encoder_2="fp8"), "small+text_encoder_2=fp8,transformer=nf4"),
        (small(text_encoder="nf4-double"), "small+text_encoder=nf4-double"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_has_one_key_however_it_is_asked_for(
    simulate: Simulate, model: moored.ModelRef, key: str
) -> None:
    with simulate().client() as client:
        picture = client.generate_image("a cube", model=model, timeout=DEADLINE_S)
        assert picture.model.key == key
        held = {"8-bit": "transformer=int8-convrot,text_encoder_2=int8-convrot"}
        held["4-bit"] = held["8-bit"].replace("int8-convrot", "nf4")
        formats = key.split("+")[1]
        asked = [each for each in held.get(formats, formats).split(",") if "=" in each]
        asked_of = dict(each.split("=") for each in asked)
        assert dict(picture.model.quantization) == dict.fromkeys(FULL_BYTES, "full") | asked_of
        entries = {key for one in residents(client).values() for key in one.entries}
        assert entries == {key}


def test_auto_takes_the_best_formats_that_fit_and_stays_with_them(simulate: Simulate) -> None:
    auto = moored.ModelRef("flux-full", quantization="auto")
    with simulate("sim:20GiB").client() as client:
        planned = client.plan("a cube", model=auto).model
        assert planned.key == "flux-full+8-bit"
        assert "8-bit: full needs" in planned.choice and "sim:0" in planned.choice
        client.load("flux-full+4-bit", timeout=DEADLINE_S)
        model = client.generate_image("a cube", model=auto, timeout=DEADLINE_S).model
        assert (model.key, model.choice) == (
            "flux-full+4-bit",
            "4-bit: it is in use in these formats",
        )
        client.unload("flux-full+4-bit")
        assert client.plan("a cube", model="flux-full+auto").model.key == "flux-full+8-bit"
        assert client.plan("a cube", model="flux-full").model.choice == "", "it was named"


def test_auto_leaves_what_is_reserved(simulate: Simulate) -> None:
    def chosen(client: moored.Client) -> str:
        return client.plan("a cube", model="flux-full+auto").model.key.removeprefix("flux-full+")

    with simulate("sim:40GiB").client() as client:
        assert chosen(client) == "full"
        small_left = client.plan("a cube", model="flux-full+auto", headroom_bytes=26 << 30).model
        assert small_left.key == "flux-full+8-bit", "what the job itself leaves free"
        with client.reserve(30 << 30, ttl_s=600):
            assert chosen(client) == "4-bit"
        assert chosen(client) == "full"


def test_auto_takes_no_other_formats(simulate: Simulate) -> None:
    with simulate().client() as client:
        with pytest.raises(moored.InvalidRequest, match=r"model\.quantization\.components"):
            client.plan("a cube", model=small("auto", vae="nf4"))
        for both in (moored.ModelRef("small+4-bit", quantization="auto"), "small+4-bit+auto"):
            with pytest.raises(moored.InvalidRequest, match=r"model\.id.*4-bit already"):
                client.plan("a cube", model=both)


def test_equal_formats_are_resident_once(simulate: Simulate) -> None:
    with simulate().client() as client:
        client.load(small("4-bit"), timeout=DEADLINE_S)
        before = residents(client)
        sizes = {one.component.name: one.component.bytes for one in before.values()}
        quantized = {name: FULL_BYTES[name] * 9 // 32 for name in ("transformer", "text_encoder_2")}
        assert sizes == FULL_BYTES | quantized

        said = small(transformer="nf4", text_encoder_2="nf4")
        again = client.load(said, timeout=DEADLINE_S)
        assert set(again.done.resident_already) == set(FULL_BYTES)
        assert residents(client).keys() == before.keys()

        client.pin(said)
        assert client.unload(small("4-bit")).freed == ()
        client.unpin(small("4-bit"))
        assert len(client.unload(said).freed) == len(FULL_BYTES)
        assert residents(client) == {}


def test_formats_are_components_of_their_own_and_the_rest_is_shared(simulate: Simulate) -> None:
    with simulate().client() as client:
        client.load("small", timeout=DEADLINE_S)
        full = residents(client)
        client.load(small(text_encoder_2="nf4"), timeout=DEADLINE_S)
        both = residents(client)
        names = sorted(one.component.name for one in both.values())
        assert names == sorted([*FULL_BYTES, "text_encoder_2"])
        (added,) = both.keys() - full.keys()
        assert both[added].entries == ("small+text_encoder_2=nf4",)
        (vae,) = (one for one in both.values() if one.component.name == "vae")
        assert set(vae.entries) == {"small+full", "small+text_encoder_2=nf4"}

        left = client.unload("small", timeout=DEADLINE_S)
        assert [one.component.name for one in left.freed] == ["text_encoder_2"]
        assert {one.component.name for one in left.kept} == set(FULL_BYTES) - {"text_encoder_2"}
        listed = {model.id: model for model in client.list_models()}
        assert set(listed["small"].resident) == set(FULL_BYTES)
        client.unload(timeout=DEADLINE_S)
        assert residents(client) == {}


def test_latents_pass_between_formats_of_a_model(simulate: Simulate) -> None:
    with simulate().client() as client:
        for model, other in [(small(vae="int8"), small()), (small(), small("4-bit", vae="nf4"))]:
            (latent,) = client.generate_image("a cube", model=model, keep_latent=True).latents
            client.decode_latent(latent.id, model=other, timeout=DEADLINE_S)


def test_a_refusal_names_quantizations_in_order_of_fidelity_before_sizes(
    simulate: Simulate,
) -> None:
    with simulate("sim:14GiB").client() as client:
        with pytest.raises(moored.NeverFits) as refused:
            client.generate_image("too large", model="flux-full", timeout=DEADLINE_S)
        fallbacks = refused.value.fallbacks
        labels = [fallback.label for fallback in fallbacks]
        assert labels == [
            "quantization 8-bit (int8-convrot)",
            "quantization text_encoder_2=fp8,transformer=fp8",
            "quantization 4-bit (nf4)",
            "quantization text_encoder_2=nf4-double,transformer=nf4-double",
        ]
        scratch, transformer = 1536 << 20, 23_836_229_632
        peaks = [fallback.peak_bytes - scratch for fallback in fallbacks]
        assert peaks[:3] == [transformer // 2, transformer // 2, transformer * 9 // 32]
        assert all(fallback.fits_now for fallback in fallbacks)
        plan = client.plan("too large", model="flux-full")
        shortfall = next(stage.shortfall for stage in plan.stages if stage.shortfall)
        assert shortfall.fallbacks == fallbacks
        for fallback in fallbacks:
            client.unload(timeout=DEADLINE_S)
            told = as_told(fallback.label, "flux-full")
            picture = client.generate_image("as told", timeout=DEADLINE_S, **told)
            peak = max(stage.peak_bytes for stage in picture.done.stages)
            assert peak >= fallback.peak_bytes


@pytest.mark.parametrize("gibibytes", [8, 9, 13, 14, 18, 23])
@pytest.mark.parametrize("beside", ["", "small", "steady"], ids=lambda beside: beside or "alone")
def test_every_quantization_that_a_refusal_names_runs(
    simulate: Simulate, gibibytes: int, beside: str
) -> None:
    with simulate(f"sim:{gibibytes}GiB").client() as client:

        def as_it_was() -> None:
            client.unload(timeout=DEADLINE_S)
            if beside:
                client.load(beside, timeout=DEADLINE_S)

        def refusal(call: Callable[[], object]) -> list[moored.Fallback]:
            as_it_was()
            with pytest.raises(moored.NeverFits) as refused:
                call()
            named = [one for one in refused.value.fallbacks if one.label.startswith("quantization")]
            assert named or gibibytes < 9
            return named

        request = {"prompt": "a cube", "timeout": DEADLINE_S}
        for fallback in refusal(lambda: client.generate_image(model="flux-full", **request)):
            as_it_was()
            told = as_told(fallback.label, "flux-full")
            plan = client.plan("a cube", **told)
            moves = [move for stage in plan.stages for move in stage.moves]
            assert fallback.fits_now == (not any(move.startswith("evict") for move in moves))
            assert len(client.generate_image(**request, **told).pictures) == 1
        for fallback in refusal(lambda: client.load("flux-full", timeout=DEADLINE_S)):
            as_it_was()
            there = set(residents(client))
            client.load(**as_told(fallback.label, "flux-full"), timeout=DEADLINE_S)
            assert fallback.fits_now == (there <= set(residents(client)))


def test_a_refusal_names_an_alternative_that_fits_on_any_of_several_cards(
    simulate: Simulate,
) -> None:
    with simulate("sim:8GiB", "sim:14GiB,index=1").client() as client:
        with pytest.raises(moored.NeverFits) as refused:
            client.generate_image("too large", model="flux-full", timeout=DEADLINE_S)
        labels = [fallback.label for fallback in refused.value.fallbacks]
        assert labels[0] == "quantization 8-bit (int8-convrot)"
        assert refused.value.capacity_bytes > 13 * GIB
        picture = client.generate_image("a cube", **as_told(labels[0], "flux-full"))
        assert {stage.card for stage in picture.done.stages[1:]} == {"sim:1"}


def test_entries_are_named_by_their_keys_too(simulate: Simulate) -> None:
    service = simulate()
    with service.client() as client:
        loaded = client.load("small+4-bit", timeout=DEADLINE_S)
        assert (loaded.model.key, loaded.model.id) == (FOUR_BITS, "small")
        for key in {key for one in residents(client).values() for key in one.entries}:
            again = client.load(key, timeout=DEADLINE_S)
            assert set(again.done.resident_already) == set(FULL_BYTES)
        client.pin(FOUR_BITS)

        # From one format to another, named either way, with the pin.
        eight_bits = "small+8-bit"
        client.load("small+8-bit", replace=FOUR_BITS, timeout=DEADLINE_S)
        assert entries_of_transformers(client) == [(eight_bits,)]
        replaced = service.run("load", "small", "--quantization", "4-bit", "--replace", eight_bits)
        assert replaced.returncode == 0, replaced.stderr
        assert f"{FOUR_BITS} is proven and resident in place of {eight_bits}" in replaced.stdout
        assert entries_of_transformers(client) == [(FOUR_BITS,)]
        assert all(one.pinned for one in residents(client).values())

        # What is resident in another format is not taken for it.
        missed = service.run("unload", "small")
        assert missed.returncode == 0, missed.stderr
        assert "small+4-bit" in missed.stdout
        service.run("pin", FOUR_BITS, "--off")
        assert "freed transformer" in service.run("unload", FOUR_BITS).stdout
        with pytest.raises(moored.InvalidRequest, match="already"):
            client.load(moored.ModelRef("small+4-bit", quantization="8-bit"), timeout=DEADLINE_S)
        with pytest.raises(moored.InvalidRequest, match="transformer=nf4"):
            client.load(small("nf4"), timeout=DEADLINE_S)


def test_a_key_that_was_used_for_another_format_is_refused(simulate: Simulate) -> None:
    with simulate().client() as client:
        request = {"prompt": "a cube", "idempotency_key": "mine", "timeout": DEADLINE_S}
        first = client.generate_image(model=small("4-bit"), **request)
        assert client.generate_image(model=FOUR_BITS, **request).job_id == first.job_id
        with pytest.raises(moored.KeyReused):
            client.generate_image(model=small("8-bit"), **request)


def test_what_does_not_fit_in_8_bits_is_offered_in_4(simulate: Simulate) -> None:
    with simulate("sim:12GiB").client() as client:
        with pytest.raises(moored.NeverFits) as refused:
            client.load("flux-full", timeout=DEADLINE_S)
        labels = [fallback.label for fallback in refused.value.fallbacks]
        assert labels[0] == "quantization 4-bit (nf4)"
        assert labels[2].startswith("components "), "parts of a load come after"
        client.load(moored.ModelRef("flux-full", quantization="4-bit"), timeout=DEADLINE_S)


@pytest.mark.parametrize(
    ("model", "field", "word"),
    [
        (small("5-bit"), "model.quantization.preset", "8-bit"),
        (small(vae="int7"), "model.quantization.components", "nf4-double"),
        (small(unet="nf4"), "model.quantization.components", "text_encoder_2"),
        (small("4-bit", vae="Q4_K"), "model.quantization.components", "vae"),
    ],
    ids=["preset", "format", "component", "stored"],
)
def test_unknown_formats_and_components_are_refused_by_field(
    simulate: Simulate, model: moored.ModelRef, field: str, word: str
) -> None:
    with simulate().client() as client:
        calls: list[Callable[[], object]] = [
            lambda: client.generate_image("no", model=model),
            lambda: client.load(model),
            lambda: client.plan("no", model=model),
            lambda: client.pin(model),
            lambda: client.hold(model),
            lambda: client.unload(model),
        ]
        for call in calls:
            with pytest.raises(moored.InvalidRequest) as wrong:
                call()
            (violation,) = wrong.value.violations
            assert violation.field == field
            assert word in violation.description


def test_a_model_stored_quantized_is_listed_so_and_not_converted(
    simulate: Simulate, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    stored = {
        "name": "stored",
        "components": [
            {"name": "transformer", "bytes": 9 * GIB, "identity": "s", "stored": "Q4_K"},
            {"name": "text_encoder_2", "bytes": 9 * GIB, "identity": "t5-xxl"},
            {"name": "vae", "bytes": GIB, "identity": "v"},
        ],
    }
    (folder / "stored.instant.json").write_text(json.dumps(stored))
    service = simulate("sim:14GiB", arguments=("--models", str(folder)))
    with service.client() as client:
        with pytest.raises(moored.InvalidRequest, match=r"Q4_K.*transformer=full"):
            client.load(moored.ModelRef("stored", quantization="4-bit"), timeout=DEADLINE_S)
        assert client.plan("a cube", model="stored+auto").model.key == "stored+full"
        with client.reserve(6 << 30):
            chosen = client.plan("a cube", model="stored+auto").model
            assert chosen.key == "stored+text_encoder_2=nf4", "the least, though it waits"
        as_advised = moored.ModelRef(
            "stored", quantization="4-bit", formats={"transformer": "full"}
        )
        assert client.load(as_advised, timeout=DEADLINE_S).model.key == "stored+text_encoder_2=nf4"
        client.unload(timeout=DEADLINE_S)
        with pytest.raises(moored.NeverFits) as refused:
            client.load("stored", timeout=DEADLINE_S)
        labels = [fallback.label for fallback in refused.value.fallbacks]
        assert labels[:2] == [
            "quantization text_encoder_2=nf4",
            "quantization text_encoder_2=nf4-double",
        ]
        loaded = client.load(**as_told(labels[0], "stored"), timeout=DEADLINE_S)
        formats = {"transformer": "Q4_K", "text_encoder_2": "nf4", "vae": "full"}
        assert dict(loaded.model.quantization) == formats

        (model,) = (one for one in client.list_models() if one.id == "stored")
        assert model.quantization["transformer"] == "Q4_K"
        assert [choice.preset for choice in model.choices] == ["full"]


def test_formats_are_requested_on_the_command_line(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate()
    service.client().close()

    def good(*arguments: str) -> str:
        result = service.run(*arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    preset, formats = ("--quantization", "4-bit"), ("--format", "transformer=nf4")
    picture = tmp_path / "picture.png"
    good("generate", "a cube", "-m", "small", *preset, "-o", str(picture))
    with service.client() as client:
        assert {key for one in residents(client).values() for key in one.entries} == {FOUR_BITS}
        good("load", "small", *formats, "--format", "text_encoder_2=nf4")
        assert len(residents(client)) == len(FULL_BYTES)
        plan = json.loads(good("plan", "a cube", "-m", "small", *preset, "--json"))
        assert plan["model"]["key"] == FOUR_BITS
        assert "small+4-bit" in good("pin", "small", *preset), "as it is typed"
        good("pin", "small", *preset, "--off")
        good("unload", "small", *preset)
        assert residents(client) == {}
        # A picture remembers how its model was held.
        good("generate", "--from", str(picture), "-o", str(tmp_path / "again.png"))
        assert {key for one in residents(client).values() for key in one.entries} == {FOUR_BITS}
    wrong = service.run("load", "small", "--format", "transformer")
    assert wrong.returncode == 2
    assert "transformer=nf4" in wrong.stderr
    wrong = service.run("load", "small", *formats, "--format", "transformer=int8")
    assert wrong.returncode == 2
    assert "--format names transformer twice, as nf4 and as int8" in wrong.stderr
    wrong = service.run("load", "small", "--format", "unet=nf4")
    assert wrong.returncode == 2
    assert "unet" in wrong.stderr
