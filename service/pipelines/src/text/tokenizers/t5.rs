//! T5's tokenizer, and UMT5's: of a folder, or inside a text encoder's file.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use gpu::Stored;
use model::ModelError;
use serde_json::{Value, json};

use super::{TokenizeError, TokenizerConfig, Words, build, id_of, pieces, take, words};
use crate::ModelFile;
use crate::checkpoint::open;
use crate::files::{damaged, read_bytes, read_json};
use crate::text::shared::Shared;

/// The tensor with a tokenizer in a text encoder's file.
const PIECES_TENSOR: &str = "spiece_model";
/// Its longest length in bytes: UMT5's is a tenth of it.
const LONGEST_PIECES: usize = 64 << 20;

/// T5's tokenizer, and UMT5's, whose file says which piece is the unknown one and whether bytes are in its place.
#[derive(Clone, Debug)]
pub struct T5Tokenizer {
    words: Words,
    end: u32,
    pad: u32,
}

static OPEN_T5: Shared<T5Tokenizer> = Shared::new();

impl T5Tokenizer {
    /// As [`T5Tokenizer::open`]; models that read the same files share it.
    ///
    /// # Errors
    /// As [`T5Tokenizer::open`].
    pub(crate) fn shared(folder: &Path) -> Result<Arc<T5Tokenizer>, ModelError> {
        OPEN_T5.of(folder, T5Tokenizer::open)
    }

    /// The tokenizer inside a text encoder's file, as ComfyUI keeps it: a tensor of bytes that is a SentencePiece model. `None`
    /// if the file has no such tensor. Models that read the same file share it.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn shared_in_file(path: &Path) -> Result<Option<Arc<T5Tokenizer>>, ModelError> {
        let file = open(path)?;
        let Some(entry) = file.get(PIECES_TENSOR) else {
            return Ok(None);
        };
        let unreadable = |problem: &str| damaged(path, format!("tensor {PIECES_TENSOR} {problem}"));
        let length = usize::try_from(entry.range.length).unwrap_or(usize::MAX);
        if entry.stored != Stored::U8 || length > LONGEST_PIECES {
            return Err(unreadable("is no SentencePiece model"));
        }
        let read = || {
            let mut bytes = vec![0; length];
            let opened = gpu::open_regular(path).map_err(|e| unreadable(&e.to_string()))?;
            opened
                .read_exact_at(&mut bytes, entry.range.offset)
                .map_err(|e| unreadable(&e.to_string()))?;
            T5Tokenizer::of_pieces(path, &bytes)
        };
        OPEN_T5.of_files(vec![ModelFile::of(&file)], read).map(Some)
    }

    /// The tokenizer of a SentencePiece model, whose marks have T5's names.
    fn of_pieces(file: &Path, bytes: &[u8]) -> Result<T5Tokenizer, ModelError> {
        let tokenizer = pieces::tokenizer_of(file, bytes)?;
        Ok(T5Tokenizer {
            end: id_of(file, &tokenizer, "</s>")?,
            pad: id_of(file, &tokenizer, "<pad>")?,
            words: Words {
                tokenizer,
                file: file.to_owned(),
            },
        })
    }

    /// Opens a folder's `tokenizer.json` and its `tokenizer_config.json`, or else its `spiece.model`.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] for a file that is missing or malformed.
    pub fn open(folder: &Path) -> Result<T5Tokenizer, ModelError> {
        let (file, of_pieces) = (folder.join("tokenizer.json"), folder.join("spiece.model"));
        if !file.is_file() && of_pieces.is_file() {
            return T5Tokenizer::of_pieces(&of_pieces, &read_bytes(&of_pieces)?);
        }
        let tokenizer_config = TokenizerConfig::open(folder)?;
        let mut description = read_json(&file)?;
        let unknown = tokenizer_config.token("unk_token", "<unk>");
        let end = tokenizer_config.token("eos_token", "</s>");
        let pad = tokenizer_config.token("pad_token", "<pad>");
        let vocabulary = take(&mut description, "/model/vocab");
        let unknown_id = description["model"]["unk_id"].as_u64().unwrap_or(2);
        let has_bytes = description["model"]["byte_fallback"].as_bool().unwrap_or(false);
        let baked = take(&mut description, "/added_tokens");
        let added = tokenizer_config.added_tokens(baked, &vocabulary, &[&end, &unknown, &pad]);
        let space = json!({
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true,
        });
        let description = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": precompiled_of(&description["normalizer"]),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
            "post_processor": null,
            "decoder": null,
            "model": {
                "type": "Unigram", "unk_id": unknown_id, "vocab": vocabulary, "byte_fallback": has_bytes,
            },
        });
        let tokenizer = build(&file, &description)?;
        Ok(T5Tokenizer {
            end: id_of(&file, &tokenizer, &end)?,
            pad: id_of(&file, &tokenizer, &pad)?,
            words: Words { tokenizer, file },
        })
    }

    /// Checks that the encoder knows all of these tokens.
    ///
    /// # Errors
    /// [`TokenizeError::Unknown`] for the first unknown token.
    pub fn check_known(&self, ids: &[u32], encoder: &str, vocabulary: usize) -> Result<(), TokenizeError> {
        self.words.check_known(ids, encoder, vocabulary)
    }

    /// Tokens of a prompt that [`T5Tokenizer::encode`] leaves out.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn left_out(&self, prompt: &str, max_sequence_length: usize) -> Result<usize, TokenizeError> {
        let room = max_sequence_length.saturating_sub(1); // one is the end token
        Ok(words(&self.words.tokenizer, prompt)?.len().saturating_sub(room))
    }

    /// The ids of a prompt: prompt (truncated), end token, and padding up to `max_sequence_length`.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn encode(&self, prompt: &str, max_sequence_length: usize) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = self.encode_unpadded(prompt, max_sequence_length)?;
        ids.resize(max_sequence_length.max(1), self.pad);
        Ok(ids)
    }

    /// The ids of a prompt: prompt (truncated) and end token.
    ///
    /// # Errors
    /// [`TokenizeError`], for which no input is known.
    pub fn encode_unpadded(&self, prompt: &str, most: usize) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = words(&self.words.tokenizer, prompt)?;
        ids.truncate(most.saturating_sub(1));
        ids.push(self.end);
        Ok(ids)
    }
}

/// SentencePiece's precompiled character map, alone or in a sequence: the only normalizer that `T5Tokenizer` keeps.
fn precompiled_of(normalizer: &Value) -> Value {
    let parts = normalizer["normalizers"]
        .as_array()
        .map_or(std::slice::from_ref(normalizer), Vec::as_slice);
    parts
        .iter()
        .find(|part| part["type"] == "Precompiled")
        .cloned()
        .unwrap_or(Value::Null)
}
