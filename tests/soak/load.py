"""What clients do in a soak: an action each, with its weight. What may go wrong in it is caught in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import moored
from clients import CALL_S, Visitor
from measures import OTHERS, OURS, accounts_of
from models import DEMO, SINGLE, TINY, Z_TINY
from PIL import Image
from results import QUICK

PROMPTS = ("a boat", "a red cube on a blue plane", "two circles", "rain", "a green tree", "night")
SEEDS = (1, 2, 3)
REAL = (DEMO, TINY, Z_TINY, SINGLE)
LARGE = ("flux-full", "flux-other")
START = Image.new("RGB", (64, 64), (200, 30, 40))
DETAIL = (Image.linear_gradient("L").resize((64, 64)).convert("RGB"), START)
LONG_STEPS = 60

Options = dict[str, Any]


def _reference(v: Visitor, model: str) -> moored.ModelRef:
    """A real model in one of the formats that the device takes."""
    name = v.chance.choice(v.world.formats[model])
    return moored.ModelRef(model, formats={} if name == "full" else {"transformer": name})


def _words(model: moored.ModelLike) -> str:
    return model if isinstance(model, str) else f"{model.id}{dict(model.formats)}"


def _small(v: Visitor) -> tuple[moored.ModelLike, Options]:
    """A model that costs little, and options for it."""
    if v.world.simulated and v.chance.random() < 0.4:
        return v.chance.choice(("small", "slow")), {"width": 64, "height": 64, "steps": 3}
    return _reference(v, v.chance.choice(list(v.world.formats))), dict(QUICK)


def _prompt(v: Visitor) -> tuple[str, Options]:
    return v.chance.choice(PROMPTS), {"seed": v.chance.choice(SEEDS)}


def _picture(v: Visitor, client: moored.Client, model: moored.ModelLike, options: Options) -> Any:
    """A picture that is read, and held against the first of its request."""
    prompt, seed = _prompt(v)
    given = options | seed
    result = v.book.result(client.stream_image(prompt, model=model, timeout=CALL_S, **given))
    request = (prompt, _words(model), tuple(sorted(given.items())))
    v.world.results.same_picture(request, result, exact=isinstance(model, str))
    return result


# Results.


def picture(v: Visitor) -> None:
    """A small picture."""
    _picture(v, v.client, *_small(v))


def larger_picture(v: Visitor) -> None:
    """A picture of a real model that takes memory and time."""
    side = v.chance.choice((256, 512, 1024) if v.world.on_card else (128, 192))
    options: Options = {"width": side, "height": side, "steps": 8 if v.world.on_card else 2}
    _picture(v, v.client, _reference(v, DEMO), options)


def pictures(v: Visitor) -> None:
    """Several at once."""
    model, options = _small(v)
    _picture(v, v.client, model, options | {"count": 3})


def preview(v: Visitor) -> None:
    """With previews."""
    model, options = _small(v)
    _picture(v, v.client, model, options | {"steps": 8, "preview_interval_s": 0.1})


def from_image(v: Visitor) -> None:
    """A picture from a picture."""
    model, options = _small(v)
    start = v.chance.choice(DETAIL)
    stream = v.client.stream_image(
        "again", model=model, seed=1, init_image=start, timeout=CALL_S, **options
    )
    result = v.book.result(stream)
    request = ("again", _words(model), DETAIL.index(start))
    v.world.results.same_picture(request, result, exact=isinstance(model, str))


def large_picture(v: Visitor) -> None:
    """Of models that do not fit the card beside each other."""
    name = v.chance.choice(LARGE)
    form = v.chance.choice(("", "", "8-bit", "4-bit"))
    model = moored.ModelRef(name, quantization=form)
    stream = v.client.stream_image(
        v.chance.choice(PROMPTS), model=model, width=64, height=64, steps=2, timeout=CALL_S
    )
    with suppress(moored.NeverFits):  # beside what is pinned and reserved just then
        v.book.follow(stream)


def film(v: Visitor) -> None:
    """A film, held against the first of its request."""
    prompt, frames = v.chance.choice(PROMPTS), v.chance.choice((5, 13, 25))
    stream = v.client.stream_video(prompt, model="video", frames=frames, seed=1, timeout=CALL_S)
    (one,) = v.book.result(stream).films
    if one.frame_count != frames:
        v.book.fault(f"{stream.job_id}: {one.frame_count} frames of {frames}")
    v.world.results.same_bytes((prompt, "video", frames), one.data)


def track(v: Visitor) -> None:
    """A track, held against the first of its request."""
    prompt, seconds = v.chance.choice(PROMPTS), v.chance.choice((0.5, 1.0, 2.0))
    stream = v.client.stream_audio(
        prompt, model="track", seconds=seconds, seed=1, output="raw", timeout=CALL_S
    )
    (one,) = v.book.result(stream).tracks
    v.world.results.same_bytes((prompt, "track", seconds), one.data)


# Readers.


def slow_reader(v: Visitor) -> None:
    """Reads its results more slowly than they come."""
    if v.world.simulated:
        stream: Any = v.client.stream_video(
            "slowly", model="video", width=256, height=256, frames=13, timeout=CALL_S
        )
    else:
        side = 512 if v.world.on_card else 192
        stream = v.client.stream_image(
            "slowly",
            model=DEMO,
            width=side,
            height=side,
            steps=1,
            count=2,
            output="raw",
            timeout=CALL_S,
        )
    v.book.follow(stream, pause_s=v.chance.uniform(0.01, 0.06))


def _long(v: Visitor) -> Any:
    """A job that lasts long enough to be left or cancelled in the middle."""
    options: Options = {
        "steps": LONG_STEPS,
        "timeout": CALL_S,
        "keep_latent": v.chance.random() < 0.5,
    }
    if v.world.simulated and v.chance.random() < 0.5:
        return v.client.stream_image("long", model="slow", **options)
    size: Options = {"width": 64, "height": 64, "max_sequence_length": 16}
    return v.client.stream_image("long", model=_reference(v, DEMO), **size, **options)


def _after_some(v: Visitor) -> Callable[[moored.Event], bool]:
    left = v.chance.choice((0, 0, 1, 2, 4, 8, 16, 32))

    def is_over(_: moored.Event) -> bool:
        nonlocal left
        left -= 1
        return left < 0

    return is_over


def leave(v: Visitor) -> None:
    """Leaves a stream at some event."""
    stream = _long(v)
    v.book.follow(stream, leave=_after_some(v))
    with suppress(moored.JobNotFound):  # forgotten already, after a hundred others
        v.client.cancel(stream.job_id, release_latents=True)


def cancel(v: Visitor) -> None:
    """Cancels a job at some event, and hears it out."""
    stream, now = _long(v), _after_some(v)
    asked = False

    def heed(event: moored.Event) -> None:
        nonlocal asked
        if not asked and now(event):
            asked = True
            with suppress(moored.JobNotFound):
                v.client.cancel(stream.job_id, release_latents=True)

    with suppress(moored.Cancelled):
        v.book.follow(stream, heed=heed)


def deadline(v: Visitor) -> None:
    """Has less time than it may need."""
    seconds = v.chance.choice((0.01, 0.05, 0.2, 0.5, 1.0))
    options: Options = {"steps": LONG_STEPS, "timeout": seconds}
    model: moored.ModelLike = "slow" if v.world.simulated else _reference(v, DEMO)
    with suppress(moored.Deadline):
        v.book.follow(v.client.stream_image("in time", model=model, **options))


# Keys.


def joined(v: Visitor) -> None:
    """Two streams of one job, by its key; sometimes a third that asks for something else by it."""
    model, options = _small(v)
    prompt, seed = _prompt(v)
    key = f"{v.name} {time.monotonic()} {v.chance.random()}"
    asked: Options = {"model": model, "idempotency_key": key, "timeout": CALL_S} | options | seed
    first = v.client.stream_image(prompt, **asked)
    events = iter(first)
    next(events)  # accepted: the job is there
    second = v.client.stream_image(prompt, **asked)
    if v.chance.random() < 0.3:
        with suppress(moored.KeyReused):
            v.book.follow(v.client.stream_image("something else", **asked))
            v.book.fault(f"{first.job_id}: its key was taken for another request")
    one, two = v.book.result(first), v.book.result(second)
    if one.job_id != two.job_id or one.pictures[0].data != two.pictures[0].data:
        v.book.fault(f"{one.job_id} and {two.job_id}: joined, and not the same")


def detached(v: Visitor) -> None:
    """Leaves a job that goes on, and comes back for its result."""
    key = f"{v.name} {time.monotonic()} {v.chance.random()}"
    asked: Options = {"idempotency_key": key, "detach": True, "timeout": CALL_S, "seed": 1}
    asked |= {"model": "slow"} if v.world.simulated else {"model": DEMO} | QUICK
    stream = v.client.stream_image("goes on", **asked)
    v.book.follow(stream, leave=_after_some(v))
    again = v.client.stream_image("goes on", **asked)
    v.book.follow(again)
    if again.job_id != stream.job_id:
        v.book.fault(f"{stream.job_id}: it was detached, and {again.job_id} was started by its key")


# Latents.


def latents(v: Visitor) -> None:
    """Kept, read, brought back, decoded, released."""
    model, options = _small(v)
    prompt, seed = _prompt(v)
    kept: list[moored.LatentInfo] = []
    try:
        stream = v.client.stream_image(
            prompt, model=model, keep_latent=True, timeout=CALL_S, **options, **seed
        )
        result = v.book.result(stream)
        kept += result.latents
        read = v.client.get_latent(kept[0], timeout=CALL_S)
        kept.append(v.client.put_latent(read, timeout=CALL_S))
        request = (prompt, _words(model), tuple(sorted((options | seed).items())))
        for latent in kept[-2:]:
            decode = v.client.stream_decode(latent, model=model, timeout=CALL_S)
            decoded = v.book.result(decode)
            # The picture of the same request, whichever way it came to be.
            v.world.results.same_picture(request, decoded, exact=isinstance(model, str))
        v.world.results.same_picture(request, result, exact=isinstance(model, str))
    except moored.MooredError as error:
        kept += error.latents
        raise
    finally:
        for latent in kept:
            v.client.release_latent(latent)


def encode(v: Visitor) -> None:
    """A picture to a latent and back."""
    model, _ = _small(v)
    stream = v.client.stream_encode(START, model=model, width=64, height=64, timeout=CALL_S)
    (latent,) = v.book.result(stream).latents
    try:
        decoded = v.book.result(v.client.stream_decode(latent, model=model, timeout=CALL_S))
        request = ("encode", _words(model))
        v.world.results.same_picture(request, decoded, exact=isinstance(model, str))
    finally:
        v.client.release_latent(latent)


# Residency.


def plan(v: Visitor) -> None:
    """Asks what a request would need."""
    model, options = _small(v)
    v.client.plan("what if", model=model, **options)
    if v.world.simulated:
        v.client.plan_video("what if", model="video")
        v.client.plan("what if", model=v.chance.choice(LARGE))


def load_and_unload(v: Visitor) -> None:
    """A model in, and out again unless others use it."""
    model, _ = _small(v)
    v.book.follow(v.client.stream_load(model, prove=v.chance.random() < 0.3, timeout=CALL_S))
    if v.chance.random() < 0.5:
        v.client.unload(model, timeout=CALL_S)


def forced_unload(v: Visitor) -> None:
    """Takes a model from under its own job."""
    stream = v.client.stream_image("taken away", model="steady", steps=100, timeout=CALL_S)
    asked = False

    def heed(event: moored.Event) -> None:
        nonlocal asked
        if not asked and isinstance(event, moored.Step):
            asked = True
            v.client.unload("steady", force=True, timeout=CALL_S)

    with suppress(moored.Cancelled):
        v.book.follow(stream, heed=heed)


def pin(v: Visitor) -> None:
    """Pins a model, uses it, and unpins it."""
    model, options = _small(v)
    v.client.pin(model, timeout=CALL_S)
    try:
        _picture(v, v.client, model, options)
    finally:
        v.client.unpin(model, timeout=CALL_S)


def hold(v: Visitor) -> None:
    """Holds a model for a while; sometimes it lets the time run out."""
    model, options = _small(v)
    held = v.client.hold(model, ttl_s=1.0, timeout=CALL_S)
    _picture(v, v.client, model, options)
    if v.chance.random() < 0.7:
        held.release()


def reserve(v: Visitor) -> None:
    """Keeps memory free for somebody else for a while."""
    size = int(v.world.card_bytes * v.chance.uniform(0.05, 0.3))
    with suppress(moored.NeverFits):
        with v.client.reserve(size, ttl_s=2.0, label="soak", timeout=CALL_S):
            model, options = _small(v)
            _picture(v, v.client, model, options)


def swap(v: Visitor) -> None:
    """A model takes the place of another."""
    model = v.chance.choice(list(v.world.formats))
    old, new = _reference(v, model), _reference(v, model)
    if _words(old) == _words(new):
        new = _reference(v, v.chance.choice(list(v.world.formats)))
    if _words(old) == _words(new):
        return
    v.book.follow(v.client.stream_load(old, timeout=CALL_S))
    v.book.follow(v.client.stream_load(new, replace=old, timeout=CALL_S))


def trim(v: Visitor) -> None:
    """Has slack handed back."""
    v.client.trim(timeout=CALL_S)


# Looking, and asking for nonsense.


def look(v: Visitor) -> None:
    """Everything that can be looked at."""
    v.client.list_models(timeout=CALL_S)
    v.client.server_info()
    v.client.health()
    # It tells of changes alone, and there may be none.
    with suppress(moored.Deadline), v.client.watch_status(interval_s=0.05, timeout=0.5) as watch:
        for card in (card for status in watch for card in status.cards):
            accounts = accounts_of(card.memory)
            if sum(accounts[name] for name in (*OURS, *OTHERS)) != accounts["total"]:
                v.book.fault(f"the accounts of {card.id} do not add up: {accounts}")


def newcomer(v: Visitor) -> None:
    """A client that comes for one picture and goes."""
    with moored.Client(v.address, client_id=f"newcomer {v.chance.randrange(50)}") as client:
        _picture(v, client, *_small(v))


def nonsense(v: Visitor) -> None:
    """Requests that are refused, each by its own error."""
    missing = "no-such-thing"
    wrong: list[tuple[type[moored.MooredError], Callable[[], object]]] = [
        (moored.ModelNotFound, lambda: v.client.generate_image("x", model=missing)),
        (moored.InvalidRequest, lambda: v.client.generate_image("x", model=TINY, width=17)),
        (moored.LatentNotFound, lambda: v.client.decode_latent(missing, model=TINY)),
        (moored.JobNotFound, lambda: v.client.cancel(missing)),
    ]
    if v.world.simulated:
        wrong.append((moored.NeverFits, lambda: v.client.generate_image("x", model="huge")))
    kind, ask = v.chance.choice(wrong)
    with suppress(kind):
        ask()
        v.book.fault(f"{kind.__name__} was expected, and nothing was refused")


# Checkpoints.


def rewritten_picture(v: Visitor) -> None:
    """A picture of a model that others overwrite: it must be that of the file as it was."""
    one = v.chance.choice(v.world.overwritten)
    before = one.begin()
    stream = v.client.stream_image("a boat", model=one.what.name, seed=1, timeout=CALL_S, **QUICK)
    try:
        one.judge(before, v.book.result(stream))
    except moored.MooredError:
        # While it is written, whatever is said of it.
        if one.begin() == before and before[0] % 2 == 0:
            raise


def overwrite(v: Visitor) -> None:
    """Overwrites a checkpoint, then asks for a picture of what it holds now."""
    one = v.chance.choice(v.world.overwritten)
    if one.overwrite(by_rename=v.chance.random() < 0.5):
        before = one.begin()
        stream = v.client.stream_image(
            "a boat", model=one.what.name, seed=1, timeout=CALL_S, **QUICK
        )
        try:
            one.judge(before, v.book.result(stream))
        except moored.MooredError:
            if one.begin() == before:
                raise


Actions = dict[str, tuple[float, Callable[[Visitor], None]]]

EVERYWHERE: Actions = {
    "picture": (10, picture),
    "larger picture": (2, larger_picture),
    "pictures": (3, pictures),
    "preview": (2, preview),
    "from image": (3, from_image),
    "slow reader": (2, slow_reader),
    "leave": (5, leave),
    "cancel": (5, cancel),
    "deadline": (3, deadline),
    "joined": (3, joined),
    "detached": (2, detached),
    "latents": (4, latents),
    "encode": (3, encode),
    "plan": (2, plan),
    "load and unload": (4, load_and_unload),
    "pin": (3, pin),
    "hold": (3, hold),
    "reserve": (2, reserve),
    "swap": (3, swap),
    "trim": (1, trim),
    "look": (2, look),
    "newcomer": (3, newcomer),
    "nonsense": (2, nonsense),
    "rewritten picture": (4, rewritten_picture),
    "overwrite": (2, overwrite),
}
# By models without mathematics, which a real card does not take.
ON_SIMULATED_CARDS: Actions = {
    "film": (4, film),
    "track": (4, track),
    "large picture": (5, large_picture),
    "forced unload": (2, forced_unload),
}


def actions_for(simulated: bool) -> Actions:
    """What can be done on a device."""
    return EVERYWHERE | (ON_SIMULATED_CARDS if simulated else {})
