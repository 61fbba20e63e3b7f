//! Elementwise activation functions.

use candle_core::cpu::erf::erf_f32;
use candle_core::{D, Result, Tensor};

use crate::loops::{gelu_tanh_in_place, quick_gelu_in_place, silu_in_place};
use crate::place::write_rows;

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Nonlinearity {
    /// `torch.nn.GELU()`, exact, by the error function.
    Gelu,
    /// `torch.nn.GELU(approximate="tanh")`.
    GeluTanh,
    /// `x * sigmoid(1.702 x)`: transformers' `quick_gelu`, which CLIP uses.
    QuickGelu,
    /// `x * sigmoid(x)`: `torch.nn.SiLU`.
    Silu,
    /// `torch.nn.Tanh`.
    Tanh,
    /// `x` within `-most` and `most`: `torch.nn.Hardtanh(-most, most)`.
    HardTanh { most: f32 },
}

impl Nonlinearity {
    /// Applies the function to every element, in place.
    pub(crate) fn apply(self, numbers: &mut [f32]) {
        match self {
            Nonlinearity::Gelu => gelu_in_place(numbers),
            Nonlinearity::GeluTanh => gelu_tanh_in_place(numbers),
            Nonlinearity::QuickGelu => quick_gelu_in_place(numbers),
            Nonlinearity::Silu => silu_in_place(numbers),
            Nonlinearity::Tanh => numbers.iter_mut().for_each(|v| *v = v.tanh()),
            Nonlinearity::HardTanh { most } => numbers.iter_mut().for_each(|v| *v = v.clamp(-most, most)),
        }
    }
}

/// Applies an activation to every element of `x` `[.., d]`, in place, computed in f32. `x` may be a strided view.
///
/// # Errors
/// Errors of the device.
pub fn activate(x: &Tensor, by: Nonlinearity) -> Result<()> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return crate::cuda::glu(x, None, by, x);
    }
    if x.elem_count() == 0 {
        return Ok(());
    }
    write_rows(x, x.dim(D::Minus1)?, |_, numbers| by.apply(numbers))
}

fn gelu_in_place(numbers: &mut [f32]) {
    let one = |v: f32| 0.5 * v * (1.0 + erf_f32(v * std::f32::consts::FRAC_1_SQRT_2));
    numbers.iter_mut().for_each(|v| *v = one(*v));
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    use crate::testing::{BF16_OPERATION, assert_close, here, random};

    fn composed_quick_gelu(x: &Tensor) -> Result<Tensor> {
        x / ((x * -1.702)?.exp()? + 1.0)?
    }

    #[test]
    fn a_strided_view_is_activated_in_place() -> Result<()> {
        use candle_core::Device;
        let x = (random(&[3, 5, 24], 1)? * 3.0)?;
        for (width, by, expected) in [
            (24, Nonlinearity::Silu, x.silu()?),
            (16, Nonlinearity::GeluTanh, x.gelu()?),
            (7, Nonlinearity::Gelu, x.gelu_erf()?),
            (5, Nonlinearity::QuickGelu, composed_quick_gelu(&x)?),
            (24, Nonlinearity::Tanh, x.tanh()?),
            (9, Nonlinearity::HardTanh { most: 1.5 }, x.clamp(-1.5f32, 1.5f32)?),
        ] {
            for (dtype, tolerance) in [
                (DType::F32, 1e-6),
                (DType::F16, 1e-3),
                (DType::BF16, BF16_OPERATION),
            ] {
                let all = here(&x.to_dtype(dtype)?).copy()?;
                activate(&all.narrow(2, 24 - width, width)?, by)?;
                let all = all.to_device(&Device::Cpu)?;
                assert_close(
                    &all.narrow(2, 24 - width, width)?,
                    &expected.narrow(2, 24 - width, width)?,
                    tolerance,
                )?;
                if width < 24 {
                    let rest = |x: &Tensor| x.narrow(2, 0, 24 - width);
                    assert_close(&rest(&all)?, &rest(&x.to_dtype(dtype)?)?, 0.0)?;
                }
            }
        }
        let far = here(&Tensor::new(&[-200f32, 0.0, 200.0], &Device::Cpu)?);
        use Nonlinearity::{Gelu, GeluTanh, HardTanh, QuickGelu, Silu, Tanh};
        for (by, bounds) in [
            (Tanh, [-1.0, 0.0, 1.0]),
            (HardTanh { most: 3.0 }, [-3.0, 0.0, 3.0]),
        ] {
            let y = far.copy()?;
            activate(&y, by)?;
            assert_eq!(y.to_vec1::<f32>()?, bounds, "{by:?}");
            let strange = here(&Tensor::new(&[f32::NAN], &Device::Cpu)?);
            activate(&strange, by)?;
            assert!(strange.to_vec1::<f32>()?[0].is_nan(), "{by:?}");
        }
        for by in [Gelu, GeluTanh, QuickGelu, Silu] {
            let y = far.copy()?;
            activate(&y, by)?;
            let y = y.to_vec1::<f32>()?;
            assert!(
                y[0].abs() < 1e-30 && y[1] == 0.0 && y[2] == 200.0,
                "{by:?}: {y:?}"
            );
        }
        Ok(())
    }
}
