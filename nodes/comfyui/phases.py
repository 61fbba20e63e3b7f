"""Where a job is, in words short enough for a node."""

from __future__ import annotations

import re
from typing import Any

import moored

HOLDERS_AT_MOST = 2


def phase(event: Any) -> str:
    """`Queued 2nd`, `Loading transformer 6.1/11.9 GiB`, `Section 2/4, step 7/20`; empty for what is not said.

    Of a job's beginning, what the service chose and why, where the quantization is left to it.
    """
    match event:
        case moored.Queued():
            return f"Queued {ordinal(event.position + 1)}{_about(event.estimate_ms)}"
        case moored.Waiting():
            return _waiting(event)
        case moored.Accepted():
            return event.model.choice
        case moored.Preview() | moored.Artifact() | moored.LatentKept():
            return ""
        case _:
            return moored.describe(event)


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else suffix}"


def size(count: int) -> str:
    """Bytes for people: `11.9 GiB`."""
    divisor, unit = (2**30, "GiB") if count >= 2**30 / 10 else (2**20, "MiB")
    return f"{count / divisor:.1f} {unit}"


def status_text(status: moored.Status) -> str:
    """The cards of a service, what is on them, and the queue."""
    lines = []
    for card in status.cards:
        memory = card.memory
        lines.append(
            f"{card.name or card.id}, {card.state}: {size(memory.free)} of {size(memory.total)} free, "
            f"models {size(memory.components)}, other programs {size(memory.foreign)}"
        )
        lines += [f"  {_resident(one)}" for one in card.residents]
    waiting = [job for job in status.jobs if job.state in ("queued", "waiting")]
    running = [job for job in status.jobs if job.state == "running"]
    lines.append(f"{len(running)} running, {len(waiting)} waiting, {status.latents} latents kept")
    return "\n".join(lines)


def kept_lines(unloaded: moored.Unloaded) -> list[str]:
    """What stayed of a model, a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for one in unloaded.kept:
        by_reason.setdefault(one.reason, []).append(one.component.name)
    return [f"Kept {', '.join(names)}: {wrapping(why)}" for why, names in by_reason.items()]


def wrapping(text: str) -> str:
    """A text with a space after each comma, so that a narrow node breaks it between words."""
    return re.sub(r",(?=\S)", ", ", text)


def _resident(one: moored.ResidentComponent) -> str:
    marks = [word for word, so in (("pinned", one.pinned), ("held", one.held)) if so]
    of_models = f" of {', '.join(map(wrapping, one.entries))}" if one.entries else ""
    more = f" ({', '.join(marks)})" if marks else ""
    return f"{one.component.name}{of_models}: {_on_card(one)}{more}"


def _on_card(one: moored.ResidentComponent) -> str:
    return one.streamed.words if one.streamed else size(one.resident_bytes)


def _waiting(event: moored.Waiting) -> str:
    short = max(0, event.needed_bytes - event.free_bytes)
    words = [
        f"Waiting for {size(short)} ({size(event.needed_bytes)} needed, {size(event.free_bytes)} free)"
    ]
    for holder in sorted(event.holders, key=lambda one: -one.bytes)[:HOLDERS_AT_MOST]:
        pid = f" {holder.pid}" if holder.pid else ""
        words.append(f"{holder.name}{pid} holds {size(holder.bytes)}")
    words.append(f"{event.patience_left_ms / 1000:.0f} s left")
    return ", ".join(words)


def _about(estimate_ms: int | None) -> str:
    return "" if estimate_ms is None else f", about {estimate_ms / 1000:.0f} s"
