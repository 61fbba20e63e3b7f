"""A page that is to the panel what ComfyUI is: a stand-in, with the few names of ComfyUI that scripts use.

    python browser_page.py USER_DIRECTORY

Serves the pack's own routes and scripts as ComfyUI does: each route also under `/api`, and what is in `web`
under `/extensions/moored`. Prints its port, and ends with its standard input. With PANEL_QUICK_S a question
to the service may take so many seconds instead of the pack's own.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from aiohttp import web

PACK = Path(__file__).resolve().parents[3] / "nodes/comfyui"
STAND_IN = Path(__file__).resolve().parent / "browser_page"


def pack_module(name: str, user_directory: Path) -> types.ModuleType:
    """A module of the pack without its nodes, and with the one name of ComfyUI's Python that routes use."""
    folder_paths = types.ModuleType("folder_paths")
    folder_paths.get_user_directory = lambda: str(user_directory)  # type: ignore[attr-defined]
    sys.modules["folder_paths"] = folder_paths
    package = types.ModuleType("pack")
    package.__path__ = [str(PACK)]
    sys.modules["pack"] = package
    return importlib.import_module(f"pack.{name}")


def translations() -> dict[str, dict[str, object]]:
    """The pack's locales as ComfyUI's `/i18n` has them."""
    found: dict[str, dict[str, object]] = {}
    for folder in sorted((PACK / "locales").iterdir()):
        found[folder.name] = json.loads((folder / "main.json").read_text(encoding="utf-8"))
    return found


def application(user_directory: Path) -> web.Application:
    """The page and the pack's routes."""
    routes = web.RouteTableDef()
    panel: Any = pack_module("panel", user_directory)
    panel.QUICK_S = float(os.environ.get("PANEL_QUICK_S", panel.QUICK_S))
    panel.register_routes(routes)

    @routes.get("/i18n")
    async def i18n(request: web.Request) -> web.Response:
        return web.json_response(translations())

    prefixed = web.RouteTableDef()
    for route in routes:
        assert isinstance(route, web.RouteDef)
        prefixed.route(route.method, f"/api{route.path}")(route.handler, **route.kwargs)

    async def page(request: web.Request) -> web.FileResponse:
        return web.FileResponse(STAND_IN / "page.html")

    app = web.Application()
    app.add_routes(routes)
    app.add_routes(prefixed)
    app.add_routes([web.get("/", page)])
    app.add_routes([web.static("/scripts", STAND_IN / "scripts")])
    app.add_routes([web.static("/extensions/moored", PACK / "web")])
    return app


async def serve(user_directory: Path) -> None:
    """Serves until standard input ends."""
    # A stream that is still open must not keep the page up.
    runner = web.AppRunner(application(user_directory), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
