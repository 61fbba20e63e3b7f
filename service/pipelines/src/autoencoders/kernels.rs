//! The axes of an autoencoder's kernels, and the padding of maps for them.

use candle_core::{DType, Result};
use ops::Filter;

use crate::maps::Convolution;

/// Side of every kernel, except those of one position.
const SIDE: usize = 3;

/// Rows, frames, columns.
pub(super) type Sides = [usize; 3];

/// Axes that a layer resizes by two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Resize {
    pub(super) space: bool,
    pub(super) time: bool,
}

impl Resize {
    pub(super) const NONE: Resize = Resize {
        space: false,
        time: false,
    };
    pub(super) const SPACE: Resize = Resize {
        space: true,
        time: false,
    };
}

/// The axes of the kernels of an autoencoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernels {
    /// Rows and columns of a picture (`torch.nn.Conv2d`), with zeros around it, which the convolution adds itself. A
    /// layer that halves a picture has them at the bottom and at the right only.
    Flat,
    /// Rows, columns, and a frame with the two before it (`HunyuanVideoCausalConv3d`, a layer that contains one named
    /// `conv`). Maps are padded as they are read: by the nearest position around rows and columns, by the first frame
    /// twice before the frames.
    Causal,
}

impl Kernels {
    /// The axes of a convolution's kernel, and its filter for maps `[h, t, w, c]` (without frames where it has no axis of
    /// frames).
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn with_filter(convolution: &Convolution, dtype: DType) -> Result<(Kernels, Filter)> {
        Ok(match convolution.has_frames() {
            true => (Kernels::Causal, convolution.rows_first(dtype)?),
            false => (Kernels::Flat, convolution.filter(dtype)?),
        })
    }

    /// Name of the tensors of a convolution.
    pub(super) fn layer(self, name: &str) -> String {
        match self {
            Kernels::Flat => name.to_owned(),
            Kernels::Causal => format!("{name}.conv"),
        }
    }

    /// Shape of a weight of this side.
    pub(super) fn weight(self, (from, to): (usize, usize), side: usize) -> Vec<usize> {
        let axes = match self {
            Kernels::Flat => 2,
            Kernels::Causal => 3,
        };
        let mut shape = vec![to, from];
        shape.resize(2 + axes, side);
        shape
    }

    /// Shape of the weight of a convolution of a map's neighbourhoods.
    pub(super) fn filter(self, channels: (usize, usize)) -> Vec<usize> {
        self.weight(channels, SIDE)
    }

    /// Positions that a kernel spans.
    pub(super) fn taps(self) -> Sides {
        match self {
            Kernels::Flat => [SIDE, 1, SIDE],
            Kernels::Causal => [SIDE; 3],
        }
    }

    /// Padding before and after a map, of a convolution of these strides.
    pub(super) fn padding(self, strides: Sides) -> (Sides, Sides) {
        match (self, strides) {
            (Kernels::Flat, [1, ..]) => ([1, 0, 1], [1, 0, 1]),
            (Kernels::Flat, _) => ([0; 3], [1, 0, 1]),
            (Kernels::Causal, _) => ([1, 2, 1], [1, 0, 1]),
        }
    }
}
