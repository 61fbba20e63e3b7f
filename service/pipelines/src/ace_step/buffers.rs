//! The buffers of layers and of steps, which compute in them and allocate nothing, and their memory.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use ops::{Scratch, allocated};

use super::condition::LIBRARIES;
use super::config::{LayerConfig, TransformerConfig};
use crate::adapters::SetsOfItems;
use crate::rotary::Rotations;

/// Buffers of a pass over `[batch, tokens]`, reused by every layer. A row has queries, keys, values and the output of attention one
/// after the other, or in the same memory both halves of the feed-forward: the layers of each are one product where copies of their
/// weights follow each other too.
#[derive(Debug)]
pub(super) struct TokenBuffers {
    /// The residual stream, `[batch, tokens, hidden_size]`.
    pub(super) sum: Tensor,
    /// Normalized input of the next layers, or their output before it is added.
    pub(super) normed: Tensor,
    /// `[batch, tokens, heads, head_dim]`, followed by keys, values and the output of attention in each row.
    pub(super) query: Tensor,
    /// The same of all items as one, `[1, batch tokens, heads, head_dim]`.
    query_rows: Tensor,
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    pub(super) attended: Tensor,
    attended_rows: Tensor,
    /// `[batch, tokens, intermediate_size]`.
    pub(super) gate: Tensor,
    pub(super) raised: Tensor,
    /// Workspace of linear layers.
    pub(super) scratch: Arc<Scratch>,
    /// The set of adapters of each item.
    pub(super) sets: SetsOfItems,
}

/// Buffers of the steps of requests of equal length, one or several in each pass.
#[derive(Debug)]
pub struct StepBuffers {
    pub(super) tokens: TokenBuffers,
    pub(super) turned: Rotations,
    /// Inputs of each request, `[tokens * patch, in_channels]`: source, mask and latent of each frame; zeros after the last.
    pub(super) inputs: Vec<Tensor>,
    /// `[requests, tokens, patch * channels]`.
    pub(super) output: Tensor,
    pub(super) frames: usize,
    pub(super) channels: usize,
}

impl StepBuffers {
    /// The input of the request at a place.
    pub(super) fn input(&self, place: usize) -> Result<&Tensor> {
        match self.inputs.get(place) {
            Some(input) => Ok(input),
            None => candle_core::bail!("no place {place} in a pass"),
        }
    }

    /// Takes the source and mask of a request, `[frames, 2 channels]`.
    ///
    /// # Errors
    /// When there is no such place, or shapes do not match; errors of the device.
    pub(super) fn put_context(&self, place: usize, context: &Tensor) -> Result<()> {
        self.put(place, (0, 2 * self.channels), context)
    }

    /// Takes the latents of a request, `[frames, channels]`.
    ///
    /// # Errors
    /// As of [`StepBuffers::put_context`].
    pub(super) fn put_latents(&self, place: usize, latents: &Tensor) -> Result<()> {
        self.put(place, (2 * self.channels, self.channels), latents)
    }

    fn put(&self, place: usize, (first, count): (usize, usize), columns: &Tensor) -> Result<()> {
        if columns.dims() != [self.frames, count] {
            let found = columns.dims();
            candle_core::bail!("{found:?} in a pass of {} frames by {count}", self.frames);
        }
        let input = self.input(place)?.narrow(0, 0, self.frames)?;
        ops::copy_rows(columns, &input.narrow(1, first, count)?)
    }

    /// The velocity of the item of this number in the pass that was computed last, `[frames, channels]`, valid until the next pass.
    ///
    /// # Errors
    /// When there is no such item.
    pub(super) fn velocity(&self, item: usize) -> Result<Tensor> {
        let (_, tokens, width) = self.output.dims3()?;
        let rows = self
            .output
            .get(item)?
            .reshape((tokens * width / self.channels, self.channels))?;
        rows.narrow(0, 0, self.frames)
    }
}

/// Elements from one token to the next of queries, keys, values and the output of attention, in whole heads.
pub(super) fn row_width(layer: &LayerConfig) -> usize {
    let of_attention = 2 * layer.queries() + 2 * layer.keys();
    let halves = 2 * layer.intermediate_size;
    of_attention.max(halves).next_multiple_of(layer.head_dim)
}

impl TokenBuffers {
    /// For `tokens` tokens in each item of a batch; the residual stream in its own dtype.
    pub(super) fn new(
        layer: &LayerConfig,
        (batch, tokens): (usize, usize),
        of_sum: DType,
        scratch_bytes: u64,
        (dtype, device): (DType, &Device),
    ) -> Result<TokenBuffers> {
        let (all, head) = (batch * tokens, layer.head_dim);
        let (heads, keys, inner) = (
            layer.num_attention_heads,
            layer.num_key_value_heads,
            layer.intermediate_size,
        );
        let width = row_width(layer);
        let shared = Tensor::zeros(all * width, dtype, device)?;
        let in_heads = |shape: (usize, usize)| shared.reshape((shape.0, shape.1, width / head, head));
        let (joint, joint_rows) = (in_heads((batch, tokens))?, in_heads((1, all))?);
        let halves = shared.reshape((batch, tokens, width))?;
        let after = heads + 2 * keys;
        let rows = (batch, tokens, layer.hidden_size);
        Ok(TokenBuffers {
            sum: Tensor::zeros(rows, of_sum, device)?,
            normed: Tensor::zeros(rows, dtype, device)?,
            query: joint.narrow(2, 0, heads)?,
            query_rows: joint_rows.narrow(2, 0, heads)?,
            key: joint.narrow(2, heads, keys)?,
            value: joint.narrow(2, heads + keys, keys)?,
            attended: joint.narrow(2, after, heads)?,
            attended_rows: joint_rows.narrow(2, after, heads)?,
            gate: halves.narrow(2, 0, inner)?,
            raised: halves.narrow(2, inner, inner)?,
            scratch: Arc::new(Scratch::new(scratch_bytes, device)?),
            sets: SetsOfItems::first_of(batch),
        })
    }

    /// The part of the first `items` items of the batch, which have these sets of adapters.
    pub(super) fn first(&self, items: usize, sets: SetsOfItems) -> Result<TokenBuffers> {
        let first = |buffer: &Tensor| buffer.narrow(0, 0, items);
        let (_, tokens, _) = self.sum.dims3()?;
        let rows = |buffer: &Tensor| buffer.narrow(1, 0, items * tokens);
        Ok(TokenBuffers {
            sum: first(&self.sum)?,
            normed: first(&self.normed)?,
            query: first(&self.query)?,
            query_rows: rows(&self.query_rows)?,
            key: first(&self.key)?,
            value: first(&self.value)?,
            attended: first(&self.attended)?,
            attended_rows: rows(&self.attended_rows)?,
            gate: first(&self.gate)?,
            raised: first(&self.raised)?,
            scratch: Arc::clone(&self.scratch),
            sets,
        })
    }

    /// Queries of items of the batch as those of one, `[1, items tokens, heads, head_dim]`, and what they attend to.
    pub(super) fn as_one(&self, items: Range<usize>) -> Result<(Tensor, Tensor)> {
        let (_, tokens, _) = self.sum.dims3()?;
        let rows = |buffer: &Tensor| buffer.narrow(1, items.start * tokens, items.len() * tokens);
        Ok((rows(&self.query_rows)?, rows(&self.attended_rows)?))
    }

    /// Bytes of the buffers for `tokens` tokens, without the workspace of linear layers.
    pub(super) fn bytes(layer: &LayerConfig, tokens: usize, of_sum: DType, dtype: DType) -> u64 {
        let size = dtype.size_in_bytes();
        allocated(tokens * layer.hidden_size * of_sum.size_in_bytes())
            + allocated(tokens * layer.hidden_size * size)
            + allocated(tokens * row_width(layer) * size)
    }
}

/// Predicted activation bytes of `steps` steps over `frames` latent frames, with conditions of these token counts:
/// the buffers, rotations, the modulation of all steps, keys and values of the conditions, the workspace of attention where
/// cuDNN has no plan, and the reordered layers. Not included is the scratch of quantized layers ([`ops::linear_scratch`]).
pub fn denoise_scratch(
    config: &TransformerConfig,
    frames: usize,
    conditions: &[usize],
    steps: u32,
    dtype: DType,
) -> u64 {
    let (layer, size) = (&config.layer, dtype.size_in_bytes());
    let (width, tokens) = (layer.hidden_size, config.tokens(frames));
    let channels = config.audio_acoustic_hidden_dim;
    let rotations = tokens * layer.head_dim * size_of::<f32>();
    let longest = conditions.iter().copied().max().unwrap_or(0);
    let embedded = longest * (width + config.condition_width()) * size;
    let workspace = ops::attention_workspace(layer.num_attention_heads, tokens, tokens.max(longest));
    let reordered = config.patch_size * (config.in_channels + channels) * width * size;
    let others = rotations + embedded + workspace + reordered;
    request_scratch(config, frames, conditions, steps, dtype) + others as u64 + LIBRARIES
}

/// Predicted activation bytes of each further request in passes over several requests, with modulations of `rows` rows: the
/// part of [`denoise_scratch`] that every request has.
pub fn request_scratch(
    config: &TransformerConfig,
    frames: usize,
    conditions: &[usize],
    rows: u32,
    dtype: DType,
) -> u64 {
    let (layer, size) = (&config.layer, dtype.size_in_bytes());
    let (width, tokens, layers) = (layer.hidden_size, config.tokens(frames), config.num_hidden_layers);
    let channels = config.audio_acoustic_hidden_dim;
    let modulations = (6 * layers + 16) * width * rows as usize * size;
    let attended: usize = conditions.iter().sum();
    let kept = 2 * attended * layer.keys() * layers * size;
    // The latent in f32 and in the dtype, its context and output, and velocities that guidance mixes.
    let latents = tokens * config.patch_size * channels * (4 + 8 * size);
    TokenBuffers::bytes(layer, tokens, dtype, dtype) + (modulations + kept + latents) as u64
}
