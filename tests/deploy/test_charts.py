"""The Helm chart and the manifests for Kubernetes: rendered by Helm itself, checked against its schemas.

No cluster is started here. The proxies check their configurations, and the service its settings.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import yaml
from charts import CHART, MANIFESTS, PLAIN, manifests, plain
from proxies import ENVOY_CONFIGURATION, HAPROXY_CONFIGURATION, envoy_program, haproxy_program

from service import BINARY, ROOT, clean_environment

VERSIONS = ("1.29", "1.37")
"""The oldest that the chart takes, and the newest whose schema there is."""

ALL = {
    "boxes": {
        "settings": {"MOORED_QUEUE_MAX_JOBS": "64"},
        "preload": ["owner/name", "owner/other+4-bit"],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "drainSeconds": 1200,
    },
    "state": {"storageClassName": "fast"},
    "models": {"existingClaim": "models"},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
    "service": {"type": "LoadBalancer"},
}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": PLAIN,
    "envoy": {"proxy": {"kind": "envoy"}, "token": {"existingSecret": "token"}},
    "cpu": {"boxes": {"device": "cpu:14GiB", "gpu": {"count": 0}, "noticeSeconds": 0}},
    "all": ALL | PLAIN,
}


@pytest.fixture(params=CASES)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What somebody may set."""
    return CASES[request.param]


def of_kind(found: list[dict[str, Any]], kind: str, name: str = "moored") -> dict[str, Any]:
    (one,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return one


def box_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The container of a box."""
    pod = of_kind(found, "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return dict(container)


def test_helm_finds_no_fault() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_rendered_matches_the_schemas_of_kubernetes(
    values: dict[str, Any], version: str
) -> None:
    found = manifests(values)
    assert len(found) >= 8
    for each in found:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"boxes": {"gpu": {"count": 2}}},
        {"boxes": {"replica": 3}},
        {"boxes": {"replicas": 0}},
        {"boxes": {"settings": {"queue.max_jobs": "64"}}},
        {"boxes": {"settings": {"MOORED_QUEUE_MAX_JOBS": 64}}},
        {"proxy": {"kind": "nginx"}},
        {"state": {"size": "200 GB"}},
        {"autoscale": {}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        manifests(wrong)


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    assert MANIFESTS.read_text(encoding="utf-8") == plain(), "tests/deploy/charts.py --write"


def test_the_chart_has_the_configurations_of_the_proxies() -> None:
    for path in (HAPROXY_CONFIGURATION, ENVOY_CONFIGURATION):
        assert (CHART / "files" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_box_has_one_gpu_and_a_volume_of_its_own(values: dict[str, Any]) -> None:
    found = manifests(values)
    (claim,) = of_kind(found, "StatefulSet")["spec"]["volumeClaimTemplates"]
    mounts = {mount["name"]: mount["mountPath"] for mount in box_of(found)["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == "/var/lib/moored"
    gpus = box_of(found)["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == (None if values.get("boxes", {}).get("gpu") else 1)


def test_health_is_that_of_grpc_and_no_card_ends_a_pod() -> None:
    box = box_of(manifests({}))
    assert box["readinessProbe"]["grpc"] == box["startupProbe"]["grpc"] == {"port": 50051}
    assert box["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_jobs_that_run_may_finish_before_a_pod_is_killed(values: dict[str, Any]) -> None:
    found = manifests(values)
    box = box_of(found)
    drain = {each["name"]: each["value"] for each in box["env"]}["MOORED_SERVICE_DRAIN"]
    notice = int(box["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in box else 0
    pod = of_kind(found, "StatefulSet")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > int(drain.removesuffix("s")) + notice


def test_a_part_of_the_boxes_stays_when_nodes_are_upgraded(values: dict[str, Any]) -> None:
    found = manifests(values)
    for kind, name in (("StatefulSet", "moored"), ("Deployment", "moored-proxy")):
        labels = of_kind(found, kind, name)["spec"]["template"]["metadata"]["labels"]
        budget = of_kind(found, "PodDisruptionBudget", name)["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_scaling_goes_by_a_metric_that_the_service_has() -> None:
    found = manifests(PLAIN)
    scaler = of_kind(found, "HorizontalPodAutoscaler")["spec"]
    assert "replicas" not in of_kind(found, "StatefulSet")["spec"], "the scaler's, not ours"
    (metric,) = scaler["metrics"]
    adapter = yaml.safe_load((ROOT / "deploy/kubernetes/prometheus-adapter.yaml").read_text())
    (rule,) = adapter["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    gauge = re.match(r"\w+", rule["seriesQuery"])
    assert gauge
    documented = (ROOT / "docs/METRICS.md").read_text(encoding="utf-8")
    assert f"`{gauge[0]}`" in documented
    # The proxy knows as many boxes as there may be.
    configuration = of_kind(found, "ConfigMap", "moored-proxy")["data"]["haproxy.cfg"]
    assert configuration.count("check-proto h1\n") == scaler["maxReplicas"]


@pytest.mark.parametrize("kind", ["haproxy", "envoy"])
def test_the_proxies_take_their_configuration(kind: str, tmp_path: Path) -> None:
    found = manifests({"proxy": {"kind": kind}, "boxes": {"replicas": 4}})
    ((name, text),) = of_kind(found, "ConfigMap", "moored-proxy")["data"].items()
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    command = {
        "haproxy": [haproxy_program(), "-c", "-f", str(path)],
        "envoy": [envoy_program(), "--mode", "validate", "-c", str(path)],
    }[kind]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "moored-3.moored-boxes.moored.svc.cluster.local" in text
    assert "10.0.0.1" not in text
    (container,) = of_kind(found, "Deployment", "moored-proxy")["spec"]["template"]["spec"][
        "containers"
    ]
    port = container["ports"][0]["containerPort"]
    environment = {each["name"]: each["value"] for each in container.get("env", [])}
    assert f":{port}" == environment.get("MOORED_PROXY_LISTEN", f":{port}")


def test_a_box_takes_its_settings(values: dict[str, Any], tmp_path: Path) -> None:
    box = box_of(manifests(values))
    environment = clean_environment() | {each["name"]: each["value"] for each in box["env"]}
    shown = subprocess.run(
        [str(BINARY), "config", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    found = {each["name"]: each for each in map(json.loads, shown.stdout.splitlines())}
    sources = {each["source"] for each in found.values()}
    for name in {each["name"] for each in box["env"]} - {"MOORED_TOKEN_FILE"}:
        assert any(name in source for source in sources), f"{name} is no setting: {sources}"
    preload = values.get("boxes", {}).get("preload", [])
    assert found["models.preload"]["value"] == preload


def test_a_token_is_read_by_the_group_of_the_pod_alone() -> None:
    pod = of_kind(manifests(PLAIN), "StatefulSet")["spec"]["template"]["spec"]
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    (mount,) = [
        each for each in box_of(manifests(PLAIN))["volumeMounts"] if each["name"] == "token"
    ]
    # The Dockerfile's MOORED_SERVICE_TOKEN_FILE.
    assert f"{mount['mountPath']}/{secret['items'][0]['path']}" == "/run/secrets/moored_token"
