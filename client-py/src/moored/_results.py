"""What a finished job gives: pictures, films, tracks, latents, timings.

And how its events are gathered into that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._assembly import Assembly, FilmAssembly, TrackAssembly, assembly_of
from ._bounds import Bounds
from ._errors import InternalError, MooredError
from ._events import Accepted, Artifact, Done, Event, LatentKept, TextLeftOut
from ._media import FLAC, MP4, RAW_VIDEO, WAV, Film, Frame, Picture, Samples, Track
from ._records import FreedComponent, LatentInfo, ResolvedModel, StageReport

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Milliseconds of a stage, summed over the pictures of a job."""

    run_ms: int = 0
    """Computing."""
    move_ms: int = 0
    """Loading and evicting before it."""
    wait_ms: int = 0
    """Waiting for memory before it."""


@dataclass(frozen=True, repr=False)
class JobResult:
    """The figures of every finished job."""

    done: Done
    """The last event."""
    latents: tuple[LatentInfo, ...] = ()
    """Latents that it left in the service, in the order of what they are of."""

    @property
    def job_id(self) -> str:
        """The job."""
        return self.done.job_id

    @property
    def seed(self) -> int:
        """Seed of the first picture, film or track; number i used seed + i."""
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
        """Every approximation that memory forced, or that a decoded latent has, in words.

        Empty: exactly the reference.
        """
        return self.done.approximations

    @property
    def left_out(self) -> tuple[TextLeftOut, ...]:
        """The ends of the prompt and the lyrics that are too long for the model to read."""
        return self.done.left_out

    @property
    def resident_already(self) -> tuple[str, ...]:
        """Components that did not have to be loaded, by name."""
        return self.done.resident_already

    def to_dict(self) -> dict[str, Any]:
        """Its data, without pixels and sound, in values that `json.dumps` takes."""
        return {
            "job_id": self.job_id,
            "seed": self.seed,
            "model": self.model.key,
            "total_ms": self.total_ms,
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
            "approximations": list(self.approximations),
            "resident_already": list(self.resident_already),
            "latents": [latent.id for latent in self.latents],
            **self._described(),
        }

    def _described(self) -> dict[str, Any]:
        return {}

    def _says(self) -> list[str]:
        """What a line about it says first."""
        return []

    def __repr__(self) -> str:
        told = [*self._says(), f"seed {self.seed}", f"{self.total_ms / 1000:.1f} s", self.model.key]
        return f"{type(self).__name__}({', '.join(told)})"

    def _without(self, what: str) -> LookupError:
        return LookupError(f"Job {self.job_id} gave no {what}; what it kept is in .latents")


@dataclass(frozen=True, repr=False)
class ImageResult(JobResult):
    """The pictures of a job. Empty when only a latent was asked for."""

    pictures: tuple[Picture, ...] = ()
    """The pictures as they came, in order."""

    @property
    def data(self) -> bytes:
        """The bytes of the first picture: a PNG file, or raw pixels by `output="raw"`."""
        return self._first().data

    def _described(self) -> dict[str, Any]:
        return {"pictures": [_description(one) for one in self.pictures]}

    def _says(self) -> list[str]:
        sizes = {
            f"{p.metadata.get('width', '?')}x{p.metadata.get('height', '?')}" for p in self.pictures
        }
        number = f"{len(self.pictures)} of " if len(self.pictures) > 1 else ""
        return [number + ", ".join(sorted(sizes))] if sizes else ["no picture"]

    def _repr_png_(self) -> bytes | None:
        return self.pictures[0]._png() if self.pictures else None

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

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes the first picture to a file, with its recipe: `.png`, `.jpg` or `.webp`.

        Of several, `result.pictures` has the others. A file that is there is replaced by
        `overwrite` alone; else the name is counted up. Returns the path.
        """
        return self._first().save(path, overwrite=overwrite)

    def _first(self) -> Picture:
        if not self.pictures:
            raise self._without("picture")
        return self.pictures[0]


@dataclass(frozen=True, repr=False)
class VideoResult(JobResult):
    """The films of a job. Empty when only a latent was asked for."""

    films: tuple[Film, ...] = ()
    """The films as they came, in order."""
    tracks: tuple[Track, ...] = ()
    """Their sound, where the model makes any, in order.

    By `output="mp4"` it is in the file alone.
    """

    @property
    def data(self) -> memoryview:
        """The bytes of the first film: its frames, or the MP4 file by `output="mp4"`."""
        return self.film.data

    def _described(self) -> dict[str, Any]:
        films = [
            _description(one)
            | {
                "width": one.width,
                "height": one.height,
                "frames": one.frame_count,
                "frames_per_second": one.frames_per_second,
                "sound": None if one.sound is None else asdict(one.sound),
            }
            for one in self.films
        ]
        return {"films": films, "tracks": [_description(one) for one in self.tracks]}

    def _says(self) -> list[str]:
        return [
            f"{one.frame_count} frames of {one.width}x{one.height}"
            + ("" if one.sound is None else " with sound")
            for one in self.films
        ]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {
            **(self.films[0]._repr_mimebundle_() if self.films else {}),
            "text/plain": repr(self),
        }

    @property
    def film(self) -> Film:
        """The first film."""
        if not self.films:
            raise self._without("film")
        return self.films[0]

    @property
    def audio(self) -> Track | None:
        """The sound of the first film: its samples, their rate; None: the film is silent.

        It begins with the first frame. Of the others, `tracks` has the sound by `index`.
        """
        film = self.film
        for track in self.tracks:
            if (track.index, track.name) == (film.index, SOUND):
                return track
        if film.sound is None:
            return None
        raise ValueError(
            'Its sound came in the MP4 alone: ask for output="raw+mp4", the default, or "raw"'
        )

    @property
    def array(self) -> NDArray[Any]:
        """The first film as a numpy array, uint8, [frames, height, width, 3], without a copy.

        Needs `moored[images]`.
        """
        return self.film.array

    @property
    def frames(self) -> list[Image.Image]:
        """The frames of the first film as PIL images. Needs `moored[images]`."""
        return self.film.frames

    @property
    def mp4(self) -> bytes:
        """The MP4 file of the first film, where it was asked for by `output="mp4"`."""
        return self.film.mp4

    @property
    def frames_per_second(self) -> float:
        """The rate of the first film."""
        return self.film.frames_per_second

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the service says of the first film, as text."""
        return self.film.metadata

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes the first film to a file; see Film.save for the formats."""
        return self.film.save(path, overwrite=overwrite)


@dataclass(frozen=True, repr=False)
class AudioResult(JobResult):
    """The tracks of a job. Empty when only a latent was asked for."""

    tracks: tuple[Track, ...] = ()
    """The tracks as they came, in the order of their items."""

    @property
    def data(self) -> memoryview:
        """The bytes of the first track: a WAV file, or what `output` says."""
        return self.track().data

    def _described(self) -> dict[str, Any]:
        tracks = [
            _description(one)
            | {
                "name": one.name,
                "sample_rate": one.sample_rate,
                "channels": one.channels,
                "seconds": one.seconds,
            }
            for one in self.tracks
        ]
        return {"tracks": tracks}

    def _says(self) -> list[str]:
        return [f"{one.name or 'track'} of {one.seconds:.1f} s" for one in self.tracks]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        first = self.tracks[0]._repr_mimebundle_() if self.tracks else {}
        return {**first, "text/plain": repr(self)}

    def track(self, name: str | None = None, index: int = 0) -> Track:
        """A track of an item, by its name; by none, the first of the item."""
        for track in self.tracks:
            if track.index == index and name in (None, track.name):
                return track
        if not self.tracks:
            raise self._without("track")
        there = ", ".join(f"{track.name!r} of item {track.index}" for track in self.tracks)
        raise LookupError(f"Job {self.job_id} gave no track {name!r} of item {index}: {there}")

    @property
    def array(self) -> NDArray[Any]:
        """The first track as a numpy array, int16, [samples, channels], without a copy.

        Needs `moored[images]`.
        """
        return self.track().array

    @property
    def flac(self) -> bytes:
        """The FLAC file of the first track, where it was asked for by `output="flac"`."""
        return self.track().flac

    @property
    def sample_rate(self) -> int:
        """Samples a second of the first track, of each channel."""
        return self.track().sample_rate

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the service says of the first track, as text."""
        return self.track().metadata

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Writes the first track to a file; see Track.save for the formats."""
        return self.track().save(path, overwrite=overwrite)


@dataclass(frozen=True, repr=False)
class LatentResult(JobResult):
    """The latent of a picture that was encoded."""

    @property
    def latent(self) -> LatentInfo:
        """The latent, which stays in the service."""
        if not self.latents:
            raise LookupError(f"Job {self.job_id} gave no latent")
        return self.latents[0]


def _description(made: Picture | Film | Track) -> dict[str, Any]:
    return {
        "index": made.index,
        "media_type": made.media_type,
        "bytes": len(made.data),
        "seed": made.seed,
        "recipe": dict(made.recipe),
    }


# The name of the track that has the sound of a film.
SOUND = "sound"

# A result that comes as pieces, and the file of it that may come after them.
_FILES = {RAW_VIDEO: MP4, WAV: FLAC}


class Gathered:
    """The results in the events of a job so far."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._bytes = 0
        self.job_id = ""
        self.done: Done | None = None
        self._latents: dict[int, LatentInfo] = {}
        # By index and track, in the order in which they began.
        self._assemblies: dict[tuple[int, str], Assembly] = {}
        # Files that come after the pieces, of results that are whole.
        self._files: dict[tuple[int, str], Assembly] = {}

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(one.whole for one in self._in_order() if isinstance(one.whole, Picture))

    @property
    def films(self) -> tuple[Film, ...]:
        return tuple(one.whole for one in self._in_order() if isinstance(one.whole, Film))

    @property
    def tracks(self) -> tuple[Track, ...]:
        return tuple(one.whole for one in self._in_order() if isinstance(one.whole, Track))

    def new_frames(self) -> Iterator[Frame]:
        """Frames of any film that were not returned here before."""
        for one in self._in_order():
            if isinstance(one, FilmAssembly):
                yield from one.frames()

    def new_samples(self) -> Iterator[Samples]:
        """Samples of any track that were not returned here before."""
        for one in self._in_order():
            if isinstance(one, TrackAssembly) and (samples := one.samples()) is not None:
                yield samples

    def _in_order(self) -> list[Assembly]:
        return sorted(self._assemblies.values(), key=lambda one: one.first.index)

    @property
    def latents(self) -> tuple[LatentInfo, ...]:
        return tuple(latent for _, latent in sorted(self._latents.items()))

    def add(self, event: Event) -> None:
        self.job_id = event.job_id or self.job_id
        if isinstance(event, Accepted):
            # A joined job replays from its start.
            whole = {key: one for key, one in self._assemblies.items() if one.whole is not None}
            self._assemblies = whole
            self._files.clear()
            self._bytes = 0
        elif isinstance(event, Artifact):
            self._add_piece(event)
        elif isinstance(event, LatentKept):
            self._bounds.check_item(event.item, "latent")
            self._latents[event.item] = event.latent
        elif isinstance(event, Done):
            self.done = event

    def _add_piece(self, piece: Artifact) -> None:
        # Pieces of several artifacts, and of several tracks of one, may be interleaved.
        self._bounds.check_item(piece.index, "result")
        self._bytes += len(piece.chunk)
        self._bounds.check_bytes(self._bytes)
        key = (piece.index, piece.track)
        assembly = self._files.get(key) or self._assemblies.get(key)
        if assembly is None or assembly.whole is not None:
            before, assembly = assembly, assembly_of(piece, self._bounds)
            is_file = before is not None and _FILES.get(before.first.media_type) == piece.media_type
            (self._files if is_file else self._assemblies)[key] = assembly
            self._bounds.check_tracks(len(self._assemblies))
        assembly.add(piece)
        if assembly.whole is not None and self._files.get(key) is assembly:
            del self._files[key]
            made, file = self._assemblies[key], assembly.whole
            if isinstance(made.whole, (Film, Track)):
                made.whole = replace(made.whole, _file=bytes(file.data))

    def failed(self, error: MooredError) -> MooredError:
        """`error` with the job's id and the latents that it kept."""
        error.job_id, error.latents = self.job_id, self.latents
        return error

    def finished(self) -> Done:
        if self.done is None:
            raise self.failed(
                InternalError(
                    "The job's events ended without a result: run it again, and see its log"
                )
            )
        return self.done


def image_result(gathered: Gathered) -> ImageResult:
    """The result of GenerateImage, and of DecodeLatent for a picture."""
    return ImageResult(gathered.finished(), gathered.latents, gathered.pictures)


def video_result(gathered: Gathered) -> VideoResult:
    """The result of GenerateVideo, and of DecodeLatent for a film."""
    return VideoResult(gathered.finished(), gathered.latents, gathered.films, gathered.tracks)


def audio_result(gathered: Gathered) -> AudioResult:
    """The result of GenerateAudio, and of DecodeLatent for a track."""
    return AudioResult(gathered.finished(), gathered.latents, gathered.tracks)


def latent_result(gathered: Gathered) -> LatentResult:
    """The result of EncodeImage."""
    return LatentResult(gathered.finished(), gathered.latents)


def job_result(gathered: Gathered) -> JobResult:
    """The result of Load."""
    return JobResult(gathered.finished(), gathered.latents)


def fetched_result(gathered: Gathered) -> ImageResult | VideoResult | AudioResult:
    """The result of a job of any medium."""
    if gathered.films:
        return video_result(gathered)
    if gathered.tracks:
        return audio_result(gathered)
    return image_result(gathered)
