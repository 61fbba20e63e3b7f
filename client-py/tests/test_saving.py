"""What is saved keeps its recipe, is what its name says, and replaces nothing unasked."""

from __future__ import annotations

import io
import json
import struct
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import Service, accepted, done, film, pieces, sound, track

import moored

Image = pytest.importorskip("PIL.Image")

RECIPE = {
    "prompt": "a red cube",
    "seed": 7,
    "width": 32,
    "height": 16,
    "steps": 8,
    "guidance": 3.5,
    "max_sequence_length": 64,
    "model": "moored/demo",
    "model_key": "moored/demo+full",
    "version": "0.1.0",
}
PARAMETERS = (
    "a red cube\n"
    "Steps: 8, Sampler: Euler, CFG scale: 3.5, Seed: 7, Size: 32x16, Model: moored/demo, "
    "Version: moored 0.1.0"
)
# What the service's tests hold too: recipes, and what is made of them.
CASES = json.loads(Path(__file__).with_name("recipes.json").read_text(encoding="utf-8"))
EXIF_CASES = [case for case in CASES if "exif" in case]
WAV_CASES = [case for case in CASES if "wav" in case]


def as_sent(recipe: dict[str, Any]) -> str:
    """A recipe in the words of the service."""
    return json.dumps(recipe, ensure_ascii=False, separators=(",", ":"))


def made(service: Service, client: moored.Client, data: bytes, **more: Any) -> moored.ImageResult:
    recipe = more.pop("recipe", json.dumps(RECIPE))
    metadata = {"recipe": recipe, "width": "32", "height": "16"} if recipe else {}
    service.on("GenerateImage", [accepted(), *pieces(data, **more, **metadata), done()])
    return client.generate_image("x")


def user_comment(path: Path) -> bytes:
    with Image.open(path) as image:
        comment: bytes = image.getexif().get_ifd(0x8769)[0x9286]
        return comment


@pytest.mark.parametrize("media_type", ["image/png", "image/x-raw-rgb"])
def test_a_png_has_the_recipe_and_the_parameters_that_other_tools_read(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path, media_type: str
) -> None:
    data = png if media_type == "image/png" else bytes(32 * 16 * 3)
    result = made(service, client, data, media_type=media_type)
    result.save(tmp_path / "cube.png")
    with Image.open(tmp_path / "cube.png") as image:
        image.load()
        assert json.loads(image.info["moored"]) == RECIPE
        assert image.info["parameters"] == PARAMETERS
        assert image.tobytes() == result.image.tobytes()
    assert moored.read_recipe(tmp_path / "cube.png") == RECIPE
    assert result.pictures[0].recipe == RECIPE


def test_texts_that_the_service_wrote_are_not_written_twice(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path
) -> None:
    made(service, client, png).save(tmp_path / "once.png")
    once = (tmp_path / "once.png").read_bytes()
    made(service, client, once).save(tmp_path / "twice.png")
    assert (tmp_path / "twice.png").read_bytes() == once


@pytest.mark.parametrize(("ending", "name"), [("jpg", "JPEG"), ("JPEG", "JPEG"), ("webp", "WEBP")])
@pytest.mark.parametrize("prompt", ["a red cube", 'ein Würfel, <rot> & "schräg" 立方体'])
def test_jpeg_and_webp_are_what_they_say_and_keep_the_recipe(
    service: Service,
    client: moored.Client,
    png: bytes,
    tmp_path: Path,
    ending: str,
    name: str,
    prompt: str,
) -> None:
    recipe = RECIPE | {"prompt": prompt}
    path = tmp_path / f"cube.{ending}"
    made(service, client, png, recipe=json.dumps(recipe)).save(path)
    with Image.open(path) as image:
        assert (image.format, image.size) == (name, (32, 16))
        assert image.getpixel((3, 3)) == pytest.approx((200, 10, 30), abs=8)
    assert moored.read_recipe(path) == recipe
    kind, text = user_comment(path)[:8], user_comment(path)[8:].decode("utf-16-be")
    assert (kind, text) == (b"UNICODE\0", PARAMETERS.replace("a red cube", prompt))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"])
def test_other_tools_read_the_same_settings_as_in_files_of_the_service(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path, case: dict[str, Any]
) -> None:
    result = made(service, client, png, recipe=as_sent(case["recipe"]))
    result.save(tmp_path / "cube.png")
    with Image.open(tmp_path / "cube.png") as image:
        image.load()
        assert image.info["parameters"] == case["parameters"]
    chunk = b"tEXt" if all(letter <= "\xff" for letter in case["parameters"]) else b"iTXt"
    assert chunk + b"parameters\0" in (tmp_path / "cube.png").read_bytes()
    for ending in ("jpg", "webp"):
        result.save(tmp_path / f"cube.{ending}")
        comment = user_comment(tmp_path / f"cube.{ending}")
        assert comment == b"UNICODE\0" + case["parameters"].encode("utf-16-be")


@pytest.mark.parametrize("case", EXIF_CASES, ids=lambda case: case["why"])
def test_jpeg_and_webp_have_the_same_exif_as_those_of_the_command_line(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path, case: dict[str, Any]
) -> None:
    result = made(service, client, png, recipe=as_sent(case["recipe"]))
    for ending in ("jpg", "webp"):
        result.save(tmp_path / f"cube.{ending}")
        with Image.open(tmp_path / f"cube.{ending}") as image:
            assert image.info["exif"].removeprefix(b"Exif\0\0") == bytes.fromhex(case["exif"])


def jpeg_of_the_command_line(exif: bytes) -> bytes:
    """Its segments in their order: JFIF, the EXIF, and what the picture is made of."""
    plain = io.BytesIO()
    Image.new("RGB", (8, 8)).save(plain, "JPEG")
    start, jfif, rest = plain.getvalue()[:2], plain.getvalue()[2:20], plain.getvalue()[20:]
    segment = b"Exif\0\0" + exif
    return start + jfif + b"\xff\xe1" + struct.pack(">H", 2 + len(segment)) + segment + rest


def webp_of_the_command_line(exif: bytes) -> bytes:
    """Its chunks in their order: a header that says EXIF, the picture without loss, the EXIF."""
    plain = io.BytesIO()
    Image.new("RGB", (8, 8)).save(plain, "WEBP", lossless=True)
    header = struct.pack("<4sIB3x", b"VP8X", 10, 0x08) + 2 * (8 - 1).to_bytes(3, "little")
    exif_chunk = struct.pack("<4sI", b"EXIF", len(exif)) + exif + bytes(len(exif) % 2)
    chunks = b"WEBP" + header + plain.getvalue()[12:] + exif_chunk
    return struct.pack("<4sI", b"RIFF", len(chunks)) + chunks


@pytest.mark.parametrize(
    "of_the_command_line", [jpeg_of_the_command_line, webp_of_the_command_line]
)
@pytest.mark.parametrize("case", EXIF_CASES, ids=lambda case: case["why"])
def test_the_recipe_of_a_file_of_the_command_line_is_read(
    tmp_path: Path, of_the_command_line: Callable[[bytes], bytes], case: dict[str, Any]
) -> None:
    path = tmp_path / "a picture"
    path.write_bytes(of_the_command_line(bytes.fromhex(case["exif"])))
    assert moored.read_recipe(path) == case["recipe"]


def test_a_recipe_survives_a_tool_that_writes_the_file_again(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path
) -> None:
    made(service, client, png).save(tmp_path / "ours.jpg")
    with Image.open(tmp_path / "ours.jpg") as image:
        exif = image.getexif()
        exif.get_ifd(0x8769)  # which is written again where it has been read
        exif.endian = "<"
        image.save(tmp_path / "theirs.webp", exif=exif)
    assert b"II*\0" in (tmp_path / "theirs.webp").read_bytes()
    assert moored.read_recipe(tmp_path / "theirs.webp") == RECIPE


@pytest.mark.parametrize("note", [b'another{"steps": 1}', b"moored\0{}", b"moored\0\xff", b""])
def test_a_note_of_another_maker_is_no_recipe(tmp_path: Path, note: bytes) -> None:
    exif = Image.Exif()
    exif.get_ifd(0x8769)[0x927C] = note
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg", exif=exif)
    assert moored.read_recipe(tmp_path / "a.jpg") == {}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning")  # so pillow says it
@pytest.mark.parametrize("damage", [b"", b"MM", b"MM\0*\0\0\0\x08", b"no directory at all"])
def test_damaged_exif_is_no_recipe(tmp_path: Path, damage: bytes) -> None:
    for ending in ("jpg", "webp"):
        path = tmp_path / f"a.{ending}"
        Image.new("RGB", (8, 8)).save(path, exif=b"Exif\0\0" + damage)
        assert moored.read_recipe(path) == {}


@pytest.mark.parametrize("size", [0, 3, 4, 2**32 - 1])
def test_a_wav_whose_list_announces_another_size_is_no_recipe(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF\0\0\0\0WAVELIST" + size.to_bytes(4, "little") + b"INFO")
    assert moored.read_recipe(path) == {}


def test_what_was_to_be_left_out_is_in_no_file(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path
) -> None:
    result = made(service, client, png, recipe="")
    for ending in ("png", "jpg", "webp"):
        result.save(tmp_path / f"cube.{ending}")
        assert moored.read_recipe(tmp_path / f"cube.{ending}") == {}
    assert (tmp_path / "cube.png").read_bytes() == png


def test_a_prompt_too_long_for_a_jpeg_is_said(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path
) -> None:
    recipe = RECIPE | {"prompt": "very " * 20_000}
    result = made(service, client, png, recipe=json.dumps(recipe))
    with pytest.raises(ValueError, match=r"too long .* save a \.png"):
        result.save(tmp_path / "cube.jpg")
    assert not (tmp_path / "cube.jpg").exists()
    result.save(tmp_path / "cube.png")
    assert moored.read_recipe(tmp_path / "cube.png") == recipe


def test_a_prompt_too_long_for_a_jpeg_is_said_whatever_words_pillow_has_for_it(
    service: Service,
    client: moored.Client,
    png: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*rest: Any, **options: Any) -> None:
        raise ValueError("EXIF does not fit")

    result = made(service, client, png, recipe=json.dumps(RECIPE | {"prompt": "very " * 20_000}))
    monkeypatch.setattr(Image.Image, "save", refuse)
    with pytest.raises(ValueError, match=r"too long .* save a \.png"):
        result.save(tmp_path / "cube.jpg")


def test_the_longest_prompt_that_a_jpeg_takes_is_kept(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path
) -> None:
    # A letter is three bytes: one in the recipe, two in the settings as UTF-16.
    with_one = len(moored._saving.exif_of({"recipe": json.dumps(RECIPE | {"prompt": "v"})}))
    longest = RECIPE | {"prompt": "v" * ((0xFFFF - 2 - len(b"Exif\0\0") - with_one) // 3 + 1)}
    made(service, client, png, recipe=json.dumps(longest)).save(tmp_path / "cube.jpg")
    assert moored.read_recipe(tmp_path / "cube.jpg") == longest
    longer = longest | {"prompt": longest["prompt"] + "v"}
    with pytest.raises(ValueError, match=r"too long .* save a \.png"):
        made(service, client, png, recipe=json.dumps(longer)).save(tmp_path / "longer.jpg")


@pytest.mark.parametrize("name", ["cube.bmp", "cube", "cube.gif"])
def test_other_formats_are_refused_with_those_that_there_are(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ValueError, match=r"\.png, \.jpg, \.jpeg, \.webp.*image\.save"):
        made(service, client, png).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_nothing_is_replaced_unless_asked_for(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path
) -> None:
    service.on("GenerateVideo", [accepted(), *film(2)[1], done()])
    service.on("GenerateAudio", [accepted(), *track(sound(3), samples=3), done()])
    saved: list[tuple[Any, tuple[str, ...]]] = [
        (made(service, client, png), ("a.png", "a.jpg", "a.webp")),
        (client.generate_video("x"), ("b.png", "b.webp", "b.gif", "b.rgb")),
        (client.generate_audio("x"), ("c.wav", "c.pcm")),
    ]
    for result, names in saved:
        for path in (tmp_path / name for name in names):
            path.write_bytes(b"mine")
            with pytest.warns(UserWarning, match="exists already"):
                beside = result.save(path)
            assert beside == path.with_stem(f"{path.stem}-2")
            assert beside.stat().st_size > 0
            assert path.read_bytes() == b"mine"
            result.save(path, overwrite=True)
            assert path.read_bytes() != b"mine"
    with wave.open(str(tmp_path / "c.wav")) as file:
        assert file.getnframes() == 3


def test_an_animation_keeps_the_recipe(
    service: Service, client: moored.Client, tmp_path: Path
) -> None:
    recipe = RECIPE | {"frames": 2}
    events = film(2, recipe=json.dumps(recipe))[1]
    service.on("GenerateVideo", [accepted(), *events, done()])
    result = client.generate_video("x")
    for name in ("a.png", "a.webp"):
        result.save(tmp_path / name)
        assert moored.read_recipe(tmp_path / name) == recipe
    with Image.open(tmp_path / "a.png") as image:
        assert image.n_frames == 2


@pytest.mark.parametrize("case", WAV_CASES, ids=lambda case: case["why"])
def test_a_wav_has_the_recipe_as_the_service_writes_it(
    service: Service, client: moored.Client, tmp_path: Path, case: dict[str, Any]
) -> None:
    samples, recipe = sound(5), as_sent(case["recipe"])
    service.on("GenerateAudio", [accepted(), *track(samples, samples=5, recipe=recipe), done()])
    result = client.generate_audio("x", output="raw")
    result.save(tmp_path / "a.wav")
    assert (tmp_path / "a.wav").read_bytes() == bytes.fromhex(case["wav"]) + samples
    assert moored.read_recipe(tmp_path / "a.wav") == case["recipe"] == result.track().recipe
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert file.readframes(5) == samples


def test_a_track_without_a_recipe_is_saved_without_one(
    service: Service, client: moored.Client, tmp_path: Path
) -> None:
    service.on("GenerateAudio", [accepted(), *track(sound(5), samples=5), done()])
    client.generate_audio("x", output="raw").save(tmp_path / "a.wav")
    assert len((tmp_path / "a.wav").read_bytes()) == 44 + len(sound(5))
    assert moored.read_recipe(tmp_path / "a.wav") == {}


def flac_block(kind: int, content: bytes) -> bytes:
    return bytes([kind]) + len(content).to_bytes(3, "big") + content


def test_the_recipe_of_a_flac_is_read_from_its_comments(tmp_path: Path) -> None:
    def counted(text: str) -> bytes:
        return struct.pack("<I", len(text.encode())) + text.encode()

    recipe = {"prompt": "ein tiefer Ton \u2013 \U0001f3b5", "bpm": 120}
    tags = ["TITLE=x=y", f"comment={as_sent(recipe)}", "COMMENT=another"]
    comments = counted("who") + struct.pack("<I", len(tags)) + b"".join(map(counted, tags))
    file = b"fLaC" + flac_block(0, bytes(34)) + flac_block(4 | 0x80, comments) + b"frames"
    path = tmp_path / "a.flac"
    path.write_bytes(file)
    assert moored.read_recipe(path) == recipe
    path.write_bytes(b"fLaC" + flac_block(0x80, bytes(34)))
    assert moored.read_recipe(path) == {}
    # Cut anywhere it is no other recipe, and no error.
    for end in range(12, len(file)):
        path.write_bytes(file[:end])
        assert moored.read_recipe(path) in ({}, recipe)


def test_a_full_disk_leaves_nothing(
    service: Service,
    client: moored.Client,
    png: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = made(service, client, png)

    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        result.save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_made(
    service: Service, client: moored.Client, png: bytes, tmp_path: Path
) -> None:
    wanted = tmp_path / "new" / "folder" / "a.png"
    assert made(service, client, png).save(wanted) == wanted
    assert wanted.stat().st_size > 0
