//! The tokenizer, and the template.

use pipelines::ModelError;
use pipelines::text::tokenizers::{LlamaTokenizer, TemplatedIds};
use serde::Deserialize;

use super::path;
use crate::numbers::{fixtures, json};

/// Tokens of the template before the prompt, with the start token: `crop_start` of the reference.
pub(crate) const HEAD: usize = 95;

/// An entry of `expected/prompts.json`.
#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    prompt: String,
    length: usize,
    pub(crate) ids: Vec<u32>,
}

impl Case {
    pub(crate) fn templated(&self) -> TemplatedIds {
        TemplatedIds {
            ids: self.ids.clone(),
            head: HEAD,
        }
    }
}

pub(crate) fn cases() -> Vec<Case> {
    json(&path("expected/prompts.json"))
}

fn tokenizer() -> LlamaTokenizer {
    LlamaTokenizer::open(&fixtures().join(path("tokenizer"))).expect("a tokenizer")
}

#[test]
fn prompts_are_tokenized_in_the_template() {
    let tokenizer = tokenizer();
    let cases = cases();
    for case in &cases {
        let found = tokenizer
            .encode_video_prompt(&case.prompt, case.length)
            .expect("tokens");
        assert_eq!(found, case.templated(), "{}", case.name);
    }
    // A newline merges with those that end the head; truncation takes the end of the template.
    let by_name = |name: &str| &cases.iter().find(|case| case.name == name).expect(name).ids;
    assert_ne!(by_name("4.256")[..HEAD], by_name("0.256")[..HEAD]);
    assert_eq!(by_name("4.256")[..HEAD - 1], by_name("0.256")[..HEAD - 1]);
    assert_eq!(by_name("2.256").len(), HEAD + 1);
    assert_eq!(by_name("6.256").len(), HEAD + 256);
    assert_ne!(by_name("6.256").last(), by_name("2.256").last());
}

#[test]
fn a_damaged_tokenizer_is_refused() {
    let from = fixtures().join(path("tokenizer"));
    let folder = tempfile::TempDir::new().expect("a folder");
    let error = LlamaTokenizer::open(folder.path()).expect_err("nothing there");
    assert!(matches!(error, ModelError::Incomplete { .. }), "{error}");
    let text = std::fs::read_to_string(from.join("tokenizer.json")).expect("a file");
    for mark in ["<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>"] {
        let without = text.replace(mark, "<|other|>");
        std::fs::write(folder.path().join("tokenizer.json"), without).expect("a file");
        let error = LlamaTokenizer::open(folder.path()).expect_err(mark).to_string();
        assert!(error.contains(mark), "{error}");
    }
    for broken in ["{", "{}", r#"{"model": {"type": "BPE"}}"#, "[]"] {
        std::fs::write(folder.path().join("tokenizer.json"), broken).expect("a file");
        let error = LlamaTokenizer::open(folder.path()).expect_err(broken);
        let is_cut_off = matches!(error, ModelError::Incomplete { .. });
        assert!(is_cut_off == (broken == "{"), "{error}");
    }
}
