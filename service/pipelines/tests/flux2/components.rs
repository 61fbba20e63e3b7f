//! Parity of the transformer, its rotations and its schedule.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::flow_match::SchedulerConfig;
use pipelines::flux2::{Place, Prompted, Transformer, TransformerConfig, mu, positions, rotations};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::numbers::{component, distance, json, largest_difference, numbers, resident, tensors};

pub(crate) const WEIGHTS: &str = "flux2-tiny/transformer/diffusion_pytorch_model.safetensors";
pub(crate) const ANSWERS: &str = "flux2-tiny/expected/transformer.safetensors";

pub(crate) fn config() -> TransformerConfig {
    json("flux2-tiny/transformer/config.json")
}

/// The weights of a fixture in f32, in which the reference was computed.
pub(crate) fn weights(path: &str) -> HashMap<String, Tensor> {
    let wide = |tensor: Tensor| tensor.to_dtype(DType::F32).expect("numbers");
    let all = tensors(path).into_iter();
    all.map(|(name, tensor)| (name, wide(tensor))).collect()
}

/// The tokens and the place of a latent `[channels, height, width]`.
fn tokens_of(latent: &Tensor) -> (Tensor, Place) {
    let (_, rows, columns) = latent.dims3().expect("a latent");
    let tokens = latent
        .flatten_from(1)
        .and_then(|x| x.t())
        .and_then(|x| x.contiguous());
    let tokens = tokens.and_then(|x| x.unsqueeze(0)).expect("tokens");
    (tokens, Place { rows, columns })
}

/// The transformer's output at every time of a case, `[times, channels, height, width]`.
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
    let (latent, picture) = tokens_of(input("latent"));
    let references = (0..).map_while(|number| inputs.get(&format!("{case}.reference.{number}")));
    let (references, places): (Vec<Tensor>, Vec<Place>) = references.map(tokens_of).unzip();
    let references =
        (!references.is_empty()).then(|| narrow(&Tensor::cat(&references, 1).expect("references")));
    let sequence = narrow(&input("text").unsqueeze(0).expect("a text"));
    let times = numbers(input("times"));
    let prompted = Prompted {
        sequence: &sequence,
        picture,
        places: &places,
        references: references.as_ref(),
    };
    let conditioning = transformer.condition(&prompted, &times).expect("conditioning");
    let text = sequence.dim(1).expect("tokens");
    let beside = places.iter().map(|place| place.tokens()).sum();
    let buffers = transformer
        .step_buffers(text, (picture.tokens(), beside), (dtype, test_device()))
        .expect("buffers");
    let latent = narrow(&latent);
    // Out of order, so that state of one step that leaks into another is detected.
    let mut outputs: Vec<(usize, Tensor)> = (0..times.len())
        .rev()
        .map(|step| {
            let output = transformer
                .velocity(&latent, &conditioning, step, &buffers, &mut || Ok(()))
                .expect("an output");
            let output = output
                .to_device(&Device::Cpu)
                .and_then(|x| x.to_dtype(DType::F32));
            let output = output
                .and_then(|x| x.transpose(1, 2))
                .and_then(|x| x.contiguous());
            let output = output.expect("numbers");
            let channels = output.dim(1).expect("channels");
            let shape = (1, channels, picture.rows, picture.columns);
            (step, output.reshape(shape).expect("a latent"))
        })
        .collect();
    outputs.sort_by_key(|(step, _)| *step);
    let outputs: Vec<Tensor> = outputs.into_iter().map(|(_, output)| output).collect();
    Tensor::cat(&outputs, 0).expect("outputs")
}

const CASES: [&str; 2] = ["plain", "references"];

#[test]
fn the_transformer_equals_the_reference_at_every_time() {
    let inputs = tensors(ANSWERS);
    let weights = resident(&weights(WEIGHTS));
    for case in CASES {
        let (found, expected) = (
            outputs(&weights, &inputs, case),
            &inputs[&format!("{case}.output")],
        );
        for step in 0..expected.dims()[0] {
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
fn positions_equal_the_references() {
    let inputs = tensors(ANSWERS);
    for case in CASES {
        let input = |name: &str| &inputs[&format!("{case}.{name}")];
        let references = (0..).map_while(|number| inputs.get(&format!("{case}.reference.{number}")));
        let places: Vec<Place> = references.map(|latent| tokens_of(latent).1).collect();
        let text = input("text").dim(0).expect("tokens");
        let found = positions(text, tokens_of(input("latent")).1, &places);
        let rows = |name: &str| input(name).to_vec2::<i64>().expect("rows");
        let expected: Vec<Vec<i64>> = [rows("txt_ids"), rows("img_ids")].concat();
        let found: Vec<Vec<i64>> = found.iter().map(|row| row.map(i64::from).to_vec()).collect();
        assert_eq!(found, expected, "{case}");
    }
}

#[test]
fn rotations_are_exact_far_from_the_first_token() {
    let expected = tensors("flux2-tiny/expected/rope.safetensors");
    let rows: Vec<Vec<i64>> = expected["rows"].to_vec2().expect("rows");
    let places: Vec<[u32; 4]> = rows
        .iter()
        .map(|row| [row[0], row[1], row[2], row[3]].map(|at| at as u32))
        .collect();
    let found = rotations(&places, &TransformerConfig::default(), test_device()).expect("rotations");
    for (name, found) in [("cos", &found.cos), ("sin", &found.sin)] {
        // The reference repeats each angle for both elements of its pair.
        let pairs: Vec<f32> = numbers(&expected[name]).into_iter().step_by(2).collect();
        let pairs = Tensor::from_vec(pairs, found.shape(), &Device::Cpu).expect("pairs");
        let largest = largest_difference(found, &pairs);
        println!("rope {name}: {largest:.2e}");
        assert!(largest <= 1.2e-7, "{name}: {largest:e}");
    }
}

#[test]
fn sigmas_equal_the_schedulers() {
    let config: SchedulerConfig = json("flux2-tiny/scheduler/scheduler_config.json");
    let mut compared = 0;
    for (name, expected) in tensors("flux2-tiny/expected/scheduler.safetensors") {
        let parts: Vec<&str> = name.split('.').collect();
        let (steps, tokens) = (
            parts[0].parse().expect("steps"),
            parts[1].parse().expect("tokens"),
        );
        match parts[2] {
            "mu" => {
                let expected: f64 = expected.to_scalar().expect("a number");
                let apart = (mu(tokens, steps) - expected).abs();
                assert!(apart < 1e-12, "{name}: {apart:e}");
            }
            "sigmas" => {
                let found = config.sigmas_of_mu(steps, mu(tokens, steps));
                for (found, expected) in found.iter().zip(numbers(&expected)) {
                    assert!((found - expected).abs() <= 6e-8, "{name}: {found} {expected}");
                }
                assert_eq!(found.len(), expected.elem_count());
            }
            _ => continue,
        }
        compared += 1;
    }
    assert!(compared > 40, "{compared} compared");
}
