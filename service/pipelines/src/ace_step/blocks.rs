//! The transformer's blocks: diffusers' `AceStepTransformerBlock`. A block begins with normalized rows, and ends by
//! normalizing for the next.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::{Modulation, Norm, residual_norm_modulate};

use super::buffers::TokenBuffers;
use super::config::LayerConfig;
use super::layers::{Attention, FeedForward, Others};
use crate::adapters::{AdaptedTensors, SetsOfItems};
use crate::linear::Linear;
use crate::rotary::Rotations;

/// Places in a block's modulation: shift, scale and gate of attention, then of the feed-forward.
const SHIFT: usize = 0;
const SCALE: usize = 1;
const GATE: usize = 2;
const FEED_FORWARD: usize = 3;

/// A transformer block.
pub(super) struct Block {
    attention: Attention,
    cross: Attention,
    feed_forward: FeedForward,
    norms: [Tensor; 3],
    /// `[1, 6 hidden_size]`.
    table: Tensor,
    eps: f64,
}

/// A vector of six parts for each item of a batch, `[b, 6 hidden_size]`, or of fewer.
pub(super) struct ModulationVectors<'a> {
    pub(super) all: &'a Tensor,
    pub(super) width: usize,
}

impl ModulationVectors<'_> {
    pub(super) fn part(&self, number: usize) -> Result<Tensor> {
        self.all.narrow(1, number * self.width, self.width)
    }
}

/// The norm before the next layers.
pub(super) struct Next {
    /// `[hidden_size]`.
    pub(super) weight: Tensor,
    /// `[b, hidden_size]`.
    pub(super) scale: Tensor,
    pub(super) shift: Tensor,
    pub(super) eps: f64,
}

impl Next {
    pub(super) fn norm(&self) -> Norm<'_> {
        Norm::Rms {
            weight: Some(&self.weight),
            eps: self.eps,
        }
    }

    pub(super) fn modulation(&self) -> Modulation<'_> {
        Modulation {
            scale: &self.scale,
            shift: Some(&self.shift),
        }
    }
}

impl Block {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        layer: &LayerConfig,
    ) -> std::result::Result<Block, MissingTensor> {
        let width = layer.hidden_size;
        let norm = |part: &str| tensors.shaped(&format!("{name}.{part}.weight"), &[width]);
        Ok(Block {
            attention: Attention::new(tensors, &format!("{name}.self_attn"), layer)?,
            cross: Attention::new(tensors, &format!("{name}.cross_attn"), layer)?,
            feed_forward: FeedForward::new(tensors, &format!("{name}.mlp"), layer)?,
            norms: [
                norm("self_attn_norm")?,
                norm("cross_attn_norm")?,
                norm("mlp_norm")?,
            ],
            table: flat(tensors, &format!("{name}.scale_shift_table"), 6, width)?,
            eps: layer.rms_norm_eps,
        })
    }

    /// Layers that run over the tokens of a step.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let [query, _, _, output] = self.cross.linears();
        let own = self.attention.linears().into_iter();
        own.chain([query, output]).chain(self.feed_forward.linears())
    }

    /// Writes the modulation in every step to `own`, `[steps, 6 hidden_size]`, from the modulation that all blocks share.
    pub(super) fn modulate(&self, shared: &Tensor, own: &Tensor) -> Result<()> {
        ops::copy_rows(shared, own)?;
        ops::add_residual(own, &self.table, None)
    }

    /// Keys and values of its cross attention, from the embedded condition `[1, n, hidden_size]`, with a set of adapters.
    pub(super) fn keys_and_values(
        &self,
        condition: &Tensor,
        set: &SetsOfItems,
        layer: &LayerConfig,
    ) -> Result<(Tensor, Tensor)> {
        self.cross.keys_and_values(condition, set, layer)
    }

    /// The norm at the beginning of the block.
    pub(super) fn first(&self, modulation: &ModulationVectors<'_>) -> Result<Next> {
        self.next(modulation, 0)
    }

    fn next(&self, modulation: &ModulationVectors<'_>, half: usize) -> Result<Next> {
        Ok(Next {
            weight: self.norms[2 * half].clone(),
            scale: modulation.part(FEED_FORWARD * half + SCALE)?,
            shift: modulation.part(FEED_FORWARD * half + SHIFT)?,
            eps: self.eps,
        })
    }

    /// Runs the block, each item with its modulation and the condition that it attends to, and normalizes for `next`.
    pub(super) fn forward(
        &self,
        buffers: &TokenBuffers,
        modulation: &ModulationVectors<'_>,
        (turned, window): (&Rotations, Option<usize>),
        conditions: &[Others<'_>],
        next: &Next,
    ) -> Result<()> {
        let TokenBuffers { sum, normed, .. } = buffers;
        self.attention.to_itself(buffers, turned, window)?;
        let gate = modulation.part(GATE)?;
        let cross = Norm::Rms {
            weight: Some(&self.norms[1]),
            eps: self.eps,
        };
        residual_norm_modulate(sum, normed, Some((&gate).into()), cross, None, normed)?;
        self.cross.to_others(buffers, conditions)?;
        let inside = self.next(modulation, 1)?;
        residual_norm_modulate(
            sum,
            normed,
            None,
            inside.norm(),
            Some(inside.modulation()),
            normed,
        )?;
        self.feed_forward.forward(buffers)?;
        let gate = modulation.part(FEED_FORWARD + GATE)?;
        residual_norm_modulate(
            sum,
            normed,
            Some((&gate).into()),
            next.norm(),
            Some(next.modulation()),
            normed,
        )
    }
}

/// A table `[1, parts, width]` as one row.
pub(super) fn flat(
    tensors: &AdaptedTensors<'_>,
    name: &str,
    parts: usize,
    width: usize,
) -> std::result::Result<Tensor, MissingTensor> {
    let table = tensors.shaped(name, &[1, parts, width])?;
    table.reshape((1, parts * width)).map_err(|error| MissingTensor {
        name: name.to_owned(),
        problem: error.to_string(),
    })
}
