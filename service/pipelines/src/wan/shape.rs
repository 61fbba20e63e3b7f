//! The sizes of Wan's blocks, and the memory and the work that follow from them.

use candle_core::DType;
use gpu::BlockPlace;
use ops::{AttentionShape, MaskShape, Planned};

use crate::attention::AttentionPrecision;
use crate::checkpoint::{QuantizeRole, numbered};

/// Sizes of a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BlockShape {
    pub(crate) heads: usize,
    /// Width of a head.
    pub(crate) head: usize,
    /// Width inside the feed-forward layers.
    pub(crate) inner: usize,
    /// Epsilon of all norms.
    pub(crate) eps: f64,
}

impl BlockShape {
    /// Width of the hidden states.
    pub(crate) fn width(&self) -> usize {
        self.heads * self.head
    }

    /// Widths of the rotary axes in a head: frames, rows, columns.
    pub(crate) fn axes(&self) -> [usize; 3] {
        let side = 2 * (self.head / 6);
        [self.head - 2 * side, side, side]
    }

    /// Numbers of a row of the buffer that holds queries, keys and values, then the inside of the feed-forward; whole heads.
    pub(crate) fn wide(&self) -> usize {
        (3 * self.width()).max(self.inner).next_multiple_of(self.head)
    }

    /// Bytes of the buffers of a pass over `rows` rows.
    pub(crate) fn buffers_bytes(&self, rows: usize, dtype: DType) -> u64 {
        ((2 * self.width() + self.wide()) * rows * dtype.size_in_bytes()) as u64
    }

    /// Bytes of the rotations of `tokens` tokens.
    pub(crate) fn rotations_bytes(&self, tokens: usize) -> u64 {
        (tokens * self.head * size_of::<f32>()) as u64
    }

    /// Bytes of the keys and values of a text of `tokens` tokens in so many blocks.
    pub(crate) fn texts_bytes(&self, blocks: usize, tokens: usize, dtype: DType) -> u64 {
        (2 * blocks * tokens * self.width() * dtype.size_in_bytes()) as u64
    }

    /// Shapes of attention over the tokens of `batch` items, and over those of their texts.
    pub(crate) fn planned(
        &self,
        batch: usize,
        tokens: usize,
        text: usize,
        (dtype, attention): (DType, AttentionPrecision),
    ) -> Vec<Planned> {
        let (row, width) = (self.wide(), self.width());
        let by_head = (self.heads, self.head);
        let own = AttentionShape::of_rows(tokens, by_head, (row, width), dtype, MaskShape::None);
        let own = AttentionShape { batch, ..own };
        let keys = [text * width, width, self.head];
        let cross = AttentionShape {
            keys: text,
            q: own.out,
            k: keys,
            v: keys,
            out: own.q,
            ..own.clone()
        };
        vec![
            attention.planned(Planned::Attention(own)),
            Planned::Attention(cross),
        ]
    }

    /// Floating-point operations of attention in a block, over `tokens` tokens and over those of a text.
    pub(crate) fn flops_of_attention(&self, tokens: usize, text: usize) -> u64 {
        4 * tokens as u64 * (tokens + text) as u64 * self.width() as u64
    }
}

/// The layers of a block over the text: their results are the same in all steps.
const OF_TEXT: [&str; 3] = ["attn2.to_k.", "attn2.to_v.", "attn2.norm_k."];

/// Whether a tensor is of a layer over the text, which steps do not use.
pub(crate) fn is_of_text(name: &str) -> bool {
    OF_TEXT.iter().any(|layer| name.contains(layer))
}

/// The block of a tensor. Tables of modulations are small, and are read before the blocks.
pub(crate) fn block_of(name: &str) -> Option<BlockPlace> {
    let (number, rest) = numbered(name, "blocks.")?;
    match rest {
        "scale_shift_table" => None,
        _ if is_of_text(name) => Some(BlockPlace::once(number)),
        _ => Some(BlockPlace::each_pass(number)),
    }
}

/// The quantization role of a tensor: the linear layers of blocks are quantized, which have nearly all numbers. Norms, tables and
/// the embedding of patches are in full precision; embedders and the last layer are as they are stored.
pub(crate) fn role(name: &str) -> QuantizeRole {
    let Some(layer) = name.strip_suffix(".weight") else {
        return QuantizeRole::Full;
    };
    let is_norm = layer
        .rsplit('.')
        .next()
        .is_some_and(|last| last.starts_with("norm"));
    if is_norm || layer == "patch_embedding" {
        return QuantizeRole::Full;
    }
    match numbered(name, "blocks.") {
        Some(_) => QuantizeRole::Quantized,
        None => QuantizeRole::AsStored,
    }
}
