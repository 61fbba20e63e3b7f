//! Residual blocks over maps `[h, t, w, c]`, in the memory of as few maps as their strips allow.

use candle_core::{DType, Tensor};
use model::StageError;
use ops::{Affine, Onto};

use super::pass::StripSize;
use super::source::LayerSource;
use super::strips::{Goes, Reading, StripConvolution, Walk, convolve};
use crate::maps::{Convolution, GroupNorm};

type Outcome<T> = std::result::Result<T, StageError>;

/// Group norm, SiLU and a convolution, into a new map.
fn norm_and_convolve(
    map: &Tensor,
    norm: &GroupNorm,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> Outcome<Tensor> {
    let affine = norm.measure(map)?;
    convolve(map, Reading::activated(&affine), convolution, walk)
}

/// [`norm_and_convolve`] of the last layers of a half: into a new map `[t, h, w, c]` of frames, which is returned as one of
/// rows.
pub(super) fn norm_and_convolve_to_frames(
    map: &Tensor,
    norm: &GroupNorm,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> Outcome<Tensor> {
    let affine = norm.measure(map)?;
    let reading = Reading::activated(&affine);
    let layer = StripConvolution::new(map, reading, convolution, (walk.goes(), 0), walk)?;
    let [height, frames, width, channels] = layer.whole();
    let out = ops::blank(&[frames, height, width, channels], map.dtype(), map.device())?;
    let rows_first = out.permute((1, 0, 2, 3))?;
    layer.run(map.clone(), &rows_first, Onto::Nothing, walk)?;
    Ok(rows_first)
}

/// A residual block without a time embedding (`ResnetBlock2D`, `HunyuanVideoResnetBlockCausal3D`).
#[derive(Clone, Debug)]
pub(super) struct Resnet {
    norm1: GroupNorm,
    conv1: Convolution,
    norm2: GroupNorm,
    conv2: Convolution,
    /// A convolution of single positions, where the number of channels changes.
    shortcut: Option<Convolution>,
    outputs: usize,
}

impl Resnet {
    pub(super) fn new(source: LayerSource<'_>, name: &str, (from, to): (usize, usize)) -> Outcome<Resnet> {
        Ok(Resnet {
            norm1: source.norm(&format!("{name}.norm1"), from)?,
            conv1: source.convolution(&format!("{name}.conv1"), (from, to))?,
            norm2: source.norm(&format!("{name}.norm2"), to)?,
            conv2: source.convolution(&format!("{name}.conv2"), (to, to))?,
            shortcut: match from == to {
                true => None,
                false => Some(source.shortcut(&format!("{name}.conv_shortcut"), (from, to))?),
            },
            outputs: to,
        })
    }

    /// Consumes `map`: the result is added to it, or to its convolution where the number of channels changes.
    pub(super) fn forward(&self, map: Tensor, walk: Walk<'_>) -> Outcome<Tensor> {
        let inner = norm_and_convolve(&map, &self.norm1, &self.conv1, walk)?;
        let affine = self.norm2.measure(&inner)?;
        let outer = match (&self.shortcut, walk.size) {
            (None, _) => map,
            (Some(shortcut), StripSize::LatentRows { .. }) => {
                return self.over_inner(inner, &affine, (map, shortcut), walk);
            }
            (Some(shortcut), StripSize::Bytes(_)) => {
                let short = ops::blank(inner.dims(), map.dtype(), map.device())?;
                shortcut_of(&map, shortcut, &short, walk)?;
                drop(map);
                short
            }
        };
        self.add_second(inner, &affine, (&outer, walk.goes()), walk)?;
        Ok(outer)
    }

    /// Adds the second convolution of the inner map to the outer one.
    fn add_second(
        &self,
        inner: Tensor,
        affine: &Affine,
        (outer, goes): (&Tensor, Goes),
        walk: Walk<'_>,
    ) -> Outcome<()> {
        let reading = Reading::activated(affine);
        let layer = StripConvolution::new(&inner, reading, &self.conv2, (goes, 0), walk)?;
        layer.run(inner, outer, Onto::Itself, walk)
    }

    /// The second convolution and the shortcut. With strips, the result is written over the inner map, so that there are
    /// never three maps.
    fn over_inner(
        &self,
        inner: Tensor,
        affine: &Affine,
        (outer, shortcut): (Tensor, &Convolution),
        walk: Walk<'_>,
    ) -> Outcome<Tensor> {
        let reading = Reading::activated(affine);
        let layer = StripConvolution::new(&inner, reading, &self.conv2, (Goes::There, 0), walk)?;
        if layer.is_whole() {
            walk.check_cancelled()?;
            let strip = layer.read_whole(inner)?;
            let out = layer.blank()?;
            shortcut.of_positions(&outer, &out, Onto::Nothing)?;
            drop(outer);
            layer.convolve(&strip, &out, Onto::Itself)?;
            return Ok(out);
        }
        let sums = layer.blank_strip()?;
        layer.run_over(
            &inner,
            |strip, (first, count)| {
                let sums = sums.narrow(0, 0, count)?;
                shortcut.of_positions(&outer.narrow(0, first, count)?, &sums, Onto::Nothing)?;
                layer.convolve(strip, &sums, Onto::Itself)?;
                Ok(sums)
            },
            |sums, (first, count)| ops::copy_rows(&sums, &inner.narrow(0, first, count)?),
            walk,
        )?;
        Ok(inner)
    }

    /// [`Resnet::forward`] of a level without a layer after it, on its largest maps: everything stays in the memory of
    /// one map.
    pub(super) fn forward_in_place(&self, maps: Maps, walk: Walk<'_>) -> Outcome<Maps> {
        let (inner, outer) = match (maps, &self.shortcut) {
            (Maps::Whole(map), Some(shortcut)) if 2 * self.outputs == map.dim(3)? => {
                self.first_half_of(&map, shortcut, walk)?
            }
            (Maps::Halves { inner, outer }, None) => {
                let affine = self.norm1.measure(&outer)?;
                let (reading, to) = (Reading::activated(&affine), (Goes::Through, 0));
                let layer = StripConvolution::new(&outer, reading, &self.conv1, to, walk)?;
                layer.run(outer.clone(), &inner, Onto::Nothing, walk)?;
                (inner, outer)
            }
            (maps, _) => return Ok(Maps::Whole(self.forward(maps.into_map(), walk)?)),
        };
        let affine = self.norm2.measure(&inner)?;
        self.add_second(inner.clone(), &affine, (&outer, Goes::Through), walk)?;
        Ok(Maps::Halves { inner, outer })
    }

    /// Norm and first convolution of a map into the first half of its channels, and the shortcut into the second.
    fn first_half_of(
        &self,
        map: &Tensor,
        shortcut: &Convolution,
        walk: Walk<'_>,
    ) -> Outcome<(Tensor, Tensor)> {
        let inner = map.narrow(3, 0, self.outputs)?;
        let outer = map.narrow(3, self.outputs, self.outputs)?;
        let affine = self.norm1.measure(map)?;
        let reading = Reading::activated(&affine);
        let layer = StripConvolution::new(map, reading, &self.conv1, (Goes::Through, 1), walk)?;
        let short = layer.blank_strip()?;
        layer.run_over(
            map,
            |strip, (first, count)| {
                let short = short.narrow(0, 0, count)?;
                shortcut.of_positions(&map.narrow(0, first, count)?, &short, Onto::Nothing)?;
                Ok((layer.results(strip)?, short))
            },
            |(results, short), (first, count)| {
                ops::copy_rows(&results, &inner.narrow(0, first, count)?)?;
                ops::copy_rows(&short, &outer.narrow(0, first, count)?)
            },
            walk,
        )?;
        Ok((inner, outer))
    }
}

/// The map between two layers, or the maps of a level that shares the memory of one.
pub(super) enum Maps {
    Whole(Tensor),
    /// Two views of a map of twice as many channels: `outer` is the map of the level, `inner` is free.
    Halves {
        inner: Tensor,
        outer: Tensor,
    },
}

impl Maps {
    /// The map that the next layer reads.
    pub(super) fn into_map(self) -> Tensor {
        match self {
            Maps::Whole(map) => map,
            Maps::Halves { outer, .. } => outer,
        }
    }
}

/// The shortcut of a whole map, in strips.
fn shortcut_of(map: &Tensor, shortcut: &Convolution, out: &Tensor, walk: Walk<'_>) -> Outcome<()> {
    let height = out.dim(0)?;
    let rows = shortcut_rows(out.dims(), out.dtype(), walk.bytes(out.device()));
    for first in (0..height).step_by(rows) {
        walk.check_cancelled()?;
        let count = rows.min(height - first);
        let out = out.narrow(0, first, count)?;
        shortcut.of_positions(&map.narrow(0, first, count)?, &out, Onto::Nothing)?;
    }
    Ok(())
}

/// Rows of a strip of results of at most `bytes` bytes, of a map of this shape.
pub(super) fn shortcut_rows(shape: &[usize], dtype: DType, bytes: usize) -> usize {
    let of_row: usize = shape[1..].iter().product::<usize>() * dtype.size_in_bytes();
    (bytes / of_row.max(1)).clamp(1, shape[0].max(1))
}
