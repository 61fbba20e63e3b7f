//! Memory of FLUX.1's stages on a card, against the prediction. Weights are zeros: memory does not depend on them.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::autoencoders::kl::{
    Chunking, VaeConfig, VaeDecoder, VaeEncoder, decode_ladder, encode_ladder,
};
use pipelines::flux::{Prompted, Transformer, TransformerConfig, denoise_scratch};
use pipelines::text::t5::{T5Config, T5Encoder};

use crate::card;
use crate::device::pool::peak_of;

fn zeros(shape: &[usize], device: &Device) -> Tensor {
    Tensor::zeros(shape, DType::BF16, device).expect("a tensor")
}

fn component(shapes: impl IntoIterator<Item = (String, Vec<usize>)>, device: &Device) -> ComponentTensors {
    let tensors = shapes
        .into_iter()
        .map(|(name, shape)| (name, zeros(&shape, device)));
    ComponentTensors::new(tensors.collect::<HashMap<_, _>>())
}

/// Prints both, and asserts that the prediction is close to the measurement. A shortage must be within the headroom;
/// after the first run the measured peak replaces the prediction.
fn assert_predicted(what: &str, predicted: u64, taken: u64) {
    let ratio = predicted as f64 / taken as f64;
    println!(
        "{what}: {} MiB predicted, {} MiB taken ({ratio:.2})",
        predicted >> 20,
        taken >> 20
    );
    assert!(
        (0.9..1.35).contains(&ratio) || predicted.abs_diff(taken) < 48 << 20,
        "{what}: {ratio:.2}"
    );
}

#[test]
fn a_step_allocates_the_predicted_bytes() {
    let Some(device) = card() else { return };
    // One block of each kind: the others use the same memory, one after the other.
    let config = TransformerConfig {
        num_layers: 1,
        num_single_layers: 1,
        guidance_embeds: true,
        ..TransformerConfig::default()
    };
    let tensors = component(config.tensor_shapes(), device);
    let transformer = Transformer::new(&config, &tensors).expect("all tensors");
    for (rows, columns, text) in [(32, 32, 256), (64, 64, 512), (96, 64, 512), (128, 128, 512)] {
        let sequence = zeros(&[1, text, config.joint_attention_dim], device);
        let pooled = zeros(&[1, config.pooled_projection_dim], device);
        let step = || {
            let prompted = Prompted {
                reference: None,
                sequence: &sequence,
                pooled: &pooled,
                guidance: 3.5,
                rows,
                columns,
            };
            let conditioning = transformer
                .condition(&prompted, &[1.0, 0.5])
                .expect("conditioning");
            let latent =
                Tensor::zeros((1, rows * columns, config.in_channels), DType::F32, device).expect("a latent");
            let seen = Tensor::zeros((1, rows * columns, config.in_channels), DType::BF16, device)
                .expect("a latent");
            let finite = ops::Finite::new(device).expect("a flag");
            let step_buffers = transformer
                .step_buffers(1, text, rows * columns, (DType::BF16, device))
                .expect("buffers");
            for step in 0..2 {
                let velocity = transformer
                    .velocity(&seen, &conditioning, step, &step_buffers, &mut || Ok(()))
                    .expect("a velocity");
                ops::euler(&latent, velocity, -0.5, &seen, &finite).expect("a step");
            }
        };
        step(); // modules and workspaces
        let (taken, ()) = peak_of(device, step);
        let predicted = denoise_scratch(&config, text, rows * columns, 2, DType::BF16);
        assert_predicted(&format!("{}x{}", rows * 16, columns * 16), predicted, taken);
    }
}

#[test]
fn every_rung_of_the_autoencoder_allocates_the_predicted_bytes() {
    let Some(device) = card() else { return };
    let config = VaeConfig::flux();
    let tensors = component(config.tensor_shapes(), device);
    let decoder = VaeDecoder::new(&config, &tensors).expect("a decoder");
    let encoder = VaeEncoder::new(&config, &tensors).expect("an encoder");
    for (h, w) in [(128, 128), (64, 96)] {
        for (chunking, rung) in decode_ladder(&config, h, w, DType::BF16) {
            let decode = || {
                let latent = Tensor::zeros((1, 16, h, w), DType::F32, device).expect("a latent");
                decoder.decode(&latent, chunking, &|| false).expect("a picture");
            };
            if chunking == Chunking::Whole {
                decode(); // modules and workspaces
            }
            let (taken, ()) = peak_of(device, decode);
            assert_predicted(&format!("decode {h}x{w} {}", rung.label), rung.scratch.0, taken);
        }
        for (chunking, rung) in encode_ladder(&config, h, w, DType::BF16) {
            let (taken, ()) = peak_of(device, || {
                let picture = Tensor::zeros((1, 3, h * 8, w * 8), DType::BF16, device).expect("a picture");
                encoder.encode(&picture, chunking, &|| false).expect("moments");
            });
            assert_predicted(&format!("encode {h}x{w} {}", rung.label), rung.scratch.0, taken);
        }
    }
}

#[test]
fn text_encoding_allocates_the_predicted_bytes() {
    let Some(device) = card() else { return };
    // FLUX.1's T5 with two layers of 24.
    let config = T5Config {
        d_model: 4096,
        d_ff: 10240,
        num_layers: 2,
        num_heads: 64,
        feed_forward_proj: "gated-gelu".to_owned(),
        ..T5Config::default()
    };
    let tensors = component(config.tensor_shapes(&|_| false), device);
    let encoder = T5Encoder::new(&config, "text_encoder_2", &tensors).expect("an encoder");
    for tokens in [256, 512] {
        let encode = || drop(encoder.forward(&vec![1; tokens], &|| false).expect("an encoding"));
        encode();
        let (taken, ()) = peak_of(device, encode);
        let predicted = config.scratch(tokens, DType::BF16).0;
        assert_predicted(&format!("T5 of {tokens}"), predicted, taken);
    }
}
