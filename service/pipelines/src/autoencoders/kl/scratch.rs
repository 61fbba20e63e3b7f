//! Activation memory of a decode or an encode, derived from the configuration, and the rungs that need less.

use candle_core::DType;
use model::plan::ladder;
use ops::Planned;
use residency::Bytes;
use serde::{Deserialize, Serialize};

use super::config::VaeConfig;
use crate::Rung;
use crate::autoencoders::pass::{Map, StripSize};
use crate::autoencoders::scratch::Account;
use crate::autoencoders::strips::Walk;
use crate::autoencoders::tiles::edges;

/// The part of a map that is processed at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chunking {
    /// The whole map.
    Whole,
    /// Strips of rows at the latent's resolution. The result equals that of `Whole`.
    Strips { latent_rows: usize },
    /// Independent square tiles that overlap by a quarter, as diffusers' `enable_tiling`. The result differs from
    /// that of `Whole`.
    Tiles {
        /// Rows and columns of a tile, in latent cells.
        latent_size: usize,
    },
}

impl Chunking {
    /// For reports: `whole`, `strips of 16`, `tiles of 64`.
    pub fn label(self) -> String {
        match self {
            Chunking::Whole => "whole".to_owned(),
            Chunking::Strips { latent_rows } => format!("strips of {latent_rows}"),
            Chunking::Tiles { latent_size } => format!("tiles of {latent_size}"),
        }
    }

    /// Whether the result differs from that of `Whole` by more than rounding.
    pub fn is_approximate(self) -> bool {
        matches!(self, Chunking::Tiles { .. })
    }

    /// How a map whose latent has this height is processed. Tiles are processed whole.
    pub(super) fn walk(self, height: usize, cancelled: &dyn Fn() -> bool) -> Walk<'_> {
        let rows = match self {
            Chunking::Strips { latent_rows } => latent_rows,
            Chunking::Whole | Chunking::Tiles { .. } => height,
        };
        Walk {
            size: StripSize::LatentRows { rows, of: height },
            cancelled,
        }
    }
}

/// The ladder of rungs for decoding a latent of `h` by `w`, best first, each predicted to need less memory than the
/// one before it: whole, strips of 32 rows down to 1, tiles of diffusers' size down to an eighth of it.
pub fn decode_ladder(config: &VaeConfig, h: usize, w: usize, dtype: DType) -> Vec<(Chunking, Rung)> {
    rungs(config, h, w, |chunking| {
        decode_scratch(config, h, w, chunking, dtype)
    })
}

/// The ladder for encoding a picture whose latent is `h` by `w`.
pub fn encode_ladder(config: &VaeConfig, h: usize, w: usize, dtype: DType) -> Vec<(Chunking, Rung)> {
    rungs(config, h, w, |chunking| {
        encode_scratch(config, h, w, chunking, dtype)
    })
}

fn rungs(
    config: &VaeConfig,
    h: usize,
    w: usize,
    scratch: impl Fn(Chunking) -> Bytes,
) -> Vec<(Chunking, Rung)> {
    let strips = [32, 16, 8, 4, 2, 1].into_iter().filter(|rows| *rows < h);
    let strips = strips.map(|latent_rows| Chunking::Strips { latent_rows });
    let sizes = [1, 2, 4, 8]
        .into_iter()
        .map(|divisor| config.default_tile() / divisor);
    let tiles = sizes.filter(|size| *size >= 8 && (*size < h || *size < w));
    let tiles = tiles.map(|latent_size| Chunking::Tiles { latent_size });
    let chunkings = std::iter::once(Chunking::Whole).chain(strips).chain(tiles);
    ladder(chunkings, |chunking| Rung {
        approximate: chunking.is_approximate(),
        ..Rung::new(chunking.label(), scratch(chunking))
    })
}

/// Predicted peak of activation bytes of decoding a latent of `h` by `w`, the picture included.
pub fn decode_scratch(config: &VaeConfig, h: usize, w: usize, chunking: Chunking, dtype: DType) -> Bytes {
    let factor = config.factor();
    let latent = config.latent_channels * h * w * dtype.size_in_bytes();
    let picture = config.out_channels * h * w * factor * factor;
    let tile = |latent_size: usize| (latent_size * factor, config.out_channels);
    let bytes = match chunking {
        Chunking::Whole => decode_peak(config, (h, w), h, dtype),
        Chunking::Strips { latent_rows } => decode_peak(config, (h, w), latent_rows, dtype),
        Chunking::Tiles { latent_size } if h <= latent_size && w <= latent_size => {
            decode_peak(config, (h, w), h, dtype)
        }
        Chunking::Tiles { latent_size } => {
            let (size, channels) = tile(latent_size);
            let peak = decode_peak(
                config,
                (h.min(latent_size), w.min(latent_size)),
                latent_size,
                dtype,
            );
            let edges = edges(size, w * factor) * channels * dtype.size_in_bytes();
            latent + peak + picture * dtype.size_in_bytes() + edges
        }
    };
    // At the end: the picture as a map, and in f32.
    Bytes(bytes.max(picture * (dtype.size_in_bytes() + 4)) as u64)
}

/// Predicted peak of activation bytes of encoding a picture whose latent is `h` by `w`, the picture included.
pub fn encode_scratch(config: &VaeConfig, h: usize, w: usize, chunking: Chunking, dtype: DType) -> Bytes {
    let picture = config.in_channels * h * w * config.factor() * config.factor() * dtype.size_in_bytes();
    let bytes = match chunking {
        Chunking::Whole => encode_peak(config, (h, w), h, dtype),
        Chunking::Strips { latent_rows } => encode_peak(config, (h, w), latent_rows, dtype),
        Chunking::Tiles { latent_size } if h <= latent_size && w <= latent_size => {
            encode_peak(config, (h, w), h, dtype)
        }
        // In addition to the tile: the picture as a map, and the joined result.
        Chunking::Tiles { latent_size } => {
            let peak = encode_peak(
                config,
                (h.min(latent_size), w.min(latent_size)),
                latent_size,
                dtype,
            );
            let moments = 2 * config.latent_channels;
            let joined = moments * (h * w + edges(latent_size, w));
            peak + picture + joined * dtype.size_in_bytes()
        }
    };
    Bytes((bytes + picture) as u64)
}

fn decode_peak(config: &VaeConfig, sides: (usize, usize), latent_rows: usize, dtype: DType) -> usize {
    decode_account(config, sides, latent_rows, dtype).peak
}

fn encode_peak(config: &VaeConfig, sides: (usize, usize), latent_rows: usize, dtype: DType) -> usize {
    encode_account(config, sides, latent_rows, dtype).peak
}

/// Account of decoding a latent, in strips of latent rows.
fn decode_account(config: &VaeConfig, (h, w): (usize, usize), latent_rows: usize, dtype: DType) -> Account {
    let latent = Map {
        channels: config.latent_channels,
        sides: [h, 1, w],
    };
    let size = StripSize::LatentRows {
        rows: latent_rows,
        of: h,
    };
    Account::of(&config.table().decoder(), latent, size, dtype)
}

/// Account of encoding a picture, in strips of latent rows.
fn encode_account(config: &VaeConfig, (h, w): (usize, usize), latent_rows: usize, dtype: DType) -> Account {
    let factor = config.factor();
    let picture = Map {
        channels: config.in_channels,
        sides: [h * factor, 1, w * factor],
    };
    let size = StripSize::LatentRows {
        rows: latent_rows,
        of: h,
    };
    Account::of(&config.table().encoder(), picture, size, dtype)
}

impl VaeConfig {
    /// Shapes of decoding a latent of `h` by `w` with maps of this dtype for which cuDNN is used, in strips of
    /// `latent_rows` latent rows; `h` of them decode it whole. Each shape once, in order of use.
    pub fn planned_to_decode(&self, sides: (usize, usize), latent_rows: usize, dtype: DType) -> Vec<Planned> {
        let mut all = Vec::new();
        decode_account(self, sides, latent_rows, dtype).planned(&mut all);
        all
    }

    /// Shapes of encoding a picture whose latent is `h` by `w`.
    pub fn planned_to_encode(&self, sides: (usize, usize), latent_rows: usize, dtype: DType) -> Vec<Planned> {
        let mut all = Vec::new();
        encode_account(self, sides, latent_rows, dtype).planned(&mut all);
        all
    }
}
