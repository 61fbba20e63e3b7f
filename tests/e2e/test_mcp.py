"""The tools of agents, held to the reference client of their protocol: over HTTP, and by `moored mcp`."""

from __future__ import annotations

import asyncio
import base64
import io
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, ClientSession, StdioServerParameters
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from PIL import Image
from test_access import make_token
from waiting import wait_until

from service import BINARY, Service, clean_environment, slower_model, write_secret

Simulate = Callable[..., Service]
SMALL: dict[str, Any] = {
    "prompt": "a boat",
    "model": "small",
    "width": 64,
    "height": 64,
    "steps": 3,
}


@asynccontextmanager
async def over_http(service: Service, token: str = "") -> AsyncIterator[Client]:
    """The reference client over HTTP, by the newest version of the protocol."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    url = f"http://{service.address}/mcp"
    async with create_mcp_http_client(headers=headers) as http:
        async with Client(streamable_http_client(url, http_client=http)) as client:
            yield client


@asynccontextmanager
async def in_session(service: Service, token: str = "") -> AsyncIterator[ClientSession]:
    """The same in a session, as older versions of the protocol have it."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    url = f"http://{service.address}/mcp"
    async with create_mcp_http_client(headers=headers) as http:
        async with streamable_http_client(url, http_client=http) as (read, write, *_):
            async with ClientSession(read, write) as session:
                await session.initialize()
                yield session


@asynccontextmanager
async def over_stdio(service: Service, token: str = "") -> AsyncIterator[Client]:
    """The reference client with `moored mcp`."""
    environment = clean_environment() | {"MOORED_ENDPOINT": f"http://{service.address}"}
    with tempfile.TemporaryDirectory() as folder:
        if token:
            write_secret(file := Path(folder) / "token", token)
            environment["MOORED_TOKEN_FILE"] = str(file)
        program = StdioServerParameters(command=str(BINARY), args=["mcp"], env=environment)
        async with Client(program) as client:
            yield client


@pytest.fixture(params=[over_http, in_session, over_stdio], ids=["http", "session", "stdio"])
def opened(request: pytest.FixtureRequest) -> Any:
    return request.param


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))  # type: ignore[arg-type]


def test_a_picture_is_made_shown_and_read_again(simulate: Simulate, opened: Any) -> None:
    service = simulate("sim:24GiB")
    with service.client() as client:
        reference = client.generate_image(
            "a boat", model="small", width=64, height=64, steps=3, seed=7
        )

    async def talk() -> None:
        told: list[tuple[float, float | None, str | None]] = []

        async def progress(done: float, of: float | None, words: str | None) -> None:
            told.append((done, of, words))

        async with opened(service) as session:
            names = {tool.name for tool in (await session.list_tools()).tools}
            assert {"generate_image", "edit_image", "generate_video", "generate_music"} <= names
            made = await session.call_tool(
                "generate_image", SMALL | {"seed": 7}, progress_callback=progress
            )
            assert not made.is_error, made
            preview, link, words = made.content
            assert preview.type == "image" and preview.mime_type == "image/jpeg"
            assert Image.open(io.BytesIO(base64.b64decode(preview.data))).size == (64, 64)
            assert link.type == "resource_link" and words.text.endswith("with the seed 7.")
            (read,) = (await session.read_resource(link.uri)).contents
            assert base64.b64decode(read.blob) == reference.pictures[0].data
            listed = (await session.list_resources()).resources
            assert [str(one.uri) for one in listed] == [str(link.uri)]
            assert any(words == "step 3 of 3" for _, _, words in told), told
            assert all(a[0] < b[0] or a == b for a, b in zip(told, told[1:], strict=False)), told
            edited = await session.call_tool(
                "edit_image", SMALL | {"image": str(link.uri), "strength": 0.5, "seed": 1}
            )
            assert not edited.is_error, edited

    run(talk())


def test_a_refusal_says_what_to_do(simulate: Simulate, opened: Any) -> None:
    service = simulate("sim:24GiB")
    service.client().close()  # its card is ready

    async def talk() -> None:
        async with opened(service) as session:
            refused = await session.call_tool(
                "generate_image", {"prompt": "a boat", "model": "missing"}
            )
            assert refused.is_error
            assert "missing" in refused.content[0].text
            assert refused.structured_content["error"]["code"] == "model_not_found"
            gone = await session.call_tool("get_result", {"job": "job-0"})
            assert gone.is_error
            sampled = await session.call_tool("generate_image", SMALL | {"sampler": "euler"})
            assert sampled.is_error and "sampler" in sampled.content[0].text
            fits = await session.call_tool("what_fits", {"model": "small"})
            assert fits.structured_content["runs_now"] is True
            models = await session.call_tool("list_models", {})
            assert any(model["id"] == "small" for model in models.structured_content["models"])
            status = await session.call_tool("status", {})
            assert status.structured_content["cards"][0]["ready"] is True

    run(talk())


def test_a_film_is_begun_and_fetched_later(simulate: Simulate, opened: Any) -> None:
    service = simulate("sim:24GiB")

    async def talk() -> None:
        async with opened(service) as session:
            begun = await session.call_tool(
                "generate_video", {"prompt": "waves", "model": "video", "steps": 2, "wait": False}
            )
            assert not begun.is_error, begun
            job = begun.structured_content["job"]
            made = await session.call_tool("get_result", {"job": job})
            assert made.structured_content["results"][0]["media_type"] == "video/mp4", made

    run(talk())


def test_what_an_agent_leaves_is_cancelled(tmp_path: Path, opened: Any) -> None:
    models = slower_model(tmp_path, steps_ms=200)
    service = Service("--models", str(models), state=tmp_path / "state", devices=("sim:24GiB",))
    try:
        with service.client() as client:

            async def talk() -> None:
                async with opened(service) as session:
                    call = asyncio.create_task(
                        session.call_tool(
                            "generate_image", SMALL | {"model": "slower", "steps": 200}
                        )
                    )
                    await asyncio.to_thread(
                        wait_until, lambda: any(job.step > 0 for job in client.jobs()), "it runs"
                    )
                    call.cancel()
                    await asyncio.to_thread(wait_until, lambda: not client.jobs(), "it has ended")

            run(talk())
            (job,) = client.jobs(include_ended=True)
            assert job.state == "cancelled"
    finally:
        service.kill()


def test_a_role_has_the_tools_that_it_may_call(
    simulate: Simulate, tmp_path: Path, opened: Any
) -> None:
    token = make_token(tmp_path / "state-0", "watcher", role="observe")
    service = simulate("sim:24GiB")

    async def talk() -> None:
        async with opened(service, token) as session:
            names = {tool.name for tool in (await session.list_tools()).tools}
            assert names == {"list_models", "status"}
            refused = await session.call_tool("generate_image", SMALL)
            assert refused.is_error and "role generate" in refused.content[0].text

    run(talk())
