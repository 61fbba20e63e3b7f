//! Latents as tokens, and back.

use candle_core::{Result, Tensor};

/// Cells of a token along frames, rows and columns.
pub(super) type Patch = [usize; 3];

/// The patch of sampled frames, and of seen frames in full resolution.
pub(super) const FULL: Patch = [1, 2, 2];
/// The patch of frames that are seen in half resolution.
pub(super) const HALF: Patch = [2, 4, 4];
/// The patch of frames that are seen in a quarter of the resolution.
pub(super) const QUARTER: Patch = [4, 8, 8];

/// A latent `[channels, frames, rows, columns]` as tokens `[1, tokens, channels * cells]`, frames first. Where patches do
/// not divide it the last cells are repeated: `_pad_for_3d_conv`.
///
/// # Errors
/// Errors of candle.
pub(super) fn patches(latent: &Tensor, patch: Patch) -> Result<Tensor> {
    let channels = latent.dim(0)?;
    let mut padded = latent.clone();
    for (axis, cells) in patch.into_iter().enumerate() {
        let size = padded.dim(axis + 1)?;
        padded = padded.pad_with_same(axis + 1, 0, size.next_multiple_of(cells) - size)?;
    }
    let (_, frames, rows, columns) = padded.dims4()?;
    let [t, h, w] = patch;
    let tokens = (frames / t) * (rows / h) * (columns / w);
    padded
        .contiguous()?
        .reshape(vec![channels, frames / t, t, rows / h, h, columns / w, w])?
        .permute(vec![1, 3, 5, 0, 2, 4, 6])?
        .contiguous()?
        .reshape((1, tokens, channels * t * h * w))
}

/// Tokens `[1, tokens, channels * 4]` back to a latent `[channels, frames, 2 * rows, 2 * columns]`.
///
/// # Errors
/// When there are not `frames * rows * columns` tokens.
pub(super) fn unpatched(tokens: &Tensor, frames: usize, (rows, columns): (usize, usize)) -> Result<Tensor> {
    let channels = tokens.dim(2)? / 4;
    tokens
        .reshape(vec![frames, rows, columns, channels, 2, 2])?
        .permute(vec![3, 0, 1, 4, 2, 5])?
        .contiguous()?
        .reshape((channels, frames, 2 * rows, 2 * columns))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, IndexOp as _};

    use super::*;

    #[test]
    fn a_latent_becomes_tokens_and_comes_back() -> Result<()> {
        let latent = Tensor::arange(0f32, 3.0 * 2.0 * 4.0 * 6.0, &Device::Cpu)?.reshape((3, 2, 4, 6))?;
        let tokens = patches(&latent, FULL)?;
        assert_eq!(tokens.dims(), [1, 2 * 2 * 3, 12]);
        // The second token of the first row: columns 2 and 3 of rows 0 and 1, channel by channel.
        let second: Vec<f32> = tokens.i((0, 1))?.to_vec1()?;
        assert_eq!(second[..4], [2.0, 3.0, 8.0, 9.0]);
        assert_eq!(second[4], 48.0 + 2.0);
        let back = unpatched(&tokens, 2, (2, 3))?;
        assert_eq!(
            back.flatten_all()?.to_vec1::<f32>()?,
            latent.flatten_all()?.to_vec1::<f32>()?
        );
        Ok(())
    }

    #[test]
    fn the_last_cells_are_repeated_where_patches_do_not_divide() -> Result<()> {
        let latent = Tensor::arange(0f32, 2.0 * 6.0 * 6.0, &Device::Cpu)?.reshape((1, 2, 6, 6))?;
        let tokens = patches(&latent, HALF)?;
        assert_eq!(tokens.dims(), [1, 4, 32]);
        let last: Vec<f32> = tokens.i((0, 3))?.to_vec1()?;
        assert_eq!(last[..4], [28.0, 29.0, 29.0, 29.0]);
        assert_eq!(last[8..12], [34.0, 35.0, 35.0, 35.0]);
        Ok(())
    }
}
