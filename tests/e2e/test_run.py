"""From a model's name to a picture: the catalogue, planned downloads, and a service for one command."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import termios
from pathlib import Path
from typing import Any

import pytest
from commands import LARGE_ID as ID
from commands import Run, good
from hub import Hub, Repository
from PIL import Image
from test_stored_formats import GgufKind, in_bfl_names, read_safetensors, write_gguf

from service import BINARY, INSTANT_MODELS, ROOT, ReservedPort, Service, run

SHORT = "z-image-turbo"
SIZE = ("-W", "64", "-H", "64", "--steps", "1", "--seed", "3")
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
WAIT_S = 60


def blobs(home: Path) -> list[Path]:
    return list(home.glob("hub/models--*/blobs/*"))


def test_one_command_downloads_a_model_starts_a_service_and_generates(
    hub: Hub, home: Path, alone: Run, tmp_path: Path
) -> None:
    first = alone("run", SHORT, "a red cube", *SIZE, "--device", "cpu")
    assert good(first).splitlines()[-1] == "z-image-turbo-3.png"
    with Image.open(tmp_path / "z-image-turbo-3.png") as picture:
        assert json.loads(picture.info["moored"])["model"] == ID
    for told in (ID, "Apache-2.0", "15.8 MB to download", "starting one", "moored serve"):
        assert told in first.stderr
    assert "INFO" not in first.stderr
    assert "no service answers" in alone("status").stderr, "it has ended with the command"
    before = len(hub.requests)
    second = alone("run", SHORT, "a red cube", *SIZE, "--device", "cpu")
    assert good(second).splitlines() == ["z-image-turbo-3-2.png"]
    assert len(hub.requests) == before, "what is here is not asked for again"


def test_one_command_downloads_a_transformer_in_one_file_and_its_base(
    hub: Hub, alone: Run, tmp_path: Path
) -> None:
    weights = in_bfl_names(read_safetensors(ROOT / "demo/model" / TRANSFORMER))
    write_gguf(tmp_path / "a.gguf", weights, lambda _: GgufKind.Q8_0)
    files = {"tiny-Q8_0.gguf": (tmp_path / "a.gguf").read_bytes()}
    hub.repositories["me/tiny-gguf"] = Repository(files, card={"base_model": ID})
    model = "me/tiny-gguf:tiny-Q8_0.gguf"
    done = alone("run", model, "a red cube", *SIZE, "--device", "cpu")
    name = good(done).splitlines()[-1]
    assert re.fullmatch(r"[\w.-]+-3\.png", name)
    with Image.open(tmp_path / name) as picture:
        assert json.loads(picture.info["moored"])["model"] == model
    assert f"are those of {ID}" in done.stderr
    assert not hub.fetched(TRANSFORMER)


def test_a_running_service_is_used_and_downloads_the_model(
    hub: Hub, home: Path, tmp_path: Path
) -> None:
    env = hub.environment(home)
    service = Service(state=tmp_path / "state", environment=env)
    try:
        service.client().close()
        given = ("run", SHORT, "a red cube", *SIZE)
        done = service.run(*given, env=env, cwd=tmp_path)
        assert good(done).splitlines() == ["z-image-turbo-3.png"]
        assert "starting one" not in done.stderr
        assert "Apache-2.0" in done.stderr, "the licence of what is downloaded is told"
        again = service.run(*given, env=env, cwd=tmp_path)
        assert good(again).splitlines() == ["z-image-turbo-3-2.png"]
        assert "Apache-2.0" not in again.stderr, "it is here by its short name"
        listed = service.run("models", "--available", "--json", env=env)
        here = {one["name"]: one["here"] for one in map(json.loads, good(listed).splitlines())}
        assert (here[SHORT], here["flux-dev"]) == (True, False)
    finally:
        assert service.stop() == 0


def test_the_most_faithful_precision_that_fits_is_chosen(tmp_path: Path) -> None:
    service = Service(
        *("--models", str(INSTANT_MODELS)), state=tmp_path / "state", devices=("sim:20GiB",)
    )
    try:
        service.client().close()

        def model_of(*more: str) -> tuple[str, str]:
            told = service.run("run", "flux-full", "a cube", *more, cwd=tmp_path).stderr
            done = service.run("run", "flux-full", "a cube", "--json", *more, cwd=tmp_path)
            events = [json.loads(line) for line in good(done).splitlines()]
            return next(one["model"]["key"] for one in events if one["event"] == "accepted"), told

        key, told = model_of()
        assert key == "flux-full+8-bit"
        assert "8-bit: full needs" in told
        assert "sim:0" in told
        key, told = model_of("--quantization", "4-bit")
        assert key == "flux-full+4-bit"
        assert "8-bit" not in told
    finally:
        assert service.stop() == 0


def test_a_service_elsewhere_is_not_started_here(alone: Run) -> None:
    done = alone("run", SHORT, "a cube", MOORED_ENDPOINT="http://192.0.2.1:1", MOORED_CLIENT="x")
    assert done.returncode == 3
    assert "192.0.2.1" in done.stderr


def test_a_dry_run_of_a_pull_prints_the_plan_alone(hub: Hub, home: Path, alone: Run) -> None:
    planned = good(alone("pull", SHORT, "--dry-run"))
    assert re.search(rf"{ID}: \d+ files, 15.8 MB to download, into .*home/hub", planned)
    assert blobs(home) == []
    (told,) = map(json.loads, good(alone("pull", SHORT, "--dry-run", "--json")).splitlines())
    assert told["bytes_missing"] == told["bytes_total"] > 15_000_000
    hub.requests.clear()
    done = alone("pull", SHORT)
    assert "15.8 MB to download" in done.stderr
    listings = [one.path for one in hub.requests if "/revision/" in one.path]
    assert len(listings) == 1, "what is planned is what is pulled: the repository is listed once"
    assert Path(good(done).strip()).is_dir()
    assert "all of it here already" in good(alone("pull", SHORT, "--dry-run"))


def test_an_unknown_name_points_to_the_list_of_short_names(alone: Run) -> None:
    done = alone("pull", "sd15")
    assert done.returncode == 2
    for name in ("OWNER/NAME", "moored models --available"):
        assert name in done.stderr


def test_a_model_that_was_downloaded_can_be_removed(hub: Hub, home: Path, alone: Run) -> None:
    missing = alone("rm", SHORT, "--yes")
    assert missing.returncode == 5
    assert "is not in" in missing.stderr
    good(alone("pull", SHORT))
    asks = alone("rm", SHORT)
    assert asks.returncode == 2
    assert "--yes" in asks.stderr
    assert blobs(home) != []
    assert "removed" in good(alone("rm", SHORT, "--yes"))
    assert blobs(home) == []
    assert list(home.glob("hub/models--*")) == []
    good(alone("pull", SHORT))
    assert "yes" not in good(alone("models", "--available")).replace("yes-", "") or blobs(home)


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("\n", False)])
def test_in_a_terminal_rm_asks(hub: Hub, home: Path, answer: str, removed: bool) -> None:
    env = hub.environment(home, TERM="xterm")
    assert run("pull", ID, env=env).returncode == 0
    mine, theirs = pty.openpty()
    command = [str(BINARY), "rm", ID]
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        os.write(mine, answer.encode())
        assert process.wait(WAIT_S) == 0
    os.close(mine)
    assert (blobs(home) == []) is removed


def test_the_catalogue_lists_what_fits_the_card(alone: Run) -> None:
    def listed(device: str) -> dict[str, Any]:
        told = good(alone("models", "--available", "--json", MOORED_CARDS_DEVICES=device))
        return {one["name"]: one for one in map(json.loads, told.splitlines())}

    def fits(device: str) -> dict[str, Any]:
        return {name: one["fits"] for name, one in listed(device).items()}

    assert set(fits("sim:80GiB").values()) == {"full"}
    assert fits("sim:24GiB")["flux-dev"] == "8-bit"
    several = '["cpu:64GiB", "sim:24GiB", "sim:8GiB,index=1"]'
    assert fits(several) == fits("sim:24GiB"), "the largest GPU counts"
    assert set(fits("sim:1MiB").values()) == {None}
    on_4 = listed("sim:4GiB")
    dev = on_4["flux-dev"]
    assert dev["fits"] == "4-bit"
    # What a card does not hold crosses the link in each step, so the figure follows the card.
    four_bit = dev["precisions"]["4-bit"]
    assert four_bit["least_card_bytes"] < 4 << 30 < four_bit["card_bytes"]
    assert 0 < dev["streamed_bytes_per_step"] < four_bit["streamed_bytes_per_step_at_least"]
    assert listed("sim:24GiB")["flux-dev"]["streamed_bytes_per_step"] == 0
    film = on_4["hunyuan-video"]
    assert (film["fits"], film["streamed_bytes_per_step"]) == (None, None)
    assert re.fullmatch(r"\d+x\d+", film["smaller"])
    shown = good(alone("models", "--available", MOORED_CARDS_DEVICES="sim:24GiB"))
    heading, *rows = (line.split("\t") for line in shown.splitlines())
    (row,) = (dict(zip(heading, row, strict=True)) for row in rows if row[0] == "flux-dev")
    assert (row["fits"], row["download"], row["makes"]) == ("8-bit", "34 GB", "pictures")
    told = json.loads(good(alone("info", "flux-dev", "--json")))
    assert "Non-Commercial" in told["licence"]
    assert "8-bit 16.1 GiB" in told["memory"]
    assert re.search(r"4-bit [\d.]+ MiB \([\d.]+ GiB in each step\)", told["streamed"])


@pytest.mark.parametrize("device", ["sim:4GiB", "sim:8GiB"])
def test_the_list_has_one_line_a_model_in_80_columns(
    hub: Hub, home: Path, tmp_path: Path, device: str
) -> None:
    env = hub.environment(home) | {
        "MOORED_ENDPOINT": f"http://{ReservedPort().address}",
        "MOORED_SERVICE_STATE": str(tmp_path / "state"),
        "MOORED_CARDS_DEVICES": device,
        "TERM": "xterm",
    }
    mine, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [str(BINARY), "models", "--available"]
    shown = b""
    with subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):
            while part := os.read(mine, 1 << 16):
                shown += part
        assert process.wait(WAIT_S) == 0
    os.close(mine)
    table = [line.rstrip() for line in shown.decode().splitlines() if " GB " in line]
    assert len(table) == 20, shown.decode()
    assert "licences: Apache-2.0 or MIT, but for flux2-klein-9b (FLUX Non-" in shown.decode()
    for line in table:
        assert len(line) <= 80 and re.search("steps|from|with", line), shown.decode()


def test_info_prints_the_facts_of_a_model(hub: Hub, alone: Run, tmp_path: Path) -> None:
    told = json.loads(good(alone("info", SHORT, "--json")))
    assert told["licence"] == "Apache-2.0"
    assert "downloaded" not in told
    assert "licence: Apache-2.0" in good(alone("pull", SHORT, "--dry-run"))
    good(alone("pull", SHORT))
    assert json.loads(good(alone("info", SHORT, "--json")))["downloaded"].startswith("15.8 MB")
    assert alone("info", "nobody/knows").returncode == 5
    service = Service("--models", str(INSTANT_MODELS), state=tmp_path / "s", devices=("sim:24GiB",))
    try:
        service.client().close()
        shown = good(service.run("info", "flux-full"))
        for word in ("transformer", "8-bit 15.9 GiB", "steps"):
            assert word in shown
    finally:
        service.stop()
