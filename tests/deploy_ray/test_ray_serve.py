"""The application for Ray Serve on a local cluster: two replicas, each with a service of a simulated card."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import moored
import pytest
import ray
import yaml
from ray import serve
from waiting import wait_until

from service import BINARY, INSTANT_MODELS, ROOT, ReservedPort, clean_environment

sys.path.insert(0, str(ROOT / "deploy/ray"))

from moored_serve import Moored, Settings, app  # noqa: E402

NAMES = tuple(f"picture-{number}" for number in range(6))
SMALL = {"width": 64, "height": 64, "steps": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with names of their own."""
    folder = tmp_path_factory.mktemp("models")
    base = json.loads((INSTANT_MODELS / "small.instant.json").read_text(encoding="utf-8"))
    for name in NAMES:
        parts = [part | {"identity": f"{name}-{part['name']}"} for part in base["components"]]
        model = base | {"name": name, "components": parts}
        (folder / f"{name}.instant.json").write_text(json.dumps(model), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[int]:
    """A local cluster; the port of its HTTP."""
    # Ray hands it on, and a service would take it for a setting.
    os.environ.pop("MOORED_BINARY", None)
    port = ReservedPort().number
    path = f"{ROOT / 'deploy/ray'}:{ROOT / 'client-py/src'}"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def handle(cluster: int, models: Path) -> Iterator[Any]:
    """The application with two replicas, whose cards are simulated."""
    settings = Settings(
        program=str(BINARY),
        devices=("sim:14GiB",),
        arguments=("--models", str(models)),
        environment={
            name: value
            for name, value in clean_environment().items()
            if name.startswith(("HF_", "MOORED_"))
        },
    )
    two = Moored.options(num_replicas=2, ray_actor_options={"num_cpus": 1}, health_check_period_s=1)
    yield serve.run(two.bind(settings), name="moored")
    serve.delete("moored")


def test_a_model_stays_at_its_replica(handle: Any) -> None:
    def places(name: str) -> set[str]:
        at = handle.options(multiplexed_model_id=name)
        return {at.endpoint.remote().result() for _ in range(4)}

    for name in NAMES:
        at = handle.options(multiplexed_model_id=name)
        result = at.generate_image.remote("a red cube", **SMALL).result()
        assert result.done.model.id == name
        assert result.pictures[0].data.startswith(b"\x89PNG")
    # Replicas tell Ray what they have a little later.
    wait_until(lambda: all(len(places(name)) == 1 for name in NAMES), "each has its replica")
    homes = {name: places(name) for name in NAMES}
    assert len(set.union(*homes.values())) == 2, "both replicas have some"
    for name in NAMES * 3:
        assert places(name) == homes[name]


def test_the_box_has_what_ray_counts_as_its_models(handle: Any) -> None:
    at = handle.options(multiplexed_model_id=NAMES[0])
    at.generate_image.remote("a red cube", **SMALL).result()
    found = set()
    for _ in range(8):
        with moored.Client(handle.endpoint.remote().result()) as client:
            for card in client.status().cards:
                found |= {key.partition("+")[0] for each in card.residents for key in each.entries}
    assert NAMES[0] in found


def test_over_http(handle: Any, cluster: int) -> None:
    def asked(body: Any, model: str = "") -> tuple[int, Any]:
        headers = {"content-type": "application/json"}
        if model:
            headers["serve_multiplexed_model_id"] = model
        request = Request(f"http://127.0.0.1:{cluster}/", json.dumps(body).encode(), headers)
        try:
            with urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            return error.code, json.loads(error.read())

    status, picture = asked({"prompt": "a red cube", **SMALL}, NAMES[1])
    assert (status, picture[:4]) == (200, b"\x89PNG")
    status, picture = asked({"prompt": "a red cube", "model": NAMES[2], **SMALL})
    assert (status, picture[:4]) == (200, b"\x89PNG")
    status, said = asked({"prompt": "a red cube", "colour": 3}, NAMES[1])
    assert (status, "colour" in said["error"]) == (400, True), said
    status, said = asked({"prompt": "a red cube"}, "there/is-none")
    assert (status, "there/is-none" in said["error"]) == (400, True), said
    status, said = asked([])
    assert status == 400


def test_a_replica_whose_service_has_ended_is_replaced(handle: Any) -> None:
    lost = sorted(endpoints(handle))[0]
    os.kill(pid_of(lost), signal.SIGKILL)
    wait_until(
        lambda: lost not in (now := endpoints(handle)) and len(now) == 2, "two replicas again", 120
    )
    assert handle.generate_image.remote("x", model=NAMES[0], **SMALL).result().pictures


def test_services_end_with_their_replicas(cluster: int, handle: Any) -> None:
    pids = [pid_of(endpoint) for endpoint in endpoints(handle)]
    serve.delete("moored")
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "services end")


def test_the_configuration_names_what_there_is() -> None:
    read = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema.model_validate(read).applications
    assert application.import_path == "moored_serve:app"
    built = app(application.args)
    assert built._bound_deployment.name == application.deployments[0].name == "Moored"


def endpoints(handle: Any) -> set[str]:
    """The services of all replicas that answer."""
    found = set()
    for _ in range(12):
        try:
            found.add(handle.endpoint.remote().result(timeout_s=60))
        except Exception:  # a replica that ends
            continue
    return found


def pid_of(endpoint: str) -> int:
    """The process of a service, by what it was told to listen at."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if endpoint.encode() in words and b"serve" in words:
            return int(path.parent.name)
    raise AssertionError(f"nothing listens at {endpoint}")
