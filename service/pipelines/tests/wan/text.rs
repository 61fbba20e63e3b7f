//! UMT5 and its tokenizer against the reference's.

use std::collections::HashMap;

use candle_core::{DType, Tensor};
use pipelines::text::t5::{T5Config, T5Encoder};
use pipelines::text::tokenizers::T5Tokenizer;
use pipelines::text::umt5::{cleaned, transformers_name};
use serde::Deserialize;

use crate::numbers::{distance, fixtures, json, resident, tensors};

#[derive(Deserialize)]
struct Prompt {
    prompt: String,
    ids: Vec<u32>,
}

fn weights() -> HashMap<String, Tensor> {
    let read = tensors("wan-tiny/text_encoder/model.safetensors").into_iter();
    read.map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).expect("numbers")))
        .collect()
}

/// The largest relative error over all prompts.
fn error_of(weights: &HashMap<String, Tensor>) -> f64 {
    let config: T5Config = json("wan-tiny/text_encoder/config.json");
    let encoder = T5Encoder::new(&config, "text_encoder", &resident(weights)).expect("an encoder");
    let answers = tensors("wan-tiny/expected/text_encoder.safetensors");
    let prompts: Vec<Prompt> = json("wan-tiny/expected/prompts.json");
    let apart = prompts.iter().enumerate().map(|(number, prompt)| {
        let states = encoder.forward(&prompt.ids, &|| false).expect("states");
        distance(&states, &answers[&format!("states.{number}")])
    });
    apart.fold(0.0, f64::max)
}

#[test]
fn prompts_have_the_tokens_of_the_reference() {
    let tokenizer = T5Tokenizer::open(&fixtures().join("wan-tiny/tokenizer")).expect("a tokenizer");
    let prompts: Vec<Prompt> = json("wan-tiny/expected/prompts.json");
    for Prompt { prompt, ids } in prompts {
        let found = tokenizer.encode_unpadded(&cleaned(&prompt), 40).expect("tokens");
        assert_eq!(found, ids, "{prompt:?}");
    }
}

/// SentencePiece's own models, which folders of the authors and ComfyUI's files have.
#[test]
fn sentencepiece_models_give_the_tokens_of_sentencepiece() {
    let tokenizer = T5Tokenizer::open(&fixtures().join("spiece-tiny")).expect("a tokenizer");
    let prompts: Vec<Prompt> = json("spiece-tiny/expected.json");
    for Prompt { prompt, ids } in prompts {
        let found = tokenizer.encode_unpadded(&prompt, 512).expect("tokens");
        assert_eq!(found, ids, "{prompt:?}");
    }
    // Marks in a text are marks, as in transformers.
    assert_eq!(tokenizer.encode_unpadded("</s>", 512).expect("tokens"), [1, 1]);
}

/// The reference masks padding, which is not encoded here at all.
#[test]
fn states_equal_the_reference() {
    let apart = error_of(&weights());
    println!("UMT5: {apart:e}");
    assert!(apart <= 1e-5, "{apart:e}");
}

/// Each layer has biases of positions of its own.
#[test]
fn every_table_of_biases_matters() {
    let table =
        |layer: usize| format!("encoder.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight");
    for layer in [1, 2] {
        let mut changed = weights();
        let first = changed[&table(0)].clone();
        changed.insert(table(layer), first);
        let apart = error_of(&changed);
        assert!(apart > 1e-2, "{layer}: {apart:e}");
    }
}

/// The names of the encoder's tensors lead back from those of Wan's authors.
#[test]
fn files_of_the_authors_have_the_same_tensors() {
    for name in weights().keys() {
        assert_eq!(transformers_name(name).as_ref(), Some(name));
    }
    let layer = "encoder.block.2.layer.1.DenseReluDense.wi_0.weight";
    assert_eq!(
        transformers_name("blocks.2.ffn.gate.0.weight").as_deref(),
        Some(layer)
    );
}
