"""Names and shapes of the tensors of Ovi's fusion model, as its authors' file has them."""

from __future__ import annotations

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]

SINUSOIDS = 256
TAPS = 7


@dataclass(frozen=True)
class Fusion:
    """The sizes of a fusion model; those that are published."""

    width: int = 3072
    inner: int = 14_336
    layers: int = 30
    text: int = 4096
    video: int = 48
    """Channels of the latent of the film, and of that of the sound."""
    audio: int = 20

    def shapes(self) -> Shapes:
        """All tensors."""
        width = self.width
        # The width inside the gated convolution that embeds sound.
        gate = -(-(8 * width // 3) // 256) * 256
        video: Shapes = {
            "patch_embedding.weight": (width, self.video, 1, 2, 2),
            "patch_embedding.bias": (width,),
        }
        audio: Shapes = {
            "patch_embedding.0.weight": (width, self.audio, TAPS),
            "patch_embedding.0.bias": (width,),
            "patch_embedding.2.w1.weight": (gate, width, TAPS),
            "patch_embedding.2.w2.weight": (width, gate, TAPS),
            "patch_embedding.2.w3.weight": (gate, width, TAPS),
        }
        branches = {
            "video_model": video | self._branch(4 * self.video),
            "audio_model": audio | self._branch(self.audio),
        }
        return {
            f"{branch}.{name}": shape
            for branch, shapes in branches.items()
            for name, shape in shapes.items()
        }

    def _branch(self, token: int) -> Shapes:
        """A branch but for its embedding; a token of its velocity has this width."""
        width = self.width
        found: Shapes = {"head.modulation": (1, 2, width)}
        for name, sides in (
            ("text_embedding.0", (width, self.text)),
            ("text_embedding.2", (width, width)),
            ("time_embedding.0", (width, SINUSOIDS)),
            ("time_embedding.2", (width, width)),
            ("time_projection.1", (6 * width, width)),
            ("head.head", (token, width)),
        ):
            found |= linear(name, *sides)
        for number in range(self.layers):
            found |= {f"blocks.{number}.{name}": shape for name, shape in self._block().items()}
        return found

    def _block(self) -> Shapes:
        width, rows = self.width, (self.width,)
        found: Shapes = {"modulation.modulation": (1, 6, width)}
        for attention, layers in (
            ("self_attn", ("q", "k", "v", "o")),
            ("cross_attn", ("q", "k", "v", "o", "k_fusion", "v_fusion")),
        ):
            for layer in layers:
                found |= linear(f"{attention}.{layer}", width, width)
            found |= {f"{attention}.{norm}.weight": rows for norm in ("norm_q", "norm_k")}
        for norm in ("norm3", "cross_attn.pre_attn_norm_fusion"):
            found |= {f"{norm}.weight": rows, f"{norm}.bias": rows}
        found["cross_attn.norm_k_fusion.weight"] = rows
        return found | linear("ffn.0", self.inner, width) | linear("ffn.2", width, self.inner)


def linear(name: str, outputs: int, inputs: int) -> Shapes:
    """A layer with a bias."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
