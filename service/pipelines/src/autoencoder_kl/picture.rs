//! Conversion between 8-bit pictures and tensors of -1 to 1: diffusers' `VaeImageProcessor`.

use candle_core::{DType, Device, Result, Tensor};

use super::config::VaeConfig;

/// `[1, 3, height, width]` of -1 to 1 to RGB, 8 bits each, row-major: `VaeImageProcessor.postprocess`. Values are
/// clamped; halves are rounded to even, as numpy does.
///
/// # Errors
/// When it does not have three channels.
pub fn to_rgb8(picture: &Tensor) -> Result<Vec<u8>> {
    let (_, channels, height, width) = picture.dims4()?;
    if channels != 3 {
        candle_core::bail!("a picture of {channels} channels where 3 are expected");
    }
    let values = picture
        .to_dtype(DType::F32)?
        .to_device(&Device::Cpu)?
        .flatten_all()?
        .to_vec1::<f32>()?;
    let plane = height * width;
    let mut rgb = vec![0u8; 3 * plane];
    for (channel, values) in values.chunks(plane).take(3).enumerate() {
        for (pixel, value) in rgb.chunks_mut(3).zip(values) {
            let level = (value / 2.0 + 0.5).clamp(0.0, 1.0);
            pixel[channel] = (level * 255.0).round_ties_even() as u8;
        }
    }
    Ok(rgb)
}

/// RGB, 8 bits each, row-major, to f32 `[1, 3, height, width]` of -1 to 1: `VaeImageProcessor.preprocess`.
///
/// # Errors
/// When there are not `3 * width * height` bytes.
pub fn from_rgb8(rgb: &[u8], width: usize, height: usize, device: &Device) -> Result<Tensor> {
    let plane = width * height;
    if rgb.len() != 3 * plane {
        candle_core::bail!(
            "{} bytes where a picture of {width}x{height} has {}",
            rgb.len(),
            3 * plane
        );
    }
    let mut values = Vec::with_capacity(rgb.len());
    for channel in 0..3 {
        values.extend(
            rgb.chunks(3)
                .map(|pixel| 2.0 * (f32::from(pixel[channel]) / 255.0) - 1.0),
        );
    }
    Tensor::from_vec(values, (1, 3, height, width), device)
}

/// An 8-bit RGB picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb8 {
    pub width: usize,
    pub height: usize,
    /// Row-major, three bytes per pixel.
    pub rgb: Vec<u8>,
}

impl VaeConfig {
    /// Factor and summand that convert the transformer's latents to the autoencoder's.
    pub(super) fn unscaling(&self) -> (f64, f64) {
        (1.0 / self.scaling_factor, self.shift_factor.unwrap_or(0.0))
    }

    /// The transformer's latents to the autoencoder's: `latents / scaling_factor + shift_factor`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn unscaled(&self, latent: &Tensor) -> Result<Tensor> {
        let (factor, summand) = self.unscaling();
        latent.affine(factor, summand)
    }

    /// The autoencoder's latents to the transformer's: `(latents - shift_factor) * scaling_factor`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn scaled(&self, latent: &Tensor) -> Result<Tensor> {
        let shift = self.shift_factor.unwrap_or(0.0);
        latent.affine(self.scaling_factor, -shift * self.scaling_factor)
    }
}
