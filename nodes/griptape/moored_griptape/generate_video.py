"""The node Generate Video: text to video, and image to video."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import moored
from griptape.artifacts import AudioUrlArtifact, VideoUrlArtifact
from griptape_nodes.exe_types.param_types.parameter_audio import ParameterAudio
from griptape_nodes.exe_types.param_types.parameter_float import ParameterFloat
from griptape_nodes.exe_types.param_types.parameter_image import ParameterImage
from griptape_nodes.exe_types.param_types.parameter_int import ParameterInt
from griptape_nodes.exe_types.param_types.parameter_video import ParameterVideo
from griptape_nodes.files.file import FileWriteError

from moored_griptape.given_pictures import sized_picture
from moored_griptape.numbers import number
from moored_griptape.previewing_node import PreviewingNode

# While the library loads, and not on the engine's loop in the middle of a run.
VideoUrlArtifact("").to_dict()
AudioUrlArtifact("").to_dict()


class MooredGenerateVideo(PreviewingNode):
    """Generates a film from a prompt, or from a prompt and a picture, as a file of the project."""

    kind_of_options = moored.VideoOptions
    shown = "film"
    prompt_tooltip = "What the film shows."
    prompt_example = "a red cube that turns slowly on a blue plane"
    without_prompt = "There is no prompt: say what the film is to show"
    # The engine gives a file the ending of what is in it.
    default_file = "film.mp4"
    detaches = True

    def _add_inputs_of_its_own(self) -> None:
        self.add_parameter(
            ParameterImage(
                name="input_image",
                tooltip="The picture that the film starts from, for models that take one, such as "
                "FramePack. Empty: from the prompt alone.",
                allow_output=False,
            )
        )
        self.add_parameter(
            ParameterImage(
                name="end_image",
                tooltip="The picture that the film ends with, for models that take one, such as "
                "FramePack. Empty: the film ends as it likes.",
                allow_output=False,
            )
        )
        for side in ("width", "height"):
            self.add_parameter(
                ParameterInt(
                    name=side,
                    tooltip="Pixels, a multiple of 16. 0: the model's default, in the shape of the "
                    "input_image.",
                    default_value=0,
                )
            )
        self.add_parameter(
            ParameterFloat(
                name="seconds",
                tooltip="How long. 0: the model's default, or by frames.",
                default_value=0.0,
            )
        )
        self.add_parameter(
            ParameterInt(
                name="frames",
                tooltip="How many, instead of seconds. Some models take certain numbers only.",
                default_value=0,
            )
        )
        self.add_parameter(
            ParameterFloat(
                name="fps", tooltip="Frames a second. 0: the model's default.", default_value=0.0
            )
        )

    def _add_result(self) -> None:
        self.add_parameter(
            ParameterVideo(
                name="video",
                tooltip="The film, a file of the project, with its sound if it has any.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )
        self.add_parameter(
            ParameterAudio(
                name="audio",
                tooltip="Its sound alone, if it has any.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )

    async def _run(self, client: moored.AsyncClient) -> str:
        prompt, options = self._prompt(), self._options()

        def begin(whole: dict[str, Any]) -> moored.AsyncEventStream[moored.VideoResult]:
            interval_s = self._preview_interval_s
            return client.stream_video(prompt, preview_interval_s=interval_s, **whole)

        result = await self._made(client, client.plan_video, options, begin)
        film, sound = result.film, result.audio
        video = await asyncio.to_thread(self._saved, film)
        self.parameter_output_values["video"] = video
        if sound is not None:
            audio = await asyncio.to_thread(self._saved_sound, sound)
            self.parameter_output_values["audio"] = audio
        return (
            f"Generated with {result.model.key}, seed {result.seed}, {film.frame_count} frames of "
            f"{film.width} x {film.height}, {film.frame_count / film.frames_per_second:.1f} s long, "
            f"in {result.total_ms / 1000:.1f} s: {Path(video.value).name}"
        )

    async def _options_by_model(self, client: moored.AsyncClient) -> dict[str, Any]:
        """Start, size and length."""
        width, height, frames = (self._whole(name) for name in ("width", "height", "frames"))
        seconds, fps = (self._positive(name) for name in ("seconds", "fps"))
        if seconds and frames:
            raise ValueError("The length is named twice: set either seconds or frames to 0")
        start: bytes | None = None
        end: bytes | None = None
        if last := self.get_parameter_value("end_image"):
            end, _ = await asyncio.to_thread(sized_picture, last, "end_image")
        given = self.get_parameter_value("input_image")
        if given:
            start, size = await asyncio.to_thread(sized_picture, given, "input_image")
            defaults = await self._defaults(client)
            width, height = defaults.film_size(size, width or 0, height or 0)
        if seconds:
            defaults = await self._defaults(client)
            if not (fps or defaults.frames_per_second):
                raise ValueError("This model has no rate of its own: set fps beside seconds")
            frames = None
        return {
            "init_image": start,
            "end_image": end,
            "width": width,
            "height": height,
            "frames": frames,
            "seconds": seconds or None,
            "frames_per_second": fps or None,
        }

    async def _defaults(self, client: moored.AsyncClient) -> moored.ModelDefaults:
        """The values of a model that makes films; all of them 0 where the service does not list it."""
        # A name may bring a quantization: owner/name+4-bit.
        name = self._handle.model.partition("+")[0]
        for listed in await client.list_models():
            is_it = listed.id == name or (not name and listed.is_default)
            if is_it and listed.defaults.frames:
                return listed.defaults
        # Whether it is there, and makes films, is the service's to say; what else is missing, later.
        with contextlib.suppress(moored.MemoryShortage, moored.CardNotReady):
            try:
                await client.plan_video(model=self._handle.ref)
            except moored.InvalidRequest as error:
                if any(violation.field == "model" for violation in error.violations):
                    raise
        return moored.ModelDefaults(0, 0.0, 0, 0, 0)

    def _positive(self, name: str) -> float:
        """A number that 0 leaves to the model."""
        value = number(self.get_parameter_value(name) or 0, name)
        if not value >= 0:
            raise ValueError(f"{name} is 0 or more, not {value:g}")
        return value

    def _saved(self, film: moored.Film) -> VideoUrlArtifact:
        """The film as a file, by the project's rules. Blocks: run it in a thread.

        One with sound is an MP4. The engine refuses those whose codec it cannot probe, where there
        is no FFmpeg beside it: then the film is an animated WebP, and `audio` alone has its sound.
        """
        file = self._file.build_file()
        if film.sound is not None:
            try:
                return VideoUrlArtifact(file.write_bytes(film.mp4).location)
            except (FileWriteError, ValueError) as problem:
                self._shown.line(f"The film is saved without its sound, which audio has: {problem}")
        return VideoUrlArtifact(file.write_bytes(_animation_of(film)).location)

    def _saved_sound(self, sound: moored.Track) -> AudioUrlArtifact:
        """The sound, which came as WAV, as a file. Blocks: run it in a thread."""
        return AudioUrlArtifact(self._saved_beside(bytes(sound.data), "sound.wav"))


def _animation_of(film: moored.Film) -> bytes:
    """An animated WebP of a film's frames, with its recipe. Blocks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.webp"
        film.save(path)
        return path.read_bytes()
