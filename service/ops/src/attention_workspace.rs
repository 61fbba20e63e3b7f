//! Workspace of attention on a card where cuDNN has no plan and scores are materialized.

/// Limit on the bytes of materialized scores, unless those of one query exceed it.
const SCORE_BYTES: usize = 64 << 20;

/// Rows of scores, over all heads, that keep a card busy; and queries of a head that fill the tiles of a matrix
/// product.
const ROWS: usize = 3072;
const TILE: usize = 128;

/// Stride of a row of scores, in elements: rows are aligned to 16 bytes for matrix products.
pub(crate) fn row_of_scores(keys: usize) -> usize {
    keys.next_multiple_of(8)
}

/// Number of queries whose scores are materialized at a time.
pub(crate) fn queries_at_a_time(heads: usize, queries: usize, keys: usize) -> usize {
    let bytes_of_a_query = heads * row_of_scores(keys) * size_of::<f32>();
    let most = SCORE_BYTES / bytes_of_a_query.max(1);
    let wanted = (ROWS / heads.max(1)).next_multiple_of(TILE).max(TILE);
    let chunk = match most.min(wanted) {
        few @ 0..TILE => few,
        many => many / TILE * TILE,
    };
    chunk.clamp(1, queries.max(1))
}

/// Maximum workspace in bytes of [`crate::attention()`] on a card, in any dtype: the f32 scores, where cuDNN has no
/// plan. For one batch item; items are processed one after the other.
pub fn attention_workspace(heads: usize, queries: usize, keys: usize) -> usize {
    heads * queries_at_a_time(heads, queries, keys) * row_of_scores(keys) * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_of_scores_is_bounded_for_every_size() {
        // FLUX.1 at 1024x1024 and at 4096x4096, T5, CLIP, and an autoencoder's one head.
        for (heads, queries, keys, bytes) in [
            (24, 4608, 4608, 24 * 128 * 4608 * 4),
            (24, 66_048, 66_048, 24 * 10 * 66_048 * 4),
            (64, 512, 512, 64 * 128 * 512 * 4),
            (12, 77, 77, 12 * 77 * 80 * 4),
            (1, 16_384, 16_384, 1024 * 16_384 * 4),
            (1, 1, 1, 8 * 4),
        ] {
            assert_eq!(attention_workspace(heads, queries, keys), bytes);
            assert!(bytes <= SCORE_BYTES);
        }
        // The minimum is one query.
        assert_eq!(attention_workspace(1000, 5, 100_000), 1000 * 100_000 * 4);
    }
}
