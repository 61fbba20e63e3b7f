//! Attention over e4m3 codes: faster on cards whose tensor cores multiply them, and not quite equal.

use candle_core::{Result, Tensor};
use gpu::{E4M3_MAX, e4m3_to_f32, f32_to_e4m3};

use super::{Mask, check_shapes, cpu};
use crate::place::{with_rows, write_rows};
use crate::planned::{AttentionShape, Planned, log_shape};

/// Tensors whose greatest magnitude is smaller become zeros.
const NEGLIGIBLE: f32 = 1e-20;

/// [`super::attention()`] to all keys, in e4m3 where the device has it, else in full.
///
/// Queries, keys and values are rounded to e4m3 with one scale each, of their greatest magnitude; so are the weights, whose sums stay in
/// f32, and the result, with the scale of the values (Shah et al., "FlashAttention-3", 2024, section 3.3, without their blocks). The
/// error is 0.04 to 0.05 in L2 of random numbers, and grows with the spread of the scores: 0.08 where they deviate by 3. Queries, keys and values are **overwritten**: the codes lie in their rows, so that no other memory is needed.
/// Each row's heads must be side by side.
///
/// A card has it from compute capability 9.0 on, where cuDNN has a plan. On the CPU numbers are rounded as there, but for the weights, so
/// that a request means the same there.
///
/// # Errors
/// When shapes do not match; errors of the device.
pub fn attention_in_fp8(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, out: &Tensor) -> Result<()> {
    check_shapes(q, k, v, out)?;
    let shape = AttentionShape::of(q, k, v, Mask::None, out).map(AttentionShape::in_fp8_if_possible);
    let Some(shape) = shape.filter(|shape| shape.in_fp8) else {
        return super::attention(q, k, v, scale, Mask::None, out);
    };
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        if !crate::cuda::attention_in_fp8(&shape, [q, k, v], scale, out)? {
            return super::attention(q, k, v, scale, Mask::None, out);
        }
        log_shape(|| Some(Planned::Attention(shape)));
        return Ok(());
    }
    log_shape(|| Some(Planned::Attention(shape)));
    let mut of_values = 0.0;
    for x in [q, k, v] {
        of_values = greatest(x)?;
        round(x, of_values)?;
    }
    cpu::attention(q, k, v, scale, Mask::None, out)?;
    round(out, of_values)?;
    crate::libraries::count_attention_on_cpu();
    crate::libraries::count_attention_in_fp8();
    Ok(())
}

/// Elements of a row: all heads of a token.
fn columns(x: &Tensor) -> Result<usize> {
    let (_, _, heads, width) = x.dims4()?;
    Ok(heads * width)
}

/// The greatest magnitude.
fn greatest(x: &Tensor) -> Result<f32> {
    with_rows(x, columns(x)?, |rows| {
        let of_row = |row: usize| rows.row(row).iter().fold(0f32, |most, x| most.max(x.abs()));
        Ok((0..rows.count()).map(of_row).fold(0f32, f32::max))
    })
}

/// Rounds to e4m3 with the scale of this magnitude, in place.
fn round(x: &Tensor, greatest: f32) -> Result<()> {
    let scale = if greatest < NEGLIGIBLE {
        1.0
    } else {
        greatest / E4M3_MAX
    };
    let factor = 1.0 / scale;
    write_rows(x, columns(x)?, |_, row| {
        for x in row {
            *x = match x.is_nan() {
                true => f32::NAN,
                false => e4m3_to_f32(f32_to_e4m3(*x * factor)) * scale,
            };
        }
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::testing::{here, random, test_device};

    fn relative(found: &Tensor, expected: &Tensor) -> Result<f64> {
        let in_f64 = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.contiguous();
        let (found, expected) = (in_f64(found)?, in_f64(expected)?);
        let norm = |x: Tensor| x.sqr()?.sum_all()?.to_scalar::<f64>();
        Ok((norm((&found - &expected)?)? / norm(expected)?).sqrt())
    }

    /// Queries, keys and values in one buffer, and a place for the result in wider rows.
    struct Operands {
        joint: Tensor,
        wide: Tensor,
        heads: usize,
    }

    impl Operands {
        fn new([batch, tokens, heads, width]: [usize; 4], dtype: DType, gain: f64) -> Result<Operands> {
            let joint = (random(&[batch, tokens, 3 * heads, width], 5)? * gain)?.to_dtype(dtype)?;
            let wide = Tensor::full(7f32, (batch, tokens, 2 * heads, width), &Device::Cpu)?;
            Ok(Operands {
                joint: here(&joint),
                wide: here(&wide.to_dtype(dtype)?),
                heads,
            })
        }

        fn of(&self, part: usize) -> Result<Tensor> {
            self.joint.narrow(2, part * self.heads, self.heads)
        }

        /// The result, and whether it was in e4m3.
        fn attend(&self, queries: usize) -> Result<(Tensor, bool)> {
            let before = crate::AttentionPaths::now();
            let out = self.wide.narrow(2, 0, self.heads)?.narrow(1, 0, queries)?;
            let query = self.of(0)?.narrow(1, 0, queries)?;
            attention_in_fp8(&query, &self.of(1)?, &self.of(2)?, 0.09, &out)?;
            Ok((out, crate::AttentionPaths::now().in_fp8 > before.in_fp8))
        }

        /// The result in full precision, computed first: queries, keys and values are overwritten.
        fn expected(&self, queries: usize) -> Result<Tensor> {
            let out = self.of(0)?.narrow(1, 0, queries)?.zeros_like()?;
            let query = self.of(0)?.narrow(1, 0, queries)?;
            super::super::attention(&query, &self.of(1)?, &self.of(2)?, 0.09, Mask::None, &out)?;
            Ok(out)
        }
    }

    /// What cards with attention in e4m3 compute in.
    fn dtypes() -> &'static [DType] {
        match test_device().is_cpu() {
            true => &[DType::F32],
            false => &[DType::BF16, DType::F16],
        }
    }

    #[test]
    fn attention_in_e4m3_is_near_attention() -> Result<()> {
        for &dtype in dtypes() {
            for (shape, queries) in [
                ([1, 300, 3, 128], 300),
                ([2, 131, 4, 64], 131),
                ([1, 700, 2, 128], 450),
            ] {
                let operands = Operands::new(shape, dtype, 0.8)?;
                let expected = operands.expected(queries)?;
                let (found, is_in_fp8) = operands.attend(queries)?;
                assert!(is_in_fp8, "{shape:?} {dtype:?}");
                let error = relative(&found, &expected)?;
                // Not equal, or nothing was rounded.
                assert!((0.005..0.05).contains(&error), "{shape:?} {dtype:?}: {error}");
                let beside = operands.wide.narrow(2, shape[2], shape[2])?;
                assert_eq!(relative(&beside, &beside.ones_like()?.affine(7.0, 0.0)?)?, 0.0);
            }
        }
        Ok(())
    }

    /// In two strips of queries, the second of which begins inside the first.
    #[test]
    fn a_rest_of_keys_has_its_share() -> Result<()> {
        if test_device().is_cpu() {
            return Ok(()); // keys are not split there
        }
        for queries in [12_361, 12_001] {
            let operands = Operands::new([1, 12_361, 24, 128], DType::BF16, 0.8)?;
            // Values that differ between the first keys and the last, of which there are 73.
            let last = operands.of(2)?.narrow(1, 12_288, 73)?;
            crate::copy_rows(&last.affine(40.0, 60.0)?, &last)?;
            let expected = operands.expected(queries)?;
            let (found, is_in_fp8) = operands.attend(queries)?;
            assert!(is_in_fp8);
            let error = relative(&found, &expected)?;
            assert!(error < 0.05, "{queries}: {error}");
        }
        Ok(())
    }

    #[test]
    fn a_scale_is_that_of_each_tensor() -> Result<()> {
        for &dtype in dtypes() {
            for gain in [1e-3, 200.0] {
                let operands = Operands::new([1, 160, 2, 128], dtype, 1.0)?;
                // Values alone: weights depend on the magnitudes of queries and keys.
                let values = operands.of(2)?;
                let larger = values.affine(gain, 0.0)?;
                crate::copy_rows(&larger, &values)?;
                let expected = operands.expected(160)?;
                let error = relative(&operands.attend(160)?.0, &expected)?;
                assert!(error < 0.05, "{gain} {dtype:?}: {error}");
            }
        }
        Ok(())
    }

    #[test]
    fn zeros_attend_to_zeros_and_what_is_no_number_stays_none() -> Result<()> {
        for &dtype in dtypes() {
            let operands = Operands::new([1, 130, 2, 128], dtype, 0.0)?;
            let (found, _) = operands.attend(130)?;
            assert_eq!(
                found.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()?,
                0.0
            );
            let operands = Operands::new([1, 130, 2, 128], dtype, 1.0)?;
            let value = operands.of(2)?.narrow(1, 7, 1)?;
            crate::copy_rows(&value.affine(0.0, f64::NAN)?, &value)?;
            let (found, _) = operands.attend(130)?;
            let sum = found.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
            assert!(sum.is_nan());
        }
        Ok(())
    }

    #[test]
    fn other_widths_are_computed_in_full() -> Result<()> {
        for &dtype in dtypes() {
            let operands = Operands::new([1, 40, 2, 40], dtype, 1.0)?;
            let expected = operands.expected(40)?;
            let (found, is_in_fp8) = operands.attend(40)?;
            assert!(!is_in_fp8);
            assert_eq!(relative(&found, &expected)?, 0.0);
        }
        Ok(())
    }
}
