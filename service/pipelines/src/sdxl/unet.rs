//! The UNet: diffusers' `UNet2DConditionModel` as SDXL has it, with its tensor names.

use std::cell::OnceCell;

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, WeightStream};
use model::StageError;
use ops::{Nonlinearity, Scratch};

use super::attention::{Attention, Surroundings};
use super::config::UnetConfig;
use super::convolution::{AROUND, Convolution, HALVING};
use super::resnet::{After, Resnet, doubled, group_norm, joined, normalized};
use super::table::{Layer, Named};
use crate::adapters::AdaptedTensors;
use crate::linear::{Linear, largest_scratch};
use crate::maps::GroupNorm;
use crate::sinusoids::sinusoids;

type Found<T> = Result<T, MissingTensor>;

/// A [`Layer`] with its tensors.
#[derive(Debug)]
enum Loaded {
    Resnet { resnet: Box<Resnet>, joins: bool },
    Attention(Box<Attention>),
    Halve(Convolution),
    Double(Convolution),
    Keep,
}

/// Two linear layers with SiLU between them: `TimestepEmbedding`.
#[derive(Debug)]
struct Embedder {
    first: Linear,
    second: Linear,
}

impl Embedder {
    fn new(tensors: &AdaptedTensors<'_>, name: &str, inputs: usize, width: usize) -> Found<Embedder> {
        Ok(Embedder {
            first: Linear::new(tensors, &format!("{name}.linear_1"), inputs, width)?,
            second: Linear::new(tensors, &format!("{name}.linear_2"), width, width)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let inner = self.first.forward(x)?;
        ops::activate(&inner, Nonlinearity::Silu)?;
        self.second.forward(&inner)
    }
}

/// What the UNet is conditioned on beside the time: the text of each item, and what is added to the embedding of the time.
#[derive(Clone, Debug)]
pub struct Conditioning {
    /// `[items * tokens, cross_attention_dim]`.
    states: Tensor,
    /// `[items, time_width]`.
    added: Tensor,
    /// Keys and values of the text for each layer of attention, by its streamed block: the first pass writes them, and those of the
    /// other steps read them.
    of_text: Vec<OnceCell<Tensor>>,
}

/// The text of an item, and the sizes of its picture.
#[derive(Clone, Debug)]
pub struct Prompted {
    /// `[1, tokens, cross_attention_dim]`: the states of both text encoders.
    pub states: Tensor,
    /// `[1, width]`: the pooled state of the second.
    pub pooled: Tensor,
    /// Height and width of the original picture, the corner it was cut at, and height and width that are asked for.
    pub ids: [f32; 6],
}

/// The UNet over resident tensors. It holds handles only, and allocates nothing.
#[derive(Debug)]
pub struct Unet {
    config: UnetConfig,
    conv_in: Convolution,
    time: Embedder,
    added: Embedder,
    layers: Vec<(Loaded, usize)>,
    norm_out: GroupNorm,
    conv_out: Convolution,
    /// Brings the blocks that are not on the card.
    stream: WeightStream,
}

impl Unet {
    /// The UNet with the tensors of a component.
    ///
    /// # Errors
    /// The first tensor that is missing or of another shape.
    pub fn new(config: &UnetConfig, tensors: &ComponentTensors) -> Result<Unet, MissingTensor> {
        Unet::with_adapters(config, &AdaptedTensors::from(tensors))
    }

    /// As [`Unet::new`], with adapters.
    pub(crate) fn with_adapters(config: &UnetConfig, tensors: &AdaptedTensors<'_>) -> Found<Unet> {
        let (finest, time_width) = (config.finest(), config.time_width());
        let norm = (config.norm_num_groups, config.norm_eps);
        let load = |Named {
                        name, layer, block, ..
                    }: &Named|
         -> Found<(Loaded, usize)> {
            let square = |channels| Convolution::new(tensors, name, &[channels, channels, 3, 3]);
            let loaded = match *layer {
                Layer::Keep => Loaded::Keep,
                Layer::Halve { channels } => Loaded::Halve(square(channels)?),
                Layer::Double { channels } => Loaded::Double(square(channels)?),
                Layer::Resnet { channels, skip } => Loaded::Resnet {
                    resnet: Box::new(Resnet::new(tensors, name, channels, time_width, norm)?),
                    joins: skip > 0,
                },
                Layer::Attention {
                    channels,
                    heads,
                    depth,
                } => Loaded::Attention(Box::new(Attention::new(
                    tensors,
                    name,
                    (channels, heads, depth),
                    config.cross_attention_dim,
                    config.norm_num_groups,
                )?)),
            };
            Ok((loaded, *block))
        };
        let added = config.projection_class_embeddings_input_dim;
        Ok(Unet {
            conv_in: Convolution::new(tensors, "conv_in", &[finest, config.in_channels, 3, 3])?,
            time: Embedder::new(tensors, "time_embedding", finest, time_width)?,
            added: Embedder::new(tensors, "add_embedding", added, time_width)?,
            layers: config.layers().iter().map(load).collect::<Found<_>>()?,
            norm_out: group_norm(tensors, "conv_norm_out", finest, norm)?,
            conv_out: Convolution::new(tensors, "conv_out", &[config.out_channels, finest, 3, 3])?,
            stream: tensors.stream(),
            config: config.clone(),
        })
    }

    /// The conditioning that all steps share, of as many items as there are prompts, all of one length.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for texts of other widths or lengths; errors of the device.
    pub fn condition(
        &self,
        prompts: &[&Prompted],
        (dtype, device): (DType, &Device),
    ) -> Result<Conditioning, StageError> {
        let Some(first) = prompts.first() else {
            return Err(StageError::BadInput(
                "there is no text to condition on".to_owned(),
            ));
        };
        let (_, tokens, width) = first.states.dims3()?;
        let (ids_width, pooled) = (self.config.addition_time_embed_dim, self.config.pooled_width());
        if width != self.config.cross_attention_dim || prompts.iter().any(|p| p.pooled.dims() != [1, pooled])
        {
            let problem = format!(
                "states of text of width {width} and pooled ones of {:?}, where {} and {pooled} are expected",
                first.pooled.dims(),
                self.config.cross_attention_dim
            );
            return Err(StageError::BadInput(problem));
        }
        let states = ops::blank(&[prompts.len() * tokens, width], dtype, device)?;
        let inputs = self.config.projection_class_embeddings_input_dim;
        let embedded = ops::blank(&[prompts.len(), inputs], dtype, device)?;
        for (item, prompt) in prompts.iter().enumerate() {
            let rows = prompt.states.reshape(((), width))?;
            ops::copy_rows(&rows, &states.narrow(0, item * tokens, tokens)?)?;
            let row = embedded.narrow(0, item, 1)?;
            ops::copy_rows(&prompt.pooled, &row.narrow(1, 0, pooled)?)?;
            let ids = sinusoids(&prompt.ids, ids_width, dtype, device)?.reshape((1, inputs - pooled))?;
            ops::copy_rows(&ids, &row.narrow(1, pooled, inputs - pooled)?)?;
        }
        Ok(Conditioning {
            states,
            added: self.added.forward(&embedded)?,
            of_text: vec![OnceCell::new(); self.config.blocks()],
        })
    }

    /// Scratch of the layers with matrices, for items of latents of this many cells.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn scratch(
        &self,
        (items, cells): (usize, usize),
        (dtype, device): (DType, &Device),
    ) -> candle_core::Result<Scratch> {
        let linears = self.layers.iter().flat_map(|(layer, _)| -> Vec<&Linear> {
            match layer {
                Loaded::Resnet { resnet, .. } => vec![resnet.linear()],
                Loaded::Attention(attention) => attention.linears().collect(),
                Loaded::Halve(_) | Loaded::Double(_) | Loaded::Keep => Vec::new(),
            }
        });
        Scratch::new(largest_scratch(linears, items * cells, dtype), device)
    }

    /// The prediction `[items, h, w, 4]` for latents `[items, h, w, in_channels]` at a time of 0 to 999. `go_on` is called before
    /// each layer.
    ///
    /// # Errors
    /// Errors of `go_on` and of the device.
    pub fn forward(
        &self,
        latent: &Tensor,
        time: f32,
        conditioning: &Conditioning,
        scratch: &Scratch,
        go_on: &mut dyn FnMut() -> Result<(), StageError>,
    ) -> Result<Tensor, StageError> {
        let (dtype, device) = (latent.dtype(), latent.device());
        let Conditioning {
            states,
            added,
            of_text,
        } = conditioning;
        let times = ops::blank(added.dims(), dtype, device)?;
        ops::copy_rows(added, &times)?;
        let time = sinusoids(&[time], self.config.finest(), dtype, device)?;
        ops::add_residual(&times, &self.time.forward(&time)?, None)?;
        ops::activate(&times, Nonlinearity::Silu)?;

        let around = Surroundings {
            states,
            of_text,
            stream: &self.stream,
            scratch,
        };
        let mut map = self.conv_in.forward(latent, &AROUND)?;
        let mut kept: Vec<Tensor> = Vec::new();
        for (layer, block) in &self.layers {
            go_on()?;
            if !matches!(layer, Loaded::Keep | Loaded::Attention(_)) {
                self.stream.enter(BlockPlace::each_pass(*block))?;
            }
            map = match layer {
                Loaded::Keep => {
                    kept.push(map.clone());
                    map
                }
                Loaded::Halve(by) => by.forward(&map, &HALVING)?,
                Loaded::Double(by) => {
                    let sides = kept.last().map_or_else(|| map.dims4(), Tensor::dims4)?;
                    doubled(map, by, [sides.1, sides.2])?
                }
                Loaded::Resnet { resnet, joins } => {
                    let input = match joins.then(|| kept.pop()).flatten() {
                        Some(other) => joined(map, other)?,
                        None => map,
                    };
                    resnet.forward(&input, &times, scratch)?
                }
                Loaded::Attention(attention) => {
                    attention.forward(&map, &around, *block, go_on)?;
                    map
                }
            };
        }
        let activated = normalized(&map, &self.norm_out, After::Silu)?;
        drop(map);
        Ok(self.conv_out.forward(&activated, &AROUND)?)
    }
}
