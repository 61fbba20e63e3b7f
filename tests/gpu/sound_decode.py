"""diffusers' time and memory for four minutes of ACE-Step's autoencoder, for `duration_of_four_minutes`.

    python tests/gpu/sound_decode.py         (where the card is; one line of JSON for each)

It decodes and encodes what `service/pipelines/tests/card/oobleck.rs` does: 6000 latent frames and their
samples, with random weights of full size in bf16; whole, as `AutoencoderOobleck` does by default, and in its
tiles. `ms` is on the card alone, `ms_host` with 16-bit samples in host memory, or from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from diffusers import AutoencoderOobleck

FRAMES = 6000
HOP = 1920
RUNS = 5


def measured(run: Callable[[], object]) -> tuple[float, int]:
    """The best of some runs in milliseconds, and the peak in MiB."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), (torch.cuda.max_memory_allocated() - held) >> 20


@torch.no_grad()
def main() -> None:
    torch.manual_seed(1)
    with torch.device("cuda"):
        vae = AutoencoderOobleck(downsampling_ratios=[2, 4, 4, 6, 10], sampling_rate=48000)
        vae = vae.to(torch.bfloat16).eval()
        latents = torch.randn(1, 64, FRAMES, dtype=torch.bfloat16)
        samples = torch.randn(1, 2, FRAMES * HOP, dtype=torch.bfloat16) * 0.3
    host = samples.cpu()

    def decode() -> torch.Tensor:
        return vae.decode(latents).sample

    def decode_to_host() -> torch.Tensor:
        track = decode()[0].T.float()
        return (track.clamp(-1, 1) * 32767).round().to(torch.int16).cpu()

    def encode() -> torch.Tensor:
        return vae.encode(samples).latent_dist.mean

    def encode_from_host() -> torch.Tensor:
        return vae.encode(host.cuda()).latent_dist.mean.float().cpu()

    for tiled in (False, True):
        vae.use_tiling = tiled
        for name, alone, with_host in (
            ("decode", decode, decode_to_host),
            ("encode", encode, encode_from_host),
        ):
            ms, peak = measured(alone)
            ms_host, _ = measured(with_host)
            line = {"what": name, "tiled": tiled, "ms": ms, "ms_host": ms_host, "peak_mib": peak}
            print(json.dumps(line), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
