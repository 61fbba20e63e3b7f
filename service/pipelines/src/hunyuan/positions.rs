//! The rotary embedding of HunyuanVideo over frames, rows and columns, and of FramePack's frames in lower resolutions.

use std::ops::Range;

use candle_core::{Device, Result, Tensor};

use super::sections::Context;
use crate::rotary::{Rotations, Rounded, turns};

/// Tokens of latent frames in one resolution.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Grid {
    /// Positions of the latent frames on the axis of time.
    frames: Range<u32>,
    /// Positions that one token covers, along every axis: their cosines and sines are averaged
    /// (`HunyuanVideoFramepackTransformer3DModel._pad_rotary_emb`).
    averaged: usize,
}

/// Rows and columns of tokens in full resolution.
pub(super) type Sides = (usize, usize);

/// The widths of the rotary axes in a head, and the base of their frequencies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axes {
    pub(super) widths: [usize; 3],
    pub(super) theta: f64,
}

/// Cosines and sines of the pairs of one axis, by place on it.
type Table = Vec<Vec<(f32, f32)>>;

/// The rotations of positions on an axis. Each is the mean over `averaged` positions; the last position is repeated where they
/// do not divide.
fn table(positions: Range<u32>, averaged: usize, (width, theta): (usize, f64)) -> Table {
    let last = positions.end.saturating_sub(1);
    let own: Vec<u32> = positions.collect();
    let of = |chunk: &[u32]| -> Vec<(f32, f32)> {
        let places = (0..averaged).map(|i| chunk.get(i).copied().unwrap_or(last));
        let turned: Vec<Vec<(f32, f32)>> = places
            .map(|at| turns(at, width, theta, Rounded::Frequencies))
            .collect();
        let mean = |pair: usize, pick: fn(&(f32, f32)) -> f32| {
            let sum: f32 = turned.iter().map(|pairs| pick(&pairs[pair])).sum();
            sum / averaged as f32
        };
        (0..width / 2)
            .map(|pair| (mean(pair, |turn| turn.0), mean(pair, |turn| turn.1)))
            .collect()
    };
    own.chunks(averaged).map(of).collect()
}

fn rotations_of(text: usize, grids: &[Grid], sides: Sides, axes: Axes, device: &Device) -> Result<Rotations> {
    let pairs = axes.widths.iter().sum::<usize>() / 2;
    // The text is not rotated.
    let mut cos = vec![1.0_f32; text * pairs];
    let mut sin = vec![0.0_f32; text * pairs];
    for grid in grids {
        let spans = [grid.frames.clone(), 0..sides.0 as u32, 0..sides.1 as u32];
        let [frames, rows, columns]: [Table; 3] = std::array::from_fn(|axis| {
            let span = spans[axis].clone();
            table(span, grid.averaged, (axes.widths[axis], axes.theta))
        });
        for frame in &frames {
            for row in &rows {
                for column in &columns {
                    for &(s, c) in frame.iter().chain(row).chain(column) {
                        sin.push(s);
                        cos.push(c);
                    }
                }
            }
        }
    }
    let shape = (cos.len() / pairs.max(1), pairs);
    Ok(Rotations {
        cos: Tensor::from_vec(cos, shape, device)?,
        sin: Tensor::from_vec(sin, shape, device)?,
    })
}

/// Rotations of `text` tokens and a film of `frames` latent frames: `HunyuanVideoRotaryPosEmbed`.
///
/// # Errors
/// Errors of the device.
pub(super) fn film(
    text: usize,
    frames: usize,
    sides: Sides,
    axes: Axes,
    device: &Device,
) -> Result<Rotations> {
    let whole = Grid {
        frames: 0..frames as u32,
        averaged: 1,
    };
    rotations_of(text, &[whole], sides, axes, device)
}

/// Rotations of `text` tokens and of a section with the frames it sees, in the order of [`super::transformer::Seen`].
///
/// # Errors
/// Errors of the device.
pub(super) fn section(
    text: usize,
    context: &Context,
    sides: Sides,
    axes: Axes,
    device: &Device,
) -> Result<Rotations> {
    let at = |first: u32, count: usize| first..first + count as u32;
    let grid = |frames, averaged| Grid { frames, averaged };
    let [start, near] = context.full.map(|(_, position)| at(position, 1));
    let grids = [
        grid(at(context.quarter.1, context.quarter.0.len()), 4),
        grid(at(context.half.1, context.half.0.len()), 2),
        grid(start, 1),
        grid(near, 1),
        grid(context.sampled.clone(), 1),
    ];
    rotations_of(text, &grids, sides, axes, device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averaged_positions_are_means_and_the_last_is_repeated() {
        let axis = (4, 256.0);
        let single = table(0..3, 1, axis);
        let averaged = table(0..3, 2, axis);
        assert_eq!((single.len(), averaged.len()), (3, 2));
        for pair in 0..2 {
            let mean = |a: f32, b: f32| (a + b) / 2.0;
            assert_eq!(averaged[0][pair].0, mean(single[0][pair].0, single[1][pair].0));
            assert_eq!(averaged[1][pair], single[2][pair]);
        }
        assert_eq!(single[0][0], (0.0, 1.0));
    }
}
