//! The configuration of the vocoder.

use serde::Deserialize;

/// Most stages, taps, dilations and channels: far above any published model. Untrusted values must not overflow, nor exhaust
/// memory.
const MAX_STAGES: usize = 8;
const MAX_TAPS: usize = 31;
const MAX_RATE: usize = 64;
const MAX_CHANNELS: usize = 1 << 13;

/// Configuration of diffusers' `MMAudioVocoder`. Missing fields are those of the vocoder of 16 kHz, whose file has no
/// configuration.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct VocoderConfig {
    /// Bins of a mel spectrogram.
    pub num_mels: usize,
    /// Channels of the first layer. Each stage has half as many as the one before it.
    pub upsample_initial_channel: usize,
    /// By how much each stage lengthens a sequence.
    pub upsample_rates: Vec<usize>,
    /// Taps of its transposed convolution: twice as many.
    pub upsample_kernel_sizes: Vec<usize>,
    /// Taps of the residual blocks of a stage.
    pub resblock_kernel_sizes: Vec<usize>,
    /// Dilations of each of them.
    pub resblock_dilation_sizes: Vec<Vec<usize>>,
}

impl Default for VocoderConfig {
    fn default() -> VocoderConfig {
        VocoderConfig {
            num_mels: 80,
            upsample_initial_channel: 1536,
            upsample_rates: vec![4, 4, 2, 2, 2, 2],
            upsample_kernel_sizes: vec![8, 8, 4, 4, 4, 4],
            resblock_kernel_sizes: vec![3, 7, 11],
            resblock_dilation_sizes: vec![vec![1, 3, 5]; 3],
        }
    }
}

impl VocoderConfig {
    /// Samples for each frame of a spectrogram.
    pub fn hop(&self) -> usize {
        self.upsample_rates.iter().product()
    }

    /// Checks that this vocoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let (rates, taps) = (&self.upsample_rates, &self.upsample_kernel_sizes);
        if rates.is_empty() || rates.len() > MAX_STAGES || taps.len() != rates.len() {
            return Err(format!("stages of {rates:?} with {taps:?} taps"));
        }
        let is_doubled = |(rate, taps): (&usize, &usize)| {
            (1..=MAX_RATE).contains(rate) && rate.is_multiple_of(2) && *taps == 2 * rate
        };
        if !rates.iter().zip(taps).all(is_doubled) {
            return Err(format!(
                "stages of {rates:?} with {taps:?} taps; even rates with twice as many taps are known"
            ));
        }
        let (kernels, dilations) = (&self.resblock_kernel_sizes, &self.resblock_dilation_sizes);
        if kernels.is_empty() || kernels.len() > MAX_STAGES || kernels.len() != dilations.len() {
            return Err(format!("blocks of {kernels:?} taps with {dilations:?}"));
        }
        let is_odd = |taps: &usize| taps % 2 == 1 && *taps <= MAX_TAPS;
        let is_few = |of: &Vec<usize>| {
            (1..=MAX_STAGES).contains(&of.len())
                && of.iter().all(|dilation| (1..=MAX_TAPS).contains(dilation))
        };
        if !kernels.iter().all(is_odd) || !dilations.iter().all(is_few) {
            return Err(format!("blocks of {kernels:?} taps with {dilations:?}"));
        }
        let first = self.upsample_initial_channel;
        if !(1..=MAX_CHANNELS).contains(&first) || !first.is_multiple_of(1 << rates.len()) {
            return Err(format!("{first} channels in {} stages", rates.len()));
        }
        if !(1..=MAX_CHANNELS).contains(&self.num_mels) {
            return Err(format!("{} bins", self.num_mels));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_settings_are_named() {
        let published = VocoderConfig::default();
        assert_eq!((published.check(), published.hop()), (Ok(()), 256));
        for (change, word) in [
            (
                &(|c: &mut VocoderConfig| c.upsample_rates[0] = 8) as &dyn Fn(&mut VocoderConfig),
                "twice as many",
            ),
            (&|c| c.upsample_rates.clear(), "stages of []"),
            (&|c| c.resblock_kernel_sizes[1] = 4, "[3, 4, 11]"),
            (&|c| c.resblock_dilation_sizes[2] = vec![0], "[0]"),
            (&|c| c.upsample_initial_channel = 96, "96 channels in 6"),
            (&|c| c.num_mels = 0, "0 bins"),
        ] {
            let mut config = VocoderConfig::default();
            change(&mut config);
            let problem = config.check().expect_err("not supported");
            assert!(problem.contains(word), "{problem}");
        }
    }
}
