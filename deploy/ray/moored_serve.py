"""A Ray Serve application: each replica has a box, and Ray sends a model to the replica that has it.

    pip install --find-links FOLDER 'ray[serve]' 'moored[service]'    FOLDER has the files of a release
    cd deploy/ray && serve run moored_serve:app arguments="--models /models"
    serve deploy deploy/ray/serve.yaml                        on a cluster, with a GPU for each replica

    curl -H 'serve_multiplexed_model_id: owner/name' -H 'content-type: application/json' \\
        -d '{"prompt": "a red cube", "steps": 4}' http://127.0.0.1:8000/ -o cube.png

Beside HTTP a handle has the calls of the Python client: handle.options(multiplexed_model_id="owner/name")
.generate_image.remote("a red cube"). Memory is moored's alone: what Ray counts as a model of a replica is
only a name by which it finds the replica again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any

import moored
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

READY_S = 300.0
NAMES_AT_A_REPLICA = 64
"""Names of models that Ray knows of a replica. Which of them are in memory is for moored to decide."""


@dataclass(frozen=True)
class Settings:
    """How a replica comes to its service."""

    endpoint: str = ""
    """A service that runs beside the replica, on every node. Empty: the replica starts one."""
    program: str = "moored"
    devices: tuple[str, ...] = ()
    """Cards of the service. Empty: those that Ray gives the replica, else the processor."""
    arguments: tuple[str, ...] = ()
    """More of `moored serve`."""
    state: str = ""
    """The folder of its state. Empty: one for the life of the replica."""
    environment: dict[str, str] = field(default_factory=dict)


class Box:
    """The service of a replica. It ends with its replica, whatever ends that."""

    def __init__(self, settings: Settings) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._own_state = ""
        self.endpoint = settings.endpoint
        if not self.endpoint:
            self._start(settings)

    def _start(self, settings: Settings) -> None:
        program = shutil.which(settings.program)
        if program is None:
            raise RuntimeError(f"{settings.program} is missing: install moored[service]")
        if not settings.state:
            self._own_state = tempfile.mkdtemp(prefix="moored-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        command = [program, "serve", "--listen", self.endpoint, "--end-with-stdin"]
        command += ["--state", settings.state or self._own_state]
        given = [f"cuda:{number}" for number in ray.get_gpu_ids()]
        for device in settings.devices or given or ["cpu"]:
            command += ["--device", device]
        # Its input is open for as long as the replica lives, and the end of that drains it.
        self._process = subprocess.Popen(
            [*command, *settings.arguments],
            stdin=subprocess.PIPE,
            env=os.environ | settings.environment,
        )

    def check(self) -> None:
        """Raises a RuntimeError where its process is gone."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RuntimeError(
                f"the service of this replica has ended with code {code}: its log is that of the replica"
            )

    def stop(self) -> None:
        """Lets it end its jobs, and waits for that."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
        if self._own_state:
            shutil.rmtree(self._own_state, ignore_errors=True)


@serve.deployment(
    num_replicas=1,
    ray_actor_options={"num_gpus": 1},
    # moored has the queue, with fair shares; Ray only keeps a replica from having all of it.
    max_ongoing_requests=64,
    graceful_shutdown_timeout_s=300,
    health_check_period_s=5,
    health_check_timeout_s=30,
)
class Moored:
    """A replica: a box, and a client of it."""

    def __init__(self, settings: Settings | dict[str, Any] | None = None) -> None:
        if not isinstance(settings, Settings):
            settings = Settings(**(settings or {}))
        self._box = Box(settings)
        self._client = moored.AsyncClient(self._box.endpoint, client_id="ray", retry_s=60)
        self._ready = False

    async def _prepared(self) -> moored.AsyncClient:
        if not self._ready:
            await self._client.wait_until_ready(READY_S)
            self._ready = True
        return self._client

    async def check_health(self) -> None:
        """Ray replaces a replica whose service is gone or has no card ready."""
        self._box.check()
        if self._ready and await self._client.health() != "serving":
            raise RuntimeError("the service of this replica has no card ready")

    @serve.multiplexed(max_num_models_per_replica=NAMES_AT_A_REPLICA)
    async def model(self, name: str) -> str:
        """Has the box load a model; from then on Ray sends requests of this name here."""
        await (await self._prepared()).load(name)
        return name

    async def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of a call, with the model that Ray routes by; without one the box's default."""
        name = serve.get_multiplexed_model_id() or options.pop("model", "")
        if not name:
            return options
        return options | {"model": await self.model(name)}

    async def generate_image(self, prompt: str, **options: Any) -> moored.ImageResult:
        """As of the Python client. `model` is that of the handle."""
        client = await self._prepared()
        return await client.generate_image(prompt, **await self._named(options))

    async def generate_video(self, prompt: str, **options: Any) -> moored.VideoResult:
        """As of the Python client. `model` is that of the handle."""
        client = await self._prepared()
        return await client.generate_video(prompt, **await self._named(options))

    async def generate_audio(self, prompt: str, **options: Any) -> moored.AudioResult:
        """As of the Python client. `model` is that of the handle."""
        client = await self._prepared()
        return await client.generate_audio(prompt, **await self._named(options))

    async def endpoint(self) -> str:
        """The address of the box of this replica, on its node."""
        await self._prepared()
        return self._box.endpoint

    async def __call__(self, request: Request) -> Response:
        """A picture of JSON with `prompt`, and options of the Python client; the header names the model."""
        try:
            options = await request.json()
            prompt = options.pop("prompt")
            if not isinstance(prompt, str):
                raise TypeError("prompt: a text is wanted")
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            return JSONResponse({"error": f"JSON with a prompt is wanted: {error}"}, 400)
        try:
            (picture, *_) = (await self.generate_image(prompt, **options)).pictures
        except (TypeError, moored.InvalidRequest, moored.ModelNotFound) as error:
            return JSONResponse({"error": str(error)}, 400)
        except moored.MooredError as error:
            return JSONResponse({"error": str(error), "reason": error.reason}, 503)
        headers = {"x-moored-box": serve.get_replica_context().replica_id.unique_id}
        return Response(picture.data, media_type=picture.media_type, headers=headers)

    async def __del__(self) -> None:
        """Ray calls it when the replica is to end, and waits."""
        with contextlib.suppress(Exception):
            await self._client.close()
        await asyncio.to_thread(self._box.stop)


def app(arguments: dict[str, Any]) -> serve.Application:
    """The application. Arguments of `serve run` and `serve.yaml` are those of Settings, lists as words."""
    words = ("devices", "arguments")
    given = {
        name: tuple(value.split()) if name in words and isinstance(value, str) else value
        for name, value in arguments.items()
    }
    return Moored.bind(Settings(**given))
