//! Layer norm over the last axis, with a second pass for the variance: one pass loses it to cancellation
//! where the mean is large.

use candle_core::{D, DType, Result, Tensor};

use crate::loops::{layer_norm_row, modulated_row};
use crate::rows::{in_parts, in_parts_of_rows, map_rows, on_cpu, with_numbers};

/// The normalised rows in f32, by candle's operations.
fn normalised(x: &Tensor, eps: f64) -> Result<Tensor> {
    let x = x.to_dtype(DType::F32)?;
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    centred.broadcast_div(&(variance + eps)?.sqrt()?)
}

/// `torch.nn.LayerNorm` over the last axis: `x` is `[.., d]`, `weight` and `bias` are `[d]`.
///
/// # Errors
/// When shapes do not fit.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    if weight.dims() != [width] || bias.dims() != [width] {
        candle_core::bail!(
            "layer norm over {width} with weight {:?}, bias {:?}",
            weight.dims(),
            bias.dims()
        );
    }
    if !on_cpu(x) {
        let (weight, bias) = (weight.to_dtype(DType::F32)?, bias.to_dtype(DType::F32)?);
        return in_parts_of_rows(x, |part| composed(part, &weight, &bias, eps));
    }
    with_numbers(weight, |weight| {
        with_numbers(bias, |bias| {
            map_rows(x, |_, row, out| {
                layer_norm_row(row, weight, bias, eps as f32, out)
            })
        })
    })
}

fn composed(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let (weight, bias) = (weight.to_dtype(DType::F32)?, bias.to_dtype(DType::F32)?);
    normalised(x, eps)?
        .broadcast_mul(&weight)?
        .broadcast_add(&bias)?
        .to_dtype(x.dtype())
}

/// Layer norm without weights, then `* (1 + scale) + shift`: the adaptive norm of diffusion transformers.
/// `x` is `[b, n, d]`; `scale` and `shift` are `[b, d]`.
///
/// # Errors
/// When shapes do not fit.
pub fn modulated_layer_norm(x: &Tensor, scale: &Tensor, shift: &Tensor, eps: f64) -> Result<Tensor> {
    let (batch, tokens, width) = x.dims3()?;
    if scale.dims() != [batch, width] || shift.dims() != [batch, width] {
        candle_core::bail!(
            "modulation of {:?} by {:?} and {:?}",
            x.dims(),
            scale.dims(),
            shift.dims()
        );
    }
    if !on_cpu(x) {
        let scale = scale.to_dtype(DType::F32)?;
        let shift = shift.to_dtype(DType::F32)?;
        return in_parts(x, 1, |part, _| composed_modulation(part, &scale, &shift, eps));
    }
    with_numbers(scale, |scale| {
        with_numbers(shift, |shift| {
            map_rows(x, |row_index, row, out| {
                let of_batch = (row_index / tokens) * width..(row_index / tokens + 1) * width;
                modulated_row(row, &scale[of_batch.clone()], &shift[of_batch], eps as f32, out);
            })
        })
    })
}

fn composed_modulation(x: &Tensor, scale: &Tensor, shift: &Tensor, eps: f64) -> Result<Tensor> {
    let scale = (scale.to_dtype(DType::F32)? + 1.0)?.unsqueeze(1)?;
    let shift = shift.to_dtype(DType::F32)?.unsqueeze(1)?;
    normalised(x, eps)?
        .broadcast_mul(&scale)?
        .broadcast_add(&shift)?
        .to_dtype(x.dtype())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{assert_close, assert_defined, here, random};

    #[test]
    fn layer_norm_equals_its_definition() -> Result<()> {
        let x = (random(&[2, 7, 37], 1)? + 5.0)?;
        let (weight, bias) = (random(&[37], 2)?, random(&[37], 3)?);
        let expected = composed(&x, &weight, &bias, 1e-6)?;
        // In bf16 a mean of five costs three of eight bits of what is left without it: looked at below.
        let (exact_x, exact_weight, exact_bias) = (here(&x), here(&weight), here(&bias));
        assert_close(
            &layer_norm(&exact_x, &exact_weight, &exact_bias, 1e-6)?,
            &expected,
            1e-6,
        )?;
        let x = random(&[2, 7, 37], 1)?;
        let expected = composed(&x, &weight, &bias, 1e-6)?;
        let norm = |t: &[Tensor]| layer_norm(&t[0], &t[1], &t[2], 1e-6);
        assert_defined(&[&x, &weight, &bias], norm, &expected, 1e-6)
    }

    #[test]
    fn modulation_is_per_batch() -> Result<()> {
        let x = random(&[2, 7, 37], 1)?;
        let (scale, shift) = (random(&[2, 37], 2)?, random(&[2, 37], 3)?);
        let expected = composed_modulation(&x, &scale, &shift, 1e-6)?;
        let norm = |t: &[Tensor]| modulated_layer_norm(&t[0], &t[1], &t[2], 1e-6);
        assert_defined(&[&x, &scale, &shift], norm, &expected, 1e-6)
    }

    #[test]
    fn a_large_mean_does_not_drown_the_variance() -> Result<()> {
        let around_zero = here(&random(&[1, 1, 512], 4)?);
        let far_away = (&around_zero + 4096.0)?;
        let zeros = here(&Tensor::zeros((1, 512), DType::F32, &Device::Cpu)?);
        let far = modulated_layer_norm(&far_away, &zeros, &zeros, 1e-6)?;
        // Adding 4096 itself rounds to 2^-12 or so; a one-pass variance would be off by whole units.
        assert_close(
            &far,
            &modulated_layer_norm(&around_zero, &zeros, &zeros, 1e-6)?,
            1e-3,
        )
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() -> Result<()> {
        let x = random(&[1, 3, 8], 1)?;
        assert!(layer_norm(&x, &random(&[7], 1)?, &random(&[8], 1)?, 1e-6).is_err());
        assert!(modulated_layer_norm(&x, &random(&[2, 8], 1)?, &random(&[1, 8], 1)?, 1e-6).is_err());
        Ok(())
    }
}
