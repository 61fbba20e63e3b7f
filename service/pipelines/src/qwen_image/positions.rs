//! Qwen-Image's rotary embedding over three axes: picture, row, column. Rows and columns count from the middle of their picture; a
//! token of text has the same number on all axes, beyond the numbers of the largest picture (`QwenEmbedRope`).

use candle_core::{Device, Result};

use super::config::TransformerConfig;
use crate::place::Place;
use crate::rotary::{self, Rotations, Rounded};

/// Base of the rotary frequencies.
const THETA: f64 = 10_000.0;

/// Numbers that the reference's tables have in either direction.
pub(super) const MOST: usize = 4096;

/// Positions of the tokens of a picture of this number.
fn at(picture: i32, place: Place) -> impl Iterator<Item = [i32; 3]> {
    let from_middle = |side: usize| {
        let behind = (side / 2) as i32;
        (behind - side as i32)..behind
    };
    let columns = from_middle(place.columns);
    from_middle(place.rows).flat_map(move |row| columns.clone().map(move |column| [picture, row, column]))
}

/// The number of the first token of text beside these pictures.
pub(super) fn first_of_text(pictures: &[Place]) -> usize {
    let halves = pictures
        .iter()
        .flat_map(|place| [place.rows / 2, place.columns / 2]);
    halves.max().unwrap_or(0)
}

/// Positions of `text` tokens, and of those of the pictures, the generated one first, row by row.
pub fn positions(text: usize, pictures: &[Place]) -> Vec<[i32; 3]> {
    let first = first_of_text(pictures);
    let texts = (first..first + text).map(|number| [number as i32; 3]);
    let pictures = pictures.iter().zip(0..);
    texts
        .chain(pictures.flat_map(|(place, number)| at(number, *place)))
        .collect()
}

/// The rotations of these positions.
///
/// # Errors
/// Errors of the device.
pub fn rotations(positions: &[[i32; 3]], config: &TransformerConfig, device: &Device) -> Result<Rotations> {
    let axes = config.axes_dims_rope;
    rotary::rotations(positions, axes, THETA, Rounded::Frequencies, device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_count_from_the_middle_and_text_follows_the_largest_picture() {
        let place = |rows, columns| Place { rows, columns };
        let positions = positions(2, &[place(1, 3), place(4, 1)]);
        let expected = [
            [2, 2, 2],
            [3, 3, 3],
            [0, -1, -2],
            [0, -1, -1],
            [0, -1, 0],
            [1, -2, -1],
            [1, -1, -1],
            [1, 0, -1],
            [1, 1, -1],
        ];
        assert_eq!(positions, expected);
        assert_eq!(first_of_text(&[place(83, 64)]), 41);
        assert_eq!(first_of_text(&[place(64, 64), place(20, 80)]), 40);
    }
}
