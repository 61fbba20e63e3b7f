"""Makes a small wheel of a large one: of its libraries only those that are named, everything else as it is.

    python tests/gpu/strip_wheel.py bitsandbytes-*.whl --out FOLDER --keep libbitsandbytes_cuda130.so

For machines that take wheels from nowhere but a folder, and little of them.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path, PurePosixPath


def strip(wheel: Path, folder: Path, keep: set[str]) -> Path:
    """Writes the small wheel under the same name into the folder.

    Raises a ValueError for a library to be kept that the wheel does not hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / wheel.name
    with zipfile.ZipFile(wheel) as source:
        libraries = {name for name in source.namelist() if name.endswith(".so")}
        if missing := keep - {PurePosixPath(name).name for name in libraries}:
            raise ValueError(f"{wheel.name} has no {', '.join(sorted(missing))}")
        dropped = {name for name in libraries if PurePosixPath(name).name not in keep}
        with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
            for entry in source.infolist():
                if entry.filename in dropped:
                    continue
                data = source.read(entry)
                if entry.filename.endswith(".dist-info/RECORD"):
                    # Each line is `path,hash,size`; an installer wants no line without its file.
                    lines = data.decode().splitlines(keepends=True)
                    kept = (line for line in lines if line.rsplit(",", 2)[0] not in dropped)
                    data = "".join(kept).encode()
                target.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Leave most libraries of a wheel out.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the small wheel")
    parser.add_argument("--keep", action="append", default=[], help="file name of a library")
    arguments = parser.parse_args()
    made = strip(arguments.wheel, arguments.out, set(arguments.keep))
    print(f"{made}: {made.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
