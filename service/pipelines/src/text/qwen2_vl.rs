//! Qwen2.5-VL's language model as Qwen-Image's text encoder: all its layers and the norm after them, without the head of
//! the language model (transformers' `Qwen2_5_VLModel`, `last_hidden_state`). Tokens of pictures come from its vision tower
//! ([`crate::vision::qwen2_vl`]), a component of its own.
//!
//! All precisions are computed by our own layers (`decoder.rs`). A token has three positions: its number in the text, and
//! within a picture row and column too ([`Prompt::positions`]).

mod names;
mod place;
mod template;

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::Planned;
use residency::Bytes;
use serde::Deserialize;

use super::decoder::{self, Decoder, ResidentDecoder, Rope, Taken, Tokens, is_embedding, last_norm};
use crate::checkpoint::QuantizeRole;
use crate::vision::qwen2_vl::QwenVisionConfig;

pub(crate) use super::decoder::{MAX_TOKENS, block_of};
pub(crate) use place::Place;
pub use template::{Prompt, Template};

/// Base of the rotary frequencies where a configuration has none.
const THETA: f64 = 1_000_000.0;

/// Pairs of a head that turn by time, rows and columns in all published models, whose heads have [`HEAD`] numbers.
const SECTIONS: [usize; 3] = [16, 24, 24];
const HEAD: usize = 128;

/// The sizes of the language model and its vision tower, of `config.json`, where those of the language model may be in
/// `text_config`. Missing fields have the values of Qwen2.5-VL-7B.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Written")]
pub struct Qwen2VlConfig {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of a token.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Activation: only `silu` is supported.
    pub hidden_act: String,
    /// Must be false.
    pub use_sliding_window: bool,
    /// The rotary embedding.
    rope: Rope,
    /// The vision tower.
    pub vision: QwenVisionConfig,
}

/// A configuration as it is written.
#[derive(Deserialize)]
#[serde(default)]
struct Written {
    text_config: Option<Box<Written>>,
    vision_config: QwenVisionConfig,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    rms_norm_eps: f64,
    hidden_act: String,
    use_sliding_window: bool,
    #[serde(flatten)]
    rope: Rope,
}

impl Default for Written {
    fn default() -> Written {
        Written {
            text_config: None,
            vision_config: QwenVisionConfig::default(),
            vocab_size: 152_064,
            hidden_size: 3584,
            intermediate_size: 18_944,
            num_hidden_layers: 28,
            num_attention_heads: 28,
            num_key_value_heads: 4,
            rms_norm_eps: 1e-6,
            hidden_act: "silu".to_owned(),
            use_sliding_window: false,
            rope: Rope::default(),
        }
    }
}

impl From<Written> for Qwen2VlConfig {
    fn from(written: Written) -> Qwen2VlConfig {
        let vision = written.vision_config;
        let text = match written.text_config {
            Some(text) => *text,
            None => Written {
                vision_config: vision.clone(),
                ..written
            },
        };
        Qwen2VlConfig {
            vocab_size: text.vocab_size,
            hidden_size: text.hidden_size,
            intermediate_size: text.intermediate_size,
            num_hidden_layers: text.num_hidden_layers,
            num_attention_heads: text.num_attention_heads,
            num_key_value_heads: text.num_key_value_heads,
            rms_norm_eps: text.rms_norm_eps,
            hidden_act: text.hidden_act,
            use_sliding_window: text.use_sliding_window,
            rope: text.rope,
            vision,
        }
    }
}

impl Default for Qwen2VlConfig {
    fn default() -> Qwen2VlConfig {
        Qwen2VlConfig::from(Written::default())
    }
}

impl Qwen2VlConfig {
    /// The configuration of a language model of this kind by the shapes of its tensors, under the names of `model.` that
    /// transformers writes; `None` for another model. Heads have the published width. The vision tower is the published
    /// one.
    pub(crate) fn of_shapes(shape_of: impl Fn(&str) -> Option<Vec<usize>>) -> Option<Qwen2VlConfig> {
        let has = |name: &str| shape_of(name).is_some();
        let prefix = decoder::prefix_of(&has);
        let side = |name: &str, axis: usize| shape_of(&format!("{prefix}{name}"))?.get(axis).copied();
        let has_layer = |i: &usize| has(&format!("{prefix}layers.{i}.self_attn.q_proj.bias"));
        let heads = |part: &str| Some(side(&format!("layers.0.self_attn.{part}_proj.weight"), 0)? / HEAD);
        Some(Qwen2VlConfig {
            vocab_size: side("embed_tokens.weight", 0)?,
            hidden_size: side("embed_tokens.weight", 1)?,
            intermediate_size: side("layers.0.mlp.gate_proj.weight", 0)?,
            num_hidden_layers: Some((0..).take_while(has_layer).count()).filter(|count| *count > 0)?,
            num_attention_heads: heads("q")?,
            num_key_value_heads: heads("k")?,
            ..Qwen2VlConfig::default()
        })
    }

    /// Width of a head.
    fn head_dim(&self) -> usize {
        self.hidden_size
            .checked_div(self.num_attention_heads)
            .unwrap_or(0)
    }

    /// The decoder's sizes.
    fn decoder(&self) -> Decoder {
        Decoder {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            heads_kv: self.num_key_value_heads,
            head_dim: self.head_dim(),
            rms_norm_eps: self.rms_norm_eps,
            theta: self.rope.written_theta().unwrap_or(THETA),
            has_head_norms: false,
            has_biases: true,
            sections: Some(self.rope.sections().unwrap_or(SECTIONS)),
        }
    }

    /// Checks that this language model and its tower are supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        self.decoder().check(&self.hidden_act)?;
        if self.head_dim() * self.num_attention_heads != self.hidden_size {
            return Err(format!(
                "a width of {} in {} heads",
                self.hidden_size, self.num_attention_heads
            ));
        }
        if self.use_sliding_window {
            return Err("a sliding window, which is not known".to_owned());
        }
        self.rope.check_scale()?;
        self.vision.check()?;
        match self.vision.out_hidden_size == self.hidden_size {
            true => Ok(()),
            false => Err(format!(
                "tokens of pictures of {} channels beside those of text of {}",
                self.vision.out_hidden_size, self.hidden_size
            )),
        }
    }

    /// Names and shapes of the tensors of all layers and the norm after them. Names begin with `model.` unless `has` knows
    /// the token embedding by another name.
    pub fn tensor_shapes(&self, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        let mut shapes = self.decoder().tensor_shapes(self.num_hidden_layers, has);
        shapes.push((last_norm(has), vec![self.hidden_size]));
        shapes
    }

    /// Predicted peak of activations of encoding `tokens`, those of the template and of pictures included. `pictured` of them
    /// are of pictures, and are held beside the others.
    pub fn scratch(&self, tokens: usize, pictured: usize, dtype: DType) -> Bytes {
        let of_pictures = pictured * self.hidden_size * dtype.size_in_bytes();
        self.decoder().scratch(tokens, dtype) + Bytes(ops::allocated(of_pictures))
    }

    /// cuDNN shape of each layer's attention over `tokens`.
    pub fn planned(&self, tokens: usize, dtype: DType) -> Planned {
        self.decoder().planned(tokens, dtype)
    }
}

/// Attention and feed-forward may be quantized. The token embedding stays as it is stored: GGUF files have it in blocks.
pub(crate) fn role(name: &str) -> QuantizeRole {
    match is_embedding(name) {
        true => QuantizeRole::AsStored,
        false => decoder::role(name),
    }
}

/// The language model, over resident tensors.
#[derive(Debug)]
pub struct Qwen2VlEncoder<'a>(ResidentDecoder<'a>);

impl Qwen2VlEncoder<'_> {
    /// The encoder with the tensors of this component.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported model, [`StageError::Missing`] for a tensor that is missing or not of the
    /// configuration's shape.
    pub fn new<'a>(
        config: &Qwen2VlConfig,
        component: &str,
        tensors: &'a ComponentTensors,
    ) -> Result<Qwen2VlEncoder<'a>, StageError> {
        let bad = |problem| StageError::BadInput(format!("the Qwen2.5-VL encoder has {problem}"));
        config.check().map_err(bad)?;
        let depth = config.num_hidden_layers;
        ResidentDecoder::new(config.decoder(), depth, component, tensors).map(Qwen2VlEncoder)
    }

    /// Encodes a prompt in its template: `[1, prompt.used(), hidden_size]`, the last hidden state of the tokens after the head
    /// of the template, in the dtype of the weights. `pictures` are the vision tower's tokens of each picture of the prompt,
    /// `[tokens, hidden_size]`. `cancelled` is called before every layer.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, too many, or none
    /// after the head, and for tokens of pictures that are not those of the prompt.
    pub fn forward(
        &self,
        prompt: &Prompt,
        pictures: &[Tensor],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let (used, width) = (prompt.used(), self.0.decoder.hidden_size);
        if used == 0 {
            let problem = format!(
                "{} tokens, of which the template has {}",
                prompt.ids.len(),
                prompt.head
            );
            return Err(StageError::BadInput(problem));
        }
        let found: Vec<&[usize]> = pictures.iter().map(Tensor::dims).collect();
        let expected: Vec<[usize; 2]> = prompt.pictures().map(|(_, count)| [count, width]).collect();
        if found != expected {
            let problem = format!("tokens of pictures of {found:?} where {expected:?} are expected");
            return Err(StageError::BadInput(problem));
        }
        let inserted: Vec<(usize, &Tensor)> = prompt
            .pictures()
            .zip(pictures)
            .map(|((first, _), rows)| (first, rows))
            .collect();
        let positions = prompt.positions();
        let tokens = Tokens {
            ids: &prompt.ids,
            positions: Some(&positions),
            inserted: &inserted,
        };
        let taken = Taken {
            attended: prompt.ids.len(),
            after: &[self.0.depth],
            is_normed: true,
        };
        let states = || self.0.states(&tokens, &taken, cancelled);
        let states = self.0.checked(&prompt.ids, cancelled, states)?;
        Ok(states.narrow(0, prompt.head, used)?.unsqueeze(0)?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn the_published_model_has_its_published_size() {
        let config = Qwen2VlConfig::default();
        let shapes = config.tensor_shapes(&|_| false);
        let count = |shapes: &[(String, Vec<usize>)]| -> usize {
            shapes
                .iter()
                .map(|(_, shape)| shape.iter().product::<usize>())
                .sum()
        };
        // 7.071 B without the head.
        assert_eq!(count(&shapes) / 1_000_000, 7_070);
        config.check().unwrap();
        let by_name: BTreeMap<_, _> = shapes.into_iter().collect();
        let found = Qwen2VlConfig::of_shapes(|name| by_name.get(name).cloned());
        assert_eq!(found, Some(config));
    }

    /// The published file of Qwen2.5-VL has the sizes of the language model beside `vision_config`; later ones in
    /// `text_config`.
    #[test]
    fn both_spellings_of_a_configuration_are_read() {
        let older = r#"{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 50.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "vision_config": {"out_hidden_size": 64, "in_chans": 3}}"#;
        let both = r#"{"text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 50.0,
            "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]}},
            "vision_config": {"out_hidden_size": 64}}"#;
        let newer = r#"{"text_config": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 3, 3]}},
            "vision_config": {"out_hidden_size": 64, "in_channels": 3}}"#;
        for written in [older, both, newer] {
            let config: Qwen2VlConfig = serde_json::from_str(written).unwrap();
            config.check().unwrap();
            let decoder = config.decoder();
            assert_eq!((decoder.theta, decoder.sections), (50.0, Some([2, 3, 3])));
        }
    }

    #[test]
    fn unsupported_models_are_refused() {
        let of = |text: &str| serde_json::from_str::<Qwen2VlConfig>(text).unwrap().check();
        for (written, told) in [
            (r#"{"use_sliding_window": true}"#, "sliding window"),
            (r#"{"rope_scaling": {"type": "yarn", "factor": 4.0}}"#, "scaled"),
            (
                r#"{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}"#,
                "sections",
            ),
            (r#"{"num_attention_heads": 24}"#, "heads"),
            (r#"{"hidden_size": 3072, "num_attention_heads": 24}"#, "3584"),
            (r#"{"vision_config": {"spatial_merge_size": 3}}"#, "merge"),
        ] {
            let refused = of(written).unwrap_err();
            assert!(refused.contains(told), "{refused}");
        }
    }
}
