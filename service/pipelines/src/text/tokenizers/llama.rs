//! LLaMA 3's tokenizer, in HunyuanVideo's template.

use std::path::Path;
use std::sync::Arc;

use model::ModelError;
use serde_json::{Value, json};

use super::{Shared, TokenizeError, TokenizerConfig, Words, build, id_of, take, words};
use crate::files::{damaged, read_json};

/// The text before a prompt, to the letter: diffusers' `HunyuanVideoPipeline`, `DEFAULT_PROMPT_TEMPLATE`.
const HEAD: &str = concat!(
    "<|start_header_id|>system<|end_header_id|>\n\n",
    "Describe the video by detailing the following aspects: ",
    "1. The main content and theme of the video.",
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects.",
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects.",
    "4. background environment, light, style and atmosphere.",
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>",
    "<|start_header_id|>user<|end_header_id|>\n\n",
);

/// The text after a prompt.
const TAIL: &str = "<|eot_id|>";

/// The tokens of a prompt in its template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TemplatedIds {
    /// Ids of the template and the prompt.
    pub ids: Vec<u32>,
    /// How many of them, at the beginning, are the template's head, whose states are not used.
    pub head: usize,
}

impl TemplatedIds {
    /// Number of tokens after the template's head, whose states are used.
    pub fn used(&self) -> usize {
        self.ids.len().saturating_sub(self.head)
    }
}

/// LLaMA 3's tokenizer: `PreTrainedTokenizerFast`, whose rules are the file's. (transformers 5 reads such a folder as
/// `LlamaTokenizerFast`, which `model_index.json` names, by the rules of LLaMA 2, and gets other tokens.)
#[derive(Clone, Debug)]
pub struct LlamaTokenizer {
    words: Words,
    start: u32,
    /// Tokens of the template before a prompt, with the start token.
    head: usize,
}

static OPEN_LLAMA: Shared<LlamaTokenizer> = Shared::new();

impl LlamaTokenizer {
    /// As [`LlamaTokenizer::open`]; models that read the same files share it.
    ///
    /// # Errors
    /// As [`LlamaTokenizer::open`].
    pub(crate) fn shared(folder: &Path) -> Result<Arc<LlamaTokenizer>, ModelError> {
        OPEN_LLAMA.of(folder, LlamaTokenizer::open)
    }

    /// From a folder: its `tokenizer.json` and its `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] for a file that is missing or malformed, or that lacks the template's tokens.
    pub fn open(folder: &Path) -> Result<LlamaTokenizer, ModelError> {
        let tokenizer_config = TokenizerConfig::open(folder)?;
        let file = folder.join("tokenizer.json");
        let mut description: Value = read_json(&file)?;
        let start = tokenizer_config.token("bos_token", "<|begin_of_text|>");
        let baked = take(&mut description, "/added_tokens");
        let vocabulary = &description["model"]["vocab"];
        let added = tokenizer_config.added_tokens(baked, vocabulary, &[&start]);
        // Truncation is done here, and so is the start token; nothing is decoded.
        let description = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": take(&mut description, "/normalizer"),
            "pre_tokenizer": take(&mut description, "/pre_tokenizer"),
            "post_processor": null,
            "decoder": null,
            "model": take(&mut description, "/model"),
        });
        let tokenizer = build(&file, &description)?;
        for mark in ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"] {
            id_of(&file, &tokenizer, mark)?;
        }
        let head = words(&tokenizer, HEAD).map_err(|error| damaged(&file, error.to_string()))?;
        Ok(LlamaTokenizer {
            start: id_of(&file, &tokenizer, &start)?,
            head: 1 + head.len(),
            words: Words { tokenizer, file },
        })
    }

    /// Checks that the encoder knows all of these tokens.
    ///
    /// # Errors
    /// [`TokenizeError::Unknown`] for the first that it lacks.
    pub fn check_known(&self, ids: &[u32], encoder: &str, vocabulary: usize) -> Result<(), TokenizeError> {
        self.words.check_known(ids, encoder, vocabulary)
    }

    /// Tokens of a prompt that [`LlamaTokenizer::encode_video_prompt`] leaves out.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn left_out(&self, prompt: &str, max_sequence_length: usize) -> Result<usize, TokenizeError> {
        let whole = 1 + words(&self.words.tokenizer, &format!("{HEAD}{prompt}{TAIL}"))?.len();
        let tail = words(&self.words.tokenizer, TAIL)?.len();
        let most = self.head.saturating_add(max_sequence_length);
        Ok(whole.saturating_sub(most).saturating_sub(tail))
    }

    /// The ids of the start token, the template, and the prompt in it. The prompt and the end of the template are
    /// truncated to `max_sequence_length` tokens; no padding.
    ///
    /// The head is counted, as in the reference: a prompt whose first characters merge with the end of the head loses
    /// that token.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn encode_video_prompt(
        &self,
        prompt: &str,
        max_sequence_length: usize,
    ) -> Result<TemplatedIds, TokenizeError> {
        let mut ids = vec![self.start];
        ids.extend(words(&self.words.tokenizer, &format!("{HEAD}{prompt}{TAIL}"))?);
        ids.truncate(self.head.saturating_add(max_sequence_length));
        Ok(TemplatedIds { ids, head: self.head })
    }
}
