//! The shapes for which a decode or an encode uses cuDNN, derived from the configuration.

use candle_core::DType;
use ops::Planned;

use super::config::OobleckConfig;
use super::scratch::{decode_account, encode_account};
use super::windows::Windows;

impl OobleckConfig {
    /// Shapes of decoding so many latent frames with sequences of this dtype. Each shape once, in order of use: all
    /// windows have the same.
    pub fn planned_to_decode(&self, frames: usize, windows: Windows, dtype: DType) -> Vec<Planned> {
        decode_account(self, frames, windows, dtype).planned
    }

    /// Shapes of encoding so many samples per channel. The last window of a number that is no multiple of a frame's
    /// samples is shorter, and has shapes of its own, which are not listed.
    pub fn planned_to_encode(&self, samples: usize, windows: Windows, dtype: DType) -> Vec<Planned> {
        encode_account(self, samples, windows, dtype).planned
    }
}
