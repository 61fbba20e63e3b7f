"""Programs that run beside the service: the witness of its memory, the hog, the link, and the peers.

Each is a process of its own, started by `beside.py NAME ...`. The witness and the hog take a line of standard
input as a command, answer with a line of JSON, and end with their input; the others print one line of JSON.
Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
LINK_BYTES = 4 << 30
HOG_PIECE_BYTES = 1 << 30


def say(**what: object) -> None:
    """One answer."""
    print(json.dumps(what), flush=True)


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def nvml_reader(index: int) -> tuple[Callable[[], int], str]:
    """What reads the used bytes of a card, and the card's name with its driver's version."""
    try:
        import pynvml
    except ImportError:
        return _nvml_by_hand(index)
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def word(text: Any) -> str:
        return text.decode() if isinstance(text, bytes) else str(text)

    driver = word(pynvml.nvmlSystemGetDriverVersion())
    name = f"{word(pynvml.nvmlDeviceGetName(handle))}, driver {driver}"
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used), name


def _nvml_by_hand(index: int) -> tuple[Callable[[], int], str]:
    library = ctypes.CDLL("libnvidia-ml.so.1")

    def call(function: str, *arguments: object) -> None:
        code = getattr(library, function)(*arguments)
        if code != 0:
            raise OSError(f"{function}: NVML error {code}")

    call("nvmlInit_v2")
    handle = ctypes.c_void_p()
    call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
    name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(80)
    call("nvmlDeviceGetName", handle, name, len(name))
    call("nvmlSystemGetDriverVersion", driver, len(driver))
    memory = _Memory()

    def used() -> int:
        call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return int(memory.used)

    return used, f"{name.value.decode()}, driver {driver.value.decode()}"


def witness(index: int) -> None:
    """Says how many bytes of the card are used, as often as it is asked."""
    used, name = nvml_reader(index)
    say(name=name)
    for _ in sys.stdin:
        say(used=used(), at=time.monotonic())


def hog(index: int) -> None:
    """`hold BYTES` takes memory of the card until so much is free; `free` gives all of it back."""
    import torch

    torch.cuda.set_device(index)
    torch.cuda.init()
    held: list[torch.Tensor] = []
    say(ready=True)
    for line in sys.stdin:
        word, _, leave = line.strip().partition(" ")
        if word == "hold":
            # PyTorch takes no less than 20 MiB of the driver.
            while (free := torch.cuda.mem_get_info()[0]) >= int(leave) + 20 * MIB:
                piece = min(free - int(leave), HOG_PIECE_BYTES) // (2 * MIB) * 2 * MIB
                try:
                    held.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        else:
            held.clear()
            torch.cuda.empty_cache()
        say(free=torch.cuda.mem_get_info()[0], held=sum(map(len, held)), at=time.monotonic())


def link(index: int) -> None:
    """Gigabytes a second between the host and the card: the best of several transfers."""
    import torch

    torch.cuda.set_device(index)
    card = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")

    def best(to: torch.Tensor, source: torch.Tensor, rounds: int) -> float:
        seconds = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            began = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return len(source) / min(seconds) / 1e9

    pinned = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    to_card, from_card = best(card, pinned, 6), best(pinned, card, 6)
    del pinned
    part = LINK_BYTES // 4
    pageable = torch.ones(part, dtype=torch.uint8)
    say(
        pinned_to_card=to_card,
        card_to_pinned=from_card,
        pageable_to_card=best(card[:part], pageable, 4),
        torch=torch.__version__,
    )


def peers(index: int, folder: Path) -> None:
    """diffusers and safetensors on the same files: seconds to load, seconds to unload, bytes left."""
    import diffusers
    import torch

    place = f"cuda:{index}"
    used, _ = nvml_reader(index)
    torch.zeros(1, device=place)
    torch.cuda.synchronize()
    rounds = []
    for _ in range(3):
        before, began = used(), time.perf_counter()
        model: Any = diffusers.FluxTransformer2DModel.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True
        )
        read = time.perf_counter()
        model.to(place)
        torch.cuda.synchronize()
        loaded = time.perf_counter()
        size = sum(weight.nbytes for weight in model.parameters())
        del model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        gone = time.perf_counter()
        rounds.append(
            {
                "bytes": size,
                "load_s": loaded - began,
                "to_s": loaded - read,
                "unload_s": gone - loaded,
                "left": used() - before,
            }
        )
    direct = []
    for _ in range(2):
        from safetensors.torch import load_file

        began = time.perf_counter()
        tensors = [load_file(file, device=place) for file in sorted(folder.glob("*.safetensors"))]
        torch.cuda.synchronize()
        direct.append(time.perf_counter() - began)
        tensors.clear()
        gc.collect()
        torch.cuda.empty_cache()
    say(
        rounds=rounds,
        direct=direct,
        versions=f"diffusers {diffusers.__version__}, torch {torch.__version__}",
    )


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=["witness", "hog", "link", "peers"])
    parser.add_argument("--index", type=int, default=0, help="number of the card")
    parser.add_argument("--folder", type=Path, help="a transformer's folder, for peers")
    arguments = parser.parse_args()
    if arguments.program == "peers":
        peers(arguments.index, arguments.folder)
    else:
        {"witness": witness, "hog": hog, "link": link}[arguments.program](arguments.index)


if __name__ == "__main__":
    main()
