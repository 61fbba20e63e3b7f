//! Random weights and options of the examples that time steps.

use candle_core::{Device, Tensor};
use gpu::{QuantizedWeight, Weight, WeightFormat};

/// The value behind a flag.
pub(crate) fn option(name: &str, otherwise: &str) -> String {
    let arguments: Vec<String> = std::env::args().collect();
    let place = arguments.iter().position(|argument| argument == name);
    place
        .and_then(|place| arguments.get(place + 1))
        .map_or(otherwise.to_owned(), Clone::clone)
}

pub(crate) fn number(name: &str, otherwise: usize) -> usize {
    option(name, &otherwise.to_string()).parse().expect("a number")
}

/// Random numbers of about the size that weights have, one block of them for all.
pub(crate) struct Block {
    pub(crate) numbers: Vec<half::bf16>,
    bytes: Vec<u8>,
}

impl Block {
    pub(crate) fn new() -> Block {
        let mut state = 1u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let count = 80 << 20;
        Block {
            numbers: (0..count)
                .map(|_| half::bf16::from_f32((next() >> 40) as f32 / (1u64 << 28) as f32 - 0.03))
                .collect(),
            // No NaN in e4m3, and scales that are finite.
            bytes: (0..count).map(|_| next() as u8 & 0x3F).collect(),
        }
    }

    pub(crate) fn weight(
        &self,
        name: &str,
        shape: &[usize],
        format: Option<WeightFormat>,
        device: &Device,
    ) -> Weight {
        let count: usize = shape.iter().product();
        match format {
            Some(format) if shape.len() == 2 && name.contains("blocks") && !name.contains("norm") => {
                let (rows, columns) = gpu::rows_and_columns(shape);
                let bytes = self.bytes[..format.bytes(rows, columns).0 as usize].to_vec();
                let length = bytes.len();
                Weight::Quantized(QuantizedWeight {
                    bytes: Tensor::from_vec(bytes, length, &Device::Cpu)
                        .and_then(|bytes| bytes.to_device(device))
                        .expect("a weight"),
                    format,
                    shape: shape.to_vec(),
                })
            }
            _ => {
                let tensor = Tensor::from_slice(&self.numbers[..count], shape, device);
                Weight::Full(tensor.expect("a weight"))
            }
        }
    }
}
