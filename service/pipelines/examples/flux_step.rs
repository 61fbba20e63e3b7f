//! Times steps of FLUX.1-dev's transformer with random weights on a CUDA device, without a service around it:
//! `flux_step --format full|int8|fp8|nf4|nf4-double --steps 6 --side 1024 --text 512 --batch 1`. It prints milliseconds
//! of every step, as the host waits for them. `tests/gpu/count` counts what a step asks of the driver.
#![allow(clippy::print_stdout, clippy::expect_used)] // A benchmark, which prints its figures.

mod made_up;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, Weight, WeightFormat};
use pipelines::flux::{Prompted, Transformer, TransformerConfig};

use crate::made_up::{Block, number, option};

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
