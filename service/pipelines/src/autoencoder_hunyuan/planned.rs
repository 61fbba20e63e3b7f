//! The shapes for which a decode or an encode uses cuDNN, derived from the configuration.

use candle_core::DType;
use ops::Planned;

use super::blocks::attention_shape;
use super::config::HunyuanVaeConfig;
use super::conv::Pass;
use super::scratch::{Account, Chunking, PlannedLayer, decode_account, encode_account};
use super::time::{decode_tiles, encode_tiles};

impl HunyuanVaeConfig {
    /// Shapes of decoding so many latents of `h` by `w` with maps of this dtype. Each shape once, in order of use. None
    /// for tiles in space, whose last ones are of other sizes.
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

    /// Shapes of encoding so many frames, whose latents are `h` by `w`.
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
            planned(&account(length), &mut all);
        }
    }
    all
}

fn planned(account: &Account, all: &mut Vec<Planned>) {
    for seen in &account.seen {
        match seen {
            PlannedLayer::Convolution(pass, rows) => convolutions(pass, *rows, account.dtype, all),
            PlannedLayer::Attention(map) => {
                let [height, frames, width] = map.sides;
                for frame in 0..frames {
                    let shape = attention_shape(frame, frames, height * width, map.channels, account.dtype);
                    add(Planned::Attention(shape), all);
                }
            }
        }
    }
}

/// The shapes of all strips: the last one differs.
fn convolutions(pass: &Pass, rows: usize, dtype: DType, all: &mut Vec<Planned>) {
    for (_, count) in pass.each(rows) {
        if let Some(shape) = Planned::convolution(&pass.buffer(count), &pass.filter(), &pass.steps(), dtype) {
            add(shape, all);
        }
    }
}

fn add(shape: Planned, all: &mut Vec<Planned>) {
    if !all.contains(&shape) {
        all.push(shape);
    }
}
