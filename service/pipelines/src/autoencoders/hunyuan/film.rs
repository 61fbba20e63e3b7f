//! Latents to frames, as they are finished: `AutoencoderKLHunyuanVideo.decode`, tile by tile in time.

use candle_core::{DType, Tensor};
use model::StageError;

use super::decoder::HunyuanVaeDecoder;
use super::scratch::Chunking;
use super::time::decode_tiles;
use crate::autoencoders::tiles::copy;

/// How a film is decoded. Only tiles in space change its frames.
#[derive(Clone, Copy)]
pub struct FrameDecoding<'a> {
    pub chunking: Chunking,
    /// Most frames that are delivered at a time.
    pub frames_at_a_time: usize,
    /// Factor of the latents: 1 where they are in the autoencoder's scale,
    /// [`super::HunyuanVaeConfig::unscaling`] where they are in the transformer's.
    pub factor: f64,
    /// Called before every layer and every strip.
    pub cancelled: &'a dyn Fn() -> bool,
}

impl HunyuanVaeDecoder {
    /// Decodes `latents`, f32 `[1, latent_channels, l, h, w]`, to the `4 (l - 1) + 1` frames of
    /// `AutoencoderKLHunyuanVideo.decode`, with its tiles in time. `deliver` is called with the index of a frame, and with the
    /// frames from there on, `[n, 8h, 8w, out_channels]` in the dtype of maps, -1 to 1 and not clamped. Each frame is delivered
    /// once and in order, as soon as its tile is decoded. Between tiles four frames are held. Delivered frames are a view,
    /// which keeps all frames of its tile in memory.
    ///
    /// # Errors
    /// [`StageError::Cancelled`]; [`StageError::BadInput`] for latents of another shape; errors of `deliver`. Whether
    /// values are finite is found by [`super::frames_to_rgb8`].
    pub fn decode_frames(
        &self,
        latents: &Tensor,
        how: &FrameDecoding<'_>,
        deliver: &mut dyn FnMut(usize, Tensor) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let expected = self.config().latent_channels;
        let &[1, channels, length, h, w] = latents.dims() else {
            return Err(not_latents(latents, expected));
        };
        if channels != expected || length * h * w == 0 {
            return Err(not_latents(latents, expected));
        }
        let planes = latents.to_dtype(DType::F32)?.contiguous()?;
        let planes = planes.reshape((1, channels, length * h, w))?;
        let map = ops::planes_to_map(&planes, (how.factor, 0.0), self.dtype())?;
        let map = map.reshape((length, h, w, channels))?;
        let mut next = 0;
        let mut carried: Option<Tensor> = None;
        for tile in decode_tiles(self.config(), length) {
            let of_tile = map.narrow(0, tile.first, tile.count)?;
            let decoded = self.decode_tile(of_tile, how.chunking, how.cancelled)?;
            let outputs = decoded.dim(0)? - tile.dropped;
            let decoded = decoded.narrow(0, tile.dropped, outputs)?;
            if let Some(before) = carried.take() {
                blend(&before, &decoded, tile.blended)?;
            }
            if tile.carried > 0 {
                let last = decoded.narrow(0, outputs - tile.carried, tile.carried)?;
                carried = Some(copy(&last)?);
            }
            for first in (0..tile.kept).step_by(how.frames_at_a_time.max(1)) {
                let count = how.frames_at_a_time.max(1).min(tile.kept - first);
                deliver(next, decoded.narrow(0, first, count)?)?;
                next += count;
            }
        }
        Ok(())
    }
}

fn not_latents(latents: &Tensor, channels: usize) -> StageError {
    let found = latents.dims();
    StageError::BadInput(format!(
        "latents of shape {found:?} where [1, {channels}, l, h, w] are expected"
    ))
}

/// `blend_t`: blends the first `count` outputs of a tile with the last of the tile before.
pub(super) fn blend(before: &Tensor, outputs: &Tensor, count: usize) -> Result<(), StageError> {
    if count == 0 {
        return Ok(());
    }
    let last = before.narrow(0, before.dim(0)? - count, count)?;
    let first = outputs.narrow(0, 0, count)?;
    let (_, height, width, channels) = first.dims4()?;
    let lines = |map: &Tensor| map.reshape((count, height * width, channels));
    Ok(ops::blend(&lines(&last)?, &lines(&first)?, true)?)
}
