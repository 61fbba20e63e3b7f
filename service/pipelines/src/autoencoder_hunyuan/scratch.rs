//! Activation memory of a decode or an encode, derived from the configuration, and the rungs that need less.

use candle_core::DType;
use ops::Onto;
use residency::Bytes;
use serde::{Deserialize, Serialize};

use super::blocks::shortcut_rows;
use super::config::{HunyuanVaeConfig, Resize};
use super::conv::{Goes, Pass, Sides, StripBytes};
use super::time::{decode_tiles, most_frames, most_latents};
use crate::Rung;
use crate::autoencoder_kl::edges;
use model::plan::ladder;

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
    /// Strips of rows of at most so many bytes, with their padding and their results. The result equals that of `Whole`.
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

    pub(super) fn strip_bytes(self) -> usize {
        match self {
            Chunking::Whole => WHOLE_STRIP_BYTES,
            Chunking::Strips { bytes } => bytes,
            Chunking::Tiles { .. } => TILE_STRIP_BYTES,
        }
    }
}

/// The ladder of rungs for decoding so many latents of `h` by `w`, best first, each predicted to need less memory than
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

/// The ladder for encoding so many frames, whose latents are `h` by `w`.
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

/// Predicted peak of activation bytes of decoding so many latents of `h` by `w`, the frames of a tile included.
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

/// Predicted peak of activation bytes of encoding so many 8-bit frames whose latents are `h` by `w`, the frames of a
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

/// Tracks live bytes layer by layer, and the layers that were passed.
pub(super) struct Account {
    pub(super) dtype: DType,
    strip_bytes: usize,
    pub(super) peak: usize,
    pub(super) seen: Vec<PlannedLayer>,
}

/// A layer for which cuDNN may have a plan.
#[derive(Clone, Copy)]
pub(super) enum PlannedLayer {
    /// A convolution, with its number of output rows per strip.
    Convolution(Pass, usize),
    /// Attention over a map, frame by frame.
    Attention(Map),
}

/// Dimensions of a map.
#[derive(Clone, Copy)]
pub(super) struct Map {
    pub(super) channels: usize,
    pub(super) sides: Sides,
}

impl Map {
    fn with(self, channels: usize) -> Map {
        Map { channels, ..self }
    }
}

impl Account {
    fn new(chunking: Chunking, dtype: DType) -> Account {
        Account {
            dtype,
            strip_bytes: chunking.strip_bytes(),
            peak: 0,
            seen: Vec::new(),
        }
    }

    fn note(&mut self, alive: usize) {
        self.peak = self.peak.max(alive);
    }

    fn bytes(&self, map: Map) -> usize {
        map.channels * map.sides.iter().product::<usize>() * self.dtype.size_in_bytes()
    }

    /// Dtypes narrower than f32 imply a card: the CPU computes in f32.
    fn on_card(&self) -> bool {
        self.dtype.size_in_bytes() < 4
    }

    fn strips(&self) -> StripBytes {
        StripBytes::of(self.strip_bytes, !self.on_card())
    }

    /// A convolution while so many bytes of maps are alive, input and output included.
    fn layer(&mut self, pass: Pass, (goes, beside): (Goes, usize), alive: usize) {
        let number = self.dtype.size_in_bytes();
        let strips = beside + usize::from(goes == Goes::Through);
        let rows = pass.rows(self.strips(), strips, self.dtype);
        self.seen.push(PlannedLayer::Convolution(pass, rows));
        let positions = |shape: [usize; 4]| shape[..3].iter().product::<usize>();
        let (buffer, strip) = (pass.buffer(rows), pass.strip(rows));
        let held = (positions(buffer) * buffer[3] + strips * positions(strip) * strip[3]) * number;
        let taps: usize = pass.filter()[2..].iter().product();
        let (inputs, outputs) = pass.channels;
        let filter = inputs * outputs * taps * number;
        let besides = match self.on_card() {
            true => {
                let positions = (positions(buffer), positions(strip));
                let unrolled = ops::convolve_scratch(positions, pass.channels, taps, number, Onto::Nothing);
                // The product of a shortcut, before its bias.
                unrolled.max(beside * strip.iter().product::<usize>() * number)
            }
            false => 0,
        };
        self.note(alive + held + filter + besides);
    }

    /// A convolution of a map into a new one.
    fn convolve(
        &mut self,
        from: Map,
        channels: usize,
        (enlarge, halved): (Resize, Resize),
        goes: Goes,
    ) -> Map {
        let pass = Pass::new(from.sides, (from.channels, channels), enlarge, halved);
        let to = Map {
            channels,
            sides: pass.to,
        };
        self.layer(pass, (goes, 0), self.bytes(from) + self.bytes(to));
        to
    }

    fn resnet(&mut self, from: Map, channels: usize) -> Map {
        let to = from.with(channels);
        let plain = (Resize::NONE, Resize::NONE);
        self.convolve(from, channels, plain, Goes::There);
        let inner = self.bytes(to);
        if from.channels != channels {
            let product = match self.on_card() {
                true => {
                    let [height, frames, width] = to.sides;
                    let rows = shortcut_rows(&[height, frames, width, channels], self.dtype, self.strips().0);
                    inner / height * rows
                }
                false => 0,
            };
            self.note(self.bytes(from) + 2 * inner + product);
        }
        let pass = Pass::new(to.sides, (channels, channels), Resize::NONE, Resize::NONE);
        self.layer(pass, (Goes::Through, 0), 2 * inner);
        to
    }

    /// The blocks of a level in the memory of its first map.
    fn resnets_in_place(&mut self, from: Map, channels: usize, blocks: usize) -> Map {
        if from.channels != 2 * channels {
            return (0..blocks).fold(from, |map, _| self.resnet(map, channels));
        }
        let alive = self.bytes(from);
        let of = |inputs: usize| Pass::new(from.sides, (inputs, channels), Resize::NONE, Resize::NONE);
        for block in 0..blocks {
            match block {
                0 => self.layer(of(from.channels), (Goes::Through, 1), alive),
                _ => self.layer(of(channels), (Goes::Through, 0), alive),
            }
            self.layer(of(channels), (Goes::Through, 0), alive);
        }
        // Half of the memory of the first map, which stays.
        from
    }

    fn middle(&mut self, map: Map, with_attention: bool) {
        self.resnet(map, map.channels);
        if with_attention {
            self.seen.push(PlannedLayer::Attention(map));
            let [height, frames, width] = map.sides;
            let (one, of_frame) = (self.bytes(map), height * width);
            // Scores where cuDNN has no plan, or a product. The CPU has a block of scores per thread.
            let besides = match self.on_card() {
                true => ops::attention_workspace(1, of_frame, frames * of_frame).max(one),
                false => 0,
            };
            // The map, its normalized copy, and three projections.
            self.note(5 * one + besides);
        }
        self.resnet(map, map.channels);
    }

    /// The last norm and convolution, into frames.
    fn last(&mut self, map: Map, held: Map, channels: usize) {
        let pass = Pass::new(map.sides, (map.channels, channels), Resize::NONE, Resize::NONE);
        let out = self.bytes(map.with(channels));
        self.layer(pass, (Goes::Through, 0), self.bytes(held) + out);
    }
}

/// Account of decoding the latents of one tile in time.
pub(super) fn decode_account(
    config: &HunyuanVaeConfig,
    (h, w): (usize, usize),
    latents: usize,
    chunking: Chunking,
    dtype: DType,
) -> Account {
    let mut account = Account::new(chunking, dtype);
    let channels = &config.block_out_channels;
    let plain = (Resize::NONE, Resize::NONE);
    let latent = Map {
        channels: config.latent_channels,
        sides: [h, latents, w],
    };
    let (finest, coarsest) = (channels[0], channels[channels.len() - 1]);
    let mut map = account.convolve(latent, coarsest, plain, Goes::There);
    account.middle(map, config.mid_block_add_attention);
    // The map, and what its memory is a part of.
    let mut held = map;
    for (level, &width) in channels.iter().rev().enumerate() {
        match config.resize(level) {
            Some(enlarge) => {
                for _ in 0..=config.layers_per_block {
                    map = account.resnet(map, width);
                }
                map = account.convolve(map, width, (enlarge, Resize::NONE), Goes::There);
                held = map;
            }
            None => {
                held = account.resnets_in_place(map, width, config.layers_per_block + 1);
                map = map.with(width);
            }
        }
    }
    account.last(map.with(finest), held, config.out_channels);
    account
}

/// Account of encoding the frames of one tile in time, whose latents are `h` by `w`.
pub(super) fn encode_account(
    config: &HunyuanVaeConfig,
    (h, w): (usize, usize),
    frames: usize,
    chunking: Chunking,
    dtype: DType,
) -> Account {
    let mut account = Account::new(chunking, dtype);
    let channels = &config.block_out_channels;
    let factor = config.factor();
    let plain = (Resize::NONE, Resize::NONE);
    let picture = Map {
        channels: config.in_channels,
        sides: [h * factor, frames, w * factor],
    };
    let mut map = account.convolve(picture, channels[0], plain, Goes::There);
    for (level, &width) in channels.iter().enumerate() {
        for _ in 0..config.layers_per_block {
            map = account.resnet(map, width);
        }
        if let Some(halved) = config.resize(level) {
            map = account.convolve(map, width, (Resize::NONE, halved), Goes::There);
        }
    }
    account.middle(map, config.mid_block_add_attention);
    account.last(map, map, 2 * config.latent_channels);
    account
}
