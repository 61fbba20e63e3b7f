"""How a node reaches the service: by the engine's settings, over a channel of its own for each run."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import moored
from griptape_nodes.retained_mode.events.config_events import (
    GetConfigValueRequest,
    GetConfigValueResultSuccess,
)
from griptape_nodes.retained_mode.events.secrets_events import (
    GetSecretValueRequest,
    GetSecretValueResultSuccess,
)
from griptape_nodes.retained_mode.griptape_nodes import GriptapeNodes
from griptape_nodes.retained_mode.managers.config_manager import USER_CONFIG_PATH

SETTINGS = "moored"
TOKEN_SECRET = "MOORED_TOKEN"
# Beside the engine's own configuration: jobs that outlive the engine.
UNFINISHED_FILE = "moored-unfinished.json"


STARTING = "Starting the service on this machine"
# What the setting `start_service` may be; any other value is the first.
WHILE_THE_ENGINE_RUNS, KEEP, NEVER = "while the engine runs", "keep it running", "never"


@contextlib.asynccontextmanager
async def service_client(
    say: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[moored.AsyncClient]:
    """A client of the service that the settings name.

    Where they and the environment name none, and none answers, one is started on this machine, unless
    the settings say never; `say` is given a text while that goes on.
    """
    client = _client()
    chosen = _setting("start_service")
    left_open = not (_setting("endpoint") or os.environ.get("MOORED_ENDPOINT"))
    if left_open and chosen != NEVER and await asyncio.to_thread(moored.can_start_local_service):
        if not await asyncio.to_thread(moored.local_service_listens):
            say(STARTING)
        # Also where one listens: another program may have started it, and it may not be ready yet.
        await asyncio.to_thread(moored.start_local_service, keep=chosen == KEEP)
    async with client:
        yield client


def _client() -> moored.AsyncClient:
    """A client of the service that the settings name. It connects when first used.

    What the settings leave open follows the client's own rules: MOORED_ENDPOINT, MOORED_TOKEN_FILE for
    the service there, MOORED_CLIENT, 127.0.0.1 and user@host; an https:// address is TLS, with
    MOORED_CA_FILE. The secret belongs to the service that it was first used for: the settings of a
    workspace, which may be a stranger's, lead it nowhere else.
    """
    endpoint = _setting("endpoint") or None
    token = _token() or None
    if token:
        token = moored.bound_token(endpoint, token)
    return moored.AsyncClient(
        endpoint,
        token=token,
        client_id=_setting("client_name") or None,
        unfinished=USER_CONFIG_PATH.parent / UNFINISHED_FILE,
    )


def _setting(name: str) -> str:
    request = GetConfigValueRequest(category_and_key=f"{SETTINGS}.{name}")
    result = GriptapeNodes.handle_request(request)
    value: Any = result.value if isinstance(result, GetConfigValueResultSuccess) else ""
    return str(value or "").strip()


def _token() -> str:
    request = GetSecretValueRequest(key=TOKEN_SECRET, should_error_on_not_found=False)
    result = GriptapeNodes.handle_request(request)
    value = result.value if isinstance(result, GetSecretValueResultSuccess) else ""
    token = str(value or "").strip()
    if not (token.isascii() and token.isprintable()):
        raise ValueError(
            f"The secret {TOKEN_SECRET} has characters that no token has: set it to the service's token"
        )
    return token
