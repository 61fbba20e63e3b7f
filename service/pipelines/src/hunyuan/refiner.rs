//! The refiner of the text: diffusers' `HunyuanVideoTokenRefiner`. It depends on the timestep, so it runs in each step.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::{Activation, Epilogue, Gate, Mask, Nonlinearity, Scratch, linears_into};

use super::config::TransformerConfig;
use crate::adapters::AdaptedTensors;
use crate::layer_norm::LayerNorm;
use crate::linear::Linear;
use crate::mmdit::{Part, StepEmbedder};

/// Epsilon of its norms.
const EPS: f64 = 1e-6;

/// Prefix of its tensors.
const NAME: &str = "context_embedder";

/// `HunyuanVideoIndividualTokenRefinerBlock`.
struct Block {
    norm: LayerNorm,
    projections: [Linear; 3],
    output: Linear,
    inner_norm: LayerNorm,
    up: Linear,
    down: Linear,
    gates: Linear,
}

impl Block {
    fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        width: usize,
    ) -> std::result::Result<Block, MissingTensor> {
        let square = |part: &str| Linear::new(tensors, &format!("{name}.attn.{part}"), width, width);
        Ok(Block {
            norm: LayerNorm::new(tensors, &format!("{name}.norm1"), width, EPS)?,
            projections: [square("to_q")?, square("to_k")?, square("to_v")?],
            output: square("to_out.0")?,
            inner_norm: LayerNorm::new(tensors, &format!("{name}.norm2"), width, EPS)?,
            up: Linear::new(tensors, &format!("{name}.ff.net.0.proj"), width, 4 * width)?,
            down: Linear::new(tensors, &format!("{name}.ff.net.2"), 4 * width, width)?,
            gates: Linear::new(tensors, &format!("{name}.norm_out.linear"), width, 2 * width)?,
        })
    }

    /// Runs over the rows of a text; `gates` are those of the step, of attention and of the feed-forward, `[1, width]`.
    fn forward(&self, text: &Part, gates: &[Tensor; 2], scratch: &Scratch) -> Result<()> {
        let normed = || Activation::Numbers(&text.branch);
        ops::norm_modulate(&text.hidden, self.norm.as_norm(), None, normed())?;
        let [query, key, value] = &self.projections;
        let layers = [query.to(&text.query)?, key.to(&text.key)?, value.to(&text.value)?];
        linears_into(normed(), &layers, Epilogue::None, scratch)?;
        let scale = (text.query.dim(3)? as f64).powf(-0.5);
        // The reference masks the padding of a text, which is not computed here.
        ops::attention(
            &text.query,
            &text.key,
            &text.value,
            scale,
            Mask::None,
            &text.attended,
        )?;
        self.output
            .forward_into(&text.attended, Epilogue::None, &text.branch, scratch)?;
        ops::residual_norm_modulate(
            &text.hidden,
            &text.branch,
            Some(Gate::from(&gates[0])),
            self.inner_norm.as_norm(),
            None,
            normed(),
        )?;
        self.up
            .forward_into(&text.branch, Epilogue::None, &text.inner, scratch)?;
        ops::activate(&text.inner, Nonlinearity::Silu)?;
        self.down
            .forward_into(&text.inner, Epilogue::None, &text.branch, scratch)?;
        ops::add_residual(&text.hidden, &text.branch, Some(Gate::from(&gates[1])))
    }

    fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.projections
            .iter()
            .chain([&self.output, &self.up, &self.down])
    }
}

/// The refiner over resident tensors.
pub(super) struct Refiner {
    text_in: Linear,
    embedder: StepEmbedder,
    blocks: Vec<Block>,
}

/// The text of a request, and the gates of every block for every step, `[steps, width]` each.
pub(super) struct RefinerConditioning {
    /// States of the text encoder, `[1, tokens, text_embed_dim]`.
    text: Tensor,
    gates: Vec<[Tensor; 2]>,
}

impl RefinerConditioning {
    /// Number of text tokens.
    pub(super) fn tokens(&self) -> Result<usize> {
        self.text.dim(1)
    }
}

impl Refiner {
    /// Takes the tensors from a component and checks their shapes.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub(super) fn new(
        config: &TransformerConfig,
        tensors: &AdaptedTensors<'_>,
    ) -> std::result::Result<Refiner, MissingTensor> {
        let (width, text) = (config.width(), config.text_embed_dim);
        let block = |i| {
            Block::new(
                tensors,
                &format!("{NAME}.token_refiner.refiner_blocks.{i}"),
                width,
            )
        };
        Ok(Refiner {
            text_in: Linear::new(tensors, &format!("{NAME}.proj_in"), text, width)?,
            embedder: StepEmbedder::new(tensors, &format!("{NAME}.time_text_embed"), (text, width), false)?,
            blocks: (0..config.num_refiner_layers)
                .map(block)
                .collect::<std::result::Result<_, _>>()?,
        })
    }

    /// Layers that a step runs.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let blocks = self.blocks.iter().flat_map(Block::layers);
        blocks.chain([&self.text_in])
    }

    /// Computes the state that steps share. `mean` is the mean of the text's states, `[1, text_embed_dim]`; `sigmas` are those
    /// of the steps.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(super) fn condition(
        &self,
        text: &Tensor,
        mean: &Tensor,
        sigmas: &[f32],
    ) -> Result<RefinerConditioning> {
        // The refiner has no guidance.
        let vector = self.embedder.forward(sigmas, 0.0, mean)?;
        let gates = self.blocks.iter().map(|block| -> Result<[Tensor; 2]> {
            let gates = block.gates.forward(&vector)?;
            let width = gates.dim(1)? / 2;
            Ok([gates.narrow(1, 0, width)?, gates.narrow(1, width, width)?])
        });
        Ok(RefinerConditioning {
            text: text.clone(),
            gates: gates.collect::<Result<_>>()?,
        })
    }

    /// Refines the text of a step into the residual stream of `rows`.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn forward(
        &self,
        conditioning: &RefinerConditioning,
        step: usize,
        rows: &Part,
        scratch: &Scratch,
    ) -> Result<()> {
        self.text_in
            .forward_into(&conditioning.text, Epilogue::None, &rows.hidden, scratch)?;
        for (block, [attention, feed_forward]) in self.blocks.iter().zip(&conditioning.gates) {
            let gates = [attention.narrow(0, step, 1)?, feed_forward.narrow(0, step, 1)?];
            block.forward(rows, &gates, scratch)?;
        }
        Ok(())
    }
}
