//! Z-Image's transformer: diffusers' `ZImageTransformer2DModel`, with its tensor names.
//!
//! Text and picture are refined separately, then go through all blocks together. The refined text is the same in
//! every step, so it is computed once per request.

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, WeightStream};
use ops::{Epilogue, Nonlinearity, Norm};

use super::blocks::{Block, Modulations};
use super::buffers::{Layers, Next, ZImageBuffers};
use super::config::{PATCH, TransformerConfig};
use super::layout::{Blocks, LAST, PATCH_IN};
use super::positions::{Lengths, positions, rotations};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::checkpoint::numbered;
use crate::linear::{Linear, largest_scratch};
use crate::rotary::Rotations;
use crate::sampling::Conditions;
use crate::sinusoids::sinusoids;

/// Width of the sinusoidal embedding of timesteps.
pub(super) const SINUSOIDS: usize = 256;

/// The transformer over resident tensors. It holds handles only, and allocates nothing.
pub struct Transformer {
    config: TransformerConfig,
    patch_in: Linear,
    /// Linear, SiLU, linear.
    timestep: [Linear; 2],
    text_norm: Tensor,
    text_in: Linear,
    /// Learned embedding of padding, `[1, dim]`.
    picture_pad: Tensor,
    text_pad: Tensor,
    picture_blocks: Vec<Block>,
    text_blocks: Vec<Block>,
    blocks: Vec<Block>,
    last_modulator: Linear,
    last: Linear,
    /// Brings the blocks that are not on the card.
    stream: WeightStream,
}

/// State shared by all steps of a request: the refined text, rotations, and the modulation of every block for every
/// step.
pub struct Conditioning {
    lengths: Lengths,
    /// `[1, padded text, dim]`.
    text: Tensor,
    rotations: Rotations,
    modulated: Modulated,
    /// Source indices of the picture's padding: as many zeros, u32.
    pads: Option<Tensor>,
}

/// The modulation of every block for every step. It depends on no text, so all texts of a request share it: a clone is
/// handles.
#[derive(Clone)]
pub struct Modulated {
    picture_blocks: Vec<Modulations>,
    blocks: Vec<Modulations>,
    /// `[steps, dim]`.
    last: Tensor,
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
        let (width, timestep) = (config.dim, config.timestep_width());
        let kinds = config.blocks().map(|blocks| {
            let block = |i| {
                Block::new(
                    tensors,
                    &format!("{}.{i}", blocks.name),
                    blocks.is_modulated,
                    config,
                )
            };
            (0..blocks.count).map(block).collect::<Result<Vec<_>, _>>()
        });
        let [picture_blocks, text_blocks, blocks] = kinds;
        let linear = |name: &str, from: usize, to: usize| Linear::new(tensors, name, from, to);
        Ok(Transformer {
            patch_in: linear(PATCH_IN, config.patch_width(), width)?,
            timestep: [
                linear("t_embedder.mlp.0", SINUSOIDS, config.timestep_inner)?,
                linear("t_embedder.mlp.2", config.timestep_inner, timestep)?,
            ],
            text_norm: tensors.shaped("cap_embedder.0.weight", &[config.cap_feat_dim])?,
            text_in: linear("cap_embedder.1", config.cap_feat_dim, width)?,
            picture_pad: tensors.shaped("x_pad_token", &[1, width])?,
            text_pad: tensors.shaped("cap_pad_token", &[1, width])?,
            picture_blocks: picture_blocks?,
            text_blocks: text_blocks?,
            blocks: blocks?,
            last_modulator: linear(&format!("{LAST}.adaLN_modulation.1"), timestep, width)?,
            last: linear(&format!("{LAST}.linear"), width, config.patch_width())?,
            config: config.clone(),
            stream: tensors.stream(),
        })
    }

    /// Computes the shared state: from the encoded text, `[tokens, cap_feat_dim]`, and the times of all steps, from 0
    /// (noise) to 1.
    ///
    /// # Errors
    /// When shapes do not match; errors of the device, and of `go_on`, which is called before every block.
    pub fn condition(
        &self,
        caption: &Tensor,
        size: (usize, usize),
        times: &[f32],
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Conditioning, StageError> {
        let modulated = self.modulated(times, (caption.dtype(), caption.device()))?;
        self.condition_of(caption, size, &modulated, go_on)
    }

    /// The modulation of the steps at these times.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn modulated(
        &self,
        times: &[f32],
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<Modulated> {
        let scale = self.config.t_scale as f32;
        let scaled: Vec<f32> = times.iter().map(|time| time * scale).collect();
        let [first, second] = &self.timestep;
        let embedded = first.forward(&sinusoids(&scaled, SINUSOIDS, dtype, device)?)?;
        ops::activate(&embedded, Nonlinearity::Silu)?;
        let embedded = second.forward(&embedded)?;
        let modulated = |blocks: &[Block]| -> candle_core::Result<Vec<Modulations>> {
            blocks.iter().map(|block| block.modulate(&embedded)).collect()
        };
        let (picture_blocks, blocks) = (modulated(&self.picture_blocks)?, modulated(&self.blocks)?);
        // The blocks take the embedding without activation.
        ops::activate(&embedded, Nonlinearity::Silu)?;
        Ok(Modulated {
            picture_blocks,
            blocks,
            last: self.last_modulator.forward(&embedded)?,
        })
    }

    /// As [`Transformer::condition`], with the modulation of the steps.
    ///
    /// # Errors
    /// Errors of [`Transformer::condition`].
    pub fn condition_of(
        &self,
        caption: &Tensor,
        (rows, columns): (usize, usize),
        modulated: &Modulated,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Conditioning, StageError> {
        let lengths = Lengths {
            rows,
            columns,
            text: caption.dim(0)?,
        };
        let rotations = rotations(&positions(&lengths), &self.config, caption.device())?;
        let pads = lengths.padded_picture() - lengths.picture();
        Ok(Conditioning {
            lengths,
            text: self.refined(caption, &lengths, &rotations, go_on)?,
            rotations,
            modulated: modulated.clone(),
            pads: zeros(pads, caption.device())?,
        })
    }

    /// The refined text, `[1, padded text, dim]`.
    fn refined(
        &self,
        caption: &Tensor,
        lengths: &Lengths,
        rotations: &Rotations,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tensor, StageError> {
        let (device, dtype) = (caption.device(), caption.dtype());
        let (tokens, padded) = (lengths.text, lengths.padded_text());
        let layers = self.text_blocks.iter().flat_map(Block::layers);
        let layers = asked(layers.chain([&self.text_in]), padded, dtype)?;
        let buffers = ZImageBuffers::new(&self.config, padded, layers, (dtype, device))?;
        let normed = Tensor::zeros(caption.shape(), dtype, device)?;
        let norm = Norm::Rms {
            weight: Some(&self.text_norm),
            eps: self.config.norm_eps,
        };
        ops::norm_modulate(caption, norm, None, &normed)?;
        let text = buffers.part(0, padded)?;
        let real = text.hidden.narrow(1, 0, tokens)?.squeeze(0)?;
        self.text_in
            .forward_into(&normed, Epilogue::None, &real, buffers.scratch())?;
        if let Some(pads) = zeros(padded - tokens, device)? {
            let at = text.hidden.narrow(1, tokens, padded - tokens)?.squeeze(0)?;
            ops::embed(&self.text_pad, &pads, &at)?;
        }
        let turned = rotations.rows(lengths.padded_picture(), padded)?;
        let none = Block::unmodulated(self.config.dim, dtype, device)?;
        for (i, block) in self.text_blocks.iter().enumerate() {
            go_on()?;
            self.stream.enter(BlockPlace::once(i))?;
            if i == 0 {
                text.enter(&block.first(&none, 0, dtype)?)?;
            }
            let next = match self.text_blocks.get(i + 1) {
                Some(next) => next.first(&none, 0, dtype)?,
                None => Next::Nothing,
            };
            block.forward(&buffers, (&text, &text), &none, 0, turned.angles(), &next)?;
        }
        Ok(text.hidden)
    }

    /// Buffers of steps; those of a longer text serve a shorter one too.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn step_buffers(
        &self,
        lengths: &Lengths,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        let tokens = lengths.all();
        let blocks = self.picture_blocks.iter().chain(&self.blocks);
        let layers = blocks.flat_map(Block::layers).chain([&self.patch_in, &self.last]);
        let buffers = ZImageBuffers::new(
            &self.config,
            tokens,
            asked(layers, tokens, dtype)?,
            (dtype, device),
        )?;
        let shape = (1, lengths.picture(), self.config.patch_width());
        Ok(StepBuffers {
            output: Tensor::zeros(shape, dtype, device)?,
            buffers,
        })
    }

    /// The transformer's output for patches `[1, rows * columns, patch width]` in step `step` (from 0), of the same
    /// shape. It is in the step buffers, valid until the next step. It points from noise to picture: the velocity of
    /// the schedule is its negative. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`.
    pub fn direction<'a>(
        &self,
        patches: &Tensor,
        conditioning: &Conditioning,
        step: usize,
        step_buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        let (buffers, lengths) = (&step_buffers.buffers, &conditioning.lengths);
        let modulated = &conditioning.modulated;
        let (there, padded) = (lengths.picture(), lengths.padded_picture());
        let (picture, text) = (
            buffers.part(0, padded)?,
            buffers.part(padded, lengths.padded_text())?,
        );
        let (whole, wanted) = (buffers.part(0, lengths.all())?, buffers.part(0, there)?);
        let (scratch, dtype) = (buffers.scratch(), patches.dtype());
        self.patch_in
            .forward_into(patches, Epilogue::None, &wanted.hidden, scratch)?;
        if let Some(pads) = &conditioning.pads {
            let at = picture.hidden.narrow(1, there, padded - there)?.squeeze(0)?;
            ops::embed(&self.picture_pad, pads, &at)?;
        }
        ops::copy_rows(&conditioning.text, &text.hidden)?;

        let together = |i: usize| match (self.blocks.get(i), modulated.blocks.get(i)) {
            (Some(block), Some(modulations)) => block.first(modulations, step, dtype),
            _ => Ok(Next::Last {
                scale: modulated.last.narrow(0, step, 1)?,
            }),
        };
        let turned = conditioning.rotations.rows(0, padded)?;
        let alone = self.picture_blocks.iter().zip(&modulated.picture_blocks);
        let mut following = self.picture_blocks.iter().zip(&modulated.picture_blocks);
        for (i, (block, modulations)) in alone.enumerate() {
            go_on()?;
            self.stream.enter(BlockPlace::each_pass(i))?;
            if i == 0 {
                picture.enter(&block.first(modulations, step, dtype)?)?;
                following.next();
            }
            let next = match following.next() {
                Some((next, modulations)) => next.first(modulations, step, dtype)?,
                None => together(0)?,
            };
            block.forward(
                buffers,
                (&picture, &picture),
                modulations,
                step,
                turned.angles(),
                &next,
            )?;
        }
        match self.picture_blocks.is_empty() {
            true => whole.enter(&together(0)?)?,
            false => text.enter(&together(0)?)?,
        }
        let last = self.blocks.len().saturating_sub(1);
        for (i, (block, modulations)) in self.blocks.iter().zip(&modulated.blocks).enumerate() {
            go_on()?;
            self.stream
                .enter(BlockPlace::each_pass(self.picture_blocks.len() + i))?;
            let goes_on = if i == last { &wanted } else { &whole };
            let angles = conditioning.rotations.angles();
            block.forward(
                buffers,
                (&whole, goes_on),
                modulations,
                step,
                angles,
                &together(i + 1)?,
            )?;
        }
        self.last.forward_into(
            wanted.last_normed(),
            Epilogue::None,
            &step_buffers.output,
            scratch,
        )?;
        Ok(&step_buffers.output)
    }
}

/// Buffers of a request's steps.
#[derive(Debug)]
pub struct StepBuffers {
    buffers: ZImageBuffers,
    output: Tensor,
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

/// `count` zeros, u32; `None` for zero.
fn zeros(count: usize, device: &Device) -> candle_core::Result<Option<Tensor>> {
    (count > 0)
        .then(|| Tensor::zeros(count, DType::U32, device))
        .transpose()
}

/// Requirements of these layers on the buffers for `tokens` tokens.
fn asked<'a>(
    layers: impl Iterator<Item = &'a Linear> + Clone,
    tokens: usize,
    dtype: DType,
) -> candle_core::Result<Layers> {
    let mut take_codes = false;
    for layer in layers.clone() {
        take_codes |= layer.takes_codes(dtype)?;
    }
    Ok(Layers {
        take_codes,
        scratch_bytes: largest_scratch(layers, tokens, dtype),
    })
}

/// A latent `[1, channels, 2 rows, 2 columns]` as patches `[1, rows * columns, 4 * channels]`, channels-last within a
/// patch: `ZImageTransformer2DModel._patchify_image`.
///
/// # Errors
/// When a dimension is odd.
pub fn patches_of(latent: &Tensor) -> candle_core::Result<Tensor> {
    let (batch, channels, height, width) = latent.dims4()?;
    if height % PATCH != 0 || width % PATCH != 0 {
        candle_core::bail!("a latent of {height} x {width} does not divide into squares of {PATCH}");
    }
    let (rows, columns) = (height / PATCH, width / PATCH);
    latent
        .reshape((batch, channels, rows, PATCH, columns, PATCH))?
        .permute((0, 2, 4, 3, 5, 1))?
        .reshape((batch, rows * columns, PATCH * PATCH * channels))
}

/// Patches `[batch, rows * columns, 4 * channels]` back to a latent `[batch, channels, 2 * rows, 2 * columns]` of the
/// same dtype: `ZImageTransformer2DModel.unpatchify`.
///
/// # Errors
/// When there are not `rows * columns` patches.
pub fn latent_of(patches: &Tensor, rows: usize, columns: usize) -> candle_core::Result<Tensor> {
    let (batch, _, width) = patches.dims3()?;
    let channels = width / (PATCH * PATCH);
    patches
        .reshape((batch, rows, columns, PATCH, PATCH, channels))?
        .permute((0, 5, 1, 3, 2, 4))?
        .reshape((batch, channels, rows * PATCH, columns * PATCH))
}

/// The transformer's times for the sigmas of all steps but the final one: from 0 (noise) to 1, rounded where the
/// reference rounds.
pub fn times(sigmas: &[f32]) -> Vec<f32> {
    let steps = sigmas.len().saturating_sub(1);
    let time = |sigma: &f32| (1000.0 - sigma * 1000.0) / 1000.0;
    sigmas.iter().take(steps).map(time).collect()
}

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// Predicted activation bytes of `steps` steps: the buffers, the refined text, rotations, and the modulation of all
/// steps. Not included are the scratch of quantized layers ([`ops::linear_scratch`]), and the codes of rows for
/// native fp8 products.
pub fn denoise_scratch(config: &TransformerConfig, lengths: &Lengths, steps: u32, dtype: DType) -> u64 {
    let number = dtype.size_in_bytes();
    let buffers = ZImageBuffers::bytes(config, lengths.all(), number);
    let rotations = (lengths.all() * config.head() * 4) as u64;
    let modulated = config.blocks().into_iter().filter(|blocks| blocks.is_modulated);
    let modulations = modulated.map(|blocks| 4 * blocks.count).sum::<usize>() + 1;
    let modulations = (modulations * config.dim * number) as u64 * u64::from(steps);
    // The latent in f32 and in the computation dtype, and the output; the encoded, the normalized and the refined
    // text.
    let latents = lengths.picture() * config.patch_width() * (4 + 2 * number);
    let text = (2 * lengths.text * config.cap_feat_dim + lengths.padded_text() * config.dim) * number;
    buffers + rotations + modulations + (latents + text) as u64 + LIBRARIES
}

/// Predicted further bytes where every step predicts under a second condition, whose text makes these lengths: the encoded
/// and the refined text, rotations, and the prediction that is kept.
pub fn negative_scratch(config: &TransformerConfig, lengths: &Lengths, dtype: DType) -> u64 {
    let text = lengths.text * config.cap_feat_dim + lengths.padded_text() * config.dim;
    let rotations = lengths.all() * config.head() * 4;
    let prediction = lengths.picture() * config.patch_width();
    (text * dtype.size_in_bytes() + rotations) as u64
        + Conditions::<Conditioning>::kept_bytes(prediction, dtype)
}

/// Further bytes predicted where a text of these lengths is refined again in every step, because strengths of adapters change,
/// in addition to the buffers of the step.
pub fn refining_scratch(config: &TransformerConfig, lengths: &Lengths, dtype: DType) -> u64 {
    let number = dtype.size_in_bytes();
    let normed = lengths.text * config.cap_feat_dim * number;
    let rotations = lengths.all() * config.head() * 4;
    ZImageBuffers::bytes(config, lengths.padded_text(), number) + (normed + rotations) as u64
}

/// The block of a tensor: those of the text are used once, those of picture and of both together in each step. Modulators are
/// small.
pub(super) fn block_of(config: &TransformerConfig, name: &str) -> Option<BlockPlace> {
    let [picture, text, both] = config.blocks();
    let of = |blocks: &Blocks| {
        numbered(name, &format!("{}.", blocks.name))
            .filter(|_| !is_modulator(name))
            .map(|(number, _)| number)
    };
    let first = picture.count;
    let of_text = of(&text).map(BlockPlace::once);
    let of_both = of(&both).map(|number| BlockPlace::each_pass(first + number));
    of(&picture).map(BlockPlace::each_pass).or(of_text).or(of_both)
}

/// Whether a tensor is the weight of a layer that computes modulations, which steps do not use.
pub(super) fn is_modulator(name: &str) -> bool {
    name.contains(".adaLN_modulation.")
}
