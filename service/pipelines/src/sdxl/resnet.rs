//! Residual blocks of the UNet, and convolutions that resize a map: diffusers' `ResnetBlock2D`, `Downsample2D` and `Upsample2D`,
//! over maps `[items, h, w, c]`.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::{ChannelNorm, Enlarge, MapReading, Onto, Scratch, Steps};

use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::maps::{Convolution, GroupNorm};

type Found<T> = std::result::Result<T, MissingTensor>;

/// A convolution of 3 by 3 positions with a border of zeros.
pub(super) const AROUND: Steps = Steps {
    before: [0, 1, 1],
    after: [0, 1, 1],
    strides: [1; 3],
};

/// The same to half the sides.
pub(super) const HALVING: Steps = Steps {
    strides: [1, 2, 2],
    ..AROUND
};

/// The convolution of this name, with a weight of this shape.
pub(super) fn convolution(tensors: &AdaptedTensors<'_>, name: &str, shape: &[usize]) -> Found<Convolution> {
    let full_name = format!("{name}.weight");
    let weight = tensors.shaped_weight(&full_name, shape)?;
    let bias = tensors.shaped(&format!("{name}.bias"), &shape[..1])?;
    Convolution::new(weight, bias).map_err(|error| MissingTensor {
        name: full_name,
        problem: error.to_string(),
    })
}

/// The group norm of this name.
pub(super) fn group_norm(
    tensors: &AdaptedTensors<'_>,
    name: &str,
    channels: usize,
    (groups, eps): (usize, f64),
) -> Found<GroupNorm> {
    let weight = tensors.shaped(&format!("{name}.weight"), &[channels])?;
    let bias = tensors.shaped(&format!("{name}.bias"), &[channels])?;
    GroupNorm::new(weight, bias, groups, eps).map_err(|error| MissingTensor {
        name: format!("{name}.weight"),
        problem: error.to_string(),
    })
}

/// Whether SiLU follows a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    Nothing,
    Silu,
}

/// The map of each item, normalized by its own statistics.
pub(super) fn normalized(map: &Tensor, norm: &GroupNorm, after: After) -> Result<Tensor> {
    let out = ops::blank(map.dims(), map.dtype(), map.device())?;
    for item in 0..map.dim(0)? {
        let one = map.narrow(0, item, 1)?;
        let affine = norm.measure(&one)?;
        let reading = MapReading {
            norm: ChannelNorm::Affine(&affine),
            silu: after == After::Silu,
            ..MapReading::PLAIN
        };
        ops::apply_norm(&one, &reading, [0; 3], &out.narrow(0, item, 1)?)?;
    }
    Ok(out)
}

/// A convolution of all items into a new map.
pub(super) fn convolved(map: &Tensor, by: &Convolution, steps: &Steps) -> Result<Tensor> {
    let (items, height, width, _) = map.dims4()?;
    // Sides of 3 positions with a border of one on either end.
    let side = |side: usize, axis: usize| (side - 1) / steps.strides[axis] + 1;
    let shape = [items, side(height, 1), side(width, 2), by.outputs()];
    let out = ops::blank(&shape, map.dtype(), map.device())?;
    let filter = by.filter(map.dtype())?;
    ops::convolve(map, &filter, Some(&by.bias), steps, &out, Onto::Nothing)?;
    Ok(out)
}

/// A convolution of the map at twice its sides, of which the last row and column are cut where `sides` has one less.
pub(super) fn doubled(map: Tensor, by: &Convolution, sides: [usize; 2]) -> Result<Tensor> {
    let (items, _, _, channels) = map.dims4()?;
    let large = ops::blank(&[items, sides[0], sides[1], channels], map.dtype(), map.device())?;
    let reading = MapReading {
        enlarge: [Enlarge::Not, Enlarge::Twice, Enlarge::Twice],
        ..MapReading::PLAIN
    };
    ops::apply_norm(&map, &reading, [0; 3], &large)?;
    drop(map);
    convolved(&large, by, &AROUND)
}

/// The channels of both maps.
pub(super) fn joined(map: Tensor, kept: Tensor) -> Result<Tensor> {
    let (items, height, width, channels) = map.dims4()?;
    let further = kept.dim(3)?;
    let out = ops::blank(
        &[items, height, width, channels + further],
        map.dtype(),
        map.device(),
    )?;
    ops::copy_rows(&map, &out.narrow(3, 0, channels)?)?;
    ops::copy_rows(&kept, &out.narrow(3, channels, further)?)?;
    Ok(out)
}

/// A residual block.
#[derive(Clone, Debug)]
pub(super) struct Resnet {
    norm1: GroupNorm,
    conv1: Convolution,
    time: Linear,
    norm2: GroupNorm,
    conv2: Convolution,
    /// A convolution of single positions, where the number of channels changes.
    shortcut: Option<Convolution>,
    outputs: usize,
}

impl Resnet {
    pub(super) fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        (from, to): (usize, usize),
        time_width: usize,
        norm: (usize, f64),
    ) -> Found<Resnet> {
        let part = |part: &str| format!("{name}.{part}");
        let shortcut = || convolution(tensors, &part("conv_shortcut"), &[to, from, 1, 1]);
        Ok(Resnet {
            norm1: group_norm(tensors, &part("norm1"), from, norm)?,
            conv1: convolution(tensors, &part("conv1"), &[to, from, 3, 3])?,
            time: Linear::new(tensors, &part("time_emb_proj"), time_width, to)?,
            norm2: group_norm(tensors, &part("norm2"), to, norm)?,
            conv2: convolution(tensors, &part("conv2"), &[to, to, 3, 3])?,
            shortcut: (from != to).then(shortcut).transpose()?,
            outputs: to,
        })
    }

    /// The layer with a matrix.
    pub(super) fn linear(&self) -> &Linear {
        &self.time
    }

    /// The map behind the block, in new memory. `times` is the activated embedding of the time, `[items, time_width]`.
    pub(super) fn forward(&self, map: &Tensor, times: &Tensor, scratch: &Scratch) -> Result<Tensor> {
        let (items, height, width, _) = map.dims4()?;
        let activated = normalized(map, &self.norm1, After::Silu)?;
        let inner = convolved(&activated, &self.conv1, &AROUND)?;
        drop(activated);
        let added = ops::blank(&[items, self.outputs], map.dtype(), map.device())?;
        self.time
            .forward_into(times, ops::Epilogue::None, &added, scratch)?;
        for item in 0..items {
            let positions = inner
                .narrow(0, item, 1)?
                .reshape((height * width, self.outputs))?;
            ops::add_residual(&positions, &added.narrow(0, item, 1)?, None)?;
        }
        let activated = normalized(&inner, &self.norm2, After::Silu)?;
        // Over the inner map, not the outer one, which may be kept for the way up.
        let filter = self.conv2.filter(inner.dtype())?;
        let bias = Some(&self.conv2.bias);
        ops::convolve(&activated, &filter, bias, &AROUND, &inner, Onto::Nothing)?;
        drop((activated, filter));
        match &self.shortcut {
            None => ops::add_rows(map, &inner)?,
            Some(shortcut) => shortcut.of_positions(map, &inner, Onto::Itself)?,
        }
        Ok(inner)
    }
}
