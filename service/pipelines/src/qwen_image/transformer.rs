//! Qwen-Image's transformer: diffusers' `QwenImageTransformer2DModel`, with its tensor names.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor};
use ops::{Epilogue, Nonlinearity, Norm};

use super::config::TransformerConfig;
use super::layout::TIMESTEP;
use super::positions::{positions, rotations};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::linear::Linear;
use crate::mmdit::{
    Apart, Blocks, Buffers, CacheOfPass, Modulations, Modulator, Next, NoHook, Pass, SINUSOIDS, TwoLayers,
};
use crate::place::Place;
use crate::rotary::Rotations;
use crate::sampling::{Conditions, Length};
use crate::sinusoids::sinusoids_of;

/// Epsilon of the norm of the text.
const EPS: f64 = 1e-6;

/// The transformer over resident tensors. It holds handles only, and allocates nothing.
pub struct Transformer {
    config: TransformerConfig,
    picture_in: Linear,
    text_norm: Tensor,
    text_in: Linear,
    timestep: TwoLayers,
    blocks: Blocks,
    last_modulator: Modulator,
    last: Linear,
}

/// The modulation of every block for every step, which depends on the time alone: all conditions share it, and the third of the
/// weights that it is computed from is not read in the steps.
pub struct Modulated {
    modulations: Modulations,
    last: Vec<Tensor>,
    /// The row of time 0, which references take.
    at_zero: Option<usize>,
}

/// State of one condition that all steps share.
pub struct Conditioning {
    /// The normalized text, `[1, tokens, joint_attention_dim]`.
    sequence: Tensor,
    /// The tokens of all reference pictures, `[1, tokens, in_channels]`.
    references: Option<Tensor>,
    rotations: Rotations,
}

/// Inputs of the transformer other than the latent and the time.
#[derive(Clone, Copy)]
pub struct Prompted<'a> {
    /// Hidden states of the text encoder, `[1, tokens, joint_attention_dim]`.
    pub sequence: &'a Tensor,
    /// Places of the generated picture, and of the reference pictures in their order.
    pub places: &'a [Place],
    /// The tokens of all reference pictures in their order, `[1, tokens, in_channels]`.
    pub references: Option<&'a Tensor>,
}

/// Numbers of tokens of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCounts {
    /// Of the longest text of the conditions.
    pub text: usize,
    pub generated: usize,
    /// Of all reference pictures.
    pub references: usize,
}

impl TokenCounts {
    /// All tokens.
    pub fn all(self) -> usize {
        self.text + self.generated + self.references
    }
}

impl Transformer {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub fn new(config: &TransformerConfig, tensors: &ComponentTensors) -> Result<Transformer, MissingTensor> {
        Transformer::with_adapters(config, &AdaptedTensors::from(tensors))
    }

    /// As [`Transformer::new`], with adapters.
    pub(super) fn with_adapters(
        config: &TransformerConfig,
        tensors: &AdaptedTensors<'_>,
    ) -> Result<Transformer, MissingTensor> {
        let (width, blocks, text) = (config.width(), config.blocks(), config.joint_attention_dim);
        Ok(Transformer {
            picture_in: Linear::new(tensors, "img_in", config.in_channels, width)?,
            text_norm: tensors.shaped("txt_norm.weight", &[text])?,
            text_in: Linear::new(tensors, "txt_in", text, width)?,
            timestep: TwoLayers::new(tensors, TIMESTEP, (SINUSOIDS, width), Nonlinearity::Silu)?,
            blocks: Blocks::new(blocks, tensors)?,
            last_modulator: Modulator::new(tensors, "norm_out.linear", &blocks, 2)?,
            last: Linear::new(tensors, "proj_out", width, config.in_channels)?,
            config: config.clone(),
        })
    }

    /// The modulations of steps at these times, from 0 to 1 (the sigmas).
    ///
    /// # Errors
    /// Errors of the device; when a streamed block cannot be read.
    pub fn modulated(
        &self,
        times: &[f32],
        (dtype, device): (DType, &Device),
    ) -> Result<Modulated, StageError> {
        let mut times = times.to_vec();
        let at_zero = self.config.zero_cond_t.then_some(times.len());
        times.extend(at_zero.map(|_| 0.0));
        let embedded = sinusoids_of(&times, 1000.0, SINUSOIDS, (dtype, device))?;
        let vector = self.timestep.forward(&embedded)?;
        ops::activate(&vector, Nonlinearity::Silu)?;
        Ok(Modulated {
            modulations: self.blocks.modulate(&vector)?,
            last: self.last_modulator.forward(&vector)?,
            at_zero,
        })
    }

    /// Computes the state of a condition.
    ///
    /// # Errors
    /// When shapes do not match.
    pub fn condition(&self, prompted: &Prompted<'_>) -> Result<Conditioning, StageError> {
        let text = prompted.sequence;
        let sequence = Tensor::zeros(text.shape(), text.dtype(), text.device())?;
        let norm = Norm::Rms {
            weight: Some(&self.text_norm),
            eps: EPS,
        };
        ops::norm_modulate(text, norm, None, &sequence)?;
        let positions = positions(text.dim(1)?, prompted.places);
        Ok(Conditioning {
            sequence,
            references: prompted.references.cloned(),
            rotations: rotations(&positions, &self.config, text.device())?,
        })
    }

    /// Buffers of steps over so many tokens.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn step_buffers(
        &self,
        tokens: TokenCounts,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        let further = [&self.picture_in, &self.text_in, &self.last];
        let counts = (1, tokens.text, tokens.generated + tokens.references);
        Ok(StepBuffers {
            velocity: Tensor::zeros((1, tokens.generated, self.config.in_channels), dtype, device)?,
            buffers: self.blocks.buffers(counts, further, (dtype, device))?,
        })
    }

    /// The velocity at `latent` `[1, rows * columns, in_channels]` in the step of this row of the modulations, of the same shape.
    /// It is in the step buffers, valid until the next step. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of candle and of `go_on`.
    pub fn velocity<'a>(
        &self,
        latent: &Tensor,
        (modulated, row): (&Modulated, usize),
        conditioning: &Conditioning,
        step_buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        self.velocity_cached(
            latent,
            (modulated, row),
            (conditioning, None),
            step_buffers,
            go_on,
        )
    }

    /// As [`Transformer::velocity`], with the cache of the condition's passes.
    pub(super) fn velocity_cached<'a>(
        &self,
        latent: &Tensor,
        (modulated, row): (&Modulated, usize),
        (conditioning, cache): (&Conditioning, CacheOfPass<'_>),
        step_buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        // They are as long as the longest text.
        let longest = &step_buffers.buffers;
        let shorter = longest.text - conditioning.sequence.dim(1)?;
        let buffers = &longest.for_shorter_text(shorter);
        let scratch = buffers.scratch();
        let generated = buffers.generated(latent.dim(1)?)?;
        self.picture_in
            .forward_into(latent, Epilogue::None, &generated.hidden, scratch)?;
        let mut apart = None;
        if let Some(tokens) = &conditioning.references {
            let count = tokens.dim(1)?;
            let references = buffers.reference(count)?;
            self.picture_in
                .forward_into(tokens, Epilogue::None, &references.hidden, scratch)?;
            apart = modulated.at_zero.map(|row| Apart { count, row });
        }
        self.text_in.forward_into(
            &conditioning.sequence,
            Epilogue::None,
            &buffers.text()?.hidden,
            scratch,
        )?;
        let last = Next {
            // Scale before shift here (`AdaLayerNormContinuous`), shift before scale in every block.
            scale: modulated.last[0].narrow(0, row, 1)?,
            shift: modulated.last[1].narrow(0, row, 1)?,
            as_codes: false,
        };
        let pass = Pass {
            buffers,
            modulations: &modulated.modulations,
            rotations: &conditioning.rotations,
            step: row,
            apart,
            wanted: &generated,
            last: &last,
            cache,
        };
        self.blocks.run(&pass, &mut NoHook, go_on)?;
        self.last.forward_into(
            generated.last_normed(),
            Epilogue::None,
            &step_buffers.velocity,
            scratch,
        )?;
        Ok(&step_buffers.velocity)
    }
}

/// Buffers of a request's steps.
#[derive(Debug)]
pub struct StepBuffers {
    buffers: Buffers,
    velocity: Tensor,
}

impl StepBuffers {
    /// The same buffers, for attention as asked.
    pub(super) fn with_attention(self, attention: AttentionPrecision) -> StepBuffers {
        StepBuffers {
            buffers: self.buffers.with_attention(attention),
            ..self
        }
    }
}

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// Predicted activation bytes of `steps` steps over these tokens: the buffers, the modulation of all steps, and the text of each
/// condition. With a second one its rotations, and its velocity, which is kept and then combined. Not included are the scratch of
/// quantized layers ([`ops::linear_scratch`]), and the codes of rows for native fp8 products.
pub fn denoise_scratch(
    config: &TransformerConfig,
    tokens: TokenCounts,
    (steps, conditions): (u32, u32),
    dtype: DType,
) -> u64 {
    let (blocks, number) = (config.blocks(), dtype.size_in_bytes());
    let rows = steps + u32::from(config.zero_cond_t);
    let text = (tokens.text * config.joint_attention_dim * number) as u64;
    let further = match conditions {
        0 | 1 => 0,
        _ => {
            let numbers = tokens.generated * config.in_channels;
            let kept = Conditions::<Conditioning>::kept_bytes(numbers, dtype);
            blocks.rotations_bytes(tokens.all()) + text + kept + Length::OfPrompt.bytes(numbers, dtype)
        }
    };
    // The latent in f32 and in the computation dtype, and its velocity; the references.
    let latents = config.in_channels * (tokens.generated * (4 + 2 * number) + tokens.references * number);
    blocks.buffers_bytes(tokens.all(), dtype)
        + blocks.modulations_bytes(rows, dtype)
        + text
        + further
        + latents as u64
        + LIBRARIES
}
