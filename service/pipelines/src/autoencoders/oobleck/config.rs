//! `vae/config.json`.

use serde::Deserialize;

use super::table::Layer;

/// Most levels, samples per latent frame, and channels of a level: far above any published model. Untrusted values must
/// not overflow, nor exhaust memory.
const MAX_LEVELS: usize = 16;
const MAX_HOP: usize = 1 << 20;
const MAX_CHANNELS: usize = 1 << 16;

/// Configuration of diffusers' `AutoencoderOobleck`. Missing fields have diffusers' defaults.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct OobleckConfig {
    /// Channels of the encoder's first layer, and of its output: mean and scale, half of them each.
    pub encoder_hidden_size: usize,
    /// Strides of the encoder's levels, from the samples on; those of the decoder in reverse order.
    pub downsampling_ratios: Vec<usize>,
    /// Channels of each level, as multiples of those of the first layer.
    pub channel_multiples: Vec<usize>,
    /// Channels of the decoder's last level.
    pub decoder_channels: usize,
    /// Channels of a latent frame.
    pub decoder_input_channels: usize,
    /// Channels of a track: 1 or 2.
    pub audio_channels: usize,
    /// Samples per second and channel.
    pub sampling_rate: u32,
}

impl Default for OobleckConfig {
    fn default() -> OobleckConfig {
        OobleckConfig {
            encoder_hidden_size: 128,
            downsampling_ratios: vec![2, 4, 4, 8, 8],
            channel_multiples: vec![1, 2, 4, 8, 16],
            decoder_channels: 128,
            decoder_input_channels: 64,
            audio_channels: 2,
            sampling_rate: 44100,
        }
    }
}

/// A level: its stride, and the channels on its finer and on its coarser side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Level {
    pub(super) stride: usize,
    pub(super) finer: usize,
    pub(super) coarser: usize,
}

impl OobleckConfig {
    /// Samples per latent frame and channel.
    pub fn hop(&self) -> usize {
        self.downsampling_ratios.iter().product()
    }

    /// Samples per channel of the track that `frames` latent frames are decoded to.
    pub fn samples(&self, frames: usize) -> usize {
        length_after(&self.decoder(), frames)
    }

    /// Latent frames of a track of `samples` samples per channel; 0 for one that is too short.
    pub fn frames(&self, samples: usize) -> usize {
        length_after(&self.encoder(), samples)
    }

    /// The levels of the encoder or the decoder, whose finest has `channels` channels; those nearest to the samples first.
    pub(super) fn levels(&self, channels: usize) -> Vec<Level> {
        let multiples = std::iter::once(&1).chain(&self.channel_multiples);
        let pairs = multiples.zip(&self.channel_multiples);
        let strides = self.downsampling_ratios.iter();
        strides
            .zip(pairs)
            .map(|(&stride, (&finer, &coarser))| Level {
                stride,
                finer: channels * finer,
                coarser: channels * coarser,
            })
            .collect()
    }

    /// Checks that this autoencoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let (strides, multiples) = (&self.downsampling_ratios, &self.channel_multiples);
        if strides.is_empty() || strides.len() > MAX_LEVELS || multiples.len() != strides.len() {
            return Err(format!(
                "{} strides and {} multiples of channels; as many of both are expected, at most {MAX_LEVELS}",
                strides.len(),
                multiples.len()
            ));
        }
        let hop = strides
            .iter()
            .try_fold(1usize, |hop, stride| hop.checked_mul(*stride));
        if !hop.is_some_and(|hop| (1..=MAX_HOP).contains(&hop)) {
            return Err(format!("strides of {strides:?}"));
        }
        let most = multiples.iter().copied().max().unwrap_or(1);
        let widths = [
            self.encoder_hidden_size.checked_mul(most),
            self.decoder_channels.checked_mul(most),
            Some(self.encoder_hidden_size),
            Some(self.decoder_channels),
            Some(self.decoder_input_channels),
            Some(multiples.iter().copied().min().unwrap_or(1)),
        ];
        let is_width = |width: &Option<usize>| width.is_some_and(|width| (1..=MAX_CHANNELS).contains(&width));
        if !widths.iter().all(is_width) {
            return Err(format!(
                "{}, {} and {} channels in multiples of {multiples:?}",
                self.encoder_hidden_size, self.decoder_channels, self.decoder_input_channels
            ));
        }
        if !self.encoder_hidden_size.is_multiple_of(2) {
            return Err(format!("{} channels of mean and scale", self.encoder_hidden_size));
        }
        if !(1..=2).contains(&self.audio_channels) {
            return Err(format!(
                "{} channels of sound; 1 and 2 are known",
                self.audio_channels
            ));
        }
        if self.sampling_rate == 0 {
            return Err("no samples per second".to_owned());
        }
        Ok(())
    }
}

/// Length of a sequence after all layers; 0 for one that is too short.
fn length_after(layers: &[Layer], length: usize) -> usize {
    let after = |length: usize, layer: &Layer| Some(layer.shape().reach(length)?.length);
    layers.iter().try_fold(length, after).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ace_step() -> OobleckConfig {
        OobleckConfig {
            downsampling_ratios: vec![2, 4, 4, 6, 10],
            sampling_rate: 48000,
            ..OobleckConfig::default()
        }
    }

    #[test]
    fn a_frame_of_ace_step_is_1920_samples() {
        let config = ace_step();
        assert_eq!((config.check(), config.hop()), (Ok(()), 1920));
        assert_eq!(
            [1, 25, 6000].map(|frames| config.samples(frames)),
            [1920, 48000, 11_520_000]
        );
        assert_eq!(
            [1919, 1920, 3839, 48000].map(|samples| config.frames(samples)),
            [0, 1, 1, 25]
        );
        let levels: Vec<_> = config
            .levels(128)
            .iter()
            .map(|level| (level.finer, level.coarser))
            .collect();
        assert_eq!(
            levels,
            [(128, 128), (128, 256), (256, 512), (512, 1024), (1024, 2048)]
        );
    }

    #[test]
    fn odd_strides_change_lengths_as_the_reference_does() {
        let config = OobleckConfig {
            downsampling_ratios: vec![1, 2],
            channel_multiples: vec![2, 4],
            ..OobleckConfig::default()
        };
        // L + 1 positions by a stride of 1 in the encoder, L - 1 in the decoder.
        assert_eq!([1, 2, 7].map(|samples| config.frames(samples)), [1, 1, 4]);
        assert_eq!([1, 2, 7].map(|frames| config.samples(frames)), [1, 3, 13]);
    }

    #[test]
    fn unsupported_settings_are_named() {
        assert_eq!(OobleckConfig::default().check(), Ok(()));
        for (change, word) in [
            (
                &(|c: &mut OobleckConfig| c.downsampling_ratios = vec![2, 4]) as &dyn Fn(&mut OobleckConfig),
                "2 strides and 5",
            ),
            (&|c| c.downsampling_ratios[1] = 0, "strides of [2, 0"),
            (&|c| c.downsampling_ratios[1] = usize::MAX, "strides of"),
            (&|c| c.encoder_hidden_size = 1 << 15, "32768, 128"),
            (&|c| c.encoder_hidden_size = 7, "7 channels of mean"),
            (&|c| c.decoder_input_channels = 0, "128 and 0 channels"),
            (&|c| c.channel_multiples[2] = 0, "[1, 2, 0"),
            (&|c| c.audio_channels = 6, "6 channels of sound"),
            (&|c| c.sampling_rate = 0, "no samples"),
        ] {
            let mut config = OobleckConfig::default();
            change(&mut config);
            let problem = config.check().expect_err("not supported");
            assert!(problem.contains(word), "{problem}");
        }
    }
}
