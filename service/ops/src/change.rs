//! How much a branch of a network changes from step to step.

use candle_core::{D, Result, Tensor};

use crate::place::with_rows;

/// How far `x - base` is from `kept`, relative to `kept`: the mean of `|x - base - kept|` by the mean of `|kept|`, over all
/// elements. All three are `[.., d]`, of the same shape and dtype (f32, f16 or bf16), and may be strided views. Sums are in f32 or
/// f64, in a fixed order: equal inputs have equal results. Infinite where `kept` is 0 throughout. On a card this synchronizes.
///
/// # Errors
/// When shapes or dtypes do not match; errors of the device.
pub fn relative_change(x: &Tensor, base: &Tensor, kept: &Tensor) -> Result<f64> {
    let is_alike = |other: &Tensor| other.dims() == x.dims() && other.dtype() == x.dtype();
    if !is_alike(base) || !is_alike(kept) {
        candle_core::bail!(
            "a change of {:?} from {:?}, beside one of {:?}",
            x.dims(),
            base.dims(),
            kept.dims()
        );
    }
    let [change, whole] = sums(x, base, kept)?;
    Ok(match whole > 0.0 {
        true => change / whole,
        false => f64::INFINITY,
    })
}

fn sums(x: &Tensor, base: &Tensor, kept: &Tensor) -> Result<[f64; 2]> {
    if x.elem_count() == 0 {
        return Ok([0.0; 2]);
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::sums_of_change(x, base, kept);
    }
    let width = x.dim(D::Minus1)?;
    with_rows(x, width, |x| {
        with_rows(base, width, |base| {
            with_rows(kept, width, |kept| {
                let mut sums = [0.0; 2];
                for row in 0..x.count() {
                    for ((x, base), kept) in x.row(row).iter().zip(base.row(row)).zip(kept.row(row)) {
                        sums[0] += f64::from((x - base - kept).abs());
                        sums[1] += f64::from(kept.abs());
                    }
                }
                Ok(sums)
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{here, random};

    #[test]
    fn a_change_is_measured_against_what_is_kept() -> Result<()> {
        for (dtype, width, tolerance) in [
            (DType::F32, 24, 1e-5),
            (DType::BF16, 24, 1e-5),
            (DType::F16, 7, 1e-5),
        ] {
            let rounded = |seed| random(&[2, 9, width + 8], seed)?.to_dtype(dtype);
            let (x, base, kept) = (rounded(1)?, rounded(2)?, rounded(3)?);
            let in_f32 = |x: &Tensor| x.narrow(2, 0, width)?.to_dtype(DType::F32);
            let (a, b, c) = (in_f32(&x)?, in_f32(&base)?, in_f32(&kept)?);
            let mean = |x: Tensor| x.abs()?.mean_all()?.to_scalar::<f32>();
            let expected = f64::from(mean(((&a - &b)? - &c)?)? / mean(c)?);
            let window = |x: &Tensor| here(x).narrow(2, 0, width);
            let found = relative_change(&window(&x)?, &window(&base)?, &window(&kept)?)?;
            assert!(
                (found / expected - 1.0).abs() < tolerance,
                "{found}, {expected} in {dtype:?}"
            );
            let again = relative_change(&window(&x)?, &window(&base)?, &window(&kept)?)?;
            assert_eq!(found.to_bits(), again.to_bits());
        }
        Ok(())
    }

    #[test]
    fn equal_branches_have_no_change_and_beside_zeros_the_change_is_infinite() -> Result<()> {
        let x = here(&random(&[1, 5, 16], 1)?);
        let zero = here(&Tensor::zeros((1, 5, 16), DType::F32, &Device::Cpu)?);
        assert_eq!(relative_change(&x, &zero, &x)?, 0.0);
        assert_eq!(relative_change(&x, &zero, &zero)?, f64::INFINITY);
        assert!(relative_change(&x, &zero, &zero.narrow(2, 0, 8)?).is_err());
        Ok(())
    }
}
