//! Memory of Z-Image's stages, against the prediction.
#![allow(clippy::expect_used)] // What tests share is outside of them.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, allocator};
use pipelines::noise::Generator;
use pipelines::text::qwen3::{Qwen3Config, Qwen3Encoder};
use pipelines::z_image::{Lengths, Transformer, TransformerConfig, denoise_scratch};

#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

fn random(shape: &[usize], generator: &mut Generator) -> Tensor {
    let gain = (shape.last().copied().unwrap_or(1) as f32).powf(-0.5);
    let numbers = generator
        .normal(shape.iter().product())
        .into_iter()
        .map(|number| number * gain);
    Tensor::from_vec(numbers.collect::<Vec<f32>>(), shape, &Device::Cpu).expect("a tensor")
}

fn made_up(shapes: impl IntoIterator<Item = (String, Vec<usize>)>) -> ComponentTensors {
    let mut generator = Generator::new(1);
    let tensors: HashMap<String, Tensor> = shapes
        .into_iter()
        .map(|(name, shape)| (name, random(&shape, &mut generator)))
        .collect();
    ComponentTensors::new(tensors)
}

/// Peak bytes of `steps` steps.
fn denoise(config: &TransformerConfig, lengths: &Lengths, steps: usize) -> u64 {
    let tensors = made_up(config.tensor_shapes());
    let transformer = Transformer::new(config, &tensors).expect("all tensors");
    let mut generator = Generator::new(2);
    let caption = random(&[lengths.text, config.cap_feat_dim], &mut generator);
    let latent = random(&[1, lengths.picture(), config.patch_width()], &mut generator);
    let times: Vec<f32> = (0..steps).map(|step| step as f32 / steps as f32).collect();

    let before = allocator::mark();
    // Inputs of the stage: the text on the card, the latent twice.
    let caption = caption.copy().expect("a text");
    let latent = latent.copy().expect("a latent");
    let seen = latent.copy().expect("a latent");
    let conditioning = transformer
        .condition(&caption, (lengths.rows, lengths.columns), &times, &mut || Ok(()))
        .expect("conditioning");
    let finite = ops::Finite::new(&Device::Cpu).expect("a flag");
    let buffers = transformer
        .step_buffers(lengths, (DType::F32, &Device::Cpu))
        .expect("buffers");
    for step in 0..steps {
        let direction = transformer
            .direction(&seen, &conditioning, step, &buffers, &mut || Ok(()))
            .expect("an output");
        ops::euler(&latent, direction, 1.0 / steps as f64, &seen, &finite).expect("a step");
    }
    allocator::peak_since_mark().0 - before.0
}

/// Asserts that the prediction is sufficient and not much too large, apart from packing buffers of threads, which small
/// products do not use.
fn compared(what: &str, taken: u64, predicted: u64) -> String {
    let threads = candle_core::utils::get_num_threads() as u64;
    let figures = format!("{what}: {taken} bytes taken, {predicted} predicted, {threads} threads");
    assert!(taken <= predicted, "{figures}");
    assert!(
        predicted <= taken * 2 + (8 << 20) + threads * (5 << 19),
        "{figures}"
    );
    figures
}

/// A single test, since the counter is process-wide.
#[test]
fn stages_allocate_the_predicted_bytes() {
    let small = TransformerConfig {
        dim: 192,
        n_layers: 2,
        n_refiner_layers: 1,
        n_heads: 6,
        n_kv_heads: 6,
        cap_feat_dim: 128,
        axes_dims: [8, 12, 12],
        timestep_inner: 64,
        ..TransformerConfig::default()
    };
    for (rows, columns, text) in [(8, 9, 33), (24, 20, 130), (40, 32, 500)] {
        let lengths = Lengths { rows, columns, text };
        let taken = denoise(&small, &lengths, 2);
        let predicted = denoise_scratch(&small, &lengths, 2, DType::F32);
        println!(
            "{}",
            compared(&format!("{rows}x{columns} and {text} tokens"), taken, predicted)
        );
    }

    let json = r#"{"vocab_size": 400, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1000000.0}"#;
    let config: Qwen3Config = serde_json::from_str(json).expect("a configuration");
    let depth = config.num_hidden_layers - 1;
    let tensors = made_up(config.tensor_shapes(depth, &|_| false));
    let encoder = Qwen3Encoder::new(&config, depth, "text_encoder", &tensors).expect("an encoder");
    for tokens in [32, 160, 512] {
        let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7 % 400).collect();
        let before = allocator::mark();
        drop(encoder.forward(&ids, &|| false).expect("an encoding"));
        let by_candle = allocator::peak_since_mark().0 - before.0;
        let predicted = config.scratch(tokens, false, DType::F32).0;
        println!(
            "{}",
            compared(
                &format!("{tokens} tokens by candle-transformers"),
                by_candle,
                predicted,
            )
        );
        let before = allocator::mark();
        drop(encoder.by_our_layers(&ids, &|| false).expect("an encoding"));
        let by_ours = allocator::peak_since_mark().0 - before.0;
        let predicted = config.scratch(tokens, true, DType::F32).0;
        println!(
            "{}",
            compared(&format!("{tokens} tokens by our layers"), by_ours, predicted)
        );
    }
}
