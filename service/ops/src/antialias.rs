//! Snake at twice the rate of a sequence, between a filter that doubles the rate and one that halves it, so that it adds no
//! frequencies that the rate cannot have (Karras et al. 2021; `Activation1d` of BigVGAN, Lee et al. 2022).

use candle_core::{DType, Result, Tensor};

use crate::Snake;
use crate::place::{apart_from, with_rows, write_rows};

/// Taps of the low pass of both filters.
pub const ANTIALIAS_TAPS: usize = 12;

/// Activates a sequence `x`, contiguous f32 `[n, channels]`, at twice its rate, into `out` of the same shape, contiguous in
/// f32, f16 or bf16. `taps` is a low pass of half the doubled rate. Both filters see copies of the rows at the ends beyond
/// them. `out` must not overlap `x`.
///
/// On a card it is one kernel; on the CPU it takes memory of twice the sequence.
///
/// # Errors
/// When shapes or dtypes do not match.
pub fn antialiased_snake(
    x: &Tensor,
    snake: &Snake,
    taps: &[f32; ANTIALIAS_TAPS],
    out: &Tensor,
) -> Result<()> {
    let (rows, channels) = x.dims2()?;
    let fits = x.dtype() == DType::F32
        && x.is_contiguous()
        && out.dims() == x.dims()
        && out.is_contiguous()
        && snake.fits(x, channels);
    if !fits {
        candle_core::bail!(
            "a sequence {:?} of {:?} to {:?} by Snake of {:?}",
            x.dims(),
            x.dtype(),
            out.dims(),
            snake.alpha
        );
    }
    if x.elem_count() == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::antialiased_snake(x, snake, taps, out);
    }
    let factors = snake.factors()?;
    let doubled = Tensor::zeros((2 * rows, channels), DType::F32, x.device())?;
    // Row `2 t` sees the rows from `t - 3` to `t + 2`, row `2 t + 1` those from `t - 2` to `t + 3`, which is the reverse.
    with_rows(&apart_from(x, out)?, channels, |x| {
        write_rows(&doubled, channels, |row, numbers| {
            let (first, odd) = (row / 2, row % 2);
            for of_row in 0..ANTIALIAS_TAPS / 2 {
                let seen = (first + of_row + odd)
                    .saturating_sub(ANTIALIAS_TAPS / 4)
                    .min(rows - 1);
                add_scaled(
                    x.row(seen),
                    2.0 * taps[ANTIALIAS_TAPS - 1 - odd - 2 * of_row],
                    numbers,
                );
            }
            crate::snake::activate_row(numbers, &factors.0, &factors.1);
        })
    })?;
    // Row `t` sees the doubled rows from `2 t - 5` to `2 t + 6`.
    with_rows(&doubled, channels, |doubled| {
        write_rows(out, channels, |row, numbers| {
            numbers.fill(0.0);
            for (tap, factor) in taps.iter().enumerate() {
                let seen = (2 * row + tap)
                    .saturating_sub(ANTIALIAS_TAPS / 2 - 1)
                    .min(2 * rows - 1);
                add_scaled(doubled.row(seen), *factor, numbers);
            }
        })
    })
}

fn add_scaled(row: &[f32], factor: f32, to: &mut [f32]) {
    for (to, number) in to.iter_mut().zip(row) {
        *to += factor * number;
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    /// The definition in f64, number by number: `interpolate` and `decimate` by the taps around Snake.
    fn naive(x: &Tensor, [alpha, beta]: [&Tensor; 2], taps: &[f32; ANTIALIAS_TAPS]) -> Result<Tensor> {
        let (rows, channels) = x.dims2()?;
        let (numbers, alpha, beta) = (
            x.to_vec2::<f32>()?,
            alpha.to_vec1::<f32>()?,
            beta.to_vec1::<f32>()?,
        );
        let mut result = vec![0.0f32; rows * channels];
        for channel in 0..channels {
            // Zeros between the rows, after five copies of the first and before five of the last; then the filter.
            let at = |row: i64| f64::from(numbers[row.clamp(0, rows as i64 - 1) as usize][channel]);
            let spread = |place: i64| if place % 2 == 0 { at(place / 2 - 5) } else { 0.0 };
            let doubled: Vec<f64> = (0..2 * rows as i64)
                .map(|row| {
                    let of_taps = taps.iter().enumerate();
                    // `conv_transpose1d` of stride 2, cut by 15 on both sides.
                    let sum = of_taps.map(|(tap, factor)| {
                        let place = row + 15 - tap as i64;
                        2.0 * f64::from(*factor) * spread(place)
                    });
                    let value: f64 = sum.sum();
                    let sin = (value * f64::from(alpha[channel]).exp()).sin();
                    value + sin * sin / (f64::from(beta[channel]).exp() + 1e-9)
                })
                .collect();
            for row in 0..rows {
                let sum: f64 = taps
                    .iter()
                    .enumerate()
                    .map(|(tap, factor)| {
                        let seen = (2 * row + tap) as i64 - 5;
                        f64::from(*factor) * doubled[seen.clamp(0, 2 * rows as i64 - 1) as usize]
                    })
                    .sum();
                result[row * channels + channel] = sum as f32;
            }
        }
        Tensor::from_vec(result, (rows, channels), &Device::Cpu)
    }

    #[test]
    fn it_equals_its_definition_for_every_length() -> Result<()> {
        let taps: [f32; ANTIALIAS_TAPS] = std::array::from_fn(|tap| ((tap * tap) as f32 * 0.37).sin() * 0.3);
        for (rows, channels) in [(1, 8), (2, 5), (5, 24), (31, 3), (32, 8), (33, 40), (200, 17)] {
            let x = (random(&[rows, channels], 1)? * 4.0)?;
            let (alpha, beta) = (random(&[channels], 2)?, random(&[channels], 3)?);
            let expected = naive(&x, [&alpha, &beta], &taps)?;
            let snake = Snake {
                alpha: here(&alpha),
                beta: here(&beta),
            };
            for (dtype, most) in [
                (DType::F32, 2e-6),
                (DType::BF16, BF16_OPERATION),
                (DType::F16, 1e-3),
            ] {
                // Into the middle of a larger sequence.
                let larger =
                    here(&Tensor::full(7f32, (rows + 3, channels), &Device::Cpu)?).to_dtype(dtype)?;
                antialiased_snake(&here(&x), &snake, &taps, &larger.narrow(0, 2, rows)?)?;
                let larger = larger.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                assert_close(&larger.narrow(0, 2, rows)?, &expected, most)?;
                for beside in [larger.narrow(0, 0, 2)?, larger.narrow(0, rows + 2, 1)?] {
                    assert!(
                        beside
                            .flatten_all()?
                            .to_vec1::<f32>()?
                            .iter()
                            .all(|number| *number == 7.0)
                    );
                }
            }
        }
        Ok(())
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let taps = [0.1; ANTIALIAS_TAPS];
        let x = here(&random(&[5, 4], 1)?);
        let vector = |channels: usize| random(&[channels], 2).map(|vector| here(&vector));
        let of = |alpha: usize| {
            Ok::<_, candle_core::Error>(Snake {
                alpha: vector(alpha)?,
                beta: vector(4)?,
            })
        };
        let (fits, out) = (of(4)?, x.copy()?);
        assert!(antialiased_snake(&x, &fits, &taps, &out).is_ok());
        assert!(antialiased_snake(&x, &of(3)?, &taps, &out).is_err());
        assert!(antialiased_snake(&x, &fits, &taps, &out.narrow(0, 0, 4)?).is_err());
        assert!(antialiased_snake(&x.to_dtype(DType::BF16)?, &fits, &taps, &out).is_err());
        assert!(antialiased_snake(&x, &fits, &taps, &out.t()?).is_err());
        Ok(())
    }
}
