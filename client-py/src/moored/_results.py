"""What a finished job gives: pictures, latents, timings; and how events are gathered into it."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._errors import InternalError, MooredError
from ._events import Accepted, Artifact, Done, Event, LatentKept
from ._extras import numpy, pillow
from ._records import FreedComponent, LatentInfo, ResolvedModel, StageReport

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image

RAW_RGB = "image/x-raw-rgb"


@dataclass(frozen=True)
class Picture:
    """A picture as it came: `data` is a PNG, or raw RGB, as `media_type` says."""

    index: int
    """Its place among the pictures of the job, from 0."""
    media_type: str
    """`image/png` or `image/x-raw-rgb`."""
    data: bytes = field(repr=False)
    """The bytes of the file, or of the pixels: 8 bits a channel, row-major."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Width, height, seed, prompt and the like, as text."""

    @cached_property
    def image(self) -> Image.Image:
        """A PIL image, decoded once. Needs `moored[images]`."""
        if self.media_type == RAW_RGB:
            return self._raw()
        image: Image.Image = pillow().open(io.BytesIO(self.data))
        image.load()
        return image

    def _raw(self) -> Image.Image:
        size = (int(self.metadata["width"]), int(self.metadata["height"]))
        image: Image.Image = pillow().frombytes("RGB", size, self.data)
        return image

    @cached_property
    def array(self) -> NDArray[Any]:
        """A numpy array, uint8, [height, width, 3]. Needs `moored[images]`."""
        array: NDArray[Any] = numpy().asarray(self.image.convert("RGB"))
        return array

    @property
    def seed(self) -> int | None:
        """The seed that it was painted with; None where the service did not tell."""
        said = self.metadata.get("seed")
        return int(said) if said is not None else None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file. A PNG keeps its metadata; other formats go through pillow."""
        if self.media_type == "image/png" and Path(path).suffix.lower() == ".png":
            Path(path).write_bytes(self.data)
        else:
            self.image.save(path)


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Milliseconds of a stage, summed over the pictures of a job."""

    run_ms: int = 0
    """Computing."""
    move_ms: int = 0
    """Loading and evicting before it."""
    wait_ms: int = 0
    """Waiting for memory before it."""


@dataclass(frozen=True)
class JobResult:
    """What every finished job tells."""

    done: Done
    """The last event."""
    latents: tuple[LatentInfo, ...] = ()
    """Latents that it left in the service, in the order of their pictures."""

    @property
    def job_id(self) -> str:
        """The job."""
        return self.done.job_id

    @property
    def seed(self) -> int:
        """Seed of the first picture; picture i used seed + i."""
        return self.done.seed

    @property
    def stages(self) -> tuple[StageReport, ...]:
        """Every stage that ran, with times and bytes."""
        return self.done.stages

    @property
    def timings(self) -> dict[str, StageTiming]:
        """Milliseconds by stage name, summed over the pictures."""
        timings: dict[str, StageTiming] = {}
        for stage in self.done.stages:
            so_far = timings.get(stage.name, StageTiming())
            timings[stage.name] = StageTiming(
                so_far.run_ms + stage.run_ms,
                so_far.move_ms + stage.move_ms,
                so_far.wait_ms + stage.wait_ms,
            )
        return timings

    @property
    def total_ms(self) -> int:
        """Milliseconds from acceptance to the end."""
        return self.done.total_ms

    @property
    def freed(self) -> tuple[FreedComponent, ...]:
        """What left of the model that a load replaced."""
        return self.done.freed

    @property
    def model(self) -> ResolvedModel:
        """The model that was used."""
        return self.done.model

    @property
    def approximations(self) -> tuple[str, ...]:
        """Every approximation that memory forced, in words; empty: exactly the reference."""
        return self.done.approximations

    @property
    def resident_already(self) -> tuple[str, ...]:
        """Components that did not have to be loaded, by name."""
        return self.done.resident_already


@dataclass(frozen=True)
class ImageResult(JobResult):
    """The pictures of a job. Empty when only a latent was asked for."""

    pictures: tuple[Picture, ...] = ()
    """The pictures as they came, in order."""

    @property
    def image(self) -> Image.Image:
        """The first picture as a PIL image. Needs `moored[images]`."""
        return self._first().image

    @property
    def images(self) -> list[Image.Image]:
        """All pictures as PIL images. Needs `moored[images]`."""
        return [picture.image for picture in self.pictures]

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the service says of the first picture, as text."""
        return self._first().metadata

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the first picture to a file."""
        self._first().save(path)

    def _first(self) -> Picture:
        if not self.pictures:
            raise LookupError(f"Job {self.job_id} gave no picture; what it kept is in .latents")
        return self.pictures[0]


@dataclass(frozen=True)
class LatentResult(JobResult):
    """The latent of a picture that was encoded."""

    @property
    def latent(self) -> LatentInfo:
        """The latent, which stays in the service."""
        if not self.latents:
            raise LookupError(f"Job {self.job_id} gave no latent")
        return self.latents[0]


class _Assembly:
    """An artifact that is still arriving."""

    def __init__(self, first: Artifact) -> None:
        self.media_type = first.media_type
        self.metadata = first.metadata
        self.total_bytes = first.total_bytes
        self.data = bytearray()

    def add(self, piece: Artifact) -> None:
        self.data += piece.chunk

    def finish(self, index: int) -> Picture:
        if self.total_bytes and len(self.data) != self.total_bytes:
            raise InternalError(
                f"Artifact {index} ended after {len(self.data)} of {self.total_bytes} bytes"
            )
        return Picture(index, self.media_type, bytes(self.data), self.metadata)


class Gathered:
    """What the events of a job have brought so far."""

    def __init__(self) -> None:
        self.job_id = ""
        self.done: Done | None = None
        self._pictures: dict[int, Picture] = {}
        self._latents: dict[int, LatentInfo] = {}
        self._arriving: dict[int, _Assembly] = {}

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(picture for _, picture in sorted(self._pictures.items()))

    @property
    def latents(self) -> tuple[LatentInfo, ...]:
        return tuple(latent for _, latent in sorted(self._latents.items()))

    def add(self, event: Event) -> None:
        self.job_id = event.job_id or self.job_id
        if isinstance(event, Accepted):
            # A joined job replays from its start.
            self._arriving.clear()
        elif isinstance(event, Artifact):
            self._add_piece(event)
        elif isinstance(event, LatentKept):
            self._latents[event.picture] = event.latent
        elif isinstance(event, Done):
            self.done = event

    def _add_piece(self, piece: Artifact) -> None:
        # Pieces of several artifacts may be interleaved.
        if piece.index not in self._arriving:
            self._arriving[piece.index] = _Assembly(piece)
        self._arriving[piece.index].add(piece)
        if piece.last:
            self._pictures[piece.index] = self._arriving.pop(piece.index).finish(piece.index)

    def failed(self, error: MooredError) -> MooredError:
        """`error` with what the job left behind."""
        error.job_id, error.latents = self.job_id, self.latents
        return error

    def finished(self) -> Done:
        if self.done is None:
            raise self.failed(InternalError("The job's events ended without a result"))
        return self.done


def image_result(gathered: Gathered) -> ImageResult:
    """The result of GenerateImage and DecodeLatent."""
    return ImageResult(gathered.finished(), gathered.latents, gathered.pictures)


def latent_result(gathered: Gathered) -> LatentResult:
    """The result of EncodeImage."""
    return LatentResult(gathered.finished(), gathered.latents)


def job_result(gathered: Gathered) -> JobResult:
    """The result of Load."""
    return JobResult(gathered.finished(), gathered.latents)
