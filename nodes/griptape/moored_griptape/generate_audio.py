"""The node Generate Audio: text to music or sound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import moored
from griptape.artifacts import AudioUrlArtifact
from griptape_nodes.exe_types.param_types.parameter_audio import ParameterAudio
from griptape_nodes.exe_types.param_types.parameter_float import ParameterFloat
from griptape_nodes.exe_types.param_types.parameter_string import ParameterString

from moored_griptape.generating_node import GeneratingNode
from moored_griptape.numbers import number

# While the library loads, and not on the engine's loop in the middle of a run.
AudioUrlArtifact("").to_dict()


class MooredGenerateAudio(GeneratingNode):
    """Makes music or sound from a prompt, as a WAV file of the project."""

    prompt_tooltip = "What is to be heard."
    prompt_example = "a slow waltz on an accordion"
    without_prompt = "There is no prompt: say what is to be heard"
    default_file = "track.wav"

    def _add_inputs_of_its_own(self) -> None:
        self.add_parameter(
            ParameterString(
                name="lyrics",
                tooltip="What is sung. Empty: nothing.",
                default_value="",
                multiline=True,
            )
        )
        self.add_parameter(
            ParameterFloat(name="seconds", tooltip="0: the model's default.", default_value=0.0)
        )

    def _add_outputs(self) -> None:
        self.add_parameter(
            ParameterAudio(
                name="audio",
                tooltip="The track, a WAV file of the project.",
                allow_input=False,
                allow_property=False,
                settable=False,
            )
        )

    async def _run(self, client: moored.AsyncClient) -> str:
        prompt = self._prompt()
        options = {
            **self._options(),
            "lyrics": str(self.get_parameter_value("lyrics") or "") or None,
            "seconds": number(self.get_parameter_value("seconds") or 0, "seconds") or None,
        }

        def begin(whole: dict[str, Any]) -> moored.AsyncEventStream[moored.AudioResult]:
            return client.stream_audio(prompt, **whole)

        result = await self._made(client, client.plan_audio, options, begin)
        track = result.track()
        audio = await asyncio.to_thread(self._saved, track)
        self.parameter_output_values["audio"] = audio
        return (
            f"Made with {result.model.key}, seed {result.seed}, {track.seconds:.1f} s long, in "
            f"{result.total_ms / 1000:.1f} s: {Path(audio.value).name}"
        )

    def _saved(self, track: moored.Track) -> AudioUrlArtifact:
        """The track as a file, by the project's rules. Blocks: run it in a thread."""
        return AudioUrlArtifact(self._file.build_file().write_bytes(bytes(track.data)).location)
