"""The node Unload Models: gives memory of the cards back."""

from __future__ import annotations

from collections.abc import Iterable

import moored
from griptape_nodes.exe_types.core_types import Parameter, ParameterMode
from griptape_nodes.exe_types.param_types.parameter_bool import ParameterBool

from moored_griptape.run_node import RunNode
from moored_griptape.sizes import GB, in_words


class MooredUnloadModels(RunNode):
    """Unloads a model, or all of them, and reports the freed bytes that the driver confirms.

    Models that others hold or have pinned stay, and are named. Your own holds are released first.
    """

    takes_constraints = False

    def _add_inputs(self) -> None:
        self.add_parameter(
            ParameterBool(
                name="all_models",
                tooltip="Every model that nobody holds or has pinned, of everybody on the box. Off: "
                "the model that is connected, or the service's default.",
                default_value=True,
            )
        )
        self.add_parameter(
            ParameterBool(
                name="force",
                tooltip="Cancel the jobs that use what is unloaded, of everybody, instead of waiting "
                "for them.",
                default_value=False,
            )
        )

    def _add_outputs(self) -> None:
        self.add_parameter(
            Parameter(
                name="freed_gb",
                tooltip="GB that came free, as the driver's figures confirm.",
                output_type="float",
                allowed_modes={ParameterMode.OUTPUT},
                settable=False,
            )
        )

    async def _run(self, client: moored.AsyncClient) -> str:
        model = None if self.get_parameter_value("all_models") else self._handle.named
        for entry in await self._held_entries(client) if model is None else [model]:
            await self._give_up(client, entry)
        self._shown.status("Unloading")
        unloaded = await client.unload(model, force=bool(self.get_parameter_value("force")))
        for one in unloaded.freed:
            self._shown.line(f"{one.component.name} left {one.card}: {in_words(one.freed_bytes)}")
        kept = _once(f"{one.component.name} stays: {one.reason}" for one in unloaded.kept)
        for line in kept:
            self._shown.line(line)
        for job in unloaded.cancelled_jobs:
            self._shown.line(f"Job {job} was cancelled")
        self.parameter_output_values["freed_gb"] = unloaded.freed_bytes / GB
        words = f"{in_words(unloaded.freed_bytes)} came free"
        return f"{words}; {'; '.join(kept)}" if kept else words

    async def _held_entries(self, client: moored.AsyncClient) -> list[str]:
        """Entries with components that somebody holds: ours among them."""
        residents = [one for card in (await client.status()).cards for one in card.residents]
        return _once(entry for one in residents if one.held for entry in one.entries)


def _once(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
