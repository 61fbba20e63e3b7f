"""What a model needs, whatever it generates."""

from __future__ import annotations

import moored


async def plan_of(client: moored.AsyncClient, model: moored.ModelRef) -> moored.Plan:
    """What a request of the model's defaults would need; nothing is loaded.

    It raises where the service has not the model, or cannot hold it so.
    """
    refused: moored.InvalidRequest | None = None
    for plan in (client.plan, client.plan_video, client.plan_audio):
        try:
            return await plan(model=model)
        except moored.InvalidRequest as error:
            if [violation.field for violation in error.violations] != ["model"]:
                raise
            # It may generate something else than was asked for.
            refused = refused or error
    assert refused is not None
    raise refused
