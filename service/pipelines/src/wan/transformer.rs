//! Wan's transformer: diffusers' `WanTransformer3DModel`, with its tensor names.
//!
//! Where a film begins with a picture, the reference gives each token a time, and computes a modulation for each. There are two
//! distinct times only, zero for the picture's tokens and that of the step, so two modulations are computed. The picture's tokens
//! come first, and no velocity is computed for them, since the picture stays.

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, WeightStream};
use ops::{Epilogue, Nonlinearity};

use super::blocks::{Block, KeysValues};
use super::buffers::{Buffers, Next, Part};
use super::config::TransformerConfig;
use super::modulation::{BlockModulation, Modulations, Tables};
use crate::StageError;
use crate::adapters::AdaptedTensors;
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
    time: TwoLayers,
    time_projection: Linear,
    text: TwoLayers,
    tables: Tables,
    blocks: Vec<Block>,
    /// Shift and scale of the last norm, `[1, 2, width]`, to which the time is added.
    last_table: Tensor,
    last: Linear,
    /// Brings the blocks that are not on the card.
    stream: WeightStream,
}

/// Tokens of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCounts {
    /// Tokens of a picture that the film begins with, which are seen and not sampled.
    pub first: usize,
    /// Tokens that are sampled.
    pub sampled: usize,
}

impl TokenCounts {
    /// The number of all tokens.
    pub fn all(&self) -> usize {
        self.first + self.sampled
    }
}

/// The embedded times of all steps, and zero after them.
pub struct Times {
    /// `[steps + 1, width]`.
    embedded: Tensor,
    /// `[steps + 1, 6 width]`.
    projected: Tensor,
}

/// The keys and values of the texts of a batch in every block: the same in all steps.
pub struct Texts(Vec<KeysValues>);

/// Buffers of a request's steps.
pub struct StepBuffers {
    buffers: Buffers,
    counts: TokenCounts,
    /// Modulations of the sampled tokens, and of a picture's.
    modulations: [Modulations; 2],
    /// Shift and scale of the last norm, `[1, width]` each.
    last: [Tensor; 2],
    /// The latent with its condition in each row, `[1, sampled, 4 in_channels]`.
    conditioned: Option<Tensor>,
    /// The embedded picture that the film begins with, `[1, first, width]`.
    first: Option<Tensor>,
    /// `[batch, sampled, 4 out_channels]`.
    velocity: Tensor,
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
            let embedder = |part: &str, inputs: usize, between| {
                let name = format!("condition_embedder.{part}_embedder");
                TwoLayers::new(tensors, &name, (inputs, width), between)
            };
            let blocks = names.clone().map(|name| Block::new(tensors, &name, &shape));
            let tables = names.clone().map(|name| format!("{name}.scale_shift_table"));
            let [t, h, w] = config.patch_size;
            let patches = tensors.shaped("patch_embedding.weight", &[width, config.in_channels, t, h, w])?;
            let transformer = Transformer {
                // Replaced below.
                patches_in: Linear::of(patches.clone(), None),
                time: embedder("time", SINUSOIDS, Nonlinearity::Silu)?,
                time_projection: Linear::new(tensors, "condition_embedder.time_proj", width, 6 * width)?,
                text: embedder("text", config.text_dim, Nonlinearity::GeluTanh)?,
                tables: Tables::new(tensors, tables, width)?,
                blocks: blocks.collect::<Result<_, _>>()?,
                last_table: tensors.shaped("scale_shift_table", &[1, 2, width])?,
                last: Linear::new(tensors, "proj_out", width, config.token_width())?,
                config: config.clone(),
                stream: tensors.stream(),
            };
            let bias = tensors.shaped("patch_embedding.bias", &[width])?;
            Ok((transformer, patches, bias))
        };
        let (transformer, patches, bias) = read().map_err(StageError::missing_in(component))?;
        Ok(Transformer {
            patches_in: Linear::of(patches_last(&patches, config)?, Some(bias)),
            ..transformer
        })
    }

    /// The embedded times of the steps, in training steps.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn times(&self, times: &[f32], (dtype, device): (DType, &Device)) -> Result<Times, StageError> {
        let all: Vec<f32> = times.iter().copied().chain([0.0]).collect();
        let embedded = self.time.forward(&sinusoids(&all, SINUSOIDS, dtype, device)?)?;
        let activated = embedded.zeros_like()?;
        ops::copy_rows(&embedded, &activated)?;
        ops::activate(&activated, Nonlinearity::Silu)?;
        Ok(Times {
            projected: self.time_projection.forward(&activated)?,
            embedded,
        })
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
        let (on, width) = ((dtype, device), self.config.width());
        let layers = self.blocks.iter().flat_map(Block::layers).chain([&self.last]);
        let vector = || Tensor::zeros((1, width), dtype, device);
        let shape = (batch, counts.sampled, self.config.token_width());
        Ok(StepBuffers {
            buffers: Buffers::new(self.config.blocks(), (batch, counts.all()), layers, on)?,
            counts,
            modulations: [self.tables.modulations(on)?, self.tables.modulations(on)?],
            last: [vector()?, vector()?],
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
        self.set_time(times, step, step_buffers)?;
        let [of_sampled, of_first] = &step_buffers.modulations;
        let sampled = buffers.part(counts.first, counts.sampled)?;
        self.embed(latent, &sampled, step_buffers)?;
        let whole = buffers.whole()?;
        let (parts, of_parts) = match counts.first {
            0 => (vec![sampled], vec![of_sampled]),
            first => (vec![buffers.part(0, first)?, sampled], vec![of_first, of_sampled]),
        };
        let rows = &whole.branch;
        let of_block = |number: usize| -> candle_core::Result<Vec<BlockModulation>> {
            of_parts.iter().map(|all| all.of_block(number)).collect()
        };
        let firsts = |number: usize| -> candle_core::Result<Vec<Next<'_>>> {
            match self.blocks.get(number) {
                Some(block) => {
                    let modulations = of_block(number)?;
                    modulations.iter().map(|each| block.first(each, rows)).collect()
                }
                None => Ok(of_parts.iter().map(|_| step_buffers.last_norm()).collect()),
            }
        };
        for (part, next) in parts.iter().zip(firsts(0)?) {
            part.enter(&next)?;
        }
        for (number, (block, text)) in self.blocks.iter().zip(&texts.0).enumerate() {
            go_on()?;
            self.stream.enter(BlockPlace::each_pass(number))?;
            block.forward(
                (&parts, &whole),
                &of_block(number)?,
                text,
                rotations,
                &firsts(number + 1)?,
                buffers.scratch(),
            )?;
        }
        let normed = &buffers.part(counts.first, counts.sampled)?.branch;
        let velocity = &step_buffers.velocity;
        self.last
            .forward_into(normed, Epilogue::None, velocity, buffers.scratch())?;
        Ok(velocity)
    }

    /// Sets the modulations to those of a step.
    fn set_time(&self, times: &Times, step: usize, buffers: &StepBuffers) -> candle_core::Result<()> {
        let [of_sampled, of_first] = &buffers.modulations;
        self.tables
            .set(of_sampled, &times.projected.narrow(0, step, 1)?)?;
        if buffers.counts.first > 0 {
            let zero = times.projected.dim(0)? - 1;
            self.tables.set(of_first, &times.projected.narrow(0, zero, 1)?)?;
        }
        let time = times.embedded.narrow(0, step, 1)?;
        for (part, vector) in buffers.last.iter().enumerate() {
            ops::copy_rows(&self.last_table.narrow(1, part, 1)?.squeeze(0)?, vector)?;
            ops::add_residual(vector, &time, None)?;
        }
        Ok(())
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

impl StepBuffers {
    /// The norm before the last layer.
    fn last_norm(&self) -> Next<'_> {
        let [shift, scale] = &self.last;
        Next {
            affine: None,
            modulation: Some((shift.clone(), scale.clone())),
            as_codes: false,
        }
    }
}

/// The weight of the embedding of patches, `[width, channels, 1, 2, 2]`, as a matrix whose columns are in the order in which the
/// last layer writes a patch: cell by cell, channels last; the latent's, then those of its condition.
fn patches_last(weight: &Tensor, config: &TransformerConfig) -> candle_core::Result<Tensor> {
    let (width, device) = (config.width(), weight.device());
    let weight = weight
        .to_device(&Device::Cpu)?
        .reshape((width, config.in_channels, 4))?;
    let columns = |first: usize, count: usize| {
        let channels = weight.narrow(1, first, count)?.transpose(1, 2)?.contiguous()?;
        channels.reshape((width, 4 * count))
    };
    let all = match config.conditions() {
        0 => columns(0, config.out_channels)?,
        conditions => Tensor::cat(
            &[
                columns(0, config.out_channels)?,
                columns(config.out_channels, conditions)?,
            ],
            1,
        )?,
    };
    all.contiguous()?.to_device(device)
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
