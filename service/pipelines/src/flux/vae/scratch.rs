//! What a decode or an encode needs beside the weights, from the configuration alone, and the ways to need
//! less.

use candle_core::DType;
use residency::Bytes;
use serde::{Deserialize, Serialize};

use super::blocks::{MOST_SCORES_BYTES, queries_at_a_time};
use super::config::VaeConfig;
use super::conv::{PART_BYTES, slab_rows};
use crate::family::Rung;

/// How much of a map is worked on at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chunking {
    /// All of it.
    Whole,
    /// Strips of so many rows, counted at the latent's resolution. The result is the whole's.
    Strips {
        /// Rows of the latent.
        latent_rows: usize,
    },
    /// Independent squares that overlap by a quarter, as diffusers' `enable_tiling`. The result is not the
    /// whole's.
    Tiles {
        /// Rows and columns of the latent.
        latent_size: usize,
    },
}

impl Chunking {
    /// `whole`, `strips of 16`, `tiles of 64`.
    pub fn label(self) -> String {
        match self {
            Chunking::Whole => "whole".to_owned(),
            Chunking::Strips { latent_rows } => format!("strips of {latent_rows}"),
            Chunking::Tiles { latent_size } => format!("tiles of {latent_size}"),
        }
    }

    /// Whether the result differs from the whole's by more than rounding.
    pub fn is_approximate(self) -> bool {
        matches!(self, Chunking::Tiles { .. })
    }
}

/// The ways to decode a latent of `h` by `w`, best first, each predicted to need less than the one before it:
/// whole, strips of 32 rows down to 1, tiles of diffusers' size down to an eighth of it.
pub fn ladder(config: &VaeConfig, h: usize, w: usize, dtype: DType) -> Vec<(Chunking, Rung)> {
    rungs(config, h, w, |chunking| {
        decode_scratch(config, h, w, chunking, dtype)
    })
}

/// The same for encoding a picture whose latent is `h` by `w`.
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
    let mut rungs: Vec<(Chunking, Rung)> = Vec::new();
    for chunking in std::iter::once(Chunking::Whole).chain(strips).chain(tiles) {
        let scratch = scratch(chunking);
        // A rung that saves less than a fiftieth is not worth a try.
        if rungs
            .last()
            .is_some_and(|(_, last)| scratch.0 + last.scratch.0 / 50 >= last.scratch.0)
        {
            continue;
        }
        let rung = Rung {
            label: chunking.label(),
            scratch,
            approximate: chunking.is_approximate(),
        };
        rungs.push((chunking, rung));
    }
    rungs
}

/// Predicted peak of activations while a latent of `h` by `w` is decoded, the picture included.
pub fn decode_scratch(config: &VaeConfig, h: usize, w: usize, chunking: Chunking, dtype: DType) -> Bytes {
    let picture = config.out_channels * h * w * config.factor() * config.factor() * 4;
    chunked((h, w), chunking, picture, |(h, w), rows| {
        decode_peak(config, (h, w), rows, dtype)
    })
}

/// Predicted peak of activations while a picture whose latent is `h` by `w` is encoded, the picture included.
pub fn encode_scratch(config: &VaeConfig, h: usize, w: usize, chunking: Chunking, dtype: DType) -> Bytes {
    let picture = config.in_channels * h * w * config.factor() * config.factor() * dtype.size_in_bytes();
    chunked((h, w), chunking, 0, |(h, w), rows| {
        encode_peak(config, (h, w), rows, dtype)
    }) + Bytes(picture as u64)
}

fn chunked(
    (h, w): (usize, usize),
    chunking: Chunking,
    finished: usize,
    peak: impl Fn((usize, usize), usize) -> usize,
) -> Bytes {
    let bytes = match chunking {
        Chunking::Whole => peak((h, w), h),
        Chunking::Strips { latent_rows } => peak((h, w), latent_rows),
        Chunking::Tiles { latent_size } if h <= latent_size && w <= latent_size => peak((h, w), h),
        // Beside the tile: the rows of tiles that are finished, and the picture that they are joined to.
        Chunking::Tiles { latent_size } => {
            let tile = (h.min(latent_size), w.min(latent_size));
            peak(tile, tile.0) + finished
        }
    };
    // At the end the picture, in f32, is looked through for values that are not finite.
    Bytes(bytes.max(2 * finished) as u64)
}

/// Bytes alive, followed layer by layer.
struct Account {
    bytes_per_value: usize,
    latent_height: usize,
    latent_rows: usize,
    peak: usize,
}

/// A map: channels, height, width.
#[derive(Clone, Copy)]
struct Map {
    channels: usize,
    height: usize,
    width: usize,
}

impl Account {
    fn map(&self, map: Map) -> usize {
        map.channels * map.height * map.width * self.bytes_per_value
    }

    /// A convolution of `from` (as read: normed, enlarged) to `to`, with `alive` bytes held beside. `over`: the
    /// outputs are written over a map that is alive anyway. `summands`: strips of outputs that are added.
    fn convolve(&mut self, from: Map, to: Map, kernel: usize, alive: usize, over: bool, summands: usize) {
        let stride = from.height / to.height;
        let rows = self
            .latent_rows
            .saturating_mul(to.height.div_ceil(self.latent_height))
            .clamp(1, to.height);
        let in_strips = rows < to.height;
        let rows_in = (rows - 1) * stride + kernel;
        let strip = self.map(Map {
            height: rows_in,
            width: from.width + kernel - 1,
            ..from
        });
        let out = self.map(Map { height: rows, ..to });
        let slab = slab_rows(from.channels, kernel, rows, to.width, self.bytes_per_value);
        let target = if in_strips && !over { self.map(to) } else { 0 };
        let unwritten = if in_strips { out } else { 0 };
        let unrolled = from.channels * kernel * kernel;
        let (unrolled, widened) = if self.composed() {
            // Patches (twice where they are picked out one by one) and their product; then the product as it is,
            // padded, and with its bias. Beside the strip while it is read: a part in f32, multiplied, added to, and
            // activated; and as much for what the card's allocator rounds up.
            let line = slab * (from.width + kernel - 1) * self.bytes_per_value;
            let unrolled = if stride == 1 { unrolled } else { 2 * unrolled };
            let part = from.channels * rows_in * (from.width + kernel - 1) * 4;
            let least = rows_in * (from.width + kernel - 1) * 4;
            let widened = 5 * part.min(PART_BYTES.max(least));
            ((unrolled + to.channels).max(3 * to.channels) * line, widened)
        } else {
            let line = slab * to.width * self.bytes_per_value;
            ((unrolled + to.channels) * line, 0)
        };
        let convolving = strip + (out + unrolled).max(unwritten + widened);
        self.peak = self
            .peak
            .max(alive + target + convolving.max(out * (1 + summands)));
    }

    /// Whether operations are composed of the tensor library's: where numbers are narrower than f32. The CPU has loops
    /// of its own, in f32.
    fn composed(&self) -> bool {
        self.bytes_per_value < 4
    }

    /// A 3x3 convolution of a map, read as another, to a third.
    fn layer(&mut self, from: Map, read: Map, to: Map) {
        self.convolve(read, to, 3, self.map(from), false, 0);
    }

    /// Statistics of a map, with `alive` bytes held, itself among them: composed, they take a part in f32, its
    /// deviations and their squares.
    fn norm(&mut self, map: Map, alive: usize) {
        if self.composed() {
            let part = (map.channels * map.height * map.width * 4).min(PART_BYTES);
            self.peak = self.peak.max(alive + 3 * part + part / 16);
        }
    }

    fn resnet(&mut self, from: Map, channels: usize) -> Map {
        let to = Map { channels, ..from };
        self.convolve(from, to, 3, self.map(from), false, 0);
        self.norm(to, self.map(from) + self.map(to));
        let summands = if channels == from.channels { 1 } else { 2 };
        self.convolve(to, to, 3, self.map(from) + self.map(to), true, summands);
        to
    }

    fn middle(&mut self, map: Map, with_attention: bool) {
        self.resnet(map, map.channels);
        if with_attention {
            let cells = map.height * map.width;
            let held = self.map(map) + 3 * map.channels * cells * 4;
            let chunk = queries_at_a_time(cells);
            let scores = (chunk * cells * 4).min(MOST_SCORES_BYTES.max(cells * 4));
            let normed = 3 * map.channels * cells * 4;
            let attending = 3 * scores + 2 * map.channels * chunk * 4 + self.map(map);
            self.peak = self.peak.max(held + normed.max(attending));
        }
        self.resnet(map, map.channels);
    }
}

fn account(h: usize, latent_rows: usize, dtype: DType) -> Account {
    Account {
        bytes_per_value: dtype.size_in_bytes(),
        latent_height: h,
        latent_rows,
        peak: 0,
    }
}

fn decode_peak(config: &VaeConfig, (h, w): (usize, usize), latent_rows: usize, dtype: DType) -> usize {
    let mut account = account(h, latent_rows, dtype);
    let channels = &config.block_out_channels;
    let latent = Map {
        channels: config.latent_channels,
        height: h,
        width: w,
    };
    let mut map = Map {
        channels: channels[channels.len() - 1],
        ..latent
    };
    account.layer(latent, latent, map);
    account.middle(map, config.mid_block_add_attention);
    for (level, &width) in channels.iter().rev().enumerate() {
        for _ in 0..=config.layers_per_block {
            map = account.resnet(map, width);
        }
        if level + 1 < channels.len() {
            let to = Map {
                height: map.height * 2,
                width: map.width * 2,
                ..map
            };
            account.layer(map, to, to);
            map = to;
        }
    }
    account.layer(
        map,
        map,
        Map {
            channels: config.out_channels,
            ..map
        },
    );
    account.peak
}

fn encode_peak(config: &VaeConfig, (h, w): (usize, usize), latent_rows: usize, dtype: DType) -> usize {
    let mut account = account(h, latent_rows, dtype);
    let channels = &config.block_out_channels;
    let factor = config.factor();
    let picture = Map {
        channels: config.in_channels,
        height: h * factor,
        width: w * factor,
    };
    let mut map = Map {
        channels: channels[0],
        ..picture
    };
    account.layer(picture, picture, map);
    for (level, &width) in channels.iter().enumerate() {
        for _ in 0..config.layers_per_block {
            map = account.resnet(map, width);
        }
        if level + 1 < channels.len() {
            let to = Map {
                height: map.height / 2,
                width: map.width / 2,
                ..map
            };
            account.layer(map, map, to);
            map = to;
        }
    }
    account.middle(map, config.mid_block_add_attention);
    account.layer(
        map,
        map,
        Map {
            channels: 2 * config.latent_channels,
            ..map
        },
    );
    account.peak
}
