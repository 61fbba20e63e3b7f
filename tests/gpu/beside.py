"""Programs that run beside the service: the witness and the holder of memory, the link, and the peers.

Each is a process of its own, started by `beside.py NAME ...`. Witness and holder take a line of standard
input as a command, answer with a line of JSON, and end with their input; the others print one line of JSON.
Times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import threading
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


SAMPLE_S = 0.001


def witness(index: int) -> None:
    """Looks at the used bytes of the card all the time.

    It answers with those of now, and with the most since it was asked before and when that was.
    """
    used, name = nvml_reader(index)
    say(name=name)
    lock, most = threading.Lock(), (0, time.monotonic())

    def look() -> int:
        nonlocal most
        now = used()
        with lock:
            most = max(most, (now, time.monotonic()))
        return now

    def keep_looking() -> None:
        while True:
            look()
            time.sleep(SAMPLE_S)

    threading.Thread(target=keep_looking, daemon=True).start()
    for _ in sys.stdin:
        now = look()
        with lock:
            (peak, at), most = most, (now, time.monotonic())
        say(used=now, at=time.monotonic(), most=peak, most_at=at)


def holder(index: int) -> None:
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


def quantized(place: str, folder: Path, name: str, rounds: int, steps: int, side: int) -> None:
    """diffusers with bitsandbytes on the same files: seconds, bytes on the card, a step, bytes left.

    `name`: `full` (no bitsandbytes), `int8`, `nf4`, `nf4-double`. The first round computes besides, so that
    what a library keeps for good is there before bytes that are left are counted.
    """
    try:
        say(**_quantized(place, folder, name, rounds, steps, side))
    except Exception as error:  # Whatever another program meets is a result.
        say(error=f"{type(error).__name__}: {error}")


def _quantized(
    place: str, folder: Path, name: str, rounds: int, steps: int, side: int
) -> dict[str, object]:
    import diffusers
    import torch

    on_card = place.startswith("cuda")
    versions = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
    options: dict[str, Any] = {}
    if name != "full":
        import bitsandbytes

        versions += f", bitsandbytes {bitsandbytes.__version__}"
        asked: dict[str, Any] = {"load_in_8bit": True}
        if name != "int8":
            asked = {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": name == "nf4-double",
                "bnb_4bit_compute_dtype": torch.bfloat16,
            }
        # Where there is a device map, quantized weights are made on that device as they are read.
        options = {
            "quantization_config": diffusers.BitsAndBytesConfig(**asked),
            "device_map": {"": place},
        }
    used = nvml_reader(torch.device(place).index or 0)[0] if on_card else int
    synchronize = torch.cuda.synchronize if on_card else int
    allocated = torch.cuda.memory_allocated if on_card else int
    empty_cache = torch.cuda.empty_cache if on_card else int
    torch.zeros(1, device=place)
    synchronize()
    family: Any = diffusers.FluxTransformer2DModel  # imported by being named
    found, step_s = [], []
    for number in range(rounds):
        before, taken, began = used(), allocated(), time.perf_counter()
        model: Any = family.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True, **options
        )
        if name == "full":
            model.to(place)
        synchronize()
        loaded = time.perf_counter()
        one = {
            "load_s": loaded - began,
            "allocated": allocated() - taken,
            "used": used() - before,
        }
        if number == 0:
            step_s = _steps(model, place, steps, side, synchronize)
        began = time.perf_counter()
        del model
        gc.collect()
        empty_cache()
        synchronize()
        one |= {"unload_s": time.perf_counter() - began, "left": used() - before}
        found.append(one)
    return {"rounds": found, "steps": step_s, "versions": versions}


def step_inputs(
    config: Any, place: str, width: int, height: int, pictures: int = 1
) -> dict[str, Any]:
    """What diffusers' FluxTransformer2DModel takes for a step at so many pixels and 512 text tokens."""
    import torch

    rows, columns, words = height // 16, width // 16, 512
    kind: dict[str, Any] = {"device": place, "dtype": torch.bfloat16}
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] += torch.arange(rows)[:, None]
    ids[..., 2] += torch.arange(columns)[None]
    return {
        "hidden_states": torch.randn(pictures, rows * columns, config.in_channels, **kind),
        "encoder_hidden_states": torch.randn(pictures, words, config.joint_attention_dim, **kind),
        "pooled_projections": torch.randn(pictures, config.pooled_projection_dim, **kind),
        "timestep": torch.full((pictures,), 0.5, **kind),
        "guidance": torch.full((pictures,), 3.5, **kind),
        "img_ids": ids.reshape(-1, 3).to(**kind),
        "txt_ids": torch.zeros(words, 3, **kind),
    }


def _steps(
    model: Any, place: str, steps: int, side: int, synchronize: Callable[[], object]
) -> list[float]:
    """Seconds of each forward pass for a picture of so many pixels a side, after one that is not counted."""
    import torch

    given = step_inputs(model.config, place, side, side)
    seconds = []
    with torch.no_grad():
        for _ in range(steps + 1):
            synchronize()
            began = time.perf_counter()
            model(**given, return_dict=False)
            synchronize()
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=["witness", "holder", "link", "peers", "quantized"])
    parser.add_argument("--index", type=int, default=0, help="number of the card")
    parser.add_argument(
        "--folder", type=Path, help="a transformer's folder, for peers and quantized"
    )
    parser.add_argument(
        "--place", help="for quantized: default cuda:INDEX; cpu to see that it works"
    )
    parser.add_argument("--format", default="full", help="for quantized")
    parser.add_argument("--rounds", type=int, default=3, help="for quantized: loads")
    parser.add_argument("--steps", type=int, default=4, help="for quantized: steps that are timed")
    parser.add_argument("--side", type=int, default=1024, help="for quantized: pixels of a side")
    arguments = parser.parse_args()
    if arguments.program == "peers":
        peers(arguments.index, arguments.folder)
    elif arguments.program == "quantized":
        quantized(
            arguments.place or f"cuda:{arguments.index}",
            arguments.folder,
            arguments.format,
            arguments.rounds,
            arguments.steps,
            arguments.side,
        )
    else:
        {"witness": witness, "holder": holder, "link": link}[arguments.program](arguments.index)


if __name__ == "__main__":
    main()
