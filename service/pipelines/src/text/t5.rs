//! T5's encoder, version 1.1, and UMT5's: transformers' `T5EncoderModel` and `UMT5EncoderModel`, which differ in the biases
//! of positions: T5 has one table for all layers, UMT5 one in each. FLUX pads prompts and passes no mask, so padding takes
//! part in attention; for UMT5 see [`super::umt5`].

use candle_core::{DType, Device, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, WeightStream};
use model::StageError;
use ops::{
    AttentionShape, Epilogue, Mask, MaskShape, Nonlinearity, Norm, Planned, Scratch, allocated, attention,
    linears_into, norm_modulate, residual_norm_modulate,
};
use residency::Bytes;
use serde::Deserialize;

use super::encoding::{check_finite, check_ids};
use crate::adapters::AdaptedTensors;
use crate::checkpoint::{QuantizeRole, numbered};
use crate::files::check_sizes;
use crate::linear::{Linear, largest_scratch};
use crate::resident::packing_bytes;

/// Maximum tokens of a prompt: attention is quadratic.
const MAX_TOKENS: usize = 4096;

/// The end of the name of a table of relative position biases.
const BIASES: &str = ".layer.0.SelfAttention.relative_attention_bias.weight";

const LAST_NORM: &str = "encoder.final_layer_norm.weight";

/// Name of the token embedding: it is tied to the encoder's own, and saved under either name.
fn table(has: &dyn Fn(&str) -> bool) -> &'static str {
    let names = ["shared.weight", "encoder.embed_tokens.weight"];
    names.into_iter().find(|name| has(name)).unwrap_or(names[0])
}

/// The encoder's `config.json`. Missing fields have the defaults of transformers' `T5Config`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct T5Config {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of a token.
    pub d_model: usize,
    /// Width of a head.
    pub d_kv: usize,
    /// Width inside the feed-forward layers.
    pub d_ff: usize,
    pub num_layers: usize,
    pub num_heads: usize,
    /// Number of relative position buckets.
    pub relative_attention_num_buckets: usize,
    /// Distance from which on all tokens share one bucket.
    pub relative_attention_max_distance: usize,
    /// Epsilon of the norms.
    pub layer_norm_epsilon: f64,
    /// Feed-forward type: only `gated-gelu` is supported.
    pub feed_forward_proj: String,
    /// `t5`, or `umt5`, each of whose layers has biases of positions.
    pub model_type: String,
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
            model_type: "t5".to_owned(),
        }
    }
}

impl T5Config {
    /// Checks that this encoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let widths = [
            self.d_model,
            self.d_kv,
            self.d_ff,
            self.relative_attention_num_buckets,
        ];
        let counts = [self.num_layers, self.num_heads];
        check_sizes(&[
            (&widths, 1 << 16),
            (&counts, 1 << 10),
            (&[self.vocab_size], 1 << 24),
        ])?;
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

    /// The names of the tables of position biases: of the first layer for all, or of each.
    fn biases(&self) -> impl Iterator<Item = String> {
        let tables = match self.has_biases_in_layers() {
            true => self.num_layers,
            false => 1,
        };
        (0..tables).map(|layer| format!("encoder.block.{layer}{BIASES}"))
    }

    fn has_biases_in_layers(&self) -> bool {
        self.model_type == "umt5"
    }

    fn biases_shape(&self) -> [usize; 2] {
        [self.relative_attention_num_buckets, self.num_heads]
    }

    /// Names and shapes of all tensors of this configuration. The token embedding has the name that `has` knows.
    pub fn tensor_shapes(&self, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        let (width, inner) = (self.d_model, self.num_heads * self.d_kv);
        let mut list = vec![(table(has).to_owned(), vec![self.vocab_size, width])];
        list.extend(self.biases().map(|name| (name, self.biases_shape().to_vec())));
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

    /// Predicted peak of activations of encoding a prompt of `tokens`: the buffers, the shared bias, the workspace of attention
    /// where cuDNN has no plan, and packing buffers of a CPU's products.
    pub fn scratch(&self, tokens: usize, dtype: DType) -> Bytes {
        let size = dtype.size_in_bytes();
        let sum = allocated(tokens * self.d_model * size_of::<f32>());
        let bias = allocated(self.num_heads * tokens * tokens * size);
        let others = [self.d_model, self.first_width(), self.second_width()];
        let others: u64 = others.iter().map(|width| allocated(tokens * width * size)).sum();
        // Token ids, and bucket indices.
        let small = allocated(tokens * size_of::<u32>()) + allocated(2 * tokens * size_of::<u32>());
        let attention = allocated(ops::attention_workspace(self.num_heads, tokens, tokens));
        Bytes(sum + bias + others + small + attention + packing_bytes(dtype))
    }

    /// Shape of each layer's attention: queries, keys and values are concatenated in rows of one buffer.
    pub fn planned(&self, tokens: usize, dtype: DType) -> Planned {
        let inner = self.num_heads * self.d_kv;
        let bias = MaskShape::bias([1, self.num_heads, tokens, tokens]);
        let (by_head, rows) = ((self.num_heads, self.d_kv), (3 * inner, inner));
        Planned::Attention(AttentionShape::of_rows(tokens, by_head, rows, dtype, bias))
    }

    /// Elements per token of the first shared buffer: queries, keys and values, then the gate.
    fn first_width(&self) -> usize {
        (3 * self.num_heads * self.d_kv).max(self.d_ff)
    }

    /// Elements per token of the second: attention output, then the gated values.
    fn second_width(&self) -> usize {
        (self.num_heads * self.d_kv).max(self.d_ff)
    }

    /// The bucket of a distance: `T5Attention._relative_position_bucket`, bidirectional. Half of the buckets are for keys after
    /// the query, half for those before it; of each, half are single distances, and the others grow logarithmically.
    pub fn bucket(&self, key: usize, query: usize) -> usize {
        let one_way = self.relative_attention_num_buckets / 2;
        let base = if key > query { one_way } else { 0 };
        let distance = key.abs_diff(query);
        let exact = one_way / 2;
        if distance < exact {
            return base + distance;
        }
        // In f32, as in the reference: at some distances the bucket depends on the rounding.
        let span = (self.relative_attention_max_distance as f64 / exact as f64).ln() as f32;
        let far = (distance as f32 / exact as f32).ln() / span * (one_way - exact) as f32;
        base + (exact + far as usize).min(one_way - 1)
    }
}

/// The block of a tensor: each layer is one.
pub(crate) fn block_of(name: &str) -> Option<BlockPlace> {
    // Biases of positions are small, and T5's serve all layers.
    let (number, _) = numbered(name, "encoder.block.").filter(|_| !name.ends_with(BIASES))?;
    Some(BlockPlace::each_pass(number))
}

/// Attention and feed-forward may be quantized.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    if layer.ends_with(".relative_attention_bias") {
        return QuantizeRole::Full;
    }
    match layer.contains(".SelfAttention.") || layer.contains(".DenseReluDense.") {
        true => QuantizeRole::Quantized,
        false => QuantizeRole::Full,
    }
}

/// `T5Block` of an encoder.
#[derive(Clone, Debug)]
struct T5Layer {
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

impl T5Layer {
    fn new(tensors: &AdaptedTensors<'_>, name: &str, config: &T5Config) -> Result<T5Layer, MissingTensor> {
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
        Ok(T5Layer {
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

    /// The linear layers of the block.
    fn linears(&self) -> [&Linear; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.out,
            &self.gate,
            &self.widen,
            &self.narrow,
        ]
    }

    /// Adds the layer to the residual stream, whose normalized rows are ready; `next` is the weight of the norm that
    /// follows.
    fn forward(&self, buffers: &T5Buffers, next: &Tensor) -> candle_core::Result<()> {
        let T5Buffers {
            sum,
            normed,
            queries_keys_values,
            attended,
            gate,
            raised,
            bias,
            config,
            scratch,
        } = buffers;
        let (heads, head) = (config.num_heads, config.d_kv);
        let (tokens, inner) = attended.dims2()?;
        let rms = |weight| Norm::Rms {
            weight: Some(weight),
            eps: config.layer_norm_epsilon,
        };
        let [query, key, value] = [0, 1, 2].map(|i| queries_keys_values.narrow(1, i * inner, inner));
        let (query, key, value) = (query?, key?, value?);
        let layers = [self.query.to(&query)?, self.key.to(&key)?, self.value.to(&value)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        let by_head = queries_keys_values.reshape((1, tokens, 3 * heads, head))?;
        let [query, key, value] = [0, 1, 2].map(|i| by_head.narrow(2, i * heads, heads));
        // T5 does not scale scores: the initialization of its weights accounts for it.
        let seen = attended.reshape((1, tokens, heads, head))?;
        attention(&query?, &key?, &value?, 1.0, Mask::Bias(bias), &seen)?;
        self.out.forward_into(attended, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, rms(&self.norm2), None, normed)?;
        let layers = [self.gate.to(gate)?, self.widen.to(raised)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        ops::glu(gate, raised, Nonlinearity::GeluTanh, gate)?;
        self.narrow.forward_into(gate, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, rms(next), None, normed)
    }
}

/// Buffers of a pass, reused by every layer. The first and the last intermediate results share memory.
struct T5Buffers {
    /// f32 `[tokens, width]`: the residual stream, which exceeds the range of f16.
    sum: Tensor,
    /// `[tokens, width]`: the normalized input of the next layers, or their output before it is added.
    normed: Tensor,
    /// `[tokens, 3 * inner]`.
    queries_keys_values: Tensor,
    /// `[tokens, inner]`.
    attended: Tensor,
    /// `[tokens, d_ff]`, in the memory of `queries_keys_values`.
    gate: Tensor,
    /// `[tokens, d_ff]`, in the memory of `attended`.
    raised: Tensor,
    /// `[1, heads, tokens, tokens]`: added to the scores of keys per query.
    bias: Tensor,
    config: T5Config,
    scratch: Scratch,
}

impl T5Buffers {
    fn new(
        config: &T5Config,
        tokens: usize,
        dtype: DType,
        scratch: Scratch,
        device: &Device,
    ) -> candle_core::Result<T5Buffers> {
        let inner = config.num_heads * config.d_kv;
        let buffer = |width: usize| Tensor::zeros(tokens * width, dtype, device);
        let of_width =
            |buffer: &Tensor, width: usize| buffer.narrow(0, 0, tokens * width)?.reshape((tokens, width));
        let (first, second) = (buffer(config.first_width())?, buffer(config.second_width())?);
        Ok(T5Buffers {
            sum: Tensor::zeros((tokens, config.d_model), DType::F32, device)?,
            normed: of_width(&buffer(config.d_model)?, config.d_model)?,
            queries_keys_values: of_width(&first, 3 * inner)?,
            attended: of_width(&second, inner)?,
            gate: of_width(&first, config.d_ff)?,
            raised: of_width(&second, config.d_ff)?,
            bias: Tensor::zeros((1, config.num_heads, tokens, tokens), dtype, device)?,
            config: config.clone(),
            scratch,
        })
    }
}

/// T5's encoder over resident tensors.
#[derive(Clone, Debug)]
pub struct T5Encoder {
    tokens: Tensor,
    /// `[buckets, heads]`, of the first layer and used by all, or of each layer.
    biases: Vec<Tensor>,
    layers: Vec<T5Layer>,
    norm: Tensor,
    /// Brings the layers that are not on the card.
    stream: WeightStream,
    component: String,
    config: T5Config,
}

impl T5Encoder {
    /// The encoder with the tensors of this component, with transformers' names (`shared.weight`, `encoder.block.*`).
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported encoder, [`StageError::Missing`] for a tensor that is missing or
    /// not of the configuration's shape.
    pub fn new(
        config: &T5Config,
        component: &str,
        tensors: &ComponentTensors,
    ) -> Result<T5Encoder, StageError> {
        T5Encoder::with_adapters(config, component, &AdaptedTensors::from(tensors))
    }

    /// As [`T5Encoder::new`], with adapters.
    pub(crate) fn with_adapters(
        config: &T5Config,
        component: &str,
        tensors: &AdaptedTensors<'_>,
    ) -> Result<T5Encoder, StageError> {
        let bad = |problem| StageError::BadInput(format!("the T5 encoder has {problem}"));
        config.check().map_err(bad)?;
        let read = || -> Result<T5Encoder, MissingTensor> {
            let table = table(&|name| tensors.contains(name));
            let biases = config.biases();
            let biases = biases.map(|name| tensors.shaped(&name, &config.biases_shape()));
            let layers = 0..config.num_layers;
            let layers = layers.map(|i| T5Layer::new(tensors, &format!("encoder.block.{i}"), config));
            Ok(T5Encoder {
                tokens: tensors.shaped(table, &[config.vocab_size, config.d_model])?,
                biases: biases.collect::<Result<_, _>>()?,
                layers: layers.collect::<Result<_, _>>()?,
                norm: tensors.shaped(LAST_NORM, &[config.d_model])?,
                stream: tensors.stream(),
                component: component.to_owned(),
                config: config.clone(),
            })
        };
        read().map_err(StageError::missing_in(component))
    }

    /// Encodes the tokens of one prompt, with padding if it takes part in attention: `[1, tokens, d_model]` in the dtype of the weights. The
    /// residual stream is f32, since it exceeds the range of f16. `cancelled` is called before every layer.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, or too
    /// many.
    pub fn forward(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        check_ids(ids, self.config.vocab_size, MAX_TOKENS)?;
        let (device, dtype) = (self.tokens.device(), self.tokens.dtype());
        let linears = self.layers.iter().flat_map(T5Layer::linears);
        let scratch = Scratch::new(largest_scratch(linears, ids.len(), dtype), device)?;
        let buffers = T5Buffers::new(&self.config, ids.len(), dtype, scratch, device)?;
        ops::embed(&self.tokens, &Tensor::new(ids, device)?, &buffers.sum)?;
        let distances = self.buckets(ids.len(), device)?;
        let first = Norm::Rms {
            weight: Some(self.layers.first().map_or(&self.norm, |layer| &layer.norm1)),
            eps: self.config.layer_norm_epsilon,
        };
        norm_modulate(&buffers.sum, first, None, &buffers.normed)?;
        let next = self.layers.iter().skip(1).map(|layer| &layer.norm1);
        for (number, (layer, next)) in self.layers.iter().zip(next.chain([&self.norm])).enumerate() {
            if cancelled() {
                return Err(StageError::Cancelled);
            }
            self.stream.enter(BlockPlace::each_pass(number))?;
            if let Some(biases) = self.biases.get(number) {
                ops::relative_bias(biases, &distances, &buffers.bias)?;
            }
            layer.forward(&buffers, next)?;
        }
        let encoded = buffers.normed.unsqueeze(0)?;
        check_finite(&encoded, &self.component)?;
        Ok(encoded)
    }

    /// u32 `[2 * tokens - 1]`: the buckets of all distances from key to query, ascending.
    fn buckets(&self, tokens: usize, device: &Device) -> candle_core::Result<Tensor> {
        let last = tokens.saturating_sub(1);
        let buckets: Vec<u32> = (0..tokens + last)
            .map(|key| self.config.bucket(key, last) as u32)
            .collect();
        Tensor::new(buckets, device)
    }
}
