//! The latent of a film as tokens: patches of two by two cells, cell by cell, channels last.

use candle_core::{Result, Tensor};

/// A latent `[channels, frames, h, w]` as `[1, frames h/2 w/2, 4 channels]`.
///
/// # Errors
/// When a side is odd.
pub(super) fn tokens_of(latent: &Tensor) -> Result<Tensor> {
    let (channels, frames, h, w) = latent.dims4()?;
    let cells = latent.reshape(&[channels, frames, h / 2, 2, w / 2, 2][..])?;
    let cells = cells.permute(&[1, 2, 4, 3, 5, 0][..])?.contiguous()?;
    cells.reshape((1, frames * (h / 2) * (w / 2), 4 * channels))
}

/// Tokens as the latent of so many frames, with rows and columns of tokens.
///
/// # Errors
/// When there are others than these.
pub(super) fn latent_of(tokens: &Tensor, [frames, rows, columns]: [usize; 3]) -> Result<Tensor> {
    let channels = tokens.dim(2)? / 4;
    let cells = tokens.reshape(&[frames, rows, columns, 2, 2, channels][..])?;
    let cells = cells.permute(&[5, 0, 1, 3, 2, 4][..])?.contiguous()?;
    cells.reshape((channels, frames, 2 * rows, 2 * columns))
}
