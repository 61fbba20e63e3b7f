"""Writes the licences of the crates that are linked into the program: each text once, under its crates.

    python scripts/third_party_licences.py THIRD-PARTY-LICENSES --features cuda

What may be linked at all is in deny.toml. The texts are those that the crates carry.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXTS = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)
RULE = "=" * 80
HEAD = """\
moored is under the Apache License 2.0. The program contains the crates below and the Rust standard
library (MIT OR Apache-2.0, the Rust Project contributors).
"""


def linked_crates(features: str) -> list[dict[str, Any]]:
    """What the program is linked from on this platform, but for the crates of the project itself."""
    version = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    host = next(line[6:] for line in version.splitlines() if line.startswith("host: "))
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", host]
    answer = subprocess.run(
        [*command, "--manifest-path", "service/moored/Cargo.toml", "--features", features],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    metadata = json.loads(answer)
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    reached: set[str] = set()
    ahead = [metadata["resolve"]["root"]]
    while ahead:
        crate = ahead.pop()
        if crate not in reached:
            reached.add(crate)
            for dependency in nodes[crate]["deps"]:
                # Neither what builds nor what tests: no kind is what is linked.
                if any(kind["kind"] is None for kind in dependency["dep_kinds"]):
                    ahead.append(dependency["pkg"])
    crates = [one for one in metadata["packages"] if one["id"] in reached and one["source"]]
    return sorted(crates, key=lambda crate: (crate["name"], crate["version"]))


def licence_texts(crate: dict[str, Any]) -> list[str]:
    """The licences and notices that a crate carries."""
    folder = Path(crate["manifest_path"]).parent
    # Its own, and those of sources by others that it carries in a folder.
    there = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    files = {path for path in there if path.is_file() and TEXTS.match(path.name)}
    if crate["license_file"]:
        files.add(folder / crate["license_file"])
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)]


def report(crates: list[dict[str, Any]]) -> str:
    """The whole file: a list of the crates, then the texts."""
    texts: dict[str, tuple[str, list[str]]] = {}
    lines = [HEAD]
    for crate in crates:
        name = f"{crate['name']} {crate['version']}"
        lines.append(f"{name}: {crate['license']}, {crate['repository'] or 'no repository'}")
        carried = licence_texts(crate)
        if not carried:
            authors = ", ".join(crate["authors"]) or "its authors"
            lines.append(f"  (carries no text; by {authors})")
        for text in carried:
            # The same text with other line breaks is the same text.
            texts.setdefault(" ".join(text.split()), (text, []))[1].append(name)
    for text, names in texts.values():
        lines += ["", RULE, *names, RULE, "", text.strip()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--features", default="", help="features of the program")
    arguments = parser.parse_args()
    crates = linked_crates(arguments.features)
    arguments.out.write_text(report(crates), encoding="utf-8")


if __name__ == "__main__":
    main()
