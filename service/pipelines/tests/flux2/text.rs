//! The text encoder's states at three depths, with those of padding.

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use pipelines::text::qwen3::{Qwen3Config, Qwen3Encoder};
use pipelines::text::tokenizers::{QwenTokenizer, Thinking};
use serde::Deserialize;

use crate::components::weights;
use crate::device::{BF16_COMPONENT, ON_CPU, here, tolerances};
use crate::numbers::{component, distance, fixtures, json, resident, tensors};

const WEIGHTS: &str = "flux2-tiny/text_encoder/model.safetensors";
const ANSWERS: &str = "flux2-tiny/expected/text_encoder.safetensors";

/// Layers after which states are taken.
const AFTER: [usize; 3] = [1, 2, 3];

/// An entry of `expected/prompts.json`.
#[derive(Deserialize)]
struct Case {
    name: String,
    prompt: String,
    length: usize,
    ids: Vec<u32>,
    has_hidden: bool,
}

fn cases() -> Vec<Case> {
    json("flux2-tiny/expected/prompts.json")
}

fn tokenizer() -> QwenTokenizer {
    QwenTokenizer::open(&fixtures().join("flux2-tiny/tokenizer")).expect("a tokenizer")
}

#[test]
fn a_prompt_is_tokenized_as_a_turn_without_thinking() {
    for case in cases() {
        let ids = tokenizer().encode_turn(&case.prompt, Thinking::Skipped, case.length);
        assert_eq!(ids.expect("tokens"), case.ids, "{}", case.name);
    }
}

/// The states of a case at the rows that the reference has.
fn states(case: &Case, tensors: &ComponentTensors, attended: usize) -> Tensor {
    let config: Qwen3Config = json("flux2-tiny/text_encoder/config.json");
    let encoder = Qwen3Encoder::new(&config, AFTER[2], "text_encoder", tensors).expect("an encoder");
    let mut ids = case.ids.clone();
    ids.resize(case.length, tokenizer().pad().expect("a token"));
    let states = encoder.states(&ids, attended, &AFTER, &|| false);
    states.expect("states")
}

fn rows(states: &Tensor, rows: &Tensor) -> Tensor {
    let rows = here(&rows.to_dtype(DType::U32).expect("rows"));
    states.index_select(&rows, 0).expect("rows")
}

#[test]
fn states_and_those_of_padding_equal_transformers() {
    let (weights, expected) = (resident(&weights(WEIGHTS)), tensors(ANSWERS));
    let narrow = component(WEIGHTS);
    let mut compared = 0;
    for case in cases().iter().filter(|case| case.has_hidden) {
        let [hidden, at] = ["hidden", "rows"].map(|what| &expected[&format!("{}.{what}", case.name)]);
        let attended = case.ids.len();
        let apart = distance(&rows(&states(case, &weights, attended), at), hidden);
        let in_bf16 = distance(&rows(&states(case, &narrow, attended), at), hidden);
        println!("{}: {apart:.2e}, in bf16 {in_bf16:.2e}", case.name);
        assert!(apart < tolerances().component, "{}: {apart:e}", case.name);
        assert!(in_bf16 < BF16_COMPONENT, "{}: {in_bf16:e}", case.name);
        // Padding that is attended to changes its own rows.
        if attended < case.length {
            let wrong = rows(&states(case, &weights, case.length), at);
            let factor = distance(&wrong, hidden) / ON_CPU.component;
            assert!(factor > 100.0, "{}: {factor}", case.name);
        }
        compared += 1;
    }
    assert!(compared > 4, "{compared} compared");
}

#[test]
fn a_number_of_tokens_that_does_not_fit_is_refused() {
    let weights = resident(&weights(WEIGHTS));
    let config: Qwen3Config = json("flux2-tiny/text_encoder/config.json");
    let encoder = Qwen3Encoder::new(&config, AFTER[2], "text_encoder", &weights).expect("an encoder");
    for attended in [0, 4] {
        assert!(encoder.states(&[1, 2, 3], attended, &AFTER, &|| false).is_err());
    }
    assert!(encoder.states(&[1, 2, 3], 3, &AFTER, &|| true).is_err());
}
