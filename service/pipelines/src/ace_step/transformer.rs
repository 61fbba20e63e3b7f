//! The transformer: diffusers' `AceStepTransformer1DModel`, with its tensor names.
//!
//! A token is `patch_size` latent frames with their source and mask. Latents stay `[frames, channels]` from step to step;
//! an incomplete last patch is filled with zeros. The keys and values of the condition are the same in every step, so
//! they are computed once per request.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, WeightStream};
use half::bf16;
use ops::{Epilogue, Nonlinearity};

use super::blocks::{Block, ModulationVectors, Next, flat};
use super::buffers::{StepBuffers, TokenBuffers};
use super::config::{SINUSOIDS, TransformerConfig};
use super::layers::Others;
use super::padded::Padded;
use crate::StageError;
use crate::adapters::{AdaptedTensors, SetsOfItems};
use crate::checkpoint::numbered;
use crate::linear::{Linear, largest_scratch};
use crate::rotary::{Rounded, rotations};
use crate::sinusoids::sinusoids;

/// The block of a tensor: keys and values of the condition are computed once, all else of a layer runs in each step.
pub(super) fn block_of(name: &str) -> Option<BlockPlace> {
    let (number, rest) = numbered(name, "layers.")?;
    match rest {
        "scale_shift_table" => None,
        "cross_attn.to_k.weight" | "cross_attn.to_v.weight" => Some(BlockPlace::once(number)),
        _ => Some(BlockPlace::each_pass(number)),
    }
}

/// Vectors of `hidden_size` in the modulations of a block, and of the last norm.
const OF_BLOCK: usize = 6;
const OF_LAST: usize = 2;

/// Factor by which times from 0 to 1 are multiplied.
const TIME_SCALE: f32 = 1000.0;

/// Embedding of times: linear, SiLU, linear, and after another SiLU the projection to modulations.
struct TimeEmbedding {
    layers: [Linear; 2],
    project: Linear,
}

impl TimeEmbedding {
    fn new(tensors: &AdaptedTensors<'_>, name: &str, width: usize) -> Result<TimeEmbedding, MissingTensor> {
        let linear =
            |part: &str, from: usize, to: usize| Linear::new(tensors, &format!("{name}.{part}"), from, to);
        Ok(TimeEmbedding {
            layers: [
                linear("linear_1", SINUSOIDS, width)?,
                linear("linear_2", width, width)?,
            ],
            project: linear("time_proj", width, 6 * width)?,
        })
    }

    /// The embedding `[times, width]` and the modulation `[times, 6 width]`, with a set of adapters.
    fn embed(
        &self,
        times: &[f32],
        set: usize,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<(Tensor, Tensor)> {
        let [first, second] = &self.layers;
        let sets = &SetsOfItems::of([set]);
        let embedded = first.forward_of_items(&sinusoids(times, SINUSOIDS, dtype, device)?, sets)?;
        ops::activate(&embedded, Nonlinearity::Silu)?;
        let embedded = second.forward_of_items(&embedded, sets)?;
        let activated = Tensor::zeros(embedded.shape(), dtype, device)?;
        ops::copy_rows(&embedded, &activated)?;
        ops::activate(&activated, Nonlinearity::Silu)?;
        Ok((embedded, self.project.forward_of_items(&activated, sets)?))
    }
}

/// The transformer over resident tensors. It holds handles, and its first and last layers in another order of numbers.
pub struct Transformer {
    config: TransformerConfig,
    patch_in: Linear,
    time: TimeEmbedding,
    /// Embedding of the time that has passed within a step, which is 0 here.
    elapsed: TimeEmbedding,
    condition_in: Linear,
    blocks: Vec<Block>,
    last_norm: Tensor,
    /// `[1, 2 hidden_size]`: shift and scale.
    last_table: Tensor,
    patch_out: Linear,
    /// Brings the blocks that are not on the card.
    stream: WeightStream,
}

/// The modulations of all blocks, 6 `hidden_size` each, and of the last norm, shift and scale, in some steps: a row for each step.
pub struct Times(Tensor);

impl Times {
    /// Those of a step, from 0, `[1, ..]`.
    pub(super) fn step(&self, step: usize) -> candle_core::Result<Tensor> {
        self.0.narrow(0, step, 1)
    }
}

/// What the blocks attend to of a condition, with a set of adapters.
pub struct Conditioning {
    /// Keys and values for each block, `[1, n, heads, head_dim]`.
    blocks: Vec<(Tensor, Tensor)>,
    /// Number of the set, which the items that attend to it have.
    set: usize,
}

impl Conditioning {
    /// Of keys and values for each block, with a set of adapters.
    pub(super) fn of_blocks(blocks: Vec<(Tensor, Tensor)>, set: usize) -> Conditioning {
        Conditioning { blocks, set }
    }

    /// Keys and values for each block.
    pub(super) fn blocks(&self) -> &[(Tensor, Tensor)] {
        &self.blocks
    }

    /// Its tokens.
    pub(super) fn tokens(&self) -> usize {
        let first = self.blocks.first();
        first.map_or(0, |(keys, _)| keys.dims().get(1).copied().unwrap_or(0))
    }
}

/// A request in a pass.
#[derive(Clone, Copy)]
pub(super) struct Item<'a> {
    /// The request's place in the step buffers.
    pub(super) place: usize,
    pub(super) conditioning: &'a Conditioning,
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
        let (layer, width) = (&config.layer, config.layer.hidden_size);
        let block = |i| Block::new(tensors, &format!("layers.{i}"), layer);
        Ok(Transformer {
            patch_in: patch_in(config, tensors)?,
            time: TimeEmbedding::new(tensors, "time_embed", width)?,
            elapsed: TimeEmbedding::new(tensors, "time_embed_r", width)?,
            condition_in: Linear::new(tensors, "condition_embedder", config.condition_width(), width)?,
            blocks: (0..config.num_hidden_layers)
                .map(block)
                .collect::<Result<_, _>>()?,
            last_norm: tensors.shaped("norm_out.weight", &[width])?,
            last_table: flat(tensors, "scale_shift_table", 2, width)?,
            patch_out: patch_out(config, tensors)?,
            config: config.clone(),
            stream: tensors.stream(),
        })
    }

    /// The configuration that it was made from.
    pub(super) fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Whether all of its blocks are on the card.
    pub(super) fn is_whole(&self) -> bool {
        self.stream.is_whole()
    }

    /// The modulations of steps, from their times, 1 (noise) to 0, in the dtype of the activations: the reference
    /// rounds times to it.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn times(&self, times: &[f32], on: (DType, &Device)) -> candle_core::Result<Times> {
        self.times_of_set(times, 0, on)
    }

    /// As [`Transformer::times`], with a set of adapters.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn times_of_set(
        &self,
        times: &[f32],
        set: usize,
        on @ (dtype, device): (DType, &Device),
    ) -> candle_core::Result<Times> {
        let rounded = |number: f32| match dtype {
            DType::BF16 => bf16::from_f32(number).to_f32(),
            _ => number,
        };
        let scaled: Vec<f32> = times
            .iter()
            .map(|time| rounded(rounded(*time) * TIME_SCALE))
            .collect();
        let (embedded, shared) = self.time.embed(&scaled, set, on)?;
        // One row for all times.
        let (elapsed, of_elapsed) = self.elapsed.embed(&[0.0], set, on)?;
        ops::add_residual(&embedded, &elapsed, None)?;
        ops::add_residual(&shared, &of_elapsed, None)?;
        let width = self.config.layer.hidden_size;
        let all = ops::blank(&[times.len(), self.modulations()], dtype, device)?;
        for (i, block) in self.blocks.iter().enumerate() {
            block.modulate(&shared, &all.narrow(1, i * OF_BLOCK * width, OF_BLOCK * width)?)?;
        }
        let last = self.of_last(&all)?;
        for part in 0..OF_LAST {
            ops::copy_rows(&embedded, &last.narrow(1, part * width, width)?)?;
        }
        ops::add_residual(&last, &self.last_table, None)?;
        Ok(Times(all))
    }

    /// Elements of the modulations of a step.
    pub(super) fn modulations(&self) -> usize {
        (OF_BLOCK * self.blocks.len() + OF_LAST) * self.config.layer.hidden_size
    }

    /// The modulations of the last norm, of those of steps.
    fn of_last(&self, all: &Tensor) -> candle_core::Result<Tensor> {
        let width = self.config.layer.hidden_size;
        all.narrow(1, OF_BLOCK * self.blocks.len() * width, OF_LAST * width)
    }

    /// Keys and values for every step, from a condition `[n, condition width]`.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`, which is called before every block.
    pub fn condition(
        &self,
        condition: &Tensor,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Conditioning, StageError> {
        self.condition_of_set(condition, 0, go_on)
    }

    /// As [`Transformer::condition`], with a set of adapters.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`, which is called before every block.
    pub(super) fn condition_of_set(
        &self,
        condition: &Tensor,
        set: usize,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Conditioning, StageError> {
        let of_set = SetsOfItems::of([set]);
        let embedded = self
            .condition_in
            .forward_of_items(&condition.unsqueeze(0)?, &of_set)?;
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (i, block) in self.blocks.iter().enumerate() {
            go_on()?;
            self.stream.enter(BlockPlace::once(i))?;
            blocks.push(block.keys_and_values(&embedded, &of_set, &self.config.layer)?);
        }
        Ok(Conditioning::of_blocks(blocks, set))
    }

    /// Buffers of a request's steps, in the context of its source and mask `[frames, 2 channels]`.
    ///
    /// # Errors
    /// When shapes do not match; errors of the device.
    pub fn step_buffers(&self, context: &Tensor) -> candle_core::Result<StepBuffers> {
        let buffers = self.shared_buffers((1, context.dim(0)?), (context.dtype(), context.device()))?;
        buffers.put_context(0, context)?;
        Ok(buffers)
    }

    /// Buffers of passes over so many requests, of so many frames each.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn shared_buffers(
        &self,
        (batch, frames): (usize, usize),
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<StepBuffers> {
        let (config, layer) = (&self.config, &self.config.layer);
        let tokens = config.tokens(frames);
        let layers = self.blocks.iter().flat_map(Block::layers);
        let layers = layers.chain([&self.patch_in, &self.patch_out]);
        let scratch = largest_scratch(layers, batch * tokens, dtype);
        let input = (tokens * config.patch_size, config.in_channels);
        let inputs = (0..batch).map(|_| Tensor::zeros(input, dtype, device));
        let places: Vec<[u32; 1]> = (0..tokens as u32).map(|at| [at]).collect();
        let channels = config.audio_acoustic_hidden_dim;
        Ok(StepBuffers {
            tokens: TokenBuffers::new(layer, (batch, tokens), dtype, scratch, (dtype, device))?,
            turned: rotations(
                &places,
                [layer.head_dim],
                layer.rope_theta,
                Rounded::Frequencies,
                device,
            )?,
            inputs: inputs.collect::<candle_core::Result<_>>()?,
            output: Tensor::zeros((batch, tokens, config.patch_size * channels), dtype, device)?,
            frames,
            channels,
        })
    }

    /// The velocity of latents `[frames, channels]` in step `step` (from 0), of the same shape. It is in the step buffers,
    /// valid until the next step. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of the device, and of `go_on`.
    pub fn velocity(
        &self,
        latents: &Tensor,
        (times, step): (&Times, usize),
        conditioning: &Conditioning,
        buffers: &StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tensor, StageError> {
        let item = Item {
            place: 0,
            conditioning,
        };
        buffers.put_latents(0, latents)?;
        self.compute((&[item], None), &times.step(step)?, buffers, go_on)?;
        Ok(buffers.velocity(0)?)
    }

    /// Computes the velocities of several requests in one pass, in the order of the items ([`StepBuffers::velocity`]), from the latents
    /// in the buffers and the modulations of their steps, `[items, ..]`. They attend to the rows of their conditionings, if these are padded;
    /// else those next to each other with one conditioning attend to it together. Those with one set of adapters share the products of its
    /// terms. Except for rounding, no result depends on the other requests.
    ///
    /// # Errors
    /// When the buffers have no such places; errors of the device, and of `go_on`.
    pub(super) fn compute(
        &self,
        (items, padded): (&[Item<'_>], Option<Padded<'_>>),
        modulations: &Tensor,
        buffers: &StepBuffers,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let (config, batch) = (&self.config, items.len());
        let width = config.layer.hidden_size;
        let sets = SetsOfItems::of(items.iter().map(|item| item.conditioning.set));
        let tokens = buffers.tokens.first(batch, sets)?;
        let (_, count, _) = tokens.sum.dims3()?;
        for (row, item) in items.iter().enumerate() {
            let input = buffers.input(item.place)?;
            let patches = input.reshape((1, count, config.patch_size * config.in_channels))?;
            let sum = tokens.sum.narrow(0, row, 1)?;
            self.patch_in
                .forward_into(&patches, Epilogue::None, &sum, &tokens.scratch)?;
        }
        let of_block = |i: usize| modulations.narrow(1, i * OF_BLOCK * width, OF_BLOCK * width);
        let of_blocks = (0..self.blocks.len()).map(of_block);
        let of_blocks = of_blocks.collect::<candle_core::Result<Vec<_>>>()?;
        let last = self.of_last(modulations)?;
        let parts = |all| ModulationVectors { all, width };
        let next_of = |i: usize| -> candle_core::Result<Next> {
            match (self.blocks.get(i), of_blocks.get(i)) {
                (Some(block), Some(modulation)) => block.first(&parts(modulation)),
                _ => Ok(Next {
                    weight: self.last_norm.clone(),
                    shift: parts(&last).part(0)?,
                    scale: parts(&last).part(1)?,
                    eps: config.layer.rms_norm_eps,
                }),
            }
        };
        let attended = by_conditioning(items);
        let next = next_of(0)?;
        ops::norm_modulate(&tokens.sum, next.norm(), Some(next.modulation()), &tokens.normed)?;
        for (i, (block, modulation)) in self.blocks.iter().zip(&of_blocks).enumerate() {
            go_on()?;
            self.stream.enter(BlockPlace::each_pass(i))?;
            let window = config.layer.window(i, count);
            let of_block = attended.iter().filter_map(|(items, conditioning)| {
                let (keys, values) = conditioning.blocks.get(i)?;
                let items = items.clone();
                Some(Others::OfAll { items, keys, values })
            });
            let conditions: Vec<Others<'_>> = match padded {
                Some(padded) => vec![padded.of_block(i)?],
                None => of_block.collect(),
            };
            block.forward(
                &tokens,
                &parts(modulation),
                (&buffers.turned, window),
                &conditions,
                &next_of(i + 1)?,
            )?;
        }
        let output = buffers.output.narrow(0, 0, batch)?;
        self.patch_out
            .forward_into(&tokens.normed, Epilogue::None, &output, &tokens.scratch)?;
        Ok(())
    }
}

/// The conditionings of a pass, each with the items next to each other that attend to it.
fn by_conditioning<'a>(items: &[Item<'a>]) -> Vec<(Range<usize>, &'a Conditioning)> {
    let mut all: Vec<(Range<usize>, &Conditioning)> = Vec::new();
    for (row, item) in items.iter().enumerate() {
        match all.last_mut() {
            Some((rows, last)) if std::ptr::eq(*last, item.conditioning) => rows.end = row + 1,
            _ => all.push((row..row + 1, item.conditioning)),
        }
    }
    all
}

/// The layer over patches: the filters `[hidden_size, channels, patch]` of a convolution whose steps are as long, with their
/// numbers in the order of frames, then channels.
fn patch_in(config: &TransformerConfig, tensors: &AdaptedTensors<'_>) -> Result<Linear, MissingTensor> {
    let (width, channels, patch) = (config.layer.hidden_size, config.in_channels, config.patch_size);
    let name = "proj_in_conv.weight";
    let filters = tensors.shaped(name, &[width, channels, patch])?;
    let rows = || {
        let rows = Tensor::zeros((width, patch * channels), filters.dtype(), filters.device())?;
        for frame in 0..patch {
            let of_frame = rows.narrow(1, frame * channels, channels)?.unsqueeze(2)?;
            ops::copy_rows(&filters.narrow(2, frame, 1)?, &of_frame)?;
        }
        Ok(rows)
    };
    let bias = tensors.shaped("proj_in_conv.bias", &[width])?;
    Ok(Linear::of(rows().map_err(of_tensor(name))?, Some(bias)))
}

/// The layer from tokens to patches: the filters `[hidden_size, channels, patch]` of a transposed convolution.
fn patch_out(config: &TransformerConfig, tensors: &AdaptedTensors<'_>) -> Result<Linear, MissingTensor> {
    let (width, patch) = (config.layer.hidden_size, config.patch_size);
    let channels = config.audio_acoustic_hidden_dim;
    let name = "proj_out_conv.weight";
    let filters = tensors.shaped(name, &[width, channels, patch])?;
    let bias = tensors.shaped("proj_out_conv.bias", &[channels])?;
    let both = || -> candle_core::Result<(Tensor, Tensor)> {
        let (dtype, device) = (filters.dtype(), filters.device());
        let rows = Tensor::zeros((patch * channels, width), dtype, device)?;
        let biases = Tensor::zeros(patch * channels, dtype, device)?;
        for frame in 0..patch {
            let of_frame = rows.narrow(0, frame * channels, channels)?.unsqueeze(2)?;
            ops::copy_rows(&filters.narrow(2, frame, 1)?.transpose(0, 1)?, &of_frame)?;
            ops::copy_rows(&bias, &biases.narrow(0, frame * channels, channels)?)?;
        }
        Ok((rows, biases))
    };
    let (rows, bias) = both().map_err(of_tensor(name))?;
    Ok(Linear::of(rows, Some(bias)))
}

fn of_tensor(name: &str) -> impl Fn(candle_core::Error) -> MissingTensor {
    move |error| MissingTensor {
        name: name.to_owned(),
        problem: error.to_string(),
    }
}

/// Whether a tensor is the weight of a layer that computes modulations, which steps do not use.
pub(super) fn is_modulator(name: &str) -> bool {
    name.starts_with("time_embed")
}

/// Whether a tensor belongs to a layer that runs over the tokens of every step: keys and values of conditions are made once.
pub(super) fn is_in_steps(name: &str) -> bool {
    let of_conditions = [".cross_attn.to_k.", ".cross_attn.to_v."];
    name.starts_with("layers.") && !of_conditions.iter().any(|part| name.contains(part))
}
