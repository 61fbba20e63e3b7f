//! FLUX.2's transformer: diffusers' `Flux2Transformer2DModel`, with its tensor names.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor};
use ops::{Epilogue, Nonlinearity};

use super::config::TransformerConfig;
use super::layout::TIMESTEP;
use super::positions::{positions, rotations};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::linear::Linear;
use crate::mmdit::{Blocks, Buffers, CacheOfPass, Modulations, Modulator, Next, NoHook, Pass, SINUSOIDS};
use crate::place::Place;
use crate::rotary::Rotations;
use crate::sampling::Conditions;
use crate::sinusoids::sinusoids;

/// The transformer over resident tensors. It holds handles only, and allocates nothing.
pub struct Transformer {
    config: TransformerConfig,
    picture_in: Linear,
    text_in: Linear,
    /// Linear, SiLU, linear.
    timestep: [Linear; 2],
    blocks: Blocks,
    last_modulator: Modulator,
    last: Linear,
}

/// State shared by all steps of a request: the encoded text, rotations, and the modulation of the blocks for every step.
pub struct Conditioning {
    /// `[1, tokens, joint_attention_dim]`.
    sequence: Tensor,
    /// The tokens of all reference pictures, `[1, tokens, in_channels]`.
    references: Option<Tensor>,
    rotations: Rotations,
    modulations: Modulations,
    last: Vec<Tensor>,
}

/// Inputs of the transformer other than the latent.
#[derive(Clone, Copy)]
pub struct Prompted<'a> {
    /// Hidden states of the text encoder, `[1, tokens, joint_attention_dim]`.
    pub sequence: &'a Tensor,
    /// Place of the generated picture.
    pub picture: Place,
    /// Places of reference pictures.
    pub places: &'a [Place],
    /// The tokens of all reference pictures in their order, `[1, tokens, in_channels]`.
    pub references: Option<&'a Tensor>,
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
        let (width, blocks) = (config.width(), config.blocks());
        let linear = |name: &str, inputs, outputs| Linear::without_bias(tensors, name, inputs, outputs);
        Ok(Transformer {
            picture_in: linear("x_embedder", config.in_channels, width)?,
            text_in: linear("context_embedder", config.joint_attention_dim, width)?,
            timestep: [
                linear(&format!("{TIMESTEP}.linear_1"), SINUSOIDS, width)?,
                linear(&format!("{TIMESTEP}.linear_2"), width, width)?,
            ],
            blocks: Blocks::new(blocks, tensors)?,
            last_modulator: Modulator::new(tensors, "norm_out.linear", &blocks, 2)?,
            last: linear("proj_out", width, config.in_channels)?,
            config: config.clone(),
        })
    }

    /// Computes the shared state. `times` are the timesteps, from 0 to 1 (the sigmas), one per step.
    ///
    /// # Errors
    /// When shapes do not match; when a streamed block cannot be read.
    pub fn condition(&self, prompted: &Prompted<'_>, times: &[f32]) -> Result<Conditioning, StageError> {
        let (dtype, device) = (prompted.sequence.dtype(), prompted.sequence.device());
        let thousandths: Vec<f32> = times.iter().map(|time| time * 1000.0).collect();
        let [first, second] = &self.timestep;
        let hidden = first.forward(&sinusoids(&thousandths, SINUSOIDS, dtype, device)?)?;
        ops::activate(&hidden, Nonlinearity::Silu)?;
        let vector = second.forward(&hidden)?;
        ops::activate(&vector, Nonlinearity::Silu)?;
        let places = positions(prompted.sequence.dim(1)?, prompted.picture, prompted.places);
        Ok(Conditioning {
            sequence: prompted.sequence.clone(),
            references: prompted.references.cloned(),
            rotations: rotations(&places, &self.config, device)?,
            modulations: self.blocks.modulate(&vector)?,
            last: self.last_modulator.forward(&vector)?,
        })
    }

    /// Buffers of steps, with these token counts of text, of the generated picture and of all reference pictures.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn step_buffers(
        &self,
        text: usize,
        (generated, references): (usize, usize),
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        let further = [&self.picture_in, &self.text_in, &self.last];
        let counts = (1, text, generated + references);
        Ok(StepBuffers {
            velocity: Tensor::zeros((1, generated, self.config.in_channels), dtype, device)?,
            buffers: self.blocks.buffers(counts, further, (dtype, device))?,
        })
    }

    /// The velocity at `latent` `[1, rows * columns, in_channels]` in step `step` (from 0), of the same shape. It is in the step
    /// buffers, valid until the next step. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of candle and of `go_on`.
    pub fn velocity<'a>(
        &self,
        latent: &Tensor,
        conditioning: &Conditioning,
        step: usize,
        step_buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        self.velocity_cached(latent, (conditioning, None), step, step_buffers, go_on)
    }

    /// As [`Transformer::velocity`], with the cache of the condition's passes.
    pub(super) fn velocity_cached<'a>(
        &self,
        latent: &Tensor,
        (conditioning, cache): (&Conditioning, CacheOfPass<'_>),
        step: usize,
        step_buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        let buffers = &step_buffers.buffers;
        let scratch = buffers.scratch();
        let generated = buffers.generated(latent.dim(1)?)?;
        self.picture_in
            .forward_into(latent, Epilogue::None, &generated.hidden, scratch)?;
        if let Some(tokens) = &conditioning.references {
            let references = buffers.reference(tokens.dim(1)?)?;
            self.picture_in
                .forward_into(tokens, Epilogue::None, &references.hidden, scratch)?;
        }
        let text = buffers.text()?;
        self.text_in
            .forward_into(&conditioning.sequence, Epilogue::None, &text.hidden, scratch)?;
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

/// A latent `[1, channels, rows, columns]` as tokens `[1, rows * columns, channels]`: `Flux2KleinPipeline._pack_latents`.
///
/// # Errors
/// Errors of candle.
pub(super) fn pack(latent: &Tensor) -> candle_core::Result<Tensor> {
    latent.flatten_from(2)?.transpose(1, 2)?.contiguous()
}

/// Tokens back to a latent.
///
/// # Errors
/// When there are not `rows * columns` tokens.
pub(super) fn unpack(tokens: &Tensor, place: Place) -> candle_core::Result<Tensor> {
    let (batch, _, channels) = tokens.dims3()?;
    tokens
        .transpose(1, 2)?
        .contiguous()?
        .reshape((batch, channels, place.rows, place.columns))
}

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// Predicted activation bytes of `steps` steps over `text` and `generated` tokens and those of references: the buffers, and the
/// modulation of all steps. With a second condition its text, rotations and modulations, and its velocity, which is kept. Not
/// included are the scratch of quantized layers ([`ops::linear_scratch`]), and the codes of rows for native fp8 products.
pub fn denoise_scratch(
    config: &TransformerConfig,
    text: usize,
    (generated, references): (usize, usize),
    (steps, conditions): (u32, u32),
    dtype: DType,
) -> u64 {
    let (blocks, number) = (config.blocks(), dtype.size_in_bytes());
    let tokens = text + generated + references;
    let buffers = blocks.buffers_bytes(tokens, dtype);
    let of_condition =
        blocks.modulations_bytes(steps, dtype) + (text * config.joint_attention_dim * number) as u64;
    let further = match conditions {
        0 | 1 => 0,
        _ => {
            let kept = Conditions::<Conditioning>::kept_bytes(generated * config.in_channels, dtype);
            blocks.rotations_bytes(tokens) + of_condition + kept
        }
    };
    // The latent in f32 and in the computation dtype, and its velocity; the references.
    let latents = config.in_channels * (generated * (4 + 2 * number) + references * number);
    buffers + of_condition + further + latents as u64 + LIBRARIES
}
