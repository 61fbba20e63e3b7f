//! Rotary position embedding over neighbouring pairs.

use candle_core::{DType, Result, Tensor};

use crate::loops::rotated_row;
use crate::rows::{in_parts, map_rows, on_cpu, with_numbers};

/// Rotates neighbouring pairs of the last axis: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`, in f32.
/// `x` is `[b, h, n, d]`; `cos` and `sin` are f32 `[n, d / 2]`, one angle a pair (diffusers'
/// `apply_rotary_emb` holds each twice).
///
/// # Errors
/// When shapes do not fit.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (_, _, tokens, width) = x.dims4()?;
    let pairs = width / 2;
    if cos.dims() != [tokens, pairs] || sin.dims() != [tokens, pairs] || width % 2 != 0 {
        candle_core::bail!(
            "rotation of {:?} by {:?} and {:?}",
            x.dims(),
            cos.dims(),
            sin.dims()
        );
    }
    if !on_cpu(x) {
        // Heads turn alike.
        return in_parts(x, 1, |heads, _| composed(heads, cos, sin));
    }
    with_numbers(cos, |cos| {
        with_numbers(sin, |sin| {
            map_rows(x, |row_index, row, out| {
                let start = (row_index % tokens) * pairs;
                rotated_row(row, &cos[start..start + pairs], &sin[start..start + pairs], out);
            })
        })
    })
}

fn composed(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let (batch, heads, tokens, width) = x.dims4()?;
    let numbers = x
        .to_dtype(DType::F32)?
        .reshape((batch, heads, tokens, width / 2, 2))?;
    let (first, second) = (numbers.narrow(4, 0, 1)?, numbers.narrow(4, 1, 1)?);
    let (cos, sin) = (
        cos.reshape((1, 1, tokens, width / 2, 1))?,
        sin.reshape((1, 1, tokens, width / 2, 1))?,
    );
    let rotated_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    let rotated_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
    drop(numbers);
    let rotated = Tensor::cat(&[rotated_first, rotated_second], 4)?;
    rotated.reshape(x.shape())?.to_dtype(x.dtype())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::testing::{assert_close, assert_defined, here, random};

    #[test]
    fn a_rotation_by_a_right_angle_swaps_the_pair() -> Result<()> {
        let x = Tensor::new(&[1f32, 2.0, 3.0, 4.0], &Device::Cpu)?.reshape((1, 1, 1, 4))?;
        let cos = Tensor::new(&[[0f32, 1.0]], &Device::Cpu)?;
        let sin = Tensor::new(&[[1f32, 0.0]], &Device::Cpu)?;
        assert_eq!(
            rope(&here(&x), &here(&cos), &here(&sin))?
                .flatten_all()?
                .to_vec1::<f32>()?,
            [-2.0, 1.0, 3.0, 4.0]
        );
        Ok(())
    }

    #[test]
    fn rotation_equals_its_definition() -> Result<()> {
        let x = random(&[2, 3, 5, 8], 1)?;
        let angles = random(&[5, 4], 2)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let expected = composed(&x, &cos, &sin)?;
        // Angles are f32 whatever the dtype is.
        let (cos, sin) = (here(&cos), here(&sin));
        assert_defined(&[&x], |x| rope(&x[0], &cos, &sin), &expected, 1e-6)
    }

    #[test]
    fn tokens_may_lie_before_heads() -> Result<()> {
        // As projections give them: `[b, n, h, d]`, transposed.
        let x = here(&random(&[1, 5, 3, 8], 1)?).transpose(1, 2)?;
        let angles = random(&[5, 4], 2)?;
        let (cos, sin) = (here(&angles.cos()?), here(&angles.sin()?));
        assert_close(&rope(&x, &cos, &sin)?, &rope(&x.contiguous()?, &cos, &sin)?, 0.0)
    }
}
