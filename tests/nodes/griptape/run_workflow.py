"""Runs a saved workflow in an engine of its own, as a user's is: `moored` comes with the library.

    run_workflow.py MANIFEST WORKFLOW ENDPOINT

Prints as JSON what each node shows, and where `moored` came from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from headless import START_LIMIT_S, Headless


async def main(engine: Headless, manifest: Path, workflow: Path, endpoint: str) -> dict[str, Any]:
    """What each node shows when the workflow has run."""
    assert "moored" not in sys.modules
    await engine.settings(endpoint=endpoint)
    await engine.start(manifest)
    nodes = await engine.load(workflow)
    result = await engine.run()
    assert result.succeeded(), result.result_details
    return {
        name: {key: in_words(value) for key, value in node.parameter_output_values.items()}
        for name, node in nodes.items()
    }


def in_words(value: object) -> str:
    """A value as text; a picture as the path of its file."""
    from griptape.artifacts import ImageUrlArtifact
    from griptape_nodes.files.file import File

    return File(value.value).resolve() if isinstance(value, ImageUrlArtifact) else str(value)


if __name__ == "__main__":
    engine = Headless()
    manifest, workflow, endpoint = sys.argv[1:]
    shown = engine.do(main(engine, Path(manifest), Path(workflow), endpoint), START_LIMIT_S)
    print(json.dumps({"moored": sys.modules["moored"].__file__, "nodes": shown}))
