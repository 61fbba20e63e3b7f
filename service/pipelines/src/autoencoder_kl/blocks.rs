//! The blocks of encoder and decoder, over channels-last maps `[h, w, c]`.

use candle_core::{DType, Tensor};
use gpu::{ComponentTensors, Weight};
use ops::{Affine, AttentionShape, ChannelNorm, MapReading, Mask, MaskShape, Onto};

use super::conv::{Convolution, Padding, Reading, StripConvolution};
use super::norm::GroupNorm;
use model::StageError;

/// How a map is processed: the height of its strips, and the check for cancellation.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a> {
    pub(super) latent_height: usize,
    /// Rows of a strip, at the latent's resolution.
    pub(super) latent_rows: usize,
    pub(super) cancelled: &'a dyn Fn() -> bool,
}

impl Walk<'_> {
    /// Rows of a strip of a map of this height.
    fn rows(&self, height: usize) -> usize {
        self.latent_rows
            .saturating_mul(height.div_ceil(self.latent_height))
            .clamp(1, height)
    }

    pub(super) fn check_cancelled(&self) -> std::result::Result<(), StageError> {
        if (self.cancelled)() {
            Err(StageError::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// Takes the tensors of one layer out of a component.
#[derive(Clone, Copy)]
pub(crate) struct LayerSource<'a> {
    pub(crate) tensors: &'a ComponentTensors,
    pub(crate) dtype: DType,
    pub(crate) groups: usize,
}

impl LayerSource<'_> {
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> std::result::Result<Tensor, StageError> {
        let tensor = self.tensors.shaped(name, shape).map_err(missing)?;
        Ok(tensor.to_dtype(self.dtype)?)
    }

    /// A weight; if in full precision, in the dtype of maps.
    pub(crate) fn weight(&self, name: &str, shape: &[usize]) -> std::result::Result<Weight, StageError> {
        match self.tensors.shaped_weight(name, shape).map_err(missing)? {
            Weight::Full(tensor) => Ok(Weight::Full(tensor.to_dtype(self.dtype)?)),
            quantized @ Weight::Quantized(_) => Ok(quantized),
        }
    }

    /// A convolution with a square kernel.
    pub(super) fn convolution(
        &self,
        name: &str,
        (in_channels, out_channels): (usize, usize),
        kernel: usize,
        stride: usize,
    ) -> std::result::Result<Convolution, StageError> {
        let shape = [out_channels, in_channels, kernel, kernel];
        let weight = self.weight(&format!("{name}.weight"), &shape)?;
        let bias = self.tensor(&format!("{name}.bias"), &[out_channels])?;
        Ok(Convolution::new(weight, bias, stride)?)
    }

    pub(crate) fn norm(&self, name: &str, channels: usize) -> std::result::Result<GroupNorm, StageError> {
        let weight = self.tensor(&format!("{name}.weight"), &[channels])?;
        let bias = self.tensor(&format!("{name}.bias"), &[channels])?;
        Ok(GroupNorm::new(weight, bias, self.groups)?)
    }

    /// A linear layer `[c, c]`, which BFL's checkpoints store as a 1x1 convolution `[c, c, 1, 1]`.
    fn square(&self, name: &str, channels: usize) -> std::result::Result<Convolution, StageError> {
        let weight = format!("{name}.weight");
        let found = self.tensors.weight(&weight);
        let as_convolution = found.is_ok_and(|weight| weight.dims().len() == 4);
        let shape: &[usize] = if as_convolution {
            &[channels, channels, 1, 1]
        } else {
            &[channels, channels]
        };
        let weight = self.weight(&weight, shape)?;
        let bias = self.tensor(&format!("{name}.bias"), &[channels])?;
        Ok(Convolution::new(weight, bias, 1)?)
    }
}

fn missing(missing: gpu::MissingTensor) -> StageError {
    StageError::Missing {
        component: super::COMPONENT.to_owned(),
        missing,
    }
}

/// Convolves a map strip by strip into a new one.
pub(super) fn convolve(
    map: &Tensor,
    reading: Reading<'_>,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    let layer = StripConvolution::new(map, reading, convolution, |height| walk.rows(height))?;
    let out = layer.blank(layer.strips.height, map)?;
    for strip in layer.strips.each() {
        walk.check_cancelled()?;
        let read = layer.read(map, strip)?;
        layer.convolve(&read, &out.narrow(0, strip.0, strip.1)?, Onto::Nothing)?;
    }
    Ok(out)
}

/// Convolves a map strip by strip, and accumulates into another, which is not an input of this layer. Frees `map` as
/// soon as it is read.
fn convolve_onto(
    map: Tensor,
    reading: Reading<'_>,
    convolution: &Convolution,
    other: &Tensor,
    walk: Walk<'_>,
) -> std::result::Result<(), StageError> {
    let layer = StripConvolution::new(&map, reading, convolution, |height| walk.rows(height))?;
    let mut map = Some(map);
    for strip in layer.strips.each() {
        walk.check_cancelled()?;
        let read = layer.read_last(&mut map, strip)?;
        layer.convolve(&read, &other.narrow(0, strip.0, strip.1)?, Onto::Itself)?;
    }
    Ok(())
}

/// Like [`convolve_onto`], where the other map first goes through a convolution that changes its channels. With
/// strips, the result is written over `map`: each strip once the next one, which reads some of its rows, was read. So
/// there are never three maps.
fn convolve_onto_shortcut(
    map: Tensor,
    reading: Reading<'_>,
    convolution: &Convolution,
    (other, shortcut): (Tensor, &Convolution),
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    let layer = StripConvolution::new(&map, reading, convolution, |height| walk.rows(height))?;
    walk.check_cancelled()?;
    if layer.strips.rows >= layer.strips.height {
        let whole = (0, layer.strips.height);
        let read = layer.read_last(&mut Some(map), whole)?;
        let out = layer.blank(layer.strips.height, &other)?;
        shortcut.of_positions(&other, &out, Onto::Nothing)?;
        drop(other);
        layer.convolve(&read, &out, Onto::Itself)?;
        return Ok(out);
    }
    let sums = layer.blank(layer.strips.rows, &map)?;
    let mut unwritten: Option<(usize, usize)> = None;
    let write = |(first, count): (usize, usize)| {
        let target = map.narrow(0, first, count)?;
        ops::apply_norm(&sums.narrow(0, 0, count)?, &MapReading::PLAIN, [0; 3], &target)
    };
    for strip in layer.strips.each() {
        walk.check_cancelled()?;
        let read = layer.read(&map, strip)?;
        unwritten.take().map_or(Ok(()), write)?;
        let sums = sums.narrow(0, 0, strip.1)?;
        shortcut.of_positions(&other.narrow(0, strip.0, strip.1)?, &sums, Onto::Nothing)?;
        layer.convolve(&read, &sums, Onto::Itself)?;
        unwritten = Some(strip);
    }
    unwritten.map_or(Ok(()), write)?;
    Ok(map)
}

/// A convolution without norm, of an even size or padded around.
pub(super) fn plain(
    map: &Tensor,
    convolution: &Convolution,
    padding: Padding,
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    convolve(map, Reading::plain(padding), convolution, walk)
}

/// Nearest-neighbour upsampling by 2 and a convolution: `Upsample2D`.
pub(super) fn enlarge(
    map: &Tensor,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    let reading = Reading {
        enlarged: true,
        ..Reading::plain(Padding::AROUND)
    };
    convolve(map, reading, convolution, walk)
}

/// Group norm, SiLU and a 3x3 convolution.
pub(super) fn norm_and_convolve(
    map: &Tensor,
    norm: &GroupNorm,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> std::result::Result<Tensor, StageError> {
    let affine = norm.measure(map)?;
    convolve(map, activated(&affine), convolution, walk)
}

fn activated(affine: &Affine) -> Reading<'_> {
    Reading {
        normed: Some(affine),
        ..Reading::plain(Padding::AROUND)
    }
}

/// `ResnetBlock2D` without a time embedding.
#[derive(Clone, Debug)]
pub(super) struct Resnet {
    norm1: GroupNorm,
    conv1: Convolution,
    norm2: GroupNorm,
    conv2: Convolution,
    /// A 1x1 convolution, where the number of channels changes.
    shortcut: Option<Convolution>,
}

impl Resnet {
    pub(super) fn new(
        source: LayerSource<'_>,
        name: &str,
        (from, to): (usize, usize),
    ) -> std::result::Result<Resnet, StageError> {
        Ok(Resnet {
            norm1: source.norm(&format!("{name}.norm1"), from)?,
            conv1: source.convolution(&format!("{name}.conv1"), (from, to), 3, 1)?,
            norm2: source.norm(&format!("{name}.norm2"), to)?,
            conv2: source.convolution(&format!("{name}.conv2"), (to, to), 3, 1)?,
            shortcut: match from == to {
                true => None,
                false => Some(source.convolution(&format!("{name}.conv_shortcut"), (from, to), 1, 1)?),
            },
        })
    }

    /// Consumes `map`: the result is added to it, or written over the intermediate map where the number of channels
    /// changes. With strips there are never more than two maps.
    pub(super) fn forward(&self, map: Tensor, walk: Walk<'_>) -> std::result::Result<Tensor, StageError> {
        let inner = norm_and_convolve(&map, &self.norm1, &self.conv1, walk)?;
        let affine = self.norm2.measure(&inner)?;
        match &self.shortcut {
            None => {
                convolve_onto(inner, activated(&affine), &self.conv2, &map, walk)?;
                Ok(map)
            }
            Some(shortcut) => {
                convolve_onto_shortcut(inner, activated(&affine), &self.conv2, (map, shortcut), walk)
            }
        }
    }
}

/// `Attention` with one head over all positions of a map.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    norm: GroupNorm,
    to_q: Convolution,
    to_k: Convolution,
    to_v: Convolution,
    to_out: Convolution,
}

impl Attention {
    fn new(
        source: LayerSource<'_>,
        name: &str,
        channels: usize,
    ) -> std::result::Result<Attention, StageError> {
        Ok(Attention {
            norm: source.norm(&format!("{name}.group_norm"), channels)?,
            to_q: source.square(&format!("{name}.to_q"), channels)?,
            to_k: source.square(&format!("{name}.to_k"), channels)?,
            to_v: source.square(&format!("{name}.to_v"), channels)?,
            to_out: source.square(&format!("{name}.to_out.0"), channels)?,
        })
    }

    /// Adds attention over all positions to the map, in place.
    fn forward(&self, map: &Tensor, walk: Walk<'_>) -> std::result::Result<(), StageError> {
        walk.check_cancelled()?;
        let (height, width, channels) = map.dims3()?;
        let blank = || ops::blank(map.dims(), map.dtype(), map.device());
        let affine = self.norm.measure(map)?;
        let reading = MapReading {
            norm: ChannelNorm::Affine(&affine),
            ..MapReading::PLAIN
        };
        let normed = blank()?;
        ops::apply_norm(map, &reading, [0; 3], &normed)?;
        let [queries, keys, values] = [blank()?, blank()?, blank()?];
        for (projection, out) in [(&self.to_q, &queries), (&self.to_k, &keys), (&self.to_v, &values)] {
            projection.of_positions(&normed, out, Onto::Nothing)?;
        }
        walk.check_cancelled()?;
        // The normalized map is no longer needed: the result is written over it. The CPU attends in f32.
        let wide = |map: &Tensor| match map.device().is_cpu() {
            true => map.to_dtype(DType::F32),
            false => Ok(map.clone()),
        };
        let seen = wide(&normed)?;
        {
            let one_head = (1, height * width, 1, channels);
            let by_head = |map: &Tensor| wide(map)?.reshape(one_head);
            let scale = 1.0 / (channels as f64).sqrt();
            let (queries, keys, values) = (by_head(&queries)?, by_head(&keys)?, by_head(&values)?);
            ops::attention(
                &queries,
                &keys,
                &values,
                scale,
                Mask::None,
                &seen.reshape(one_head)?,
            )?;
        }
        drop((normed, queries, keys, values));
        let seen = seen.to_dtype(map.dtype())?;
        Ok(self.to_out.of_positions(&seen, map, Onto::Itself)?)
    }
}

/// Shape of the attention over a map of so many positions: one head of all channels.
pub(super) fn attention_shape(positions: usize, channels: usize, dtype: DType) -> AttentionShape {
    let one_head = (1, channels);
    AttentionShape::of_rows(positions, one_head, (channels, channels), dtype, MaskShape::None)
}

/// `UNetMidBlock2D`.
#[derive(Clone, Debug)]
pub(super) struct Middle {
    first: Resnet,
    attention: Option<Attention>,
    second: Resnet,
}

impl Middle {
    pub(super) fn new(
        source: LayerSource<'_>,
        name: &str,
        channels: usize,
        with_attention: bool,
    ) -> std::result::Result<Middle, StageError> {
        Ok(Middle {
            first: Resnet::new(source, &format!("{name}.resnets.0"), (channels, channels))?,
            attention: match with_attention {
                true => Some(Attention::new(source, &format!("{name}.attentions.0"), channels)?),
                false => None,
            },
            second: Resnet::new(source, &format!("{name}.resnets.1"), (channels, channels))?,
        })
    }

    pub(super) fn forward(&self, map: Tensor, walk: Walk<'_>) -> std::result::Result<Tensor, StageError> {
        let map = self.first.forward(map, walk)?;
        if let Some(attention) = &self.attention {
            attention.forward(&map, walk)?;
        }
        self.second.forward(map, walk)
    }
}
