//! Gated linear units.

use candle_core::{D, Result, Tensor};

use crate::Nonlinearity;
use crate::place::{apart_from, with_rows, write_rows};

/// `out = by(gate) * up` (Shazeer 2020, "GLU Variants Improve Transformer"), computed in f32. All are `[.., d]` in
/// one dtype and may be strided views; `out` may be `gate` or `up`.
///
/// # Errors
/// When shapes or dtypes do not match.
pub fn glu(gate: &Tensor, up: &Tensor, by: Nonlinearity, out: &Tensor) -> Result<()> {
    let all = [gate, up, out];
    if all
        .iter()
        .any(|x| x.dims() != out.dims() || x.dtype() != out.dtype())
    {
        let (shapes, dtypes) = (all.map(Tensor::dims), all.map(Tensor::dtype));
        candle_core::bail!("a gated unit of {shapes:?} in {dtypes:?}");
    }
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::glu(gate, Some(up), by, out);
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    let width = out.dim(D::Minus1)?;
    let (gate, up) = (apart_from(gate, out)?, apart_from(up, out)?);
    with_rows(&gate, width, |gate| {
        with_rows(&up, width, |up| {
            write_rows(out, width, |row, numbers| {
                numbers.copy_from_slice(gate.row(row));
                by.apply(numbers);
                for (number, up) in numbers.iter_mut().zip(up.row(row)) {
                    *number *= up;
                }
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    /// Reference implementation, by candle's operations on the CPU in f32.
    fn defined(gate: &Tensor, up: &Tensor, by: Nonlinearity) -> Result<Tensor> {
        let activated = match by {
            Nonlinearity::Gelu => gate.gelu_erf()?,
            Nonlinearity::GeluTanh => gate.gelu()?,
            Nonlinearity::Silu => gate.silu()?,
            Nonlinearity::QuickGelu => (gate / ((gate * -1.702)?.exp()? + 1.0)?)?,
            Nonlinearity::Tanh => gate.tanh()?,
            Nonlinearity::HardTanh { most } => gate.clamp(-most, most)?,
        };
        activated * up
    }

    #[test]
    fn the_activated_gate_multiplies_the_other_half() -> Result<()> {
        use Nonlinearity::{Gelu, GeluTanh, HardTanh, QuickGelu, Silu, Tanh};
        // Both halves next to each other, into a window of another tensor.
        for width in [24, 7] {
            let halves = (random(&[2, 5, 2 * width], 1)? * 3.0)?;
            let half = |x: &Tensor, which: usize| x.narrow(2, which * width, width);
            for by in [Gelu, GeluTanh, QuickGelu, Silu, Tanh, HardTanh { most: 0.5 }] {
                let expected = defined(&half(&halves, 0)?, &half(&halves, 1)?, by)?;
                for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, BF16_OPERATION)] {
                    let x = here(&halves.to_dtype(dtype)?).copy()?;
                    let all = here(&Tensor::ones((2, 5, width + 8), dtype, &Device::Cpu)?).copy()?;
                    let out = all.narrow(2, 8, width)?;
                    glu(&half(&x, 0)?, &half(&x, 1)?, by, &out)?;
                    assert_close(&out, &expected, tolerance)?;
                    assert_close(
                        &all.narrow(2, 0, 8)?,
                        &Tensor::ones((2, 5, 8), dtype, &Device::Cpu)?,
                        0.0,
                    )?;
                    // In place of the gate, which shares a storage with the other half.
                    glu(&half(&x, 0)?, &half(&x, 1)?, by, &half(&x, 0)?)?;
                    assert_close(&half(&x, 0)?, &expected, tolerance)?;
                    assert_close(&half(&x, 1)?, &half(&halves.to_dtype(dtype)?, 1)?, 0.0)?;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn halves_that_do_not_fit_are_refused() -> Result<()> {
        let x = here(&random(&[2, 8], 1)?);
        let out = x.copy()?;
        assert!(glu(&x, &x.narrow(1, 0, 4)?, Nonlinearity::Silu, &out).is_err());
        assert!(
            glu(
                &x,
                &x.to_device(&Device::Cpu)?.to_dtype(DType::F16)?,
                Nonlinearity::Silu,
                &out
            )
            .is_err()
        );
        Ok(())
    }
}
