//! The transformer of HunyuanVideo and FramePack: diffusers' `HunyuanVideoTransformer3DModel` and
//! `HunyuanVideoFramepackTransformer3DModel`, with their tensor names. Here text precedes the film's tokens, in the references
//! it follows them: attention does not depend on the order.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use gpu::MissingTensor;
use ops::{Epilogue, Nonlinearity};

use super::config::TransformerConfig;
use super::patches::{FULL, HALF, Patch, QUARTER};
use super::refiner::{Refiner, RefinerConditioning};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::linear::Linear;
use crate::mmdit::{Blocks, Buffers, CacheOfPass, Modulations, Modulator, Next, NoHook, Pass, StepEmbedder};
use crate::rotary::Rotations;
use crate::sampling::Conditions;
use crate::shared_stage::{CARDS, Half, OtherCard};

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// The transformer over resident tensors. It holds handles only, and allocates nothing.
pub(super) struct Transformer {
    config: TransformerConfig,
    latent_in: Linear,
    framepack: Option<FramePackLayers>,
    refiner: Refiner,
    embedder: StepEmbedder,
    blocks: Blocks,
    last_modulator: Modulator,
    last: Linear,
}

/// The layers that FramePack has in addition to HunyuanVideo's.
struct FramePackLayers {
    full: Linear,
    half: Linear,
    quarter: Linear,
    vision_up: Linear,
    vision_down: Linear,
}

/// The frames that a section of FramePack sees, as tokens of the patches of their resolution, `[1, tokens, channels * cells]`,
/// and the start picture.
pub(super) struct Seen<'a> {
    pub(super) quarter: &'a Tensor,
    pub(super) half: &'a Tensor,
    /// The start picture and one frame.
    pub(super) full: &'a Tensor,
    /// States of the picture encoder, `[1, tokens, image_proj_dim]`.
    pub(super) vision: &'a Tensor,
}

/// Inputs of the transformer other than the latent. All in the dtype of the card.
pub(super) struct Prompted<'a> {
    /// States of the text encoder, `[1, tokens, text_embed_dim]`, without padding.
    pub(super) text: &'a Tensor,
    /// Mean of the text's states, `[1, text_embed_dim]`.
    pub(super) mean: &'a Tensor,
    /// CLIP's pooled output, `[1, pooled_projection_dim]`.
    pub(super) pooled: &'a Tensor,
    pub(super) guidance: f32,
    /// The rotations of all tokens: text, seen frames, sampled frames.
    pub(super) rotations: Rotations,
    /// `None`: HunyuanVideo.
    pub(super) seen: Option<&'a EmbeddedSeen>,
}

/// Embedded states of the picture encoder, `[1, tokens, width]`, and embedded seen frames, `[1, tokens, width]`: the same under
/// every prompt.
#[derive(Clone)]
pub(super) struct EmbeddedSeen {
    vision: Tensor,
    frames: Tensor,
}

impl EmbeddedSeen {
    /// This card's half of the seen frames.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn half(&self, half: Half) -> candle_core::Result<EmbeddedSeen> {
        let own = half.own(self.frames.dim(1)?);
        Ok(EmbeddedSeen {
            vision: self.vision.clone(),
            frames: self.frames.narrow(1, own.start, own.len())?,
        })
    }
}

/// State shared by all steps.
pub(super) struct Conditioning {
    rotations: Rotations,
    modulations: Modulations,
    last: Vec<Tensor>,
    refiner: RefinerConditioning,
    seen: Option<EmbeddedSeen>,
}

/// Buffers of a request's steps.
pub(super) struct StepBuffers {
    buffers: Buffers,
    velocity: Tensor,
    /// Tokens that are seen and not sampled.
    seen: usize,
}

impl StepBuffers {
    /// The same buffers, for attention as asked.
    pub(super) fn with_attention(self, attention: AttentionPrecision) -> StepBuffers {
        StepBuffers {
            buffers: self.buffers.with_attention(attention),
            ..self
        }
    }

    /// The same buffers, for tokens that this card shares with another.
    pub(super) fn beside(self, other: Option<OtherCard>) -> StepBuffers {
        StepBuffers {
            buffers: self.buffers.beside(other),
            ..self
        }
    }
}

/// Counts of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenCounts {
    /// Tokens of the prompt.
    pub(super) text: usize,
    /// Tokens of the picture encoder.
    pub(super) vision: usize,
    /// Tokens of the history frames that are seen.
    pub(super) seen: usize,
    /// Tokens that are sampled.
    pub(super) sampled: usize,
    /// Tokens of seen and sampled frames that another card computes.
    pub(super) others: usize,
}

impl TokenCounts {
    /// The number of all tokens that this card computes.
    pub(super) fn all(&self) -> usize {
        self.text + self.vision + self.seen + self.sampled
    }

    /// This card's half. Both cards compute the tokens of the prompt and of the picture encoder.
    pub(super) fn half(&self, half: Half) -> TokenCounts {
        TokenCounts {
            seen: half.own(self.seen).len(),
            sampled: half.own(self.sampled).len(),
            others: half.others(self.seen).len() + half.others(self.sampled).len(),
            ..*self
        }
    }

    /// The ranges of all tokens that this card computes: text and picture encoder, seen frames, sampled frames.
    pub(super) fn ranges(&self, half: Half) -> [Range<usize>; 3] {
        let of = |first: usize, count: usize| {
            let own = half.own(count);
            first + own.start..first + own.end
        };
        let before = self.text + self.vision;
        [
            0..before,
            of(before, self.seen),
            of(before + self.seen, self.sampled),
        ]
    }

    /// The most bytes that are exchanged with the other card at a time: keys and values, or latents in f32.
    pub(super) fn exchanged_bytes(&self, config: &TransformerConfig, dtype: DType) -> u64 {
        let frames = (self.seen + self.sampled).max(self.others);
        let [_, keys_and_values] = config.blocks().bytes_of_others(frames, dtype);
        let latents = frames * config.token_width() * size_of::<f32>();
        keys_and_values.max(latents as u64)
    }

    /// Bytes that sharing the tokens with another card takes on this one.
    fn shared_bytes(&self, config: &TransformerConfig, dtype: DType) -> u64 {
        if self.others == 0 {
            return 0;
        }
        let [buffers, _] = config.blocks().bytes_of_others(self.others, dtype);
        // The whole latent is gathered for previews and at the end, from this card's part.
        let latents = (CARDS + 1) * (self.sampled + self.others) * config.token_width() * size_of::<f32>();
        buffers + ops::Exchange::allocated(self.exchanged_bytes(config, dtype)) + latents as u64
    }
}

impl Transformer {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(
        config: &TransformerConfig,
        tensors: &AdaptedTensors<'_>,
    ) -> Result<Transformer, MissingTensor> {
        let width = config.width();
        let patches = |name: &str, patch: Patch| {
            let [t, h, w] = patch;
            Linear::of_patches(tensors, name, &[config.in_channels, t, h, w], width)
        };
        let sizes = (config.pooled_projection_dim, width);
        let framepack = || -> Result<FramePackLayers, MissingTensor> {
            let vision = config.image_proj_dim;
            Ok(FramePackLayers {
                full: patches("clean_x_embedder.proj", FULL)?,
                half: patches("clean_x_embedder.proj_2x", HALF)?,
                quarter: patches("clean_x_embedder.proj_4x", QUARTER)?,
                vision_up: Linear::new(tensors, "image_projection.up", vision, 3 * width)?,
                vision_down: Linear::new(tensors, "image_projection.down", 3 * width, width)?,
            })
        };
        Ok(Transformer {
            latent_in: patches("x_embedder.proj", FULL)?,
            framepack: config.is_framepack().then(framepack).transpose()?,
            refiner: Refiner::new(config, tensors)?,
            embedder: StepEmbedder::new(tensors, "time_text_embed", sizes, config.guidance_embeds)?,
            blocks: Blocks::new(config.blocks(), tensors)?,
            last_modulator: Modulator::new(tensors, "norm_out.linear", &config.blocks(), 2)?,
            last: Linear::new(tensors, "proj_out", width, config.token_width())?,
            config: config.clone(),
        })
    }

    /// Computes the shared state. `sigmas` are those of the steps.
    ///
    /// # Errors
    /// When shapes do not match; when a streamed block cannot be read.
    pub(super) fn condition(
        &self,
        prompted: &Prompted<'_>,
        sigmas: &[f32],
    ) -> Result<Conditioning, StageError> {
        let vector = self
            .embedder
            .forward(sigmas, prompted.guidance, prompted.pooled)?;
        Ok(Conditioning {
            rotations: prompted.rotations.clone(),
            modulations: self.blocks.modulate(&vector)?,
            last: self.last_modulator.forward(&vector)?,
            refiner: self.refiner.condition(prompted.text, prompted.mean, sigmas)?,
            seen: prompted.seen.cloned(),
        })
    }

    /// Embeds what a section sees; `None` for HunyuanVideo.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn embedded(&self, seen: &Seen<'_>) -> candle_core::Result<Option<EmbeddedSeen>> {
        self.framepack
            .as_ref()
            .map(|layers| layers.embedded(seen))
            .transpose()
    }

    /// Buffers of steps.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn step_buffers(
        &self,
        tokens: &TokenCounts,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        let counts = (1, tokens.text + tokens.vision, tokens.seen + tokens.sampled);
        let further = self.refiner.layers().chain([&self.latent_in, &self.last]);
        let shape = (1, tokens.sampled, self.config.token_width());
        Ok(StepBuffers {
            velocity: Tensor::zeros(shape, dtype, device)?,
            buffers: self
                .blocks
                .buffers_beside(tokens.others, counts, further, (dtype, device))?,
            seen: tokens.seen,
        })
    }

    /// The velocity at `latent` `[1, tokens, 4 * channels]` in step `step` (from 0), of the same shape. It is in the step
    /// buffers, valid until the next step. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of candle and of `go_on`.
    pub(super) fn velocity<'a>(
        &self,
        latent: &Tensor,
        (conditioning, cache): (&Conditioning, CacheOfPass<'_>),
        step: usize,
        step_buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        let text = conditioning.refiner.tokens()?;
        let vision = match &conditioning.seen {
            Some(seen) => seen.vision.dim(1)?,
            None => 0,
        };
        // They are as long as the longest text.
        let longest = &step_buffers.buffers;
        let buffers = &longest.for_shorter_text(longest.text - text - vision);
        let scratch = buffers.scratch();
        let refined = buffers.rows(vision, text)?;
        self.refiner
            .forward(&conditioning.refiner, step, &refined, scratch)?;
        if let Some(embedded) = &conditioning.seen {
            ops::copy_rows(&embedded.vision, &buffers.rows(0, vision)?.hidden)?;
            let seen = buffers.rows(buffers.text, step_buffers.seen)?;
            ops::copy_rows(&embedded.frames, &seen.hidden)?;
        }
        let sampled = buffers.rows(buffers.text + step_buffers.seen, latent.dim(1)?)?;
        self.latent_in
            .forward_into(latent, Epilogue::None, &sampled.hidden, scratch)?;
        let last = Next {
            // Scale before shift here (`AdaLayerNormContinuous`), shift before scale in every block.
            scale: conditioning.last[0].narrow(0, step, 1)?,
            shift: conditioning.last[1].narrow(0, step, 1)?,
            as_codes: false,
        };
        let pass = Pass {
            buffers,
            modulations: &conditioning.modulations,
            rotations: &conditioning.rotations,
            step,
            apart: None,
            wanted: &sampled,
            last: &last,
            cache,
        };
        self.blocks.run(&pass, &mut NoHook, go_on)?;
        self.last.forward_into(
            sampled.last_normed(),
            Epilogue::None,
            &step_buffers.velocity,
            scratch,
        )?;
        Ok(&step_buffers.velocity)
    }
}

impl FramePackLayers {
    /// The tokens of the picture encoder, and those of the seen frames, `[1, tokens, width]` each.
    fn embedded(&self, seen: &Seen<'_>) -> candle_core::Result<EmbeddedSeen> {
        let hidden = self.vision_up.forward(seen.vision)?;
        ops::activate(&hidden, Nonlinearity::Silu)?;
        let vision = self.vision_down.forward(&hidden)?;
        let parts = [
            self.quarter.forward(seen.quarter)?,
            self.half.forward(seen.half)?,
            self.full.forward(seen.full)?,
        ];
        let tokens = parts.iter().map(|part| part.dims()[1]).sum::<usize>();
        let all = Tensor::zeros((1, tokens, vision.dim(2)?), vision.dtype(), vision.device())?;
        let mut first = 0;
        for part in &parts {
            let count = part.dim(1)?;
            ops::copy_rows(part, &all.narrow(1, first, count)?)?;
            first += count;
        }
        Ok(EmbeddedSeen { vision, frames: all })
    }
}

/// Predicted further bytes where every step predicts under a second condition, in the same buffers: its text, rotations,
/// modulations and gates, and its velocity, which is kept while that of the prompt is computed.
pub(super) fn negative_scratch(
    config: &TransformerConfig,
    tokens: &TokenCounts,
    steps: u32,
    dtype: DType,
) -> u64 {
    let (blocks, number) = (config.blocks(), dtype.size_in_bytes());
    let gates = 2 * config.num_refiner_layers * config.width() * steps as usize * number;
    let text = tokens.text * config.text_embed_dim * number;
    blocks.rotations_bytes(tokens.all())
        + blocks.modulations_bytes(steps, dtype)
        + (gates + text) as u64
        + Conditions::<Conditioning>::kept_bytes(tokens.sampled * config.token_width(), dtype)
}

/// Predicted activation bytes of `steps` steps over these tokens: the buffers, the modulation of all steps, the embedded
/// inputs and the latent. Not included are the scratch of quantized layers, and the codes of rows for native fp8 products.
pub(super) fn denoise_scratch(
    config: &TransformerConfig,
    tokens: &TokenCounts,
    steps: u32,
    dtype: DType,
) -> u64 {
    let (blocks, number) = (config.blocks(), dtype.size_in_bytes());
    let width = config.width();
    let gates = 2 * config.num_refiner_layers * width * steps as usize * number;
    let embedded = (tokens.vision + 2 * tokens.seen) * width * number
        + tokens.vision * (3 * width + config.image_proj_dim) * number
        + tokens.seen * config.in_channels * 256 * number;
    let latents = tokens.sampled * config.token_width() * (4 + 2 * number)
        + tokens.text * config.text_embed_dim * number;
    blocks.buffers_bytes(tokens.all(), dtype)
        + blocks.modulations_bytes(steps, dtype)
        + (gates + embedded + latents) as u64
        + tokens.shared_bytes(config, dtype)
        + LIBRARIES
}
