"""The same pictures elsewhere, and the same files by other programs: pictures, peers."""

from __future__ import annotations

import statistics

import checkpoints
import moored
import numpy as np
from bench import ROOT, Bench, gigabytes
from figures import MIB
from PIL import Image

PROMPTS = ROOT / "service/cli/src/demo_prompts.txt"
PICTURES = 8
DEMO = "moored/demo"
MAGNIFIED = 32
GAP = 4


def pictures(bench: Bench) -> None:
    """The shipped model on the CPU and on the card: in f32, where they are the same, and as cards compute."""
    cpu = _generate(bench, "cpu")
    exact = _generate(bench, bench.spec("dtype=f32"))
    usual = _generate(bench, bench.spec())
    for key, what, pictures, target in (
        ("f32", "the card's in f32", exact, 2.0),
        ("usual", "the card's as it computes", usual, None),
    ):
        apart = [
            np.abs(one.astype(int) - two.astype(int))
            for one, two in zip(cpu, pictures, strict=True)
        ]
        most, mean = max(int(one.max()) for one in apart), float(np.mean(apart))
        name = f"{PICTURES} demo pictures, the CPU's against {what}"
        bench.record.add(f"pictures.{key}.most", f"{name}, most", most, "of 255", target=target)
        bench.record.add(f"pictures.{key}.mean", f"{name}, mean", mean, "of 255")
    sheet = bench.out / "pictures.png"
    _sheet([cpu, exact, usual]).save(sheet)
    bench.record.note(
        f"rows of {sheet.name}: CPU; card in f32; card as it computes; "
        f"{MAGNIFIED} times the difference of each"
    )


def _generate(bench: Bench, device: str) -> list[np.ndarray]:
    prompts = [line for line in PROMPTS.read_text(encoding="utf-8").splitlines() if line]
    with bench.serve(device) as running:
        bench.record.note(
            f"{device} computes in {running.client.server_info().cards[0].compute_dtype}"
        )
        return [
            _array(running.client.generate_image(prompt, model=DEMO, seed=seed, output="raw"))
            for seed, prompt in enumerate(prompts[:PICTURES], start=1)
        ]


def _array(result: moored.ImageResult) -> np.ndarray:
    return np.asarray(result.image.convert("RGB"))


def _sheet(rows: list[list[np.ndarray]]) -> Image.Image:
    """Pictures side by side, row by row, and beneath them how far they are from the first row."""
    first = rows[0]
    shown = [*rows]
    for row in rows[1:]:
        pairs = zip(first, row, strict=True)
        apart = [MAGNIFIED * np.abs(one.astype(int) - two.astype(int)) for one, two in pairs]
        shown.append([np.clip(one, 0, 255).astype(np.uint8) for one in apart])
    height, width = (size + GAP for size in first[0].shape[:2])
    sheet = Image.new("RGB", (width * len(first), height * len(shown)), "white")
    for y, row in enumerate(shown):
        for x, picture in enumerate(row):
            sheet.paste(Image.fromarray(picture), (x * width, y * height))
    return sheet


def peers(bench: Bench) -> None:
    """diffusers and safetensors on the same transformer."""
    bench.needs_card()
    folder = bench.models / checkpoints.MODELS[0] / "transformer"
    checkpoints.warm(folder, bench.threads)
    found = bench.beside("peers", "--folder", str(folder), timeout_s=400)
    rounds, versions = found["rounds"], found["versions"]
    bench.record.note(f"peers: {versions}")

    def median(name: str) -> float:
        return float(statistics.median(one[name] for one in rounds))

    size = gigabytes(rounds[0]["bytes"])
    add = bench.record.add
    for key, what, speed, of in (
        (
            "load",
            "diffusers from_pretrained and .to(card), p50",
            size / median("load_s"),
            "load.p50",
        ),
        ("to", "pageable .to(card) alone, p50", size / median("to_s"), "link.pageable"),
        (
            "direct",
            "safetensors load_file(device=card), best",
            size / min(found["direct"]),
            "load.best",
        ),
    ):
        add(f"peers.{key}", what, speed, "GB/s", "higher", peer_of=of)
    what = "diffusers: del, gc, empty_cache, p50"
    add("peers.unload", what, 1e3 * median("unload_s"), "ms", peer_of="unload.large.p50")
    left = max(one["left"] for one in rounds) / MIB
    what = "diffusers, bytes left, most"
    add("peers.left", what, left, "MiB", peer_of="unload.large.left")


PARTS = {"pictures": pictures, "peers": peers}
