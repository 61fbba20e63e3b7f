"""The bundle that is checked in: that it is of its sources, small, and all of the service's own."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "service" / "web" / "page"
DIST = PAGE / "dist"
# As sources.js has them.
PLACES = (
    "src",
    "protos",
    "index.html",
    "package.json",
    "package-lock.json",
    "buf.gen.yaml",
    "tsconfig.json",
    "vite.config.js",
    "sources.js",
    "../../../proto/moored",
)
MOST_WIRE_BYTES = 300_000


def files_of(place: str) -> list[str]:
    path = PAGE / place
    if path.is_file():
        return [place]
    found = (
        f"{place}/{file.relative_to(path).as_posix()}" for file in path.rglob("*") if file.is_file()
    )
    return [name for name in found if not name.startswith("src/proto/")]


def test_the_bundle_is_of_its_sources() -> None:
    total = hashlib.sha256()
    for name in sorted(name for place in PLACES for name in files_of(place)):
        content = hashlib.sha256((PAGE / name).read_bytes()).hexdigest()
        total.update(f"{content}  {name}\n".encode())
    built_of = (DIST / "SOURCES").read_text(encoding="utf-8").strip()
    assert total.hexdigest() == built_of, (
        "the page or the protos changed: npm ci && npm run build in service/web/page, and commit dist"
    )


def test_the_page_is_small_over_the_wire() -> None:
    sent = [DIST / "index.html", *(DIST / "assets").glob("*")]
    assert sum(len(gzip.compress(file.read_bytes())) for file in sent) <= MOST_WIRE_BYTES


def test_the_page_names_its_own_files_alone() -> None:
    html = (DIST / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)
    named = re.findall(r"(?:src|href)=\"([^\"]*)\"", html)
    assert named
    for name in named:
        assert name.startswith("/assets/"), name
        assert (DIST / name.removeprefix("/")).is_file(), name
    assert not re.findall(
        r"url\((?!#)", "".join(f.read_text() for f in (DIST / "assets").glob("*.css"))
    )
