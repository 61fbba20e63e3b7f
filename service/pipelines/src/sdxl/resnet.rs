//! Residual blocks of the UNet, and convolutions that enlarge a map: diffusers' `ResnetBlock2D` and `Upsample2D`, over maps
//! `[items, h, w, c]`.

use candle_core::{Result, Tensor};
use gpu::MissingTensor;
use ops::{ChannelNorm, Enlarge, MapReading, Scratch};

use super::convolution::{AROUND, Convolution};
use crate::adapters::AdaptedTensors;
use crate::linear::Linear;
use crate::maps::GroupNorm;

type Found<T> = std::result::Result<T, MissingTensor>;

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
    by.forward(&large, &AROUND)
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
        let shortcut = || Convolution::new(tensors, &part("conv_shortcut"), &[to, from, 1, 1]);
        Ok(Resnet {
            norm1: group_norm(tensors, &part("norm1"), from, norm)?,
            conv1: Convolution::new(tensors, &part("conv1"), &[to, from, 3, 3])?,
            time: Linear::new(tensors, &part("time_emb_proj"), time_width, to)?,
            norm2: group_norm(tensors, &part("norm2"), to, norm)?,
            conv2: Convolution::new(tensors, &part("conv2"), &[to, to, 3, 3])?,
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
        let inner = self.conv1.forward(&activated, &AROUND)?;
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
        self.conv2.forward_into(&activated, &AROUND, &inner)?;
        drop(activated);
        match &self.shortcut {
            None => ops::add_rows(map, &inner)?,
            Some(shortcut) => shortcut.add_positions(map, &inner)?,
        }
        Ok(inner)
    }
}
