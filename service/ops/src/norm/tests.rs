use candle_core::{DType, Device, Result, Tensor};

use super::*;
use crate::testing::{BF16_OPERATION, assert_close, here, random};

/// A view of a larger buffer full of NaN.
fn poisoned(shape: (usize, usize, usize), dtype: DType) -> Result<Tensor> {
    let (batch, rows, columns) = shape;
    let all = (Tensor::zeros((batch, rows + 3, columns + 16), DType::F32, &Device::Cpu)? + f64::NAN)?;
    here(&all.to_dtype(dtype)?)
        .narrow(1, 2, rows)?
        .narrow(2, 8, columns)
}

/// `x` in such a view.
fn placed(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let (batch, rows, columns) = x.dims3()?;
    let all = (Tensor::zeros((batch, rows + 3, columns + 16), DType::F32, &Device::Cpu)? + f64::NAN)?;
    let all = all.slice_assign(&[0..batch, 2..2 + rows, 8..8 + columns], x)?;
    here(&all.to_dtype(dtype)?)
        .narrow(1, 2, rows)?
        .narrow(2, 8, columns)
}

/// A copy on the CPU in f32.
fn found(x: &Tensor) -> Result<Tensor> {
    // The whole storage is copied: strided copies on the card are not under test.
    x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()
}

/// Reference implementation, by candle's operations on the CPU in f32.
struct Defined {
    x: Tensor,
    out: Tensor,
}

#[allow(clippy::too_many_arguments)] // All that a pass has.
fn defined(
    x: &Tensor,
    y: Option<(&Tensor, Option<&Tensor>, bool, Option<&Tensor>)>,
    is_rms: bool,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    modulation: Option<(&Tensor, Option<&Tensor>)>,
    eps: f64,
) -> Result<Defined> {
    let by_rms = |x: &Tensor| x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?);
    let mut x = x.clone();
    if let Some((y, gate, tanh, weight)) = y {
        let y = match weight {
            Some(weight) => by_rms(y)?.broadcast_mul(weight)?,
            None => y.clone(),
        };
        let y = match gate {
            Some(gate) => {
                let gate = if tanh { gate.tanh()? } else { gate.clone() };
                y.broadcast_mul(&gate.unsqueeze(1)?)?
            }
            None => y,
        };
        x = (x + y)?;
    }
    let mut out = match is_rms {
        true => x.clone(),
        false => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
    };
    out = by_rms(&out)?;
    if let Some(weight) = weight {
        out = out.broadcast_mul(weight)?;
    }
    if let Some(bias) = bias {
        out = out.broadcast_add(bias)?;
    }
    if let Some((scale, shift)) = modulation {
        out = out.broadcast_mul(&(scale + 1.0)?.unsqueeze(1)?)?;
        if let Some(shift) = shift {
            out = out.broadcast_add(&shift.unsqueeze(1)?)?;
        }
    }
    Ok(Defined { x, out })
}

#[test]
fn every_norm_pass_equals_the_reference_in_views_of_every_dtype() -> Result<()> {
    // Odd widths, those of wide loads, and one with several units per thread.
    for (batch, rows, columns) in [
        (2, 5, 37),
        (2, 3, 192),
        (2, 3, 2040),
        (1, 4, 3072),
        (1, 2, 8200),
        (1, 2, 16_400),
    ] {
        let x = random(&[batch, rows, columns], 1)?;
        let y = random(&[batch, rows, columns], 2)?;
        let vector = |seed| random(&[columns], seed);
        let of_batch = |seed| random(&[batch, columns], seed);
        let (weight, bias, branch_norm) = (vector(3)?, vector(4)?, vector(5)?);
        let (gate, scale, shift) = (of_batch(6)?, of_batch(7)?, of_batch(8)?);
        for (dtype_of_x, dtype, tolerance) in [
            (DType::F32, DType::F32, 2e-6),
            (DType::BF16, DType::BF16, 2.0 * BF16_OPERATION),
            (DType::F16, DType::F16, 2e-3),
            (DType::F32, DType::BF16, BF16_OPERATION),
        ] {
            let to = |t: &Tensor| here(t).to_dtype(dtype);
            let (weight_, bias_, branch_norm_) = (to(&weight)?, to(&bias)?, to(&branch_norm)?);
            let (gate_, scale_, shift_) = (to(&gate)?, to(&scale)?, to(&shift)?);
            let modulation = Modulation {
                scale: &scale_,
                shift: Some(&shift_),
            };

            // An adaptive layer norm, with the normalized residual written over its branch.
            let (x_, y_) = (placed(&x, dtype_of_x)?, placed(&y, dtype)?);
            let norm = Norm::Layer {
                affine: None,
                eps: 1e-6,
            };
            let expected = defined(&x, None, false, None, None, Some((&scale, Some(&shift))), 1e-6)?;
            let out = poisoned((batch, rows, columns), dtype)?;
            norm_modulate(&x_, norm, Some(modulation), &out)?;
            assert_close(&found(&out)?, &expected.out, tolerance)?;
            let branch = Some((&y, Some(&gate), false, None));
            let expected = defined(&x, branch, false, None, None, Some((&scale, Some(&shift))), 1e-6)?;
            residual_norm_modulate(&x_, &y_, Some((&gate_).into()), norm, Some(modulation), &y_)?;
            assert_close(&found(&x_)?, &expected.x, tolerance)?;
            assert_close(&found(&y_)?, &expected.out, tolerance)?;

            // A layer norm with weights, and a residual without a gate.
            let (x_, y_) = (placed(&x, dtype_of_x)?, placed(&y, dtype)?);
            let norm = Norm::Layer {
                affine: Some((&weight_, &bias_)),
                eps: 1e-5,
            };
            let branch = Some((&y, None, false, None));
            let expected = defined(&x, branch, false, Some(&weight), Some(&bias), None, 1e-5)?;
            let out = poisoned((batch, rows, columns), dtype)?;
            residual_norm_modulate(&x_, &y_, None, norm, None, &out)?;
            assert_close(&found(&out)?, &expected.out, tolerance)?;

            // RMS norm, with a normalized branch, a tanh gate, and no shift.
            let (x_, y_) = (placed(&x, dtype_of_x)?, placed(&y, dtype)?);
            let norm = Norm::Rms {
                weight: Some(&weight_),
                eps: 1e-5,
            };
            let gate_ = Gate {
                vector: &gate_,
                tanh: true,
                branch_norm: Some(&branch_norm_),
            };
            let modulation = Modulation {
                scale: &scale_,
                shift: None,
            };
            let branch = Some((&y, Some(&gate), true, Some(&branch_norm)));
            let expected = defined(&x, branch, true, Some(&weight), None, Some((&scale, None)), 1e-5)?;
            residual_norm_modulate(&x_, &y_, Some(gate_), norm, Some(modulation), &out)?;
            assert_close(&found(&x_)?, &expected.x, tolerance)?;
            assert_close(&found(&out)?, &expected.out, tolerance)?;

            // The residual only.
            let (x_, y_) = (placed(&x, dtype_of_x)?, placed(&y, dtype)?);
            add_residual(&x_, &y_, None)?;
            assert_close(&found(&x_)?, &(&x + &y)?, tolerance)?;
        }
    }
    Ok(())
}

#[test]
fn one_modulation_is_broadcast_to_every_batch_item() -> Result<()> {
    let x = random(&[3, 2, 24], 1)?;
    let (scale, shift) = (random(&[1, 24], 2)?, random(&[1, 24], 3)?);
    let all = |t: &Tensor| t.broadcast_as((3, 24))?.contiguous();
    let expected = defined(
        &x,
        None,
        false,
        None,
        None,
        Some((&all(&scale)?, Some(&all(&shift)?))),
        1e-6,
    )?;
    let out = poisoned((3, 2, 24), DType::F32)?;
    let (scale, shift) = (here(&scale), here(&shift));
    let modulation = Modulation {
        scale: &scale,
        shift: Some(&shift),
    };
    let norm = Norm::Layer {
        affine: None,
        eps: 1e-6,
    };
    norm_modulate(&placed(&x, DType::F32)?, norm, Some(modulation), &out)?;
    assert_close(&found(&out)?, &expected.out, 2e-6)
}

#[test]
fn a_large_mean_does_not_cancel_the_variance() -> Result<()> {
    let around_zero = random(&[1, 1, 512], 4)?;
    let far_away = here(&(&around_zero + 4096.0)?);
    let norm = Norm::Layer {
        affine: None,
        eps: 1e-6,
    };
    let out = poisoned((1, 1, 512), DType::F32)?;
    norm_modulate(&far_away, norm, None, &out)?;
    let expected = defined(&around_zero, None, false, None, None, None, 1e-6)?;
    // Adding 4096 itself rounds to 2^-12 or so; a one-pass variance would be wrong by whole units.
    assert_close(&found(&out)?, &expected.out, 1e-3)
}

#[test]
fn shapes_that_do_not_fit_are_refused() -> Result<()> {
    let x = here(&random(&[2, 3, 8], 1)?);
    let wrong = here(&random(&[1, 7], 1)?);
    let short = here(&random(&[7], 1)?);
    let norm = Norm::Rms {
        weight: None,
        eps: 1e-6,
    };
    let modulation = Modulation {
        scale: &wrong,
        shift: None,
    };
    assert!(norm_modulate(&x, norm, Some(modulation), &x).is_err());
    assert!(add_residual(&x, &x.narrow(1, 0, 2)?, None).is_err());
    assert!(add_residual(&x, &x.copy()?, Some((&wrong).into())).is_err());
    let norm = Norm::Rms {
        weight: Some(&short),
        eps: 1e-6,
    };
    assert!(norm_modulate(&x, norm, None, &x).is_err());
    Ok(())
}

#[test]
fn scales_of_parts_are_aligned_and_do_not_overlap() -> Result<()> {
    let start = |tensor: &Tensor| tensor.layout().start_offset();
    let (rows, width) = (23, 32);
    let all = CodesOfRows::new(rows, width, &Device::Cpu)?;
    assert_eq!(CodesOfRows::bytes(rows, width), (rows * width + 16 * rows) as u64);
    for split in 0..=rows {
        let (text, picture) = (all.part(0, split)?, all.part(split, rows - split)?);
        assert_eq!(picture.codes.dims(), [rows - split, width]);
        assert_eq!(picture.scales.dims(), [rows - split]);
        assert_eq!(start(&picture.scales) * size_of::<f32>() % 16, 0);
        assert!(start(&text.scales) + split <= start(&picture.scales));
    }
    assert!(all.part(20, 4).is_err());
    Ok(())
}
