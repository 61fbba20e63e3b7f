//! Parity of the transformer, its rotations and its schedule.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use gpu::ComponentTensors;
use pipelines::flow_match::SchedulerConfig;
use pipelines::qwen_image::{
    Place, Prompted, TokenCounts, Transformer, TransformerConfig, positions, rotations,
};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::numbers::{component, distance, json, largest_difference, numbers, resident, tensors};

pub(crate) const WEIGHTS: &str = "qwen-image-tiny/transformer/diffusion_pytorch_model.safetensors";
pub(crate) const ANSWERS: &str = "qwen-image-tiny/expected/transformer.safetensors";

pub(crate) fn config() -> TransformerConfig {
    json("qwen-image-tiny/transformer/config.json")
}

/// The weights of a fixture in f32, in which the reference was computed.
pub(crate) fn weights(path: &str) -> HashMap<String, Tensor> {
    let wide = |tensor: Tensor| tensor.to_dtype(DType::F32).expect("numbers");
    let all = tensors(path).into_iter();
    all.map(|(name, tensor)| (name, wide(tensor))).collect()
}

/// The tokens and the place of a latent `[channels, rows, columns]` of tokens.
fn tokens_of(latent: &Tensor) -> (Tensor, Place) {
    let (_, rows, columns) = latent.dims3().expect("a latent");
    let tokens = latent
        .flatten_from(1)
        .and_then(|x| x.t())
        .and_then(|x| x.contiguous());
    let tokens = tokens.and_then(|x| x.unsqueeze(0)).expect("tokens");
    (tokens, Place { rows, columns })
}

/// How the inputs of a case are passed on, of which mutations change something.
pub(crate) struct Given {
    pub(crate) places: Vec<Place>,
    pub(crate) times: Vec<f32>,
    pub(crate) config: TransformerConfig,
}

/// The transformer's output at every time of a case, `[times, channels, rows, columns]`.
pub(crate) fn outputs(tensors: &ComponentTensors, inputs: &HashMap<String, Tensor>, case: &str) -> Tensor {
    outputs_in(tensors, inputs, case, DType::F32, &|_| {})
}

pub(crate) fn outputs_in(
    tensors: &ComponentTensors,
    inputs: &HashMap<String, Tensor>,
    case: &str,
    dtype: DType,
    change: &dyn Fn(&mut Given),
) -> Tensor {
    let input = |name: &str| &inputs[&format!("{case}.{name}")];
    let narrow = |x: &Tensor| here(&x.to_dtype(dtype).expect("numbers"));
    let (latent, picture) = tokens_of(input("latent"));
    let references = (0..).map_while(|number| inputs.get(&format!("{case}.reference.{number}")));
    let (references, places): (Vec<Tensor>, Vec<Place>) = references.map(tokens_of).unzip();
    let references =
        (!references.is_empty()).then(|| narrow(&Tensor::cat(&references, 1).expect("references")));
    let sequence = narrow(&input("text").unsqueeze(0).expect("a text"));
    let mut given = Given {
        places: [vec![picture], places].concat(),
        times: numbers(input("times")),
        config: TransformerConfig {
            zero_cond_t: case == "zero",
            ..config()
        },
    };
    change(&mut given);
    let on = (dtype, test_device());
    let transformer = Transformer::new(&given.config, tensors).expect("all tensors");
    let modulated = transformer.modulated(&given.times, on).expect("modulations");
    let prompted = Prompted {
        sequence: &sequence,
        places: &given.places,
        references: references.as_ref(),
    };
    let conditioning = transformer.condition(&prompted).expect("conditioning");
    // The buffers are of a longer text.
    let counts = TokenCounts {
        text: sequence.dim(1).expect("tokens") + 3,
        generated: picture.tokens(),
        references: references.as_ref().map_or(0, |tokens| tokens.dims()[1]),
    };
    let buffers = transformer.step_buffers(counts, on).expect("buffers");
    let latent = narrow(&latent);
    // Out of order, so that state of one step that leaks into another is detected.
    let mut outputs: Vec<(usize, Tensor)> = (0..given.times.len())
        .rev()
        .map(|step| {
            let output = transformer
                .velocity(&latent, (&modulated, step), &conditioning, &buffers, &mut || {
                    Ok(())
                })
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

const CASES: [&str; 3] = ["plain", "references", "zero"];

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
        let found = outputs_in(&weights, &inputs, case, DType::BF16, &|_| {});
        let apart = distance(&found, &inputs[&format!("{case}.output")]);
        println!("{case} in bf16: {apart:.2e}");
        assert!(apart < BF16_COMPONENT, "{case}: {apart:e}");
    }
}

#[test]
fn rotations_equal_the_references() {
    let expected = tensors("qwen-image-tiny/expected/rope.safetensors");
    let places: Vec<Vec<i64>> = expected["places"].to_vec2().expect("places");
    let places: Vec<Place> = places
        .iter()
        .map(|sides| Place {
            rows: sides[0] as usize,
            columns: sides[1] as usize,
        })
        .collect();
    let kept: Vec<i64> = expected["kept"].to_vec1().expect("rows");
    let positions = positions(512, &places);
    let texts = (0..512).step_by(73).map(|row| positions[row]);
    let pictures = kept.iter().map(|row| positions[512 + *row as usize]);
    for (what, rows) in [
        ("text", texts.collect::<Vec<_>>()),
        ("pictures", pictures.collect()),
    ] {
        let found = rotations(&rows, &TransformerConfig::default(), test_device()).expect("rotations");
        for (name, found) in [("cos", &found.cos), ("sin", &found.sin)] {
            let largest = largest_difference(found, &expected[&format!("{what}.{name}")]);
            println!("{what} {name}: {largest:.2e}");
            // The reference's frequencies and angles are rounded to f32 in torch's own order.
            assert!(largest <= 4e-5, "{what} {name}: {largest:e}");
        }
    }
}

#[test]
fn sigmas_equal_the_schedulers() {
    let config: SchedulerConfig = json("qwen-image-tiny/scheduler/scheduler_config.json");
    let mut compared = 0;
    for (name, expected) in tensors("qwen-image-tiny/expected/scheduler.safetensors") {
        let parts: Vec<&str> = name.split('.').collect();
        let Ok(steps) = parts[0].parse() else {
            continue; // Lightning's, of a model with a shift
        };
        let found = config.sigmas(steps, parts[1].parse().expect("tokens"));
        assert_eq!(found.len(), expected.elem_count());
        for (found, expected) in found.iter().zip(numbers(&expected)) {
            assert!((found - expected).abs() <= 2.4e-7, "{name}: {found} {expected}");
        }
        compared += 1;
    }
    assert_eq!(compared, 20);
    // One step cannot be stretched.
    assert_eq!(config.sigmas(1, 4096), [1.0, 0.0]);
}
