"""What cannot be written: a full disk at each file of the state, and folders that are read-only."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import moored
import pytest

from service import INSTANT_MODELS, Service, clean_environment, run, run_with_a_full_disk

TOKEN = "0123456789abcdef0123456789abcdef"
NOBODY = 65534


def files_in(folder: Path) -> dict[str, bytes]:
    """All files, without locks: these are empty."""
    there = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock")
    return {str(file.relative_to(folder)): file.read_bytes() for file in there}


@pytest.fixture
def own(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with a file of credentials."""
    return clean_environment() | {"MOORED_CREDENTIALS": str(tmp_path / "user" / "credentials.json")}


@pytest.mark.parametrize(
    "command",
    [
        ("token", "make", "second"),
        ("token", "withdraw", "first"),
        ("serve", "--init"),
        ("token", "use", "-", "--endpoint", "https://other"),
        ("token", "forget", "--endpoint", "https://box"),
    ],
    ids=" ".join,
)
def test_a_full_disk_leaves_secrets_as_they_were(
    tmp_path: Path, own: dict[str, str], command: tuple[str, ...]
) -> None:
    state = ("--state", str(tmp_path / "state"))
    assert run("token", "make", "first", *state, env=own).returncode == 0
    kept = run("token", "use", "-", "--endpoint", "https://box", input=TOKEN, env=own)
    assert kept.returncode == 0, kept.stderr
    before = files_in(tmp_path)
    assert len(before) == 2
    arguments = command if command[1] in ("use", "forget") else (*command, *state)
    failed = run_with_a_full_disk(*arguments, input=TOKEN, env=own)
    assert failed.returncode in (1, 8), failed.stderr
    assert "too large" in failed.stderr, failed.stderr
    assert str(tmp_path) in failed.stderr, "the file or its folder is named"
    assert TOKEN not in failed.stderr
    assert files_in(tmp_path) == before
    # Once there is room, the same command does it.
    again = run(*arguments, input=TOKEN, env=own)
    assert again.returncode == 0, again.stderr


def test_a_service_whose_disk_is_full_serves_and_says_so_once(tmp_path: Path) -> None:
    service = Service("--models", str(INSTANT_MODELS), state=tmp_path, devices=("sim:24GiB",))
    try:
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (0, 0))
        with service.client() as client:
            for seed in range(3):
                made = client.generate_image(
                    "x", model="small", steps=1, width=64, height=64, seed=seed
                )
                assert made.data
            with pytest.raises(moored.NotKept, match="large"):
                client.stream_image("x", model="small", detach=True).leave()
            assert client.generate_image("x", model="small").data, "others go on"
        said = [line for line in service.log if "cannot remember hashes" in line]
        assert len(said) <= 1, said
    finally:
        assert service.stop() == 0


# Folders that are read-only.


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A folder that its user can enter and not write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def as_another_user() -> dict[str, object]:
    """Root writes everywhere; whoever is not root does not need to become another."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def test_a_state_folder_that_cannot_be_written_is_named(foreign: Path) -> None:
    state = foreign / "state"
    state.mkdir()
    state.chmod(0o555)
    environment = clean_environment() | {"HOME": str(foreign)}
    given = {"env": environment, **as_another_user()}
    serve = ("serve", "--device", "sim:1GiB", "--listen", "127.0.0.1:0")
    commands = [
        ("doctor",),
        ("token", "make", "alice"),
        ("serve", "--init"),
        (*serve, "--set", "service.own_certificate=true"),
        ("serve", "--device", "cpu", "--listen", "127.0.0.1:0"),
    ]
    for command in commands:
        where = ("--set", f"service.state={state}")
        refused = run(*command, *where, **given)
        assert refused.returncode == 1, (command, refused.stderr)
        told = refused.stdout + refused.stderr
        assert str(state) in told, (command, told)
        assert "denied" in told, (command, told)
    assert list(state.iterdir()) == []


def test_kept_tokens_that_cannot_be_written_are_named(foreign: Path) -> None:
    kept = foreign / "kept"
    kept.mkdir()
    kept.chmod(0o555)
    environment = clean_environment() | {"MOORED_CREDENTIALS": str(kept / "credentials.json")}
    given = {"env": environment | {"HOME": str(foreign)}, **as_another_user()}
    refused = run("token", "use", "-", "--endpoint", "https://box", input=TOKEN, **given)
    assert refused.returncode == 8, refused.stderr
    assert str(kept) in refused.stderr
    assert TOKEN not in refused.stderr
