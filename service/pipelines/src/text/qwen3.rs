//! Qwen3's decoder as a text encoder: the sum of its layers, without the last norm (transformers' `Qwen3Model`,
//! `hidden_states[depth]`).
//!
//! Attention is causal, so padding behind a prompt does not affect its states, and is not computed.
//!
//! A full-precision component is computed by candle-transformers (`candle.rs`); a quantized one by the layers here,
//! which support all weight formats.

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor, Weight};
use ops::{
    AttentionShape, Epilogue, Mask, MaskShape, Nonlinearity, Norm, Pairs, Planned, QkNorm, Scratch,
    add_residual, allocated, attention, linears_into, norm_modulate, qk_norm_rope, residual_norm_modulate,
};
use residency::Bytes;
use serde::Deserialize;

use super::candle;
use super::encoding::{check_finite, check_ids};
use crate::adapters::AdaptedTensors;
use crate::checkpoint::QuantizeRole;
use crate::family::StageError;
use crate::linear::{Linear, largest_scratch};
use crate::rotary::{Rotations, Rounded, rotations};

/// Maximum tokens of a prompt: attention is quadratic.
const MAX_TOKENS: usize = 4096;

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
pub(super) const LIBRARIES: u64 = 4 << 20;

/// Prefix of all names in most checkpoints.
const PREFIX: &str = "model.";

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
    /// Base of the rotary frequencies, in older files.
    rope_theta: Option<f64>,
    /// Base of the rotary frequencies, in newer files.
    rope_parameters: Option<RopeParameters>,
    /// Must be null.
    rope_scaling: Option<serde_json::Value>,
}

/// `rope_parameters` of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
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
            rope_theta: None,
            rope_parameters: None,
            rope_scaling: None,
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
            rope_theta: Some(1_000_000.0),
            ..Qwen3Config::default()
        }
    }

    /// Checks that this decoder is supported.
    ///
    /// # Errors
    /// What is not supported.
    pub fn check(&self) -> Result<(), String> {
        // Far above any published model: untrusted values must not overflow, nor exhaust memory.
        let widths = [self.hidden_size, self.intermediate_size, self.head_dim];
        let counts = [self.num_hidden_layers, self.num_attention_heads];
        if widths.iter().any(|width| *width > 1 << 17)
            || counts.iter().any(|count| *count > 1 << 10)
            || self.vocab_size > 1 << 24
        {
            return Err("sizes beyond all reason".to_owned());
        }
        if widths.contains(&0) || counts.contains(&0) || !self.head_dim.is_multiple_of(2) {
            return Err("layers of no width, none of them, or heads of an odd one".to_owned());
        }
        let (heads, of_keys) = (self.num_attention_heads, self.num_key_value_heads);
        if of_keys == 0 || !heads.is_multiple_of(of_keys) {
            return Err(format!("{heads} heads of queries over {of_keys} of keys"));
        }
        if self.hidden_act != "silu" {
            return Err(format!(
                "the activation {:?}; only silu is known",
                self.hidden_act
            ));
        }
        if self.attention_bias || self.use_sliding_window {
            return Err("biases of attention, or a sliding window, which are not known".to_owned());
        }
        let kind = self
            .rope_parameters
            .as_ref()
            .and_then(|rope| rope.rope_type.as_deref());
        if self
            .rope_scaling
            .as_ref()
            .is_some_and(|scaling| !scaling.is_null())
            || kind.is_some_and(|kind| kind != "default")
        {
            return Err("rotary embeddings that are scaled, which are not known".to_owned());
        }
        if !(self.theta() > 0.0 && self.rms_norm_eps > 0.0) {
            return Err(format!(
                "a base of {} or an epsilon of {}",
                self.theta(),
                self.rms_norm_eps
            ));
        }
        Ok(())
    }

    /// Base of the rotary frequencies.
    pub fn theta(&self) -> f64 {
        let newer = self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
        newer.or(self.rope_theta).unwrap_or(10_000.0)
    }

    /// Names and shapes of the tensors of the first `depth` layers. Names begin with `model.` if `has` knows the
    /// token embedding by such a name.
    pub fn tensor_shapes(&self, depth: usize, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        let (width, inner, head) = (self.hidden_size, self.intermediate_size, self.head_dim);
        let (queries, keys) = (self.num_attention_heads * head, self.num_key_value_heads * head);
        let prefix = prefix_of(has);
        let mut list = vec![(
            format!("{prefix}embed_tokens.weight"),
            vec![self.vocab_size, width],
        )];
        for i in 0..depth {
            let mut add = |name: &str, shape: &[usize]| {
                list.push((format!("{prefix}layers.{i}.{name}.weight"), shape.to_vec()));
            };
            add("input_layernorm", &[width]);
            add("self_attn.q_proj", &[queries, width]);
            add("self_attn.k_proj", &[keys, width]);
            add("self_attn.v_proj", &[keys, width]);
            add("self_attn.o_proj", &[width, queries]);
            add("self_attn.q_norm", &[head]);
            add("self_attn.k_norm", &[head]);
            add("post_attention_layernorm", &[width]);
            add("mlp.gate_proj", &[inner, width]);
            add("mlp.up_proj", &[inner, width]);
            add("mlp.down_proj", &[width, inner]);
        }
        list
    }

    /// Predicted peak of activations of encoding `tokens`, by a quantized or a full-precision component.
    pub fn scratch(&self, tokens: usize, is_quantized: bool, dtype: DType) -> Bytes {
        match is_quantized {
            true => self.own_scratch(tokens, dtype),
            false => candle::scratch(self, tokens, dtype),
        }
    }

    /// The buffers, and the workspace of attention where cuDNN has no plan.
    fn own_scratch(&self, tokens: usize, dtype: DType) -> Bytes {
        let size = dtype.size_in_bytes();
        let sum = allocated(tokens * self.hidden_size * size_of::<f32>());
        let others = [self.hidden_size, self.first_width(), self.second_width()];
        let others: u64 = others.iter().map(|width| allocated(tokens * width * size)).sum();
        let rotations = 2 * allocated(tokens * self.head_dim / 2 * size_of::<f32>());
        let encoded = allocated(tokens * self.hidden_size * size);
        let attention = ops::attention_workspace(self.num_attention_heads, tokens, tokens);
        Bytes(
            sum + others
                + rotations
                + encoded
                + allocated(tokens * size_of::<u32>())
                + allocated(attention)
                + LIBRARIES,
        )
    }

    /// cuDNN shape of each layer's attention: `None` if candle-transformers computes it.
    pub fn planned(&self, tokens: usize, is_quantized: bool, dtype: DType) -> Option<Planned> {
        let by_head = (self.num_attention_heads, self.head_dim);
        let rows = (self.joint_width(), self.second_width());
        let shape = AttentionShape::of_rows(tokens, by_head, rows, dtype, MaskShape::Causal);
        is_quantized.then_some(Planned::Attention(AttentionShape {
            heads_kv: self.num_key_value_heads,
            ..shape
        }))
    }

    /// Elements per token of queries, keys and values.
    fn joint_width(&self) -> usize {
        (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
    }

    /// Elements per token of the first shared buffer: queries, keys and values, then the gate.
    fn first_width(&self) -> usize {
        self.joint_width().max(self.intermediate_size)
    }

    /// Elements per token of the second: attention output, then the gated values, rounded up to whole heads.
    fn second_width(&self) -> usize {
        let attended = self.num_attention_heads * self.head_dim;
        attended.max(self.intermediate_size.next_multiple_of(self.head_dim))
    }
}

/// Prefix of the names of a checkpoint's tensors.
pub(super) fn prefix_of(has: &dyn Fn(&str) -> bool) -> &'static str {
    match has("embed_tokens.weight") {
        true => "",
        false => PREFIX,
    }
}

/// Attention and feed-forward may be quantized.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    match layer.ends_with("_proj") && (layer.contains(".self_attn.") || layer.contains(".mlp.")) {
        true => QuantizeRole::Quantized,
        false => QuantizeRole::Full,
    }
}

/// `Qwen3DecoderLayer`.
#[derive(Clone, Debug)]
struct Qwen3Layer {
    norm1: Tensor,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    query_norm: Tensor,
    key_norm: Tensor,
    norm2: Tensor,
    gate: Linear,
    raise: Linear,
    lower: Linear,
}

impl Qwen3Layer {
    fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        config: &Qwen3Config,
    ) -> Result<Qwen3Layer, MissingTensor> {
        let (width, inner, head) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (queries, keys) = (
            config.num_attention_heads * head,
            config.num_key_value_heads * head,
        );
        let linear = |part: &str, from: usize, to: usize| {
            Linear::without_bias(tensors, &format!("{name}.{part}_proj"), from, to)
        };
        let norm = |part: &str, width: usize| tensors.shaped(&format!("{name}.{part}.weight"), &[width]);
        Ok(Qwen3Layer {
            norm1: norm("input_layernorm", width)?,
            query: linear("self_attn.q", width, queries)?,
            key: linear("self_attn.k", width, keys)?,
            value: linear("self_attn.v", width, keys)?,
            out: linear("self_attn.o", queries, width)?,
            query_norm: norm("self_attn.q_norm", head)?,
            key_norm: norm("self_attn.k_norm", head)?,
            norm2: norm("post_attention_layernorm", width)?,
            gate: linear("mlp.gate", width, inner)?,
            raise: linear("mlp.up", width, inner)?,
            lower: linear("mlp.down", inner, width)?,
        })
    }

    fn linears(&self) -> [&Linear; 7] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.out,
            &self.gate,
            &self.raise,
            &self.lower,
        ]
    }

    /// Adds the layer to the residual stream, whose normalized rows are ready; `next` is the weight of the norm that
    /// follows, `None` after the last layer.
    fn forward(&self, buffers: &Qwen3Buffers, next: Option<&Tensor>) -> candle_core::Result<()> {
        let Qwen3Buffers {
            sum,
            normed,
            query,
            key,
            value,
            attended,
            gate,
            raised,
            rotations,
            eps,
            scratch,
        } = buffers;
        let rms = |weight| Norm::Rms {
            weight: Some(weight),
            eps: *eps,
        };
        let layers = [self.query.to(query)?, self.key.to(key)?, self.value.to(value)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        let norm = QkNorm::PerHead {
            q: &self.query_norm,
            k: &self.key_norm,
            eps: *eps,
        };
        qk_norm_rope(query, key, norm, Some(rotations.angles()), Pairs::Halves)?;
        let scale = (query.dim(3)? as f64).powf(-0.5);
        attention(query, key, value, scale, Mask::Causal, attended)?;
        self.out.forward_into(attended, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, rms(&self.norm2), None, normed)?;
        let layers = [self.gate.to(gate)?, self.raise.to(raised)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        ops::glu(gate, raised, Nonlinearity::Silu, gate)?;
        self.lower.forward_into(gate, Epilogue::None, normed, scratch)?;
        match next {
            Some(next) => residual_norm_modulate(sum, normed, None, rms(next), None, normed),
            None => add_residual(sum, normed, None),
        }
    }
}

/// Buffers of a pass, reused by every layer. The first and the last intermediate results share memory.
struct Qwen3Buffers {
    /// f32 `[1, tokens, width]`: the residual stream.
    sum: Tensor,
    /// `[1, tokens, width]`: the normalized input of the next layers, or their output before it is added.
    normed: Tensor,
    /// `[1, tokens, heads, head]`, with keys and values behind them in each row.
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    /// `[1, tokens, inner]`, in the memory of `query`.
    gate: Tensor,
    /// `[1, tokens, inner]`, in the memory of `attended`.
    raised: Tensor,
    rotations: Rotations,
    eps: f64,
    scratch: Scratch,
}

impl Qwen3Buffers {
    fn new(
        config: &Qwen3Config,
        tokens: usize,
        dtype: DType,
        scratch: Scratch,
        device: &Device,
    ) -> candle_core::Result<Qwen3Buffers> {
        let (heads, keys, head) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        );
        let (first, second) = (config.first_width(), config.second_width());
        let buffer = |width: usize| Tensor::zeros(tokens * width, dtype, device);
        let (first, second_rows) = (buffer(first)?, buffer(second)?);
        let joint = first.narrow(0, 0, tokens * config.joint_width())?;
        let joint = joint.reshape((1, tokens, heads + 2 * keys, head))?;
        let attended = second_rows.reshape((1, tokens, second / head, head))?;
        let inner = config.intermediate_size;
        let places: Vec<[u32; 1]> = (0..tokens as u32).map(|at| [at]).collect();
        Ok(Qwen3Buffers {
            sum: Tensor::zeros((1, tokens, config.hidden_size), DType::F32, device)?,
            normed: buffer(config.hidden_size)?.reshape((1, tokens, config.hidden_size))?,
            query: joint.narrow(2, 0, heads)?,
            key: joint.narrow(2, heads, keys)?,
            value: joint.narrow(2, heads + keys, keys)?,
            attended: attended.narrow(2, 0, heads)?,
            gate: first.narrow(0, 0, tokens * inner)?.reshape((1, tokens, inner))?,
            raised: second_rows
                .narrow(0, 0, tokens * inner)?
                .reshape((1, tokens, inner))?,
            rotations: rotations(&places, [head], config.theta(), Rounded::Frequencies, device)?,
            eps: config.rms_norm_eps,
            scratch,
        })
    }
}

/// The first layers of a decoder, over resident tensors.
#[derive(Debug)]
pub struct Qwen3Encoder<'a> {
    config: Qwen3Config,
    depth: usize,
    component: String,
    tensors: &'a ComponentTensors,
}

impl Qwen3Encoder<'_> {
    /// The first `depth` layers, at least 1, from the tensors of this component.
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
        if depth == 0 || depth > config.num_hidden_layers {
            return Err(bad(format!(
                "{} layers, and {depth} are asked for",
                config.num_hidden_layers
            )));
        }
        for (name, shape) in config.tensor_shapes(depth, &|name| tensors.contains(name)) {
            let found = match role(&name) {
                QuantizeRole::Quantized => tensors.shaped_weight(&name, &shape).map(|_| ()),
                QuantizeRole::AsStored | QuantizeRole::Full => tensors.shaped(&name, &shape).map(|_| ()),
            };
            found.map_err(|missing| StageError::Missing {
                component: component.to_owned(),
                missing,
            })?;
        }
        Ok(Qwen3Encoder {
            config: config.clone(),
            depth,
            component: component.to_owned(),
            tensors,
        })
    }

    /// Whether any of its weights is quantized.
    pub fn is_quantized(&self) -> bool {
        let is_quantized = |name: &str| matches!(self.tensors.weight(name), Ok(Weight::Quantized(_)));
        self.tensors.names().any(is_quantized)
    }

    /// Encodes tokens: `[tokens, hidden_size]`, the sum of the layers, in the dtype of the weights. `cancelled` is
    /// called before every layer of a quantized component, and once for a full-precision one.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, or too
    /// many.
    pub fn forward(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        check_ids(ids, self.config.vocab_size, MAX_TOKENS)?;
        if cancelled() {
            return Err(StageError::Cancelled);
        }
        let encoded = match self.is_quantized() {
            true => self.by_our_layers(ids, cancelled)?,
            false => candle::encode(&self.config, self.depth, self.tensors, ids)?,
        };
        check_finite(&encoded, &self.component)?;
        Ok(encoded)
    }

    /// [`Qwen3Encoder::forward`] by the layers here, for any weight format. Returns f32.
    ///
    /// # Errors
    /// Errors of the device, [`StageError::Cancelled`], [`StageError::Missing`].
    pub fn by_our_layers(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let read = || -> Result<(Tensor, Vec<Qwen3Layer>), MissingTensor> {
            let prefix = prefix_of(&|name| self.tensors.contains(name));
            let table = self.tensors.get(&format!("{prefix}embed_tokens.weight"))?;
            let tensors = AdaptedTensors::from(self.tensors);
            let layers = (0..self.depth)
                .map(|i| Qwen3Layer::new(&tensors, &format!("{prefix}layers.{i}"), &self.config));
            Ok((table, layers.collect::<Result<_, _>>()?))
        };
        let (table, layers) = read().map_err(|missing| StageError::Missing {
            component: self.component.clone(),
            missing,
        })?;
        let (device, dtype) = (table.device(), table.dtype());
        let linears = layers.iter().flat_map(Qwen3Layer::linears);
        let scratch = Scratch::new(largest_scratch(linears, ids.len(), dtype), device)?;
        let buffers = Qwen3Buffers::new(&self.config, ids.len(), dtype, scratch, device)?;
        ops::embed(&table, &Tensor::new(ids, device)?, &buffers.sum.squeeze(0)?)?;
        if let Some(first) = layers.first() {
            let norm = Norm::Rms {
                weight: Some(&first.norm1),
                eps: self.config.rms_norm_eps,
            };
            norm_modulate(&buffers.sum, norm, None, &buffers.normed)?;
        }
        let next = layers.iter().skip(1).map(|layer| Some(&layer.norm1));
        for (layer, next) in layers.iter().zip(next.chain([None])) {
            if cancelled() {
                return Err(StageError::Cancelled);
            }
            layer.forward(&buffers, next)?;
        }
        let encoded = Tensor::zeros((ids.len(), self.config.hidden_size), dtype, device)?;
        ops::copy_rows(&buffers.sum.squeeze(0)?, &encoded)?;
        Ok(encoded)
    }
}
