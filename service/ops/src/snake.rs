//! Snake, the activation of periodic signals, with the zeros that a convolution reads around a sequence.

use candle_core::{DType, Result, Tensor};

use crate::place::{apart_from, with_rows, write_rows};
use crate::rows::with_numbers;

/// Added to a divisor, as the reference does.
const EPS: f32 = 1e-9;

/// `x + sin²(e^alpha x) / (e^beta + 1e-9)` (Ziyin et al. 2020; BigVGAN's SnakeBeta with logarithmic scale).
#[derive(Clone, Debug)]
pub struct Snake {
    /// `[channels]`, in the dtype of sequences: logarithm of the frequency.
    pub alpha: Tensor,
    /// `[channels]`, in the dtype of sequences: logarithm of the reciprocal of the height.
    pub beta: Tensor,
}

impl Snake {
    pub(crate) fn fits(&self, x: &Tensor, channels: usize) -> bool {
        [&self.alpha, &self.beta].iter().all(|vector| {
            vector.dims() == [channels] && vector.dtype() == x.dtype() && vector.is_contiguous()
        })
    }

    /// Frequencies and heights.
    pub(crate) fn factors(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        let exp = |vector: &Tensor| -> Result<Vec<f32>> {
            let numbers = vector.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            Ok(numbers.into_iter().map(f32::exp).collect())
        };
        let heights = exp(&self.beta)?.into_iter().map(|beta| 1.0 / (beta + EPS));
        Ok((exp(&self.alpha)?, heights.collect()))
    }
}

/// Writes a sequence `x`, `[n, channels]`, into `out`, `[m, channels]`, activated by `snake` if there is one: `before`
/// rows of zeros, the rows of `x` as far as there is room, and zeros after them. Both are contiguous and of one dtype
/// (f32, f16 or bf16), and do not overlap.
///
/// # Errors
/// When shapes or dtypes do not match.
pub fn pad_sequence(x: &Tensor, snake: Option<&Snake>, before: usize, out: &Tensor) -> Result<()> {
    let ((_, channels), (rows, written)) = (x.dims2()?, out.dims2()?);
    let is_plain = x.is_contiguous() && out.is_contiguous() && x.dtype() == out.dtype();
    if channels != written || before > rows || !is_plain || !snake.is_none_or(|snake| snake.fits(x, channels))
    {
        candle_core::bail!(
            "a sequence {:?} of {:?} after {before} rows of {:?} of {:?}",
            x.dims(),
            x.dtype(),
            out.dims(),
            out.dtype()
        );
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::snake(x, snake, before, out);
    }
    let factors = snake.map(Snake::factors).transpose()?;
    with_rows(&apart_from(x, out)?, channels, |x| {
        write_rows(out, channels, |row, to| {
            match row.checked_sub(before).filter(|row| *row < x.count()) {
                None => to.fill(0.0),
                Some(row) => {
                    to.copy_from_slice(x.row(row));
                    if let Some((frequencies, heights)) = &factors {
                        activate_row(to, frequencies, heights);
                    }
                }
            }
        })
    })
}

/// Activates a contiguous sequence `[n, channels]` in place.
///
/// # Errors
/// When shapes or dtypes do not match.
pub fn snake_in_place(x: &Tensor, snake: &Snake) -> Result<()> {
    let (_, channels) = x.dims2()?;
    if !x.is_contiguous() || !snake.fits(x, channels) {
        candle_core::bail!(
            "a sequence {:?} of {:?} and Snake of {:?}",
            x.dims(),
            x.dtype(),
            snake.alpha
        );
    }
    if x.elem_count() == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::snake(x, Some(snake), 0, x);
    }
    let (frequencies, heights) = snake.factors()?;
    write_rows(x, channels, |_, row| activate_row(row, &frequencies, &heights))
}

pub(crate) fn activate_row(row: &mut [f32], frequencies: &[f32], heights: &[f32]) {
    for ((number, frequency), height) in row.iter_mut().zip(frequencies).zip(heights) {
        let sin = (*number * frequency).sin();
        *number += height * (sin * sin);
    }
}

/// The length that the rows of a [`NormedWeight`] get.
#[derive(Clone, Copy, Debug)]
pub enum RowLength<'a> {
    /// One that is stored for each row: `weight_g` of `torch.nn.utils.weight_norm` (`dim=0`; Salimans & Kingma 2016).
    Stored(&'a Tensor),
    /// That of the direction times a gain: the weight is stored as it is used.
    Own { gain: f64 },
    /// About the gain, whatever that of the direction is: a direction of `n` numbers is divided by its length and
    /// `epsilon √n` (magnitude-preserving layers; Karras et al. 2024).
    Gain { gain: f64, epsilon: f64 },
}

/// A weight that is folded of a direction and a length for each row: `length · direction / ‖direction‖`.
#[derive(Clone, Copy, Debug)]
pub struct NormedWeight<'a> {
    /// `[rows, ..]`, contiguous: `weight_v`, or the weight.
    pub direction: &'a Tensor,
    /// The length of each row.
    pub length: RowLength<'a>,
}

impl NormedWeight<'_> {
    /// `length / ‖direction‖` of each row, f32 `[rows]`.
    pub(crate) fn scales(&self) -> Result<Tensor> {
        let rows = self.direction.dims().first().copied().unwrap_or_default();
        let are_as_many = match self.length {
            RowLength::Stored(lengths) => lengths.elem_count() == rows,
            RowLength::Own { .. } | RowLength::Gain { .. } => true,
        };
        if rows == 0 || self.direction.elem_count() == 0 || !are_as_many {
            candle_core::bail!(
                "lengths {:?} of directions {:?}",
                self.length,
                self.direction.dims()
            );
        }
        #[cfg(feature = "cuda")]
        if self.direction.device().is_cuda() {
            return crate::cuda::weight_scales(self.direction, self.length);
        }
        let stored = match self.length {
            RowLength::Stored(lengths) => lengths.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?,
            RowLength::Own { .. } | RowLength::Gain { .. } => Vec::new(),
        };
        with_numbers(self.direction, |numbers| {
            let columns = numbers.len() / rows;
            let scale = |(index, row): (usize, &[f32])| {
                let square: f64 = row.iter().map(|number| f64::from(*number).powi(2)).sum();
                match self.length {
                    RowLength::Stored(_) => stored[index] / square.sqrt() as f32,
                    RowLength::Own { gain } => gain as f32,
                    RowLength::Gain { gain, epsilon } => {
                        (gain / (square.sqrt() + epsilon * (columns as f64).sqrt())) as f32
                    }
                }
            };
            let scales: Vec<f32> = numbers.chunks(columns).enumerate().map(scale).collect();
            Tensor::from_vec(scales, rows, self.direction.device())
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    fn host(tensor: &Tensor) -> Result<Tensor> {
        tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)
    }

    #[test]
    fn snake_equals_its_definition_between_zeros() -> Result<()> {
        for channels in [1, 3, 8, 40] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let there = |t: Tensor| here(&t).to_dtype(dtype);
                // Large arguments too: many turns.
                let x = there((random(&[37, channels], 1)? * 30.0)?)?;
                let (alpha, beta) = (there(random(&[channels], 2)?)?, there(random(&[channels], 3)?)?);
                let f64_of = |t: &Tensor| host(t)?.to_dtype(DType::F64);
                let (a, b) = (f64_of(&alpha)?.exp()?, (f64_of(&beta)?.exp()? + 1e-9)?);
                let wide = f64_of(&x)?;
                let squares = wide.broadcast_mul(&a)?.sin()?.sqr()?;
                let expected = (&wide + squares.broadcast_div(&b)?)?.to_dtype(DType::F32)?;
                let snake = Snake { alpha, beta };
                let most = if dtype == DType::F32 { 1e-6 } else { BF16_OPERATION };
                for (before, rows) in [(0, 37), (4, 50), (3, 20), (60, 60)] {
                    let out =
                        here(&Tensor::full(f32::NAN, (rows, channels), &Device::Cpu)?).to_dtype(dtype)?;
                    pad_sequence(&x, Some(&snake), before, &out)?;
                    let kept = (rows - before).min(37);
                    let out = host(&out)?;
                    if kept > 0 {
                        let found = out.narrow(0, before, kept)?.contiguous()?;
                        assert_close(&found, &expected.narrow(0, 0, kept)?, most)?;
                    }
                    let rest = out.sum_all()?.to_scalar::<f32>()?;
                    let of_kept = out.narrow(0, before, kept)?.sum_all()?.to_scalar::<f32>()?;
                    assert!((rest - of_kept).abs() <= 1e-3 * of_kept.abs(), "zeros around it");
                }
                // A sequence as it is, and in place.
                let plain = here(&Tensor::full(f32::NAN, (40, channels), &Device::Cpu)?).to_dtype(dtype)?;
                pad_sequence(&x, None, 2, &plain)?;
                assert_close(&host(&plain.narrow(0, 2, 37)?.contiguous()?)?, &host(&x)?, 0.0)?;
                let inside = plain.narrow(0, 2, 37)?;
                snake_in_place(&inside, &snake)?;
                assert_close(&host(&inside)?.contiguous()?, &expected, most)?;
                let beside = host(&plain.narrow(0, 39, 1)?)?.sum_all()?.to_scalar::<f32>()?;
                assert_eq!(beside, 0.0);
            }
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let (x, out) = (here(&random(&[5, 4], 1)?), here(&random(&[7, 4], 1)?));
        let vector = |channels: usize| Ok::<_, candle_core::Error>(here(&random(&[channels], 1)?));
        let snake = |channels| {
            Ok::<_, candle_core::Error>(Snake {
                alpha: vector(channels)?,
                beta: vector(4)?,
            })
        };
        assert!(pad_sequence(&x, Some(&snake(4)?), 1, &out).is_ok());
        assert!(pad_sequence(&x, Some(&snake(3)?), 1, &out).is_err());
        assert!(pad_sequence(&x, None, 8, &out).is_err());
        assert!(pad_sequence(&x, None, 0, &out.t()?).is_err());
        assert!(pad_sequence(&x, None, 0, &out.to_dtype(DType::BF16)?).is_err());
        assert!(snake_in_place(&x, &snake(5)?).is_err());
        Ok(())
    }
}
