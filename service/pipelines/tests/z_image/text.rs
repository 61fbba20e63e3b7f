//! The tokenizer and the text encoder, by candle-transformers and by our own layers.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use pipelines::text::qwen3::{Qwen3Config, Qwen3Encoder};
use pipelines::text::tokenizers::{QwenTokenizer, Thinking};
use serde::Deserialize;

use crate::components::weights;
use crate::device::{BF16_COMPONENT, ON_CPU, tolerances};
use crate::numbers::{component, distance, fixtures, json, resident, tensors};

pub(crate) const WEIGHTS: &str = "z-image-tiny/text_encoder/model.safetensors";
const ANSWERS: &str = "z-image-tiny/expected/text_encoder.safetensors";

/// An entry of `expected/prompts.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    length: usize,
    ids: Vec<u32>,
}

fn cases() -> Vec<Case> {
    let text = std::fs::read_to_string(fixtures().join("z-image-tiny/expected/prompts.json"));
    serde_json::from_str(&text.expect("cases")).expect("cases")
}

fn config() -> Qwen3Config {
    json("z-image-tiny/text_encoder/config.json")
}

/// The states that Z-Image uses: those before the last layer.
const DEPTH: usize = 4;

fn encoder(tensors: &ComponentTensors) -> Qwen3Encoder<'_> {
    Qwen3Encoder::new(&config(), DEPTH, "text_encoder", tensors).expect("an encoder")
}

#[test]
fn a_prompt_is_tokenized_as_a_chat_turn() {
    let folder = fixtures().join("z-image-tiny/tokenizer");
    let tokenizer = QwenTokenizer::open(&folder).expect("a tokenizer");
    for case in cases() {
        let ids = tokenizer
            .encode_turn(&case.prompt, Thinking::Allowed, case.length)
            .expect("tokens");
        assert_eq!(ids, case.ids, "{}", case.name);
    }
}

#[test]
fn a_tokenizer_in_one_file_equals_that_in_several() {
    let from = fixtures().join("z-image-tiny/tokenizer");
    let read = |name: &str| std::fs::read_to_string(from.join(name)).expect(name);
    let vocabulary: serde_json::Value = serde_json::from_str(&read("vocab.json")).expect("a vocabulary");
    let merges = read("merges.txt");
    let merges: Vec<&str> = merges.lines().skip(1).collect();
    let config: serde_json::Value =
        serde_json::from_str(&read("tokenizer_config.json")).expect("a configuration");
    let added = config["added_tokens_decoder"].as_object().expect("tokens");
    let added: Vec<serde_json::Value> = added
        .iter()
        .map(|(id, token)| {
            let mut token = token.clone();
            token["id"] = id.parse::<u64>().expect("an id").into();
            token
        })
        .collect();
    let whole = serde_json::json!({
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        "added_tokens": added,
    });
    let folder = tempfile::TempDir::new().expect("a folder");
    std::fs::write(folder.path().join("tokenizer.json"), whole.to_string()).expect("a file");
    let tokenizer = QwenTokenizer::open(folder.path()).expect("a tokenizer");
    for case in cases() {
        let ids = tokenizer
            .encode_turn(&case.prompt, Thinking::Allowed, case.length)
            .expect("tokens");
        assert_eq!(ids, case.ids, "{}", case.name);
    }
}

#[test]
fn a_tokenizer_without_chat_tokens_is_refused() {
    let from = fixtures().join("z-image-tiny/tokenizer");
    let folder = tempfile::TempDir::new().expect("a folder");
    for name in ["vocab.json", "merges.txt"] {
        std::fs::copy(from.join(name), folder.path().join(name)).expect("a copy");
    }
    let error = QwenTokenizer::open(folder.path()).expect_err("no marks");
    assert!(error.to_string().contains("<|im_start|>"), "{error}");
}

#[test]
fn a_tokenizer_without_a_token_for_padding_encodes_what_needs_none() {
    let from = fixtures().join("z-image-tiny/tokenizer");
    let folder = tempfile::TempDir::new().expect("a folder");
    for name in ["vocab.json", "merges.txt"] {
        std::fs::copy(from.join(name), folder.path().join(name)).expect("a copy");
    }
    let mut config: serde_json::Value = json("z-image-tiny/tokenizer/tokenizer_config.json");
    config["pad_token"] = "<|nothing|>".into();
    let path = folder.path().join("tokenizer_config.json");
    std::fs::write(path, config.to_string()).expect("a file");
    let tokenizer = QwenTokenizer::open(folder.path()).expect("a tokenizer");
    let case = &cases()[0];
    let ids = tokenizer.encode_turn(&case.prompt, Thinking::Allowed, case.length);
    assert_eq!(ids.expect("tokens"), case.ids);
    let error = tokenizer.pad().expect_err("no such token");
    assert!(error.to_string().contains("pad_token"), "{error}");
}

#[test]
fn both_encoders_equal_transformers() {
    let (weights, expected) = (resident(&weights(WEIGHTS)), tensors(ANSWERS));
    let encoder = encoder(&weights);
    assert!(!encoder.is_quantized());
    let mut compared = 0;
    for case in cases() {
        let Some(expected) = expected.get(&format!("{}.hidden", case.name)) else {
            continue;
        };
        let by_candle = encoder.forward(&case.ids, &|| false).expect("an encoding");
        let by_ours = encoder.by_our_layers(&case.ids, &|| false).expect("an encoding");
        let (by_candle, by_ours) = (distance(&by_candle, expected), distance(&by_ours, expected));
        println!(
            "{}: candle-transformers {by_candle:.2e}, ours {by_ours:.2e}",
            case.name
        );
        let most = tolerances().component;
        assert!(
            by_candle < most && by_ours < most,
            "{}: {by_candle:e} {by_ours:e}",
            case.name
        );
        compared += 1;
    }
    assert!(compared > 8, "{compared} compared");
}

#[test]
fn bf16_encoding_equals_f32_within_its_rounding() {
    let (weights, expected) = (component(WEIGHTS), tensors(ANSWERS));
    let encoder = encoder(&weights);
    let case = &cases()[0];
    let expected = &expected[&format!("{}.hidden", case.name)];
    for (road, found) in [
        ("candle-transformers", encoder.forward(&case.ids, &|| false)),
        ("ours", encoder.by_our_layers(&case.ids, &|| false)),
    ] {
        let found = found.expect("an encoding");
        assert_eq!(found.dtype(), DType::BF16);
        let apart = distance(&found, expected);
        println!("{road} in bf16: {apart:.2e}");
        assert!(apart < BF16_COMPONENT, "{road}: {apart:e}");
    }
}

#[test]
fn tensor_names_without_the_prefix_are_read() {
    let bare = |tensors: HashMap<String, Tensor>| -> HashMap<String, Tensor> {
        let bare = |name: &str| name.trim_start_matches("model.").to_owned();
        tensors.into_iter().map(|(name, t)| (bare(&name), t)).collect()
    };
    let weights = resident(&bare(weights(WEIGHTS)));
    let (case, expected) = (&cases()[0], tensors(ANSWERS));
    let expected = &expected[&format!("{}.hidden", case.name)];
    let encoder = encoder(&weights);
    for found in [
        encoder.forward(&case.ids, &|| false),
        encoder.by_our_layers(&case.ids, &|| false),
    ] {
        let apart = distance(&found.expect("an encoding"), expected);
        assert!(apart < tolerances().component, "{apart:e}");
    }
}

#[test]
fn a_missing_tensor_of_an_encoder_is_named() {
    let mut some = weights(WEIGHTS);
    some.remove("model.layers.3.self_attn.k_norm.weight");
    let error = Qwen3Encoder::new(&config(), DEPTH, "text_encoder", &resident(&some)).expect_err("a gap");
    assert!(error.to_string().contains("layers.3.self_attn.k_norm"), "{error}");
    // The last layer and the norm after it are not computed.
    let mut enough = weights(WEIGHTS);
    enough.retain(|name, _| !name.contains("layers.4.") && name != "model.norm.weight");
    let enough = resident(&enough);
    let ids = &cases()[0].ids;
    let found = encoder(&enough).forward(ids, &|| false).expect("an encoding");
    assert_eq!(found.dims(), [ids.len(), 32]);
    assert!(encoder(&enough).forward(&[9999], &|| false).is_err());
    assert!(encoder(&enough).forward(&[], &|| false).is_err());
    assert!(encoder(&enough).forward(ids, &|| true).is_err());
}

/// An error, and the change of the tensors that simulates it.
type Mutation = (&'static str, fn(&mut HashMap<String, Tensor>));

const MUTATIONS: &[Mutation] = &[
    ("norms of queries and keys swapped", |t| {
        let (q, k) = (
            "model.layers.0.self_attn.q_norm.weight",
            "model.layers.0.self_attn.k_norm.weight",
        );
        let (of_q, of_k) = (t[q].clone(), t[k].clone());
        t.insert(q.to_owned(), of_k);
        t.insert(k.to_owned(), of_q);
    }),
    ("gate and raised swapped", |t| {
        let (gate, up) = (
            "model.layers.1.mlp.gate_proj.weight",
            "model.layers.1.mlp.up_proj.weight",
        );
        let (of_gate, of_up) = (t[gate].clone(), t[up].clone());
        t.insert(gate.to_owned(), of_up);
        t.insert(up.to_owned(), of_gate);
    }),
    ("the norms of a layer swapped", |t| {
        let (one, other) = (
            "model.layers.2.input_layernorm.weight",
            "model.layers.2.post_attention_layernorm.weight",
        );
        let (of_one, of_other) = (t[one].clone(), t[other].clone());
        t.insert(one.to_owned(), of_other);
        t.insert(other.to_owned(), of_one);
    }),
    ("a layer's norm neutral", |t| {
        let name = "model.layers.3.post_attention_layernorm.weight";
        let ones = t[name].ones_like().expect("ones");
        t.insert(name.to_owned(), ones);
    }),
];

#[test]
fn a_wrong_weight_exceeds_the_tolerance_in_both_encoders() {
    let (case, expected) = (&cases()[2], tensors(ANSWERS));
    let expected = &expected[&format!("{}.hidden", case.name)];
    for (name, mutate) in MUTATIONS {
        let mut weights = weights(WEIGHTS);
        mutate(&mut weights);
        let weights = resident(&weights);
        let encoder = encoder(&weights);
        for found in [
            encoder.forward(&case.ids, &|| false),
            encoder.by_our_layers(&case.ids, &|| false),
        ] {
            let factor = distance(&found.expect("an encoding"), expected) / ON_CPU.component;
            println!("{name}: {factor:.0} times the tolerance");
            assert!(factor > 100.0, "{name}: {factor:.1}");
        }
    }
    // One layer more or less is another encoding.
    let weights = resident(&weights(WEIGHTS));
    for depth in [DEPTH - 1, DEPTH + 1] {
        let encoder = Qwen3Encoder::new(&config(), depth, "text_encoder", &weights).expect("an encoder");
        for found in [
            encoder.forward(&case.ids, &|| false),
            encoder.by_our_layers(&case.ids, &|| false),
        ] {
            let factor = distance(&found.expect("an encoding"), expected) / ON_CPU.component;
            assert!(factor > 100.0, "{depth} layers: {factor:.1}");
        }
    }
}
