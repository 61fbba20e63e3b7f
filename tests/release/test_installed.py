"""A release on a bare machine: two commands to a picture, by each of its forms; upgrades keep the state.

    scripts/release && RELEASE=target/release-0.1.0 scripts/test release

Each machine is a Debian of its own, made by mmdebstrap. It needs root, buildah, mmdebstrap and the package
registries, and takes minutes: it is run before a release, and not in CI.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RELEASE = Path(os.environ.get("RELEASE", "no release"))
VERSION = "0.1.0"
TOKEN = "0123456789abcdef" * 4
READY_S = 60

pytestmark = pytest.mark.skipif(
    not RELEASE.is_dir(), reason="RELEASE names no folder that scripts/release has made"
)


def run(*words: object, **options: object) -> str:
    """Runs a command that has to succeed; its output."""
    done = subprocess.run(
        [str(word) for word in words],
        **({"capture_output": True, "text": True} | options),  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the smallest Debian that has apt."""
    root = tmp_path_factory.mktemp("debian") / "root"
    run("mmdebstrap", "--quiet", "--variant=minbase", "bookworm", root)
    return root


@pytest.fixture
def machine(debian: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, with the processes and the network of this machine."""
    root = tmp_path / "machine"
    run("cp", "-a", debian, root)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    for name in ("proc", "dev"):
        run("mount", "--rbind", f"/{name}", root / name)
    yield root
    for name in ("dev", "proc"):
        run("umount", "--recursive", "--lazy", root / name)


def package(version: str, folder: Path) -> Path:
    """The package, as if it were of another version."""
    unpacked = folder / f"package-{version}"
    run("dpkg-deb", "-R", next(RELEASE.glob("moored_*.deb")), unpacked)
    control = unpacked / "DEBIAN/control"
    told = control.read_text(encoding="utf-8")
    control.write_text(told.replace(f"Version: {VERSION}", f"Version: {version}"), encoding="utf-8")
    file = folder / f"moored_{version}_amd64.deb"
    run("dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", unpacked, file)
    return file


def test_the_package_leads_to_a_picture_and_keeps_its_state(machine: Path, tmp_path: Path) -> None:
    def inside(*words: str) -> str:
        quiet = {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return run("chroot", machine, *words, env=quiet)

    for version in (VERSION, "0.2.0"):
        shutil.copy(package(version, tmp_path), machine / f"root/moored-{version}.deb")
    install = ("apt-get", "-qq", "install", "-y", "--no-install-recommends", "--allow-downgrades")
    inside(*install, f"/root/moored-{VERSION}.deb")
    inside("sh", "-c", "cd /root && moored demo")
    assert len(list((machine / "root/moored-demo").glob("*.png"))) >= 12

    state = "/var/lib/moored/state"
    as_the_service = (
        "env",
        "HOME=/var/lib/moored",
        f"MOORED_SERVICE_STATE={state}",
        "setpriv",
        "--reuid=moored",
    )
    as_the_service += ("--regid=moored", "--init-groups")
    inside("install", "-d", "-o", "moored", "-g", "moored", "-m", "700", "/var/lib/moored")
    inside(*as_the_service, "moored", "token", "make", "anna")
    for version in ("0.2.0", VERSION):  # up and down
        inside(*install, f"/root/moored-{version}.deb")
        assert version in inside("dpkg-query", "-W", "moored")
        assert "anna" in inside(*as_the_service, "moored", "token", "list")
    inside("apt-get", "-qq", "remove", "-y", "moored")
    assert (machine / "var/lib/moored/state").is_dir()
    assert not (machine / "usr/bin/moored").exists()
    inside("apt-get", "-qq", "purge", "-y", "moored")
    assert not (machine / "var/lib/moored").exists()


def test_the_wheels_lead_to_a_picture(tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = (tmp_path / "venv/bin/pip", "install", "-q", "--find-links", RELEASE.resolve())
    run(*pip, f"moored[service]=={VERSION}")
    run(tmp_path / "venv/bin/moored", "demo", cwd=tmp_path)
    assert len(list((tmp_path / "moored-demo").glob("*.png"))) >= 12


def test_the_archive_leads_to_a_picture_on_a_bare_machine(machine: Path) -> None:
    """Without root, without curl: from files that are there."""
    shutil.copytree(RELEASE, machine / "release")
    run("chroot", machine, "useradd", "--create-home", "anna")
    words = "sh /release/install.sh --from /release && ~/.local/bin/moored demo"
    run("chroot", machine, "su", "-", "anna", "-c", words)
    assert len(list((machine / "home/anna/moored-demo").glob("*.png"))) >= 12


def test_the_image_serves_with_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    """As docker-compose.yml runs it: its user, a read-only root, folders for state and temporary files."""
    storage = (
        "--root",
        tmp_path / "storage",
        "--runroot",
        tmp_path / "run",
        "--storage-driver",
        "vfs",
    )
    archive = next(RELEASE.glob("moored-*-image.tar"))
    made = run("buildah", *storage, "from", f"docker-archive:{archive.resolve()}").strip()
    root = Path(run("buildah", *storage, "mount", made).strip())
    of_image = json.loads(run("buildah", *storage, "inspect", made))["Docker"]["config"]
    assert of_image["User"] == "moored"
    assert of_image["StopSignal"] == "SIGTERM"
    (root / "run/secrets").mkdir(parents=True)
    (root / "run/secrets/moored_token").write_text(TOKEN, encoding="utf-8")
    os.chown(root / "run/secrets/moored_token", 10001, 10001)
    (root / "run/secrets/moored_token").chmod(0o400)
    environment = dict(pair.split("=", 1) for pair in of_image["Env"])
    environment |= {"MOORED_SERVICE_ALLOW_WITHOUT_TLS": "true"}
    script = f"""
        set -e
        ip link set lo up
        mount --rbind {root} {root}
        mount -t tmpfs -o mode=1777 none {root}/tmp
        mount -t tmpfs -o mode=700,uid=10001,gid=10001 none {root}/var/lib/moored
        mount -t proc none {root}/proc
        mount --rbind /dev {root}/dev
        mount -o remount,ro,bind {root}
        exec chroot --userspec=10001:10001 {root} "$@"
    """
    namespaces = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")
    inside = (
        'cd /usr/share/moored; if (: > /etc/x) 2> /dev/null; then echo "root is writable"; exit 1; fi; '
        '"$@" & service=$!; '
        f"for _ in $(seq {READY_S * 2}); do sleep 0.5; moored status --json > /dev/null 2>&1 && break; done; "
        "moored status --json > /dev/null && moored generate 'a red cube' --steps 1 -o /tmp/cube.png && "
        "test -s /tmp/cube.png && kill -TERM $service && wait $service"
    )
    command = [*of_image["Entrypoint"], "--device", "cpu:2GiB"]
    done = subprocess.run(
        [*namespaces, "bash", "-c", script, "bash", "/bin/sh", "-c", inside, "sh", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped" in done.stderr, "it drained"
    run("buildah", *storage, "rm", made)
