//! Attention with one head, of each frame over all positions of this frame and of the frames before it.

use candle_core::{DType, Tensor};
use model::StageError;
use ops::{AttentionShape, ChannelNorm, MapReading, Mask, MaskShape, Onto};

use super::pass::Map;
use super::source::LayerSource;
use super::strips::{Goes, Walk};
use crate::maps::{Convolution, GroupNorm};

/// `Attention` of diffusers, in the middle of either half.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    norm: GroupNorm,
    to_q: Convolution,
    to_k: Convolution,
    to_v: Convolution,
    to_out: Convolution,
}

impl Attention {
    pub(super) fn new(source: LayerSource<'_>, name: &str, channels: usize) -> Result<Attention, StageError> {
        Ok(Attention {
            norm: source.norm(&format!("{name}.group_norm"), channels)?,
            to_q: source.square(&format!("{name}.to_q"), channels)?,
            to_k: source.square(&format!("{name}.to_k"), channels)?,
            to_v: source.square(&format!("{name}.to_v"), channels)?,
            to_out: source.square(&format!("{name}.to_out.0"), channels)?,
        })
    }

    /// Adds attention to the map, in place. Tokens are ordered by frame: `[t, h, w, c]`.
    pub(super) fn forward(&self, map: &Tensor, walk: Walk<'_>) -> Result<(), StageError> {
        walk.check_cancelled()?;
        let (height, frames, width, channels) = map.dims4()?;
        let blank = || ops::blank(&[frames, height, width, channels], map.dtype(), map.device());
        let affine = self.norm.measure(map)?;
        let reading = MapReading {
            norm: ChannelNorm::Affine(&affine),
            ..MapReading::PLAIN
        };
        let normed = blank()?;
        ops::apply_norm(&map.permute((1, 0, 2, 3))?, &reading, [0; 3], &normed)?;
        let [queries, keys, values] = [blank()?, blank()?, blank()?];
        for (projection, out) in [(&self.to_q, &queries), (&self.to_k, &keys), (&self.to_v, &values)] {
            projection.of_positions(&normed, out, Onto::Nothing)?;
        }
        // The normalized map is no longer needed: the result is written over it. The CPU attends in f32.
        let wide = |map: &Tensor| match map.device().is_cpu() {
            true => map.to_dtype(DType::F32),
            false => Ok(map.clone()),
        };
        let seen = wide(&normed)?;
        {
            let of_frame = height * width;
            let by_token = |map: &Tensor| wide(map)?.reshape((1, frames * of_frame, 1, channels));
            let (queries, keys, values) = (by_token(&queries)?, by_token(&keys)?, by_token(&values)?);
            let seen = seen.reshape((1, frames * of_frame, 1, channels))?;
            let scale = 1.0 / (channels as f64).sqrt();
            for frame in 0..frames {
                walk.check_cancelled()?;
                let (first, until) = (frame * of_frame, (frame + 1) * of_frame);
                ops::attention(
                    &queries.narrow(1, first, of_frame)?,
                    &keys.narrow(1, 0, until)?,
                    &values.narrow(1, 0, until)?,
                    scale,
                    Mask::None,
                    &seen.narrow(1, first, of_frame)?,
                )?;
            }
        }
        drop((normed, keys, values));
        self.add(&seen.to_dtype(map.dtype())?, queries, map, walk)
    }

    /// Adds the last projection of `seen`. It is computed in the memory of `free` where frames have to change places.
    fn add(&self, seen: &Tensor, free: Tensor, map: &Tensor, walk: Walk<'_>) -> Result<(), StageError> {
        let (height, frames, width, channels) = map.dims4()?;
        if walk.goes() == Goes::There && frames == 1 {
            return Ok(self.to_out.of_positions(seen, map, Onto::Itself)?);
        }
        self.to_out.of_positions(seen, &free, Onto::Nothing)?;
        // Rows of one frame at a time, whose distance is constant in either map.
        let line = width * channels;
        let by_frame = map.reshape((height, frames, line))?;
        let added = free.reshape((frames, height, line))?;
        for frame in 0..frames {
            let target = by_frame.narrow(1, frame, 1)?.squeeze(1)?;
            ops::add_rows(&added.narrow(0, frame, 1)?.squeeze(0)?, &target)?;
        }
        Ok(())
    }
}

/// Shape of the attention of a frame of a map, counted from 0: one head of all channels.
pub(super) fn attention_shape(map: Map, frame: usize, dtype: DType) -> AttentionShape {
    let [height, frames, width] = map.sides;
    let of_frame = height * width;
    let (head, rows) = ((1, map.channels), (map.channels, map.channels));
    AttentionShape {
        queries: of_frame,
        keys: (frame + 1) * of_frame,
        ..AttentionShape::of_rows(frames * of_frame, head, rows, dtype, MaskShape::None)
    }
}
