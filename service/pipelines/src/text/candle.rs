//! Encoders of candle-transformers over resident tensors: they look tensors up by name and get handles, so nothing is
//! copied and residency is unaffected.
//!
//! Its `models::qwen3::Model` ends with the last norm, but the states before it are needed;
//! `models::z_image::ZImageTextEncoder` is the same decoder and returns those. Full-precision weights only.

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Activation, Init, VarBuilder};
use candle_transformers::models::z_image::{TextEncoderConfig, ZImageTextEncoder};
use gpu::ComponentTensors;
use ops::allocated;
use residency::Bytes;

use super::qwen3::{Qwen3Config, prefix_of};

/// Prefix of all names that the encoder looks up.
const PREFIX: &str = "model.";

/// The tensors of a component as a tensor source of candle-transformers.
struct Resident<'a> {
    tensors: &'a ComponentTensors,
    /// Prefix of names in the component.
    prefix: &'static str,
    /// The layer that is looked up and never run, and the one whose tensors are substituted.
    unused: (String, String),
}

impl Resident<'_> {
    fn name(&self, asked: &str) -> String {
        let name = asked.strip_prefix(PREFIX).unwrap_or(asked);
        let (unused, instead) = &self.unused;
        match name.strip_prefix(unused.as_str()) {
            Some(part) => format!("{}{instead}{part}", self.prefix),
            None => format!("{}{name}", self.prefix),
        }
    }
}

impl SimpleBackend for Resident<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            candle_core::bail!(
                "tensor {name} is {:?} where {shape:?} is expected",
                tensor.shape()
            );
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let tensor = self
            .tensors
            .get(&self.name(name))
            .map_err(candle_core::Error::wrap)?;
        // Another dtype or device would mean a copy.
        if tensor.dtype() != dtype || !tensor.device().same_device(device) {
            candle_core::bail!(
                "tensor {name} is {:?} where {dtype:?} is expected",
                tensor.dtype()
            );
        }
        Ok(tensor)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains(&self.name(name))
    }
}

/// The sum of the first `depth` layers over these tokens, `[tokens, hidden_size]` in the dtype of the weights.
///
/// # Errors
/// Errors of the device.
pub(super) fn encode(
    config: &Qwen3Config,
    depth: usize,
    tensors: &ComponentTensors,
    ids: &[u32],
) -> candle_core::Result<Tensor> {
    let prefix = prefix_of(&|name| tensors.contains(name));
    let table = tensors.get(&format!("{prefix}embed_tokens.weight"));
    let table = table.map_err(candle_core::Error::wrap)?;
    let (device, dtype) = (table.device(), table.dtype());
    let resident = Resident {
        tensors,
        prefix,
        unused: (format!("layers.{depth}."), format!("layers.{}.", depth - 1)),
    };
    let vars = VarBuilder::from_backend(Box::new(resident), dtype, device.clone());
    let encoder = ZImageTextEncoder::new(&config_of(config, depth, ids.len()), vars)?;
    encoder
        .forward(&Tensor::new(ids, device)?.unsqueeze(0)?)?
        .squeeze(0)
}

/// The encoder stops one layer before the configured last.
fn config_of(config: &Qwen3Config, depth: usize, tokens: usize) -> TextEncoderConfig {
    TextEncoderConfig {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        num_hidden_layers: depth + 1,
        num_attention_heads: config.num_attention_heads,
        num_key_value_heads: config.num_key_value_heads,
        head_dim: config.head_dim,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.theta(),
        attention_bias: false,
        hidden_act: Activation::Silu,
        // Size of the table of rotations.
        max_position_embeddings: tokens,
    }
}

/// Bytes of packing buffers that a thread has for matrix products on a CPU: 2.1 MB were measured on 16 cores.
const PACKING_BYTES: u64 = 5 << 19;

/// Bytes of those of all threads. Where half precision is computed in, products are a card's.
fn packing_bytes(dtype: DType) -> u64 {
    match dtype {
        DType::F32 => PACKING_BYTES * candle_core::utils::get_num_threads() as u64,
        _ => 0,
    }
}

/// Predicted peak of activations. Every operation allocates its result: the peaks are attention (scores, scaled,
/// masked, beside queries, keys and values of all heads), and the feed-forward (the gate, the gated values, and their
/// product).
pub(super) fn scratch(config: &Qwen3Config, tokens: usize, dtype: DType) -> Bytes {
    let size = dtype.size_in_bytes();
    let (heads, width) = (config.num_attention_heads, config.hidden_size);
    let of_heads = heads * config.head_dim;
    let scores = allocated(heads * tokens * tokens * size);
    let mask = allocated(tokens * tokens * size_of::<f32>()) + allocated(tokens * tokens * size);
    let rotations = 6 * allocated(tokens * config.head_dim / 2 * size_of::<f32>());
    let hidden = allocated(tokens * width * size);
    let attention = 3 * scores + 6 * allocated(tokens * of_heads * size);
    let feed_forward = 3 * allocated(tokens * config.intermediate_size * size);
    Bytes(4 * hidden + mask + rotations + attention.max(feed_forward) + packing_bytes(dtype))
}
