"""A program that holds memory of an NVIDIA card, by the driver alone: a line in, a line of JSON out.

`hold BYTES` takes or gives back until it holds so many bytes, or as many as there are; `figures` says what
the driver says of the whole card. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from typing import Any

PIECE_BYTES = 256 << 20
OUT_OF_MEMORY = 2


class Driver:
    """The calls of libcuda that are needed, and a context."""

    def __init__(self, index: int) -> None:
        """Makes a context on the card of this number, in the order of the bus."""
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._held: list[tuple[ctypes.c_uint64, int]] = []

    def _call(self, name: str, *arguments: object) -> None:
        if (code := getattr(self._library, name)(*arguments)) != 0:
            raise OSError(f"{name}: CUDA error {code}")

    @property
    def held(self) -> int:
        """Bytes."""
        return sum(size for _, size in self._held)

    def hold(self, size: int) -> None:
        """Takes or gives back until it has so much."""
        while self._held and self.held > size:
            pointer, _ = self._held.pop()
            self._call("cuMemFree_v2", pointer)
        while (left := size - self.held) > 0:
            pointer, piece = ctypes.c_uint64(), min(left, PIECE_BYTES)
            code = self._library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(piece))
            if code == OUT_OF_MEMORY:
                return
            if code != 0:
                raise OSError(f"cuMemAlloc: CUDA error {code}")
            self._held.append((pointer, piece))

    def figures(self) -> dict[str, int]:
        """Free and total, of the whole card."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return {"free": free.value, "total": total.value, "held": self.held}


def main() -> None:
    """Answers until its input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", type=int, default=0, help="number of the card")
    driver = Driver(parser.parse_args().index)
    print(json.dumps(driver.figures()), flush=True)
    for line in sys.stdin:
        word, _, size = line.strip().partition(" ")
        if word == "hold":
            driver.hold(int(size))
        print(json.dumps(driver.figures()), flush=True)


if __name__ == "__main__":
    main()
