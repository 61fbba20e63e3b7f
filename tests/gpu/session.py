"""Measures sessions of sound on a card: the first sound, what shared passes bring, gaps, and what is left.

    python tests/gpu/session.py --binary moored --work FOLDER --out session.json

It needs the models that `sound.py --parts make` leaves in the folder. One line of JSON for each figure,
and all of them in the file; `sound_rows.py` makes rows of them. `--parts adapters` times a pass of four
segments with four different LoRAs, and with four prompts, beside one of four alike, for segments of 10 s,
60 s and 240 s.
"""

from __future__ import annotations

import json
import statistics
import struct
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import moored
import numpy as np
from full_size import begin, bytes_of, command_line, guarded, run_parts, settled, tell
from sound import LYRICS, MODEL, Service, track
from sound_rows import (
    LORA_SHARE,
    RANK,
    SEGMENT_S,
    TOGETHER,
    WITH_LORAS,
    WITH_ONE_LORA,
    WITH_PROMPTS,
    step_of,
)

SECONDS = 10.0
MINUTE = 60.0
TWO_MINUTES = 120.0
PROMPT = "a slow waltz for piano and strings"
PROMPTS = (
    PROMPT,
    "a march",
    "fast and loud drums with a choir, two guitars and a bass that plays in thirds with the left hand",
    "an old song about the sea, sung by a woman",
)


def play(
    live: moored.AudioSession, seed: int, seconds: float = SECONDS, **more: Any
) -> moored.Segment:
    return live.play(PROMPT, lyrics=LYRICS, seconds=seconds, seed=seed, **more)


def first_sound(service: Service) -> None:
    """From opening to the first chunk, model and kernels warm; the prompt is new to each."""
    track(service, MODEL, SECONDS, 8)
    times = []
    for number in range(7):
        began = time.perf_counter()
        with service.client.audio_session(MODEL) as live:
            live.play(f"{PROMPT}, {number}", lyrics=LYRICS, seconds=SECONDS, seed=number)
            next(iter(live))
            times.append((time.perf_counter() - began) * 1e3)
    more = {"least_ms": round(min(times), 1), "most_ms": round(max(times), 1)}
    tell("session: first sound after open", sorted(times)[3], "ms", who="moored", **more)


def at_once(service: Service, seconds: float = SECONDS, what: str = "another version") -> None:
    """From a new prompt until it sounds at the head of what is sent."""
    times = []
    with service.client.audio_session(MODEL, lead_s=0.3) as live:
        play(live, 1, seconds=seconds).wait(60)
        chunks = iter(live)
        next(chunks)
        for seed in range(2, 9):
            began = time.perf_counter()
            segment = play(live, seed, seconds=seconds, at="now")
            while next(chunks).segment != segment.number:
                pass
            times.append((time.perf_counter() - began) * 1e3)
    tell(f"session: {what} sounds after", sorted(times)[3], "ms", who="moored")


def window(service: Service) -> None:
    """Four tracks of a minute in one pass: what a step of all four takes, and when a change is heard."""
    what = f"step of four tracks of {MINUTE:.0f} s in one pass"
    tell(what, pass_ms(service, MINUTE, ()), "ms", who="moored")
    in_fp8 = moored.ModelRef(MODEL, formats={"transformer": "fp8"})
    tell(f"{what}, in fp8", pass_ms(service, MINUTE, (), in_fp8), "ms", who="moored")
    at_once(service, MINUTE, f"another version of {MINUTE:.0f} s")


def segments(service: Service, slots: int) -> None:
    """How many segments of ten seconds are made in a second, twice as many under way as there are slots."""
    count = 96
    with service.client.audio_session(MODEL, slots=slots, lead_s=0.1) as live:

        def make(number: int) -> None:
            under_way.pop(0).wait(60)
            under_way.append(play(live, 100 + number))

        under_way = [play(live, seed) for seed in range(2 * slots)]
        for number in range(3 * slots):
            make(number)
        began = time.perf_counter()
        for number in range(count):
            make(1000 + number)
        seconds = time.perf_counter() - began
    tell(f"session: segments of 10 s a second, {slots} slots", count / seconds, "1/s", who="moored")


def two_minutes(service: Service) -> None:
    """A session by the clock, with a new version every five seconds, beside tracks of another client."""
    stop = threading.Event()
    tracks = 0

    def other() -> None:
        nonlocal tracks
        client = moored.Client(service.client.endpoint, client_id="another")
        with client:
            while not stop.is_set():
                client.generate_audio(
                    PROMPT, model=MODEL, seconds=240, steps=8, seed=tracks, output="raw"
                )
                tracks += 1

    thread = threading.Thread(target=other)
    with service.client.audio_session(MODEL, slots=2) as live:
        play(live, 0).wait(60)
        thread.start()
        began, seed, heard = time.perf_counter(), 1, 0.0
        for chunk in live:
            heard = (chunk.first_sample + chunk.sample_count) / live.sample_rate
            gone = time.perf_counter() - began
            if gone > seed * 5:
                play(live, seed, at="now" if seed % 2 else "over")
                seed += 1
            if gone > TWO_MINUTES:
                break
        stop.set()
        report = live.close()
    thread.join()
    more = {"heard_s": round(heard, 1), "segments": report.segments, "tracks": tracks}
    more |= {"gap_ms": report.gap_ms}
    what = "session: gaps in two minutes beside another client's tracks"
    tell(what, report.gaps, "gaps", who="moored", **more)


def left(service: Service) -> None:
    """What many sessions leave on the card."""
    client = service.client

    def at_rest() -> int:
        client.unload(timeout=60)
        client.trim()
        return settled(lambda: bytes_of(service))

    def one(number: int) -> None:
        live = client.audio_session(MODEL, slots=1 + number % 4).open()
        for seed in range(1 + number % 3):
            segment = play(live, seed, steps=2)
        if number % 4 == 1:
            segment.wait(60)
            next(iter(live))
        if number % 4 == 2:
            live.replace_model("ace-step-other").wait(60)
        live.close() if number % 2 else live.__exit__(RuntimeError, None, None)

    for number in range(4):
        one(number)
    before = at_rest()
    for number in range(24):
        one(number)
    tell("session: bytes left after 24 sessions", at_rest() - before, "bytes", who="moored")


def linear_layers(transformer: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of the blocks of a transformer in a folder."""
    found: dict[str, tuple[int, int]] = {}
    for file in sorted(transformer.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        for name, tensor in header.items():
            shape = tensor.get("shape", [])
            if name.startswith("layers.") and name.endswith(".weight") and len(shape) == 2:
                found[name.removesuffix(".weight")] = (shape[0], shape[1])
    return found


def write_lora(path: Path, layers: dict[str, tuple[int, int]], seed: int) -> None:
    """Writes a random adapter of these layers, in bf16 and diffusers' names."""
    header: dict[str, Any] = {}
    at = 0
    for name, (outputs, inputs) in layers.items():
        for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
            length = 2 * shape[0] * shape[1]
            header[f"transformer.{name}.{part}.weight"] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": [at, at + length],
            }
            at += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    drawn = np.random.default_rng(seed).standard_normal(at // 2, dtype=np.float32) * 0.002
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write((drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def pass_ms(
    service: Service,
    seconds: float,
    names: tuple[str, ...],
    model: str | moored.ModelRef = MODEL,
    prompts: tuple[str, ...] = (PROMPT,),
) -> float:
    """The time of a step of four segments, each with the next of these adapters and prompts; the median
    over rounds.

    Twice as many segments as slots are under way throughout, so that nearly all rounds are of four. A round
    has eight steps: the service tells its time in whole milliseconds.
    """
    steps, rounds = 8 * TOGETHER, []
    with service.client.audio_session(model, slots=TOGETHER, lead_s=0.1) as live:

        def next_of(number: int) -> moored.Segment:
            adapters = (moored.Adapter(names[number % len(names)]),) if names else ()
            prompt = prompts[number % len(prompts)]
            return live.play(
                prompt, lyrics=LYRICS, seconds=seconds, seed=number, steps=steps, adapters=adapters
            )

        under_way = [next_of(number) for number in range(2 * TOGETHER)]
        for number in range(6 * TOGETHER):
            done = under_way.pop(0).wait(300).done
            under_way.append(next_of(2 * TOGETHER + number))
            if done is not None and TOGETHER <= number < 5 * TOGETHER:
                sampled = [stage.run_ms for stage in done.stages if stage.name == "denoise"]
                rounds += [ms * len(sampled) / steps for ms in sampled]
    return statistics.median(rounds)


def with_adapters(service: Service) -> None:
    """A step of four segments with four LoRAs, or prompts, beside one of four alike."""
    names = tuple(f"rank-{RANK}-{number}" for number in range(TOGETHER))
    missed = []
    for seconds in SEGMENT_S:
        without = pass_ms(service, seconds, ())
        adapted = pass_ms(service, seconds, names)
        same = pass_ms(service, seconds, names[:1])
        prompted = pass_ms(service, seconds, (), prompts=PROMPTS)
        what = step_of(seconds)
        tell(what, without, "ms", who="moored")
        tell(f"{what}{WITH_PROMPTS}", prompted, "ms", who="moored")
        tell(f"{what}{WITH_ONE_LORA}", same, "ms", who="moored")
        tell(f"{what}{WITH_LORAS}", adapted, "ms", who="moored")
        if adapted > LORA_SHARE * without:
            missed.append(f"{what}: {adapted / without:.3f} of one without LoRAs")
    if missed:
        raise RuntimeError("; ".join(missed))


def adapters(binary: Path, work: Path) -> None:
    folder = work / "session-adapters"
    layers = linear_layers(work / MODEL / "transformer")
    for number in range(TOGETHER):
        write_lora(folder / f"rank-{RANK}-{number}.safetensors", layers, number)
    room = ('limits.results="4GiB"', 'limits.results_per_client="2GiB"')
    with Service(binary, work, f'models.adapters=["{folder}"]', *room).logged(
        "adapters"
    ) as service:
        service.client.wait_until_ready(60)
        guarded("adapters", partial(with_adapters, service))


def sessions(binary: Path, work: Path) -> None:
    with Service(binary, work).logged("sessions") as service:
        service.client.wait_until_ready(60)
        for what, measure in (
            ("first sound", first_sound),
            ("at once", at_once),
            *((f"slots {slots}", partial(segments, slots=slots)) for slots in (1, 2, 4, 8)),
            ("window", window),
            ("two minutes", two_minutes),
            ("left", left),
        ):
            guarded(what, partial(measure, service))


def main() -> None:
    settings = command_line(__doc__, "sessions", "all figures").parse_args()
    begin(settings)
    parts = {
        "sessions": partial(sessions, settings.binary, settings.work),
        "adapters": partial(adapters, settings.binary, settings.work),
    }
    run_parts(parts, settings.parts.split(","))


if __name__ == "__main__":
    main()
