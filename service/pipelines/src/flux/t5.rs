//! T5's encoder, version 1.1: transformers' `T5EncoderModel`. FLUX pads prompts and passes no mask, so pads
//! attend and are attended to like any token.

use candle_core::{DType, Tensor};
use gpu::{ComponentTensors, MissingTensor};
use residency::Bytes;
use serde::Deserialize;

use super::clip::{check_finite, check_ids};
use super::linear::Linear;
use crate::family::StageError;

/// The component's name.
const COMPONENT: &str = "text_encoder_2";

/// Tokens beyond which a prompt is refused: attention needs their square.
const MOST_TOKENS: usize = 4096;

/// The first layer has the biases of all.
const BIASES: &str = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";

const LAST_NORM: &str = "encoder.final_layer_norm.weight";

/// The name of the table of tokens: it is tied to the encoder's own, and saved under either name.
fn table(has: &dyn Fn(&str) -> bool) -> &'static str {
    let names = ["shared.weight", "encoder.embed_tokens.weight"];
    names.into_iter().find(|name| has(name)).unwrap_or(names[0])
}

/// `text_encoder_2/config.json`. Fields that the file leaves out have the defaults of transformers' `T5Config`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct T5Config {
    /// Tokens that there are.
    pub vocab_size: usize,
    /// Width of a token.
    pub d_model: usize,
    /// Width of a head.
    pub d_kv: usize,
    /// Width within the feed-forward layers.
    pub d_ff: usize,
    /// Layers.
    pub num_layers: usize,
    /// Heads of each attention.
    pub num_heads: usize,
    /// Buckets of distances between tokens that have a bias of their own.
    pub relative_attention_num_buckets: usize,
    /// The distance from which on all share one.
    pub relative_attention_max_distance: usize,
    /// Epsilon of the norms.
    pub layer_norm_epsilon: f64,
    /// Only `gated-gelu` is known.
    pub feed_forward_proj: String,
}

impl Default for T5Config {
    fn default() -> T5Config {
        T5Config {
            vocab_size: 32128,
            d_model: 512,
            d_kv: 64,
            d_ff: 2048,
            num_layers: 6,
            num_heads: 8,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            layer_norm_epsilon: 1e-6,
            feed_forward_proj: "relu".to_owned(),
        }
    }
}

impl T5Config {
    /// Whether this is an encoder that the mathematics here knows.
    ///
    /// # Errors
    /// Says what it is instead.
    pub fn check(&self) -> Result<(), String> {
        // Far above anything published: what a file says must not overflow, nor fill memory with names.
        let widths = [
            self.d_model,
            self.d_kv,
            self.d_ff,
            self.relative_attention_num_buckets,
        ];
        let counts = [self.num_layers, self.num_heads];
        if widths.iter().any(|width| *width > 1 << 16)
            || counts.iter().any(|count| *count > 1 << 10)
            || self.vocab_size > 1 << 24
        {
            return Err("sizes beyond all reason".to_owned());
        }
        if self.feed_forward_proj != "gated-gelu" {
            return Err(format!(
                "{:?} feed-forward layers; only gated-gelu is known",
                self.feed_forward_proj
            ));
        }
        let buckets = self.relative_attention_num_buckets;
        if buckets < 4 || !buckets.is_multiple_of(2) || self.relative_attention_max_distance <= buckets / 4 {
            return Err(format!(
                "{buckets} buckets for distances up to {}",
                self.relative_attention_max_distance
            ));
        }
        if self.num_heads == 0 || self.d_kv == 0 {
            return Err("attention without heads".to_owned());
        }
        Ok(())
    }

    /// Names and shapes of all tensors of such an encoder, as [`T5Encoder::new`] asks for them. The table of
    /// tokens has that of its names that `has` knows.
    pub fn tensor_shapes(&self, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        let (width, inner) = (self.d_model, self.num_heads * self.d_kv);
        let mut list = vec![
            (table(has).to_owned(), vec![self.vocab_size, width]),
            (
                BIASES.to_owned(),
                vec![self.relative_attention_num_buckets, self.num_heads],
            ),
        ];
        for i in 0..self.num_layers {
            let block = format!("encoder.block.{i}");
            let mut add = |name: &str, shape: &[usize]| {
                list.push((format!("{block}.{name}.weight"), shape.to_vec()));
            };
            add("layer.0.layer_norm", &[width]);
            for part in ["q", "k", "v"] {
                add(&format!("layer.0.SelfAttention.{part}"), &[inner, width]);
            }
            add("layer.0.SelfAttention.o", &[width, inner]);
            add("layer.1.layer_norm", &[width]);
            add("layer.1.DenseReluDense.wi_0", &[self.d_ff, width]);
            add("layer.1.DenseReluDense.wi_1", &[self.d_ff, width]);
            add("layer.1.DenseReluDense.wo", &[width, self.d_ff]);
        }
        list.push((LAST_NORM.to_owned(), vec![width]));
        list
    }

    /// Predicted peak of activations while a prompt of `tokens` is encoded.
    pub fn scratch(&self, tokens: usize, dtype: DType) -> Bytes {
        let (size, inner) = (dtype.size_in_bytes(), self.num_heads * self.d_kv);
        // The sum is f32 throughout, and so is a norm until it is narrowed; the bias of all layers.
        let kept = tokens * self.d_model * 8 + self.num_heads * tokens * tokens * size;
        let attention = tokens * (self.d_model + 3 * inner) * size
            + ops::attention_scratch(self.num_heads, tokens, tokens, self.d_kv, size);
        // Two projections, the activation of one, and their product.
        let feed_forward = tokens * (self.d_model + 4 * self.d_ff) * size;
        // A part of a norm or an activation in f32, thrice, where the dtype is narrower.
        let widened = if size < 4 {
            3 * (tokens * self.d_ff * 4).min(ops::PART_BYTES)
        } else {
            0
        };
        Bytes((kept + attention.max(feed_forward + widened)) as u64)
    }

    /// The bucket of a distance: `T5Attention._relative_position_bucket`, both ways. Half of the buckets are
    /// for what is behind the query, half for what is before; of each, half are single distances, and the
    /// others grow by the logarithm.
    pub fn bucket(&self, key: usize, query: usize) -> usize {
        let one_way = self.relative_attention_num_buckets / 2;
        let base = if key > query { one_way } else { 0 };
        let distance = key.abs_diff(query);
        let exact = one_way / 2;
        if distance < exact {
            return base + distance;
        }
        // In f32, as the reference has it: at some distances the bucket hangs on the rounding.
        let span = (self.relative_attention_max_distance as f64 / exact as f64).ln() as f32;
        let far = (distance as f32 / exact as f32).ln() / span * (one_way - exact) as f32;
        base + (exact + far as usize).min(one_way - 1)
    }
}

/// `T5Block` of an encoder.
#[derive(Clone, Debug)]
struct Layer {
    norm1: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    norm2: Tensor,
    gate: Linear,
    widen: Linear,
    narrow: Linear,
}

impl Layer {
    fn new(tensors: &ComponentTensors, name: &str, config: &T5Config) -> Result<Layer, MissingTensor> {
        let (width, inner) = (config.d_model, config.num_heads * config.d_kv);
        let attention = |part: &str, from: usize, to: usize| {
            Linear::without_bias(tensors, &format!("{name}.layer.0.SelfAttention.{part}"), from, to)
        };
        let feed_forward = |part: &str, from: usize, to: usize| {
            Linear::without_bias(
                tensors,
                &format!("{name}.layer.1.DenseReluDense.{part}"),
                from,
                to,
            )
        };
        Ok(Layer {
            norm1: tensors.shaped(&format!("{name}.layer.0.layer_norm.weight"), &[width])?,
            query: attention("q", width, inner)?,
            key: attention("k", width, inner)?,
            value: attention("v", width, inner)?,
            out: attention("o", inner, width)?,
            norm2: tensors.shaped(&format!("{name}.layer.1.layer_norm.weight"), &[width])?,
            gate: feed_forward("wi_0", width, config.d_ff)?,
            widen: feed_forward("wi_1", width, config.d_ff)?,
            narrow: feed_forward("wo", config.d_ff, width)?,
        })
    }

    /// `x` is f32 `[1, tokens, width]`, `bias` `[1, heads, tokens, tokens]`.
    fn forward(&self, x: &Tensor, bias: &Tensor, config: &T5Config) -> candle_core::Result<Tensor> {
        let (_, tokens, _) = x.dims3()?;
        let (heads, head) = (config.num_heads, config.d_kv);
        let normed = self.norm(x, &self.norm1, config)?;
        let by_head = |layer: &Linear| {
            layer
                .forward(&normed)?
                .reshape((1, tokens, heads, head))?
                .transpose(1, 2)?
                .contiguous()
        };
        let (query, key, value) = (by_head(&self.query)?, by_head(&self.key)?, by_head(&self.value)?);
        // T5 does not scale: its weights are initialised so that it need not.
        let seen = ops::composed_attention(&query, &key, &value, 1.0, Some(bias), false)?;
        drop((query, key, value));
        let seen = seen
            .transpose(1, 2)?
            .contiguous()?
            .reshape((1, tokens, heads * head))?;
        let x = (x + self.out.forward(&seen)?.to_dtype(DType::F32)?)?;
        let normed = self.norm(&x, &self.norm2, config)?;
        let gate = self.gate.forward(&normed)?;
        let gate = ops::gelu_tanh(&gate)?;
        let inner = (gate * self.widen.forward(&normed)?)?;
        x + self.narrow.forward(&inner)?.to_dtype(DType::F32)?
    }

    /// The norm in f32, then the dtype of the weights.
    fn norm(&self, x: &Tensor, weight: &Tensor, config: &T5Config) -> candle_core::Result<Tensor> {
        ops::rms_norm(x, weight, config.layer_norm_epsilon)?.to_dtype(weight.dtype())
    }
}

/// T5's encoder.
#[derive(Clone, Debug)]
pub struct T5Encoder {
    tokens: Tensor,
    /// `[buckets, heads]`: the first layer has it, all use it.
    biases: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    config: T5Config,
}

impl T5Encoder {
    /// From the tensors of the `text_encoder_2` component, by transformers' names (`shared.weight`,
    /// `encoder.block.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an encoder that is not known, [`StageError::Missing`] for a tensor that is
    /// not there or not of the configuration's shape.
    pub fn new(config: &T5Config, tensors: &ComponentTensors) -> Result<T5Encoder, StageError> {
        let bad = |problem| StageError::BadInput(format!("the T5 encoder has {problem}"));
        config.check().map_err(bad)?;
        let read = || -> Result<T5Encoder, MissingTensor> {
            let table = table(&|name| tensors.contains(name));
            let layers = 0..config.num_layers;
            let layers = layers.map(|i| Layer::new(tensors, &format!("encoder.block.{i}"), config));
            Ok(T5Encoder {
                tokens: tensors.shaped(table, &[config.vocab_size, config.d_model])?,
                biases: tensors.shaped(BIASES, &[config.relative_attention_num_buckets, config.num_heads])?,
                layers: layers.collect::<Result<_, _>>()?,
                norm: tensors.shaped(LAST_NORM, &[config.d_model])?,
                config: config.clone(),
            })
        };
        read().map_err(|missing| StageError::Missing {
            component: COMPONENT.to_owned(),
            missing,
        })
    }

    /// Encodes the tokens of one prompt, pads included: `[1, tokens, d_model]` in the dtype of the weights.
    /// What the layers add up is f32, since it outgrows what f16 holds. `cancelled` is asked before every
    /// layer.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for tokens that there are
    /// not, or too many.
    pub fn forward(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        check_ids(ids, self.config.vocab_size, MOST_TOKENS)?;
        let rows = Tensor::new(ids, self.tokens.device())?;
        let mut x = self
            .tokens
            .index_select(&rows, 0)?
            .to_dtype(DType::F32)?
            .unsqueeze(0)?;
        let bias = self.position_bias(ids.len())?;
        for layer in &self.layers {
            if cancelled() {
                return Err(StageError::Cancelled);
            }
            x = layer.forward(&x, &bias, &self.config)?;
        }
        let encoded = ops::rms_norm(&x, &self.norm, self.config.layer_norm_epsilon)?;
        let encoded = encoded.to_dtype(self.tokens.dtype())?;
        check_finite(&encoded, COMPONENT)?;
        Ok(encoded)
    }

    /// `[1, heads, tokens, tokens]`: what is added to the score of a key for a query.
    fn position_bias(&self, tokens: usize) -> candle_core::Result<Tensor> {
        let buckets: Vec<u32> = (0..tokens)
            .flat_map(|query| (0..tokens).map(move |key| (key, query)))
            .map(|(key, query)| self.config.bucket(key, query) as u32)
            .collect();
        let buckets = Tensor::from_vec(buckets, tokens * tokens, self.biases.device())?;
        let biases = self.biases.index_select(&buckets, 0)?.t()?.contiguous()?;
        biases.reshape((1, self.config.num_heads, tokens, tokens))
    }
}
