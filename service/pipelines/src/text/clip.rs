//! CLIP's text encoder: transformers' `CLIPTextModel`, of which FLUX uses the pooled output, and `CLIPTextModelWithProjection`. SDXL
//! uses the states before the last layer of both.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use gpu::{ComponentTensors, MissingTensor};
use model::StageError;
use ops::{
    AttentionShape, Epilogue, Mask, MaskShape, Nonlinearity, Planned, Scratch, add_residual, allocated,
    attention, linears_into, norm_modulate, residual_norm_modulate,
};
use residency::Bytes;
use serde::Deserialize;

use super::encoding::{check_finite, check_ids};
use crate::ModelError;
use crate::adapters::AdaptedTensors;
use crate::checkpoint::QuantizeRole;
use crate::files::{check_sizes, unsupported};
use crate::layer_norm::LayerNorm;
use crate::linear::{Linear, largest_scratch};

/// Prefix of all names in published checkpoints.
const PREFIX: &str = "text_model.";

/// Name of the projection's tensor, `[projection_dim, hidden_size]`.
const PROJECTION: &str = "text_projection.weight";

/// Its name in OpenCLIP, where it is transposed, `[hidden_size, projection_dim]`.
pub(crate) const TRANSPOSED_PROJECTION: &str = "text_projection";

/// The legacy `eos_token_id` of published configurations, which no tokenizer has: the end of the prompt is then the
/// highest id in it.
const LEGACY_END: u32 = 2;

/// The encoder's `config.json`. Missing fields have the defaults of transformers' `CLIPTextConfig`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct ClipConfig {
    /// Vocabulary size.
    pub vocab_size: usize,
    /// Width of a token.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    /// Maximum tokens of a prompt.
    pub max_position_embeddings: usize,
    /// Activation: `quick_gelu`, `gelu`, `gelu_new`.
    pub hidden_act: String,
    /// Epsilon of the layer norms.
    pub layer_norm_eps: f64,
    /// The token at which the output is pooled.
    pub eos_token_id: u32,
    /// Width of the projection of the pooled output, where there is one ([`ClipProjection`]).
    pub projection_dim: usize,
}

impl Default for ClipConfig {
    fn default() -> ClipConfig {
        ClipConfig {
            vocab_size: 49408,
            hidden_size: 512,
            intermediate_size: 2048,
            num_hidden_layers: 12,
            num_attention_heads: 8,
            max_position_embeddings: 77,
            hidden_act: "quick_gelu".to_owned(),
            layer_norm_eps: 1e-5,
            eos_token_id: 49407,
            projection_dim: 512,
        }
    }
}

impl ClipConfig {
    /// Refuses a tokenizer whose prompts are longer than the encoder's positions.
    pub(crate) fn check_length(&self, base: &Path, tokens: usize) -> Result<(), ModelError> {
        let places = self.max_position_embeddings;
        if tokens > places {
            let problem = format!("its CLIP has {places} positions for {tokens} tokens");
            return Err(unsupported(base, problem));
        }
        Ok(())
    }

    /// The configuration of CLIP-L, whose single files have none.
    pub fn clip_l() -> ClipConfig {
        ClipConfig {
            hidden_size: 768,
            intermediate_size: 3072,
            num_attention_heads: 12,
            ..ClipConfig::default()
        }
    }

    /// The configuration of OpenCLIP's bigG, whose single files have none.
    pub fn big_g() -> ClipConfig {
        ClipConfig {
            hidden_size: 1280,
            intermediate_size: 5120,
            num_hidden_layers: 32,
            num_attention_heads: 20,
            hidden_act: "gelu".to_owned(),
            projection_dim: 1280,
            ..ClipConfig::default()
        }
    }

    /// Name and shape of the projection's tensor ([`ClipProjection`]).
    pub fn projection_shape(&self) -> (String, Vec<usize>) {
        (PROJECTION.to_owned(), vec![self.projection_dim, self.hidden_size])
    }

    /// Checks that this encoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let widths = [
            self.projection_dim,
            self.hidden_size,
            self.intermediate_size,
            self.max_position_embeddings,
        ];
        check_sizes(&[
            (&widths, 1 << 16),
            (&[self.num_hidden_layers], 1 << 10),
            (&[self.vocab_size], 1 << 24),
        ])?;
        activation_named(&self.hidden_act).map(|_| ())?;
        if self.num_attention_heads == 0 || !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return Err(format!(
                "a width of {} in {} heads",
                self.hidden_size, self.num_attention_heads
            ));
        }
        Ok(())
    }

    /// Names and shapes of all tensors of this configuration. Names begin with `text_model.` if `has` knows names with this
    /// prefix.
    pub fn tensor_shapes(&self, has: &dyn Fn(&str) -> bool) -> Vec<(String, Vec<usize>)> {
        let (width, inner) = (self.hidden_size, self.intermediate_size);
        // Any of them is sufficient, so that a missing one is reported by its full name.
        let first = "embeddings.token_embedding.weight";
        let prefixed = ["final_layer_norm.weight", "final_layer_norm.bias", first]
            .iter()
            .any(|name| has(&format!("{PREFIX}{name}")));
        let prefix = if prefixed { PREFIX } else { "" };
        let places = "embeddings.position_embedding.weight";
        let mut list = vec![
            (format!("{prefix}{first}"), vec![self.vocab_size, width]),
            (
                format!("{prefix}{places}"),
                vec![self.max_position_embeddings, width],
            ),
        ];
        let mut layer = |name: String, shape: &[usize]| {
            list.push((format!("{prefix}{name}.weight"), shape.to_vec()));
            list.push((format!("{prefix}{name}.bias"), shape[..1].to_vec()));
        };
        for i in 0..self.num_hidden_layers {
            let block = format!("encoder.layers.{i}");
            layer(format!("{block}.layer_norm1"), &[width]);
            for part in ["q_proj", "k_proj", "v_proj", "out_proj"] {
                layer(format!("{block}.self_attn.{part}"), &[width, width]);
            }
            layer(format!("{block}.layer_norm2"), &[width]);
            layer(format!("{block}.mlp.fc1"), &[inner, width]);
            layer(format!("{block}.mlp.fc2"), &[width, inner]);
        }
        layer("final_layer_norm".to_owned(), &[width]);
        list
    }

    /// Predicted peak of activations of encoding a prompt of `tokens`: the buffers, and the workspace of attention
    /// where cuDNN has no plan.
    pub fn scratch(&self, tokens: usize, dtype: DType) -> Bytes {
        let widths = [
            self.hidden_size,
            self.hidden_size,
            self.hidden_size,
            self.shared_width(),
        ];
        let size = dtype.size_in_bytes();
        let buffers: u64 = widths.iter().map(|width| allocated(tokens * width * size)).sum();
        let attention = ops::attention_workspace(self.num_attention_heads, tokens, tokens);
        let packing = crate::resident::packing_bytes(dtype);
        Bytes(buffers + allocated(tokens * size_of::<u32>()) + allocated(attention) + packing)
    }

    /// Shape of each layer's attention: queries, keys and values are concatenated in rows of one buffer.
    pub fn planned(&self, tokens: usize, dtype: DType) -> Planned {
        let (width, heads) = (self.hidden_size, self.num_attention_heads);
        let by_head = (heads, width / heads.max(1));
        let rows = (3 * width, width);
        Planned::Attention(AttentionShape::of_rows(
            tokens,
            by_head,
            rows,
            dtype,
            MaskShape::Causal,
        ))
    }

    /// Elements per token of the buffer shared by both halves of a layer: queries, keys and values, then the
    /// feed-forward.
    fn shared_width(&self) -> usize {
        (3 * self.hidden_size).max(self.intermediate_size)
    }
}

/// The activation of this name.
fn activation_named(name: &str) -> Result<Nonlinearity, String> {
    match name {
        "quick_gelu" => Ok(Nonlinearity::QuickGelu),
        "gelu" => Ok(Nonlinearity::Gelu),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Nonlinearity::GeluTanh),
        other => Err(format!(
            "the activation {other:?}; quick_gelu, gelu and gelu_new are known"
        )),
    }
}

/// `CLIPEncoderLayer`: norms before attention and feed-forward.
#[derive(Clone, Debug)]
struct ClipLayer {
    norm1: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    out: Linear,
    norm2: LayerNorm,
    widen: Linear,
    narrow: Linear,
}

impl ClipLayer {
    fn new(
        tensors: &AdaptedTensors<'_>,
        name: &str,
        config: &ClipConfig,
    ) -> Result<ClipLayer, MissingTensor> {
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let square = |part: &str| Linear::new(tensors, &format!("{name}.self_attn.{part}"), width, width);
        Ok(ClipLayer {
            norm1: LayerNorm::new(
                tensors,
                &format!("{name}.layer_norm1"),
                config.hidden_size,
                config.layer_norm_eps,
            )?,
            query: square("q_proj")?,
            key: square("k_proj")?,
            value: square("v_proj")?,
            out: square("out_proj")?,
            norm2: LayerNorm::new(
                tensors,
                &format!("{name}.layer_norm2"),
                config.hidden_size,
                config.layer_norm_eps,
            )?,
            widen: Linear::new(tensors, &format!("{name}.mlp.fc1"), width, inner)?,
            narrow: Linear::new(tensors, &format!("{name}.mlp.fc2"), inner, width)?,
        })
    }

    /// The linear layers of the block.
    fn linears(&self) -> [&Linear; 6] {
        [
            &self.query,
            &self.key,
            &self.value,
            &self.out,
            &self.widen,
            &self.narrow,
        ]
    }

    /// Adds the layer to the residual stream, whose normalized rows are ready; `next` is the norm that follows.
    fn forward(
        &self,
        buffers: &ClipBuffers,
        heads: usize,
        activation: Nonlinearity,
        next: &LayerNorm,
    ) -> candle_core::Result<()> {
        let ClipBuffers {
            sum,
            normed,
            queries_keys_values,
            attended,
            widened,
            scratch,
        } = buffers;
        let (tokens, width) = sum.dims2()?;
        let head = width / heads;
        let [query, key, value] = [0, 1, 2].map(|i| queries_keys_values.narrow(1, i * width, width));
        let (query, key, value) = (query?, key?, value?);
        let layers = [self.query.to(&query)?, self.key.to(&key)?, self.value.to(&value)?];
        linears_into(normed, &layers, Epilogue::None, scratch)?;
        let by_head = queries_keys_values.reshape((1, tokens, 3 * heads, head))?;
        let [query, key, value] = [0, 1, 2].map(|i| by_head.narrow(2, i * heads, heads));
        let scale = 1.0 / (head as f64).sqrt();
        let seen = attended.reshape((1, tokens, heads, head))?;
        attention(&query?, &key?, &value?, scale, Mask::Causal, &seen)?;
        self.out.forward_into(attended, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, self.norm2.as_norm(), None, normed)?;
        match activation {
            Nonlinearity::GeluTanh => {
                self.widen
                    .forward_into(normed, Epilogue::GeluTanh, widened, scratch)?;
            }
            other => {
                self.widen
                    .forward_into(normed, Epilogue::None, widened, scratch)?;
                ops::activate(widened, other)?;
            }
        }
        self.narrow
            .forward_into(widened, Epilogue::None, normed, scratch)?;
        residual_norm_modulate(sum, normed, None, next.as_norm(), None, normed)
    }
}

/// Buffers of a pass, reused by every layer. The first and the last intermediate results share memory.
struct ClipBuffers {
    /// `[tokens, width]`: the residual stream.
    sum: Tensor,
    /// `[tokens, width]`: the normalized input of the next layers, or their output before it is added.
    normed: Tensor,
    /// `[tokens, 3 * width]`.
    queries_keys_values: Tensor,
    /// `[tokens, width]`.
    attended: Tensor,
    /// `[tokens, intermediate_size]`, in the memory of `queries_keys_values`.
    widened: Tensor,
    scratch: Scratch,
}

impl ClipBuffers {
    fn new(
        config: &ClipConfig,
        tokens: usize,
        dtype: DType,
        scratch: Scratch,
        device: &Device,
    ) -> candle_core::Result<ClipBuffers> {
        let width = config.hidden_size;
        let buffer = || Tensor::zeros((tokens, width), dtype, device);
        let shared = Tensor::zeros(tokens * config.shared_width(), dtype, device)?;
        let of_width = |width: usize| shared.narrow(0, 0, tokens * width)?.reshape((tokens, width));
        Ok(ClipBuffers {
            sum: buffer()?,
            normed: buffer()?,
            queries_keys_values: of_width(3 * width)?,
            attended: buffer()?,
            widened: of_width(config.intermediate_size)?,
            scratch,
        })
    }
}

/// The encoder's output.
#[derive(Clone, Debug)]
pub struct ClipOutput {
    /// `[1, tokens, width]`, after the last norm: `last_hidden_state`.
    pub last_hidden: Tensor,
    /// `[1, width]`, at the end of the prompt: `pooler_output`.
    pub pooled: Tensor,
}

/// Attention and feed-forward may be quantized.
pub(crate) fn role(name: &str) -> QuantizeRole {
    match name.strip_suffix(".weight") {
        Some(layer) if layer.contains(".self_attn.") || layer.contains(".mlp.") => QuantizeRole::Quantized,
        _ => QuantizeRole::Full,
    }
}

/// CLIP's text encoder over resident tensors.
#[derive(Clone, Debug)]
pub struct ClipEncoder {
    tokens: Tensor,
    positions: Tensor,
    layers: Vec<ClipLayer>,
    norm: LayerNorm,
    activation: Nonlinearity,
    component: String,
    config: ClipConfig,
}

impl ClipEncoder {
    /// The encoder with the tensors of this component. Names begin with `text_model.` in published checkpoints, and have no
    /// prefix in those saved by transformers 5: both are read.
    ///
    /// # Errors
    /// [`StageError::BadInput`] for an unsupported encoder, [`StageError::Missing`] for a tensor that is missing or
    /// not of the configuration's shape.
    pub fn new(
        config: &ClipConfig,
        component: &str,
        tensors: &ComponentTensors,
    ) -> Result<ClipEncoder, StageError> {
        ClipEncoder::with_adapters(config, component, &AdaptedTensors::from(tensors))
    }

    /// As [`ClipEncoder::new`], with adapters.
    pub(crate) fn with_adapters(
        config: &ClipConfig,
        component: &str,
        tensors: &AdaptedTensors<'_>,
    ) -> Result<ClipEncoder, StageError> {
        let bad = |problem| StageError::BadInput(format!("the CLIP encoder has {problem}"));
        config.check().map_err(bad)?;
        let activation = activation_named(&config.hidden_act).map_err(bad)?;
        let probe = format!("{PREFIX}final_layer_norm.weight");
        let prefix = if tensors.contains(&probe) { PREFIX } else { "" };
        let read = || -> Result<ClipEncoder, MissingTensor> {
            let embedding = |name: &str, rows: usize| {
                let name = format!("{prefix}embeddings.{name}_embedding.weight");
                tensors.shaped(&name, &[rows, config.hidden_size])
            };
            let layers = 0..config.num_hidden_layers;
            let layers =
                layers.map(|i| ClipLayer::new(tensors, &format!("{prefix}encoder.layers.{i}"), config));
            Ok(ClipEncoder {
                tokens: embedding("token", config.vocab_size)?,
                positions: embedding("position", config.max_position_embeddings)?,
                layers: layers.collect::<Result<_, _>>()?,
                norm: LayerNorm::new(
                    tensors,
                    &format!("{prefix}final_layer_norm"),
                    config.hidden_size,
                    config.layer_norm_eps,
                )?,
                activation,
                component: component.to_owned(),
                config: config.clone(),
            })
        };
        read().map_err(StageError::missing_in(component))
    }

    /// Encodes the tokens of one prompt; padding is attended to. `cancelled` is called before every layer.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::NotFinite`]; [`StageError::BadInput`] for ids out of range, or too
    /// many.
    pub fn forward(&self, ids: &[u32], cancelled: &dyn Fn() -> bool) -> Result<ClipOutput, StageError> {
        self.run(ids, None, cancelled)
    }

    /// As [`ClipEncoder::forward`]. The states before the last layer, `hidden_states[-2]`, are written to `out` `[tokens, width]`,
    /// which may be a part of wider rows.
    ///
    /// # Errors
    /// As [`ClipEncoder::forward`].
    pub fn forward_with_states(
        &self,
        ids: &[u32],
        out: &Tensor,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<ClipOutput, StageError> {
        self.run(ids, Some(out), cancelled)
    }

    fn run(
        &self,
        ids: &[u32],
        before_last: Option<&Tensor>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<ClipOutput, StageError> {
        check_ids(ids, self.config.vocab_size, self.config.max_position_embeddings)?;
        let (device, dtype) = (self.tokens.device(), self.tokens.dtype());
        let linears = self.layers.iter().flat_map(ClipLayer::linears);
        let scratch = Scratch::new(largest_scratch(linears, ids.len(), dtype), device)?;
        let buffers = ClipBuffers::new(&self.config, ids.len(), dtype, scratch, device)?;
        ops::embed(&self.tokens, &Tensor::new(ids, device)?, &buffers.sum)?;
        add_residual(&buffers.sum, &self.positions.narrow(0, 0, ids.len())?, None)?;
        let first = self.layers.first().map_or(&self.norm, |layer| &layer.norm1);
        norm_modulate(&buffers.sum, first.as_norm(), None, &buffers.normed)?;
        let next = self.layers.iter().skip(1).map(|layer| &layer.norm1);
        for (number, (layer, next)) in self.layers.iter().zip(next.chain([&self.norm])).enumerate() {
            if cancelled() {
                return Err(StageError::Cancelled);
            }
            if let Some(out) = before_last.filter(|_| number + 1 == self.layers.len()) {
                ops::copy_rows(&buffers.sum, out)?;
            }
            layer.forward(&buffers, self.config.num_attention_heads, self.activation, next)?;
        }
        let last_hidden = buffers.normed.unsqueeze(0)?;
        check_finite(&last_hidden, &self.component)?;
        let pooled = buffers.normed.narrow(0, self.end_of(ids), 1)?;
        Ok(ClipOutput { last_hidden, pooled })
    }

    /// Index of the first end token: the first `eos_token_id`, or the first highest id under the legacy
    /// configuration. 0 if there is none, as in transformers.
    fn end_of(&self, ids: &[u32]) -> usize {
        let end = match self.config.eos_token_id {
            LEGACY_END => ids.iter().copied().max().unwrap_or(0),
            id => id,
        };
        ids.iter().position(|id| *id == end).unwrap_or(0)
    }
}

/// The projection of the pooled output of `CLIPTextModelWithProjection`.
#[derive(Clone, Debug)]
pub struct ClipProjection {
    /// `[projection_dim, hidden_size]`, without a bias.
    linear: Linear,
}

impl ClipProjection {
    /// The projection of a component: diffusers' `text_projection.weight`, or OpenCLIP's transposed one.
    ///
    /// # Errors
    /// [`StageError::Missing`] when it is missing or of another shape.
    pub fn new(
        config: &ClipConfig,
        component: &str,
        tensors: &ComponentTensors,
    ) -> Result<ClipProjection, StageError> {
        let (from, to) = (config.hidden_size, config.projection_dim);
        let shaped = |name: &str, shape: [usize; 2]| {
            let tensor = tensors.shaped(name, &shape);
            tensor.map_err(StageError::missing_in(component))
        };
        let weight = match tensors.contains(TRANSPOSED_PROJECTION) {
            // In host memory, where no kernel has to be loaded for it.
            true => {
                let transposed = shaped(TRANSPOSED_PROJECTION, [from, to])?;
                let weight = transposed.to_device(&Device::Cpu)?.t()?.contiguous()?;
                weight.to_device(transposed.device())?
            }
            false => shaped(PROJECTION, [to, from])?,
        };
        Ok(ClipProjection {
            linear: Linear::of(weight, None),
        })
    }

    /// `text_embeds` of a pooled output `[1, hidden_size]`: `[1, projection_dim]`.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn forward(&self, pooled: &Tensor) -> candle_core::Result<Tensor> {
        self.linear.forward(pooled)
    }
}
