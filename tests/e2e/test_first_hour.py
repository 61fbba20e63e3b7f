"""What a new user tries first: names, typos, cards that are too small, and commands that name no model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from commands import LARGE_ID as ID
from commands import Completed, Run, good
from gpu import checkpoints
from hub import Hub, Repository, files_of
from stored_files import Tensor, in_f32, write_pth, write_safetensors

from service import BINARY, INSTANT_MODELS, ROOT, ReservedPort, Service, run

SHORT = "z-image-turbo"
LARGE = "hunyuan-video"
FRAMEPACK = "lllyasviel/FramePackI2V_HY"
OVI = "chetwinlow1/Ovi"
FIXTURES = ROOT / "service/pipelines/fixtures"
WAIT_S = 60
TINY_FILM = ("-W", "48", "-H", "32", "--frames", "5", "--steps", "1")
SMALL = ("-W", "64", "-H", "64", "--steps", "1", "--seed", "3")


def framepack_repositories() -> dict[str, Repository]:
    """FramePack's transformer alone, and the two repositories that it takes the rest from; all tiny."""
    base = files_of(FIXTURES / "hunyuan-tiny")
    for part, folder in (("text_encoder_2", "text_encoder"), ("tokenizer_2", "tokenizer")):
        files = files_of(FIXTURES / "flux-tiny" / folder)
        base |= {f"{part}/{name}": content for name, content in files.items()}
    base = {name: content for name, content in base.items() if not name.startswith("expected")}
    tiny = FIXTURES / "framepack-tiny"
    vision = {"model_index.json": json.dumps({"_class_name": "FluxPriorReduxPipeline"}).encode()}
    for folder in ("image_encoder", "feature_extractor"):
        vision |= {f"{folder}/{name}": data for name, data in files_of(tiny / folder).items()}
    return {
        FRAMEPACK: Repository(files_of(tiny / "transformer")),
        "hunyuanvideo-community/HunyuanVideo": Repository(base),
        "lllyasviel/flux_redux_bfl": Repository(vision),
    }


def ovi_repositories(folder: Path) -> dict[str, Repository]:
    """Ovi's fusion model, and the two repositories with the rest of it; all tiny. Numbers are random."""
    generator = np.random.default_rng(1)

    def tensor(name: str, shape: list[int]) -> Tensor:
        inputs = math.prod(shape[1:])
        scale = inputs**-0.5 if len(shape) > 1 else 0.1
        centre = 1.0 if len(shape) == 1 and name.endswith(("weight", "std")) else 0.0
        numbers = centre + scale * generator.standard_normal(shape)
        return in_f32(*np.atleast_1d(numbers).flat, shape=tuple(shape))

    files = json.loads((FIXTURES / "ovi-tiny/shapes.json").read_text(encoding="utf-8"))
    made = {
        file: {name: tensor(name, shape) for name, shape in shapes.items()}
        for file, shapes in files.items()
    }
    fusion, vae, vocoder = (
        folder / name for name in ("model.safetensors", "v1-16.pth", "best_netG.pt")
    )
    write_safetensors(fusion, made["Ovi-960x960-5s"])
    write_pth(vae, made["v1-16"])
    write_pth(vocoder, made["best_netG"], within="generator")
    base = files_of(FIXTURES / "wan-ti2v-tiny")
    for part in ("text_encoder", "tokenizer"):
        inside = files_of(FIXTURES / "wan-tiny" / part).items()
        base |= {f"{part}/{name}": content for name, content in inside}
    of_sound = {f"ext_weights/{path.name}": path.read_bytes() for path in (vae, vocoder)}
    return {
        OVI: Repository({fusion.name: fusion.read_bytes(), "README.md": b"of the authors"}),
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": Repository(base),
        "hkchengrex/MMAudio": Repository(of_sound | {"weights/large.pth": b"not read"}),
    }


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """A hub that has FramePack, too."""
    hub.repositories |= framepack_repositories()
    return hub


def available(alone: Run, device: str) -> tuple[dict[str, str], str]:
    """What the table says of each model on a card, and the notes below it."""
    told = alone("models", "--available", MOORED_CARDS_DEVICES=device)
    heading, *rows = (line.split("\t") for line in good(told).splitlines())
    column = heading.index("fits")
    return {row[0]: row[column] for row in rows}, told.stderr


@pytest.mark.parametrize("device", ["sim:2GiB", "sim:4GiB", "sim:6GiB", "sim:8GiB", "sim:16GiB"])
def test_the_command_to_try_is_of_a_model_that_fits(alone: Run, device: str) -> None:
    fits, told = available(alone, device)
    (tried,) = re.findall(r"moored run (\S+)", told)
    assert re.match(r"full|8-bit|4-bit", fits[tried]), fits[tried]
    assert tried != "flux-schnell", "it wants a login first"
    assert re.match(r"no|up to \d+x\d+", fits[LARGE]), "it is too large for so small a card"
    for word in ("streamed", "up to"):
        assert (f"{word}: " in told) is any(word in fit for fit in fits.values()), word


def test_nothing_is_tried_where_nothing_fits_and_a_cpu_is_called_slow(alone: Run) -> None:
    fits, told = available(alone, "sim:512MiB")
    assert set(fits.values()) == {"no"}
    assert "moored run" not in told
    fits, told = available(alone, "cpu:16GiB")
    assert fits[SHORT] == "8-bit, slow"
    assert "slow on a CPU" in told


@pytest.mark.parametrize("gib", [6, 24])
def test_every_model_runs_on_a_card_of_6_gib_in_some_size(alone: Run, gib: int) -> None:
    fits, _ = available(alone, f"sim:{gib}GiB")
    # Simulated cards compute in float32, in which ten seconds with sound take more than 6 GiB.
    too_long = {"ovi-1.1-960-10s"} if gib == 6 else set()
    assert {name for name, fit in fits.items() if fit == "no"} <= too_long
    found = alone("doctor", "--json", MOORED_CARDS_DEVICES=f"sim:{gib}GiB").stdout
    checks = map(json.loads, found.splitlines())
    (said,) = (check["found"] for check in checks if check["check"] == "fits")
    assert all(f"{name} {fit}" in said for name, fit in fits.items()), said


def test_help_names_no_model_that_a_card_may_refuse(alone: Run) -> None:
    said = good(alone("--help"))
    assert "moored models --available" in said
    assert "flux" not in said.lower().replace("flux, z-image", "")


def test_a_model_that_will_not_fit_is_not_downloaded_unasked(hub: Hub, alone: Run) -> None:
    def told(*more: str, device: str = "sim:512MiB") -> Completed:
        return alone("run", LARGE, "a wave", "--device", device, *more)

    refused = told(device="sim:8GiB")
    assert refused.returncode == 6, refused.stderr
    for part in ("GiB", "sim:0", "wan2.1-t2v-1.3b fits (4-bit)", "nothing was downloaded"):
        assert part in refused.stderr
    assert "--pull" in refused.stderr
    refused = told(*TINY_FILM)
    assert refused.returncode == 6, refused.stderr
    assert "fit" not in refused.stderr, "nor does any other film on this card"
    assert hub.requests == []
    good(told("--pull", *TINY_FILM))
    assert hub.requests != [], "it goes on where it is told to"


def test_a_film_is_downloaded_in_a_size_that_fits(hub: Hub, alone: Run) -> None:
    def told(*more: str) -> Completed:
        return alone("run", LARGE, "a wave", "--device", "sim:8GiB", *more)

    ((width, height),) = re.findall(r"(\d+)x(\d+) would fit", told().stderr)
    smaller = ("-W", width, "-H", height)
    for too_large in ((*smaller, "--frames", "1000"), ("-W", width)):
        assert told(*too_large).returncode == 6, too_large
    assert hub.requests == []
    good(told(*TINY_FILM))
    assert hub.requests != []


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("\n", False)])
def test_in_a_terminal_it_is_asked(
    hub: Hub, home: Path, tmp_path: Path, answer: str, goes_on: bool
) -> None:
    env = hub.environment(home, TERM="xterm") | {
        "MOORED_ENDPOINT": f"http://{ReservedPort().address}",
        "MOORED_SERVICE_STATE": str(tmp_path / "state"),
    }
    mine, theirs = pty.openpty()
    command = [str(BINARY), "run", LARGE, "a wave", "--device", "sim:512MiB", *TINY_FILM]
    with subprocess.Popen(
        command, env=env, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        os.write(mine, answer.encode())
        with contextlib.suppress(OSError):
            while os.read(mine, 1 << 16):
                pass
        assert process.wait(WAIT_S) == (0 if goes_on else 6)
    os.close(mine)
    assert bool(hub.requests) is goes_on


def test_a_service_is_asked_what_fits_before_it_downloads(
    hub: Hub, home: Path, tmp_path: Path
) -> None:
    env = hub.environment(home)
    service = Service(state=tmp_path / "state", devices=("sim:8GiB",), environment=env)
    try:
        service.client().close()
        refused = service.run("run", LARGE, "a wave", env=env, cwd=tmp_path)
        assert refused.returncode == 6, refused.stderr
        assert hub.requests == []
    finally:
        assert service.stop() == 0


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fluks", "flux-schnell"),
        ("flux", "flux-dev"),
        ("hunyuan", "hunyuan-video"),
        ("acestep+4-bit", "ace-step"),
        ("dem", "moored/demo"),
    ],
)
def test_a_mistyped_name_is_reported_before_anything_starts(
    hub: Hub, alone: Run, typed: str, meant: str
) -> None:
    done = alone("run", typed, "a cat")
    assert done.returncode == 5, done.stderr
    assert "did you mean" in done.stderr
    assert meant in done.stderr
    assert "starting one" not in done.stderr
    assert hub.requests == []


def test_models_without_a_service_are_those_of_this_machine(alone: Run) -> None:
    good(alone("pull", SHORT))
    done = alone("models")
    assert ID in good(done)
    assert "moored/demo" in done.stdout
    assert "no service answers" in done.stderr
    elsewhere = alone("models", MOORED_ENDPOINT="http://192.0.2.1:1")
    assert elsewhere.returncode == 3, "what is here says nothing of another machine"
    listed = [json.loads(line) for line in good(alone("models", "--json")).splitlines()]
    assert ID in {model["id"] for model in listed}


def test_short_names_mean_the_model_wherever_one_is_named(
    hub: Hub, home: Path, tmp_path: Path
) -> None:
    env = hub.environment(home)
    service = Service(state=tmp_path / "state", environment=env)
    try:
        with service.client() as client:
            missing = service.run("generate", "a cube", "-m", SHORT, *SMALL, env=env, cwd=tmp_path)
            assert missing.returncode == 5
            assert f"moored pull {ID}" in missing.stderr
            with pytest.raises(moored.ModelNotFound):
                client.generate_image("a cube", model=SHORT)
            assert client.plan_pull(SHORT).id == ID
            with pytest.raises(moored.InvalidRequest, match="did you mean z-image-turbo"):
                client.plan_pull("z-image-turb")
            client.pull_model(SHORT)
            for name in (SHORT.upper(), f"{SHORT}+full", f"{SHORT}@main"):
                made = client.generate_image("a cube", model=name, width=64, height=64, steps=1)
                assert made.model.id == ID, name
            quantized = client.generate_image(
                "a cube", model=f"{SHORT}+4-bit", width=64, height=64, steps=1
            )
            assert quantized.model.key.endswith("+4-bit")
            for command in (
                ("generate", "a cube", "-m", SHORT, *SMALL, "-o", "a.png"),
                ("run", f"{SHORT}+8-bit", "a cube", *SMALL, "-o", "b.png"),
                ("plan", "a cube", "-m", SHORT, *SMALL),
                ("load", SHORT),
                ("pin", SHORT),
                ("pin", SHORT, "--off"),
                ("unload", SHORT),
                ("info", SHORT),
            ):
                good(service.run(*command, env=env, cwd=tmp_path))
        good(run("rm", SHORT, "--yes", env=env))
    finally:
        assert service.stop() == 0


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the shipped models alone."""
    service = Service(state=tmp_path_factory.mktemp("demo"))
    service.client().close()
    yield service
    assert service.stop() == 0


def test_a_film_and_a_track_without_a_model_take_the_shipped_ones(
    demo: Service, tmp_path: Path
) -> None:
    start = ROOT / "docs/demo.png"
    size = ("-W", "64", "-H", "64", "--frames", "37", "--steps", "1")
    film = ("film", "a circle moves", "--init", str(start), *size, "-o", "a.mp4")
    good(demo.run(*film, cwd=tmp_path))
    good(
        demo.run(
            "play", "one short note", "--seconds", "1", "--steps", "1", "-o", "a.wav", cwd=tmp_path
        )
    )
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.wav"}
    with demo.client() as client:
        assert (
            client.generate_audio("one note", seconds=1.0, steps=1).model.id == "moored/demo-sound"
        )
        assert client.plan_video("a circle", width=64, height=64, init_image=start).model.id == (
            "moored/demo-film"
        )


def test_a_model_of_another_medium_is_refused_with_one_to_name(
    demo: Service, tmp_path: Path
) -> None:
    refused = demo.run("film", "a wave", "-m", "moored/demo", cwd=tmp_path)
    assert refused.returncode == 2
    for part in ("moored/demo makes pictures", "moored/demo-film"):
        assert part in refused.stderr
    assert "Generate" not in refused.stderr, "a person calls no procedure"
    with demo.client() as client, pytest.raises(moored.InvalidRequest, match="moored/demo-sound"):
        client.generate_audio("a waltz", model="moored/demo-film")


def test_the_only_model_of_a_medium_is_its_default(simulate: Any, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("small", "video"):
        shutil.copy(INSTANT_MODELS / f"{name}.instant.json", models)
    arguments = ("--models", str(models), "--set", "models.default=video")
    with simulate("sim:24GiB", arguments=arguments).client() as client:
        film = client.generate_video("a wave", width=64, height=64, frames=2, steps=1)
        assert film.model.id == "video", "the configured default makes films"
        assert (
            client.generate_image("a cube", steps=1, width=64, height=64).model.id == "moored/demo"
        )


def test_a_refusal_names_the_smallest_need_and_a_model_that_fits(simulate: Any) -> None:
    arguments = ("--models", str(INSTANT_MODELS))
    model = moored.ModelRef("flux-full", quantization="auto")
    with simulate("sim:5GiB", arguments=arguments).client() as client:
        with pytest.raises(moored.NeverFits) as refused:
            client.generate_image("a cube", model=model)
        said = str(refused.value)
        assert re.search(r"nf4-double, the smallest, needs [\d.]+ GiB", said), said
        assert "z-image-turbo fits this card" in said
        chosen = client.plan("a cube", model=model).model.choice
        assert chosen.startswith("nothing fits: "), chosen
        assert "full:" not in chosen


def test_a_refusal_of_a_streamed_model_says_the_least_that_it_needs(
    simulate: Any, tmp_path: Path
) -> None:
    model = json.loads((INSTANT_MODELS / "flux-full.instant.json").read_text(encoding="utf-8"))
    model["name"] = "streamed"
    for component in model["components"]:
        component |= {"blocks": 40}
    (tmp_path / "streamed.instant.json").write_text(json.dumps(model), encoding="utf-8")
    with simulate("sim:2GiB", arguments=("--models", str(tmp_path))).client() as client:
        (denoise,) = (
            stage
            for stage in client.plan("a cube", model="streamed").stages
            if stage.name == "denoise"
        )
        assert denoise.verdict == "never"
        assert denoise.shortfall is not None
        # Two slots of blocks of 0.6 GB, and the scratch.
        assert 2.7e9 < denoise.shortfall.needed_bytes < 2.9e9, "not the 25 GB of all of it"


def test_framepack_is_one_pull_and_one_model(
    hub: Hub, home: Path, alone: Run, tmp_path: Path
) -> None:
    planned = alone("pull", "framepack", "--dry-run")
    assert "hunyuanvideo-community/HunyuanVideo" in planned.stderr
    good(alone("pull", "framepack"))
    cached = {folder.name for folder in (home / "hub").glob("models--*")}
    assert len(cached) == 3, cached
    base = home / "hub/models--hunyuanvideo-community--HunyuanVideo"
    assert list(base.glob("snapshots/*/vae/*.safetensors"))
    assert not list(base.glob("snapshots/*/transformer/*.safetensors")), "FramePack has its own"
    service = Service(state=tmp_path / "s", environment=hub.environment(home))
    try:
        with service.client() as client:
            theirs = [model for model in client.list_models() if not model.id.startswith("moored/")]
            assert [(model.id, model.problem) for model in theirs] == [(FRAMEPACK, "")]
            film = client.generate_video(
                "a wave",
                model="framepack",
                width=48,
                height=32,
                frames=37,
                steps=1,
                init_image=ROOT / "docs/demo.png",
                max_sequence_length=64,
            )
            assert film.model.id == FRAMEPACK
            # As it was pulled by versions that brought the transformer alone.
            shutil.rmtree(home / "hub/models--lllyasviel--flux_redux_bfl")
            client.unload()
            with pytest.raises(moored.ModelUnsupported, match="moored pull framepack"):
                client.plan_video("a wave", model="framepack")
    finally:
        assert service.stop() == 0


def test_ovi_is_one_pull_and_makes_a_film_with_sound(
    hub: Hub, home: Path, alone: Run, tmp_path: Path
) -> None:
    hub.repositories |= ovi_repositories(tmp_path)
    planned = alone("pull", "ovi-1.0", "--dry-run")
    assert "Wan-AI/Wan2.2-TI2V-5B-Diffusers" in planned.stderr
    good(alone("pull", "ovi-1.0"))
    base = home / "hub/models--Wan-AI--Wan2.2-TI2V-5B-Diffusers"
    assert not list(base.glob("snapshots/*/transformer/*.safetensors")), "Ovi has its own"
    sound = home / "hub/models--hkchengrex--MMAudio"
    assert not list(sound.glob("snapshots/*/weights/*")), "only what decodes the sound"
    service = Service(state=tmp_path / "s", environment=hub.environment(home))
    try:
        with service.client() as client:
            theirs = [model for model in client.list_models() if not model.id.startswith("moored/")]
            told = [(model.id, model.problem) for model in theirs]
            assert told == [(f"{OVI}:model.safetensors", "")]
            film = client.generate_video(
                "a wave <S>hello<E>",
                model="ovi-1.0",
                width=64,
                height=32,
                frames=5,
                frames_per_second=24,
                steps=1,
            )
            assert film.audio is not None
            track = (film.audio.sample_rate, film.audio.channels, film.audio.sample_count)
            assert track == (16_000, 1, 6 * 512)
            assert list(film.timings)[-2:] == ["decode_sound", "decode"]
            with pytest.raises(moored.InvalidRequest, match="multiple of 4 plus 1"):
                client.plan_video("a wave", model="ovi-1.0", frames=120)
    finally:
        assert service.stop() == 0


CARDS = (
    "sim:4GiB",
    "sim:6GiB,index=1",
    "sim:8GiB,index=2",
    "sim:12GiB,index=3",
    "sim:24GiB,index=4",
)


@pytest.fixture
def flux_without_numbers(tmp_path: Path) -> Path:
    """A folder of models with FLUX.1-dev in its published shapes; its weights are holes."""
    models = tmp_path / "models"
    full = models / "flux"
    for place, configuration in checkpoints.configurations(checkpoints.FULL).items():
        (full / place).parent.mkdir(parents=True, exist_ok=True)
        (full / place).write_text(json.dumps(configuration))
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(ROOT / "demo/model" / name, full / name)
    for name, shapes_of in {
        "transformer": checkpoints.transformer,
        "text_encoder": checkpoints.text_encoder,
        "text_encoder_2": checkpoints.text_encoder_2,
        "vae": checkpoints.vae,
    }.items():
        header: dict[str, Any] = {}
        end = 0
        for tensor, shape in shapes_of(checkpoints.FULL):
            begin, end = end, end + 2 * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        written = json.dumps(header).encode()
        stem = "diffusion_pytorch_model" if name in ("transformer", "vae") else "model"
        with (full / name / f"{stem}.safetensors").open("wb") as file:
            file.write(len(written).to_bytes(8, "little") + written)
            file.truncate(8 + len(written) + end)
    return models


def test_auto_takes_what_the_list_says_of_each_card(
    simulate: Any, alone: Run, flux_without_numbers: Path
) -> None:
    service = simulate(*CARDS, arguments=("--models", str(flux_without_numbers)))
    model = moored.ModelRef("flux", quantization="auto")
    with service.client() as client:
        for index, device in enumerate(CARDS):
            fits, _ = available(alone, device.split(",")[0])
            plan = client.plan("a cube", model=model, card=f"sim:{index}")
            assert plan.runs_now, device
            (denoise,) = (stage for stage in plan.stages if stage.name == "denoise")
            preset = plan.model.choice.partition(":")[0].partition(" ")[0]
            is_streamed = any(one.streamed_bytes for one in denoise.streamed)
            said = f"{preset}, streamed" if is_streamed else preset
            assert said == fits["flux-dev"], (device, plan.model.choice)
