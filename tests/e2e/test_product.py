"""Every shipped model, in every precision, by the command line and both Python clients: see `product.py`."""

from __future__ import annotations

import asyncio
import io
import wave
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import moored
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageSequence
from product import (
    CASES,
    SEED,
    Row,
    generated,
    model_of,
    name_of,
    numbers_of,
    options_of,
    start_picture,
)

from service import Service

COMMANDS = {"image": "generate", "video": "film", "audio": "play"}
FLAGS = {"negative_prompt": "negative", "true_guidance": "true-guidance"}
"""Options of the command line, by those of the Python client, where they differ."""
ENDINGS = {"image": "png", "video": "apng", "audio": "wav"}
"""Of files without loss."""


@dataclass
class Case:
    """A row in a precision, on a service."""

    service: Service
    client: moored.Client
    row: Row
    precision: str
    folder: Path

    def command(self, name: str, *arguments: str) -> str:
        """Runs a command of the program, which succeeds; what it prints."""
        done = self.service.run(name, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def options(self) -> list[str]:
        """The row's options on the command line."""
        told = [f"--{FLAGS.get(name, name)}={value}" for name, value in self.row.options.items()]
        told += [f"--seed={SEED}", f"--steps={self.row.steps}"]
        told += [f"--quantization={self.precision}"]
        if self.row.needs_picture:
            start = self.folder / "start.png"
            start_picture().save(start)
            told.append(f"--init={start}")
        return told


def by_medium(case: Case) -> NDArray[Any]:
    """`moored generate`, `film` or `play`."""
    output = case.folder / f"out.{ENDINGS[case.row.medium]}"
    model = ["-m", case.row.model, "-o", str(output)]
    case.command(COMMANDS[case.row.medium], case.row.prompt, *model, *case.options())
    return read(output)


def by_run(case: Case) -> NDArray[Any]:
    """`moored run`, which chooses the precision by itself where none is asked for."""
    output = case.folder / f"run.{ENDINGS[case.row.medium]}"
    options = [one for one in case.options() if one != "--quantization=auto"]
    medium = ["--medium", case.row.medium, "-o", str(output)]
    case.command("run", case.row.model, case.row.prompt, *medium, *options)
    return read(output)


def by_async_client(case: Case) -> NDArray[Any]:
    """The asynchronous Python client."""

    async def generate() -> Any:
        async with moored.AsyncClient(case.service.address) as client:
            call = {
                "image": client.generate_image,
                "video": client.generate_video,
                "audio": client.generate_audio,
            }[case.row.medium]
            return await call(case.row.prompt, **options_of(case.row, case.precision))

    return numbers_of(asyncio.run(generate()))


def by_uploaded_picture(case: Case) -> NDArray[Any]:
    """The synchronous client, with a start picture that was uploaded before."""
    options = options_of(case.row, case.precision)
    if case.row.needs_picture:
        options["init_media"] = case.client.put_media(options.pop("init_image"))
    call = {
        "image": case.client.generate_image,
        "video": case.client.generate_video,
        "audio": case.client.generate_audio,
    }[case.row.medium]
    return numbers_of(call(case.row.prompt, **options))


FRONTS: dict[str, Callable[[Case], NDArray[Any]]] = {
    "command line": by_medium,
    "run": by_run,
    "async client": by_async_client,
    "uploaded": by_uploaded_picture,
}


def read(output: Path) -> NDArray[Any]:
    """The pixels or samples of a file without loss, as `numbers_of` has them."""
    if output.suffix == ".wav":
        with wave.open(io.BytesIO(output.read_bytes())) as track:
            samples = np.frombuffer(track.readframes(track.getnframes()), "<i2")
            return samples.reshape(-1, track.getnchannels())
    with Image.open(output) as image:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
    return frames[0] if output.suffix == ".png" else np.stack(frames)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(state=tmp_path_factory.mktemp("product"))
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[moored.Client]:
    with service.client() as client:
        yield client


@pytest.mark.parametrize(("row", "precision"), CASES, ids=name_of)
def test_every_front_gives_the_same_result(
    service: Service, client: moored.Client, tmp_path: Path, row: Row, precision: str
) -> None:
    case = Case(service, client, row, precision, tmp_path)
    result = generated(client, row, precision)
    preset = result.model.key.rpartition("+")[2]
    assert precision in ("auto", preset)
    expected = numbers_of(result)
    assert expected.std() > 1, "something is to be seen or heard"
    for name, front in FRONTS.items():
        assert np.array_equal(front(case), expected), f"{name} gives another result"


@pytest.mark.parametrize(("row", "precision"), CASES, ids=name_of)
def test_every_front_plans_and_loads(
    service: Service, client: moored.Client, tmp_path: Path, row: Row, precision: str
) -> None:
    case = Case(service, client, row, precision, tmp_path)
    plans = {
        "image": client.plan,
        "video": client.plan_video,
        "audio": client.plan_audio,
    }
    asked = plans[row.medium](row.prompt, **options_of(row, precision))
    alone = client.plan_model(model_of(row, precision))
    assert asked.runs_now and alone.runs_now
    assert [stage.name for stage in alone.stages][-1].startswith("decode")
    medium = ["--medium", row.medium, "-m", row.model]
    assert "runs now" in case.command("plan", row.prompt, *medium, *case.options())
    case.command("load", row.model, f"--quantization={precision}")
    client.load(model_of(row, precision))
