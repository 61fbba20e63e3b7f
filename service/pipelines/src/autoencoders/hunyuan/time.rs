//! Tiles in time: `_temporal_tiled_decode` and `_temporal_tiled_encode` of the reference, as a list.
//!
//! A film of more than 16 frames is cut into tiles of 17 frames at a distance of 12. Each tile is computed for itself;
//! all but the first lose their first output, which is a lone frame only in the first tile; and their next outputs are
//! blended with the last ones of the tile before.

use super::config::HunyuanVaeConfig;

/// The reference's `tile_sample_min_num_frames` and `tile_sample_stride_num_frames`.
const TILE_FRAMES: usize = 16;
const STRIDE_FRAMES: usize = 12;

/// A tile in time, and which of its outputs are results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TimeTile {
    /// First input, and number of inputs.
    pub(super) first: usize,
    pub(super) count: usize,
    /// Outputs dropped from the beginning.
    pub(super) dropped: usize,
    /// Outputs after the dropped ones that are blended with as many last outputs of the tile before.
    pub(super) blended: usize,
    /// Outputs after the dropped ones that are results, the blended ones included.
    pub(super) kept: usize,
    /// Outputs at the end that the next tile is blended with.
    pub(super) carried: usize,
}

/// Tiles of decoding a film of `latents` latents. A tile without results is left out.
pub(super) fn decode_tiles(config: &HunyuanVaeConfig, latents: usize) -> Vec<TimeTile> {
    let ratio = config.temporal_compression_ratio;
    let of = Cutting {
        size: TILE_FRAMES / ratio,
        stride: STRIDE_FRAMES / ratio,
        kept: STRIDE_FRAMES,
        blended: TILE_FRAMES - STRIDE_FRAMES,
    };
    of.tiles(latents, config.frames(latents), |inputs| config.frames(inputs))
}

/// Tiles of encoding a film of `frames` frames.
pub(super) fn encode_tiles(config: &HunyuanVaeConfig, frames: usize) -> Vec<TimeTile> {
    let ratio = config.temporal_compression_ratio;
    let of = Cutting {
        size: TILE_FRAMES,
        stride: STRIDE_FRAMES,
        kept: STRIDE_FRAMES / ratio,
        blended: (TILE_FRAMES - STRIDE_FRAMES) / ratio,
    };
    of.tiles(frames, config.latents(frames), |inputs| config.latents(inputs))
}

/// Most inputs of a tile of a film of `latents` latents to decode.
pub(super) fn most_latents(config: &HunyuanVaeConfig, latents: usize) -> usize {
    latents.min(TILE_FRAMES / config.temporal_compression_ratio + 1)
}

/// Most inputs of a tile of a film of `frames` frames to encode.
pub(super) fn most_frames(frames: usize) -> usize {
    frames.min(TILE_FRAMES + 1)
}

struct Cutting {
    /// Inputs of a tile after its first input, and most inputs of a film that is not cut.
    size: usize,
    /// Inputs between the first ones of tiles.
    stride: usize,
    /// Results of a tile after its first result.
    kept: usize,
    /// Outputs that neighbouring tiles are blended in.
    blended: usize,
}

impl Cutting {
    fn tiles(&self, inputs: usize, results: usize, outputs_of: impl Fn(usize) -> usize) -> Vec<TimeTile> {
        if inputs <= self.size {
            return vec![TimeTile {
                first: 0,
                count: inputs,
                dropped: 0,
                blended: 0,
                kept: results,
                carried: 0,
            }];
        }
        let mut tiles: Vec<TimeTile> = Vec::new();
        let (mut left, mut carried) = (results, 0);
        for first in (0..inputs).step_by(self.stride) {
            let count = (self.size + 1).min(inputs - first);
            let dropped = usize::from(first > 0);
            let outputs = outputs_of(count) - dropped;
            let kept = (self.kept + 1 - dropped).min(outputs).min(left);
            if kept == 0 {
                break;
            }
            left -= kept;
            let blended = self.blended.min(carried).min(outputs);
            carried = self.blended.min(outputs);
            tiles.push(TimeTile {
                first,
                count,
                dropped,
                blended,
                kept,
                carried,
            });
        }
        // No tile follows the last one, so it carries nothing.
        if let Some(last) = tiles.last_mut() {
            last.carried = 0;
        }
        tiles
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_frame_and_every_latent_is_a_result_of_one_tile() {
        let config = HunyuanVaeConfig::default();
        for latents in 1..40 {
            let tiles = decode_tiles(&config, latents);
            let kept: usize = tiles.iter().map(|tile| tile.kept).sum();
            assert_eq!(kept, 4 * (latents - 1) + 1, "{latents}");
            assert!(tiles.windows(2).all(|pair| pair[0].carried >= pair[1].blended));
            assert!(
                tiles
                    .iter()
                    .all(|tile| tile.count <= most_latents(&config, latents))
            );
        }
        for frames in 1..90 {
            let tiles = encode_tiles(&config, frames);
            let kept: usize = tiles.iter().map(|tile| tile.kept).sum();
            assert_eq!(kept, (frames - 1) / 4 + 1, "{frames}");
            assert!(tiles.iter().all(|tile| tile.count <= most_frames(frames)));
        }
    }

    #[test]
    fn a_film_of_nine_latents_has_three_tiles() {
        let config = HunyuanVaeConfig::default();
        let cuts: Vec<[usize; 6]> = decode_tiles(&config, 9)
            .into_iter()
            .map(|t| [t.first, t.count, t.dropped, t.blended, t.kept, t.carried])
            .collect();
        assert_eq!(
            cuts,
            [[0, 5, 0, 0, 13, 4], [3, 5, 1, 4, 12, 4], [6, 3, 1, 4, 8, 0]]
        );
        // The fourth would begin with the last latent alone, which has no result.
        assert_eq!(decode_tiles(&config, 10).len(), 3);
        assert_eq!(decode_tiles(&config, 4).len(), 1);
    }
}
