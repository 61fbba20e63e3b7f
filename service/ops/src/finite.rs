//! Detection of NaN and infinity.

use candle_core::{D, Result, Tensor};

use crate::place::with_rows;

/// Whether every element of `x` `[.., d]` is finite: f32, f16 or bf16, possibly a strided view. On a card this
/// synchronizes.
///
/// # Errors
/// Errors of the device.
pub fn all_finite(x: &Tensor) -> Result<bool> {
    if x.elem_count() == 0 {
        return Ok(true);
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::all_finite(x);
    }
    with_rows(x, x.dim(D::Minus1)?, |rows| {
        Ok((0..rows.count()).all(|row| rows.row(row).iter().all(|number| number.is_finite())))
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{here, random};

    #[test]
    fn a_value_that_is_not_finite_is_found_at_any_position() -> Result<()> {
        for (width, dtype) in [
            (24, DType::F32),
            (24, DType::BF16),
            (7, DType::F16),
            (5, DType::BF16),
        ] {
            // Each value is far from overflow; their sum is not.
            let x = (random(&[2, 9, width + 8], 1)? * 6e4)?.to_dtype(dtype)?;
            assert!(all_finite(&here(&x))?, "{dtype:?}");
            for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for (batch, row, column) in [(0, 0, 0), (1, 8, width - 1), (1, 3, 3)] {
                    let mut numbers = x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                    numbers[(batch * 9 + row) * (width + 8) + column] = wrong;
                    let with = here(&Tensor::from_vec(numbers, x.shape(), &Device::Cpu)?.to_dtype(dtype)?);
                    assert!(!all_finite(&with)?, "{wrong} in {dtype:?}");
                    assert!(
                        !all_finite(&with.narrow(2, 0, width)?)?,
                        "{wrong} in a window of {dtype:?}"
                    );
                    // The value is outside of this view.
                    assert!(all_finite(&with.narrow(2, width, 8)?)?);
                }
            }
        }
        Ok(())
    }
}
