"""Measures how long a new user waits: to install a release, and for first pictures (docs/BENCHMARKS.md).

    .venv-comfyui/bin/python scripts/first_hour.py [--binary target/release/moored | --release FOLDER]

A hub and a ComfyUI stand in for the real ones, on loopback: what is measured is what moored does between a
command and its picture, not the line to the hub. With --release, FOLDER has what scripts/release made: each
of its forms is installed, and the program is the one of its archive. The files of a release are read from the
folder; what the package and the wheels need besides comes from their registries. The package is installed on
a bare Debian, which takes root and mmdebstrap, and the image by buildah. What cannot be measured is named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMFYUI = ROOT / "tests/nodes/comfyui"
RUNS = 3

Command = tuple[str, ...]


def seconds_to_picture(command: Command, folder: Path, environment: dict[str, str]) -> float:
    """From the command to the line that names a picture, which is written by then."""
    began = time.monotonic()
    took = None
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            # Other lines name the folder of a model that was pulled.
            name = line.split(maxsplit=1)[0] if line.strip() else ""
            if took is None and name.endswith(".png") and (folder / name).is_file():
                took = time.monotonic() - began
    if process.returncode or took is None:
        sys.exit(f"{' '.join(command)} failed")
    return took


def demo(binary: Path, folder: Path) -> float:
    from service import clean_environment

    command = (str(binary), "demo", "--device", "cpu")
    return seconds_to_picture(command, folder, clean_environment())


def pulled(binary: Path, folder: Path) -> float:
    """`moored run` of a model that is not here, where no service runs."""
    from hub import Hub, Repository, files_of

    from service import ReservedPort

    port = ReservedPort()
    with Hub() as hub:
        hub.repositories["me/mine"] = Repository(files_of(ROOT / "demo/model"))
        environment = hub.environment(folder / "home") | {
            "MOORED_ENDPOINT": f"http://{port.address}",
            "MOORED_SERVICE_STATE": str(folder / "state"),
        }
        command = (str(binary), "run", "me/mine", "a red circle", "--device", "cpu")
        return seconds_to_picture(command, folder, environment)


def in_comfyui(binary: Path, folder: Path) -> float:
    """From `moored serve` and the start of ComfyUI to the picture of the first prompt."""
    from prompts import Graph
    from standin.executor import StandIn

    from service import Service

    began = time.monotonic()
    service = Service(state=folder / "state", binary=binary)
    linked = folder / "moored"
    linked.symlink_to(ROOT / "nodes/comfyui")
    comfyui = StandIn(linked, folder)
    graph = Graph(service.address, model="moored/demo")
    # The size and the steps of the model, as the pack's example text_to_image has them.
    graph.add("PreviewImage", images=[graph.text_to_image(width=0, height=0, steps=0), 0])
    comfyui.queue(graph.prompt).succeeded()
    took = time.monotonic() - began
    comfyui.stop()
    service.stop()
    return took


MEASURES: dict[str, Callable[[Path, Path], float]] = {
    "`moored demo`: the first picture": demo,
    "`moored run owner/name PROMPT`: the picture of a model that is downloaded": pulled,
    "ComfyUI: the first picture, with the start of both": in_comfyui,
}


def seconds_of(*command: object, environment: dict[str, str] | None = None) -> float:
    """Of a command that has to succeed."""
    words = [str(word) for word in command]
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    took = time.monotonic() - began
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return took


def by_script(release: Path, folder: Path) -> float:
    """Into `folder`: `folder/bin/moored` is the program."""
    return seconds_of("sh", release / "install.sh", "--from", release, "--prefix", folder)


def by_pip(package: str) -> Callable[[Path, Path], float]:
    """Into a virtual environment, which is made before the clock runs; pip's own cache is empty."""

    def measure(release: Path, folder: Path) -> float:
        seconds_of(sys.executable, "-m", "venv", folder / "venv")
        return seconds_of(
            folder / "venv/bin/pip",
            "install",
            "-q",
            "--no-cache-dir",
            "--find-links",
            release,
            package,
        )

    return measure


@cache
def debian() -> tempfile.TemporaryDirectory[str]:
    """A bare Debian with its lists of packages, in the folder `root`; removed when this program ends."""
    folder = tempfile.TemporaryDirectory()  # noqa: SIM115
    root = Path(folder.name) / "root"
    seconds_of("mmdebstrap", "--quiet", "--variant=minbase", "bookworm", root)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    return folder


def by_apt(release: Path, folder: Path) -> float:
    """On a bare Debian, which is made before the clock runs."""
    root = folder / "debian"
    seconds_of("cp", "-a", Path(debian().name) / "root", root)
    package = next(release.glob("moored_*.deb"))
    shutil.copy(package, root / "root")
    environment = {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    return seconds_of(
        *(
            "chroot",
            root,
            "apt-get",
            "-qq",
            "install",
            "-y",
            "--no-install-recommends",
            f"/root/{package.name}",
        ),
        environment=environment,
    )


def by_image(release: Path, folder: Path) -> float:
    """As `docker load` does: the layers are unpacked into a storage of images."""
    storage = ("--root", folder / "storage", "--runroot", folder / "run", "--storage-driver", "vfs")
    image = next(release.glob("moored-*-image.tar"))
    return seconds_of("buildah", *storage, "pull", "-q", f"docker-archive:{image}")


INSTALLATIONS: dict[str, tuple[Callable[[Path, Path], float], str, tuple[str, ...]]] = {
    "`sh install.sh`": (by_script, "moored-*-linux.tar.gz", ()),
    "`apt install ./moored_*.deb`": (by_apt, "moored_*.deb", ("mmdebstrap",)),
    "`pip install 'moored[service]'`": (by_pip("moored[service]"), "moored_service-*.whl", ()),
    "`pip install 'moored[images]'`, the client": (by_pip("moored[images]"), "moored-*.whl", ()),
    "`docker load`": (by_image, "moored-*-image.tar", ("buildah",)),
}
"""What installs a form of a release, the file that it is, and the programs that it needs here, as root."""


def without(release: Path, pattern: str, programs: tuple[str, ...]) -> str | None:
    """Why a form of a release cannot be measured here."""
    if not any(release.glob(pattern)):
        return f"the release has no {pattern}"
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} is missing"
    return "it needs root" if programs and os.geteuid() != 0 else None


def measured(name: str, measure: Callable[[Path, Path], float], subject: Path) -> None:
    took = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            took.append(measure(subject, Path(folder)))
    print(f"{name}: {min(took):.1f} to {max(took):.1f} s", flush=True)


@contextmanager
def installed(release: Path) -> Iterator[Path]:
    """The program of the archive of a release."""
    with tempfile.TemporaryDirectory() as folder:
        by_script(release, Path(folder))
        yield Path(folder) / "bin/moored"


def pictures(binary: Path) -> None:
    for name, measure in MEASURES.items():
        measured(name, measure, binary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    program = parser.add_mutually_exclusive_group()
    program.add_argument("--binary", type=Path, default=ROOT / "target/release/moored")
    program.add_argument("--release", type=Path, help="a folder that scripts/release made")
    given = parser.parse_args()
    subject: Path = (given.release or given.binary).resolve()
    print(f"{subject}, {os.cpu_count()} cores, the best and the worst of {RUNS} runs")
    if given.release is None:
        pictures(subject)
        return
    for name, (measure, pattern, programs) in INSTALLATIONS.items():
        reason = without(subject, pattern, programs)
        if reason is None:
            measured(name, measure, subject)
        else:
            print(f"{name}: not measured, {reason}")
    with installed(subject) as binary:
        pictures(binary)


if __name__ == "__main__":
    for folder in (COMFYUI / "standin", COMFYUI, ROOT / "tests/e2e", ROOT / "tests"):
        sys.path.insert(0, str(folder))
    main()
