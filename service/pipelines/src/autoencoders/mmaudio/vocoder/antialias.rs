//! Snake at twice the rate, between the filters that double and halve it.

use std::f64::consts::PI;

use candle_core::Tensor;
use ops::{ANTIALIAS_TAPS, Snake, antialiased_snake};

use super::super::layers::{Outcome, Wide};

/// Taps of either filter.
const TAPS: usize = ANTIALIAS_TAPS;
/// Width of a filter's transition, as a part of the doubled rate.
const HALF_WIDTH: f64 = 0.3;

/// The activation of a sequence, with its filter.
#[derive(Clone, Debug)]
pub(super) struct Antialiased {
    snake: Snake,
    filter: [f32; TAPS],
}

impl Antialiased {
    /// Of Snake with vectors of f32.
    pub(super) fn new(snake: Snake) -> Antialiased {
        Antialiased {
            snake,
            filter: filter().map(|tap| tap as f32),
        }
    }

    /// A convolution of the activated sequence `x`.
    pub(super) fn before(
        &self,
        convolution: &Wide,
        x: &Tensor,
        cancelled: &dyn Fn() -> bool,
    ) -> Outcome<Tensor> {
        let activate = |x: &Tensor, out: &Tensor| antialiased_snake(x, &self.snake, &self.filter, out);
        convolution.run_through(x, &activate, cancelled)
    }
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
