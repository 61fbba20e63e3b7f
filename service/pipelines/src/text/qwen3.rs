//! Qwen3's decoder as a text encoder: the sum of its layers, without the last norm (transformers' `Qwen3Model`,
//! `hidden_states[depth]`).
//!
//! A full-precision component is computed by candle-transformers (`candle.rs`); a quantized one by our own layers
//! (`decoder.rs`), which support all weight formats.

mod place;

use candle_core::{DType, Tensor};
use gpu::ComponentTensors;
use model::StageError;
use ops::Planned;
use residency::Bytes;
use serde::Deserialize;

use super::candle;
use super::decoder::{Decoder, ResidentDecoder, Rope, Taken, Tokens, last_norm, prefix_of};
use super::encoding::{check_finite, check_ids};

pub(crate) use super::decoder::{block_of, role};
pub(crate) use place::{Place, Published};

/// The encoder's `config.json`. Missing fields have the defaults of transformers' `Qwen3Config`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct Qwen3Config {
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
    /// Width of a head.
    pub head_dim: usize,
    /// Epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Activation: only `silu` is supported.
    pub hidden_act: String,
    /// Must be false.
    pub attention_bias: bool,
    /// Must be false.
    pub use_sliding_window: bool,
    /// The rotary embedding.
    #[serde(flatten)]
    rope: Rope,
}

impl Default for Qwen3Config {
    fn default() -> Qwen3Config {
        Qwen3Config {
            vocab_size: 151_936,
            hidden_size: 4096,
            intermediate_size: 22_016,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            rms_norm_eps: 1e-6,
            hidden_act: "silu".to_owned(),
            attention_bias: false,
            use_sliding_window: false,
            rope: Rope::default(),
        }
    }
}

impl Qwen3Config {
    /// Qwen3-4B, whose single files have no configuration.
    pub fn qwen3_4b() -> Qwen3Config {
        Qwen3Config {
            hidden_size: 2560,
            intermediate_size: 9728,
            num_hidden_layers: 36,
            num_key_value_heads: 8,
            rope: Rope::of(1_000_000.0),
            ..Qwen3Config::default()
        }
    }

    /// Qwen3-8B, whose single files have no configuration.
    pub fn qwen3_8b() -> Qwen3Config {
        Qwen3Config {
            hidden_size: 4096,
            intermediate_size: 12_288,
            num_hidden_layers: 36,
            num_key_value_heads: 8,
            rope: Rope::of(1_000_000.0),
            ..Qwen3Config::default()
        }
    }

    /// Qwen3-Embedding-0.6B, whose single files have no configuration. `vocab_size` is the number of rows of its embedding
    /// table.
    pub fn qwen3_embedding_0_6b(vocab_size: usize) -> Qwen3Config {
        Qwen3Config {
            vocab_size,
            hidden_size: 1024,
            intermediate_size: 3072,
            num_hidden_layers: 28,
            num_attention_heads: 16,
            num_key_value_heads: 8,
            rope: Rope::of(1_000_000.0),
            ..Qwen3Config::default()
        }
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
            head_dim: self.head_dim,
            rms_norm_eps: self.rms_norm_eps,
            theta: self.rope.theta(),
            has_head_norms: true,
            has_biases: false,
            sections: None,
        }
    }

    /// Checks that this decoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        self.decoder().check(&self.hidden_act)?;
        if self.attention_bias || self.use_sliding_window {
            return Err("biases of attention, or a sliding window, which are not known".to_owned());
        }
        self.rope.check()
    }

    /// Names and shapes of the tensors of the first `depth` layers. Names begin with `model.` unless `has` knows the
    /// token embedding by another name.
    pub fn tensor_shapes(&self, depth: usize, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        self.decoder().tensor_shapes(depth, has)
    }

    /// [`Qwen3Config::tensor_shapes`] of all layers, and of the norm after them.
    pub fn tensor_shapes_with_norm(&self, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        let mut shapes = self.tensor_shapes(self.num_hidden_layers, has);
        shapes.push((last_norm(has), vec![self.hidden_size]));
        shapes
    }

    /// Predicted peak of activations of encoding `tokens`, by a quantized or a full-precision component.
    pub fn scratch(&self, tokens: usize, is_quantized: bool, dtype: DType) -> Bytes {
        match is_quantized {
            true => self.decoder().scratch(tokens, dtype),
            false => candle::scratch(&self.decoder(), tokens, dtype),
        }
    }

    /// Predicted peak of activations of [`Qwen3Encoder::states`] after `count` layers.
    pub fn scratch_of_states(&self, tokens: usize, count: usize, dtype: DType) -> Bytes {
        let further = count.saturating_sub(1) * tokens * self.hidden_size * dtype.size_in_bytes();
        self.decoder().scratch(tokens, dtype) + Bytes(ops::allocated(further))
    }

    /// cuDNN shapes of each layer's attention in [`Qwen3Encoder::states`].
    pub fn planned_of_states(&self, attended: usize, tokens: usize, dtype: DType) -> Vec<Planned> {
        self.decoder().planned_with_padding(attended, tokens, dtype)
    }

    /// cuDNN shape of each layer's attention: `None` if candle-transformers computes it.
    pub fn planned(&self, tokens: usize, is_quantized: bool, dtype: DType) -> Option<Planned> {
        is_quantized.then(|| self.decoder().planned(tokens, dtype))
    }
}

/// The first layers of a decoder, over resident tensors.
#[derive(Debug)]
pub struct Qwen3Encoder<'a>(ResidentDecoder<'a>);

impl Qwen3Encoder<'_> {
    /// An encoder of the first `depth` layers, at least 1, with the tensors of this component.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported decoder, [`StageError::Missing`] for a tensor that is missing or
    /// not of the configuration's shape.
    pub fn new<'a>(
        config: &Qwen3Config,
        depth: usize,
        component: &str,
        tensors: &'a ComponentTensors,
    ) -> Result<Qwen3Encoder<'a>, StageError> {
        let bad = |problem| StageError::BadInput(format!("the Qwen3 encoder has {problem}"));
        config.check().map_err(bad)?;
        ResidentDecoder::new(config.decoder(), depth, component, tensors).map(Qwen3Encoder)
    }

    /// Whether any of its weights is quantized.
    pub fn is_quantized(&self) -> bool {
        self.0.is_quantized()
    }

    /// Encodes tokens: `[tokens, hidden_size]`, the sum of the layers, in the dtype of the weights. `cancelled` is
    /// called before every layer of a quantized component, and once for a full-precision one.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, or too
    /// many.
    pub fn forward(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let ResidentDecoder {
            decoder,
            depth,
            tensors,
            ..
        } = &self.0;
        self.0.checked(ids, cancelled, || match self.is_quantized() {
            true => self.by_our_layers(ids, cancelled),
            false => Ok(candle::encode(decoder, *depth, tensors, ids)?),
        })
    }

    /// The sums of the layers up to each of `after` (ascending, the last is the depth), side by side:
    /// `[tokens, count * hidden_size]` in the dtype of the weights. The tokens from `attended` on are padding: they attend to
    /// those before, and nothing attends to them (an attention mask of transformers). Computed by our own layers.
    ///
    /// # Errors
    /// Errors of [`Qwen3Encoder::forward`].
    pub fn states(
        &self,
        ids: &[u32],
        attended: usize,
        after: &[usize],
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        if attended == 0 || attended > ids.len() {
            let problem = format!("{attended} of {} tokens are attended to", ids.len());
            return Err(StageError::BadInput(problem));
        }
        let taken = Taken {
            attended,
            after,
            is_normed: false,
        };
        let states = || self.0.states(&Tokens::of_text(ids), &taken, cancelled);
        self.0.checked(ids, cancelled, states)
    }

    /// [`Qwen3Encoder::forward`] of all layers, with the norm after them: transformers' `last_hidden_state`.
    ///
    /// # Errors
    /// Errors of [`Qwen3Encoder::forward`]; [`StageError::Missing`] where the component has no such norm.
    pub fn last_hidden_state(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let sum = self.forward(ids, cancelled)?;
        let name = last_norm(&|name| self.0.tensors.contains(name));
        let weight = self.0.tensors.shaped(&name, &[self.0.decoder.hidden_size]);
        let weight = weight.map_err(|missing| self.0.missing(missing))?;
        let norm = ops::Norm::Rms {
            weight: Some(&weight),
            eps: self.0.decoder.rms_norm_eps,
        };
        let states = Tensor::zeros(sum.shape(), sum.dtype(), sum.device())?;
        ops::norm_modulate(&sum, norm, None, &states)?;
        Ok(states)
    }

    /// The rows of the token embedding, `[tokens, hidden_size]` in the dtype of the weights.
    ///
    /// # Errors
    /// [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, or too many.
    pub fn embedded(&self, ids: &[u32]) -> Result<Tensor, StageError> {
        check_ids(ids, self.0.decoder.vocab_size, super::decoder::MAX_TOKENS)?;
        let prefix = prefix_of(&|name| self.0.tensors.contains(name));
        let table = self.0.tensors.get(&format!("{prefix}embed_tokens.weight"));
        let table = table.map_err(|missing| self.0.missing(missing))?;
        let shape = (ids.len(), self.0.decoder.hidden_size);
        let rows = Tensor::zeros(shape, table.dtype(), table.device())?;
        ops::embed(&table, &Tensor::new(ids, table.device())?, &rows)?;
        check_finite(&rows, self.0.component())?;
        Ok(rows)
    }

    /// [`Qwen3Encoder::forward`] by our own layers, for any weight format.
    ///
    /// # Errors
    /// Errors of the device, [`StageError::Cancelled`], [`StageError::Missing`].
    pub fn by_our_layers(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        self.0.encode(ids, cancelled)
    }
}
