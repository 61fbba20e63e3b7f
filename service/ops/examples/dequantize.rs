//! Says how fast quantized weights are dequantized on the CPU: GB/s of what is written, on as many threads as there are
//! cores (`RAYON_NUM_THREADS=1`: on one).
//!
//! ```sh
//! cargo run --release -p ops --example dequantize
//! ```
#![allow(clippy::print_stdout)] // figures are what it is for

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use gpu::{Fp8Scales, GgufType, QuantizedWeight, WeightFormat};

const ROWS: usize = 4096;
const COLUMNS: usize = 4096;
const RUNS: usize = 5;

fn main() -> Result<()> {
    let whole = [
        WeightFormat::Int8,
        WeightFormat::Fp8(Fp8Scales::Rows),
        WeightFormat::Nf4,
        WeightFormat::Nf4Double,
    ];
    for format in whole.into_iter().chain(GgufType::ALL.map(WeightFormat::Gguf)) {
        let count = format.bytes(ROWS, COLUMNS).0 as usize;
        let codes = (0..count).map(|i| (i * 31 % 61) as u8).collect::<Vec<_>>();
        let weight = QuantizedWeight {
            bytes: Tensor::from_vec(codes, count, &Device::Cpu)?,
            format,
            shape: vec![ROWS, COLUMNS],
        };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let began = Instant::now();
            for _ in 0..RUNS {
                std::hint::black_box(ops::dequantize(&weight, dtype)?);
            }
            let written = (RUNS * ROWS * COLUMNS * dtype.size_in_bytes()) as f64;
            println!(
                "{format:>10} {dtype:?}: {:.2} GB/s",
                written / began.elapsed().as_secs_f64() / 1e9
            );
        }
    }
    Ok(())
}
