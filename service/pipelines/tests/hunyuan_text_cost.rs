//! Memory of HunyuanVideo's text encoder and of FramePack's encoder of pictures, against the prediction.
#![allow(clippy::expect_used)] // What tests share is outside of them.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, allocator};
use pipelines::noise::Generator;
use pipelines::text::llama::{LlamaConfig, LlamaEncoder};
use pipelines::text::tokenizers::TemplatedIds;
use pipelines::vision::siglip::{SiglipConfig, SiglipEncoder};

#[global_allocator]
static ALLOCATOR: gpu::CountingAllocator = gpu::CountingAllocator;

fn made_up(shapes: Vec<(String, Vec<usize>)>) -> ComponentTensors {
    let mut generator = Generator::new(1);
    let mut random = |shape: Vec<usize>| {
        let gain = (shape.last().copied().unwrap_or(1) as f32).powf(-0.5);
        let numbers = generator.normal(shape.iter().product()).into_iter();
        let numbers: Vec<f32> = numbers.map(|number| number * gain).collect();
        Tensor::from_vec(numbers, shape, &Device::Cpu).expect("a tensor")
    };
    let tensors = shapes.into_iter().map(|(name, shape)| (name, random(shape)));
    ComponentTensors::new(tensors.collect::<HashMap<_, _>>())
}

/// Peak bytes of `work`.
fn peak_of<T>(work: impl FnOnce() -> T) -> u64 {
    let before = allocator::mark();
    drop(work());
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
fn encoders_allocate_the_predicted_bytes() {
    let json = r#"{"vocab_size": 400, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "rope_theta": 500000.0}"#;
    let config: LlamaConfig = serde_json::from_str(json).expect("a configuration");
    let tensors = made_up(config.tensor_shapes(&|_| false));
    let encoder = LlamaEncoder::new(&config, "text_encoder", &tensors).expect("an encoder");
    for tokens in [96, 351] {
        let ids = (0..tokens as u32).map(|i| i * 7 % 400).collect();
        let prompt = TemplatedIds { ids, head: 95 };
        let taken = peak_of(|| encoder.forward(&prompt, &|| false).expect("an encoding"));
        let predicted = config.scratch(tokens, DType::F32).0;
        let figures = compared(&format!("{tokens} tokens"), taken, predicted);
        println!("{figures}");
    }

    for (side, patch) in [(224, 16), (384, 14)] {
        let json = format!(
            r#"{{"hidden_size": 256, "intermediate_size": 960, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": {side}, "patch_size": {patch}}}"#
        );
        let config: SiglipConfig = serde_json::from_str(&json).expect("a configuration");
        let tensors = made_up(config.tensor_shapes(&|_| false));
        let encoder = SiglipEncoder::new(&config, "image_encoder", &tensors).expect("an encoder");
        let pixels = Tensor::zeros((1, 3, side, side), DType::F32, &Device::Cpu).expect("pixels");
        let taken = peak_of(|| encoder.forward(&pixels, &|| false).expect("an encoding"));
        compared(
            &format!("a picture of {side}"),
            taken,
            config.scratch(DType::F32).0,
        );
    }
}
