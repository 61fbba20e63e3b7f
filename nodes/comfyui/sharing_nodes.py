"""The nodes Reserve and Release: memory of a card for ComfyUI's own nodes."""

from __future__ import annotations

from typing import Any

import moored
from comfy_api.latest import io

from . import connection, own_models, reservations
from .failures import told
from .follow import Deliver, Display, attend
from .phases import size
from .reservations import Reservation
from .schema import CATEGORY, ReservationType, server_input

GIB = 2**30
MAX_GIB = 1024.0
MAX_PATIENCE_S = 3600.0


class Reserve(io.ComfyNode):
    """Keeps memory free for the nodes after it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        passed_on = io.MatchType.Template("passed_on")
        return io.Schema(
            node_id="MooredReserve",
            display_name="Reserve Memory (moored)",
            category=f"{CATEGORY}/memory",
            description="Keeps GPU memory free for ComfyUI's own nodes after it, "
            "until Release Memory or the end of the prompt.",
            search_aliases=["vram", "free memory", "room"],
            inputs=[
                io.MatchType.Input(
                    "after",
                    template=passed_on,
                    tooltip="Whatever is to happen before, of any type. It is passed on.",
                ),
                io.Float.Input(
                    "size_gib",
                    default=8.0,
                    min=0.1,
                    max=MAX_GIB,
                    step=0.5,
                    tooltip="GiB to keep free. Models of the service that are idle are unloaded for it.",
                ),
                io.String.Input(
                    "card",
                    default="",
                    placeholder="cuda:0",
                    advanced=True,
                    tooltip="The GPU, by its name in the service. Empty: the one that ComfyUI uses, if the "
                    "service sees that; else the one with the most room.",
                ),
                io.Float.Input(
                    "patience_s",
                    default=60.0,
                    min=0.0,
                    max=MAX_PATIENCE_S,
                    step=0.5,
                    advanced=True,
                    tooltip="Seconds to wait for memory that jobs or other programs use.",
                ),
                server_input(),
            ],
            outputs=[
                io.MatchType.Output(
                    passed_on, "passed_on", tooltip="For the nodes that need the memory."
                ),
                ReservationType.Output("reservation", tooltip="For Release Memory."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> float:
        """Never the same: the reservation of the last prompt has ended."""
        return float("nan")

    @classmethod
    async def execute(
        cls,
        after: Any,
        size_gib: float,
        card: str = "",
        patience_s: float = 60.0,
        server: connection.Server | None = None,
    ) -> io.NodeOutput:
        """Reserves."""
        with told(cls.hidden.unique_id):
            target = connection.target(server)
            wanted = int(size_gib * GIB)

            async def work(client: moored.AsyncClient, deliver: Deliver) -> Reservation:
                return await reservations.make(
                    client, target, wanted, card.strip(), patience_s, deliver
                )

            display = Display(cls.hidden.unique_id)
            display.say(f"Reserving {size(wanted)}")
            reservation = await attend(display, target, work, lambda late: late.give_back())
            reservation.keep()
        display.say(f"Reserved {size(reservation.made.bytes)} on {reservation.made.card}")
        return io.NodeOutput(after, reservation)


class Release(io.ComfyNode):
    """Gives reserved memory back."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Inputs and outputs."""
        passed_on = io.MatchType.Template("passed_on")
        return io.Schema(
            node_id="MooredRelease",
            display_name="Release Memory (moored)",
            category=f"{CATEGORY}/memory",
            description="Gives the memory of Reserve Memory back, after whatever is linked to `after`.",
            search_aliases=["vram", "free memory", "unload"],
            inputs=[
                ReservationType.Input("reservation", tooltip="From Reserve Memory."),
                io.MatchType.Input(
                    "after",
                    template=passed_on,
                    tooltip="The last that needs the memory, of any type. It is passed on.",
                ),
                io.Boolean.Input(
                    "unload_models",
                    default=True,
                    tooltip="Unload ComfyUI's own models, so that jobs can use their memory at once.",
                ),
            ],
            outputs=[
                io.MatchType.Output(passed_on, "passed_on", tooltip="What was linked to `after`.")
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    async def execute(
        cls, reservation: Reservation, after: Any, unload_models: bool = True
    ) -> io.NodeOutput:
        """Gives back."""
        display = Display(cls.hidden.unique_id)
        unloaded = unload_models and own_models.unload("the memory reserved for them is given back")

        async def work(client: moored.AsyncClient, deliver: Deliver) -> bool:
            return await reservation.release()

        with told(cls.hidden.unique_id):
            there = await attend(display, reservation.target, work)
        lines = [f"Released {size(reservation.made.bytes)}" if there else "It had ended before"]
        if unloaded:
            lines.append(own_models.UNLOADED)
        display.say("\n".join(lines))
        return io.NodeOutput(after)
