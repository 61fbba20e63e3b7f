//! Decoded frames as bytes.

use candle_core::Tensor;
use model::StageError;

use super::source::finite;

/// Frames `[n, h, w, c]` of -1 to 1 to bytes in that order, as diffusers' `VideoProcessor.postprocess_video` rounds
/// them. Values beyond are clamped. Synchronizes on a card.
///
/// # Errors
/// [`StageError::NotFinite`].
pub fn frames_to_rgb8(frames: &Tensor) -> Result<Vec<u8>, StageError> {
    let (count, height, width, channels) = frames.dims4()?;
    let lines = frames.reshape((count * height, width, channels))?;
    let (bytes, is_finite) = ops::map_to_bytes(&lines)?;
    finite(is_finite)?;
    Ok(bytes)
}
