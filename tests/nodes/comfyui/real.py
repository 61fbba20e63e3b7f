"""A real ComfyUI, started as people do, on loopback, with the pack linked into its custom nodes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from runs import Message, Run
from websockets.sync.client import ClientConnection, connect

START_TIMEOUT_S = 180.0

PREVIEW_FRAME = 1
TEXT_FRAME = 3

# ComfyUI, which ends when its standard input does, however the test process ends.
LAUNCH = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class RealComfyUI:
    """A ComfyUI of a process of its own."""

    def __init__(
        self, directory: Path, python: Path, pack: Path, client: Path, base: Path, *others: Path
    ) -> None:
        """`client`: where the package moored is imported from; `base`: an empty folder for everything.

        `others`: further packs.
        """
        for name in ("custom_nodes", "input", "output", "temp", "user", "models"):
            (base / name).mkdir(parents=True)
        (base / "custom_nodes" / "moored-nodes").symlink_to(pack)
        for other in others:
            (base / "custom_nodes" / other.name).symlink_to(other)
        self.base = base
        self._directory, self._python = directory, python
        self.port = unused_port()
        self.log = base / "comfyui.log"
        self._clients: dict[str, _Client] = {}
        settings = ["--cpu", "--listen", "127.0.0.1", "--port", str(self.port)]
        settings += ["--base-directory", str(base), "--user-directory", str(base / "user")]
        settings += ["--database-url", "sqlite:///:memory:", "--disable-auto-launch"]
        settings += ["--disable-api-nodes"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MOORED_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-c", LAUNCH, str(directory / "main.py"), *settings],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment | {"PYTHONPATH": str(client), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        self.process_id = self._process.pid
        self._wait()

    # What a frontend does.

    def queue(self, prompt: dict[str, Any], client_id: str = "a") -> Run:
        """Queues a prompt."""
        if client_id not in self._clients:
            self._clients[client_id] = _Client(self, client_id)
        run = Run(str(uuid.uuid4()), client_id)
        self._clients[client_id].runs[run.prompt_id] = run
        said = {"prompt": prompt, "client_id": client_id, "prompt_id": run.prompt_id}
        self.post("/prompt", said)
        return run

    def interrupt(self) -> None:
        """The interrupt button."""
        self.post("/interrupt", {})

    def free(self) -> None:
        """The button that frees memory and cache."""
        self.post("/free", {"unload_models": True, "free_memory": True})

    def set(self, **settings: Any) -> None:
        """Changes settings of the pack, without the `moored.` before them."""
        self.post("/settings", {f"moored.{name}": value for name, value in settings.items()})

    def upload(self, name: str, image: Image.Image) -> str:
        """Brings a picture that LoadImage can load."""
        image.save(self.base / "input" / name)
        return name

    def object_info(self) -> dict[str, Any]:
        """The nodes of the pack, as ComfyUI shows them."""
        nodes = json.loads(self.get("/object_info"))
        return {name: info for name, info in nodes.items() if name.startswith("Moored")}

    def version(self) -> str:
        """Which ComfyUI it is."""
        return str(json.loads(self.get("/system_stats"))["system"]["comfyui_version"])

    def python(self, *arguments: str) -> str:
        """What its interpreter prints, with its modules at hand."""
        environment = os.environ | {"PYTHONPATH": str(self._directory)}
        done = subprocess.run(
            [str(self._python), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> None:
        """Ends it."""
        for client in self._clients.values():
            client.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    # Its HTTP.

    def get(self, path: str) -> bytes:
        """What it answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return bytes(answer.read())

    def post(self, path: str, what: dict[str, Any]) -> bytes:
        """What it answers; a refusal is an AssertionError with its words."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(what).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as refused:
            raise AssertionError(refused.read().decode()) from None

    def _wait(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.get("/system_stats")
                return
            except OSError as error:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > until:
                    self._process.kill()
                    raise AssertionError(
                        f"ComfyUI did not start:\n{self.log.read_text()}"
                    ) from error
                time.sleep(0.2)  # it has no word for being ready but an answer


class _Client:
    """The websocket of one frontend, and the prompts that it queued."""

    def __init__(self, comfyui: RealComfyUI, client_id: str) -> None:
        self.runs: dict[str, Run] = {}
        self._comfyui = comfyui
        self._running: Run | None = None
        url = f"ws://127.0.0.1:{comfyui.port}/ws?clientId={client_id}"
        self._open = contextlib.ExitStack()
        self._socket: ClientConnection = self._open.enter_context(connect(url, max_size=None))
        threading.Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        self._open.close()

    def _read(self) -> None:
        for frame in self._socket:
            if isinstance(frame, bytes):
                self._show(frame)
            else:
                said = json.loads(frame)
                self._hear(said["type"], said["data"])

    def _show(self, frame: bytes) -> None:
        (kind,) = struct.unpack(">I", frame[:4])
        if kind == TEXT_FRAME:
            (length,) = struct.unpack(">I", frame[4:8])
            node, text = frame[8 : 8 + length].decode(), frame[8 + length :].decode()
            message = Message("text", node, text)
        elif kind == PREVIEW_FRAME:
            message = Message("preview", None, Image.open(io.BytesIO(frame[8:])).size)
        else:
            return
        if self._running is not None:
            self._running.add(message)
        else:
            for run in self.runs.values():
                run.strays.append(message)

    def _hear(self, kind: str, data: dict[str, Any]) -> None:
        run = self.runs.get(data.get("prompt_id", ""))
        if run is None:
            return
        if kind == "execution_start":
            self._running = run
        elif kind == "progress":
            run.add(Message("progress", data["node"], (data["value"], data["max"])))
        elif kind == "execution_error":
            run.error = data["exception_message"].strip()
        elif kind == "executing" and data["node"] is None:
            self._running = None
            self._end(run)

    def _end(self, run: Run) -> None:
        history = json.loads(self._comfyui.get(f"/history/{run.prompt_id}"))[run.prompt_id]
        told = [kind for kind, _ in history["status"]["messages"]]
        status = history["status"]["status_str"]
        if "execution_interrupted" in told:
            assert "execution_error" not in told
            status = "interrupted"
        for node, outputs in history["outputs"].items():
            run.outputs[node] = dict(outputs)
            if "images" in outputs and not any(outputs.get("animated", ())):  # else it is a film
                run.outputs[node]["pictures"] = [self._picture(one) for one in outputs["images"]]
        run.end(status)

    def _picture(self, image: dict[str, str]) -> Any:
        query = urllib.parse.urlencode(
            {name: image[name] for name in ("filename", "subfolder", "type")}
        )
        png = self._comfyui.get(f"/view?{query}")
        return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def unused_port() -> int:
    """A port of loopback where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(pack: Path, client: Path, base: Path, *others: Path) -> RealComfyUI | None:
    """The ComfyUI of COMFYUI_DIR and COMFYUI_PYTHON; None where they are not set."""
    directory, python = os.environ.get("COMFYUI_DIR"), os.environ.get("COMFYUI_PYTHON")
    if not directory:
        return None
    python_file = Path(python or sys.executable)
    return RealComfyUI(Path(directory), python_file, pack, client, base, *others)
