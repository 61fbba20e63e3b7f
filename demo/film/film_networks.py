"""The networks of the film model, and their batched form for training.

The shipped modules are diffusers' and transformers' own classes. The pipeline runs the transformer one film
at a time, with one padding and a cropped text; `Filmer.velocity` computes the same for a batch of sections
with different paddings and prompts, with batched rotary tables and a mask over the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType

import film_tokens
import films
import torch
import torch._dynamo
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoFramepackTransformer3DModel,
)
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import HunyuanVideoCausalConv3d
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

LATENT_CHANNELS = 16
LATENT_SIDE = films.FRAME_SIZE // 8
HISTORY = (1, 2, 16)
MAX_PADDING = 3
SHIFT = 3.0
"""The scheduler's shift of the noise levels."""
LLAMA_WIDTH, CLIP_WIDTH, SIGLIP_WIDTH = 64, 64, 64
PROMPT_TOKENS = 24
"""Room for a prompt's tokens after the template's head, the end of turn included."""
PLACES = 9
STEPS = 8
"""Sampling steps of a section."""
GUIDANCE = 6.0


def make_vae() -> AutoencoderKLHunyuanVideo:
    """HunyuanVideo's autoencoder (8x in space, 4x in time, 16 channels) with four small blocks."""
    return AutoencoderKLHunyuanVideo(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 16, 32, 40),
        layers_per_block=1,
        norm_num_groups=8,
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """HunyuanVideo's scheduler with a shift for small films."""
    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)


def speed_up(vae: AutoencoderKLHunyuanVideo) -> None:
    """Replace slow operations of the autoencoder by equal ones, for training.

    Replication padding has a slow backward pass, and automatic casts would normalize in f32.
    """

    def pad(conv: HunyuanVideoCausalConv3d, x: Tensor) -> Tensor:
        side, _, _, _, before, _ = conv.time_causal_padding
        if side:
            x = torch.cat([x[..., :1], x, x[..., -1:]], -1)
            x = torch.cat([x[..., :1, :], x, x[..., -1:, :]], -2)
        if before:
            x = torch.cat([x[:, :, :1]] * before + [x], 2)
        return conv.conv(x)

    def normalize(norm: nn.GroupNorm, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
            return F.group_norm(x, norm.num_groups, weight, bias, norm.eps)

    for module in vae.modules():
        if isinstance(module, HunyuanVideoCausalConv3d):
            module.forward = MethodType(pad, module)
        elif isinstance(module, nn.GroupNorm):
            module.forward = MethodType(normalize, module)


class _BatchedAttention:
    """`HunyuanVideoAttnProcessor2_0` with a rotary table for each film of the batch."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        picture = hidden_states.shape[1]
        double = attn.add_q_proj is not None

        def heads(x: Tensor, norm: nn.Module | None = None) -> Tensor:
            x = x.unflatten(2, (attn.heads, -1))
            return (x if norm is None else norm(x)).transpose(1, 2)

        def turn(x: Tensor) -> Tensor:
            cos, sin = image_rotary_emb  # [batch, 1, tokens, width]
            real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([-imaginary, real], -1).flatten(-2)
            return (x * cos + turned * sin).to(x.dtype)

        whole = torch.cat([hidden_states, encoder_hidden_states], 1)
        source = hidden_states if double else whole
        query = heads(attn.to_q(source), attn.norm_q)
        key = heads(attn.to_k(source), attn.norm_k)
        value = heads(attn.to_v(source))
        query = torch.cat([turn(query[:, :, :picture]), query[:, :, picture:]], 2)
        key = torch.cat([turn(key[:, :, :picture]), key[:, :, picture:]], 2)
        if double:
            text_query = heads(attn.add_q_proj(encoder_hidden_states), attn.norm_added_q)
            text_key = heads(attn.add_k_proj(encoder_hidden_states), attn.norm_added_k)
            query, key = torch.cat([query, text_query], 2), torch.cat([key, text_key], 2)
            value = torch.cat([value, heads(attn.add_v_proj(encoder_hidden_states))], 2)
        kind = value.dtype
        seen = F.scaled_dot_product_attention(
            query.to(kind), key.to(kind), value, attn_mask=attention_mask
        )
        seen = seen.transpose(1, 2).flatten(2)
        first, second = seen[:, :picture], seen[:, picture:]
        if double:
            first, second = attn.to_out[0](first), attn.to_add_out(second)
        return first, second


class Filmer(nn.Module):
    """The text encoders, the image encoder and the transformer, trained jointly."""

    def __init__(self, llama_vocabulary: int, clip_vocabulary: int) -> None:
        super().__init__()
        # The pipeline reads the state after all but the last two layers: those two are not trained.
        self.llama = LlamaModel(
            LlamaConfig(
                vocab_size=llama_vocabulary,
                hidden_size=LLAMA_WIDTH,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=512,
                rms_norm_eps=1e-5,
                rope_theta=10_000.0,
                tie_word_embeddings=False,
                bos_token_id=llama_vocabulary - 6,
                eos_token_id=llama_vocabulary - 2,
                pad_token_id=llama_vocabulary - 1,
            )
        )
        for name, parameter in self.llama.named_parameters():
            if name.startswith(("layers.2.", "layers.3.")):
                parameter.data.fill_(1.0 if "layernorm" in name else 0.0)
                parameter.requires_grad_(False)
        self.llama.norm.requires_grad_(False)
        self.clip = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=clip_vocabulary,
                hidden_size=CLIP_WIDTH,
                intermediate_size=128,
                projection_dim=CLIP_WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=film_tokens.CLIP_LENGTH,
                hidden_act="quick_gelu",
                bos_token_id=0,
                eos_token_id=2,
                pad_token_id=1,
            )
        )
        self.siglip = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=SIGLIP_WIDTH,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=films.FRAME_SIZE,
                patch_size=16,
            )
        )
        self.transformer = HunyuanVideoFramepackTransformer3DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=4,
            attention_head_dim=32,
            num_layers=2,
            num_single_layers=3,
            num_refiner_layers=1,
            text_embed_dim=LLAMA_WIDTH,
            pooled_projection_dim=CLIP_WIDTH,
            rope_axes_dim=(8, 12, 12),
            has_image_proj=True,
            image_proj_dim=SIGLIP_WIDTH,
            has_clean_x_embedder=True,
        )
        self._start_as_identity()
        self.read_places = nn.Linear(LLAMA_WIDTH + CLIP_WIDTH, PLACES)
        """Training only: reads the end place off the text encoders."""
        self._tables: tuple[Tensor, Tensor] | None = None

    def _start_as_identity(self) -> None:
        """Zero the modulations and the last layer, so that each block starts as the identity."""
        film = self.transformer
        layers = [film.proj_out, film.norm_out.linear]
        for block in film.transformer_blocks:
            layers += [block.norm1.linear, block.norm1_context.linear]
        layers += [block.norm.linear for block in film.single_transformer_blocks]
        for layer in layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def prepare_training(self, compiled: bool) -> None:
        """Use the batched attention in the transformer's blocks, and compile them one by one."""
        blocks = [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]
        attention = _BatchedAttention()
        for block in blocks:
            block.attn.processor = attention
        if compiled:
            torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is
            blocks += [*self.llama.layers[:2], self.transformer.context_embedder.token_refiner]
            for block in blocks:
                block.compile(dynamic=False)

    def shipped(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that the exported model holds, by folder."""
        yield "text_encoder", self.llama
        yield "text_encoder_2", self.clip
        yield "image_encoder", self.siglip
        yield "transformer", self.transformer

    def read_text(self, llama_ids: Tensor, clip_ids: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """LLaMA's states of the prompts' tokens [batch, tokens, 64] and CLIP's pooled state.

        `head` are the template's ids before the prompt; prompts are padded on the right, which causal
        encoders don't see.
        """
        ids = torch.cat([head.expand(len(llama_ids), -1), llama_ids], 1)
        states = self.llama.embed_tokens(ids)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        turns = self.llama.rotary_emb(states, places)
        for layer in self.llama.layers[:2]:
            # Without a mask the attention of these classes is causal.
            out = layer(states, attention_mask=None, position_embeddings=turns)
            states = out[0] if isinstance(out, tuple) else out
        return states[:, head.shape[0] :], self.clip(clip_ids).pooler_output

    @torch.no_grad()
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines for each padding: [paddings, 1, tokens, head width]."""
        if self._tables is None:
            film = self.transformer
            device = film.proj_out.weight.device
            side = LATENT_SIDE // 2
            cosines, sines = [], []
            for padding in range(MAX_PADDING + 1):
                sizes = [1, padding * films.WINDOW, films.WINDOW, *HISTORY]
                first, _, window, one, two, four = torch.arange(sum(sizes)).split(sizes)
                parts = []
                for index, factor in (
                    (four, 4),
                    (two, 2),
                    (torch.cat([first, one]), 1),
                    (window, 1),
                ):
                    table = film.rope(index, LATENT_SIDE, LATENT_SIDE, device)
                    if factor > 1:
                        table = film._pad_rotary_emb(table, side, side, (factor,) * 3)
                    parts.append(table)
                cosines.append(torch.cat([part[0] for part in parts]))
                sines.append(torch.cat([part[1] for part in parts]))
            self._tables = torch.stack(cosines)[:, None], torch.stack(sines)[:, None]
        return self._tables

    def velocity(
        self,
        noisy: Tensor,
        sigmas: Tensor,
        padding: Tensor,
        first: Tensor,
        history: Tensor,
        text: Tensor,
        text_mask: Tensor,
        pooled: Tensor,
        pictures: Tensor,
        guidance: Tensor,
    ) -> Tensor:
        """The transformer's output for sections with different paddings and texts.

        `noisy` is [batch, 16, 9, 8, 8], `first` the start picture's latent [batch, 16, 1, 8, 8], `history`
        the 19 latents after the section, `pictures` the start pictures in -1 to 1, `guidance` the scale.
        """
        film = self.transformer
        one, two, four = history.split(HISTORY, 2)
        clean, two, four = film.clean_x_embedder(torch.cat([first, one], 2), two, four)
        window = film.x_embedder(noisy)
        states = torch.cat([four, two, clean, window], 1)
        cos, sin = self.rotary_tables()
        tables = (cos[padding], sin[padding])
        timestep = 1000 * sigmas
        temb, _ = film.time_text_embed(timestep, pooled, 1000 * guidance)
        words = film.context_embedder(text, timestep, text_mask)
        seen = film.image_projection(self.siglip(pixel_values=pictures).last_hidden_state)
        context = torch.cat([seen, words], 1)
        known = text_mask.new_ones(len(noisy), states.shape[1] + seen.shape[1])
        mask = torch.cat([known, text_mask], 1).bool()[:, None, None]
        for block in (*film.transformer_blocks, *film.single_transformer_blocks):
            states, context = block(states, context, temb, mask, tables)
        states = film.proj_out(film.norm_out(states[:, -window.shape[1] :], temb))
        side = LATENT_SIDE // 2
        states = states.view(len(noisy), films.WINDOW, side, side, LATENT_CHANNELS, 2, 2)
        return states.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)
