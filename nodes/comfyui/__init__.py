"""Nodes of moored: the service holds the models and generates, ComfyUI shows and cancels."""

from __future__ import annotations

import sys
from pathlib import Path

from comfy_api.latest import ComfyExtension, io


def _client() -> str:
    """What to install: the client of the checkout that this pack is in, else where to find it."""
    found = Path(__file__).resolve().parents[2] / "client-py"
    return f"{found if found.is_dir() else 'CHECKOUT-OF-MOORED/client-py'}[images]"


try:
    from .control_nodes import ApplyControlNet
    from .film_nodes import ImageToVideo, TextToVideo
    from .latent_nodes import LatentFromComfyUI, LatentToComfyUI, VAEDecode, VAEEncode
    from .lora_nodes import LoadLoRA
    from .model_nodes import LoadModel, Server
    from .music_nodes import CoverMusic, RepaintMusic, TextToMusic
    from .panel import register_routes
    from .picture_nodes import EditImage, ImageToImage, TextToImage
    from .residency_nodes import GPUStatus, Pin, Preload, Unload
    from .sharing_nodes import Release, Reserve
except ModuleNotFoundError as missing:
    if missing.name != "moored":
        raise
    # ComfyUI shows it in its log, and starts without the nodes.
    raise ImportError(
        "The nodes of moored need its client in ComfyUI's own Python: "
        f"{sys.executable} -m pip install '{_client()}'"
    ) from missing

WEB_DIRECTORY = "./web"

NODES: list[type[io.ComfyNode]] = [
    Server,
    LoadModel,
    LoadLoRA,
    ApplyControlNet,
    TextToImage,
    ImageToImage,
    EditImage,
    TextToVideo,
    ImageToVideo,
    TextToMusic,
    RepaintMusic,
    CoverMusic,
    VAEEncode,
    VAEDecode,
    LatentToComfyUI,
    LatentFromComfyUI,
    GPUStatus,
    Preload,
    Unload,
    Pin,
    Reserve,
    Release,
]


class MooredExtension(ComfyExtension):
    """What ComfyUI loads."""

    async def on_load(self) -> None:
        """Adds the routes of the pack, where there is a server to add them to."""
        from server import PromptServer

        instance = getattr(PromptServer, "instance", None)
        if instance is not None:
            register_routes(instance.routes)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes of the pack."""
        return NODES


async def comfy_entrypoint() -> MooredExtension:
    """Called by ComfyUI."""
    return MooredExtension()


__all__ = ["WEB_DIRECTORY", "MooredExtension", "comfy_entrypoint"]
