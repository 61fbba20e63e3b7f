//! Activation memory of a decode or an encode, derived from the configuration, and the rungs that need less.

use candle_core::DType;
use ops::Onto;
use residency::Bytes;
use serde::{Deserialize, Serialize};

use super::config::VaeConfig;
use super::conv::{filter_bytes, rows_of_strip};
use super::tiles::edges;
use crate::Rung;
use model::plan::ladder;

/// How much of a map is processed at a time.
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
        // Beside the tile: the picture as a map, and the joined result.
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

/// Tracks live bytes layer by layer, and the layers that were passed.
pub(super) struct Account {
    pub(super) dtype: DType,
    latent_height: usize,
    latent_rows: usize,
    peak: usize,
    pub(super) seen: Vec<PlannedLayer>,
}

/// A layer for which cuDNN may have a plan.
#[derive(Clone, Copy)]
pub(super) enum PlannedLayer {
    /// A convolution, with its number of output rows per strip.
    Convolution(ConvolutionPass, usize),
    /// Attention over all positions of a map.
    Attention(Map),
}

/// Dimensions of a map: channels, height, width.
#[derive(Clone, Copy)]
pub(super) struct Map {
    pub(super) channels: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}

impl Map {
    fn twice(self) -> Map {
        Map {
            height: 2 * self.height,
            width: 2 * self.width,
            ..self
        }
    }
}

/// Input and output of a convolution.
#[derive(Clone, Copy)]
pub(super) struct ConvolutionPass {
    /// Dimensions of the input after upsampling.
    pub(super) read: Map,
    pub(super) to: Map,
    pub(super) kernel: usize,
    /// Whether strips are read in place, without a buffer.
    is_plain: bool,
}

impl ConvolutionPass {
    /// 1, or 2 for downsampling.
    pub(super) fn stride(&self) -> usize {
        self.read.height / self.to.height
    }
}

/// Memory of a convolution.
struct LayerBytes {
    in_strips: bool,
    /// The filter, and the buffer of strips.
    held: usize,
    /// A strip of outputs.
    out: usize,
    /// Workspace during the convolution: when overwriting, or accumulating.
    new: usize,
    onto: usize,
}

impl Account {
    fn note(&mut self, alive: usize) {
        self.peak = self.peak.max(alive);
    }

    fn map(&self, map: Map) -> usize {
        map.channels * map.height * map.width * self.dtype.size_in_bytes()
    }

    /// Dtypes narrower than f32 imply a card: the CPU computes in f32.
    fn on_card(&self) -> bool {
        self.dtype.size_in_bytes() < 4
    }

    fn take(&mut self, pass: &ConvolutionPass) -> LayerBytes {
        let ConvolutionPass {
            read,
            to,
            kernel,
            is_plain,
        } = *pass;
        let stride = pass.stride();
        let mut rows = self
            .latent_rows
            .saturating_mul(to.height.div_ceil(self.latent_height))
            .clamp(1, to.height);
        if !self.on_card() && !is_plain {
            rows = rows.min(rows_of_strip(self.map(Map { height: 1, ..read })));
        }
        self.seen.push(PlannedLayer::Convolution(*pass, rows));
        let rows_in = ((rows - 1) * stride + kernel).min(read.height);
        let strip = self.map(Map {
            height: rows_in,
            ..read
        });
        let channels = (read.channels, to.channels);
        let besides = |onto: Onto| {
            let positions = (rows_in * read.width, rows * to.width);
            let number = self.dtype.size_in_bytes();
            match self.on_card() {
                true => ops::convolve_scratch(positions, channels, kernel * kernel, number, onto),
                false => 0,
            }
        };
        LayerBytes {
            in_strips: rows < to.height,
            held: filter_bytes(channels, kernel, self.dtype) + if is_plain { 0 } else { strip },
            out: self.map(Map { height: rows, ..to }),
            new: besides(Onto::Nothing),
            onto: besides(Onto::Itself),
        }
    }

    /// A 3x3 convolution of a map, upsampled to another, to a third.
    fn layer(&mut self, from: Map, read: Map, to: Map, is_plain: bool) {
        let pass = ConvolutionPass {
            read,
            to,
            kernel: 3,
            is_plain,
        };
        let taken = self.take(&pass);
        self.note(self.map(from) + self.map(to) + taken.held + taken.new);
    }

    fn resnet(&mut self, from: Map, channels: usize) -> Map {
        let to = Map { channels, ..from };
        self.layer(from, from, to, false);
        let pass = ConvolutionPass {
            read: to,
            to,
            kernel: 3,
            is_plain: false,
        };
        let taken = self.take(&pass);
        let (outer, inner) = (self.map(from), self.map(to));
        self.note(outer + inner + taken.held);
        if from.channels == channels {
            let inner = if taken.in_strips { inner } else { 0 };
            self.note(outer + inner + taken.held + taken.onto);
            return to;
        }
        // A strip of the result, or all of it: the other map through its own convolution, accumulated.
        let shortcut = if self.on_card() { taken.out } else { 0 };
        let (while_shortened, while_added) = match taken.in_strips {
            true => (outer + inner, outer + inner),
            false => (outer, 0),
        };
        self.note(while_shortened + taken.held + taken.out + shortcut);
        self.note(while_added + taken.held + taken.out + taken.onto);
        to
    }

    fn middle(&mut self, map: Map, with_attention: bool) {
        self.resnet(map, map.channels);
        if with_attention {
            self.seen.push(PlannedLayer::Attention(map));
            let cells = map.height * map.width;
            let one = self.map(map);
            // Scores where cuDNN has no plan, or the product after them. The CPU has a block of scores per thread.
            let besides = match self.on_card() {
                true => ops::attention_workspace(1, cells, cells).max(one),
                false => 0,
            };
            // The map, its normalized copy, and three projections.
            self.note(5 * one + besides);
        }
        self.resnet(map, map.channels);
    }
}

fn account(h: usize, latent_rows: usize, dtype: DType) -> Account {
    Account {
        dtype,
        latent_height: h,
        latent_rows,
        peak: 0,
        seen: Vec::new(),
    }
}

fn decode_peak(config: &VaeConfig, sides: (usize, usize), latent_rows: usize, dtype: DType) -> usize {
    decode_account(config, sides, latent_rows, dtype).peak
}

/// Account of decoding a latent, in strips of latent rows.
pub(super) fn decode_account(
    config: &VaeConfig,
    (h, w): (usize, usize),
    latent_rows: usize,
    dtype: DType,
) -> Account {
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
    account.layer(latent, latent, map, true);
    account.middle(map, config.mid_block_add_attention);
    for (level, &width) in channels.iter().rev().enumerate() {
        for _ in 0..=config.layers_per_block {
            map = account.resnet(map, width);
        }
        if level + 1 < channels.len() {
            account.layer(map, map.twice(), map.twice(), false);
            map = map.twice();
        }
    }
    let picture = Map {
        channels: config.out_channels,
        ..map
    };
    account.layer(map, map, picture, false);
    account
}

fn encode_peak(config: &VaeConfig, sides: (usize, usize), latent_rows: usize, dtype: DType) -> usize {
    encode_account(config, sides, latent_rows, dtype).peak
}

/// Account of encoding a picture, in strips of latent rows.
pub(super) fn encode_account(
    config: &VaeConfig,
    (h, w): (usize, usize),
    latent_rows: usize,
    dtype: DType,
) -> Account {
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
    account.layer(picture, picture, map, true);
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
            account.layer(map, map, to, true);
            map = to;
        }
    }
    account.middle(map, config.mid_block_add_attention);
    let moments = Map {
        channels: 2 * config.latent_channels,
        ..map
    };
    account.layer(map, map, moments, false);
    account
}
