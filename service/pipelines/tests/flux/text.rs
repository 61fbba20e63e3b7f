//! FLUX's text encoders and tokenizers against transformers' own (fixtures/make_fixtures.py,
//! fixtures/make_token_fixtures.py).

use std::collections::HashMap;
use std::path::PathBuf;

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use pipelines::text::clip::{ClipConfig, ClipEncoder, ClipOutput};
use pipelines::text::t5::{T5Config, T5Encoder};
use pipelines::text::tokenizers::{ClipTokenizer, T5Tokenizer};
use pipelines::{ModelError, StageError};
use serde::Deserialize;

use crate::device::{BF16_COMPONENT, tolerances};
use crate::numbers::{distance, fixtures, resident, tensors};
use crate::processor_time;

type Tensors = HashMap<String, Tensor>;
/// A change of the weights, with a name.
type Change = dyn Fn(&mut Tensors);
/// Another name for it.
type Mutation = (String, Box<Change>);

fn folder() -> PathBuf {
    fixtures().join("flux-tiny")
}

fn load(path: &str) -> Tensors {
    tensors(&format!("flux-tiny/{path}"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(folder().join(path)).expect(path)
}

fn clip_config() -> ClipConfig {
    serde_json::from_str(&read("text_encoder/config.json")).expect("CLIP's configuration")
}

fn t5_config() -> T5Config {
    serde_json::from_str(&read("text_encoder_2/config.json")).expect("T5's configuration")
}

fn clip_weights() -> Tensors {
    load("text_encoder/model.safetensors")
}

fn t5_weights() -> Tensors {
    load("text_encoder_2/model.safetensors")
}

fn clip_of(tensors: Tensors) -> ClipEncoder {
    ClipEncoder::new(&clip_config(), "text_encoder", &resident(&tensors)).expect("an encoder")
}

fn t5_of(tensors: Tensors) -> T5Encoder {
    T5Encoder::new(&t5_config(), "text_encoder_2", &resident(&tensors)).expect("an encoder")
}

fn encode_clip(encoder: &ClipEncoder, ids: &[u32]) -> ClipOutput {
    encoder.forward(ids, &|| false).expect("an encoding")
}

fn encode_t5(encoder: &T5Encoder, ids: &[u32]) -> Tensor {
    encoder.forward(ids, &|| false).expect("an encoding")
}

fn ids_of(tensor: &Tensor) -> Vec<u32> {
    tensor
        .flatten_all()
        .unwrap()
        .to_vec1::<i64>()
        .unwrap()
        .into_iter()
        .map(|id| id as u32)
        .collect()
}

/// The prompts of the fixtures of both encoders.
const PROMPTS: usize = 5;

#[test]
fn clip_equals_transformers() {
    let (encoder, expected) = (clip_of(clip_weights()), load("expected/clip.safetensors"));
    for i in 0..PROMPTS {
        let output = encode_clip(&encoder, &ids_of(&expected[&format!("{i}.ids")]));
        let pooled = distance(&output.pooled, &expected[&format!("{i}.pooled")]);
        let hidden = distance(&output.last_hidden, &expected[&format!("{i}.last_hidden")]);
        println!("clip {i}: {pooled:.2e} {hidden:.2e}");
        let most = tolerances().component;
        assert!(pooled < most && hidden < most, "{i}: {pooled:e} {hidden:e}");
    }
}

#[test]
fn t5_equals_transformers() {
    let (encoder, expected) = (t5_of(t5_weights()), load("expected/t5.safetensors"));
    for i in 0..PROMPTS {
        let encoded = encode_t5(&encoder, &ids_of(&expected[&format!("{i}.ids")]));
        let error = distance(&encoded, &expected[&format!("{i}.last_hidden")]);
        println!("t5 {i}: {error:.2e}");
        assert!(error < tolerances().component, "{i}: {error:e}");
    }
}

/// Applies every change of the weights and expects the error to exceed the tolerance.
fn expect_seen(mutations: &[Mutation], error_of: &dyn Fn(&Change) -> f64) {
    for (name, change) in mutations {
        let error = error_of(change.as_ref());
        assert!(error > 1e-3, "{name}: {error:e}");
    }
}

fn dropped(name: &'static str) -> Mutation {
    let change = move |tensors: &mut Tensors| {
        let zeros = tensors[name].zeros_like().unwrap();
        tensors.insert(name.to_owned(), zeros);
    };
    (format!("no {name}"), Box::new(change))
}

fn swapped(a: &'static str, b: &'static str) -> Mutation {
    let change = move |tensors: &mut Tensors| {
        let (first, second) = (tensors[a].clone(), tensors[b].clone());
        tensors.insert(a.to_owned(), second);
        tensors.insert(b.to_owned(), first);
    };
    (format!("{a} and {b} swapped"), Box::new(change))
}

#[test]
fn wrong_weights_in_clip_exceed_the_tolerance() {
    let expected = load("expected/clip.safetensors");
    let ids = ids_of(&expected["0.ids"]);
    let mutations = [
        dropped("text_model.encoder.layers.0.self_attn.q_proj.bias"),
        dropped("text_model.encoder.layers.1.self_attn.v_proj.bias"),
        dropped("text_model.encoder.layers.0.self_attn.out_proj.bias"),
        dropped("text_model.encoder.layers.1.mlp.fc1.bias"),
        dropped("text_model.encoder.layers.0.mlp.fc2.bias"),
        dropped("text_model.final_layer_norm.bias"),
        dropped("text_model.embeddings.position_embedding.weight"),
        swapped(
            "text_model.encoder.layers.0.layer_norm1.weight",
            "text_model.encoder.layers.0.layer_norm2.weight",
        ),
        swapped(
            "text_model.encoder.layers.1.layer_norm1.bias",
            "text_model.encoder.layers.1.layer_norm2.bias",
        ),
        swapped(
            "text_model.final_layer_norm.weight",
            "text_model.final_layer_norm.bias",
        ),
        swapped(
            "text_model.encoder.layers.0.self_attn.q_proj.weight",
            "text_model.encoder.layers.0.self_attn.v_proj.weight",
        ),
        swapped(
            "text_model.encoder.layers.0.self_attn.q_proj.weight",
            "text_model.encoder.layers.1.self_attn.q_proj.weight",
        ),
    ];
    expect_seen(&mutations, &|change| {
        let mut tensors = clip_weights();
        change(&mut tensors);
        distance(
            &encode_clip(&clip_of(tensors), &ids).last_hidden,
            &expected["0.last_hidden"],
        )
    });
    // Another activation.
    let config = ClipConfig {
        hidden_act: "gelu".to_owned(),
        ..clip_config()
    };
    let other = ClipEncoder::new(&config, "text_encoder", &resident(&clip_weights())).unwrap();
    assert!(distance(&encode_clip(&other, &ids).last_hidden, &expected["0.last_hidden"]) > 1e-3);
}

#[test]
fn wrong_weights_in_t5_exceed_the_tolerance() {
    let expected = load("expected/t5.safetensors");
    let ids = ids_of(&expected["0.ids"]);
    let mutations = [
        dropped("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        swapped(
            "encoder.block.0.layer.0.SelfAttention.q.weight",
            "encoder.block.1.layer.0.SelfAttention.q.weight",
        ),
        swapped(
            "encoder.block.1.layer.0.SelfAttention.q.weight",
            "encoder.block.1.layer.0.SelfAttention.v.weight",
        ),
        swapped(
            "encoder.block.0.layer.0.layer_norm.weight",
            "encoder.block.0.layer.1.layer_norm.weight",
        ),
        swapped(
            "encoder.block.1.layer.1.layer_norm.weight",
            "encoder.final_layer_norm.weight",
        ),
        swapped(
            "encoder.block.0.layer.1.DenseReluDense.wi_0.weight",
            "encoder.block.0.layer.1.DenseReluDense.wi_1.weight",
        ),
    ];
    expect_seen(&mutations, &|change| {
        let mut tensors = t5_weights();
        change(&mut tensors);
        distance(&encode_t5(&t5_of(tensors), &ids), &expected["0.last_hidden"])
    });
}

#[test]
fn relative_position_buckets_equal_the_reference() {
    // Distances at which `T5Attention._relative_position_bucket` changes, from the reference itself.
    let steps = [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 5),
        (6, 6),
        (7, 7),
        (8, 8),
        (12, 9),
        (16, 10),
        (23, 11),
        (32, 12),
        (46, 13),
        (64, 14),
        (91, 15),
    ];
    let config = T5Config::default();
    for distance in 0..5000 {
        let expected = steps.iter().rev().find(|(from, _)| *from <= distance).unwrap().1;
        assert_eq!(config.bucket(0, distance), expected, "{distance} behind");
        let ahead = if distance == 0 { 0 } else { expected + 16 };
        assert_eq!(config.bucket(distance, 0), ahead, "{distance} ahead");
    }
}

#[test]
fn clip_pools_at_the_end_of_the_prompt() {
    let mut ids = vec![5u32, 9, 500, 3, 500, 8];
    let output = encode_clip(&clip_of(clip_weights()), &ids);
    let at = |output: &ClipOutput, i: usize| output.last_hidden.narrow(1, i, 1).unwrap().squeeze(1).unwrap();
    // The legacy configuration: the first of the highest ids.
    assert_eq!(clip_config().eos_token_id, 2);
    assert_eq!(distance(&output.pooled, &at(&output, 2)), 0.0);
    // Otherwise the first end token; index 0 if there is none.
    let config = ClipConfig {
        eos_token_id: 3,
        ..clip_config()
    };
    let encoder = ClipEncoder::new(&config, "text_encoder", &resident(&clip_weights())).unwrap();
    let output = encode_clip(&encoder, &ids);
    assert_eq!(distance(&output.pooled, &at(&output, 3)), 0.0);
    ids[3] = 4;
    let output = encode_clip(&encoder, &ids);
    assert_eq!(distance(&output.pooled, &at(&output, 0)), 0.0);
}

#[test]
fn clip_is_read_with_and_without_its_prefix() {
    let bare = clip_weights()
        .into_iter()
        .map(|(name, t)| (name.replace("text_model.", ""), t))
        .collect();
    let ids = [1u32, 2, 3];
    let expected = encode_clip(&clip_of(clip_weights()), &ids).pooled;
    assert_eq!(
        distance(&encode_clip(&clip_of(bare), &ids).pooled, &expected),
        0.0
    );
}

#[test]
fn bf16_weights_change_encodings_little() {
    let expected = load("expected/t5.safetensors");
    let ids = ids_of(&expected["0.ids"]);
    let rounded: Tensors = t5_weights()
        .into_iter()
        .map(|(name, t)| {
            (
                name,
                t.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap(),
            )
        })
        .collect();
    let error = distance(&encode_t5(&t5_of(rounded), &ids), &expected["0.last_hidden"]);
    assert!(error < 2e-2, "{error:e}");
    let halves: Tensors = t5_weights()
        .into_iter()
        .map(|(name, t)| (name, t.to_dtype(DType::F16).unwrap()))
        .collect();
    let encoded = encode_t5(&t5_of(halves), &ids);
    assert_eq!(encoded.dtype(), DType::F16);
    let error = distance(&encoded, &expected["0.last_hidden"]);
    assert!(error < 5e-3, "{error:e}");
}

#[test]
fn bf16_encodes_the_same_within_its_rounding() {
    let narrow = |tensors: Tensors| -> Tensors {
        let narrow = |t: Tensor| t.to_dtype(DType::BF16).unwrap();
        tensors.into_iter().map(|(name, t)| (name, narrow(t))).collect()
    };
    let (clip, t5) = (clip_of(narrow(clip_weights())), t5_of(narrow(t5_weights())));
    let (of_clip, of_t5) = (load("expected/clip.safetensors"), load("expected/t5.safetensors"));
    for i in 0..PROMPTS {
        let output = encode_clip(&clip, &ids_of(&of_clip[&format!("{i}.ids")]));
        assert_eq!(output.pooled.dtype(), DType::BF16);
        let pooled = distance(&output.pooled, &of_clip[&format!("{i}.pooled")]);
        let encoded = encode_t5(&t5, &ids_of(&of_t5[&format!("{i}.ids")]));
        assert_eq!(encoded.dtype(), DType::BF16);
        let sequence = distance(&encoded, &of_t5[&format!("{i}.last_hidden")]);
        println!("bf16 {i}: clip {pooled:.2e}, t5 {sequence:.2e}");
        assert!(
            pooled < BF16_COMPONENT && sequence < BF16_COMPONENT,
            "{i}: {pooled:e} {sequence:e}"
        );
    }
}

#[test]
fn encoders_refuse_bad_input_can_be_cancelled_and_report_errors() {
    let (clip, t5) = (clip_of(clip_weights()), t5_of(t5_weights()));
    assert!(matches!(
        clip.forward(&[1; 78], &|| false),
        Err(StageError::BadInput(_))
    ));
    assert!(matches!(
        clip.forward(&[], &|| false),
        Err(StageError::BadInput(_))
    ));
    assert!(matches!(
        t5.forward(&[100_000], &|| false),
        Err(StageError::BadInput(_))
    ));
    assert!(matches!(clip.forward(&[1], &|| true), Err(StageError::Cancelled)));
    assert!(matches!(t5.forward(&[1], &|| true), Err(StageError::Cancelled)));
    let mut tensors = t5_weights();
    tensors.remove("encoder.block.1.layer.0.SelfAttention.k.weight");
    let error = T5Encoder::new(&t5_config(), "text_encoder_2", &ComponentTensors::new(tensors))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("text_encoder_2") && error.contains("block.1.layer.0.SelfAttention.k"),
        "{error}"
    );
    let mut tensors = t5_weights();
    let name = "encoder.final_layer_norm.weight";
    let infinite = (tensors[name].ones_like().unwrap() * f64::INFINITY).unwrap();
    tensors.insert(name.to_owned(), infinite);
    assert!(matches!(
        t5_of(tensors).forward(&[1], &|| false),
        Err(StageError::NotFinite { .. })
    ));
    let strange = T5Config {
        feed_forward_proj: "relu".to_owned(),
        ..t5_config()
    };
    assert!(matches!(
        T5Encoder::new(&strange, "text_encoder_2", &ComponentTensors::new(t5_weights())),
        Err(StageError::BadInput(_))
    ));
}

#[derive(Deserialize)]
struct TokenCase {
    prompt: String,
    clip: Vec<u32>,
    t5: HashMap<String, Vec<u32>>,
}

fn clip_tokenizer() -> ClipTokenizer {
    ClipTokenizer::open(&folder().join("tokenizer")).expect("a tokenizer")
}

fn t5_tokenizer() -> T5Tokenizer {
    T5Tokenizer::open(&folder().join("tokenizer_2")).expect("a tokenizer")
}

#[test]
fn tokens_equal_transformers() {
    let (clip, t5) = (clip_tokenizer(), t5_tokenizer());
    let cases: Vec<TokenCase> = serde_json::from_str(&read("expected/tokens.json")).expect("cases");
    for case in &cases {
        assert_eq!(
            clip.encode(&case.prompt).unwrap(),
            case.clip,
            "CLIP of {:?}",
            case.prompt
        );
        for (length, expected) in &case.t5 {
            let ids = t5.encode(&case.prompt, length.parse().unwrap()).unwrap();
            assert_eq!(&ids, expected, "T5 of {:?} to {length}", case.prompt);
        }
    }
    assert_eq!(clip.length(), 77);
}

#[test]
fn tokens_equal_the_inputs_of_the_encoder_fixtures() {
    let (clip, t5) = (clip_tokenizer(), t5_tokenizer());
    let prompts: Vec<String> = serde_json::from_str(&read("expected/prompts.json")).expect("prompts");
    let (for_clip, for_t5) = (load("expected/clip.safetensors"), load("expected/t5.safetensors"));
    for (i, prompt) in prompts.iter().enumerate() {
        assert_eq!(
            clip.encode(prompt).unwrap(),
            ids_of(&for_clip[&format!("{i}.ids")]),
            "{prompt:?}"
        );
        let expected = ids_of(&for_t5[&format!("{i}.ids")]);
        assert_eq!(t5.encode(prompt, expected.len()).unwrap(), expected, "{prompt:?}");
    }
}

#[test]
fn huge_prompts_are_tokenized_fast() {
    let (clip, t5) = (clip_tokenizer(), t5_tokenizer());
    let cases = [
        "x".to_owned(),
        "a red cat ".to_owned(),
        "🐱".to_owned(),
        " ".to_owned(),
        "'".to_owned(),
        "\u{301}".to_owned(),
    ];
    for part in cases {
        let prompt: String = part.chars().cycle().take(100_000).collect();
        let start = processor_time::of_thread();
        assert_eq!(clip.encode(&prompt).unwrap().len(), 77);
        let for_clip = processor_time::of_thread() - start;
        assert_eq!(t5.encode(&prompt, 512).unwrap().len(), 512);
        let for_both = processor_time::of_thread() - start;
        println!("{part:?}: {for_clip:.2} s for CLIP, {for_both:.2} s for both");
        assert!(for_both < 5.0, "{part:?}: {for_both} s");
    }
}

#[test]
fn clip_reads_a_tokenizer_json_too() {
    let folder = tempfile::tempdir().unwrap();
    let vocabulary: serde_json::Value = serde_json::from_str(&read("tokenizer/vocab.json")).unwrap();
    let merges = read("tokenizer/merges.txt");
    let merges: Vec<Vec<&str>> = merges
        .lines()
        .skip(1)
        .map(|line| line.split(' ').collect())
        .collect();
    let file = serde_json::json!({"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}});
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    let whole = ClipTokenizer::open(folder.path()).expect("a tokenizer");
    for prompt in ["a RED circle, on the left!", "<|endoftext|> 🐱"] {
        assert_eq!(
            whole.encode(prompt).unwrap(),
            clip_tokenizer().encode(prompt).unwrap()
        );
    }
}

#[test]
fn damaged_tokenizers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = ClipTokenizer::open(folder.path()).unwrap_err();
    assert!(
        matches!(&error, ModelError::Incomplete { path, .. } if path.ends_with("vocab.json")),
        "{error}"
    );
    std::fs::write(folder.path().join("tokenizer.json"), "{\"model\": {}").unwrap();
    let error = T5Tokenizer::open(folder.path()).unwrap_err();
    assert!(
        matches!(&error, ModelError::Incomplete { path, .. } if path.ends_with("tokenizer.json")),
        "{error}"
    );
    std::fs::write(
        folder.path().join("tokenizer.json"),
        "{\"model\": {\"vocab\": [[\"a\", 0.0]]}}",
    )
    .unwrap();
    assert!(matches!(
        T5Tokenizer::open(folder.path()),
        Err(ModelError::Damaged { .. })
    ));
}
