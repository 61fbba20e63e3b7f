"""Every command of the documents is taken by the program, and runs where this machine suffices.

A block of commands is fenced by ```sh and runs here as it stands, in a folder with a few files, against a
service with tiny models that have the names of the documents. A block that needs more says what, after `sh`:

    needs=hub       models of a hub: it runs against a stand-in of one
    needs=build     a compiler, or packages of an index
    needs=machine   another machine, or that this one is changed

Commands of the last two are read by the program's own parser, and do not run. Blocks of Python, JSON and TOML
are read, and run, by the same rule.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomllib
from hub import Hub, Repository, files_of
from PIL import Image
from test_first_hour import framepack_repositories
from tiny_models import FIXTURES, film_models, picture_models

from service import BINARY, INSTANT_MODELS, ROOT, Service, clean_environment, run

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "demo/README.md")),
    *(ROOT / name for name in ("client-py/README.md", "tests/gpu/README.md")),
    *(ROOT / f"nodes/{pack}/README.md" for pack in ("comfyui", "griptape")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NEEDS = {"hub", "build", "machine"}
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_-]+$")
ADDRESS = "127.0.0.1:50051"
"""Where the documents have the service."""
PLAYS = {
    "Tongyi-MAI/Z-Image-Turbo": "small",
    "ACE-Step/Ace-Step1.5": "track",
    "owner/film": "video",
    "owner/music": "track",
}
"""Models that compute nothing, by the names that the documents use."""
TINY = {
    "owner/name": "plain",
    # A Kontext would scale each picture to a megapixel.
    "black-forest-labs/FLUX.1-Kontext-dev": "klein",
    "black-forest-labs/FLUX.1-Fill-dev": "fill",
    "black-forest-labs/FLUX.2-klein-4B": "klein",
    "lllyasviel/FramePackI2V_HY": "framepack",
    "hunyuanvideo-community/HunyuanVideo": "hunyuan",
}
"""Models of random numbers, which do what the family does. The first is the default."""
SMALL = {"steps": 1, "width": 64, "height": 64}
"""Their defaults."""
FRAMES = {"framepack": 37, "hunyuan": 5}
"""Of films, the fewest that the family makes."""
LORAS = ("styles/ink", "oil")
# `serve` is what runs already, and nothing here looks at a status for ever.
MOORED = """#!/bin/bash
words=()
for word in "$@"; do [ "$word" = --watch ] || words+=("$word"); done
[ "${words[0]}" != serve ] || words=(status)
exec "$PROGRAM" "${words[@]}"
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def needs(self) -> str:
        """What it needs besides this machine; empty: nothing."""
        found = re.search(r"needs=(\w+)", self.info)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            indent, language, info, inside = fence.groups()
            if language in languages:
                line = text[: fence.start()].count("\n") + 1
                plain = re.sub(f"^{indent}", "", inside, flags=re.MULTILINE)
                found.append(Block(page, line, language, info.strip(), plain))
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of `moored` in a block, as words."""
    for line in block.text.splitlines():
        for inner in (line, *re.findall(r"\$\(([^)]*)\)", line)):
            words = shlex.split(inner, comments=True)
            if "cargo" in words[:1] and "--" in words:
                words = ["moored", *words[words.index("--") + 1 :]]
            if words[:1] == ["moored"]:
                ends = (at for at, word in enumerate(words) if re.match(r"\d?>|[|&;]", word))
                yield words[1 : next(ends, len(words))]


@functools.cache
def problem_with(*words: str) -> str:
    """What the program's parser has against a command; empty: nothing.

    With `--help` last it reads all words, and runs nothing. Capitals stand for a value of the reader's.
    """
    said = run(*(word for word in words if word != "..."), "--help").stderr
    stands_for = re.search(r"invalid value '([^']*)'", said)
    if stands_for and PLACEHOLDER.match(stands_for[1]):
        return ""
    return said


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_the_commands_of_a_block_are_commands(block: Block) -> None:
    assert re.fullmatch(r"(needs=\w+)?", block.info), "see the rule at the head of this file"
    assert not block.needs or block.needs in NEEDS
    for words in commands(block):
        assert not problem_with(*words), words
    for script in re.findall(r"(?:^|[\s/])((?:scripts|tests|demo|client-py)/[\w./-]+)", block.text):
        assert (ROOT / script).exists() or script.startswith("tests/gpu/run"), script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_are_commands(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for written in set(re.findall(r"`moored ([a-z][^`\n]*)`", text)):
        try:
            words = shlex.split(written)
        except ValueError as error:
            raise AssertionError(f"moored {written}: {error}") from None
        assert not problem_with(*words), f"moored {written}"
    for script in set(re.findall(r"(?<![\w/])(scripts/[\w.-]*\w)", text)):
        assert (ROOT / script).is_file(), script


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with models by the names of the documents."""
    folder = tmp_path_factory.mktemp("docs")
    models, adapters, tiny = folder / "models", folder / "adapters", folder / "tiny"
    tiny.mkdir()
    picture_models(tiny)
    film_models(tiny)
    shutil.copytree(FIXTURES / "flux-tiny", tiny / "fill")
    shutil.copytree(FIXTURES / "flux-fill-tiny", tiny / "fill", dirs_exist_ok=True)
    for name, model in TINY.items():
        (models / name).parent.mkdir(parents=True, exist_ok=True)
        (models / name).symlink_to(tiny / model)
        defaults = SMALL | ({"frames": FRAMES[model]} if model in FRAMES else {})
        (tiny / model / "moored.json").write_text(json.dumps(defaults), encoding="utf-8")
    for name, model in PLAYS.items():
        instant = json.loads((INSTANT_MODELS / f"{model}.instant.json").read_text(encoding="utf-8"))
        instant |= {"name": name.partition("/")[2], "steps_ms": 0}
        (models / f"{name}.instant.json").parent.mkdir(parents=True, exist_ok=True)
        (models / f"{name}.instant.json").write_text(json.dumps(instant), encoding="utf-8")
    shutil.copytree(FIXTURES / "flux-controlnet-tiny/single", adapters / "canny")
    for name in LORAS:
        (adapters / name).parent.mkdir(exist_ok=True)
        shutil.copy(FIXTURES / "flux-lora-tiny/kohya.safetensors", adapters / f"{name}.safetensors")
    settings = ("models.default=owner/name", f"models.adapters={json.dumps([str(adapters)])}")
    arguments = ["--models", str(models), *(word for one in settings for word in ("--set", one))]
    service = Service(*arguments, state=folder / "state", devices=("sim:24GiB",))
    with service.client():
        pass
    yield service
    service.kill()


@pytest.fixture(scope="module")
def with_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service whose hub has models by the names of the documents, and its environment."""
    folder = tmp_path_factory.mktemp("hub")
    model = files_of(ROOT / "demo/model")
    lora = (ROOT / "demo/adapters/circle-to-star.safetensors").read_bytes()
    files = {"file.gguf": b"GGUF", "styles/ink.safetensors": lora}
    with Hub() as hub:
        for name in ("Tongyi-MAI/Z-Image-Turbo", "black-forest-labs/FLUX.1-schnell"):
            hub.repositories[name] = Repository(model)
        hub.repositories["owner/name"] = Repository(model | files)
        hub.repositories |= framepack_repositories()
        environment = hub.environment(folder / "home")
        service = Service(state=folder / "state", environment=environment)
        with service.client():
            pass
        yield service, environment
        service.kill()


@pytest.fixture
def folder(tmp_path: Path, service: Service) -> Path:
    """A folder with the files that the documents start from."""
    for name in ("cat", "hat", "wall", "hole", "room", "portrait", "left", "right", "edges"):
        shade = Image.linear_gradient("L").resize((64, 64)).rotate(90 * (len(name) % 4))
        Image.merge("RGB", [shade] * 3).save(tmp_path / f"{name}.png")
    (tmp_path / "song.txt").write_text("la la la\n", encoding="utf-8")
    with service.client() as client:
        for name in ("old.flac", "song.wav", "strings.wav"):
            client.generate_audio("a note", model="owner/music").save(tmp_path / name)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/moored"
    program.write_text(MOORED, encoding="utf-8")
    program.chmod(0o755)
    return tmp_path


def environment(
    folder: Path, service: Service, own: dict[str, str] | None = None
) -> dict[str, str]:
    """One in which `moored` is the program, and asks this service; `own` is that of the service."""
    return (own or clean_environment()) | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "PROGRAM": str(BINARY),
        "MOORED_ENDPOINT": f"http://{service.address}",
    }


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_a_block_of_commands_runs(
    block: Block, folder: Path, request: pytest.FixtureRequest
) -> None:
    if block.needs not in ("", "hub"):
        return
    if block.needs:
        service, own = request.getfixturevalue("with_hub")
    else:
        service, own = request.getfixturevalue("service"), None
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", block.text],
        cwd=folder,
        env=environment(folder, service, own),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_a_block_of_python_runs(block: Block, folder: Path, service: Service) -> None:
    """Those of the client's own README run in its own tests."""
    code = block.text.replace(ADDRESS, service.address)
    compile(code, str(block), "exec")
    if block.needs or block.page.parent.name == "client-py":
        return
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(folder, service) | {"PYTHONPATH": str(ROOT / "client-py/src")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_a_block_of_json_is_that(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_a_block_of_toml_is_a_configuration(block: Block, tmp_path: Path) -> None:
    tomllib.loads(block.text)
    file = tmp_path / "moored.toml"
    file.write_text(block.text, encoding="utf-8")
    checked = run("config", "--config", str(file))
    assert checked.returncode == 0, checked.stderr
