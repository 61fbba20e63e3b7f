"""Masks, reference pictures and ControlNets: what stays, what changes, and what is refused."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from service import ROOT, Service

FIXTURES = ROOT / "service/pipelines/fixtures"
PROMPT = "a large red circle in the centre on a black background"
SIDE = 64
SMALL: dict[str, Any] = {"seed": 7, "width": SIDE, "height": SIDE, "steps": 3}
LEFT = SIDE // 4
"""Columns of the mask that change, from the left."""
SINGLE, UNION = "nets/single", "union"
LORA = "moored/circle-to-star"
Z_IMAGE = "z-image"
UNION_MODES = 4
# What is preferred for a reference of 48 by 32 pixels.
REFERENCE_SIZE = (48, 32)
PREFERRED_SIZE = (1248, 832)

Pixels = NDArray[np.uint8]
Refused = moored.InvalidRequest


def noise(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """A picture whose every pixel is different."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def mask(width: int = SIDE, height: int = SIDE, grey: int = 255) -> Image.Image:
    """A mask by which the left quarter changes."""
    left = Image.new("L", (width, height), 0)
    left.paste(grey, (0, 0, width // 4, height))
    return left


START = noise(1)
MASK = mask()


def png_of(picture: Image.Image) -> bytes:
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return encoded.getvalue()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny FLUX.1, and as Kontext and Fill; and a tiny Z-Image."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("plain", "kontext", "fill"):
        shutil.copytree(FIXTURES / "flux-tiny", folder / name)
    for name in ("kontext", "fill"):
        shutil.copytree(FIXTURES / f"flux-{name}-tiny", folder / name, dirs_exist_ok=True)
    shutil.copytree(FIXTURES / "z-image-tiny", folder / Z_IMAGE)
    shutil.copytree(FIXTURES / "flux-tiny/vae", folder / Z_IMAGE / "vae")
    return folder


@pytest.fixture(scope="module")
def editing(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with these models, the shipped one and two ControlNets."""
    nets = tmp_path_factory.mktemp("nets")
    for name in (SINGLE, UNION):
        source = FIXTURES / "flux-controlnet-tiny" / Path(name).name
        shutil.copytree(source, nets / name)
    service = Service(
        *("--models", str(models)),
        *("--set", f"models.adapters={json.dumps([str(nets)])}"),
        state=tmp_path_factory.mktemp("editing"),
    )
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def client(editing: Service) -> Iterator[moored.Client]:
    with editing.client() as client:
        yield client


def generated(client: moored.Client, **options: Any) -> Pixels:
    """The pixels of one picture."""
    result = client.generate_image(PROMPT, output="raw", **(SMALL | options))
    return np.array(result.pictures[0].array)


def same(one: Pixels, other: Pixels) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def fields_of(client: moored.Client, **options: Any) -> list[str]:
    """The fields for which a picture is refused; its plan is refused by the same."""
    refusals = []
    for call in (client.generate_image, client.plan):
        with pytest.raises(Refused) as refused:
            call(PROMPT, **(SMALL | options))
        refusals.append([one.field for one in refused.value.violations])
    assert refusals[0] == refusals[1]
    return refusals[0]


# Masks.


@pytest.mark.parametrize("model", ["moored/demo", "plain", "fill", Z_IMAGE])
def test_what_is_not_masked_stays_to_the_byte(client: moored.Client, model: str) -> None:
    before = np.array(START)
    changed = generated(client, model=model, init_image=START, mask=MASK)
    assert same(changed[:, LEFT:], before[:, LEFT:])
    there = (changed[:, :LEFT] != before[:, :LEFT]).any(axis=2)
    assert there.mean() > 0.9
    assert not same(changed, generated(client, model=model, init_image=START))


def test_a_mask_of_black_changes_nothing_and_of_white_all(client: moored.Client) -> None:
    black, white = (Image.new("L", (SIDE, SIDE), grey) for grey in (0, 255))
    assert same(generated(client, init_image=START, mask=black), np.array(START))
    all_of_it = generated(client, init_image=START, mask=white)
    assert same(all_of_it, generated(client, init_image=START))


def test_a_grey_mask_mixes_both_pictures(client: moored.Client) -> None:
    full = generated(client, init_image=START, mask=MASK).astype(int)
    # From the middle on a cell is sampled, and its pixels are mixed.
    mixed = generated(client, init_image=START, mask=mask(grey=191)).astype(int)
    before = np.array(START).astype(int)
    expected = (full * 191 + before * (255 - 191) + 127) // 255
    assert (mixed == expected).all()


def test_a_mask_of_another_size_is_scaled(client: moored.Client) -> None:
    # 16 columns of 64, of a mask of one third of the size.
    other = mask(SIDE // 4, SIDE // 2).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    scaled = generated(client, init_image=START, mask=mask(SIDE // 4, SIDE // 2))
    assert same(scaled, generated(client, init_image=START, mask=other))
    assert same(scaled[:, SIDE // 2 :], np.array(START)[:, SIDE // 2 :])


@pytest.mark.parametrize("mode", ["1", "RGB", "RGBA", "LA", "P"])
def test_a_mask_is_its_luminance_in_any_mode(client: moored.Client, mode: str) -> None:
    expected = generated(client, init_image=START, mask=MASK)
    converted = MASK.convert(mode)
    if "A" in mode:
        converted.putalpha(0)
    for given in (converted, png_of(converted)):
        assert same(generated(client, init_image=START, mask=given), expected)


def test_pictures_to_edit_may_be_uploaded_media(client: moored.Client) -> None:
    start, uploaded = client.put_media(START), client.put_media(MASK)
    expected = generated(client, init_image=START, mask=MASK)
    assert same(generated(client, init_media=start, mask=uploaded), expected)
    edges = client.put_media(noise(3))
    own = generated(client, model="plain", controls=[moored.Control(SINGLE, noise(3))])
    brought = generated(client, model="plain", controls=[moored.Control(SINGLE, edges)])
    assert same(own, brought)
    client.release_media(uploaded)
    with pytest.raises(moored.MooredError) as gone:
        generated(client, init_media=start, mask=uploaded)
    assert uploaded.id in gone.value.message


def test_a_mask_goes_with_a_latent_to_start_from(client: moored.Client) -> None:
    latent = client.encode_image(START, seed=7).latent
    picture = generated(client, init_latent=latent, mask=MASK)
    free = generated(client, init_latent=latent)
    assert not same(picture, free)
    # The autoencoder rebuilds what is kept; the start's own pixels are not there to put back.
    kept = client.decode_latent(latent, output="raw").pictures[0].array
    apart = np.abs(picture.astype(int) - kept.astype(int))
    assert apart[:, SIDE // 2 :].mean() < np.abs(free.astype(int) - kept)[:, SIDE // 2 :].mean()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mask": MASK}, "mask"),
        ({"init_image": START, "mask": b""}, "mask"),
        ({"init_image": START, "mask": b"no picture"}, "mask"),
        ({"init_image": START, "mask": moored.MediaInfo("no-such", "image/png", 1, 1)}, "mask"),
    ],
)
def test_a_mask_is_refused_by_its_field(
    client: moored.Client, options: dict[str, Any], field: str
) -> None:
    assert fields_of(client, **options) == [field]


def test_several_pictures_share_a_mask(client: moored.Client) -> None:
    result = client.generate_image(
        PROMPT, output="raw", init_image=START, mask=MASK, count=2, **SMALL
    )
    one, two = (np.array(picture.array) for picture in result.pictures)
    assert same(one[:, LEFT:], two[:, LEFT:])
    assert not same(one, two)


# FLUX.1 Kontext.


def test_a_reference_is_scaled_to_a_preferred_size_which_is_the_default(
    client: moored.Client,
) -> None:
    reference = noise(2, *REFERENCE_SIZE)
    # A picture of that size is some seconds: one step of it.
    planned = client.plan(PROMPT, model="kontext", references=[reference], steps=1)
    assert "encode_reference" in [stage.name for stage in planned.stages]
    picture = generated(
        client, model="kontext", references=[reference], width=None, height=None, steps=1
    )
    assert picture.shape == (PREFERRED_SIZE[1], PREFERRED_SIZE[0], 3)


def test_a_reference_changes_the_picture(client: moored.Client) -> None:
    without = generated(client, model="kontext", steps=1)
    one, other = (
        generated(client, model="kontext", references=[noise(seed, 32, 32)], steps=1)
        for seed in (2, 3)
    )
    assert one.shape == (SIDE, SIDE, 3), "a size that is named counts"
    assert not same(one, without)
    assert not same(one, other)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"model": "plain", "references": [START]}, ["references"]),
        ({"model": "fill", "references": [START]}, ["references"]),
        ({"model": "moored/demo", "references": [START]}, ["references"]),
        ({"model": Z_IMAGE, "references": [START]}, ["references"]),
        ({"model": "kontext", "references": [START, START]}, ["references"]),
        ({"model": "kontext", "references": [START] * 9}, ["references"]),
        ({"model": "kontext", "references": [noise(1, 64, 15)]}, ["references"]),
        ({"model": "kontext", "references": [b"no picture"]}, ["references"]),
        ({"model": "kontext", "references": [b""]}, ["references[0]"]),
    ],
)
def test_references_are_refused_by_their_field(
    client: moored.Client, options: dict[str, Any], fields: list[str]
) -> None:
    assert fields_of(client, **options) == fields


# ControlNets.


def control(name: str = SINGLE, seed: int = 3, **options: Any) -> moored.Control:
    mode = 1 if name == UNION else None
    return moored.Control(name, noise(seed), **({"mode": mode} | options))


def residents(client: moored.Client) -> dict[str, moored.ResidentComponent]:
    """What is on the card, by the components' names."""
    return {one.component.name: one for one in client.status().cards[0].residents}


def test_control_nets_are_listed_among_the_adapters(
    editing: Service, client: moored.Client
) -> None:
    listed = {one.id: one.bytes for one in client.list_adapters()}
    assert listed.keys() >= {SINGLE, UNION}
    assert listed[UNION] > listed[SINGLE] > 0
    shown = editing.run("models", "--adapters")
    assert shown.returncode == 0
    assert SINGLE in shown.stdout


@pytest.mark.parametrize("name", [SINGLE, UNION])
def test_a_control_net_changes_the_picture(client: moored.Client, name: str) -> None:
    pictures = [
        generated(client, model="plain"),
        generated(client, model="plain", controls=[control(name)]),
        generated(client, model="plain", controls=[control(name, seed=4)]),
        generated(client, model="plain", controls=[control(name, scale=0.5)]),
        generated(client, model="plain", controls=[control(name, end=0.5)]),
    ]
    assert len({one.tobytes() for one in pictures}) == len(pictures)
    again = generated(client, model="plain", controls=[control(name)])
    assert same(again, pictures[1])


def test_a_union_has_modes(client: moored.Client) -> None:
    of_modes = {
        generated(client, model="plain", controls=[control(UNION, mode=mode)]).tobytes()
        for mode in range(UNION_MODES)
    }
    assert len(of_modes) == UNION_MODES


def test_a_control_net_of_scale_0_still_draws_its_random_numbers(client: moored.Client) -> None:
    # The control picture is drawn before the noise, as in diffusers: scale 0 is another picture than none.
    nothing = generated(client, model="plain", controls=[control(scale=0)])
    never = generated(client, model="plain", controls=[control(start=0, end=0)])
    other = generated(client, model="plain", controls=[control(seed=4, scale=0)])
    assert same(nothing, never)
    assert same(nothing, other)
    assert not same(nothing, generated(client, model="plain"))


def test_several_control_nets_go_together_with_a_mask(client: moored.Client) -> None:
    both = [control(), control(UNION)]
    pictures = [
        generated(client, model="plain", controls=controls)
        for controls in (both, both[:1], both[1:], [control(), control(seed=4)])
    ]
    assert len({one.tobytes() for one in pictures}) == len(pictures)
    for model in ("plain", "fill"):
        picture = generated(client, model=model, controls=both, init_image=START, mask=MASK)
        assert same(picture[:, LEFT:], np.array(START)[:, LEFT:])


def test_a_control_picture_has_the_size_of_the_picture(client: moored.Client) -> None:
    large = noise(3, 2 * SIDE, SIDE)
    scaled = large.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    pictures = [
        generated(client, model="plain", controls=[moored.Control(SINGLE, one)])
        for one in (large, scaled)
    ]
    assert same(*pictures)


def test_control_nets_are_components_that_leave_with_their_model(client: moored.Client) -> None:
    client.unload()
    result = client.generate_image(PROMPT, model="plain", controls=[control(UNION)], **SMALL)
    (attached,) = result.model.adapters
    assert attached.id == UNION
    there = residents(client)
    (name,) = (name for name in there if UNION in name)
    assert there[name].component.bytes > 0
    assert any(UNION in entry for entry in there[name].entries)
    generated(client, model="plain", controls=[control()])
    assert len(residents(client)) == len(there) + 1, "the base is there once"
    client.unload(result.model.key)
    assert name not in residents(client)
    client.unload()
    assert residents(client) == {}


@pytest.mark.parametrize(
    ("controls", "field", "said"),
    [
        ([moored.Control("none", START)], "controls[0].id", "none"),
        ([control(), moored.Control("../nets", START)], "controls[1].id", "../nets"),
        ([moored.Control("", START)], "controls[0].id", "is not there"),
        ([moored.Control(UNION, START)], "controls[0].mode", "modes are 0 to 3"),
        (
            [control(), control(UNION, mode=UNION_MODES)],
            "controls[1].mode",
            "modes of union are 0 to 3",
        ),
        ([control(scale=101)], "controls[0].scale", "100"),
        ([control(), control(scale=float("nan"))], "controls[1].scale", ""),
        ([control(start=-0.5)], "controls[0].start", "-0.5"),
        ([control(start=0.5, end=0.25)], "controls[0].end", "0.25"),
        ([control(end=1.5)], "controls[0].end", "1.5"),
        ([moored.Control(SINGLE, b"")], "controls[0].image", "is empty"),
        ([control(), moored.Control(SINGLE, b"no picture")], "controls[1].image", ""),
        ([control()] * 5, "controls", "4"),
    ],
)
def test_controls_are_refused_by_their_field(
    client: moored.Client, controls: list[moored.Control], field: str, said: str
) -> None:
    assert fields_of(client, model="plain", controls=controls) == [field]
    with pytest.raises(Refused) as refused:
        client.plan(PROMPT, model="plain", controls=controls)
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("model", "said"), [("moored/demo", "joint_attention_dim"), (Z_IMAGE, "take no ControlNets")]
)
def test_a_control_net_that_is_of_another_model_is_refused(
    client: moored.Client, model: str, said: str
) -> None:
    assert fields_of(client, model=model, controls=[control()]) == ["controls[0].id"]
    with pytest.raises(Refused) as refused:
        generated(client, model=model, controls=[control()])
    assert SINGLE in refused.value.message
    assert said in refused.value.message


def test_formats_are_chosen_with_the_control_nets(models: Path, tmp_path: Path) -> None:
    nets = tmp_path / "nets"
    shutil.copytree(FIXTURES / "flux-controlnet-tiny/single", nets / "single")
    settings = {
        "models.adapters": json.dumps([str(nets)]),
        "models.settings.plain.width": "32",
        "models.settings.plain.height": "32",
        # The text encoder takes less than the sampling then, with which the ControlNet is.
        "models.settings.plain.max_sequence_length": "64",
        "cards.headroom": "0B",
    }
    controls = [moored.Control("single", START)]

    @contextmanager
    def planning(card: str) -> Iterator[moored.Client]:
        arguments = (f"--set={name}={value}" for name, value in settings.items())
        state = tmp_path / card.replace(":", "-")
        service = Service("--models", str(models), *arguments, state=state, devices=(card,))
        with service.client() as client:
            yield client
        service.kill()

    def peak(client: moored.Client, model: str) -> int:
        stages = client.plan(PROMPT, model=model, controls=controls).stages
        return max(stage.component_bytes + stage.scratch_bytes for stage in stages)

    with planning("sim:1GiB") as client:
        full, less = (peak(client, f"plain+{formats}") for formats in ("full", "8-bit"))
    with planning(f"sim:{(full + less) // 2}B") as client:
        assert client.plan(PROMPT, model="plain+auto").model.key == "plain+full"
        chosen = client.plan(PROMPT, model="plain+auto", controls=controls).model
        assert chosen.key == "plain+8-bit&single"
        # One that adds nothing is not loaded.
        idle = [moored.Control("single", START, scale=0)]
        assert (
            client.plan(PROMPT, model="plain+auto", controls=idle).model.key == "plain+full&single"
        )


def test_a_lora_as_control_net_and_a_control_net_as_lora_are_refused(client: moored.Client) -> None:
    options: dict[str, Any]
    for options in ({"controls": [control(LORA)]}, {"model": "plain", "adapters": [SINGLE]}):
        name = LORA if "controls" in options else SINGLE
        with pytest.raises(Refused) as refused:
            generated(client, **options)
        assert name in refused.value.message


def test_a_control_net_that_adds_nothing_is_not_loaded(client: moored.Client) -> None:
    client.unload()
    result = client.generate_image(
        PROMPT, model="plain", controls=[control(scale=0), control(UNION, end=0)], **SMALL
    )
    assert not [stage for stage in result.done.stages if stage.name.startswith("encode_control")]
    assert not [name for name in residents(client) if name.startswith("controlnet:")]


def test_a_key_with_a_control_net_names_its_model(client: moored.Client) -> None:
    expected = generated(client, model="plain", controls=[control()])
    key = client.plan(PROMPT, model="plain", controls=[control()]).model.key
    assert SINGLE in key
    assert same(generated(client, model=key, controls=[control()]), expected)
    assert same(generated(client, model=key), generated(client, model="plain"))


def test_a_latent_of_a_masked_picture_says_what_it_lacks(client: moored.Client) -> None:
    options: dict[str, Any] = {"init_image": START, "mask": MASK, "keep_latent": True, **SMALL}
    masked = client.generate_image(PROMPT, **options)
    assert masked.approximations == ()
    decoded = client.decode_latent(masked.latents[0], output="raw")
    (said,) = decoded.approximations
    assert "mask" in said
    assert not same(np.array(decoded.pictures[0].array)[:, LEFT:], np.array(START)[:, LEFT:])


# Pictures are decoded when the model has taken the request.


def cut(picture: Image.Image) -> bytes:
    """A picture with its header, and half of its pixels."""
    whole = png_of(picture)
    return whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"init_image": cut(START), "guidance": 5.0}, "guidance"),
        ({"mask": cut(MASK)}, "mask"),
        ({"references": [cut(START)]}, "references"),
        ({"init_image": cut(START), "mask": cut(MASK), "steps": 0x7FFF}, "steps"),
    ],
)
def test_a_model_refuses_a_request_before_its_pictures_are_decoded(
    client: moored.Client, options: dict[str, Any], field: str
) -> None:
    assert fields_of(client, model=Z_IMAGE, **options) == [field]
    with pytest.raises(Refused) as refused:
        client.plan(PROMPT, model=Z_IMAGE, **(SMALL | options))
    assert "cannot be read" not in refused.value.message


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"init_image": cut(START)}, "init_image"),
        ({"init_image": START, "mask": cut(MASK)}, "mask"),
        ({"controls": [control(), moored.Control(SINGLE, cut(START))]}, "controls[1].image"),
    ],
)
def test_a_damaged_picture_is_refused_by_its_field(
    client: moored.Client, options: dict[str, Any], field: str
) -> None:
    assert fields_of(client, model="plain", **options) == [field]


def test_decoded_pictures_count_against_their_client(simulate: Callable[..., Service]) -> None:
    service = simulate(arguments=("--set", "limits.media_per_client=100KiB"))
    with service.client() as client:
        # 48 KiB, and 192 KiB.
        for side, fits in ((128, True), (256, False), (128, True)):
            size = {"width": side, "height": side}
            start = Image.new("RGB", (side, side))
            if fits:
                client.generate_image("x", model="small", init_image=start, **size)
                continue
            with pytest.raises(moored.ClientLimit) as refused:
                client.generate_image("x", model="small", init_image=start, **size)
            assert "limits.media_per_client" in refused.value.message


def test_another_mask_is_another_request(client: moored.Client) -> None:
    options: dict[str, Any] = {"init_image": START, "idempotency_key": "a mask", **SMALL}
    client.generate_image(PROMPT, mask=MASK, **options)
    client.generate_image(PROMPT, mask=MASK, **options)
    with pytest.raises(moored.KeyReused):
        client.generate_image(PROMPT, mask=mask(grey=200), **options)
