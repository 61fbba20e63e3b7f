"""The Helm chart as Helm renders it, and the plain manifests that are made of it.

python tests/deploy/charts.py --write     writes deploy/kubernetes/moored.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/moored"
MANIFESTS = ROOT / "deploy/kubernetes/moored.yaml"
PLAIN = {"autoscaling": {"enabled": True}, "token": {"existingSecret": "moored-token"}}
HEADING = """\
# Made of deploy/helm/moored by tests/deploy/charts.py --write: change that.
# Boxes with a GPU each, behind HAProxy:
#
#   kubectl create namespace moored
#   kubectl -n moored create secret generic moored-token --from-literal=token=$(openssl rand -hex 32)
#   kubectl -n moored apply -f moored.yaml
"""


def rendered(values: dict[str, Any]) -> str:
    """All manifests as one text."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="moored", namespace="moored")
    made = [files[name].strip() for name in sorted(files) if name.endswith(".yaml")]
    return "\n---\n".join(text.removeprefix("---\n") for text in made) + "\n"


def manifests(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The same, read."""
    return [one for one in yaml.safe_load_all(rendered(values)) if one]


def plain() -> str:
    """What `deploy/kubernetes/moored.yaml` has."""
    return HEADING + rendered(PLAIN)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    MANIFESTS.write_text(plain(), encoding="utf-8")
