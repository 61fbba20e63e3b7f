"""diffusers' time and memory for one tile of HunyuanVideo's autoencoder, for `duration_of_a_tile`.

    python tests/gpu/film_decode.py         (where the card is; one line of JSON per size)

It decodes what `service/pipelines/tests/card/hunyuan_vae.rs` decodes: five latents, random weights of full
size in bf16, and brings the frames to host memory as bytes. The decoder itself is called, without the tiles
that follow.
"""

from __future__ import annotations

import json
import time

import torch
from diffusers import AutoencoderKLHunyuanVideo

LATENTS = 5
RUNS = 5
SIZES = ((60, 104), (80, 80), (90, 160))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(1)
    with torch.device("cuda"):
        vae = AutoencoderKLHunyuanVideo().to(torch.bfloat16).eval()
    for height, width in SIZES:
        latents = torch.randn(1, 16, LATENTS, height, width, device="cuda", dtype=torch.bfloat16)

        def tile(latents: torch.Tensor = latents) -> None:
            frames = vae.decoder(vae.post_quant_conv(latents))
            levels = (frames / 2 + 0.5).clamp(0, 1)
            (levels * 255).round().to(torch.uint8).cpu()

        tile()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        times = []
        for _ in range(RUNS):
            start = time.perf_counter()
            tile()
            times.append((time.perf_counter() - start) * 1e3)
        peak = torch.cuda.max_memory_allocated() - held
        size = f"{8 * width}x{8 * height}"
        print(json.dumps({"size": size, "ms": min(times), "peak_mib": peak >> 20}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
