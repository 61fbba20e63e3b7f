//! Convolution of a map `[h, w, c]`, strip by strip.
//!
//! Rows of a map are contiguous, so the input rows of a strip are passed in place, or are read into a buffer first,
//! with norm, activation and upsampling applied. Zero padding is applied only at the borders of the map, so outputs
//! do not depend on the strips. Neither the normalized nor the upsampled map is ever materialized.

use candle_core::{DType, Result, Tensor};
use gpu::Weight;
use ops::{Affine, ChannelNorm, Enlarge, Filter, MapReading, Onto, Steps};

/// Maximum bytes of a strip on the CPU, unless one row exceeds it: it is read and convolved while it is in a cache.
/// On a card strips are as large as possible.
pub(crate) const MAX_STRIP_BYTES: usize = 8 << 20;

/// Zero padding around a map.
#[derive(Clone, Copy, Debug)]
pub(super) struct Padding {
    pub(super) before: usize,
    pub(super) after: usize,
}

impl Padding {
    /// No padding: 1x1 convolutions.
    pub(super) const NONE: Padding = Padding { before: 0, after: 0 };
    /// Same padding of a 3x3 kernel.
    pub(super) const AROUND: Padding = Padding { before: 1, after: 1 };
    /// `Downsample2D` pads at the bottom and right only.
    pub(super) const BEHIND: Padding = Padding { before: 0, after: 1 };
}

/// How the rows of a map are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading<'a> {
    /// Group norm as scale and shift per channel, followed by SiLU.
    pub(super) normed: Option<&'a Affine>,
    /// Nearest-neighbour upsampling by 2.
    pub(super) enlarged: bool,
    pub(super) padding: Padding,
}

impl Reading<'_> {
    /// No norm and no upsampling.
    pub(super) fn plain(padding: Padding) -> Reading<'static> {
        Reading {
            normed: None,
            enlarged: false,
            padding,
        }
    }

    /// Height or width after upsampling, for a map of this height or width.
    fn size(&self, size: usize) -> usize {
        if self.enlarged { size * 2 } else { size }
    }

    fn is_plain(&self) -> bool {
        self.normed.is_none() && !self.enlarged
    }

    /// Rows `first..` of `map` as read, as many as `out` has.
    fn read(&self, map: &Tensor, first: usize, out: &Tensor) -> Result<()> {
        let reading = MapReading {
            norm: self.normed.map_or(ChannelNorm::None, ChannelNorm::Affine),
            silu: self.normed.is_some(),
            enlarge: match self.enlarged {
                true => [Enlarge::Not, Enlarge::Twice, Enlarge::Twice],
                false => [Enlarge::Not; 3],
            },
            ..MapReading::PLAIN
        };
        ops::apply_norm(map, &reading, [0, first as i64, 0], out)
    }
}

/// A convolution with its bias.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    /// `[out, in, k, k]` or `[out, in]`. Converted to a [`Filter`], and dequantized, at every run: that takes a card
    /// microseconds, and avoids a second copy of all weights.
    weight: Weight,
    /// `[out]`.
    bias: Tensor,
    stride: usize,
}

impl Convolution {
    /// From a weight `[out, in, k, k]` or `[out, in]` and a bias `[out]`.
    ///
    /// # Errors
    /// When the weight has another rank.
    pub(super) fn new(weight: Weight, bias: Tensor, stride: usize) -> Result<Convolution> {
        if !matches!(weight.dims().len(), 2 | 4) {
            candle_core::bail!("a convolution with a weight of shape {:?}", weight.dims())
        }
        Ok(Convolution {
            weight,
            bias: bias.contiguous()?,
            stride,
        })
    }

    fn kernel(&self) -> usize {
        self.weight.dims().get(2).copied().unwrap_or(1)
    }

    /// A 1x1 convolution of a map `[h, w, in]`.
    pub(super) fn of_positions(&self, map: &Tensor, out: &Tensor, onto: Onto) -> Result<()> {
        let filter = Filter::new(&self.weight, map.dtype())?;
        ops::convolve(map, &filter, Some(&self.bias), &Steps::EACH, out, onto)
    }
}

/// Decomposition of a convolution with a square filter into strips.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strips {
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: Padding,
    /// Input rows, after upsampling.
    pub(super) height_read: usize,
    /// Output rows.
    pub(super) height: usize,
    /// Output rows per strip.
    pub(super) rows: usize,
}

impl Strips {
    /// First row and number of rows of each output strip.
    pub(super) fn each(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (height, rows) = (self.height, self.rows);
        (0..height)
            .step_by(rows)
            .map(move |first| (first, rows.min(height - first)))
    }

    /// The input rows of an output strip: first row, number of rows, and the filter's steps.
    pub(super) fn window(&self, (first, count): (usize, usize)) -> (usize, usize, Steps) {
        // In coordinates of the padded map, then of the input.
        let before = self.padding.before;
        let (begin, end) = (
            first * self.stride,
            (first + count - 1) * self.stride + self.kernel,
        );
        let low = begin.saturating_sub(before).min(self.height_read);
        let high = end.saturating_sub(before).min(self.height_read);
        let (above, below) = (before.saturating_sub(begin), end - before.min(end) - high);
        let steps = Steps {
            before: [0, above, before],
            after: [0, below, self.padding.after],
            strides: [1, self.stride, self.stride],
        };
        (low, high - low, steps)
    }

    /// Maximum of input rows of a strip.
    fn most_rows_in(&self) -> usize {
        ((self.rows - 1) * self.stride + self.kernel).min(self.height_read)
    }
}

/// A convolution of a whole map, strip by strip.
pub(super) struct StripConvolution<'a> {
    reading: Reading<'a>,
    filter: Filter,
    bias: &'a Tensor,
    pub(super) strips: Strips,
    /// Width of the output.
    width: usize,
    /// Buffer into which strips are read.
    buffer: Option<Tensor>,
}

/// The input rows of some outputs.
pub(super) struct Strip {
    rows: Tensor,
    steps: Steps,
}

impl<'a> StripConvolution<'a> {
    /// `rows` is the requested number of output rows per strip, and the total.
    pub(super) fn new(
        map: &Tensor,
        reading: Reading<'a>,
        convolution: &'a Convolution,
        rows: impl Fn(usize) -> usize,
    ) -> Result<StripConvolution<'a>> {
        let (map_height, width_in, channels_in) = map.dims3()?;
        let (kernel, stride) = (convolution.kernel(), convolution.stride);
        let padding = reading.padding.before + reading.padding.after;
        let size_out = |size: usize| {
            let padded = reading.size(size) + padding;
            padded.checked_sub(kernel).map(|rest| rest / stride + 1)
        };
        let (Some(height), Some(width)) = (size_out(map_height), size_out(width_in)) else {
            candle_core::bail!("a map of {:?} under a filter of {kernel}", map.dims())
        };
        let mut layer = StripConvolution {
            reading,
            filter: Filter::new(&convolution.weight, map.dtype())?,
            bias: &convolution.bias,
            strips: Strips {
                kernel,
                stride,
                padding: reading.padding,
                height_read: reading.size(map_height),
                height,
                rows: rows(height),
            },
            width,
            buffer: None,
        };
        if !reading.is_plain() {
            let of_row = reading.size(width_in) * channels_in * map.dtype().size_in_bytes();
            if map.device().is_cpu() {
                layer.strips.rows = layer.strips.rows.min(rows_of_strip(of_row));
            }
            let shape = [layer.strips.most_rows_in(), reading.size(width_in), channels_in];
            layer.buffer = Some(ops::blank(&shape, map.dtype(), map.device())?);
        }
        Ok(layer)
    }

    /// Reads the input of an output strip. Overwrites the previous strip.
    pub(super) fn read(&self, map: &Tensor, strip: (usize, usize)) -> Result<Strip> {
        let (low, count, steps) = self.strips.window(strip);
        let rows = match &self.buffer {
            None => map.narrow(0, low, count)?,
            Some(buffer) => {
                let rows = buffer.narrow(0, 0, count)?;
                self.reading.read(map, low, &rows)?;
                rows
            }
        };
        Ok(Strip { rows, steps })
    }

    /// Like [`StripConvolution::read`], but frees the map after the last strip.
    pub(super) fn read_last(&self, map: &mut Option<Tensor>, strip: (usize, usize)) -> Result<Strip> {
        let read = match map {
            Some(map) => self.read(map, strip)?,
            None => candle_core::bail!("a map that is read after its last strip"),
        };
        if strip.0 + strip.1 == self.strips.height {
            *map = None;
        }
        Ok(read)
    }

    /// Convolves a strip into its output rows, overwriting or accumulating.
    pub(super) fn convolve(&self, strip: &Strip, out: &Tensor, onto: Onto) -> Result<()> {
        ops::convolve(
            &strip.rows,
            &self.filter,
            Some(self.bias),
            &strip.steps,
            out,
            onto,
        )
    }

    /// An uninitialized map of so many output rows.
    pub(super) fn blank(&self, rows: usize, like: &Tensor) -> Result<Tensor> {
        ops::blank(
            &[rows, self.width, self.filter.outputs()],
            like.dtype(),
            like.device(),
        )
    }
}

/// Maximum rows of a strip on the CPU, for input rows of this many bytes.
pub(super) fn rows_of_strip(bytes_of_row: usize) -> usize {
    (MAX_STRIP_BYTES / bytes_of_row.max(1)).max(1)
}

/// Bytes of a filter while it is in use.
pub(super) fn filter_bytes((inputs, outputs): (usize, usize), kernel: usize, dtype: DType) -> usize {
    match kernel {
        1 => 0,
        _ => inputs * outputs * kernel * kernel * dtype.size_in_bytes(),
    }
}
