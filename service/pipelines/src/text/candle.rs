//! Qwen3 by candle-transformers, over resident tensors.
//!
//! Its `models::qwen3::Model` ends with the last norm, but the states before it are needed;
//! `models::z_image::ZImageTextEncoder` is the same decoder and returns those. Full-precision weights only.

use candle_core::{DType, Tensor};
use candle_nn::Activation;
use candle_transformers::models::z_image::{TextEncoderConfig, ZImageTextEncoder};
use gpu::ComponentTensors;
use ops::allocated;
use residency::Bytes;

use super::decoder::{Decoder, prefix_of};
use crate::resident;

/// Prefix of all names that the encoder looks up.
const PREFIX: &str = "model.";

/// The sum of the first `depth` layers over these tokens, `[tokens, hidden_size]` in the dtype of the weights.
///
/// # Errors
/// Errors of the device.
pub(super) fn encode(
    decoder: &Decoder,
    depth: usize,
    tensors: &ComponentTensors,
    ids: &[u32],
) -> candle_core::Result<Tensor> {
    let prefix = prefix_of(&|name| tensors.contains(name));
    let table = tensors.get(&format!("{prefix}embed_tokens.weight"));
    let table = table.map_err(candle_core::Error::wrap)?;
    let (device, dtype) = (table.device(), table.dtype());
    // The last layer is looked up and never run, so the tensors of the layer before it are returned.
    let (unused, instead) = (format!("layers.{depth}."), format!("layers.{}.", depth - 1));
    let name_of = move |asked: &str| {
        let name = asked.strip_prefix(PREFIX).unwrap_or(asked);
        match name.strip_prefix(unused.as_str()) {
            Some(part) => format!("{prefix}{instead}{part}"),
            None => format!("{prefix}{name}"),
        }
    };
    let vars = resident::vars(tensors, dtype, device, name_of);
    let encoder = ZImageTextEncoder::new(&config_of(decoder, depth, ids.len()), vars)?;
    encoder
        .forward(&Tensor::new(ids, device)?.unsqueeze(0)?)?
        .squeeze(0)
}

/// The encoder stops one layer before the configured last.
fn config_of(decoder: &Decoder, depth: usize, tokens: usize) -> TextEncoderConfig {
    TextEncoderConfig {
        vocab_size: decoder.vocab_size,
        hidden_size: decoder.hidden_size,
        intermediate_size: decoder.intermediate_size,
        num_hidden_layers: depth + 1,
        num_attention_heads: decoder.heads,
        num_key_value_heads: decoder.heads_kv,
        head_dim: decoder.head_dim,
        rms_norm_eps: decoder.rms_norm_eps,
        rope_theta: decoder.theta,
        attention_bias: false,
        hidden_act: Activation::Silu,
        // Size of the table of rotations.
        max_position_embeddings: tokens,
    }
}

/// Predicted peak of activations. Every operation allocates its result: the peaks are attention (scores, scaled,
/// masked, with queries, keys and values of all heads), and the feed-forward (the gate, the gated values, and their
/// product).
pub(super) fn scratch(decoder: &Decoder, tokens: usize, dtype: DType) -> Bytes {
    let size = dtype.size_in_bytes();
    let (heads, width) = (decoder.heads, decoder.hidden_size);
    let of_heads = heads * decoder.head_dim;
    let scores = allocated(heads * tokens * tokens * size);
    let mask = allocated(tokens * tokens * size_of::<f32>()) + allocated(tokens * tokens * size);
    let rotations = 6 * allocated(tokens * decoder.head_dim / 2 * size_of::<f32>());
    let hidden = allocated(tokens * width * size);
    let attention = 3 * scores + 6 * allocated(tokens * of_heads * size);
    let feed_forward = 3 * allocated(tokens * decoder.intermediate_size * size);
    Bytes(4 * hidden + mask + rotations + attention.max(feed_forward) + resident::packing_bytes(dtype))
}
