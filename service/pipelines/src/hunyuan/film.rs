//! Decoded frames to a film: which frames are final, which are blended with frames of the section before, and which are kept
//! for the next section. (`HunyuanVideoFramepackPipeline._soft_append`.)

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use super::sections::FilmPart;
use crate::autoencoders::hunyuan::frames_to_rgb8;
use crate::{MediaFormat, Piece, StageError, Video};

/// The film of which a decode delivers a part.
pub(super) struct Film {
    format: MediaFormat,
    /// Ranges of the decoded frames, in order, each with its use.
    parts: Vec<(Range<usize>, FilmPart)>,
    /// The last frames of the section before, `[frames, h, w, 3]`, in host memory.
    before: Option<Tensor>,
    /// Frames that are kept for the next section.
    kept: Vec<Tensor>,
}

impl Film {
    /// The part of a film that is decoded at once.
    pub(super) fn whole_parts(frames: usize) -> Vec<(Range<usize>, FilmPart)> {
        vec![(0..frames, FilmPart::Final { first: 0 })]
    }

    /// `before` are the last frames of the section before.
    pub(super) fn new(video: &Video, parts: Vec<(Range<usize>, FilmPart)>, before: Option<Tensor>) -> Film {
        Film {
            format: video.format(None),
            parts,
            before,
            kept: Vec::new(),
        }
    }

    /// Takes the next decoded frames, `[n, h, w, 3]` of -1 to 1, and delivers the frames that are final.
    ///
    /// # Errors
    /// [`StageError::NotFinite`]; [`StageError::BadInput`] if there is nothing to blend with.
    pub(super) fn take(
        &mut self,
        first: usize,
        frames: &Tensor,
        deliver: &mut dyn FnMut(Piece),
    ) -> Result<(), StageError> {
        let taken = first..first + frames.dim(0)?;
        for (range, part) in &self.parts {
            let here = range.start.max(taken.start)..range.end.min(taken.end);
            if here.is_empty() {
                continue;
            }
            let some = frames.narrow(0, here.start - taken.start, here.len())?;
            let offset = here.start - range.start;
            let (first, some) = match *part {
                FilmPart::Carried => {
                    self.kept.push(some.to_device(&Device::Cpu)?.contiguous()?);
                    continue;
                }
                FilmPart::Final { first } => (first, some),
                FilmPart::FadingOut { first } | FilmPart::FadingIn { first } => {
                    let before = self.before.as_ref().ok_or_else(|| {
                        StageError::BadInput("the frames of the section before are missing".to_owned())
                    })?;
                    let other = before.narrow(0, offset, here.len())?;
                    let own = some.to_device(&Device::Cpu)?;
                    let weights = weights(range.len(), own.dtype())?.narrow(0, offset, here.len())?;
                    let blended = match part {
                        FilmPart::FadingOut { .. } => faded(&own, &other, &weights)?,
                        _ => faded(&other, &own, &weights)?,
                    };
                    (first, blended)
                }
            };
            let rgb = frames_to_rgb8(&some)?;
            deliver(Piece {
                track: String::new(),
                format: self.format,
                first: (first + offset) as u64,
                data: rgb.into(),
            });
        }
        Ok(())
    }

    /// The frames that are left for the next section; `None` if there are none.
    ///
    /// # Errors
    /// Errors of candle.
    pub(super) fn left(self) -> Result<Option<Tensor>, StageError> {
        match self.kept.is_empty() {
            true => Ok(None),
            false => Ok(Some(Tensor::cat(&self.kept, 0)?)),
        }
    }
}

/// `torch.linspace(1, 0, count)`, `[count, 1, 1, 1]`: computed in f32 from both ends towards the middle.
fn weights(count: usize, dtype: DType) -> Result<Tensor, StageError> {
    let step = -1.0 / (count.saturating_sub(1).max(1)) as f32;
    let weight = |i: usize| match i < count / 2 {
        true => 1.0 + step * i as f32,
        false => -step * (count - 1 - i) as f32,
    };
    let weights: Vec<f32> = match count {
        1 => vec![1.0],
        _ => (0..count).map(weight).collect(),
    };
    Ok(Tensor::from_vec(weights, (count, 1, 1, 1), &Device::Cpu)?.to_dtype(dtype)?)
}

/// Blends `earlier` frames into `later` ones, by the weights of the earlier.
fn faded(earlier: &Tensor, later: &Tensor, weights: &Tensor) -> Result<Tensor, StageError> {
    let rest = weights.affine(-1.0, 1.0)?;
    let blended = (earlier.broadcast_mul(weights)? + later.broadcast_mul(&rest)?)?;
    Ok(blended.contiguous()?)
}
