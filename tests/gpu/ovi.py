"""Measures Ovi on a card: from a prompt to a film with sound, in little memory, and what films leave.

    python tests/gpu/ovi.py --binary moored --work FOLDER --out ovi.json

It makes Ovi in full size from random numbers, and Wan 2.2 TI2V 5B, whose other parts Ovi uses (47 GB; 39 GB
with `--umt5-layers 4`), and needs torch, diffusers, transformers, and what the Python client needs.
`--parts` chooses among make, steps, film, precompiled, capped, unload and long, `--only` figures by a
pattern of their names. One line of JSON for each figure, and all of them in the file, of which `film_rows.py`
makes rows.
`--tiny` runs everything with tiny models on the CPU.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import full_size
import host_memory
import torch
import wan
from full_size import (
    ASKED,
    FIXTURES,
    Job,
    begin,
    bytes_of,
    command_line,
    fill,
    guarded,
    picture,
    run_parts,
    save,
    scratch_of,
    short_track,
    small_film,
    tell,
    tell_left,
    tell_step,
    tell_whole,
)
from host_memory import Memory
from ovi_shapes import Fusion, Shapes
from processes import children_of
from sampling import sampled
from start_picture import start_picture

BASE = "wan-5b"
# The weights do not tell the variant: the names of the files do.
OVI, OVI_10S = "Ovi-11B-bf16", "Ovi-960x960-10s"
FILES = tuple(f"{name}.{end}" for name in (OVI, OVI_10S) for end in ("safetensors", "moored.json"))
VARIANT = "Ovi 720x720, 5 s"
SIZE, FRAMES = (960, 544), 121
LONG_SIZE, LONG_FRAMES = (960, 960), 241
SMALL_SIZE, SMALL_FRAMES = (320, 192), 17
SAMPLE_S = 0.1
PROMPT = "a red circle says <S>hello<E> <AUDCAP>rain on a roof<ENDAUDCAP>"
OTHER_PROMPT = "a blue square says <S>good night<E> <AUDCAP>wind in trees<ENDAUDCAP>"
# Those of MMAudio for 16 kHz.
AUDIO_VAE = {
    "mel_bins": 80,
    "latent_channels": 20,
    "hidden_channels": 384,
    "channel_multipliers": [1, 2, 4],
    "layers_per_block": 2,
    "sample_rate": 16_000,
    "n_fft": 64,
    "hop_length": 16,
}
VOCODER = {
    "num_mels": 80,
    "upsample_initial_channel": 1536,
    "upsample_rates": [4, 4, 2, 2, 2, 2],
    "upsample_kernel_sizes": [8, 8, 4, 4, 4, 4],
}
CAP_GIB = 24


class Service(full_size.Service):
    """A running service of Ovi and of Wan 2.2 5B."""

    def __init__(
        self,
        binary: Path,
        work: Path,
        *settings: str,
        device: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        told = ("log.filter=info,timeline=debug", *settings)
        super().__init__(binary, work, (BASE, *FILES), *told, device=device, variables=variables)


def make(work: Path, layers: int) -> None:
    """What is not there yet: the base with the decoders of sound, and the file of the fusion model."""
    wan.make(work, (BASE,), layers)
    began = time.perf_counter()
    last = work / FILES[-1]
    if last.is_file():
        return
    for name, shapes in sound_shapes().items():
        save(drawn(shapes), work / BASE / f"{name}.safetensors")
    fusion = Fusion()
    if ASKED.is_tiny:
        config = json.loads((FIXTURES / "ovi-tiny/config.json").read_text(encoding="utf-8"))[
            "video"
        ]
        known = ("dim", "ffn_dim", "num_layers", "text_dim", "in_dim")
        fusion = Fusion(*(config[name] for name in known))
    first, *others = (work / f"{name}.safetensors" for name in (OVI, OVI_10S))
    save(drawn(fusion.shapes()), first)
    for file in others:
        file.unlink(missing_ok=True)
        os.link(first, file)
    for name in (OVI, OVI_10S):
        (work / f"{name}.moored.json").write_text(json.dumps({"base": BASE}))
    tell("make Ovi", time.perf_counter() - began, "s")


def drawn(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Random numbers in bf16."""
    found = {}
    for name, shape in shapes.items():
        found[name] = torch.empty(shape, device=ASKED.place, dtype=torch.bfloat16)
        fill(name, found[name])
    return found


def sound_shapes() -> dict[str, Shapes]:
    """By file: the tensors of MMAudio's VAE and vocoder that decode, in the names of their authors."""
    import diffusers

    vae, vocoder = AUDIO_VAE, VOCODER
    if ASKED.is_tiny:
        vae, vocoder = vae | {"hidden_channels": 8}, vocoder | {"upsample_initial_channel": 128}
    with torch.device("meta"):
        of_vae = diffusers.MMAudioVAE(**vae).vae.state_dict()
        of_vocoder = dict(diffusers.MMAudioVocoder(**vocoder).named_parameters())
    decoding = {name: value for name, value in of_vae.items() if not name.startswith("encoder.")}
    found = {
        file: {name: tuple(value.shape) for name, value in tensors.items()}
        for file, tensors in (("v1-16", decoding), ("best_netG", of_vocoder))
    }
    # The class of diffusers has none.
    found["best_netG"]["conv_post.bias"] = (1,)
    return found


def film(
    served: full_size.Service,
    name: str,
    size: tuple[int, int],
    frames: int,
    steps: int,
    **options: Any,
) -> Any:
    """A film with sound, of which a step is two passes."""
    if ASKED.is_tiny:
        size, frames = (64, 32), 5 if frames <= FRAMES else 9
    told = {"prompt": PROMPT, "true_guidance": 4.0} | options
    return wan.film(served, name, size, frames, steps, **told)


def steps(binary: Path, work: Path) -> None:
    with Service(binary, work).logged("steps") as service:
        for quantized in wan.FORMATS:
            what = f"step, {VARIANT}{quantized}"
            make_film = partial(film, service, OVI + quantized, SIZE, FRAMES, latent_only=True)
            guarded(what, partial(tell_step, what, make_film, 1, 3))


def whole_film(binary: Path, work: Path) -> None:
    """Everything resident, and a prompt that was not encoded before."""
    with Service(binary, work).logged("film") as service:
        make_film = partial(film, service, OVI, SIZE, FRAMES, output="mp4")
        what = f"{VARIANT}, 50 steps, prompt to MP4"
        again = partial(make_film, 50, prompt=OTHER_PROMPT)
        result = tell_whole(what, partial(make_film, 2), again)
        for stage in result.stages:
            name = f"{what}: {stage.name}"
            tell(name, stage.run_ms / 1e3, "s", who="moored", **scratch_of(stage))


def precompiled(binary: Path, work: Path) -> None:
    """Films where the driver may compile nothing: a kernel that is not in the binary as machine code fails.

    A driver that has to compile some lets the first film of a new machine wait for seconds.
    """
    size = (64, 32) if ASKED.is_tiny else SMALL_SIZE
    starts: dict[str, dict[str, Any]] = {
        "from text": {},
        "from a picture": {"init_image": start_picture(size)},
    }
    variables = {"CUDA_DISABLE_PTX_JIT": "1"}
    with Service(binary, work, variables=variables).logged("precompiled") as service:
        for quantized in wan.FORMATS:
            for start, options in starts.items():
                for make_film, name in ((film, OVI), (wan.film, BASE)):
                    what = f"film of {name}{quantized} {start}, nothing compiled"
                    told = {"output": "mp4"} | options
                    job = partial(make_film, service, name + quantized, size, SMALL_FRAMES, 1)
                    guarded(what, partial(job, **told))


def capped(binary: Path, work: Path) -> None:
    """In fp8 on a card that the configuration makes small, beside the whole card."""
    small = f"sim:{CAP_GIB}GiB" if ASKED.is_tiny else f"cuda:0={CAP_GIB}GiB"
    for device, policy in (("", "shared"), (small, "shared"), (small, "exclusive")):
        place = f"card of {CAP_GIB} GiB" if device else "whole card"
        what = f"{VARIANT}, 4 steps in fp8, {place}, {policy}"
        guarded(what, partial(_on_card, binary, work, device, policy, what))


def _on_card(binary: Path, work: Path, device: str, policy: str, what: str) -> None:
    log = f"{'capped' if device else 'whole'}-{policy}"
    settings = f"cards.policy={policy}"
    with Service(binary, work, settings, device=device).logged(log) as service:
        make_film = partial(film, service, f"{OVI} fp8", SIZE, FRAMES, output="mp4")
        first, then = partial(make_film, 1), partial(make_film, 4, prompt=OTHER_PROMPT)
        job = partial(tell_whole, what, first, then)
        with sampled(lambda: bytes_of(service), SAMPLE_S) as readings:
            job()
        tell(f"{what}: most on the card by the driver", max(readings) / 2**30, "GiB", who="moored")


def unload(binary: Path, work: Path) -> None:
    """What is left on the card after films, pictures and tracks, when everything is unloaded."""
    with Service(binary, work).logged("unload") as service:

        def of(make_film: Callable[..., Any], name: str) -> Job:
            return partial(make_film, service, name, SMALL_SIZE, SMALL_FRAMES, 1)

        def mixed(number: int) -> Job:
            quantized = wan.FORMATS[number // 5 % len(wan.FORMATS)]
            return (
                of(wan.film, BASE + quantized),
                partial(picture, service, number),
                of(film, OVI + quantized),
                partial(small_film, service, number),
                partial(short_track, service, number),
            )[number % 5]

        first = [mixed(number) for number in (2, 0, 1, 3, 4)]
        again = [of(film, OVI + name) for name in wan.FORMATS[1:]]
        again += [of(wan.film, BASE + name) for name in wan.FORMATS[1:]]
        what = "bytes left after unloading, 50 mixed films, pictures and tracks"
        tell_left(service, first, again, mixed, what, ", Wan and Ovi")


def long(binary: Path, work: Path) -> None:
    """What the supervisor and the worker have of the machine's memory in a film of 10 s beside one of 5 s."""
    with Service(binary, work).logged("long") as service:
        make_film = partial(film, service, OVI_10S, LONG_SIZE, output="raw+mp4")
        make_film(FRAMES, 1)
        pid = service.process.pid

        def read() -> tuple[Memory, Memory]:
            return host_memory.read((pid,)), host_memory.read(children_of(pid))

        taken, delivered = [], []
        for frames in (FRAMES, LONG_FRAMES):
            with sampled(read, SAMPLE_S) as readings:
                result = make_film(frames, 2)
            taken.append([Memory.most(one) for one in zip(*readings, strict=True)])
            delivered.append(result.array.nbytes + len(result.mp4) + len(result.audio.data))
        more = {"delivered_mib": round((delivered[1] - delivered[0]) / 2**20, 1)}
        for who, short, twice in zip(("supervisor", "worker"), *taken, strict=True):
            growth = twice - short
            anonymous = round(growth.anonymous / 2**20, 1)
            what = f"film of 10 s beside one of 5 s: memory of the {who}, growth"
            mib = growth.resident / 2**20
            tell(what, mib, "MiB", who="moored", anonymous_mib=anonymous, **more)


def main() -> None:
    every = "make,steps,film,precompiled,capped,unload,long"
    parser = command_line(__doc__, every, "steps and capped")
    parser.add_argument("--umt5-layers", type=int, default=24)
    parser.add_argument("--tiny", action="store_true")
    settings = parser.parse_args()
    begin(settings)
    binary, work = settings.binary, settings.work
    parts = {
        "make": partial(make, work, settings.umt5_layers),
        "steps": partial(steps, binary, work),
        "film": partial(whole_film, binary, work),
        "precompiled": partial(precompiled, binary, work),
        "capped": partial(capped, binary, work),
        "unload": partial(unload, binary, work),
        "long": partial(long, binary, work),
    }
    run_parts(parts, settings.parts.split(","))


if __name__ == "__main__":
    main()
