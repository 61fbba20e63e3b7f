"""The other side: the Griptape library on the real engine, in an environment of its own.

    python griptape_side.py ENDPOINT FOLDER

`{"generate": [[PROMPT, SEED], ...], "steps": N}` is one workflow with a Generate Image for each, one after
the other; `{"cancel": true}` cancels it. Each workflow ends in `{"status", "error", "texts", "pictures"}`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from lines import commands, say

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "griptape"))

from headless import Headless, clean_environment, client_from_here, library_copy  # noqa: E402


async def serve(engine: Headless, manifest: Path, endpoint: str, folder: Path) -> None:
    """Runs what it is told to."""
    await engine.start(manifest)
    await engine.settings(endpoint=endpoint)
    say(ready=True)
    coming = commands()
    async with asyncio.TaskGroup() as running:
        while command := await asyncio.to_thread(next, coming, None):
            if "cancel" in command:
                await engine.cancel()
            else:
                running.create_task(generate(engine, command, folder))


async def generate(engine: Headless, command: dict[str, Any], folder: Path) -> None:
    """One workflow, and how it ended."""
    await engine.fresh_flow()
    nodes: list[Any] = []
    for prompt, seed in command["generate"]:
        said = {"prompt": prompt, "seed": seed, "steps": command["steps"]}
        nodes.append(await engine.node("GenerateImage", **said))
    for before, after in zip(nodes, nodes[1:], strict=False):
        await engine.connect(before, "exec_out", after, "exec_in")
    result = await engine.run()
    outputs = [dict(node.parameter_output_values) for node in nodes]
    # A workflow that is cancelled is no failure to the engine, which soon clears its nodes.
    status = "success" if result.succeeded() else "error"
    if status == "success" and not all("image" in one for one in outputs):
        status = "cancelled"
    texts = [line for one in outputs for line in one.get("logs", "").splitlines()]
    say(
        status=status,
        error="" if status == "success" else str(result.result_details),
        texts=texts,
        pictures=[copied(one["image"].value, folder) for one in outputs if status == "success"],
    )


def copied(address: str, folder: Path) -> str:
    """A picture where the test can read it: the engine alone knows what its addresses mean."""
    from griptape_nodes.files.file import File

    path = folder / Path(address).name
    path.write_bytes(File(address).read_bytes())
    return str(path)


def main() -> None:
    """Starts the engine."""
    endpoint, folder = sys.argv[1], Path(sys.argv[2])
    clean_environment(folder)
    client_from_here(folder)
    engine = Headless()
    engine.loop.run_until_complete(serve(engine, library_copy(folder), endpoint, folder))


if __name__ == "__main__":
    main()
