//! Activations, number by number.

use candle_core::{Result, Tensor};

use crate::rows::{exp, map_numbers, on_cpu};

/// `x * sigmoid(x)`: `torch.nn.SiLU`.
///
/// # Errors
/// Those of candle.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    if on_cpu(x) {
        map_numbers(x, |v| v / (1.0 + exp(-v)))
    } else {
        x.silu()
    }
}

/// `torch.nn.GELU(approximate="tanh")`.
///
/// # Errors
/// Those of candle.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    // (1 + tanh u) / 2 = 1 / (1 + exp -2u): one exponential, and no cancellation far below zero.
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
    const TWICE_ROOT_2_OVER_PI: f32 = (2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2) as f32;
    let one = |v: f32| v / (1.0 + exp(-TWICE_ROOT_2_OVER_PI * (v + 0.044_715 * v * v * v)));
    if on_cpu(x) { map_numbers(x, one) } else { x.gelu() }
}

/// `torch.nn.GELU()`, by the error function.
///
/// # Errors
/// Those of candle.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if on_cpu(x) {
        map_numbers(x, |v| {
            0.5 * v * (1.0 + candle_core::cpu::erf::erf_f32(v * std::f32::consts::FRAC_1_SQRT_2))
        })
    } else {
        x.gelu_erf()
    }
}

/// `x * sigmoid(1.702 x)`: transformers' `quick_gelu`, which CLIP uses.
///
/// # Errors
/// Those of candle.
pub fn quick_gelu(x: &Tensor) -> Result<Tensor> {
    if on_cpu(x) {
        map_numbers(x, |v| v / (1.0 + exp(-1.702 * v)))
    } else {
        composed_quick_gelu(x)
    }
}

fn composed_quick_gelu(x: &Tensor) -> Result<Tensor> {
    x / ((x * -1.702)?.exp()? + 1.0)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, random};

    #[test]
    fn activations_equal_their_definitions() -> Result<()> {
        let x = (random(&[3, 50, 40], 1)? * 3.0)?;
        assert_close(&silu(&x)?, &x.silu()?, 1e-6)?;
        assert_close(&gelu_tanh(&x)?, &x.gelu()?, 1e-6)?;
        assert_close(&gelu(&x)?, &x.gelu_erf()?, 1e-6)?;
        assert_close(&quick_gelu(&x)?, &composed_quick_gelu(&x)?, 1e-6)
    }

    #[test]
    fn activations_have_their_limits_far_from_zero() -> Result<()> {
        let x = Tensor::new(&[-200f32, 0.0, 200.0], &candle_core::Device::Cpu)?;
        for f in [silu, gelu_tanh, gelu, quick_gelu] {
            let y = f(&x)?.to_vec1::<f32>()?;
            assert!(y[0].abs() < 1e-30 && y[1] == 0.0 && y[2] == 200.0, "{y:?}");
        }
        Ok(())
    }
}
