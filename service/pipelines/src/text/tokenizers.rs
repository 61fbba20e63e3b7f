//! Tokenization, as by transformers' `CLIPTokenizer`, `T5Tokenizer` and `Qwen2Tokenizer`, and as LLaMA 3's
//! `PreTrainedTokenizerFast`.
//!
//! The former read a vocabulary from a folder and apply their own fixed rules, ignoring the rules of the folder's
//! `tokenizer.json`; so do these. Truncation and padding are done here: ids end with the prompt's end token for any
//! prompt length.

mod llama;
mod pieces;
mod t5;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::ModelError;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokenizers::{AddedToken, Tokenizer};

use super::shared::Shared;
use crate::files::{damaged, incomplete, read_json, read_text};

pub use llama::{LlamaTokenizer, TemplatedIds};
pub use t5::T5Tokenizer;

/// A failed tokenization.
#[derive(Debug, thiserror::Error)]
pub enum TokenizeError {
    /// The tokenizer library failed.
    #[error("the text cannot be tokenized: {0}")]
    Failed(String),
    /// The text has a token that the encoder lacks.
    #[error(
        "the text has the token {token:?}, number {id} of {}, and {encoder} knows {vocabulary} tokens, numbers from 0: leave the \
         token out, or use the {encoder} that was saved with this tokenizer",
        file.display()
    )]
    Unknown {
        token: String,
        id: u32,
        /// The tokenizer's file.
        file: PathBuf,
        /// The component that reads the tokens.
        encoder: String,
        /// Number of tokens that the encoder knows.
        vocabulary: usize,
    },
}

/// A tokenizer of the library, and the file of its vocabulary.
#[derive(Clone, Debug)]
struct Words {
    tokenizer: Tokenizer,
    file: PathBuf,
}

impl Words {
    /// Checks that an encoder with a vocabulary of this size knows all of these.
    fn check_known(&self, ids: &[u32], encoder: &str, vocabulary: usize) -> Result<(), TokenizeError> {
        match ids.iter().find(|id| **id as usize >= vocabulary) {
            None => Ok(()),
            Some(id) => Err(TokenizeError::Unknown {
                token: self.tokenizer.id_to_token(*id).unwrap_or_default(),
                id: *id,
                file: self.file.clone(),
                encoder: encoder.to_owned(),
                vocabulary,
            }),
        }
    }
}

/// Regular expression of words in CLIP.
const CLIP_WORD: &str =
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+";

/// CLIP's tokenizer.
#[derive(Clone, Debug)]
pub struct ClipTokenizer {
    words: Words,
    start: u32,
    end: u32,
    pad: u32,
    length: usize,
}

static OPEN_CLIP: Shared<ClipTokenizer> = Shared::new();

impl ClipTokenizer {
    /// As [`ClipTokenizer::open`]; models that read the same files share it.
    ///
    /// # Errors
    /// As [`ClipTokenizer::open`].
    pub(crate) fn shared(folder: &Path) -> Result<Arc<ClipTokenizer>, ModelError> {
        OPEN_CLIP.of(folder, ClipTokenizer::open)
    }

    /// Opens a folder's `tokenizer.json`, or its `vocab.json` and `merges.txt`, and its
    /// `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] for a file that is missing or malformed.
    pub fn open(folder: &Path) -> Result<ClipTokenizer, ModelError> {
        let tokenizer_config = TokenizerConfig::open(folder)?;
        let BpeFiles {
            words_file,
            merges_file,
            vocabulary,
            merges,
            added: baked,
            template: _,
        } = BpeFiles::open(folder)?;
        let unknown = tokenizer_config.token("unk_token", "<|endoftext|>");
        let start = tokenizer_config.token("bos_token", "<|startoftext|>");
        let end = tokenizer_config.token("eos_token", "<|endoftext|>");
        let pad = tokenizer_config.token("pad_token", "<|endoftext|>");
        let added = tokenizer_config.added_tokens(baked, &vocabulary, &[&start, &end, &unknown, &pad]);
        let description = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "NFC"},
                {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
                {"type": "Lowercase"},
            ]},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": CLIP_WORD}, "behavior": "Removed", "invert": true},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            ]},
            "post_processor": null,
            "decoder": null,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "</w>",
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": vocabulary,
                "merges": merges,
            },
        });
        let tokenizer = build(&merges_file, &description)?;
        Ok(ClipTokenizer {
            start: id_of(&words_file, &tokenizer, &start)?,
            end: id_of(&words_file, &tokenizer, &end)?,
            pad: id_of(&words_file, &tokenizer, &pad)?,
            length: tokenizer_config.length(77),
            words: Words {
                tokenizer,
                file: words_file,
            },
        })
    }

    /// The ids of a prompt: start token, prompt (truncated), end token, and padding up to `model_max_length` (77).
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn encode(&self, prompt: &str) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = vec![self.start];
        ids.extend(words(&self.words.tokenizer, prompt)?);
        ids.truncate(self.length.saturating_sub(1));
        ids.push(self.end);
        ids.resize(self.length.max(1), self.pad);
        Ok(ids)
    }

    /// The ids of a prompt of any length, of which at most `most` tokens are read: chunks of as many tokens as fit between a start
    /// and an end token, each padded, as A1111's WebUI and ComfyUI encode long prompts. There are at least `least` chunks, of
    /// which the last may be without tokens.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn chunks(&self, prompt: &str, most: usize, least: usize) -> Result<Vec<Vec<u32>>, TokenizeError> {
        let mut ids = words(&self.words.tokenizer, prompt)?;
        ids.truncate(most);
        let room = self.length.saturating_sub(2).max(1);
        let count = ids.len().div_ceil(room).max(least).max(1);
        let chunk = |number: usize| {
            let [first, end] = [number, number + 1].map(|edge| (edge * room).min(ids.len()));
            let mut chunk = vec![self.start];
            chunk.extend(&ids[first..end]);
            chunk.push(self.end);
            chunk.resize(room + 2, self.pad);
            chunk
        };
        Ok((0..count).map(chunk).collect())
    }

    /// Tokens of a prompt that [`ClipTokenizer::chunks`] leaves out.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn left_out(&self, prompt: &str, most: usize) -> Result<usize, TokenizeError> {
        Ok(words(&self.words.tokenizer, prompt)?.len().saturating_sub(most))
    }

    /// Checks that the encoder knows all of these tokens.
    ///
    /// # Errors
    /// [`TokenizeError::Unknown`] for the first unknown token.
    pub fn check_known(&self, ids: &[u32], encoder: &str, vocabulary: usize) -> Result<(), TokenizeError> {
        self.words.check_known(ids, encoder, vocabulary)
    }

    /// Length of the result of [`ClipTokenizer::encode`].
    pub fn length(&self) -> usize {
        self.length
    }
}

/// Regular expression of words in Qwen.
const QWEN_WORD: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen's tokenizer, for a user's turn of a chat, and for a text without a template.
#[derive(Clone, Debug)]
pub struct QwenTokenizer {
    words: Words,
    /// Ids that the folder's `tokenizer.json` appends to a text (Qwen3-Embedding).
    after: Vec<u32>,
    /// Padding after a text, where the vocabulary has it.
    pad: Option<u32>,
}

/// Whether the assistant's turn of a chat may begin with thinking: `enable_thinking` of Qwen3's template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// The turn is open.
    Allowed,
    /// The turn begins with an empty thought.
    Skipped,
}

impl Thinking {
    /// The text after a prompt in Qwen3's chat.
    fn after_turn(self) -> String {
        const ANSWER: &str = "<|im_end|>\n<|im_start|>assistant\n";
        match self {
            Thinking::Allowed => ANSWER.to_owned(),
            Thinking::Skipped => format!("{ANSWER}<think>\n\n</think>\n\n"),
        }
    }

    /// A prompt in Qwen3's chat.
    fn turn_of(self, prompt: &str) -> String {
        format!("<|im_start|>user\n{prompt}{}", self.after_turn())
    }
}

static OPEN_QWEN: Shared<QwenTokenizer> = Shared::new();

impl QwenTokenizer {
    /// As [`QwenTokenizer::open`]; models that read the same files share it.
    ///
    /// # Errors
    /// As [`QwenTokenizer::open`].
    pub(crate) fn shared(folder: &Path) -> Result<Arc<QwenTokenizer>, ModelError> {
        OPEN_QWEN.of(folder, QwenTokenizer::open)
    }

    /// Opens a folder's `tokenizer.json`, or its `vocab.json` and `merges.txt`, and its `tokenizer_config.json`.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] for a file that is missing or malformed, or that lacks the chat tokens.
    pub fn open(folder: &Path) -> Result<QwenTokenizer, ModelError> {
        let tokenizer_config = TokenizerConfig::open(folder)?;
        let pairs = BpeFiles::open(folder)?;
        let marks = marks_after(&pairs.template);
        let end = tokenizer_config.token("eos_token", "<|im_end|>");
        let pad = tokenizer_config.token("pad_token", "<|endoftext|>");
        let added = tokenizer_config.added_tokens(pairs.added, &pairs.vocabulary, &[&end, &pad]);
        let description = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN_WORD}, "behavior": "Isolated", "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]},
            "post_processor": null,
            "decoder": null,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": pairs.vocabulary,
                "merges": pairs.merges,
            },
        });
        let tokenizer = build(&pairs.merges_file, &description)?;
        for mark in ["<|im_start|>", "<|im_end|>"] {
            id_of(&pairs.words_file, &tokenizer, mark)?;
        }
        let after = marks
            .iter()
            .map(|mark| id_of(&pairs.words_file, &tokenizer, mark));
        Ok(QwenTokenizer {
            pad: tokenizer.token_to_id(&pad),
            after: after.collect::<Result<_, _>>()?,
            words: Words {
                tokenizer,
                file: pairs.words_file,
            },
        })
    }

    /// Checks that the encoder knows all of these tokens.
    ///
    /// # Errors
    /// [`TokenizeError::Unknown`] for the first unknown token.
    pub fn check_known(&self, ids: &[u32], encoder: &str, vocabulary: usize) -> Result<(), TokenizeError> {
        self.words.check_known(ids, encoder, vocabulary)
    }

    /// Tokens of a text that [`QwenTokenizer::encode_text`] leaves out.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn left_out_of_text(&self, text: &str, most: usize) -> Result<usize, TokenizeError> {
        let room = most.saturating_sub(self.after.len());
        Ok(words(&self.words.tokenizer, text)?.len().saturating_sub(room))
    }

    /// Tokens of a prompt that [`QwenTokenizer::encode_turn`] leaves out.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn left_out_of_turn(
        &self,
        prompt: &str,
        thinking: Thinking,
        most: usize,
    ) -> Result<usize, TokenizeError> {
        let whole = words(&self.words.tokenizer, &thinking.turn_of(prompt))?.len();
        let end = words(&self.words.tokenizer, &thinking.after_turn())?.len();
        Ok(whole.saturating_sub(most).saturating_sub(end))
    }

    /// The ids of a text, and those that the folder's template appends; at most `most` with them. No padding.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn encode_text(&self, text: &str, most: usize) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = words(&self.words.tokenizer, text)?;
        ids.truncate(most.saturating_sub(self.after.len()));
        ids.extend(&self.after);
        Ok(ids)
    }

    /// The ids of a text alone: nothing is appended.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub(crate) fn encode_bare(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        words(&self.words.tokenizer, text)
    }

    /// The id of a token that models of pictures need.
    ///
    /// # Errors
    /// [`TokenizeError::Failed`] when the vocabulary has no such token.
    pub(crate) fn id(&self, token: &str) -> Result<u32, TokenizeError> {
        let id = self.words.tokenizer.token_to_id(token);
        id.ok_or_else(|| {
            let file = self.words.file.display();
            TokenizeError::Failed(format!("the vocabulary in {file} has no token {token:?}"))
        })
    }

    /// The id of padding.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] when the vocabulary has no such token.
    pub fn pad(&self) -> Result<u32, ModelError> {
        let missing = || {
            damaged(
                &self.words.file,
                "the vocabulary has no token for padding (`pad_token`)",
            )
        };
        self.pad.ok_or_else(missing)
    }

    /// The ids of a chat in which the user's turn is the prompt and the assistant's turn begins: Qwen3's chat
    /// template with `add_generation_prompt`. Truncated to `max_sequence_length`; no padding.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn encode_turn(
        &self,
        prompt: &str,
        thinking: Thinking,
        max_sequence_length: usize,
    ) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = words(&self.words.tokenizer, &thinking.turn_of(prompt))?;
        ids.truncate(max_sequence_length);
        Ok(ids)
    }
}

/// The files of a byte-level BPE: vocabulary and merges.
struct BpeFiles {
    words_file: PathBuf,
    merges_file: PathBuf,
    vocabulary: Value,
    merges: Value,
    /// `added_tokens` of a `tokenizer.json`.
    added: Value,
    /// `post_processor` of a `tokenizer.json`.
    template: Value,
}

impl BpeFiles {
    fn open(folder: &Path) -> Result<BpeFiles, ModelError> {
        let whole = folder.join("tokenizer.json");
        if whole.is_file() {
            let mut file = read_json(&whole)?;
            return Ok(BpeFiles {
                vocabulary: take(&mut file, "/model/vocab"),
                merges: take(&mut file, "/model/merges"),
                added: take(&mut file, "/added_tokens"),
                template: take(&mut file, "/post_processor"),
                words_file: whole.clone(),
                merges_file: whole,
            });
        }
        let (words_file, merges_file) = (folder.join("vocab.json"), folder.join("merges.txt"));
        // Ids are validated here, so that a later failure is not due to the vocabulary.
        let ids: BTreeMap<String, u32> = read_json(&words_file)?;
        if ids.is_empty() {
            return Err(damaged(&words_file, "it has no words"));
        }
        Ok(BpeFiles {
            merges: read_merges(&merges_file, &ids)?,
            vocabulary: json!(ids),
            added: Value::Null,
            template: Value::Null,
            words_file,
            merges_file,
        })
    }
}

/// The tokens that a post-processor appends to a single text.
fn marks_after(template: &Value) -> Vec<String> {
    let parts = template["processors"].as_array();
    let within = parts.into_iter().flatten().flat_map(marks_after);
    let single = template["single"].as_array();
    let after = single
        .into_iter()
        .flatten()
        .skip_while(|part| part["Sequence"].is_null());
    let marks = after.filter_map(|part| part["SpecialToken"]["id"].as_str().map(str::to_owned));
    within.chain(marks).collect()
}

/// The ids of a text without special tokens.
fn words(tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>, TokenizeError> {
    let encoding = tokenizer
        .encode_fast(prompt, false)
        .map_err(|error| TokenizeError::Failed(error.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

/// `tokenizer_config.json`, over `special_tokens_map.json`: either may be missing.
struct TokenizerConfig {
    config: Value,
    specials: Value,
}

impl TokenizerConfig {
    fn open(folder: &Path) -> Result<TokenizerConfig, ModelError> {
        let read = |name: &str| {
            let path = folder.join(name);
            if path.is_file() {
                read_json(&path)
            } else {
                Ok(Value::Null)
            }
        };
        let tokenizer_config = TokenizerConfig {
            config: read("tokenizer_config.json")?,
            specials: read("special_tokens_map.json")?,
        };
        let added = tokenizer_config.config["added_tokens_decoder"].as_object();
        for (id, token) in added.into_iter().flatten() {
            AddedToken::deserialize(token).map_err(|error| {
                let problem = format!("the added token {id} cannot be read: {error}");
                damaged(&folder.join("tokenizer_config.json"), problem)
            })?;
        }
        Ok(tokenizer_config)
    }

    /// A token by its role, stored as text or as an object.
    fn token(&self, role: &str, default: &str) -> String {
        let of = |file: &Value| {
            let token = &file[role];
            token
                .as_str()
                .or_else(|| token["content"].as_str())
                .map(str::to_owned)
        };
        of(&self.config)
            .or_else(|| of(&self.specials))
            .unwrap_or_else(|| default.to_owned())
    }

    /// `model_max_length`, which transformers writes as a huge number if there is none.
    fn length(&self, default: usize) -> usize {
        let length = self.config["model_max_length"]
            .as_u64()
            .and_then(|length| usize::try_from(length).ok());
        length
            .filter(|length| (2..=100_000).contains(length))
            .unwrap_or(default)
    }

    /// Tokens that are recognized within a prompt: those of `tokenizer_config.json`, or else those of
    /// `tokenizer.json`, and the special tokens in any case.
    fn added_tokens(&self, baked: Value, vocabulary: &Value, specials: &[&String]) -> Vec<Value> {
        let mut added: Vec<Value> = match (&self.config["added_tokens_decoder"], baked) {
            (Value::Object(tokens), _) => tokens
                .iter()
                .filter_map(|(id, token)| with_id(id, token))
                .collect(),
            (_, Value::Array(tokens)) => tokens,
            _ => Vec::new(),
        };
        for special in specials {
            let known = added
                .iter()
                .any(|token| token["content"].as_str() == Some(special));
            if let (false, Some(id)) = (known, id_in(vocabulary, special)) {
                added.push(json!({
                    "id": id, "content": special, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true,
                }));
            }
        }
        added.sort_by_key(|token| token["id"].as_u64());
        added
    }
}

/// Converts an entry of `added_tokens_decoder` to the form of `tokenizer.json`.
fn with_id(id: &str, token: &Value) -> Option<Value> {
    let mut entry: Map<String, Value> = token.as_object()?.clone();
    entry.remove("__type");
    entry.insert("id".to_owned(), id.parse::<u64>().ok()?.into());
    Some(Value::Object(entry))
}

/// The id of a token in the vocabulary of a BPE (an object) or of a unigram model (a list of pairs).
fn id_in(vocabulary: &Value, token: &str) -> Option<u64> {
    match vocabulary {
        Value::Object(ids) => ids.get(token)?.as_u64(),
        Value::Array(pairs) => pairs.iter().position(|pair| pair[0] == token).map(|id| id as u64),
        _ => None,
    }
}

/// Removes a value from a JSON file by its pointer; null if there is none.
fn take(file: &mut Value, pointer: &str) -> Value {
    file.pointer_mut(pointer).map(Value::take).unwrap_or_default()
}

fn build(file: &Path, description: &Value) -> Result<Tokenizer, ModelError> {
    Tokenizer::from_bytes(description.to_string()).map_err(|error| damaged(file, error.to_string()))
}

fn id_of(file: &Path, tokenizer: &Tokenizer, token: &str) -> Result<u32, ModelError> {
    tokenizer
        .token_to_id(token)
        .ok_or_else(|| damaged(file, format!("the vocabulary has no {token:?}")))
}

/// Parses `merges.txt`: a pair per line, the most frequent first; the first line may contain a version. Every word of the
/// vocabulary that is longer than a letter must be made by a pair: a file that was cut off would give other tokens.
fn read_merges(path: &Path, vocabulary: &BTreeMap<String, u32>) -> Result<Value, ModelError> {
    let text = read_text(path)?;
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("#version") && !line.is_empty())
        .collect();
    let made: BTreeSet<String> = lines.iter().map(|line| line.replacen(' ', "", 1)).collect();
    let is_letter = |word: &str| word.strip_suffix("</w>").unwrap_or(word).chars().count() <= 1;
    let is_special = |word: &str| word.starts_with('<') && word.ends_with('>');
    let unmade = |word: &&String| !is_letter(word) && !is_special(word) && !made.contains(*word);
    match vocabulary.keys().find(unmade) {
        Some(word) => Err(incomplete(
            path,
            format!("no pair makes {word:?}, a word of the vocabulary: was it cut off? Download it again"),
        )),
        None => Ok(lines.into()),
    }
}
