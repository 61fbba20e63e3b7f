//! Root-mean-square norm over the last axis.

use candle_core::{D, DType, Result, Tensor};

use crate::loops::rms_norm_row;
use crate::rows::{in_parts_of_rows, map_rows, on_cpu, with_numbers};

/// `torch.nn.RMSNorm` and transformers' `T5LayerNorm`: `x / sqrt(mean(x²) + eps) * weight`, `x` is
/// `[.., d]`, `weight` is `[d]`. No mean is taken away and there is no bias.
///
/// # Errors
/// When shapes do not fit.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if weight.dims() != [width] {
        candle_core::bail!(
            "root-mean-square norm over {width} with weight {:?}",
            weight.dims()
        );
    }
    if !on_cpu(x) {
        let weight = weight.to_dtype(DType::F32)?;
        return in_parts_of_rows(x, |part| composed(part, &weight, eps));
    }
    with_numbers(weight, |weight| {
        map_rows(x, |_, row, out| rms_norm_row(row, weight, eps as f32, out))
    })
}

fn composed(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let numbers = x.to_dtype(DType::F32)?;
    let mean_square = numbers.sqr()?.mean_keepdim(D::Minus1)?;
    numbers
        .broadcast_div(&(mean_square + eps)?.sqrt()?)?
        .broadcast_mul(&weight.to_dtype(DType::F32)?)?
        .to_dtype(x.dtype())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_defined, random};

    #[test]
    fn rms_norm_equals_its_definition() -> Result<()> {
        let (x, weight) = (random(&[2, 3, 5, 19], 1)?, random(&[19], 2)?);
        let expected = composed(&x, &weight, 1e-6)?;
        assert_defined(&[&x, &weight], |t| rms_norm(&t[0], &t[1], 1e-6), &expected, 1e-6)
    }
}
