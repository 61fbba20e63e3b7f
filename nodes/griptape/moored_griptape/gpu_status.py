"""The node GPU Status: memory of the cards by holder, and the jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import moored
from griptape_nodes.exe_types.core_types import Parameter, ParameterMode

from moored_griptape.run_node import RunNode
from moored_griptape.sizes import in_words

_ACCOUNTS = ("components", "scratch", "foreign", "free")


class MooredGPUStatus(RunNode):
    """Tells of the cards, their residents and the jobs of everybody; asks anew at each run."""

    takes_model = False
    takes_constraints = False

    def _add_outputs(self) -> None:
        self.add_parameter(
            Parameter(
                name="report",
                tooltip="The cards in words.",
                output_type="str",
                allowed_modes={ParameterMode.OUTPUT},
                settable=False,
                ui_options={"multiline": True},
            )
        )
        self.add_parameter(
            Parameter(
                name="cards",
                tooltip="The cards as data: bytes by account, residents, holders, jobs.",
                output_type="dict",
                allowed_modes={ParameterMode.OUTPUT},
                settable=False,
                ui_options={"hide_property": True},
            )
        )

    async def _run(self, client: moored.AsyncClient) -> str:
        status = await client.status()
        self.parameter_output_values["report"] = "\n".join(
            line for card in status.cards for line in _card(card)
        ) + "".join(f"\n{_job(job)}" for job in status.jobs)
        self.parameter_output_values["cards"] = {
            "cards": [asdict(card) for card in status.cards],
            "jobs": [asdict(job) for job in status.jobs],
        }
        free = sum(card.memory.free for card in status.cards)
        cards = ", ".join(card.id for card in status.cards)
        return f"{in_words(free)} free on {cards}; jobs: {len(status.jobs)}"


def _card(card: moored.CardStatus) -> list[str]:
    memory: dict[str, Any] = asdict(card.memory)
    accounts = ", ".join(f"{name} {in_words(memory[name])}" for name in _ACCOUNTS)
    lines = [f"{card.id} ({card.name}), {card.state}: {accounts}, of {in_words(card.memory.total)}"]
    if card.attention:
        lines.append(f"  attention: {card.attention}")
    for one in card.residents:
        stays = " pinned" * one.pinned + " held" * one.held
        whole = f" of {in_words(one.component.bytes)}, the rest streamed" if one.streamed else ""
        lines.append(f"  {one.component.name} {in_words(one.resident_bytes)}{whole}{stays}")
    if card.on_host:
        held = ", ".join(f"{one.component.name} {in_words(one.bytes)}" for one in card.on_host)
        lines.append(f"  in the machine's memory: {held}")
    # Our own components are among the holders, too, with why they stay in brackets.
    ours = tuple(f"{one.component.name} (" for one in card.residents)
    for holder in card.holders:
        if not holder.name.startswith(ours):
            who = f"{holder.name} {holder.pid}" if holder.pid else holder.name
            lines.append(f"  {who} has {in_words(holder.bytes)}")
    return lines


def _job(job: moored.JobInfo) -> str:
    step = f", step {job.step}/{job.steps}" if job.steps else ""
    return f"{job.kind} of {job.client_id}: {job.state}{step}"
