//! Causal convolution of a map `[h, t, w, c]`, strip by strip of rows.
//!
//! The rows of a strip are read into a buffer first, with norm, activation, upsampling and padding applied in one pass:
//! the nearest position before and behind rows and columns, the first frame twice before the frames
//! (`HunyuanVideoCausalConv3d`). The buffer is convolved without padding. Neither the normalized nor the upsampled nor
//! the padded map is ever materialized, and outputs do not depend on the strips.

use candle_core::{DType, Device, Result, Tensor};
use gpu::Weight;
use ops::{Affine, ChannelNorm, Enlarge, Filter, MapReading, Onto, Pad, Steps};

use super::config::Resize;
use crate::StageError;
use crate::autoencoder_kl::MAX_STRIP_BYTES;

/// Side of every filter but those of one position.
const KERNEL: usize = 3;

/// Positions of padding before the first row, frame and column.
const BEFORE: [i64; 3] = [1, 2, 1];

/// Dimensions of a map: rows, frames, columns.
pub(super) type Sides = [usize; 3];

/// How the positions of a map are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading<'a> {
    /// Group norm as scale and shift per channel, followed by SiLU.
    pub(super) normed: Option<&'a Affine>,
    /// Nearest-neighbour upsampling by 2; of frames, all but the first.
    pub(super) enlarge: Resize,
}

impl Reading<'_> {
    /// No norm and no upsampling.
    pub(super) const PLAIN: Reading<'static> = Reading {
        normed: None,
        enlarge: Resize::NONE,
    };

    /// Rows from `first` on of the upsampled and padded `map`, as many as `out` has.
    fn read(&self, map: &Tensor, first: usize, out: &Tensor) -> Result<()> {
        let [rows, frames, columns] = BEFORE;
        let reading = MapReading {
            norm: self.normed.map_or(ChannelNorm::None, ChannelNorm::Affine),
            silu: self.normed.is_some(),
            enlarge: enlarge_axes(self.enlarge),
            pad: Pad::Replicate,
        };
        ops::apply_norm(map, &reading, [first as i64 - rows, -frames, -columns], out)
    }
}

/// By row, frame and column.
fn enlarge_axes(resize: Resize) -> [Enlarge; 3] {
    let space = match resize.space {
        true => Enlarge::Twice,
        false => Enlarge::Not,
    };
    let time = match resize.time {
        true => Enlarge::TwiceButFirst,
        false => Enlarge::Not,
    };
    [space, time, space]
}

/// A convolution with its bias.
#[derive(Clone, Debug)]
pub(super) struct Convolution {
    /// `[out, in, frames, rows, columns]` or `[out, in]`. Converted to a [`Filter`], and dequantized, at every run: that
    /// avoids a second copy of all weights.
    weight: Weight,
    /// `[out]`.
    bias: Tensor,
    strides: Sides,
}

impl Convolution {
    /// From a weight `[out, in, frames, rows, columns]` or `[out, in]` and a bias `[out]`. `halved` are the axes of
    /// which every second position is an output.
    ///
    /// # Errors
    /// When the weight has another rank.
    pub(super) fn new(weight: Weight, bias: Tensor, halved: Resize) -> Result<Convolution> {
        if !matches!(weight.dims().len(), 2 | 5) {
            candle_core::bail!("a convolution with a weight of shape {:?}", weight.dims())
        }
        let stride = |halved: bool| if halved { 2 } else { 1 };
        let (space, time) = (stride(halved.space), stride(halved.time));
        Ok(Convolution {
            weight,
            bias: bias.contiguous()?,
            strides: [space, time, space],
        })
    }

    /// A convolution of one position, of a contiguous map `[.., in]` to `[.., out]`.
    pub(super) fn of_positions(&self, map: &Tensor, out: &Tensor, onto: Onto) -> Result<()> {
        let filter = Filter::new(&self.weight, map.dtype())?;
        let rows = |map: &Tensor| {
            let channels = map.dim(candle_core::D::Minus1)?;
            map.reshape((map.elem_count() / channels.max(1), 1, 1, channels))
        };
        ops::convolve(
            &rows(map)?,
            &filter,
            Some(&self.bias),
            &Steps::EACH,
            &rows(out)?,
            onto,
        )
    }

    fn outputs(&self) -> usize {
        self.weight.dims().first().copied().unwrap_or_default()
    }
}

/// Where strips of results go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goes {
    /// Into the rows of a contiguous map, directly.
    There,
    /// Into a strip of their own first: into a strided map, or onto a map.
    Through,
}

/// Dimensions of a convolution, and of its strips.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    /// Channels of input and output.
    pub(super) channels: (usize, usize),
    pub(super) to: Sides,
    pub(super) strides: Sides,
}

impl Pass {
    pub(super) fn new(from: Sides, channels: (usize, usize), enlarge: Resize, halved: Resize) -> Pass {
        let axes = enlarge_axes(enlarge);
        let read = [0, 1, 2].map(|axis| axes[axis].size(from[axis]));
        let of = |halved: bool| if halved { 2 } else { 1 };
        let strides = [of(halved.space), of(halved.time), of(halved.space)];
        Pass {
            channels,
            to: [0, 1, 2].map(|axis| (read[axis] - 1) / strides[axis] + 1),
            strides,
        }
    }

    /// Positions that so many outputs read along an axis.
    fn taken(&self, axis: usize, outputs: usize) -> usize {
        (outputs - 1) * self.strides[axis] + KERNEL
    }

    /// Shape of the buffer of a strip of so many output rows.
    pub(super) fn buffer(&self, rows: usize) -> [usize; 4] {
        let [_, frames, columns] = self.to;
        [
            self.taken(0, rows),
            self.taken(1, frames),
            self.taken(2, columns),
            self.channels.0,
        ]
    }

    /// Shape of a strip of so many output rows.
    pub(super) fn strip(&self, rows: usize) -> [usize; 4] {
        [rows, self.to[1], self.to[2], self.channels.1]
    }

    /// Output rows of a strip whose buffer and `strips` of results have at most so many bytes; at least 1.
    pub(super) fn rows(&self, bytes: StripBytes, strips: usize, dtype: DType) -> usize {
        let number = dtype.size_in_bytes();
        let of = |shape: [usize; 4]| shape[1..].iter().product::<usize>() * number;
        let (of_buffer, of_strips) = (of(self.buffer(1)), of(self.strip(1)) * strips);
        let stride = self.strides[0];
        let first = (KERNEL - stride) * of_buffer;
        let rows = bytes.0.saturating_sub(first) / (stride * of_buffer + of_strips).max(1);
        rows.clamp(1, self.to[0])
    }

    /// First row and number of rows of each strip of outputs.
    pub(super) fn each(&self, rows: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let height = self.to[0];
        (0..height)
            .step_by(rows.max(1))
            .map(move |first| (first, rows.min(height - first)))
    }

    pub(super) fn steps(&self) -> Steps {
        Steps {
            strides: self.strides,
            ..Steps::EACH
        }
    }

    /// Shape of the filter.
    pub(super) fn filter(&self) -> [usize; 5] {
        [self.channels.1, self.channels.0, KERNEL, KERNEL, KERNEL]
    }
}

/// Most bytes of what a layer holds of a strip: its buffer, and the strips of its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StripBytes(pub(super) usize);

impl StripBytes {
    /// On the CPU never more than fit into a cache: a strip is read and convolved while it is there.
    pub(super) fn of(bytes: usize, on_cpu: bool) -> StripBytes {
        StripBytes(if on_cpu { bytes.min(MAX_STRIP_BYTES) } else { bytes })
    }
}

/// How a map is processed: the bytes of its strips, and the check for cancellation.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a> {
    /// For a card.
    pub(super) strip_bytes: usize,
    pub(super) cancelled: &'a dyn Fn() -> bool,
}

impl Walk<'_> {
    pub(super) fn bytes(&self, device: &Device) -> StripBytes {
        StripBytes::of(self.strip_bytes, device.is_cpu())
    }

    pub(super) fn check_cancelled(&self) -> std::result::Result<(), StageError> {
        if (self.cancelled)() {
            Err(StageError::Cancelled)
        } else {
            Ok(())
        }
    }
}

/// A convolution of a whole map, strip by strip.
pub(super) struct StripConvolution<'a> {
    reading: Reading<'a>,
    filter: Filter,
    bias: &'a Tensor,
    pass: Pass,
    rows: usize,
    /// Buffer into which strips are read.
    buffer: Tensor,
    /// The results of a strip, where they do not go to their place directly.
    results: Option<Tensor>,
}

impl<'a> StripConvolution<'a> {
    /// `beside` further strips of results are held by the caller.
    pub(super) fn new(
        map: &Tensor,
        reading: Reading<'a>,
        convolution: &'a Convolution,
        (goes, beside): (Goes, usize),
        walk: Walk<'_>,
    ) -> Result<StripConvolution<'a>> {
        let (height, frames, width, channels) = map.dims4()?;
        let [space, time, _] = convolution.strides.map(|stride| stride == 2);
        let pass = Pass::new(
            [height, frames, width],
            (channels, convolution.outputs()),
            reading.enlarge,
            Resize { space, time },
        );
        let held = beside + usize::from(goes == Goes::Through);
        let rows = pass.rows(walk.bytes(map.device()), held, map.dtype());
        let blank = |shape: [usize; 4]| ops::blank(&shape, map.dtype(), map.device());
        Ok(StripConvolution {
            reading,
            filter: Filter::rows_first(&convolution.weight, map.dtype())?,
            bias: &convolution.bias,
            pass,
            rows,
            buffer: blank(pass.buffer(rows))?,
            results: match goes {
                Goes::There => None,
                Goes::Through => Some(blank(pass.strip(rows))?),
            },
        })
    }

    /// First row and number of rows of each strip.
    pub(super) fn each(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        self.pass.each(self.rows)
    }

    /// An uninitialized strip of results.
    pub(super) fn blank_strip(&self) -> Result<Tensor> {
        ops::blank(
            &self.pass.strip(self.rows),
            self.buffer.dtype(),
            self.buffer.device(),
        )
    }

    /// Reads the input of a strip into the buffer, over the previous strip.
    pub(super) fn read(&self, map: &Tensor, (first, count): (usize, usize)) -> Result<()> {
        let rows = self.buffer.narrow(0, 0, self.pass.taken(0, count))?;
        self.reading.read(map, first * self.pass.strides[0], &rows)
    }

    /// Convolves `count` rows of results out of the buffer into a contiguous strip.
    fn convolve(&self, count: usize, out: &Tensor) -> Result<()> {
        let read = self.buffer.narrow(0, 0, self.pass.taken(0, count))?;
        ops::convolve(
            &read,
            &self.filter,
            Some(self.bias),
            &self.pass.steps(),
            out,
            Onto::Nothing,
        )
    }

    /// [`StripConvolution::convolve`] into the strip of results.
    pub(super) fn results(&self, count: usize) -> Result<Tensor> {
        match &self.results {
            Some(results) => {
                let results = results.narrow(0, 0, count)?;
                self.convolve(count, &results)?;
                Ok(results)
            }
            None => candle_core::bail!("a convolution without a strip for its results"),
        }
    }

    /// Convolves the whole map over a target, or onto it.
    pub(super) fn run(
        &self,
        map: &Tensor,
        target: &Tensor,
        onto: Onto,
        walk: Walk<'_>,
    ) -> std::result::Result<(), StageError> {
        for strip in self.each() {
            walk.check_cancelled()?;
            self.read(map, strip)?;
            let target = target.narrow(0, strip.0, strip.1)?;
            match (&self.results, onto) {
                (None, Onto::Nothing) => self.convolve(strip.1, &target)?,
                (None, Onto::Itself) => {
                    return Err(candle_core::Error::Msg("nothing to add from".to_owned()).into());
                }
                (Some(_), Onto::Nothing) => ops::copy_rows(&self.results(strip.1)?, &target)?,
                (Some(_), Onto::Itself) => ops::add_rows(&self.results(strip.1)?, &target)?,
            }
        }
        Ok(())
    }

    /// Shape of the whole output.
    pub(super) fn whole(&self) -> [usize; 4] {
        self.pass.strip(self.pass.to[0])
    }
}
