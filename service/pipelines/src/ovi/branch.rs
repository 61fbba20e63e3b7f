//! One branch of the fusion model: Wan's blocks with what they read of the other branch, and the embeddings of times and texts.

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, MissingTensor, WeightStream};
use ops::{Epilogue, Nonlinearity};

use super::config::BranchConfig;
use super::fusion::{OtherBranch, attend};
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::attention::AttentionPrecision;
use crate::linear::Linear;
use crate::mmdit::TwoLayers;
use crate::rotary::Rotations;
use crate::wan::blocks::{Block, KeysValues};
use crate::wan::buffers::{Buffers, Next, Part};
use crate::wan::times::{StepModulations, TimeLayers, Times, TokenCounts};

type Missing<T> = Result<T, MissingTensor>;

/// A block, and what it reads of the other branch.
pub(super) struct FusionBlock {
    pub(super) block: Block,
    pub(super) other: OtherBranch,
}

/// The layers of a branch, without those that embed its latent.
pub(super) struct Branch {
    time: TimeLayers,
    text: TwoLayers,
    pub(super) blocks: Vec<FusionBlock>,
    last: Linear,
    config: BranchConfig,
}

/// Buffers of a branch's steps.
pub(super) struct BranchBuffers {
    pub(super) buffers: Buffers,
    pub(super) counts: TokenCounts,
    modulations: StepModulations,
    /// `[1, sampled, token width]`.
    pub(super) velocity: Tensor,
}

impl BranchBuffers {
    /// The same buffers, for attention of a branch's tokens to each other as asked.
    pub(super) fn with_attention(self, attention: AttentionPrecision) -> BranchBuffers {
        BranchBuffers {
            buffers: self.buffers.with_attention(attention),
            ..self
        }
    }
}

/// A pass over a branch's blocks.
pub(super) struct Pass<'a> {
    branch: &'a Branch,
    buffers: &'a BranchBuffers,
    parts: Vec<Part>,
    pub(super) whole: Part,
    pub(super) rotations: &'a Rotations,
}

impl Branch {
    /// The layers with the tensors under `{name}.`; a token of the velocity has this width.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        config: &BranchConfig,
        token_width: usize,
    ) -> Missing<Branch> {
        let (width, shape) = (config.dim, config.blocks());
        let text = format!("{name}.condition_embedder.text_embedder");
        let names = (0..config.num_layers).map(|block| format!("{name}.blocks.{block}"));
        let block = |name: String| {
            Ok(FusionBlock {
                other: OtherBranch::new(tensors, &format!("{name}.attn2"), &shape)?,
                block: Block::new(tensors, &name, &shape)?,
            })
        };
        Ok(Branch {
            time: TimeLayers::new(tensors, &format!("{name}."), config.num_layers, width)?,
            text: TwoLayers::new(tensors, &text, (config.text_dim, width), Nonlinearity::GeluTanh)?,
            blocks: names.map(block).collect::<Missing<_>>()?,
            last: Linear::new(tensors, &format!("{name}.proj_out"), width, token_width)?,
            config: config.clone(),
        })
    }

    /// The embedded times of the steps, by their sinusoids, `[steps + 1, 256]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn times(&self, sinusoids: &Tensor) -> candle_core::Result<Times> {
        self.time.times(sinusoids)
    }

    /// A text's states, `[1, tokens, text_dim]`, with rows of zeros after them, embedded.
    ///
    /// # Errors
    /// Errors of the device; [`StageError::BadInput`] for a text that is too long.
    pub(super) fn embedded_text(&self, states: &Tensor) -> Result<Tensor, StageError> {
        let (batch, tokens, width) = states.dims3()?;
        let most = self.config.text_len;
        if tokens > most {
            let problem = format!("a text of {tokens} tokens where {most} are the most");
            return Err(StageError::BadInput(problem));
        }
        let padded = Tensor::zeros((batch, most, width), states.dtype(), states.device())?;
        ops::copy_rows(states, &padded.narrow(1, 0, tokens)?)?;
        Ok(self.text.forward(&padded)?)
    }

    /// Linear layers that a step runs.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let of_blocks = self
            .blocks
            .iter()
            .flat_map(|of| of.block.layers().chain(of.other.layers()));
        of_blocks.chain([&self.last])
    }

    /// Buffers of steps over these tokens. The layers of both branches use the scratch of one.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn buffers<'a>(
        &self,
        counts: TokenCounts,
        layers: impl IntoIterator<Item = &'a Linear>,
        token_width: usize,
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<BranchBuffers> {
        let on = (dtype, device);
        Ok(BranchBuffers {
            buffers: Buffers::new(self.config.blocks(), (1, counts.all()), layers, on)?,
            counts,
            modulations: self.time.modulations(counts, on)?,
            velocity: Tensor::zeros((1, counts.sampled, token_width), dtype, device)?,
        })
    }

    /// Sets the modulations to those of a step.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn set_time(
        &self,
        times: &Times,
        step: usize,
        buffers: &BranchBuffers,
    ) -> candle_core::Result<()> {
        self.time.set(&buffers.modulations, times, step)
    }

    /// Begins a pass over the embedded tokens, whose first block is `first`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn enter<'a>(
        &'a self,
        first: usize,
        buffers: &'a BranchBuffers,
        rotations: &'a Rotations,
    ) -> candle_core::Result<Pass<'a>> {
        let pass = Pass {
            branch: self,
            buffers,
            parts: buffers.counts.parts(&buffers.buffers)?,
            whole: buffers.buffers.whole()?,
            rotations,
        };
        for (part, next) in pass.parts.iter().zip(pass.norms_of(first)?) {
            part.enter(&next)?;
        }
        Ok(pass)
    }
}

impl Pass<'_> {
    /// The norms of the parts at the beginning of a block, or after the last one.
    fn norms_of(&self, number: usize) -> candle_core::Result<Vec<Next<'_>>> {
        let block = self.branch.blocks.get(number).map(|of| &of.block);
        self.buffers.modulations.norms(number, block, &self.whole.branch)
    }

    /// The attention of a block's tokens to each other; normalizes for their attention to texts.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn own_attention(&self, number: usize) -> candle_core::Result<()> {
        let FusionBlock { block, .. } = &self.branch.blocks[number];
        let scratch = self.buffers.buffers.scratch();
        block
            .own
            .forward(&self.parts, &self.whole, self.rotations, scratch)?;
        let next = block.cross.next(&self.whole.branch)?;
        for (part, modulation) in self.parts.iter().zip(self.buffers.modulations.of_block(number)?) {
            part.pass_on(&part.query_rows, Some(&modulation.attention_gate()?), &next)?;
        }
        Ok(())
    }

    /// The attention to a text and to the other branch, and the feed-forward; normalizes for the block `next`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn rest(
        &self,
        number: usize,
        seen: (&KeysValues, &KeysValues),
        next: usize,
    ) -> candle_core::Result<()> {
        let FusionBlock { block, .. } = &self.branch.blocks[number];
        let (parts, whole, scratch) = (&self.parts, &self.whole, self.buffers.buffers.scratch());
        block.cross.queries(parts, whole, scratch)?;
        attend(block, whole, seen, self.rotations)?;
        block.cross.close(whole, scratch)?;
        let modulations = self.buffers.modulations.of_block(number)?;
        for (part, modulation) in parts.iter().zip(&modulations) {
            let before = block.before_feed_forward(modulation, &whole.branch)?;
            part.pass_on(&part.branch, None, &before)?;
        }
        block.feed_forward.forward(parts, whole, scratch)?;
        for ((part, modulation), next) in parts.iter().zip(&modulations).zip(self.norms_of(next)?) {
            part.pass_on(&part.branch, Some(&modulation.feed_forward_gate()?), &next)?;
        }
        Ok(())
    }

    /// The velocity of the sampled tokens, after all blocks.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn close(&self) -> candle_core::Result<()> {
        let BranchBuffers {
            buffers,
            counts,
            velocity,
            ..
        } = self.buffers;
        let normed = &buffers.part(counts.first, counts.sampled)?.branch;
        self.branch
            .last
            .forward_into(normed, Epilogue::None, velocity, buffers.scratch())
    }
}

/// The keys and values of embedded texts in every block, `texts` by branch: the same in all steps. `go_on` is called before every
/// block.
///
/// # Errors
/// Errors of the device, and of `go_on`; when a streamed block cannot be read.
pub(super) fn keys_values(
    branches: [&Branch; 2],
    texts: [&Tensor; 2],
    stream: &WeightStream,
    go_on: &mut dyn FnMut() -> Result<(), StageError>,
) -> Result<Vec<[KeysValues; 2]>, StageError> {
    let [video, audio] = branches;
    let blocks = video.blocks.iter().zip(&audio.blocks).enumerate();
    let mut all = Vec::with_capacity(video.blocks.len());
    for (number, (video, audio)) in blocks {
        go_on()?;
        stream.enter(BlockPlace::once(number))?;
        all.push([
            video.block.cross.keys_values(texts[0])?,
            audio.block.cross.keys_values(texts[1])?,
        ]);
    }
    Ok(all)
}
