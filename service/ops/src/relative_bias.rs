//! Relative position bias of attention.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::place::write_rows;

/// `out[.., head, query, key] = table[buckets[key - query + queries - 1], head]`: T5's `relative_attention_bias`,
/// with precomputed buckets. `table` is `[b, h]`, `buckets` u32 `[queries + keys - 1]`, by ascending distance from
/// key to query; `out` is `[.., h, queries, keys]` in the dtype of the table. All are contiguous.
///
/// # Errors
/// When shapes do not match. On the CPU also for a bucket out of range; on a card it becomes NaN.
pub fn relative_bias(table: &Tensor, buckets: &Tensor, out: &Tensor) -> Result<()> {
    let (known, heads) = table.dims2()?;
    let (queries, keys) = (out.dim(D::Minus2)?, out.dim(D::Minus1)?);
    let fits = out.elem_count() == heads * queries * keys
        && buckets.dims() == [(queries + keys).saturating_sub(1)]
        && buckets.dtype() == DType::U32
        && out.dtype() == table.dtype()
        && [table, buckets, out].iter().all(|x| x.is_contiguous());
    if !fits {
        candle_core::bail!(
            "a bias {:?} of {:?} by {:?}",
            out.dims(),
            table.dims(),
            buckets.dims()
        );
    }
    #[cfg(feature = "cuda")]
    if out.device().is_cuda() {
        return crate::cuda::relative_bias(table, buckets, out);
    }
    if out.elem_count() == 0 {
        return Ok(());
    }
    let buckets = buckets.to_device(&Device::Cpu)?.to_vec1::<u32>()?;
    let table = table.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    if let Some(bucket) = buckets.iter().find(|bucket| **bucket as usize >= known) {
        candle_core::bail!("bucket {bucket} of {known}");
    }
    write_rows(out, keys, |row, numbers| {
        let (head, query) = (row / queries, row % queries);
        let seen = &buckets[queries - 1 - query..];
        for (number, bucket) in numbers.iter_mut().zip(seen) {
            *number = table[*bucket as usize][head];
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{assert_close, here, random, test_device};

    #[test]
    fn relative_bias_depends_only_on_the_distance() -> Result<()> {
        for (queries, keys) in [(5, 9), (8, 16), (16, 3), (1, 1)] {
            let table = random(&[6, 3], 1)?;
            let buckets: Vec<u32> = (0..queries + keys - 1).map(|i| (i * 7 % 6) as u32).collect();
            let numbers = table.flatten_all()?.to_vec1::<f32>()?;
            let mut expected = Vec::new();
            for head in 0..3 {
                for query in 0..queries {
                    let of_key = |key: usize| numbers[buckets[key + queries - 1 - query] as usize * 3 + head];
                    expected.extend((0..keys).map(of_key));
                }
            }
            let expected = Tensor::from_vec(expected, (1, 3, queries, keys), &Device::Cpu)?;
            let buckets = here(&Tensor::new(buckets, &Device::Cpu)?);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let out = Tensor::zeros((1, 3, queries, keys), dtype, test_device())?;
                relative_bias(&here(&table.to_dtype(dtype)?), &buckets, &out)?;
                assert_close(&out, &expected.to_dtype(dtype)?, 0.0)?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_bucket_out_of_range_is_not_read() -> Result<()> {
        let table = here(&random(&[2, 1], 1)?);
        let buckets = here(&Tensor::new(&[0u32, 1, 2], &Device::Cpu)?);
        let out = Tensor::zeros((1, 1, 2, 2), DType::F32, test_device())?;
        match relative_bias(&table, &buckets, &out) {
            Err(error) => assert!(error.to_string().contains("bucket 2 of 2"), "{error}"),
            Ok(()) => assert!(out.flatten_all()?.to_vec1::<f32>()?[1].is_nan()),
        }
        assert!(relative_bias(&table, &buckets.narrow(0, 0, 2)?, &out).is_err());
        Ok(())
    }
}
