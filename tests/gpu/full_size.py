"""What measurements of whole models share: random models of full size, a service, and the figures of a run.

`film.py`, `sound.py`, `wan.py` and `ovi.py` measure with it. It needs torch and what the Python client needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client-py/src"), str(ROOT / "tests")]

import moored  # noqa: E402
import torch  # noqa: E402
from start_picture import start_picture  # noqa: E402

import service  # noqa: E402

FIXTURES = ROOT / "service/pipelines/fixtures"
SHARD_BYTES = 2 << 30
WRITERS = 4
FIGURES: list[dict[str, Any]] = []
FAILED: list[str] = []
"""Names of what could not be measured."""


@dataclass
class Asked:
    """What the command line asks for."""

    out: Path = Path(os.devnull)
    only: str = ""
    device: str = ""
    is_tiny: bool = False
    """Whether models are tiny and on the CPU: that shows that a script works, and measures nothing."""

    @property
    def place(self) -> str:
        """Where PyTorch computes."""
        return "cpu" if self.is_tiny else "cuda"


ASKED = Asked()


def machine() -> str:
    """The card, its driver, and the processors, as all rows name them."""
    from beside import nvml_reader

    name = "CPU" if ASKED.is_tiny else nvml_reader(0)[1]
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def command_line(about: str | None, parts: str, names: str) -> argparse.ArgumentParser:
    """What all scripts take; `names` says of what `--only` chooses."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=parts)
    parser.add_argument("--only", default="", help=f"a pattern of names: of {names}")
    return parser


def begin(settings: argparse.Namespace) -> None:
    """Takes what the command line asks for."""
    ASKED.is_tiny = getattr(settings, "tiny", False)
    ASKED.out, ASKED.only, ASKED.device = settings.out, settings.only, machine()
    for folder in (settings.work, settings.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)


def tell(measure: str, figure: float, unit: str, **more: object) -> None:
    """Notes a figure, and writes all that there are: a run that is ended loses none."""
    date = datetime.now(timezone.utc).date().isoformat()
    known = {"measure": measure, "figure": round(figure, 4), "unit": unit}
    FIGURES.append(known | more | {"device": ASKED.device, "date": date})
    print(json.dumps(known | more), flush=True)
    ASKED.out.write_text(json.dumps(FIGURES, indent=1) + "\n")


def guarded(what: str, work: Callable[[], object]) -> None:
    """Does it, if it is wanted; what fails costs its own figures only."""
    if not re.search(ASKED.only, what):
        return
    try:
        work()
    except Exception as error:  # noqa: BLE001
        FAILED.append(what)
        print(f"{what} failed: {error!r}", flush=True)


def run_parts(parts: Mapping[str, Callable[[], object]], wanted: Sequence[str]) -> None:
    """Runs the parts that are wanted, gives memory back between them, and lists the figures.

    The process ends with 1 when something failed.
    """
    for part in wanted:
        began = time.perf_counter()
        try:
            parts[part]()
        except Exception as error:  # noqa: BLE001
            FAILED.append(part)
            print(f"{part} failed: {error!r}", flush=True)
        free_memory()
        print(f"# {part}: {time.perf_counter() - began:.1f} s", flush=True)
    for each in FIGURES:
        print(
            f"{each.get('who', ''):16} {each['measure']:60} {each['figure']:10.1f} {each['unit']}"
        )
    if FAILED:
        sys.exit(f"failed: {', '.join(FAILED)}")


def free_memory() -> None:
    gc.collect()
    if not ASKED.is_tiny:
        torch.cuda.empty_cache()


def made(build: Callable[[], Any]) -> Any:
    """A module on the card in bf16."""
    with torch.device("meta"):
        module = build().to(torch.bfloat16)
    module = module.to_empty(device=ASKED.place).eval()
    for name, parameter in module.named_parameters():
        fill(name, parameter)
    for name, buffer in module.named_buffers():
        if "position_ids" in name:
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
        elif "silence" in name:
            buffer.normal_(0, 1)
        elif name.endswith("running_mean"):
            buffer.zero_()
        elif name.endswith("running_var"):
            buffer.fill_(1)
    return module


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor) -> None:
    """Matrices of N(0, 0.02), norms and deviations of 1, lengths of folded weights of 0.7."""
    last = name.rpartition(".")[2]
    if last == "weight_g":
        tensor.fill_(0.7)
    elif last in ("gamma", "data_std") or (last == "weight" and tensor.ndim == 1):
        tensor.fill_(1)
    elif last in ("bias", "alpha", "beta"):
        tensor.zero_()
    else:
        tensor.normal_(0, 0.02)


def save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """A file of safetensors, from the card and without copies of its bytes in between."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16, name
        places = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": places}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        begin = out.tell()

        def put(name: str) -> None:
            tensor = tensors[name].contiguous().view(-1).view(torch.uint8)
            numbers, place = tensor.cpu().numpy().data, begin + header[name]["data_offsets"][0]
            done = 0
            while done < len(numbers):
                done += os.pwrite(out.fileno(), numbers[done:], place + done)

        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(put, tensors))


def write(
    folder: Path, module: Any, name: str, prefix: str = "", apart: tuple[str, ...] = ()
) -> dict[str, str]:
    """A component in shards, as transformers and diffusers name them; what begins with `apart` comes last.

    Returns the file of each tensor.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: t for k, t in module.state_dict().items() if t.is_floating_point()}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for is_apart in (False, True):
        for key, tensor in tensors.items():
            if key.startswith(apart or ("\0",)) != is_apart:
                continue
            size += tensor.nbytes
            if (size > SHARD_BYTES or (is_apart and size == tensor.nbytes)) and shards[-1]:
                shards.append({})
                size = tensor.nbytes
            shards[-1][prefix + key] = tensor
        size = 0
    names = [f"{name}-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{name}.safetensors"]
    for one, shard in zip(names, shards, strict=True):
        save(shard, folder / one)
    files = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
    if len(shards) > 1:
        write_index(folder, name, files)
    return files


def write_index(folder: Path, name: str, files: dict[str, str]) -> None:
    """The index of shards."""
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index))


def synchronize() -> None:
    if not ASKED.is_tiny:
        torch.cuda.synchronize()


def compiler() -> str:
    """The backend of torch.compile; tiny models are not compiled."""
    return "eager" if ASKED.is_tiny else "inductor"


def compile_blocks(module: Any) -> None:
    """Compiles a model of diffusers block by block, for one shape."""
    module.compile_repeated_blocks(fullgraph=True, dynamic=False, backend=compiler())


def timed(work: Callable[[], object], runs: int) -> float:
    """The median of some runs on the card, in milliseconds."""
    work()
    times = []
    for _ in range(runs):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e3


def peak_gib(work: Callable[[], object]) -> float:
    """What a run takes of the card at most, beside what is held before."""
    if ASKED.is_tiny:
        work()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - held) / 2**30


class Service:
    """A running service of the models in a folder, with a client of it."""

    def __init__(
        self,
        binary: Path,
        work: Path,
        models: Sequence[str],
        *settings: str,
        device: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it with what there is of these folders and files; on a device, or on those that it finds.

        Variables are added to its environment.
        """
        folder = work / "models"
        folder.mkdir(exist_ok=True)
        for name in models:
            if (work / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to((work / name).absolute())
        words = ["--models", str(folder)]
        for setting in settings:
            words += ["--set", setting]
        device = device or ("cpu" if ASKED.is_tiny else "")
        devices = (device,) if device else ()
        served = service.Service(
            *words,
            state=work / "state",
            devices=devices,
            binary=binary,
            environment=service.clean_environment() | dict(variables or {}),
        )
        self.process, self.log, self.stop = served.process, served.log, served.stop
        self.client = moored.Client(served.address)

    @contextmanager
    def logged(self, name: str) -> Iterator[Any]:
        """Itself, until it is stopped and its log is written beside the figures."""
        try:
            yield self
        except BaseException:
            print("".join(self.log[-40:]))
            raise
        finally:
            self.stop()
            file = ASKED.out.with_name(f"{ASKED.out.stem}-{name}.log")
            file.write_text("".join(self.log))


def run_ms(result: Any, name: str) -> list[tuple[float, Any]]:
    """What the stages of a name took, with what the service says of each."""
    return [(stage.run_ms, stage) for stage in result.stages if stage.name == name]


def show(result: Any) -> None:
    for stage in result.stages:
        words = [stage.name, f"run {stage.run_ms}", f"move {stage.move_ms}", stage.chunking]
        words += [
            f"peak {stage.peak_scratch_bytes >> 20}",
            f"of {stage.predicted_scratch_bytes >> 20} MiB",
        ]
        print("   ", *words, stage.attention, flush=True)


def scratch_of(stage: Any) -> dict[str, object]:
    """What the service says of how a stage was computed."""
    return {
        "peak_gib": round(stage.peak_scratch_bytes / 2**30, 3),
        "predicted_gib": round(stage.predicted_scratch_bytes / 2**30, 3),
        "attention": stage.attention,
        "chunking": stage.chunking,
    }


def tell_step(what: str, make: Callable[[int], Any], few: int, many: int) -> None:
    """Tells what a step takes: the difference of two jobs, after one that brings in what they need."""
    make(few)
    before, result = make(few), make(many)
    show(result)
    ms, stage = run_ms(result, "denoise")[-1]
    of_step = (ms - run_ms(before, "denoise")[-1][0]) / (many - few)
    tell(what, of_step, "ms", who="moored", **scratch_of(stage))


def tell_decode(what: str, make: Callable[[], Any]) -> None:
    """Tells what a decode takes: the best of some, after one."""
    make()
    ms, stage = min((run_ms(make(), "decode")[-1] for _ in range(3)), key=lambda one: one[0])
    tell(what, ms, "ms", who="moored", **scratch_of(stage))


def tell_whole(what: str, first: Callable[[], Any], then: Callable[[], Any]) -> Any:
    """Tells what a job takes from its request to its last byte, after another one; the job."""
    first()
    began = time.perf_counter()
    result = then()
    seconds = time.perf_counter() - began
    show(result)
    more = {
        "chunking": [stage.chunking for stage in result.stages if stage.name == "decode"],
        "moved_s": sum(stage.move_ms for stage in result.stages) / 1e3,
        "ran_s": sum(stage.run_ms for stage in result.stages) / 1e3,
        "approximations": list(result.approximations),
    }
    tell(what, seconds, "s", who="moored", **more)
    return result


def settled(used: Callable[[], int]) -> int:
    """The driver's figure of what is used, once two readings agree."""
    last = used()
    for _ in range(40):
        time.sleep(0.05)
        now = used()
        if now == last:
            break
        last = now
    return last


def bytes_of(served: Service) -> int:
    """What the service's processes hold of the card by the driver; of all programs where it does not tell."""
    if ASKED.is_tiny:
        return 0
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(0)
    parents = {served.process.pid}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, parent = status.parent.name, status.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == served.process.pid:
            parents.add(int(number))
    every = pynvml.nvmlDeviceGetComputeRunningProcesses(card)
    found = [one.usedGpuMemory for one in every if one.pid in parents and one.usedGpuMemory]
    return int(sum(found) or pynvml.nvmlDeviceGetMemoryInfo(card).used)


Job = Callable[[], object]


def tell_left(
    served: Service,
    first: Sequence[Job],
    again: Sequence[Job],
    mixed: Callable[[int], Job],
    what: str,
    of_what: str = "",
) -> None:
    """Tells what is left on the card when everything is unloaded: after jobs, and after 50 mixed ones.

    The first jobs, and those `again`, bring the code of kernels, which stays with the process.
    """

    def used() -> int:
        return bytes_of(served)

    def after(*jobs: Job) -> int:
        for job in jobs:
            job()
        served.client.unload(timeout=60)
        served.client.trim()
        return settled(used)

    served.client.wait_until_ready(60)
    idle = settled(used)
    before = after(*first)
    tell(f"code and context that a first film leaves{of_what}", (before - idle) / 2**20, "MiB")
    left = max(after(first[0]) - before for _ in range(3))
    tell(f"bytes left after a film and unloading{of_what}", left, "bytes", who="moored")
    for job in again:
        before = after(job)
    began = time.perf_counter()
    samples = [after(mixed(number)) - before for number in range(50)]
    seconds = round(time.perf_counter() - began, 1)
    tell(what, samples[-1], "bytes", who="moored", most=max(samples), seconds=seconds)


def small_film(served: Service, seed: int) -> None:
    """A film of the shipped model, of one section or several."""
    served.client.generate_video(
        "the red circle moves to the top left on a blue background",
        model="moored/demo-film",
        init_image=start_picture((64, 64)),
        frames=37 + 36 * (seed % 3),
        steps=2,
        seed=seed,
    )


def picture(served: Service, seed: int) -> None:
    """A picture of the shipped model."""
    served.client.generate_image("a red circle", model="moored/demo", steps=2, seed=seed)


def short_track(served: Service, seed: int) -> None:
    """A track of the shipped model."""
    served.client.generate_audio("a waltz", model="moored/demo-sound", steps=2, seed=seed)
