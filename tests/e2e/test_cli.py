"""The command line as people and scripts use it: pipes, exit codes, errors that help."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moored
import pytest
import tomllib
from commands import Completed
from PIL import Image

from service import BINARY, INSTANT_MODELS, Service, clean_environment, run

Simulate = Callable[..., Service]

DEADLINE_S = 60.0
PROMPT = "a large red circle in the centre"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for all commands that do not change its state."""
    service = Service(
        *("--models", str(INSTANT_MODELS)),
        state=tmp_path_factory.mktemp("cli"),
        devices=("sim:40GiB",),
    )
    service.client().close()
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[moored.Client]:
    with service.client() as client:
        yield client


def good(result: Completed) -> str:
    """The output of a command that succeeded, and has no escape sequences."""
    assert result.returncode == 0, result.stderr
    assert_plain(result)
    return result.stdout


def bad(result: Completed, code: int | None = None) -> str:
    """The error message of a command that failed: with this exit code, or with any."""
    assert result.returncode in ([code] if code else range(1, 100)), (result.stdout, result.stderr)
    assert_plain(result)
    assert "panicked" not in result.stderr
    assert "transport error" not in result.stderr
    return result.stderr


def assert_plain(result: Completed) -> None:
    for text in (result.stdout, result.stderr):
        assert "\x1b" not in text, "no escape codes in a pipe"
        assert "\r" not in text


def objects(text: str) -> list[dict[str, object]]:
    """Parses output of one JSON object a line, and nothing else."""
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(isinstance(line, dict) for line in lines)
    return lines


def table(text: str) -> list[dict[str, str]]:
    """The rows of a table, as dictionaries by heading."""
    heading, *rows = (line.split("\t") for line in text.splitlines())
    assert all(len(row) == len(heading) for row in rows)
    return [dict(zip(heading, row, strict=True)) for row in rows]


def pixels(path: Path) -> tuple[tuple[int, int], bytes]:
    with Image.open(path) as image:
        return image.size, image.convert("RGB").tobytes()


# generate


def test_generate_writes_a_file_and_prints_where(service: Service, tmp_path: Path) -> None:
    out = tmp_path / "new" / "red.png"
    result = service.run("generate", PROMPT, "-m", "small", "-o", str(out), "--seed", "3")
    assert good(result).splitlines() == [str(out)]
    assert "seed 3" in result.stderr
    assert "denoise" in result.stderr
    with Image.open(out) as image:
        assert image.size == (64, 64)
        assert image.format == "PNG"
        recipe = json.loads(image.text["moored"])  # type: ignore[attr-defined]
    assert recipe["prompt"] == PROMPT
    assert recipe["seed"] == 3
    assert recipe["model"] == "small"


def test_generate_takes_every_option(service: Service, tmp_path: Path) -> None:
    out = tmp_path / "out.png"
    given = [*("-m", "small", "-W", "96", "-H", "32", "-s", "3", "-g", "2.5", "--seed", "9")]
    given += ["--max-sequence-length", "32", "--priority", "high", "--client", "ann"]
    given += ["--card", "sim:0", "--patience", "10s", "--allow-low-memory", "--headroom", "1MiB"]
    good(service.run("generate", PROMPT, *given, "-o", str(out)))
    with Image.open(out) as image:
        assert image.size == (96, 32)
        recipe = json.loads(image.text["moored"])  # type: ignore[attr-defined]
    assert (recipe["steps"], recipe["guidance"], recipe["max_sequence_length"]) == (3, 2.5, 32)
    jobs = table(good(service.run("jobs", "--all")))
    assert jobs[0]["client"] == "ann"

    bare = tmp_path / "bare.png"
    good(service.run("generate", PROMPT, *given, "-o", str(bare), "--no-metadata"))
    with Image.open(bare) as image:
        assert image.info == {} or not any("red circle" in str(v) for v in image.info.values())
    assert b"red circle" not in bare.read_bytes()
    assert pixels(bare) == pixels(out)


def test_headroom_and_an_unknown_card_are_sent_to_the_service(service: Service) -> None:
    much = bad(service.run("generate", PROMPT, "-m", "small", "--headroom", "10TiB", "-o", "-"))
    assert "can give 0 B" in much, much
    assert "headroom" in bad(service.run("generate", PROMPT, "--headroom", "some"))
    missing = bad(service.run("generate", PROMPT, "-m", "small", "--card", "cuda:9"))
    assert "cuda:9" in missing and "sim:0" in missing


def test_generate_writes_to_standard_output(service: Service) -> None:
    command = ["generate", PROMPT, "-m", "small", "-o", "-"]
    result = subprocess.run(
        [str(BINARY), *command, "--endpoint", service.address],
        capture_output=True,
        env=clean_environment(),
        timeout=DEADLINE_S,
    )
    assert result.returncode == 0, result.stderr
    with Image.open(io.BytesIO(result.stdout)) as image:
        image.load()
        assert image.size == (64, 64)
    assert b"\x1b" not in result.stderr
    several = service.run(*command, "-n", "2")
    assert "-o" in bad(several), "what to do is told"


def test_a_pipe_that_somebody_reads_takes_a_result_and_no_other(
    service: Service, client: moored.Client, tmp_path: Path
) -> None:
    """What would fail when a result is written fails before it is computed."""
    pipe, socket_path = tmp_path / "pipe", tmp_path / "socket.png"
    os.mkfifo(pipe)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(socket_path))
    given = ["generate", PROMPT, "-m", "small"]
    jobs = client.jobs(include_ended=True)
    assert "start its reader first" in bad(service.run(*given, "-o", str(pipe)), 8)
    assert "it is a socket" in bad(service.run(*given, "-o", str(socket_path)), 8)
    assert "takes one result" in bad(service.run(*given, "-o", str(pipe), "-n", "2"), 2)
    (tmp_path / "a-0001.png").mkdir()
    assert "a folder" in bad(
        service.run(*given, "-o", str(tmp_path / "a.png"), "-n", "2", "--force"), 8
    )
    assert client.jobs(include_ended=True) == jobs, "before anything is computed"
    listener.close()

    # Without waiting for a writer.
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        good(service.run(*given, "-o", str(pipe)))
        with Image.open(io.BytesIO(reader.read())) as image:
            assert image.size == (64, 64)
    good(service.run(*given, "-o", "/dev/null"))


@pytest.mark.parametrize("words", [[], ["-"]], ids=["left out", "dash"])
def test_generate_reads_the_prompt_from_standard_input(
    service: Service, tmp_path: Path, words: list[str]
) -> None:
    out = tmp_path / "piped.png"
    result = service.run(
        "generate", *words, "-m", "small", "-o", str(out), input="från ett rör, 🟥\n"
    )
    good(result)
    with Image.open(out) as image:
        recipe = json.loads(image.text["moored"])  # type: ignore[attr-defined]
    assert recipe["prompt"] == "från ett rör, 🟥"
    empty = service.run("generate", *words, "-m", "small", "-o", str(out), input=" \n")
    assert "prompt" in bad(empty)


def test_generate_prints_json(service: Service, tmp_path: Path) -> None:
    out = tmp_path / "j.png"
    result = service.run("generate", PROMPT, "-m", "small", "-o", str(out), "--json", "--seed", "1")
    events = objects(good(result))
    names = [event["event"] for event in events]
    assert names[0] == "accepted"
    assert {"stage", "step", "artifact", "done", "written"} <= set(names)
    assert events[names.index("done")]["seed"] == 1
    assert events[-1]["event"] == "written"
    assert events[-1]["path"] == str(out)
    assert out.is_file()
    jobs = {event["job_id"] for event in events if "job_id" in event}
    assert len(jobs) == 1
    assert result.stderr == "", "a script reads one stream"


@pytest.mark.parametrize(
    ("out", "names"),
    [
        ("some.png", ["some-0000.png", "some-0001.png", "some-0002.png"]),
        ("folder", ["folder/small-5.png", "folder/small-6.png", "folder/small-7.png"]),
        ("slash/", ["slash/small-5.png", "slash/small-6.png", "slash/small-7.png"]),
    ],
)
def test_generate_numbers_several_pictures(
    service: Service, tmp_path: Path, out: str, names: list[str]
) -> None:
    given = ["-m", "small", "-n", "3", "--seed", "5"]
    target = f"{tmp_path}/{out}"
    printed = good(service.run("generate", PROMPT, *given, "-o", target)).splitlines()
    assert printed == [str(tmp_path / name) for name in names]
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == [tmp_path / n for n in names]
    pictures = [pixels(tmp_path / name) for name in names]
    assert len(set(pictures)) == 3, "seeds differ"
    third = tmp_path / "third.png"
    good(service.run("generate", PROMPT, "-m", "small", "--seed", "7", "-o", str(third)))
    assert pixels(third) == pictures[2], "picture i has seed + i"


def test_from_repeats_a_picture_and_options_change_it(service: Service, tmp_path: Path) -> None:
    first = tmp_path / "first.png"
    given = ["-m", "small", "-W", "80", "-H", "48", "-s", "7", "-g", "1.5"]
    good(service.run("generate", PROMPT, *given, "-o", str(first)))

    again = tmp_path / "again.png"
    good(service.run("generate", "--from", str(first), "-o", str(again)))
    assert pixels(again) == pixels(first)
    assert again.read_bytes() == first.read_bytes(), "recipe and all"

    for option in (["-s", "6"], ["-g", "2"], ["--seed", "12345"]):
        changed = tmp_path / "changed.png"
        good(service.run("generate", "--from", str(first), *option, "-f", "-o", str(changed)))
        assert pixels(changed)[0] == (80, 48)
        assert pixels(changed)[1] != pixels(first)[1], option
    good(service.run("generate", "another prompt", "--from", str(first), "-fo", str(changed)))
    assert pixels(changed)[1] != pixels(first)[1]
    good(service.run("generate", "--from", str(first), "-W", "32", "-fo", str(changed)))
    assert pixels(changed)[0] == (32, 48)


def test_a_picture_of_several_can_be_repeated(service: Service, tmp_path: Path) -> None:
    given = ["-m", "small", "-n", "2", "--seed", "4"]
    good(service.run("generate", PROMPT, *given, "-o", str(tmp_path / "s")))
    second = tmp_path / "s" / "small-5.png"
    again = tmp_path / "again.png"
    good(service.run("generate", "--from", str(second), "-o", str(again)))
    assert pixels(again) == pixels(second)


def test_image_to_image(service: Service, tmp_path: Path) -> None:
    init = tmp_path / "init.png"
    Image.new("RGB", (50, 40), (200, 100, 0)).save(init)
    out = tmp_path / "out.png"
    given = ["-m", "small", "--init", str(init), "--strength", "0.1", "-W", "64", "-H", "64"]
    good(service.run("generate", PROMPT, *given, "-o", str(out)))
    size, rgb = pixels(out)
    assert size == (64, 64)
    for value, started in zip(rgb[:3], (200, 100, 0), strict=True):
        assert abs(value - started) <= 27, "a tenth of the way"
    again = service.run("generate", "--from", str(out), "-o", str(tmp_path / "again.png"))
    assert "--init" in bad(again), "what is missing is told"
    good(
        service.run(
            "generate", "--from", str(out), "--init", str(init), "-o", str(tmp_path / "again.png")
        )
    )
    assert pixels(tmp_path / "again.png") == pixels(out)


def test_progress_in_a_pipe_is_plain_lines(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate("sim:40GiB,speed=200GiB/s")
    service.client().close()
    out = str(tmp_path / "p.png")
    result = service.run("generate", PROMPT, "-m", "flux-full", "-o", out)
    good(result)
    lines = result.stderr.splitlines()
    assert any("transformer" in line for line in lines)
    assert any("denoise" in line for line in lines)
    assert all(line.strip() for line in lines)


def test_ctrl_c_cancels_the_job(service: Service, client: moored.Client) -> None:
    command = ["generate", PROMPT, "-m", "slow", "-s", "200", "--json", "-o", "never.png"]
    generating = subprocess.Popen(
        [str(BINARY), *command, "--endpoint", f"http://{service.address}"],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert generating.stdout is not None
    with generating, generating.stdout:
        job = next(e["job_id"] for e in map(json.loads, generating.stdout) if e["event"] == "step")
        generating.send_signal(signal.SIGINT)
        assert generating.wait(DEADLINE_S) == 130, "as shells have it"
    with client.watch_status(timeout=DEADLINE_S) as watch:
        next(status for status in watch if status.jobs == ())
    (state,) = [one.state for one in client.jobs(include_ended=True) if one.id == job]
    assert state == "cancelled"
    assert not Path("never.png").exists()


# models, load, unload, pin, plan, status


def test_models_are_listed(service: Service) -> None:
    rows = {row["model"]: row for row in table(good(service.run("models")))}
    assert {"flux-full", "flux-other", "huge", "moored/demo", "slow", "small"} <= set(rows)
    assert rows["flux-full"]["family"] == "instant"
    assert (rows["flux-full"]["generates"], rows["video"]["generates"]) == ("image", "video")
    assert {name for name, row in rows.items() if row["generates"] == "audio"} == {
        "track",
        "moored/demo-sound",
    }
    assert rows["flux-full"]["on the card"] == "31.5 GiB"
    listed = {str(one["id"]): one for one in objects(good(service.run("models", "--json")))}
    assert set(listed) == set(rows)
    assert listed["moored/demo"]["is_default"] is True
    assert sum(one["bytes"] for one in listed["small"]["components"]) == 8 << 20
    assert rows["flux-full"]["formats"] == "full"
    assert rows["flux-full"]["quantized"] == "8-bit 15.9 GiB, 4-bit 9.1 GiB"
    assert listed["small"]["quantization"]["transformer"] == "full"
    presets = {one["preset"]: one["bytes"] for one in listed["small"]["choices"]}
    assert presets == {"full": 8 << 20, "8-bit": 5 << 20, "4-bit": (2 << 20) + (6 << 20) * 9 // 32}


def test_load_pin_and_unload(simulate: Simulate) -> None:
    service = simulate("sim:40GiB")
    service.client().close()
    assert "flux-full+full is resident" in good(service.run("load", "flux-full"))
    rows = {row["model"]: row for row in table(good(service.run("models")))}
    assert any("transformer" in cell for cell in rows["flux-full"].values())

    assert good(service.run("pin", "flux-full")).strip() == "pinned: flux-full+full"
    kept = service.run("unload", "flux-full")
    assert "--off" in bad(kept, 1), "nothing was unloaded, and what to do is told"
    assert "kept transformer on sim:0: pinned" in kept.stdout
    assert "0 B freed in all" in kept.stdout
    pinned = objects(good(service.run("pin", "small", "--json")))[-1]
    assert pinned == {"pinned": ["flux-full+full", "small+full"]}
    good(service.run("pin", "small", "--off"))
    good(service.run("unload", "small"))
    assert "not pinned any more; nothing else" in good(service.run("pin", "flux-full", "--off"))

    freed = good(service.run("unload", "flux-full"))
    assert "freed transformer from sim:0: 22.2 GiB" in freed
    assert "31.5 GiB freed in all" in freed

    good(service.run("load", "small", "--component", "vae"))
    (unloaded,) = objects(good(service.run("unload", "--all", "--json")))
    assert unloaded["kept"] == []
    assert unloaded["cancelled_jobs"] == []
    (freed,) = unloaded["freed"]
    assert (freed["component"]["name"], freed["card"]) == ("vae", "sim:0")
    assert (freed["booked_bytes"], freed["freed_bytes"]) == (1 << 20, 1 << 20)
    events = objects(good(service.run("load", "small", "--json")))
    assert [event["event"] for event in (events[0], events[-1])] == ["accepted", "done"]
    assert "--all" in bad(service.run("unload"), 2), "everything is unloaded by --all only"


def test_a_plan_is_a_table(service: Service) -> None:
    result = good(service.run("plan", PROMPT, "-m", "small", "-W", "128"))
    *lines, last = result.splitlines()
    rows = table("\n".join(lines))
    assert [row["stage"] for row in rows] == ["encode_text", "denoise", "decode"]
    assert {row["verdict"] for row in rows} == {"run"}
    assert last.startswith("on sim:0: runs now")

    never = service.run("plan", PROMPT, "-m", "huge")
    assert "can never run on sim:0" in bad(never, 6)
    assert "moves first" not in never.stdout
    told = service.run("plan", PROMPT, "-m", "huge", "--json")
    assert told.returncode == 6
    plan, failure = objects(told.stdout)
    assert failure["reason"] == "NEVER_FITS"
    assert plan["runs_now"] is False
    assert plan["model"]["key"] == "huge+full"


def test_status_shows_the_card(service: Service, client: moored.Client) -> None:
    client.load("small")
    shown = good(service.run("status"))
    assert "sim:0" in shown
    assert "40.0 GiB" in shown
    for word in ("usable", "free", "transformer", "small+full", "no jobs"):
        assert word in shown
    assert "attention: cpu loops" in shown.splitlines()
    (status,) = objects(good(service.run("status", "--json")))
    card: Any = status["cards"][0]  # type: ignore[index]
    assert card["attention"] == client.status().cards[0].attention == "cpu loops"
    memory = card["memory"]
    total = memory.pop("total")
    memory.pop("usable")
    assert sum(memory.values()) == total == 40 << 30


@pytest.mark.parametrize("as_json", [False, True])
def test_status_can_be_watched(service: Service, as_json: bool) -> None:
    command = [str(BINARY), "status", "--watch", "--endpoint", f"http://{service.address}"]
    watching = subprocess.Popen(
        [*command, *(["--json"] if as_json else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert watching.stdout is not None
    # A watch that shows nothing ends the test, not the day.
    too_late = threading.Timer(DEADLINE_S, watching.kill)
    too_late.start()
    try:
        lines = []
        for line in watching.stdout:
            lines.append(line)
            if as_json or line.startswith("latents"):
                break
        assert watching.poll() is None, "it goes on"
    finally:
        too_late.cancel()
        watching.kill()
        _, errors = watching.communicate()
    assert errors == ""
    assert "\x1b" not in "".join(lines)
    if as_json:
        assert json.loads(lines[0])["cards"]
    else:
        assert any("sim:0" in line for line in lines)


# jobs and cancel


def test_jobs_are_listed_and_cancelled(simulate: Simulate) -> None:
    service = simulate()
    with service.client(client_id="ann") as client:
        assert good(service.run("jobs")).strip() == "no jobs"
        with client.stream_image("slow", model="slow", steps=200, count=10) as stream:
            next(event for event in stream if isinstance(event, moored.Step))
            (row,) = table(good(service.run("jobs")))
            assert row["job"] == stream.job_id
            assert row["client"] == "ann"
            assert row["call"] == "GenerateImage"
            assert row["state"] == "running"
            assert row["model"] == "slow+full"
            assert row["card"] == "sim:0"
            assert "denoise" in row["stage"]
            (listed,) = objects(good(service.run("jobs", "--json")))
            assert listed["id"] == stream.job_id
            assert listed["steps"] == 200

            assert good(service.run("cancel", stream.job_id)).strip() == "cancelled"
            with pytest.raises(moored.Cancelled):
                stream.result()
        (ended,) = table(good(service.run("jobs", "--all")))
        assert (ended["job"], ended["state"]) == (stream.job_id, "cancelled")
        assert good(service.run("jobs")).strip() == "no jobs"
        again = good(service.run("cancel", stream.job_id))
        assert "ended already" in again
        assert "job-of-nobody" in bad(service.run("cancel", "job-of-nobody"))


# config and doctor


def flat(settings: dict[str, object], above: str = "") -> set[str]:
    names = set()
    for name, value in settings.items():
        full = f"{above}{name}"
        names |= flat(value, f"{full}.") if isinstance(value, dict) and value else {full}
    return names


def test_config_defaults_are_a_valid_configuration_file(tmp_path: Path) -> None:
    text = good(run("config", "--defaults"))
    defaults = flat(tomllib.loads(text))
    assert "#" in text, "every setting is explained"
    listed = objects(good(run("config", "--json")))
    assert {setting["name"] for setting in listed} == defaults

    file = tmp_path / "moored.toml"
    file.write_text(text)
    from_file = objects(good(run("config", "--json", "--config", str(file))))
    assert {s["name"]: s["value"] for s in from_file} == {s["name"]: s["value"] for s in listed}
    assert any(str(file) in str(setting["source"]) for setting in from_file)
    assert {s["name"]: s["value"] for s in listed}["queue.max_jobs"] == 256, "as JSON has it"
    assert len(listed) == len({s["name"] for s in listed}), "each once"


def test_config_says_where_each_value_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[queue]\nlatent_ttl = "3m"\ntext_cache = "1MiB"\nlatents = "2MiB"\n')
    environment = clean_environment() | {
        "MOORED_QUEUE_TEXT_CACHE": "5MiB",
        "MOORED_QUEUE_LATENTS": "6MiB",
        "MOORED_QUEUE_MAX_JOBS": "64",
        "MOORED_ENDPOINT": "http://127.0.0.1:1",
    }
    result = run(*("config", "--config", str(file), "--set", "queue.latents=7MiB"), env=environment)
    rows = {row["setting"]: row for row in table(good(result))}
    rows = {name: {k: v.strip('"') for k, v in row.items()} for name, row in rows.items()}
    assert rows["queue.latent_ttl"]["value"] == "3m"
    assert "mine.toml" in rows["queue.latent_ttl"]["from"]
    assert rows["queue.text_cache"]["value"] == "5MiB"
    assert rows["queue.text_cache"]["from"] == "MOORED_QUEUE_TEXT_CACHE"
    assert rows["queue.max_jobs"]["value"] == "64"
    assert rows["queue.latents"]["value"] == "7MiB"
    assert "flag" in rows["queue.latents"]["from"]
    assert rows["queue.keep_alive"]["from"] == "default"
    assert rows["client.endpoint"]["value"] == "http://127.0.0.1:1"


def test_config_takes_numbers_by_set() -> None:
    """`--set queue.max_jobs=64` is the example in the help."""
    rows = {row["setting"]: row for row in table(good(run("config", "--set", "queue.max_jobs=64")))}
    assert rows["queue.max_jobs"]["value"] == "64"


@pytest.mark.parametrize(
    "setting", ["queue.nothing=1", "queue.max_jobs=few", "nonsense", "cards.policy=other"]
)
def test_config_refuses_an_unknown_setting(setting: str) -> None:
    complaint = bad(run("config", "--set", setting))
    assert setting.partition("=")[0] in complaint
    assert "--defaults" in complaint


def test_doctor_reports_no_problem(service: Service, tmp_path: Path) -> None:
    arguments = ("--set", f"service.state={tmp_path / 'state'}")
    shown = good(service.run("doctor", *arguments))
    assert all(line.startswith("ok") for line in shown.splitlines())
    for word in ("cpu", "state", "moored/demo", "version"):
        assert word in shown
    findings = objects(good(service.run("doctor", *arguments, "--json")))
    assert {finding["check"] for finding in findings} >= {"card", "state", "model", "service"}
    assert all(finding["well"] is True for finding in findings)
    alone = good(run("doctor", *arguments, "--endpoint", "http://127.0.0.1:1"))
    assert "none runs at" in alone, "which is no fault"


def test_doctor_reports_problems(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "models" / "broken").mkdir(parents=True)
    (tmp_path / "models" / "broken" / "model_index.json").write_text("{")
    file = tmp_path / "moored.toml"
    folders = [str(tmp_path / "models"), str(tmp_path / "nowhere")]
    file.write_text(
        f'[service]\nstate = "{tmp_path}/file/state"\n[models]\nfolders = {json.dumps(folders)}\n'
        '[client]\nendpoint = "http://127.0.0.1:1"\n[cards]\nheadroom = "60TiB"\n'
    )
    result = run("doctor", "--config", str(file))
    assert "4 problems found" in bad(result, 1)
    wrong = [line for line in result.stdout.splitlines() if line.startswith("BAD")]
    for word in ("service.state", "nowhere", "broken", "cards.headroom"):
        assert any(word in line for line in wrong), wrong


# Errors that help.


@pytest.mark.parametrize(
    "command",
    [
        ["generate", PROMPT],
        ["load", "small"],
        ["unload", "--all"],
        ["pin", "small"],
        ["plan", PROMPT],
        ["status"],
        ["status", "--watch"],
        ["jobs"],
        ["cancel", "job-1"],
    ],
    ids=" ".join,
)
def test_an_unreachable_service_is_reported_with_a_remedy(command: list[str]) -> None:
    complaint = bad(run(*command, "--endpoint", "http://127.0.0.1:1"))
    assert "http://127.0.0.1:1" in complaint
    assert "refused" in complaint
    for remedy in ("moored serve", "--endpoint", "MOORED_ENDPOINT"):
        assert remedy in complaint
    result = run(*command, "--endpoint", "http://127.0.0.1:1", "--json")
    assert result.returncode == 3
    (failure,) = objects(result.stdout)
    assert failure["event"] == "failed"
    assert failure["reason"] == "UNREACHABLE"


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_wrong_requests_are_reported_with_a_remedy(
    service: Service, tmp_path: Path, command: str
) -> None:
    out = tmp_path / "never.png"
    for given, words in {
        ("-m", "nope"): ("nope", "moored models"),
        ("-m", "small", "-W", "65"): ("width", "multiple of 16", "64"),
        ("-m", "moored/demo", "-s", "201"): ("steps", "200"),
        ("-m", "small", "-n", "65"): ("count", "64"),
        ("-m", "small", "--init", str(tmp_path / "none.png")): ("none.png",),
        ("-m", "small", "--from", str(tmp_path / "none.png")): ("none.png",),
        ("-m", "small", "--strength", "1.5"): ("strength",),
    }.items():
        to = ["-o", str(out)] if command == "generate" else []
        complaint = bad(service.run(command, PROMPT, *given, *to))
        for word in words:
            assert word in complaint, (given, complaint)
    assert not out.exists()


def test_every_command_reports_a_missing_model(service: Service) -> None:
    for command in ("load", "unload", "pin"):
        complaint = bad(service.run(command, "nope"))
        assert "nope" in complaint
        assert "moored models" in complaint
    complaint = bad(service.run("load", "small", "--component", "unet"))
    assert "unet" in complaint
    assert "transformer" in complaint


def test_failures_are_printed_as_json(service: Service) -> None:
    result = service.run("generate", PROMPT, "-m", "nope", "--json")
    assert result.returncode == 5
    failure = objects(result.stdout)[-1]
    assert failure["event"] == "failed"
    assert failure["reason"] == "MODEL_NOT_FOUND"
    assert "nope" in str(failure["message"])
    assert result.stderr == ""


def test_a_request_that_never_fits_is_refused_with_one_that_would(
    simulate: Simulate, tmp_path: Path
) -> None:
    service = simulate("sim:24GiB")
    service.client().close()
    given = ["-m", "flux-full", "-W", "2048", "-H", "2048"]
    complaint = bad(service.run("generate", PROMPT, *given, "-o", str(tmp_path / "n.png")), 6)
    assert "28.2 GiB" in complaint
    assert "1024x1024 would fit" in complaint
    planned = service.run("plan", PROMPT, *given)
    assert planned.returncode == 6
    assert "1024x1024 would fit" in planned.stdout


def test_from_refuses_a_picture_without_a_recipe(service: Service, tmp_path: Path) -> None:
    plain = tmp_path / "plain.png"
    Image.new("RGB", (16, 16)).save(plain)
    complaint = bad(service.run("generate", "--from", str(plain), "-o", str(tmp_path / "n.png")))
    assert "plain.png" in complaint
    assert "no moored settings" in complaint
    text = tmp_path / "text.png"
    text.write_text("no picture")
    assert "PNG" in bad(service.run("generate", "--from", str(text)), 8)


def test_an_output_that_cannot_be_written_is_reported(service: Service, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "x.png"
    assert str(tmp_path / "file") in bad(
        service.run("generate", PROMPT, "-m", "small", "-o", str(out)), 8
    )


@pytest.mark.parametrize(
    "arguments",
    [["paint"], ["generate", "a", "b"], ["load"], ["cancel"], ["generate", "a", "-W", "wide"]],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str]) -> None:
    assert "--help" in bad(run(*arguments), 2)


def test_help_lists_every_command_but_the_hidden_one() -> None:
    shown = good(run("--help"))
    commands = ["serve", "generate", "demo", "status", "models", "load", "unload", "pin", "plan"]
    commands += ["run", "info", "pull", "rm", "completions", "man", "film"]
    abouts = set()
    for command in [*commands, "jobs", "cancel", "config", "doctor"]:
        assert f"\n  {command} " in shown
        help_of_command = good(run(command, "--help"))
        assert "Usage" in help_of_command
        abouts.add(help_of_command.splitlines()[0])
    assert len(abouts) == len(commands) + 4, "each says what it does"
    assert "\n  worker " not in shown


def test_a_closed_output_pipe_is_no_error(service: Service) -> None:
    """`moored models | head -1` ends quietly."""
    listing = subprocess.Popen(
        [str(BINARY), "models", "--endpoint", f"http://{service.address}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert listing.stdout is not None
    assert listing.stderr is not None
    listing.stdout.close()
    with listing.stderr:
        assert listing.stderr.read() == ""
    assert listing.wait(DEADLINE_S) == 0


# What a script and a person are told apart by.


def test_existing_files_are_not_overwritten(service: Service, tmp_path: Path) -> None:
    out = tmp_path / "mine.png"
    given = ["generate", PROMPT, "-m", "small", "-o", str(out)]
    good(service.run(*given, "--seed", "1"))
    first = out.read_bytes()
    complaint = bad(service.run(*given, "--seed", "2"), 8)
    assert "--force" in complaint
    assert out.read_bytes() == first
    refused = service.run(*given, "--json")
    assert objects(refused.stdout)[-1]["reason"] == "FILE_EXISTS"
    assert len(objects(refused.stdout)) == 1, "before anything is generated"
    good(service.run(*given, "--seed", "2", "--force"))
    assert out.read_bytes() != first


def test_generated_file_names_have_model_and_seed(service: Service, tmp_path: Path) -> None:
    for name in ("small-3.png", "small-3-2.png"):
        given = ["generate", PROMPT, "-m", "small", "--seed", "3"]
        assert good(service.run(*given, cwd=tmp_path)).strip() == name
        assert (tmp_path / name).is_file()


@pytest.mark.parametrize(("ending", "form"), [("jpg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")])
def test_the_ending_sets_the_format_and_each_format_can_be_repeated(
    service: Service, client: moored.Client, tmp_path: Path, ending: str, form: str
) -> None:
    out, plain = tmp_path / f"a.{ending}", tmp_path / "plain.png"
    given = ["generate", PROMPT, "-m", "small", "--seed", "5", "-g", "2.5", "-s", "3"]
    good(service.run(*given, "-o", str(out)))
    good(service.run(*given, "-o", str(plain)))
    with Image.open(out) as image:
        assert image.format == form
        if form == "PNG":
            settings = image.info["parameters"]
        else:
            settings = image.getexif().get_ifd(0x8769)[0x9286].removeprefix(b"UNICODE\0")
            settings = settings.decode("utf-16-be")
    expected = "Steps: 3, Sampler: Euler, CFG scale: 2.5, Seed: 5, Size: 64x64, Model: small"
    assert settings == f"{PROMPT}\n{expected}, Version: moored {client.server_info().version}"
    assert moored.read_recipe(out) == moored.read_recipe(plain)
    assert moored.read_recipe(out)["prompt"] == PROMPT
    again = tmp_path / "again.png"
    good(service.run("generate", "--from", str(out), "-o", str(again)))
    assert pixels(again) == pixels(plain)


@pytest.mark.parametrize("ending", ["jpg", "webp", "png"])
@pytest.mark.parametrize("output", ["png", "raw"])
def test_a_picture_that_the_python_client_saved_can_be_repeated(
    service: Service, client: moored.Client, tmp_path: Path, ending: str, output: str
) -> None:
    given: dict[str, Any] = {"model": "small", "seed": 5, "guidance": 2.5, "steps": 3}
    result = client.generate_image("från en klient, 🟥", output=output, **given)
    saved, plain, again = (tmp_path / name for name in (f"a.{ending}", "plain.png", "again.png"))
    result.save(saved)
    result.save(plain)
    good(service.run("generate", "--from", str(saved), "-o", str(again)))
    assert pixels(again) == pixels(plain)
    assert moored.read_recipe(again) == moored.read_recipe(saved) == result.pictures[0].recipe


def test_an_unsupported_ending_is_refused(service: Service, tmp_path: Path) -> None:
    out = tmp_path / "a.gif"
    complaint = bad(service.run("generate", PROMPT, "-m", "small", "-o", str(out)), 2)
    assert ".webp" in complaint
    assert not out.exists()


def test_prompts_of_a_file_are_generated_in_turn(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two  \nthree\n", encoding="utf-8")
    given = ["generate", "-m", "small", "--prompts", str(file), "-o", str(tmp_path / "out/a.png")]
    printed = good(service.run(*given)).splitlines()
    assert [Path(path).name for path in printed] == ["a-0000.png", "a-0001.png", "a-0002.png"]
    prompts = []
    for path in printed:
        with Image.open(path) as image:
            prompts.append(json.loads(image.text["moored"])["prompt"])  # type: ignore[attr-defined]
    assert prompts == ["one", "two", "three"]
    assert "cannot be used" in bad(service.run(*given, "and one more"), 2)


def test_wrong_options_are_refused_before_a_job_exists(service: Service, tmp_path: Path) -> None:
    out = ["-m", "small", "-o", str(tmp_path / "never.png")]
    assert "steps" in bad(service.run("generate", PROMPT, "--steps", "0", *out), 2)
    assert "empty" in bad(service.run("generate", "", *out), 2)
    complaint = bad(service.run("generate", PROMPT, "--card", "cuda:9", *out), 2)
    assert "sim:0" in complaint, "the cards that there are"
    assert "moored serve" in bad(service.run("status", "--set", "queue.max_jobs=1"), 2)
    assert not (tmp_path / "never.png").exists()


def test_in_a_pipe_many_steps_are_few_lines_and_quiet_prints_none(
    service: Service, tmp_path: Path
) -> None:
    given = ["generate", PROMPT, "-m", "small", "-s", "200"]
    told = service.run(*given, "-o", str(tmp_path / "a.png"))
    good(told)
    steps = [line for line in told.stderr.splitlines() if line.startswith("step ")]
    assert steps[-1] == "step 200 of 200"
    assert len(steps) < 15
    quiet = service.run(*given, "-o", str(tmp_path / "b.png"), "--quiet")
    assert good(quiet).strip() == str(tmp_path / "b.png")
    assert quiet.stderr == ""


def test_the_default_client_name_is_user_at_host(service: Service, tmp_path: Path) -> None:
    def client(name: str, *more: str, **variables: str) -> str:
        env = clean_environment() | {"USER": "ann"} | variables
        given = ["generate", PROMPT, "-m", "small", "-o", str(tmp_path / name)]
        good(service.run(*given, *more, env=env))
        return table(good(service.run("jobs", "--all")))[0]["client"]

    assert client("a.png") == f"ann@{os.uname().nodename}"
    assert client("b.png", MOORED_CLIENT="studio") == "studio"
    assert client("c.png", "--client", "bea", MOORED_CLIENT="studio") == "bea"


def test_a_lost_connection_is_reported(simulate: Simulate, tmp_path: Path) -> None:
    service = simulate()
    service.client().close()
    command = ["generate", PROMPT, "-m", "slow", "-s", "200", "--json"]
    command += ["-o", str(tmp_path / "n.png")]
    generating = subprocess.Popen(
        [str(BINARY), *command, "--endpoint", f"http://{service.address}"],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert generating.stdout is not None
    with generating, generating.stdout:
        next(e for e in map(json.loads, generating.stdout) if e["event"] == "step")
        service.kill()
        last = [json.loads(line) for line in generating.stdout][-1]
        assert generating.wait(DEADLINE_S) == 3
    assert last["reason"] == "CONNECTION_LOST"
    assert service.address in last["message"]
    assert "was lost before the job ended" in last["message"]


def test_the_version_has_commit_features_and_profile() -> None:
    assert good(run("-V")).startswith("moored ")
    told = good(run("--version"))
    for word in ("commit: ", "features: ", "profile: "):
        assert f"\n{word}" in told


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_are_printed(shell: str) -> None:
    script = good(run("completions", shell))
    assert "moored" in script
    assert "generate" in script


def test_manual_pages_are_written(tmp_path: Path) -> None:
    assert good(run("man")).startswith(".ie")
    good(run("man", str(tmp_path / "man")))
    names = {path.name for path in (tmp_path / "man").iterdir()}
    assert {"moored.1", "moored-generate.1", "moored-run.1"} <= names
    assert "moored-worker.1" not in names


def screen_of(*command: str, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a command on a terminal of 100 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    drawing = subprocess.Popen(
        [str(BINARY), *command], stdin=slave, stdout=slave, stderr=slave, env=env
    )
    os.close(slave)
    drawn = b""
    while True:
        try:
            piece = os.read(master, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    return drawing.wait(DEADLINE_S), drawn.decode()


def test_a_terminal_shows_steps_and_the_time_left(service: Service, tmp_path: Path) -> None:
    given = ["generate", PROMPT, "-m", "slow", "-s", "40", "-o", str(tmp_path / "a.png")]
    code, drawn = screen_of(
        *given, "--endpoint", service.address, env=clean_environment() | {"TERM": "xterm"}
    )
    assert code == 0, drawn
    counted = {int(found) for found in re.findall(r"step (\d+)/40", drawn)}
    assert len(counted) > 2, drawn
    assert re.search(r"step \d+/40, \d+.?s, \d+.?s left", drawn), drawn


def test_tables_fit_the_terminal(service: Service) -> None:
    env = clean_environment() | {"TERM": "xterm"}
    code, drawn = screen_of("models", "--endpoint", service.address, env=env)
    assert code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert "flux-full" in plain
    assert max(map(len, plain.splitlines())) <= 100
