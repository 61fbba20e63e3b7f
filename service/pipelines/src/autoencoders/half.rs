//! The layers of half an autoencoder with their tensors, and the walk of a map through them.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::Onto;

use super::attention::Attention;
use super::kernels::Resize;
use super::resnet::{Maps, Resnet, norm_and_convolve_to_frames};
use super::source::{LayerSource, TensorSource};
use super::strips::{Reading, Walk, convolve};
use super::table::{Layer, Layers};
use crate::maps::{Convolution, GroupNorm};

/// A [`Layer`] with its tensors.
#[derive(Clone, Debug)]
enum Loaded {
    OfPositions(Convolution),
    Convolution {
        convolution: Convolution,
        enlarged: Resize,
        halved: Resize,
    },
    Resnet {
        resnet: Resnet,
        in_place: bool,
    },
    Attention(Attention),
    Last(GroupNorm, Convolution),
}

/// Half an autoencoder. Its tensors are shared with the component.
#[derive(Clone, Debug)]
pub(super) struct Half {
    layers: Vec<Loaded>,
}

impl Half {
    /// The layers with the tensors of a component. Maps are of this dtype.
    ///
    /// # Errors
    /// [`StageError::Missing`] for a tensor that is missing or of another shape.
    pub(super) fn new(layers: &Layers, tensors: &ComponentTensors, dtype: DType) -> Result<Half, StageError> {
        let source = LayerSource {
            tensors: TensorSource { tensors, dtype },
            kernels: layers.kernels,
            groups: layers.groups,
        };
        let load = |(name, layer): &(String, Layer)| Loaded::new(source, name, *layer);
        Ok(Half {
            layers: layers.list.iter().map(load).collect::<Result<_, _>>()?,
        })
    }

    /// Frames or latents `[t, h, w, c]`, contiguous and in the dtype of maps, to latents or frames.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; errors of candle.
    pub(super) fn run(&self, frames: Tensor, walk: Walk<'_>) -> Result<Tensor, StageError> {
        let mut maps = Maps::Whole(frames.permute((1, 0, 2, 3))?);
        drop(frames);
        for layer in &self.layers {
            maps = layer.forward(maps, walk)?;
        }
        Ok(maps.into_map().permute((1, 0, 2, 3))?)
    }
}

impl Loaded {
    fn new(source: LayerSource<'_>, name: &str, layer: Layer) -> Result<Loaded, StageError> {
        Ok(match layer {
            Layer::OfPositions { channels } => Loaded::OfPositions(source.of_positions(name, channels)?),
            Layer::Convolution {
                channels,
                enlarged,
                halved,
            } => Loaded::Convolution {
                convolution: source.convolution(name, channels)?,
                enlarged,
                halved,
            },
            Layer::Resnet { channels, in_place } => Loaded::Resnet {
                resnet: Resnet::new(source, name, channels)?,
                in_place,
            },
            Layer::Attention { channels } => Loaded::Attention(Attention::new(source, name, channels)?),
            Layer::Last { channels } => Loaded::Last(
                source.norm(&format!("{name}.conv_norm_out"), channels.0)?,
                source.convolution(&format!("{name}.conv_out"), channels)?,
            ),
        })
    }

    /// The maps after this layer. The maps before it are dropped as soon as they are read.
    fn forward(&self, maps: Maps, walk: Walk<'_>) -> Result<Maps, StageError> {
        if let Loaded::Resnet {
            resnet,
            in_place: true,
        } = self
        {
            return resnet.forward_in_place(maps, walk);
        }
        let map = maps.into_map();
        Ok(Maps::Whole(match self {
            Loaded::OfPositions(convolution) => {
                // The first and the last map of a half are contiguous by frames.
                let frames = map.permute((1, 0, 2, 3))?;
                let out = ops::blank(frames.dims(), frames.dtype(), frames.device())?;
                convolution.of_positions(&frames, &out, Onto::Nothing)?;
                out.permute((1, 0, 2, 3))?
            }
            Loaded::Convolution {
                convolution,
                enlarged,
                halved,
            } => {
                let reading = Reading {
                    normed: None,
                    enlarged: *enlarged,
                    halved: *halved,
                };
                convolve(&map, reading, convolution, walk)?
            }
            Loaded::Resnet { resnet, .. } => resnet.forward(map, walk)?,
            Loaded::Attention(attention) => {
                attention.forward(&map, walk)?;
                map
            }
            Loaded::Last(norm, convolution) => norm_and_convolve_to_frames(&map, norm, convolution, walk)?,
        }))
    }
}
