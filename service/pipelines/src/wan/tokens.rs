//! Latents as tokens of the transformer, and back: patch by patch, frames first, channels last within a patch.

use candle_core::{Result, Tensor};

use crate::z_image::{latent_of, patches_of};

/// A latent `[channels, frames, 2 rows, 2 columns]` as tokens `[1, frames * rows * columns, 4 channels]`.
///
/// # Errors
/// When its sides are odd.
pub(crate) fn tokens_of(latent: &Tensor) -> Result<Tensor> {
    let frames = patches_of(&latent.transpose(0, 1)?.contiguous()?)?.contiguous()?;
    let (count, tokens, width) = frames.dims3()?;
    frames.reshape((1, count * tokens, width))
}

/// Tokens back to a latent.
///
/// # Errors
/// When there are not `rows * columns` tokens for each frame.
pub(crate) fn latent_of_tokens(tokens: &Tensor, (rows, columns): (usize, usize)) -> Result<Tensor> {
    let (_, count, width) = tokens.dims3()?;
    let frames = count / (rows * columns).max(1);
    let frames = tokens.reshape((frames, rows * columns, width))?;
    latent_of(&frames, rows, columns)?.transpose(0, 1)?.contiguous()
}
