//! `vae/config.json`.

use serde::Deserialize;

use crate::autoencoders::kernels::Resize;

/// Configuration of diffusers' `AutoencoderKLHunyuanVideo`. Missing fields have diffusers' defaults.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct HunyuanVaeConfig {
    /// Channels of an input frame.
    pub in_channels: usize,
    /// Channels of a decoded frame.
    pub out_channels: usize,
    /// Channels of a latent; the encoder's output has twice as many (mean and log variance).
    pub latent_channels: usize,
    /// Channels at each resolution, the frames' own first.
    pub block_out_channels: Vec<usize>,
    /// Residual blocks at each resolution of the encoder; the decoder has one more.
    pub layers_per_block: usize,
    pub norm_num_groups: usize,
    /// Factor of the transformer's latents.
    pub scaling_factor: f64,
    /// Pixels per latent cell along each axis.
    pub spatial_compression_ratio: usize,
    /// Frames per latent after the first: only 4 is supported, as in diffusers' decoder.
    pub temporal_compression_ratio: usize,
    /// Whether the middle block has attention.
    pub mid_block_add_attention: bool,
    /// The activation: only `silu` is supported.
    pub act_fn: String,
    /// Types of the encoder's blocks, one per resolution: only `HunyuanVideoDownBlock3D` is supported.
    pub down_block_types: Vec<String>,
    /// Types of the decoder's blocks, one per resolution: only `HunyuanVideoUpBlock3D` is supported.
    pub up_block_types: Vec<String>,
}

impl Default for HunyuanVaeConfig {
    fn default() -> HunyuanVaeConfig {
        HunyuanVaeConfig {
            in_channels: 3,
            out_channels: 3,
            latent_channels: 16,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            norm_num_groups: 32,
            scaling_factor: 0.476986,
            spatial_compression_ratio: 8,
            temporal_compression_ratio: 4,
            mid_block_add_attention: true,
            act_fn: "silu".to_owned(),
            down_block_types: vec!["HunyuanVideoDownBlock3D".to_owned(); 4],
            up_block_types: vec!["HunyuanVideoUpBlock3D".to_owned(); 4],
        }
    }
}

impl HunyuanVaeConfig {
    /// Pixels per latent cell along each axis.
    pub fn factor(&self) -> usize {
        self.spatial_compression_ratio
    }

    /// Frames of a film of `latents` latents, of which there is at least one.
    pub fn frames(&self, latents: usize) -> usize {
        latents.saturating_sub(1) * self.temporal_compression_ratio + 1
    }

    /// Latents of a film of `frames` frames, of which there is at least one.
    pub fn latents(&self, frames: usize) -> usize {
        frames.saturating_sub(1) / self.temporal_compression_ratio + 1
    }

    /// Height and width of the latents of a film.
    pub fn latent_sides(&self, width: u32, height: u32) -> (usize, usize) {
        (height as usize / self.factor(), width as usize / self.factor())
    }

    /// Factor that converts the transformer's latents to the autoencoder's: `1 / scaling_factor`.
    pub fn unscaling(&self) -> f64 {
        1.0 / self.scaling_factor
    }

    /// The resizing layer after the blocks of a resolution, counted from the frames in the encoder, from the latents in the
    /// decoder; `None` for no layer.
    pub(super) fn resize(&self, level: usize) -> Option<Resize> {
        let levels = self.block_out_channels.len();
        let halvings = |ratio: usize| ratio.max(1).ilog2() as usize;
        let resize = Resize {
            space: level < halvings(self.spatial_compression_ratio),
            time: level + 1 < levels && level + 1 + halvings(self.temporal_compression_ratio) >= levels,
        };
        (resize != Resize::NONE).then_some(resize)
    }

    /// Checks that this autoencoder is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        self.table().check()?;
        if self.act_fn != "silu" {
            return Err(format!("the activation {:?}; only silu is known", self.act_fn));
        }
        let levels = self.block_out_channels.len();
        for (kinds, known) in [
            (&self.down_block_types, "HunyuanVideoDownBlock3D"),
            (&self.up_block_types, "HunyuanVideoUpBlock3D"),
        ] {
            if let Some(kind) = kinds.iter().find(|kind| *kind != known) {
                return Err(format!("a block of kind {kind}; only {known} is known"));
            }
            if kinds.len() != levels {
                return Err(format!("{} blocks for {levels} resolutions", kinds.len()));
            }
        }
        if !(3..=8).contains(&levels) {
            return Err(format!("{levels} resolutions; 3 to 8 are known"));
        }
        if self.temporal_compression_ratio != 4 {
            let ratio = self.temporal_compression_ratio;
            return Err(format!("{ratio} frames per latent; only 4 are known"));
        }
        let ratio = self.spatial_compression_ratio;
        if !ratio.is_power_of_two() || ratio.ilog2() as usize > levels {
            return Err(format!("{ratio} pixels per latent cell in {levels} resolutions"));
        }
        if !self.scaling_factor.is_finite() || self.scaling_factor == 0.0 {
            return Err(format!("a scaling factor of {}", self.scaling_factor));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_levels_resize_as_the_reference_does() {
        let config = HunyuanVaeConfig::default();
        let (space, time) = (true, true);
        let resized: Vec<Option<Resize>> = (0..4).map(|level| config.resize(level)).collect();
        let expected = [
            Some(Resize { space, time: false }),
            Some(Resize { space, time }),
            Some(Resize { space, time }),
            None,
        ];
        assert_eq!(resized, expected);
        assert_eq!(config.frames(9), 33);
        assert_eq!([1, 16, 17, 33].map(|frames| config.latents(frames)), [1, 4, 5, 9]);
    }

    #[test]
    fn unsupported_settings_are_named() {
        let good = HunyuanVaeConfig::default();
        assert_eq!(good.check(), Ok(()));
        let refused = |change: &dyn Fn(&mut HunyuanVaeConfig)| {
            let mut config = HunyuanVaeConfig::default();
            change(&mut config);
            config.check().expect_err("not supported")
        };
        for (change, word) in [
            (
                &(|c: &mut HunyuanVaeConfig| c.act_fn = "mish".to_owned()) as &dyn Fn(&mut HunyuanVaeConfig),
                "mish",
            ),
            (
                &|c| c.down_block_types[1] = "DownEncoderBlock2D".to_owned(),
                "DownEncoderBlock2D",
            ),
            (&|c| c.up_block_types.truncate(3), "3 blocks"),
            (&|c| c.temporal_compression_ratio = 8, "8 frames"),
            (&|c| c.spatial_compression_ratio = 6, "6 pixels"),
            (&|c| c.spatial_compression_ratio = 32, "32 pixels"),
            (&|c| c.norm_num_groups = 48, "48 groups"),
            (&|c| c.norm_num_groups = 0, "no groups"),
            (&|c| c.latent_channels = 0, "no channels"),
            (&|c| c.scaling_factor = f64::NAN, "NaN"),
            (&|c| c.block_out_channels = vec![128, 1 << 20, 512, 512], "beyond"),
        ] {
            let problem = refused(change);
            assert!(problem.contains(word), "{problem}");
        }
    }
}
