//! Pictures, and the scale of latents.

use candle_core::{Result, Tensor};

use super::config::VaeConfig;

/// An 8-bit RGB picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb8 {
    pub width: usize,
    pub height: usize,
    /// Row-major, three bytes per pixel.
    pub rgb: Vec<u8>,
}

impl VaeConfig {
    /// Factor and summand that convert the transformer's latents to the autoencoder's; those that are normalised by statistics
    /// are converted before ([`Statistics`]).
    ///
    /// [`Statistics`]: super::statistics::Statistics
    pub(super) fn unscaling(&self) -> (f64, f64) {
        if self.patch_size.is_some() {
            return (1.0, 0.0);
        }
        (1.0 / self.scaling_factor, self.shift_factor.unwrap_or(0.0))
    }

    /// The transformer's latents to the autoencoder's: `latents / scaling_factor + shift_factor`.
    ///
    /// # Errors
    /// Errors of candle.
    pub fn unscaled(&self, latent: &Tensor) -> Result<Tensor> {
        let (factor, summand) = self.unscaling();
        latent.affine(factor, summand)
    }

    /// The autoencoder's latents to the transformer's: `(latents - shift_factor) * scaling_factor`.
    ///
    /// # Errors
    /// Errors of candle.
    pub fn scaled(&self, latent: &Tensor) -> Result<Tensor> {
        let shift = self.shift_factor.unwrap_or(0.0);
        latent.affine(self.scaling_factor, -shift * self.scaling_factor)
    }
}
