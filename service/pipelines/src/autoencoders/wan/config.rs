//! `vae/config.json`, or what the shapes of an original checkpoint say.

use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

use crate::files::check_sizes;

/// Frames per latent after the first.
const FRAMES_PER_LATENT: usize = 4;

/// Configuration of diffusers' `AutoencoderKLWan`. Missing fields have diffusers' defaults, which are those of Wan 2.1.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct WanVaeConfig {
    /// Channels of the encoder's first map.
    pub base_dim: usize,
    /// Channels of the decoder's last map, where they are others.
    pub decoder_base_dim: Option<usize>,
    /// Channels of a latent; the encoder's output has twice as many (mean and log variance).
    pub z_dim: usize,
    /// Channels at each resolution as multiples, the frames' own first.
    pub dim_mult: Vec<usize>,
    /// Residual blocks at each resolution of the encoder; the decoder has one more.
    pub num_res_blocks: usize,
    /// Scales with further attention: none are supported.
    pub attn_scales: Vec<f64>,
    /// Whether each resolution of the encoder but the last is followed by half the frames. (The name is diffusers'.)
    pub temperal_downsample: Vec<bool>,
    /// Mean of each channel of the latents.
    pub latents_mean: Vec<f64>,
    /// Standard deviation of each channel.
    pub latents_std: Vec<f64>,
    /// Whether blocks of layers have a shortcut, as in Wan 2.2.
    pub is_residual: bool,
    /// Channels of a patch that the encoder reads.
    #[serde(alias = "input_channels")]
    pub in_channels: usize,
    /// Channels of a patch that the decoder writes.
    pub out_channels: usize,
    /// Side of a patch in pixels; none for single pixels.
    pub patch_size: Option<usize>,
    pub scale_factor_temporal: Option<usize>,
    /// Pixels per latent cell along each axis.
    pub scale_factor_spatial: Option<usize>,
    /// Whether it encodes and decodes single pictures alone, as in Qwen-Image. For one frame, each convolution of frames is that
    /// of its last, and the convolutions in time are not run: neither they nor anything of frames before is there.
    #[serde(skip)]
    pub is_of_pictures: bool,
}

impl Default for WanVaeConfig {
    fn default() -> WanVaeConfig {
        WanVaeConfig {
            base_dim: 96,
            decoder_base_dim: None,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            num_res_blocks: 2,
            attn_scales: Vec::new(),
            temperal_downsample: vec![false, true, true],
            latents_mean: MEAN_OF_16.to_vec(),
            latents_std: STD_OF_16.to_vec(),
            is_residual: false,
            in_channels: 3,
            out_channels: 3,
            patch_size: None,
            scale_factor_temporal: Some(FRAMES_PER_LATENT),
            scale_factor_spatial: Some(8),
            is_of_pictures: false,
        }
    }
}

impl WanVaeConfig {
    /// The autoencoder of Wan 2.2 TI2V 5B, of which the original checkpoint has no configuration.
    pub fn wan_2_2() -> WanVaeConfig {
        WanVaeConfig {
            base_dim: 160,
            decoder_base_dim: Some(256),
            z_dim: 48,
            latents_mean: MEAN_OF_48.to_vec(),
            latents_std: STD_OF_48.to_vec(),
            is_residual: true,
            in_channels: 12,
            out_channels: 12,
            patch_size: Some(2),
            scale_factor_spatial: Some(16),
            ..WanVaeConfig::default()
        }
    }

    /// The configuration of a checkpoint without one, by the shapes of its tensors under diffusers' names: that of Wan 2.1 or of
    /// Wan 2.2, with this many channels. `None` for another autoencoder.
    pub fn of_shapes(shape_of: impl Fn(&str) -> Option<Vec<usize>>) -> Option<WanVaeConfig> {
        let first = shape_of("encoder.conv_in.weight")?;
        let last = shape_of("decoder.conv_out.weight")?;
        let latent = shape_of("decoder.conv_in.weight")?;
        let is_residual = shape_of("decoder.up_blocks.0.upsampler.resample.1.weight").is_some();
        let config = match (latent.get(1)?, is_residual) {
            (16, false) => WanVaeConfig::default(),
            (48, true) => WanVaeConfig::wan_2_2(),
            _ => return None,
        };
        let (base_dim, decoder_base_dim) = (*first.first()?, *last.get(1)?);
        Some(WanVaeConfig {
            base_dim,
            decoder_base_dim: (decoder_base_dim != base_dim).then_some(decoder_base_dim),
            ..config
        })
    }

    /// Pixels per latent cell along each axis.
    pub fn factor(&self) -> usize {
        self.patch() << self.dim_mult.len().saturating_sub(1)
    }

    /// Frames of a film of `latents` latents, of which there is at least one.
    pub fn frames(&self, latents: usize) -> usize {
        latents.saturating_sub(1) * FRAMES_PER_LATENT + 1
    }

    /// Latents of a film of `frames` frames, of which there is at least one.
    pub fn latents(&self, frames: usize) -> usize {
        frames.saturating_sub(1) / FRAMES_PER_LATENT + 1
    }

    /// Height and width of the latents of a film.
    pub fn latent_sides(&self, width: u32, height: u32) -> (usize, usize) {
        (height as usize / self.factor(), width as usize / self.factor())
    }

    /// Latents f32 `[1, z_dim, l, h, w]` in the transformer's scale, of unit variance, to that of the autoencoder.
    ///
    /// # Errors
    /// When the shape does not fit.
    pub fn unscaled(&self, latents: &Tensor) -> candle_core::Result<Tensor> {
        let (mean, std) = self.scale(latents.device())?;
        latents.broadcast_mul(&std)?.broadcast_add(&mean)
    }

    /// The inverse of [`WanVaeConfig::unscaled`].
    ///
    /// # Errors
    /// When the shape does not fit.
    pub fn scaled(&self, latents: &Tensor) -> candle_core::Result<Tensor> {
        let (mean, std) = self.scale(latents.device())?;
        latents.broadcast_sub(&mean)?.broadcast_div(&std)
    }

    /// Mean and standard deviation, f32 `[1, z_dim, 1, 1, 1]`.
    fn scale(&self, device: &Device) -> candle_core::Result<(Tensor, Tensor)> {
        let of = |numbers: &[f64]| {
            let numbers = Tensor::from_slice(numbers, (1, numbers.len(), 1, 1, 1), &Device::Cpu)?;
            numbers.to_dtype(DType::F32)?.to_device(device)
        };
        Ok((of(&self.latents_mean)?, of(&self.latents_std)?))
    }

    /// Side of a patch in pixels.
    pub(super) fn patch(&self) -> usize {
        self.patch_size.unwrap_or(1)
    }

    /// Channels of the decoder's last map.
    pub(super) fn decoder_base(&self) -> usize {
        self.decoder_base_dim.unwrap_or(self.base_dim)
    }

    /// Channels of a frame.
    pub(super) fn channels_of_frames(&self) -> usize {
        self.in_channels / (self.patch() * self.patch())
    }

    /// Frames of every latent but the first.
    pub(super) fn frames_per_latent(&self) -> usize {
        FRAMES_PER_LATENT
    }

    /// First frame and number of frames of a latent.
    pub(super) fn frames_of_latent(&self, index: usize) -> (usize, usize) {
        match index {
            0 => (0, 1),
            _ => (1 + (index - 1) * FRAMES_PER_LATENT, FRAMES_PER_LATENT),
        }
    }

    /// Checks that this autoencoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let widths = [self.base_dim, self.decoder_base(), self.z_dim];
        let patches = [self.in_channels, self.out_channels, self.patch()];
        check_sizes(&[
            (&widths, 1 << 12),
            (&patches, 1 << 8),
            (&self.dim_mult, 1 << 6),
            (&[self.num_res_blocks], 1 << 6),
        ])?;
        if [&widths[..], &patches[..], &self.dim_mult[..]]
            .concat()
            .contains(&0)
        {
            return Err("a map, a frame or a latent of no channels".to_owned());
        }
        let levels = self.dim_mult.len();
        if !(2..=8).contains(&levels) {
            return Err(format!("{levels} resolutions; 2 to 8 are known"));
        }
        if self.num_res_blocks == 0 {
            return Err("resolutions of no blocks".to_owned());
        }
        if !self.attn_scales.is_empty() {
            return Err(format!(
                "attention at the scales {:?}; none is known",
                self.attn_scales
            ));
        }
        if self.temperal_downsample.len() + 1 != levels {
            let found = self.temperal_downsample.len();
            return Err(format!("{found} resizing layers for {levels} resolutions"));
        }
        let halved = self.temperal_downsample.iter().filter(|halves| **halves).count();
        let ratio = self.scale_factor_temporal.unwrap_or(FRAMES_PER_LATENT);
        if 1 << halved != FRAMES_PER_LATENT || ratio != FRAMES_PER_LATENT {
            let found = (1 << halved).max(ratio);
            return Err(format!(
                "{found} frames per latent; only {FRAMES_PER_LATENT} are known"
            ));
        }
        let factor = self.factor();
        if let Some(found) = self.scale_factor_spatial.filter(|found| *found != factor) {
            return Err(format!(
                "{found} pixels per latent cell where its layers have {factor}"
            ));
        }
        let of_patch = self.patch() * self.patch();
        for channels in [self.in_channels, self.out_channels] {
            if !channels.is_multiple_of(of_patch) {
                let side = self.patch();
                return Err(format!("{channels} channels in patches of {side} by {side}"));
            }
        }
        self.check_channels()?;
        self.check_scale()
    }

    /// Checks that numbers of channels divide where blocks average, repeat or halve them.
    fn check_channels(&self) -> Result<(), String> {
        let levels = self.dim_mult.len();
        let mut inputs = self.base_dim;
        for (level, multiple) in self.dim_mult.iter().enumerate() {
            let outputs = self.base_dim * multiple;
            let halves = level + 1 < levels;
            let block = match (halves, halves && self.temperal_downsample[level]) {
                (false, _) => 1,
                (true, false) => 4,
                (true, true) => 8,
            };
            if self.is_residual && !(inputs * block).is_multiple_of(outputs) {
                return Err(format!("{inputs} channels averaged to {outputs}"));
            }
            inputs = outputs;
        }
        let base = self.decoder_base();
        let mut inputs = base * self.dim_mult.last().copied().unwrap_or_default();
        for (level, multiple) in self.dim_mult.iter().enumerate().skip(1).rev() {
            let outputs = base * multiple;
            let block = if self.temperal_downsample[level - 1] { 8 } else { 4 };
            if self.is_residual && !(outputs * block).is_multiple_of(inputs) {
                return Err(format!("{inputs} channels repeated to {outputs}"));
            }
            if !self.is_residual && !outputs.is_multiple_of(2) {
                return Err(format!("{outputs} channels, of which half are kept"));
            }
            inputs = outputs;
        }
        Ok(())
    }

    fn check_scale(&self) -> Result<(), String> {
        for (numbers, of) in [(&self.latents_mean, "means"), (&self.latents_std, "deviations")] {
            if numbers.len() != self.z_dim {
                return Err(format!("{} {of} of {} channels", numbers.len(), self.z_dim));
            }
            if let Some(strange) = numbers.iter().find(|number| !number.is_finite()) {
                return Err(format!("{strange} among the {of} of its channels"));
            }
        }
        if self.latents_std.iter().any(|std| *std <= 0.0) {
            return Err("deviations that are not positive".to_owned());
        }
        Ok(())
    }
}

/// Of Wan 2.1, as its authors publish them.
const MEAN_OF_16: [f64; 16] = [
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632,
    -0.1922, -0.9497, 0.2503, -0.2921,
];
const STD_OF_16: [f64; 16] = [
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382,
    1.1253, 2.8251, 1.9160,
];

/// Of Wan 2.2.
const MEAN_OF_48: [f64; 48] = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
];
const STD_OF_48: [f64; 48] = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885,
    0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338,
    0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458,
    1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn films_have_a_frame_and_four_for_every_later_latent() {
        let config = WanVaeConfig::wan_2_2();
        assert_eq!(config.factor(), 16);
        assert_eq!(WanVaeConfig::default().factor(), 8);
        assert_eq!([1, 2, 31].map(|latents| config.frames(latents)), [1, 5, 121]);
        assert_eq!(
            [1, 4, 5, 31, 121].map(|frames| config.latents(frames)),
            [1, 1, 2, 8, 31]
        );
        assert_eq!(
            [0, 1, 2].map(|index| config.frames_of_latent(index)),
            [(0, 1), (1, 4), (5, 4)]
        );
        assert_eq!(config.latent_sides(1280, 704), (44, 80));
    }

    #[test]
    fn the_latents_of_files_without_a_configuration_have_the_scales_of_the_authors() {
        #[derive(Deserialize)]
        struct Scale {
            mean: Vec<f64>,
            std: Vec<f64>,
        }
        let text = include_str!("../../../fixtures/wan-vae-tiny/scales.json");
        let scales: std::collections::BTreeMap<String, Scale> =
            serde_json::from_str(text).expect("a fixture");
        for (version, config) in [("2.1", WanVaeConfig::default()), ("2.2", WanVaeConfig::wan_2_2())] {
            let Scale { mean, std } = &scales[version];
            assert_eq!(&config.latents_mean, mean, "{version}");
            assert_eq!(&config.latents_std, std, "{version}");
        }
    }

    #[test]
    fn unsupported_settings_are_named() {
        assert_eq!(WanVaeConfig::default().check(), Ok(()));
        assert_eq!(WanVaeConfig::wan_2_2().check(), Ok(()));
        type Change = fn(&mut WanVaeConfig);
        let changes: [(Change, &str); 19] = [
            (|c| c.base_dim = 0, "no channels"),
            (|c| c.z_dim = 0, "no channels"),
            (|c| c.patch_size = Some(0), "no channels"),
            (|c| c.decoder_base_dim = Some(1 << 20), "beyond"),
            (|c| c.num_res_blocks = 1 << 20, "beyond"),
            (|c| c.num_res_blocks = 0, "no blocks"),
            (|c| c.dim_mult = vec![1], "1 resolutions"),
            (|c| c.dim_mult = vec![1; 9], "9 resolutions"),
            (|c| c.attn_scales = vec![0.5], "[0.5]"),
            (|c| c.temperal_downsample = vec![true, true], "2 resizing layers"),
            (|c| c.temperal_downsample = vec![true; 3], "8 frames"),
            (|c| c.scale_factor_temporal = Some(8), "8 frames"),
            (|c| c.scale_factor_spatial = Some(8), "8 pixels"),
            (|c| c.in_channels = 13, "13 channels"),
            (|c| c.out_channels = 3, "3 channels"),
            (|c| c.dim_mult = vec![1, 2, 4, 3], "averaged"),
            (|c| c.dim_mult = vec![1, 1, 8, 8], "repeated"),
            (|c| c.latents_mean.truncate(4), "4 means"),
            (|c| c.latents_std[3] = 0.0, "not positive"),
        ];
        for (change, word) in changes {
            let mut config = WanVaeConfig::wan_2_2();
            change(&mut config);
            let problem = config.check().expect_err(word);
            assert!(problem.contains(word), "{word}: {problem}");
        }
        let mut odd = WanVaeConfig {
            base_dim: 5,
            ..WanVaeConfig::default()
        };
        odd.dim_mult = vec![1, 3, 3, 3];
        let problem = odd.check().expect_err("15 channels have no half");
        assert!(problem.contains("half"), "{problem}");
        odd.latents_std[0] = f64::NAN;
        odd.base_dim = 96;
        assert!(odd.check().expect_err("a number is strange").contains("NaN"));
    }
}
