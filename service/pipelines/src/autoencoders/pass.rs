//! The dimensions of a convolution of a map, and of its strips.

use candle_core::DType;
use ops::{Planned, Steps};

use super::kernels::{Kernels, Resize, Sides};

/// Most bytes of a strip on the CPU, unless one row exceeds it: it is read and convolved while it is in a cache. On a
/// card strips are as large as possible.
const MAX_STRIP_BYTES: usize = 8 << 20;

/// Dimensions of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Map {
    pub(super) channels: usize,
    pub(super) sides: Sides,
}

/// First row and number of rows of a strip of results.
pub(super) type Rows = (usize, usize);

/// A convolution of a map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    kernels: Kernels,
    /// The map as it is read, after upsampling.
    read: Map,
    pub(super) to: Map,
    strides: Sides,
    /// Whether strips are read where they are, without a buffer.
    pub(super) is_plain: bool,
}

impl Pass {
    /// The pass of a convolution to `channels` channels. `is_normed`: whether positions are normalized as they are read.
    pub(super) fn new(
        kernels: Kernels,
        from: Map,
        channels: usize,
        (enlarged, halved): (Resize, Resize),
        is_normed: bool,
    ) -> Pass {
        let [rows, frames, columns] = from.sides;
        let twice = |size: usize, is_enlarged: bool| if is_enlarged { 2 * size } else { size };
        // All frames but the first.
        let frames = twice(frames, enlarged.time) - usize::from(enlarged.time);
        let read = [
            twice(rows, enlarged.space),
            frames,
            twice(columns, enlarged.space),
        ];
        let stride = |halved: bool| if halved { 2 } else { 1 };
        let strides = [stride(halved.space), stride(halved.time), stride(halved.space)];
        let (taps, (before, after)) = (kernels.taps(), kernels.padding(strides));
        let to = [0, 1, 2].map(|axis| {
            let padded = read[axis] + before[axis] + after[axis];
            padded.saturating_sub(taps[axis]) / strides[axis] + 1
        });
        Pass {
            kernels,
            read: Map { sides: read, ..from },
            to: Map { channels, sides: to },
            strides,
            is_plain: kernels == Kernels::Flat && !is_normed && enlarged == Resize::NONE,
        }
    }

    /// Positions that `results` results read along an axis: of the padded map where the padding is read with it.
    fn taken(&self, axis: usize, results: usize) -> usize {
        let taken = (results.max(1) - 1) * self.strides[axis] + self.kernels.taps()[axis];
        match self.kernels {
            Kernels::Flat => taken.min(self.read.sides[axis]),
            Kernels::Causal => taken,
        }
    }

    /// Shape of the buffer of a strip of `rows` rows of results.
    pub(super) fn buffer(&self, rows: usize) -> [usize; 4] {
        let [_, frames, columns] = self.to.sides;
        let (frames, columns) = (self.taken(1, frames), self.taken(2, columns));
        [self.taken(0, rows), frames, columns, self.read.channels]
    }

    /// Shape of a strip of `rows` rows of results.
    pub(super) fn strip(&self, rows: usize) -> [usize; 4] {
        let [_, frames, columns] = self.to.sides;
        [rows, frames, columns, self.to.channels]
    }

    /// The strips of results, of `rows` rows each.
    pub(super) fn each(&self, rows: usize) -> impl Iterator<Item = Rows> + use<> {
        let height = self.to.sides[0];
        let of_strip = move |first| (first, rows.min(height - first));
        (0..height).step_by(rows.max(1)).map(of_strip)
    }

    /// The input of a strip of results: its beginning in the map, by row, frame and column; its number of rows; and
    /// the steps of the convolution. Zeros are added at the borders of the map only, so results do not depend on strips.
    pub(super) fn window(&self, (first, count): Rows) -> ([i64; 3], usize, Steps) {
        let [stride, frames, columns] = self.strides;
        let (before, after) = self.kernels.padding(self.strides);
        match self.kernels {
            Kernels::Causal => {
                let from = [
                    (first * stride) as i64 - before[0] as i64,
                    -(before[1] as i64),
                    -(before[2] as i64),
                ];
                let steps = Steps {
                    strides: self.strides,
                    ..Steps::EACH
                };
                (from, self.taken(0, count), steps)
            }
            Kernels::Flat => {
                let height = self.read.sides[0];
                // In coordinates of the padded map, then of the map.
                let begin = first * stride;
                let end = (first + count - 1) * stride + self.kernels.taps()[0];
                let low = begin.saturating_sub(before[0]).min(height);
                let high = end.saturating_sub(before[0]).min(height);
                let steps = Steps {
                    before: [0, before[0].saturating_sub(begin), before[2]],
                    after: [0, end - before[0].min(end) - high, after[2]],
                    strides: [frames, stride, columns],
                };
                ([low as i64, 0, 0], high - low, steps)
            }
        }
    }

    /// The shapes of the convolutions of all strips: the first, the last and the others may differ.
    pub(super) fn planned(&self, rows: usize, dtype: DType) -> impl Iterator<Item = Planned> {
        let filter = self.kernels.filter((self.read.channels, self.to.channels));
        self.each(rows).filter_map(move |strip| {
            let (_, count, steps) = self.window(strip);
            let [_, frames, columns, channels] = self.buffer(strip.1);
            let map = match self.kernels {
                Kernels::Flat => vec![count, columns, channels],
                Kernels::Causal => vec![count, frames, columns, channels],
            };
            Planned::convolution(&map, &filter, &steps, dtype)
        })
    }

    /// Numbers of the filter while it is in use.
    pub(super) fn filter_numbers(&self) -> usize {
        self.read.channels * self.to.channels * self.taps()
    }

    /// Positions that each result is a sum over.
    pub(super) fn taps(&self) -> usize {
        self.kernels.taps().iter().product()
    }

    /// Channels of input and output.
    pub(super) fn channels(&self) -> (usize, usize) {
        (self.read.channels, self.to.channels)
    }
}

/// How large the strips are that a map is processed in.
#[derive(Clone, Copy, Debug)]
pub(super) enum StripSize {
    /// `rows` rows at the resolution of a latent of height `of`. The addend of a map is added in place.
    LatentRows { rows: usize, of: usize },
    /// At most this number of bytes of buffer and results, at least a row. The addend of a map is computed in place first,
    /// so that these bytes are all that a convolution takes.
    Bytes(usize),
}

impl StripSize {
    /// Most bytes of a strip.
    pub(super) fn bytes(self, on_cpu: bool) -> usize {
        match self {
            StripSize::Bytes(bytes) if !on_cpu => bytes,
            StripSize::Bytes(bytes) => bytes.min(MAX_STRIP_BYTES),
            StripSize::LatentRows { .. } if on_cpu => MAX_STRIP_BYTES,
            StripSize::LatentRows { .. } => usize::MAX,
        }
    }

    /// Rows of a strip of results, if memory has `strips` of them and the buffer; at least 1.
    pub(super) fn rows(self, pass: &Pass, strips: usize, dtype: DType, on_cpu: bool) -> usize {
        let height = pass.to.sides[0];
        let bytes_of = |shape: [usize; 4]| shape[1..].iter().product::<usize>() * dtype.size_in_bytes();
        let of_buffer = bytes_of(pass.buffer(1));
        let most = self.bytes(on_cpu);
        let rows = match self {
            StripSize::LatentRows { rows, of } => {
                let rows = rows.saturating_mul(height.div_ceil(of.max(1))).clamp(1, height);
                let least = if pass.is_plain {
                    rows
                } else {
                    most / of_buffer.max(1)
                };
                rows.min(least)
            }
            StripSize::Bytes(_) => {
                let stride = pass.strides[0];
                let overlap = (pass.kernels.taps()[0] - stride) * of_buffer;
                let of_row = stride * of_buffer + bytes_of(pass.strip(1)) * strips;
                most.saturating_sub(overlap) / of_row.max(1)
            }
        };
        rows.clamp(1, height)
    }
}
