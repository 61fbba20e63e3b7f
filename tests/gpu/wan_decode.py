"""diffusers' time and memory for films of Wan's autoencoders, for `duration_of_a_film`.

    python tests/gpu/wan_decode.py          (where the card is; one line of JSON per film)

It decodes what `service/pipelines/tests/card/wan_vae.rs` decodes: random weights of full size in bf16, and
brings the frames to host memory as bytes.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from diffusers import AutoencoderKLWan

RUNS = 3
WAN_2_2: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
WAN_2_1: dict[str, Any] = {}
FILMS = ((WAN_2_2, 1280, 704, 121), (WAN_2_1, 832, 480, 81))


@torch.no_grad()
def decoded(config: dict[str, Any], width: int, height: int, frames: int) -> tuple[float, int]:
    """Seconds of a decode to bytes in host memory, the best of some, and its bytes beside the weights."""
    with torch.device("cuda"):
        vae = AutoencoderKLWan(**config).to(torch.bfloat16).eval()
    factor = config.get("scale_factor_spatial", 8)
    shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, height // factor, width // factor)
    latents = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def film() -> None:
        levels = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
        (levels * 255).round().to(torch.uint8).cpu()

    film()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        film()
        times.append(time.perf_counter() - start)
    return min(times), torch.cuda.max_memory_allocated() - held


def main() -> None:
    torch.manual_seed(1)
    for config, width, height, frames in FILMS:
        seconds, peak = decoded(config, width, height, frames)
        row = {"size": f"{width}x{height}", "frames": frames, "s": seconds, "peak_mib": peak >> 20}
        print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
