"""The program as a Python wheel: installed by pip, it serves and generates without the checkout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from PIL import Image

from service import ROOT, START_TIMEOUT_S, Service, clean_environment

SIDE = 64
GENERATE = """
import sys
import moored
with moored.Client(sys.argv[1]) as client:
    client.wait_until_ready(float(sys.argv[2]))
    client.generate_image("a red cube on a blue plane", seed=7, steps=2).pictures[0].save("cube.png")
    print(moored.__file__)
"""


def command(*words: object, **options: object) -> str:
    """Runs a command that has to succeed; its output."""
    done = subprocess.run(
        [str(word) for word in words],
        **({"capture_output": True, "text": True, "env": clean_environment()} | options),  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both of our wheels; the program is the one that is built already."""
    folder = tmp_path_factory.mktemp("wheels")
    own = clean_environment() | {"MATURIN": str(Path(sys.executable).with_name("maturin"))}
    command(ROOT / "scripts/wheel", "--dev", "--out", folder, env=own)
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    command(*build, cwd=ROOT / "client-py")
    return folder


def link_what_the_client_needs(folder: Path) -> None:
    """A folder with what `moored` depends on, as it is installed here: nothing is fetched."""
    folder.mkdir()
    ahead, done = ["moored"], set()
    while ahead:
        name = ahead.pop()
        needed = [word for word in metadata.requires(name) or [] if "extra ==" not in word]
        names = {re.split(r"[^\w.-]", word, maxsplit=1)[0] for word in needed} - done
        ahead += names
        done |= names
    for name in done:
        files = metadata.files(name)
        assert files, name
        for top in {path.parts[0] for path in files} - {"..", "__pycache__"}:
            (folder / top).symlink_to(metadata.distribution(name).locate_file(top))


@pytest.fixture(scope="module")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment after `pip install 'moored[service]'` from nothing but our wheels."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "own venv", with_pip=False)
    link_what_the_client_needs(folder / "needed")
    packages = next((folder / "own venv/lib").glob("python3*/site-packages"))
    (packages / "needed.pth").write_text(f"{folder / 'needed'}\n", encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--python", folder / "own venv", "install", "-q")
    command(*pip, "--no-index", "--find-links", wheels, "moored[service]")
    return folder / "own venv"


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Iterator[Service]:
    """A service of the installed program, whose shipped model differs from that of the checkout."""
    defaults = environment / "share/moored/demo/model/moored.json"
    own = json.loads(defaults.read_text(encoding="utf-8")) | {"width": SIDE, "height": SIDE}
    defaults.write_text(json.dumps(own), encoding="utf-8")
    binary = environment / "bin/moored"
    service = Service(state=tmp_path / "state", binary=binary, folder=tmp_path)
    yield service
    assert service.stop() == 0


def test_the_installed_service_generates_for_the_installed_client(
    environment: Path, installed: Service, tmp_path: Path
) -> None:
    generate = (environment / "bin/python", "-c", GENERATE, installed.address, START_TIMEOUT_S)
    client = command(*generate, cwd=tmp_path, timeout=120)
    assert Path(client.strip()).is_relative_to(environment)
    with Image.open(tmp_path / "cube.png") as picture:
        assert picture.size == (SIDE, SIDE)  # by the model that the wheel brought


def test_the_client_finds_the_program_that_was_installed_with_it(environment: Path) -> None:
    """Which is what `start_local_service` starts."""
    find = (environment / "bin/python", "-c", "import moored; print(moored.local_program())")
    found = command(*find, env=clean_environment() | {"PATH": "/usr/bin:/bin"})
    assert Path(found.strip()) == (environment / "bin/moored").resolve()


def test_the_wheel_has_the_version_of_the_program_and_the_licences(
    wheels: Path, environment: Path
) -> None:
    said = command(environment / "bin/moored", "-V").split()
    (wheel,) = wheels.glob("moored_service-*.whl")
    assert said == ["moored", wheel.name.split("-")[1]]
    assert (wheels / f"moored-{said[1]}-py3-none-any.whl").is_file(), (
        "the client is of another version"
    )
    with zipfile.ZipFile(wheel) as content:
        licences = next(name for name in content.namelist() if name.endswith("/licenses/LICENSE"))
        assert content.read(licences) == (ROOT / "LICENSE").read_bytes()
        third_party = content.read(licences.replace("LICENSE", "THIRD-PARTY-LICENSES")).decode()
        listed = "\n".join(content.namelist())
    for crate in ("candle-core", "tonic", "cudarc"):
        linked = re.search(rf"^{crate} \d+\.\d+\.\d+: ", third_party, re.MULTILINE)
        assert bool(linked) is (crate != "cudarc"), crate  # that one comes with the feature `cuda`
    assert third_party.count("Permission is hereby granted") > 1
    for model in ("model", "film/model", "sound/model"):
        assert f"demo/{model}/transformer/diffusion_pytorch_model.safetensors" in listed
