//! Times steps of FLUX.1-dev's transformer with random weights on a CUDA device, without a service around it:
//! `flux_step --format full|int8|fp8|nf4|nf4-double --steps 6 --side 1024 --text 512 --batch 1`. It prints milliseconds
//! of every step, as the host waits for them. `tests/gpu/count` counts what a step asks of the driver.
#![allow(clippy::print_stdout, clippy::expect_used)] // A benchmark, which prints its figures.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, QuantizedWeight, Weight, WeightFormat};
use pipelines::flux::{Prompted, Transformer, TransformerConfig};

/// The value behind a flag.
fn option(name: &str, otherwise: &str) -> String {
    let arguments: Vec<String> = std::env::args().collect();
    let place = arguments.iter().position(|argument| argument == name);
    place
        .and_then(|place| arguments.get(place + 1))
        .map_or(otherwise.to_owned(), Clone::clone)
}

fn number(name: &str, otherwise: usize) -> usize {
    option(name, &otherwise.to_string()).parse().expect("a number")
}

/// Random numbers of about the size that weights have, one block of them for all.
struct Block {
    numbers: Vec<half::bf16>,
    bytes: Vec<u8>,
}

impl Block {
    fn new() -> Block {
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

    fn weight(&self, name: &str, shape: &[usize], format: Option<WeightFormat>, device: &Device) -> Weight {
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

fn main() {
    let device = Device::new_cuda_with_stream(0).expect("a CUDA device");
    let format = match option("--format", "full").as_str() {
        "full" => None,
        "fp8" => Some(WeightFormat::Fp8(gpu::Fp8Scales::Rows)),
        "int8" => Some(WeightFormat::Int8),
        "nf4" => Some(WeightFormat::Nf4),
        "nf4-double" => Some(WeightFormat::Nf4Double),
        other => panic!("there is no format {other}"),
    };
    let (steps, side, text) = (
        number("--steps", 6),
        number("--side", 1024),
        number("--text", 512),
    );
    let (batch, rows) = (number("--batch", 1), side / 16);
    let config = TransformerConfig {
        guidance_embeds: true,
        ..TransformerConfig::default()
    };
    let block = Block::new();
    let tensors: HashMap<String, Weight> = config
        .tensor_shapes()
        .map(|(name, shape)| {
            let weight = block.weight(&name, &shape, format, &device);
            (name, weight)
        })
        .collect();
    let tensors = ComponentTensors::of_weights(tensors);
    let transformer = Transformer::new(&config, &tensors).expect("all tensors");
    let dtype = DType::BF16;
    let random = |shape: (usize, usize, usize)| {
        let count = shape.0 * shape.1 * shape.2;
        Tensor::from_slice(&block.numbers[..count], shape, &device).expect("numbers")
    };
    let sequence = random((batch, text, config.joint_attention_dim));
    let pooled = random((1, 1, config.pooled_projection_dim))
        .squeeze(0)
        .expect("a row");
    let prompted = Prompted {
        reference: None,
        sequence: &sequence,
        pooled: &pooled,
        guidance: 3.5,
        rows,
        columns: rows,
    };
    let times: Vec<f32> = (0..steps).map(|step| 1.0 - step as f32 / steps as f32).collect();
    let conditioning = transformer.condition(&prompted, &times).expect("conditioning");
    let step_buffers = transformer
        .step_buffers(batch, text, rows * rows, (dtype, &device))
        .expect("buffers");
    let shape = (batch, rows * rows, config.in_channels);
    let seen = random(shape);
    let latent = Tensor::zeros(shape, DType::F32, &device).expect("a latent");
    let finite = ops::Finite::new(&device).expect("a flag");
    device.synchronize().expect("a device that answers");
    for step in 0..steps {
        let began = Instant::now();
        let velocity = transformer
            .velocity(&seen, &conditioning, step, &step_buffers, &mut || Ok(()))
            .expect("a velocity");
        ops::euler(&latent, velocity, -1.0 / steps as f64, &seen, &finite).expect("a step");
        let asked = began.elapsed();
        let is_finite = finite.is_finite().expect("a device that answers");
        println!(
            "step {step}: {:.2} ms, asked for in {:.2} ms{}",
            began.elapsed().as_secs_f64() * 1e3,
            asked.as_secs_f64() * 1e3,
            if is_finite { "" } else { ", not finite" }
        );
    }
}
