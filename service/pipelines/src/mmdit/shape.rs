//! The sizes of a stack of blocks, and the memory that follows from them.

use candle_core::DType;
use gpu::BlockPlace;
use model::{ComponentSet, Flops};
use ops::Planned;

use super::buffers::Buffers;
use crate::attention::AttentionPrecision;
use crate::checkpoint::{QuantizeRole, numbered};
use crate::sampling::flops_of_attention;

/// How blocks are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Design {
    /// FLUX.1 and HunyuanVideo: each block has modulators, layers have biases, and the feed-forward is a GELU of four times
    /// the width.
    Flux1,
    /// FLUX.2: blocks of a kind share their modulators, layers have no biases, the feed-forward is gated (SwiGLU) and three
    /// times as wide, and one layer of a single block makes queries, keys, values and the inside of the feed-forward.
    Flux2,
    /// Qwen-Image: the double blocks of FLUX.1 under other names, and no single blocks.
    QwenImage,
}

impl Design {
    /// Whether layers have biases.
    pub(super) fn has_biases(self) -> bool {
        match self {
            Design::Flux1 | Design::QwenImage => true,
            Design::Flux2 => false,
        }
    }

    /// Hidden widths of the inside of a feed-forward.
    fn inner(self) -> usize {
        match self {
            Design::Flux1 | Design::QwenImage => 4,
            Design::Flux2 => 3,
        }
    }

    /// Hidden widths in front of a gate, after queries, keys and values: the gate and what is gated.
    pub(super) fn gated(self) -> usize {
        match self {
            Design::Flux1 | Design::QwenImage => 0,
            Design::Flux2 => 2 * self.inner(),
        }
    }

    /// Hidden widths of a row of attention output and the inside of the feed-forward.
    pub(super) fn wide(self) -> usize {
        1 + self.inner()
    }

    /// Names of the layers of a feed-forward in diffusers.
    pub(super) fn feed_forward(self) -> [&'static str; 2] {
        match self {
            Design::Flux1 | Design::QwenImage => ["net.0.proj", "net.2"],
            Design::Flux2 => ["linear_in", "linear_out"],
        }
    }
}

/// Sizes of a stack of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlocksShape {
    pub(crate) design: Design,
    pub(crate) heads: usize,
    /// Width of a head.
    pub(crate) head: usize,
    /// Number of double-stream blocks.
    pub(crate) double: usize,
    /// Number of single-stream blocks.
    pub(crate) single: usize,
    /// Whether the last layer of a single block is two, over the attention and over the feed-forward, whose results are added.
    pub(crate) splits_last_layers: bool,
}

impl BlocksShape {
    /// Width of the hidden states.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.head
    }

    /// Width inside the feed-forward layers.
    pub(crate) fn feed_forward_width(&self) -> usize {
        self.design.inner() * self.width()
    }

    /// Width of the output of a feed-forward's first layer: with a gate, twice that inside.
    pub(super) fn raised_width(&self) -> usize {
        match self.design {
            Design::Flux1 | Design::QwenImage => self.feed_forward_width(),
            Design::Flux2 => 2 * self.feed_forward_width(),
        }
    }

    /// Bytes of the buffers of a step over `tokens` tokens of a batch, and of their rotations.
    pub(crate) fn buffers_bytes(&self, tokens: usize, dtype: DType) -> u64 {
        Buffers::bytes(self, tokens, dtype.size_in_bytes()) + self.rotations_bytes(tokens)
    }

    /// Bytes of the rotations of `tokens` tokens.
    pub(crate) fn rotations_bytes(&self, tokens: usize) -> u64 {
        (tokens * self.head * size_of::<f32>()) as u64
    }

    /// Bytes of the modulations of all blocks and of a last layer, of `steps` steps.
    pub(crate) fn modulations_bytes(&self, steps: u32, dtype: DType) -> u64 {
        let vectors = match self.design {
            Design::Flux1 | Design::QwenImage => self.double * 12 + self.single * 3 + 2,
            Design::Flux2 => 12 + 3 + 2,
        };
        (vectors * self.width() * dtype.size_in_bytes()) as u64 * u64::from(steps)
    }

    /// Shapes of the attention over all tokens of one item, as a request asks for it, of which `needed` are needed after the blocks.
    pub(crate) fn planned(
        &self,
        tokens: usize,
        needed: usize,
        as_asked: (DType, AttentionPrecision),
    ) -> Vec<Planned> {
        self.planned_in((tokens, 0), (tokens, needed, 0), as_asked)
    }

    /// The same in buffers of `rows` rows, which are those of a longer text, with space for `others` tokens of another card: the
    /// attention is to `attended` of those too.
    pub(crate) fn planned_in(
        &self,
        (rows, others): (usize, usize),
        (tokens, needed, attended): (usize, usize, usize),
        as_asked: (DType, AttentionPrecision),
    ) -> Vec<Planned> {
        Buffers::planned(self, (tokens, needed, attended), (rows, others), as_asked)
    }

    /// Bytes that `others` tokens of another card take in the buffers of a step, and the most that is exchanged for them at a time.
    pub(crate) fn bytes_of_others(&self, others: usize, dtype: DType) -> [u64; 2] {
        let number = dtype.size_in_bytes();
        [
            Buffers::bytes_of_others(self, others, number),
            Buffers::exchanged_bytes(self, others, number),
        ]
    }
}

/// The quantization role of a tensor of a transformer with such blocks: the linear layers of blocks and the last modulation are
/// quantized. Norms and biases stay in full precision, and other weights as they are stored.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    if layer
        .rsplit('.')
        .next()
        .is_some_and(|last| last.starts_with("norm"))
    {
        return QuantizeRole::Full;
    }
    let of_block = ["transformer_blocks.", "single_transformer_blocks."];
    match of_block.iter().any(|prefix| layer.starts_with(prefix)) || layer == "norm_out.linear" {
        true => QuantizeRole::Quantized,
        false => QuantizeRole::AsStored,
    }
}

/// The block of a tensor: its place among all blocks, in the pass over modulators or in that of a step.
pub(crate) fn block_of(shape: &BlocksShape, name: &str) -> Option<BlockPlace> {
    let double = numbered(name, "transformer_blocks.").map(|(number, _)| number);
    let single = || numbered(name, "single_transformer_blocks.").map(|(number, _)| shape.double + number);
    let number = double.or_else(single)?;
    Some(match is_modulator(name) {
        true => BlockPlace::once(number),
        false => BlockPlace::each_pass(number),
    })
}

/// How many rows the layer of a weight has in a pass over the blocks, with so many tokens of text and others.
pub(crate) fn rows_of((text, others): (usize, usize)) -> impl Fn(&str) -> usize {
    let is_of_text = |weight: &str| {
        [".add_", ".to_add_out", "_context.", ".txt_mlp."]
            .iter()
            .any(|part| weight.contains(part))
    };
    move |weight: &str| match weight.starts_with("transformer_blocks.") {
        _ if is_modulator(weight) => 1,
        true if is_of_text(weight) => text,
        true => others,
        false => text + others,
    }
}

/// Floating-point operations of a pass over the blocks of a component, with so many tokens of text and others.
pub(crate) fn flops_of_pass(
    shape: &BlocksShape,
    components: &ComponentSet,
    name: &str,
    (text, others): (usize, usize),
) -> Flops {
    components.flops_of_products(name, rows_of((text, others)))
        + flops_of_attention(shape.double + shape.single, text + others, shape.width())
}

/// Whether a tensor is the weight of a modulator, which steps do not use.
pub(crate) fn is_modulator(name: &str) -> bool {
    let prefixes = [
        "transformer_blocks.",
        "single_transformer_blocks.",
        "norm_out.",
        "double_stream_modulation_",
        "single_stream_modulation.",
    ];
    let endings = [".linear.weight", ".img_mod.1.weight", ".txt_mod.1.weight"];
    prefixes.iter().any(|prefix| name.starts_with(prefix))
        && endings.iter().any(|ending| name.ends_with(ending))
}
