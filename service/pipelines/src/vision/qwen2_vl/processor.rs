//! The preprocessing of pictures: transformers' `Qwen2VLImageProcessor` in its Pillow form, and the size to which
//! Qwen-Image-Edit scales a picture before it.

use std::path::Path;

use candle_core::{Device, Tensor};
use model::resized_by;
use serde::Deserialize;

use super::super::processor::{filter_of, number_of};
use super::{CHANNELS, Grid, MERGED, MOST_PATCHES, TIMES};
use crate::ModelError;
use crate::files::checked;

/// Most times that one side of a picture is as long as the other.
const MOST_ASPECT: u32 = 200;

/// Sides of a picture scaled to an area are multiples of this.
const STEP: f64 = 32.0;

/// Width and height of a picture of this size (width, height) that is scaled to an area in pixels: diffusers'
/// `calculate_dimensions`. Sides are rounded to multiples of 32, halves to even ones; no side is less than 32.
pub fn size_of_area((width, height): (u32, u32), area: u32) -> (u32, u32) {
    let ratio = f64::from(width) / f64::from(height);
    let scaled = (f64::from(area) * ratio).sqrt();
    let side = |side: f64| ((side / STEP).round_ties_even() * STEP).max(STEP) as u32;
    (side(scaled), side(scaled / ratio))
}

/// The processor's `preprocessor_config.json`. Missing fields have the defaults of `Qwen2VLImageProcessor`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct QwenImageProcessor {
    /// Least and most pixels of a picture.
    size: Pixels,
    /// The same in older files.
    min_pixels: Option<u32>,
    max_pixels: Option<u32>,
    /// Side of a patch in pixels.
    patch_size: u32,
    /// Must be 2.
    merge_size: usize,
    /// Must be 2.
    temporal_patch_size: usize,
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

/// Numbers of pixels, by names that mean sides elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Pixels {
    /// Least pixels of a picture.
    shortest_edge: u32,
    /// Most pixels.
    longest_edge: u32,
}

impl Default for Pixels {
    fn default() -> Pixels {
        Pixels {
            shortest_edge: 56 * 56,
            longest_edge: 28 * 28 * 1280,
        }
    }
}

impl Default for QwenImageProcessor {
    fn default() -> QwenImageProcessor {
        QwenImageProcessor {
            size: Pixels::default(),
            min_pixels: None,
            max_pixels: None,
            patch_size: 14,
            merge_size: MERGED,
            temporal_patch_size: TIMES,
            resample: 3,
            rescale_factor: 1.0 / 255.0,
            // CLIP's.
            image_mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            image_std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
            do_resize: true,
            do_rescale: true,
            do_normalize: true,
        }
    }
}

impl QwenImageProcessor {
    /// The processor of a folder.
    ///
    /// # Errors
    /// [`ModelError::Damaged`] for a file that cannot be read, [`ModelError::Unsupported`] for another processor.
    pub fn open(folder: &Path) -> Result<QwenImageProcessor, ModelError> {
        checked(
            &folder.join("preprocessor_config.json"),
            QwenImageProcessor::check,
        )
    }

    /// That of Qwen2.5-VL: single files have no configuration.
    pub fn published() -> QwenImageProcessor {
        QwenImageProcessor {
            max_pixels: Some(12_845_056),
            ..QwenImageProcessor::default()
        }
    }

    /// Checks that this processor is supported.
    ///
    /// # Errors
    /// The unsupported setting, in words.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=64).contains(&self.patch_size) {
            return Err(format!("patches of {} pixels", self.patch_size));
        }
        if (self.merge_size, self.temporal_patch_size) != (MERGED, TIMES) {
            return Err(format!(
                "a processor that merges {0} by {0} patches of {1} times; {MERGED} and {TIMES} are known",
                self.merge_size, self.temporal_patch_size
            ));
        }
        let (least, most) = self.pixels();
        if least == 0 || least > most {
            return Err(format!("pictures of {least} to {most} pixels"));
        }
        filter_of(self.resample)?;
        if !(self.do_resize && self.do_rescale && self.do_normalize) {
            return Err("pictures that are not scaled and normalized, which are not known".to_owned());
        }
        match self.image_std.contains(&0.0) {
            true => Err("a deviation of 0".to_owned()),
            false => Ok(()),
        }
    }

    /// Least and most pixels of a picture.
    fn pixels(&self) -> (u32, u32) {
        (
            self.min_pixels.unwrap_or(self.size.shortest_edge),
            self.max_pixels.unwrap_or(self.size.longest_edge),
        )
    }

    /// The patches of a picture of this size (width, height): each side is rounded to whole cells, halves to even numbers of
    /// them, and both are scaled where the picture has too few pixels or too many (`smart_resize`).
    ///
    /// # Errors
    /// For a picture that is too narrow, or has too many patches, in words.
    pub fn grid(&self, (width, height): (u32, u32)) -> Result<Grid, String> {
        let (long, short) = (width.max(height), width.min(height));
        if short == 0 || u64::from(long) > u64::from(MOST_ASPECT) * u64::from(short) {
            return Err(format!(
                "a picture of {width}x{height} pixels, where one side may be {MOST_ASPECT} times as long as the other"
            ));
        }
        let step = f64::from(self.patch_size) * MERGED as f64;
        let (least, most) = self.pixels();
        let sides = [height, width].map(f64::from);
        let pixels = sides[0] * sides[1];
        let rounded = sides.map(|side| (side / step).round_ties_even());
        let covered = rounded[0] * rounded[1] * step * step;
        let cells = if covered > f64::from(most) {
            let scale = (pixels / f64::from(most)).sqrt();
            sides.map(|side| (side / scale / step).floor().max(1.0))
        } else if covered < f64::from(least) {
            let scale = (f64::from(least) / pixels).sqrt();
            sides.map(|side| (side * scale / step).ceil())
        } else {
            rounded
        };
        let [rows, columns] = cells.map(|side| MERGED * side as usize);
        let grid = Grid { rows, columns };
        match rows * columns <= MOST_PATCHES {
            true => grid.check().map(|()| grid),
            false => Err(format!("a picture of {rows} by {columns} patches")),
        }
    }

    /// The patches of a picture of `size` (width, height), rows of interleaved RGB bytes: f32 `[patches, 3 * patch * patch]`
    /// in host memory, cell by cell. A patch's two times are equal, and here once.
    ///
    /// # Errors
    /// When the picture has another number of bytes, or no grid.
    pub fn patches(&self, rgb: &[u8], size: (u32, u32)) -> candle_core::Result<Tensor> {
        let expected = CHANNELS * size.0 as usize * size.1 as usize;
        if expected == 0 || rgb.len() != expected {
            candle_core::bail!("a picture of {size:?} pixels has {} bytes", rgb.len());
        }
        let grid = self.grid(size).map_err(candle_core::Error::msg)?;
        let filter = filter_of(self.resample).map_err(candle_core::Error::msg)?;
        let side = self.patch_size as usize;
        let (width, height) = (side * grid.columns, side * grid.rows);
        let bytes = resized_by(filter, rgb, CHANNELS, size, (width as u32, height as u32));
        let of_byte = |channel: usize, byte: u8| {
            let (mean, deviation) = (self.image_mean[channel], self.image_std[channel]);
            number_of(byte, self.rescale_factor, (mean, deviation))
        };
        let mut numbers = Vec::with_capacity(bytes.len());
        let [rows, columns] = grid.cells();
        let cells: Vec<[usize; 2]> = (0..rows)
            .flat_map(|row| (0..columns).map(move |column| [row, column]))
            .collect();
        for [row, column] in super::windows::patches_of(&cells) {
            let (top, left) = (row as usize * side, column as usize * side);
            for channel in 0..CHANNELS {
                for y in top..top + side {
                    let pixels = (left..left + side).map(|x| bytes[(y * width + x) * CHANNELS + channel]);
                    numbers.extend(pixels.map(|byte| of_byte(channel, byte)));
                }
            }
        }
        Tensor::from_vec(numbers, (grid.patches(), CHANNELS * side * side), &Device::Cpu)
    }
}
