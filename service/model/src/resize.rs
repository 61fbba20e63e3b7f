//! Scaling of pictures, equal to Pillow 13 in every byte: the references scale their input pictures with it, and a difference
//! in one pixel changes the result.

use std::convert::Infallible;
use std::f64::consts::PI;

/// Fraction bits of the weights (`PRECISION_BITS` in Pillow's `Resample.c`, for bytes).
const PRECISION: u32 = 22;

/// The weight of a pixel by its distance, in pixels of the result where it is smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// A sinc, windowed by a wider sinc, of three lobes.
    Lanczos,
    /// Cubic convolution (Keys 1981) with `a = -1/2`.
    Bicubic,
}

impl Filter {
    /// Half its width.
    fn support(self) -> f64 {
        match self {
            Filter::Lanczos => 3.0,
            Filter::Bicubic => 2.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        const A: f64 = -0.5;
        let sinc = |x: f64| if x == 0.0 { 1.0 } else { (PI * x).sin() / (PI * x) };
        let distance = x.abs();
        match self {
            _ if distance >= self.support() => 0.0,
            Filter::Lanczos => sinc(x) * sinc(x / self.support()),
            Filter::Bicubic if distance < 1.0 => {
                ((A + 2.0) * distance - (A + 3.0)) * distance * distance + 1.0
            }
            Filter::Bicubic => (((distance - 5.0) * distance + 8.0) * distance - 4.0) * A,
        }
    }
}

/// How a model takes a picture: scaled to one size, of which the middle is cut out in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceFit {
    /// Width and height after scaling.
    pub scaled: (u32, u32),
    /// Width and height of what is cut out, at most those.
    pub size: (u32, u32),
    /// Width and height to which the picture is scaled a second time, for a text encoder that sees it; `None` for a model that
    /// takes it once.
    pub seen: Option<(u32, u32)>,
}

impl ReferenceFit {
    /// Scaled to a size, and not cut.
    pub fn scaled_to(size: (u32, u32)) -> ReferenceFit {
        ReferenceFit {
            scaled: size,
            size,
            seen: None,
        }
    }

    /// The middle of a scaled picture, rows of interleaved bytes with `channels` for each pixel.
    #[must_use]
    pub fn cut(&self, bytes: Vec<u8>, channels: usize) -> Vec<u8> {
        if self.scaled == self.size {
            return bytes;
        }
        let [width, height, to_width, to_height] =
            [self.scaled.0, self.scaled.1, self.size.0, self.size.1].map(|side| side as usize);
        let (left, top) = (
            width.saturating_sub(to_width) / 2,
            height.saturating_sub(to_height) / 2,
        );
        let rows = bytes.chunks_exact(width * channels).skip(top).take(to_height);
        let cut = rows.map(|row| &row[left * channels..(left + to_width) * channels]);
        cut.collect::<Vec<_>>().concat()
    }
}

/// Scales rows of interleaved bytes, `channels` for each pixel, from one size to another (width, height), by Lanczos'
/// filter.
///
/// # Panics
/// When there are fewer bytes than `from` has.
#[must_use]
pub fn resized(bytes: &[u8], channels: usize, from: (u32, u32), to: (u32, u32)) -> Vec<u8> {
    resized_by(Filter::Lanczos, bytes, channels, from, to)
}

/// [`resized`] by another filter.
///
/// # Panics
/// As [`resized`].
pub fn resized_by(
    filter: Filter,
    bytes: &[u8],
    channels: usize,
    from: (u32, u32),
    to: (u32, u32),
) -> Vec<u8> {
    let Ok(bytes) = resized_while(|| Ok::<(), Infallible>(()), filter, bytes, channels, from, to);
    bytes
}

/// [`resized_by`], which ends with the first error of `check`. It is called before each row of a pass.
///
/// # Errors
/// Those of `check`.
///
/// # Panics
/// As [`resized`].
pub fn resized_while<E>(
    mut check: impl FnMut() -> Result<(), E>,
    filter: Filter,
    bytes: &[u8],
    channels: usize,
    (width, height): (u32, u32),
    (to_width, to_height): (u32, u32),
) -> Result<Vec<u8>, E> {
    let check = &mut check;
    let (width, height) = (width as usize, height as usize);
    let (to_width, to_height) = (to_width as usize, to_height as usize);
    // The order of the passes, each of which rounds. Signed: a side may grow.
    let shrinks_by = |from: usize, to: usize| from as i64 - to as i64;
    let is_vertical_first =
        to_height < height && shrinks_by(height, to_height) > 2 * shrinks_by(width, to_width);
    if is_vertical_first {
        let rows = vertical(check, filter, bytes, channels * width, (height, to_height))?;
        horizontal(check, filter, &rows, channels, to_height, (width, to_width))
    } else {
        let columns = horizontal(check, filter, bytes, channels, height, (width, to_width))?;
        vertical(check, filter, &columns, channels * to_width, (height, to_height))
    }
}

/// The weights of one pixel of the result: the first input pixel that contributes, and the weight of each from there on.
struct Weights {
    first: usize,
    weights: Vec<i32>,
}

/// The weights of every pixel of an axis.
fn weights(filter: Filter, from: usize, to: usize) -> Vec<Weights> {
    let scale = from as f64 / to as f64;
    let stretch = scale.max(1.0);
    let support = filter.support() * stretch;
    let of_pixel = |pixel: usize| {
        let centre = (pixel as f64 + 0.5) * scale;
        let first = (centre - support + 0.5).max(0.0) as usize;
        let last = ((centre + support + 0.5) as usize).min(from);
        let weights = (first..last).map(|at| filter.weight((at as f64 - centre + 0.5) / stretch));
        let weights: Vec<f64> = weights.collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| {
            let scaled = weight / sum * f64::from(1u32 << PRECISION);
            (scaled + if scaled < 0.0 { -0.5 } else { 0.5 }) as i32
        };
        Weights {
            first,
            weights: weights.iter().map(fixed).collect(),
        }
    };
    (0..to).map(of_pixel).collect()
}

/// The weighted sum of bytes at a distance from each other.
fn sum(bytes: &[u8], begin: usize, stride: usize, weights: &[i32]) -> u8 {
    let products = weights.iter().enumerate();
    let products = products.map(|(i, weight)| i32::from(bytes[begin + i * stride]) * weight);
    let sum: i32 = (1i32 << (PRECISION - 1)) + products.sum::<i32>();
    (sum >> PRECISION).clamp(0, 255) as u8
}

fn horizontal<E>(
    check: &mut impl FnMut() -> Result<(), E>,
    filter: Filter,
    bytes: &[u8],
    channels: usize,
    rows: usize,
    (from, to): (usize, usize),
) -> Result<Vec<u8>, E> {
    if from == to {
        return Ok(bytes[..rows * from * channels].to_vec());
    }
    let weights = weights(filter, from, to);
    let mut out = Vec::with_capacity(rows * to * channels);
    for row in bytes[..rows * from * channels].chunks_exact(from * channels) {
        check()?;
        for Weights { first, weights } in &weights {
            out.extend((0..channels).map(|channel| sum(row, first * channels + channel, channels, weights)));
        }
    }
    Ok(out)
}

fn vertical<E>(
    check: &mut impl FnMut() -> Result<(), E>,
    filter: Filter,
    bytes: &[u8],
    row_bytes: usize,
    (from, to): (usize, usize),
) -> Result<Vec<u8>, E> {
    if from == to {
        return Ok(bytes[..from * row_bytes].to_vec());
    }
    let mut out = Vec::with_capacity(to * row_bytes);
    for Weights { first, weights } in &weights(filter, from, to) {
        check()?;
        out.extend((0..row_bytes).map(|at| sum(bytes, first * row_bytes + at, row_bytes, weights)));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use candle_core::{Device, Tensor};

    use super::*;

    #[test]
    fn the_middle_of_a_picture_is_cut_out() {
        let fit = ReferenceFit {
            scaled: (5, 4),
            size: (2, 2),
            seen: None,
        };
        let bytes: Vec<u8> = (0..20).collect();
        assert_eq!(fit.cut(bytes.clone(), 1), [6, 7, 11, 12]);
        assert_eq!(ReferenceFit::scaled_to((5, 4)).cut(bytes.clone(), 1), bytes);
    }

    #[test]
    fn scaled_pictures_equal_pillows_to_the_byte() {
        let path = "../pipelines/fixtures/flux-kontext-tiny/expected/resize.safetensors";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let bytes = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let size = |t: &Tensor| (t.dims()[1] as u32, t.dims()[0] as u32);
        let mut checked = 0;
        for (name, before) in &tensors {
            let Some(case) = name.strip_suffix(".from").filter(|case| *case != "luminance") else {
                continue;
            };
            let after = &tensors[&format!("{case}.to")];
            let channels = before.dims().get(2).copied().unwrap_or(1);
            let found = resized(&bytes(before), channels, size(before), size(after));
            assert!(found == bytes(after), "{case}");
            checked += 1;
        }
        assert!(checked > 3, "{checked}");
    }

    #[test]
    fn scaling_ends_at_the_row_whose_check_fails() {
        let bytes = vec![7; 64 * 64];
        for end_at in [1, 40, 70] {
            let mut rows = 0;
            let check = || {
                rows += 1;
                if rows < end_at { Ok(()) } else { Err(end_at) }
            };
            let ended = resized_while(check, Filter::Lanczos, &bytes, 1, (64, 64), (32, 32));
            assert_eq!(ended, Err(end_at));
        }
    }

    #[test]
    fn a_picture_of_the_right_size_is_left_as_it_is() {
        let bytes: Vec<u8> = (0..48).collect();
        assert_eq!(resized(&bytes, 3, (4, 4), (4, 4)), bytes);
    }
}
