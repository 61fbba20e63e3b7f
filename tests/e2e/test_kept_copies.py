"""Copies of what is quantized at load: made, read again, made again when damaged, and optional."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import moored
import pytest
from waiting import wait_until

from service import Service

DEADLINE_S = 300.0
FOUR_BITS = moored.ModelRef("moored/demo", quantization="4-bit")
QUANTIZED = {"transformer", "text_encoder_2"}

Keep = Callable[..., Service]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def keep(tmp_path: Path, folder: Path) -> Keep:
    """Starts a service that keeps copies in `folder`."""

    def start(number: int, *arguments: str) -> Service:
        setting = f"quantization.keep_folder={folder}"
        state = tmp_path / f"state-{number}"
        return Service("--set", setting, *arguments, state=state)

    return start


def copies(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kept.safetensors"))


def loads(service: Service) -> list[tuple[str, str]]:
    """Component, and what it was loaded from, as the log says."""
    found = re.findall(r' loaded component="(\w+)".* from="([\w ]+)"', "".join(service.log))
    return [(name, source) for name, source in found]


def load(client: moored.Client, service: Service) -> dict[str, str]:
    """Unloads and loads; where each quantized component was read from."""
    before = len(loads(service))
    client.unload(timeout=DEADLINE_S)
    client.load(FOUR_BITS, timeout=DEADLINE_S)
    service.wait_for_log(lambda: len(loads(service)) == before + 4)
    return {name: source for name, source in loads(service)[before:] if name in QUANTIZED}


def load_until(client: moored.Client, service: Service, sources: dict[str, str]) -> None:
    """Loads again and again until each is read from its source: copies are made meanwhile."""
    wait_until(lambda: load(client, service) == sources, f"it is read from {sources}", DEADLINE_S)


def generate(client: moored.Client) -> bytes:
    picture = client.generate_image("a red cube", model=FOUR_BITS, seed=1, timeout=DEADLINE_S)
    return picture.images[0].tobytes()


FROM_COPIES = dict.fromkeys(QUANTIZED, "kept copy")
FROM_CHECKPOINT = dict.fromkeys(QUANTIZED, "checkpoint")


def test_the_next_load_reads_the_copies_and_gives_the_same_picture(
    keep: Keep, folder: Path
) -> None:
    first = keep(0)
    with first.client() as client:
        assert load(client, first) == FROM_CHECKPOINT
        wait_until(lambda: len(copies(folder)) == 2, "both are kept", DEADLINE_S)
        assert {path.name.split("-nf4-")[0] for path in copies(folder)} == QUANTIZED
        picture = generate(client)
        load_until(client, first, FROM_COPIES)
    assert first.stop() == 0
    second = keep(1)
    with second.client() as client:
        assert load(client, second) == FROM_COPIES
        assert generate(client) == picture
    assert second.stop() == 0
    assert len(list(folder.iterdir())) == 2


def test_damaged_or_removed_copies_are_made_again(keep: Keep, folder: Path) -> None:
    service = keep(0)
    with service.client() as client:

        def made() -> bytes:
            load_until(client, service, FROM_COPIES)
            return generate(
                client
            )  # nothing is loaded meanwhile, so that nothing more is asked for

        load(client, service)
        picture = made()
        whole = {path: path.read_bytes() for path in copies(folder)}
        for path, content in whole.items():
            path.write_bytes(content[: len(content) // 2])
        assert load(client, service) == FROM_CHECKPOINT
        assert made() == picture
        for path in whole:
            path.write_bytes(b"of somebody else")
        assert load(client, service) == FROM_CHECKPOINT
        assert made() == picture
        shutil.rmtree(folder)
        assert load(client, service) == FROM_CHECKPOINT
        assert made() == picture
        assert {path: path.read_bytes() for path in copies(folder)} == whole
    assert service.stop() == 0


def test_a_folder_that_cannot_be_written_fails_nothing(keep: Keep, folder: Path) -> None:
    service = keep(0)
    with service.client() as client:
        folder.rmdir()
        folder.write_text("no folder any more")
        for _ in range(2):
            assert load(client, service) == FROM_CHECKPOINT
        generate(client)
        said = "no copy of a quantized component is kept"
        service.wait_for_log(lambda: sum(said in line for line in service.log) == len(QUANTIZED))
    assert service.stop() == 0
    assert folder.read_text() == "no folder any more"


def test_a_limit_below_a_copy_keeps_the_others(keep: Keep, folder: Path) -> None:
    service = keep(0, "--set", "quantization.keep_limit=1MiB")
    with service.client() as client:
        load(client, service)
        mixed = {"transformer": "checkpoint", "text_encoder_2": "kept copy"}
        load_until(client, service, mixed)
    assert service.stop() == 0
    assert len(list(folder.iterdir())) == 1


def test_two_services_share_a_folder(keep: Keep, folder: Path) -> None:
    services = [keep(number) for number in range(2)]
    clients = [service.client() for service in services]
    for client, service in zip(clients, services, strict=True):
        load(client, service)
    for client, service in zip(clients, services, strict=True):
        load_until(client, service, FROM_COPIES)
        client.close()
        assert service.stop() == 0
    assert len(list(folder.iterdir())) == 2


def test_the_next_service_removes_what_a_killed_one_left(keep: Keep, folder: Path) -> None:
    for number in range(4):
        service = keep(number)
        with service.client() as client:
            client.load(FOUR_BITS, timeout=DEADLINE_S)
            if number == 0:
                wait_until(lambda: any(folder.iterdir()), "a copy is begun", DEADLINE_S)
            service.kill()
    last = keep(9)
    with last.client() as client:
        load_until(client, last, FROM_COPIES)
    assert last.stop() == 0
    assert len(copies(folder)) == len(list(folder.iterdir())) == 2
