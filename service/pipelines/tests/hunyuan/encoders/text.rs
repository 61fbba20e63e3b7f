//! LLaMA without its last layers.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, Fp8Scales, QuantizedWeight, Weight, WeightFormat};
use pipelines::StageError;
use pipelines::text::llama::{LlamaConfig, LlamaEncoder};
use pipelines::text::tokenizers::TemplatedIds;

use super::tokens::{HEAD, cases};
use super::{Mutation, error_of, narrow, neutral, path, renamed, swap, weights};
use crate::device::{BF16_COMPONENT, here, tolerances};
use crate::numbers::{distance, fixtures, json, resident, tensors};
use crate::shapes_asked::{asked, words};

fn llama_config() -> LlamaConfig {
    json(&path("text_encoder/config.json"))
}

fn encode(tensors: &ComponentTensors, prompt: &TemplatedIds) -> Tensor {
    LlamaEncoder::new(&llama_config(), "text_encoder", tensors)
        .and_then(|encoder| encoder.forward(prompt, &|| false))
        .expect("an encoding")
}

/// The first prompt, and the states of its tokens.
fn first() -> (TemplatedIds, Tensor) {
    let expected = tensors(&path("expected/text_encoder.safetensors"));
    let states = expected["0.256.hidden"].unsqueeze(0).expect("a batch");
    (cases()[0].templated(), states)
}

#[test]
fn text_encoding_equals_the_reference() {
    let expected = tensors(&path("expected/text_encoder.safetensors"));
    let weights = resident(&weights("text_encoder"));
    let mut compared = 0;
    for case in cases() {
        let Some(expected) = expected.get(&format!("{}.hidden", case.name)) else {
            continue;
        };
        let found = encode(&weights, &case.templated());
        assert_eq!(found.dims(), [1, case.ids.len() - HEAD, 32]);
        let apart = distance(&found.squeeze(0).unwrap(), expected);
        println!("{}: {apart:.2e}", case.name);
        assert!(apart < tolerances().component, "{}: {apart:e}", case.name);
        compared += 1;
    }
    assert!(compared > 4, "{compared}");
}

#[test]
fn attention_has_the_planned_shape() {
    let (prompt, _) = first();
    let weights = resident(&weights("text_encoder"));
    let (asked, _) = asked(|| encode(&weights, &prompt));
    let planned = llama_config().planned(prompt.ids.len(), DType::F32);
    assert_eq!(asked, words(&[planned]));
}

#[test]
fn text_encoding_in_bf16_equals_f32_within_its_rounding() {
    let (prompt, expected) = first();
    let found = encode(&resident(&narrow(weights("text_encoder"), DType::BF16)), &prompt);
    assert_eq!(found.dtype(), DType::BF16);
    let apart = distance(&found, &expected);
    println!("bf16: {apart:.2e}");
    assert!(apart < BF16_COMPONENT, "{apart:e}");
}

#[test]
fn the_decoder_is_found_under_the_names_of_all_programs() {
    let (prompt, expected) = first();
    for prefix in ["model.", "language_model.model.", "model.language_model."] {
        let weights = renamed(weights("text_encoder"), |name| format!("{prefix}{name}"));
        let names: Vec<String> = llama_config()
            .tensor_shapes(&|name| weights.contains_key(name))
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert!(names.iter().all(|name| weights.contains_key(name)), "{prefix}");
        let apart = distance(&encode(&resident(&weights), &prompt), &expected);
        assert!(apart < tolerances().component, "{prefix}: {apart:e}");
    }
    // As a part of LLaVA, with the defaults of transformers.
    let llava = r#"{"image_token_index": 1, "hidden_size": 7, "text_config": {"vocab_size": 128320, "model_type": "llama",
        "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}}"#;
    let llava: LlamaConfig = serde_json::from_str(llava).expect("a configuration");
    assert_eq!(llava, LlamaConfig::llava_llama3_8b());
    assert_eq!(llava.check(), Ok(()));
}

#[test]
fn the_last_two_layers_are_neither_needed_nor_used() {
    let (prompt, expected) = first();
    let shapes = llama_config().tensor_shapes(&|name| name == "embed_tokens.weight");
    assert_eq!(shapes.len(), 1 + 2 * 9);
    let is_used = |name: &String| shapes.iter().any(|(used, _)| used == name);
    let mut some = weights("text_encoder");
    some.retain(|name, _| is_used(name));
    assert_eq!(some.len(), shapes.len());
    let apart = distance(&encode(&resident(&some), &prompt), &expected);
    assert!(apart < tolerances().component, "{apart:e}");

    some.remove("layers.1.self_attn.k_proj.weight");
    let error = LlamaEncoder::new(&llama_config(), "text_encoder", &resident(&some)).unwrap_err();
    assert!(error.to_string().contains("layers.1.self_attn.k_proj"), "{error}");
}

/// A weight quantized as at load.
fn quantized(weight: &Tensor, format: WeightFormat) -> Weight {
    let (rows, columns) = weight.dims2().unwrap();
    let numbers: Vec<f32> = weight.flatten_all().unwrap().to_vec1().unwrap();
    let bytes = gpu::quantize(format, &numbers, rows, columns).expect("a format");
    let length = bytes.len();
    Weight::Quantized(QuantizedWeight {
        bytes: here(&Tensor::from_vec(bytes, length, &Device::Cpu).unwrap()),
        format,
        shape: vec![rows, columns],
    })
}

#[test]
fn text_encoding_with_quantized_weights_equals_the_reference_with_dequantized_ones() {
    let expected = tensors(&path("expected/text_encoder.safetensors"));
    let prompt = cases()[0].templated();
    for (name, format) in [
        ("int8", WeightFormat::Int8),
        ("fp8", WeightFormat::Fp8(Fp8Scales::Rows)),
        ("nf4", WeightFormat::Nf4),
    ] {
        let weight = |(name, tensor): (String, Tensor)| match name.contains("_proj.") {
            true => (name, quantized(&tensor, format)),
            false => (name, Weight::Full(here(&tensor))),
        };
        let weights = weights("text_encoder").into_iter().map(weight).collect();
        let found = encode(&ComponentTensors::of_weights(weights), &prompt);
        let expected = expected[&format!("0.256.{name}")].unsqueeze(0).unwrap();
        let apart = distance(&found, &expected);
        println!("{name}: {apart:.2e}");
        assert!(apart < tolerances().component, "{name}: {apart:e}");
        // The formats differ by more than the tolerance.
        assert!(error_of(&first().1, &expected) > 100.0, "{name}");
    }
}

#[test]
fn a_wrong_weight_of_the_decoder_exceeds_the_tolerance() {
    let mutations: [Mutation; 5] = [
        ("keys and values", |t| {
            swap(
                t,
                "layers.0.self_attn.k_proj.weight",
                "layers.0.self_attn.v_proj.weight",
            );
        }),
        ("queries and outputs", |t| {
            swap(
                t,
                "layers.1.self_attn.q_proj.weight",
                "layers.1.self_attn.o_proj.weight",
            );
        }),
        ("gate and raised", |t| {
            swap(t, "layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight");
        }),
        ("norms of a layer", |t| {
            let (one, other) = ("input_layernorm.weight", "post_attention_layernorm.weight");
            swap(t, &format!("layers.0.{one}"), &format!("layers.0.{other}"));
        }),
        ("a neutral norm", |t| {
            neutral(t, "layers.1.post_attention_layernorm.weight", 1.0)
        }),
    ];
    let (prompt, expected) = first();
    for (name, mutate) in mutations {
        let mut weights = weights("text_encoder");
        mutate(&mut weights);
        let factor = error_of(&encode(&resident(&weights), &prompt), &expected);
        println!("{name}: {factor:.0} times the tolerance");
        assert!(factor > 100.0, "{name}: {factor:.1}");
    }
    // Other constants, and one layer more.
    let text = std::fs::read_to_string(fixtures().join(path("text_encoder/config.json"))).unwrap();
    for (this, that) in [
        ("500000.0", "10000.0"),
        ("1e-05", "1e-02"),
        (r#""num_hidden_layers": 4"#, r#""num_hidden_layers": 5"#),
    ] {
        let config: LlamaConfig = serde_json::from_str(&text.replace(this, that)).expect(that);
        let weights = resident(&weights("text_encoder"));
        let encoder = LlamaEncoder::new(&config, "text_encoder", &weights).expect("an encoder");
        let factor = error_of(&encoder.forward(&prompt, &|| false).unwrap(), &expected);
        assert!(factor > 100.0, "{that}: {factor:.1}");
    }
}

#[test]
fn the_text_encoder_refuses_invalid_input() {
    let weights = resident(&weights("text_encoder"));
    let encoder = LlamaEncoder::new(&llama_config(), "text_encoder", &weights).expect("an encoder");
    for (ids, head) in [
        (vec![1; HEAD], HEAD),
        (vec![], 0),
        (vec![1; 4097], HEAD),
        (vec![9999; 100], HEAD),
    ] {
        let error = encoder.forward(&TemplatedIds { ids, head }, &|| false);
        assert!(matches!(error, Err(StageError::BadInput(_))), "{error:?}");
    }
    let cancelled = encoder.forward(&cases()[0].templated(), &|| true);
    assert!(matches!(cancelled, Err(StageError::Cancelled)));

    let text = std::fs::read_to_string(fixtures().join(path("text_encoder/config.json"))).unwrap();
    for (this, that) in [
        (r#""num_hidden_layers": 4"#, r#""num_hidden_layers": 2"#),
        (r#""mlp_bias": false"#, r#""mlp_bias": true"#),
        (r#""attention_bias": false"#, r#""attention_bias": true"#),
        ("silu", "gelu"),
        (r#""rope_type": "default""#, r#""rope_type": "llama3""#),
        (r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 3"#),
        (r#""hidden_size": 32"#, r#""hidden_size": 99999999999"#),
        (r#""head_dim": 8"#, r#""head_dim": 7"#),
    ] {
        let config: LlamaConfig = serde_json::from_str(&text.replace(this, that)).expect(that);
        assert!(config.check().is_err(), "{that}");
        let encoder = LlamaEncoder::new(&config, "text_encoder", &weights);
        assert!(matches!(encoder, Err(StageError::BadInput(_))), "{that}");
    }
}
