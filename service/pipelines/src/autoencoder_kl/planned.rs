//! What cuDNN is asked for by a decode or an encode, from the configuration alone.

use candle_core::DType;
use ops::Planned;

use super::blocks::attention_shape;
use super::config::VaeConfig;
use super::conv::{Padding, Strips};
use super::scratch::{Account, Map, Pass, Seen, decode_account, encode_account};

impl VaeConfig {
    /// What decoding a latent of `h` by `w` with maps of this dtype asks for, in strips of so many rows of the latent;
    /// `h` of them decode it whole. Each shape once, in the order in which they are asked for.
    pub fn planned_to_decode(
        &self,
        (h, w): (usize, usize),
        latent_rows: usize,
        dtype: DType,
    ) -> Vec<Planned> {
        planned(&decode_account(self, (h, w), latent_rows, dtype))
    }

    /// What encoding a picture whose latent is `h` by `w` asks for.
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
            Seen::Convolution(pass, rows) => convolutions(pass, *rows, account.dtype, &mut all),
            Seen::Attention(map) => {
                let positions = map.height * map.width;
                let shape = attention_shape(positions, map.channels, account.dtype);
                add(Planned::Attention(shape), &mut all);
            }
        }
    }
    all
}

/// Those of all strips, of which the first, the last and the others differ.
fn convolutions(pass: &Pass, rows: usize, dtype: DType, all: &mut Vec<Planned>) {
    let Pass { read, to, kernel, .. } = *pass;
    let Map { channels, width, .. } = read;
    let strips = Strips {
        kernel,
        stride: pass.stride(),
        // Only what halves a map is padded behind alone.
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
