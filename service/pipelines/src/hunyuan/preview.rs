//! Previews of a sampling that need neither autoencoder nor memory: a linear map from latent to colour. For a film that begins
//! with a picture, the map is learned by least squares from the picture and its latent, and fits any autoencoder. Other films
//! use the published map of HunyuanVideo. A preview shows shapes and motion; colours are rough.

use candle_core::{DType, Device, Tensor};
use model::resized;

use crate::autoencoders::hunyuan::HunyuanVaeConfig;
use crate::{InitImage, StageError};

/// Weight of small weights in the fit, relative to the mean variance of the latent: a start of one colour has a map too.
const RIDGE: f64 = 1e-3;

/// How much larger than the latent a preview is.
const ENLARGED: u32 = 4;

/// The parts of red, green and blue, from 0 to 1, that HunyuanVideo's 16 latent channels add, as FramePack's program has them
/// (`diffusers_helper/hunyuan.py`, `vae_decode_fake`), and the colour of a latent of zeros.
const PUBLISHED: [[f64; 3]; 16] = [
    [-0.0395, -0.0331, 0.0445],
    [0.0696, 0.0795, 0.0518],
    [0.0135, -0.0945, -0.0282],
    [0.0108, -0.0250, -0.0765],
    [-0.0209, 0.0032, 0.0224],
    [-0.0804, -0.0254, -0.0639],
    [-0.0991, 0.0271, -0.0669],
    [-0.0646, -0.0422, -0.0400],
    [-0.0696, -0.0595, -0.0894],
    [-0.0799, -0.0208, -0.0375],
    [0.1166, 0.1627, 0.0962],
    [0.1165, 0.0432, 0.0407],
    [-0.2315, -0.1920, -0.1355],
    [-0.0270, 0.0401, -0.0821],
    [-0.0616, -0.0997, -0.0727],
    [0.0249, -0.0469, -0.1703],
];
const PUBLISHED_OF_ZEROS: [f64; 3] = [0.0259, -0.0192, -0.0761];

/// A linear map from the channels of a latent to red, green and blue.
#[derive(Clone, Debug)]
pub(crate) struct ColourMap {
    /// For each colour, a weight per channel.
    weights: [Vec<f64>; 3],
    /// The colour of a latent that is `middle`, 0 to 255.
    mean: [f64; 3],
    /// Mean of each channel.
    middle: Vec<f64>,
}

/// A picture of RGB, 8 bits each.
pub(crate) struct Preview {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) rgb: Vec<u8>,
}

impl ColourMap {
    /// Learns the map from a picture and its latent, f32 `[channels, 1, h, w]` in host memory.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn learned(start: &InitImage, latent: &Tensor) -> Result<ColourMap, StageError> {
        let (channels, _, h, w) = latent.dims4()?;
        let cells = h * w;
        let planes: Vec<Vec<f32>> = latent.reshape((channels, cells))?.to_vec2()?;
        let small = resized(&start.rgb, 3, (start.width, start.height), (w as u32, h as u32));
        let colour = |cell: usize, c: usize| f64::from(small.get(3 * cell + c).copied().unwrap_or_default());
        let count = cells.max(1) as f64;
        let mean = std::array::from_fn(|c| (0..cells).map(|cell| colour(cell, c)).sum::<f64>() / count);
        let middle: Vec<f64> = planes
            .iter()
            .map(|plane| plane.iter().map(|&z| f64::from(z)).sum::<f64>() / count)
            .collect();
        let apart = |channel: usize, cell: usize| f64::from(planes[channel][cell]) - middle[channel];
        let product = |one: usize, other: usize| {
            (0..cells)
                .map(|cell| apart(one, cell) * apart(other, cell))
                .sum::<f64>()
        };
        let mut squares: Vec<Vec<f64>> = (0..channels)
            .map(|one| (0..channels).map(|other| product(one, other)).collect())
            .collect();
        let variance = (0..channels).map(|c| squares[c][c]).sum::<f64>() / channels.max(1) as f64;
        for (channel, row) in squares.iter_mut().enumerate() {
            row[channel] += RIDGE * variance + f64::EPSILON;
        }
        let weights = std::array::from_fn(|c| {
            let right = (0..channels).map(|channel| {
                (0..cells)
                    .map(|cell| apart(channel, cell) * (colour(cell, c) - mean[c]))
                    .sum()
            });
            solved(squares.clone(), right.collect())
        });
        Ok(ColourMap {
            weights,
            mean,
            middle,
        })
    }

    /// The published map, for the autoencoder that it was made for: one of HunyuanVideo's size and scaling.
    pub(crate) fn published(config: &HunyuanVaeConfig) -> Option<ColourMap> {
        let original = HunyuanVaeConfig::default();
        let is_original = config.block_out_channels == original.block_out_channels
            && config.latent_channels == PUBLISHED.len()
            && config.scaling_factor == original.scaling_factor;
        is_original.then(|| ColourMap::of_table(&PUBLISHED, PUBLISHED_OF_ZEROS))
    }

    /// A published map: the parts of red, green and blue, from 0 to 1, that each channel adds, and the colour of a latent of zeros.
    pub(crate) fn of_table(channels: &[[f64; 3]], of_zeros: [f64; 3]) -> ColourMap {
        ColourMap {
            weights: std::array::from_fn(|c| channels.iter().map(|channel| 255.0 * channel[c]).collect()),
            mean: of_zeros.map(|level| 255.0 * level),
            middle: vec![0.0; channels.len()],
        }
    }

    /// The picture of one latent frame, `[channels, 1, h, w]`.
    ///
    /// # Errors
    /// Errors of candle.
    pub(crate) fn preview(&self, frame: &Tensor) -> Result<Preview, StageError> {
        let (channels, _, h, w) = frame.dims4()?;
        let frame = frame.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let planes: Vec<Vec<f32>> = frame.reshape((channels, h * w))?.to_vec2()?;
        let byte = |cell: usize, c: usize| {
            let weighted = planes.iter().zip(&self.weights[c]).zip(&self.middle);
            let sum: f64 = weighted
                .map(|((plane, weight), middle)| weight * (f64::from(plane[cell]) - middle))
                .sum();
            (self.mean[c] + sum).round().clamp(0.0, 255.0) as u8
        };
        let small: Vec<u8> = (0..h * w)
            .flat_map(|cell| (0..3).map(move |c| (cell, c)))
            .map(|(cell, c)| byte(cell, c))
            .collect();
        let (width, height) = (ENLARGED * w as u32, ENLARGED * h as u32);
        Ok(Preview {
            width,
            height,
            rgb: resized(&small, 3, (w as u32, h as u32), (width, height)),
        })
    }
}

/// The solution of a symmetric positive system, by Gaussian elimination.
fn solved(mut rows: Vec<Vec<f64>>, mut right: Vec<f64>) -> Vec<f64> {
    let size = right.len();
    for pivot in 0..size {
        let (above, below) = rows.split_at_mut(pivot + 1);
        let of_pivot = &above[pivot];
        for (offset, row) in below.iter_mut().enumerate() {
            let factor = row[pivot] / of_pivot[pivot];
            for (number, over) in row.iter_mut().zip(of_pivot).skip(pivot) {
                *number -= factor * over;
            }
            right[pivot + 1 + offset] -= factor * right[pivot];
        }
    }
    for pivot in (0..size).rev() {
        let known: f64 = (pivot + 1..size)
            .map(|column| rows[pivot][column] * right[column])
            .sum();
        right[pivot] = (right[pivot] - known) / rows[pivot][pivot];
    }
    right
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture of 16 by 8 pixels in cells of one colour each, and a latent that is a linear function of it.
    fn picture() -> (InitImage, Tensor) {
        let colour = |cell: usize| [(cell * 97) % 251, (cell * 53) % 241, (cell * 31) % 239];
        let cells = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)];
        let pixels = (0..8 * 4).flat_map(|y: usize| {
            (0..8 * 2).flat_map(move |x: usize| colour((y / 8) * 2 + x / 8).map(|byte| byte as u8))
        });
        let image = InitImage {
            width: 16,
            height: 32,
            rgb: pixels.collect(),
        };
        let mixed = |channel: usize, cell: usize| {
            let [r, g, b] = colour(cell).map(|byte| byte as f32 / 255.0);
            [r - g, g + 0.5 * b, b - 0.3 * r, 0.1 * r][channel]
        };
        let numbers: Vec<f32> = (0..4)
            .flat_map(|channel| (0..cells.len()).map(move |cell| (channel, cell)))
            .map(|(channel, cell)| mixed(channel, cell))
            .collect();
        (
            image,
            Tensor::from_vec(numbers, (4, 1, 4, 2), &Device::Cpu).expect("a latent"),
        )
    }

    #[test]
    fn a_preview_of_the_start_resembles_the_picture() -> Result<(), StageError> {
        let (image, latent) = picture();
        let map = ColourMap::learned(&image, &latent)?;
        let preview = map.preview(&latent)?;
        assert_eq!((preview.width, preview.height), (8, 16));
        let small = resized(&image.rgb, 3, (16, 32), (8, 16));
        let apart: f64 = preview
            .rgb
            .iter()
            .zip(&small)
            .map(|(found, expected)| f64::from(found.abs_diff(*expected)))
            .sum();
        // The map is exact in cells, and the enlargement rounds their edges.
        assert!(apart / (small.len() as f64) < 40.0, "{apart}");
        let cell = |x: usize, y: usize, c: usize| {
            let [row, column] = [4 * y + 1, 4 * x + 1];
            f64::from(preview.rgb[3 * (row * 8 + column) + c])
        };
        assert!((cell(1, 0, 0) - 97.0).abs() < 60.0, "{}", cell(1, 0, 0));
        Ok(())
    }

    #[test]
    fn the_published_map_is_of_hunyuan_videos_autoencoder_alone() -> Result<(), StageError> {
        let original = HunyuanVaeConfig::default();
        let map = ColourMap::published(&original).expect("its own map");
        let mut latent = vec![0.0f32; 16];
        latent[10] = 4.0;
        let latent = Tensor::from_vec(latent, (16, 1, 1, 1), &Device::Cpu)?;
        // 255 (0.0259 + 4 * 0.1166), and so on.
        assert_eq!(map.preview(&latent)?.rgb[..3], [126, 161, 79]);
        let another = HunyuanVaeConfig {
            scaling_factor: 0.3726,
            ..original
        };
        assert!(ColourMap::published(&another).is_none());
        Ok(())
    }

    #[test]
    fn a_start_of_one_colour_has_a_map_of_that_colour() -> Result<(), StageError> {
        let image = InitImage {
            width: 16,
            height: 16,
            rgb: [200, 10, 30].repeat(256).into(),
        };
        let latent = Tensor::ones((4, 1, 2, 2), DType::F32, &Device::Cpu)?;
        let preview = ColourMap::learned(&image, &latent)?.preview(&latent)?;
        assert_eq!(preview.rgb[..3], [200, 10, 30]);
        Ok(())
    }
}
