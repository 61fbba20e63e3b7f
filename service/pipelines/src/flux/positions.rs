//! FLUX's rotary embedding over three axes.

use candle_core::{Device, Result};

use crate::rotary::{self, Rotations, Rounded};

/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;

/// Positions of `text` tokens, all zero, followed by those of a picture of `rows` by `columns` tokens: `[0, row,
/// column]`, row-major. (`FluxPipeline._prepare_latent_image_ids`.)
pub fn positions(text: usize, rows: usize, columns: usize) -> Vec<[u32; 3]> {
    let picture = (0..rows as u32).flat_map(|row| (0..columns as u32).map(move |column| [0, row, column]));
    std::iter::repeat_n([0; 3], text).chain(picture).collect()
}

/// Positions of a reference picture of `rows` by `columns` tokens, which follow those of the generated one: `[1, row,
/// column]`. (`FluxKontextPipeline.prepare_latents`.)
pub(super) fn reference_positions(rows: usize, columns: usize) -> impl Iterator<Item = [u32; 3]> {
    (0..rows as u32).flat_map(move |row| (0..columns as u32).map(move |column| [1, row, column]))
}

/// The rotations of these positions: `FluxPosEmbed`, computed in f64 and rounded once. `axes` are the widths of the
/// axes in a head (16, 56 and 56 of 128).
///
/// # Errors
/// Errors of candle.
pub fn rotations(positions: &[[u32; 3]], axes: [usize; 3], device: &Device) -> Result<Rotations> {
    rotary::rotations(positions, axes, THETA, Rounded::Results, device)
}
