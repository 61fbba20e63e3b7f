//! UMT5's encoder as Wan uses it: the published size, the names of its tensors in files of Wan's authors, and how a prompt is
//! cleaned before it is read. The computation is T5's ([`super::t5`]).
//!
//! The reference pads a prompt to 512 tokens, masks the padding, and replaces its states by zeros. A masked token changes no
//! other, so only the prompt's own tokens are encoded here, and the zeros are added where the states are read.

use super::t5::T5Config;

/// Tokens of a prompt that are read, its end token included.
pub const MOST_TOKENS: usize = 512;

/// The configuration of the published encoder, `google/umt5-xxl`.
pub(crate) fn umt5_xxl() -> T5Config {
    T5Config {
        vocab_size: 256_384,
        d_model: 4096,
        d_kv: 64,
        d_ff: 10_240,
        num_layers: 24,
        num_heads: 64,
        feed_forward_proj: "gated-gelu".to_owned(),
        model_type: "umt5".to_owned(),
        ..T5Config::default()
    }
}

/// The configuration of an encoder of UMT5's kind by the shapes of its tensors, under the names of transformers; `None` for
/// another model. T5's encoder has one table of biases, in its first layer.
pub(crate) fn of_shapes(shape_of: impl Fn(&str) -> Option<Vec<usize>>) -> Option<T5Config> {
    let side = |name: &str, axis: usize| shape_of(name)?.get(axis).copied();
    let layer = |block: usize, rest: &str| format!("encoder.block.{block}.layer.{rest}.weight");
    let table = |block: usize| layer(block, "0.SelfAttention.relative_attention_bias");
    let embedding = ["shared.weight", "encoder.embed_tokens.weight"];
    let embedding = embedding.into_iter().find(|name| shape_of(name).is_some())?;
    let has_layer = |block: &usize| shape_of(&layer(*block, "0.SelfAttention.q")).is_some();
    let num_layers = (0..).take_while(has_layer).count();
    let heads = side(&table(0), 1).filter(|heads| *heads > 0)?;
    shape_of(&table(num_layers.checked_sub(1)?))?;
    Some(T5Config {
        vocab_size: side(embedding, 0)?,
        d_model: side(embedding, 1)?,
        d_kv: side(&layer(0, "0.SelfAttention.q"), 0)? / heads,
        d_ff: side(&layer(0, "1.DenseReluDense.wi_0"), 0)?,
        num_layers,
        num_heads: heads,
        relative_attention_num_buckets: side(&table(0), 0)?,
        ..umt5_xxl()
    })
}

/// The layers of a block: in transformers, and in the authors' `wan/modules/t5.py`.
const LAYERS: [(&str, &str); 10] = [
    ("layer.0.layer_norm", "norm1"),
    ("layer.0.SelfAttention.q", "attn.q"),
    ("layer.0.SelfAttention.k", "attn.k"),
    ("layer.0.SelfAttention.v", "attn.v"),
    ("layer.0.SelfAttention.o", "attn.o"),
    (
        "layer.0.SelfAttention.relative_attention_bias",
        "pos_embedding.embedding",
    ),
    ("layer.1.layer_norm", "norm2"),
    ("layer.1.DenseReluDense.wi_0", "ffn.gate.0"),
    ("layer.1.DenseReluDense.wi_1", "ffn.fc1"),
    ("layer.1.DenseReluDense.wo", "ffn.fc2"),
];

/// The name in transformers of a tensor of a file, in transformers' names or in those of Wan's authors: each name shows whose it
/// is.
pub fn transformers_name(name: &str) -> Option<String> {
    let renamed = |from: &str, to: &str| Some(format!("{to}{}", name.strip_prefix(from)?));
    if let Some(outside) =
        renamed("token_embedding.", "shared.").or_else(|| renamed("norm.", "encoder.final_layer_norm."))
    {
        return Some(outside);
    }
    let of_block = || {
        let (number, rest) = name.strip_prefix("blocks.")?.split_once('.')?;
        LAYERS.iter().find_map(|(layer, authors)| {
            let kind = rest.strip_prefix(authors)?.strip_prefix('.')?;
            Some(format!("encoder.block.{number}.{layer}.{kind}"))
        })
    };
    Some(of_block().unwrap_or_else(|| name.to_owned()))
}

/// A prompt as diffusers' `WanPipeline` cleans it: marks of HTML are replaced twice, and white space becomes single spaces. Of
/// what ftfy repairs, typographic quotation marks become plain ones and ligatures single letters; wide letters are the
/// tokenizer's affair.
pub fn cleaned(prompt: &str) -> String {
    let mut plain = String::with_capacity(prompt.len());
    for letter in prompt.chars() {
        match letter {
            '\u{2bc}' | '\u{2018}'..='\u{201b}' => plain.push('\''),
            '\u{201c}'..='\u{201f}' => plain.push('"'),
            '\u{fb00}' => plain.push_str("ff"),
            '\u{fb01}' => plain.push_str("fi"),
            '\u{fb02}' => plain.push_str("fl"),
            '\u{fb03}' => plain.push_str("ffi"),
            '\u{fb04}' => plain.push_str("ffl"),
            '\u{fb05}' | '\u{fb06}' => plain.push_str("st"),
            other => plain.push(other),
        }
    }
    let once = htmlize::unescape(&plain);
    let twice = htmlize::unescape(&*once);
    twice.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    #[test]
    fn an_encoder_is_known_by_its_shapes() {
        let of = |config: &T5Config| {
            let shapes: BTreeMap<_, _> = config.tensor_shapes(&|_| false).into_iter().collect();
            of_shapes(|name| shapes.get(name).cloned())
        };
        assert_eq!(of(&umt5_xxl()), Some(umt5_xxl()));
        let t5 = T5Config {
            model_type: "t5".to_owned(),
            ..umt5_xxl()
        };
        assert_eq!(of(&t5), None, "it has one table for all layers");
    }

    #[test]
    fn the_published_encoder_has_its_published_size() {
        let shapes = umt5_xxl().tensor_shapes(&|name| name == "shared.weight");
        let count: usize = shapes
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        assert_eq!(count / 1_000_000, 5_680);
    }

    #[test]
    fn authors_names_lead_to_those_of_transformers() {
        let config = T5Config {
            num_layers: 2,
            ..umt5_xxl()
        };
        let shapes = config.tensor_shapes(&|name| name == "shared.weight");
        let known: BTreeSet<String> = shapes.into_iter().map(|(name, _)| name).collect();
        let of_block = |block: usize| {
            LAYERS
                .iter()
                .map(move |(_, authors)| format!("blocks.{block}.{authors}.weight"))
        };
        let outside = ["token_embedding.weight", "norm.weight"].map(str::to_owned);
        let authors = of_block(0).chain(of_block(1)).chain(outside);
        let found: BTreeSet<String> = authors.filter_map(|name| transformers_name(&name)).collect();
        assert_eq!(found, known);
        for name in &known {
            assert_eq!(transformers_name(name).as_ref(), Some(name));
        }
    }

    #[test]
    fn prompts_are_cleaned() {
        for (prompt, clean) in [
            ("  a red \t cat\n ", "a red cat"),
            ("&quot;a&quot; &amp;amp; b", "\"a\" & b"),
            ("\u{201c}it\u{2019}s\u{201d}", "\"it's\""),
            ("", ""),
        ] {
            assert_eq!(cleaned(prompt), clean);
        }
    }
}
