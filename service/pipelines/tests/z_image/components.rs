//! Parity of the transformer, its rotations and its schedule.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use pipelines::flow_match::SchedulerConfig;
use pipelines::z_image::{Lengths, Transformer, TransformerConfig, latent_of, patches_of, rotations};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::numbers::{component, distance, json, largest_difference, numbers, resident, tensors};

pub(crate) const WEIGHTS: &str = "z-image-tiny/transformer/diffusion_pytorch_model.safetensors";
pub(crate) const ANSWERS: &str = "z-image-tiny/expected/transformer.safetensors";

/// The transformer's configuration; the inner width of the timestep embedding is in no file.
pub(crate) fn config() -> TransformerConfig {
    TransformerConfig {
        timestep_inner: 72,
        ..json("z-image-tiny/transformer/config.json")
    }
}

/// The weights of a fixture in f32, in which the reference was computed.
pub(crate) fn weights(path: &str) -> HashMap<String, Tensor> {
    let wide = |tensor: Tensor| tensor.to_dtype(DType::F32).expect("numbers");
    let all = tensors(path).into_iter();
    all.map(|(name, tensor)| (name, wide(tensor))).collect()
}

/// The transformer's output in every step of a case, `[steps, channels, height, width]`.
pub(crate) fn outputs(tensors: &ComponentTensors, inputs: &HashMap<String, Tensor>, case: &str) -> Tensor {
    outputs_in(tensors, inputs, case, DType::F32)
}

fn outputs_in(
    tensors: &ComponentTensors,
    inputs: &HashMap<String, Tensor>,
    case: &str,
    dtype: DType,
) -> Tensor {
    let input = |name: &str| &inputs[&format!("{case}.{name}")];
    let transformer = Transformer::new(&config(), tensors).expect("all tensors");
    let narrow = |x: &Tensor| here(&x.to_dtype(dtype).expect("numbers"));
    let latent = input("latent").unsqueeze(0).expect("a latent");
    let (_, _, height, width) = latent.dims4().expect("a latent");
    let (rows, columns) = (height / 2, width / 2);
    let caption = narrow(input("caption"));
    let lengths = Lengths {
        rows,
        columns,
        text: caption.dims()[0],
    };
    let times = numbers(input("times"));
    let conditioning = transformer
        .condition(&caption, (rows, columns), &times, &mut || Ok(()))
        .expect("conditioning");
    let patches = narrow(&patches_of(&latent).and_then(|x| x.contiguous()).expect("patches"));
    let buffers = transformer
        .step_buffers(&lengths, (dtype, test_device()))
        .expect("buffers");
    // Out of order, so that state of one step that leaks into another is detected.
    let mut outputs: Vec<(usize, Tensor)> = (0..times.len())
        .rev()
        .map(|step| {
            let output = transformer
                .direction(&patches, &conditioning, step, &buffers, &mut || Ok(()))
                .expect("an output");
            let output = output.to_device(&candle_core::Device::Cpu).expect("an output");
            let output = output.to_dtype(DType::F32).expect("numbers");
            (step, latent_of(&output, rows, columns).expect("a latent"))
        })
        .collect();
    outputs.sort_by_key(|(step, _)| *step);
    let outputs: Vec<Tensor> = outputs.into_iter().map(|(_, output)| output).collect();
    Tensor::cat(&outputs, 0).expect("outputs")
}

/// Padding of the picture and the text; a picture larger than one multiple; no padding.
const CASES: [&str; 3] = ["wide", "tall", "no_pads"];

#[test]
fn the_transformer_equals_the_reference_at_every_time() {
    let inputs = tensors(ANSWERS);
    let weights = resident(&weights(WEIGHTS));
    for case in CASES {
        let (found, expected) = (
            outputs(&weights, &inputs, case),
            &inputs[&format!("{case}.output")],
        );
        let steps = expected.dims()[0];
        for step in 0..steps {
            let of = |x: &Tensor| x.narrow(0, step, 1).expect("a step");
            let apart = distance(&of(&found), &of(expected));
            println!("{case}, step {step}: {apart:.2e}");
            assert!(apart < tolerances().component, "{case}, step {step}: {apart:e}");
        }
    }
}

#[test]
fn bf16_equals_f32_within_its_rounding() {
    // The fixture's weights are bf16.
    let (inputs, weights) = (tensors(ANSWERS), component(WEIGHTS));
    for case in CASES {
        let found = outputs_in(&weights, &inputs, case, DType::BF16);
        let apart = distance(&found, &inputs[&format!("{case}.output")]);
        println!("{case} in bf16: {apart:.2e}");
        assert!(apart < BF16_COMPONENT, "{case}: {apart:e}");
    }
}

#[test]
fn rotations_are_exact_far_from_the_first_token() {
    let expected = tensors("z-image-tiny/expected/rope.safetensors");
    let rows: Vec<Vec<i64>> = expected["rows"].to_vec2().expect("rows");
    let places: Vec<[u32; 3]> = rows
        .iter()
        .map(|row| [row[0], row[1], row[2]].map(|at| at as u32))
        .collect();
    let found = rotations(&places, &TransformerConfig::default(), test_device()).expect("rotations");
    for (name, found) in [("cos", &found.cos), ("sin", &found.sin)] {
        let largest = largest_difference(found, &expected[name]);
        println!("rope {name}: {largest:.2e}");
        assert!(largest <= 1.2e-7, "{name}: {largest:e}");
    }
}

#[test]
fn sigmas_and_times_equal_the_schedulers() {
    let config: SchedulerConfig = json("z-image-tiny/scheduler/scheduler_config.json");
    for (name, expected) in tensors("z-image-tiny/expected/scheduler.safetensors") {
        let (steps, what) = name.split_once('.').expect("a name");
        let sigmas = config.sigmas_from_both_ends(steps.parse().expect("steps"), 4096);
        let found = match what {
            "sigmas" => sigmas,
            _ => pipelines::z_image::times(&sigmas),
        };
        assert_eq!(found, numbers(&expected), "{name}");
    }
    // Eight steps, as they are published.
    let found = config.sigmas_from_both_ends(8, 4096);
    for (found, published) in found
        .iter()
        .zip([1.0, 0.9545, 0.9, 0.8333, 0.75, 0.6429, 0.5, 0.3, 0.0])
    {
        assert!((found - published).abs() < 1e-4, "{found} {published}");
    }
}
