//! Strided row copies, dtype conversion, and embedding lookup.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::pictures::blank;
use crate::place::{apart_from, widest_row, with_rows, write_rows};

/// Copies the elements of `x` to `out`, converting to the dtype of `out`: f32, f16 or bf16 each. Both have the same
/// rows along the last axis or axes, and may be strided views, which must not overlap.
///
/// # Errors
/// When shapes do not match.
pub fn copy_rows(x: &Tensor, out: &Tensor) -> Result<()> {
    if x.elem_count() != out.elem_count() || x.dim(D::Minus1)? != out.dim(D::Minus1)? {
        candle_core::bail!("rows of {:?} to {:?}", x.dims(), out.dims());
    }
    let width = widest_row(x, out);
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::copy_rows(x, None, out, width);
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    with_rows(&apart_from(x, out)?, width, |x| {
        write_rows(out, width, |row, numbers| numbers.copy_from_slice(x.row(row)))
    })
}

/// Rows in a dtype, f32, f16 or bf16, contiguous: as they are, if they are that already.
///
/// # Errors
/// When memory is exhausted; on a card for axes of more than two strides.
pub fn in_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype && x.is_contiguous() {
        return Ok(x.clone());
    }
    let out = blank(x.dims(), dtype, x.device())?;
    copy_rows(x, &out)?;
    Ok(out)
}

/// Embedding lookup (`torch.nn.Embedding`): `table` is `[v, d]`, `ids` u32 `[n]`, `out` `[n, d]` in any of f32, f16
/// and bf16.
///
/// # Errors
/// When shapes do not match. On the CPU also for an index out of range; on a card such a row becomes NaN.
pub fn embed(table: &Tensor, ids: &Tensor, out: &Tensor) -> Result<()> {
    let ((rows, width), (count, out_width)) = (table.dims2()?, out.dims2()?);
    if ids.dims() != [count] || ids.dtype() != DType::U32 || !ids.is_contiguous() || width != out_width {
        candle_core::bail!("rows {:?} of {:?} to {:?}", ids.dims(), table.dims(), out.dims());
    }
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::copy_rows(table, Some(ids), out, width);
    }
    let ids = ids.to_device(&Device::Cpu)?.to_vec1::<u32>()?;
    for (row, &id) in ids.iter().enumerate() {
        if id as usize >= rows {
            candle_core::bail!("row {id} of a table of {rows}");
        }
        copy_rows(&table.narrow(0, id as usize, 1)?, &out.narrow(0, row, 1)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, here, random, test_device};

    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    #[test]
    fn rows_are_copied_and_converted_to_the_destination_dtype() -> Result<()> {
        // A width of a multiple of eight, which is copied with wide loads, and others.
        for (columns, before) in [(16, 8), (16, 1), (5, 3)] {
            let x = random(&[2, 7, columns + 4], 1)?;
            let window = |x: &Tensor| x.narrow(2, 0, columns)?.narrow(1, 2, 5);
            for from in DTYPES {
                for to in DTYPES {
                    let all = here(&Tensor::ones((2, 5, columns + before), to, &Device::Cpu)?).copy()?;
                    copy_rows(
                        &window(&here(&x.to_dtype(from)?))?,
                        &all.narrow(2, before, columns)?,
                    )?;
                    let all = all.to_device(&Device::Cpu)?;
                    let expected = window(&x)?.to_dtype(from)?.to_dtype(to)?;
                    assert_close(&all.narrow(2, before, columns)?, &expected, 0.0)?;
                    assert_close(
                        &all.narrow(2, 0, before)?,
                        &Tensor::ones((2, 5, before), to, &Device::Cpu)?,
                        0.0,
                    )?;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn rows_are_as_they_are_or_converted() -> Result<()> {
        let x = random(&[3, 24], 1)?;
        let there = here(&x);
        for dtype in DTYPES {
            for (first, width) in [(0, 24), (8, 16), (3, 5)] {
                let found = in_dtype(&there.narrow(1, first, width)?, dtype)?;
                assert!(found.dtype() == dtype && found.is_contiguous());
                let expected = x.narrow(1, first, width)?.contiguous()?.to_dtype(dtype)?;
                assert_close(&found.to_device(&Device::Cpu)?, &expected, 0.0)?;
            }
        }
        Ok(())
    }

    #[test]
    fn rows_are_copied_within_one_tensor() -> Result<()> {
        let all = here(&random(&[2, 24], 3)?).copy()?;
        let before = all.copy()?;
        copy_rows(&all.narrow(1, 0, 8)?, &all.narrow(1, 16, 8)?)?;
        assert_close(
            &all.narrow(1, 16, 8)?,
            &before.narrow(1, 0, 8)?.to_device(&Device::Cpu)?,
            0.0,
        )?;
        assert_close(
            &all.narrow(1, 0, 16)?,
            &before.narrow(1, 0, 16)?.to_device(&Device::Cpu)?,
            0.0,
        )
    }

    #[test]
    fn embedding_looks_rows_up_by_id() -> Result<()> {
        let table = random(&[9, 12], 1)?;
        let ids = Tensor::new(&[8u32, 0, 3, 3], &Device::Cpu)?;
        let expected = table.index_select(&ids, 0)?;
        for from in DTYPES {
            let table = here(&table.to_dtype(from)?);
            for to in [DType::F32, from] {
                let out = here(&Tensor::zeros((4, 12), to, &Device::Cpu)?).copy()?;
                embed(&table, &here(&ids), &out)?;
                assert_close(&out, &expected.to_dtype(from)?, 0.0)?;
            }
        }
        Ok(())
    }

    #[test]
    fn an_id_out_of_range_is_not_read() -> Result<()> {
        let (table, ids) = (
            here(&random(&[3, 4], 1)?),
            here(&Tensor::new(&[3u32], &Device::Cpu)?),
        );
        let out = Tensor::zeros((1, 4), DType::F32, test_device())?;
        match embed(&table, &ids, &out) {
            Err(error) => assert!(error.to_string().contains("row 3 of a table of 3"), "{error}"),
            Ok(()) => assert!(out.to_vec2::<f32>()?[0].iter().all(|number| number.is_nan())),
        }
        let ids = here(&Tensor::new(&[1u32, 2], &Device::Cpu)?);
        assert!(embed(&table, &ids, &out).is_err());
        assert!(copy_rows(&table, &out).is_err());
        Ok(())
    }
}
