//! Parity of the transformer, the condition encoder, and the tokenizer of latents with its inverse.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use pipelines::ace_step::{
    AudioDetokenizer, AudioTokenizer, ConditionConfig, ConditionEncoder, LayerConfig, TokenConfig,
    Transformer, TransformerConfig, sigmas,
};

use crate::device::{BF16_COMPONENT, here, test_device, tolerances};
use crate::numbers::{distance, json, numbers, resident, tensors};

/// The weights of a component of the fixture in this dtype.
fn weights(component: &str, dtype: DType) -> gpu::ComponentTensors {
    let path = format!("ace-tiny/{component}/diffusion_pytorch_model.safetensors");
    let all = tensors(&path).into_iter();
    let all: HashMap<String, Tensor> = all
        .map(|(name, tensor)| (name, tensor.to_dtype(dtype).expect("numbers")))
        .collect();
    resident(&all)
}

fn config<T: serde::de::DeserializeOwned>(component: &str) -> T {
    json(&format!("ace-tiny/{component}/config.json"))
}

fn on_host(tensor: &Tensor) -> Tensor {
    let host = tensor
        .to_device(&Device::Cpu)
        .and_then(|host| host.to_dtype(DType::F32));
    host.and_then(|host| host.contiguous()).expect("numbers")
}

/// The transformer's velocity of a case at every time, `[times, frames, channels]`.
fn velocities(case: &str, dtype: DType) -> Tensor {
    velocities_of(&config("transformer"), weights("transformer", dtype), case, dtype)
}

fn velocities_of(
    config: &TransformerConfig,
    weights: gpu::ComponentTensors,
    case: &str,
    dtype: DType,
) -> Tensor {
    let answers = tensors("ace-tiny/expected/transformer.safetensors");
    let input = |name: &str| {
        here(
            &answers[&format!("{case}.{name}")]
                .to_dtype(dtype)
                .expect("numbers"),
        )
    };
    let transformer = Transformer::new(config, &weights).expect("all tensors");
    let times = numbers(&answers["times"]);
    let modulations = transformer
        .times(&times, (dtype, test_device()))
        .expect("modulations");
    let mut go_on = || Ok(());
    let condition = transformer
        .condition(&input("condition"), &mut go_on)
        .expect("a condition");
    let buffers = transformer.step_buffers(&input("context")).expect("buffers");
    let latent = input("latent");
    // Out of order, so that state of one step that leaks into another is detected.
    let mut steps: Vec<(usize, Tensor)> = (0..times.len())
        .rev()
        .map(|step| {
            let velocity =
                transformer.velocity(&latent, (&modulations, step), &condition, &buffers, &mut go_on);
            let velocity = on_host(&velocity.expect("a velocity"));
            // The next step overwrites the buffers.
            (step, velocity.copy().expect("a copy"))
        })
        .collect();
    steps.sort_by_key(|(step, _)| *step);
    let steps: Vec<Tensor> = steps.into_iter().map(|(_, velocity)| velocity).collect();
    Tensor::stack(&steps, 0).expect("velocities")
}

/// Longer than the window; a last patch that is not whole; shorter than the window.
const CASES: [&str; 3] = ["even", "odd", "short"];

#[test]
fn the_transformer_equals_the_reference_at_every_time() {
    let answers = tensors("ace-tiny/expected/transformer.safetensors");
    for case in CASES {
        let apart = distance(&velocities(case, DType::F32), &answers[&format!("{case}.output")]);
        println!("{case}: {apart:.2e}");
        assert!(apart < tolerances().component, "{case}: {apart:e}");
    }
}

#[test]
fn small_errors_in_configuration_or_weights_exceed_the_tolerance() {
    let answers = tensors("ace-tiny/expected/transformer.safetensors");
    let right: TransformerConfig = config("transformer");
    // A card's tolerance is nearer to the effect of a wrong epsilon.
    let times = if test_device().is_cpu() { 20.0 } else { 5.0 };
    let least = times * tolerances().component;
    let layer = |change: &dyn Fn(&mut LayerConfig)| {
        let mut wrong = right.clone();
        change(&mut wrong.layer);
        wrong
    };
    let swapped = |one: &str, other: &str| {
        let path = "ace-tiny/transformer/diffusion_pytorch_model.safetensors";
        let renamed = tensors(path).into_iter().map(|(name, tensor)| {
            let name = match (name.strip_prefix(one), name.strip_prefix(other)) {
                (Some(rest), _) => format!("{other}{rest}"),
                (_, Some(rest)) => format!("{one}{rest}"),
                (None, None) => name,
            };
            (name, tensor.to_dtype(DType::F32).expect("numbers"))
        });
        resident(&renamed.collect())
    };
    let all_full = Some(vec!["full_attention".to_owned(); 3]);
    let plain = || weights("transformer", DType::F32);
    for (name, config, weights) in [
        ("a window of 3", layer(&|layer| layer.sliding_window = 3), plain()),
        (
            "no window",
            layer(&|layer| layer.layer_types.clone_from(&all_full)),
            plain(),
        ),
        ("another base", layer(&|layer| layer.rope_theta = 5e5), plain()),
        (
            "another epsilon",
            layer(&|layer| layer.rms_norm_eps = 1e-3),
            plain(),
        ),
        (
            "times exchanged",
            right.clone(),
            swapped("time_embed.linear_2.", "time_embed_r.linear_2."),
        ),
        (
            "attentions exchanged",
            right.clone(),
            swapped("layers.1.self_attn.", "layers.1.cross_attn."),
        ),
        (
            "keys and values exchanged",
            right.clone(),
            swapped("layers.2.cross_attn.to_k.", "layers.2.cross_attn.to_v."),
        ),
    ] {
        let apart = distance(
            &velocities_of(&config, weights, "even", DType::F32),
            &answers["even.output"],
        );
        println!("{name}: {apart:.2e}");
        assert!(apart > least, "{name}: {apart:e}");
    }
}

#[test]
fn bf16_equals_the_reference_within_its_rounding() {
    let answers = tensors("ace-tiny/expected/transformer.safetensors");
    for case in CASES {
        let apart = distance(
            &velocities(case, DType::BF16),
            &answers[&format!("{case}.narrow_output")],
        );
        println!("{case} in bf16: {apart:.2e}");
        assert!(apart < BF16_COMPONENT, "{case}: {apart:e}");
    }
}

#[test]
fn the_condition_encoder_equals_the_reference() {
    let answers = tensors("ace-tiny/expected/condition.safetensors");
    let config: ConditionConfig = config("condition_encoder");
    let weights = weights("condition_encoder", DType::F32);
    let encoder = ConditionEncoder::new(&config, &weights).expect("all tensors");
    for case in ["long", "short"] {
        let input = |name: &str| here(&answers[&format!("{case}.{name}")]);
        let condition = encoder
            .condition(&input("text"), &input("lyrics"), &input("timbre"), &mut || Ok(()))
            .expect("a condition");
        let apart = distance(&on_host(&condition), &answers[&format!("{case}.output")]);
        println!("{case}: {apart:.2e}");
        assert!(apart < tolerances().component, "{case}: {apart:e}");
    }
}

#[test]
fn latents_become_the_references_tokens_and_latents_again() {
    let answers = tensors("ace-tiny/expected/tokens.safetensors");
    let condition = ConditionEncoder::new(
        &config::<ConditionConfig>("condition_encoder"),
        &weights("condition_encoder", DType::F32),
    );
    let silence = condition.expect("all tensors").silence(13).expect("silence");
    let of_tokenizer: TokenConfig = config("audio_tokenizer");
    let tokenizer = AudioTokenizer::new(&of_tokenizer, &weights("audio_tokenizer", DType::F32));
    let tokenizer = tokenizer.expect("all tensors");
    let of_detokenizer: TokenConfig = config("audio_token_detokenizer");
    let detokenizer = AudioDetokenizer::new(&of_detokenizer, &weights("audio_token_detokenizer", DType::F32));
    let detokenizer = detokenizer.expect("all tensors");
    for case in ["whole", "rest"] {
        let input = |name: &str| &answers[&format!("{case}.{name}")];
        let latent = here(input("latent"));
        let frames = latent.dims()[0];
        let tokens = tokenizer
            .tokenize(&latent, &here(&silence), &mut || Ok(()))
            .expect("tokens");
        let codes: Vec<i64> = input("codes").to_vec1().expect("codes");
        let found: Vec<i64> = tokens.codes.iter().map(|code| i64::from(*code)).collect();
        assert_eq!(found, codes, "{case}");
        let latents = detokenizer
            .latents(&tokens.quantized, &mut || Ok(()))
            .and_then(|latents| Ok(latents.narrow(0, 0, frames)?))
            .expect("latents");
        for (name, found) in [("quantized", &tokens.quantized), ("output", &latents)] {
            let apart = distance(&on_host(found), input(name));
            println!("{case}, {name}: {apart:.2e}");
            assert!(apart < tolerances().component, "{case}, {name}: {apart:e}");
        }
    }
}

#[test]
fn sigmas_are_the_published_ones() {
    for (steps, shift, published) in [
        (
            8,
            3.0,
            &[1.0, 0.9545, 0.9, 0.8333, 0.75, 0.6429, 0.5, 0.3, 0.0][..],
        ),
        (4, 1.0, &[1.0, 0.75, 0.5, 0.25, 0.0]),
        (1, 3.0, &[1.0, 0.0]),
    ] {
        let found = sigmas(steps, shift);
        assert_eq!(found.len(), published.len());
        for (found, published) in found.iter().zip(published) {
            assert!((found - published).abs() < 1e-4, "{found} {published}");
        }
    }
}
