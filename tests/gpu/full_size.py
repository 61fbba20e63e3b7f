"""What measurements of whole models share: random models of full size, a service, and the figures of a run.

`film.py` and `sound.py` measure with it. It needs torch and what the Python client needs.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client-py/src"), str(ROOT / "tests")]

import moored  # noqa: E402
import torch  # noqa: E402

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


ASKED = Asked()


def machine() -> str:
    """The card, its driver, and the processors, as all rows name them."""
    from beside import nvml_reader

    return f"{nvml_reader(0)[1]}, {len(os.sched_getaffinity(0))} cores"


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
    torch.cuda.empty_cache()


def made(build: Callable[[], Any]) -> Any:
    """A module on the card in bf16: matrices of N(0, 0.02), norms of 1, lengths of folded weights of 0.7."""
    with torch.device("meta"):
        module = build().to(torch.bfloat16)
    module = module.to_empty(device="cuda").eval()
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            last = name.rpartition(".")[2]
            if last == "weight_g":
                parameter.fill_(0.7)
            elif last == "weight" and parameter.ndim == 1:
                parameter.fill_(1)
            elif last == "bias" or last in ("alpha", "beta"):
                parameter.zero_()
            else:
                parameter.normal_(0, 0.02)
    for name, buffer in module.named_buffers():
        if "position_ids" in name:
            buffer.copy_(torch.arange(buffer.shape[-1]).expand(buffer.shape))
        elif "silence" in name:
            buffer.normal_(0, 1)
    return module


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
        for tensor in tensors.values():
            numbers = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data
            done = 0
            while done < len(numbers):
                done += out.write(numbers[done:])


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
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(save, shards, (folder / one for one in names)))
    files = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
    if len(shards) > 1:
        write_index(folder, name, files)
    return files


def write_index(folder: Path, name: str, files: dict[str, str]) -> None:
    """The index of shards."""
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index))


def timed(work: Callable[[], object], runs: int) -> float:
    """The median of some runs on the card, in milliseconds."""
    work()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2] * 1e3


def peak_gib(work: Callable[[], object]) -> float:
    """What a run takes of the card at most, beside what is held before."""
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - held) / 2**30


class Service:
    """A running service of the models in a folder, with a client of it."""

    def __init__(self, binary: Path, work: Path, models: Sequence[str], *settings: str) -> None:
        folder = work / "models"
        folder.mkdir(exist_ok=True)
        for name in models:
            if (work / name).is_dir() and not (folder / name).exists():
                (folder / name).symlink_to(work / name)
        words = ["--models", str(folder)]
        for setting in settings:
            words += ["--set", setting]
        served = service.Service(*words, state=work / "state", devices=(), binary=binary)
        self.process, self.log, self.stop = served.process, served.log, served.stop
        self.client = moored.Client(served.address)


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
