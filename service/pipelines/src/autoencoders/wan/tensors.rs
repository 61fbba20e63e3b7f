//! The arithmetic of maps that are tensors.

use candle_core::{DType, Device, Tensor};
use model::StageError;
use ops::{ChannelNorm, Enlarge, MapReading, Mask, Onto, Pad, Steps};

use super::arithmetic::{Arithmetic, Blocks, Outcome, Reading, Sides};
use super::table::Source;
use crate::autoencoders::pass::StripSize;
use crate::autoencoders::source::TensorSource;
use crate::maps::Convolution;

/// `torch.nn.functional.normalize` has this as its least length.
const LEAST_LENGTH: f64 = 1e-12;

/// Maps in the memory of a device.
pub(super) struct Tensors<'a> {
    pub(super) device: &'a Device,
    pub(super) dtype: DType,
    pub(super) pieces: StripSize,
    pub(super) cancelled: &'a dyn Fn() -> bool,
}

impl Source for TensorSource<'_> {
    type Layer = Convolution;
    type Norm = Tensor;

    fn layer(&mut self, name: &str, shape: &[usize]) -> Outcome<Convolution> {
        TensorSource::layer(self, name, shape)
    }

    fn of_last_frame(&mut self, name: &str, shape: &[usize; 5]) -> Outcome<Convolution> {
        Ok(TensorSource::layer(self, name, shape)?.of_last_frame())
    }

    fn norm(&mut self, name: &str, shape: &[usize]) -> Outcome<Tensor> {
        let gamma = self.tensor(&format!("{name}.gamma"), shape)?;
        Ok(gamma.flatten_all()?.contiguous()?)
    }
}

impl Tensors<'_> {
    /// The CPU attends in f32.
    fn wide(&self, map: &Tensor) -> candle_core::Result<Tensor> {
        match map.device().is_cpu() {
            true => map.to_dtype(DType::F32),
            false => Ok(map.clone()),
        }
    }
}

impl Arithmetic for Tensors<'_> {
    type Map = Tensor;
    type Layer = Convolution;
    type Norm = Tensor;

    fn sides(&self, map: &Tensor) -> Outcome<Sides> {
        Ok(map.dims4()?.into())
    }

    fn blank(&self, sides: Sides) -> Outcome<Tensor> {
        Ok(ops::blank(&sides, self.dtype, self.device)?)
    }

    fn zeros(&self, sides: Sides) -> Outcome<Tensor> {
        Ok(Tensor::zeros(&sides[..], self.dtype, self.device)?)
    }

    fn part(&self, map: &Tensor, axis: usize, first: usize, count: usize) -> Outcome<Tensor> {
        Ok(map.narrow(axis, first, count)?)
    }

    fn every_second_frame(&self, map: &Tensor, first: usize) -> Outcome<Tensor> {
        let [frames, rows, columns, channels] = self.sides(map)?;
        let pairs = map.reshape((frames / 2, 2, rows, columns, channels))?;
        Ok(pairs.narrow(1, first, 1)?.squeeze(1)?)
    }

    fn read(&self, map: &Tensor, reading: &Reading<'_, Tensor>, row: usize, out: &Tensor) -> Outcome<()> {
        let enlarge = match reading.is_enlarged {
            true => Enlarge::Twice,
            false => Enlarge::Not,
        };
        let norm = reading
            .normed
            .map_or(ChannelNorm::None, |(weight, _)| ChannelNorm::Rms {
                weight,
                eps: LEAST_LENGTH,
            });
        let reading = MapReading {
            norm,
            silu: reading.normed.is_some_and(|(_, silu)| silu),
            enlarge: [Enlarge::Not, enlarge, enlarge],
            pad: Pad::Zero,
        };
        Ok(ops::apply_norm(map, &reading, [0, row as i64, 0], out)?)
    }

    fn copy(&self, map: &Tensor, out: &Tensor) -> Outcome<()> {
        Ok(ops::copy_rows(map, out)?)
    }

    fn add(&self, map: &Tensor, out: &Tensor) -> Outcome<()> {
        if map.is_contiguous() && out.is_contiguous() {
            return Ok(ops::add_rows(map, out)?);
        }
        // The rows of one frame have one distance.
        for frame in 0..map.dim(0)? {
            ops::add_rows(&map.narrow(0, frame, 1)?, &out.narrow(0, frame, 1)?)?;
        }
        Ok(())
    }

    fn convolve(&self, layer: &Convolution, map: &Tensor, steps: &Steps, out: &Tensor) -> Outcome<()> {
        let filter = layer.filter(self.dtype)?;
        Ok(ops::convolve(
            map,
            &filter,
            Some(&layer.bias),
            steps,
            out,
            Onto::Nothing,
        )?)
    }

    fn of_positions(&self, layer: &Convolution, map: &Tensor, out: &Tensor, onto: Onto) -> Outcome<()> {
        Ok(layer.of_positions(map, out, onto)?)
    }

    fn attend(&self, projected: &Tensor, out: &Tensor) -> Outcome<()> {
        let [frames, rows, columns, channels] = self.sides(out)?;
        let tokens = rows * columns;
        let scale = 1.0 / (channels as f64).sqrt();
        for frame in 0..frames {
            self.check_cancelled()?;
            let of_frame = projected.narrow(0, frame, 1)?;
            let of_frame = self.wide(&of_frame)?.reshape((1, tokens, 1, 3 * channels))?;
            let part = |index: usize| of_frame.narrow(3, index * channels, channels);
            let target = out.narrow(0, frame, 1)?.reshape((1, tokens, 1, channels))?;
            let seen = self.wide(&target)?;
            ops::attention(&part(0)?, &part(1)?, &part(2)?, scale, Mask::None, &seen)?;
            if seen.dtype() != target.dtype() {
                ops::copy_rows(&seen, &target)?;
            }
        }
        Ok(())
    }

    fn average_blocks(&self, map: &Tensor, blocks: Blocks, out: &Tensor) -> Outcome<()> {
        Ok(ops::average_blocks(map, [blocks.frames, blocks.sides], out)?)
    }

    fn add_repeated(&self, map: &Tensor, blocks: Blocks, from: [usize; 2], out: &Tensor) -> Outcome<()> {
        Ok(ops::add_repeated(map, [blocks.frames, blocks.sides], from, out)?)
    }

    fn patched(&self, frames: &Tensor, patch: usize) -> Outcome<Tensor> {
        if patch == 1 {
            return Ok(frames.clone());
        }
        let [count, height, width, channels] = self.sides(frames)?;
        let map = self.blank([count, height / patch, width / patch, channels * patch * patch])?;
        ops::patched(frames, patch, &map)?;
        Ok(map)
    }

    fn unpatch(&self, map: &Tensor, patch: usize, frames: &Tensor) -> Outcome<()> {
        if patch == 1 {
            return self.copy(map, frames);
        }
        Ok(ops::unpatched(map, patch, frames)?)
    }

    fn number(&self) -> usize {
        self.dtype.size_in_bytes()
    }

    fn bytes_of_piece(&self) -> usize {
        self.pieces.bytes(self.device.is_cpu())
    }

    fn check_cancelled(&self) -> Outcome<()> {
        match (self.cancelled)() {
            true => Err(StageError::Cancelled),
            false => Ok(()),
        }
    }
}
