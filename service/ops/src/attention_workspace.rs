//! What attention on a card takes beside its operands, where its scores are written down.

/// Bytes of scores that exist at a time, unless those of one query are more.
const SCORE_BYTES: usize = 64 << 20;

/// Rows of scores, over all heads, that keep a card busy; and queries of a head that fill the tiles of a product.
const ROWS: usize = 3072;
const TILE: usize = 128;

/// Numbers from a row of scores to the next: rows of weights begin at multiples of 16 bytes, as products like them.
pub(crate) fn row_of_scores(keys: usize) -> usize {
    keys.next_multiple_of(8)
}

/// Queries whose scores exist at a time.
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

/// Bytes that [`crate::attention()`] takes at most on a card beside its operands, in each of its dtypes: what its scores take,
/// in f32, where cuDNN does not do it. Of so many heads, queries and keys; batches go one after the other.
pub fn attention_workspace(heads: usize, queries: usize, keys: usize) -> usize {
    heads * queries_at_a_time(heads, queries, keys) * row_of_scores(keys) * size_of::<f32>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_bounded_whatever_the_size() {
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
        // One query is the least.
        assert_eq!(attention_workspace(1000, 5, 100_000), 1000 * 100_000 * 4);
    }
}
