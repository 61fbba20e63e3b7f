"""The library in the engine: it loads whole, from its own packages, and asks nothing on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import declared_models
from headless import LIBRARY, MANIFEST, Headless

from service import ROOT

NODES = {
    "MooredGPUConfiguration",
    "MooredDiffusionModel",
    "MooredGenerateImage",
    "MooredEditImage",
    "MooredGenerateVideo",
    "MooredGenerateAudio",
    "MooredPreloadModel",
    "MooredUnloadModels",
    "MooredGPUStatus",
}


def test_every_node_is_made_while_no_service_runs(nowhere: Headless) -> None:
    from griptape_nodes.retained_mode.events.library_events import ListNodeTypesInLibraryRequest

    listed = nowhere.do(nowhere.ask(ListNodeTypesInLibraryRequest(library="moored")))
    assert set(listed.node_types) == NODES
    for kind in NODES:
        node = nowhere.do(nowhere.node(kind.removeprefix("Moored")))
        assert type(node).__name__ == kind, "no placeholder"


def test_the_manifest_is_of_the_engines_schema_and_declares_the_models_of_the_catalogue() -> None:
    """Written by `declared_models.py --write`."""
    from griptape_nodes.node_library.library_registry import LibrarySchema

    manifest = json.loads((LIBRARY / MANIFEST).read_text(encoding="utf-8"))
    schema = LibrarySchema.model_validate(manifest)
    assert schema.model_extra is None
    declared = [int(part) for part in schema.library_schema_version.split(".")]
    assert declared <= [int(part) for part in LibrarySchema.LATEST_SCHEMA_VERSION.split(".")]
    assert declared_models.declared(json.loads(json.dumps(manifest))) == manifest
    catalogue = manifest["metadata"]["declarations"][1]["providers"]
    flux = catalogue["black-forest-labs"]["models"]["flux-dev"]
    assert flux["terms_url"].endswith("/black-forest-labs/FLUX.1-dev")
    assert "Non-Commercial" in flux["notes"]
    assert (LIBRARY / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_every_template_has_a_thumbnail() -> None:
    """Drawn by `tests/nodes/make_thumbnails.py`; `scripts/packs` writes its address into the template."""
    manifest = json.loads((LIBRARY / MANIFEST).read_text(encoding="utf-8"))
    for template in manifest["workflows"]:
        picture = (LIBRARY / template).with_suffix(".jpg")
        assert picture.read_bytes()[:2] == b"\xff\xd8", template


def test_the_declared_engine_is_no_newer_than_this_one() -> None:
    declared = json.loads((LIBRARY / MANIFEST).read_text())["metadata"]["engine_version"]
    here = version("griptape-nodes-engine")
    assert [int(part) for part in declared.split(".")] <= [int(part) for part in here.split(".")]


def test_endpoint_and_token_are_settings_of_the_engine(nowhere: Headless) -> None:
    from griptape_nodes.retained_mode.events.config_events import GetConfigValueRequest

    got = nowhere.do(nowhere.ask(GetConfigValueRequest(category_and_key="moored.endpoint")))
    assert got.value == "127.0.0.1:9", "what a person has set outlives the library's loading"
    # The engine offers secrets that are registered when it starts the next time.
    (kept,) = Path(os.environ["XDG_CONFIG_HOME"]).glob("griptape_nodes/*config.json")
    events = json.loads(kept.read_text())["app_events"]["on_app_initialization_complete"]
    assert "MOORED_TOKEN" in events["secrets_to_register"]


def test_the_engine_installs_the_client_for_the_library_without_torch(
    engine: Headless, manifest: Path
) -> None:
    packages = manifest.parent / ".venv/lib"
    (site,) = packages.glob("python*/site-packages")
    installed = {folder.name for folder in site.iterdir()}
    assert {"moored", "grpc", "google"} <= installed
    assert "torch" not in installed


def test_the_package_of_the_client_is_enough(engine: Headless, manifest: Path) -> None:
    """The library's packages import the client by themselves, without pillow or numpy."""
    (site,) = (manifest.parent / ".venv/lib").glob("python*/site-packages")
    code = "import moored, sys; print(moored.__file__); assert 'PIL' not in sys.modules"
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(site)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(site)
