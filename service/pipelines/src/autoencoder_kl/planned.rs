//! The shapes for which a decode or an encode uses cuDNN, derived from the configuration.

use candle_core::DType;
use ops::Planned;

use super::blocks::attention_shape;
use super::config::VaeConfig;
use super::conv::{Padding, Strips};
use super::scratch::{Account, ConvolutionPass, Map, PlannedLayer, decode_account, encode_account};

impl VaeConfig {
    /// Shapes of decoding a latent of `h` by `w` with maps of this dtype, in strips of `latent_rows` latent rows; `h`
    /// of them decode it whole. Each shape once, in order of use.
    pub fn planned_to_decode(
        &self,
        (h, w): (usize, usize),
        latent_rows: usize,
        dtype: DType,
    ) -> Vec<Planned> {
        planned(&decode_account(self, (h, w), latent_rows, dtype))
    }

    /// Shapes of encoding a picture whose latent is `h` by `w`.
    pub fn planned_to_encode(
        &self,
        (h, w): (usize, usize),
        latent_rows: usize,
        dtype: DType,
    ) -> Vec<Planned> {
        planned(&encode_account(self, (h, w), latent_rows, dtype))
    }
}

fn planned(account: &Account) -> Vec<Planned> {
    let mut all = Vec::new();
    for seen in &account.seen {
        match seen {
            PlannedLayer::Convolution(pass, rows) => convolutions(pass, *rows, account.dtype, &mut all),
            PlannedLayer::Attention(map) => {
                let positions = map.height * map.width;
                let shape = attention_shape(positions, map.channels, account.dtype);
                add(Planned::Attention(shape), &mut all);
            }
        }
    }
    all
}

/// The shapes of all strips: the first, the last and the others differ.
fn convolutions(pass: &ConvolutionPass, rows: usize, dtype: DType, all: &mut Vec<Planned>) {
    let ConvolutionPass { read, to, kernel, .. } = *pass;
    let Map { channels, width, .. } = read;
    let strips = Strips {
        kernel,
        stride: pass.stride(),
        // Only downsampling pads at the bottom and right alone.
        padding: if pass.stride() == 1 {
            Padding::AROUND
        } else {
            Padding::BEHIND
        },
        height_read: read.height,
        height: to.height,
        rows,
    };
    let filter = [to.channels, channels, kernel, kernel];
    for strip in strips.each() {
        let (_, count, steps) = strips.window(strip);
        if let Some(shape) = Planned::convolution(&[count, width, channels], &filter, &steps, dtype) {
            add(shape, all);
        }
    }
}

fn add(shape: Planned, all: &mut Vec<Planned>) {
    if !all.contains(&shape) {
        all.push(shape);
    }
}
