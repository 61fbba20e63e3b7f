"""Memory limits that a user sets for a run, and the check of the plan against them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import moored

from moored_griptape.model_handle import AS_STORED, AUTO, ModelHandle
from moored_griptape.numbers import json_object, number_or_none
from moored_griptape.sizes import GB, in_words

ANY_DEVICE = "any"
LONGEST_PATIENCE_S = 600.0
_MULTIPLE = 16

Log = Callable[[str], None]
Needs = Callable[[moored.Plan], tuple[int, str]]
Options = dict[str, Any]
"""Those of a request, whatever it generates."""
Planner = Callable[..., Awaitable[moored.Plan]]
"""A call of a client that plans, with a prompt and options."""


class OverBudget(Exception):
    """A run would take more than the constraints allow; its text says what would not."""


@dataclass(frozen=True)
class SystemConstraints:
    """Limits of a run. The service keeps its own beside them; these are a person's."""

    gpu_device: str = ANY_DEVICE
    """The card; `any`: the one that the service picks."""
    gpu_memory_fraction: float = 1.0
    """How much of the card a run may need at its peak, weights and activations together."""
    cpu_memory_gb: float | None = None
    """How much main memory weights and activations may take: where the card is the CPU."""
    allow_low_memory: bool = False
    """Run although memory is short. If it runs out, only this run ends."""
    release_patience_s: float | None = None
    """How long to wait for memory that others have; None: the service's own setting."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """From a node's input: the dict or its JSON; nothing: no limits but the service's own."""
        if value is None or value in ("", {}):
            return cls()
        value = json_object(value, "system_constraints", "GPU Configuration")
        unknown = sorted(str(name) for name in value if name not in cls.__dataclass_fields__)
        if unknown:
            raise ValueError(f"system_constraints has no {', '.join(unknown)}: remove it")
        constraints = cls(
            gpu_device=str(value.get("gpu_device") or ANY_DEVICE).strip(),
            gpu_memory_fraction=_number(value, "gpu_memory_fraction", 1.0),
            cpu_memory_gb=number_or_none(value.get("cpu_memory_gb"), "cpu_memory_gb"),
            allow_low_memory=_truth(value.get("allow_low_memory")),
            release_patience_s=number_or_none(
                value.get("release_patience_s"), "release_patience_s"
            ),
        )
        constraints._check()
        return constraints

    def _check(self) -> None:
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ValueError(
                f"gpu_memory_fraction is over 0 and at most 1, not {self.gpu_memory_fraction:g}"
            )
        if self.cpu_memory_gb is not None and not 0 < self.cpu_memory_gb < math.inf:
            raise ValueError(f"cpu_memory_gb is a number over 0, not {self.cpu_memory_gb:g}")
        patience = self.release_patience_s
        if patience is not None and not 0 <= patience <= LONGEST_PATIENCE_S:
            raise ValueError(
                f"release_patience_s is 0 to {LONGEST_PATIENCE_S:g} seconds, not {patience:g}"
            )

    def as_json(self) -> dict[str, Any]:
        """The dict that travels between nodes."""
        return asdict(self)

    @property
    def card(self) -> str:
        """The card's id; empty: any."""
        return "" if self.gpu_device == ANY_DEVICE else self.gpu_device

    @property
    def job_options(self) -> moored.JobOptions:
        """The constraints that the service itself keeps."""
        options = moored.JobOptions(allow_low_memory=self.allow_low_memory)
        if self.card:
            options["card"] = self.card
        if self.release_patience_s is not None:
            options["patience_s"] = self.release_patience_s
        return options

    @property
    def _has_budget(self) -> bool:
        return self.gpu_memory_fraction < 1 or self.cpu_memory_gb is not None

    async def check(
        self,
        client: moored.AsyncClient,
        plan: Planner,
        handle: ModelHandle,
        prompt: str,
        options: Options,
        log: Log,
    ) -> None:
        """Raises OverBudget where the service's plan of a request peaks above what is allowed.

        With `allow_low_memory` it is said in the log instead. Activations are what the service has
        measured before, or predicts.
        """
        tries = _quantized(handle, options)
        width, height = options.get("width"), options.get("height")
        if width and height and min(width, height) >= 2 * _MULTIPLE:
            half = {"width": _half(width), "height": _half(height)}
            tries[f"{half['width']}x{half['height']}"] = {**options, **half}
        await self._check_plan(client, plan, prompt, options, tries, _peak, log)

    async def check_load(self, client: moored.AsyncClient, handle: ModelHandle, log: Log) -> None:
        """The same for a whole model that is to be in."""
        options: Options = {"model": handle.ref, **self.job_options}
        tries = _quantized(handle, options)

        async def plan(
            _prompt: str, *, model: moored.ModelRef | None, card: str = "", **_job: Any
        ) -> moored.Plan:
            return await client.plan_model(model or "", card=card)

        await self._check_plan(client, plan, "", options, tries, _whole, log)

    async def _check_plan(
        self,
        client: moored.AsyncClient,
        planner: Planner,
        prompt: str,
        options: Options,
        tries: Mapping[str, Options],
        needs: Needs,
        log: Log,
    ) -> None:
        if not (self.card or self._has_budget):
            return
        cards = {card.id: card for card in (await client.status()).cards}
        if self.card and self.card not in cards:
            raise OverBudget(
                f"The service has no card {self.card}: set gpu_device to `{ANY_DEVICE}` or to one of "
                f"{', '.join(sorted(cards))}"
            )
        plan = await planner(prompt, **options)
        card = cards.get(plan.card)
        if card is None or not self._has_budget:
            return
        if self.cpu_memory_gb is not None and card.kind != "cpu":
            log(f"cpu_memory_gb has no effect on {card.id}: its weights are in GPU memory")
        allowed, by = self._allowed(card)
        needed, when = needs(plan)
        if needed <= allowed:
            return
        short = (
            f"This needs {in_words(needed)} of {card.id} {when}, and {by} allows "
            f"{in_words(allowed)} of {in_words(card.memory.total)}"
        )
        if self.allow_low_memory:
            log(f"{short}; it runs all the same, by allow_low_memory")
            return
        fits = []
        for label, instead in tries.items():
            with contextlib.suppress(moored.MooredError):  # a model that cannot be quantized, say
                less, _ = needs(await planner(prompt, **instead))
                fits += [f"{label} ({in_words(less)})"] if less <= allowed else []
        remedies = [f"take {' or '.join(fits)}"] if fits else []
        raise OverBudget(
            f"{short}: {', or '.join([*remedies, f'raise {by}', 'set allow_low_memory'])}"
        )

    def _allowed(self, card: moored.CardStatus) -> tuple[int, str]:
        """The lower of the limits that bear on a card, and its name."""
        limits = [(int(self.gpu_memory_fraction * card.memory.total), "gpu_memory_fraction")]
        if self.cpu_memory_gb is not None and card.kind == "cpu":
            limits.append((int(self.cpu_memory_gb * GB), "cpu_memory_gb"))
        return min(limits)


def _quantized(handle: ModelHandle, options: Options) -> dict[str, Options]:
    """The same request in fewer bytes."""
    if handle.quantization_mode not in (AUTO, AS_STORED):
        return {}
    return {
        f"quantization_mode {mode}": {**options, "model": handle.in_mode(mode)}
        for mode in ("int8", "int4")
    }


def _peak(plan: moored.Plan) -> tuple[int, str]:
    """What a job needs at its peak, and when that is. Of a streamed component, a part is there."""

    def peak(stage: moored.PlannedStage) -> int:
        streamed = sum(one.whole_bytes - one.resident_bytes for one in stage.streamed)
        return stage.component_bytes - streamed + stage.scratch_bytes

    needed, stage = max(((peak(stage), stage.name) for stage in plan.stages), default=(0, ""))
    return needed, f"at its peak ({stage})"


def _whole(plan: moored.Plan) -> tuple[int, str]:
    """What a model needs that is in whole."""
    components = {one.id: one.bytes for stage in plan.stages for one in stage.components}
    return sum(components.values()), "for the whole model"


def _half(side: int) -> int:
    return side // 2 // _MULTIPLE * _MULTIPLE


def _number(value: Mapping[str, Any], name: str, default: float) -> float:
    given = number_or_none(value.get(name), name)
    return default if given is None else given


def _truth(value: object) -> bool:
    """By value: a workflow may carry the word instead of the truth."""
    if isinstance(value, str):
        return value.strip().lower() in ("true", "1", "yes", "on")
    return bool(value)
