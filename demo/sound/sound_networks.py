"""The networks of the sound model, and their batched form for training.

The shipped modules are diffusers' and transformers' own classes. The pipeline runs one prompt at a time, and
its transformer sees every token of the condition; `Player.velocity` computes the same for a batch of prompts
of different lengths, with a mask over the condition.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import MethodType
from typing import Any

import melodies
import torch
from diffusers import (
    AceStepTransformer1DModel,
    AutoencoderOobleck,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.ace_step_transformer import _ace_step_rotary_freqs
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import remove_weight_norm, weight_norm
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

LATENT = 8
"""Channels of a latent frame."""
WIDTH, TEXT_WIDTH, TOKEN_WIDTH = 128, 96, 64
STEPS = 8
SHIFT = 3.0
"""The pipeline's shift of the times of steps."""
WINDOW = 128
"""Of attention, in tokens; `Player` computes without it, so its sequences are shorter."""
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def make_vae() -> AutoencoderOobleck:
    """ACE-Step's autoencoder (stereo, 25 frames a second) for 16,000 samples a second.

    Without norms it learns only from weights that keep the loudness of what passes.
    """
    vae = AutoencoderOobleck(
        encoder_hidden_size=2 * LATENT,
        downsampling_ratios=[2, 4, 8, 10],
        channel_multiples=[1, 2, 4, 8],
        decoder_channels=16,
        decoder_input_channels=LATENT,
        audio_channels=2,
        sampling_rate=melodies.RATE,
    )
    without_weight_norm(vae)
    for name, module in vae.named_modules():
        if isinstance(module, nn.ConvTranspose1d):
            inputs = 2 * module.in_channels
        elif isinstance(module, nn.Conv1d):
            inputs = module.weight[0].numel()
        else:
            continue
        gain = 0.3 if "res_unit" in name and "conv2" in name else 1.0
        nn.init.normal_(module.weight, std=gain * inputs**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    return with_weight_norm(vae)


def _convolutions(vae: AutoencoderOobleck) -> list[nn.Module]:
    kinds = (nn.Conv1d, nn.ConvTranspose1d)
    return [module for module in vae.modules() if isinstance(module, kinds)]


def without_weight_norm(vae: AutoencoderOobleck) -> AutoencoderOobleck:
    """The same autoencoder with plain weights, as it is trained."""
    for module in _convolutions(vae):
        remove_weight_norm(module)
    return vae


def with_weight_norm(vae: AutoencoderOobleck) -> AutoencoderOobleck:
    """The inverse of `without_weight_norm`, as it is shipped."""
    for module in _convolutions(vae):
        weight_norm(module)
    return vae


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """ACE-Step's scheduler: the pipeline shifts the times itself."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0)


def make_tokenizers() -> tuple[AceStepAudioTokenizer, AceStepAudioTokenDetokenizer]:
    """The tokenizer of latents, five frames a token, and its inverse."""
    sizes: dict[str, Any] = {
        "hidden_size": TOKEN_WIDTH,
        "intermediate_size": 2 * TOKEN_WIDTH,
        "audio_acoustic_hidden_dim": LATENT,
        "num_attention_pooler_hidden_layers": 2,
        "rope_theta": 10_000.0,
        **(HEADS | {"head_dim": 16}),
    }
    tokenizer = AceStepAudioTokenizer(fsq_dim=TOKEN_WIDTH, **sizes)
    return tokenizer, AceStepAudioTokenDetokenizer(**sizes)


def through_tokens(
    tokenizer: AceStepAudioTokenizer, detokenizer: AceStepAudioTokenDetokenizer, latents: Tensor
) -> Tensor:
    """Latents [batch, frames, channels], of whole tokens, as their tokens say them, with gradients.

    The rounding passes gradients on as they are. Without gradients it is what a cover starts from.
    """
    quantizer = tokenizer.quantizer
    patches = latents.unflatten(1, (-1, tokenizer.pool_window_size))
    pooled = tokenizer.attention_pooler(tokenizer.audio_acoustic_proj(patches))
    numbers = quantizer.project_in(pooled).float()
    bound = 1 + 1 / (quantizer._levels - 1)
    numbers = (numbers / bound).tanh() * bound
    numbers = numbers + (quantizer._quantize(numbers) - numbers).detach()
    return detokenizer(quantizer.project_out(numbers))


def _normalize(norm: RMSNorm | Qwen3RMSNorm, states: Tensor) -> Tensor:
    """`RMSNorm` in the type of the states; automatic casts would compute in f32."""
    eps = norm.eps if isinstance(norm, RMSNorm) else norm.variance_epsilon
    with torch.autocast(states.device.type, enabled=False):
        return F.rms_norm(states, norm.weight.shape, norm.weight.to(states.dtype), eps)


@cache
def _turns(
    tokens: int, width: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding; a graph may not make them."""
    with torch.no_grad():
        return _ace_step_rotary_freqs(tokens, width, theta, device, dtype)


class _TrainingAttention:
    """`AceStepAttnProcessor2_0` with keys and values of all heads, which has faster kernels for a mask."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        is_cross = attn.is_cross_attention and encoder_hidden_states is not None
        others = encoder_hidden_states if is_cross else hidden_states
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, (attn.heads, attn.head_dim)))
        key = attn.norm_k(attn.to_k(others).unflatten(-1, (attn.kv_heads, attn.head_dim)))
        value = attn.to_v(others).unflatten(-1, (attn.kv_heads, attn.head_dim))
        if not is_cross and image_rotary_emb is not None:
            query, key = (
                apply_rotary_emb(x, image_rotary_emb, use_real_unbind_dim=-2, sequence_dim=1)
                for x in (query, key)
            )
        copies = attn.heads // attn.kv_heads
        key, value = (x.repeat_interleave(copies, 2).transpose(1, 2) for x in (key, value))
        query = query.transpose(1, 2).to(value.dtype)
        out = F.scaled_dot_product_attention(
            query, key.to(value.dtype), value, attention_mask, scale=attn.scaling
        )
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


class Player(nn.Module):
    """Everything that the flow stage trains: text encoder, condition encoder and transformer."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.text = Qwen3Model(
            Qwen3Config(
                vocab_size=vocabulary,
                hidden_size=TEXT_WIDTH,
                intermediate_size=256,
                num_hidden_layers=4,
                max_position_embeddings=2048,
                rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
                bos_token_id=None,
                eos_token_id=None,
                tie_word_embeddings=True,
                use_cache=False,
                **HEADS,
            )
        )
        self.condition = AceStepConditionEncoder(
            hidden_size=WIDTH,
            intermediate_size=256,
            text_hidden_dim=TEXT_WIDTH,
            timbre_hidden_dim=LATENT,
            num_lyric_encoder_hidden_layers=1,
            num_timbre_encoder_hidden_layers=1,
            rope_theta=10_000.0,
            sliding_window=WINDOW,
            **HEADS,
        )
        self.transformer = AceStepTransformer1DModel(
            hidden_size=WIDTH,
            intermediate_size=384,
            num_hidden_layers=6,
            in_channels=3 * LATENT,
            audio_acoustic_hidden_dim=LATENT,
            rope_theta=1000.0,
            sliding_window=WINDOW,
            is_turbo=True,
            model_version="turbo",
            **HEADS,
        )
        phrase = melodies.MOST_NOTES + 1 + len(melodies.PITCHES) + len(melodies.LENGTHS)
        self.read_melody = nn.Linear(
            TEXT_WIDTH, melodies.MOST_PHRASES * phrase + len(melodies.WAVES)
        )
        """Training only: reads the melody off the text encoder."""
        self._start_as_identity()

    def _start_as_identity(self) -> None:
        """Zero the gates and the last layer, so that each block starts as the identity."""
        transformer = self.transformer
        layers = [transformer.proj_out_conv]
        layers += [transformer.time_embed.time_proj, transformer.time_embed_r.time_proj]
        layers += [block.cross_attn.to_out[0] for block in transformer.layers]
        for layer in layers:
            nn.init.zeros_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        for block in transformer.layers:
            nn.init.zeros_(block.scale_shift_table[:, 2::3].detach())

    def prepare_training(self) -> None:
        """Use the faster attention, and norms that are one operation."""
        attention = _TrainingAttention()
        for module in self.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(attention)
            if isinstance(module, (RMSNorm, Qwen3RMSNorm)):
                module.forward = MethodType(_normalize, module)

    def shipped(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that the exported model holds, by folder."""
        yield "text_encoder", self.text
        yield "condition_encoder", self.condition
        yield "transformer", self.transformer

    def read_text(self, ids: Tensor) -> Tensor:
        """States of captions [batch, tokens], padded on the right, which a causal encoder doesn't see."""
        states = self.text.embed_tokens(ids)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        turns = self.text.rotary_emb(states, places)
        for layer in self.text.layers:
            # Without a mask the attention of these classes is causal.
            out = layer(states, attention_mask=None, position_embeddings=turns)
            states = out[0] if isinstance(out, tuple) else out
        return self.text.norm(states)

    def read_timbre(self, latents: Tensor) -> Tensor:
        """The timbre of latents [batch, frames, channels], [batch, 1, width].

        The one layer's first token sees `WINDOW` frames and itself: those are all that is needed.
        """
        encoder = self.condition.timbre_encoder
        states = encoder.embed_tokens(latents[:, : WINDOW + 1])
        turns = _turns(
            states.shape[1], encoder.head_dim, encoder.rope_theta, states.device, states.dtype
        )
        for layer in encoder.layers:
            states = layer(states, turns)
        return encoder.norm(states)[:, :1]

    def read_lyrics(self, ids: Tensor) -> Tensor:
        """The states of lyrics [batch, tokens], all of one length."""
        encoder = self.condition.lyric_encoder
        states = encoder.embed_tokens(self.text.embed_tokens(ids))
        turns = _turns(
            states.shape[1], encoder.head_dim, encoder.rope_theta, states.device, states.dtype
        )
        for layer in encoder.layers:
            states = layer(states, turns)
        return encoder.norm(states)

    def conditions(
        self, states: Tensor, mask: Tensor, timbre: Tensor, lyric_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the transformer attends to, and which of it is there.

        `states` of `read_text` with their bool `mask` [batch, tokens]; `timbre` [batch, 1, width]; the ids of
        the lyrics that all share, [1, tokens].
        """
        words = self.condition.text_projector(states)
        sung = self.read_lyrics(lyric_ids).expand(len(words), -1, -1)
        there = mask.new_ones(len(words), sung.shape[1] + 1)
        whole = torch.cat([sung.to(words.dtype), timbre.to(words.dtype), words], 1)
        return self.transformer.condition_embedder(whole), torch.cat([there, mask], 1)

    def velocity(
        self, noisy: Tensor, times: Tensor, context: Tensor, condition: Tensor, mask: Tensor
    ) -> Tensor:
        """The transformer's output for latents [batch, frames, channels] at `times` [batch].

        `context` are the source's latents and its mask [batch, frames, 2 channels]; `condition` and `mask`
        are those of `conditions`.
        """
        transformer = self.transformer
        frames = noisy.shape[1]
        state, shifts = transformer.time_embed(times)
        state_r, shifts_r = transformer.time_embed_r(torch.zeros_like(times))
        state, shifts = state + state_r, shifts + shifts_r
        states = torch.cat([context, noisy], -1)
        states = F.pad(states, (0, 0, 0, frames % transformer.patch_size))
        states = transformer.proj_in_conv(states.transpose(1, 2)).transpose(1, 2)
        assert states.shape[1] <= WINDOW
        turns = _turns(
            states.shape[1],
            transformer.head_dim,
            transformer.rope_theta,
            states.device,
            states.dtype,
        )
        seen = mask[:, None, None]
        for block in transformer.layers:
            states = block(states, turns, shifts, None, condition, seen)
        shift, scale = (transformer.scale_shift_table + state[:, None]).chunk(2, 1)
        states = transformer.norm_out(states) * (1 + scale) + shift
        return transformer.proj_out_conv(states.transpose(1, 2)).transpose(1, 2)[:, :frames]
