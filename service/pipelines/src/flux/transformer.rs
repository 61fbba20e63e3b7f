//! FLUX's transformer: diffusers' `FluxTransformer2DModel`, with its tensor names.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor};
use ops::Epilogue;

use super::config::TransformerConfig;
use super::trunk::{Trunk, TrunkConditioning};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::linear::Linear;
use crate::mmdit::{BlockHook, Buffers, CacheOfPass, Modulator, Next, NoHook};
use crate::sampling::Conditions;

/// The transformer over resident tensors. It holds handles only, and allocates nothing.
pub struct Transformer {
    trunk: Trunk,
    last_modulator: Modulator,
    last: Linear,
}

/// State shared by all steps of a request: rotations, and the modulation of every block for every step (from a
/// quarter of the weights, which are only used here).
pub struct Conditioning {
    trunk: TrunkConditioning,
    /// Packed latent of a reference picture.
    reference: Option<Tensor>,
    last: Vec<Tensor>,
}

/// Inputs of the transformer other than the latent.
pub struct Prompted<'a> {
    /// T5's last hidden states, `[1, tokens, joint_attention_dim]`.
    pub sequence: &'a Tensor,
    /// CLIP's pooled output, `[1, pooled_projection_dim]`.
    pub pooled: &'a Tensor,
    /// Guidance scale; ignored by models without guidance embedding.
    pub guidance: f32,
    /// Rows of picture tokens: 1/16 of the picture's height.
    pub rows: usize,
    /// Columns of picture tokens: 1/16 of the picture's width.
    pub columns: usize,
    /// A picture to edit (Kontext).
    pub reference: Option<Reference<'a>>,
}

impl Prompted<'_> {
    /// The inputs with the encodings of another prompt.
    pub(super) fn of<'a>(&'a self, pooled: &'a Tensor, sequence: &'a Tensor) -> Prompted<'a> {
        Prompted {
            pooled,
            sequence,
            ..*self
        }
    }
}

/// A reference picture, whose tokens follow those of the generated picture.
#[derive(Clone, Copy, Debug)]
pub struct Reference<'a> {
    /// The reference's packed latent, `[1, rows * columns, in_channels]`.
    pub tokens: &'a Tensor,
    pub rows: usize,
    pub columns: usize,
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
        let width = config.width();
        Ok(Transformer {
            trunk: Trunk::new(config, tensors)?,
            last_modulator: Modulator::new(tensors, "norm_out.linear", &config.blocks(), 2)?,
            last: Linear::new(tensors, "proj_out", width, config.out_width())?,
        })
    }

    /// Computes the shared state. `times` are the timesteps, from 0 to 1 (the sigmas), one per step.
    ///
    /// # Errors
    /// When shapes do not match; when a streamed block cannot be read.
    pub fn condition(&self, prompted: &Prompted<'_>, times: &[f32]) -> Result<Conditioning, StageError> {
        let vector = self.trunk.embedded(prompted, times)?;
        Ok(Conditioning {
            trunk: self.trunk.condition(prompted, &vector, None)?,
            reference: prompted.reference.map(|reference| reference.tokens.clone()),
            last: self.last_modulator.forward(&vector)?,
        })
    }

    /// Buffers of steps for a batch of pictures, with these token counts of text and of each picture.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn step_buffers(
        &self,
        batch: usize,
        text: usize,
        picture: usize,
        on: (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        self.step_buffers_beside(batch, text, (picture, 0), on)
    }

    /// As [`Transformer::step_buffers`], with tokens of reference pictures in addition to those of the generated picture.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn step_buffers_beside(
        &self,
        batch: usize,
        text: usize,
        (generated, reference): (usize, usize),
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        let picture = generated + reference;
        let shape = (batch, generated, self.trunk.config.out_width());
        Ok(StepBuffers {
            velocity: Tensor::zeros(shape, dtype, device)?,
            buffers: self
                .trunk
                .buffers((batch, text, picture), [&self.last], (dtype, device))?,
        })
    }

    /// The velocity at `latent` `[batch, rows * columns, in_channels]` in step `step` (from 0), `[batch, rows * columns,
    /// out_width]`. It is in the step buffers, valid until the next step. `go_on` is called before every block.
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
        self.velocity_beside(
            latent,
            (conditioning, None),
            step,
            step_buffers,
            &mut NoHook,
            go_on,
        )
    }

    /// As [`Transformer::velocity`], with the residuals of ControlNets, and the cache of the condition's passes.
    ///
    /// # Errors
    /// Errors of [`Transformer::velocity`].
    pub(super) fn velocity_beside<'a>(
        &self,
        latent: &Tensor,
        (conditioning, cache): (&Conditioning, CacheOfPass<'_>),
        step: usize,
        step_buffers: &'a StepBuffers,
        beside: &mut dyn BlockHook,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        let buffers = &step_buffers.buffers;
        let scratch = buffers.scratch();
        let generated = buffers.generated(latent.dim(1)?)?;
        self.trunk
            .picture_in
            .forward_into(latent, Epilogue::None, &generated.hidden, scratch)?;
        if let Some(tokens) = &conditioning.reference {
            let reference = buffers.reference(tokens.dim(1)?)?;
            self.trunk
                .picture_in
                .forward_into(tokens, Epilogue::None, &reference.hidden, scratch)?;
        }
        let last = Next {
            // Scale before shift here (`AdaLayerNormContinuous`), shift before scale in every block.
            scale: conditioning.last[0].narrow(0, step, 1)?,
            shift: conditioning.last[1].narrow(0, step, 1)?,
            as_codes: false,
        };
        self.trunk.run(
            buffers,
            &conditioning.trunk,
            step,
            (&generated, &last, cache),
            beside,
            go_on,
        )?;
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

/// A latent `[1, channels, 2 rows, 2 columns]` as tokens `[1, rows * columns, 4 * channels]`:
/// `FluxPipeline._pack_latents`.
///
/// # Errors
/// When a dimension is odd.
pub fn pack(latent: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = latent.dims4()?;
    if height % 2 != 0 || width % 2 != 0 {
        candle_core::bail!("a latent of {height} x {width} does not divide into squares of two");
    }
    latent
        .reshape((batch, channels, height / 2, 2, width / 2, 2))?
        .permute((0, 2, 4, 1, 3, 5))?
        .reshape((batch, (height / 2) * (width / 2), channels * 4))
}

/// Tokens `[batch, rows * columns, 4 * channels]` back to a latent `[batch, channels, 2 * rows, 2 * columns]` of the
/// same dtype: `FluxPipeline._unpack_latents`.
///
/// # Errors
/// When there are not `rows * columns` tokens.
pub fn unpack(tokens: &Tensor, rows: usize, columns: usize) -> candle_core::Result<Tensor> {
    let (batch, _, width) = tokens.dims3()?;
    tokens
        .reshape((batch, rows, columns, width / 4, 2, 2))?
        .permute((0, 3, 1, 4, 2, 5))?
        .reshape((batch, width / 4, rows * 2, columns * 2))
}

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// Predicted further bytes where every step predicts under a second condition, in the same buffers: its text, rotations and
/// modulations, and its velocity, which is kept while that of the prompt is computed.
pub fn negative_scratch(
    config: &TransformerConfig,
    text: usize,
    picture: usize,
    steps: u32,
    dtype: DType,
) -> u64 {
    let tokens = text + picture;
    let text_bytes = text * config.joint_attention_dim * dtype.size_in_bytes();
    let kept = Conditions::<Conditioning>::kept_bytes(picture * config.out_width(), dtype);
    let blocks = config.blocks();
    blocks.rotations_bytes(tokens) + blocks.modulations_bytes(steps, dtype) + text_bytes as u64 + kept
}

/// Predicted activation bytes of `steps` steps over `text` and `picture` tokens: the buffers, the workspace of
/// attention, and the modulation of all steps. Not included are the scratch of quantized layers
/// ([`ops::linear_scratch`]), and the codes of rows for native fp8 products.
pub fn denoise_scratch(
    config: &TransformerConfig,
    text: usize,
    picture: usize,
    steps: u32,
    dtype: DType,
) -> u64 {
    let (blocks, number) = (config.blocks(), dtype.size_in_bytes());
    let buffers = blocks.buffers_bytes(text + picture, dtype);
    let modulations = blocks.modulations_bytes(steps, dtype);
    // The latent in f32 and in the computation dtype, and its velocity; its conditioning; the encoded text.
    let input = if config.takes_mask() {
        config.in_channels
    } else {
        0
    };
    let latents = picture * (config.out_width() * (4 + 2 * number) + input * number)
        + text * config.joint_attention_dim * number;
    buffers + modulations + latents as u64 + LIBRARIES
}
