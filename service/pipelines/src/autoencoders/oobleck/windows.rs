//! Windows of a track: which latent frames are processed at a time, and which of their samples are kept.

use std::ops::Range;

use ops::{SequenceShape, Through};
use serde::{Deserialize, Serialize};

use super::config::OobleckConfig;
use super::table::Layer;

/// How a track is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Windows {
    /// The whole track at once.
    Whole,
    /// Windows of `frames` latent frames, or of as few as see a frame whole. The result equals that of `Whole`.
    Of { frames: usize },
}

impl Windows {
    /// For reports: `whole`, `windows of 512 frames`.
    pub fn label(self) -> String {
        match self {
            Windows::Whole => "whole".to_owned(),
            Windows::Of { frames } => format!("windows of {frames} frames"),
        }
    }
}

/// Latent frames around a frame that its result depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Margins {
    pub(super) before: usize,
    pub(super) after: usize,
}

/// Latent frames that are processed together, and those of them whose results are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// Frames from `first` to `end`.
    pub(super) first: usize,
    pub(super) end: usize,
    pub(super) keep_first: usize,
    pub(super) keep_end: usize,
}

/// First and end of a range of positions in a layer's input or output, far from the edges.
type Span = (i64, i64);

/// The positions of a convolution's input on which the positions of a span depend.
fn seen((first, end): Span, shape: SequenceShape) -> Span {
    let taps = shape.taps as i64;
    match shape.through {
        Through::Dilated { dilation } => {
            let reach = taps / 2 * dilation as i64;
            (first - reach, end + reach)
        }
        Through::Strided { stride } => {
            let (stride, padding) = (stride as i64, stride.div_ceil(2) as i64);
            (first * stride - padding, (end - 1) * stride - padding + taps)
        }
        // Position `t` sees those before and at `(t + padding) / stride`.
        Through::Transposed { stride } => {
            let (stride, padding) = (stride as i64, stride.div_ceil(2) as i64);
            let (before, at) = (first + padding, end - 1 + padding);
            (before.div_euclid(stride) - 1, at.div_euclid(stride) + 1)
        }
    }
}

fn seen_by_all(span: Span, layers: &[Layer]) -> Span {
    layers
        .iter()
        .rev()
        .fold(span, |span, layer| seen(span, layer.shape()))
}

impl OobleckConfig {
    /// Latent frames around those that a frame's samples are decoded from.
    pub(super) fn decode_margins(&self) -> Margins {
        let (first, end) = seen_by_all((0, self.hop() as i64), &self.decoder());
        Margins {
            before: (-first).max(0) as usize,
            after: (end - 1).max(0) as usize,
        }
    }

    /// Latent frames around those whose samples a frame is encoded from, rounded up to whole frames.
    pub(super) fn encode_margins(&self) -> Margins {
        let hop = self.hop() as i64;
        let (first, end) = seen_by_all((0, 1), &self.encoder());
        let frames = |samples: i64| samples.max(0).unsigned_abs().div_ceil(hop.unsigned_abs()) as usize;
        Margins {
            before: frames(-first),
            after: frames(end - hop),
        }
    }
}

/// The windows, in order, of which the frames `kept` of a track of `frames` frames are kept. All have the same length, so that
/// they have the same plans and the same order of sums: the last one begins earlier instead of being shorter. Together they
/// keep each of the frames `kept` once.
pub(super) fn windows_of(
    frames: usize,
    kept: Range<usize>,
    windows: Windows,
    margins: Margins,
) -> Vec<Window> {
    let around = kept.len() + margins.before + margins.after;
    let length = window_frames(around.min(frames), windows, margins);
    let mut list = Vec::new();
    let mut next = kept.start;
    while next < kept.end {
        let first = next.saturating_sub(margins.before).min(frames - length);
        let end = first + length;
        let seen = if end == frames {
            frames
        } else {
            end - margins.after
        };
        let keep_end = seen.min(kept.end);
        list.push(Window {
            first,
            end,
            keep_first: next,
            keep_end,
        });
        next = keep_end;
    }
    list
}

/// Frames of each window of a track of `frames` frames. At least one frame of a window is kept.
pub(super) fn window_frames(frames: usize, windows: Windows, margins: Margins) -> usize {
    match windows {
        Windows::Whole => frames,
        Windows::Of { frames: wanted } => wanted.max(margins.before + 1 + margins.after).min(frames),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ace_step() -> OobleckConfig {
        OobleckConfig {
            downsampling_ratios: vec![2, 4, 4, 6, 10],
            ..OobleckConfig::default()
        }
    }

    #[test]
    fn margins_follow_from_the_layers() {
        assert_eq!(ace_step().decode_margins(), Margins { before: 9, after: 9 });
        assert_eq!(ace_step().encode_margins(), Margins { before: 7, after: 7 });
        let coarse = OobleckConfig {
            downsampling_ratios: vec![2, 4],
            channel_multiples: vec![1, 2],
            ..OobleckConfig::default()
        };
        let margins = coarse.decode_margins();
        assert!(margins.before > 9 && margins.after > 9, "{margins:?}");
    }

    #[test]
    fn windows_of_a_part_have_its_margins() {
        let margins = Margins { before: 3, after: 2 };
        for (kept, expected) in [
            (10..14, (7, 16)),
            (0..4, (0, 9)),
            (36..40, (31, 40)),
            (2..3, (0, 6)),
        ] {
            let list = windows_of(40, kept.clone(), Windows::Whole, margins);
            let [window] = list.as_slice() else {
                panic!("{list:?}");
            };
            assert_eq!((window.first, window.end), expected, "{kept:?}");
            assert_eq!(window.keep_first..window.keep_end, kept);
            let list = windows_of(40, kept.clone(), Windows::Of { frames: 7 }, margins);
            assert_eq!(list.first().map(|window| window.keep_first), Some(kept.start));
            assert_eq!(list.last().map(|window| window.keep_end), Some(kept.end));
        }
    }

    #[test]
    fn windows_cover_a_track_once_and_have_their_margins() {
        let margins = Margins { before: 3, after: 2 };
        for frames in 1..60 {
            for length in 1..70 {
                let list = windows_of(frames, 0..frames, Windows::Of { frames: length }, margins);
                let mut next = 0;
                for window in &list {
                    assert_eq!(window.keep_first, next);
                    assert!(window.keep_end > window.keep_first && window.end <= frames);
                    assert!(window.first == 0 || window.first + margins.before <= window.keep_first);
                    assert!(window.end == frames || window.keep_end + margins.after <= window.end);
                    assert_eq!(window.end - window.first, list[0].end - list[0].first);
                    next = window.keep_end;
                }
                assert_eq!(next, frames);
            }
            assert_eq!(windows_of(frames, 0..frames, Windows::Whole, margins).len(), 1);
        }
        assert!(windows_of(0, 0..0, Windows::Whole, margins).is_empty());
    }
}
