"""What the library's manifest declares of models: those with a short name, their licences, who offers them.

    python tests/nodes/griptape/declared_models.py --write

writes it anew, from the service's catalogue.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[3]
MANIFEST = ROOT / "nodes/griptape/griptape_nodes_library.json"
CATALOGUE = ROOT / "service/hub/src/catalogue.toml"
HUB = "https://huggingface.co"
MEDIA = {
    "MooredGenerateImage": "image",
    "MooredEditImage": "image",
    "MooredGenerateVideo": "video",
    "MooredGenerateAudio": "audio",
}
"""What each node makes."""


def models() -> list[dict[str, Any]]:
    """The models of the catalogue."""
    found: list[dict[str, Any]] = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))["models"]
    return found


def of_library() -> list[dict[str, Any]]:
    """What the library declares."""
    providers: dict[str, Any] = {}
    for model in models():
        repository = model["id"].partition(":")[0]
        owner = repository.partition("/")[0]
        provider = providers.setdefault(owner.lower(), {"display_name": owner, "models": {}})
        notes = f"Licence: {model['licence']}."
        if model["needs_terms"]:
            notes += " The hub wants a login, and its terms accepted, before it is downloaded."
        provider["models"][model["name"]] = {
            "display_name": model["title"],
            "provider_model_id": model["id"],
            "key_support": "NO_KEY_REQUIRED",
            "terms_url": f"{HUB}/{repository}",
            "notes": notes,
        }
    catalogue = {"type": "model_catalog", "providers": providers}
    return [{"type": "lifecycle_stage", "stage": "BETA"}, catalogue]


def of_node(kind: str) -> list[dict[str, Any]]:
    """What a node declares."""
    medium = MEDIA.get(kind)
    used = [model["name"] for model in models() if model["medium"] == medium]
    return [{"type": "model_usage", "model_ids": used}] if used else []


def declared(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest with its declarations as they are to be."""
    manifest["metadata"]["declarations"] = of_library()
    for node in manifest["nodes"]:
        node["metadata"].pop("declarations", None)
        if of_node(node["class_name"]):
            node["metadata"]["declarations"] = of_node(node["class_name"])
    return manifest


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    fresh = declared(json.loads(MANIFEST.read_text(encoding="utf-8")))
    MANIFEST.write_text(json.dumps(fresh, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
