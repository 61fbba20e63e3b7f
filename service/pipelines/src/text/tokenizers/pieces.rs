//! SentencePiece's own models (`spiece.model`, and the bytes that ComfyUI keeps inside UMT5's file): the pieces of a unigram model
//! and how a text is normalized, in the protocol buffers of `sentencepiece_model.proto`. The fields that are read are below.

use std::path::Path;

use prost::Message;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::{NormalizerWrapper, Precompiled};
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::whitespace::WhitespaceSplit;
use tokenizers::{AddedToken, Tokenizer};

use crate::ModelError;
use crate::files::{damaged, unsupported};

/// The kind of a model that is read.
const UNIGRAM: i32 = 1;
/// Kinds of pieces: the one for what has no piece, marks, and those that users add.
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const ADDED: i32 = 4;

#[derive(Clone, PartialEq, Message)]
struct SentencePieceModel {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct Piece {
    #[prost(string, optional, tag = "1")]
    piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
    #[prost(bool, optional, tag = "35")]
    byte_fallback: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(bytes = "vec", optional, tag = "2")]
    character_map: Option<Vec<u8>>,
}

/// A unigram tokenizer of T5's kind from the bytes of a model. `file` is where they are, for messages.
///
/// # Errors
/// When they are no such model.
pub(super) fn tokenizer_of(file: &Path, bytes: &[u8]) -> Result<Tokenizer, ModelError> {
    let not_read =
        |problem: String| damaged(file, format!("its SentencePiece model cannot be read: {problem}"));
    let model = SentencePieceModel::decode(bytes).map_err(|error| not_read(error.to_string()))?;
    if model.pieces.is_empty() {
        return Err(not_read("it has no pieces".to_owned()));
    }
    let trainer = model.trainer.unwrap_or_default();
    if trainer.kind.unwrap_or(UNIGRAM) != UNIGRAM {
        let problem = "its SentencePiece model is no unigram model, as those of T5 and UMT5 are";
        return Err(unsupported(file, problem));
    }
    let is = |kind: i32| move |piece: &&Piece| piece.kind == Some(kind);
    let unknown = model.pieces.iter().position(|piece| piece.kind == Some(UNKNOWN));
    let added =
        |piece: &Piece, is_mark: bool| AddedToken::from(piece.piece.clone().unwrap_or_default(), is_mark);
    let marks = model.pieces.iter().filter(|piece| {
        let kind = piece.kind.unwrap_or_default();
        [UNKNOWN, CONTROL].contains(&kind)
    });
    let marks: Vec<AddedToken> = marks.map(|piece| added(piece, true)).collect();
    let others: Vec<AddedToken> = model
        .pieces
        .iter()
        .filter(is(ADDED))
        .map(|piece| added(piece, false).normalized(false))
        .collect();
    let pieces = model.pieces.into_iter().map(|piece| {
        let score = f64::from(piece.score.unwrap_or_default());
        (piece.piece.unwrap_or_default(), score)
    });
    let pieces: Vec<(String, f64)> = pieces.collect();
    if pieces.iter().any(|(_, score)| !score.is_finite()) {
        return Err(not_read("a piece has a score that is no number".to_owned()));
    }
    let unigram = Unigram::from(pieces, unknown, trainer.byte_fallback.unwrap_or(false));
    let mut tokenizer = Tokenizer::new(unigram.map_err(|error| not_read(error.to_string()))?);
    let map = model.normalizer.and_then(|normalizer| normalizer.character_map);
    if let Some(map) = map.filter(|map| !map.is_empty()) {
        check_map(&map).map_err(|problem| not_read(problem.to_owned()))?;
        let map = Precompiled::from(&map).map_err(|error| not_read(error.to_string()))?;
        let normalizer = Some(NormalizerWrapper::Precompiled(map));
        tokenizer
            .with_normalizer(normalizer)
            .map_err(|error| not_read(error.to_string()))?;
    }
    let spaces = Metaspace::new('▁', PrependScheme::Always, true);
    let words = vec![WhitespaceSplit.into(), spaces.into()];
    tokenizer.with_pre_tokenizer(Some(Sequence::new(words)));
    for (is_special, tokens) in [(true, marks), (false, others)] {
        let done = match is_special {
            true => tokenizer.add_special_tokens(tokens),
            false => tokenizer.add_tokens(tokens),
        };
        done.map_err(|error| not_read(error.to_string()))?;
    }
    Ok(tokenizer)
}

/// Checks a precompiled character map, which the library follows without checks: the length of a double array, its units of 32
/// bits, and the texts that its values point into. A unit leads to a block of 256 others, and a leaf to the beginning of a text.
fn check_map(map: &[u8]) -> Result<(), &'static str> {
    const TOO_SHORT: &str = "its character map is cut off";
    const ASTRAY: &str = "its character map points outside of itself";
    let (length, rest) = map.split_first_chunk::<4>().ok_or(TOO_SHORT)?;
    let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| TOO_SHORT)?;
    let (units, texts) = rest.split_at_checked(length / 4 * 4).ok_or(TOO_SHORT)?;
    let texts = std::str::from_utf8(texts).map_err(|_| "its character map has a text that is no UTF-8")?;
    let units: Vec<usize> = units
        .as_chunks::<4>()
        .0
        .iter()
        .map(|unit| u32::from_le_bytes(*unit) as usize)
        .collect();
    if units.is_empty() {
        return Err(TOO_SHORT);
    }
    for (place, unit) in units.iter().enumerate() {
        if unit >> 31 == 1 {
            continue; // a value
        }
        let block = place ^ ((unit >> 10) << ((unit & (1 << 9)) >> 6));
        if block | 0xff >= units.len() {
            return Err(ASTRAY);
        }
        let is_leaf = (unit >> 8) & 1 == 1;
        let value = units[block] & ((1 << 31) - 1);
        if is_leaf && !texts.is_char_boundary(value) {
            return Err(ASTRAY);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> Vec<u8> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/spiece-tiny");
        std::fs::read(folder.join(name)).expect("a fixture")
    }

    #[test]
    fn what_is_no_model_is_refused() {
        let file = Path::new("umt5.safetensors");
        let whole = fixture("spiece.model");
        assert!(tokenizer_of(file, &whole).is_ok());
        let error = tokenizer_of(file, &whole[..whole.len() / 2]).expect_err("cut off");
        assert!(error.to_string().contains("SentencePiece"), "{error}");
        assert!(tokenizer_of(file, b"").is_err(), "it has no pieces");
        let mut model = SentencePieceModel::decode(&*whole).expect("a model");
        model.trainer = Some(Trainer {
            kind: Some(2),
            byte_fallback: None,
        });
        let error = tokenizer_of(file, &model.encode_to_vec()).expect_err("a BPE");
        assert!(error.to_string().contains("unigram"), "{error}");
    }

    /// Whatever bytes a file has, a text is tokenized or the model refused.
    #[test]
    fn any_sentencepiece_model_is_read_safely() {
        let whole = fixture("spiece.model");
        let model = SentencePieceModel::decode(&*whole).expect("a model");
        let map = model
            .normalizer
            .clone()
            .and_then(|normalizer| normalizer.character_map);
        let map = map.expect("a map");
        bolero::check!()
            .with_iterations(300)
            .with_type::<(bool, Vec<(u32, u8)>)>()
            .for_each(|(in_map, changes)| {
                let mut changed = if *in_map { map.clone() } else { whole.clone() };
                for (place, byte) in changes {
                    let place = *place as usize % changed.len();
                    changed[place] = *byte;
                }
                if *in_map {
                    let mut model = model.clone();
                    model.normalizer = Some(Normalizer {
                        character_map: Some(changed),
                    });
                    changed = model.encode_to_vec();
                }
                if let Ok(tokenizer) = tokenizer_of(Path::new("x"), &changed) {
                    let text = "ﬁne Ⅷ ｗｉｄｅ 北京 naïve e\u{301} 🐱\u{fe0f}";
                    let _ = tokenizer.encode_fast(text, false).map(|ids| ids.len());
                }
            });
    }
}
