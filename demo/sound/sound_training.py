"""What the stages of the sound model's training share: the plan, graphs, and the film trainer's clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "film"))

from film_training import (  # noqa: E402
    Clock,
    log,
    read_moments,
    restore_moments,
    save,
    set_rate,
)

__all__ = [
    "Clock",
    "GradientStep",
    "Plan",
    "half_precision",
    "log",
    "read_moments",
    "restore_moments",
    "save",
    "set_rate",
]


@dataclass(frozen=True)
class Plan:
    """Sizes, rates and minutes of the training."""

    seed: int = 20261123
    warmup: int = 200
    vae_minutes: float = 1.3
    vae_batch: int = 48
    vae_rate: float = 2e-3
    clip_frames: int = 16
    """Latent frames of the clips that the autoencoder learns from."""
    latent_noise: float = 0.15
    """Largest noise on the latents that the decoder learns from, for latents of spread 1."""
    decoder_minutes: float = 0.5
    decoder_batch: int = 48
    decoder_rate: float = 7e-4
    decoder_noise: float = 0.08
    decoder_clips: int = 1024
    decoder_reuse: int = 200
    """Steps after which other clips are made."""
    tokens_minutes: float = 0.25
    tokens_batch: int = 512
    tokens_rate: float = 2e-3
    flow_minutes: float = 2.5
    flow_batch: int = 768
    flow_rate: float = 2e-3
    auxiliary_weight: float = 0.1
    repeats: tuple[int, int, int] = (24, 6, 1)
    """Times that melodies of one, two and three phrases are in the bank, in other keys and loudness."""
    bank: int = 1_000_000
    """Most melodies of the bank."""
    average: float = 0.999


def half_precision(device: str) -> torch.autocast:
    """Automatic bf16 on a GPU; a CPU computes faster in f32."""
    # Without the cache of cast weights, which a graph would keep.
    return torch.autocast(device, torch.bfloat16, device == "cuda", cache_enabled=False)


class GradientStep:
    """Gradients of a loss; on a card as CUDA graphs, one for each shape of input.

    Small networks wait for the host between their kernels; a graph launches them all at once.
    """

    def __init__(
        self,
        live: Sequence[nn.Parameter],
        compute: Callable[..., tuple[Tensor, ...]],
        is_graphed: bool,
    ) -> None:
        """`compute` returns the loss and figures to be shown; it draws no numbers but torch's own."""
        self._live, self._compute, self._is_graphed = live, compute, is_graphed
        self._graphs: dict[tuple[torch.Size, ...], _Graph] = {}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Set the parameters' gradients; returns what was computed."""
        if not self._is_graphed:
            return self._backward(inputs)
        shapes = tuple(value.shape for value in inputs)
        if shapes not in self._graphs:
            try:
                self._graphs[shapes] = self._capture(inputs)
            except RuntimeError as error:
                log(not_graphed=str(error)[:200])
                self._is_graphed = False
                return self._backward(inputs)
        graph = self._graphs[shapes]
        for place, value in zip(graph.inputs, inputs, strict=True):
            place.copy_(value)
        graph.graph.replay()
        for parameter, gradient in zip(self._live, graph.gradients, strict=True):
            parameter.grad = gradient
        return graph.outputs

    def _backward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for parameter in self._live:
            parameter.grad = None
        outputs = self._compute(*inputs)
        outputs[0].backward()
        return tuple(output.detach() for output in outputs)

    def _capture(self, inputs: Sequence[Tensor]) -> _Graph:
        kept = [value.clone() for value in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._backward(kept)
        torch.cuda.current_stream().wait_stream(side)
        for parameter in self._live:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self._backward(kept)
        return _Graph(graph, kept, outputs, [parameter.grad for parameter in self._live])


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    gradients: list[Tensor | None]
