//! Times predictions of SDXL's UNet with random weights on a CUDA device, without a service around it:
//! `sdxl_step --steps 6 --side 1024 --text 77 --items 2`. It prints milliseconds of every step, as the host waits for them. Two items
//! are a step with guidance, both conditions at once.
#![allow(clippy::print_stdout, clippy::expect_used)] // A benchmark, which prints its figures.

mod made_up;

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, Weight};
use pipelines::sdxl::{Prompted, Unet, UnetConfig};

use crate::made_up::{Block, number};

fn main() {
    let device = Device::new_cuda_with_stream(0).expect("a CUDA device");
    let (steps, side) = (number("--steps", 6), number("--side", 1024) / 8);
    let (items, text) = (number("--items", 2), number("--text", 77));
    let config = UnetConfig::default();
    let block = Block::new();
    let tensors: HashMap<String, Weight> = config
        .tensor_shapes()
        .map(|(name, shape)| {
            let weight = block.weight(&name, &shape, None, &device);
            (name, weight)
        })
        .collect();
    let tensors = ComponentTensors::of_weights(tensors);
    let unet = Unet::new(&config, &tensors).expect("all tensors");
    let random = |shape: &[usize]| {
        let count = shape.iter().product();
        Tensor::from_slice(&block.numbers[..count], shape, &device).expect("numbers")
    };
    let pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim;
    let pixels = (8 * side) as f32;
    let prompted = Prompted {
        states: random(&[1, text, config.cross_attention_dim]),
        pooled: random(&[1, pooled]),
        ids: [pixels, pixels, 0.0, 0.0, pixels, pixels],
    };
    let on = (DType::BF16, &device);
    let conditioning = unet.condition(&vec![&prompted; items], on).expect("conditioning");
    let scratch = unet.scratch((items, side * side), on).expect("scratch");
    let latent = random(&[items, side, side, config.in_channels]);
    device.synchronize().expect("a device that answers");
    for step in 0..steps {
        let began = Instant::now();
        let time = 999.0 - step as f32;
        let output = unet
            .forward(&latent, time, &conditioning, &scratch, &mut || Ok(()))
            .expect("a prediction");
        let asked = began.elapsed();
        let planes = output.narrow(0, 0, 1).and_then(|item| item.squeeze(0));
        let (_, is_finite) = ops::map_to_planes(&planes.expect("an item")).expect("planes");
        println!(
            "step {step}: {:.2} ms, asked for in {:.2} ms{}",
            began.elapsed().as_secs_f64() * 1e3,
            asked.as_secs_f64() * 1e3,
            if is_finite { "" } else { ", not finite" }
        );
    }
}
