"""diffusers' time and memory for films of Wan's autoencoders, for `duration_of_a_film`.

    python tests/gpu/wan_decode.py          (where the card is; one line of JSON per film)

It decodes what `service/pipelines/tests/card/wan_vae.rs` decodes: random weights of full size in bf16, and
brings the frames to host memory as bytes.
"""

from __future__ import annotations

import json
import time

import torch
from diffusers import AutoencoderKLWan

RUNS = 3
WAN_2_2 = {
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
FILMS = ((WAN_2_2, 1280, 704, 121), ({}, 832, 480, 81))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(1)
    for config, width, height, frames in FILMS:
        with torch.device("cuda"):
            vae = AutoencoderKLWan(**config).to(torch.bfloat16).eval()
        factor = config.get("scale_factor_spatial", 8)
        shape = (1, vae.config.z_dim, (frames - 1) // 4 + 1, height // factor, width // factor)
        latents = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        def film(vae: AutoencoderKLWan = vae, latents: torch.Tensor = latents) -> None:
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
        peak = torch.cuda.max_memory_allocated() - held
        size = f"{width}x{height}"
        row = {"size": size, "frames": frames, "s": min(times), "peak_mib": peak >> 20}
        print(json.dumps(row), flush=True)
        del vae
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
