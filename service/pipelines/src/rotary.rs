//! Rotary position embedding over several axes (Su et al. 2021): each pair of a head's elements is rotated by the
//! token's position on one axis.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};

/// Cosine and sine for every pair of a head, `[tokens, head_width / 2]` in f32 for any dtype of the card: far
/// positions have errors of 0.1 rad and more in bf16.
#[derive(Debug, Clone)]
pub struct Rotations {
    pub cos: Tensor,
    pub sin: Tensor,
}

impl Rotations {
    /// The rotations of some tokens.
    pub(crate) fn rows(&self, first: usize, count: usize) -> Result<Rotations> {
        Ok(Rotations {
            cos: self.cos.narrow(0, first, count)?,
            sin: self.sin.narrow(0, first, count)?,
        })
    }

    /// The rotations of several ranges of tokens, one after the other, on this device. These are in host memory.
    pub(crate) fn of_ranges(&self, ranges: &[Range<usize>], device: &Device) -> Result<Rotations> {
        let gathered = |all: &Tensor| {
            let parts = ranges.iter().map(|range| all.narrow(0, range.start, range.len()));
            Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?.to_device(device)
        };
        Ok(Rotations {
            cos: gathered(&self.cos)?,
            sin: gathered(&self.sin)?,
        })
    }

    pub(crate) fn angles(&self) -> ops::Angles<'_> {
        ops::Angles {
            cos: &self.cos,
            sin: &self.sin,
        }
    }
}

/// Which intermediate results the reference rounds to f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounded {
    /// Cosines and sines: FLUX.
    Results,
    /// Angles too: Z-Image.
    Angles,
    /// Frequencies and angles too: language models.
    Frequencies,
}

/// The rotations of these positions, whole numbers, computed in f64. `axes` are the widths of the axes in a head; the frequency
/// of pair `i` of an axis of width `d` is `theta^(-2i/d)`.
///
/// # Errors
/// Errors of the device.
pub(crate) fn rotations<const N: usize, P: Copy + Into<i64>>(
    positions: &[[P; N]],
    axes: [usize; N],
    theta: f64,
    rounded: Rounded,
    device: &Device,
) -> Result<Rotations> {
    // An axis has few distinct positions: each is computed once.
    let mut most = [0; N];
    for position in positions {
        most.iter_mut()
            .zip(position)
            .for_each(|(most, &at)| *most = (at.into().unsigned_abs() as u32).max(*most));
    }
    let mut tables = Vec::with_capacity(N);
    for (&width, most) in axes.iter().zip(most) {
        let frequencies = frequencies(width, theta, rounded);
        let table = (0..=most).map(|at| turned(at, &frequencies, rounded));
        tables.push(table.collect::<Vec<Vec<(f32, f32)>>>());
    }
    let pairs = axes.iter().sum::<usize>() / 2;
    let mut cos = Vec::with_capacity(positions.len() * pairs);
    let mut sin = Vec::with_capacity(positions.len() * pairs);
    for position in positions {
        for (&at, table) in position.iter().zip(&tables) {
            let at: i64 = at.into();
            // Backwards is the same angle with the other sign.
            let sign = if at < 0 { -1.0 } else { 1.0 };
            for (s, c) in &table[at.unsigned_abs() as usize] {
                cos.push(*c);
                sin.push(sign * *s);
            }
        }
    }
    let shape = (positions.len(), pairs);
    Ok(Rotations {
        cos: Tensor::from_vec(cos, shape, device)?,
        sin: Tensor::from_vec(sin, shape, device)?,
    })
}

/// Frequencies of the pairs of an axis.
fn frequencies(width: usize, theta: f64, rounded: Rounded) -> Vec<f64> {
    let frequency = |i: usize| match rounded {
        Rounded::Results | Rounded::Angles => theta.powf(-((2 * i) as f64) / width as f64),
        Rounded::Frequencies => {
            let period = theta.powf((2 * i) as f64 / width as f64);
            f64::from(1.0 / period as f32)
        }
    };
    (0..width / 2).map(frequency).collect()
}

/// Sine and cosine of a position at these frequencies.
fn turned(at: u32, frequencies: &[f64], rounded: Rounded) -> Vec<(f32, f32)> {
    let turn = |&frequency: &f64| {
        let angle = f64::from(at) * frequency;
        let (sin, cos) = match rounded {
            Rounded::Results => angle.sin_cos(),
            Rounded::Angles | Rounded::Frequencies => f64::from(angle as f32).sin_cos(),
        };
        (sin as f32, cos as f32)
    };
    frequencies.iter().map(turn).collect()
}

/// Sine and cosine of the pairs of one axis of this width, at a position.
pub(crate) fn turns(at: u32, width: usize, theta: f64, rounded: Rounded) -> Vec<(f32, f32)> {
    turned(at, &frequencies(width, theta, rounded), rounded)
}
