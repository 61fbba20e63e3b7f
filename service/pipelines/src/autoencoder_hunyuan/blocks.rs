//! The blocks of encoder and decoder, over maps `[h, t, w, c]`.

use candle_core::{DType, Tensor};
use gpu::Weight;
use ops::{Affine, AttentionShape, ChannelNorm, MapReading, Mask, MaskShape, Onto};

use super::config::Resize;
use super::conv::{Convolution, Goes, Reading, StripConvolution, Walk};
use crate::autoencoder_kl::{GroupNorm, LayerSource};
use model::StageError;

type Outcome<T> = std::result::Result<T, StageError>;

/// `HunyuanVideoCausalConv3d` of a cubic kernel; `halved` are the axes of stride 2.
pub(super) fn causal(
    source: LayerSource<'_>,
    name: &str,
    (from, to): (usize, usize),
    kernel: usize,
    halved: Resize,
) -> Outcome<Convolution> {
    convolution(
        source,
        &format!("{name}.conv"),
        &[to, from, kernel, kernel, kernel],
        halved,
    )
}

/// A convolution of one position (`torch.nn.Conv3d`).
pub(super) fn of_positions(source: LayerSource<'_>, name: &str, channels: usize) -> Outcome<Convolution> {
    convolution(source, name, &[channels, channels, 1, 1, 1], Resize::NONE)
}

fn convolution(source: LayerSource<'_>, name: &str, shape: &[usize], halved: Resize) -> Outcome<Convolution> {
    let weight: Weight = source.weight(&format!("{name}.weight"), shape)?;
    let bias = source.tensor(&format!("{name}.bias"), &shape[..1])?;
    Ok(Convolution::new(weight, bias, halved)?)
}

fn blank_like(map: &Tensor, shape: &[usize]) -> candle_core::Result<Tensor> {
    ops::blank(shape, map.dtype(), map.device())
}

/// A convolution into a new map.
pub(super) fn convolve(
    map: &Tensor,
    reading: Reading<'_>,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> Outcome<Tensor> {
    let layer = StripConvolution::new(map, reading, convolution, (Goes::There, 0), walk)?;
    let out = blank_like(map, &layer.whole())?;
    layer.run(map, &out, Onto::Nothing, walk)?;
    Ok(out)
}

/// Group norm, SiLU and a convolution, over a given map or onto it. The map may be strided.
fn norm_and_convolve(
    map: &Tensor,
    norm: &GroupNorm,
    convolution: &Convolution,
    (out, onto): (&Tensor, Onto),
    walk: Walk<'_>,
) -> Outcome<()> {
    let affine = norm.measure(map)?;
    let goes = match onto == Onto::Nothing && out.is_contiguous() {
        true => Goes::There,
        false => Goes::Through,
    };
    let layer = StripConvolution::new(map, activated(&affine), convolution, (goes, 0), walk)?;
    layer.run(map, out, onto, walk)
}

/// Group norm, SiLU and a convolution of the last layer, into a new map `[t, h, w, c]` of frames.
pub(super) fn norm_and_convolve_to_frames(
    map: &Tensor,
    norm: &GroupNorm,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> Outcome<Tensor> {
    let affine = norm.measure(map)?;
    let layer = StripConvolution::new(map, activated(&affine), convolution, (Goes::Through, 0), walk)?;
    let [height, frames, width, channels] = layer.whole();
    let out = blank_like(map, &[frames, height, width, channels])?;
    layer.run(map, &out.permute((1, 0, 2, 3))?, Onto::Nothing, walk)?;
    Ok(out)
}

fn activated(affine: &Affine) -> Reading<'_> {
    Reading {
        normed: Some(affine),
        ..Reading::PLAIN
    }
}

/// `HunyuanVideoResnetBlockCausal3D`.
#[derive(Clone, Debug)]
pub(super) struct Resnet {
    norm1: GroupNorm,
    conv1: Convolution,
    norm2: GroupNorm,
    conv2: Convolution,
    /// A convolution of one position, where the number of channels changes.
    shortcut: Option<Convolution>,
    outputs: usize,
}

impl Resnet {
    pub(super) fn new(source: LayerSource<'_>, name: &str, (from, to): (usize, usize)) -> Outcome<Resnet> {
        let conv = |layer: &str, channels, kernel| {
            causal(source, &format!("{name}.{layer}"), channels, kernel, Resize::NONE)
        };
        Ok(Resnet {
            norm1: source.norm(&format!("{name}.norm1"), from)?,
            conv1: conv("conv1", (from, to), 3)?,
            norm2: source.norm(&format!("{name}.norm2"), to)?,
            conv2: conv("conv2", (to, to), 3)?,
            shortcut: match from == to {
                true => None,
                false => Some(conv("conv_shortcut", (from, to), 1)?),
            },
            outputs: to,
        })
    }

    /// Consumes `map`: the result is added to it, or to what the shortcut makes of it.
    pub(super) fn forward(&self, map: Tensor, walk: Walk<'_>) -> Outcome<Tensor> {
        let (height, frames, width, _) = map.dims4()?;
        let inner = blank_like(&map, &[height, frames, width, self.outputs])?;
        norm_and_convolve(&map, &self.norm1, &self.conv1, (&inner, Onto::Nothing), walk)?;
        let outer = match &self.shortcut {
            None => map,
            Some(shortcut) => {
                let short = blank_like(&map, inner.dims())?;
                shortcut_of(&map, shortcut, &short, walk)?;
                drop(map);
                short
            }
        };
        norm_and_convolve(&inner, &self.norm2, &self.conv2, (&outer, Onto::Itself), walk)?;
        Ok(outer)
    }

    /// [`Resnet::forward`] of a level without a layer behind it, on its largest maps: everything stays in the memory of
    /// one map.
    pub(super) fn forward_in_place(&self, maps: InPlace, walk: Walk<'_>) -> Outcome<InPlace> {
        let halves = match (maps, &self.shortcut) {
            (InPlace::Whole(map), Some(shortcut)) if 2 * self.outputs == map.dim(3)? => {
                self.first_half_of(&map, shortcut, walk)?
            }
            (InPlace::Whole(map), _) => return Ok(InPlace::Whole(self.forward(map, walk)?)),
            (InPlace::Halves { inner, outer }, _) => {
                norm_and_convolve(&outer, &self.norm1, &self.conv1, (&inner, Onto::Nothing), walk)?;
                (inner, outer)
            }
        };
        let (inner, outer) = halves;
        norm_and_convolve(&inner, &self.norm2, &self.conv2, (&outer, Onto::Itself), walk)?;
        Ok(InPlace::Halves { inner, outer })
    }

    /// Norm and first convolution of a map into the first half of its channels, and the shortcut into the second. Each
    /// strip is written once the next one, which reads some of its rows, was read.
    fn first_half_of(
        &self,
        map: &Tensor,
        shortcut: &Convolution,
        walk: Walk<'_>,
    ) -> Outcome<(Tensor, Tensor)> {
        let halves = [0, self.outputs].map(|first| map.narrow(3, first, self.outputs));
        let [inner, outer] = halves;
        let (inner, outer) = (inner?, outer?);
        let affine = self.norm1.measure(map)?;
        let layer = StripConvolution::new(map, activated(&affine), &self.conv1, (Goes::Through, 1), walk)?;
        let short = layer.blank_strip()?;
        let mut unwritten: Option<(Tensor, (usize, usize))> = None;
        let write = |(results, (first, count)): (Tensor, (usize, usize))| {
            ops::copy_rows(&results, &inner.narrow(0, first, count)?)?;
            ops::copy_rows(&short.narrow(0, 0, count)?, &outer.narrow(0, first, count)?)
        };
        for strip in layer.each() {
            walk.check_cancelled()?;
            layer.read(map, strip)?;
            unwritten.take().map_or(Ok(()), write)?;
            let of_map = map.narrow(0, strip.0, strip.1)?;
            shortcut.of_positions(&of_map, &short.narrow(0, 0, strip.1)?, Onto::Nothing)?;
            unwritten = Some((layer.results(strip.1)?, strip));
        }
        unwritten.map_or(Ok(()), write)?;
        Ok((inner, outer))
    }
}

/// Maps of a level that shares the memory of one.
pub(super) enum InPlace {
    /// A contiguous map.
    Whole(Tensor),
    /// Two views of a map of twice as many channels: `outer` is the map of the level, `inner` is free.
    Halves { inner: Tensor, outer: Tensor },
}

impl InPlace {
    /// The map of the level.
    pub(super) fn map(self) -> Tensor {
        match self {
            InPlace::Whole(map) => map,
            InPlace::Halves { outer, .. } => outer,
        }
    }
}

/// The convolution of one position of a whole map, in strips.
fn shortcut_of(map: &Tensor, shortcut: &Convolution, out: &Tensor, walk: Walk<'_>) -> Outcome<()> {
    let height = out.dim(0)?;
    let rows = shortcut_rows(out.dims(), out.dtype(), walk.bytes(out.device()).0);
    for first in (0..height).step_by(rows) {
        walk.check_cancelled()?;
        let count = rows.min(height - first);
        let out = out.narrow(0, first, count)?;
        shortcut.of_positions(&map.narrow(0, first, count)?, &out, Onto::Nothing)?;
    }
    Ok(())
}

/// Rows of a strip of results of at most so many bytes, of a map of this shape.
pub(super) fn shortcut_rows(shape: &[usize], dtype: DType, bytes: usize) -> usize {
    let of_row: usize = shape[1..].iter().product::<usize>() * dtype.size_in_bytes();
    (bytes / of_row.max(1)).clamp(1, shape[0].max(1))
}

/// `Attention` with one head, of each frame over all positions of the frames up to it.
#[derive(Clone, Debug)]
struct Attention {
    norm: GroupNorm,
    to_q: Convolution,
    to_k: Convolution,
    to_v: Convolution,
    to_out: Convolution,
}

impl Attention {
    fn new(source: LayerSource<'_>, name: &str, channels: usize) -> Outcome<Attention> {
        let linear = |layer: &str| {
            convolution(
                source,
                &format!("{name}.{layer}"),
                &[channels, channels],
                Resize::NONE,
            )
        };
        Ok(Attention {
            norm: source.norm(&format!("{name}.group_norm"), channels)?,
            to_q: linear("to_q")?,
            to_k: linear("to_k")?,
            to_v: linear("to_v")?,
            to_out: linear("to_out.0")?,
        })
    }

    /// Adds attention to the map, in place. Tokens are ordered by frame: `[t, h, w, c]`.
    fn forward(&self, map: &Tensor, walk: Walk<'_>) -> Outcome<()> {
        walk.check_cancelled()?;
        let (height, frames, width, channels) = map.dims4()?;
        let blank = || blank_like(map, &[frames, height, width, channels]);
        let affine = self.norm.measure(map)?;
        let reading = MapReading {
            norm: ChannelNorm::Affine(&affine),
            ..MapReading::PLAIN
        };
        let normed = blank()?;
        ops::apply_norm(&map.permute((1, 0, 2, 3))?, &reading, [0; 3], &normed)?;
        let [queries, keys, values] = [blank()?, blank()?, blank()?];
        for (projection, out) in [(&self.to_q, &queries), (&self.to_k, &keys), (&self.to_v, &values)] {
            projection.of_positions(&normed, out, Onto::Nothing)?;
        }
        // The normalized map is no longer needed: the result is written over it. The CPU attends in f32.
        let wide = |map: &Tensor| match map.device().is_cpu() {
            true => map.to_dtype(DType::F32),
            false => Ok(map.clone()),
        };
        let seen = wide(&normed)?;
        let of_frame = height * width;
        {
            let by_token = |map: &Tensor| wide(map)?.reshape((1, frames * of_frame, 1, channels));
            let (queries, keys, values) = (by_token(&queries)?, by_token(&keys)?, by_token(&values)?);
            let seen = seen.reshape((1, frames * of_frame, 1, channels))?;
            let scale = 1.0 / (channels as f64).sqrt();
            for frame in 0..frames {
                walk.check_cancelled()?;
                let (first, until) = (frame * of_frame, (frame + 1) * of_frame);
                ops::attention(
                    &queries.narrow(1, first, of_frame)?,
                    &keys.narrow(1, 0, until)?,
                    &values.narrow(1, 0, until)?,
                    scale,
                    Mask::None,
                    &seen.narrow(1, first, of_frame)?,
                )?;
            }
        }
        drop((keys, values));
        let seen = seen.to_dtype(map.dtype())?;
        self.to_out.of_positions(&seen, &queries, Onto::Nothing)?;
        // Rows of one frame at a time, which have one distance in either map.
        let line = width * channels;
        let by_frame = map.reshape((height, frames, line))?;
        let added = queries.reshape((frames, height, line))?;
        for frame in 0..frames {
            let target = by_frame.narrow(1, frame, 1)?.squeeze(1)?;
            ops::add_rows(&added.narrow(0, frame, 1)?.squeeze(0)?, &target)?;
        }
        Ok(())
    }
}

/// Shape of the attention of a frame, counted from 0, of so many positions: one head of all channels.
pub(super) fn attention_shape(
    frame: usize,
    frames: usize,
    positions: usize,
    channels: usize,
    dtype: DType,
) -> AttentionShape {
    let one_head = (1, channels);
    let of_all = AttentionShape::of_rows(
        frames * positions,
        one_head,
        (channels, channels),
        dtype,
        MaskShape::None,
    );
    AttentionShape {
        queries: positions,
        keys: (frame + 1) * positions,
        ..of_all
    }
}

/// `HunyuanVideoMidBlock3D`.
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
    ) -> Outcome<Middle> {
        Ok(Middle {
            first: Resnet::new(source, &format!("{name}.resnets.0"), (channels, channels))?,
            attention: match with_attention {
                true => Some(Attention::new(source, &format!("{name}.attentions.0"), channels)?),
                false => None,
            },
            second: Resnet::new(source, &format!("{name}.resnets.1"), (channels, channels))?,
        })
    }

    pub(super) fn forward(&self, map: Tensor, walk: Walk<'_>) -> Outcome<Tensor> {
        let map = self.first.forward(map, walk)?;
        if let Some(attention) = &self.attention {
            attention.forward(&map, walk)?;
        }
        self.second.forward(map, walk)
    }
}
