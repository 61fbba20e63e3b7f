//! Activation memory of a decode or an encode, derived from the configuration, and the rungs that need less.

use candle_core::DType;
use model::plan::ladder;
use ops::Planned;
use residency::Bytes;
use serde::{Deserialize, Serialize};

use super::config::HunyuanVaeConfig;
use super::time::{decode_tiles, encode_tiles, most_frames, most_latents};
use crate::Rung;
use crate::autoencoders::pass::{Map, StripSize};
use crate::autoencoders::scratch::Account;
use crate::autoencoders::strips::Walk;
use crate::autoencoders::tiles::edges;

/// Most bytes of a strip of a map that is processed whole: engines of convolutions count elements in 32 bits, and the
/// strips of a film at 832x480 are already longer than a card's cache.
const WHOLE_STRIP_BYTES: usize = 512 << 20;

/// Most bytes of a strip of a tile in space.
const TILE_STRIP_BYTES: usize = 32 << 20;

/// Side of the reference's tiles in space, in pixels (`tile_sample_min_height`).
const TILE_PIXELS: usize = 256;

/// How much of a map is processed at a time, on a card: on the CPU strips fit into a cache anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chunking {
    /// The whole map, in strips as large as is of use.
    Whole,
    /// Strips of rows of at most `bytes` bytes, with their padding and their results. The result equals that of `Whole`.
    Strips { bytes: usize },
    /// Independent square tiles that overlap by a quarter, as diffusers' `enable_tiling`. The result differs from
    /// that of `Whole`.
    Tiles {
        /// Rows and columns of a tile, in latent cells.
        latent_size: usize,
    },
}

impl Chunking {
    /// For reports: `whole`, `strips of 32 MiB`, `tiles of 32`.
    pub fn label(self) -> String {
        match self {
            Chunking::Whole => "whole".to_owned(),
            Chunking::Strips { bytes } if bytes >= 1 << 20 => format!("strips of {} MiB", bytes >> 20),
            Chunking::Strips { bytes } => format!("strips of {bytes} bytes"),
            Chunking::Tiles { latent_size } => format!("tiles of {latent_size}"),
        }
    }

    /// Whether the result differs from that of `Whole` by more than rounding.
    pub fn is_approximate(self) -> bool {
        matches!(self, Chunking::Tiles { .. })
    }

    fn strips(self) -> StripSize {
        StripSize::Bytes(match self {
            Chunking::Whole => WHOLE_STRIP_BYTES,
            Chunking::Strips { bytes } => bytes,
            Chunking::Tiles { .. } => TILE_STRIP_BYTES,
        })
    }

    /// How a map is processed.
    pub(super) fn walk(self, cancelled: &dyn Fn() -> bool) -> Walk<'_> {
        Walk {
            size: self.strips(),
            cancelled,
        }
    }
}

/// The ladder of rungs for decoding `latents` latents of `h` by `w`, best first, each predicted to need less memory than
/// the one before it: whole, smaller and smaller strips, tiles in space of the reference's size and of half of it.
pub fn decode_ladder(
    config: &HunyuanVaeConfig,
    sides: (usize, usize),
    latents: usize,
    dtype: DType,
) -> Vec<(Chunking, Rung)> {
    rungs(config, sides, |chunking| {
        decode_scratch(config, sides, latents, chunking, dtype)
    })
}

/// The ladder for encoding `frames` frames, whose latents are `h` by `w`.
pub fn encode_ladder(
    config: &HunyuanVaeConfig,
    sides: (usize, usize),
    frames: usize,
    dtype: DType,
) -> Vec<(Chunking, Rung)> {
    rungs(config, sides, |chunking| {
        encode_scratch(config, sides, frames, chunking, dtype)
    })
}

fn rungs(
    config: &HunyuanVaeConfig,
    (h, w): (usize, usize),
    scratch: impl Fn(Chunking) -> Bytes,
) -> Vec<(Chunking, Rung)> {
    let strips = [128, 32, 8, 2].map(|mebibytes| Chunking::Strips {
        bytes: mebibytes << 20,
    });
    let sizes = [1, 2].map(|divisor| TILE_PIXELS / config.factor() / divisor);
    let tiles = sizes
        .into_iter()
        .filter(|size| *size >= 8 && (*size < h || *size < w));
    let tiles = tiles.map(|latent_size| Chunking::Tiles { latent_size });
    let chunkings = std::iter::once(Chunking::Whole).chain(strips).chain(tiles);
    ladder(chunkings, |chunking| Rung {
        approximate: chunking.is_approximate(),
        ..Rung::new(chunking.label(), scratch(chunking))
    })
}

/// Predicted peak of activation bytes of decoding `latents` latents of `h` by `w`, the frames of a tile included.
pub fn decode_scratch(
    config: &HunyuanVaeConfig,
    (h, w): (usize, usize),
    latents: usize,
    chunking: Chunking,
    dtype: DType,
) -> Bytes {
    let number = dtype.size_in_bytes();
    let factor = config.factor();
    let of_frame = config.out_channels * h * w * factor * factor * number;
    let film = latents * h * w * config.latent_channels * number;
    let carried = decode_tiles(config, latents)
        .iter()
        .map(|tile| tile.carried)
        .max();
    let held = film + carried.unwrap_or_default() * of_frame;
    let length = most_latents(config, latents);
    let peak = match chunking {
        Chunking::Tiles { latent_size } if h > latent_size || w > latent_size => {
            let sides = (h.min(latent_size), w.min(latent_size));
            let account = decode_account(config, sides, length, chunking, dtype);
            let frames = config.frames(length);
            let tile = latent_size * factor;
            let edges = edges(tile, w * factor) * config.out_channels * frames * number;
            let window = length * sides.0 * sides.1 * config.latent_channels * number;
            account.peak + window + frames * of_frame + edges
        }
        _ => decode_account(config, (h, w), length, chunking, dtype).peak,
    };
    // At the end: the frames of a tile as a map, as bytes, and those that are held.
    let frames = config.frames(length) * of_frame;
    Bytes((held + peak.max(frames + frames / number)) as u64)
}

/// Predicted peak of activation bytes of encoding `frames` 8-bit frames whose latents are `h` by `w`, the frames of a
/// tile as a map included.
pub fn encode_scratch(
    config: &HunyuanVaeConfig,
    (h, w): (usize, usize),
    frames: usize,
    chunking: Chunking,
    dtype: DType,
) -> Bytes {
    let number = dtype.size_in_bytes();
    let of_latent = 2 * config.latent_channels * h * w * number;
    // The results, and the last latent of the tile before.
    let held = (config.latents(frames) + 1) * of_latent;
    let count = most_frames(frames);
    let factor = config.factor();
    let peak = match chunking {
        Chunking::Tiles { latent_size } if h > latent_size || w > latent_size => {
            let sides = (h.min(latent_size), w.min(latent_size));
            let account = encode_account(config, sides, count, chunking, dtype);
            let all = config.in_channels * h * w * factor * factor * count * number;
            let latents = config.latents(count);
            let edges = edges(latent_size, w) * 2 * config.latent_channels * latents * number;
            account.peak + all + latents * of_latent + edges
        }
        _ => encode_account(config, (h, w), count, chunking, dtype).peak,
    };
    Bytes((held + peak) as u64)
}

/// Account of decoding the latents of one tile in time.
fn decode_account(
    config: &HunyuanVaeConfig,
    (h, w): (usize, usize),
    latents: usize,
    chunking: Chunking,
    dtype: DType,
) -> Account {
    let map = Map {
        channels: config.latent_channels,
        sides: [h, latents, w],
    };
    Account::of(&config.table().decoder(), map, chunking.strips(), dtype)
}

/// Account of encoding the frames of one tile in time, whose latents are `h` by `w`.
fn encode_account(
    config: &HunyuanVaeConfig,
    (h, w): (usize, usize),
    frames: usize,
    chunking: Chunking,
    dtype: DType,
) -> Account {
    let factor = config.factor();
    let map = Map {
        channels: config.in_channels,
        sides: [h * factor, frames, w * factor],
    };
    Account::of(&config.table().encoder(), map, chunking.strips(), dtype)
}

impl HunyuanVaeConfig {
    /// Shapes for which cuDNN is used to decode `latents` latents of `h` by `w` with maps of this dtype. Each shape once, in
    /// order of use. None for tiles in space, whose last ones are of other sizes.
    pub fn planned_to_decode(
        &self,
        sides: (usize, usize),
        latents: usize,
        chunking: Chunking,
        dtype: DType,
    ) -> Vec<Planned> {
        let tiles = decode_tiles(self, latents);
        let lengths = tiles.iter().map(|tile| tile.count);
        of_tiles(lengths, chunking, |length| {
            decode_account(self, sides, length, chunking, dtype)
        })
    }

    /// Shapes for which it is used to encode `frames` frames, whose latents are `h` by `w`.
    pub fn planned_to_encode(
        &self,
        sides: (usize, usize),
        frames: usize,
        chunking: Chunking,
        dtype: DType,
    ) -> Vec<Planned> {
        let tiles = encode_tiles(self, frames);
        let lengths = tiles.iter().map(|tile| tile.count);
        of_tiles(lengths, chunking, |length| {
            encode_account(self, sides, length, chunking, dtype)
        })
    }
}

fn of_tiles(
    lengths: impl Iterator<Item = usize>,
    chunking: Chunking,
    account: impl Fn(usize) -> Account,
) -> Vec<Planned> {
    let mut all = Vec::new();
    if chunking.is_approximate() {
        return all;
    }
    let mut before = Vec::new();
    for length in lengths {
        if !before.contains(&length) {
            before.push(length);
            account(length).planned(&mut all);
        }
    }
    all
}
