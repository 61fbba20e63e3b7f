"""The state of the service as the panel shows it: JSON values alone, and no secrets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from moored import CardStatus, Holder, JobInfo, ModelDefaults, ResidentComponent, Status

ENDED = ("done", "failed", "cancelled")

# What runs comes first, then what is next.
_ORDER = {"running": 0, "waiting": 1, "queued": 2}


def reachable(status: Status, endpoint: str) -> dict[str, Any]:
    """The snapshot of a service that answers."""
    jobs = [job for job in status.jobs if job.state not in ENDED]
    jobs.sort(key=lambda job: (_ORDER.get(job.state, 3), job.queue_position, -job.age_ms))
    return {
        "reachable": True,
        "endpoint": endpoint,
        "problem": "",
        "cards": [_card(card, jobs) for card in status.cards],
        "jobs": [_job(job) for job in jobs],
        "latents": status.latents,
        "latent_bytes": status.latent_bytes,
        "uptime_ms": status.uptime_ms,
    }


def unreachable(problem: str, endpoint: str, can_start: bool = False) -> dict[str, Any]:
    """The snapshot of a service that does not answer: `problem` is the one sentence that says what to do.

    `can_start`: whether this pack can start one.
    """
    return {
        "reachable": False,
        "can_start": can_start,
        "endpoint": endpoint,
        "problem": problem,
        "cards": [],
        "jobs": [],
        "latents": 0,
        "latent_bytes": 0,
        "uptime_ms": 0,
    }


def defaults(of: ModelDefaults) -> dict[str, float]:
    """A model's own values, by the inputs of the nodes; none for what it does not make."""
    of_film = of.frames / of.frames_per_second if of.frames_per_second else 0.0
    values: dict[str, float] = asdict(of)
    values |= {"fps": values.pop("frames_per_second"), "seconds": of.seconds or round(of_film, 1)}
    # The wire has singles: 3.5 is to look like that.
    shown = {name: float(f"{value:.6g}") for name, value in values.items() if value}
    return {name: int(value) if value.is_integer() else value for name, value in shown.items()}


def _card(card: CardStatus, jobs: list[JobInfo]) -> dict[str, Any]:
    return {
        "id": card.id,
        "name": card.name,
        "kind": card.kind,
        "state": card.state,
        "policy": card.policy,
        "attention": card.attention,
        "worker_restarts": card.worker_restarts,
        "job": card.job_id,
        "memory": asdict(card.memory),
        "entries": _entries(card.residents, jobs),
        "holders": [asdict(holder) for holder in _foreign(card)],
        "host_bytes": sum(one.bytes for one in card.on_host),
        "reservations": [asdict(reservation) for reservation in card.reservations],
    }


def _foreign(card: CardStatus) -> Iterator[Holder]:
    """Who holds the foreign bytes: the service names them first, and what is its own after them."""
    unnamed = card.memory.foreign
    for holder in card.holders:
        if unnamed <= 0:
            return
        unnamed -= holder.bytes
        yield holder


def _entries(residents: Iterable[ResidentComponent], jobs: list[JobInfo]) -> list[dict[str, Any]]:
    """What is resident, by the entries that use it; what several share is counted in each of them."""
    by_key: dict[str, list[ResidentComponent]] = {}
    for resident in residents:
        for key in resident.entries:
            by_key.setdefault(key, []).append(resident)
    entries = [_entry(key, parts, jobs) for key, parts in sorted(by_key.items())]
    shown = [entry for entry in entries if _is_there(entry, entries)]
    keys = {entry["key"] for entry in shown}
    for entry in shown:
        for part in entry["components"]:
            part["shared_with"] = [key for key in part["shared_with"] if key in keys]
    return shown


def _is_there(entry: dict[str, Any], entries: list[dict[str, Any]]) -> bool:
    """Not an entry that has left, and of which another one keeps what the two share."""
    if entry["jobs"]:
        return True

    def is_covered_by(other: dict[str, Any]) -> bool:
        # A pin that goes further than the other's is its own.
        return (
            _names(entry) < _names(other)
            and all(other["key"] in part["shared_with"] for part in entry["components"])
            and (other["pinned"] or not entry["pinned"])
        )

    return not any(is_covered_by(other) for other in entries)


def _names(entry: dict[str, Any]) -> set[str]:
    return {part["name"] for part in entry["components"]}


def _entry(key: str, parts: list[ResidentComponent], jobs: list[JobInfo]) -> dict[str, Any]:
    states = {part.state for part in parts}
    return {
        "key": key,
        "bytes": sum(part.resident_bytes for part in parts),
        "state": next((each for each in ("loading", "evicting") if each in states), "resident"),
        # A pin is on every component of its entry: one of another entry covers shared components alone.
        "pinned": all(part.pinned for part in parts),
        "held": any(part.held for part in parts),
        # A component that others share may be in use by one of them.
        "in_use": any(job.model_key == key and job.state == "running" for job in jobs)
        or any(part.leases and len(part.entries) == 1 for part in parts),
        "idle_ms": min(part.idle_ms for part in parts),
        "jobs": sum(job.model_key == key for job in jobs),
        "components": [
            {
                "name": part.component.name,
                "bytes": part.resident_bytes,
                # How much of it is on the card, and what streaming the rest costs; empty: all of it.
                "streamed": part.streamed.words if part.streamed else "",
                "state": part.state,
                "shared_with": [other for other in part.entries if other != key],
            }
            for part in parts
        ],
    }


def _job(job: JobInfo) -> dict[str, Any]:
    return {
        "id": job.id,
        "client": job.client_id,
        "priority": job.priority,
        "state": job.state,
        "kind": job.kind,
        "model": job.model_key,
        "card": job.card,
        "stage": job.stage,
        "step": job.step,
        "steps": job.steps,
        "position": job.queue_position,
        "age_ms": job.age_ms,
    }
