//! The configuration of the fusion model: `ovi/configs/model/dit/{video,audio}.json` of the authors.

use serde::Deserialize;

use crate::files::check_sizes;
use crate::mmdit::SINUSOIDS;
use crate::wan::shape::BlockShape;

/// Most positions on an axis of the rotary embedding.
pub(super) const MAX_POSITIONS: usize = 1024;

/// Configuration of one branch: a transformer of Wan's blocks. Missing fields are those of the published model that both
/// branches share.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct BranchConfig {
    /// Width of the hidden states.
    pub dim: usize,
    /// Width inside the feed-forward layers.
    pub ffn_dim: usize,
    /// Width of the sinusoidal embedding of times; 256 is supported.
    pub freq_dim: usize,
    /// Width of the text encoder's states.
    pub text_dim: usize,
    pub num_heads: usize,
    pub num_layers: usize,
    /// Channels of the latent, and of its velocity.
    pub in_dim: usize,
    pub out_dim: usize,
    /// Rows of an embedded text; missing ones are zeros, which are read too.
    pub text_len: usize,
    /// Epsilon of all norms.
    pub eps: f64,
    /// Factor of the frequencies of the rotary embedding, by which a frame of sound is at the time of one of the film.
    pub temporal_rope_scaling_factor: f64,
}

impl Default for BranchConfig {
    fn default() -> BranchConfig {
        BranchConfig {
            dim: 3072,
            ffn_dim: 14_336,
            freq_dim: 256,
            text_dim: 4096,
            num_heads: 24,
            num_layers: 30,
            in_dim: 48,
            out_dim: 48,
            text_len: 512,
            eps: 1e-6,
            temporal_rope_scaling_factor: 1.0,
        }
    }
}

impl BranchConfig {
    /// The shape of the blocks.
    pub(crate) fn blocks(&self) -> BlockShape {
        BlockShape {
            heads: self.num_heads,
            head: self.dim / self.num_heads.max(1),
            inner: self.ffn_dim,
            eps: self.eps,
        }
    }

    fn check(&self) -> Result<(), String> {
        let widths = [self.dim, self.ffn_dim, self.text_dim, self.in_dim, self.out_dim];
        let counts = [self.num_layers, self.num_heads, self.text_len];
        check_sizes(&[(&widths, 1 << 16), (&counts, 1 << 10)])?;
        if self.freq_dim != SINUSOIDS {
            return Err(format!("freq_dim is {}; {SINUSOIDS} is supported", self.freq_dim));
        }
        let head = self.dim / self.num_heads.max(1);
        // Attention to the other branch is computed in two halves of the heads.
        if head * self.num_heads != self.dim || self.num_heads < 2 || head < 6 || !head.is_multiple_of(2) {
            return Err(format!("{} heads of a width of {}", self.num_heads, self.dim));
        }
        if self.in_dim != self.out_dim {
            return Err(format!(
                "{} channels become {}; as many are expected",
                self.in_dim, self.out_dim
            ));
        }
        match self.eps > 0.0 && self.eps < 1.0 && self.temporal_rope_scaling_factor.is_finite() {
            true => Ok(()),
            false => Err(format!("eps is {}; a small number is expected", self.eps)),
        }
    }
}

/// Configuration of both branches.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct FusionConfig {
    pub video: BranchConfig,
    pub audio: BranchConfig,
}

impl Default for FusionConfig {
    fn default() -> FusionConfig {
        FusionConfig {
            video: BranchConfig::default(),
            audio: BranchConfig {
                in_dim: 20,
                out_dim: 20,
                temporal_rope_scaling_factor: 0.19676,
                ..BranchConfig::default()
            },
        }
    }
}

impl FusionConfig {
    /// Width of a token of the film: a patch of two by two cells.
    pub fn token_width(&self) -> usize {
        4 * self.video.in_dim
    }

    /// Width inside the gated layers of the embedding of sound: two thirds of four times the width, in steps of 256.
    pub fn gate_width(&self) -> usize {
        (2 * (4 * self.audio.dim) / 3).next_multiple_of(256)
    }

    /// Checks that this configuration is supported.
    ///
    /// # Errors
    /// The unsupported setting.
    pub fn check(&self) -> Result<(), String> {
        for (name, branch) in [("video", &self.video), ("audio", &self.audio)] {
            branch.check().map_err(|problem| format!("{name}: {problem}"))?;
        }
        let shared =
            |branch: &BranchConfig| (branch.dim, branch.num_heads, branch.num_layers, branch.text_dim);
        match shared(&self.video) == shared(&self.audio) {
            true => Ok(()),
            false => Err(format!(
                "width, heads, layers and width of texts are {:?} of the film and {:?} of the sound; they must be equal",
                shared(&self.video),
                shared(&self.audio)
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_run_is_named() {
        let published = FusionConfig::default();
        assert_eq!((published.check(), published.gate_width()), (Ok(()), 8192));
        for (change, named) in [
            (
                &(|c: &mut FusionConfig| c.audio.num_layers = 29) as &dyn Fn(&mut FusionConfig),
                "must be equal",
            ),
            (&|c| c.video.num_heads = 7, "video: 7 heads of a width of 3072"),
            (&|c| c.audio.num_heads = 1, "audio: 1 heads of a width of 3072"),
            (&|c| c.audio.freq_dim = 128, "audio: freq_dim is 128"),
            (&|c| c.audio.out_dim = 40, "20 channels become 40"),
            (&|c| c.video.eps = 0.0, "eps is 0"),
        ] {
            let mut config = FusionConfig::default();
            change(&mut config);
            let refused = config.check().expect_err("not supported");
            assert!(refused.contains(named), "{refused}");
        }
    }
}
