//! The layers that FLUX's transformer and its ControlNets share: the embedders and the blocks.

use candle_core::{DType, Device, Tensor};
use gpu::MissingTensor;
use ops::Epilogue;

use super::config::TransformerConfig;
use super::positions::{positions, reference_positions, rotations};
use super::transformer::Prompted;
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::mmdit::{BlockHook, Blocks, Buffers, CacheOfPass, Modulations, Next, Part, Pass, StepEmbedder};
use crate::rotary::Rotations;

/// Embedders and blocks over resident tensors. It holds handles only, and allocates nothing.
pub(super) struct Trunk {
    pub(super) config: TransformerConfig,
    pub(super) picture_in: Linear,
    text_in: Linear,
    embedder: StepEmbedder,
    blocks: Blocks,
}

/// State shared by all steps of a request: rotations, and the modulation of every block for every step.
pub(super) struct TrunkConditioning {
    /// T5's hidden states, `[batch, tokens, joint_attention_dim]`.
    sequence: Tensor,
    /// A token before the text, `[1, 1, width]`: the mode of a ControlNet.
    mode: Option<Tensor>,
    rotations: Rotations,
    modulations: Modulations,
}

impl Trunk {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(
        config: &TransformerConfig,
        tensors: &AdaptedTensors<'_>,
    ) -> Result<Trunk, MissingTensor> {
        let width = config.width();
        let sizes = (config.pooled_projection_dim, width);
        Ok(Trunk {
            picture_in: Linear::new(tensors, "x_embedder", config.in_channels, width)?,
            text_in: Linear::new(tensors, "context_embedder", config.joint_attention_dim, width)?,
            embedder: StepEmbedder::new(tensors, "time_text_embed", sizes, config.guidance_embeds)?,
            blocks: Blocks::new(config.blocks(), tensors)?,
            config: config.clone(),
        })
    }

    /// SiLU of the embedded timesteps, guidance and pooled text, `[steps, width]`. `times` are the timesteps, from 0 to 1
    /// (the sigmas), one per step.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(super) fn embedded(&self, prompted: &Prompted<'_>, times: &[f32]) -> candle_core::Result<Tensor> {
        self.embedder.forward(times, prompted.guidance, prompted.pooled)
    }

    /// Computes the shared state from `vector`, the result of [`Trunk::embedded`]. `mode` is a token before the text.
    ///
    /// # Errors
    /// When shapes do not match; when a streamed block cannot be read.
    pub(super) fn condition(
        &self,
        prompted: &Prompted<'_>,
        vector: &Tensor,
        mode: Option<Tensor>,
    ) -> Result<TrunkConditioning, StageError> {
        let device = prompted.sequence.device();
        let text = prompted.sequence.dim(1)? + usize::from(mode.is_some());
        let mut places = positions(text, prompted.rows, prompted.columns);
        if let Some(reference) = prompted.reference {
            places.extend(reference_positions(reference.rows, reference.columns));
        }
        Ok(TrunkConditioning {
            sequence: prompted.sequence.clone(),
            mode,
            rotations: rotations(&places, self.config.axes_dims_rope, device)?,
            modulations: self.blocks.modulate(vector)?,
        })
    }

    /// Buffers of steps for a batch of pictures, with these token counts of text and of each picture. `further` layers
    /// compute in them too.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn buffers<'a>(
        &'a self,
        counts: (usize, usize, usize),
        further: impl IntoIterator<Item = &'a Linear>,
        on: (DType, &Device),
    ) -> candle_core::Result<Buffers> {
        let own = [&self.picture_in, &self.text_in];
        self.blocks.buffers(counts, own.into_iter().chain(further), on)
    }

    /// Embeds the text, and runs all blocks over the rows of the picture, which are embedded already. `wanted` are the rows
    /// that are needed after the last block, normalized for `last`; blocks may be left out by the cache. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of candle, of `go_on`, and of `beside`.
    pub(super) fn run(
        &self,
        buffers: &Buffers,
        conditioning: &TrunkConditioning,
        step: usize,
        (wanted, last, cache): (&Part, &Next, CacheOfPass<'_>),
        beside: &mut dyn BlockHook,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let text = buffers.text()?;
        let scratch = buffers.scratch();
        match &conditioning.mode {
            None => {
                self.text_in
                    .forward_into(&conditioning.sequence, Epilogue::None, &text.hidden, scratch)?
            }
            Some(mode) => {
                let tokens = conditioning.sequence.dim(1)?;
                ops::copy_rows(mode, &text.hidden.narrow(1, 0, 1)?)?;
                let rest = text.hidden.narrow(1, 1, tokens)?;
                self.text_in
                    .forward_into(&conditioning.sequence, Epilogue::None, &rest, scratch)?;
            }
        }
        let pass = Pass {
            buffers,
            modulations: &conditioning.modulations,
            rotations: &conditioning.rotations,
            step,
            apart: None,
            wanted,
            last,
            cache,
        };
        self.blocks.run(&pass, beside, go_on)
    }
}
