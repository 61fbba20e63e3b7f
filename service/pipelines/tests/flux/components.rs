//! Parity of each component.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::flow_match::SchedulerConfig;
use pipelines::flux::{Prompted, Transformer, TransformerConfig, positions, rotations};
use pipelines::noise::Generator;

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::numbers::{component, distance, json, largest_difference, numbers, resident, tensors};

/// The transformer of a fixture with these tensors, run on the fixture's inputs on the device of the tests.
pub(crate) fn velocity(folder: &str, tensors: &ComponentTensors, inputs: &HashMap<String, Tensor>) -> Tensor {
    let config: TransformerConfig = json(&format!("{folder}/transformer/config.json"));
    let transformer = Transformer::new(&config, tensors).expect("all tensors");
    let prompted = Prompted {
        reference: None,
        sequence: &here(&inputs["encoder_hidden_states"]),
        pooled: &here(&inputs["pooled_projections"]),
        guidance: inputs
            .get("guidance")
            .map_or(0.0, |guidance| numbers(guidance)[0]),
        rows: 4,
        columns: 6,
    };
    // Two steps: the requested one must not use the modulation of the other.
    let times = [0.25, numbers(&inputs["timestep"])[0]];
    let conditioning = transformer.condition(&prompted, &times).expect("conditioning");
    let latent = here(&inputs["hidden_states"]);
    let text = inputs["encoder_hidden_states"].dims()[1];
    let step_buffers = transformer
        .step_buffers(1, text, latent.dims()[1], (latent.dtype(), test_device()))
        .expect("buffers");
    transformer
        .velocity(&latent, &conditioning, 1, &step_buffers, &mut || Ok(()))
        .expect("a velocity")
        .clone()
}

#[test]
fn the_transformer_equals_the_reference() {
    for (folder, expected) in [
        ("flux-tiny", "transformer.safetensors"),
        ("flux-tiny-schnell", "transformer_schnell.safetensors"),
    ] {
        let weights = component(&format!(
            "{folder}/transformer/diffusion_pytorch_model.safetensors"
        ));
        let inputs = tensors(&format!("flux-tiny/expected/{expected}"));
        let apart = distance(&velocity(folder, &weights, &inputs), &inputs["output"]);
        println!("{folder} transformer: {apart:.2e}");
        assert!(apart < tolerances().component, "{folder}: {apart:e}");
    }
}

#[test]
fn bf16_equals_f32_within_its_rounding() {
    let narrow = |tensors: &HashMap<String, Tensor>| -> HashMap<String, Tensor> {
        let narrow = |tensor: &Tensor| tensor.to_dtype(DType::BF16).expect("a tensor");
        tensors
            .iter()
            .map(|(name, tensor)| (name.clone(), narrow(tensor)))
            .collect()
    };
    let weights = tensors("flux-tiny/transformer/diffusion_pytorch_model.safetensors");
    let inputs = tensors("flux-tiny/expected/transformer.safetensors");
    let mut narrow_inputs = narrow(&inputs);
    for exact in ["timestep", "guidance"] {
        narrow_inputs.insert(exact.to_owned(), inputs[exact].clone());
    }
    let found = velocity("flux-tiny", &resident(&narrow(&weights)), &narrow_inputs);
    assert_eq!(found.dtype(), DType::BF16);
    let apart = distance(&found, &inputs["output"]);
    println!("flux-tiny transformer in bf16: {apart:.2e}");
    assert!(apart < BF16_COMPONENT, "{apart:e}");
}

#[test]
fn rotations_are_exact_at_the_far_end_of_a_large_picture() {
    let expected = tensors("flux-tiny/expected/rope.safetensors");
    let rows = expected["rows"].to_vec1::<i64>().expect("rows");
    let all = positions(512, 64, 64);
    let places: Vec<_> = rows.iter().map(|&row| all[row as usize]).collect();
    let found = rotations(&places, [16, 56, 56], test_device()).expect("rotations");
    // The reference stores every angle twice, in adjacent columns.
    let every_second = Tensor::arange_step(0u32, 128, 2, &Device::Cpu).expect("indices");
    for (name, found) in [("cos", &found.cos), ("sin", &found.sin)] {
        let expected = expected[name].index_select(&every_second, 1).expect("columns");
        let largest = largest_difference(found, &expected);
        println!("rope {name}: {largest:.2e}");
        assert!(largest <= 1e-7, "{name}: {largest:e}");
    }
    // `[b, h, n, d]` there.
    let by_token = |x: &Tensor| here(&x.transpose(1, 2).and_then(|x| x.contiguous()).expect("heads"));
    let rotated = by_token(&expected["x"]);
    let angles = ops::Angles {
        cos: &found.cos,
        sin: &found.sin,
    };
    let another = rotated.copy().expect("a copy");
    ops::qk_norm_rope(
        &rotated,
        &another,
        ops::QkNorm::None,
        Some(angles),
        ops::Pairs::Neighbours,
    )
    .expect("a rotation");
    let rotated = rotated.transpose(1, 2).expect("heads");
    let apart = distance(&rotated, &expected["rotated"]);
    println!("rotated: {apart:.2e}");
    assert!(apart < tolerances().operation, "{apart:e}");
}

#[test]
fn noise_equals_torch() {
    let expected = tensors("flux-tiny/expected/noise.safetensors");
    let mut largest = 0f32;
    for (name, expected) in &expected {
        let parts: Vec<&str> = name.split('.').collect();
        let found = match parts[..] {
            ["sequence", seed, sizes] => {
                let mut generator = Generator::new(seed.parse().expect("a seed"));
                let sizes = sizes.split('_').map(|size| size.parse().expect("a size"));
                sizes
                    .flat_map(|size| generator.normal(size))
                    .collect::<Vec<f32>>()
            }
            [seed, size, ..] => {
                let numbers =
                    Generator::new(seed.parse().expect("a seed")).normal(size.parse().expect("a size"));
                let stride = if parts.len() > 2 { 61 } else { 1 };
                numbers.into_iter().step_by(stride).collect()
            }
            _ => panic!("{name}"),
        };
        let found = Tensor::new(found, &Device::Cpu).expect("a tensor");
        let difference = largest_difference(&found, expected);
        assert!(difference <= 2e-6, "{name}: {difference:e}");
        largest = largest.max(difference);
    }
    println!("noise: {largest:.2e}");
}

#[test]
fn sigmas_equal_the_schedulers() {
    let expected = tensors("flux-tiny/expected/scheduler.safetensors");
    let base = SchedulerConfig::default();
    let configuration = |name: &str| match name {
        "dev" => SchedulerConfig {
            shift: 3.0,
            use_dynamic_shifting: true,
            ..base.clone()
        },
        "static" => SchedulerConfig {
            shift: 3.0,
            ..base.clone()
        },
        "linear" => SchedulerConfig {
            use_dynamic_shifting: true,
            time_shift_type: "linear".to_owned(),
            ..base.clone()
        },
        _ => base.clone(),
    };
    for (name, expected) in expected.iter().filter(|(name, _)| name.ends_with("sigmas")) {
        let parts: Vec<&str> = name.split('.').collect();
        let (steps, tokens) = (
            parts[1].parse().expect("steps"),
            parts[2].parse().expect("tokens"),
        );
        let found = Tensor::new(configuration(parts[0]).sigmas(steps, tokens), &Device::Cpu).expect("sigmas");
        let largest = largest_difference(&found, expected);
        assert!(largest <= 1.2e-7, "{name}: {largest:e}");
    }
}
