"""Workers have no more rights than they need: one that strangers have taken over finds nothing."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moored
import pytest
from commands import good
from faults import worker_pid
from processes import open_files_of, threads_of

from service import BINARY, INSTANT_MODELS, ROOT, Service, clean_environment, run

Simulate = Callable[..., Service]

QUICK: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 1}

ALWAYS_TRIED = (
    "read /etc/shadow",
    "listen on a TCP port",
    "open a UDP socket",
    "connect to the service",
    "open a datagram socket of this machine",
    "run a program",
    "signal the service",
    "read the service's memory",
    "read the service's variables",
    "read the service's descriptors",
    "call ptrace",
    "call process_vm_readv",
    "call io_uring_setup",
    "call bpf",
    "call unshare",
    "call execve",
)


def landlock() -> int:
    """The version of Landlock's interface; below 1, there is none."""
    landlock_create_ruleset, of_version = 444, 1
    return int(ctypes.CDLL(None).syscall(landlock_create_ruleset, None, 0, of_version))


needs_landlock = pytest.mark.skipif(landlock() < 1, reason="this kernel has no Landlock")


class Secrets:
    """A service's secrets, and the arguments that name them."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "above" / "state"
        self.configuration = folder / "moored.toml"
        self.token = folder / "token"
        self.models = folder / "models"
        shutil.copytree(INSTANT_MODELS, self.models)
        self.token.write_text("a-token-that-nobody-may-read\n", encoding="utf-8")
        self.token.chmod(0o600)
        self.configuration.write_text(f'[models]\nfolders = ["{self.models}"]\n', encoding="utf-8")
        self.arguments = ("--config", str(self.configuration))

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.state, self.token, self.configuration)


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path)


def outcomes_of_a_takeover(
    secrets: Secrets, confine: str, device: str = "sim:24GiB,escape-at=denoise:1"
) -> dict[str, str]:
    """What the worker of a real service tried, on its card's thread, and how that ended."""
    service = Service(
        *secrets.arguments,
        *("--set", f"service.confine_workers={confine}"),
        *("--set", f"service.token_file={secrets.token}"),
        state=secrets.state,
        devices=(device,),
    )
    try:
        token = secrets.token.read_text(encoding="utf-8").strip()
        with service.client(token=token) as client:
            client.generate_image("a boat", model="small", **QUICK)
    finally:
        assert service.stop() == 0
    # Its log is whole only now.
    escape = re.compile(r'tries to escape place="?\w+"? what="([^"]+)" outcome=(.+)')
    told = (escape.search(line) for line in service.log)
    return {match[1]: match[2].strip() for match in told if match}


@needs_landlock
def test_a_compromised_worker_is_refused_everything(secrets: Secrets) -> None:
    found = outcomes_of_a_takeover(secrets, "always")
    for secret in secrets.files:
        assert found[f"read {secret}"] == "refused", secret
        assert found[f"change who may read {secret}"] == "refused", secret
    assert found[f"write into {secrets.models}"] == "refused"
    assert {what: found[what] for what in ALWAYS_TRIED} == dict.fromkeys(ALWAYS_TRIED, "refused")
    succeeded = [what for what, outcome in found.items() if outcome == "succeeded"]
    assert not succeeded


def test_the_same_tries_succeed_where_workers_are_not_confined(secrets: Secrets) -> None:
    found = outcomes_of_a_takeover(secrets, "never")
    for what in ALWAYS_TRIED:
        if what == "read /etc/shadow" and os.geteuid() != 0:
            continue
        if "memory" in what or "variables" in what or "descriptors" in what:
            continue  # the system may keep processes of one user from each other by itself
        assert found[what] == "succeeded", what
    for secret in secrets.files:
        assert found[f"read {secret}"] == "succeeded", secret


@needs_landlock
def test_doctor_says_what_holds(secrets: Secrets) -> None:
    def finding(confine: str) -> dict[str, Any]:
        done = run(
            "doctor",
            "--json",
            *secrets.arguments,
            *("--set", f"service.confine_workers={confine}"),
            *("--set", f"service.state={secrets.state}"),
            *("--set", "cards.devices=sim:24GiB"),
            *("--endpoint", "http://127.0.0.1:1"),
        )
        findings = [json.loads(line) for line in done.stdout.splitlines()]
        (workers,) = [found for found in findings if found.get("check") == "workers"]
        return workers

    confined = finding("auto")
    assert confined["well"], confined
    assert "Landlock" in confined["found"]
    assert "tries were refused" in confined["found"]
    outcomes = {tried["what"]: tried["outcome"] for tried in confined["tried"]}
    assert outcomes[f"read {secrets.state}"] == "refused"
    assert outcomes["run a program"] == "refused"
    free = finding("never")
    assert free["well"]
    assert free["found"].startswith("not confined")
    outcomes = {tried["what"]: tried["outcome"] for tried in free["tried"]}
    assert outcomes["run a program"] == "succeeded"


def test_every_thread_of_a_worker_is_confined(
    demo_service: Service, demo_client: moored.Client
) -> None:
    """A real model has been run by it, and its threads compute."""
    demo_client.generate_image("a red circle", **QUICK)
    threads = threads_of(worker_pid(demo_client))
    for thread in threads:
        assert thread["Seccomp"] == "2", thread["Name"]
        assert thread["NoNewPrivs"] == "1", thread["Name"]
    assert len(threads) > 3


def test_what_a_service_inherits_does_not_reach_its_workers(
    secrets: Secrets, tmp_path: Path
) -> None:
    left_open = os.open(secrets.token, os.O_RDONLY)
    os.set_inheritable(left_open, True)
    environment = clean_environment() | {"HF_TOKEN": "a-token-of-a-hub", "AWS_SECRET": "a-key"}
    command = [
        str(BINARY),
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--end-with-stdin",
        "--device",
        "sim:24GiB",
    ]
    process = subprocess.Popen(
        [*command, "--state", str(secrets.state), *secrets.arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        close_fds=False,
    )
    try:
        assert process.stderr is not None
        listening = (re.search(r"is listening address=(\S+)", line) for line in process.stderr)
        (address,) = [next(found for found in listening if found)[1]]
        with moored.Client(address) as client:
            client.wait_until_ready(60)
            worker = worker_pid(client)
        assert str(secrets.token) in open_files_of(process.pid), "the test leaves nothing open"
        open_files = open_files_of(worker)
        others = [
            file for file in open_files if not file.startswith(("pipe:", "/proc/", "anon_inode:"))
        ]
        assert others == [], open_files
        variables = Path(f"/proc/{worker}/environ").read_bytes()
        assert b"a-token-of-a-hub" not in variables
        assert b"a-key" not in variables
    finally:
        os.close(left_open)
        process.kill()
        process.wait(10)


@pytest.fixture
def copy_of_a_model(tmp_path: Path) -> Path:
    """A model whose files are read, outside of every configured folder."""
    folder = tmp_path / "elsewhere" / "mine"
    left_out = shutil.ignore_patterns("expected")
    shutil.copytree(ROOT / "service/pipelines/fixtures/flux-tiny", folder, ignore=left_out)
    return folder


@pytest.fixture
def empty(simulate: Simulate, tmp_path: Path) -> Iterator[tuple[Service, Path]]:
    """A service whose folder of models is not there yet, and that folder."""
    models = tmp_path / "models"
    service = simulate(arguments=("--models", str(models), "--set", "service.confine_workers=auto"))
    yield service, models


def test_a_folder_of_models_that_is_made_later_is_read(
    empty: tuple[Service, Path], copy_of_a_model: Path
) -> None:
    service, models = empty
    with service.client() as client:
        client.generate_image("a boat", model="small", **QUICK)
        before = worker_pid(client)
        shutil.copytree(copy_of_a_model, models / "mine")
        client.generate_image("a boat", model="mine", **QUICK)
        if landlock() >= 1:
            assert worker_pid(client) != before, "the worker could read it all along"


def test_a_model_that_is_a_link_to_another_folder_is_read(
    empty: tuple[Service, Path], copy_of_a_model: Path
) -> None:
    service, models = empty
    models.mkdir()
    (models / "mine").symlink_to(copy_of_a_model)
    with service.client() as client:
        client.generate_image("a boat", model="mine", **QUICK)
        worker = worker_pid(client)
        client.unload()
        client.generate_image("a boat", model="mine", **QUICK)
        assert worker_pid(client) == worker, "it is started again once"


@needs_landlock
def test_a_link_in_a_model_opens_no_other_folder_to_its_worker(
    empty: tuple[Service, Path], copy_of_a_model: Path
) -> None:
    """Whoever made the model made them, perhaps to a key of the user."""
    service, models = empty
    weights = Path("transformer/diffusion_pytorch_model.safetensors")
    shutil.copytree(copy_of_a_model, models / "mine")
    (models / "mine" / weights).unlink()
    (models / "mine" / weights).symlink_to(copy_of_a_model / weights)
    with service.client() as client:
        with pytest.raises(moored.MooredError, match="ermission denied"):
            client.generate_image("a boat", model="mine", **QUICK)
        service.wait_for_log(lambda: any("lead out of the folders" in line for line in service.log))


def test_all_that_a_service_keeps_is_its_owners_alone_whatever_the_umask(secrets: Secrets) -> None:
    own_certificate = ("--set", "service.own_certificate=true")
    kept = ("--set", f"quantization.keep_folder={secrets.state / 'kept'}")
    token_file = ("--set", f"service.token_file={secrets.token}")
    token = secrets.token.read_text(encoding="utf-8").strip()
    before = os.umask(0)
    try:
        good(run("token", "make", "me", "--set", f"service.state={secrets.state}"))
        assert Service(*token_file, *own_certificate, state=secrets.state).stop() == 0
        service = Service(*token_file, *kept, state=secrets.state)
    finally:
        os.umask(before)
    try:
        with service.client(token=token) as client:
            model = moored.ModelRef("moored/demo", quantization="8-bit")
            client.generate_image("a red circle", model=model, **QUICK)
    finally:
        assert service.stop() == 0
    names = {path.name for path in secrets.state.rglob("*")}
    assert {"tokens.json", "certificate-key.pem", "identities.json", "kept"} <= names
    of_state = [secrets.state, *secrets.state.rglob("*")]
    open_to_others = [str(path) for path in of_state if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others == []
    assert secrets.state.parent.stat().st_mode & 0o022 == 0, (
        "others could exchange the whole folder"
    )
