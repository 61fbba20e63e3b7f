//! Where tokens are, as angles: Z-Image's rotary embedding over three axes. A token of text has its place on the first; a
//! token of the picture has the first place behind all text on it, and its row and column on the others
//! (`ZImageTransformer2DModel.patchify_and_embed`).

use candle_core::{Device, Result};

use super::config::{MULTIPLE, TransformerConfig};
use crate::rotary::{self, Rotations, Rounded};

/// Tokens of a picture and of its text: what there is, and what stands behind it so that both are multiples of
/// `MULTIPLE`. Pads are tokens like others to attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Rows of patches.
    pub rows: usize,
    /// Columns of patches.
    pub columns: usize,
    /// Tokens of text.
    pub text: usize,
}

impl Lengths {
    /// Patches of the picture.
    pub fn picture(&self) -> usize {
        self.rows * self.columns
    }

    /// With the pads behind them.
    pub fn padded_picture(&self) -> usize {
        self.picture().next_multiple_of(MULTIPLE)
    }

    /// Tokens of text with the pads behind them.
    pub fn padded_text(&self) -> usize {
        self.text.next_multiple_of(MULTIPLE)
    }

    /// All tokens: the picture, its pads, the text, its pads.
    pub fn all(&self) -> usize {
        self.padded_picture() + self.padded_text()
    }
}

/// Positions of all tokens in that order. The text begins at 1 and runs on through its pads; the pads of a picture are at
/// zero.
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

/// The rotations of these positions: `RopeEmbedder`, which rounds angles to f32 and then takes their cosine and sine.
///
/// # Errors
/// Those of the device.
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
    fn pads_of_the_text_run_on_and_those_of_a_picture_are_at_zero() {
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
