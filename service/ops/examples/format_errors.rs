//! How far weights are from what they were before they were quantized at load: relative L2 of normally distributed numbers,
//! of the same with a hundredth of their columns eight times as large, and of Student's t with four degrees of freedom.
//!
//!     cargo run --release -p ops --example format_errors
#![allow(clippy::print_stdout)] // figures are what it is for

use candle_core::{DType, Device, Tensor};
use gpu::{QuantizedWeight, WeightFormat};

const ROWS: usize = 3072;
const COLUMNS: usize = 3072;
const DEVIATION: f64 = 0.02;
/// Of so many columns one is large.
const OF_COLUMNS: usize = 100;

/// Normally distributed numbers: Box and Muller's over a linear congruential generator.
struct Normal(u64);

impl Normal {
    fn uniform(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    fn next(&mut self) -> f64 {
        let (size, angle) = (self.uniform(), self.uniform());
        (-2.0 * size.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }

    /// Of Student's t with four degrees of freedom.
    fn student(&mut self) -> f64 {
        let squares: f64 = (0..4).map(|_| self.next().powi(2)).sum();
        self.next() / (squares / 4.0).sqrt()
    }
}

fn weights(of: impl Fn(&mut Normal, usize) -> f64) -> Vec<f32> {
    let mut random = Normal(7);
    let numbers = (0..ROWS * COLUMNS).map(|i| (DEVIATION * of(&mut random, i % COLUMNS)) as f32);
    numbers.collect()
}

/// Relative L2 distance of numbers and what they are in a format.
fn error(format: WeightFormat, numbers: &[f32]) -> Result<f64, Box<dyn std::error::Error>> {
    let bytes = gpu::quantize(format, numbers, ROWS, COLUMNS)?;
    let count = bytes.len();
    let weight = QuantizedWeight {
        bytes: Tensor::from_vec(bytes, count, &Device::Cpu)?,
        format,
        shape: vec![ROWS, COLUMNS],
    };
    let found = ops::dequantize(&weight, DType::F32)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let mut apart = found
        .iter()
        .zip(numbers)
        .map(|(a, b)| f64::from(*a) - f64::from(*b));
    let apart = square(&mut apart);
    Ok((apart / square(&mut numbers.iter().map(|n| f64::from(*n)))).sqrt())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let normal = weights(|random, _| random.next());
    let outliers = weights(|random, column| match column % OF_COLUMNS {
        0 => 8.0 * random.next(),
        _ => random.next(),
    });
    let student = weights(|random, _| random.student());
    println!("{:14} {:>8} {:>8} {:>8}", "format", "normal", "outliers", "t4");
    for format in WeightFormat::MADE_AT_LOAD {
        let format = format.for_columns(COLUMNS);
        let errors = [&normal, &outliers, &student].map(|numbers| error(format, numbers));
        let [normal, outliers, student] = errors;
        println!(
            "{:14} {:8.4} {:8.4} {:8.4}",
            format.to_string(),
            normal?,
            outliers?,
            student?
        );
    }
    Ok(())
}
