//! What FLUX's transformer and its ControlNets have in common: the embedders and the blocks.

use candle_core::{DType, Device, Tensor};
use gpu::MissingTensor;
use ops::{Epilogue, Nonlinearity};

use super::blocks::{DoubleBlock, SingleBlock};
use super::buffers::{Added, FluxBuffers, Layers, Next, Part};
use super::config::TransformerConfig;
use super::positions::{positions, reference_positions, rotations};
use super::transformer::Prompted;
use crate::StageError;
use crate::adapters::AdaptedTensors;
use crate::linear::{Linear, largest_scratch};
use crate::rotary::Rotations;
use crate::sinusoids::sinusoids;

/// Width of the sinusoidal embedding of timesteps and guidance.
const SINUSOIDS: usize = 256;

/// Embedders and blocks over resident tensors. It holds handles only, and allocates nothing.
pub(super) struct Trunk {
    pub(super) config: TransformerConfig,
    pub(super) picture_in: Linear,
    text_in: Linear,
    timestep: TwoLayers,
    guidance: Option<TwoLayers>,
    pooled: TwoLayers,
    pub(super) double: Vec<DoubleBlock>,
    pub(super) single: Vec<SingleBlock>,
}

/// State shared by all steps of a request: rotations, and the modulation of every block for every step (from a
/// quarter of the weights, which are only used here).
pub(super) struct TrunkConditioning {
    /// T5's hidden states, `[batch, tokens, joint_attention_dim]`.
    sequence: Tensor,
    /// A token before the text, `[1, 1, width]`: the mode of a ControlNet.
    mode: Option<Tensor>,
    pub(super) rotations: Rotations,
    double: Vec<(Vec<Tensor>, Vec<Tensor>)>,
    single: Vec<Vec<Tensor>>,
}

/// Linear, SiLU, linear.
struct TwoLayers {
    first: Linear,
    second: Linear,
}

impl TwoLayers {
    fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        inputs: usize,
        width: usize,
    ) -> Result<TwoLayers, MissingTensor> {
        let name = format!("time_text_embed.{name}_embedder");
        Ok(TwoLayers {
            first: Linear::new(tensors, &format!("{name}.linear_1"), inputs, width)?,
            second: Linear::new(tensors, &format!("{name}.linear_2"), width, width)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let hidden = self.first.forward(x)?;
        ops::activate(&hidden, Nonlinearity::Silu)?;
        self.second.forward(&hidden)
    }
}

/// A block, by its place among those of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockPlace {
    Double(usize),
    Single(usize),
}

/// What goes along with the blocks of a pass.
pub(super) trait BlockHook {
    /// What a block adds to the residual of the generated picture.
    fn added(&self, _block: BlockPlace) -> Vec<Added<'_>> {
        Vec::new()
    }

    /// Called behind every block, when the residual is whole.
    ///
    /// # Errors
    /// Its own.
    fn behind(&mut self, _block: BlockPlace, _buffers: &FluxBuffers) -> Result<(), StageError> {
        Ok(())
    }
}

/// Nothing beside the blocks.
pub(super) struct NoHook;

impl BlockHook for NoHook {}

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
        let guidance = config
            .guidance_embeds
            .then(|| TwoLayers::new(tensors, "guidance", SINUSOIDS, width))
            .transpose()?;
        let double = (0..config.num_layers)
            .map(|i| DoubleBlock::new(tensors, &format!("transformer_blocks.{i}"), config))
            .collect::<Result<_, _>>()?;
        let single = (0..config.num_single_layers)
            .map(|i| SingleBlock::new(tensors, &format!("single_transformer_blocks.{i}"), config))
            .collect::<Result<_, _>>()?;
        Ok(Trunk {
            picture_in: Linear::new(tensors, "x_embedder", config.in_channels, width)?,
            text_in: Linear::new(tensors, "context_embedder", config.joint_attention_dim, width)?,
            timestep: TwoLayers::new(tensors, "timestep", SINUSOIDS, width)?,
            guidance,
            pooled: TwoLayers::new(tensors, "text", config.pooled_projection_dim, width)?,
            double,
            single,
            config: config.clone(),
        })
    }

    /// SiLU of the embedded timesteps, guidance and pooled text, `[steps, width]`. `times` are the timesteps, from 0 to 1
    /// (the sigmas), one per step.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(super) fn embedded(&self, prompted: &Prompted<'_>, times: &[f32]) -> candle_core::Result<Tensor> {
        let (device, dtype) = (prompted.sequence.device(), prompted.sequence.dtype());
        let embedded = |thousandths: Vec<f32>| sinusoids(&thousandths, SINUSOIDS, dtype, device);
        let vector = self
            .timestep
            .forward(&embedded(times.iter().map(|t| t * 1000.0).collect())?)?;
        if let Some(layers) = &self.guidance {
            let guidance = embedded(vec![prompted.guidance * 1000.0])?;
            ops::add_residual(&vector, &layers.forward(&guidance)?, None)?;
        }
        ops::add_residual(&vector, &self.pooled.forward(prompted.pooled)?, None)?;
        ops::activate(&vector, Nonlinearity::Silu)?;
        Ok(vector)
    }

    /// Computes the shared state from what [`Trunk::embedded`] gives. `mode` is a token before the text.
    ///
    /// # Errors
    /// When shapes do not match.
    pub(super) fn condition(
        &self,
        prompted: &Prompted<'_>,
        vector: &Tensor,
        mode: Option<Tensor>,
    ) -> candle_core::Result<TrunkConditioning> {
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
            double: self
                .double
                .iter()
                .map(|block| block.modulate(vector))
                .collect::<Result<_, _>>()?,
            single: self
                .single
                .iter()
                .map(|block| block.modulate(vector))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Requirements of the blocks and embedders, and of `further` layers, on the buffers.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn layers<'a>(
        &'a self,
        further: impl IntoIterator<Item = &'a Linear>,
        tokens: usize,
        dtype: DType,
    ) -> candle_core::Result<Layers> {
        let double = self.double.iter().flat_map(DoubleBlock::layers);
        let single = self.single.iter().flat_map(SingleBlock::layers);
        let own = double.chain(single).chain([&self.picture_in, &self.text_in]);
        let all: Vec<&Linear> = own.chain(further).collect();
        let mut take_codes = false;
        for layer in &all {
            take_codes |= layer.takes_codes(dtype)?;
        }
        Ok(Layers {
            take_codes,
            scratch_bytes: largest_scratch(all, tokens, dtype),
        })
    }

    /// Buffers of steps for a batch of pictures, with these token counts of text and of each picture.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn buffers(
        &self,
        (batch, text, picture): (usize, usize, usize),
        layers: Layers,
        on: (DType, &Device),
    ) -> candle_core::Result<FluxBuffers> {
        FluxBuffers::new(&self.config, (batch, text, picture), layers, on)
    }

    /// Embeds the text, and runs all blocks over the rows of the picture, which are embedded already. `wanted` are the rows
    /// that are needed behind the last block, normalized for `last`. `go_on` is called before every block.
    ///
    /// # Errors
    /// Errors of candle, of `go_on`, and of what is beside.
    pub(super) fn run(
        &self,
        buffers: &FluxBuffers,
        conditioning: &TrunkConditioning,
        step: usize,
        (wanted, last): (&Part, &Next),
        beside: &mut dyn BlockHook,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let (picture, text, whole) = (buffers.picture()?, buffers.text()?, buffers.whole()?);
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
        let single_at = |i: usize| match (self.single.get(i), conditioning.single.get(i)) {
            (Some(block), Some(modulation)) => block.first(modulation, step).map(Some),
            _ => Ok(None),
        };
        let rotations = &conditioning.rotations;
        for (i, (block, modulation)) in self.double.iter().zip(&conditioning.double).enumerate() {
            go_on()?;
            if i == 0 {
                let (of_picture, of_text) = block.first(modulation, step)?;
                picture.enter(&of_picture)?;
                text.enter(&of_text)?;
            }
            let behind = self.double.get(i + 1).zip(conditioning.double.get(i + 1));
            let place = BlockPlace::Double(i);
            let added = beside.added(place);
            match (behind, single_at(0)?) {
                (Some((next, modulations)), _) => {
                    let (of_picture, of_text) = next.first(modulations, step)?;
                    let next = (&of_picture, &of_text);
                    block.forward(buffers, modulation, step, rotations, next, &added)?;
                }
                (None, Some(next)) => {
                    block.forward(buffers, modulation, step, rotations, (&next, &next), &added)?;
                }
                (None, None) => {
                    block.forward(buffers, modulation, step, rotations, (last, last), &added)?;
                }
            }
            beside.behind(place, buffers)?;
        }
        for (i, (block, modulation)) in self.single.iter().zip(&conditioning.single).enumerate() {
            go_on()?;
            if i == 0 && self.double.is_empty() {
                whole.enter(&block.first(modulation, step)?)?;
            }
            let place = BlockPlace::Single(i);
            let added = beside.added(place);
            match single_at(i + 1)? {
                Some(next) => {
                    block.forward(buffers, modulation, step, rotations, (&whole, &next), &added)?;
                }
                None => block.forward(buffers, modulation, step, rotations, (wanted, last), &added)?,
            }
            beside.behind(place, buffers)?;
        }
        Ok(())
    }
}
