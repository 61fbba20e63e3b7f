"""What a release consists of: the archive with its install script, the Debian package, the unit for systemd.

They are made of the program that is built already. What needs a root of its own (the package installed by
apt, the container image) is in tests/release.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from test_deploy import seconds

from service import BINARY, ROOT, Service, clean_environment

ARCHIVE = "moored-0.1.0-x86_64-linux.tar.gz"
UNIT = ROOT / "packaging/moored.service"
DEFAULTS = (ROOT / "service/config/src/default.toml").read_text(encoding="utf-8")


def make_release(folder: Path, *arguments: str) -> Path:
    """`scripts/release` of the program of the tests, into `folder`."""
    own = {
        "MOORED_BINARY": str(BINARY),
        "PYTHON": sys.executable,
        "SOURCE_DATE_EPOCH": "1767225600",
    }
    done = subprocess.run(
        [str(ROOT / "scripts/release"), "--dev", "--out", str(folder), *arguments],
        capture_output=True,
        text=True,
        env=clean_environment() | own,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_release(tmp_path_factory.mktemp("release"), "archive", "package")


class Home:
    """A home with nothing in it, in which commands run."""

    def __init__(self, folder: Path, release: Path) -> None:
        self.folder = folder
        self.release = release
        self.prefix = folder / ".local"
        self.environment = clean_environment() | {"HOME": str(folder)}

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            check=False,
        )

    def install(
        self, *options: object, release: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        source = release or self.release
        return self.run("sh", source / "install.sh", "--from", source, *options)

    def files(self) -> set[str]:
        """Everything below the prefix, as paths below it."""
        return {
            str(path.relative_to(self.prefix))
            for path in self.prefix.rglob("*")
            if not path.is_dir()
        }


@pytest.fixture
def home(tmp_path: Path, release: Path) -> Home:
    (tmp_path / "home").mkdir()
    return Home(tmp_path / "home", release)


def test_two_commands_lead_from_an_empty_home_to_a_picture_and_a_third_removes_the_program(
    home: Home,
) -> None:
    installed = home.install()
    assert installed.returncode == 0, installed.stderr
    assert f"Installed moored 0.1.0: {home.prefix}/bin/moored" in installed.stdout
    made = home.run(
        home.prefix / "bin/moored",
        "run",
        "moored/demo",
        "a red cube",
        "--steps",
        "1",
        "-o",
        "cube.png",
    )
    assert made.returncode == 0, made.stderr
    assert (home.folder / "cube.png").read_bytes().startswith(b"\x89PNG")

    (home.prefix / "bin/another").write_text("of somebody else", encoding="utf-8")
    state = [path for path in (home.folder / ".local/state").rglob("*") if path.is_file()]
    assert state, "the service has kept something"
    removed = home.run("sh", home.release / "install.sh", "--remove")
    assert removed.returncode == 0, removed.stderr
    left = home.files()
    assert "bin/another" in left
    assert {path for path in left if not path.startswith("state/")} == {"bin/another"}
    assert all(path.is_file() for path in state), "jobs and tokens stay"
    again = home.run("sh", home.release / "install.sh", "--remove")
    assert again.returncode == 1
    assert "no moored that this script installed" in again.stderr


def test_an_archive_that_was_changed_is_not_installed(home: Home, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(home.release, changed)
    with (changed / ARCHIVE).open("r+b") as archive:
        archive.seek(1000)
        archive.write(b"\0\0\0\0")
    refused = home.install(release=changed)
    assert refused.returncode == 1
    assert "is not what SHA256SUMS" in refused.stderr
    assert home.files() == set()

    (changed / ARCHIVE).unlink()
    missing = home.install(release=changed)
    assert missing.returncode == 1
    assert f"{ARCHIVE} cannot be read" in missing.stderr
    assert home.files() == set()


def test_a_program_that_the_script_did_not_install_is_not_replaced(home: Home) -> None:
    (home.prefix / "bin").mkdir(parents=True)
    (home.prefix / "bin/moored").write_text("built by hand", encoding="utf-8")
    refused = home.install()
    assert refused.returncode == 1
    assert "this script did not install it" in refused.stderr
    assert (home.prefix / "bin/moored").read_text(encoding="utf-8") == "built by hand"
    assert home.install("--force").returncode == 0
    assert home.run(home.prefix / "bin/moored", "--version").returncode == 0


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (("--prefx", "/x"), "there is no option --prefx"),
        (("--prefix",), "--prefix needs a folder"),
    ],
)
def test_mistakes_are_named(home: Home, script: tuple[str, ...], message: str) -> None:
    refused = home.run("sh", home.release / "install.sh", *script)
    assert refused.returncode == 1
    assert message in refused.stderr


def test_another_system_is_refused_before_anything_is_fetched(home: Home, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "getconf").write_text("#!/bin/sh\necho glibc 2.31\n", encoding="utf-8")
    (tools / "getconf").chmod(0o755)
    home.environment["PATH"] = f"{tools}:{os.environ['PATH']}"
    refused = home.install()
    assert refused.returncode == 1
    assert re.search(r"needs glibc 2\.\d+ or newer, and this system has 2\.31", refused.stderr)
    (tools / "uname").write_text("#!/bin/sh\necho Darwin\n", encoding="utf-8")
    (tools / "uname").chmod(0o755)
    refused = home.install()
    assert "is for Linux on x86-64; here is Darwin" in refused.stderr
    assert home.files() == set()


def test_a_newer_and_an_older_version_are_installed_over_each_other(
    home: Home, tmp_path: Path, release: Path
) -> None:
    """Files that a version does not have are gone, and the state of the service stays."""
    newer = tmp_path / "newer"
    newer.mkdir()
    unpacked = tmp_path / "unpacked"
    with tarfile.open(release / ARCHIVE) as archive:
        archive.extractall(unpacked, filter="data")
    (old,) = unpacked.iterdir()
    root = old.rename(unpacked / "moored-0.2.0-x86_64-linux")
    (root / "share/doc/moored/LICENSE").rename(root / "share/doc/moored/LICENSE-2")
    name = f"{root.name}.tar.gz"
    with tarfile.open(newer / name, "w:gz", compresslevel=0) as archive:
        archive.add(root, arcname=root.name)
    digest = hashlib.sha256((newer / name).read_bytes()).hexdigest()
    (newer / "SHA256SUMS").write_text(f"{digest}  {name}\n", encoding="utf-8")
    script = (release / "install.sh").read_text(encoding="utf-8")
    (newer / "install.sh").write_text(
        script.replace("version=0.1.0", "version=0.2.0"), encoding="utf-8"
    )

    assert home.install().returncode == 0
    made = home.run(home.prefix / "bin/moored", "token", "make", "anna")
    assert made.returncode == 0, made.stderr
    assert home.install(release=newer).returncode == 0
    assert "share/doc/moored/LICENSE-2" in home.files()
    assert "share/doc/moored/LICENSE" not in home.files()
    assert "anna" in home.run(home.prefix / "bin/moored", "token", "list").stdout
    assert home.install().returncode == 0
    assert "share/doc/moored/LICENSE-2" not in home.files()
    assert "share/doc/moored/LICENSE" in home.files()
    assert "anna" in home.run(home.prefix / "bin/moored", "token", "list").stdout
    assert not list(home.prefix.glob(".moored-*"))


def test_all_files_have_checksums_and_all_crates_are_listed(release: Path) -> None:
    sums = dict(
        reversed(line.split("  "))
        for line in (release / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    )
    assert set(sums) == {path.name for path in release.iterdir()} - {"SHA256SUMS"}
    for name, sha256 in sums.items():
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == sha256
    bill = json.loads((release / "moored-0.1.0.cdx.json").read_text(encoding="utf-8"))
    listed = {f"{one['name']} {one['version']}" for one in bill["components"]}
    licences = (release / "THIRD-PARTY-LICENSES").read_text(encoding="utf-8")
    named = set(re.findall(r"^(\S+ \d\S*): ", licences, re.MULTILINE))
    assert listed == named
    assert all(one["licenses"] and one["hashes"] for one in bill["components"])


def test_the_same_sources_give_the_same_bytes(release: Path, tmp_path: Path) -> None:
    again = make_release(tmp_path / "again", "archive", "package")
    sums = (release / "SHA256SUMS").read_text(encoding="utf-8")
    assert (again / "SHA256SUMS").read_text(encoding="utf-8") == sums


def test_nothing_of_this_machine_is_in_scripts_and_documents(release: Path) -> None:
    for name in ("install.sh", "moored-0.1.0.cdx.json", "THIRD-PARTY-LICENSES"):
        assert str(ROOT) not in (release / name).read_text(encoding="utf-8"), name


# The package and its unit.


@pytest.fixture(scope="module")
def package(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the package, as they would lie below `/`."""
    (file,) = release.glob("moored_*.deb")
    folder = tmp_path_factory.mktemp("package")
    subprocess.run(["dpkg-deb", "-x", str(file), str(folder)], check=True)
    return folder


def unit(of: Path = UNIT) -> dict[str, dict[str, list[str]]]:
    """A unit as sections of names with all their values."""
    found: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in of.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, value = line.split("=", 1)
            section.setdefault(name, []).append(value)
    return found


def test_running_jobs_may_finish_before_systemd_kills_the_service() -> None:
    drain = re.search(r'^drain = "(\w+)"$', DEFAULTS, re.MULTILINE)
    assert drain
    service = unit()["Service"]
    assert seconds(service["TimeoutStopSec"][0]) > seconds(drain[1])
    assert service["KillMode"] == ["mixed"], "SIGTERM would end the workers under running jobs"


def test_the_command_of_the_unit_is_in_the_package_and_takes_its_settings(package: Path) -> None:
    service = unit(package / "usr/lib/systemd/system/moored.service")["Service"]
    program, *arguments = service["ExecStart"][0].split()
    assert os.access(package / program.lstrip("/"), os.X_OK)
    settings = package / arguments[arguments.index("--config") + 1].lstrip("/")
    checked = subprocess.run(
        [str(package / program.lstrip("/")), "config", "--config", str(settings), "--json"],
        capture_output=True,
        text=True,
        env=clean_environment() | dict(pair.split("=", 1) for pair in service["Environment"]),
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert "/var/lib/moored/state" in checked.stdout
    user = (package / "usr/lib/sysusers.d/moored.conf").read_text(encoding="utf-8")
    assert re.search(rf"^u {service['User'][0]} ", user, re.MULTILINE)


def test_the_package_has_a_manual_page_for_each_command(package: Path) -> None:
    pages = {path.name for path in (package / "usr/share/man/man1").iterdir()}
    assert {"moored.1.gz", "moored-serve.1.gz", "moored-generate.1.gz"} <= pages
    assert (package / "usr/share/doc/moored/copyright").is_file()


def test_systemd_is_told_when_the_service_listens_and_when_it_drains(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        address = str(tmp_path / "notify")
        systemd.bind(address)
        systemd.settimeout(30)
        own = clean_environment() | {"NOTIFY_SOCKET": address}
        service = Service(state=tmp_path / "state", environment=own)
        assert systemd.recv(1000) == f"READY=1\nSTATUS=listening on {service.address}\n".encode()
        service.stop()
        assert systemd.recv(1000) == b"STOPPING=1\nSTATUS=running jobs may finish within 30 s\n"
