//! The tokens of a picture.

use model::bounds::PIXELS_PER_TOKEN;

/// Rows and columns of tokens of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub rows: usize,
    pub columns: usize,
}

impl Place {
    /// The tokens of a picture of this size in pixels.
    pub(crate) fn of_picture(width: u32, height: u32) -> Place {
        Place {
            rows: (height / PIXELS_PER_TOKEN) as usize,
            columns: (width / PIXELS_PER_TOKEN) as usize,
        }
    }

    /// Number of tokens.
    pub fn tokens(self) -> usize {
        self.rows * self.columns
    }
}
