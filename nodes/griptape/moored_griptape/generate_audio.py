"""The node Generate Audio: text to music or sound, and what is made of a track."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import moored
from griptape.artifacts import AudioUrlArtifact
from griptape_nodes.exe_types.param_types.parameter_audio import ParameterAudio
from griptape_nodes.exe_types.param_types.parameter_float import ParameterFloat
from griptape_nodes.exe_types.param_types.parameter_int import ParameterInt
from griptape_nodes.exe_types.param_types.parameter_string import ParameterString
from griptape_nodes.traits.options import Options

from moored_griptape.generating_node import GeneratingNode
from moored_griptape.given_pictures import file_data
from moored_griptape.numbers import listed, number

# While the library loads, and not on the engine's loop in the middle of a run.
AudioUrlArtifact("").to_dict()

NEW_TRACK = "new track"
TASKS = (NEW_TRACK, "repaint", "cover", "extract", "lego", "complete")
WINDOWED = ("repaint", "lego")
FORMATS = ("wav", "flac")


class MooredGenerateAudio(GeneratingNode):
    """Makes music or sound from a prompt, or from a prompt and a track, as a file of the project."""

    kind_of_options = moored.AudioOptions
    prompt_tooltip = "What is to be heard."
    prompt_example = "a slow waltz on an accordion"
    without_prompt = "There is no prompt: say what is to be heard"
    # The engine gives a file the ending of what is in it.
    default_file = "track.wav"
    detaches = True

    def _add_inputs_of_its_own(self) -> None:
        self._add_text("lyrics", "What is sung. Empty: nothing.", multiline=True)
        self._add_seconds("seconds", "0: that of the input_audio, else the model's default.")
        self._add_audio("input_audio", "A WAV or FLAC that the task is about, or to start from.")
        self._add_choice(
            "task",
            "What to make of the input_audio: a part anew, its melody in another style, one of its tracks "
            "alone, one track more, or it with further tracks. A model may know some of them only.",
            TASKS,
        )
        self._add_seconds("start_seconds", "Of repaint and lego: where the part begins.")
        self._add_seconds(
            "end_seconds", "Of repaint and lego: where it ends. 0: at the end of the input_audio."
        )
        self._add_text(
            "tracks", "Of extract, lego and complete: vocals, drums and the like, with commas."
        )
        self._add_audio("reference_audio", "A WAV or FLAC whose timbre is taken.")
        self.add_parameter(
            ParameterInt(
                name="bpm", tooltip="Beats a minute. 0: the model's choice.", default_value=0
            )
        )
        self._add_text("key", "Key and scale: C major. Empty: the model's choice.")
        self._add_text("time_signature", "Beats of a bar: 4. Empty: the model's choice.")
        self._add_text("language", "Language of the lyrics: en. Empty: the model's.")

    def _add_inputs_before_the_file(self) -> None:
        self._add_choice("file_format", "Both have the recipe in them; flac is smaller.", FORMATS)

    def _add_text(self, name: str, tooltip: str, *, multiline: bool = False) -> None:
        self.add_parameter(
            ParameterString(name=name, tooltip=tooltip, default_value="", multiline=multiline)
        )

    def _add_seconds(self, name: str, tooltip: str) -> None:
        self.add_parameter(ParameterFloat(name=name, tooltip=tooltip, default_value=0.0))

    def _add_audio(self, name: str, tooltip: str) -> None:
        self.add_parameter(ParameterAudio(name=name, tooltip=tooltip, allow_output=False))

    def _add_choice(self, name: str, tooltip: str, choices: tuple[str, ...]) -> None:
        self.add_parameter(
            ParameterString(
                name=name,
                tooltip=tooltip,
                default_value=choices[0],
                traits={Options(choices=list(choices))},
            )
        )

    def _add_outputs(self) -> None:
        self.add_parameter(
            ParameterAudio(
                name="audio",
                tooltip="The track, a file of the project.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )

    async def _run(self, client: moored.AsyncClient) -> str:
        prompt = self._prompt()
        options = {
            **self._options(),
            **self._music(),
            "output": self._chosen("file_format", FORMATS),
        }
        self._brought: dict[str, moored.MediaInfo] = {}

        def begin(whole: dict[str, Any]) -> moored.AsyncEventStream[moored.AudioResult]:
            return client.stream_audio(prompt, **whole)

        try:
            result = await self._made(client, client.plan_audio, options, begin)
        finally:
            # What was accepted keeps it; what fails here expires.
            with contextlib.suppress(moored.MooredError):
                for media in self._brought.values():
                    await client.release_media(media)
        track = result.track()
        audio = await asyncio.to_thread(self._saved, track)
        self.parameter_output_values["audio"] = audio
        return (
            f"Made with {result.model.key}, seed {result.seed}, {track.seconds:.1f} s long, in "
            f"{result.total_ms / 1000:.1f} s: {Path(audio.value).name}"
        )

    def _music(self) -> dict[str, Any]:
        """Lyrics, task, window and metre, as options."""
        task = self._chosen("task", TASKS)
        start, end = (self._seconds(name) for name in ("start_seconds", "end_seconds"))
        tracks = [
            str(name).strip()
            for name in listed(self.get_parameter_value("tracks"), "tracks", "names")
        ]
        return {
            **{
                name: str(self.get_parameter_value(name) or "").strip() or None
                for name in ("key", "time_signature", "language")
            },
            "lyrics": str(self.get_parameter_value("lyrics") or "") or None,
            "seconds": self._seconds("seconds"),
            "task": None if task == NEW_TRACK else task,
            "window": (start, end) if task in WINDOWED or start or end else None,
            "tracks": tracks or None,
            "bpm": self._whole("bpm"),
        }

    async def _options_by_model(self, client: moored.AsyncClient) -> dict[str, Any]:
        """The tracks of the node, uploaded to the service once."""
        for name, option in (("input_audio", "init_media"), ("reference_audio", "reference")):
            given = self.get_parameter_value(name)
            if given and option not in self._brought:
                data = await asyncio.to_thread(file_data, given)
                # Of several boxes, all of a request is at the one that is to have its model.
                box = next((client.box_of(one) for one in self._brought.values()), "")
                try:
                    self._brought[option] = await client.put_media(
                        data, model=self._handle.ref, box=box
                    )
                except (ValueError, moored.InvalidRequest) as error:
                    raise ValueError(f"The {name} cannot be taken: {error}") from error
        return dict(self._brought)

    def _chosen(self, name: str, choices: tuple[str, ...]) -> str:
        value = str(self.get_parameter_value(name) or choices[0])
        if value not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}, not {value!r}")
        return value

    def _seconds(self, name: str) -> float | None:
        """Seconds that 0 leaves open."""
        return number(self.get_parameter_value(name) or 0, name) or None

    def _saved(self, track: moored.Track) -> AudioUrlArtifact:
        """The track as a file, by the project's rules. Blocks: run it in a thread."""
        return AudioUrlArtifact(self._file.build_file().write_bytes(bytes(track.data)).location)
