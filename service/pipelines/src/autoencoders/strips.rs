//! Convolution of a map `[h, t, w, c]`, strip by strip of rows.
//!
//! The rows that a strip of results depends on are convolved where they are, or are read into a buffer first, with
//! norm, activation, upsampling and the padding of [`Kernels::Causal`] applied in one pass. Neither the normalized nor
//! the upsampled nor the padded map is ever materialized, and results do not depend on the strips.

use candle_core::{DType, Device, Result, Tensor};
use model::StageError;
use ops::{Affine, ChannelNorm, Enlarge, Filter, MapReading, Onto, Pad, Steps};

use super::kernels::{Kernels, Resize};
use super::pass::{Map, Pass, Rows, StripSize};
use crate::maps::Convolution;

type Outcome<T> = std::result::Result<T, StageError>;

/// How a map is processed: the size of its strips, and the check for cancellation.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a> {
    pub(super) size: StripSize,
    pub(super) cancelled: &'a dyn Fn() -> bool,
}

impl Walk<'_> {
    /// Most bytes of a strip.
    pub(super) fn bytes(&self, device: &Device) -> usize {
        self.size.bytes(device.is_cpu())
    }

    /// The destination of strips that are not written to a contiguous map of rows.
    pub(super) fn goes(&self) -> Goes {
        match self.size {
            StripSize::LatentRows { .. } => Goes::There,
            StripSize::Bytes(_) => Goes::Through,
        }
    }

    pub(super) fn check_cancelled(&self) -> Outcome<()> {
        match (self.cancelled)() {
            true => Err(StageError::Cancelled),
            false => Ok(()),
        }
    }
}

/// How the positions of a map are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading<'a> {
    /// Group norm as scale and shift per channel, followed by SiLU.
    pub(super) normed: Option<&'a Affine>,
    /// Nearest-neighbour upsampling by 2; of frames, all but the first.
    pub(super) enlarged: Resize,
    /// Axes of which every second position is a result.
    pub(super) halved: Resize,
}

impl Reading<'_> {
    /// Group norm and SiLU.
    pub(super) fn activated(affine: &Affine) -> Reading<'_> {
        Reading {
            normed: Some(affine),
            enlarged: Resize::NONE,
            halved: Resize::NONE,
        }
    }

    /// A region of the upsampled and padded map, of the size of `out`.
    fn read(&self, map: &Tensor, from: [i64; 3], out: &Tensor) -> Result<()> {
        let space = match self.enlarged.space {
            true => Enlarge::Twice,
            false => Enlarge::Not,
        };
        let time = match self.enlarged.time {
            true => Enlarge::TwiceButFirst,
            false => Enlarge::Not,
        };
        let reading = MapReading {
            norm: self.normed.map_or(ChannelNorm::None, ChannelNorm::Affine),
            silu: self.normed.is_some(),
            enlarge: [space, time, space],
            pad: Pad::Replicate,
        };
        ops::apply_norm(map, &reading, from, out)
    }
}

/// The destination of strips of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goes {
    /// Into the rows of a map, which are contiguous.
    There,
    /// Into a separate strip first: into a strided map, or onto a map.
    Through,
}

/// A convolution of a whole map, strip by strip.
pub(super) struct StripConvolution<'a> {
    reading: Reading<'a>,
    kernels: Kernels,
    filter: Filter,
    bias: &'a Tensor,
    pass: Pass,
    rows: usize,
    dtype: DType,
    device: Device,
    /// Buffer into which strips are read.
    buffer: Option<Tensor>,
    /// The results of a strip, where they do not go to their place directly.
    results: Option<Tensor>,
}

/// The input of a strip of results.
pub(super) struct Strip {
    read: Tensor,
    steps: Steps,
    /// Rows of results.
    count: usize,
}

impl<'a> StripConvolution<'a> {
    /// `beside` is the number of further strips of results that the caller holds.
    pub(super) fn new(
        map: &Tensor,
        reading: Reading<'a>,
        convolution: &'a Convolution,
        (goes, beside): (Goes, usize),
        walk: Walk<'_>,
    ) -> Result<StripConvolution<'a>> {
        let (height, frames, width, channels) = map.dims4()?;
        let from = Map {
            channels,
            sides: [height, frames, width],
        };
        let (kernels, filter) = Kernels::with_filter(convolution, map.dtype())?;
        let resized = (reading.enlarged, reading.halved);
        let outputs = convolution.outputs();
        let pass = Pass::new(kernels, from, outputs, resized, reading.normed.is_some());
        let held = beside + usize::from(goes == Goes::Through);
        let rows = walk.size.rows(&pass, held, map.dtype(), map.device().is_cpu());
        let blank = |shape: [usize; 4]| ops::blank(&shape, map.dtype(), map.device());
        Ok(StripConvolution {
            reading,
            kernels,
            filter,
            bias: &convolution.bias,
            pass,
            rows,
            dtype: map.dtype(),
            device: map.device().clone(),
            buffer: match pass.is_plain {
                true => None,
                false => Some(blank(pass.buffer(rows))?),
            },
            results: match goes {
                Goes::There => None,
                Goes::Through => Some(blank(pass.strip(rows))?),
            },
        })
    }

    /// Whether there is one strip.
    pub(super) fn is_whole(&self) -> bool {
        self.rows >= self.pass.to.sides[0]
    }

    /// An uninitialized strip of results.
    pub(super) fn blank_strip(&self) -> Result<Tensor> {
        ops::blank(&self.pass.strip(self.rows), self.dtype, &self.device)
    }

    /// An uninitialized map of all results.
    pub(super) fn blank(&self) -> Result<Tensor> {
        ops::blank(&self.whole(), self.dtype, &self.device)
    }

    /// Shape of the map of all results.
    pub(super) fn whole(&self) -> [usize; 4] {
        self.pass.strip(self.pass.to.sides[0])
    }

    /// Reads the input of a strip, over that of the previous strip.
    fn read(&self, map: &Tensor, strip: Rows) -> Result<Strip> {
        let (from, count, steps) = self.pass.window(strip);
        let read = match &self.buffer {
            None => map.narrow(0, from[0] as usize, count)?,
            Some(buffer) => {
                let read = buffer.narrow(0, 0, count)?;
                self.reading.read(map, from, &read)?;
                read
            }
        };
        Ok(Strip {
            read,
            steps,
            count: strip.1,
        })
    }

    /// Convolves a strip over a contiguous target, or onto it.
    pub(super) fn convolve(&self, strip: &Strip, out: &Tensor, onto: Onto) -> Result<()> {
        let axes = |map: &Tensor| match self.kernels {
            Kernels::Flat => map.squeeze(1),
            Kernels::Causal => Ok(map.clone()),
        };
        let (read, out) = (axes(&strip.read)?, axes(out)?);
        ops::convolve(&read, &self.filter, Some(self.bias), &strip.steps, &out, onto)
    }

    /// Convolves a strip into the strip of results.
    pub(super) fn results(&self, strip: &Strip) -> Result<Tensor> {
        let Some(results) = &self.results else {
            candle_core::bail!("a convolution without a strip for its results");
        };
        let results = results.narrow(0, 0, strip.count)?;
        self.convolve(strip, &results, Onto::Nothing)?;
        Ok(results)
    }

    /// Convolves the whole map over a target, or onto it. The map is dropped as soon as it is read.
    pub(super) fn run(&self, map: Tensor, target: &Tensor, onto: Onto, walk: Walk<'_>) -> Outcome<()> {
        let mut strips = self.pass.each(self.rows).peekable();
        let mut unread = Some(map);
        while let (Some(rows), Some(map)) = (strips.next(), unread.take()) {
            walk.check_cancelled()?;
            let strip = self.read(&map, rows)?;
            unread = strips.peek().map(|_| map);
            let target = target.narrow(0, rows.0, rows.1)?;
            match (&self.results, onto) {
                (None, onto) => self.convolve(&strip, &target, onto)?,
                (Some(_), Onto::Nothing) => ops::copy_rows(&self.results(&strip)?, &target)?,
                (Some(_), Onto::Itself) => ops::add_rows(&self.results(&strip)?, &target)?,
            }
        }
        Ok(())
    }

    /// Convolves a map, and writes the results to its memory. A strip is computed by `compute`, and written by `write` after
    /// the next strip, which reads some of its rows, has been read.
    pub(super) fn run_over<T>(
        &self,
        map: &Tensor,
        compute: impl Fn(&Strip, Rows) -> Result<T>,
        write: impl Fn(T, Rows) -> Result<()>,
        walk: Walk<'_>,
    ) -> Outcome<()> {
        let mut unwritten: Option<(T, Rows)> = None;
        for rows in self.pass.each(self.rows) {
            walk.check_cancelled()?;
            let strip = self.read(map, rows)?;
            if let Some((results, before)) = unwritten.take() {
                write(results, before)?;
            }
            unwritten = Some((compute(&strip, rows)?, rows));
        }
        if let Some((results, last)) = unwritten {
            write(results, last)?;
        }
        Ok(())
    }

    /// The whole map as one strip, which is dropped as soon as it is read.
    pub(super) fn read_whole(&self, map: Tensor) -> Result<Strip> {
        self.read(&map, (0, self.pass.to.sides[0]))
    }
}

/// A convolution into a new map.
pub(super) fn convolve(
    map: &Tensor,
    reading: Reading<'_>,
    convolution: &Convolution,
    walk: Walk<'_>,
) -> Outcome<Tensor> {
    let layer = StripConvolution::new(map, reading, convolution, (Goes::There, 0), walk)?;
    let out = layer.blank()?;
    layer.run(map.clone(), &out, Onto::Nothing, walk)?;
    Ok(out)
}
