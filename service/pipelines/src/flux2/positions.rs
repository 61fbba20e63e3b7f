//! FLUX.2's rotary embedding over four axes: reference, row, column, and the index of a token of text.

use candle_core::{Device, Result};

use super::config::TransformerConfig;
use crate::place::Place;
use crate::rotary::{self, Rotations, Rounded};

/// First axis of the first reference picture, and the distance of those that follow.
const REFERENCE: u32 = 10;

/// Positions of a picture's tokens, with this first axis.
fn at(first: u32, place: Place) -> impl Iterator<Item = [u32; 4]> {
    let rows = 0..place.rows as u32;
    rows.flat_map(move |row| (0..place.columns as u32).map(move |column| [first, row, column, 0]))
}

/// Positions of `text` tokens, of those of the generated picture, and of those of reference pictures, row by row
/// (`Flux2KleinPipeline._prepare_text_ids`, `_prepare_latent_ids`, `_prepare_image_ids`).
pub fn positions(text: usize, picture: Place, references: &[Place]) -> Vec<[u32; 4]> {
    let texts = (0..text as u32).map(|index| [0, 0, 0, index]);
    let references = references.iter().zip(1..);
    let references = references.flat_map(|(place, number)| at(REFERENCE * number, *place));
    texts.chain(at(0, picture)).chain(references).collect()
}

/// The rotations of these positions: `Flux2PosEmbed`, computed in f64 and rounded once.
///
/// # Errors
/// Errors of the device.
pub fn rotations(positions: &[[u32; 4]], config: &TransformerConfig, device: &Device) -> Result<Rotations> {
    let (axes, theta) = (config.axes_dims_rope, config.rope_theta);
    rotary::rotations(positions, axes, theta, Rounded::Results, device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_follow_at_tens() {
        let place = |rows, columns| Place { rows, columns };
        let positions = positions(2, place(1, 2), &[place(2, 1), place(1, 1)]);
        let expected = [
            [0, 0, 0, 0],
            [0, 0, 0, 1],
            [0, 0, 0, 0],
            [0, 0, 1, 0],
            [10, 0, 0, 0],
            [10, 1, 0, 0],
            [20, 0, 0, 0],
        ];
        assert_eq!(positions, expected);
    }
}
