//! The configuration of the autoencoder.

use serde::Deserialize;

/// Bins of the autoencoder of 44.1 kHz, whose vocoder and whose logarithm differ.
const BINS_OF_44K: usize = 128;
/// Most levels, and channels of a level: far above any published model. Untrusted values must not overflow, nor exhaust
/// memory.
const MAX_LEVELS: usize = 8;
const MAX_CHANNELS: usize = 1 << 14;

/// Configuration of diffusers' `MMAudioVAE`, as far as its decoder reads it. Missing fields are those of the autoencoder of
/// 16 kHz, whose files have no configuration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct MmAudioConfig {
    /// Bins of a mel spectrogram.
    pub mel_bins: usize,
    /// Channels of a latent frame.
    pub latent_channels: usize,
    /// Channels of the level nearest to the spectrogram.
    pub hidden_channels: usize,
    /// Channels of each level, as multiples of these.
    pub channel_multipliers: Vec<usize>,
    /// Residual blocks of a level of the encoder; a level of the decoder has one more.
    pub layers_per_block: usize,
    /// Whether the weights are stored normalised, as in diffusers' files. They are not in the authors'.
    pub has_normalised_weights: bool,
}

impl Default for MmAudioConfig {
    fn default() -> MmAudioConfig {
        MmAudioConfig {
            mel_bins: 80,
            latent_channels: 20,
            hidden_channels: 384,
            channel_multipliers: vec![1, 2, 4],
            layers_per_block: 2,
            has_normalised_weights: false,
        }
    }
}

impl MmAudioConfig {
    /// Frames of a mel spectrogram for each latent frame.
    pub const FRAMES: usize = 2;

    /// Checks that this autoencoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.mel_bins == BINS_OF_44K {
            return Err(format!(
                "{BINS_OF_44K} bins: it is MMAudio's autoencoder of 44.1 kHz, which does not run here. \
                 Use that of 16 kHz: v1-16.pth, or mmaudio_vae_16k_bf16.safetensors"
            ));
        }
        let multipliers = &self.channel_multipliers;
        if !(2..=MAX_LEVELS).contains(&multipliers.len()) {
            return Err(format!(
                "{} levels; 2 to {MAX_LEVELS} are expected",
                multipliers.len()
            ));
        }
        let widths = multipliers
            .iter()
            .map(|multiplier| self.hidden_channels.checked_mul(*multiplier))
            .chain([Some(self.mel_bins), Some(self.latent_channels)]);
        for width in widths {
            if !width.is_some_and(|width| (1..=MAX_CHANNELS).contains(&width)) {
                return Err(format!(
                    "{}, {} and {} channels in multiples of {multipliers:?}",
                    self.hidden_channels, self.latent_channels, self.mel_bins
                ));
            }
        }
        if !(1..=MAX_LEVELS).contains(&self.layers_per_block) {
            return Err(format!("{} blocks in a level", self.layers_per_block));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_settings_are_named() {
        assert_eq!(MmAudioConfig::default().check(), Ok(()));
        for (change, word) in [
            (
                &(|c: &mut MmAudioConfig| c.mel_bins = 128) as &dyn Fn(&mut MmAudioConfig),
                "44.1 kHz",
            ),
            (&|c| c.channel_multipliers = vec![1], "1 levels"),
            (&|c| c.channel_multipliers = vec![1, 0, 2], "[1, 0, 2]"),
            (&|c| c.hidden_channels = usize::MAX, "in multiples of"),
            (&|c| c.latent_channels = 0, "384, 0 and 80"),
            (&|c| c.layers_per_block = 0, "0 blocks"),
        ] {
            let mut config = MmAudioConfig::default();
            change(&mut config);
            let problem = config.check().expect_err("not supported");
            assert!(problem.contains(word), "{problem}");
        }
    }
}
