"""Dockerfile, docker-compose.yml and docker-compose.cuda.yml: valid, and consistent with the binary.

No container is built or run here. The files are parsed, and the binary is started with the
environment and the commands in them.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import moored
import pytest
import tomllib
import yaml

from service import BINARY, ROOT, START_TIMEOUT_S, ReservedPort, clean_environment, write_secret

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
COMPOSE_CUDA: dict[str, Any] = yaml.safe_load(
    (ROOT / "docker-compose.cuda.yml").read_text(encoding="utf-8")
)
DEFAULTS = (ROOT / "service/config/src/default.toml").read_text(encoding="utf-8")
TOKEN_PATH = "/run/secrets/moored_token"
STATE_PATH = "/var/lib/moored"
CACHE_PATH = f"{STATE_PATH}/hub"
MODELS_PATH = "/models"
LISTEN = "0.0.0.0:50051"
TOKEN = "0123456789abcdef" * 4
PORT = 50051

_DURATION = {"type": "string", "pattern": r"^(\d+h)?(\d+m)?(\d+s)?$"}
_SIZE = {"type": "string", "pattern": r"^\d+[bkmg]$"}
_WORDS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
# A schema of our own for the part of the Compose specification that we use: what is not in here, is
# a key that nobody has thought about. The whole schema of compose-spec is not in this repository.
OUR_PART_OF_COMPOSE: dict[str, Any] = {
    "type": "object",
    "required": ["services"],
    "additionalProperties": False,
    "properties": {
        "services": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "build": {"type": "string"},
                    "image": {"type": "string"},
                    "command": {"type": "array", "items": {"type": "string"}},
                    "mem_limit": _SIZE,
                    "ports": _WORDS,
                    "environment": {"type": "object", "additionalProperties": {"type": "string"}},
                    "secrets": _WORDS,
                    "volumes": _WORDS,
                    "tmpfs": _WORDS,
                    "read_only": {"type": "boolean"},
                    "cap_drop": _WORDS,
                    "security_opt": _WORDS,
                    "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
                    "stop_grace_period": _DURATION,
                    "healthcheck": {
                        "type": "object",
                        "required": ["test", "interval", "timeout", "retries"],
                        "additionalProperties": False,
                        "properties": {
                            "test": {"type": "array", "items": {"type": "string"}},
                            "interval": _DURATION,
                            "timeout": _DURATION,
                            "retries": {"type": "integer", "minimum": 1},
                            "start_period": _DURATION,
                        },
                    },
                },
            },
        },
        "secrets": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["file"],
                "additionalProperties": False,
                "properties": {"file": {"type": "string"}},
            },
        },
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
    },
}


def seconds(text: str) -> int:
    """`1m30s` in seconds."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, rest), lines joined and comments left out."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest) for word, rest in found]


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Each stage by its name: what it is from, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            base, _as, name = rest.split()
            found[name] = (base, [])
        elif found:
            found[list(found)[-1]][1].append((word, rest))
    return found


def image(name: str = "cpu") -> list[tuple[str, str]]:
    """The instructions that make an image: those of its stage after those of the stage that it is from."""
    base, own = stages()[name]
    return (image(base) if base in stages() else []) + own


def value_of(instruction: str) -> str:
    """The last value of this instruction in the image."""
    return [rest for word, rest in image() if word == instruction][-1]


def image_environment() -> dict[str, str]:
    """ENV of the image."""
    pairs = [shlex.split(rest) for word, rest in image() if word == "ENV"]
    return dict(pair.split("=", 1) for group in pairs for pair in group)


def the_service() -> dict[str, Any]:
    service: dict[str, Any] = COMPOSE["services"]["moored"]
    return service


# Dockerfile.


def test_the_image_drains_on_its_stop_signal() -> None:
    assert value_of("STOPSIGNAL") == "SIGTERM"
    # As a list: a shell in between would keep the signal to itself.
    assert json.loads(value_of("ENTRYPOINT")) == ["moored", "serve"]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_image_runs_as_an_unprivileged_user(name: str) -> None:
    words = image(name)
    assert words[-1] == ("USER", "moored"), "nothing is done as root after the user has changed"
    assert [rest for word, rest in words if word == "USER"] == ["moored"]
    made = " ".join(rest for word, rest in words if word == "RUN")
    assert re.search(r"useradd .*--uid 10001 .*\bmoored\b", made)
    assert f"install -d -o moored -g moored {STATE_PATH} {MODELS_PATH}" in made


def test_the_image_is_small_and_complete() -> None:
    assert {name: base for name, (base, _) in stages().items()} == {
        "builder": "rust:1-bookworm",
        "builder-cuda": "rust:1-bookworm",
        "run": "${BASE}",
        "cuda": "run",
        "cpu": "run",
    }
    assert ("ARG", "BASE=debian:bookworm-slim") in instructions()
    assert list(stages())[-1] == "cpu", "docker compose builds the last stage"
    for name, builder in [("cpu", "builder"), ("cuda", "builder-cuda")]:
        copied = [rest.split() for word, rest in image(name) if word == "COPY"]
        assert [f"--from={builder}", "/out/moored", "/usr/local/bin/moored"] in copied
        assert ["demo/model", f"{value_of('WORKDIR')}/demo/model"] in copied
        built = " ".join(rest for word, rest in stages()[builder][1] if word == "RUN")
        assert "cargo build --release --locked" in built
    assert (ROOT / "demo/model/model_index.json").is_file()
    for source in [rest.split()[:-1] for word, rest in instructions() if word == "COPY"]:
        for path in source:
            if not path.startswith("--") and not path.startswith("/"):
                assert (ROOT / path).exists(), path


def test_the_image_for_nvidia_cards_has_the_libraries_of_the_wheel() -> None:
    wheel = tomllib.loads((ROOT / "service/moored/pyproject.toml").read_text(encoding="utf-8"))
    asked = wheel["project"]["optional-dependencies"]["cuda"]
    installed = " ".join(rest for word, rest in stages()["cuda"][1] if word == "RUN")
    assert sorted(re.findall(r"'(nvidia-[^']+)'", installed)) == sorted(asked)


def test_the_image_tells_whether_it_is_healthy() -> None:
    asked = value_of("HEALTHCHECK").split("CMD", 1)[1]
    assert json.loads(asked) == the_service()["healthcheck"]["test"][1:]


def test_the_image_requires_a_token() -> None:
    environment = image_environment()
    assert environment["MOORED_SERVICE_LISTEN"] == LISTEN
    assert environment["MOORED_SERVICE_TOKEN_FILE"] == TOKEN_PATH
    assert environment["MOORED_TOKEN_FILE"] == TOKEN_PATH
    assert value_of("EXPOSE") == str(PORT)


# docker-compose.yml.


def test_the_compose_file_matches_our_schema() -> None:
    jsonschema.validate(COMPOSE, OUR_PART_OF_COMPOSE)


@pytest.mark.parametrize(
    ("key", "value"),
    [("stop_grace", "45s"), ("mem_limit", "16 GB"), ("ports", "50051"), ("restart", "often")],
)
def test_the_schema_refuses_mistakes(key: str, value: str) -> None:
    wrong = {"services": {"moored": the_service() | {key: value}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, OUR_PART_OF_COMPOSE)


def test_running_jobs_may_finish_before_the_container_is_killed() -> None:
    drain = re.search(r'^drain = "(\w+)"$', DEFAULTS, re.MULTILINE)
    assert drain
    assert seconds(the_service()["stop_grace_period"]) > seconds(drain[1])
    assert "MOORED_SERVICE_DRAIN" not in image_environment()


def test_the_port_is_published_on_loopback_alone() -> None:
    assert the_service()["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]


def test_the_service_is_without_tls_only_where_its_port_is_on_loopback() -> None:
    """It is said in so many words, beside the port, and the image alone does not say it."""
    assert the_service()["environment"] == {"MOORED_SERVICE_ALLOW_WITHOUT_TLS": "true"}
    assert "MOORED_SERVICE_ALLOW_WITHOUT_TLS" not in image_environment()


def test_the_secret_is_the_token_of_the_image() -> None:
    (secret,) = the_service()["secrets"]
    assert f"/run/secrets/{secret}" == TOKEN_PATH
    assert set(COMPOSE["secrets"]) == {secret}
    ignored = subprocess.run(
        ["git", "ls-files", COMPOSE["secrets"][secret]["file"]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ignored.stdout == "", "the token is in the repository"


def test_volumes_are_mounted_at_the_folders_of_the_image() -> None:
    environment = image_environment()
    assert environment["MOORED_SERVICE_STATE"] == STATE_PATH
    assert environment["MOORED_MODELS_FOLDERS"] == MODELS_PATH
    assert environment["MOORED_HUB_CACHE"] == CACHE_PATH
    mounts = {re.sub(r"^\$\{.*?\}|^[^:]*", "", volume) for volume in the_service()["volumes"]}
    assert mounts == {f":{MODELS_PATH}:ro", f":{STATE_PATH}"}
    named = {volume.split(":")[0] for volume in the_service()["volumes"] if volume[0].isalpha()}
    assert named == set(COMPOSE["volumes"])


def test_the_card_is_smaller_than_the_container() -> None:
    limit = int(the_service()["mem_limit"].removesuffix("g"))
    command = the_service()["command"]
    card = re.fullmatch(r"cpu:(\d+)GiB", command[command.index("--device") + 1])
    assert card
    assert int(card[1]) + 2 <= limit


def test_the_compose_file_for_nvidia_cards_changes_only_what_cards_need() -> None:
    """Token, privileges, ports and volumes stay those of docker-compose.yml."""
    assert set(COMPOSE_CUDA) == {"services"}
    assert set(COMPOSE_CUDA["services"]) == set(COMPOSE["services"])
    cuda = COMPOSE_CUDA["services"]["moored"]
    assert set(cuda) == {"build", "image", "command", "mem_limit", "deploy"}
    assert cuda["build"]["target"] in stages()
    assert cuda["image"] == f"{the_service()['image']}-cuda"
    assert cuda["command"] == ["--device", "auto"]
    (device,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert re.fullmatch(_SIZE["pattern"], cuda["mem_limit"])


def test_the_container_drops_unneeded_privileges() -> None:
    service = the_service()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service


# The binary, as image and compose start it.


@pytest.fixture
def port() -> Iterator[int]:
    reserved = ReservedPort()
    yield reserved.number


def environment_of_the_image(tmp_path: Path, port: int) -> dict[str, str]:
    """ENV of the image, with its paths moved to where this test may write."""
    places = {
        TOKEN_PATH: str(tmp_path / "token"),
        STATE_PATH: str(tmp_path / "state"),
        CACHE_PATH: str(tmp_path / "state/hub"),
        MODELS_PATH: str(tmp_path / "models"),
        LISTEN: f"0.0.0.0:{port}",
    }
    moved = {name: places[value] for name, value in image_environment().items()}
    environment: dict[str, str] = the_service()["environment"]
    return clean_environment() | moved | environment


def compose_command() -> list[str]:
    """`command` of the service, with a card that this machine has for certain."""
    return [re.sub(r"^cpu:\d+GiB$", "cpu:1GiB", word) for word in the_service()["command"]]


def test_the_image_does_not_start_without_a_token(tmp_path: Path, port: int) -> None:
    environment = environment_of_the_image(tmp_path, port)
    (tmp_path / "models").mkdir()
    for missing in ({}, {"MOORED_SERVICE_TOKEN_FILE": ""}):
        started = subprocess.run(
            [str(BINARY), "serve", *compose_command()],
            env=environment | missing,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        assert started.returncode != 0
        assert "token" in started.stderr


def test_the_composed_service_generates_replaces_a_killed_worker_and_drains(
    tmp_path: Path, port: int
) -> None:
    environment = environment_of_the_image(tmp_path, port)
    write_secret(tmp_path / "token", f"{TOKEN}\n")
    (tmp_path / "models").mkdir()
    workdir = tmp_path / "share"
    workdir.mkdir()
    (workdir / "demo").symlink_to(ROOT / "demo")
    process = subprocess.Popen(
        [str(BINARY), "serve", *compose_command()],
        env=environment,
        cwd=workdir,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with moored.Client(f"127.0.0.1:{port}", token=TOKEN) as client:
            client.wait_until_ready(START_TIMEOUT_S)
            assert client.server_info().default_model == "moored/demo"
            (card,) = client.status().cards
            assert card.memory.total == 2**30
        with (
            moored.Client(f"127.0.0.1:{port}", token=TOKEN[::-1]) as stranger,
            pytest.raises(moored.Unauthenticated),
        ):
            stranger.status()
        assert healthcheck(environment, port) == 0
        assert list((tmp_path / "state").iterdir())
        process.terminate()
        assert process.wait(seconds(the_service()["stop_grace_period"])) == 0
        assert healthcheck(environment, port) != 0
    finally:
        process.kill()
        process.wait()


def healthcheck(environment: dict[str, str], port: int) -> int:
    """The exit code of the container's health check, with the port that this test has."""
    kind, program, *arguments = the_service()["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "moored")
    return subprocess.run(
        [str(BINARY), *arguments],
        env=environment | {"MOORED_ENDPOINT": f"http://127.0.0.1:{port}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=seconds(the_service()["healthcheck"]["timeout"]) * 6,
        check=False,
    ).returncode
