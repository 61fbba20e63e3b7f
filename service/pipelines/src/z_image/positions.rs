//! Z-Image's rotary embedding over three axes. A text token has its index on the first axis; a picture token has the
//! first index after all text on it, and its row and column on the others
//! (`ZImageTransformer2DModel.patchify_and_embed`).

use candle_core::{Device, Result};

use super::config::{MULTIPLE, TransformerConfig};
use crate::rotary::{self, Rotations, Rounded};

/// Token counts of a picture and of its text, and their padding to multiples of `MULTIPLE`. Padding takes part in
/// attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    pub rows: usize,
    pub columns: usize,
    pub text: usize,
}

impl Lengths {
    /// Number of picture patches.
    pub fn picture(&self) -> usize {
        self.rows * self.columns
    }

    /// Number of picture patches with padding.
    pub fn padded_picture(&self) -> usize {
        self.picture().next_multiple_of(MULTIPLE)
    }

    /// Number of text tokens with padding.
    pub fn padded_text(&self) -> usize {
        self.text.next_multiple_of(MULTIPLE)
    }

    /// Number of all tokens, in the order picture, padding, text, padding.
    pub fn all(&self) -> usize {
        self.padded_picture() + self.padded_text()
    }
}

/// Positions of all tokens in that order. The text starts at 1 and continues through its padding; the padding of a
/// picture is at zero.
pub fn positions(lengths: &Lengths) -> Vec<[u32; 3]> {
    let text = lengths.padded_text() as u32;
    let (rows, columns) = (lengths.rows as u32, lengths.columns as u32);
    let picture = (0..rows).flat_map(|row| (0..columns).map(move |column| [text + 1, row, column]));
    let pads = std::iter::repeat_n([0; 3], lengths.padded_picture() - lengths.picture());
    picture
        .chain(pads)
        .chain((1..=text).map(|at| [at, 0, 0]))
        .collect()
}

/// The rotations of these positions: `RopeEmbedder`, which rounds angles to f32 before cosine and sine.
///
/// # Errors
/// Errors of the device.
pub fn rotations(positions: &[[u32; 3]], config: &TransformerConfig, device: &Device) -> Result<Rotations> {
    rotary::rotations(
        positions,
        config.axes_dims,
        config.rope_theta,
        Rounded::Angles,
        device,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_padding_continues_positions_and_picture_padding_is_at_zero() {
        let lengths = Lengths {
            rows: 3,
            columns: 11,
            text: 33,
        };
        let positions = positions(&lengths);
        assert_eq!(
            (lengths.padded_picture(), lengths.padded_text(), lengths.all()),
            (64, 64, 128)
        );
        assert_eq!(positions.len(), 128);
        assert_eq!(positions[0], [65, 0, 0]);
        assert_eq!(positions[32], [65, 2, 10]);
        assert_eq!((positions[33], positions[63]), ([0; 3], [0; 3]));
        assert_eq!((positions[64], positions[127]), ([1, 0, 0], [64, 0, 0]));
    }
}
