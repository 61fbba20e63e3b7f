//! Wan's transformer: diffusers' `WanTransformer3DModel`, with its tensor names.
//!
//! Where a film begins with a picture, the reference gives each token a time, and computes a modulation for each. There are two
//! distinct times only, zero for the picture's tokens and that of the step, so two modulations are computed. The picture's tokens
//! come first, and no velocity is computed for them, since the picture stays.

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, WeightStream};
use ops::{Epilogue, Nonlinearity};

use super::blocks::{Block, KeysValues};
use super::buffers::{Buffers, Part};
use super::config::TransformerConfig;
use super::modulation::Tables;
use super::times::{StepModulations, TimeLayers, Times, TokenCounts};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::linear::Linear;
use crate::mmdit::{SINUSOIDS, TwoLayers};
use crate::rotary::{Rotations, Rounded, rotations};
use crate::sinusoids::sinusoids;

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;

/// The transformer over resident tensors. It holds handles only, but for a copy of the embedding of patches, with its inputs in
/// the order of the outputs.
pub struct Transformer {
    config: TransformerConfig,
    patches_in: Linear,
    time: TimeLayers,
    text: TwoLayers,
    blocks: Vec<Block>,
    last: Linear,
    /// Brings the blocks that are not on the card.
    stream: WeightStream,
}

/// The keys and values of the texts of a batch in every block: the same in all steps.
pub struct Texts(Vec<KeysValues>);

/// Buffers of a request's steps.
pub struct StepBuffers {
    buffers: Buffers,
    counts: TokenCounts,
    modulations: StepModulations,
    /// The latent with its condition in each row, `[1, sampled, 4 in_channels]`.
    conditioned: Option<Tensor>,
    /// The embedded picture that the film begins with, `[1, first, width]`.
    first: Option<Tensor>,
    /// `[batch, sampled, 4 out_channels]`.
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

/// What the latent is seen with.
#[derive(Clone, Copy)]
pub enum Seen<'a> {
    /// Nothing else.
    Alone,
    /// A condition of each token, `[1, sampled, 4 conditions]`.
    Conditioned(&'a Tensor),
    /// A picture that the film begins with, `[1, first, 4 channels]`.
    After(&'a Tensor),
}

impl Transformer {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape; errors of the device.
    pub fn new(config: &TransformerConfig, tensors: &ComponentTensors) -> Result<Transformer, StageError> {
        Transformer::with_adapters(config, &AdaptedTensors::from(tensors), "transformer")
    }

    /// As [`Transformer::new`], with adapters; `component` is its name.
    pub(super) fn with_adapters(
        config: &TransformerConfig,
        tensors: &AdaptedTensors<'_>,
        component: &str,
    ) -> Result<Transformer, StageError> {
        let (width, shape) = (config.width(), config.blocks());
        let names = (0..config.num_layers).map(|i| format!("blocks.{i}"));
        let read = || -> Result<_, MissingTensor> {
            let text = "condition_embedder.text_embedder";
            let blocks = names.clone().map(|name| Block::new(tensors, &name, &shape));
            let [t, h, w] = config.patch_size;
            let patches = tensors.shaped("patch_embedding.weight", &[width, config.in_channels, t, h, w])?;
            let transformer = Transformer {
                // Replaced below.
                patches_in: Linear::of(patches.clone(), None),
                time: TimeLayers::new(tensors, "", config.num_layers, width)?,
                text: TwoLayers::new(tensors, text, (config.text_dim, width), Nonlinearity::GeluTanh)?,
                blocks: blocks.collect::<Result<_, _>>()?,
                last: Linear::new(tensors, "proj_out", width, config.token_width())?,
                config: config.clone(),
                stream: tensors.stream(),
            };
            let bias = tensors.shaped("patch_embedding.bias", &[width])?;
            Ok((transformer, patches, bias))
        };
        let (transformer, patches, bias) = read().map_err(StageError::missing_in(component))?;
        let parts = match config.conditions() {
            0 => vec![config.out_channels],
            conditions => vec![config.out_channels, conditions],
        };
        Ok(Transformer {
            patches_in: Linear::of(patches_last(&patches, &parts)?, Some(bias)),
            ..transformer
        })
    }

    /// The embedded times of the steps, in training steps.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn times(&self, times: &[f32], (dtype, device): (DType, &Device)) -> Result<Times, StageError> {
        let all: Vec<f32> = times.iter().copied().chain([0.0]).collect();
        Ok(self.time.times(&sinusoids(&all, SINUSOIDS, dtype, device)?)?)
    }

    /// The keys and values of the states of texts, `[batch, tokens, text_dim]`. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`; when a streamed block cannot be read.
    pub fn texts(
        &self,
        states: &Tensor,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Texts, StageError> {
        let embedded = self.text.forward(states)?;
        let mut texts = Vec::with_capacity(self.blocks.len());
        for (number, block) in self.blocks.iter().enumerate() {
            go_on()?;
            self.stream.enter(BlockPlace::once(number))?;
            texts.push(block.cross.keys_values(&embedded)?);
        }
        Ok(Texts(texts))
    }

    /// Rotations of the tokens of a film of so many latent frames, and rows and columns of tokens.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn rotations(
        &self,
        frames: usize,
        (rows, columns): (usize, usize),
        device: &Device,
    ) -> candle_core::Result<Rotations> {
        let mut positions = Vec::with_capacity(frames * rows * columns);
        for frame in 0..frames as u32 {
            for row in 0..rows as u32 {
                positions.extend((0..columns as u32).map(|column| [frame, row, column]));
            }
        }
        let axes = self.config.blocks().axes();
        rotations(&positions, axes, THETA, Rounded::Results, device)
    }

    /// Buffers of steps for a batch, which sees the latent with the same.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn step_buffers(
        &self,
        (batch, counts): (usize, TokenCounts),
        seen: Seen<'_>,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        let on = (dtype, device);
        let layers = self.blocks.iter().flat_map(Block::layers).chain([&self.last]);
        let shape = (batch, counts.sampled, self.config.token_width());
        Ok(StepBuffers {
            buffers: Buffers::new(self.config.blocks(), (batch, counts.all()), layers, on)?,
            counts,
            modulations: self.time.modulations(counts, on)?,
            conditioned: match seen {
                Seen::Conditioned(condition) => {
                    let (own, all) = (self.config.token_width(), 4 * self.config.in_channels);
                    let row = Tensor::zeros((1, counts.sampled, all), dtype, device)?;
                    ops::copy_rows(condition, &row.narrow(2, own, all - own)?)?;
                    Some(row)
                }
                Seen::Alone | Seen::After(_) => None,
            },
            first: match seen {
                Seen::After(picture) => Some(self.patches_in.forward(picture)?),
                Seen::Alone | Seen::Conditioned(_) => None,
            },
            velocity: Tensor::zeros(shape, dtype, device)?,
        })
    }

    /// The velocity at `latent` `[1, sampled, 4 channels]` in step `step` (from 0) under each text of the batch, `[batch, sampled,
    /// 4 channels]`. It is in the step buffers, valid until the next step. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`.
    pub fn velocity<'a>(
        &self,
        latent: &Tensor,
        (times, step): (&Times, usize),
        (texts, rotations): (&Texts, &Rotations),
        step_buffers: &'a StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<&'a Tensor, StageError> {
        let (buffers, counts) = (&step_buffers.buffers, step_buffers.counts);
        let modulations = &step_buffers.modulations;
        self.time.set(modulations, times, step)?;
        self.embed(latent, &buffers.part(counts.first, counts.sampled)?, step_buffers)?;
        let (parts, whole) = (counts.parts(buffers)?, buffers.whole()?);
        let norms = |number: usize| modulations.norms(number, self.blocks.get(number), &whole.branch);
        for (part, next) in parts.iter().zip(norms(0)?) {
            part.enter(&next)?;
        }
        for (number, (block, text)) in self.blocks.iter().zip(&texts.0).enumerate() {
            go_on()?;
            self.stream.enter(BlockPlace::each_pass(number))?;
            block.forward(
                (&parts, &whole),
                &modulations.of_block(number)?,
                text,
                rotations,
                &norms(number + 1)?,
                buffers.scratch(),
            )?;
        }
        let normed = &buffers.part(counts.first, counts.sampled)?.branch;
        let velocity = &step_buffers.velocity;
        self.last
            .forward_into(normed, Epilogue::None, velocity, buffers.scratch())?;
        Ok(velocity)
    }

    /// Embeds the latent, and the picture before it, for each item of the batch.
    fn embed(&self, latent: &Tensor, sampled: &Part, step_buffers: &StepBuffers) -> candle_core::Result<()> {
        let buffers = &step_buffers.buffers;
        let input = match &step_buffers.conditioned {
            None => latent,
            Some(row) => {
                ops::copy_rows(latent, &row.narrow(2, 0, latent.dim(2)?)?)?;
                row
            }
        };
        for item in 0..sampled.hidden.dim(0)? {
            let hidden = sampled.hidden.narrow(0, item, 1)?;
            self.patches_in
                .forward_into(input, Epilogue::None, &hidden, buffers.scratch())?;
            if let Some(first) = &step_buffers.first {
                let hidden = buffers.part(0, step_buffers.counts.first)?.hidden;
                ops::copy_rows(first, &hidden.narrow(0, item, 1)?)?;
            }
        }
        Ok(())
    }
}

/// The weight of the embedding of patches, `[width, channels, 1, 2, 2]`, as a matrix whose columns are in the order in which the
/// last layer writes a patch: cell by cell, channels last; first those of the first of the `parts` that make up the channels. It
/// is small, and is rearranged in host memory.
pub(crate) fn patches_last(weight: &Tensor, parts: &[usize]) -> candle_core::Result<Tensor> {
    let (width, channels, ..) = weight.dims5()?;
    let on_host = weight.to_device(&Device::Cpu)?.reshape((width, channels, 4))?;
    let mut first = 0;
    let mut columns = Vec::with_capacity(parts.len());
    for count in parts {
        let part = on_host.narrow(1, first, *count)?.transpose(1, 2)?.contiguous()?;
        columns.push(part.reshape((width, 4 * count))?);
        first += count;
    }
    Tensor::cat(&columns, 1)?.contiguous()?.to_device(weight.device())
}

/// Predicted activation bytes of `steps` steps of a batch over these tokens: the buffers, the keys and values of the texts, the
/// modulations, and the embedded inputs. Not included are the latent, the scratch of quantized layers, and the codes of rows for
/// native fp8 products.
pub fn denoise_scratch(
    config: &TransformerConfig,
    (batch, counts): (usize, TokenCounts),
    texts: (usize, usize),
    steps: u32,
    dtype: DType,
) -> u64 {
    let (shape, number) = (config.blocks(), dtype.size_in_bytes());
    let (width, rows) = (config.width(), batch * counts.all());
    let (texts, tokens) = texts;
    let times = (steps as usize + 1) * (7 * width + SINUSOIDS);
    let seen = counts.first * width + counts.sampled * 4 * config.in_channels;
    let texts_embedded = texts * tokens * (config.text_dim + 2 * width);
    let patches = 4 * config.in_channels * width;
    let velocity = batch * counts.sampled * config.token_width();
    shape.buffers_bytes(rows, dtype)
        + shape.rotations_bytes(counts.all())
        + shape.texts_bytes(config.num_layers, texts * tokens, dtype)
        + 2 * Tables::bytes(config.num_layers, width, dtype)
        + ((times + seen + texts_embedded + patches + velocity) * number) as u64
        + LIBRARIES
}
