//! The preprocessing of pictures for a picture encoder: transformers' `SiglipImageProcessor` in its Pillow form.

use std::path::Path;

use candle_core::{Device, Tensor};
use model::{Filter, resized_by};
use serde::Deserialize;

use crate::ModelError;
use crate::files::checked;

/// Channels of a picture.
const CHANNELS: usize = 3;

/// Maximum side of a processed picture.
const MAX_SIDE: u32 = 4096;

/// The processor's `preprocessor_config.json`. Missing fields have the defaults of `SiglipImageProcessor`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct ImageProcessor {
    /// Size of the result.
    pub size: Size,
    /// Pillow's number of a filter: only 3 (bicubic) and 1 (Lanczos) are supported.
    resample: u32,
    /// Number of the brightest byte.
    rescale_factor: f64,
    /// Subtracted from each channel, after scaling.
    image_mean: [f32; CHANNELS],
    /// Each channel is divided by it.
    image_std: [f32; CHANNELS],
    /// Must be true.
    do_resize: bool,
    /// Must be true.
    do_rescale: bool,
    /// Must be true.
    do_normalize: bool,
}

/// Sides of a picture in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Size {
    pub height: u32,
    pub width: u32,
}

impl Default for ImageProcessor {
    fn default() -> ImageProcessor {
        ImageProcessor::of_side(224)
    }
}

impl ImageProcessor {
    /// The processor of a folder.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] for a file that cannot be read, [`ModelError::Unsupported`] for another processor.
    pub fn open(folder: &Path) -> Result<ImageProcessor, ModelError> {
        checked(&folder.join("preprocessor_config.json"), ImageProcessor::check)
    }

    /// SigLIP's, for square pictures of this side: single files have no configuration.
    pub fn of_side(side: u32) -> ImageProcessor {
        ImageProcessor {
            size: Size {
                height: side,
                width: side,
            },
            resample: 3,
            rescale_factor: 1.0 / 255.0,
            image_mean: [0.5; CHANNELS],
            image_std: [0.5; CHANNELS],
            do_resize: true,
            do_rescale: true,
            do_normalize: true,
        }
    }

    /// Checks that this processor is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        let Size { height, width } = self.size;
        if [height, width].iter().any(|side| !(1..=MAX_SIDE).contains(side)) {
            return Err(format!("pictures of {width}x{height} pixels"));
        }
        filter_of(self.resample)?;
        if !(self.do_resize && self.do_rescale && self.do_normalize) {
            return Err("pictures that are not scaled and normalized, which are not known".to_owned());
        }
        if self.image_std.contains(&0.0) {
            return Err("a deviation of 0".to_owned());
        }
        Ok(())
    }

    /// The pixels of a picture of `size` (width, height), rows of interleaved RGB bytes: f32 `[1, 3, height, width]`
    /// in host memory.
    ///
    /// # Errors
    /// When the picture has another number of bytes.
    pub fn pixels(&self, rgb: &[u8], size: (u32, u32)) -> candle_core::Result<Tensor> {
        let expected = CHANNELS * size.0 as usize * size.1 as usize;
        if expected == 0 || rgb.len() != expected {
            candle_core::bail!("a picture of {size:?} pixels has {} bytes", rgb.len());
        }
        let filter = filter_of(self.resample).map_err(candle_core::Error::msg)?;
        let Size { height, width } = self.size;
        let bytes = resized_by(filter, rgb, CHANNELS, size, (width, height));
        let pixels = (0..CHANNELS).flat_map(|channel| {
            let (mean, deviation) = (self.image_mean[channel], self.image_std[channel]);
            let of_channel = bytes.iter().skip(channel).step_by(CHANNELS);
            of_channel.map(move |byte| number_of(*byte, self.rescale_factor, (mean, deviation)))
        });
        let shape = (1, CHANNELS, height as usize, width as usize);
        Tensor::from_vec(pixels.collect::<Vec<f32>>(), shape, &Device::Cpu)
    }
}

/// The filter of Pillow's number.
///
/// # Errors
/// For an unsupported one, in words.
pub(super) fn filter_of(resample: u32) -> Result<Filter, String> {
    match resample {
        1 => Ok(Filter::Lanczos),
        3 => Ok(Filter::Bicubic),
        other => Err(format!(
            "the filter {other}; 1 (Lanczos) and 3 (bicubic) are known"
        )),
    }
}

/// The number of a byte, scaled by `factor`, in units of the deviation from the mean.
pub(super) fn number_of(byte: u8, factor: f64, (mean, deviation): (f32, f32)) -> f32 {
    ((f64::from(byte) * factor) as f32 - mean) / deviation
}

/// A picture as diffusers' FramePack pipeline hands it to the processor: as floats of -1 to 1, of which the processor
/// makes bytes again by truncation, so that dark bytes become one less.
pub fn bytes_through_floats(rgb: &[u8]) -> Vec<u8> {
    let through = |byte: &u8| {
        let symmetric = 2.0 * (f32::from(*byte) / 255.0) - 1.0;
        ((symmetric + 1.0) / 2.0 * 255.0) as u8
    };
    rgb.iter().map(through).collect()
}
