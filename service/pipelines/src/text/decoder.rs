//! A causal decoder as a text encoder: the sum of its first layers over resident tensors of any weight format, without
//! the last norm or with it (transformers' `LlamaModel`, `Qwen3Model`, `Qwen2_5_VLTextModel`, `hidden_states[depth]`).
//!
//! Attention is causal, so padding after a prompt does not affect its states, and is not computed, unless a model reads the
//! states of padding too ([`Taken::attended`]).

mod embedding;
mod layer;
mod positions;

use candle_core::{DType, Tensor};
use gpu::{BlockPlace, ComponentTensors, MissingTensor, Weight};
use model::StageError;
use ops::{AttentionShape, MaskShape, Norm, Planned, Scratch, allocated, norm_modulate};
use residency::Bytes;
use serde::Deserialize;

use self::embedding::embed_tokens;
use self::layer::{Buffers, Layer};
use self::positions::Positions;
use super::encoding::{check_finite, check_ids};
use crate::adapters::AdaptedTensors;
use crate::checkpoint::{QuantizeRole, numbered};
use crate::files::check_sizes;
use crate::linear::largest_scratch;

/// Maximum tokens of a prompt: attention is quadratic.
pub(crate) const MAX_TOKENS: usize = 4096;

/// Bytes of packing buffers of matrix products on a CPU, and of other allocations independent of the request.
const LIBRARIES: u64 = 4 << 20;

/// Prefix of all names in most checkpoints.
const PREFIX: &str = "model.";

/// The prefixes that are recognized: none where the decoder was saved alone, and those of older and newer
/// `LlavaForConditionalGeneration`.
const PREFIXES: [&str; 3] = ["", "language_model.model.", "model.language_model."];

/// Prefix of the names of a checkpoint's tensors.
pub(super) fn prefix_of(has: &dyn Fn(&str) -> bool) -> &'static str {
    let known = |prefix: &&str| has(&format!("{prefix}embed_tokens.weight"));
    PREFIXES.into_iter().find(known).unwrap_or(PREFIX)
}

/// Name of the norm after the layers.
pub(super) fn last_norm(has: &dyn Fn(&str) -> bool) -> String {
    format!("{}norm.weight", prefix_of(has))
}

/// Whether a tensor is the token embedding.
pub(super) fn is_embedding(name: &str) -> bool {
    name.ends_with("embed_tokens.weight")
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

/// The rotary embedding of a configuration, in either of its spellings.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(super) struct Rope {
    /// Base of the frequencies, in older files.
    rope_theta: Option<f64>,
    /// The rotary parameters, in newer files.
    rope_parameters: Option<RopeParameters>,
    /// Null, but for the sections of older files.
    rope_scaling: Option<RopeParameters>,
}

/// `rope_parameters` of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct RopeParameters {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// The same in older files.
    #[serde(rename = "type")]
    kind: Option<String>,
    /// Pairs of a head that turn by each of the three positions of a token (Qwen2-VL).
    mrope_section: Option<[usize; 3]>,
}

impl RopeParameters {
    /// Whether the frequencies are scaled.
    fn is_scaled(&self) -> bool {
        let kind = self.rope_type.as_deref().or(self.kind.as_deref());
        kind.is_some_and(|kind| kind != "default" && !(kind == "mrope" && self.mrope_section.is_some()))
    }
}

impl Rope {
    /// Rotary embedding with this base.
    pub(super) fn of(theta: f64) -> Rope {
        Rope {
            rope_theta: Some(theta),
            ..Rope::default()
        }
    }

    /// Base of the frequencies, or that of LLaMA where none is written.
    pub(super) fn theta(&self) -> f64 {
        self.written_theta().unwrap_or(10_000.0)
    }

    /// Base of the frequencies, where it is written.
    pub(super) fn written_theta(&self) -> Option<f64> {
        let newer = self.rope_parameters.as_ref().and_then(|rope| rope.rope_theta);
        newer.or(self.rope_theta)
    }

    /// Pairs of a head that turn by each of the three positions of a token, where they are written.
    pub(super) fn sections(&self) -> Option<[usize; 3]> {
        let of = |rope: &Option<RopeParameters>| rope.as_ref().and_then(|rope| rope.mrope_section);
        of(&self.rope_parameters).or_else(|| of(&self.rope_scaling))
    }

    /// Checks that the rotary embedding is not scaled, and has one position for a token.
    pub(super) fn check(&self) -> Result<(), String> {
        match self.sections() {
            None => self.check_scale(),
            Some(_) => Err("rotary embeddings on three axes, which are not known here".to_owned()),
        }
    }

    /// Checks that the rotary embedding is not scaled.
    pub(super) fn check_scale(&self) -> Result<(), String> {
        let older = self.rope_scaling.as_ref();
        let is_scaled = older.is_some_and(|rope| rope.is_scaled() || rope.mrope_section.is_none());
        match is_scaled
            || self
                .rope_parameters
                .as_ref()
                .is_some_and(RopeParameters::is_scaled)
        {
            true => Err("rotary embeddings that are scaled, which are not known".to_owned()),
            false => Ok(()),
        }
    }
}

/// Layers that have biases in Qwen2.
const BIASED: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];

/// The sizes and constants of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decoder {
    pub(super) vocab_size: usize,
    /// Width of a token.
    pub(super) hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub(super) intermediate_size: usize,
    pub(super) layers: usize,
    /// Query heads.
    pub(super) heads: usize,
    /// Key and value heads; divides the query heads.
    pub(super) heads_kv: usize,
    /// Width of a head.
    pub(super) head_dim: usize,
    /// Epsilon of the norms.
    pub(super) rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub(super) theta: f64,
    /// Whether each head of queries and keys has a norm (Qwen3).
    pub(super) has_head_norms: bool,
    /// Whether queries, keys and values have biases (Qwen2).
    pub(super) has_biases: bool,
    /// Pairs of a head that turn by each of the three positions of a token (Qwen2-VL); `None` where it has one.
    pub(super) sections: Option<[usize; 3]>,
}

impl Decoder {
    /// Checks the sizes, which come from files.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub(super) fn check(&self, hidden_act: &str) -> Result<(), String> {
        let widths = [self.hidden_size, self.intermediate_size, self.head_dim];
        let counts = [self.layers, self.heads];
        check_sizes(&[
            (&widths, 1 << 17),
            (&counts, 1 << 10),
            (&[self.vocab_size], 1 << 24),
        ])?;
        if widths.contains(&0) || counts.contains(&0) || !self.head_dim.is_multiple_of(2) {
            return Err("layers of no width, none of them, or heads of an odd one".to_owned());
        }
        let (heads, of_keys) = (self.heads, self.heads_kv);
        if of_keys == 0 || !heads.is_multiple_of(of_keys) {
            return Err(format!("{heads} heads of queries over {of_keys} of keys"));
        }
        if hidden_act != "silu" {
            return Err(format!("the activation {hidden_act:?}; only silu is known"));
        }
        if let Some(sections) = self.sections
            && sections
                .iter()
                .try_fold(0usize, |sum, pairs| sum.checked_add(*pairs))
                != Some(self.head_dim / 2)
        {
            return Err(format!(
                "sections of {sections:?} pairs in a head of {} numbers",
                self.head_dim
            ));
        }
        if !(self.theta > 0.0 && self.rms_norm_eps > 0.0) {
            return Err(format!(
                "a base of {} or an epsilon of {}",
                self.theta, self.rms_norm_eps
            ));
        }
        Ok(())
    }

    /// Names and shapes of the tensors of the first `depth` layers, by the names that `has` knows.
    pub(super) fn tensor_shapes(
        &self,
        depth: usize,
        has: &dyn Fn(&str) -> bool,
    ) -> Vec<(String, Vec<usize>)> {
        let (width, inner, head) = (self.hidden_size, self.intermediate_size, self.head_dim);
        let (queries, keys) = (self.heads * head, self.heads_kv * head);
        let prefix = prefix_of(has);
        let mut list = vec![(
            format!("{prefix}embed_tokens.weight"),
            vec![self.vocab_size, width],
        )];
        for i in 0..depth {
            let mut add = |name: &str, shape: &[usize]| {
                list.push((format!("{prefix}layers.{i}.{name}.weight"), shape.to_vec()));
                if self.has_biases && BIASED.contains(&name) {
                    list.push((format!("{prefix}layers.{i}.{name}.bias"), shape[..1].to_vec()));
                }
            };
            add("input_layernorm", &[width]);
            add("self_attn.q_proj", &[queries, width]);
            add("self_attn.k_proj", &[keys, width]);
            add("self_attn.v_proj", &[keys, width]);
            add("self_attn.o_proj", &[width, queries]);
            if self.has_head_norms {
                add("self_attn.q_norm", &[head]);
                add("self_attn.k_norm", &[head]);
            }
            add("post_attention_layernorm", &[width]);
            add("mlp.gate_proj", &[inner, width]);
            add("mlp.up_proj", &[inner, width]);
            add("mlp.down_proj", &[width, inner]);
        }
        list
    }

    /// Predicted peak of activations of encoding `tokens`: the buffers, and the workspace of attention where cuDNN has
    /// no plan.
    pub(super) fn scratch(&self, tokens: usize, dtype: DType) -> Bytes {
        let size = dtype.size_in_bytes();
        let sum = allocated(tokens * self.hidden_size * size_of::<f32>());
        let others = [self.hidden_size, self.first_width(), self.second_width()];
        let others: u64 = others.iter().map(|width| allocated(tokens * width * size)).sum();
        let rotations = 2 * allocated(tokens * self.head_dim / 2 * size_of::<f32>());
        let encoded = allocated(tokens * self.hidden_size * size);
        let attention = ops::attention_workspace(self.heads, tokens, tokens);
        Bytes(
            sum + others
                + rotations
                + encoded
                + allocated(tokens * size_of::<u32>())
                + allocated(attention)
                + LIBRARIES,
        )
    }

    /// cuDNN shape of each layer's attention.
    pub(super) fn planned(&self, tokens: usize, dtype: DType) -> Planned {
        Planned::Attention(self.attention(tokens, dtype, MaskShape::Causal))
    }

    /// cuDNN shapes of each layer's attention, of `attended` tokens and of the padding up to `tokens`.
    pub(super) fn planned_with_padding(&self, attended: usize, tokens: usize, dtype: DType) -> Vec<Planned> {
        let of = |queries: usize, mask| AttentionShape {
            queries,
            keys: attended,
            ..self.attention(tokens, dtype, mask)
        };
        let texts = [
            of(attended, MaskShape::Causal),
            of(tokens - attended, MaskShape::None),
        ];
        let some = texts.into_iter().filter(|shape| shape.queries > 0);
        some.map(Planned::Attention).collect()
    }

    fn attention(&self, tokens: usize, dtype: DType, mask: MaskShape) -> AttentionShape {
        let by_head = (self.heads, self.head_dim);
        let rows = (self.joint_width(), self.second_width());
        AttentionShape {
            heads_kv: self.heads_kv,
            ..AttentionShape::of_rows(tokens, by_head, rows, dtype, mask)
        }
    }

    /// Elements per token of queries, keys and values.
    fn joint_width(&self) -> usize {
        (self.heads + 2 * self.heads_kv) * self.head_dim
    }

    /// Elements per token of the first shared buffer: queries, keys and values, then the gate.
    fn first_width(&self) -> usize {
        self.joint_width().max(self.intermediate_size)
    }

    /// Elements per token of the second: attention output, then the gated values, rounded up to whole heads.
    fn second_width(&self) -> usize {
        let attended = self.heads * self.head_dim;
        attended.max(self.intermediate_size.next_multiple_of(self.head_dim))
    }
}

/// The tokens of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens<'a> {
    pub(super) ids: &'a [u32],
    /// Position of each token in time, rows and columns; without them, each token's number is its position on every axis.
    pub(super) positions: Option<&'a [[u32; 3]]>,
    /// Rows `[tokens, hidden_size]` in place of those of the token embedding, with the number of the first of these tokens.
    pub(super) inserted: &'a [(usize, &'a Tensor)],
}

impl<'a> Tokens<'a> {
    /// The tokens of a text.
    pub(super) fn of_text(ids: &'a [u32]) -> Tokens<'a> {
        Tokens {
            ids,
            positions: None,
            inserted: &[],
        }
    }
}

/// What is taken of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken<'a> {
    /// The number of tokens that are attended to. Those after them are padding: each attends to all of these, and to no
    /// padding.
    pub(super) attended: usize,
    /// The numbers of layers after which the states are taken, ascending; the last is that of all layers that run.
    pub(super) after: &'a [usize],
    /// Whether the last of these states is normalized by the norm after the layers.
    pub(super) is_normed: bool,
}

/// The block of a tensor: each layer is one.
pub(crate) fn block_of(name: &str) -> Option<BlockPlace> {
    let (number, _) = numbered(&name[name.find("layers.")?..], "layers.")?;
    Some(BlockPlace::each_pass(number))
}

/// The first layers of a decoder, over resident tensors.
#[derive(Debug)]
pub(super) struct ResidentDecoder<'a> {
    pub(super) decoder: Decoder,
    pub(super) depth: usize,
    component: String,
    pub(super) tensors: &'a ComponentTensors,
}

impl ResidentDecoder<'_> {
    /// A decoder of the first `depth` layers, at least 1, with the tensors of this component.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for another number of layers, [`StageError::Missing`] for a tensor that is missing or
    /// of another shape.
    pub(super) fn new<'a>(
        decoder: Decoder,
        depth: usize,
        component: &str,
        tensors: &'a ComponentTensors,
    ) -> Result<ResidentDecoder<'a>, StageError> {
        if depth == 0 || depth > decoder.layers {
            let problem = format!(
                "the text encoder has {} layers, and {depth} are asked for",
                decoder.layers
            );
            return Err(StageError::BadInput(problem));
        }
        for (name, shape) in decoder.tensor_shapes(depth, &|name| tensors.contains(name)) {
            // A token embedding may be stored in blocks, of which the rows of tokens are dequantized.
            let found = match role(&name) == QuantizeRole::Quantized || is_embedding(&name) {
                true => tensors.shaped_weight(&name, &shape).map(|_| ()),
                false => tensors.shaped(&name, &shape).map(|_| ()),
            };
            found.map_err(StageError::missing_in(component))?;
        }
        Ok(ResidentDecoder {
            decoder,
            depth,
            component: component.to_owned(),
            tensors,
        })
    }

    /// Name of the component.
    pub(super) fn component(&self) -> &str {
        &self.component
    }

    /// The error for a tensor that the component lacks.
    pub(super) fn missing(&self, missing: MissingTensor) -> StageError {
        StageError::Missing {
            component: self.component.clone(),
            missing,
        }
    }

    /// Whether any weight of the decoder is quantized.
    pub(super) fn is_quantized(&self) -> bool {
        let is_quantized = |name: &str| matches!(self.tensors.weight(name), Ok(Weight::Quantized(_)));
        self.tensors.names().any(is_quantized)
    }

    /// Encodes tokens by `work`, and checks them and the result.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, or too
    /// many.
    pub(super) fn checked(
        &self,
        ids: &[u32],
        cancelled: &dyn Fn() -> bool,
        work: impl FnOnce() -> Result<Tensor, StageError>,
    ) -> Result<Tensor, StageError> {
        check_ids(ids, self.decoder.vocab_size, MAX_TOKENS)?;
        if cancelled() {
            return Err(StageError::Cancelled);
        }
        let encoded = work()?;
        check_finite(&encoded, &self.component)?;
        Ok(encoded)
    }

    /// The sum of the layers, `[tokens, hidden_size]` in the dtype of the weights. `cancelled` is called before every
    /// layer.
    ///
    /// # Errors
    /// Errors of the device, [`StageError::Cancelled`], [`StageError::Missing`].
    pub(super) fn encode(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Tensor, StageError> {
        let all = Taken {
            attended: ids.len(),
            after: &[self.depth],
            is_normed: false,
        };
        self.states(&Tokens::of_text(ids), &all, cancelled)
    }

    /// The sums of the layers up to those that are taken, side by side: `[tokens, count * hidden_size]` in the dtype of the
    /// weights.
    ///
    /// # Errors
    /// Errors of [`ResidentDecoder::encode`].
    pub(super) fn states(
        &self,
        tokens: &Tokens<'_>,
        taken: &Taken<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Tensor, StageError> {
        let (decoder, count) = (&self.decoder, tokens.ids.len());
        let has = |name: &str| self.tensors.contains(name);
        let read = || -> Result<(Weight, Vec<Layer>, Option<Tensor>), MissingTensor> {
            let prefix = prefix_of(&has);
            let table = self.tensors.weight(&format!("{prefix}embed_tokens.weight"))?;
            let tensors = AdaptedTensors::from(self.tensors);
            let layers =
                (0..self.depth).map(|i| Layer::new(&tensors, &format!("{prefix}layers.{i}"), decoder));
            let of_end = || self.tensors.shaped(&last_norm(&has), &[decoder.hidden_size]);
            let end = taken.is_normed.then(of_end).transpose()?;
            Ok((table, layers.collect::<Result<_, _>>()?, end))
        };
        let (table, layers, end) = read().map_err(StageError::missing_in(&self.component))?;
        let Some(first) = layers.first() else {
            return Err(StageError::BadInput("a decoder without layers".to_owned()));
        };
        let (device, dtype) = (first.norm1.device(), first.norm1.dtype());
        let linears = layers.iter().flat_map(Layer::linears);
        let scratch = Scratch::new(largest_scratch(linears, count, dtype), device)?;
        let positions = Positions::of(tokens.positions, count)?;
        let buffers = Buffers::new(decoder, (&positions, taken.attended), dtype, scratch, device)?;
        let sum = buffers.sum.squeeze(0)?;
        embed_tokens(&table, tokens.ids, &sum)?;
        for (first, rows) in tokens.inserted {
            ops::copy_rows(
                &gpu::to_device(rows, device)?,
                &sum.narrow(0, *first, rows.dim(0)?)?,
            )?;
        }
        let norm = Norm::Rms {
            weight: Some(&first.norm1),
            eps: decoder.rms_norm_eps,
        };
        norm_modulate(&buffers.sum, norm, None, &buffers.normed)?;
        let next = layers.iter().skip(1).map(|layer| Some(&layer.norm1));
        let stream = self.tensors.stream();
        let width = decoder.hidden_size;
        let encoded = Tensor::zeros((count, taken.after.len() * width), dtype, device)?;
        for (number, (layer, next)) in layers.iter().zip(next.chain([end.as_ref()])).enumerate() {
            if cancelled() {
                return Err(StageError::Cancelled);
            }
            stream.enter(BlockPlace::each_pass(number))?;
            layer.forward(&buffers, next)?;
            if let Some(place) = taken.after.iter().position(|after| *after == number + 1) {
                let is_end = number + 1 == self.depth;
                let states = match taken.is_normed && is_end {
                    true => buffers.normed.squeeze(0)?,
                    false => buffers.sum.squeeze(0)?,
                };
                ops::copy_rows(&states, &encoded.narrow(1, place * width, width)?)?;
            }
        }
        Ok(encoded)
    }
}
