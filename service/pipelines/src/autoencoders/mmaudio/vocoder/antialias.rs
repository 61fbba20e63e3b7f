//! Snake at twice the rate, between the filters that double and halve it.

use std::f64::consts::PI;

use candle_core::{DType, Result, Tensor};
use ops::{Snake, snake_in_place};

/// Taps of either filter.
const TAPS: usize = 12;
/// Width of a filter's transition, as a part of the doubled rate.
const HALF_WIDTH: f64 = 0.3;
/// Rows before and after a sequence that the filters see: copies of those at its ends.
const BEYOND: usize = 3;

/// The activation of a sequence, with its filter.
#[derive(Clone, Debug)]
pub(super) struct Antialiased {
    snake: Snake,
    filter: [f64; TAPS],
}

/// The taps that a doubled row has of six rows: every second one, the last first for the filter that doubles.
fn every_second(filter: &[f64; TAPS], first: usize) -> impl Iterator<Item = f64> + Clone {
    filter.iter().skip(first).step_by(2).copied()
}

impl Antialiased {
    /// Of Snake with vectors of f32.
    pub(super) fn new(snake: Snake) -> Antialiased {
        Antialiased {
            snake,
            filter: filter(),
        }
    }

    /// Activates a contiguous sequence `[n, channels]` of f32 into a new one.
    ///
    /// # Errors
    /// Errors of the device.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(0)?;
        // The doubled sequence as its even and its odd rows. Even row `2 t` sees the rows from `t - 3` to `t + 2`, odd row
        // `2 t + 1` those from `t - 2` to `t + 3`, which is the reverse.
        let (even, odd) = {
            let x = with_ends(x, x, x)?;
            let doubled = |first: usize, at: usize| {
                let taps = every_second(&self.filter, first).map(|tap| 2.0 * tap);
                let taps: Vec<f64> = taps.collect();
                sum(&x, at, rows, taps.into_iter().rev())
            };
            (doubled(1, 0)?, doubled(0, 1)?)
        };
        for half in [&even, &odd] {
            snake_in_place(half, &self.snake)?;
        }
        // Row `t` sees the doubled rows from `2 t - 5` to `2 t + 6`; before the first one is the first even row, after the
        // last one the last odd row.
        let even_rows = with_ends(&even, &even, &odd)?;
        let odd_rows = with_ends(&odd, &even, &odd)?;
        drop((even, odd));
        let of_odd = sum(&odd_rows, 0, rows, every_second(&self.filter, 0))?;
        drop(odd_rows);
        of_odd + sum(&even_rows, 1, rows, every_second(&self.filter, 1))?
    }
}

/// A sequence after copies of the first row of `first`, and before copies of the last row of `last`.
fn with_ends(x: &Tensor, first: &Tensor, last: &Tensor) -> Result<Tensor> {
    let before = first.narrow(0, 0, 1)?.repeat((BEYOND, 1))?;
    let after = last.narrow(0, last.dim(0)? - 1, 1)?.repeat((BEYOND, 1))?;
    Tensor::cat(&[&before, x, &after], 0)
}

/// The sum of as many rows from each row on as there are taps, each times its tap: `rows` rows, the first from row `at` on.
fn sum(x: &Tensor, at: usize, rows: usize, taps: impl Iterator<Item = f64>) -> Result<Tensor> {
    let mut sum: Option<Tensor> = None;
    for (index, tap) in taps.enumerate() {
        let part = x.narrow(0, at + index, rows)?.affine(tap, 0.0)?;
        sum = Some(match sum {
            None => part,
            Some(sum) => (sum + part)?,
        });
    }
    sum.ok_or_else(|| candle_core::Error::Msg("a filter without taps".to_owned()))
}

/// A low pass of half the doubled rate: a sinc in a Kaiser window, whose taps add up to one.
fn filter() -> [f64; TAPS] {
    let half = TAPS as f64 / 2.0;
    let attenuation = 2.285 * (half - 1.0) * PI * 4.0 * HALF_WIDTH + 7.95;
    // Kaiser's formula for attenuations over 50 dB, as this one is.
    let beta = 0.1102 * (attenuation - 8.7);
    let tap = |index: usize| {
        let time = index as f64 - half + 0.5;
        let place = 2.0 * index as f64 / (TAPS - 1) as f64 - 1.0;
        let window = bessel(beta * (1.0 - place * place).max(0.0).sqrt()) / bessel(beta);
        // A sinc of half the rate; no tap is in its middle.
        window * (PI * time / 2.0).sin() / (PI * time)
    };
    let taps: [f64; TAPS] = std::array::from_fn(tap);
    let all: f64 = taps.iter().sum();
    taps.map(|tap| tap / all)
}

/// The modified Bessel function of the first kind and of order 0, by its series.
fn bessel(x: f64) -> f64 {
    let mut term = 1.0;
    let mut sum = 1.0;
    for index in 1..64 {
        term *= (x / (2.0 * f64::from(index))).powi(2);
        sum += term;
    }
    sum
}

/// Vectors of Snake in f32.
///
/// # Errors
/// Errors of the device.
pub(super) fn wide(alpha: &Tensor, beta: &Tensor) -> Result<Snake> {
    Ok(Snake {
        alpha: alpha.to_dtype(DType::F32)?.contiguous()?,
        beta: beta.to_dtype(DType::F32)?.contiguous()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_is_that_of_the_reference() {
        // `kaiser_sinc_filter1d(0.25, 0.3, 12)` of diffusers' vocoder, in f32.
        let half = [
            0.002_028_964_7,
            0.009_389_465_7,
            -0.025_543_459,
            -0.057_657_383,
            0.128_572_58,
            0.443_209_8,
        ];
        let taps = filter();
        for (index, expected) in half.into_iter().enumerate() {
            for tap in [taps[index], taps[TAPS - 1 - index]] {
                assert!((tap - expected).abs() < 1e-7, "{tap} at {index}");
            }
        }
    }
}
