//! Attention over many keys that do not fill the last of cuDNN's tiles.
//!
//! Its kernel for Hopper takes 7 to 8% longer for them, whatever the number of queries: of 19,145 keys 8.2 ms instead of 7.6
//! (H200, cuDNN 9.19, a step's load). So the keys of whole tiles are attended to, then those of the rest, and both results
//! are added by the shares that they have in the sum of a row (Dao et al., "FlashAttention", 2022, section 3.1). The rest
//! takes 0.1 ms, in strips of queries that fit the workspace, and adding it as much. Its kernel over e4m3 codes has tiles of twice as
//! many keys, and takes 15% longer for others: of 19,145 keys 5.2 ms, of 19,200 4.5 (the same card).

use super::WORKSPACE_BYTES;
use crate::planned::{AttentionShape, MaskShape};

/// Keys of a tile of the kernel for heads of [`WIDTH`] elements, and of that over codes.
const TILE: usize = 128;
const TILE_OF_CODES: usize = 256;
const WIDTH: usize = 128;

/// Fewer keys gain less than the rest costs.
const LEAST_KEYS: usize = 12 << 10;

/// Most bytes of the workspace for a plan. The rest of the workspace has the results between the two attentions.
const PLAN_BYTES: usize = 1 << 20;

/// The end of these bytes has the scales of an attention in e4m3.
const SCALES_BYTES: usize = 1 << 10;

/// Alignment of the parts of the workspace.
const APART: usize = 256;

/// An attention as two, with f32 logarithms of the sums of their rows, `[heads, queries]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InTiles {
    /// Over the keys of whole tiles.
    pub(crate) whole: AttentionShape,
    /// Of a strip of queries over the keys after the whole tiles, to `[queries, heads, width]`.
    pub(crate) rest: AttentionShape,
    /// Places in the workspace, in bytes.
    pub(crate) sums_at: usize,
    pub(crate) rest_sums_at: usize,
    pub(crate) rest_at: usize,
}

impl InTiles {
    /// For a card of compute capability 9.0; `None` where one attention is faster, or only one is possible.
    pub(crate) fn of(shape: &AttentionShape) -> Option<InTiles> {
        let AttentionShape {
            heads,
            queries,
            keys,
            width,
            ..
        } = *shape;
        let (tile, size) = match shape.in_fp8 {
            true => (TILE_OF_CODES, 1),
            false => (TILE, shape.dtype.size_in_bytes()),
        };
        let whole_keys = keys / tile * tile;
        let is_gain = shape.mask == MaskShape::None
            && shape.batch == 1
            && width == WIDTH
            && keys >= LEAST_KEYS
            && whole_keys < keys
            && queries > 0
            && shape.out[2] == width
            && !shape.log_sums;
        if !is_gain {
            return None;
        }
        let sums_of = |queries: usize| (heads * queries * size_of::<f32>()).next_multiple_of(APART);
        let result = heads * width * size;
        // Strides are in numbers, of which a row has as many as its codes have bytes of.
        let row = result / shape.dtype.size_in_bytes();
        let left = WORKSPACE_BYTES.checked_sub(PLAN_BYTES + sums_of(queries) + APART)?;
        let most = left / (result + heads * size_of::<f32>());
        let strips = queries.div_ceil(most.checked_sub(1)?.max(1));
        let strip = queries.div_ceil(strips);
        let sums_at = PLAN_BYTES;
        let rest_sums_at = sums_at + sums_of(queries);
        let rest_at = rest_sums_at + sums_of(strip);
        (rest_at + strip * result <= WORKSPACE_BYTES).then(|| InTiles {
            whole: AttentionShape {
                keys: whole_keys,
                log_sums: true,
                ..shape.clone()
            },
            rest: AttentionShape {
                queries: strip,
                keys: keys - whole_keys,
                out: [strip * row, row, width],
                log_sums: true,
                ..shape.clone()
            },
            sums_at,
            rest_sums_at,
            rest_at,
        })
    }

    /// Whether a plan leaves room in the workspace for scales, and for the results between the two attentions.
    pub(crate) fn leaves_room(workspace: usize) -> bool {
        workspace <= PLAN_BYTES - SCALES_BYTES
    }

    /// The place of the scales of an attention in e4m3 in the workspace, of at most so many bytes.
    pub(crate) fn scales_at(bytes: usize) -> Option<usize> {
        (bytes <= SCALES_BYTES).then_some(PLAN_BYTES - SCALES_BYTES)
    }

    /// The strips: the first query that is computed, and the first that is added, which is later where the last strip
    /// begins inside the one before.
    pub(crate) fn strips(&self) -> impl Iterator<Item = (usize, usize)> {
        let (queries, strip) = (self.whole.queries, self.rest.queries);
        (0..queries)
            .step_by(strip)
            .map(move |first| (first.min(queries - strip), first))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;

    fn of_rows(tokens: usize, heads: usize, mask: MaskShape) -> AttentionShape {
        let row = heads * 128;
        AttentionShape::of_rows(tokens, (heads, 128), (3 * row, 5 * row), DType::BF16, mask)
    }

    #[test]
    fn strips_cover_each_query_once_and_fit_the_workspace() {
        for (tokens, heads) in [
            (19_145, 24),
            (51_496, 24),
            (12_289, 40),
            (90_001, 40),
            (13_000, 1),
        ] {
            let shape = of_rows(tokens, heads, MaskShape::None);
            let split = InTiles::of(&shape).expect("more keys than fill the tiles");
            assert_eq!(split.whole.keys % 128, 0);
            assert_eq!(split.whole.keys + split.rest.keys, tokens);
            assert!((1..128).contains(&split.rest.keys));
            let strip = split.rest.queries;
            let mut next = 0;
            for (first, added) in split.strips() {
                assert!(
                    first + strip <= tokens && first <= added && added == next,
                    "{tokens} {first}"
                );
                next = first + strip;
            }
            assert_eq!(next, tokens);
            let sums = heads * tokens * 4;
            assert!(split.sums_at + sums <= split.rest_sums_at);
            assert!(split.rest_sums_at + heads * strip * 4 <= split.rest_at);
            assert!(split.rest_at + strip * heads * 128 * 2 <= WORKSPACE_BYTES);
        }
    }

    #[test]
    fn codes_have_tiles_of_more_keys_and_smaller_results() {
        let shape = of_rows(19_145, 24, MaskShape::None).in_fp8_if_possible();
        assert!(shape.in_fp8);
        let split = InTiles::of(&shape).expect("more keys than fill the tiles");
        assert_eq!((split.whole.keys, split.rest.keys), (18_944, 201));
        assert!(split.whole.in_fp8 && split.rest.in_fp8);
        let strip = split.rest.queries;
        // Bytes of a row of codes, in numbers of two bytes.
        assert_eq!(split.rest.out, [strip * 1536, 1536, 128]);
        assert!(split.rest_at + strip * 24 * 128 <= WORKSPACE_BYTES);
        assert!(split.sums_at >= InTiles::scales_at(1024).expect("room") + 1024);
        assert_eq!(InTiles::scales_at(1025), None);
        let filled = of_rows(19_200, 24, MaskShape::None).in_fp8_if_possible();
        assert_eq!(InTiles::of(&filled), None);
    }

    #[test]
    fn attention_is_not_split_without_a_gain() {
        let of = |tokens| of_rows(tokens, 24, MaskShape::None);
        for shape in [
            of(19_200),
            of(4_573),
            of_rows(19_145, 24, MaskShape::Causal),
            AttentionShape {
                log_sums: true,
                ..of(19_145)
            },
            AttentionShape {
                width: 64,
                ..of(19_145)
            },
        ] {
            assert_eq!(InTiles::of(&shape), None, "{shape:?}");
        }
    }
}
