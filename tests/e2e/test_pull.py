"""Pulls from a stand-in of a hub that serves the shipped model: a model is complete or absent."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from http2 import Http2, message
from hub import Hub, Repository, files_of, git_blob, is_large, sha256
from test_stored_formats import GgufKind, in_bfl_names, read_safetensors, write_gguf
from waiting import wait_until

from service import BINARY, ROOT, Service, run, run_with_a_full_disk

MODEL = "me/mine"
RIGHT = "hf_secret"
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
T5 = "text_encoder_2/model.safetensors"
QUICK: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 3}
DECOYS = {
    "README.md": b"# Mine",
    "flux1-dev.safetensors": b"the same weights, again",
    "safety_checker/model.safetensors": b"none of ours",
    "text_encoder/model.fp16.safetensors": b"half of it",
    "text_encoder/pytorch_model.bin": b"in another format",
    "vae/diffusion_pytorch_model.fp16.safetensors": b"half of it",
    "transformer/model.onnx": b"for another program",
}
"""What repositories hold beside the pipeline."""
WAIT_S = 30


@pytest.fixture(scope="module")
def shipped() -> dict[str, bytes]:
    return files_of(ROOT / "demo/model")


@pytest.fixture
def hub(shipped: dict[str, bytes]) -> Iterator[Hub]:
    with Hub() as hub:
        hub.repositories[MODEL] = Repository(shipped | DECOYS)
        yield hub


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME; the hub cache is `hub` in it."""
    return tmp_path / "home"


@pytest.fixture
def pull(hub: Hub, home: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`moored pull --json`, with more of its environment by name."""

    def pull(model: str = MODEL, **environment: str) -> subprocess.CompletedProcess[str]:
        return run("pull", model, "--json", env=hub.environment(home, **environment))

    return pull


Pull = Callable[..., "subprocess.CompletedProcess[str]"]
Serve = Callable[..., Service]


@pytest.fixture
def serve(hub: Hub, home: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a service that has this hub and its cache."""
    started: list[Service] = []

    def start(*arguments: str, **environment: str) -> Service:
        state = tmp_path / f"state-{len(started)}"
        env = hub.environment(home, **environment)
        service = Service(*arguments, state=state, environment=env)
        started.append(service)
        return service

    yield start
    for service in started:
        service.kill()


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last event that a command printed."""
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def pulled(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    return told(done)


def failed(done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Reason and message of a pull that failed."""
    said = told(done)
    codes = {"INVALID_REQUEST": 2, "DISK_FULL": 8}
    assert done.returncode == codes.get(said["reason"], 5), done.stdout + done.stderr
    assert said["event"] == "failed"
    return said["reason"], said["message"]


def cache_of(home: Path) -> Path:
    return home / "hub/models--me--mine"


def snapshot_of(home: Path, commit: str) -> dict[str, bytes]:
    return files_of(cache_of(home) / "snapshots" / commit)


def incomplete(home: Path) -> list[Path]:
    return list((cache_of(home) / "blobs").glob("*.incomplete"))


def same_picture(ours: moored.ImageResult, theirs: moored.ImageResult) -> bool:
    return bool(np.array_equal(ours.pictures[0].array, theirs.pictures[0].array))


# What is there afterwards.


def test_a_pulled_model_generates_without_a_restart(
    hub: Hub, serve: Serve, pull: Pull, demo_client: moored.Client
) -> None:
    with serve().client() as client:
        with pytest.raises(moored.ModelNotFound, match=r"`moored pull me/mine`$") as missing:
            client.generate_image("a red cube", model=MODEL, **QUICK)
        assert missing.value.metadata == {"model": MODEL}
        assert MODEL not in {model.id for model in client.list_models()}
        pulled(pull())
        ours = client.generate_image("a red cube", model=MODEL, **QUICK)
        assert ours.model.revision == hub.repositories[MODEL].revisions["main"]
        assert same_picture(ours, demo_client.generate_image("a red cube", **QUICK))


def test_the_cache_has_the_layout_of_other_programs(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes]
) -> None:
    done = pulled(pull())
    commit = hub.repositories[MODEL].revisions["main"]
    size = sum(len(content) for content in shipped.values())
    assert (done["event"], done["id"], done["revision"]) == ("pulled", MODEL, commit)
    assert (done["bytes_total"], done["bytes_fetched"]) == (size, size)
    snapshot = cache_of(home) / "snapshots" / commit
    assert done["path"] == str(snapshot)
    assert snapshot_of(home, commit) == shipped, "the pipeline, and no decoy"
    assert (cache_of(home) / "refs/main").read_text() == commit
    for path, content in shipped.items():
        link = os.readlink(snapshot / path)
        up = "../" * (path.count("/") + 2)
        assert link == f"{up}blobs/{sha256(content) if is_large(path) else git_blob(content)}"
    assert incomplete(home) == []
    assert not any(hub.fetched(path) for path in DECOYS)


def test_a_second_pull_fetches_nothing(hub: Hub, pull: Pull, home: Path) -> None:
    pulled(pull())
    before = len(hub.requests)
    again = pulled(pull())
    assert again["bytes_fetched"] == 0
    asked = {one.path for one in hub.requests[before:]}
    assert not any(is_large(path) for path in asked), asked
    # A file that is gone comes again, alone.
    blob = (cache_of(home) / "snapshots" / again["revision"] / VAE).resolve()
    size = blob.stat().st_size
    blob.unlink()
    assert pulled(pull())["bytes_fetched"] == size


@pytest.mark.parametrize("revision", ["beta", "pr/1", "commit"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(
    hub: Hub, home: Path, pull: Pull, serve: Serve, revision: str
) -> None:
    commits = hub.repositories[MODEL].revisions
    commits["beta"] = hashlib.sha1(b"beta").hexdigest()
    commits["pr/1"] = commits["commit"] = hashlib.sha1(b"pr").hexdigest()
    asked = commits["commit"] if revision == "commit" else revision
    assert pulled(pull(f"{MODEL}@{asked}"))["revision"] == commits[revision]
    refs = cache_of(home) / "refs"
    if revision == "commit":
        assert not refs.exists()
    else:
        assert (refs / revision).read_text() == commits[revision]
    with serve().client() as client:
        result = client.load(moored.ModelRef(MODEL, revision=asked), components=["vae"])
        assert result.model.revision == commits[revision]


def test_contents_of_another_revision_are_not_fetched_again(hub: Hub, pull: Pull) -> None:
    hub.repositories[MODEL].revisions["beta"] = hashlib.sha1(b"beta").hexdigest()
    pulled(pull())
    assert pulled(pull(f"{MODEL}@beta"))["bytes_fetched"] == 0


def test_a_branch_that_has_not_moved_is_not_written_again(home: Path, pull: Pull) -> None:
    commit = pulled(pull())["revision"]
    branch = cache_of(home) / "refs/main"
    branch.write_text(f"{commit}\n")
    pulled(pull())
    assert branch.read_text() == f"{commit}\n", "others may be reading it, or nobody may write it"


def test_in_a_pipe_a_pull_prints_lines_and_at_last_the_path(hub: Hub, home: Path) -> None:
    done = run("pull", MODEL, env=hub.environment(home))
    assert done.returncode == 0
    assert done.stdout.strip().endswith(hub.repositories[MODEL].revisions["main"])
    assert Path(done.stdout.strip()).is_dir()
    assert "15.8 MB" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


def test_in_a_terminal_a_pull_draws_its_progress(hub: Hub, home: Path) -> None:
    mine, theirs = pty.openpty()
    hub.stall(TRANSFORMER, 5_000_000)
    command, env = [str(BINARY), "pull", MODEL], hub.environment(home, TERM="xterm")
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = read_until(mine, "10.35 MB/15.84 MB")
        assert "10.35 MB/15.84 MB" in shown, shown
        hub.released.set()
        shown += read_until(mine, None)
        assert process.wait(WAIT_S) == 0
    os.close(mine)
    assert f"{MODEL} at " in shown


# Cuts.


def test_a_download_that_was_cut_is_resumed(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes]
) -> None:
    for at in (4_000_000, 9_000_001):
        hub.cut(TRANSFORMER, at)
    hub.cut("tokenizer/vocab.json", 5_000)
    done = pulled(pull())
    assert [(one.start, one.sent) for one in hub.fetched(TRANSFORMER)] == [
        (0, 4_000_000),
        (4_000_000, 5_000_001),
        (9_000_001, len(shipped[TRANSFORMER]) - 9_000_001),
    ]
    assert done["bytes_fetched"] == done["bytes_total"], "no byte came twice"
    assert snapshot_of(home, done["revision"]) == shipped


def test_a_download_is_resumed_after_a_connection_reset(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes]
) -> None:
    hub.cut(TRANSFORMER, 6_000_000, reset=True)
    done = pulled(pull())
    _, resumed = hub.fetched(TRANSFORMER)
    assert 0 < resumed.start <= 6_000_000
    assert snapshot_of(home, done["revision"]) == shipped


def test_a_download_without_progress_fails_and_keeps_its_partial_file(
    hub: Hub, home: Path, pull: Pull
) -> None:
    hub.limit(TRANSFORMER, 3_000_001)
    reason, message = failed(pull())
    assert reason == "PULL_FAILED"
    assert TRANSFORMER in message
    assert "resumes where this one ended" in message
    assert any(path.stat().st_size == 3_000_001 for path in incomplete(home))
    assert not (cache_of(home) / "snapshots").exists(), "half a model is none"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_pull_is_resumed(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes], how: signal.Signals
) -> None:
    stall = 5_000_000
    hub.stall(TRANSFORMER, stall)
    command = [str(BINARY), "pull", MODEL, "--json"]
    env = hub.environment(home)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        small = sum(len(content) for content in shipped.values()) - len(shipped[TRANSFORMER])
        for line in process.stdout:
            if json.loads(line).get("bytes_done", 0) >= small + stall:
                break
        # The bytes of the small files came before; each is whole once it has its name.
        wait_until(lambda: len(incomplete(home)) == 1, "the small files are whole")
        process.send_signal(how)
        rest = process.stdout.read()
    if how != signal.SIGKILL:
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[how]
        assert f"moored pull {MODEL}" in json.loads(rest.splitlines()[-1])["message"]
    hub.released.set()
    done = pulled(pull())
    _, resumed = hub.fetched(TRANSFORMER)
    # What came last was in memory.
    assert stall - (300 << 10) <= resumed.start <= stall
    assert done["bytes_fetched"] == len(shipped[TRANSFORMER]) - resumed.start
    assert snapshot_of(home, done["revision"]) == shipped


def test_two_pulls_at_once_download_each_byte_once(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes]
) -> None:
    results: list[dict[str, Any]] = []
    hub.stall(TRANSFORMER, 2_000_000)
    threads = [threading.Thread(target=lambda: results.append(pulled(pull()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert hub.stalled.wait(WAIT_S)
    # Both have listed by then what they lack.
    until = time.monotonic() + WAIT_S
    while sum("/revision/" in one.path for one in hub.requests) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    hub.released.set()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    total = sum(len(content) for content in shipped.values())
    assert sum(one["bytes_fetched"] for one in results) == total
    assert snapshot_of(home, results[0]["revision"]) == shipped
    assert incomplete(home) == []


# Contents that are not what they should be.


def test_a_file_with_a_wrong_checksum_is_discarded(hub: Hub, home: Path, pull: Pull) -> None:
    hub.corrupt(VAE, 100)
    reason, message = failed(pull())
    assert reason == "PULL_FAILED"
    assert VAE in message
    assert "checksum" in message
    assert len(hub.fetched(VAE)) == 2, "twice, from the start"
    blobs = {path.name for path in (cache_of(home) / "blobs").iterdir()}
    assert not any(name.startswith(sha256(hub.repositories[MODEL].files[VAE])) for name in blobs)
    assert not (cache_of(home) / "snapshots").exists()


@pytest.mark.parametrize("path", [VAE, "model_index.json"])
def test_a_damaged_partial_file_is_downloaded_again(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes], path: str
) -> None:
    content = shipped[path]
    oid = sha256(content) if is_large(path) else git_blob(content)
    blobs = cache_of(home) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{oid}.incomplete").write_bytes(b"x" * 100)
    done = pulled(pull())
    assert snapshot_of(home, done["revision"]) == shipped
    starts = [one.start for one in hub.fetched(path)]
    assert starts[-2:] == [100, 0]


# What the hub refuses.


def locked(hub: Hub) -> None:
    repository = hub.repositories[MODEL]
    hub.tokens = {RIGHT, "hf_stranger"}
    repository.gated, repository.accepted = True, {RIGHT}


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("", ["gated", "accept its terms", "hf auth login"]),
        ("hf_stranger", ["gated", "account that accepted"]),
        ("hf_wrong", ["refuses the token"]),
    ],
)
def test_the_error_of_a_gated_model_has_a_remedy(
    hub: Hub, pull: Pull, token: str, says: list[str]
) -> None:
    locked(hub)
    done = pull(HF_TOKEN=token)
    reason, message = failed(done)
    assert reason == "PULL_FAILED"
    assert all(word in message for word in says), message
    assert not token or token not in done.stdout + done.stderr


def test_the_token_is_sent_to_the_hub_alone(hub: Hub, home: Path, pull: Pull) -> None:
    locked(hub)
    home.mkdir()
    (home / "token").write_text(f"{RIGHT}\n")  # as a login leaves it
    done = pull(MOORED_LOG_FILTER="trace,hyper=trace,hyper_util=trace,reqwest=trace,rustls=trace")
    assert "TRACE" in done.stderr
    assert done.returncode == 0
    assert RIGHT not in done.stdout + done.stderr
    assert {one.token for one in hub.requests if one.server == "hub"} == {RIGHT}
    assert {one.token for one in hub.requests if one.server == "store"} == {""}


def test_a_private_model_needs_a_token(hub: Hub, pull: Pull) -> None:
    hub.tokens, hub.repositories[MODEL].private = {RIGHT}, True
    _, message = failed(pull())
    assert "without a token" in message
    assert "HF_TOKEN" in message
    pulled(pull(HF_TOKEN=RIGHT))


@pytest.mark.parametrize(
    ("model", "reason", "says"),
    [
        ("me/other", "PULL_FAILED", "no model me/other"),
        (f"{MODEL}@nowhere", "PULL_FAILED", "no revision nowhere"),
        ("mine", "INVALID_REQUEST", "OWNER/NAME"),
        ("me/../../etc", "INVALID_REQUEST", "OWNER/NAME"),
    ],
)
def test_a_missing_model_or_revision_is_named(
    pull: Pull, model: str, reason: str, says: str
) -> None:
    told, message = failed(pull(model))
    assert told == reason
    assert says in message


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"flux1-dev-Q4_0.gguf": b"GGUF"}, "moored pull me/mine:flux1-dev-Q4_0.gguf"),
        ({"config.json": b"{}"}, "no model_index.json"),
        ({"model_index.json": b'{"_class_name": "OtherPipeline"}'}, "is a OtherPipeline"),
        ({"model_index.json": b'{"_class_name": "FluxPipeline"}'}, "scheduler is missing"),
    ],
)
def test_a_repository_that_is_no_pipeline_is_not_downloaded(
    hub: Hub, home: Path, pull: Pull, files: dict[str, bytes], says: str
) -> None:
    hub.repositories[MODEL] = Repository(files)
    reason, message = failed(pull())
    assert reason == "MODEL_UNSUPPORTED"
    assert says in message
    assert not cache_of(home).exists()


def test_a_repository_without_some_weights_is_not_downloaded(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes]
) -> None:
    hub.repositories[MODEL] = Repository({p: c for p, c in shipped.items() if p != VAE})
    _, message = failed(pull())
    assert "the weights of vae" in message
    assert not cache_of(home).exists()


@pytest.mark.parametrize(
    "name",
    [
        "vae/\x1b[31mred.json",
        "vae/nul\0.json",
        "vae/..\\up.json",
        "vae/$(reboot).json",
        f"vae/{'x' * 300}.json",
        "vae/../../../../up.json",
        "/vae/up.json",
    ],
)
def test_files_with_unsafe_names_are_not_downloaded(
    hub: Hub, home: Path, pull: Pull, shipped: dict[str, bytes], name: str
) -> None:
    hub.repositories[MODEL].files[name] = b"{}"
    assert snapshot_of(home, pulled(pull())["revision"]) == shipped


def test_messages_of_the_hub_are_shown_without_control_characters_and_cut(
    hub: Hub, serve: Serve, pull: Pull
) -> None:
    index = json.dumps({"_class_name": "\x1b[31mred" + "x" * 100_000}).encode()
    hub.repositories[MODEL] = Repository({"model_index.json": index})
    _, message = failed(pull())
    assert "red" in message
    assert "\x1b" not in message
    assert len(message) < 1000
    with serve().client() as client, pytest.raises(moored.ModelUnsupported, match="red"):
        client.pull_model(MODEL)


def test_a_hub_without_checksums_is_refused(hub: Hub, pull: Pull) -> None:
    hub.lists_sizes = False
    _, message = failed(pull())
    assert "sizes and checksums" in message


def test_a_token_that_cannot_be_sent_is_reported(hub: Hub, pull: Pull) -> None:
    _, message = failed(pull(HF_TOKEN="hf_caf\ne"))
    assert "HF_TOKEN" in message
    assert "caf" not in message
    assert hub.requests == []


def test_an_unreachable_hub_is_named(pull: Pull) -> None:
    reason, message = failed(pull(HF_ENDPOINT="http://127.0.0.1:9"))
    assert reason == "PULL_FAILED"
    assert "http://127.0.0.1:9 cannot be reached" in message
    assert "HF_ENDPOINT" in message


@pytest.mark.parametrize(
    ("changes", "well", "words"),
    [
        ({}, True, "answers; gated models need HF_TOKEN"),
        ({"HF_TOKEN": RIGHT}, True, "answers and accepts the token"),
        ({"HF_TOKEN": "hf_expired"}, False, "refuses the token"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, True, "cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, True, "is not asked: HF_HUB_OFFLINE is set"),
    ],
    ids=["anonymous", "right token", "wrong token", "no hub", "offline"],
)
def test_doctor_asks_the_hub(
    hub: Hub, home: Path, tmp_path: Path, changes: dict[str, str], well: bool, words: str
) -> None:
    hub.tokens = {RIGHT}
    state = f"service.state={tmp_path / 'state'}"
    examined = run("doctor", "--json", "--set", state, env=hub.environment(home, **changes))
    findings = [json.loads(line) for line in examined.stdout.splitlines()]
    [finding] = [finding for finding in findings if finding.get("check") == "hub"]
    assert finding["well"] is well
    assert examined.returncode == (0 if well else 1)
    assert words in finding["found"]


def test_disk_space_is_checked_before_the_first_byte(hub: Hub, home: Path, pull: Pull) -> None:
    hub.announce(TRANSFORMER, 1 << 50)
    reason, message = failed(pull())
    assert reason == "DISK_FULL"
    assert "are free" in message
    assert str(home) in message
    assert not any(one.sent for one in hub.requests if one.server == "store")


def test_a_disk_that_fills_during_a_pull_is_told_and_the_pull_goes_on_later(
    hub: Hub, home: Path
) -> None:
    """Not even the first bytes can be written, though the disk said that it has room."""
    environment = hub.environment(home)
    refused = run_with_a_full_disk("pull", MODEL, "--json", most_bytes=4096, env=environment)
    reason, message = failed(refused)
    assert reason == "PULL_FAILED"
    assert str(cache_of(home)) in message, "who pulls is told where"
    assert "too large" in message, message
    assert not (cache_of(home) / "refs" / "main").exists(), "nothing names what is not whole"
    pulled(run("pull", MODEL, "--json", env=environment))


def test_a_sum_of_sizes_that_overflows_is_refused_as_a_full_disk(hub: Hub, pull: Pull) -> None:
    for path in (TRANSFORMER, VAE):
        hub.announce(path, (1 << 64) - 1)
    reason, _ = failed(pull())
    assert reason == "DISK_FULL"


# Offline.


def test_offline_names_missing_files(hub: Hub, home: Path, pull: Pull) -> None:
    _, message = failed(pull(HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE" in message
    assert "all of it is missing" in message
    assert "unset it" in message, "what to do is told"
    assert hub.requests == []
    commit = pulled(pull())["revision"]
    before = len(hub.requests)
    here = pulled(pull(HF_HUB_OFFLINE="1"))
    assert (here["revision"], here["bytes_fetched"]) == (commit, 0)
    (cache_of(home) / "snapshots" / commit / T5).unlink()
    _, message = failed(pull(HF_HUB_OFFLINE="1"))
    assert "the weights of text_encoder_2" in message
    assert len(hub.requests) == before


# Through the service.


def test_the_service_pulls_for_its_clients(
    hub: Hub, serve: Serve, shipped: dict[str, bytes]
) -> None:
    size = sum(len(content) for content in shipped.values())
    with serve().client() as client:
        assert "pull" in client.server_info().capabilities
        plan = client.plan_pull(MODEL)
        assert (plan.bytes_total, plan.bytes_missing, plan.files_total) == (
            size,
            size,
            len(shipped),
        )
        with client.stream_pull(MODEL) as stream:
            seen = list(stream)
            done = stream.result()
        assert (done.id, done.bytes_fetched) == (MODEL, size)
        assert done.revision == plan.revision == hub.repositories[MODEL].revisions["main"]
        assert [one.bytes_done for one in seen] == sorted(one.bytes_done for one in seen)
        assert client.plan_pull(MODEL).bytes_missing == 0
        assert MODEL in {model.id for model in client.list_models()}
        assert client.generate_image("a red cube", model=MODEL, **QUICK).pictures


def test_an_offline_service_plans_a_pull_of_what_it_has(
    hub: Hub, serve: Serve, pull: Pull, shipped: dict[str, bytes]
) -> None:
    commit = pulled(pull())["revision"]
    before = len(hub.requests)
    with serve(HF_HUB_OFFLINE="1").client() as client:
        plan = client.plan_pull(MODEL)
    assert (plan.revision, plan.files_total, plan.bytes_missing) == (commit, len(shipped), 0)
    assert plan.bytes_total == sum(len(content) for content in shipped.values())
    assert len(hub.requests) == before


def test_two_clients_share_a_pull_and_one_may_leave(hub: Hub, serve: Serve) -> None:
    hub.stall(TRANSFORMER, 2_000_000)
    service = serve()
    with service.client() as one, service.client() as other:
        first, second = one.stream_pull(MODEL), other.stream_pull(MODEL)
        next(first)
        next(second)
        assert hub.stalled.wait(WAIT_S)
        first.close()
        one.server_info()  # goes the same way, after the farewell
        assert not hub.left.is_set()
        hub.released.set()
        done = second.result()
        assert done.bytes_fetched == done.bytes_total
        assert [one.start for one in hub.fetched(TRANSFORMER)] == [0]


def test_a_pull_ends_with_its_last_listener(
    hub: Hub, home: Path, serve: Serve, shipped: dict[str, bytes]
) -> None:
    hub.stall(TRANSFORMER, 6_000_000)
    with serve().client() as client:
        with client.stream_pull(MODEL) as stream:
            rest = sum(len(content) for content in shipped.values()) - len(shipped[TRANSFORMER])
            assert any(one.bytes_done >= rest + 6_000_000 for one in stream)
        assert hub.left.wait(WAIT_S), "the service let go of the connection"
        assert not (cache_of(home) / "snapshots").exists()
        hub.released.set()
        done = client.pull_model(MODEL)
        assert 0 < done.bytes_fetched < len(shipped[TRANSFORMER]) - 5_000_000


def test_a_client_that_pulls_many_models_leaves_places_to_others(hub: Hub, serve: Serve) -> None:
    models = [f"me/number-{number}" for number in range(7)]
    for model in models:
        hub.repositories[model] = hub.repositories[MODEL]
    hub.stall(TRANSFORMER, 2_000_000)

    def listed() -> int:
        return sum("/api/models/me/number-" in one.path for one in hub.requests)

    def wait_for(count: int) -> None:
        until = time.monotonic() + WAIT_S
        while listed() < count and time.monotonic() < until:
            time.sleep(0.01)

    service = serve()
    with service.client() as client:
        streams = [client.stream_pull(model) for model in models[:6]]
        for stream in streams:
            next(stream)
        assert hub.stalled.wait(WAIT_S)
        wait_for(2)
        client.plan_pull(MODEL)  # whoever was to ask the hub has done so by now
        assert listed() == 2, "half of the places"
        other = Http2(service.address, source="127.0.0.9")
        name = models[6].encode()
        pull = other.call("Hub/PullModel")
        other.write(pull, message(b"\x0a" + bytes([len(name)]) + name), end=True)
        wait_for(3)
        assert listed() == 3, "of another address"
        hub.released.set()
        assert {stream.result().id for stream in streams} == set(models[:6])


def test_errors_of_a_pull_reach_the_client_typed(hub: Hub, serve: Serve) -> None:
    with serve().client() as client:
        with pytest.raises(moored.PullFailed, match="no model me/other"):
            client.pull_model("me/other")
        with pytest.raises(moored.InvalidRequest, match="OWNER/NAME"):
            client.pull_model("../etc")
        hub.announce(TRANSFORMER, 1 << 50)
        with pytest.raises(moored.DiskFull):
            client.pull_model(MODEL)
        hub.repositories["me/gguf"] = Repository({"a.gguf": b"GGUF"})
        with pytest.raises(moored.ModelUnsupported, match=r"a\.gguf"):
            client.pull_model("me/gguf")


def test_a_service_without_hub_pull_refuses_pulls(hub: Hub, serve: Serve) -> None:
    with serve("--set", "hub.pull=false").client() as client:
        assert "pull" not in client.server_info().capabilities
        for call in (client.pull_model, client.plan_pull):
            with pytest.raises(moored.PullFailed, match=r"hub\.pull.*`moored pull me/mine`"):
                call(MODEL)
    assert hub.requests == []


def test_a_service_that_stops_ends_its_pulls(hub: Hub, serve: Serve) -> None:
    hub.stall(TRANSFORMER, 2_000_000)
    service = serve()
    with service.client() as client, client.stream_pull(MODEL) as stream:
        next(stream)
        assert hub.stalled.wait(WAIT_S)
        assert service.stop() == 0
        with pytest.raises((moored.ShuttingDown, moored.ConnectionFailed)):
            stream.result()


# When a model is missing.


def test_generate_and_load_pull_on_request(hub: Hub, serve: Serve, tmp_path: Path) -> None:
    service = serve()
    picture = tmp_path / "a.png"
    arguments = ("generate", "a red cube", "-m", f"{MODEL}+8-bit", "-o", str(picture))
    arguments += ("-W", "64", "-H", "64", "--steps", "1")
    refused = service.run(*arguments)
    assert refused.returncode == 5
    assert f"`moored pull {MODEL}`" in refused.stderr
    assert not any(one.sent for one in hub.requests)
    done = service.run(*arguments, "--pull")
    assert done.returncode == 0, done.stderr
    assert picture.is_file()
    assert f"{MODEL} at " in done.stderr
    hub.repositories["me/second"] = hub.repositories[MODEL]
    hub.repositories["me/second"].revisions["beta"] = hashlib.sha1(b"beta").hexdigest()
    loaded = service.run("load", "me/second@beta", "--component", "vae", "--pull")
    assert loaded.returncode == 0, loaded.stderr
    # What `load` is to replace is not what it is asked to bring.
    before = len(hub.requests)
    refused = service.run("load", MODEL, "--replace", "me/third", "--pull")
    assert refused.returncode == 5
    assert "no model me/third" in refused.stderr
    assert len(hub.requests) == before


def test_an_incomplete_model_of_another_program_can_be_pulled(
    hub: Hub, home: Path, serve: Serve, shipped: dict[str, bytes], tmp_path: Path
) -> None:
    commit = hub.repositories[MODEL].revisions["main"]
    half = cache_of(home) / "snapshots" / commit
    half.mkdir(parents=True)
    (half / "model_index.json").write_bytes(shipped["model_index.json"])
    service = serve()
    with service.client() as client:
        assert MODEL not in {model.id for model in client.list_models()}
    picture = tmp_path / "a.png"
    size = ("-W", "64", "-H", "64", "--steps", "1")
    done = service.run("generate", "a cube", "-m", MODEL, *size, "-o", str(picture), "--pull")
    assert done.returncode == 0, done.stderr
    assert picture.is_file()


@pytest.mark.parametrize(("answer", "expected"), [("y\n", 0), ("\n", 5), ("no\n", 5)])
def test_in_a_terminal_generate_asks(
    hub: Hub, home: Path, serve: Serve, tmp_path: Path, answer: str, expected: int
) -> None:
    service = serve()
    env = hub.environment(home, TERM="xterm")
    mine, theirs = pty.openpty()
    command = [str(BINARY), "generate", "a red cube", "-m", MODEL, "-o", str(tmp_path / "a.png")]
    command += ["-W", "64", "-H", "64", "--steps", "1", "--endpoint", service.address]
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = read_until(mine, "[y/N]")
        assert f"{MODEL} is not here: 15.8 MB to pull. Pull it? [y/N]" in shown
        assert not any(one.sent for one in hub.requests if one.server == "store")
        os.write(mine, answer.encode())
        shown += read_until(mine, None)
        assert process.wait(WAIT_S) == expected, shown
    os.close(mine)
    assert (tmp_path / "a.png").is_file() is (expected == 0)
    assert bool(hub.fetched(VAE)) is (expected == 0)


@pytest.mark.parametrize(
    ("answer", "expected", "is_removed"), [("y\n", 0, True), ("\n", 0, False), (None, 130, False)]
)
def test_in_a_terminal_rm_asks_and_ctrl_c_is_no(
    hub: Hub, home: Path, pull: Pull, answer: str | None, expected: int, is_removed: bool
) -> None:
    pulled(pull())
    env = hub.environment(home, TERM="xterm")
    mine, theirs = pty.openpty()
    command = [str(BINARY), "rm", MODEL]
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = read_until(mine, "[y/N]")
        if answer is None:
            process.send_signal(signal.SIGINT)
        else:
            os.write(mine, answer.encode())
        shown += read_until(mine, None)
        assert process.wait(WAIT_S) == expected, shown
    os.close(mine)
    assert cache_of(home).exists() is not is_removed


def read_until(terminal: int, wanted: str | None) -> str:
    """The output of a terminal up to a word; without one, until its program has ended."""
    shown, until = "", time.monotonic() + WAIT_S
    while (wanted is None or wanted not in shown) and time.monotonic() < until:
        if not select.select([terminal], [], [], 0.1)[0]:
            continue
        try:
            shown += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # nobody has the other end any more
            break
    return shown


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, home: Path, pull: Pull) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where a folder belongs")
    reason, message = failed(pull())
    assert reason == "PULL_FAILED"
    assert str(home) in message


def adapter_bytes() -> bytes:
    return (ROOT / "demo/adapters/circle-to-star.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("asked", "files", "id"),
    [
        (
            "me/star",
            {"pytorch_lora_weights.safetensors": None, "README.md": b"# A star"},
            "me/star",
        ),
        ("me/star", {"star.safetensors": None, "star.png": b"a picture"}, "me/star"),
        (
            "me/many:styles/star.safetensors",
            {"styles/star.safetensors": None, "b.safetensors": b"x"},
            "",
        ),
    ],
)
def test_an_adapter_is_pulled_and_used_by_its_repository(
    hub: Hub,
    pull: Pull,
    serve: Serve,
    asked: str,
    files: dict[str, bytes | None],
    id: str,
) -> None:
    repository, _, file = asked.partition(":")
    contents = {name: content or adapter_bytes() for name, content in files.items()}
    hub.repositories[repository] = Repository(contents)
    pulled = pull(asked)
    assert pulled.returncode == 0, pulled.stderr
    fetched = [name for name in files if hub.fetched(name)]
    assert fetched == [file or next(iter(files))], "nothing else"
    with serve().client() as client:
        ids = [adapter.id for adapter in client.list_adapters()]
        id = id or repository  # of a repository with one file here, its own
        assert id in ids
        assert repository not in [model.id for model in client.list_models()]
        circle = "a large red circle in the centre on a white background"
        options = {"model": "moored/demo", "seed": 1, "steps": 2}
        with_it = client.generate_image(circle, adapters=[id], **options).pictures[0].data
        assert with_it != client.generate_image(circle, **options).pictures[0].data


def test_a_file_that_a_repository_lacks_is_reported_with_those_that_it_has(
    hub: Hub, pull: Pull
) -> None:
    hub.repositories["me/many"] = Repository({"a.safetensors": b"x", "b.safetensors": b"y"})
    for asked, said in [
        ("me/many:c.safetensors", "it has a.safetensors, b.safetensors"),
        ("me/many", "moored pull me/many:a.safetensors"),
        ("me/many:../c.safetensors", "me/many:../c.safetensors"),
    ]:
        pulled = pull(asked)
        assert pulled.returncode != 0
        assert said in pulled.stdout + pulled.stderr, asked


QUANTS = "me/mine-gguf"


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The shipped model's transformer in GGUF, 8 bits."""
    folder = tmp_path_factory.mktemp("gguf")
    weights = in_bfl_names(read_safetensors(ROOT / "demo/model" / TRANSFORMER))
    write_gguf(folder / "a.gguf", weights, lambda _: GgufKind.Q8_0)
    return (folder / "a.gguf").read_bytes()


def base_files(files: dict[str, bytes]) -> set[str]:
    """The files of a pipeline that a transformer in a single file takes."""
    return {path for path in files if path != TRANSFORMER}


def fetched_files(hub: Hub, files: dict[str, bytes]) -> set[str]:
    return {path for path in files if hub.fetched(path)}


def test_a_transformer_in_gguf_is_pulled_with_what_it_lacks_and_generates(
    hub: Hub, pull: Pull, serve: Serve, home: Path, shipped: dict[str, bytes], gguf_bytes: bytes
) -> None:
    files = {"mine-Q8_0.gguf": gguf_bytes, "mine-Q4_0.gguf": b"GGUF of four bits"}
    hub.repositories[QUANTS] = Repository(files, card={"base_model": MODEL})
    id = f"{QUANTS}:mine-Q8_0.gguf"
    done = pulled(pull(id))
    assert done["id"] == id
    assert Path(done["path"]).read_bytes() == gguf_bytes
    assert fetched_files(hub, files) == {"mine-Q8_0.gguf"}
    assert fetched_files(hub, shipped) == base_files(shipped)
    with serve().client() as client:
        ids = [model.id for model in client.list_models()]
        assert id in ids
        assert MODEL not in ids, "it lacks its transformer"
        assert not [adapter.id for adapter in client.list_adapters() if QUANTS in adapter.id]
        picture = client.generate_image("a red circle", model=id, **QUICK).pictures[0]
        assert picture.data
    hub.requests.clear()
    pulled(pull())
    assert fetched_files(hub, shipped) == {TRANSFORMER, "model_index.json"}, "only the rest"


def test_a_smaller_form_of_a_model_has_a_short_name(
    hub: Hub, pull: Pull, serve: Serve, home: Path, shipped: dict[str, bytes], gguf_bytes: bytes
) -> None:
    file = "flux1-dev-Q4_K_S.gguf"
    hub.repositories["city96/FLUX.1-dev-gguf"] = Repository({file: gguf_bytes})  # it names no base
    hub.repositories["black-forest-labs/FLUX.1-dev"] = Repository(shipped)
    id = f"city96/FLUX.1-dev-gguf:{file}"
    assert pulled(pull("flux-dev:q4"))["id"] == id
    assert fetched_files(hub, shipped) == base_files(shipped)
    with serve().client() as client:
        picture = client.generate_image("a red circle", model="flux-dev:q4", **QUICK).pictures[0]
        assert (
            picture.data
            == client.generate_image("a red circle", model=id, **QUICK).pictures[0].data
        )
        with pytest.raises(moored.ModelNotFound):
            client.generate_image("a red circle", model="flux-dev", **QUICK)
    shown = run(
        "info", "flux-dev:q4", "--endpoint", "http://127.0.0.1:1", env=hub.environment(home)
    )
    assert id in shown.stdout
    assert "black-forest-labs/FLUX.1-dev" in shown.stdout


def test_a_service_pulls_one_file_for_its_clients(
    hub: Hub, serve: Serve, gguf_bytes: bytes
) -> None:
    hub.repositories[QUANTS] = Repository({"a.gguf": gguf_bytes}, card={"base_model": [MODEL]})
    with serve().client() as client:
        id = client.pull_model(f"{QUANTS}:a.gguf").id
        assert id == f"{QUANTS}:a.gguf"
        assert client.generate_image("a red circle", model=id, **QUICK).pictures[0].data


def test_a_transformer_in_safetensors_is_known_by_its_header(
    hub: Hub, pull: Pull, serve: Serve, shipped: dict[str, bytes]
) -> None:
    files = {"split/mine.safetensors": shipped[TRANSFORMER]}
    hub.repositories["me/parts"] = Repository(files, card={"base_model": MODEL})
    id = "me/parts:split/mine.safetensors"
    assert pulled(pull(id))["id"] == id
    assert base_files(shipped) <= fetched_files(hub, shipped)
    with serve().client() as client:
        assert id in [model.id for model in client.list_models()]
        assert "me/parts" not in [adapter.id for adapter in client.list_adapters()]


@pytest.mark.parametrize("card", [{}, {"base_model": "me/nothing"}, {"base_model": 3}])
def test_a_page_without_a_base_is_reported_and_the_base_is_found_when_it_is_there(
    hub: Hub, home: Path, serve: Serve, pull: Pull, gguf_bytes: bytes, card: dict[str, Any]
) -> None:
    hub.repositories[QUANTS] = Repository({"a.gguf": gguf_bytes}, card=card)
    id = f"{QUANTS}:a.gguf"
    in_a_pipe = run("pull", id, env=hub.environment(home))
    assert "names no pipeline" in in_a_pipe.stderr
    with serve().client() as client:
        problem = next(model for model in client.list_models() if model.id == id).problem
        assert "0 folders beside it" in problem
        pulled(pull())
        assert client.generate_image("a red circle", model=id, **QUICK).pictures[0].data


def test_a_gated_base_is_reported_before_anything_is_fetched(
    hub: Hub, pull: Pull, home: Path, gguf_bytes: bytes
) -> None:
    hub.repositories[QUANTS] = Repository({"a.gguf": gguf_bytes}, card={"base_model": MODEL})
    hub.repositories[MODEL].gated = True
    reason, message = failed(pull(f"{QUANTS}:a.gguf"))
    assert reason == "PULL_FAILED"
    assert MODEL in message
    assert "accept its terms" in message
    assert not hub.fetched("a.gguf")


def test_one_file_is_removed_alone(
    hub: Hub, pull: Pull, home: Path, gguf_bytes: bytes, shipped: dict[str, bytes]
) -> None:
    files = {"a.gguf": gguf_bytes, "b.gguf": gguf_bytes[:-1] + b"x"}
    hub.repositories[QUANTS] = Repository(files)
    first, second = (f"{QUANTS}:{name}" for name in files)
    for id in (first, second):
        pulled(pull(id))
    blobs = home / "hub/models--me--mine-gguf/blobs"
    assert len(list(blobs.iterdir())) == 2
    removed = run("rm", first, "--yes", "--json", env=hub.environment(home))
    assert json.loads(removed.stdout) == {"event": "removed", "id": first, "bytes": len(gguf_bytes)}
    assert [path.name for path in blobs.iterdir()] == [sha256(files["b.gguf"])]
    gone = run("rm", first, "--yes", env=hub.environment(home))
    assert gone.returncode != 0
    run("rm", second, "--yes", env=hub.environment(home))
    assert not blobs.parent.exists()


def test_files_in_deep_folders_are_models_and_are_removed_one_by_one(
    hub: Hub, pull: Pull, serve: Serve, home: Path, gguf_bytes: bytes
) -> None:
    files = {"x/y/one.gguf": gguf_bytes, "x/y/two.gguf": gguf_bytes[:-1] + b"x"}
    hub.repositories[QUANTS] = Repository(files)
    first, second = (f"{QUANTS}:{name}" for name in files)
    for id in (first, second):
        pulled(pull(id))
    outside = home / "outside.gguf"
    outside.write_bytes(gguf_bytes)
    linked = next((home / "hub/models--me--mine-gguf/snapshots").iterdir()) / "linked.gguf"
    linked.symlink_to(outside)
    run("rm", f"{QUANTS}:linked.gguf", "--yes", env=hub.environment(home))
    assert outside.exists()
    assert not linked.is_symlink()
    run("rm", first, "--yes", env=hub.environment(home))
    with serve().client() as client:
        ids = [model.id for model in client.list_models()]
        assert second in ids
        assert first not in ids


def test_a_file_beside_a_pipeline_is_a_model_of_its_own(
    hub: Hub, pull: Pull, serve: Serve, gguf_bytes: bytes
) -> None:
    hub.repositories[MODEL].files["mine-Q8_0.gguf"] = gguf_bytes
    id = f"{MODEL}:mine-Q8_0.gguf"
    pulled(pull())
    pulled(pull(id))
    with serve().client() as client:
        ids = [model.id for model in client.list_models() if model.id.startswith("me/")]
        assert ids == [MODEL, id]
        named = f"{MODEL}@main:mine-Q8_0.gguf"
        assert client.generate_image("a red circle", model=named, **QUICK).pictures[0].data


def test_a_partial_file_outlives_the_removal_of_another(
    hub: Hub, pull: Pull, home: Path, gguf_bytes: bytes
) -> None:
    files = {"a.gguf": gguf_bytes, "b.gguf": gguf_bytes[:-1] + b"x"}
    hub.repositories[QUANTS] = Repository(files)
    pulled(pull(f"{QUANTS}:a.gguf"))
    hub.limit("b.gguf", 1 << 20)
    failed(pull(f"{QUANTS}:b.gguf"))
    run("rm", f"{QUANTS}:a.gguf", "--yes", env=hub.environment(home))
    blobs = home / "hub/models--me--mine-gguf/blobs"
    assert [path.stat().st_size for path in blobs.glob("*.incomplete")] == [1 << 20]


def test_a_broken_base_and_a_hub_that_sends_no_parts_do_not_stop_a_file(
    hub: Hub, pull: Pull, gguf_bytes: bytes
) -> None:
    hub.repositories["me/broken"] = Repository({"model_index.json": b"{"})
    hub.repositories[QUANTS] = Repository({"a.gguf": gguf_bytes}, card={"base_model": "me/broken"})
    pulled(pull(f"{QUANTS}:a.gguf"))
    hub.sends_parts = False
    hub.repositories["me/star"] = Repository({"star.safetensors": adapter_bytes()})
    pulled(pull("me/star:star.safetensors"))


def test_files_of_models_are_not_listed_as_adapters(hub: Hub, home: Path, serve: Serve) -> None:
    snapshot = home / "hub/models--me--words/snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (snapshot / name).write_bytes(b"shards of a language model")
    encoder = home / "hub/models--me--encoder/snapshots" / ("1" * 40)
    encoder.mkdir(parents=True)
    (encoder / "config.json").write_text("{}")
    (encoder / "model.safetensors").write_bytes(b"a text encoder")
    with serve().client() as client:
        assert not [one.id for one in client.list_adapters() if one.id.startswith("me/")]
