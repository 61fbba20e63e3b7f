"""Text with half of a character, and names that no file has.

Nothing computed is lost for them, and what a caller gives is refused by its name.
"""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import pytest
from conftest import Ask
from scripted import Service, accepted, done, pieces, sound, track

import moored

HALF = "\ud800"
ESCAPED = "\\ud800"
NAMES = ["a\0b", f"a{HALF}b"]
RECIPE = {
    "prompt": f"a cat {HALF}",
    "negative_prompt": f"{HALF} a dog",
    "seed": 7,
    "model": f"somebody/{HALF}",
    "adapters": [{"id": f"ink{HALF}", f"more{HALF}": 1}],
    "version": f"1{HALF}",
}
AS_READ = json.loads(json.dumps(RECIPE).replace(ESCAPED, "\\" + ESCAPED))


def image_result(service: Service, ask: Ask, png: bytes, recipe: Any = RECIPE) -> Any:
    metadata = {"recipe": json.dumps(recipe), "width": "32", "height": "16", "seed": "7"}
    service.on("GenerateImage", [accepted(), *pieces(png, **metadata), done()])
    return ask("generate_image", "x")


@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
def test_a_picture_is_saved_whatever_its_recipe_says(
    service: Service, ask: Ask, png: bytes, tmp_path: Path, ending: str
) -> None:
    path = tmp_path / f"cube.{ending}"
    result = image_result(service, ask, png)
    result.save(path)
    assert moored.read_recipe(path) == result.pictures[0].recipe == AS_READ
    json.dumps(result.to_dict(), ensure_ascii=False).encode()


def test_a_picture_is_saved_with_a_recipe_of_other_values(
    service: Service, ask: Ask, png: bytes, tmp_path: Path
) -> None:
    recipe = {"prompt": 5, "negative_prompt": ["a"], "seed": None, "steps": {}, "width": "x"}
    image_result(service, ask, png, recipe).save(tmp_path / "cube.png")
    assert moored.read_recipe(tmp_path / "cube.png") == recipe


def test_a_track_is_saved_whatever_its_recipe_says(
    service: Service, ask: Ask, tmp_path: Path
) -> None:
    samples = sound(4)
    metadata = {"recipe": json.dumps(RECIPE)}
    service.on("GenerateAudio", [accepted(), *track(samples, samples=4, **metadata), done()])
    path = ask("generate_audio", "x", output="raw").save(tmp_path / "melody.wav")
    with wave.open(str(path)) as file:
        assert file.readframes(4) == samples
    assert moored.read_recipe(path) == AS_READ


def test_a_file_of_others_with_half_a_character_is_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    info = pytest.importorskip("PIL.PngImagePlugin").PngInfo()
    info.add_itxt("moored", json.dumps(RECIPE))
    file = io.BytesIO()
    image.new("RGB", (2, 2)).save(file, "PNG", pnginfo=info)
    (tmp_path / "cat.png").write_bytes(file.getvalue())
    assert moored.read_recipe(tmp_path / "cat.png") == AS_READ


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_saved_under_a_name_that_is_possible(
    service: Service, ask: Ask, png: bytes, tmp_path: Path, name: str
) -> None:
    result = image_result(service, ask, png)
    with pytest.warns(UserWarning, match="No file can have the name .*: saved as .*a_b.png"):
        path = result.save(tmp_path / f"{name}.png")
    assert path == tmp_path / "a_b.png"
    assert path.is_file()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_with_such_a_name_cannot_be_read(ask: Ask, name: str) -> None:
    for call in (
        lambda: moored.read_recipe(f"{name}.png"),
        lambda: ask("generate_image", "x", init_image=f"{name}.png"),
        lambda: ask("put_media", f"{name}.wav"),
    ):
        with pytest.raises(OSError, match="no file can have this name"):
            call()


CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "prompt": (("generate_image", HALF), {}),
    "negative_prompt": (("generate_image", "x"), {"negative_prompt": HALF}),
    "init_latent": (("generate_image", "x"), {"init_latent": HALF}),
    "client_id": (("generate_image", "x"), {"client_id": HALF}),
    "model.id": (("pin", HALF), {}),
    "model.revision": (("pin", moored.ModelRef("a", revision=HALF)), {}),
    "model.quantization.preset": (("pin", moored.ModelRef("a", quantization=HALF)), {}),
    "model.quantization.components": (("pin", moored.ModelRef("a", formats={HALF: "a"})), {}),
    "adapters[0].id": (("pin", moored.ModelRef("a", adapters=(HALF,))), {}),
    "components": (("load", "a"), {"components": [HALF]}),
    "latent_id": (("release_latent", HALF), {}),
    "media_id": (("release_media", HALF), {}),
    "job_id": (("cancel", HALF), {}),
    "card": (("trim", HALF), {}),
    "label": (("reserve", 1), {"label": HALF}),
}


@pytest.mark.parametrize("field", CALLS)
def test_text_that_cannot_be_sent_is_refused_by_its_name(ask: Ask, field: str) -> None:
    given, options = CALLS[field]
    with pytest.raises(moored.InvalidRequest, match="half of a character") as refused:
        ask(*given, **options)
    assert [violation.field for violation in refused.value.violations] == [field]
    str(refused.value).encode()


@pytest.mark.parametrize("endpoint", [*NAMES, "unix:/run/a\0", "https://a\0", "box\n:1", HALF])
def test_an_address_with_characters_that_no_address_has(endpoint: str) -> None:
    for kind in (moored.Client, moored.AsyncClient):
        with pytest.raises(moored.InvalidRequest, match="no address of a service") as refused:
            kind(endpoint)
        assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", [*NAMES, "~\0", "~nobody-of-this-name/token"])
def test_an_impossible_token_file_or_authority_is_refused(name: str) -> None:
    with pytest.raises(moored.Unauthenticated, match=r"token file .* cannot be read: [Nn]o "):
        moored.Client("x", token_file=name)
    with pytest.raises(moored.InvalidRequest, match=r"CA file .* cannot be read: [Nn]o "):
        moored.Client("https://x", ca_file=name, token="")


def test_a_client_name_that_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(moored.InvalidRequest, match=r"client_id.*half of a character"):
        moored.Client("x", client_id=HALF)
    # A default must not fail a call.
    monkeypatch.setenv("MOORED_CLIENT", "a\udcff")
    assert moored.Client("x").client_id == "a\\udcff"
